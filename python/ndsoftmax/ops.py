"""The operations without their front: what autograd and other libraries build on."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ndsoftmax import _C, _masked
from ndsoftmax._arguments import as_dims, check_dtype, check_tensor, is_sure
from ndsoftmax._library import BACKWARD
from ndsoftmax._masked import Causal, FullyMasked, Options, as_masking


def softmax_backward(
    grad_output: Tensor,
    output: Tensor,
    dim: int | Sequence[int] = -1,
    input_dtype: torch.dtype | None = None,
    *,
    mask: Tensor | None = None,
    where: Tensor | None = None,
    scale: float = 1.0,
    causal: Causal = False,
    fully_masked: FullyMasked | None = None,
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
    mask, where, scale, causal, fully_masked
        Those of the forward call; `fully_masked` also where that had its default and a `bias` alone. The result is the
        gradient of its input; with `scale` 1, that of its bias, still to be summed over the dimensions along which that
        was broadcast.

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
    return _backward(False, grad_output, output, dim, input_dtype, mask, where, scale, causal, fully_masked)


def log_softmax_backward(
    grad_output: Tensor,
    output: Tensor,
    dim: int | Sequence[int] = -1,
    input_dtype: torch.dtype | None = None,
    *,
    mask: Tensor | None = None,
    where: Tensor | None = None,
    scale: float = 1.0,
    causal: Causal = False,
    fully_masked: FullyMasked | None = None,
) -> Tensor:
    """Gradient of log_softmax: ``grad_output - exp(output) * sum(grad_output)``, in one pass over both.

    Parameters, result and errors are those of :func:`softmax_backward`.

    Examples
    --------
    >>> y = ndsoftmax.log_softmax(torch.tensor([0.0, 0.0]))
    >>> ndsoftmax.ops.log_softmax_backward(torch.tensor([1.0, 0.0]), y)
    tensor([ 0.5000, -0.5000])
    """
    return _backward(True, grad_output, output, dim, input_dtype, mask, where, scale, causal, fully_masked)


def _backward(
    log: bool,
    grad_output: Tensor,
    output: Tensor,
    dim: int | Sequence[int],
    input_dtype: torch.dtype | None,
    mask: Tensor | None,
    where: Tensor | None,
    scale: float,
    causal: Causal,
    fully_masked: FullyMasked | None,
) -> Tensor:
    tracing = is_dynamo_compiling()
    unmasked = mask is None and where is None and causal is False and fully_masked is None
    if unmasked and type(scale) is float and scale == 1 and not tracing:
        grad_input: Tensor | None = _C.plain_backward(grad_output, output, dim, input_dtype, log)
        if grad_input is not None:
            return grad_input
    check_tensor("grad_output", grad_output)
    check_tensor("output", output)
    if input_dtype is not None:
        check_dtype("input_dtype", input_dtype)
    dims = as_dims(dim)
    mask, _, options = as_masking(
        output, dims, output.dtype, mask=mask, where=where, scale=scale, causal=causal, fully_masked=fully_masked
    )
    if mask is None and options._replace(scale=1.0) == Options(zero=False) and is_sure(options.scale == 1):
        return BACKWARD[log](grad_output, output, dims, input_dtype)
    backward = _masked.backward_of(log, grad_output, output, mask)
    return backward(grad_output, output, mask, dims, input_dtype, *options)


__all__ = ["log_softmax_backward", "softmax_backward"]
