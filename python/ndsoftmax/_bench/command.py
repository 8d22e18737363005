"""`ndsoftmax bench`."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import ndsoftmax
from ndsoftmax import _options
from ndsoftmax._bench import ladder, plots, report
from ndsoftmax._bench.measure import DTYPES, FILL_BYTES, MOST_BYTES, Pool, Roof, Row, header, measure, roof
from ndsoftmax._bench.providers import NEED_CUDA, PROVIDERS
from ndsoftmax._bench.shapes import SUITES, Case, shrunk, suite
from ndsoftmax._explain import best_device, size

_DEFAULT_SUITES = ("attention", "vocab", "vision")
_DEFAULT_DTYPES = ("float32", "bfloat16")
_EPILOG = """\
frac = time of a copy of the tensor / time of softmax: 1.00 is the speed of memory. Backward counts the copy 1.5 times.

examples:
  ndsoftmax bench                                       shapes of attention, vocabularies and vision
  ndsoftmax bench 8x19x1024x1024 --dim 1 --peers torch,compile
  ndsoftmax bench --suite rows --dtype bfloat16 --csv rows.csv --plot rows.png
  ndsoftmax bench --suite ladder --json ladder.json     from the naive kernel to the last (needs a GPU and nvcc)
  ndsoftmax bench --suite sweep --peers none            every dim of 1000 to 1100, and those where kernels take turns
  ndsoftmax bench --suite random --seed 7               shapes that nobody chose: where is another ahead?
  ndsoftmax bench --plot roofline.svg --roofline
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure softmax beside other implementations and beside a copy of the same tensor."
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shapes", nargs="*", type=_options.shape, metavar="SHAPE", help="sizes: 8x16x1024x1024")
    suites = (*SUITES, "ladder")
    parser.add_argument("--dim", type=_options.dims, default=(-1,), help="of these shapes: -1, or 0,2 (default: -1)")
    parser.add_argument("--device", type=_options.device, help="cpu, cuda or cuda:1")
    parser.add_argument("--suite", type=_options.words(suites), help=f"shapes that are known: {', '.join(suites)}")
    parser.add_argument("--seed", type=int, default=0, help="which shapes the suite random has (default: 0)")
    peers = [*(name for name in PROVIDERS if name != "ndsoftmax"), "none"]
    parser.add_argument("--peers", type=_options.words(peers), default=["torch"], help=", ".join(peers))
    parser.add_argument("--dtype", type=_options.words(DTYPES), help=f"{', '.join(DTYPES)} (default: the first two)")
    parser.add_argument("--backward", action="store_true", help="the gradient instead of the result")
    parser.add_argument("--seconds", type=_options.seconds, help="start no further shape after so long")
    parser.add_argument("--csv", type=_options.output, metavar="FILE", help="write the measurements to it")
    parser.add_argument("--json", type=_options.output, metavar="FILE", help="write the measurements to it")
    parser.add_argument("--plot", type=_options.figure, metavar="FILE", help="draw them: file.png or file.svg")
    parser.add_argument("--roofline", action="store_true", help="draw --plot as throughput under the device's roof")
    parser.set_defaults(run=run)


@dataclass
class Found:
    """What was measured so far."""

    rows: list[Row] = field(default_factory=list)
    steps: list[ladder.Step] = field(default_factory=list)
    roof: Roof | None = None

    @property
    def all_rows(self) -> list[Row]:
        """Those of the ladder's steps, too."""
        return [*self.rows, *(step.row for step in self.steps)]


def run(options: argparse.Namespace) -> int:
    """Measure and report; what was measured is left behind also where Ctrl-C or an error ends it."""
    options.device = options.device or best_device()
    _check(options)
    providers = _installed(["ndsoftmax", *(name for name in options.peers if name != "none")])
    cases = [(dtype, _cases(options, dtype)) for dtype in options.dtype or _DEFAULT_DTYPES]
    climbs = _climbs(options)
    title = f"{header(options.device)}, {'backward' if options.backward else 'forward'}"
    if "random" in options.suite:
        title += f", seed {options.seed}"
    print(f"{title}\n", flush=True)

    found, stopped = Found(), None
    try:
        _measure(options, providers, cases, climbs, found)
    except (KeyboardInterrupt, Exception) as error:
        stopped = error
    total = sum(len(of_dtype) for _, of_dtype in cases) + len(climbs)
    missing = total - len(found.rows) - len(found.steps)
    if missing and not isinstance(stopped, BrokenPipeError):
        over = "an error ended it" if stopped else f"--seconds {options.seconds:g} were over"
        why = "interrupted" if isinstance(stopped, KeyboardInterrupt) else over
        print(f"{missing} of {total} shapes left out: {why}", file=sys.stderr)
    try:
        if found.rows:
            print(f"\n{report.summary(found.rows, providers)}")
        if found.steps:
            print(f"what each rung changed (on which other)\n{ladder.legend()}")
    finally:  # also where the reader of the table has left
        _write(options, found, title)
    if stopped:
        raise stopped
    failed = any(row.seconds.get("ndsoftmax", 0) is None for row in found.all_rows)
    return 1 if failed or ladder.any_wrong(found.steps) else 0


