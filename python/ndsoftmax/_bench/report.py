"""What was measured, as text, CSV and JSON."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ndsoftmax._bench.measure import Row
from ndsoftmax._bench.shapes import SWEEP


def titles(providers: Sequence[str], width: int) -> str:
    columns = "".join(f"{name + ' µs':>14}{'frac':>7}" for name in providers)
    return f"{'shape':<{width}} {'dim':>5}  {'dtype':<8}  {'kernel':<7}{'copy µs':>11}{columns}  what"


def line(row: Row, width: int) -> str:
    times = [f"{'-' if seconds is None else f'{1e6 * seconds:.1f}':>14}" for seconds in row.seconds.values()]
    fracs = [f"{'-' if frac is None else f'{frac:.2f}':>7}" for frac in map(row.frac, row.seconds)]
    cells = "".join(map("".join, zip(times, fracs, strict=True)))
    dim = str(row.case.dim).replace(" ", "")
    start = f"{row.case!s:<{width}} {dim:>5}  {row.dtype:<8}  {row.kernel:<7}{1e6 * row.copy:>11.1f}{cells}"
    return f"{start}  {row.case.what}".rstrip()


def summary(rows: Sequence[Row], providers: Sequence[str]) -> str:
    """Each group's frac by provider, as geometric mean / worst."""
    lines = [f"{'frac: geometric mean / worst':<30}{'dtype':<10}" + "".join(f"{name:>16}" for name in providers)]
    for group, dtype in dict.fromkeys((row.case.group, row.dtype) for row in rows):
        cells = []
        for provider in providers:
            members = [row.frac(provider) for row in rows if (row.case.group, row.dtype) == (group, dtype)]
            fracs = [frac for frac in members if frac is not None]
            missing = "*" if len(fracs) < len(members) else ""
            cells.append(f"{statistics.geometric_mean(fracs):.3f} / {min(fracs):.3f}{missing}" if fracs else "-")
        lines.append(f"{group:<30}{dtype:<10}" + "".join(f"{cell:>16}" for cell in cells))
    if any(None in row.seconds.values() for row in rows):
        lines.append("* without the shapes that the provider refuses")
    return "\n".join([*lines, *_largest_steps(rows), *_slower_than_torch(rows)])


def _largest_steps(rows: Sequence[Row]) -> list[str]:
    """Of the sweep, by dtype: by how much the time of an element differs between rows of d and of d + 1 at most.

    In units of the copy's, which was measured beside each: what disturbs both is no step.
    """
    fracs = {
        (row.dtype, row.case.shape[-1]): frac
        for row in rows
        if row.case.group == SWEEP and (frac := row.frac("ndsoftmax")) is not None
    }
    lines = []
    for dtype in dict.fromkeys(dtype for dtype, _ in fracs):
        pairs = [(frac, fracs.get((dtype, dim + 1)), dim) for (of, dim), frac in fracs.items() if of == dtype]
        steps = [(max(one, following) / min(one, following) - 1, dim) for one, following, dim in pairs if following]
        if steps:
            step, dim = max(steps)
            neighbours = f"({dim}, {dim + 1})"
            lines.append(f"time per element, {dtype}: neighbouring dims differ by {step:.1%} at most {neighbours}")
    return lines


def _slower_than_torch(rows: Sequence[Row]) -> list[str]:
    compared = [(row, row.seconds.get("ndsoftmax"), row.seconds.get("torch")) for row in rows]
    pairs = [(row, ours / torchs) for row, ours, torchs in compared if ours is not None and torchs is not None]
    slower = [f"  {row.case} {row.dtype} ({ratio:.2f} × its time)" for row, ratio in pairs if round(ratio, 2) > 1]
    return [f"slower than torch on {len(slower)} of {len(pairs)} shapes", *slower] if pairs else []


COLUMNS = (
    *("group", "what", "shape", "dim", "dtype", "direction", "kernel", "provider"),
    *("seconds", "copy_seconds", "bytes", "frac"),
)


def as_dicts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A dict of COLUMNS for each provider that computed a case."""
    return [
        dict(
            zip(
                COLUMNS,
                (
                    *(row.case.group, row.case.what, str(row.case), row.case.dim, row.dtype, row.direction),
                    *(row.kernel if provider == "ndsoftmax" else "", provider),
                    *(float(f"{number:.5g}") for number in (seconds, row.copy)),
                    *(row.bytes, round(row.frac(provider) or 0, 4)),
                ),
                strict=True,
            )
        )
        for row in rows
        for provider, seconds in row.seconds.items()
        if seconds is not None
    ]


def write_csv(path: Path, rows: Sequence[Row], title: str) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(f"# {title}\n")
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(as_dicts(rows))


def write_json(path: Path, title: str, **parts: Any) -> None:
    path.write_text(json.dumps({"title": title, **parts}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
