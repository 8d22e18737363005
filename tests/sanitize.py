"""Runs the CUDA kernels of all regimes on small problems, for compute-sanitizer, and compares with float64 in passing.

`sanitize.py 2/8` runs every eighth of the problems, beginning with the second: several processes share the work.
`sanitize.py 2/8 narrow` leaves out what takes clusters of more than 8 blocks, where synccheck (2025.3) reads illegal
addresses and misses waits, also in kernels that it finds nothing in where clusters are smaller.
`sanitize.py 2/8 no-bulk` leaves out what is stored by bulk copies, which initcheck (2025.3) takes no notice of: to it
all such results are uninitialized.
All that our kernels read was copied from the host or written by them, and all that is compared is on the host:
initcheck, told to watch them alone, would take what torch's kernels write for uninitialized (and told to watch those as
well, it makes some of them fail).
"""

import os
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import ndsoftmax
import oracle
import torch
from ndsoftmax import explain
from torch import Tensor

PORTABLE_CLUSTER = 8

# (shape, dim, regimes to force; None: the plan's own, [fusions, where all would take long])
PROBLEMS: list[tuple[Any, ...]] = [
    ((40, 8), 1, (None, "block", "online", "split", "strided")),
    ((9, 13), 1, (None,)),
    ((13, 21), 1, (None, "block", "cluster")),
    ((9, 100), 1, (None, "strided")),
    ((5, 301), 1, (None,)),
    ((7, 1000), 1, (None, "online")),  # few
    ((300, 1000), 1, (None,), 1),  # more, of which each is a warp's
    ((3, 1025), 1, (None, "warp", "block", "cluster", "split", "strided")),
    ((3, 2049), 1, (None,)),
    ((2, 9000), 1, (None, "block", "cluster", "online", "split")),
    ((1, 300000), 1, (None, "split")),
    ((1, 9_000_001), 1, (None,), 1),  # whose blocks meet between the passes
    ((2, 19, 64), 1, (None,)),  # few columns
    ((2, 19, 49), 1, (None,)),
    ((140, 19, 64), 1, (None,), 1),  # more
    ((200, 19, 49), 1, (None,), 1),
    ((1, 5000, 3), 1, (None,)),
    ((3, 4501, 2), 1, (None, "cluster", "split"), 1),  # two columns that take turns in a row
    ((9, 165_001, 2), 1, ("cluster",), 1),  # as many as a cluster has room for
    ((600, 40), 0, (None,)),
    ((40, 40, 131), 1, (None,), 1),  # words of columns, whose tiles overlap
    ((7, 300, 266), 1, (None,), 1),
    ((9, 300, 196), 1, (None,), 1),  # so do those of vectors, as rows begin within sectors
    ((300, 7, 131), 1, (None,), 1),  # of 16 bits, single columns
    ((430, 70, 5), 1, (None,), 1),  # of several threads
    ((1, 3001, 3), 1, (None,), 1),  # and over clusters
    ((240, 101, 9), 1, (None,), 1),  # whole strips of words
    ((8000, 31, 2), 1, (None,), 1),  # of more threads along dim
    ((200, 301, 45), 1, (None,), 1),  # of 16 bits, folded as halves of vectors, in slabs that begin and end within them
    ((140, 1001, 33), 1, (None,), 1),  # as vectors, where halves would be held by larger clusters
    ((140, 501, 33), 1, (None,), 1),  # backward by clusters
    ((3, 3001, 21), 1, (None,), 1),  # over clusters
    ((5, 700, 131), 1, (None,), 1),  # of any size
    ((50, 40, 204), 1, (None,), 1),  # of 16 bits, halves of vectors
    ((12, 600, 100), 1, (None,), 1),  # over clusters
    ((50, 300, 36), 1, (None,), 1),  # whole strips of them
    ((1600, 900, 20), 1, (None,), 1),  # which shared memory has a part of, forward
    ((20, 2100, 3), 1, (None,), 2),  # columns that are not few: threads have much of dim, of single ones,
    ((300, 150, 3), 1, (None,), 2),
    ((70, 900, 3), 1, (None,), 2),
    ((9, 300, 131), 1, (None,), 2),  # of words,
    ((20, 900, 131), 1, (None,), 1),
    ((70, 450, 20), 1, (None,), 2),  # of vectors, and folded ones
    ((140, 101, 17), 1, (None,), 2),
    ((300, 70, 12), 1, (None,), 2),
    ((9, 2100, 64), 1, (None,), 1),
    ((140_000, 21), 1, (None,), 1),  # rows that a lane has alone
    ((100, 330, 416), 1, (None,), 1),  # and backward
    ((16, 20_001, 9), 1, (None,), 1),  # backward by threads that have more
    ((1, 30_001, 33), 1, (None,), 1),  # or, backward and of 32 bits, read twice
    ((1, 200_001, 24), 1, (None,), 1),  # whose blocks meet between the passes
    ((1, 150_001, 33), 1, (None,), 1),  # folded
    ((1, 130_001, 8), 1, (None,), 1),  # of smaller blocks
    ((1, 100_001, 7), 1, (None,), 1),
    ((2, 8_285, 297), 1, (None,), 1),  # on sectors
    ((2, 4_244, 354), 1, (None,), 1),  # backward, of 16 bits
    ((2, 350_001, 7), 1, (None,), 1),  # in slabs that are a tile each
    ((20, 10_001, 66), 1, (None,), 1),  # of which some threads have nothing to do
    ((2, 9, 131201), 1, (None,), 1),  # so many columns that threads have several
    ((1, 3, 2_400_001), 1, (None,), 1),  # and still more, whose vectors begin elsewhere in each row
    ((3, 13, 400_003), 1, (None,), 1),
    ((22, 2, 70_001), 1, (None,), 1),
    ((22, 3, 70_002), 1, (None,), 1),
    ((4000, 26, 37), 1, (None,), 1),  # of 16 bits, single columns, however many, into results of 32
    ((170_000, 2, 5), 1, (None,), 1),  # small slabs that follow each other: single columns,
    ((24_000, 5, 7), 1, (None,), 1),
    ((6000, 11, 13), 1, (None,), 1),
    ((3500, 16, 15), 1, (None,), 1),
    ((450, 301, 7), 1, (None,), 1),  # of several lanes,
    ((20_000, 3, 14), 1, (None,), 1),  # and words
    ((10_000, 8, 14), 1, (None,), 1),
    ((5000, 12, 14), 1, (None,), 1),
    ((800, 75, 14), 1, (None,), 1),
    ((30_000, 7, 6), 1, (None,), 1),
    ((3, 2, 19, 72), 2, (None,)),  # whose masks some of outer share: vectors,
    ((2, 3, 40, 66), 2, (None,)),  # words
    ((2, 3, 40, 45), 2, (None,)),  # and single columns
    ((2, 2, 900, 33), 2, (None,)),  # over clusters
    ((6, 5, 4), (0, 2), (None,)),
    ((40, 7, 30), (0, 2), (None,)),
    ((20000, 21), 1, (None,), 2),  # so many rows that they are staged: these take racecheck longest
    ((70000, 3), 1, (None,), 2),
    ((9000, 257), 1, (None,), 2),  # by teams of several lanes
    ((9000, 401), 1, (None,), 1),  # backward and of float32, element by element
    ((28, 98_400), 1, ("online",), 1),  # and so many wide ones that clusters read them twice
    # or that float32's next row of backward arrives meanwhile, and of forward shared memory's part comes first
    ((9, 330_001), 1, ("cluster",), 1),
    ((1, 700_001), 1, ("cluster",), 1),  # or that threads have more in shared memory, and float32 still more
]
# What regimes may refuse: rows of 1025 are warps' where they are of 16 bits and nothing is fused, the two operands of a
# row of 9000 in float64 are more than a block holds, as are wide ones for a cluster, and two columns are a row only
# where results have their type, of 16 or 32 bits.
MAY_BE_REFUSED = {
    ((3, 1025), "warp"),
    ((2, 9000), "block"),
    ((3, 4501, 2), "cluster"),
    ((3, 4501, 2), "split"),
    ((9, 165_001, 2), "cluster"),
    ((9, 330_001), "cluster"),
    ((1, 700_001), "cluster"),
}
DTYPES = [(torch.float32, None), (torch.bfloat16, None), (torch.float16, torch.float32), (torch.float64, None)]


