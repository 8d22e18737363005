"""What `python -m ndsoftmax` shows: real shapes, the plan for each, its error and its speed on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import ndsoftmax

_LAUNCHES = 10  # timed together on a GPU, so that the host keeps ahead of it
_ROUNDS = range(5, 100)
_SECONDS_PER_CASE = 1.0


@dataclass(frozen=True)
class Case:
    """A softmax that real models compute."""

    what: str
    shape: tuple[int, ...]
    dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Result:
    """What was found for a case; errors in ulp, times in seconds."""

    case: Case
    plan: str
    error: float
    torch_error: float
    time: float
    torch_time: float
    copy_time: float


def cases(device_type: str, dtype: torch.dtype | None = None) -> list[Case]:
    """Return the shapes to show on a kind of device, in their usual dtypes or all in `dtype`."""
    gpu = device_type == "cuda"
    half, single = dtype or torch.bfloat16, dtype or torch.float32
    return [
        Case("attention scores", (4, 16, 1024, 1024) if gpu else (4, 12, 512, 512), -1, half),
        Case("class scores", (65536, 1000) if gpu else (16384, 1000), -1, single),
        Case("segmentation logits", (8, 21, 512, 512) if gpu else (4, 21, 512, 512), 1, single),
        Case("vocabulary logits", (1024, 50257) if gpu else (256, 50257), -1, half),
        Case("contrastive logits", (8192, 8192) if gpu else (4096, 4096), 0, single),
        Case("one long row", (1, 1 << 26) if gpu else (1, 1 << 24), -1, single),
    ]


def measure(case: Case, device: torch.device) -> Result:
    """Compute the case with ndsoftmax and with torch, compare both with float64, and time both beside a copy."""
    x = torch.randn(case.shape, device=device).to(case.dtype)
    y = torch.empty_like(x)
    exact = torch.softmax(x.double(), case.dim)
    plan = ndsoftmax.explain(x, case.dim)
    times = _interleaved_medians(
        {
            "ndsoftmax": partial(ndsoftmax.softmax, x, case.dim, out=y),
            "torch": partial(torch.softmax, x, case.dim, out=y),
            "copy": partial(y.copy_, x),
        },
        _time_on_cuda if device.type == "cuda" else _time_on_cpu,
    )
    return Result(
        case,
        f"{plan.regime}: {plan.outer} × {plan.dim} × {plan.inner}, reads {plan.passes}×",
        largest_error(ndsoftmax.softmax(x, case.dim), exact),
        largest_error(torch.softmax(x, case.dim), exact),
        times["ndsoftmax"],
        times["torch"],
        times["copy"],
    )


def table(results: Sequence[Result]) -> str:
    """Lay out the results, one line each under a header, columns two spaces apart."""
    header = (
        "what",
        "shape",
        "dim",
        "dtype",
        "plan",
        "ulp",
        "torch ulp",
        "ms",
        "torch ms",
        "copy ms",
        "speed-up",
        "frac",
    )
    lines = [header, *map(_cells, results)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    words = 5  # columns of words lean left, columns of numbers right
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i < words else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def _cells(result: Result) -> tuple[str, ...]:
    case = result.case
    return (
        case.what,
        str(case.shape),
        str(case.dim),
        str(case.dtype).removeprefix("torch."),
        result.plan,
        f"{result.error:.2f}",
        f"{result.torch_error:.2f}",
        *(f"{1e3 * seconds:.3f}" for seconds in (result.time, result.torch_time, result.copy_time)),
        f"{result.torch_time / result.time:.2f}",
        f"{result.copy_time / result.time:.2f}",
    )


def largest_error(y: Tensor, exact: Tensor) -> float:
    """In units of the last place of y's dtype."""
    limits = torch.finfo(y.dtype)
    power_of_two = torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - 1).clamp(min=limits.tiny)
    return float(((y.double() - exact).abs() / (limits.eps * power_of_two)).max())


def _interleaved_medians(
    calls: Mapping[str, Callable[[], object]], seconds: Callable[[Callable[[], object]], float]
) -> dict[str, float]:
    """Time the calls in turn, so that a disturbance meets all of them, and return the median of each."""
    one_round = sum(seconds(call) for call in calls.values())  # warms up as well
    rounds = min(max(int(_SECONDS_PER_CASE / one_round), _ROUNDS.start), _ROUNDS.stop)
    samples = [{name: seconds(call) for name, call in calls.items()} for _ in range(rounds)]
    return {name: statistics.median(sample[name] for sample in samples) for name in calls}


def _time_on_cpu(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _time_on_cuda(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(_LAUNCHES):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / _LAUNCHES
