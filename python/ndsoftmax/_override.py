"""enable() and disable(): ndsoftmax under torch.softmax itself."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import partial, wraps
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from ndsoftmax import _C
from ndsoftmax._arguments import FLOATING, overlaps_itself, overlaps_partly
from ndsoftmax._library import DEVICES
from ndsoftmax._masked import Options, into_forward, kernel_backward

P = ParamSpec("P")
R = TypeVar("R")

_lock = threading.RLock()  # reentrant: a garbage collection may leave a block while another one is entered
_holders: list[enable] = []  # who wants torch overridden; a statement stays in it until disable()
_installed: Any = None  # the torch.library.Library that overrides torch
_kernels: list[Any] = []  # all that ever were in torch's table: other threads may still be on their way through one


class enable:  # a statement, a context manager and a decorator, as torch.no_grad
    """Put ndsoftmax under ``torch.softmax``, ``F.softmax``, ``nn.Softmax`` and all that is built on them.

    Process-wide and at once, for CPU and CUDA, forward and backward. What ndsoftmax does not take goes to torch as
    before. Results are contiguous, as torch's are.

    As a statement it holds until :func:`disable`. ``with enable():`` restores what was before; blocks may overlap, also
    in different threads. ``@enable()`` holds while the function runs. Outside of them torch's kernels answer again,
    reached through ours until :func:`disable`.

    Examples
    --------
    >>> with ndsoftmax.enable():
    ...     torch.nn.functional.softmax(torch.zeros(2), dim=0)
    tensor([0.5000, 0.5000])
    """

    def __init__(self) -> None:
        self._pending = True  # a statement, until it turns out to open a block or to decorate
        _change(_holders.append, self)

    def __enter__(self) -> enable:
        if not self._pending:
            _change(_holders.append, self)
        self._pending = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _change(_leave, self)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        _change(_leave, self)
        if any(kind(function) for kind in (isgeneratorfunction, iscoroutinefunction, isasyncgenfunction)):
            raise TypeError("@enable() takes functions; in a generator or coroutine, open a block: with enable():")

        @wraps(function)
        def enabled(*args: P.args, **kwargs: P.kwargs) -> R:
            with enable():
                return function(*args, **kwargs)

        return enabled


def disable() -> None:
    """Give ``torch.softmax`` back its own kernels, process-wide and at once, also inside blocks of :class:`enable`.

    Restores torch's dispatch table exactly. (Leaving a block only makes ours pass calls on: torch allows no change of
    its table while other threads call through it, so let no other thread be inside a softmax when you call this.)

    Examples
    --------
    >>> ndsoftmax.disable()
    """
    global _installed
    with _lock:
        _holders.clear()
        if _installed is not None:
            _installed._destroy()
            _installed = None


def _change(action: Callable[[enable], None], holder: enable) -> None:
    """Change who wants torch overridden; the first one puts our kernels into torch's dispatch table."""
    global _installed
    with _lock:
        action(holder)
        if _holders and _installed is None:
            try:
                _installed = _install()
            except BaseException:
                _holders.clear()
                raise


def _leave(holder: enable) -> None:
    if holder in _holders:  # a disable() may have come before
        _holders.remove(holder)


def _install() -> Any:
    kernels: list[tuple[str, Callable[..., Tensor]]] = [
        (overload, partial(kernel, log))
        for log, name in ((False, "_softmax"), (True, "_log_softmax"))
        for kernel, operator in ((_forward, name), (_backward, f"{name}_backward_data"))
        for overload in (operator, f"{operator}.out")
    ]
    kernels += [("_masked_softmax", _masked_forward), ("_masked_softmax_backward", _masked_backward)]
    overrides = [
        (overload, device, partial(kernel, torch.library.get_kernel(f"aten::{overload}", device)))
        for overload, kernel in kernels
        for device in DEVICES
    ]
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # overriding is what we are here for
        for overload, device, kernel in overrides:
            library.impl(overload, kernel, device, with_keyset=True)
            _kernels.append(torch.library.get_kernel(f"aten::{overload}", device))
    return library


# ---- kernels, with the signatures of aten's; `out` has the one tensor that an .out overload writes, if it is one


