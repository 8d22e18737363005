"""What a call may be given. Everything here runs before anything is computed, and changes nothing."""

import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ndsoftmax import _C

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NAMES = "torch.float16, torch.bfloat16, torch.float32 or torch.float64"
_DIAGONALS = ("upper_left", "lower_right")  # that causal= may name


def _check_strided(name: str, tensor: object) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, but got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} must be a strided tensor, but its layout is {tensor.layout}")
    if tensor.is_nested:
        raise TypeError(f"{name} must be a strided tensor, but is nested")
    return tensor


def check_tensor(name: str, tensor: object) -> None:
    """Raises unless `tensor` is a strided tensor on a device that this build has kernels for."""
    tensor = _check_strided(name, tensor)
    if tensor.is_quantized:
        raise TypeError(f"{name} must not be quantized, but its dtype is {tensor.dtype}")
    if not (tensor.is_cpu or tensor.is_cuda or tensor.is_meta):
        raise RuntimeError(f"{name} must be on a CPU, CUDA or meta device, but is on {tensor.device}")
    if tensor.is_cuda and not _C.HAS_CUDA:
        raise RuntimeError(
            f"{name} is on {tensor.device}, but this build of ndsoftmax has no CUDA kernels; "
            "install it where nvcc is on the PATH"
        )


def as_dims(dim: int | Sequence[int]) -> tuple[int, ...]:
    """`dim` as a tuple of ints; whether they are in range is for the dispatcher to say."""
    if isinstance(dim, tuple | list):
        if not dim:
            raise ValueError("dim must name at least one dimension, but is empty")
        return tuple(_as_int(one) for one in dim)
    return (_as_int(dim),)


def _as_int(dim: object) -> int:
    if not (isinstance(dim, int) and not isinstance(dim, bool)):
        if isinstance(dim, bool | float) or not hasattr(dim, "__index__"):
            raise TypeError(f"dim must be an int or a tuple of ints, but got {dim!r} of type {type(dim).__name__}")
        dim = operator.index(dim)
    if isinstance(dim, int) and dim.bit_length() > 63:
        raise IndexError(f"Dimension out of range (no tensor has a dimension {dim})")
    return dim


def check_dtype(name: str, dtype: object) -> None:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} must be a torch.dtype, but got {dtype!r} of type {type(dtype).__name__}")


def result_dtype(input: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the result; raises where there is none."""
    if dtype is None:
        if input.dtype not in FLOATING:
            raise TypeError(f"input must be {_NAMES}, but is {input.dtype}; pass dtype= to have it cast first")
        return input.dtype
    check_dtype("dtype", dtype)
    if dtype not in FLOATING:
        raise TypeError(f"dtype must be {_NAMES}, but is {dtype}")
    return dtype


def is_fused(source: torch.dtype, result: torch.dtype) -> bool:
    """Whether the kernels read one dtype and write the other: equal, or 16-bit widened to float32."""
    return source == result or (result == torch.float32 and source in (torch.float16, torch.bfloat16))


def wrap_dims(dims: Sequence[int], rank: int) -> list[int]:
    """`dims` counted from the first dimension; raises, in torch's words, unless they are in range and different."""
    if not dims:
        raise ValueError("dim must name at least one dimension, but is empty")
    reach = max(rank, 1)  # a 0-d tensor is one element along dim 0 or -1
    wrapped: list[int] = []
    for dim in dims:
        if not -reach <= dim < reach:
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-reach}, {reach - 1}], but got {int(dim)})"
            )
        if dim % reach in wrapped:
            raise RuntimeError(f"dim {int(dim) % reach} appears multiple times in the list of dims")
        wrapped.append(dim % reach)
    return wrapped


def check_mask(name: str, mask: object, input: Tensor) -> None:
    """Raises unless `mask` can say of every element of `input` whether it is included."""
    _check_beside(name, mask, input)
    assert isinstance(mask, Tensor)
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} must be torch.bool, but is {mask.dtype}; what it adds to input is for bias=")
    check_broadcast(name, mask, input)


def check_bias(bias: object, input: Tensor, computed_dtype: torch.dtype) -> None:
    """Raises unless `bias` can be added to every element of `input`, which is cast to `computed_dtype` first."""
    _check_beside("bias", bias, input)
    assert isinstance(bias, Tensor)
    if bias.dtype != input.dtype and not is_fused(computed_dtype, bias.dtype):
        allowed = [computed_dtype, *([input.dtype] if input.is_floating_point() else [])]
        wide = [torch.float32] if computed_dtype in (torch.float16, torch.bfloat16) else []
        names = " or ".join(map(str, dict.fromkeys(allowed + wide)))
        raise TypeError(
            f"bias must be {names}, to be added to {input.dtype} cast to {computed_dtype}, but is {bias.dtype}"
        )
    check_broadcast("bias", bias, input)


