"""The shapes that the benchmark covers, by suite."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, pairwise

import torch
from torch import Tensor

_LAST_DIMS = [
    *(1, 3, 16, 32, 50, 77, 96, 192, 256, 300, 512, 768, 1000, 1024),
    *(1030, 2048, 3072, 4095, 4096, 5120, 8192, 10000, 16384, 30522, 32768, 49408, 50304, 64000, 65536),
    *(102400, 129280, 200064, 256000),
]
_EVERY_DIM = range(1000, 1101)
_WIDEST = 1 << 20
_BESIDE_A_SWITCH = 3  # dims on either side
_FEW_ROWS = [
    *((rows, dim) for rows in (1, 2, 8, 16, 32, 64) for dim in (32000, 129280, 262144)),
    *((1, 1 << exponent) for exponent in (20, 22, 24, 26)),
    *((4, 50257), (64, 50257), (2, 1_000_003), (4, 1 << 22)),  # three that do not start on 16 bytes
]
_RANDOM = 150
_RANDOM_MOST = 1 << 24  # elements
_SMALL = [(rows, dim) for rows in (1, 32, 256, 4096) for dim in (10, 64, 197, 1000, 4096)]
_STRIDED = [
    ((8, 19, 1024, 1024), 1),
    ((16, 80, 160, 160), 1),
    ((128, 512, 14, 14), 1),
    ((4096, 64, 7, 7), 1),
    ((2048, 4, 49, 49), 2),
    ((16384, 2048), 0),
    ((512, 65536), 0),
    ((2048, 1024, 8), 1),
    ((64, 100000, 2), 1),
    ((32, 2048, 2048), 1),
    ((16, 16, 512, 511), 2),
    ((1, 3, 5000000), 1),
    ((1, 500000, 64), 1),
    ((100, 10, 10, 10, 10), 2),
]
# batch × heads × queries × keys
_ATTENTION = {
    "ViT-B/16": (128, 12, 197, 197),
    "Swin, windows": (8192, 4, 49, 49),
    "BERT-large": (32, 16, 512, 512),
    "GPT-2": (8, 12, 1024, 1024),
    "Whisper, cross": (16, 20, 448, 1500),
    "Llama 7B": (2, 32, 2048, 2048),
    "Llama 7B, long": (1, 32, 8192, 8192),
    "decoding": (64, 32, 1, 4096),
    "decoding, long": (4, 32, 1, 131072),
}
_VOCABULARIES = {
    "BERT": 30522,
    "Llama 2": 32000,
    "CLIP": 49408,
    "GPT-2": 50257,
    "Llama 3": 128256,
    "DeepSeek V3": 129280,
    "Qwen 2.5": 151936,
    "Gemma": 256000,
}
_VISION = {
    "ImageNet classes": ((4096, 1000), -1),
    "CIFAR classes": ((65536, 10), -1),
    "Cityscapes": ((8, 19, 1024, 1024), 1),
    "Pascal VOC": ((8, 21, 512, 512), 1),
    "ADE20K": ((8, 150, 512, 512), 1),
    "COCO, boxes": ((16, 8400, 80), -1),
    "keypoint heatmaps": ((64, 17, 3072), -1),
    "features of a convolution": ((128, 512, 14, 14), 1),
}
# (shape, dim, what is fused, the shape of that)
_MASKED: list[tuple[tuple[int, ...], int, str, tuple[int, ...]]] = [
    ((16, 12, 512, 512), -1, "mask", (16, 1, 1, 512)),
    ((16, 12, 512, 512), -1, "mask", (512, 512)),
    ((16, 12, 512, 512), -1, "mask", (16, 12, 512, 512)),
    ((2, 32, 2048, 2048), -1, "mask", (2, 1, 2048, 2048)),
    ((1, 16, 4096, 4096), -1, "where", (4096, 4096)),
    ((128, 6, 257, 257), -1, "mask", (128, 1, 1, 257)),
    ((2048, 50304), -1, "where", (2048, 50304)),
    ((8, 12, 1025, 1025), -1, "mask", (8, 1, 1, 1025)),
    ((2048, 50257), -1, "where", (2048, 50257)),
    ((2048, 50257), -1, "mask", (50257,)),  # tokens that are not to be sampled
    ((16, 12, 512, 512), -1, "bias", (12, 512, 512)),
    ((2, 8, 8192, 8192), -1, "causal", ()),
    ((8192, 4, 49, 49), -1, "bias", (4, 49, 49)),
    ((4096, 4, 64, 64), -1, "bias", (4, 64, 64)),
    ((128, 12, 197, 197), -1, "scale", ()),
    ((1024, 50257), -1, "scale", ()),
    ((8, 19, 1024, 1024), 1, "mask", (8, 19, 1, 1)),
    ((16, 12, 512, 512), -2, "mask", (16, 1, 512, 1)),
    ((16, 12, 512, 511), -2, "mask", (16, 1, 512, 511)),
    ((64, 21, 129, 129), 1, "mask", (21, 1, 1)),
    ((16, 150, 128, 128), 1, "where", (16, 150, 128, 128)),
    ((64, 12, 197, 197), -2, "bias", (12, 197, 197)),
]

SWEEP = "neighbouring dims"  # the group of that suite

SUITES = ("attention", "vocab", "vision", "rows", "sweep", "few", "small", "strided", "masked", "random")


@dataclass(frozen=True)
class Case:
    """One tensor and the dim to normalize."""

    group: str  # of the summary
    shape: tuple[int, ...]
    dim: int | tuple[int, ...] = -1
    memory_format: torch.memory_format = torch.contiguous_format
    what: str = ""  # the model or data that it is from
    fused: str = ""  # the name of an argument of softmax
    beside: tuple[int, ...] = ()  # the shape of that, where it is a tensor

    def __str__(self) -> str:
        channels_last = " channels_last" if self.memory_format == torch.channels_last else ""
        beside = f" {self.fused}" + (f" {_sizes(self.beside)}" if self.beside else "") if self.fused else ""
        return _sizes(self.shape) + channels_last + beside

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def suite(
    name: str, dtype: torch.dtype, fill_bytes: int, regime: Callable[[tuple[int, int]], str], seed: int = 0
) -> list[Case]:
    """Return the cases of a suite; `rows` and `sweep` take as many rows as fill `fill_bytes`.

    `regime` names the kernel that rows of this dtype would run, `seed` the shapes that `random` has.
    """
    if name == "attention":
        return [Case("attention", shape, what=what) for what, shape in _ATTENTION.items()]
    if name == "vocab":
        return [
            Case("vocabulary, " + ("a token" if rows == 1 else "many tokens"), (rows, size), what=what)
            for rows in (1024, 1)
            for what, size in _VOCABULARIES.items()
        ]
    if name == "vision":
        cases = [Case("vision", shape, dim, what=what) for what, (shape, dim) in _VISION.items()]
        return [*cases, Case("vision", (8, 21, 512, 512), 1, torch.channels_last, "Pascal VOC")]
    elements = fill_bytes // dtype.itemsize
    if name == "rows":
        return [Case(_width(dim), (elements // dim, dim)) for dim in _LAST_DIMS]
    if name == "sweep":
        dims = {*_EVERY_DIM, *_beside_switches(lambda dim: regime((elements // dim, dim)), dtype)}
        return [Case(SWEEP, (elements // dim, dim)) for dim in sorted(dims)]
    if name == "few":
        return [Case("1…64 wide rows", shape) for shape in _FEW_ROWS]
    if name == "small":
        return [Case("small", shape) for shape in _SMALL]
    if name == "strided":
        channels_last = Case("dim not last", (64, 21, 256, 256), 1, torch.channels_last)
        return [*(Case("dim not last", shape, dim) for shape, dim in _STRIDED), channels_last]
    if name == "random":
        return list(dict.fromkeys(islice(_random(random.Random(str(seed)), min(elements, _RANDOM_MOST)), _RANDOM)))
    groups = {True: "masked", False: "masked, dim not last"}
    return [
        Case("scaled" if fused == "scale" else groups[dim == -1], shape, dim, fused=fused, beside=beside)
        for shape, dim, fused, beside in _MASKED
    ]


def _beside_switches(regime: Callable[[int], str], dtype: torch.dtype) -> Iterator[int]:
    """The dims around each from which rows that start on 16 bytes, or those that do not, run another kernel."""
    vector = 16 // dtype.itemsize
    for offset in (0, 1):
        dims = [round(_WIDEST ** (i / 200)) // vector * vector + offset for i in range(1, 201)]
        for before, after in pairwise(dims):
            if not 0 < before < after or regime(before) == regime(after):
                continue
            while after - before > vector:
                middle = before + (after - before) // vector // 2 * vector
                before, after = (middle, after) if regime(middle) == regime(before) else (before, middle)
            yield from range(max(before - _BESIDE_A_SWITCH, 1), after + _BESIDE_A_SWITCH + 1)


def _random(draw: random.Random, most: int) -> Iterator[Case]:
    """Shapes that nobody chose, of `most` elements at most; the logarithms of their sizes are spread evenly."""

    def size(least: int, most: int) -> int:
        return round(math.exp(draw.uniform(math.log(least), math.log(most))))

    while True:
        wide = size(1, 400_000)
        shape, dim = draw.choice(
            [
                ((size(1, max(most // wide, 1)), wide), 1),
                ((size(256, 65_536), size(2, 1024)), 1),
                ((size(1, 64), size(2, 100_000), size(2, 100_000)), 1),
                ((size(1, 4096), size(2, 8192)), draw.randrange(2)),
                (tuple(size(1, 40) for _ in range(4)), draw.randrange(4)),
            ]
        )
        if math.prod(shape) <= most:
            yield Case("random, " + ("dim last" if dim == len(shape) - 1 else "dim not last"), shape, dim)


def _sizes(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _width(dim: int) -> str:
    return "dim 1…1024" if dim <= 1024 else "dim 1025…262144"


def shrunk(case: Case, most_bytes: int, dtype: torch.dtype) -> Case:
    """The case with fewer rows, taken from its first dimensions, where it has more than `most_bytes`."""
    sizes = list(case.shape)
    for axis, size in enumerate(sizes):
        if axis != case.dim and axis != len(sizes) - 1:
            others = math.prod(sizes) // size * dtype.itemsize
            sizes[axis] = min(size, max(most_bytes // others, 1))
    last = sizes[len(sizes) - len(case.beside) :]
    beside = tuple(min(own, size) for own, size in zip(case.beside, last, strict=True))
    return replace(case, shape=tuple(sizes), beside=beside)


def fused(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | bool | float]:
    """The keyword arguments of softmax that the case asks for; masks exclude a third of the elements."""
    if case.fused == "causal":
        return {"causal": True}
    if case.fused == "scale":
        return {"scale": 0.7}
    if case.fused == "bias":
        return {"bias": torch.randn(case.beside, device=device, dtype=dtype)}
    if case.fused:
        return {case.fused: (torch.rand(case.beside, device=device) < 1 / 3) == (case.fused == "mask")}
    return {}
