"""`ndsoftmax bench` on a machine without a GPU: what it prints, writes and draws, and how it ends."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import os
import pty
import re
import signal
import subprocess
from pathlib import Path

import ndsoftmax
import pytest
import torch
from command_line import COMMAND, run, said_one_line, without
from ndsoftmax.__main__ import main
from ndsoftmax._bench.measure import DTYPES, Row
from ndsoftmax._bench.report import summary
from ndsoftmax._bench.shapes import SUITES, Case, shrunk, suite

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
needs_rich = pytest.mark.skipif(importlib.util.find_spec("rich") is None, reason="needs rich")


def test_shapes_of_ones_own_in_the_table_and_in_files(tmp_path):
    as_csv, as_json = tmp_path / "own.csv", tmp_path / "own.json"
    result = run(
        *("bench", "64x300", "4x9", "--dim", "1", "--dtype", "float32,float16", "--device", "cpu"),
        *("--csv", str(as_csv), "--json", str(as_json)),
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "\x1b" not in result.stdout
    lines = result.stdout.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("shape"))
    rows = [line.split() for line in lines[head + 1 : lines.index("", head)]]
    assert {line.index("float") for line in lines[head + 1 : lines.index("", head)]} == {lines[head].index("dtype")}
    assert [row[:3] for row in rows] == [
        [shape, "1", dtype] for dtype in ("float32", "float16") for shape in ("64x300", "4x9")
    ]

    with as_csv.open() as file:
        assert f"torch {torch.__version__}, forward" in file.readline()
        found = list(csv.DictReader(file))
    assert [(one["shape"], one["provider"]) for one in found] == [
        (row[0], provider) for row in rows for provider in ("ndsoftmax", "torch")
    ]
    for one in found:
        elements = math.prod(map(int, one["shape"].split("x")))
        assert int(one["bytes"]) == 2 * elements * DTYPES[one["dtype"]].itemsize
        assert float(one["frac"]) == pytest.approx(
            float(one["copy_seconds"]) / float(one["seconds"]), rel=0.01, abs=1e-3
        )
    measurements = json.loads(as_json.read_text())["measurements"]
    assert [{name: str(value) for name, value in one.items()} for one in measurements] == found
    assert {one["kernel"] for one in measurements if one["shape"] == "64x300"} == {
        "",
        ndsoftmax.explain((64, 300), 1, device="cpu").regime,
    }


def test_backward_and_a_peer_that_is_compiled():
    result = run("bench", "32x100", "--dtype", "float32", "--backward", "--peers", "torch,compile", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    assert re.search(r"^32x100 .* \d+\.\d+ +\d+\.\d\d +\d+\.\d+ +\d+\.\d\d +\d+\.\d+ +\d+\.\d\d$", result.stdout, re.M)


def test_frac_counts_the_bytes_that_must_move():
    case = Case("own", (1000, 10))
    forward = Row(case, "float32", "forward", 1.0, 2 * 40000, {"ndsoftmax": 2.0, "torch": 4.0})
    backward = Row(case, "float32", "backward", 1.0, 3 * 40000, {"ndsoftmax": 2.0, "torch": None})
    assert (forward.frac("ndsoftmax"), forward.frac("torch")) == (0.5, 0.25)
    assert (backward.frac("ndsoftmax"), backward.frac("torch")) == (0.75, None)
    text = summary([forward, backward], ["ndsoftmax", "torch"])
    assert f"{math.sqrt(0.5 * 0.75):.3f} / 0.500" in text
    assert "0.250 / 0.250*" in text
    assert "slower than torch on 0 of 1 shapes" in text


def regime_on(device, dtype):
    return lambda shape: ndsoftmax.explain(shape, dtype=dtype, device=device).regime


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_the_sweep_has_the_dims_around_every_switch(dtype):
    regime, elements, vector = regime_on("H200", dtype), (1 << 29) // dtype.itemsize, 16 // dtype.itemsize
    dims = {case.shape[1] for case in suite("sweep", dtype, 1 << 29, regime)}
    assert dims >= set(range(1000, 1101))
    regimes = {dim: regime((elements // dim, dim)) for dim in range(1, 40_000)}
    for offset in (0, 1):  # rows that start on 16 bytes, and others
        for dim in range(vector + offset, 40_000 - vector, vector):
            if regimes[dim] != regimes[dim + vector]:
                assert dims >= set(range(dim, dim + vector + 1))


def test_steps_between_neighbouring_dims_are_told():
    def row(dim, seconds):
        return Row(
            Case("neighbouring dims", (10, dim)), "float32", "forward", float(dim), 80 * dim, {"ndsoftmax": seconds}
        )

    rows = [row(dim, dim * (1.2 if dim == 105 else 1.0)) for dim in (*range(100, 110), 200)]
    assert "time per element, float32: neighbouring dims differ by 20.0% at most (105, 106)" in summary(
        rows, ["ndsoftmax"]
    )


@pytest.mark.parametrize("name", SUITES)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_suites(name, dtype):
    cases = suite(name, dtype, 1 << 24, regime_on("T4", dtype))
    assert len(set(cases)) == len(cases) >= 8
    for case in cases:
        small = shrunk(case, 1 << 24, dtype)
        axis = range(len(case.shape))[case.dim]
        assert small.shape[axis] == case.shape[axis]
        ndsoftmax.explain(small.shape, small.dim, dtype=dtype, device="T4")
        if small != case:
            assert (1 << 22) < small.numel * dtype.itemsize <= (1 << 24) or small.shape[:-1] == (1,) * (len(axis) - 1)


def test_random_shapes_follow_from_the_seed():
    drawn = {seed: suite("random", torch.float32, 1 << 24, str, seed) for seed in (0, 7, -7)}
    assert drawn[7] == suite("random", torch.float32, 1 << 24, str, 7)
    assert not any(set(drawn[7][:100]) == set(other[:100]) for seed, other in drawn.items() if seed != 7)
    for cases in drawn.values():
        assert {case.group for case in cases} == {"random, dim last", "random, dim not last"}
        assert all(0 < case.numel <= 1 << 22 for case in cases)
    result = run("bench", "--suite", "random", "--seed", "7", "--device", "cpu", "--seconds", "0.01", "--peers", "none")
    assert result.stdout.splitlines()[0].endswith("forward, seed 7")


BAD = [
    ("4xbanana", "banana"),
    ("4x5 --dim 2", "Dimension"),
    ("4x0", "no elements"),
    ("4x5 --dtype int8", "int8"),
    ("4x5 --peers jax", "jax"),
    ("4x5 --device Voodoo", "Voodoo"),
    ("4x5 --csv /nowhere/file.csv", "/nowhere/file.csv"),
    ("4x5 --plot file.bmp", ".png"),
    ("4x5 --roofline", "--plot"),
    ("4x5 --seconds soon", "soon"),
    ("4x5 --seconds nan", "'nan' is not a time"),
    ("4x5 --seconds -1", "'-1' is not a time"),
    ("4x5 --seconds 0", "'0' is not a time"),
    ("4x5 --seconds inf", "'inf' is not a time"),
    ("999999x999999x99 --device cpu", "999999x999999x99 takes 1441 TiB of memory, cpu has"),
    ("4x5 --csv same --json ./same", "same'"),
    ("4x5 --csv same.svg --plot same.svg", "same.svg'"),
    ("--suite nothing", "ladder"),
    ("--suite ladder --device cpu", "GPU"),
    ("4x5 --peers liger --device cpu", "GPU"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=str)
def test_bad_input_ends_with_one_line_and_exit_code_2(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments.split()])
    output, errors = capsys.readouterr()
    assert (ended.value.code, output, errors.count("\n")) == (2, "", 1)
    assert words in errors


def test_bad_input_as_a_user_sees_it():
    for arguments, words in (BAD[0], BAD[6], BAD[-2], ("4x5 --csv same --json ./same", "same'")):
        result = run("bench", *arguments.split())
        assert said_one_line(result)
        assert words in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_cuda_without_a_gpu():
    assert said_one_line(run("bench", "4x5", "--device", "cuda"))


def test_a_missing_extra_is_named():
    result = run("bench", "4x5", "--plot", "never.png", command=without("matplotlib"))
    assert said_one_line(result)
    assert "pip install 'ndsoftmax[bench]'" in result.stderr
    assert not Path("never.png").exists()


@pytest.fixture
def heeded_ctrl_c():
    """What a background job starts ignores Ctrl-C, and so would the tests' children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded_ctrl_c")