def fusions(x: Tensor, dims: tuple[int, ...]) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """What may be fused, a different part of it each time, and which elements are included then; on the host."""
    everything = torch.ones(x.shape, dtype=torch.bool)
    yield {}, everything
    mask = torch.rand(x.shape) < 0.3
    bias = torch.randn(x.shape[-1]).to(x.dtype)
    yield {"mask": mask, "scale": 0.5}, ~mask
    yield {"where": ~mask[..., :1], "bias": bias}, (~mask[..., :1]).expand(x.shape)
    yield {"bias": torch.randn(x.shape).to(x.dtype), "scale": 0.5}, everything
    if x.dim() == 4:
        yield {"mask": mask[:, :1], "scale": 2}, (~mask[:, :1]).expand(x.shape)
    if dims == (x.dim() - 1,):
        yield {"causal": "lower_right", "bias": bias}, everything.tril(x.shape[-1] - x.shape[-2])


def on_gpu(value: Any) -> Any:
    return value.cuda() if isinstance(value, Tensor) else value


def assert_close(got: Tensor, exact: Tensor, size: Tensor) -> None:
    """To a part of `size`, some hundredths of it where 16 bits round outputs, and exponentials of those, by so much."""
    part = 0.06 if got.dtype.itemsize == 2 else 1e-3
    wrong = ~((got.double() - exact).abs().where(got != exact, 0) <= part * size + 1e-6)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} elements are wrong"


