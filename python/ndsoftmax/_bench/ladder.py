"""The ladder: from the naive kernel to the last one, each measured beside torch and ndsoftmax, and checked.

The kernels of ladder.cu are compiled by nvcc when they are first asked for, and called through ctypes; those of
triton_rungs.py are there where Triton is.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ndsoftmax
from ndsoftmax._bench.measure import DTYPES, Launch, Pool, Row, timed
from ndsoftmax._bench.shapes import Case
from ndsoftmax._showcase import largest_error

SOURCE = Path(__file__).with_name("ladder.cu")
ROWS = 4096
DIMS = (256, 512, 1024, 2048, 4096, 8192)
FIRST = 3  # values that the table shows
_MOST_PACKS = 1024  # of a row, where each thread of a block holds one
OVERFLOWING = 89.0  # the least integer whose exponential is infinite in float32


@dataclass(frozen=True)
class Rung:
    """One kernel: what it changed, and on which other."""

    name: str
    dtype: str
    changed: str
    before: str = ""  # the rung that it is compared with
    width: int = 1  # elements that one access moves; dim must be a multiple
    held: bool = True  # a row is held in registers, one access a thread
    safe: bool = True  # subtracts the maximum

    def takes(self, dim: int) -> bool:
        return dim % self.width == 0 and (not self.held or dim // self.width <= _MOST_PACKS)


RUNGS = (
    Rung("serial_f32", "float32", "the formula; one thread adds up a row", held=False, safe=False),
    Rung("naive_f32", "float32", "a thread an element, sum by warp shuffles", "serial_f32", safe=False),
    Rung("naive_f32x4", "float32", "16-byte loads: 4 elements a thread", "naive_f32", 4, safe=False),
    Rung("tree_f32", "float32", "subtracts the maximum; trees in shared memory", "serial_f32"),
    Rung("safe_f32", "float32", "warp shuffles instead of trees", "tree_f32"),
    Rung("safe_f32x4", "float32", "16-byte loads: 4 elements a thread", "safe_f32", 4),
    Rung("online_f32", "float32", "(max, sum) in one reduction; rows of any width", "safe_f32", held=False),
    Rung("online_f32x4", "float32", "16-byte loads: 4 elements a thread", "online_f32", 4, held=False),
    Rung("safe_f16", "float16", "half the bytes, one element a thread", "safe_f32"),
    Rung("safe_f16x2", "float16", "4-byte loads: 2 elements a thread", "safe_f16", 2),
    Rung("safe_f16x8", "float16", "16-byte loads: 8 elements a thread", "safe_f16x2", 8),
)
_OTHERS = {
    "triton_fused": "Triton; a program holds a row",
    "triton_online": "Triton; a program reads a row twice, 1024 elements at a time",
    "torch": "torch.softmax",
    "ndsoftmax": "ndsoftmax.softmax",
}
# One thread that adds 8192 terms one by one loses a few dozen; a wrong kernel loses all digits.
_MOST_ULP = {torch.float32: 256.0, torch.float16: 2.0}


class Kernels:
    """The compiled ladder.cu."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.ladder_launch.argtypes = [
            ctypes.c_char_p,
            *(ctypes.c_void_p, ctypes.c_void_p),
            *(ctypes.c_int, ctypes.c_int),
            ctypes.c_void_p,
        ]
        self._library.ladder_error.restype = ctypes.c_char_p

    def __call__(self, rung: str, x: Tensor, y: Tensor) -> None:
        """y = softmax of the rows of x, both dense, on the current stream of their device."""
        stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
        error = self._library.ladder_launch(rung.encode(), x.data_ptr(), y.data_ptr(), *x.shape, stream)
        if error:
            raise RuntimeError(f"{rung}: {self._library.ladder_error(error).decode()}")


def compiled(architectures: Sequence[int]) -> Path:
    """Compile ladder.cu for compute capabilities such as 90, unless the user's cache has it, and return the library."""
    name = os.environ.get("CUDACXX", "nvcc")
    nvcc = shutil.which(name)
    if nvcc is None:
        raise RuntimeError(f"the suite ladder compiles its kernels with nvcc, and there is no {name}")
    options = ["-std=c++17", "-O3", "-shared", "-Xcompiler=-fPIC", "--threads=0"]
    options += [f"-gencode=arch=compute_{number},code=sm_{number}" for number in architectures]
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join([nvcc, *options]).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ndsoftmax"
    library = cache / f"ladder-{key}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / "ladder.so"
            done = subprocess.run([nvcc, *options, "-o", made, SOURCE], capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"nvcc cannot compile {SOURCE.name}: {(done.stderr or done.stdout).strip()}")
            made.replace(library)
    return library


# Writes the softmax of the rows of its first argument into its second.
Function = Callable[[Tensor, Tensor], object]


def functions(kernels: Kernels, device: torch.device, dtype: torch.dtype, dim: int) -> dict[str, Function]:
    """The rungs for a dtype that take rows of `dim` elements, and what they are compared with. Triton needs a GPU."""
    found: dict[str, Function] = {
        rung.name: partial(kernels, rung.name) for rung in RUNGS if DTYPES[rung.dtype] == dtype and rung.takes(dim)
    }
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from ndsoftmax._bench import triton_rungs

        if dim <= triton_rungs.MOST_FUSED:
            found["triton_fused"] = triton_rungs.fused
        found["triton_online"] = triton_rungs.online
    found["torch"] = lambda x, y: torch.softmax(x, 1, out=y)
    found["ndsoftmax"] = lambda x, y: ndsoftmax.softmax(x, 1, out=y)
    return found


