"""Every instruction set that the build has kernels for and this CPU has, not only the best, which it would choose."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ndsoftmax
import pytest

INFO = ndsoftmax.build_info()
SETS = INFO["cpu_instruction_sets"]  # each contains those before it


@pytest.mark.parametrize("capability", SETS[: SETS.index(INFO["cpu_capability"])])
def test_forward_and_backward(capability: str) -> None:
    here = Path(__file__).parent
    script = (
        "import ndsoftmax, pytest, sys; "
        f"assert ndsoftmax.build_info()['cpu_capability'] == {capability!r}; "
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    numeric = ("test_forward.py", "test_backward.py", "test_numbers.py")
    masked = ("test_forward", "test_backward")
    tests = [str(here / name) for name in (*numeric, *(f"test_masked.py::{name}" for name in masked))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    result = subprocess.run(
        [sys.executable, "-c", script, "-q", "-p", "no:cacheprovider", "-k", "cpu", *tests],
        env={**environment, "NDSOFTMAX_CPU_CAPABILITY": capability},
        cwd=here.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
