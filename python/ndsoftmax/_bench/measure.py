"""How fast softmax is, beside other implementations and beside a copy of the same tensor.

The yardstick is frac = time of the copy / time of softmax: 1.00 is the speed of memory. Backward reads two tensors and
writes one, so there the copy's time counts 1.5 times; the bytes of masks and biases are added to the copy's. What lies
past a causal diagonal nobody has to read, but the copy does: there frac may pass 1. The copy is the fastest of
`y.copy_(x)` outside a CUDA graph, inside one, and `torch.neg(x, out=y)`.

On a GPU, launches over rotating inputs of 1 GiB together are captured in a CUDA graph, of which the median of 7
replays counts; fewer launches, where those would take more than a tenth of a second. On a CPU the implementations take
turns, and the median of 7 turns counts.
"""

from __future__ import annotations

import gc
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ndsoftmax
from ndsoftmax._bench.providers import PROVIDERS
from ndsoftmax._bench.shapes import Case, fused

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MIB = 1 << 20
ROTATING_BYTES = 1024 * MIB
MOST_LAUNCHES = 500  # in one graph: small inputs together stay under ROTATING_BYTES
MOST_SECONDS = 0.1  # of one graph
# On the CPU so little that malloc keeps the memory of outputs: the page faults of new memory cost more than softmax.
FILL_BYTES = {"cuda": 512 * MIB, "cpu": 16 * MIB}
MOST_BYTES = {"cuda": 1024 * MIB, "cpu": 16 * MIB}  # of a case of a suite
REPEATS = 7
CHAINED_EXPS = 64


@dataclass(frozen=True)
class Row:
    """What was measured for one case: seconds of the copy and of each provider, None where it failed."""

    case: Case
    dtype: str
    direction: str
    copy: float
    bytes: int  # that softmax must move: each tensor of the call once
    seconds: dict[str, float | None]
    kernel: str = ""  # of ndsoftmax

    @property
    def copied_bytes(self) -> int:
        return 2 * self.case.numel * DTYPES[self.dtype].itemsize

    def frac(self, provider: str) -> float | None:
        seconds = self.seconds[provider]
        return None if seconds is None else self.copy * self.bytes / self.copied_bytes / seconds


# Runs once, on the i-th of the rotating inputs.
Launch = Callable[[int], object]


class Pool:
    """Memory filled with normally distributed numbers once, out of which every case takes its tensors."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, cases: Sequence[Case], tensors_per_launch: int
    ) -> None:
        self.rotating = ROTATING_BYTES // dtype.itemsize if device.type == "cuda" else 0
        elements = max((self.launches(case) * self.stride(case) for case in cases), default=0)
        self.memory = [torch.randn(elements, device=device, dtype=dtype) for _ in range(tensors_per_launch)]

    def stride(self, case: Case) -> int:
        return math.ceil(case.numel / 128) * 128  # every tensor starts on 256 bytes

    def launches(self, case: Case) -> int:
        if self.rotating == 0:
            return 1
        return min(max(math.ceil(self.rotating / self.stride(case)), 2), MOST_LAUNCHES)

    def tensors(self, case: Case) -> list[list[Tensor]]:
        """Return the tensors of each launch."""
        stride = self.stride(case)
        starts = range(0, self.launches(case) * stride, stride)
        return [[_view(memory[start:][: case.numel], case) for memory in self.memory] for start in starts]


def _view(flat: Tensor, case: Case) -> Tensor:
    if case.memory_format == torch.channels_last:
        n, c, h, w = case.shape
        return flat.view(n, h, w, c).permute(0, 3, 1, 2)
    return flat.view(case.shape)


def measure(case: Case, direction: str, providers: Sequence[str], pool: Pool) -> Row:
    """Time the copy and every provider on the same tensors."""
    tensors = pool.tensors(case)
    x = tensors[0][0]
    arguments: dict[str, Any] = fused(case, x.dtype, x.device)
    launches = {name: _launch(name, direction, tensors, case.dim, arguments) for name in providers}
    copy, seconds = timed(launches, [x for x, *_ in tensors])
    backward = direction == "backward"
    beside = sum(value.nbytes for value in arguments.values() if isinstance(value, Tensor))
    counted = x.nbytes * (3 if backward else 2) + (0 if backward and "bias" in arguments else beside)
    works = seconds.get("ndsoftmax") is not None  # or NDSOFTMAX_REGIME forces what there is no plan for
    kernel = ndsoftmax.explain(x, case.dim, backward=backward, **arguments).regime if works else ""
    return Row(case, str(x.dtype).removeprefix("torch."), direction, copy, counted, seconds, kernel)


def timed(launches: Mapping[str, Launch], inputs: Sequence[Tensor]) -> tuple[float, dict[str, float | None]]:
    """The seconds of a copy of an input, and of each of the launches; None for one that fails."""
    outputs = [torch.empty_like(x) for x in inputs]
    copies: dict[str, Launch] = {
        "copy": lambda i: outputs[i].copy_(inputs[i]),
        "neg": lambda i: torch.neg(inputs[i], out=outputs[i]),
    }
    if inputs[0].is_cuda:
        seconds = {
            name: tried(name, graph_seconds, launch, len(inputs)) for name, launch in {**copies, **launches}.items()
        }
        seconds["eager copy"] = eager_seconds(copies["copy"], len(inputs))
    else:
        seconds = seconds_in_turns({**copies, **launches})
    copy = min(each for name in ("copy", "neg", "eager copy") if (each := seconds.get(name)) is not None)
    return copy, {name: seconds[name] for name in launches}


def _launch(
    provider: str,
    direction: str,
    tensors: Sequence[Sequence[Tensor]],
    dim: int | tuple[int, ...],
    arguments: Mapping[str, Tensor | bool | float],
) -> Launch:
    function = PROVIDERS[provider]()[direction == "backward"]
    return lambda i: function(*tensors[i], dim, **arguments)


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
    alone = min(event_seconds(lambda: launch(1)) for _ in range(3))  # the host's time included
    launches = min(launches, max(2, int(MOST_SECONDS / max(alone, 1e-6))))
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
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def seconds_in_turns(launches: Mapping[str, Launch]) -> dict[str, float | None]:
    """Time on the CPU: a disturbance meets every provider alike."""
    working = [name for name, launch in launches.items() if tried(name, clock_seconds, launch, 1) is not None]
    times = {name: math.ceil(1e-3 / clock_seconds(launches[name], 1)) for name in working}  # a millisecond of calls
    turns = [{name: clock_seconds(launches[name], times[name]) for name in times} for _ in range(REPEATS)]
    return {name: statistics.median(turn[name] for turn in turns) if name in times else None for name in launches}


def there_and_back(names: Sequence[str], turns: int) -> Iterator[str]:
    """Who comes next: in each turn all, in the other order than before, as each finds in the cache what one left there.

    Garbage is not collected meanwhile.
    """
    gc.collect()
    gc.disable()
    try:
        for turn in range(turns):
            yield from names if turn % 2 == 0 else reversed(names)
    finally:
        gc.enable()


def clock_seconds(launch: Launch, times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        launch(0)
    return (time.perf_counter() - start) / times


# ---- the device ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Roof:
    """What no softmax can pass on a device."""

    bytes_per_second: float  # of a copy, read and written
    exps_per_second: float

    def over(self, rows: Sequence[Row]) -> Roof:
        """At least what these reached: a copy in a CPU's caches, or a moment in which others used the CPU less."""
        copies = [row.copied_bytes / row.copy for row in rows]
        exps = [row.case.numel / seconds for row in rows for seconds in row.seconds.values() if seconds is not None]
        return Roof(max([self.bytes_per_second, *copies]), max([self.exps_per_second, *exps]))