@dataclass(frozen=True)
class Check:
    """What a function computes."""

    first: tuple[float, ...]  # values of the input that was measured
    ulp: float  # the largest error against float64, in units of the last place
    at_89: float  # of a row of zeros and one 89: the 89's probability, which is 1

    def wrong(self, name: str, dtype: torch.dtype) -> bool:
        """Whether it is not what the rung claims."""
        unsafe = name in {rung.name for rung in RUNGS if not rung.safe}
        return not self.ulp <= _MOST_ULP[dtype] or not (unsafe or abs(self.at_89 - 1) < 1e-6)


def check(function: Function, x: Tensor) -> Check:
    """Compare with float64."""
    y = torch.empty_like(x)
    function(x, y)
    overflowing = torch.zeros_like(x[:1])
    overflowing[0, -1] = OVERFLOWING
    y_overflowing = torch.empty_like(overflowing)
    function(overflowing, y_overflowing)
    ulp = largest_error(y, torch.softmax(x.double(), 1))
    return Check(tuple(y[0, :FIRST].tolist()), ulp, y_overflowing[0, -1].item())


@dataclass(frozen=True)
class Step:
    """The rungs on one shape."""

    row: Row
    checks: dict[str, Check]

    def gained(self, name: str, steps: Sequence[Step]) -> tuple[float, str] | None:
        """How many times as fast it is as the rung before it, and that rung."""
        before = next((rung.before for rung in RUNGS if rung.name == name), "")
        rows = [step.row for step in steps if step.row.case == self.row.case]
        slower = next((row.seconds[before] for row in rows if row.seconds.get(before)), None)
        mine = self.row.seconds[name]
        return None if slower is None or mine is None else (slower / mine, before)


def climbs(device: torch.device) -> list[tuple[str, Callable[[], Step]]]:
    """What to climb on a GPU, shape after shape, each with its name. Compiles the kernels if need be."""
    major, minor = torch.cuda.get_device_capability(device)
    kernels = Kernels(compiled([10 * major + minor]))
    return [
        (f"ladder {ROWS}x{dim} {dtype}", partial(climb, kernels, device, dim, dtype))
        for dim in DIMS
        for dtype in ("float32", "float16")
    ]


def climb(kernels: Kernels, device: torch.device, dim: int, dtype: str) -> Step:
    """Measure and check every rung on ROWS rows of `dim` elements."""
    case = Case("ladder", (ROWS, dim))
    inputs = [x for (x,) in Pool(device, DTYPES[dtype], [case], 1).tensors(case)]
    outputs = [torch.empty_like(x) for x in inputs]
    found = functions(kernels, device, DTYPES[dtype], dim)
    launches = {name: _launch(function, inputs, outputs) for name, function in found.items()}
    copy, seconds = timed(launches, inputs)
    row = Row(case, dtype, "forward", copy, 2 * inputs[0].nbytes, seconds)
    return Step(row, {name: check(function, inputs[0]) for name, function in found.items() if seconds[name]})


def _launch(function: Function, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Launch:
    return lambda i: function(inputs[i], outputs[i])


# ---- reporting -------------------------------------------------------------------------------------------------------


def legend() -> str:
    """What each rung changed."""
    lines = [(rung.name, rung.changed + (f" ({rung.before})" if rung.before else "")) for rung in RUNGS]
    return "\n".join(f"{name:<14}{text}" for name, text in [*lines, *_OTHERS.items()])


def table(step: Step, steps: Sequence[Step]) -> str:
    row = step.row
    title = f"{ROWS} × {row.case.shape[1]}, {row.dtype}: copy {1e6 * row.copy:.1f} µs"
    heads = f"{'':<14}{'µs':>9}{'frac':>7}{'gained':>22}{'ulp':>8}{'at 89':>7}  first values"
    return "\n".join([title, heads, *(_line(step, name, steps) for name in row.seconds)])


def _line(step: Step, name: str, steps: Sequence[Step]) -> str:
    seconds = step.row.seconds[name]
    if seconds is None:
        return f"{name:<14}{'-':>9}  FAILED"
    found, gained = step.checks[name], step.gained(name, steps)
    times = "" if gained is None else f"{gained[0]:.2f} × {gained[1]}"
    values = " ".join(f"{value:.8f}" for value in found.first)
    wrong = "  WRONG" if found.wrong(name, DTYPES[step.row.dtype]) else ""
    numbers = f"{1e6 * seconds:>9.1f}{step.row.frac(name):>7.2f}{times:>22}{found.ulp:>8.1f}{found.at_89:>7.3g}"
    return f"{name:<14}{numbers}  {values}{wrong}"


def as_dicts(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """One for each rung and shape."""
    return [
        {
            "rung": name,
            "dim": step.row.case.shape[1],
            "dtype": step.row.dtype,
            "seconds": seconds,
            "frac": step.row.frac(name),
            "gained": step.gained(name, steps),
            "ulp": step.checks[name].ulp,
            "at_89": str(step.checks[name].at_89),  # JSON has no NaN
            "first": step.checks[name].first,
        }
        for step in steps
        for name, seconds in step.row.seconds.items()
        if seconds is not None
    ]


def any_wrong(steps: Sequence[Step]) -> bool:
    """Whether a rung failed, or is not what it claims."""
    return any(
        seconds is None or step.checks[name].wrong(name, DTYPES[step.row.dtype])
        for step in steps
        for name, seconds in step.row.seconds.items()
    )