def _check_beside(name: str, tensor: object, input: Tensor) -> None:
    tensor = _check_strided(name, tensor)
    if tensor.device != input.device:
        raise RuntimeError(f"{name} must be on input's device, {input.device}, but is on {tensor.device}")


def check_broadcast(name: str, tensor: Tensor, input: Tensor) -> None:
    """Raises unless `tensor` broadcasts to the shape of `input`, which is never broadcast itself."""
    fits = tensor.dim() <= input.dim() and all(
        is_sure(own == 1) or is_sure(own == size) or own == size
        for own, size in zip(reversed(tensor.shape), reversed(input.shape), strict=False)
    )
    if not fits:
        raise RuntimeError(
            f"{name} must broadcast to the shape of input, {tuple(input.shape)}, but has {tuple(tensor.shape)}"
        )


def is_sure(condition: bool | torch.SymBool | Tensor) -> bool:
    """Whether it holds whatever sizes and numbers turn out that a tracer does not know."""
    if isinstance(condition, Tensor):  # of sizes in torch.jit.trace
        return bool(condition)
    if isinstance(condition, bool) and not is_dynamo_compiling():  # (to which every condition is a bool)
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # which takes long to import

    return guard_or_false(condition)


def check_one_mask(mask: object, where: object) -> None:
    if mask is not None and where is not None:
        raise ValueError("mask excludes and where includes: give one of them")


def check_causal(causal: str, dims: Sequence[int], rank: int) -> None:
    """Raises unless a diagonal lies across rows (dim -2) and columns (dim -1) that are normalized over."""
    if causal and causal not in _DIAGONALS:
        raise ValueError(f"causal must be '', 'upper_left' or 'lower_right', but is {causal!r}")
    if causal and rank < 2:
        raise ValueError(f"causal needs an input of two dimensions or more, but it has {rank}")
    if causal and wrap_dims(dims, rank) != [rank - 1]:
        raise ValueError(f"causal needs dim=-1, but dim is {dims[0] if len(dims) == 1 else tuple(dims)}")


def as_scale(scale: object) -> float:
    if isinstance(scale, torch.SymFloat | torch.SymInt):  # of a traced shape
        return scale  # type: ignore[return-value]
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"scale must be a number, but got {scale!r} of type {type(scale).__name__}")
    try:
        return float(scale)
    except OverflowError:
        raise ValueError(
            f"scale must be a number that float64 can hold, but has {int(scale).bit_length()} bits"
        ) from None


def as_causal(causal: object) -> str:
    """`causal` as operators have it: "", "upper_left" or "lower_right"."""
    if isinstance(causal, bool):
        return "upper_left" if causal else ""
    if not isinstance(causal, str) or causal not in _DIAGONALS:
        raise ValueError(f"causal must be False, True, 'upper_left' or 'lower_right', but is {causal!r}")
    return causal


def dead_rows_are_zero(fully_masked: object, masked: bool) -> bool:
    """What rows get of which nothing is left: zero, or NaN; by default zero where something is masked."""
    if fully_masked is None:
        return masked
    if fully_masked not in ("nan", "zero"):
        raise ValueError(f"fully_masked must be 'nan', 'zero' or None, but is {fully_masked!r}")
    return fully_masked == "zero"


