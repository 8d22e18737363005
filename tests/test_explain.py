"""explain(): the plan that a call would use, as text, as attributes and on the command line."""

import json

import ndsoftmax
import pytest
import torch
from command_line import run, said_one_line


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


def test_command_line():
    done = run("explain", "8x16x1024x1024", "--dim", "-1", "--dtype", "bfloat16", "--device", "H200")
    assert done.returncode == 0, done.stderr
    assert "131072 × 1024 × 1" in done.stdout
    assert run("doctor").stdout.rstrip().splitlines()[-1].startswith("OK")


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "4xbanana"),
        ("explain", "4x-5"),
        ("explain", "4x99999999999999999999"),
        ("explain", "4x5", "--dim", "2"),
        ("explain", "4x5", "--dim", "0,0"),
        ("explain", "4x5", "--dim", "one"),
        ("explain", "4x5", "--device", "Voodoo"),
        ("explain",),
        ("--device", "Voodoo"),
    ],
)
def test_bad_command_lines_end_with_one_line_and_exit_code_2(arguments):
    assert said_one_line(run(*arguments))


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
def test_help_has_examples(command: str) -> None:
    assert "example" in run(command, "--help").stdout
