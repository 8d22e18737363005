"""The command line: `python -m ndsoftmax`, also installed as `ndsoftmax`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch

import ndsoftmax
from ndsoftmax import _options
from ndsoftmax._bench import command as bench
from ndsoftmax._bench.measure import driver
from ndsoftmax._explain import best_device
from ndsoftmax._showcase import Result, cases, measure, table

_EPILOG = """\
examples:
  ndsoftmax                                     some real shapes on the GPU if there is one, else on the CPU
  ndsoftmax --device cpu --dtype float16        the same shapes on the CPU, all in float16
  ndsoftmax explain 8x19x1024x1024 --dim 1      the plan of one problem, and why
  ndsoftmax explain 4096x50257 --dtype bfloat16 --device H200
  ndsoftmax bench --suite attention,vocab       how fast, beside torch and beside a copy
  ndsoftmax doctor                              what was built, what is here, and whether it computes right
"""

_EXPLAINED = ("log", "backward", "mask", "where", "bias", "scale", "causal")

_LEGEND = """\
plan      regime: outer × dim × inner, and how often it reads each element
ulp       largest error against float64, in units of the last place of dtype
ms        median time of a call in milliseconds
speed-up  torch's time / ndsoftmax's
frac      time of copying the tensor / ndsoftmax's; 1.00 is the speed of memory"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = _options.Parser(
        prog="ndsoftmax",
        description="Show, for some shapes of real models on this machine, how ndsoftmax computes their softmax, "
        "how exact it is, and how fast beside torch and beside a copy of the tensor. Takes less than a minute.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # (names of their own: those of a command would hide them)
    show = parser.add_argument_group("without a command")
    where = "cpu, cuda or cuda:1 (default: the best there is)"
    show.add_argument("--device", dest="show_on", type=_options.device, metavar="DEVICE", help=where)
    show.add_argument("--dtype", dest="show_as", choices=_options.DTYPES, help="use this dtype for every shape")
    parser.set_defaults(run=_show)
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")

    explain = commands.add_parser(
        "explain",
        help="print the plan of a problem, and why",
        description="Print which kernel a call would run, how, and why. Runs nothing and needs no GPU.",
        epilog="examples:\n  ndsoftmax explain 8x16x1024x1024 --dtype bfloat16 --device H200\n"
        "  ndsoftmax explain 8x19x1024x1024 --dim 1 --backward --device A100\n  ndsoftmax explain 64x4096 --dim 0,1\n"
        "  ndsoftmax explain 16x12x512x512 --mask 16x1x1x512 --scale 0.125 --device H200",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=None,
    )
    explain.add_argument("shape", type=_options.shape, metavar="SHAPE", help="sizes: 8x16x1024x1024")
    explain.add_argument(
        "--dim", type=_options.dims, default=(-1,), help="what to normalize over: -1, or 0,2 (default: -1)"
    )
    explain.add_argument("--dtype", choices=_options.DTYPES, default="float32")
    explain.add_argument("--device", help="cpu, cuda, or a GPU by name, also one that is not here: H200, A100, T4, …")
    explain.add_argument("--log", action="store_true", help="log_softmax instead of softmax")
    explain.add_argument("--backward", action="store_true", help="the gradient instead of the result")
    masks = explain.add_mutually_exclusive_group()
    masks.add_argument("--mask", type=_options.shape, metavar="SHAPE", help="the shape of a mask: 16x1x1x512")
    masks.add_argument("--where", type=_options.shape, metavar="SHAPE", help="the shape of a mask that includes")
    explain.add_argument("--bias", type=_options.shape, metavar="SHAPE", help="the shape of a bias: 12x512x512")
    explain.add_argument("--scale", type=float, default=1.0, help="what the input is multiplied by (default: 1)")
    causal = explain.add_mutually_exclusive_group()
    causal.add_argument("--causal", action="store_true", help="nothing past the diagonal from the upper left corner")
    causal.add_argument(
        "--causal-lower-right", dest="causal", action="store_const", const="lower_right", help="or the lower right one"
    )
    explain.set_defaults(run=_explain)

    bench.add_arguments(commands.add_parser("bench", help="how fast softmax is, beside others and beside a copy"))

    doctor = commands.add_parser(
        "doctor",
        help="what was built, what is here, and whether it computes right",
        description="Print what was built, which GPU, driver and torch are here, and compare results with float64. "
        "Ends with a verdict, and exit code 0 if all is well.",
        epilog="example:\n  ndsoftmax doctor",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.set_defaults(run=_doctor)

    options = parser.parse_args(_options.joined(sys.argv[1:] if arguments is None else arguments))
    if options.command and (options.show_on or options.show_as):
        parser.error(f"--device and --dtype stand after the command: {parser.prog} {options.command} … --device cpu")
    try:
        exit_code: int = options.run(options)
        print(end="", flush=True)
        return exit_code
    except BrokenPipeError:  # the reader has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, IndexError, TypeError, RuntimeError, OSError) as error:
        parser.exit(2, f"ndsoftmax: {str(error).splitlines()[0]}\n")
    except KeyboardInterrupt:
        return 130  # as a shell has it for a program that Ctrl-C ended


def _show(options: argparse.Namespace) -> int:
    where = options.show_on or best_device()
    shown = cases(where.type, _options.DTYPES.get(options.show_as))
    print(f"{_describe(where)}, torch {torch.__version__}, ndsoftmax {ndsoftmax.__version__}\n")
    results: list[Result] = []
    try:
        for number, case in enumerate(shown, start=1):
            _options.progress(f"{number}/{len(shown)} {case.what}")
            results.append(measure(case, where))
    finally:  # Ctrl-C leaves what was measured
        _options.progress("")
        if results:
            print(f"{table(results)}\n\n{_LEGEND}")
    return 0


def _explain(options: argparse.Namespace) -> int:
    print(
        ndsoftmax.explain(
            options.shape,
            options.dim,
            dtype=_options.DTYPES[options.dtype],
            device=options.device,
            **{name: getattr(options, name) for name in _EXPLAINED},
        )
    )
    return 0


def _doctor(_: argparse.Namespace) -> int:
    info = ndsoftmax.build_info()
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    lines = {
        "ndsoftmax": f"{info['version']}, compiled by {info['compiler']}",
        "torch": torch.__version__,
        "CPU": f"{info['cpu_capability']} in use, of {', '.join(info['cpu_instruction_sets'])}; "
        f"{torch.get_num_threads()} threads",
        "CUDA": f"{info['cuda_version']}, for {', '.join(info['architectures'])}" if info["cuda"] else "not built",
        "GPU": ", ".join([*gpus, f"driver {driver()}"]) if gpus else "none",
    }
    print("\n".join(f"{name:<10} {text}" for name, text in lines.items()), flush=True)
    wrong = []
    for device in ("cpu", *(["cuda"] if info["cuda"] and torch.cuda.is_available() else [])):
        error = _self_test(device)
        print(f"{f'on {device}':<10} largest error {error:.2g} float32 ulp against float64 (16 allowed)", flush=True)
        if not error < 16:
            wrong.append(device)
    if wrong:
        print(f"\nWRONG: results on {' and '.join(wrong)} differ from float64")
        return 1
    missing = (
        "" if info["cuda"] or not torch.cuda.is_available() else ", but has no kernels for the GPU: install with nvcc"
    )
    print(f"\nOK: ndsoftmax computes right here{missing}")
    return 0


def _self_test(device: str) -> float:
    """The largest error against float64 over problems of every regime, in units of the last place of float32."""
    errors = []
    for shape, dim in (
        ((64, 50), 1),
        ((64, 1000), 1),
        ((8, 5000), 1),
        ((3, 40000), 1),
        ((1, 1 << 20), 1),
        ((4, 21, 500), 1),
    ):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        error = (ndsoftmax.log_softmax(x.to(device), dim).cpu().double() - torch.log_softmax(x.double(), dim)).abs()
        truth = torch.log_softmax(x.double(), dim).abs().clamp(min=1)
        errors.append((error / truth).max() / torch.finfo(torch.float32).eps)
    return torch.stack(errors).max().item()  # NaN if one is


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({ndsoftmax.build_info()['cpu_capability']}, {torch.get_num_threads()} threads)"


if __name__ == "__main__":
    sys.exit(main())