def roof(device: torch.device) -> Roof:
    """Measure the device: a copy of a tensor as large as those of the suite `rows`, and exponentials without memory."""
    fill = FILL_BYTES[device.type]
    x, y = (torch.randn(fill // 4, device=device) for _ in range(2))
    if device.type == "cpu":
        copy = fastest(lambda _: y.copy_(x), 1)
    else:
        copy, _ = timed({}, [x, y])
    return Roof(2 * fill / copy, _exps_per_second(device))


def fastest(launch: Launch, times: int) -> float:
    """Of many turns on the CPU: what it can do, not what it does while others use it too."""
    deadline = time.perf_counter() + 0.2
    turns = [clock_seconds(launch, times)]
    while time.perf_counter() < deadline:
        turns.append(clock_seconds(launch, times))
    return min(turns)


def _exps_per_second(device: torch.device) -> float:
    if device.type == "cpu":  # of numbers in the caches, by the fastest: torch.exp is exact to the last place and slow
        return max(_exps_in_cache(function) for function in (torch.exp, torch.softmax, ndsoftmax.softmax))
    x = torch.rand(1 << 24, device=device)
    chain = torch.compile(_chain)  # of numbers in registers: one kernel
    return CHAINED_EXPS * x.numel() / graph_seconds(lambda _: chain(x), 4)


def _exps_in_cache(function: Callable[..., Tensor]) -> float:
    arguments = () if function is torch.exp else (-1,)
    rates = []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.rand(64 * torch.get_num_threads(), 1024).to(dtype)  # enough for torch to use all threads
        y = torch.empty_like(x)
        rates.append(x.numel() / fastest(lambda _: function(x, *arguments, out=y), 10))  # noqa: B023
    return max(rates)


def _chain(x: Tensor) -> Tensor:
    for _ in range(CHAINED_EXPS):
        x = torch.exp(-x)
    return x


def header(device: torch.device) -> str:
    ours = f"ndsoftmax {ndsoftmax.__version__} ({_commit()}), torch {torch.__version__}"
    if device.type == "cpu":
        return f"{cpu()} ({ndsoftmax.build_info()['cpu_capability']}, threads: {torch.get_num_threads()}), {ours}"
    return f"{torch.cuda.get_device_name(device)}, driver {driver()}, CUDA {torch.version.cuda}, {ours}"


def cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def driver() -> str:
    versions = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return versions.split("\n")[0] or "unknown"


def _commit() -> str:
    """Of the source tree, where that is the current folder."""
    here = Path("python/ndsoftmax/_bench").is_dir() and _output_of("git", "describe", "--always", "--dirty")
    return here or "unknown commit"


def _output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
