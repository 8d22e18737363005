"""softmax and log_softmax as users call them: a short path for the plain ones, the operators for all others."""

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,  # which wrap tensors that are made meanwhile
    _is_tracing,
    _len_torch_dispatch_stack,
)
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from typing_extensions import Unpack  # which torch brings

from ndsoftmax import _C, _masked
from ndsoftmax._arguments import (
    as_dims,
    check_memory,
    check_out,
    check_tensor,
    is_fused,
    is_sure,
    result_dtype,
    wrap_dims,
)
from ndsoftmax._arrays import as_tensor, check_array, is_array, like_array
from ndsoftmax._C import plain_forward
from ndsoftmax._library import FORWARD, record_plain
from ndsoftmax._masked import Causal, FullyMasked, Masking, as_masking

Dim = int | Sequence[int]


class Fused(TypedDict, total=False):
    """What a call fuses. Parameters of their own would cost plain calls 20 ns each: Python looks for their defaults."""

    mask: Tensor | None
    where: Tensor | None
    bias: Tensor | None
    scale: float
    causal: Causal
    fully_masked: FullyMasked | None
    axis: Dim  # as NumPy calls dim, and torch.softmax takes it, too


_DEFAULTS: dict[str, Any] = as_masking.__kwdefaults__  # type: ignore[assignment]  # what takes them has them
_KEYWORDS = tuple(_DEFAULTS)
_NOTHING: dict[str, Any] = {}


def _given(function: str, fused: Mapping[str, object]) -> dict[str, Any]:
    """Without what is as by default. (A tensor could not be compared with a number in time.)"""
    for name in fused:
        if name not in _KEYWORDS:
            raise TypeError(
                f"{function}() got an unexpected keyword argument {name!r}; there are {', '.join(_KEYWORDS)} and out"
            )
    return {name: value for name, value in fused.items() if not _is_default(name, value)}


def _dim_of(function: str, dim: Dim, axis: Dim) -> Dim:
    if type(dim) is not int or dim != -1:
        raise TypeError(f"{function}() takes either dim or axis, but got dim={dim} and axis={axis}")
    return axis


def _is_default(name: str, value: object) -> bool:
    if name == "scale":
        return type(value) is float and is_sure(value == 1)
    return value is (False if name == "causal" else None)


