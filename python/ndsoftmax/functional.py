"""softmax and log_softmax as users call them: the short path for plain calls, the operators for all others."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ndsoftmax import _C
from ndsoftmax._arguments import as_dims, check_memory, check_out, check_tensor, is_fused, result_dtype
from ndsoftmax._arrays import as_tensor, is_array, like_array
from ndsoftmax._library import FORWARD, normalize


def softmax(
    input: Tensor, dim: int | Sequence[int] = -1, dtype: torch.dtype | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Softmax of `input` over `dim`: ``exp(x) / sum(exp(x))``, computed without overflow.

    Parameters
    ----------
    input : Tensor
        Any shape, any strides; float16, bfloat16, float32 or float64, or anything torch casts when `dtype` is given.
    dim : int or sequence of int
        The dimension to normalize over, or several: then over their product.
    dtype : torch.dtype, optional
        `input` is cast to it first. From 16-bit to float32 the cast is part of the kernel.
    out : Tensor, optional
        Written and returned. It may be `input` itself.

    Returns
    -------
    Tensor
        Of `input`'s shape, device and memory format. NaN and infinities come out where torch.softmax puts them.

    Raises
    ------
    IndexError
        `dim` is out of range.
    TypeError
        `input` is not a strided, floating-point tensor and `dtype` is not given, or `dim` is not an int.
    ValueError
        `dim` is empty.
    RuntimeError
        A dim is repeated, the device has no kernels, or `out` has another shape, dtype or device, overlaps itself
        or a part of `input`, or `input` requires grad while `out` is given.

    Notes
    -----
    Online normalizer: Milakov and Gimelshein, https://arxiv.org/abs/1805.02867.

    Examples
    --------
    >>> x = torch.tensor([[0.0, 0.0], [1000.0, 1000.0]])
    >>> ndsoftmax.softmax(x)
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    >>> ndsoftmax.softmax(x, dim=(0, 1)).sum()
    tensor(1.)
    """
    result: Tensor = _normalize(False, input, dim, dtype, out)
    return result


def log_softmax(
    input: Tensor, dim: int | Sequence[int] = -1, dtype: torch.dtype | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Logarithm of the softmax of `input` over `dim`: ``x - log(sum(exp(x)))``, computed without overflow.

    Parameters, result and errors are those of :func:`softmax`.

    Examples
    --------
    >>> ndsoftmax.log_softmax(torch.tensor([0.0, 0.0, -torch.inf]))
    tensor([-0.6931, -0.6931,    -inf])
    """
    result: Tensor = _normalize(True, input, dim, dtype, out)
    return result


def _normalize(log: bool, input: Any, dim: int | Sequence[int], dtype: torch.dtype | None, out: Tensor | None) -> Any:
    if out is None and not torch.compiler.is_dynamo_compiling():
        result = _C.plain_forward(input, dim, dtype, log, normalize)
        if result is not None:
            return result
    return _long_way(log, input, dim, dtype, out)


def _long_way(log: bool, input: Any, dim: int | Sequence[int], dtype: torch.dtype | None, out: Tensor | None) -> Any:
    if has_torch_function((input, out)):
        return handle_torch_function(log_softmax if log else softmax, (input, out), input, dim, dtype, out=out)
    if is_array(input):
        return like_array(_normalize(log, as_tensor(input), dim, dtype, out), input)
    dims = as_dims(dim)
    if isinstance(input, Tensor) and (input.is_nested or is_traceable_wrapper_subclass(input)):
        return _torchs(log, input, dims, dtype, out)
    check_tensor("input", input)
    output_dtype = result_dtype(input, dtype)
    if out is not None:
        return _into(out, log, input, dims, output_dtype)
    if not is_fused(input.dtype, output_dtype):
        input = input.to(output_dtype)
    return FORWARD[log](input, dims, dtype)


def _torchs(log: bool, input: Tensor, dims: tuple[int, ...], dtype: torch.dtype | None, out: Tensor | None) -> Tensor:
    """torch's own, for tensors of tensors (DTensor, nested tensors, ...): they know its operators, not ours."""
    if len(dims) != 1:
        raise TypeError(f"dim must be one int for a {type(input).__name__}, but is {dims}")
    function = torch.log_softmax if log else torch.softmax
    return function(input, dims[0], dtype) if out is None else function(input, dims[0], dtype, out=out)


def _into(out: Tensor, log: bool, input: Tensor, dims: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    check_out(out, input, dtype)
    plain = not torch.compiler.is_dynamo_compiling() and _C.are_plain(input, out)
    if plain:
        check_memory(out, input)
    if not is_fused(input.dtype, dtype):
        input = input.to(dtype)
    if not plain or out.dim() > _C.MAX_GROUPS:
        return out.copy_(FORWARD[log](input, dims, dtype))
    _C.forward(input, out, dims, log, torch.get_num_threads())
    torch.autograd.graph.increment_version(out)
    return out


__all__ = ["log_softmax", "softmax"]