def _measure(
    options: argparse.Namespace,
    providers: Sequence[str],
    cases: Sequence[tuple[str, Sequence[Case]]],
    climbs: Sequence[tuple[str, Callable[[], ladder.Step]]],
    found: Found,
) -> None:
    """Print what is found as it is found."""
    deadline = time.monotonic() + (options.seconds or math.inf)
    width = max(map(len, ["shape", *(str(case) for _, of_dtype in cases for case in of_dtype)]))
    steps = sum(len(of_dtype) for _, of_dtype in cases) + len(climbs) + options.roofline
    with _progress(steps) as step:
        if options.roofline:
            step("what the device can do")
            found.roof = roof(options.device)
        if any(of_dtype for _, of_dtype in cases):
            print(report.titles(providers, width), flush=True)
        for dtype, of_dtype in cases:
            pool = Pool(options.device, DTYPES[dtype], of_dtype, 2 if options.backward else 1)
            for case in of_dtype:
                if found.all_rows and time.monotonic() > deadline:
                    return
                step(f"{case} {dtype}")
                found.rows.append(measure(case, "backward" if options.backward else "forward", providers, pool))
                print(report.line(found.rows[-1], width), flush=True)
        for what, climb in climbs:
            if found.all_rows and time.monotonic() > deadline:
                return
            step(what)
            found.steps.append(climb())
            print(f"{ladder.table(found.steps[-1], found.steps)}\n", flush=True)


def _write(options: argparse.Namespace, found: Found, title: str) -> None:
    rows = found.all_rows
    limit = found.roof and found.roof.over(rows)
    if options.csv:
        report.write_csv(options.csv, rows, title)
    if options.json:
        parts = {"measurements": report.as_dicts(rows), "ladder": ladder.as_dicts(found.steps)}
        report.write_json(options.json, title, roof=limit and asdict(limit), **parts)
    if options.plot and rows:
        if limit:
            plots.write_roofline(options.plot, rows, limit, title)
        elif plots.are_rows_of_many_widths(rows):
            plots.write_fracs_by_dim(options.plot, rows, title)
        else:
            plots.write_fracs(options.plot, rows, title)


# ---- what was asked for ----------------------------------------------------------------------------------------------


def _check(options: argparse.Namespace) -> None:
    """Raises where the options do not go together, before anything is measured."""
    if not options.shapes:
        options.suite = options.suite or _DEFAULT_SUITES
    options.suite = options.suite or ()
    widest = max((DTYPES[name] for name in options.dtype or _DEFAULT_DTYPES), key=lambda dtype: dtype.itemsize)
    for shape in options.shapes:
        if 0 in shape:
            raise ValueError(f"{'x'.join(map(str, shape))} has no elements")
        plan = ndsoftmax.explain(shape, options.dim, dtype=widest, device=options.device)  # or dim is out of range
        needed = 2 * plan.bytes  # beside the tensors of a call, copies of its output, and what it is compared with
        if needed > (most := _memory(options.device)):
            raise ValueError(
                f"{'x'.join(map(str, shape))} takes {size(needed)} of memory, {options.device} has {size(most)}"
            )
    if options.backward and "ladder" in options.suite:
        raise ValueError("--backward: the suite ladder is forward alone")
    if options.roofline and options.backward:
        raise ValueError("--roofline counts exponentials, of which the backward of softmax has none")
    if options.roofline and not options.plot:
        raise ValueError("--roofline needs a file: --plot roofline.png")
    if options.plot:
        _options.require("matplotlib", "bench")
    outputs = [path.resolve() for path in (options.csv, options.json, options.plot) if path]
    if twice := [str(path) for path in outputs if outputs.count(path) > 1]:
        raise ValueError(f"--csv, --json and --plot need a file each, but two of them name {twice[0]!r}")
    if options.device.type == "cuda":
        if options.device.index is not None:
            torch.cuda.set_device(options.device)
        return
    if "ladder" in options.suite:
        raise ValueError("the suite ladder needs a CUDA GPU, and ndsoftmax built for it")
    if missing := set(options.peers) & set(NEED_CUDA):
        raise ValueError(f"--peers: {' and '.join(sorted(missing))} need a CUDA GPU")


def _memory(device: torch.device) -> int:
    """The bytes that a device has altogether."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cases(options: argparse.Namespace, dtype_name: str) -> list[Case]:
    dtype, kind = DTYPES[dtype_name], options.device.type
    dim = options.dim[0] if len(options.dim) == 1 else options.dim
    cases = [Case("own", shape, dim) for shape in options.shapes]

    def regime(shape: tuple[int, int]) -> str:
        return ndsoftmax.explain(shape, dtype=dtype, device=options.device, backward=options.backward).regime

    for name in options.suite:
        if name != "ladder":
            known = suite(name, dtype, FILL_BYTES[kind], regime, options.seed)
            cases += [shrunk(case, MOST_BYTES[kind], dtype) for case in known]
    return cases


def _climbs(options: argparse.Namespace) -> list[tuple[str, Callable[[], ladder.Step]]]:
    if "ladder" not in options.suite:
        return []
    _options.progress("compiling the kernels of the ladder")
    try:
        return ladder.climbs(options.device)
    finally:
        _options.progress("")


def _installed(providers: Sequence[str]) -> list[str]:
    found = []
    for name in dict.fromkeys(providers):
        try:
            PROVIDERS[name]()
        except ImportError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
        else:
            found.append(name)
    return found


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """Yields what to call before each of `total` steps, with its name. Draws on a terminal only."""
    bar = _bar() if _options.terminal() else None
    if bar is None:
        yield lambda name: None
        return
    with bar:
        task = bar.add_task("", total=total + 1)
        yield lambda name: bar.update(task, advance=1, description=name)


def _bar() -> Any:
    """A bar below the lines that are printed meanwhile; without rich None, and a word on what to install."""
    try:
        console, progress = (_options.require(f"rich.{part}", "cli") for part in ("console", "progress"))
    except RuntimeError as error:
        print(f"a progress bar {error}", file=sys.stderr)
        return None
    return progress.Progress(
        console=console.Console(stderr=True, soft_wrap=True),
        transient=True,
        redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
    )
