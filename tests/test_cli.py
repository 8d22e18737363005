"""`python -m ndsoftmax`, run as a user runs it."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import ndsoftmax
import pytest
import torch
from command_line import run, said_one_line
from ndsoftmax._showcase import cases


def test_the_main_job_shows_every_shape_in_an_aligned_table(device: str) -> None:
    result = run("--device", device)
    assert (result.returncode, result.stderr) == (0, "")
    assert torch.__version__ in result.stdout
    assert ndsoftmax.__version__ in result.stdout
    header, *rows = lines = table(result.stdout)
    assert len(rows) == len(cases(device))
    for case, row in zip(cases(device), rows, strict=True):
        assert row.startswith(case.what)
        assert str(case.shape) in row
    # Aligned: as many gaps run through all lines as the header has.
    filled = "".join(" " if set(column) == {" "} else "x" for column in zip(*lines, strict=True))
    assert len(re.split(" {2,}", filled)) == len(re.split(" {2,}", header)) > 8


def table(text: str) -> list[str]:
    """The lines from the header to the empty line below the last row."""
    lines = text.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("what"))
    return lines[head : lines.index("", head)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--device", "tpu"), "tpu"), (("--dtype", "int8"), "int8"), (("--shape",), "--shape")],
    ids=str,
)
def test_bad_arguments_give_one_friendly_line(arguments: tuple[str, ...], words: str) -> None:
    result = run(*arguments)
    assert said_one_line(result)
    assert words in result.stderr


def test_help_has_examples() -> None:
    result = run("--help")
    assert result.returncode == 0
    assert "examples:" in result.stdout
    assert "--dtype" in result.stdout


def test_the_console_script_is_the_same_program() -> None:
    script = Path(sysconfig.get_path("scripts")) / "ndsoftmax"
    assert run("--help", command=(str(script),)).stdout == run("--help").stdout
