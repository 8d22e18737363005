"""The suite `masked`: what it gives to softmax means to ndsoftmax what it means to torch."""

from __future__ import annotations

from dataclasses import replace

import oracle
import pytest
import torch
from command_line import run
from ndsoftmax._bench.providers import PROVIDERS
from ndsoftmax._bench.shapes import fused, suite


def case_of(name):
    case = next(case for case in suite("masked", torch.float32, 1 << 20, lambda shape: "") if case.fused == name)
    beside = tuple(
        1 if size == 1 else own for size, own in zip(case.beside, (2, 3, 24, 40)[4 - len(case.beside) :], strict=True)
    )
    return replace(case, shape=(2, 3, 24, 40), beside=beside if case.beside else ())


def exact(x, *, mask=None, where=None, bias=None, scale=1.0, causal=False):
    included = torch.ones_like(x, dtype=torch.bool)
    if mask is not None:
        included = included & ~mask
    if where is not None:
        included = included & where
    if causal:
        included = included & oracle.causal(*x.shape[-2:], causal)
    return oracle.masked_forward(x, -1, included, bias, scale, log=False)


@pytest.mark.parametrize("provider", ["torch", "ndsoftmax"])
@pytest.mark.parametrize("name", ["mask", "where", "bias", "scale", "causal"])
def test_providers_agree_with_float64(name, provider):
    case, x, grad = case_of(name), torch.randn(2, 3, 24, 40), torch.randn(2, 3, 24, 40)
    arguments = fused(case, x.dtype, x.device)
    forward, backward = PROVIDERS[provider]()
    y = exact(x, **arguments)
    torch.testing.assert_close(forward(x, case.dim, **arguments).double(), y, rtol=1e-5, atol=1e-7)
    got = backward(grad, y.float(), case.dim, **arguments).double()
    expected = oracle.backward(grad, y, case.dim, log=False) * arguments.get("scale", 1.0)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_the_suite_runs():
    result = run("bench", "--suite", "masked", "--dtype", "float32", "--device", "cpu", "--seconds", "1")
    assert result.returncode == 0
    assert " mask " in result.stdout
    assert "Error" not in result.stderr
