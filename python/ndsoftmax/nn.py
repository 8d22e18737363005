"""Modules as torch.nn has them, computed by ndsoftmax.

>>> ndsoftmax.nn.Softmax(dim=1)
Softmax(dim=1)
"""

from __future__ import annotations

import torch
from torch import Tensor

from ndsoftmax.functional import log_softmax, softmax

__all__ = ["LogSoftmax", "Softmax", "Softmax2d"]


class Softmax(torch.nn.Softmax):
    """:func:`ndsoftmax.softmax` as a module; constructor and behaviour are those of :class:`torch.nn.Softmax`.

    Examples
    --------
    >>> ndsoftmax.nn.Softmax(dim=-1)(torch.zeros(2))
    tensor([0.5000, 0.5000])
    """

    def forward(self, input: Tensor) -> Tensor:
        return softmax(input, _implicit_dim("softmax", input) if self.dim is None else self.dim)


class LogSoftmax(torch.nn.LogSoftmax):
    """:func:`ndsoftmax.log_softmax` as a module; constructor and behaviour are those of :class:`torch.nn.LogSoftmax`.

    Examples
    --------
    >>> ndsoftmax.nn.LogSoftmax(dim=-1)(torch.zeros(2))
    tensor([-0.6931, -0.6931])
    """

    def forward(self, input: Tensor) -> Tensor:
        return log_softmax(input, _implicit_dim("log_softmax", input) if self.dim is None else self.dim)


class Softmax2d(torch.nn.Softmax2d):
    """Softmax over the channels of (N, C, H, W) or (C, H, W), as :class:`torch.nn.Softmax2d`.

    Examples
    --------
    >>> ndsoftmax.nn.Softmax2d()(torch.zeros(1, 4, 2, 2))[0, :, 0, 0]
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    def forward(self, input: Tensor) -> Tensor:
        return softmax(input, _channels(input))


# What these decide by the input's dimensions is a node of its own in torch.fx's graphs.
@torch.fx.wrap
def _channels(input: Tensor) -> int:
    if input.dim() not in (3, 4):
        raise ValueError(f"input must have 3 or 4 dimensions, but has {input.dim()}")
    return -3


@torch.fx.wrap
def _implicit_dim(name: str, input: Tensor) -> int:
    """The dimension that torch takes for dim=None, with torch's warning, which points at the module's caller."""
    if torch.compiler.is_compiling():  # a graph cannot warn
        return 0 if input.dim() in (0, 1, 3) else 1
    return torch.nn.functional._get_softmax_dim(name, input.dim(), 6)  # type: ignore[attr-defined, no-any-return]
