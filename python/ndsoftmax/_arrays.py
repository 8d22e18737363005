"""Arrays of other libraries: in through DLPack, without a copy where memory allows it, and out as what they were."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor


def is_array(input: object) -> bool:
    return not isinstance(input, Tensor) and hasattr(type(input), "__dlpack__")


def check_array(array: Any, dtype: torch.dtype | None, bias: object) -> None:
    """Raises unless the result can be an array of the same library."""
    if isinstance(bias, Tensor) and bias.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "bias requires grad, but input is an array, whose softmax cannot; pass a tensor, or bias.detach()"
        )
    if _is_numpy(array):
        if dtype == torch.bfloat16:
            raise TypeError("dtype is torch.bfloat16, which NumPy has not; it may be float16, float32 or float64")
    elif not hasattr(_library_of(array), "from_dlpack"):
        raise TypeError(f"input is a {type(array).__name__}, whose library takes nothing back by DLPack; pass a tensor")


def as_tensor(array: Any) -> Tensor:
    """The array's memory as a tensor on its device."""
    if _is_numpy(array) and isinstance(array, sys.modules["numpy"].ma.MaskedArray):
        raise TypeError("input must not be a masked array, whose mask would be lost; pass array.filled(-numpy.inf)")
    try:
        return torch.utils.dlpack.from_dlpack(_exchangeable(array) if _is_numpy(array) else array)
    except BufferError as error:
        raise TypeError(f"input must be an array that DLPack can exchange, but: {error}") from error


def like_array(tensor: Tensor, array: Any) -> Any:
    """The tensor's memory as an array of the other array's library."""
    if _is_numpy(array):
        return tensor.numpy()
    return _library_of(array).from_dlpack(tensor)


def _library_of(array: Any) -> Any:
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    return sys.modules[type(array).__module__.partition(".")[0]]  # CuPy before 14


def _is_numpy(array: object) -> bool:
    return "numpy" in sys.modules and isinstance(array, sys.modules["numpy"].ndarray)


def _exchangeable(array: Any) -> Any:
    """The NumPy array, or a copy where torch.from_dlpack would abort or refuse."""
    whole_steps = all(stride >= 0 and stride % (array.itemsize or 1) == 0 for stride in array.strides)
    if whole_steps and array.dtype.isnative and (array.flags.writeable or _exchanges_read_only()):
        return array
    return array.astype(array.dtype.newbyteorder("="), order="C")


def _exchanges_read_only() -> bool:
    numpy = sys.modules["numpy"]
    return bool(numpy.lib.NumpyVersion(numpy.__version__) >= "2.1.0")
