"""The operators torch.ops.ndsoftmax.masked_*: softmax over a part of the elements, of input · scale + bias.

As the plain ones in _library.py: kernels, shapes, gradients, batches and autocast. `mask` excludes where it is True, or
includes where `where` is set; `causal` is "", "upper_left" or "lower_right"; `zero` says what rows get of which nothing
is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch._functorch.utils import enable_single_level_autograd_function
from torch.compiler import is_dynamo_compiling

from ndsoftmax import _C
from ndsoftmax._arguments import (
    as_causal,
    as_scale,
    check_bias,
    check_causal,
    check_mask,
    check_one_mask,
    dead_rows_are_zero,
    wrap_dims,
)
from ndsoftmax._library import (
    DEVICES,
    Dims,
    Operator,
    apply_of,
    below_autograd,
    empty_grad_input,
    empty_output,
    keep_forward_mode,
    library,
    primal,
    summed,
)

for _name in ("masked_softmax", "masked_log_softmax"):
    library.define(
        f"{_name}(Tensor input, Tensor? mask, Tensor? bias, int[] dim, ScalarType? dtype=None, bool where=False, "
        'Scalar scale=1.0, str causal="", bool zero=True) -> Tensor',
        tags=torch.Tag.pt2_compliant_tag,
    )
    library.define(
        f"{_name}_backward(Tensor grad_output, Tensor output, Tensor? mask, int[] dim, ScalarType? input_dtype=None, "
        'bool where=False, Scalar scale=1.0, str causal="", bool zero=True) -> Tensor',
        tags=torch.Tag.pt2_compliant_tag,
    )

# by `log`
FORWARD: dict[bool, Operator] = {
    False: torch.ops.ndsoftmax.masked_softmax.default,
    True: torch.ops.ndsoftmax.masked_log_softmax.default,
}
BACKWARD: dict[bool, Operator] = {
    False: torch.ops.ndsoftmax.masked_softmax_backward.default,
    True: torch.ops.ndsoftmax.masked_log_softmax_backward.default,
}


class Options(NamedTuple):
    """What is fused and no tensor."""

    where: bool = False
    scale: float = 1.0
    causal: str = ""
    zero: bool = True


class Masking(NamedTuple):
    """What is fused, once it has been found to be right."""

    mask: Tensor | None
    bias: Tensor | None
    options: Options


Causal = bool | Literal["upper_left", "lower_right"]
FullyMasked = Literal["nan", "zero"]


def as_masking(
    input: Tensor,
    dims: tuple[int, ...],
    computed_dtype: torch.dtype,
    *,
    mask: Any = None,
    where: Any = None,
    bias: Any = None,
    scale: Any = 1.0,
    causal: Any = False,
    fully_masked: Any = None,
) -> Masking:
    """The arguments of softmax, for an input that is cast to `computed_dtype` first; raises where one is wrong."""
    check_one_mask(mask, where)
    scale, causal = as_scale(scale), as_causal(causal)
    zero = dead_rows_are_zero(fully_masked, not (mask is None and where is None and bias is None and not causal))
    check_causal(causal, dims, input.dim())
    if mask is not None:
        check_mask("mask", mask, input)
    if where is not None:
        check_mask("where", where, input)
    if bias is not None:
        check_bias(bias, input, computed_dtype)
    return Masking(mask if where is None else where, bias, Options(where is not None, scale, causal, zero))


# ---- results and kernels


def _checked(input: Tensor, mask: Tensor | None, bias: Tensor | None, dim: Dims, causal: str) -> None:
    wrap_dims(dim, input.dim())
    if mask is not None:
        check_mask("mask", mask, input)
    if bias is not None:
        check_bias(bias, input, input.dtype)
    check_causal(causal, dim, input.dim())


def _fake_forward(
    input: Tensor, mask: Tensor | None, bias: Tensor | None, dim: Dims, dtype: torch.dtype | None = None, *options: Any
) -> Tensor:
    _checked(input, mask, bias, dim, Options(*options).causal)
    return empty_output(input, dtype)


def _fake_backward(
    grad_output: Tensor,
    output: Tensor,
    mask: Tensor | None,
    dim: Dims,
    input_dtype: torch.dtype | None = None,
    *options: Any,
) -> Tensor:
    _checked(output, mask, None, dim, Options(*options).causal)
    return empty_grad_input(grad_output, output, input_dtype)


def kernel_forward(
    log: bool,
    input: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    dim: Dims,
    dtype: torch.dtype | None = None,
    where: bool = False,
    scale: float = 1.0,
    causal: str = "",
    zero: bool = True,
) -> Tensor:
    _checked(input, mask, bias, dim, causal)
    output = empty_output(input, dtype)
    into_forward(output, log, input, mask, bias, dim, Options(where, scale, causal, zero))
    return output


def into_forward(
    output: Tensor,
    log: bool,
    input: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    dim: Dims,
    options: Options,
) -> None:
    """Write what kernel_forward returns, for arguments that have been found to be right."""
    threads = torch.get_num_threads()
    if input.dim() <= _C.MAX_GROUPS:
        _C.masked_forward(input, output, mask, bias, dim, log, *options, threads)
        return
    # Kernels step through no more dimensions than that unless they merge: contiguous ones do.
    dense = torch.empty(output.shape, dtype=output.dtype, device=output.device)
    mask, bias = (_expanded(one, input) for one in (mask, bias))
    _C.masked_forward(input.contiguous(), dense, mask, bias, dim, log, *options, threads)
    output.copy_(dense)


def kernel_backward(
    log: bool,
    grad_output: Tensor,
    output: Tensor,
    mask: Tensor | None,
    dim: Dims,
    input_dtype: torch.dtype | None = None,
    where: bool = False,
    scale: float = 1.0,
    causal: str = "",
    zero: bool = True,
) -> Tensor:
    _checked(output, mask, None, dim, causal)
    grad_input = empty_grad_input(grad_output, output, input_dtype)
    options, threads = (where, scale, causal, zero), torch.get_num_threads()
    if output.dim() <= _C.MAX_GROUPS:
        _C.masked_backward(grad_output, output, grad_input, mask, dim, log, *options, threads)
        return grad_input
    dense = torch.empty(grad_input.shape, dtype=grad_input.dtype, device=grad_input.device)
    grad_output, mask = grad_output.contiguous(), _expanded(mask, output)
    _C.masked_backward(grad_output, output.contiguous(), dense, mask, dim, log, *options, threads)
    return grad_input.copy_(dense)


def _expanded(tensor: Tensor | None, input: Tensor) -> Tensor | None:
    return None if tensor is None else tensor.expand(input.shape).contiguous()


# ---- gradients


def _living(output: Tensor, mask: Tensor | None, dims: Dims, log: bool, options: Options) -> Tensor:
    """Which elements have a derivative: included ones, of rows of which something is left."""
    living = (output != (-torch.inf if log else 0)).any(list(dims), keepdim=True)
    if mask is not None:
        living = living & (mask if options.where else ~mask)
    if options.causal:
        rows, columns = output.shape[-2:]
        diagonal = columns - rows if options.causal == "lower_right" else 0
        living = living & torch.ones(rows, columns, dtype=torch.bool, device=output.device).tril(diagonal)
    return living


def _summed(gradient: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """`gradient` added up, in `dtype`, over the dimensions along which `shape` was broadcast."""
    new = gradient.dim() - len(shape)
    stretched = [new + axis for axis, size in enumerate(shape) if size == 1 and gradient.size(new + axis) != 1]
    axes = [*range(new), *stretched]
    return gradient.sum(axes, dtype=dtype).reshape(shape) if axes else gradient


def backward_of(log: bool, grad: Tensor, output: Tensor, mask: Tensor | None) -> Callable[..., Tensor]:
    """The operator, or its kernel where torch's dispatcher would do nothing but run it."""
    plain = not is_dynamo_compiling() and not _are_functorch_transforms_active() and _C.are_plain(grad, output)
    if plain and (mask is None or _C.are_plain(mask, output)):
        return partial(kernel_backward, log)
    return BACKWARD[log]


