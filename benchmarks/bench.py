"""How fast softmax is, beside other implementations and beside a copy of the same tensor.

The yardstick is frac = time of the copy / time of softmax: 1.00 is the speed of memory. Backward reads two tensors and
writes one, so there the copy's time counts 1.5 times. The copy is the fastest of `y.copy_(x)` outside a CUDA graph,
inside one, and `torch.neg(x, out=y)`.

On a GPU, launches over rotating inputs of 1 GiB together are captured in a CUDA graph, of which the median of 7
replays counts. On a CPU the implementations take turns, and the median of 7 turns counts.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ndsoftmax
import torch
from shapes import SUITES, Case, suite
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MIB = 1 << 20
ROTATING_BYTES = 1024 * MIB
MOST_LAUNCHES = 500  # in one graph: small inputs together stay under ROTATING_BYTES
# On the CPU so little that malloc keeps the memory of outputs: the page faults of new memory cost more than softmax.
FILL_BYTES = {"cuda": 512 * MIB, "cpu": 16 * MIB}
REPEATS = 7

# Forward takes (x, dim), backward (grad, y, dim).
Provider = Callable[..., object]


@dataclass(frozen=True)
class Row:
    """What was measured for one case: seconds of the copy and of each provider, None where it failed."""

    case: Case
    dtype: str
    direction: str
    copy: float
    seconds: dict[str, float | None]

    def frac(self, provider: str) -> float | None:
        seconds = self.seconds[provider]
        return None if seconds is None else self.copy * (1.5 if self.direction == "backward" else 1) / seconds


# ---- providers ------------------------------------------------------------------------------------------------------


def _ndsoftmax() -> tuple[Provider, Provider]:
    return ndsoftmax.softmax, ndsoftmax.ops.softmax_backward


def _torch() -> tuple[Provider, Provider]:
    return torch.softmax, lambda grad, y, dim: torch._softmax_backward_data(grad, y, dim, y.dtype)


def _compile() -> tuple[Provider, Provider]:
    def backward(grad: Tensor, y: Tensor, dim: int) -> Tensor:
        return y * (grad - (grad * y).sum(dim, keepdim=True))

    torch._dynamo.reset()  # forget the shapes before, or it gives up specializing
    return torch.compile(torch.softmax, dynamic=False), torch.compile(backward, dynamic=False)


def _quack() -> tuple[Provider, Provider]:
    from quack.softmax import softmax_bwd, softmax_fwd

    return (
        lambda x, dim: softmax_fwd(_rows(x, dim)),
        lambda grad, y, dim: softmax_bwd(_rows(grad, dim), _rows(y, dim)),
    )


def _liger() -> tuple[Provider, Provider]:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    def backward(grad: Tensor, y: Tensor, dim: int) -> object:
        raise NotImplementedError("Liger's backward needs the state of its forward")

    return lambda x, dim: LigerSoftmaxFunction.apply(_rows(x, dim)), backward


def _rows(x: Tensor, dim: int) -> Tensor:
    if dim % x.dim() != x.dim() - 1:
        raise NotImplementedError("takes the last dim only")
    return x.view(-1, x.shape[-1])


PROVIDERS: dict[str, Callable[[], tuple[Provider, Provider]]] = {
    "ndsoftmax": _ndsoftmax,
    "torch": _torch,
    "compile": _compile,
    "quack": _quack,
    "liger": _liger,
}


# ---- measuring ------------------------------------------------------------------------------------------------------

# Runs once, on the i-th of the rotating inputs.
Launch = Callable[[int], object]


class Pool:
    """Memory filled with normally distributed numbers once, out of which every case takes its tensors."""

    def __init__(self, device: str, dtype: torch.dtype, cases: Sequence[Case], tensors_per_launch: int) -> None:
        self.rotating = ROTATING_BYTES // dtype.itemsize if device == "cuda" else 0
        elements = max(self.launches(case) * self.stride(case) for case in cases)
        self.memory = [torch.randn(elements, device=device, dtype=dtype) for _ in range(tensors_per_launch)]

    def stride(self, case: Case) -> int:
        return math.ceil(math.prod(case.shape) / 128) * 128  # every tensor starts on 256 bytes

    def launches(self, case: Case) -> int:
        if self.rotating == 0:
            return 1
        return min(max(math.ceil(self.rotating / self.stride(case)), 2), MOST_LAUNCHES)

    def tensors(self, case: Case) -> list[list[Tensor]]:
        """Return the tensors of each launch."""
        size, stride = math.prod(case.shape), self.stride(case)
        starts = range(0, self.launches(case) * stride, stride)
        return [[_view(memory[start:][:size], case) for memory in self.memory] for start in starts]


def _view(flat: Tensor, case: Case) -> Tensor:
    if case.memory_format == torch.channels_last:
        n, c, h, w = case.shape
        return flat.view(n, h, w, c).permute(0, 3, 1, 2)
    return flat.view(case.shape)


def measure(case: Case, direction: str, providers: Sequence[str], pool: Pool) -> Row:
    """Time the copy and every provider on the same tensors."""
    tensors = pool.tensors(case)
    outputs = [torch.empty_like(x) for x, *_ in tensors]
    launches: dict[str, Launch] = {
        "copy": lambda i: outputs[i].copy_(tensors[i][0]),
        "neg": lambda i: torch.neg(tensors[i][0], out=outputs[i]),
        **{name: _launch(name, direction, tensors, case.dim) for name in providers},
    }
    if outputs[0].is_cuda:
        seconds = {name: tried(name, graph_seconds, launch, len(tensors)) for name, launch in launches.items()}
        seconds["eager copy"] = eager_seconds(launches["copy"], len(tensors))
    else:
        seconds = seconds_in_turns(launches)
    copy = min(time for name in ("copy", "neg", "eager copy") if (time := seconds.pop(name, None)) is not None)
    return Row(case, str(outputs[0].dtype).removeprefix("torch."), direction, copy, seconds)


def _launch(provider: str, direction: str, tensors: Sequence[Sequence[Tensor]], dim: int) -> Launch:
    function = PROVIDERS[provider]()[direction == "backward"]
    return lambda i: function(*tensors[i], dim)


def tried(name: str, function: Callable[..., float], *arguments: object) -> float | None:
    """Call the function; None, and a line on stderr, where it fails."""
    try:
        return function(*arguments)
    except Exception as error:  # whatever a provider raises on a shape that it does not take
        print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", file=sys.stderr)
        return None


def graph_seconds(launch: Launch, launches: int) -> float:
    launch(0)  # what is compiled or allocated once must be by now
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # all outputs alive, so that none is written where another still lies in L2
        outputs = [launch(i) for i in range(launches)]
    graph.replay()
    median = statistics.median(event_seconds(graph.replay) for _ in range(REPEATS))
    del outputs
    return median / launches


def eager_seconds(launch: Launch, launches: int) -> float:
    def run() -> None:
        for i in range(launches):
            launch(i)

    return statistics.median(event_seconds(run) for _ in range(REPEATS)) / launches


def event_seconds(run: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def seconds_in_turns(launches: Mapping[str, Launch]) -> dict[str, float | None]:
    """Time on the CPU: a disturbance meets every provider alike."""
    working = [name for name, launch in launches.items() if tried(name, clock_seconds, launch, 1) is not None]
    times = {name: math.ceil(1e-3 / clock_seconds(launches[name], 1)) for name in working}  # a millisecond of calls
    turns = [{name: clock_seconds(launches[name], times[name]) for name in times} for _ in range(REPEATS)]
    return {name: statistics.median(turn[name] for turn in turns) if name in times else None for name in launches}


def clock_seconds(launch: Launch, times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        launch(0)
    return (time.perf_counter() - start) / times


# ---- reporting ------------------------------------------------------------------------------------------------------


def header(device: str) -> str:
    folder = Path(__file__).parent
    commit = output_of("git", "-C", str(folder), "describe", "--always", "--dirty") or "unknown commit"
    ours = f"ndsoftmax {ndsoftmax.__version__} ({commit}), torch {torch.__version__}"
    if device == "cpu":
        return f"{cpu_name()} ({ndsoftmax.build_info()['cpu_capability']}, threads: {torch.get_num_threads()}), {ours}"
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
    return f"{torch.cuda.get_device_name()}, driver {driver or 'unknown'}, CUDA {torch.version.cuda}, {ours}"


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def print_row(row: Row, width: int) -> None:
    times = [f"{'-' if seconds is None else f'{1e6 * seconds:.1f}':>14}" for seconds in row.seconds.values()]
    fracs = [f"{'-' if frac is None else f'{frac:.3f}':>8}" for frac in map(row.frac, row.seconds)]
    cells = "".join(map("".join, zip(times, fracs, strict=True)))
    print(f"{row.case!s:<{width}} {row.case.dim:>3}  {row.dtype:<8}{1e6 * row.copy:>11.1f}{cells}", flush=True)


def print_titles(providers: Sequence[str], width: int) -> None:
    titles = "".join(f"{name + ' µs':>14}{'frac':>8}" for name in providers)
    print(f"{'shape':<{width}} dim  {'dtype':<8}{'copy µs':>11}{titles}")


def print_summary(rows: Sequence[Row], providers: Sequence[str]) -> None:
    """Print, as geometric mean / worst, each group's frac by provider."""
    print(f"\n{'frac: geometric mean / worst':<30}{'dtype':<10}" + "".join(f"{name:>16}" for name in providers))
    for group, dtype in dict.fromkeys((row.case.group, row.dtype) for row in rows):
        cells = []
        for provider in providers:
            members = [row.frac(provider) for row in rows if (row.case.group, row.dtype) == (group, dtype)]
            fracs = [frac for frac in members if frac is not None]
            missing = "*" if len(fracs) < len(members) else ""
            cells.append(f"{statistics.geometric_mean(fracs):.3f} / {min(fracs):.3f}{missing}" if fracs else "-")
        print(f"{group:<30}{dtype:<10}" + "".join(f"{cell:>16}" for cell in cells))
    if any(None in row.seconds.values() for row in rows):
        print("* without the shapes that the provider refuses")
    print_slower_than_torch(rows)


