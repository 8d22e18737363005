"""What a tiny call costs the host, back to back, beside torch: nothing but overhead.

ndsoftmax and torch take turns of many calls each in one process, there and back; on a GPU the host waits for it between
turns, not in them. Of the turns, the median and the fastest are shown: what else the machine does shows in the median.

example: python benchmarks/host.py --csv results/host.csv
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import ndsoftmax
import torch
from ndsoftmax._bench.measure import Launch, clock_seconds, header, there_and_back

SHAPES = {"cpu": (2, 4), "cuda": (8, 128)}
CALLS = 500  # of a turn: no queue of launches fills up
NAMES = ("ndsoftmax", "torch")


def calls(device: torch.device) -> dict[str, dict[str, Launch]]:
    """What is measured: by name, who does it how."""
    x = torch.randn(SHAPES[device.type], device=device)
    recorded, out, grad = x.clone().requires_grad_(), torch.empty_like(x), torch.randn_like(x)
    mask = torch.zeros_like(x, dtype=torch.bool)
    functions = dict(zip(NAMES, (ndsoftmax.softmax, torch.softmax), strict=True))

    def each(call: Callable[[Callable[..., torch.Tensor]], object]) -> dict[str, Launch]:
        return {name: lambda _, function=function: call(function) for name, function in functions.items()}

    return {
        "softmax(x, -1)": each(lambda softmax: softmax(x, -1)),
        "softmax(x, -1, out=out)": each(lambda softmax: softmax(x, -1, out=out)),
        "softmax(x, -1), x requires grad": each(lambda softmax: softmax(recorded, -1)),
        "the same, and backward": each(lambda softmax: softmax(recorded, -1).backward(grad)),
        "softmax(x, -1, scale=0.5)": {
            "ndsoftmax": lambda _: ndsoftmax.softmax(x, -1, scale=0.5),
            "torch": lambda _: torch.softmax(x * 0.5, -1),
        },
        "softmax(x, -1, mask=mask)": {
            "ndsoftmax": lambda _: ndsoftmax.softmax(x, -1, mask=mask),
            "torch": lambda _: torch.softmax(x.masked_fill(mask, -torch.inf), -1),
        },
    }


def measure(launches: Mapping[str, Launch], turns: int, device: torch.device) -> dict[str, list[float]]:
    """The seconds of a call, by turn."""
    for launch in launches.values():
        clock_seconds(launch, CALLS)
    seconds: dict[str, list[float]] = {name: [] for name in launches}
    for name in there_and_back(NAMES, turns):
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds[name].append(clock_seconds(launches[name], CALLS))
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=120, help="of each (default: 120)")
    parser.add_argument("--csv", type=Path, help="write the measurements to this file")
    options = parser.parse_args()

    devices = [torch.device(kind) for kind in SHAPES if kind == "cpu" or torch.cuda.is_available()]
    rows = []
    for device in devices:
        shape = "x".join(map(str, SHAPES[device.type]))
        print(f"{header(device)}, {shape} of float32, {options.turns} turns of {CALLS} calls\n")
        titles = (f"{kind + ' µs:':>14}{NAMES[0]:>11}{NAMES[1]:>8}{'ratio':>7}" for kind in ("median", "fastest"))
        print(f"{'call':<38}{''.join(titles)}")
        for what, launches in calls(device).items():
            seconds = measure(launches, options.turns, device)
            both = [[figure(seconds[name]) for name in NAMES] for figure in (statistics.median, min)]
            cells = (f"{1e6 * ours:>25.2f}{1e6 * torchs:>8.2f}{ours / torchs:>7.2f}" for ours, torchs in both)
            print(f"{what:<38}{''.join(cells)}", flush=True)
            rows.append((device.type, shape, what, *(f"{value:.4g}" for values in both for value in values)))
        print()
    if options.csv:
        options.csv.parent.mkdir(parents=True, exist_ok=True)
        with options.csv.open("w", newline="") as file:
            file.writelines(f"# {device.type}: {header(device)}\n" for device in devices)
            writer = csv.writer(file)
            seconds = (f"{name}_{kind}_seconds" for kind in ("median", "fastest") for name in NAMES)
            writer.writerow(("device", "shape", "call", *seconds))
            writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
