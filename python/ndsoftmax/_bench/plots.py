"""Figures of what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ndsoftmax._bench.measure import Roof, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "osD^vPX<>*hp"


def write_fracs(path: Path, rows: Sequence[Row], title: str) -> None:
    """A line a case and dtype, on it a point a provider: how far from the speed of a copy."""
    figure = _figure(9, 1.6 + 0.24 * len(rows), title)
    axes = figure.subplots()
    for number, provider in enumerate(_providers(rows)):
        axes.plot(
            _fracs(rows, provider),
            range(len(rows)),
            _MARKERS[number % len(_MARKERS)],
            label=provider,
            alpha=0.8,
        )
    axes.axvline(1, color="black", linewidth=0.8)
    names = [f"{row.case.what}  {row.case}, dim {row.case.dim}, {row.dtype}".strip() for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, max(1.05, axes.get_xlim()[1]))
    axes.set_xlabel("frac: time of a copy / time of softmax (1 is the speed of memory)")
    axes.grid(alpha=0.3)
    _legend(figure, axes)
    figure.savefig(path, dpi=120)


def write_fracs_by_dim(path: Path, rows: Sequence[Row], title: str) -> None:
    """Of rows of many widths: frac against dim, a line a provider, dtypes side by side."""
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    figure = _figure(4.2 * len(dtypes), 4, title)
    panels = figure.subplots(1, len(dtypes), sharey=True, squeeze=False)[0]
    for dtype, axes in zip(dtypes, panels, strict=True):
        of_dtype = sorted((row for row in rows if row.dtype == dtype), key=lambda row: row.case.shape[-1])
        for number, provider in enumerate(_providers(rows)):
            axes.plot(
                [row.case.shape[-1] for row in of_dtype],
                _fracs(of_dtype, provider),
                _MARKERS[number % len(_MARKERS)] + "-",
                label=provider,
                markersize=3,
            )
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, max(1.1, axes.get_ylim()[1]))
        axes.set_xlabel("dim (elements of a row)")
        axes.set_title(dtype, fontsize=9)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("frac (1 is the speed of memory)")
    _legend(figure, panels[0])
    figure.savefig(path, dpi=120)


def are_rows_of_many_widths(rows: Sequence[Row]) -> bool:
    """Whether the cases are matrices with dim last, of eight widths or more, no two of a dtype alike."""
    widths = {row.case.shape[-1] for row in rows}
    dtypes = {row.dtype for row in rows}
    matrices = all(len(row.case.shape) == 2 and row.case.dim == -1 and not row.case.fused for row in rows)
    return matrices and len(widths) >= 8 and len(rows) == len(widths) * len(dtypes)


def write_roofline(path: Path, rows: Sequence[Row], roof: Roof, title: str) -> None:
    """Exponentials a byte against exponentials a second, a point a kernel and case, under what the device can do."""
    from matplotlib.ticker import LogLocator

    figure = _figure(9, 6, title)
    axes = figure.subplots()
    ridge = roof.exps_per_second / roof.bytes_per_second
    intensities = [row.case.numel / row.bytes for row in rows]
    left, right = min(*intensities, ridge) / 2, max(*intensities, ridge) * 2
    corners = [left, ridge, right]
    axes.plot(
        corners,
        [min(roof.bytes_per_second * x, roof.exps_per_second) / 1e9 for x in corners],
        color="black",
        label=f"roof: copy {roof.bytes_per_second / 1e9:.4g} GB/s, exp {roof.exps_per_second / 1e9:.4g}·10⁹/s",
    )
    providers = _providers(rows)
    for number, provider in enumerate(providers):
        beside = 2 ** (0.4 * number / len(providers))  # to the right, where the roof is higher
        points = [
            (intensity * beside, row.case.numel / seconds / 1e9)
            for intensity, row in zip(intensities, rows, strict=True)
            if (seconds := row.seconds.get(provider)) is not None
        ]
        axes.plot(*zip(*points, strict=True), _MARKERS[number % len(_MARKERS)], label=provider, alpha=0.6)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.xaxis.set_major_formatter(lambda x, _: f"1/{1 / x:g}" if x < 1 else f"{x:g}")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.set_xlabel("arithmetic intensity (exponentials / byte that must move; equal ones side by side)")
    axes.set_ylabel("throughput (10⁹ exponentials / s)")
    axes.grid(alpha=0.3)
    _legend(figure, axes)
    figure.savefig(path, dpi=120)


def _fracs(rows: Sequence[Row], provider: str) -> list[float]:
    fracs = (row.frac(provider) if provider in row.seconds else None for row in rows)
    return [math.nan if frac is None else frac for frac in fracs]


def _providers(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name, seconds in row.seconds.items() if seconds is not None))


def _figure(width: float, height: float, title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=8)
    return figure


def _legend(figure: Figure, axes: Axes) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
