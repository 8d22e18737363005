"""The operations without their front: what autograd and other libraries build on."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ndsoftmax import _C
from ndsoftmax._arguments import as_dims, check_tensor, is_fused, plain


def softmax_backward(
    grad_output: Tensor, output: Tensor, dim: int | Sequence[int] = -1, input_dtype: torch.dtype | None = None
) -> Tensor:
    """Gradient of softmax: ``output * (grad_output - sum(grad_output * output))``, in one pass over both.

    Parameters
    ----------
    grad_output, output : Tensor
        The gradient that arrives and what softmax returned: same shape, dtype and device, any strides.
    dim : int or sequence of int
        What was normalized over.
    input_dtype : torch.dtype, optional
        Of the result; `output`'s by default, or a 16-bit one where `output` is float32.

    Returns
    -------
    Tensor
        The gradient of the input, in `output`'s memory format.

    Raises
    ------
    RuntimeError
        The tensors differ in shape, dtype or device. Otherwise as :func:`ndsoftmax.softmax`.

    Examples
    --------
    >>> y = ndsoftmax.softmax(torch.tensor([0.0, 0.0]))
    >>> ndsoftmax.ops.softmax_backward(torch.tensor([1.0, 0.0]), y)
    tensor([ 0.2500, -0.2500])
    """
    return _checked_backward(grad_output, output, dim, input_dtype, log=False)


def log_softmax_backward(
    grad_output: Tensor, output: Tensor, dim: int | Sequence[int] = -1, input_dtype: torch.dtype | None = None
) -> Tensor:
    """Gradient of log_softmax: ``grad_output - exp(output) * sum(grad_output)``, in one pass over both.

    Parameters, result and errors are those of :func:`softmax_backward`.

    Examples
    --------
    >>> y = ndsoftmax.log_softmax(torch.tensor([0.0, 0.0]))
    >>> ndsoftmax.ops.log_softmax_backward(torch.tensor([1.0, 0.0]), y)
    tensor([ 0.5000, -0.5000])
    """
    return _checked_backward(grad_output, output, dim, input_dtype, log=True)


def _checked_backward(
    grad_output: Tensor, output: Tensor, dim: int | Sequence[int], input_dtype: torch.dtype | None, *, log: bool
) -> Tensor:
    check_tensor("grad_output", grad_output)
    check_tensor("output", output)
    for what in ("shape", "dtype", "device"):
        theirs, ours = getattr(grad_output, what), getattr(output, what)
        if theirs != ours:
            raise RuntimeError(f"grad_output must have output's {what}, {ours}, but has {theirs}")
    if input_dtype is None:
        input_dtype = output.dtype
    if not is_fused(input_dtype, output.dtype):
        raise TypeError(f"input_dtype must be {output.dtype}, or 16-bit where that is float32, but is {input_dtype}")
    return backward(grad_output, output, as_dims(dim), input_dtype, log)


def forward(
    input: Tensor, dims: tuple[int, ...], dtype: torch.dtype, log: bool, output: Tensor | None = None
) -> Tensor:
    """Runs the kernel on checked arguments, without autograd."""
    input = plain(input.detach())
    if output is None:
        output = torch.empty_like(input, dtype=dtype)
    _C.forward(input, output.detach(), dims, log, torch.get_num_threads())
    return output


def backward(grad_output: Tensor, output: Tensor, dims: tuple[int, ...], dtype: torch.dtype, log: bool) -> Tensor:
    """Runs the backward kernel on checked arguments, without autograd."""
    grad_input = torch.empty_like(output, dtype=dtype)
    _C.backward(
        plain(grad_output.detach()), plain(output.detach()), grad_input, dims, log, torch.get_num_threads()
    )
    return grad_input