def softmax(
    input: Tensor,
    dim: Dim = -1,
    dtype: torch.dtype | None = None,
    *,
    out: Tensor | None = None,
    **fused: Unpack[Fused],
) -> Tensor:
    """Softmax of `input` over `dim`: ``exp(x) / sum(exp(x))``, computed without overflow.

    With masks, only over the included elements, as if the others had been removed: those get 0, send no gradient back,
    and what stands in them, NaN included, shows nowhere.

    Parameters
    ----------
    input : Tensor
        Any shape, any strides; float16, bfloat16, float32 or float64, or anything torch casts when `dtype` is given.
    dim : int or sequence of int
        The dimension to normalize over, or several: then over their product. It may be given as `axis`.
    dtype : torch.dtype, optional
        `input` is cast to it first. From 16-bit to float32 the cast is part of the kernel.
    mask : Tensor, optional
        bool; True excludes, as in ``masked_fill`` and ``key_padding_mask``. Broadcasts against `input`.
    where : Tensor, optional
        bool; True includes, as in NumPy and JAX, ``torch.masked.softmax(mask=)`` and a bool ``attn_mask`` of
        ``scaled_dot_product_attention``. Broadcasts against `input`. Either this or `mask`.
    bias : Tensor, optional
        Added to ``input * scale`` on the way. Of `input`'s dtype, or float32 with a 16-bit one; broadcasts against it.
    scale : float
        `input` is multiplied by it on the way.
    causal : bool or {"upper_left", "lower_right"}
        Excludes what lies past a diagonal through rows (dim -2) and columns (dim -1), which must be `dim`: column j of
        row i where j > i (True, "upper_left"), or where the last column of the last row is on the diagonal
        ("lower_right"). Columns past it are not read (on the CPU: where rows are contiguous).
    fully_masked : {"nan", "zero"}, optional
        What a row gets of whose elements none is included, or only -inf. By default "zero" where `mask`, `where`,
        `bias` or `causal` is given, else "nan", as torch.softmax.
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
        `input` is not a strided, floating-point tensor and `dtype` is not given, `dim` is not an int, a mask is not
        bool, `bias` has another dtype, or `scale` is no number.
    ValueError
        `dim` is empty, both `mask` and `where` are given, `causal` goes with another `dim` than -1 or fewer than two
        dimensions, or a word is unknown.
    RuntimeError
        A dim is repeated, the device has no kernels, a mask or `bias` is on another device or does not broadcast, or
        `out` has another shape, dtype or device, overlaps itself or a part of an argument, or something requires grad
        while `out` is given.

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
    >>> ndsoftmax.softmax(x, mask=torch.tensor([False, True]))
    tensor([[1., 0.],
            [1., 0.]])
    >>> ndsoftmax.softmax(x, causal=True)
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    given = _NOTHING
    if fused:
        if "axis" in fused:
            return softmax(input, _dim_of("softmax", dim, fused.pop("axis")), dtype, out=out, **fused)
        given = _given("softmax", fused)
    result = None
    if given:
        result = _short_way(False, input, dim, dtype, out, **given)
    elif not is_dynamo_compiling():
        result = plain_forward(input, dim, dtype, False, record_plain, out)
    return _long_way(False, input, dim, dtype, given, out) if result is None else result


def log_softmax(
    input: Tensor,
    dim: Dim = -1,
    dtype: torch.dtype | None = None,
    *,
    out: Tensor | None = None,
    **fused: Unpack[Fused],
) -> Tensor:
    """Logarithm of the softmax of `input` over `dim`: ``x - log(sum(exp(x)))``, computed without overflow.

    Parameters, result and errors are those of :func:`softmax`; excluded elements get -inf.

    Examples
    --------
    >>> ndsoftmax.log_softmax(torch.tensor([0.0, 0.0, -torch.inf]))
    tensor([-0.6931, -0.6931,    -inf])
    """
    given = _NOTHING
    if fused:
        if "axis" in fused:
            return log_softmax(input, _dim_of("log_softmax", dim, fused.pop("axis")), dtype, out=out, **fused)
        given = _given("log_softmax", fused)
    result = None
    if given:
        result = _short_way(True, input, dim, dtype, out, **given)
    elif not is_dynamo_compiling():
        result = plain_forward(input, dim, dtype, True, record_plain, out)
    return _long_way(True, input, dim, dtype, given, out) if result is None else result


def _with_keywords(signature: inspect.Signature) -> inspect.Signature:
    """As inspect and help are to show it: each keyword with its default."""
    *positional, out, _ = signature.parameters.values()
    keywords = [
        out.replace(name=name, annotation=Fused.__annotations__[name], default=default)
        for name, default in _DEFAULTS.items()
    ]
    return signature.replace(parameters=[*positional, *keywords, out])


for _function in (softmax, log_softmax):
    _signature = _with_keywords(inspect.signature(_function))
    setattr(_function, "__signature__", _signature)  # noqa: B010
    _function.__annotations__ = {name: one.annotation for name, one in _signature.parameters.items()}
    _function.__annotations__["return"] = Tensor


def masked_softmax(
    input: Tensor,
    mask: Tensor,
    dim: Dim = -1,
    dtype: torch.dtype | None = None,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    causal: Causal = False,
    fully_masked: FullyMasked | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """:func:`softmax` without the elements where `mask` is True.

    Examples
    --------
    >>> ndsoftmax.masked_softmax(torch.zeros(3), torch.tensor([False, False, True]))
    tensor([0.5000, 0.5000, 0.0000])
    """
    return softmax(
        input, dim, dtype, mask=mask, bias=bias, scale=scale, causal=causal, fully_masked=fully_masked, out=out
    )


def masked_log_softmax(
    input: Tensor,
    mask: Tensor,
    dim: Dim = -1,
    dtype: torch.dtype | None = None,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    causal: Causal = False,
    fully_masked: FullyMasked | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """:func:`log_softmax` without the elements where `mask` is True.

    Examples
    --------
    >>> ndsoftmax.masked_log_softmax(torch.zeros(3), torch.tensor([False, False, True]))
    tensor([-0.6931, -0.6931,    -inf])
    """
    return log_softmax(
        input, dim, dtype, mask=mask, bias=bias, scale=scale, causal=causal, fully_masked=fully_masked, out=out
    )


def _short_way(
    log: bool,
    input: Any,
    dim: Dim,
    dtype: torch.dtype | None,
    out: Tensor | None,
    mask: Any = None,
    where: Any = None,
    scale: Any = 1.0,
    **others: Any,
) -> Tensor | None:
    """As a plain call goes, where a scale, a mask or both are all that is fused; or None."""
    if is_dynamo_compiling():  # asked here, as Dynamo may begin with this frame
        return None
    if others or type(scale) is not float or (mask is not None and where is not None):
        return None
    mask, includes = (mask, False) if where is None else (where, True)
    record = partial(_masked.record_plain, mask, includes, scale)
    return plain_forward(input, dim, dtype, log, record, out, scale, mask, includes)


def _long_way(
    log: bool, input: Any, dim: Dim, dtype: torch.dtype | None, fused: dict[str, Any], out: Tensor | None
) -> Tensor:
    function = log_softmax if log else softmax
    tensors = (input, fused.get("mask"), fused.get("where"), fused.get("bias"), out)
    if has_torch_function(tensors):
        result: Tensor = handle_torch_function(function, tensors, input, dim, dtype, **fused, out=out)
    elif is_array(input):
        check_array(input, dtype, fused.get("bias"))
        fused = {name: as_tensor(value) if is_array(value) else value for name, value in fused.items()}
        result = function(as_tensor(input), dim, dtype, **fused, out=out)
        result = like_array(result, input) if out is None else out
    else:
        result = _checked(log, input, dim, dtype, fused, out)
    return result


def _checked(
    log: bool, input: Tensor, dim: Dim, dtype: torch.dtype | None, fused: dict[str, Any], out: Tensor | None
) -> Tensor:
    dims = as_dims(dim)
    if isinstance(input, Tensor) and (input.is_nested or is_traceable_wrapper_subclass(input)):
        if fused:
            raise TypeError(f"{', '.join(fused)} do not go with a {type(input).__name__}")
        return _torchs(log, input, dims, dtype, out)
    check_tensor("input", input)
    output_dtype = result_dtype(input, dtype)
    computed_dtype = input.dtype if is_fused(input.dtype, output_dtype) else output_dtype
    # (the scale as a constant: what is a default, Dynamo traces as if it were any number, all of the frame once more)
    masking = as_masking(input, dims, computed_dtype, **{"scale": 1.0, **fused}) if fused else None
    if out is not None:
        check_out(out, input, output_dtype, None if masking is None else masking.bias)
    plain = not is_dynamo_compiling() and _are_plain(input, out, masking)
    if out is not None and (plain or _lie_in_memory(input, out, masking)):
        check_memory(out, input, *([] if masking is None else masking[:2]))
    if input.dtype != computed_dtype:
        input = input.to(computed_dtype)
        if masking is not None and masking.bias is not None and not is_fused(computed_dtype, masking.bias.dtype):
            masking = masking._replace(bias=masking.bias.to(computed_dtype))
    if out is not None and plain and out.dim() <= _C.MAX_GROUPS:
        return _into(out, log, input, dims, masking)
    if is_dynamo_compiling():
        wrap_dims(dims, input.dim())  # what an operator raises, Dynamo may wrap
    result = _result(plain, log, input, dims, dtype, masking)
    return result if out is None else out.copy_(result)


def _are_plain(input: Tensor, out: Tensor | None, masking: Masking | None) -> bool:
    """Whether kernels may be called past torch's dispatcher. Most plain calls were, before they came here.

    Also where a gradient is needed: what is not written to `out` can be recorded.
    """
    beside = [out, *(() if masking is None else masking[:2])]
    given = [tensor for tensor in beside if tensor is not None]
    return (out is not None or masking is not None) and all(
        _C.are_plain(input, one, recorded=out is None) for one in given or [input]
    )


def _lie_in_memory(input: Tensor, out: Tensor, masking: Masking | None) -> bool:
    """Whether memory can be compared though the call is not plain, as under a profiler."""
    if is_dynamo_compiling() or _len_torch_dispatch_stack() or _is_tracing() or _are_functorch_transforms_active():
        return False
    given = [input, out, *(() if masking is None else masking[:2])]
    return all(
        one is None or (type(one) in (Tensor, Parameter) and not one.is_meta and not torch._is_functional_tensor(one))
        for one in given
    )


def _result(
    plain: bool, log: bool, input: Tensor, dims: tuple[int, ...], dtype: torch.dtype | None, masking: Masking | None
) -> Tensor:
    if masking is None:
        return FORWARD[log](input, dims, dtype)
    mask, bias, options = masking
    if plain and not _are_functorch_transforms_active():
        output = torch.empty_like(input, dtype=dtype)
        _masked.into_forward(output, log, input, mask, bias, dims, options)
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return output
        needs_grad = input.requires_grad or (bias is not None and bias.requires_grad)
        return _masked.record(input, mask, bias, (output, dims, options, log)) if needs_grad else output
    return _masked.FORWARD[log](input, mask, bias, dims, dtype, *options)


def _into(out: Tensor, log: bool, input: Tensor, dims: tuple[int, ...], masking: Masking | None) -> Tensor:
    if masking is None:
        _C.forward(input, out, dims, log, torch.get_num_threads())
    else:
        _masked.into_forward(out, log, input, masking.mask, masking.bias, dims, masking.options)
    torch.autograd.graph.increment_version(out)
    return out


def _torchs(log: bool, input: Tensor, dims: tuple[int, ...], dtype: torch.dtype | None, out: Tensor | None) -> Tensor:
    """torch's own, for tensors of tensors (DTensor, nested tensors, ...): they know its operators, not ours."""
    if len(dims) != 1:
        raise TypeError(f"dim must be one int for a {type(input).__name__}, but is {dims}")
    function = torch.log_softmax if log else torch.softmax
    return function(input, dims[0], dtype) if out is None else function(input, dims[0], dtype, out=out)


__all__ = ["log_softmax", "masked_log_softmax", "masked_softmax", "softmax"]
