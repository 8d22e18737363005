"""The shapes that the benchmark covers, by suite."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_LAST_DIMS = [
    *(1, 3, 16, 32, 50, 77, 96, 192, 256, 300, 512, 768, 1000, 1024),
    *(1030, 2048, 3072, 4095, 4096, 5120, 8192, 10000, 16384, 30522, 32768, 49408, 50304, 64000, 65536),
    *(102400, 129280, 200064, 256000),
]
_FEW_ROWS = [(rows, dim) for rows in (1, 2, 8, 32) for dim in (32000, 129280, 262144)]
_ONE_ROW = [(1, 1 << exponent) for exponent in (20, 22, 24, 26)]
_STRIDED = [
    ((8, 19, 1024, 1024), 1),
    ((16, 80, 160, 160), 1),
    ((128, 512, 14, 14), 1),
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
_SMALL = [(rows, dim) for rows in (1, 32, 256, 4096) for dim in (10, 64, 197, 1000, 4096)]

SUITES = ("last", "few", "strided", "small")


@dataclass(frozen=True)
class Case:
    """One tensor and the dim to normalize."""

    group: str  # of the summary
    shape: tuple[int, ...]
    dim: int
    memory_format: torch.memory_format = torch.contiguous_format

    def __str__(self) -> str:
        return f"{self.shape}" + (" channels_last" if self.memory_format == torch.channels_last else "")


# Of benchmarks/cpu.py: from rows shorter than a vector to rows that no cache holds, and dims that are not the last.
CPU = [
    *(Case("last dim", shape, -1) for shape in [(1000000, 5), (400000, 10), (100000, 50), (30000, 257)]),
    *(Case("last dim", shape, -1) for shape in [(10000, 1024), (2000, 8192), (100, 50257), (2, 4000000)]),
    Case("dim not last", (8, 19, 256, 256), 1),
    Case("dim not last", (32, 512, 14, 14), 1),
    Case("dim not last", (4096, 1024), 0),
    Case("dim not last", (4, 100000, 8), 1),
]


def suite(name: str, dtype: torch.dtype, fill_bytes: int) -> list[Case]:
    """Return the cases of a suite; `last` takes as many rows as fill `fill_bytes`."""
    if name == "last":
        elements = fill_bytes // dtype.itemsize
        return [Case(_width(dim), (elements // dim, dim), -1) for dim in _LAST_DIMS]
    if name == "few":
        return [Case("1…32 wide rows", shape, -1) for shape in _FEW_ROWS + _ONE_ROW]
    if name == "strided":
        channels_last = Case("dim not last", (64, 21, 256, 256), 1, torch.channels_last)
        return [*(Case("dim not last", shape, dim) for shape, dim in _STRIDED), channels_last]
    return [Case("small", shape, -1) for shape in _SMALL]


def _width(dim: int) -> str:
    return "dim 1…1024" if dim <= 1024 else "dim 1025…262144"