def test_ctrl_c_leaves_what_was_measured(tmp_path):
    file = tmp_path / "some.json"
    arguments = ("bench", "--suite", "rows", "--dtype", "float32", "--device", "cpu", "--json", str(file))
    with subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not process.stdout.readline().startswith("4194304x1 "):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "geometric mean" in rest
    assert re.fullmatch(r"\d+ of 33 shapes left out: interrupted\n", errors)
    assert json.loads(file.read_text())["measurements"][0]["shape"] == "4194304x1"


def test_a_reader_that_leaves_early():
    result = subprocess.run(
        ["bash", "-c", f"{' '.join(COMMAND)} bench 64x64 64x65 64x66 | head -1"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (len(result.stdout.splitlines()), result.stderr) == (1, "")


def test_a_reader_that_leaves_early_does_not_take_the_files_along(tmp_path):
    file = tmp_path / "some.csv"
    command = " ".join([*COMMAND, "bench", "64x64", "64x65", "64x66", "--device", "cpu", "--csv", str(file)])
    subprocess.run(["bash", "-c", f"{command} | head -3"], capture_output=True, timeout=100, check=False)
    assert "64x64" in file.read_text()


def test_the_first_shape_is_measured_however_short_the_time():
    result = run("bench", "64x64", "64x65", "--dtype", "float32", "--device", "cpu", "--seconds", "1e-9")
    assert result.stderr == "1 of 2 shapes left out: --seconds 1e-09 were over\n"
    assert "\n64x64 " in result.stdout


def test_a_regime_that_is_forced():
    arguments = ("bench", "--suite", "vocab", "--dtype", "float32", "--device", "cpu", "--seconds", "1e-9")
    online = run(*arguments, environment={"NDSOFTMAX_REGIME": "online"})
    assert online.returncode == 0
    assert re.search(r"float32 +online ", online.stdout)
    warp = run(*arguments, environment={"NDSOFTMAX_REGIME": "warp"})
    assert warp.returncode == 1
    assert "regime warp on the CPU needs" in warp.stderr
    assert "frac: geometric mean" in warp.stdout
    own = run("bench", "64x64", "--device", "cpu", environment={"NDSOFTMAX_REGIME": "spiral"})
    assert said_one_line(own)


def on_a_terminal(command, *arguments):
    """Run with a terminal for stderr: return the exit code, stdout and what the terminal shows."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs)
    shown = b""
    try:
        while some := os.read(ours, 4096):
            shown += some
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    output, _ = process.communicate(timeout=100)
    return process.returncode, output, shown.decode()


@needs_rich
def test_progress_shows_on_a_terminal_and_never_in_a_pipe():
    code, output, shown = on_a_terminal(COMMAND, "bench", "64x64", "--dtype", "float32", "--device", "cpu")
    assert code == 0
    assert "64x64 float32" in shown
    assert "\x1b" not in output
    assert any(line.startswith("64x64 ") for line in output.splitlines())


def test_without_rich_it_measures_and_names_the_extra():
    code, output, shown = on_a_terminal(without("rich", "rich.console"), "bench", "64x64", "--device", "cpu")
    assert code == 0
    assert shown.strip().endswith("pip install 'ndsoftmax[cli]'")
    assert len(shown.splitlines()) == 1
    assert "geometric mean" in output


@needs_matplotlib
def test_plots(tmp_path):
    png, svg = tmp_path / "frac.png", tmp_path / "roof.svg"
    assert run("bench", "64x64", "--device", "cpu", "--plot", str(png)).returncode == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    done = run("bench", "64x64", "--device", "cpu", "--plot", str(svg), "--roofline", "--json", str(tmp_path / "roof"))
    assert done.returncode == 0, done.stderr
    drawn = svg.read_text()
    for words in ("arithmetic intensity (exponentials / byte", "exponentials / s)", "GB/s", "ndsoftmax", "torch"):
        assert words in drawn
    lines = tmp_path / "lines.svg"
    done = run("bench", *(f"64x{dim}" for dim in range(8, 16)), "--device", "cpu", "--plot", str(lines))
    assert done.returncode == 0, done.stderr
    for words in ("dim (elements of a row)", "frac (1 is the speed of memory)", "ndsoftmax", "torch"):
        assert words in lines.read_text()
    measured = json.loads((tmp_path / "roof").read_text())
    for one in measured["measurements"]:
        assert one["bytes"] / one["copy_seconds"] * 0.99 < measured["roof"]["bytes_per_second"]
        assert 64 * 64 / one["seconds"] * 0.99 < measured["roof"]["exps_per_second"]
    assert measured["roof"]["exps_per_second"] > 1e7
