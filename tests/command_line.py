"""`python -m ndsoftmax`, run as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys

COMMAND = (sys.executable, "-m", "ndsoftmax")


def run(
    *arguments: str, command: tuple[str, ...] = COMMAND, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **(environment or {})}
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300, check=False, env=env)


def without(*modules: str) -> tuple[str, ...]:
    """The command on a machine that lacks modules."""
    hide = f"import runpy, sys; sys.modules.update(dict.fromkeys({modules!r}))"
    return (sys.executable, "-c", f"{hide}; runpy.run_module('ndsoftmax', run_name='__main__', alter_sys=True)")


def said_one_line(result: subprocess.CompletedProcess[str]) -> bool:
    """Whether it ended with exit code 2 and one line on stderr."""
    return result.returncode == 2 and result.stdout == "" and len(result.stderr.splitlines()) == 1
