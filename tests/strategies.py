"""What Hypothesis draws: shapes, ways to lie in memory, dims and dtypes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import ndsoftmax
import torch
from hypothesis import strategies as st
from torch import Tensor

# This machine's, as far as the build serves them.
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() and ndsoftmax.build_info()["cuda"] else ("cpu",)

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HALVES = (torch.float16, torch.bfloat16)

# Sizes at which kernels change or vectors stop fitting, with their neighbours.
BORDERS = sorted({size + step for size in (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192) for step in (-1, 0, 1)})

dtypes = st.sampled_from(FLOATS)
seeds = st.integers(0, 2**31 - 1)


def numbers(count: int, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu", scale: float = 1) -> Tensor:
    """Normally distributed numbers, the same on every device."""
    if device == "meta":
        return torch.empty(count, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, generator=generator) * scale).to(dtype).to(device)


@dataclass(frozen=True)
class Layout:
    """A shape and how it lies in memory."""

    shape: tuple[int, ...]
    order: tuple[int, ...]  # the dimensions, from the one that steps farthest to the one that runs fastest
    steps: tuple[int, ...]  # for each dimension: 1 dense, 2 every second element, …; 0 expanded
    offset: int = 0  # elements before the first

    def tensor(
        self, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu", scale: float = 1
    ) -> Tensor:
        extents = [1 if self.steps[d] == 0 else self.shape[d] * self.steps[d] for d in self.order]
        memory = numbers(self.offset + math.prod(extents), seed, dtype, device, scale)
        dense = memory[self.offset :].view(extents).permute([self.order.index(d) for d in range(len(self.shape))])
        return dense[tuple(slice(None, None, step or 1) for step in self.steps)].expand(self.shape)


@st.composite
def shapes(draw: st.DrawFn, *, empty: bool = True, most_elements: int = 1 << 15) -> tuple[int, ...]:
    """0 to 6 small dimensions; sometimes one of them is wide, seldom one has size 0."""
    sizes = draw(st.lists(st.integers(1, 5), max_size=6))
    if sizes and draw(st.booleans()):
        chosen = draw(st.integers(0, len(sizes) - 1))
        room = most_elements // math.prod(sizes[:chosen] + sizes[chosen + 1 :])
        wide = st.integers(6, 300) | st.sampled_from(BORDERS) | st.integers(300, most_elements)
        sizes[chosen] = min(room, draw(wide)) if draw(st.integers(0, 15)) < 15 or not empty else 0
    return tuple(sizes)


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...] | None = None, *, expand: bool = True) -> Layout:
    """Permuted, stepped, expanded and offset; without `expand` no two elements share an address."""
    if shape is None:
        shape = draw(shapes())
    dense = draw(st.booleans())
    steps = st.just(1) if dense else st.sampled_from((1, 1, 1, 2, 3, 0) if expand else (1, 1, 1, 2, 3))
    return Layout(
        shape,
        draw(st.permutations(range(len(shape))).map(tuple)) if draw(st.booleans()) else tuple(range(len(shape))),
        tuple(draw(steps) for _ in shape),
        draw(st.integers(0, 9)),
    )


def dims(rank: int) -> st.SearchStrategy[int | tuple[int, ...]]:
    """One dim, or a tuple of different ones in any order; negative or not."""
    reach = max(rank, 1)
    one = st.integers(-reach, reach - 1)
    several = st.lists(one, min_size=1, max_size=reach, unique_by=lambda dim: dim % reach).map(tuple)
    return one | several


@dataclass(frozen=True)
class Call:
    """One call of softmax or log_softmax."""

    log: bool
    layout: Layout
    dim: int | tuple[int, ...]
    dtype: torch.dtype
    seed: int

    def input(self, device: str, scale: float = 1) -> Tensor:
        return self.layout.tensor(self.seed, self.dtype, device, scale)


@st.composite
def calls(draw: st.DrawFn, dtypes: st.SearchStrategy[torch.dtype] = dtypes) -> Call:
    layout = draw(layouts())
    return Call(draw(st.booleans()), layout, draw(dims(len(layout.shape))), draw(dtypes), draw(seeds))
