"""The command line: `python -m ndsoftmax`, also installed as `ndsoftmax`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

import ndsoftmax
from ndsoftmax._showcase import cases, measure, table

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}

_EPILOG = """\
examples:
  ndsoftmax                     the GPU if there is one, else the CPU
  ndsoftmax --device cpu        the CPU
  ndsoftmax --dtype float16     every shape in float16
"""

_LEGEND = """\
plan      regime: outer × dim × inner, and how often it reads each element
ulp       largest error against float64, in units of the last place of dtype
ms        median time of a call in milliseconds
speed-up  torch's time / ndsoftmax's
frac      time of copying the tensor / ndsoftmax's; 1.00 is the speed of memory"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Show softmax of some real shapes on this machine; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="ndsoftmax",
        description="Show, for some shapes of real models on this machine, how ndsoftmax computes their softmax, "
        "how exact it is, and how fast beside torch and beside a copy of the tensor. Takes less than a minute.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", type=_device, help="cpu, cuda or cuda:1 (default: the best there is)")
    parser.add_argument("--dtype", choices=_DTYPES, help="use this dtype for every shape")
    options = parser.parse_args(arguments)
    device = options.device or _best_device()
    shown = cases(device.type, _DTYPES.get(options.dtype))

    print(f"{_describe(device)}, torch {torch.__version__}, ndsoftmax {ndsoftmax.__version__}\n")
    results = []
    for number, case in enumerate(shown, start=1):
        _progress(f"{number}/{len(shown)} {case.what}")
        results.append(measure(case, device))
    _progress("")
    print(f"{table(results)}\n\n{_LEGEND}")
    return 0


def _best_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() and ndsoftmax.build_info()["cuda"] else "cpu")


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{name!r} is neither cpu nor cuda")
    if device.type == "cuda":
        if not ndsoftmax.build_info()["cuda"]:
            raise argparse.ArgumentTypeError(f"{name!r}: ndsoftmax was built without CUDA")
        if (device.index or 0) >= torch.cuda.device_count():
            raise argparse.ArgumentTypeError(f"{name!r}: torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({ndsoftmax.build_info()['cpu_capability']}, {torch.get_num_threads()} threads)"


def _progress(text: str) -> None:
    """Replace the line on a terminal; write nothing to a file or pipe."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
