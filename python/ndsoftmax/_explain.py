"""What a call would do, and why: the plan of a problem, on this machine or on a GPU that is not here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from operator import index
from typing import Any, Literal

import torch
from torch import Tensor

from ndsoftmax import _C
from ndsoftmax._arguments import (
    as_causal,
    as_dims,
    as_scale,
    check_bias,
    check_causal,
    check_mask,
    check_one_mask,
    check_tensor,
    dead_rows_are_zero,
    is_fused,
    result_dtype,
)

# GPUs that plans can be made for anywhere: what plan() reads of a device, and GB/s, from NVIDIA's datasheets.
_NAMED: dict[str, tuple[dict[str, int], float]] = {
    name: (
        {
            "compute_capability": capability,
            "multiprocessors": multiprocessors,
            "shared_bytes_per_block": shared_kib * 1024,
            "l2_bytes": l2_mib << 20,
        },
        bandwidth,
    )
    for name, capability, multiprocessors, shared_kib, l2_mib, bandwidth in (
        ("T4", 75, 40, 64, 4, 320),
        ("A100", 80, 108, 163, 40, 2039),
        ("L4", 89, 58, 99, 48, 300),
        ("RTX 4090", 89, 128, 99, 72, 1008),
        ("H100", 90, 132, 227, 50, 3350),
        ("H200", 90, 132, 227, 60, 4800),
        ("B200", 100, 148, 227, 126, 8000),
    )
}


@dataclass(frozen=True, repr=False)
class Explanation:
    """The plan of one problem; prints as a short text.

    Attributes
    ----------
    problem : str
        The operation and its dtypes.
    device : str
        Where it would run.
    regime, outer, dim, inner, passes, why
        Which kernel runs on which sizes, how often it reads each element, and the reason.
    vector, items, threads_per_row, grid, block, cluster, splits, staged, meets, slabs, beside, shared_bytes,
    workspace_bytes
        The shape of the launch, and the memory that it takes; `meets`: all blocks run at once, and meet between two
        passes; `slabs`: blocks have small slabs of dim × inner, whole ones, in shared memory; `beside`: "mask" or
        "bias", where they have that of the columns that threads hold there.
    shared_items : int
        Of a column's `items`, those that a thread has in shared memory.
    interleaved : int
        Columns that take turns in a row of memory, and are taken for one.
    registers : int or None
        32-bit registers in which a GPU's thread holds elements, 0 where those stay in shared memory; what the compiler
        needs beside them is not known here.
    bytes : int
        Bytes that must move: each tensor of the call once.
    bandwidth : float or None
        Of the device's memory in GB/s, as NVIDIA's datasheet or the driver has it.
    seconds : float or None
        `bytes` at that bandwidth.
    """

    problem: str
    device: str
    regime: str
    outer: int
    dim: int
    inner: int
    vector: int
    items: int
    shared_items: int
    threads_per_row: int
    grid: int
    block: int
    cluster: int
    splits: int
    interleaved: int
    staged: bool
    meets: bool
    slabs: bool
    beside: Literal["mask", "bias"] | None
    shared_bytes: int
    workspace_bytes: int
    passes: int
    why: str
    registers: int | None
    bytes: int
    bandwidth: float | None
    seconds: float | None

    def to_dict(self) -> dict[str, Any]:
        """Everything it says, as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        each = "column" if self.regime == "strided" else "row"
        lines = {
            "problem": f"{self.problem}, outer × dim × inner = {self.outer} × {self.dim} × {self.inner}",
            "device": self.device,
            "kernel": self.regime + (", staged through shared memory" if self.staged else ""),
            "why": self.why,
        }
        if self.registers is None:
            lines["work"] = f"{_count(self.grid, 'task')}, vectors of {self.vector}"
        else:
            place = _count(self.registers, "register") if self.registers else "shared memory"
            if self.registers and (self.shared_items or (self.regime == "cluster" and self.shared_bytes > 0)):
                place += ", or in shared memory"
            columns = f" of {self.interleaved} columns" if self.interleaved > 1 else ""
            lines["thread"] = (
                f"{self.items} × {self.vector} elements of a {each} in {place}, "
                f"{_count(self.threads_per_row, 'thread')} a {each}{columns}"
            )
            lines["grid"] = f"{_count(self.grid, 'block')} × {_count(self.block, 'thread')}" + (
                f" in clusters of {self.cluster}" if self.cluster > 1 else ", all at once" if self.meets else ""
            )
            lines["shared"] = f"{self.shared_bytes} bytes a block" + (
                f", also for the {self.beside} of what threads hold" if self.beside else ""
            )
        if self.splits > 1:
            lines["splits"] = f"{self.splits} parts a {each}, {self.workspace_bytes} bytes of workspace"
        times = "once" if self.passes == 1 else "at most twice"
        lines["memory"] = f"{size(self.bytes)} to move, each element read {times}"
        if self.seconds is not None:
            lines["at best"] = f"{self.seconds * 1e6:.1f} µs at {self.bandwidth:.0f} GB/s"
        return "\n".join(f"{name:<8} {text}" for name, text in lines.items())

    __repr__ = __str__


