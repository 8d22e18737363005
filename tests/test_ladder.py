"""The ladder: its kernels compile, and compute what they claim, on a GPU or in the emulator."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from ndsoftmax._bench import ladder
from ndsoftmax._bench.ladder import RUNGS, Check, Kernels, Step
from ndsoftmax._bench.measure import DTYPES, Row
from ndsoftmax._bench.shapes import Case

EMULATOR = Path(__file__).parent / "cpp" / "emulator"
NVCC = shutil.which("nvcc")
INCLUDES = [Path(os.environ.get("CUDA_PATH", "/usr/local/cuda")) / "include"]
INCLUDES += [Path(NVCC).resolve().parents[1] / "include"] if NVCC else []


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    """The kernels in the emulator, which takes them as they are."""
    include = next((folder for folder in INCLUDES if (folder / "cuda_fp16.h").exists()), None)
    if include is None:
        pytest.skip("no CUDA headers")
    library = tmp_path_factory.mktemp("ladder") / "emulated.so"
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-U_FORTIFY_SOURCE", f"-I{EMULATOR}", "-isystem", include]
    compiler = os.environ.get("CXX", "c++")
    sources = ["-xc++", ladder.SOURCE, EMULATOR / "emulator.cpp"]
    subprocess.run([compiler, *options, *sources, "-o", library, "-pthread"], check=True)
    return Kernels(library)


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_rungs_in_the_emulator(kernels, rung):
    generator = torch.Generator().manual_seed(0)
    widest = 8192 if rung.width == 8 or not rung.held else 1024 * rung.width
    for dim in {rung.width, 3 * rung.width, 31 * rung.width, 1000, 1024, widest}:
        x = torch.randn(3, dim, generator=generator).to(DTYPES[rung.dtype])
        x[2, dim // 2 :] = -torch.inf
        x[2, 0] = 0
        y = torch.full((5, dim), 7.0, dtype=x.dtype)  # rows that are not its own follow
        kernels(rung.name, x, y[:3])
        assert not ladder.check(partial(kernels, rung.name), x).wrong(rung.name, x.dtype)
        rtol = 1e-5 if x.dtype == torch.float32 else 1e-3
        torch.testing.assert_close(y[:3].double(), torch.softmax(x.double(), 1), rtol=rtol, atol=1e-7)
        assert (y[3:] == 7).all()


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_only_safe_rungs_survive_89(kernels, rung):
    x = torch.zeros(1, 64, dtype=DTYPES[rung.dtype])
    x[0, 5] = 88
    y = torch.empty_like(x)
    kernels(rung.name, x, y)
    assert y[0, 5] == 1
    x[0, 5] = 89
    kernels(rung.name, x, y)
    assert y[0, 5] == 1 if rung.safe else y[0, 5].isnan()


def test_rungs_refuse_what_they_do_not_take(kernels):
    for rung in RUNGS:
        for dim in (rung.width + 1, 1024 * rung.width + rung.width):
            x = torch.zeros(2, dim, dtype=DTYPES[rung.dtype])
            if rung.takes(dim):
                kernels(rung.name, x, torch.empty_like(x))
            else:
                with pytest.raises(RuntimeError, match=rung.name):
                    kernels(rung.name, x, torch.empty_like(x))
    with pytest.raises(RuntimeError):
        kernels("no_such_rung", torch.zeros(2, 2), torch.zeros(2, 2))


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
def test_nvcc_compiles_it_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = ladder.compiled([75, 80, 90])
    written = library.stat().st_mtime_ns
    assert ladder.compiled([75, 80, 90]).stat().st_mtime_ns == written
    assert list((tmp_path / "ndsoftmax").iterdir()) == [library]
    Kernels(library)
    monkeypatch.setattr(ladder, "SOURCE", tmp_path / "broken.cu")
    ladder.SOURCE.write_text("nonsense")
    with pytest.raises(RuntimeError, match=r"broken\.cu"):
        ladder.compiled([90])


def test_no_nvcc(monkeypatch):
    monkeypatch.setenv("CUDACXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match="no-such-compiler"):
        ladder.compiled([90])


def test_a_kernel_that_claims_too_much_is_found_out():
    right = Check((), 1.0, 1.0)
    overflowed = Check((), 1.0, float("nan"))
    assert not right.wrong("safe_f32", torch.float32)
    assert overflowed.wrong("safe_f32", torch.float32)
    assert not overflowed.wrong("naive_f32", torch.float32)
    assert Check((), float("nan"), 1.0).wrong("naive_f32", torch.float32)
    x = torch.randn(4, 100)
    assert ladder.check(lambda x, y: y.copy_(torch.softmax(x, 0)), x).wrong("torch", x.dtype)
    assert not ladder.check(lambda x, y: torch.softmax(x, 1, out=y), x).wrong("torch", x.dtype)


def test_climbing_in_the_emulator(kernels, monkeypatch):
    monkeypatch.setattr(ladder, "ROWS", 2)
    steps = [ladder.climb(kernels, torch.device("cpu"), 64, dtype) for dtype in ("float32", "float16")]
    assert not ladder.any_wrong(steps)
    for step, rung in zip(steps, ("online_f32x4", "safe_f16x8"), strict=True):
        *_, ours = ladder.table(step, steps).splitlines()
        assert ours.startswith("ndsoftmax ")
        x = step.checks["torch"].first
        assert step.checks[rung].first == pytest.approx(x, rel=1e-3)
        assert step.row.frac(rung) == pytest.approx(step.row.copy / step.row.seconds[rung])


def test_the_table_says_what_each_step_gained():
    case, right = Case("ladder", (4096, 256)), Check((0.1, 0.2, 0.3), 1.0, 1.0)
    halves = {"safe_f16": 2e-6, "safe_f16x2": None, "torch": 3e-6}
    singles = {"tree_f32": 12e-6, "safe_f32": 4e-6}
    steps = [
        Step(Row(case, dtype, "forward", 2e-6, 1 << 23, seconds), dict.fromkeys(seconds, right))
        for dtype, seconds in (("float32", singles), ("float16", halves))
    ]
    text = ladder.table(steps[0], steps)
    assert "3.00 × tree_f32" in text
    assert "0.10000000 0.20000000 0.30000000" in text
    assert "2.00 × safe_f32" in ladder.table(steps[1], steps)  # across dtypes
    assert re.search(r"^safe_f16x2 +-  FAILED$", ladder.table(steps[1], steps), re.MULTILINE)
    assert not ladder.any_wrong(steps[:1])
    assert ladder.any_wrong(steps)
    gained = {one["rung"]: one["gained"] for one in ladder.as_dicts(steps)}
    assert gained == {"tree_f32": None, "safe_f32": (3.0, "tree_f32"), "safe_f16": (2.0, "safe_f32"), "torch": None}
    assert all(rung.name in ladder.legend() for rung in RUNGS)


@pytest.mark.skipif(not torch.cuda.is_available() or NVCC is None, reason="needs a GPU and nvcc")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rungs_on_a_gpu(dtype):
    major, minor = torch.cuda.get_device_capability()
    compiled = Kernels(ladder.compiled([10 * major + minor]))
    for dim in ladder.DIMS:
        x = torch.randn(64, dim, device="cuda", dtype=dtype)
        for name, function in ladder.functions(compiled, x.device, dtype, dim).items():
            assert not ladder.check(function, x).wrong(name, dtype), name
