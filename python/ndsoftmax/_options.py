"""What the command line takes: conversions that fail with one line."""

from __future__ import annotations

import argparse
import importlib
import math
import re
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from ndsoftmax import _C

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


class Parser(argparse.ArgumentParser):
    """Ends with one line, not with its usage, where it cannot go on."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def joined(arguments: Sequence[str]) -> list[str]:
    """Values such as -1,0 and -1e-3 behind their option: alone, argparse takes them for options of their own."""
    result: list[str] = []
    for one in arguments:
        option = result[-1] if result else ""
        if option.startswith("--") and option != "--" and "=" not in option and re.match(r"-\d", one):
            result[-1] += f"={one}"
        else:
            result.append(one)
    return result


def device(name: str) -> torch.device:
    try:
        found = torch.device(name)
    except RuntimeError:
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{name!r} is neither cpu nor cuda")
    if found.type == "cuda":
        if not _C.HAS_CUDA:
            raise argparse.ArgumentTypeError(f"{name!r}: ndsoftmax was built without CUDA")
        if (found.index or 0) >= torch.cuda.device_count():
            raise argparse.ArgumentTypeError(f"{name!r}: torch sees {torch.cuda.device_count()} CUDA devices")
    return found


def shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not sizes with x between them, as 8x16x1024") from None


def dims(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(dim) for dim in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a dim, as -1, or several, as 0,2") from None


def seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds, as 60 or 0.5")
    return number


def words(known: Collection[str]) -> Callable[[str], list[str]]:
    """Converts known words with commas between them."""

    def convert(text: str) -> list[str]:
        for word in text.split(","):
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(known)}")
        return list(dict.fromkeys(text.split(",")))

    return convert


def output(text: str) -> Path:
    """A file that can be written; it is left as it is."""
    path = Path(text)
    try:
        existed = path.exists() or path.is_symlink()
        path.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {error.strerror}") from None
    if not existed:
        path.unlink()
    return path


def figure(text: str) -> Path:
    if Path(text).suffix not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"{text!r} ends in neither .png nor .svg")
    return output(text)


def terminal() -> bool:
    """Whether somebody watches stderr; what is written to a file or pipe has no progress in it."""
    return sys.stderr is not None and sys.stderr.isatty()


def progress(text: str) -> None:
    """Replace the line on a terminal."""
    if terminal():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def require(module: str, extra: str) -> Any:
    """Import what an extra brings."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise RuntimeError(f"needs {package}: pip install 'ndsoftmax[{extra}]'") from None
