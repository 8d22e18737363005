"""explain(): the plan that a call would use, as text, as attributes and on the command line."""

import copy
import json
import pickle
import re

import ndsoftmax
import pytest
import torch
from command_line import run, said_one_line
from ndsoftmax.__main__ import main


@pytest.mark.parametrize("device", ["T4", "A100", "L4", "RTX 4090", "H100", "H200", "B200", "cpu"])
@pytest.mark.parametrize("backward", [False, True])
def test_any_shape_on_any_device(device, backward):
    for shape in ((4096, 1000), (8, 50257), (3, 1 << 20), (8, 19, 64, 64)):
        plan = ndsoftmax.explain(shape, 1, device=device, dtype=torch.bfloat16, backward=backward)
        said = plan.to_dict()
        assert said["regime"] in str(plan)
        assert said["why"] in str(plan)
        assert said["outer"] * said["dim"] * said["inner"] == torch.Size(shape).numel()
        assert said["bytes"] == torch.Size(shape).numel() * 2 * (3 if backward else 2)
        assert (plan.seconds is None) == (plan.registers is None) == (device == "cpu")
        json.dumps(said)


def test_time_and_registers():
    plan = ndsoftmax.explain((4096, 1024), device="H200", dtype=torch.bfloat16, backward=True)
    assert plan.seconds == pytest.approx(3 * 4096 * 1024 * 2 / 4.8e12)
    assert plan.threads_per_row * plan.registers * 4 == 2 * 1024 * 2  # a row of each operand, spread over its threads


def test_clusters_are_for_hopper_and_later():
    assert ndsoftmax.explain((4096, 50257), device="H200").regime == "cluster"
    assert ndsoftmax.explain((4096, 50257), device="A100").regime == "online"


def test_what_clusters_read_twice_is_said():
    held, more = (ndsoftmax.explain((200, dim), device="H200") for dim in (655_360, 655_364))
    assert (held.regime, held.passes, more.regime, more.passes) == ("cluster", 1, "cluster", 2)
    assert "each element read once" in str(held)
    assert "each element read at most twice" in str(more)


