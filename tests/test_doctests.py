"""Every example in a docstring runs and prints what it says."""

import doctest
import importlib
import pkgutil

import ndsoftmax
import pytest
import torch

MODULES = ["ndsoftmax", *(f"ndsoftmax.{module.name}" for module in pkgutil.iter_modules(ndsoftmax.__path__))]


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith(("_C", "__main__"))])
def test_examples(name):
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, extraglobs={"torch": torch, "ndsoftmax": ndsoftmax})
    assert failed == 0
