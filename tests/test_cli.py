"""`python -m ndsoftmax`, run as a user runs it."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import ndsoftmax
import pytest
import torch
from command_line import COMMAND, run, said_one_line
from ndsoftmax.__main__ import main
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
    [
        (("--device", "tpu"), "tpu"),
        (("--dtype", "int8"), "int8"),
        (("--shape",), "--shape"),
        (("bogus",), "COMMAND: invalid choice: 'bogus'"),
        (("--dtype", "float16", "explain", "4x5"), "after the command: ndsoftmax explain"),
        (("--device", "cpu", "doctor"), "after the command: ndsoftmax doctor"),
    ],
    ids=str,
)
def test_bad_arguments_give_one_friendly_line(arguments: tuple[str, ...], words: str) -> None:
    result = run(*arguments)
    assert said_one_line(result)
    assert words in result.stderr


@pytest.mark.parametrize(
    "arguments", [("doctor",), ("explain", "4x5", "--device", "cpu"), ("bench", "4x5", "--device", "cpu")], ids=str
)
def test_a_wrong_instruction_set_gives_one_friendly_line(arguments: tuple[str, ...]) -> None:
    result = run(*arguments, environment={"NDSOFTMAX_CPU_CAPABILITY": "mmx"})
    assert said_one_line(result)
    assert "NDSOFTMAX_CPU_CAPABILITY is 'mmx'; it may be avx512, avx2 or baseline" in result.stderr


def test_without_stdout_and_stderr() -> None:
    for arguments in ("explain 4x5", "bench 4x5 --dtype float32 --device cpu"):
        for closed in (">&-", "2>&-"):
            result = run("-c", f"{' '.join(COMMAND)} {arguments} {closed}", command=("bash",))
            assert (result.returncode, result.stderr) == (0, "")


def test_a_full_disk_gives_one_friendly_line() -> None:
    result = run("-c", f"{' '.join(COMMAND)} explain 4x5 >/dev/full", command=("bash",))
    assert said_one_line(result)
    assert "No space left" in result.stderr


def test_the_doctor_sees_nan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = ndsoftmax.log_softmax
    monkeypatch.setattr(ndsoftmax, "log_softmax", lambda x, dim: right(x, dim) * (torch.nan if x.dim() == 3 else 1))
    assert main(["doctor"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_help_has_examples() -> None:
    result = run("--help")
    assert result.returncode == 0
    assert "examples:" in result.stdout
    assert "--dtype" in result.stdout


def test_the_console_script_is_the_same_program() -> None:
    script = Path(sysconfig.get_path("scripts")) / "ndsoftmax"
    assert run("--help", command=(str(script),)).stdout == run("--help").stdout