def test_a_tensor_is_explained_as_it_lies():
    x = torch.zeros(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    assert ndsoftmax.explain(x, 1, device="H100").inner == 1
    assert ndsoftmax.explain(x.contiguous(), 1, device="H100").inner == 64
    assert ndsoftmax.explain(x[..., ::2], -1, device="H100").regime == "strided"
    half = ndsoftmax.explain(x.half(), 1, dtype=torch.float32, device="H100")
    assert half.bytes == x.numel() * 6
    assert "float16 → float32" in str(half)


def test_bad_input():
    with pytest.raises(ValueError, match=r"'Voodoo'.*H200"):
        ndsoftmax.explain((2, 3), device="Voodoo")
    with pytest.raises(IndexError):
        ndsoftmax.explain((2, 3), 2)
    with pytest.raises(TypeError, match="dtype="):
        ndsoftmax.explain(torch.zeros(3, dtype=torch.int64))
    for wrong in ("4x5", 5, None, (2.5, 3)):
        with pytest.raises(TypeError, match="input must be a tensor or a shape"):
            ndsoftmax.explain(wrong)
    for wrong, words in (((4, -5), "may not be negative"), ((1 << 32, 1 << 32), "2^63"), ((1 << 63,), "2^63")):
        with pytest.raises(ValueError, match=rf"input is \({wrong[0]},.*{re.escape(words)}"):
            ndsoftmax.explain(wrong)
    with pytest.raises(TypeError, match=r"dtype must be a torch\.dtype, but got 'float32'"):
        ndsoftmax.explain((2, 3), dtype="float32")
    with pytest.raises(TypeError, match=r"strided tensor, but its layout is torch\.sparse_coo"):
        ndsoftmax.explain(torch.eye(3).to_sparse())
    with pytest.raises(RuntimeError, match=r"where must broadcast to the shape of input, \(8, 64\), but has \(7,\)"):
        ndsoftmax.explain((8, 64), where=(7,))
    with pytest.raises(TypeError, match=r"mask must be torch\.bool"):
        ndsoftmax.explain((8, 64), mask=torch.zeros(64))
    with pytest.raises(TypeError, match=r"bias must be torch\.float32"):
        ndsoftmax.explain((8, 64), bias=torch.zeros(64, dtype=torch.float64))


def test_it_is_a_value() -> None:
    plan = ndsoftmax.explain((8, 19, 64, 64), 1, device="H200", mask=(64, 64))
    for twin in (pickle.loads(pickle.dumps(plan)), copy.copy(plan), copy.deepcopy(plan)):
        assert twin == plan
        assert str(twin) == repr(twin) == str(plan)
    assert plan != ndsoftmax.explain((8, 19, 64, 64), 1, device="A100", mask=(64, 64))
    assert {*plan.to_dict(), "to_dict"} <= set(dir(plan))
    assert plan.to_dict() == {name: getattr(plan, name) for name in plan.to_dict()}


def test_a_forced_regime_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NDSOFTMAX_REGIME", "online")
    for device in ("cpu", "H200"):
        plan = ndsoftmax.explain((4, 1000), device=device)
        assert (plan.regime, plan.why) == ("online", "the environment variable NDSOFTMAX_REGIME forces it")
        assert "no elements" in ndsoftmax.explain((4, 0), device=device).why
    monkeypatch.setenv("NDSOFTMAX_REGIME", "cluster")
    for call in (lambda: ndsoftmax.softmax(torch.zeros(4, 5)), lambda: ndsoftmax.explain((4, 5), device="cpu")):
        with pytest.raises(ValueError, match="regime cluster on the CPU needs a GPU"):
            call()
    assert said_one_line(run("explain", "4x5", "--device", "T4"))  # no clusters before 9.0
    monkeypatch.setenv("NDSOFTMAX_REGIME", "spiral")
    with pytest.raises(ValueError, match="NDSOFTMAX_REGIME is 'spiral'; it may be warp, block"):
        ndsoftmax.explain((4, 5), device="H200")


def test_command_line():
    done = run("explain", "8x16x1024x1024", "--dim", "-1", "--dtype", "bfloat16", "--device", "H200")
    assert done.returncode == 0, done.stderr
    assert "131072 × 1024 × 1" in done.stdout
    assert run("doctor").stdout.rstrip().splitlines()[-1].startswith("OK")


@pytest.mark.parametrize(
    ("options", "keywords"),
    [
        ("--dim -2,-1", {"dim": (-2, -1)}),
        ("--mask 8x1x64", {"mask": (8, 1, 64)}),
        ("--where 64", {"where": (64,)}),
        ("--bias 64x64 --scale -1e-1", {"bias": (64, 64), "scale": -0.1}),
        ("--causal", {"causal": True}),
        ("--causal-lower-right --log --backward", {"causal": "lower_right", "log": True, "backward": True}),
    ],
)
def test_options_are_those_of_the_function(options, keywords, capsys):
    assert main(["explain", *options.split(), "8x64x64", "--device", "H200"]) == 0
    assert capsys.readouterr() == (f"{ndsoftmax.explain((8, 64, 64), device='H200', **keywords)}\n", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "4xbanana"),
        ("explain", "4x-5"),
        ("explain", "--", "-4x5"),
        ("explain", "4x99999999999999999999"),
        ("explain", "4294967296x4294967296"),
        ("explain", "4x5", "--dim", "2"),
        ("explain", "4x5", "--dim", "0,0"),
        ("explain", "4x5", "--dim", "one"),
        ("explain", "4x5", "--device", "Voodoo"),
        ("explain",),
        ("explain", "4x5", "--device", ""),
        ("explain", "4x5", "--dim", "-3,-1"),
        ("explain", "4x5", "--mask", "7"),
        ("explain", "4x5", "--mask", "fivexfour"),
        ("explain", "4x5", "--mask", "5", "--where", "5"),
        ("explain", "4x5", "--scale", "much"),
        ("explain", "4x5", "--causal", "--dim", "0"),
        ("--device", "Voodoo"),
    ],
)
def test_bad_command_lines_end_with_one_line_and_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    output, errors = capsys.readouterr()
    assert (ended.value.code, output, errors.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("device", ["cpu", "A100", "H200"])
@pytest.mark.parametrize("shape", [(0,), (3, 0, 5), (4, 0), (0, 4)], ids=str)
def test_nothing_to_compute(shape: tuple[int, ...], device: str) -> None:
    for backward in (False, True):
        assert "no elements" in str(ndsoftmax.explain(shape, 0, device=device, backward=backward))


def test_where_is_planned_as_a_mask() -> None:
    plans = [ndsoftmax.explain((8, 64, 64), device="H200", **{name: (64, 64)}).to_dict() for name in ("mask", "where")]
    assert plans[0] == plans[1]
    with pytest.raises(ValueError, match="mask excludes and where includes: give one of them"):
        ndsoftmax.explain((8, 64), mask=(8, 64), where=(8, 64))


@pytest.mark.parametrize("command", ["explain", "bench", "doctor"])
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert not ended.value.code
    assert "example" in capsys.readouterr().out
