"""Prints a folder that holds dlpack/dlpack.h, from apache-tvm-ffi or else from torch, without importing either."""

import importlib.util
import sys
from pathlib import Path


def package(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


if (tvm_ffi := package("tvm_ffi")) and (tvm_ffi / "include/dlpack/dlpack.h").exists():
    print(tvm_ffi / "include")
elif (torch := package("torch")) and (header := torch / "include/ATen/dlpack.h").exists():
    # torch keeps the header beside others of its own: give it a folder to itself
    folder = Path("dlpack_from_torch").resolve()
    (folder / "dlpack").mkdir(parents=True, exist_ok=True)
    (folder / "dlpack/dlpack.h").write_text(f'#include "{header}"\n')
    print(folder)
else:
    sys.exit("dlpack/dlpack.h was not found: install apache-tvm-ffi or torch")
