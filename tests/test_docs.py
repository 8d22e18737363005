"""The pages and the README say what is so."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "docs" / "examples.py"
_spec = importlib.util.spec_from_file_location("examples", SOURCE)
examples = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(examples)


@pytest.mark.parametrize("page", examples.PAGES, ids=lambda page: page.name)
def test_code_blocks_run(page):
    assert list(examples.wrong(page)) == []


def test_pages_build_without_a_warning(tmp_path):
    pytest.importorskip("sphinx")
    options = ["--fail-on-warning", "--keep-going", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, SOURCE.parent, tmp_path], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "<math" in (tmp_path / "online-softmax.html").read_text()