def explain(
    input: Tensor | Sequence[int],
    dim: int | Sequence[int] = -1,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    log: bool = False,
    backward: bool = False,
    mask: Tensor | Sequence[int] | None = None,
    where: Tensor | Sequence[int] | None = None,
    bias: Tensor | Sequence[int] | None = None,
    scale: float = 1.0,
    causal: bool | str = False,
    fully_masked: str | None = None,
) -> Explanation:
    """Which kernel a call would run, how, and why. Runs nothing and needs no GPU.

    Parameters
    ----------
    input : Tensor or sequence of int
        The tensor, or the shape of a contiguous one.
    dim : int or sequence of int
        What is normalized over.
    dtype : torch.dtype, optional
        Of a shape: its dtype, float32 by default. Of a tensor: what softmax's `dtype` would be.
    device : str or torch.device, optional
        "cpu", "cuda", "cuda:1", or a GPU by name: "T4", "A100", "L4", "RTX 4090", "H100", "H200" or "B200",
        as if kernels had been compiled for it. By default the tensor's device; for a shape, the GPU if there is one,
        else the CPU.
    log : bool
        log_softmax instead of softmax.
    backward : bool
        The gradient instead of the result.
    mask, where, bias : Tensor or sequence of int, optional
        What would be fused, or its shape (of a bias of the input's dtype). Not both of `mask` and `where`.
    scale, causal, fully_masked
        As for :func:`ndsoftmax.softmax`. The bytes to move are those up to the diagonal.

    Returns
    -------
    Explanation
        Prints as text; has the plan's values as attributes, and `to_dict()`.

    Raises
    ------
    ValueError
        The device is unknown, or the environment variable NDSOFTMAX_REGIME forces a regime that cannot take this.
        Otherwise as :func:`ndsoftmax.softmax`.

    Examples
    --------
    >>> plan = ndsoftmax.explain((8, 16, 1024, 1024), dtype=torch.bfloat16, device="H200")
    >>> plan.regime, plan.threads_per_row, plan.passes
    ('warp', 32, 1)
    """
    offset = 0
    if isinstance(input, Tensor):
        check_tensor("input", input)
        source, result = input.dtype, result_dtype(input, dtype)
        described = _described("input", input, source)
        device = input.device if device is None else device
        if not is_fused(source, result):
            source = result
            described = torch.empty_like(described, dtype=result)
        elif not input.is_meta:
            offset = input.data_ptr() % 256 // input.element_size()
    else:
        source = result = result_dtype(torch.empty(0, dtype=torch.float32), dtype)
        described = _described("input", input, source)
    check_one_mask(mask, where)
    check_causal(as_causal(causal), as_dims(dim), described.dim())
    name, given = ("mask", mask) if where is None else ("where", where)
    mask = None if given is None else _described(name, given, torch.bool)
    bias = None if bias is None else _described("bias", bias, source)
    if mask is not None:
        check_mask(name, mask, described)
    if bias is not None:
        check_bias(bias, described, source)
    masked = mask is not None or bias is not None or bool(causal)
    zero = dead_rows_are_zero(fully_masked, masked)
    target, device_name, bandwidth = _device(best_device() if device is None else device)
    strides = list(described.stride())
    dense = list(torch.empty_like(described).stride())
    if backward:  # from a gradient and an output that lie as the output does, to a gradient that lies as they do
        source, result, strides, offset, bias = result, source, dense, 0, None
    source_name, result_name = (str(one).removeprefix("torch.") for one in (source, result))
    forced = _C.forced_regime()
    plan = _C.plan(
        log,
        backward,
        source_name,
        result_name,
        list(described.shape),
        strides,
        dense,
        dense,
        as_dims(dim),
        target,
        (offset, 0, 0),
        regime=forced,
        mask=_layout(mask),
        bias=_layout(bias),
        bias_dtype=str(source if bias is None else bias.dtype).removeprefix("torch."),
        scale=as_scale(scale),
        causal=as_causal(causal),
        zero=zero,
    )
    sources = source.itemsize * (2 if backward else 1)
    moved = math.ceil(described.numel() * sources * _reached(described.shape, as_causal(causal)))
    moved += described.numel() * result.itemsize + _stored_bytes(mask) + _stored_bytes(bias)
    items = plan.items - plan.shared_items
    if plan.regime == "cluster" and plan.shared_bytes > 0:  # all of them are in shared memory, or some
        items = 0 if plan.staged else items - plan.shared_bytes // (plan.block * plan.vector * source.itemsize)
    registers = items * (2 if backward else 1) * math.ceil(plan.vector * source.itemsize / 4)
    planned = {one.name: getattr(plan, one.name) for one in fields(Explanation) if hasattr(plan, one.name)}
    if forced and described.numel():
        planned["why"] = "the environment variable NDSOFTMAX_REGIME forces it"
    return Explanation(
        problem=f"{'log_softmax' if log else 'softmax'} {'backward' if backward else 'forward'} "
        + " → ".join(dict.fromkeys((source_name, result_name))),
        device=device_name,
        registers=registers if target.kind == "cuda" else None,
        bytes=moved,
        bandwidth=bandwidth,
        seconds=None if bandwidth is None else moved / (bandwidth * 1e9),
        **planned,
    )


