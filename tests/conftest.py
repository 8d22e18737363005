from __future__ import annotations

import os

import pytest
import torch.testing._internal.common_utils  # noqa: F401  loads a Hypothesis profile: ours must come after it
from hypothesis import settings
from strategies import DEVICES

settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)
