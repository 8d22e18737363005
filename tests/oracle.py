"""What softmax and its gradients are, in float64 and without torch.softmax, and how far a result is from them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

Dims = int | tuple[int, ...]


def forward(x: Tensor, dim: Dims, *, log: bool) -> Tensor:
    """softmax or log_softmax of x in float64. Differentiable, so that autograd is the oracle of backward."""
    z = x.double()
    if z.numel() == 0:
        return z
    shifted = z - z.detach().amax(dim, keepdim=True)
    exponentials = shifted.exp()
    total = exponentials.sum(dim, keepdim=True)
    return shifted - total.log() if log else exponentials / total


def masked_forward(
    x: Tensor,
    dim: Dims,
    included: Tensor,
    bias: Tensor | None = None,
    scale: float = 1,
    *,
    log: bool,
    zero: bool = True,
) -> Tensor:
    """The same over the included elements of x · scale + bias only; differentiable, also where others are NaN.

    A row without any z but -inf becomes zero (log: -inf), or NaN throughout; excluded elements are zero (log: -inf).
    """
    z = x.double() * scale + (0 if bias is None else bias.double())
    if z.numel() == 0:
        return z
    z = torch.where(included, z, -torch.inf)
    largest = z.detach().amax(dim, keepdim=True)
    dead = largest == -torch.inf
    shifted = z - torch.where(dead, 0, largest)
    exponentials = shifted.exp()
    total = torch.where(dead, 1, exponentials.sum(dim, keepdim=True))
    y = shifted - total.log() if log else exponentials / total
    y = torch.where(included & ~dead, y, -torch.inf if log else 0.0)
    return y if zero else torch.where(dead, torch.nan, y)


def causal(rows: int, columns: int, kind: bool | str) -> Tensor:
    """Which elements are included."""
    diagonal = columns - rows if kind == "lower_right" else 0
    return torch.arange(columns) <= torch.arange(rows)[:, None] + diagonal


def backward(grad_output: Tensor, output: Tensor, dim: Dims, *, log: bool) -> Tensor:
    """The gradient of the input in float64, from the gradient of the output and the output itself."""
    grad, y = grad_output.double(), output.double()
    if log:
        return grad - y.exp() * grad.sum(dim, keepdim=True)
    return y * (grad - (grad * y).sum(dim, keepdim=True))


def magnitude(grad_output: Tensor, output: Tensor, dim: Dims, *, log: bool) -> Tensor:
    """The terms of `backward` added up without cancelling: rounding errors are small against this."""
    grad, y = grad_output.double().abs(), output.double()
    if log:
        return grad + y.exp() * (1 + y.abs()) * grad.sum(dim, keepdim=True)
    return y.abs() * (grad + (grad * y.abs()).sum(dim, keepdim=True))


def ulp(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbouring numbers of `dtype` at `exact` (float64)."""
    limits = torch.finfo(dtype)
    power_of_two = torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - 1)
    return limits.eps * torch.where(exact == 0, 0.0, power_of_two).clamp(min=limits.tiny)


def errors(got: Tensor, exact: Tensor, *, log: bool) -> Tensor:
    """The distance of every element from `exact` in ulp, for log_softmax in units of eps · max(1, |exact|).

    NaN and infinities count as right where `exact`, rounded to the dtype of `got`, has the same; elsewhere as infinity.
    """
    unit = torch.finfo(got.dtype).eps * exact.abs().clamp(min=1) if log else ulp(exact, got.dtype)
    same = (got.isinf() & (got == exact.to(got.dtype))) | (got.isnan() & exact.isnan())
    distance = ((got.double() - exact) / unit).abs().nan_to_num(nan=torch.inf)
    return torch.where(same, 0.0, distance)


def true_errors(got: Tensor, x: Tensor, dim: int, *, log: bool) -> Tensor:
    """:func:`errors` of softmax or log_softmax of x. For float64, float64 is no oracle: NumPy's long double is."""
    if x.dtype != torch.float64:
        return errors(got, forward(x, dim, log=log), log=log)
    z = x.cpu().numpy().astype(np.longdouble)
    shifted = z - z.max(dim, keepdims=True)
    total = np.exp(shifted).sum(dim, keepdims=True)
    exact = shifted - np.log(total) if log else np.exp(shifted) / total
    rounded = torch.from_numpy(exact.astype(np.float64))
    unit = torch.finfo(got.dtype).eps * rounded.abs().clamp(min=1) if log else ulp(rounded, got.dtype)
    distance = np.abs(got.cpu().numpy().astype(np.longdouble) - exact)
    return torch.from_numpy(distance.astype(np.float64)) / unit


def assert_forward(got: Tensor, x: Tensor, dim: Dims, *, log: bool) -> None:
    """`got` is softmax or log_softmax of x, up to the rounding that a computation in its dtype cannot avoid."""
    exact = forward(x, dim, log=log)
    assert got.shape == exact.shape
    if got.numel() == 0:
        return
    if got.dtype in (torch.float16, torch.bfloat16):
        allowed = torch.ones_like(exact)  # computed in float32, rounded once
    else:
        # Adding n numbers one after the other drifts by some √n roundings, and rounding x - max changes its
        # exponential by up to an ulp for each unit of the difference.
        difference = (x.double() - x.double().amax(dim, keepdim=True)).abs().nan_to_num(0, posinf=0)
        count = exact.numel() / exact.sum(dim, keepdim=True).numel()
        allowed = 8 + 2 * count**0.5 + (0 if log else 1) * difference
    assert_within(errors(got, exact, log=log), allowed, got, exact)


def assert_close(got: Tensor, exact: Tensor, magnitude: Tensor, eps: float | None = None) -> None:
    """`got` is `exact` up to rounding errors (of relative size eps) of terms of the given magnitude."""
    limits = torch.finfo(got.dtype)
    allowed = 16 * (limits.eps if eps is None else eps) * magnitude
    allowed.add_(exact.abs(), alpha=limits.eps).add_(limits.tiny)  # in place: memory for large tensors takes longest
    error = (got.double() - exact).abs_().masked_fill_(got == exact.to(got.dtype), 0)  # infinite where that rounds so
    assert got.shape == exact.shape
    assert_within(error, allowed, got, exact)


def assert_within(error: Tensor, allowed: Tensor, got: Tensor, exact: Tensor) -> None:
    wrong = ~(error <= allowed)
    if wrong.any():
        worst = int((error / allowed).where(wrong, 0).argmax())
        where = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), got.shape))
        raise AssertionError(
            f"{int(wrong.sum())} of {got.numel()} elements are off, worst at {where}: got {got[where]:.9g}, "
            f"should be {exact[where]:.9g}; error {error[where]:.3g}, allowed {allowed[where]:.3g}"
        )
