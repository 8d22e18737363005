"""Runs every CUDA kernel once on a small problem, for compute-sanitizer, and compares with float64 in passing."""

import os

import ndsoftmax
import torch

# (shape, dim, regimes to force; None: the plan's own)
PROBLEMS = [
    ((40, 8), 1, (None, "block", "online", "split", "strided")),
    ((13, 21), 1, (None, "block", "cluster")),
    ((9, 100), 1, (None, "strided")),
    ((7, 1000), 1, (None, "block", "online")),
    ((3, 1025), 1, (None, "cluster", "split", "strided")),
    ((2, 9000), 1, (None, "block", "cluster", "online", "split")),
    ((2, 19, 64), 1, (None,)),
    ((2, 19, 49), 1, (None,)),
    ((1, 5000, 3), 1, (None,)),
    ((600, 40), 0, (None,)),
    ((6, 5, 4), (0, 2), (None,)),
]
DTYPES = [(torch.float32, None), (torch.bfloat16, None), (torch.float16, torch.float32), (torch.float64, None)]


def main() -> None:
    device = ndsoftmax._C.device("cuda")
    for shape, dim, regimes in PROBLEMS:
        for regime in regimes:
            if regime == "cluster" and device.compute_capability < 90:
                continue
            os.environ["NDSOFTMAX_REGIME"] = regime or ""
            for dtype, result in DTYPES:
                x = torch.randn(shape, device="cuda").to(dtype)
                dims = dim if isinstance(dim, tuple) else (dim,)
                for function in (ndsoftmax.softmax, ndsoftmax.log_softmax):
                    y = function(x, dim, result)
                    shifted = x.double() - x.double().amax(dims, keepdim=True)
                    truth = shifted - shifted.exp().sum(dims, keepdim=True).log()
                    if function is ndsoftmax.softmax:
                        truth = truth.exp()
                    torch.testing.assert_close(y.double(), truth, rtol=1e-2, atol=1e-2)
                    backward = getattr(ndsoftmax.ops, f"{function.__name__}_backward")
                    backward(torch.ones_like(y), y, dim, x.dtype)
    print("every kernel ran")


if __name__ == "__main__":
    main()
