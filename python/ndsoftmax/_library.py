"""The operators torch.ops.ndsoftmax.*: kernels, shapes, gradients, batches and autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import getattr_static
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from ndsoftmax import _C
from ndsoftmax._arguments import check_backward, is_fused, result_dtype, wrap_dims

Dims = Sequence[int]
Operator = Callable[..., Tensor]

library: Any = torch.library.Library("ndsoftmax", "DEF")  # type: ignore[no-untyped-call]
for _name in ("softmax", "log_softmax"):
    library.define(
        f"{_name}(Tensor input, int[] dim, ScalarType? dtype=None) -> Tensor", tags=torch.Tag.pt2_compliant_tag
    )
    library.define(
        f"{_name}_backward(Tensor grad_output, Tensor output, int[] dim, ScalarType? input_dtype=None) -> Tensor",
        tags=torch.Tag.pt2_compliant_tag,
    )

# by `log`
FORWARD: dict[bool, Operator] = {
    False: torch.ops.ndsoftmax.softmax.default,
    True: torch.ops.ndsoftmax.log_softmax.default,
}
BACKWARD: dict[bool, Operator] = {
    False: torch.ops.ndsoftmax.softmax_backward.default,
    True: torch.ops.ndsoftmax.log_softmax_backward.default,
}


# ---- results and kernels


def empty_output(input: Tensor, dtype: torch.dtype | None) -> Tensor:
    dtype = result_dtype(input, dtype)
    if not is_fused(input.dtype, dtype):
        raise TypeError(f"input must be {dtype}, or 16-bit where that is torch.float32, but is {input.dtype}")
    return torch.empty_like(input, dtype=dtype)


def empty_grad_input(grad_output: Tensor, output: Tensor, input_dtype: torch.dtype | None) -> Tensor:
    return torch.empty_like(output, dtype=check_backward(grad_output, output, input_dtype))


def _fake_forward(input: Tensor, dim: Dims, dtype: torch.dtype | None = None) -> Tensor:
    wrap_dims(dim, input.dim())
    return empty_output(input, dtype)


def _fake_backward(grad_output: Tensor, output: Tensor, dim: Dims, input_dtype: torch.dtype | None = None) -> Tensor:
    wrap_dims(dim, output.dim())
    return empty_grad_input(grad_output, output, input_dtype)


def kernel_forward(log: bool, input: Tensor, dim: Dims, dtype: torch.dtype | None = None) -> Tensor:
    output = empty_output(input, dtype)
    if input.dim() <= _C.MAX_GROUPS:
        _C.forward(input, output, dim, log, torch.get_num_threads())
        return output
    # Kernels step through no more dimensions than that unless they merge: contiguous ones do.
    dense = torch.empty(output.shape, dtype=output.dtype, device=output.device)
    _C.forward(input.contiguous(), dense, dim, log, torch.get_num_threads())
    return output.copy_(dense)


def kernel_backward(
    log: bool, grad_output: Tensor, output: Tensor, dim: Dims, input_dtype: torch.dtype | None = None
) -> Tensor:
    grad_input = empty_grad_input(grad_output, output, input_dtype)
    if output.dim() <= _C.MAX_GROUPS:
        _C.backward(grad_output, output, grad_input, dim, log, torch.get_num_threads())
        return grad_input
    dense = torch.empty(grad_input.shape, dtype=grad_input.dtype, device=grad_input.device)
    _C.backward(grad_output.contiguous(), output.contiguous(), dense, dim, log, torch.get_num_threads())
    return grad_input.copy_(dense)


# ---- gradients


@contextmanager
def keep_forward_mode() -> Iterator[None]:
    """A Function switches forward mode off for its forward and jvp, and gradients for its forward.

    The torch.func transforms around the one at work would feel that: the same call is still to reach them.
    """
    with forward_ad._set_fwd_grad_enabled(True):
        yield


def below_autograd(operator: Operator, *arguments: Any) -> Tensor:
    """Go on with an operator from its autograd kernel."""
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def primal(tensor: Tensor) -> Tensor:
    """The tensor without its tangent at the level of the transform at work."""
    return forward_ad.unpack_dual(tensor, level=0).primal  # type: ignore[no-untyped-call, no-any-return]


def summed(tensor: Tensor, dims: Dims) -> Tensor:
    return tensor.sum(list(dims), keepdim=True)


Call = tuple[Dims, torch.dtype | None, bool]  # dim, the input's dtype, log


class Normalize(torch.autograd.Function):
    """Records what softmax and log_softmax have computed. The output comes in a tuple: it is no input."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, computed: tuple[Tensor, Call]) -> Tensor:
        output, ctx.call = computed
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (output,) = ctx.saved_tensors
        dims, input_dtype, log = ctx.call
        grad_input = None
        if not torch.compiler.is_dynamo_compiling():
            grad_input = _C.plain_backward(grad, output, dims, input_dtype, log)
        if grad_input is None:
            grad_input = BACKWARD[log](grad, output, dims, input_dtype)
        return grad_input, None

    @staticmethod
    @keep_forward_mode()
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        (output,) = ctx.saved_tensors
        dims, _, log = ctx.call
        tangent = tangent.to(output.dtype)
        if log:
            return tangent - summed(output.exp() * tangent, dims)
        return BACKWARD[False](tangent, output, dims)  # the Jacobian of softmax is symmetric


class PlainNormalize(Normalize):
    """The same for plain calls, which take no tangents."""

    forward = staticmethod(_C.record_forward)