def main() -> None:
    part, parts = map(int, sys.argv[1].split("/")) if len(sys.argv) > 1 else (1, 1)
    device = ndsoftmax._C.device("cuda")
    narrow, no_bulk = (name in sys.argv and device.compute_capability >= 90 for name in ("narrow", "no-bulk"))

    def left_out(*arguments: Any, **keywords: Any) -> bool:
        plans = [explain(*arguments, backward=backward, **keywords) for backward in (False, True)]
        return any((narrow and plan.cluster > PORTABLE_CLUSTER) or (no_bulk and plan.slabs) for plan in plans)

    cases = [(*problem, *dtypes) for problem in PROBLEMS for dtypes in DTYPES]
    for shape, dim, regimes, *few, dtype, result in cases[part - 1 :: parts]:
        dims = dim if isinstance(dim, tuple) else (dim,)
        for regime in regimes:
            print(shape, dim, dtype, regime or "", flush=True)
            if regime == "cluster" and device.compute_capability < 90:
                continue
            os.environ["NDSOFTMAX_REGIME"] = regime or ""
            host = torch.randn(shape).to(dtype)
            x = host.cuda().requires_grad_()
            for fused_on_host, included in islice(fusions(host, dims), *(few or [None])):
                fused = {name: on_gpu(value) for name, value in fused_on_host.items()}
                for function in (ndsoftmax.softmax, ndsoftmax.log_softmax):
                    log = function is ndsoftmax.log_softmax
                    scale = fused.get("scale", 1)
                    try:
                        if (narrow or no_bulk) and left_out(x, dims, dtype=result, log=log, **fused):
                            continue
                        y = function(x, dim, result, **fused)
                        bias = fused_on_host.get("bias")
                        exact = oracle.masked_forward(host, dims, included, bias, scale, log=log)
                        assert_close(y.detach().cpu(), exact, exact.abs().clamp(min=1) if log else exact)
                        # nothing comes from the others
                        grad_output = (torch.randn(shape) + 1).to(y.dtype).where(included, 0)
                        (grad,) = torch.autograd.grad(y, x, grad_output.cuda())
                    except ValueError as error:
                        if "cannot take" not in str(error) or (shape, regime) not in MAY_BE_REFUSED:
                            raise
                        print("refused:", error)
                        continue
                    exact = exact.clamp(min=-1e9)  # whose exponential is zero, too
                    exact_grad = oracle.backward(grad_output, exact, dims, log=log) * scale
                    assert_close(grad.cpu(), exact_grad, oracle.magnitude(grad_output, exact, dims, log=log))
    print("every problem ran")


if __name__ == "__main__":
    main()