class MaskedNormalize(torch.autograd.Function):
    """masked_softmax and masked_log_softmax, differentiable with respect to input and bias."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, mask: Tensor | None, bias: Tensor | None, computed: tuple[Tensor, Dims, Options, bool]
    ) -> Tensor:
        output, ctx.dims, ctx.options, ctx.log = computed
        ctx.save_for_backward(output, mask)
        ctx.save_for_forward(output, mask)
        ctx.input_dtype = input.dtype
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        output, mask = ctx.saved_tensors
        where, scale, causal, zero = ctx.options
        backward = partial(backward_of(ctx.log, grad, output, mask), grad, output, mask, ctx.dims)
        grad_input = grad_bias = None
        if ctx.needs_input_grad[2]:  # the bias is added to input · scale: its gradient is that of their sum
            shape, dtype = ctx.bias
            grad_sum = backward(None, where, 1.0, causal, zero)
            grad_bias = _summed(grad_sum, shape, torch.promote_types(grad_sum.dtype, dtype)).to(dtype)
            if scale == 1:
                grad_input = grad_sum.to(ctx.input_dtype)
        if grad_input is None and ctx.needs_input_grad[0]:  # (what is yet to be scaled, 16 bits may not hold)
            grad_input = backward(ctx.input_dtype, where, scale, causal, zero)
        return grad_input, None, grad_bias, None

    @staticmethod
    @keep_forward_mode()
    def jvp(ctx: Any, tangent: Tensor | None, _mask: None, bias_tangent: Tensor | None, *_: None) -> Tensor:
        output, mask = ctx.saved_tensors
        moved = torch.zeros_like(output)
        if tangent is not None:
            moved = moved + tangent.to(output.dtype) * ctx.options.scale
        if bias_tangent is not None:
            moved = moved + bias_tangent.to(output.dtype)
        living = _living(output, mask, ctx.dims, ctx.log, ctx.options)
        moved = torch.where(living, moved, 0)
        if ctx.log:
            return torch.where(living, moved - summed(torch.where(living, output.exp(), 0) * moved, ctx.dims), 0)
        options = ctx.options._replace(scale=1.0)
        return BACKWARD[False](moved, output, mask, ctx.dims, None, *options)  # symmetric, as in softmax


class MaskedNormalizeGradient(torch.autograd.Function):
    """Gradients of the above, themselves differentiable: the formulas of NormalizeGradient over what is living."""

    @staticmethod
    def forward(
        ctx: Any,
        grad: Tensor,
        output: Tensor,
        mask: Tensor | None,
        computed: tuple[Tensor, Dims, torch.dtype | None, Options, bool],
    ) -> Tensor:
        grad_input, ctx.dims, ctx.input_dtype, ctx.options, ctx.log = computed
        ctx.save_for_backward(grad, output, mask)
        ctx.save_for_forward(grad, output, mask)
        return grad_input

    @staticmethod
    def backward(ctx: Any, grad_input_grad: Tensor) -> tuple[Tensor | None, ...]:
        grad, output, mask = ctx.saved_tensors
        total = partial(summed, dims=ctx.dims)
        living = _living(output, mask, ctx.dims, ctx.log, ctx.options)
        v = torch.where(living, grad_input_grad.to(output.dtype) * ctx.options.scale, 0)
        grad = torch.where(living, grad, 0)
        if ctx.log:
            p = torch.where(living, output.exp(), 0)
            grad_grad, output_grad = torch.where(living, v - total(v * p), 0), -v * p * total(grad)
        else:
            y = torch.where(living, output, 0)
            grad_grad = y * (v - total(v * y))
            output_grad = v * (grad - total(grad * y)) - grad * total(v * y)
        return grad_grad, output_grad, None, None

    @staticmethod
    @keep_forward_mode()
    def jvp(ctx: Any, grad_tangent: Tensor | None, output_tangent: Tensor | None, *_: None) -> Tensor:
        grad, output, mask = (primal(saved) if saved is not None else None for saved in ctx.saved_tensors)
        assert grad is not None
        assert output is not None
        total = partial(summed, dims=ctx.dims)
        living = _living(output, mask, ctx.dims, ctx.log, ctx.options)
        masked = [
            torch.zeros_like(output) if one is None else torch.where(living, one, 0)
            for one in (grad, grad_tangent, output_tangent)
        ]
        grad, grad_tangent, output_tangent = masked
        if ctx.log:
            p = torch.where(living, output.exp(), 0)
            tangent = grad_tangent - p * (total(grad_tangent) + output_tangent * total(grad))
        else:
            y = torch.where(living, output, 0)
            tangent = y * (grad_tangent - total(grad_tangent * y))
            tangent = tangent + output_tangent * (grad - total(grad * y)) - y * total(grad * output_tangent)
        tangent = torch.where(living, tangent * ctx.options.scale, 0)
        return tangent.to(ctx.input_dtype or output.dtype)


record = apply_of(MaskedNormalize)


def record_plain(
    mask: Tensor | None,
    where: bool,
    scale: float,
    input: Tensor,
    computed: tuple[Tensor, tuple[Dims, torch.dtype, bool]],
) -> Tensor:
    """Of what plain_forward() computed."""
    output, (dims, _, log) = computed
    options = Options(where, scale, zero=mask is not None)
    recorded: Tensor = record(input, mask, None, (output, dims, options, log))
    return recorded


_masked_normalize_gradient = apply_of(MaskedNormalizeGradient)


def _autograd_forward(
    log: bool,
    input: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    dim: Dims,
    dtype: torch.dtype | None = None,
    *options: Any,
) -> Tensor:
    output = below_autograd(FORWARD[log], input, mask, bias, dim, dtype, *options)
    with enable_single_level_autograd_function():
        return record(input, mask, bias, (output, dim, Options(*options), log))


def _autograd_backward(
    log: bool,
    grad_output: Tensor,
    output: Tensor,
    mask: Tensor | None,
    dim: Dims,
    input_dtype: torch.dtype | None = None,
    *options: Any,
) -> Tensor:
    grad_input = below_autograd(BACKWARD[log], grad_output, output, mask, dim, input_dtype, *options)
    with enable_single_level_autograd_function():
        return _masked_normalize_gradient(
            grad_output, output, mask, (grad_input, dim, input_dtype, Options(*options), log)
        )


# ---- torch.vmap


def _one_of(batch: Tensor | None, batch_dim: int | None) -> Tensor | None:
    """A tensor as one of the batch is, but for its elements."""
    if batch is None or batch_dim is None:
        return batch
    return batch.new_empty(()).expand([size for axis, size in enumerate(batch.shape) if axis != batch_dim])


def _batched(
    operator: Operator, whole: int, tensors: int, info: Any, in_dims: Sequence[int | None], *arguments: Any
) -> tuple[Tensor, int]:
    """Run an operator on a batch. Its first `whole` tensors have every element; others, up to `tensors`, broadcast."""
    ones = [_one_of(*tensor) for tensor in zip(arguments[:tensors], in_dims, strict=False)]
    input = ones[whole - 1]
    assert input is not None
    mask, bias = (*ones[whole:], None)[:2]
    _checked(input, mask, bias, arguments[tensors], Options(*arguments[tensors + 2 :]).causal)
    batches = [
        tensor.expand(info.batch_size, *tensor.shape) if batch_dim is None else tensor.movedim(batch_dim, 0)
        for tensor, batch_dim in zip(arguments[:whole], in_dims, strict=False)
    ]
    rank = batches[0].dim() - 1
    if rank == 0:
        batches = [batch.unsqueeze(1) for batch in batches]
    for tensor, batch_dim in zip(arguments[whole:tensors], in_dims[whole:tensors], strict=True):
        if tensor is not None and batch_dim is not None:
            tensor = tensor.movedim(batch_dim, 0)
            missing = max(rank, 1) - (tensor.dim() - 1)
            tensor = tensor.reshape(tensor.shape[0], *(1,) * missing, *tensor.shape[1:])
        batches.append(tensor)
    dims = [dim + 1 for dim in wrap_dims(arguments[tensors], rank)]
    result = operator(*batches, dims, *arguments[tensors + 1 :])
    return result.squeeze(1) if rank == 0 else result, 0


# ---- autocast


def _autocast_forward(
    log: bool,
    input: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    dim: Dims,
    dtype: torch.dtype | None = None,
    *options: Any,
) -> Tensor:
    """As the plain operators: float32, unless dtype says otherwise or input is float64."""
    if dtype is None and input.dtype != torch.float64:
        dtype = torch.float32
    with torch.autocast("cuda", enabled=False):
        return FORWARD[log](input, mask, bias, dim, dtype, *options)


# ---- registration

for _log, _name in ((False, "masked_softmax"), (True, "masked_log_softmax")):
    for _device in DEVICES:
        library.impl(_name, partial(kernel_forward, _log), _device)
        library.impl(f"{_name}_backward", partial(kernel_backward, _log), _device)
    library.impl(_name, partial(_autograd_forward, _log), "Autograd")
    library.impl(f"{_name}_backward", partial(_autograd_backward, _log), "Autograd")
    library.impl(_name, partial(_autocast_forward, _log), "AutocastCUDA")
    torch.library.register_fake(f"ndsoftmax::{_name}", _fake_forward, lib=library)
    torch.library.register_fake(f"ndsoftmax::{_name}_backward", _fake_backward, lib=library)
    torch.library.register_vmap(f"ndsoftmax::{_name}", partial(_batched, FORWARD[_log], 1, 3), lib=library)
    torch.library.register_vmap(f"ndsoftmax::{_name}_backward", partial(_batched, BACKWARD[_log], 2, 3), lib=library)
