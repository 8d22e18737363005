"""The ladder's rungs in Triton: softmax of dense rows, fused where a row fits on chip, online where it does not.

A program takes a row. Arithmetic is in float32 whatever the dtype; lanes past the end of a row hold -inf, which changes
neither a maximum nor a sum of exponentials.
"""

import torch
import triton
import triton.language as tl

MOST_FUSED = 16384  # elements of a row that a program still holds in registers
_BLOCK = 1024  # elements of a row that the online kernel holds


@triton.jit
def _fused(input, output, dim, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * dim
    columns = tl.arange(0, BLOCK)
    inside = columns < dim
    x = tl.load(input + start + columns, mask=inside, other=-float("inf")).to(tl.float32)
    exponentials = tl.exp(x - tl.max(x, axis=0))
    y = exponentials / tl.sum(exponentials, axis=0)
    tl.store(output + start + columns, y.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _online(input, output, dim, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * dim
    columns = tl.arange(0, BLOCK)
    # Each lane keeps the (max, sum) of its own columns: no exchange between lanes until the row has been seen.
    highest = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, dim, BLOCK):
        inside = first + columns < dim
        x = tl.load(input + start + first + columns, mask=inside, other=-float("inf")).to(tl.float32)
        raised = tl.maximum(highest, x)
        shift = tl.where(raised == -float("inf"), 0.0, raised)  # -inf - -inf would be NaN
        total = total * tl.exp(highest - shift) + tl.exp(x - shift)
        highest = raised
    maximum = tl.max(highest, axis=0)
    divisor = tl.sum(total * tl.exp(highest - maximum), axis=0)
    for first in range(0, dim, BLOCK):
        inside = first + columns < dim
        x = tl.load(input + start + first + columns, mask=inside, other=0.0).to(tl.float32)
        y = tl.exp(x - maximum) / divisor
        tl.store(output + start + first + columns, y.to(output.dtype.element_ty), mask=inside)


def fused(x: torch.Tensor, y: torch.Tensor) -> None:
    """y = softmax of the rows of x, which is read once. At most MOST_FUSED columns."""
    block = triton.next_power_of_2(x.shape[1])
    _fused[(x.shape[0],)](x, y, x.shape[1], BLOCK=block, num_warps=min(max(block // 256, 1), 16))


def online(x: torch.Tensor, y: torch.Tensor) -> None:
    """y = softmax of the rows of x, which is read twice. Any number of columns."""
    _online[(x.shape[0],)](x, y, x.shape[1], BLOCK=_BLOCK, num_warps=4)
