"""What is measured: softmax as ndsoftmax and its peers have it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import ndsoftmax

# Forward takes (x, dim), backward (grad, y, dim), both what is fused by keyword.
Provider = Callable[..., object]

NEED_CUDA = ("quack", "liger")


def _ndsoftmax() -> tuple[Provider, Provider]:
    def backward(grad: Tensor, y: Tensor, dim: int, *, bias: Tensor | None = None, **masks: Any) -> Tensor:
        return ndsoftmax.ops.softmax_backward(grad, y, dim, **masks)

    return ndsoftmax.softmax, backward


def _torch() -> tuple[Provider, Provider]:
    def backward(
        grad: Tensor, y: Tensor, dim: int, *, bias: Tensor | None = None, scale: float = 1.0, **masks: Any
    ) -> Tensor:
        grad_input = torch._softmax_backward_data(grad, y, dim, y.dtype)
        return _of_input(grad_input, scale, _excluded(y, **masks))

    return _torch_softmax, backward


def _compile() -> tuple[Provider, Provider]:
    def backward(
        grad: Tensor, y: Tensor, dim: int, *, bias: Tensor | None = None, scale: float = 1.0, **masks: Any
    ) -> Tensor:
        grad_input = y * (grad - (grad * y).sum(dim, keepdim=True))
        return _of_input(grad_input, scale, _excluded(y, **masks))

    torch._dynamo.reset()  # forget the shapes before, or it gives up specializing
    return torch.compile(_torch_softmax, dynamic=False), torch.compile(backward, dynamic=False)


def _quack() -> tuple[Provider, Provider]:
    from quack.softmax import softmax_bwd, softmax_fwd

    return (
        lambda x, dim: softmax_fwd(_rows(x, dim)),
        lambda grad, y, dim: softmax_bwd(_rows(grad, dim), _rows(y, dim)),
    )


def _liger() -> tuple[Provider, Provider]:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    def backward(grad: Tensor, y: Tensor, dim: int) -> object:
        raise NotImplementedError("Liger's backward needs the state of its forward")

    return lambda x, dim: LigerSoftmaxFunction.apply(_rows(x, dim)), backward


def _torch_softmax(
    x: Tensor,
    dim: int,
    *,
    mask: Tensor | None = None,
    where: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float = 1.0,
    causal: bool = False,
) -> Tensor:
    """What users of torch write for the arguments that ndsoftmax.softmax has."""
    if scale != 1:
        x = x * scale
    if bias is not None:
        x = x + bias
    mask = _excluded(x, mask=mask, where=where, causal=causal)
    return torch.softmax(x if mask is None else x.masked_fill(mask, -torch.inf), dim)


def _of_input(grad_input: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """From the gradient of what softmax is taken of, in torch."""
    if mask is not None:
        grad_input = grad_input.masked_fill(mask, 0)
    return grad_input if scale == 1 else grad_input * scale


def _excluded(
    x: Tensor, *, mask: Tensor | None = None, where: Tensor | None = None, causal: bool = False
) -> Tensor | None:
    if causal:
        return _above_diagonal(x.shape[-2], x.shape[-1], x.device)
    return mask if where is None else ~where


@functools.cache
def _above_diagonal(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.ones(rows, columns, dtype=torch.bool, device=device).triu(1)


def _rows(x: Tensor, dim: int) -> Tensor:
    if dim % x.dim() != x.dim() - 1:
        raise NotImplementedError("takes the last dim only")
    return x.view(-1, x.shape[-1])


PROVIDERS: dict[str, Callable[[], tuple[Provider, Provider]]] = {
    "ndsoftmax": _ndsoftmax,
    "torch": _torch,
    "compile": _compile,
    "quack": _quack,
    "liger": _liger,
}
