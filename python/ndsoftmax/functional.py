"""softmax and log_softmax as users call them: check, allocate, run."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ndsoftmax import ops
from ndsoftmax._arguments import as_dims, check_out, check_tensor, is_fused, plain, result_dtype


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
    return _normalize(input, dim, dtype, out, log=False)


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
    return _normalize(input, dim, dtype, out, log=True)


def _normalize(
    input: Tensor, dim: int | Sequence[int], dtype: torch.dtype | None, out: Tensor | None, *, log: bool
) -> Tensor:
    check_tensor("input", input)
    dims = as_dims(dim)
    dtype = result_dtype(input, dtype)
    if out is not None:
        check_out(out, input, dtype)
    if not is_fused(input.dtype, dtype):
        input = input.to(dtype)
    if out is not None:
        ops.forward(input, dims, dtype, log, out)
        torch.autograd.graph.increment_version(out)
        return out
    if input.requires_grad and torch.is_grad_enabled():
        result: Tensor = _Normalize.apply(input, dims, dtype, log)  # type: ignore[no-untyped-call]
        return result
    return ops.forward(input, dims, dtype, log)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, dims: tuple[int, ...], dtype: torch.dtype, log: bool) -> Tensor:
        output = ops.forward(input, dims, dtype, log)
        ctx.save_for_backward(output)
        ctx.dims, ctx.dtype, ctx.log = dims, input.dtype, log
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (output,) = ctx.saved_tensors
        (grad,) = grads
        if torch.is_grad_enabled():  # a second derivative is wanted: of something autograd can differentiate
            total = (grad if ctx.log else grad * output).sum(ctx.dims, keepdim=True)
            grad_input = grad - output.exp() * total if ctx.log else output * (grad - total)
            return grad_input.to(ctx.dtype), None, None, None
        return ops.backward(grad, output, ctx.dims, ctx.dtype, ctx.log), None, None, None


__all__ = ["log_softmax", "softmax"]