def check_backward(grad_output: Tensor, output: Tensor, input_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the input's gradient; raises unless the arguments go together."""
    for what in ("shape", "dtype", "device"):
        theirs, ours = getattr(grad_output, what), getattr(output, what)
        if theirs != ours:
            raise RuntimeError(f"grad_output must have output's {what}, {ours}, but has {theirs}")
    if input_dtype is None:
        input_dtype = output.dtype
    if not is_fused(input_dtype, output.dtype):
        raise TypeError(f"input_dtype must be {output.dtype}, or 16-bit where that is float32, but is {input_dtype}")
    return input_dtype


def check_out(out: object, input: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> None:
    """Raises unless `out` can take a result of `input`'s shape and device, and of `dtype`."""
    check_tensor("out", out)
    assert isinstance(out, Tensor)
    if out.shape != input.shape:
        raise RuntimeError(f"out must have the shape of input, {tuple(input.shape)}, but has {tuple(out.shape)}")
    if out.dtype != dtype:
        raise RuntimeError(f"out must have dtype {dtype}, but has {out.dtype}")
    if out.device != input.device:
        raise RuntimeError(f"out must be on input's device, {input.device}, but is on {out.device}")
    # (Dynamo does not know the second question)
    if torch.is_grad_enabled() and (is_dynamo_compiling() or not torch.is_inference_mode_enabled()):
        for name, tensor in (("input", input), ("out", out), ("bias", bias)):
            if tensor is not None and tensor.requires_grad:
                raise RuntimeError(f"out= does not support automatic differentiation, but {name} requires grad")


def check_memory(out: Tensor, input: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> None:
    """Raises unless the kernel may write `out` while it reads the others."""
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError("out must not be an inference tensor outside inference mode")
    if overlaps_itself(out):
        raise RuntimeError("out must not overlap itself: several of its elements share one memory location")
    if overlaps_partly(input, out):
        raise RuntimeError("out must be input itself or not overlap it, but shares a part of its memory")
    for name, tensor in (("the mask", mask), ("bias", bias)):
        if tensor is not None and overlaps_partly(tensor, out):
            raise RuntimeError(f"out must not overlap {name}, but shares a part of its memory")


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First byte and one past the last byte."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _steps(tensor: Tensor) -> list[tuple[int, int]]:
    """(stride, size) of every dimension that has more than one element, smallest step first."""
    return sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def _slots(tensor: Tensor, begin: int, grain: int) -> Tensor:
    """Every slot of `grain` bytes that the tensor's elements take, counted from the address `begin`. (What is expanded
    takes no more of them.)"""
    item = tensor.element_size()
    where = torch.tensor([(tensor.data_ptr() - begin) // grain], device="cpu")
    for step, size in [*((stride * item // grain, size) for stride, size in _steps(tensor)), (1, item // grain)]:
        if step > 0:
            where = (where[:, None] + torch.arange(size, device="cpu") * step).flatten()
    return where


def _is_nested(tensor: Tensor) -> bool:
    """Whether every stride passes all that the smaller ones reach, as in views of a dense tensor."""
    reach = 0
    for stride, size in _steps(tensor):
        if stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements share a memory location."""
    if tensor.numel() == 0 or _is_nested(tensor):
        return False
    begin, end = _extent(tensor)
    if _steps(tensor)[0][0] == 0 or (end - begin) // tensor.element_size() < tensor.numel():
        return True  # expanded, or more elements than places
    where = _slots(tensor, begin, tensor.element_size())  # they may meet: count
    return bool(where.unique().numel() < where.numel())  # type: ignore[no-untyped-call]


def overlaps_partly(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share memory without being element for element the same."""
    if a.numel() == 0 or a.device != b.device:
        return False
    (a_begin, a_end), (b_begin, b_end) = _extent(a), _extent(b)
    if a_end <= b_begin or b_end <= a_begin:
        return False
    if a_begin == b_begin and a.dtype == b.dtype and a.shape == b.shape and _strides(a) == _strides(b):
        return False
    # Views may share a range and no byte. Interleaved ones, x[::2] and x[1::2], meet nowhere within their common step.
    apart = b_begin - a_begin
    step = math.gcd(*(stride * one.element_size() for one in (a, b) for stride, _ in _steps(one)))
    if step > 0 and a.element_size() <= apart % step <= step - b.element_size():
        return False
    # Views of one layout, as two halves of a matrix, meet where a whole number of steps leads from one to the other.
    if a.dtype == b.dtype and _steps(a) == _steps(b) and apart % a.element_size() == 0 and _is_nested(a):
        return _leads(apart // a.element_size(), _steps(a))
    # Others are rare: count.
    begin, end = min(a_begin, b_begin), max(a_end, b_end)
    grain = math.gcd(apart, a.element_size(), b.element_size())
    used = torch.zeros((end - begin) // grain, dtype=torch.bool, device="cpu")
    used[_slots(a, begin, grain)] = True
    return bool(used[_slots(b, begin, grain)].any())


def _leads(apart: int, steps: list[tuple[int, int]]) -> bool:
    """Whether fewer than `size` steps of every stride, forth or back, lead `apart`. Strides are nested."""
    if not steps:
        return apart == 0
    *smaller, (stride, size) = steps
    return any(
        abs(count) < size and _leads(apart - count * stride, smaller)
        for count in (apart // stride, apart // stride + 1)
    )


def _strides(tensor: Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
