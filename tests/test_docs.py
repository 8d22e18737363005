"""The pages and the README say what is so."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def load(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


examples = load("examples")


@pytest.mark.parametrize("page", examples.PAGES, ids=lambda page: page.name)
def test_code_blocks_run(page):
    assert list(examples.wrong(page)) == []


def test_pages_build_without_a_warning(tmp_path):
    for module in ("sphinx", "myst_parser", "furo", "latex2mathml"):
        pytest.importorskip(module)
    options = ["--fail-on-warning", "--keep-going", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, DOCS, tmp_path], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "<math" in (tmp_path / "online-softmax.html").read_text()


def test_figures_of_the_ladder(tmp_path):
    pytest.importorskip("sphinx")
    pytest.importorskip("latex2mathml")
    file = tmp_path / "ladder.json"
    measured = [("naive", 256, 2e-6, 0.5), ("naive", 512, 5e-6, 0.4), ("wide", 512, 3e-6, 0.67)]
    rungs = [
        {"rung": rung, "dtype": "float32", "dim": dim, "seconds": seconds, "frac": frac}
        for rung, dim, seconds, frac in measured
    ]
    file.write_text(json.dumps({"title": "Some GPU", "ladder": rungs}))
    *_, naive, wide = load("conf")._figures(file).replace("&nbsp;", " ").splitlines()
    assert naive == "| naive | float32 | 2.0 (0.50) | 5.0 (0.40) |"
    assert wide == "| wide | float32 | – | 3.0 (0.67) |"
