from __future__ import annotations

import contextlib
import os

import pytest
from hypothesis import settings
from strategies import DEVICES

with contextlib.suppress(ImportError):  # needs expecttest; loads a Hypothesis profile of its own: ours comes after it
    import torch.testing._internal.common_utils  # noqa: F401

settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)