def _described(name: str, given: object, dtype: torch.dtype) -> Tensor:
    """A tensor without memory: one that lies as `given` does, or, of a shape, a contiguous one of `dtype`."""
    if isinstance(given, Tensor):
        return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta")
    try:
        sizes = tuple(map(index, given))  # type: ignore[call-overload]
    except TypeError:
        raise TypeError(f"{name} must be a tensor or a shape, as (8, 1024), but is {given!r}") from None
    if any(each < 0 for each in sizes):
        raise ValueError(f"{name} is {sizes}; sizes may not be negative")
    if math.prod(max(each, 1) for each in sizes) * dtype.itemsize >= 2**63:
        raise ValueError(f"{name} is {sizes}; a tensor may have 2^63 - 1 bytes at most")
    return torch.empty(sizes, dtype=dtype, device="meta")


def best_device() -> torch.device:
    return torch.device("cuda" if _C.HAS_CUDA and torch.cuda.is_available() else "cpu")


def _device(device: str | torch.device) -> tuple[_C.Device, str, float | None]:
    """What plan() needs of a device, what it is called, and its bandwidth in GB/s."""
    named = {name.lower().replace(" ", ""): name for name in _NAMED}
    name = named.get(str(device).lower().replace(" ", ""))
    if name is not None:
        properties, bandwidth = _NAMED[name]
        return _C.Device(kind="cuda", **properties), name, bandwidth
    asked = str(device)
    try:
        device = torch.device(device)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return _C.device("cpu", 0, threads), f"CPU ({_C.build_info()['cpu_capability']}, {threads} threads)", None
    if device.type == "cuda" and best_device().type == "cuda":
        number = torch.cuda.current_device() if device.index is None else device.index
        found = torch.cuda.get_device_properties(number)
        clock, width = (getattr(found, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
        bandwidth = 2 * clock * width / 8 / 1e6  # of kHz and bits, two words a clock; 0 where torch does not say
        return _C.device("cuda", number), found.name, bandwidth or None
    known = ", ".join(["cpu", *(["cuda"] if best_device().type == "cuda" else []), *_NAMED])
    raise ValueError(f"device is {asked!r}; here it may be {known}")


def _layout(tensor: Tensor | None) -> tuple[list[int], list[int]] | None:
    return None if tensor is None else (list(tensor.shape), list(tensor.stride()))


def _stored_bytes(tensor: Tensor | None) -> int:
    """The bytes of a tensor, each of those that are repeated once."""
    if tensor is None:
        return 0
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(extent for extent, stride in sizes if stride != 0) * tensor.element_size()


def _reached(shape: Sequence[int], causal: str) -> float:
    """The share of the elements that are not past the diagonal."""
    if not causal:
        return 1.0
    rows, columns = shape[-2:]
    diagonal = columns - rows if causal == "lower_right" else 0
    # of the row numbers i, those in which the diagonal has entered, and in which it has left, the columns
    first, last = max(-diagonal, 0), max(min(columns - diagonal, rows), 0)
    partly = max(last - first, 0)
    reached = partly * (first + last - 1 + 2 * diagonal + 2) / 2 + max(rows - max(last, 0), 0) * columns
    return reached / max(rows * columns, 1)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def size(count: int) -> str:
    unit = min(int(math.log2(max(count, 1)) // 10), 4)
    return f"{count / 1024**unit:.4g} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"