# apply() looks for these in one class after the other, past Python's cache: it finds them in the first
for _name in ("setup_context", "clear_saved_tensors_on_access", "boxed_grads_call"):
    if hasattr(Normalize, _name):
        setattr(PlainNormalize, _name, getattr_static(Normalize, _name))


class NormalizeGradient(torch.autograd.Function):
    """Gradients of softmax and log_softmax, themselves differentiable.

    With p the probabilities and ⟨·⟩ the sum over dims, softmax sends p·(g - ⟨g·p⟩) back and log_softmax g - p·⟨g⟩.
    """

    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, output: Tensor, computed: tuple[Tensor, Dims, torch.dtype | None, bool]
    ) -> Tensor:
        grad_input, ctx.dims, ctx.input_dtype, ctx.log = computed
        ctx.save_for_backward(grad, output)
        ctx.save_for_forward(grad, output)
        return grad_input

    @staticmethod
    def backward(ctx: Any, grad_input_grad: Tensor) -> tuple[Tensor | None, ...]:
        grad, output = ctx.saved_tensors
        total = partial(summed, dims=ctx.dims)
        v = grad_input_grad.to(output.dtype)
        if ctx.log:
            p = output.exp()
            grad_grad, output_grad = v - total(v * p), -v * p * total(grad)
        else:
            grad_grad = BACKWARD[False](v, output, ctx.dims)
            output_grad = v * (grad - total(grad * output)) - grad * total(v * output)
        return grad_grad, output_grad, None

    @staticmethod
    @keep_forward_mode()
    def jvp(ctx: Any, grad_tangent: Tensor, output_tangent: Tensor, *_: None) -> Tensor:
        grad, output = (primal(saved) for saved in ctx.saved_tensors)
        total = partial(summed, dims=ctx.dims)
        if ctx.log:
            tangent = grad_tangent - output.exp() * (total(grad_tangent) + output_tangent * total(grad))
        else:
            tangent = BACKWARD[False](grad_tangent, output, ctx.dims)
            tangent = tangent + output_tangent * (grad - total(grad * output)) - output * total(grad * output_tangent)
        return tangent.to(ctx.input_dtype or output.dtype)


def apply_of(function: type[torch.autograd.Function]) -> Operator:
    """What records the Function at the level of torch.func that is at work.

    Function.apply itself would start over at the innermost level. That is for what users call; an autograd kernel is
    called at each level in turn.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]


_normalize = apply_of(Normalize)
record_plain = apply_of(PlainNormalize)
_normalize_gradient = apply_of(NormalizeGradient)


def _autograd_forward(log: bool, input: Tensor, dim: Dims, dtype: torch.dtype | None = None) -> Tensor:
    output = below_autograd(FORWARD[log], input, dim, dtype)
    with enable_single_level_autograd_function():
        return _normalize(input, (output, (tuple(dim), input.dtype, log)))


def _autograd_backward(
    log: bool, grad_output: Tensor, output: Tensor, dim: Dims, input_dtype: torch.dtype | None = None
) -> Tensor:
    grad_input = below_autograd(BACKWARD[log], grad_output, output, dim, input_dtype)
    with enable_single_level_autograd_function():
        return _normalize_gradient(grad_output, output, (grad_input, dim, input_dtype, log))


# ---- torch.vmap


def _batched(
    operator: Operator, tensors: int, info: Any, in_dims: Sequence[int | None], *arguments: Any
) -> tuple[Tensor, int]:
    """Run an operator whose first `tensors` arguments are tensors, and whose next is dims, on a batch."""
    batches = [
        tensor.expand(info.batch_size, *tensor.shape) if batch_dim is None else tensor.movedim(batch_dim, 0)
        for tensor, batch_dim in zip(arguments[:tensors], in_dims, strict=False)
    ]
    rank = batches[0].dim() - 1
    if rank == 0:
        batches = [batch.unsqueeze(1) for batch in batches]
    dims = [dim + 1 for dim in wrap_dims(arguments[tensors], rank)]
    result = operator(*batches, dims, *arguments[tensors + 1 :])
    return result.squeeze(1) if rank == 0 else result, 0


# ---- autocast


def _autocast_forward(log: bool, input: Tensor, dim: Dims, dtype: torch.dtype | None = None) -> Tensor:
    """As torch.softmax on CUDA: computed and returned in float32, unless dtype says otherwise or input is float64."""
    if dtype is None and input.dtype != torch.float64:
        dtype = torch.float32
    with torch.autocast("cuda", enabled=False):
        return FORWARD[log](input, dim, dtype)


# ---- registration

# (a build with CUDA kernels also works beside a torch without CUDA)
DEVICES = ("CPU", "CUDA") if _C.HAS_CUDA and torch.version.cuda is not None else ("CPU",)

for _log, _name in ((False, "softmax"), (True, "log_softmax")):
    for _device in DEVICES:
        library.impl(_name, partial(kernel_forward, _log), _device)
        library.impl(f"{_name}_backward", partial(kernel_backward, _log), _device)
    library.impl(_name, partial(_autograd_forward, _log), "Autograd")
    library.impl(f"{_name}_backward", partial(_autograd_backward, _log), "Autograd")
    library.impl(_name, partial(_autocast_forward, _log), "AutocastCUDA")
    torch.library.register_fake(f"ndsoftmax::{_name}", _fake_forward, lib=library)
    torch.library.register_fake(f"ndsoftmax::{_name}_backward", _fake_backward, lib=library)
    torch.library.register_vmap(f"ndsoftmax::{_name}", partial(_batched, FORWARD[_log], 1), lib=library)
    torch.library.register_vmap(f"ndsoftmax::{_name}_backward", partial(_batched, BACKWARD[_log], 2), lib=library)
