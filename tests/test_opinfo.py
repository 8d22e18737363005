"""torch.softmax and ndsoftmax.softmax agree on every sample that torch's own operator database has for them."""

from __future__ import annotations

import ndsoftmax
import pytest
import torch
from strategies import FLOATS

pytest.importorskip("expecttest", reason="torch's operator database needs it")
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

SOFTMAXES = [op for op in op_db if op.name in ("softmax", "log_softmax")]
CASES = [(op, dtype) for op in SOFTMAXES for dtype in sorted(op.dtypes, key=str)]


def name(op: OpInfo, dtype: torch.dtype) -> str:
    return "-".join(filter(None, (op.name, op.variant_test_name, str(dtype))))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize(("op", "dtype"), CASES, ids=[name(*case) for case in CASES])
def test_torchs_samples(device: str, op: OpInfo, dtype: torch.dtype) -> None:
    samples = list(op.sample_inputs(device, dtype))
    assert samples
    for sample in samples:
        got = getattr(ndsoftmax, op.name)(sample.input, *sample.args, **sample.kwargs)
        expected = op(sample.input, *sample.args, **sample.kwargs)
        tolerance = 4 * torch.finfo(expected.dtype).eps
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("op", [op for op in SOFTMAXES if not op.variant_test_name], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_torchs_samples_backward(device: str, op: OpInfo, dtype: torch.dtype) -> None:
    for sample in op.sample_inputs(device, dtype, requires_grad=True):
        ours, torchs = (
            function(sample.input, *sample.args, **sample.kwargs) for function in (getattr(ndsoftmax, op.name), op)
        )
        grad = torch.randn_like(torchs)
        got, expected = (torch.autograd.grad(y, sample.input, grad)[0] for y in (ours, torchs))
        # 16-bit gradients depend on how each side rounded its output.
        torch.testing.assert_close(got, expected, rtol=0, atol=16 * torch.finfo(dtype).eps)


def test_the_database_has_both() -> None:
    assert {op.name for op in SOFTMAXES} == {"softmax", "log_softmax"}
