"""How fast softmax is on the CPU, beside torch and beside a copy, forward and backward.

ndsoftmax, torch and the copy take turns in one process with the same threads, there and back, so that a disturbance
meets them alike, and so does what the one before left in the cache; of the turns, the median counts. Each call
allocates its result, as users call it (the copy is `x.clone()`), unless --preallocated gives all of them the same
memory (the copy is `y.copy_(x)`).

× torch = torch's time / ours; × min is that of the fastest turns; × cpu is that of the time that all threads of the
process spent, which other processes on the machine disturb less.
frac = the copy's time / ours; backward reads two tensors and writes one, so there the copy counts 1.5 times.

example: python benchmarks/cpu.py --threads 1 2 --dtype float32 bfloat16 --csv results/cpu.csv --plot results/cpu.png
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ndsoftmax
import torch
from ndsoftmax._bench.measure import DTYPES, Launch, clock_seconds, header, there_and_back
from ndsoftmax._bench.shapes import Case
from torch import Tensor

# From rows shorter than a vector to rows that no cache holds, and dims that are not the last.
CPU = [
    *(Case("last dim", shape, -1) for shape in [(1000000, 5), (400000, 10), (100000, 50), (30000, 257)]),
    *(Case("last dim", shape, -1) for shape in [(10000, 1024), (2000, 8192), (100, 50257), (2, 4000000)]),
    Case("dim not last", (8, 19, 256, 256), 1),
    Case("dim not last", (32, 512, 14, 14), 1),
    Case("dim not last", (4096, 1024), 0),
    Case("dim not last", (4, 100000, 8), 1),
]

ALL_DTYPES = {**DTYPES, "float64": torch.float64}
OPERATIONS = ("softmax", "log_softmax")
DIRECTIONS = ("forward", "backward")
NAMES = ("ndsoftmax", "torch", "copy")
TURN_SECONDS = 2e-3  # at least, of calls one after another


@dataclass(frozen=True)
class Row:
    """The seconds of each turn, by name: on the clock, and of the processor."""

    case: Case
    dtype: str
    operation: str
    direction: str
    threads: int
    turns: dict[str, list[float]]
    cpu_turns: dict[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.turns[name])

    @property
    def ratio(self) -> float:
        return self.median("torch") / self.median("ndsoftmax")

    @property
    def fastest_ratio(self) -> float:
        return min(self.turns["torch"]) / min(self.turns["ndsoftmax"])

    @property
    def cpu_ratio(self) -> float:
        return statistics.median(self.cpu_turns["torch"]) / statistics.median(self.cpu_turns["ndsoftmax"])

    @property
    def frac(self) -> float:
        return self.median("copy") * (1.5 if self.direction == "backward" else 1) / self.median("ndsoftmax")


def launches(
    operation: str, direction: str, x: Tensor, grad: Tensor, dim: int, preallocated: bool
) -> dict[str, Launch]:
    log = operation == "log_softmax"
    ours, theirs = getattr(ndsoftmax, operation), getattr(torch, operation)
    ours_backward = getattr(ndsoftmax.ops, f"{operation}_backward")
    theirs_backward = getattr(torch.ops.aten, f"_{operation}_backward_data")
    out, threads, dims = torch.empty_like(x), torch.get_num_threads(), (dim,)
    if direction == "forward":
        if preallocated:
            return {
                "ndsoftmax": lambda _: ours(x, dim, out=out),
                "torch": lambda _: theirs(x, dim, out=out),
                "copy": lambda _: out.copy_(x),
            }
        return {"ndsoftmax": lambda _: ours(x, dim), "torch": lambda _: theirs(x, dim), "copy": lambda _: x.clone()}
    y = theirs(x, dim)
    if preallocated:
        result = {"out" if log else "grad_input": out}
        return {
            "ndsoftmax": lambda _: ndsoftmax._C.backward(grad, y, out, dims, log, threads),
            "torch": lambda _: theirs_backward.out(grad, y, dim, y.dtype, **result),
            "copy": lambda _: out.copy_(x),
        }
    return {
        "ndsoftmax": lambda _: ours_backward(grad, y, dim),
        "torch": lambda _: theirs_backward.default(grad, y, dim, y.dtype),
        "copy": lambda _: x.clone(),
    }


def measure(case: Case, dtype: str, operation: str, direction: str, preallocated: bool, repeats: int) -> Row:
    torch.manual_seed(0)
    x, grad = (torch.randn(case.shape).to(ALL_DTYPES[dtype]) for _ in range(2))
    calls = launches(operation, direction, x, grad, case.dim, preallocated)
    for call in calls.values():
        call(0)
    times = {name: math.ceil(TURN_SECONDS / clock_seconds(call, 1)) for name, call in calls.items()}
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for name in there_and_back(list(calls), repeats):
        turns[name].append(both_clocks(calls[name], times[name]))
    clock, cpu = ({name: [both[i] for both in turns[name]] for name in calls} for i in range(2))
    return Row(case, dtype, operation, direction, torch.get_num_threads(), clock, cpu)


def both_clocks(call: Launch, times: int) -> tuple[float, float]:
    cpu = time.process_time()
    clock = clock_seconds(call, times)
    return clock, (time.process_time() - cpu) / times


# ---- reporting ------------------------------------------------------------------------------------------------------


def print_titles(width: int) -> None:
    times = "".join(f"{name + ' µs':>14}" for name in NAMES)
    print(
        f"{'shape':<{width}} dim  {'dtype':<9}{'direction':<9}{times}{'× torch':>9}{'× min':>7}{'× cpu':>7}{'frac':>7}"
    )


def print_row(row: Row, width: int) -> None:
    times = "".join(f"{1e6 * row.median(name):>14.1f}" for name in NAMES)
    ratios = f"{row.ratio:>9.2f}{row.fastest_ratio:>7.2f}{row.cpu_ratio:>7.2f}{row.frac:>7.2f}"
    print(f"{row.case!s:<{width}} {row.case.dim:>3}  {row.dtype:<9}{row.direction:<9}{times}{ratios}", flush=True)


def print_summary(rows: Sequence[Row]) -> None:
    print(f"\n{'geometric mean / worst':<28}{'× torch':>16}{'× min':>16}{'× cpu':>16}{'frac':>16}")
    for dtype, direction in dict.fromkeys((row.dtype, row.direction) for row in rows):
        members = [row for row in rows if (row.dtype, row.direction) == (dtype, direction)]
        columns = ([getattr(row, name) for row in members] for name in ("ratio", "fastest_ratio", "cpu_ratio", "frac"))
        cells = (f"{statistics.geometric_mean(column):.2f} / {min(column):.2f}" for column in columns)
        print(f"{dtype + ' ' + direction:<28}" + "".join(f"{cell:>16}" for cell in cells))


def write_csv(path: Path, rows: Sequence[Row], title: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        file.write(f"# {title}\n")
        writer = csv.writer(file)
        times = [f"{name}_{kind}" for name in NAMES for kind in ("median_seconds", "fastest_seconds")]
        writer.writerow(
            ("shape", "dim", "dtype", "operation", "direction", "threads", *times, "ratio", "cpu_ratio", "frac")
        )
        for row in rows:
            where = (row.case, row.case.dim, row.dtype, row.operation, row.direction, row.threads)
            seconds = [f"{value:.4g}" for name in NAMES for value in (row.median(name), min(row.turns[name]))]
            writer.writerow((*where, *seconds, f"{row.ratio:.3f}", f"{row.cpu_ratio:.3f}", f"{row.frac:.3f}"))


def write_plot(path: Path, rows: Sequence[Row], title: str) -> None:
    """Plot × torch by shape: a panel for each direction and number of threads, a bar for each dtype."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((row.direction, row.threads) for row in rows))
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    figure = Figure(figsize=(11, 3 * len(panels)), layout="constrained")
    figure.suptitle(title, fontsize="small")
    for axes, (direction, threads) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        members = [row for row in rows if (row.direction, row.threads) == (direction, threads)]
        labels = list(dict.fromkeys(f"{row.case}\ndim {row.case.dim}" for row in members))
        for number, dtype in enumerate(dtypes):
            ratios = [row.ratio for row in members if row.dtype == dtype]
            places = [place + number / (len(dtypes) + 1) for place in range(len(ratios))]
            axes.bar(places, ratios, 1 / (len(dtypes) + 1), align="edge", label=dtype)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks([place + 0.5 for place in range(len(labels))], labels, rotation=30, fontsize=7)
        axes.set(title=f"{direction}, threads: {threads}", ylabel="torch's time / ours")
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=ALL_DTYPES, default=["float32", "bfloat16"])
    parser.add_argument("--operation", choices=OPERATIONS, default="softmax")
    parser.add_argument("--direction", nargs="+", choices=DIRECTIONS, default=DIRECTIONS)
    parser.add_argument("--threads", nargs="+", type=int, default=[torch.get_num_threads()], help="default: torch's")
    parser.add_argument("--preallocated", action="store_true", help="give the result's memory to each call")
    parser.add_argument("--repeats", type=int, default=25, help="turns (default: 25)")
    parser.add_argument("--only", default="", help="only the shapes whose text contains this")
    parser.add_argument("--csv", type=Path, help="write the measurements to this file")
    parser.add_argument("--plot", type=Path, help="write a plot to this file (needs matplotlib)")
    options = parser.parse_args()
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'ndsoftmax[bench]'")
    cases = [case for case in CPU if options.only in str(case)]
    if not cases:
        parser.error(f"--only: no shape contains {options.only!r}")

    todo = [(dtype, direction, case) for dtype in options.dtype for direction in options.direction for case in cases]
    width = max(len(str(case)) for case in cases)
    memory = "preallocated" if options.preallocated else "allocated by each call"
    rows: list[Row] = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        title = f"{header(torch.device('cpu'))}, {options.operation}, results {memory}"
        print(f"{title}\n")
        print_titles(width)
        of_threads = []
        for number, (dtype, direction, case) in enumerate(todo, 1):
            if sys.stderr.isatty():
                print(f"\r\033[K{number}/{len(todo)} {case} {dtype}\r", end="", file=sys.stderr, flush=True)
            row = measure(case, dtype, options.operation, direction, options.preallocated, options.repeats)
            print_row(row, width)
            of_threads.append(row)
        print_summary(of_threads)
        print()
        rows += of_threads
    if options.csv:
        write_csv(options.csv, rows, title)
    if options.plot:
        write_plot(options.plot, rows, title)
    return 0


if __name__ == "__main__":
    sys.exit(main())