def print_slower_than_torch(rows: Sequence[Row]) -> None:
    compared = [(row, row.seconds.get("ndsoftmax"), row.seconds.get("torch")) for row in rows]
    pairs = [(row, ours / torchs) for row, ours, torchs in compared if ours is not None and torchs is not None]
    slower = [f"{row.case} {row.dtype} ({ratio:.2f} × its time)" for row, ratio in pairs if ratio > 1]
    if pairs:
        print(f"slower than torch on {len(slower)} of {len(pairs)} shapes" + "".join(f"\n  {line}" for line in slower))


def write_csv(path: Path, rows: Sequence[Row], title: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        file.write(f"# {title}\n")
        writer = csv.writer(file)
        writer.writerow(("group", "shape", "dim", "dtype", "direction", "provider", "seconds", "copy_seconds", "frac"))
        for row in rows:
            for provider, seconds in row.seconds.items():
                if seconds is not None:
                    where = (row.case.group, str(row.case), row.case.dim, row.dtype, row.direction)
                    writer.writerow(
                        (*where, provider, f"{seconds:.4g}", f"{row.copy:.4g}", f"{row.frac(provider):.4f}")
                    )


def write_plot(path: Path, rows: Sequence[Row], providers: Sequence[str], title: str) -> None:
    """Plot frac against dim, a panel a dtype and a line a provider, for the shapes whose dim is last."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.case.group.startswith("dim 1")]
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    figure = Figure(figsize=(10, 3.5 * len(dtypes)), layout="constrained")
    figure.suptitle(title, fontsize="small")
    for axes, dtype in zip(figure.subplots(len(dtypes), squeeze=False)[:, 0], dtypes, strict=True):
        for provider in providers:
            points = [(row.case.shape[-1], row.frac(provider) or math.nan) for row in rows if row.dtype == dtype]
            axes.plot(*zip(*points, strict=True), marker=".", label=provider)
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.1)
        axes.set(title=f"{rows[0].direction}, {dtype}", xlabel="dim (elements)", ylabel="frac (time of copy / time)")
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", nargs="+", choices=SUITES, default=SUITES, help="which shapes (default: all)")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES), help="default: all three")
    parser.add_argument("--backward", action="store_true", help="measure backward instead of forward")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=["ndsoftmax", "torch"])
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no further shape after so long")
    parser.add_argument("--csv", type=Path, help="write the measurements to this file")
    parser.add_argument("--plot", type=Path, help="write a plot of the suite `last` to this file (needs matplotlib)")
    options = parser.parse_args()
    if options.plot and "last" not in options.suite:
        parser.error("--plot shows the suite `last`, which --suite leaves out")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'ndsoftmax[bench]'")

    device = "cuda" if torch.cuda.is_available() and ndsoftmax.build_info()["cuda"] else "cpu"
    direction = "backward" if options.backward else "forward"
    providers = installed(options.providers)
    title = f"{header(device)}, {direction}"
    print(f"{title}\n")

    cases = {
        name: [case for suite_name in options.suite for case in suite(suite_name, DTYPES[name], FILL_BYTES[device])]
        for name in options.dtype
    }
    width = max(len(str(case)) for of_dtype in cases.values() for case in of_dtype)
    print_titles(providers, width)
    rows = []
    for row in measured(cases, direction, providers, device, time.monotonic() + options.seconds):
        print_row(row, width)
        rows.append(row)
    if missing := sum(map(len, cases.values())) - len(rows):
        print(f"{missing} shapes left out: --seconds {options.seconds:g} were over")
    print_summary(rows, providers)
    if options.csv:
        write_csv(options.csv, rows, title)
    if options.plot:
        write_plot(options.plot, rows, providers, title)
    return 0


def installed(providers: Sequence[str]) -> list[str]:
    found = []
    for name in providers:
        try:
            PROVIDERS[name]()
        except ImportError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
        else:
            found.append(name)
    return found


def measured(
    cases: Mapping[str, Sequence[Case]], direction: str, providers: Sequence[str], device: str, deadline: float
) -> Iterator[Row]:
    """Measure case after case until the deadline, with progress on stderr where that is a terminal."""
    total = sum(map(len, cases.values()))
    number = 0
    for dtype, of_dtype in cases.items():
        pool = Pool(device, DTYPES[dtype], of_dtype, 2 if direction == "backward" else 1)
        for case in of_dtype:
            number += 1
            if time.monotonic() > deadline:
                return
            if sys.stderr.isatty():
                print(f"\r\033[K{number}/{total} {case} {dtype}\r", end="", file=sys.stderr, flush=True)
            yield measure(case, direction, providers, pool)


if __name__ == "__main__":
    sys.exit(main())