def _forward(log: bool, torchs: Any, keys: Any, input: Tensor, dim: int, half_to_float: bool, **out: Tensor) -> Tensor:
    dtype = torch.float32 if half_to_float else input.dtype
    if not (
        _holders and _takes(input, dim, input.dtype, dtype) and all(_fits(one, input, dtype) for one in out.values())
    ):
        return cast(Tensor, torchs.call_boxed(keys, input, dim, half_to_float, **out))
    output = next(iter(out.values()), None)
    if output is None:
        output = torch.empty_like(input, dtype=dtype, memory_format=torch.contiguous_format)
    _C.forward(input, output, (dim,), log, torch.get_num_threads())
    return output


def _backward(
    log: bool,
    torchs: Any,
    keys: Any,
    grad_output: Tensor,
    output: Tensor,
    dim: int,
    input_dtype: torch.dtype,
    **out: Tensor,
) -> Tensor:
    if not (
        _holders
        and _takes(output, dim, input_dtype, output.dtype)
        and _alike(grad_output, output)
        and all(_fits(one, output, input_dtype) and _fits(one, grad_output, input_dtype) for one in out.values())
    ):
        return cast(Tensor, torchs.call_boxed(keys, grad_output, output, dim, input_dtype, **out))
    grad_input = next(iter(out.values()), None)
    if grad_input is None:
        grad_input = torch.empty_like(output, dtype=input_dtype, memory_format=torch.contiguous_format)
    _C.backward(grad_output, output, grad_input, (dim,), log, torch.get_num_threads())
    return grad_input


# torch's kinds of masks: over rows and columns, over batch and columns, over everything
_MASK_DIMS = {0: (2, 3), 1: (0, 3)}


def _masked_forward(
    torchs: Any, keys: Any, input: Tensor, mask: Tensor, dim: int | None = None, mask_type: int | None = None
) -> Tensor:
    dim = input.dim() - 1 if dim is None else dim
    view: Tensor | None = mask
    if mask_type in _MASK_DIMS:
        square = input.dim() == 4 and input.shape[2] == input.shape[3]  # which is all that torch takes
        sizes = [input.shape[d] if d in _MASK_DIMS[mask_type] else 1 for d in range(4)] if square else []
        view = mask.view(sizes) if list(mask.shape) == [size for size in sizes if size != 1] else None
    elif mask.shape != input.shape:
        view = None
    if not (_holders and view is not None and _takes_masked(input, view, dim)):
        return cast(Tensor, torchs.call_boxed(keys, input, mask, dim, mask_type))
    output = torch.empty_like(input)
    into_forward(output, False, input, view, None, (dim,), Options(zero=False))
    return output


def _masked_backward(
    torchs: Any, keys: Any, grad_output: Tensor, output: Tensor, mask: Tensor, dim: int | None = None
) -> Tensor:
    dim = output.dim() - 1 if dim is None else dim
    if not (
        _holders and mask.shape == output.shape and _takes_masked(output, mask, dim) and _alike(grad_output, output)
    ):
        return cast(Tensor, torchs.call_boxed(keys, grad_output, output, mask, dim))
    return kernel_backward(False, grad_output, output, mask, (dim,))


def _alike(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def _takes_masked(input: Tensor, mask: Tensor, dim: int) -> bool:
    return mask.dtype == torch.bool and mask.device == input.device and _takes(input, dim, input.dtype, input.dtype)


def _takes(tensor: Tensor, dim: int, narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether this is a call that torch would not refuse and that ndsoftmax has kernels for."""
    fused = narrow == torch.float16 and wide == torch.float32 and tensor.is_cuda  # the one pair that torch fuses
    reach = max(tensor.dim(), 1)
    return wide in FLOATING and (narrow == wide or fused) and -reach <= dim < reach and tensor.dim() <= _C.MAX_GROUPS


def _fits(out: Tensor, tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether `out` can be written as it is, without a resize, while `tensor` is read."""
    return (
        (out.shape, out.dtype, out.device) == (tensor.shape, dtype, tensor.device)
        and not overlaps_itself(out)
        and not overlaps_partly(tensor, out)
    )
