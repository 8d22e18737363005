"""Masks, where, bias, scale and causal: against float64, against removing what is excluded, against torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints

import ndsoftmax
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from modes import Calls
from ndsoftmax import _C, _masked, functional
from ndsoftmax._masked import as_masking
from oracle import assert_close, assert_within
from strategies import FLOATS, HALVES, Layout, dims, dtypes, layouts, numbers, seeds
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

SOFTMAX = {False: ndsoftmax.softmax, True: ndsoftmax.log_softmax}


@pytest.mark.parametrize("log", [False, True])
def test_the_signature(log: bool) -> None:
    """What is fused is taken as **fused: what it may be, and what it is by default, stands in two places."""
    signature = inspect.signature(SOFTMAX[log])
    shown = {name: one.default for name, one in signature.parameters.items() if one.kind is one.KEYWORD_ONLY}
    assert shown.pop("out") is None
    assert list(signature.parameters)[:3] == ["input", "dim", "dtype"]
    assert shown == {
        "mask": None,
        "where": None,
        "bias": None,
        "scale": 1.0,
        "causal": False,
        "fully_masked": None,
    }
    taken = inspect.signature(as_masking).parameters
    assert {name: taken[name].default for name in shown} == shown == functional._DEFAULTS
    assert set(shown) < set(get_type_hints(SOFTMAX[log]))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_scale_of_one_is_no_scale() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    assert ndsoftmax.softmax(nested, -1, scale=1.0, causal=False, mask=None).is_nested


@dataclass(frozen=True)
class Masked:
    """One call with everything that may be fused, and what the oracle needs to know of it."""

    log: bool
    layout: Layout
    dim: int | tuple[int, ...]
    dtype: torch.dtype
    seed: int
    mask: Layout | None
    where: bool
    bias: Layout | None
    wide_bias: bool
    scale: float
    causal: bool | str
    fully_masked: str | None

    def mask_tensor(self, device: str) -> Tensor | None:
        return None if self.mask is None else self.mask.tensor(self.seed + 1, device=device) > 0.3

    def bias_tensor(self, device: str) -> Tensor | None:
        dtype = torch.float32 if self.wide_bias and self.dtype in HALVES else self.dtype
        return None if self.bias is None else self.bias.tensor(self.seed + 2, dtype, device, scale=2)

    def included(self, device: str) -> Tensor:
        shape = self.layout.shape
        included = torch.ones(shape, dtype=torch.bool, device=device)
        mask = self.mask_tensor(device)
        if mask is not None:
            included = included & (mask if self.where else ~mask)
        if self.causal:
            included = included & oracle.causal(shape[-2], shape[-1], self.causal).to(device)
        return included

    def input(self, device: str) -> Tensor:
        """Half of what is excluded is NaN or infinite."""
        x = self.layout.tensor(self.seed, self.dtype, device, scale=3)
        poison = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=self.dtype, device=device)
        noise = numbers(x.numel(), self.seed + 3, device=device).view(x.shape)
        poisoned = torch.where(self.included(device) | (noise > 0), x, poison[(noise * 1000).long() % 3])
        lying_alike = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        return x if 0 in self.layout.steps else lying_alike.copy_(poisoned)

    def options(self, device: str, bias: Tensor | None = None) -> dict[str, Any]:
        return {
            "where" if self.where else "mask": self.mask_tensor(device),
            "bias": self.bias_tensor(device) if bias is None else bias,
            "scale": self.scale,
            "causal": self.causal,
            "fully_masked": self.fully_masked,
        }

    @property
    def zero(self) -> bool:
        given = self.mask is not None or self.bias is not None or bool(self.causal)
        return given if self.fully_masked is None else self.fully_masked == "zero"


@st.composite
def broadcast_layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> Layout:
    """Of some of the last dimensions, each of which may have size 1."""
    own = shape[draw(st.integers(0, len(shape))) :] if draw(st.booleans()) else shape
    return draw(layouts(tuple(1 if draw(st.booleans()) else size for size in own)))


@st.composite
def masked_calls(draw: st.DrawFn, dtypes: st.SearchStrategy[torch.dtype] = dtypes) -> Masked:
    layout = draw(layouts())
    rank = len(layout.shape)
    dim = draw(dims(rank))
    last = (dim if isinstance(dim, tuple) else (dim,)) in ((-1,), (rank - 1,))
    causal = st.sampled_from([False, True, "upper_left", "lower_right"]) if last and rank > 1 else st.just(False)
    return Masked(
        draw(st.booleans()),
        layout,
        dim,
        draw(dtypes),
        draw(seeds),
        draw(st.none() | broadcast_layouts(layout.shape)),
        draw(st.booleans()),
        draw(st.none() | broadcast_layouts(layout.shape)),
        draw(st.booleans()),
        draw(st.sampled_from([1.0, 0.125, -2.0])),
        draw(causal),
        draw(st.sampled_from([None, "nan", "zero"])),
    )


def assert_masked_forward(got: Tensor, call: Masked, x: Tensor, options: dict[str, Any], device: str) -> None:
    included = call.included(device)
    exact = oracle.masked_forward(x, call.dim, included, options["bias"], call.scale, log=call.log, zero=call.zero)
    assert got.shape == exact.shape
    if got.numel() == 0:
        return
    # z is rounded before it is exponentiated; the rest as in oracle.assert_forward
    z = x.double() * call.scale + (0 if options["bias"] is None else options["bias"].double())
    z = torch.where(included, z, 0).nan_to_num(0, 0, 0).abs().amax(call.dim, keepdim=True)
    eps = torch.finfo(torch.float64 if got.dtype == torch.float64 else torch.float32).eps
    rounding = (16 + 2 * (exact.numel() / exact.sum(call.dim, keepdim=True).numel()) ** 0.5 + 4 * z) * eps
    allowed = 1 + (rounding / torch.finfo(got.dtype).eps).expand(exact.shape)
    assert_within(oracle.errors(got, exact, log=call.log), allowed, got, exact)


@given(call=masked_calls(), widen=st.booleans())
def test_forward(device: str, call: Masked, widen: bool) -> None:
    x, options = call.input(device), call.options(device)
    dtype = torch.float32 if widen and call.dtype in HALVES else None
    got = SOFTMAX[call.log](x, call.dim, dtype, **options)
    assert got.dtype == (dtype or call.dtype)
    assert_masked_forward(got, call, x, options, device)
    out = torch.empty_like(got)
    assert SOFTMAX[call.log](x, call.dim, dtype, **options, out=out) is out
    assert torch.equal(out.nan_to_num(7), got.nan_to_num(7))


def dense(*shape: int, offset: int = 0) -> Layout:
    return Layout(shape, tuple(range(len(shape))), (1,) * len(shape), offset)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [5, 13, 32, 49, 63, 64, 72, 97, 128, 144, 197, 257, 385, 577, 700])
def test_a_bias_of_whole_rows(device: str, dim: int, dtype: torch.dtype, log: bool) -> None:
    batch = 5 if device == "cpu" else 190  # so many that they are staged
    for bias, scale in [
        (dense(3, 9, dim), 1.0),
        (dense(3, 9, dim, offset=1), -0.5),
        (dense(batch, 1, 1, dim, offset=3), 0.25),
    ]:
        call = Masked(log, dense(batch, 3, 9, dim), -1, dtype, 0, None, False, bias, False, scale, False, None)
        x, options = call.input(device), call.options(device)
        assert_masked_forward(SOFTMAX[log](x, **options), call, x, options, device)


@pytest.mark.parametrize("regime", ["block", "online", "split", "strided", "warp", "cluster"])
@given(call=masked_calls())
def test_every_regime(device: str, regime: str, call: Masked) -> None:
    x, options = call.input(device), call.options(device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NDSOFTMAX_REGIME", regime)
        try:
            got = SOFTMAX[call.log](x, call.dim, **options)
        except (ValueError, RuntimeError) as refusal:
            assert "regime" in str(refusal)  # noqa: PT017
            return
        assert_masked_forward(got, call, x, options, device)


@given(call=masked_calls())
def test_backward(device: str, call: Masked) -> None:
    x, bias = call.input(device).requires_grad_(), call.bias_tensor(device)
    inputs = [x] if bias is None else [x, bias.requires_grad_()]
    y = SOFTMAX[call.log](x, call.dim, **call.options(device, bias))
    included = call.included(device)
    grad = numbers(y.numel(), call.seed + 4, y.dtype, device).view(y.shape)
    got = torch.autograd.grad(y, inputs, torch.where(included, grad, torch.nan))  # what arrives there is ignored

    doubles = [one.detach().double().requires_grad_() for one in inputs]
    exact_y = oracle.masked_forward(doubles[0], call.dim, included, *doubles[1:], scale=call.scale, log=call.log)
    exact = torch.autograd.grad(exact_y, doubles, torch.where(included, grad, 0).double())
    magnitude = oracle.magnitude(
        torch.where(included, grad, 0), exact_y.detach().nan_to_num(0, 0, 0), call.dim, log=call.log
    )
    alive = ~exact_y.isnan().any(call.dim, keepdim=True) if exact_y.numel() else exact_y.bool()
    if call.fully_masked == "nan" and exact_y.numel():
        dead = (exact_y == (-torch.inf if call.log else 0)).all(call.dim, keepdim=True)
        alive = alive & ~(dead & included.any(call.dim, keepdim=True))
    assert not got[0].masked_select(~included).any()  # exactly zero
    assert_close(torch.where(alive, got[0], 0), torch.where(alive, exact[0], 0), magnitude * abs(call.scale))
    if bias is not None and alive.all():
        assert got[1].dtype == bias.dtype
        # 16-bit gradients are rounded before they are summed
        eps = max(torch.finfo(bias.dtype).eps, torch.finfo(y.dtype).eps)
        count = max(1, x.numel() // max(bias.numel(), 1))
        assert_close(got[1], exact[1], magnitude.sum_to_size(bias.shape) * (1 + count**0.5 / 8), eps=eps)


@given(seed=seeds, dtype=dtypes, log=st.booleans(), columns=st.integers(1, 300))
def test_as_if_removed(device: str, seed: int, dtype: torch.dtype, log: bool, columns: int) -> None:
    x = numbers(3 * columns, seed, dtype, device).view(3, columns)
    mask = numbers(columns, seed + 1, device=device) > 0
    got = SOFTMAX[log](x, mask=mask)
    rest = SOFTMAX[log](x[:, ~mask])
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got[:, ~mask], rest, rtol=4 * eps, atol=4 * eps)
    assert (got[:, mask] == (-torch.inf if log else 0)).all()


@given(seed=seeds, dtype=st.sampled_from((torch.float32, torch.float64)), dim=st.integers(-3, 2))
def test_torchs_masked_softmax(device: str, seed: int, dtype: torch.dtype, dim: int) -> None:
    x = numbers(210, seed, dtype, device).view(5, 6, 7).requires_grad_()
    mask = numbers(210, seed + 1, device=device).view(5, 6, 7) > -0.5
    grad = numbers(210, seed + 2, dtype, device).view(5, 6, 7)
    got = ndsoftmax.masked_softmax(x, mask, dim, fully_masked="nan")
    expected = torch._masked_softmax(x, mask, dim % 3, 2)
    torch.testing.assert_close(got, expected, equal_nan=True)
    torch.testing.assert_close(torch.autograd.grad(got, x, grad), torch.autograd.grad(expected, x, grad))


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_that_are_fully_masked(device: str, dtype: torch.dtype, log: bool) -> None:
    x = torch.zeros(3, 40, dtype=dtype, device=device)
    x[1] = -torch.inf
    mask = torch.zeros(3, 40, dtype=torch.bool, device=device)
    mask[0] = mask[1, :7] = True
    nothing = torch.full((2, 40), -torch.inf if log else 0.0, dtype=dtype, device=device)
    for fully_masked, expected in ((None, nothing), ("zero", nothing), ("nan", nothing * torch.nan)):
        x.requires_grad_()
        y = SOFTMAX[log](x, mask=mask, fully_masked=fully_masked)
        torch.testing.assert_close(y[:2], expected, equal_nan=True)
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert not grad[0].any()
        assert not grad[1, :7].any()
        assert grad[1, 7:].isnan().all() if fully_masked == "nan" else not grad[1].any()
        x = x.detach()
    # a plain call does as torch; asked for, it gets zeros, too
    assert SOFTMAX[log](x)[1].isnan().all()
    torch.testing.assert_close(SOFTMAX[log](x, fully_masked="zero")[1], nothing[1])
    torch.testing.assert_close(SOFTMAX[log](x, bias=torch.zeros(1, dtype=dtype, device=device))[1], nothing[1])


@pytest.mark.parametrize("log", [False, True])
def test_a_row_with_nan_keeps_its_excluded_elements(device: str, log: bool) -> None:
    for shape, dim in (((4, 5000), 1), ((5000, 4), 0), ((2, 300000), 1), ((3, 2000, 8), 1)):
        x = numbers(torch.Size(shape).numel(), 0, device=device).view(shape)
        mask = numbers(x.numel(), 1, device=device).view(shape) > 0.5
        included = (~mask).nonzero()[0]
        for bad in (torch.nan, torch.inf):
            x[tuple(included)] = bad
            y = SOFTMAX[log](x, dim, mask=mask)
            expected = oracle.masked_forward(x, dim, ~mask, log=log)
            assert torch.equal(y.isnan(), expected.isnan())
            assert (y[mask] == (-torch.inf if log else 0)).all()
            grad = ndsoftmax.softmax(x.requires_grad_(), dim, mask=mask)
            (gradient,) = torch.autograd.grad(grad, x, torch.ones_like(y))
            assert not gradient[mask].any()
            x = x.detach()


@pytest.mark.parametrize("kind", [True, "upper_left", "lower_right"])
@pytest.mark.parametrize(("rows", "columns"), [(5, 5), (3, 8), (8, 3), (1, 70000), (300, 257)])
def test_causal(device: str, kind: bool | str, rows: int, columns: int) -> None:
    x = numbers(2 * rows * columns, 0, device=device).view(2, rows, columns)
    included = oracle.causal(rows, columns, kind).to(device)
    x = torch.where(included, x, torch.nan)
    for log in (False, True):
        exact = oracle.masked_forward(x, -1, included, log=log)
        got = SOFTMAX[log](x, causal=kind)  # type: ignore[arg-type]
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(SOFTMAX[log](x.mT, -2, where=included.mT).mT, got)
        torch.testing.assert_close(SOFTMAX[log](x.mT.contiguous().mT, causal=kind), got)  # type: ignore[arg-type]


def test_masks_are_read_where_they_lie(device: str) -> None:
    x = numbers(4 * 6 * 32, 0, device=device).view(4, 6, 32)
    mask = numbers(64, 1, device=device).view(32, 2)[:, 1] > 0  # every second byte
    expected = ndsoftmax.softmax(x, mask=mask.expand(4, 6, 32).contiguous())
    assert torch.equal(ndsoftmax.softmax(x, mask=mask), expected)
    assert torch.equal(ndsoftmax.softmax(x, mask=mask.expand(4, 6, 32)), expected)
    assert torch.equal(ndsoftmax.softmax(x, where=~mask), expected)
    assert torch.equal(ndsoftmax.masked_softmax(x, mask), expected)
    assert torch.equal(ndsoftmax.masked_log_softmax(x, mask), ndsoftmax.log_softmax(x, mask=mask))


@pytest.mark.parametrize("scale", [0.0, 1e-50, 1e-42, -1e-50])  # as float32: 0, 0, denormal, -0
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [16, 40, 512, 1280, 50304])
def test_scales_that_vanish_leave_what_is_excluded_out(device: str, dim: int, dtype: torch.dtype, scale: float) -> None:
    x, mask = torch.randn(9, dim, device=device).to(dtype), torch.rand(9, dim, device=device) < 0.5
    mask[:, 0] = False  # by chance, all of 16 may be excluded
    included = (~mask).double()
    expected = included / included.sum(-1, keepdim=True)
    torch.testing.assert_close(
        ndsoftmax.softmax(x, -1, mask=mask, scale=scale).double(), expected, rtol=8e-3, atol=1e-7
    )


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("scale", [8e-39, 2e-38, 4e-36, 3e35, 5e37, 1.5e38])  # kernels may have those in the middle
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((9, 40), 1), ((9, 1024), 1), ((3, 5001), 1), ((2, 50256), 1), ((3, 40, 64), 1), ((3, 40, 31), 1)],
)
def test_scales_that_undo_what_makes_numbers_large_or_small(
    device: str, shape: tuple[int, ...], dim: int, masked: bool, dtype: torch.dtype, scale: float, log: bool
) -> None:
    x = numbers(torch.Size(shape).numel(), 0, torch.float32, device).view(shape).clamp(-2, 2)
    x = (x / scale).to(dtype)
    mask = torch.zeros(shape, dtype=torch.bool, device=device)
    mask.select(dim, 5).fill_(masked)
    z = (x.double() * scale).masked_fill(mask, -torch.inf)
    expected = (torch.log_softmax if log else torch.softmax)(z, dim)
    got = SOFTMAX[log](x, dim, scale=scale, **({"mask": mask} if masked else {}))
    rtol, atol = (8e-3, 1e-2) if dtype == torch.bfloat16 else (4e-6, 4e-6)
    torch.testing.assert_close(got.double(), expected, rtol=rtol, atol=atol if log else 0)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])  # what float16 has, float32 has times 3
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("shape", "dim"), [((9, 7), 1), ((300, 33), 1), ((9, 1024), 1), ((4, 5001), 1), ((2, 50257), 1), ((3, 40, 64), 1)]
)
def test_what_a_scale_takes_past_the_largest_number_is_infinite(
    device: str, shape: tuple[int, ...], dim: int, masked: bool, dtype: torch.dtype, log: bool
) -> None:
    x = numbers(torch.Size(shape).numel(), 0, dtype, device).view(shape)
    x.select(0, 1).select(0, 3).fill_(torch.finfo(dtype).max)
    mask = torch.zeros(shape, dtype=torch.bool, device=device)
    mask.select(dim, 5).fill_(masked)
    z = (x.float() * 3).masked_fill(mask, -torch.inf)
    expected = (torch.log_softmax if log else torch.softmax)(z, dim).masked_fill(mask, -torch.inf if log else 0)
    assert expected.isnan().any()
    got = SOFTMAX[log](x, dim, scale=3.0, **({"mask": mask} if masked else {}))
    torch.testing.assert_close(got, expected.to(dtype), equal_nan=True)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((9, 7), 1), ((900, 33), 1), ((9, 1024), 1), ((4, 5001), 1), ((3, 50256), 1), ((3, 40, 64), 1), ((3, 40, 31), 1)],
)
def test_what_the_largest_is_rounded_by_when_it_is_scaled_does_not_show(
    device: str, shape: tuple[int, ...], dim: int, masked: bool, dtype: torch.dtype, log: bool
) -> None:
    x = numbers(torch.Size(shape).numel(), 0, dtype, device).view(shape)
    x[0] = torch.finfo(dtype).min  # as who masks by a bias has it
    x[1] *= 1e10
    x[2] = 1e30
    mask = torch.zeros(shape, dtype=torch.bool, device=device)
    mask.select(dim, 5).fill_(masked)
    wide = x if dtype == torch.float64 else x.float()
    z = (wide * 0.7).masked_fill(mask, -torch.inf)  # rounded, as torch has it
    expected = (torch.log_softmax if log else torch.softmax)(z, dim)
    got = SOFTMAX[log](x, dim, scale=0.7, **({"mask": mask} if masked else {}))
    rtol, atol = (8e-3, 1e-2) if dtype == torch.bfloat16 else (2e-6, 1e-6)
    torch.testing.assert_close(got.to(wide.dtype), expected, rtol=rtol, atol=atol if log else 0)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(("shape", "dim"), [((40, 26), 1), ((3, 2000), 1), ((2, 30, 17), 1)])
def test_rows_of_nothing_but_infinities_have_no_gradient_where_a_scale_is_all_else(
    device: str, shape: tuple[int, ...], dim: int, log: bool
) -> None:
    x = numbers(torch.Size(shape).numel(), 0, device=device).view(shape)
    x[1] = -torch.inf
    x.requires_grad_()
    grad = numbers(x.numel(), 1, device=device).view(shape)
    (zero,) = torch.autograd.grad(SOFTMAX[log](x, dim, scale=0.5, fully_masked="zero"), x, grad)
    (nan,) = torch.autograd.grad(SOFTMAX[log](x, dim, scale=0.5), x, grad)
    assert (zero[1] == 0).all()
    assert nan[1].isnan().all()
    z = (x.detach() * 0.5).requires_grad_()
    (expected,) = torch.autograd.grad((torch.log_softmax if log else torch.softmax)(z, dim), z, grad)
    for got in (zero, nan):
        torch.testing.assert_close(got[0], expected[0] * 0.5)
    operator = ndsoftmax.ops.log_softmax_backward if log else ndsoftmax.ops.softmax_backward
    y = SOFTMAX[log](x.detach(), dim, scale=0.5, fully_masked="zero")
    assert (operator(grad, y, dim, scale=0.5, fully_masked="zero")[1] == 0).all()
    assert torch.equal(operator(grad, y, dim, scale=0.5), operator(grad, y, dim) * 0.5)


# ---- as a citizen of torch


def _double(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    return numbers(torch.Size(shape).numel(), seed, torch.float64, device).view(shape)


CALLS: list[dict[str, Any]] = [
    {"mask": (3, 1, 5), "scale": 0.5},
    {"where": (4, 5), "bias": (1, 4, 5)},
    {"bias": (5,), "scale": -1.5},
    {"causal": True, "bias": (3, 1, 1), "mask": (3, 4, 5)},
    {"causal": "lower_right"},
]


def _tensors(call: dict[str, Any], device: str) -> dict[str, Any]:
    made = dict(call)
    for index, name in enumerate(("mask", "where")):
        if name in call:
            made[name] = _double(*call[name], seed=index + 5, device=device) > 0.2
    if "bias" in call:
        made["bias"] = _double(*call["bias"], seed=9, device=device).requires_grad_()
    return made


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # that torch's forward mode uses
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap of the old kind, by which gradcheck batches
@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("log", [False, True])
def test_gradients_of_any_order(device: str, log: bool, call: dict[str, Any]) -> None:
    x = _double(3, 4, 5, device=device).requires_grad_()
    made = _tensors(call, device)
    bias = made.pop("bias", None)

    def function(x: Tensor, *bias: Tensor) -> Tensor:
        y = SOFTMAX[log](x, bias=bias[0] if bias else None, **made)
        return torch.where(y.isinf(), 0, y)  # gradcheck knows no -inf

    inputs = (x,) if bias is None else (x, bias)
    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, inputs, check_fwd_over_rev=True, check_rev_over_rev=True)


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("log", [False, True])
def test_opcheck(device: str, log: bool, call: dict[str, Any]) -> None:
    name = "masked_log_softmax" if log else "masked_softmax"
    made = _tensors(call, device)
    mask = made.get("mask", made.get("where"))
    causal = made.get("causal", "")
    options = ("where" in made, made.get("scale", 1.0), "upper_left" if causal is True else causal)
    x = _double(3, 4, 5, device=device).requires_grad_()
    forward, backward = getattr(torch.ops.ndsoftmax, name), getattr(torch.ops.ndsoftmax, f"{name}_backward")
    torch.library.opcheck(forward.default, (x, mask, made.get("bias"), [-1], None, *options, True))
    y, grad = forward(x.detach(), mask, None, [-1], None, *options, True), _double(3, 4, 5, seed=3, device=device)
    torch.library.opcheck(
        backward.default, (grad.requires_grad_(), y.exp().requires_grad_(), mask, [-1], None, *options)
    )


def test_operators_know_causal_words_where_nothing_is_computed_too(device: str) -> None:
    x = torch.zeros(3, 4, device=device)
    for tensor in (x, x.to("meta")):
        with pytest.raises(ValueError, match=r"causal must be .* but is 'lower'"):
            torch.ops.ndsoftmax.masked_softmax(tensor, None, None, [1], None, False, 1.0, "lower")
        with pytest.raises(ValueError, match=r"causal must be .* but is 'lower'"):
            torch.ops.ndsoftmax.masked_softmax_backward(tensor, tensor, None, [1], None, False, 1.0, "lower")


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_compile(device: str, call: dict[str, Any], dynamic: bool) -> None:
    made = _tensors(call, device)

    def loss(x: Tensor) -> Tensor:
        return (ndsoftmax.softmax(x, **made) * torch.arange(5, device=device)).sum()

    x = _double(3, 4, 5, device=device).requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    torch.testing.assert_close(compiled(x), loss(x))
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x), torch.autograd.grad(loss(x), x))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("log", [False, True])
def test_transforms(device: str, log: bool) -> None:
    x, mask = _double(3, 4, 5, device=device), _double(3, 4, 5, seed=1, device=device) > 0
    bias = _double(3, 5, seed=2, device=device)
    whole = SOFTMAX[log](x, mask=mask, bias=bias[:, None])
    per_batch = torch.vmap(lambda x, mask, bias: SOFTMAX[log](x, mask=mask, bias=bias))(x, mask, bias)
    torch.testing.assert_close(per_batch, whole)
    shared = torch.vmap(lambda x: SOFTMAX[log](x, mask=mask[0], causal=True))(x)
    torch.testing.assert_close(shared, SOFTMAX[log](x, mask=mask[0], causal=True))
    only_mask = torch.vmap(lambda mask: SOFTMAX[log](x[0], mask=mask))(mask)
    torch.testing.assert_close(only_mask, torch.stack([SOFTMAX[log](x[0], mask=one) for one in mask]))

    def loss(x: Tensor) -> Tensor:
        y = SOFTMAX[log](x, mask=mask, bias=bias[:, None])
        return torch.where(mask, 0, y).pow(2).sum()

    def reference(x: Tensor) -> Tensor:
        return oracle.masked_forward(x, -1, ~mask, bias[:, None], log=log).where(~mask, 0).pow(2).sum()

    torch.testing.assert_close(torch.func.grad(loss)(x), torch.func.grad(reference)(x))
    torch.testing.assert_close(torch.func.hessian(loss)(x), torch.func.hessian(reference)(x))


@pytest.mark.parametrize("log", [False, True])
def test_batches_of_scalars(log: bool) -> None:
    function = SOFTMAX[log]
    x, bias, mask = numbers(15, 0).view(5, 3), numbers(5, 1), torch.tensor([True, False, True, False, False])
    got = torch.vmap(lambda x, mask, bias: function(x, mask=mask, bias=bias, scale=2))(x, mask, bias)
    exact = oracle.masked_forward(x, -1, (~mask[:, None]).expand(5, 3), bias[:, None], 2, log=log)
    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=1e-6)
    alone = torch.vmap(lambda x: function(x, 0, scale=2))(bias)
    assert torch.equal(alone, torch.full((5,), 0.0 if log else 1.0))
    assert torch.func.jacrev(lambda x: function(x, 0, bias=torch.zeros(())))(bias[0]) == 0


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # that shapes are looked at
def test_jit_trace(log: bool) -> None:
    function = SOFTMAX[log]
    x, bias = numbers(12, 0).view(3, 4), numbers(4, 1)
    traced = torch.jit.trace(lambda x, mask, bias: function(x, mask=mask, bias=bias), (x, x > 0, bias))
    assert torch.equal(traced(-x, x > 1, -bias), function(-x, mask=x > 1, bias=-bias))


@pytest.mark.parametrize("log", [False, True])
def test_operators_see_one_of_a_batch(log: bool) -> None:
    operator = torch.ops.ndsoftmax.masked_log_softmax if log else torch.ops.ndsoftmax.masked_softmax
    backward = torch.ops.ndsoftmax.masked_log_softmax_backward if log else torch.ops.ndsoftmax.masked_softmax_backward
    x, mask = torch.zeros(3, 4), torch.tensor([[True], [False], [False]])
    with pytest.raises(ValueError, match="causal needs an input of two dimensions"):
        torch.vmap(lambda x: operator(x, None, None, [0], causal="upper_left"))(x)
    with pytest.raises(RuntimeError, match="mask must broadcast"):
        torch.vmap(lambda x: operator(x, mask, None, [0]))(x)
    with pytest.raises(RuntimeError, match="mask must broadcast"):
        torch.vmap(lambda x: backward(x, x, mask, [0]))(x)
    none = torch.vmap(lambda x, mask: operator(x, mask, None, [0]), (0, 1))(x[:0], torch.zeros(4, 0, dtype=torch.bool))
    assert none.shape == (0, 4)


def test_fake_and_meta_tensors() -> None:
    x = torch.empty(3, 4, 5, dtype=torch.bfloat16, device="meta")
    mask = torch.empty(4, 1, dtype=torch.bool, device="meta")
    y = ndsoftmax.softmax(x, dtype=torch.float32, mask=mask, causal=True)
    assert (y.shape, y.dtype, y.is_meta) == (x.shape, torch.float32, True)


def test_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    x = numpy.zeros((2, 4), dtype=numpy.float32)
    y = ndsoftmax.softmax(x, where=numpy.array([True, True, False, False]))
    assert isinstance(y, numpy.ndarray)
    assert (y == numpy.array([0.5, 0.5, 0, 0], dtype=numpy.float32)).all()


def test_enabled_torchs_masked_softmax_refuses_and_lays_out_as_it_does() -> None:
    x, mask = torch.randn(2, 3, 4, 4).transpose(2, 3), torch.rand(2, 3, 4, 4) < 0.5
    strides = torch._masked_softmax(x, mask, 3, 2).stride()  # (the numbers of torch 2.13 are another input's)
    with ndsoftmax.enable():
        got = torch._masked_softmax(x, mask, 3, 2)
        for mask_type, shape in ((0, (4, 6)), (1, (2, 6))):
            with pytest.raises(RuntimeError, match="mask shape should be"):
                torch._masked_softmax(torch.randn(2, 3, 4, 6), torch.zeros(shape, dtype=torch.bool), 3, mask_type)
    assert got.stride() == strides
    torch.testing.assert_close(got, x.masked_fill(mask, -torch.inf).softmax(3), equal_nan=True)


@pytest.mark.parametrize("mask_type", [None, 0, 1, 2])
def test_enable_covers_torchs_masked_softmax(
    device: str, mask_type: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {0: (4, 4), 1: (2, 4)}.get(-1 if mask_type is None else mask_type, (2, 3, 4, 4))

    def both(device: str) -> tuple[Tensor, ...]:
        x = _double(2, 3, 4, 4, device="cpu").float().to(device).requires_grad_()
        mask = (_double(*shape, seed=1, device="cpu") > 0.5).to(device)
        grad = _double(2, 3, 4, 4, seed=2, device="cpu").float().to(device)
        y = torch._masked_softmax(x, mask, 3, mask_type)
        return y, *(torch.autograd.grad(y, x, grad) if mask.shape == x.shape else ())

    calls = []
    for name in ("masked_forward", "masked_backward"):
        kernel = getattr(_C, name)
        monkeypatch.setattr(_C, name, lambda *args, kernel=kernel: (calls.append(kernel), kernel(*args)))
    expected = both("cpu")  # torch's kernel for GPUs does not take all of these masks
    assert not calls
    with ndsoftmax.enable():
        got = both(device)
    torch.testing.assert_close(tuple(tensor.cpu() for tensor in got), expected, equal_nan=True)
    ndsoftmax.disable()
    assert len(calls) == len(expected)


# ---- bad input


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"mask": torch.ones(3, dtype=torch.bool)}, RuntimeError, r"mask must broadcast .*\(2, 4, 5\).*\(3,\)"),
        ({"where": torch.ones(1, 2, 4, 5, dtype=torch.bool)}, RuntimeError, "where must broadcast"),
        ({"bias": torch.ones(4)}, RuntimeError, "bias must broadcast"),
        ({"mask": torch.ones(5)}, TypeError, "mask must be torch.bool, but is torch.float32; .*bias="),
        ({"mask": [True] * 5}, TypeError, "mask must be a torch.Tensor, but got list"),
        ({"bias": torch.ones(5, dtype=torch.float64)}, TypeError, "bias must be torch.float32.*torch.float64"),
        ({"bias": 1.0}, TypeError, "bias must be a torch.Tensor, but got float"),
        ({"mask": torch.ones(5, dtype=torch.bool, device="meta")}, RuntimeError, "mask must be on input's device"),
        ({"bias": torch.ones(5, device="meta")}, RuntimeError, "bias must be on input's device"),
        ({"scale": "2"}, TypeError, "scale must be a number, but got '2'"),
        ({"scale": True}, TypeError, "scale must be a number"),
        ({"causal": "lower"}, ValueError, "causal must be .*'lower_right', but is 'lower'"),
        ({"causal": 1}, ValueError, "causal must be"),
        ({"causal": torch.tensor([True, False])}, ValueError, "causal must be"),
        ({"causal": True, "dim": 1}, ValueError, "causal needs dim=-1, but dim is 1"),
        ({"causal": True, "dim": (-1, 0)}, ValueError, "causal needs dim=-1"),
        ({"fully_masked": "one"}, ValueError, "fully_masked must be 'nan', 'zero' or None, but is 'one'"),
        ({"mask": torch.ones(5).bool(), "where": torch.ones(5).bool()}, ValueError, "give one of them"),
    ],
    ids=str,
)
@pytest.mark.parametrize("compiled", [False, True])
def test_bad_input(options: dict[str, Any], error: type[Exception], words: str, compiled: bool) -> None:
    x = torch.zeros(2, 4, 5)
    before = x.clone()
    function = torch.compile(ndsoftmax.softmax, backend="aot_eager") if compiled else ndsoftmax.softmax
    with pytest.raises(error, match=words):
        function(x, **options)
    with pytest.raises(error, match=words):
        ndsoftmax.softmax(x, **options, out=x)
    assert torch.equal(x, before)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_bad_out() -> None:
    x = torch.zeros(4, 5)
    memory = torch.zeros(40)
    with pytest.raises(RuntimeError, match="out must not overlap bias"):
        ndsoftmax.softmax(x, bias=memory[10:15], out=memory[:20].view(4, 5))
    with pytest.raises(RuntimeError, match="out must not overlap the mask"):
        ndsoftmax.softmax(x, mask=memory.view(torch.bool)[:5], out=memory[:20].view(4, 5))
    with pytest.raises(RuntimeError, match="bias requires grad"):
        ndsoftmax.softmax(x, bias=torch.zeros(5, requires_grad=True), out=torch.zeros(4, 5))
    with pytest.raises(ValueError, match="needs an input of two dimensions"):
        ndsoftmax.softmax(torch.zeros(5), causal=True)
    with pytest.raises(TypeError, match="do not go with a"):
        ndsoftmax.softmax(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), scale=2.0)
    with pytest.raises(TypeError, match="mask must be a strided tensor, but is nested"):
        ndsoftmax.softmax(torch.zeros(2), mask=torch.nested.nested_tensor([torch.zeros(2).bool()]))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("log", [False, True])
def test_a_recorded_call_is_left_to_the_dispatcher_where_torch_looks_on(
    device: str, log: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = numbers(20, 0, device=device).view(4, 5).requires_grad_()
    bias, mask = numbers(5, 1, device=device).requires_grad_(), numbers(5, 2, device=device) > 0.5
    name = "ndsoftmax.masked_log_softmax" if log else "ndsoftmax.masked_softmax"

    def gradients() -> tuple[Tensor, ...]:
        y = SOFTMAX[log](x, mask=mask, bias=bias, scale=2.0).where(~mask, 0)
        return y.detach(), *torch.autograd.grad(y.sin().sum(), (x, bias))

    expected = gradients()
    with Calls() as calls:
        torch.testing.assert_close(gradients(), expected, rtol=0, atol=0)
    assert {f"{name}.default", f"{name}_backward.default"} <= set(calls.seen)
    with torch._C._AutoDispatchBelowAutograd():
        assert not SOFTMAX[log](x, mask=mask).requires_grad
    assert _C.are_plain(x, mask, True)
    assert not _C.are_plain(x, mask)
    with torch.no_grad():
        assert not SOFTMAX[log](x, mask=mask).requires_grad
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach().clone().requires_grad_(), torch.ones_like(x))
        y = SOFTMAX[log](dual, bias=torch.arange(5.0, device=device), causal=True)
        assert forward_ad.unpack_dual(y).tangent is not None
        assert y.requires_grad
    for operators in (_masked.FORWARD, _masked.BACKWARD):  # the short way asks for none of them
        monkeypatch.setitem(operators, log, None)
    torch.testing.assert_close(gradients(), expected, rtol=0, atol=0)


def test_backward_operators_are_autograds(device: str) -> None:
    x = numbers(60, 0, device=device).view(3, 4, 5)
    x[1] = -torch.inf
    mask, bias = numbers(20, 1, device=device).view(4, 5) > 0.5, numbers(5, 2, device=device)
    grad = numbers(60, 3, device=device).view(3, 4, 5)
    calls: list[dict[str, Any]] = [
        {"mask": mask},
        {"where": mask, "scale": 0.5, "fully_masked": "nan"},
        {"causal": "lower_right"},
        {"bias": bias, "fully_masked": "zero"},
    ]
    for log in (False, True):
        operator = ndsoftmax.ops.log_softmax_backward if log else ndsoftmax.ops.softmax_backward
        for call in calls:
            x.requires_grad_()
            y = SOFTMAX[log](x, **call)
            (expected,) = torch.autograd.grad(y, x, grad)
            got = operator(grad, y.detach(), **{name: value for name, value in call.items() if name != "bias"})
            torch.testing.assert_close(got, expected, equal_nan=True)
            x = x.detach()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2,), (1, 2), (1, 1), ()], ids=str)
def test_the_gradient_of_a_wide_bias_is_added_up_wide(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = numbers(2 * 20_000, 0, dtype, device).view(20_000, 2)
    bias = torch.zeros(shape, device=device, requires_grad=True)
    grad = torch.tensor([64.0, 0.0], dtype=dtype, device=device).expand(20_000, 2)
    y = ndsoftmax.softmax(x, 1, bias=bias)
    (got,) = torch.autograd.grad(y, bias, grad)  # up to 64 · 20,000 / 4, more than float16 has
    of_each = oracle.backward(grad, y.detach(), 1, log=False).to(dtype).double()  # each rounded, as documented
    assert got.dtype == torch.float32
    assert_close(got, of_each.sum_to_size(shape), of_each.abs().sum_to_size(shape), eps=1e-6)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1 / 64, 2.0])
@pytest.mark.parametrize("widen", [False, True])
def test_the_gradient_of_the_input_is_the_same_beside_that_of_a_bias(
    device: str, log: bool, scale: float, widen: bool
) -> None:
    x, bias = numbers(640, 0, torch.float16, device).view(10, 64), numbers(64, 1, torch.float16, device)
    grad = numbers(640, 2, torch.float32 if widen else torch.float16, device).view(10, 64) * 3000
    grad[0], grad[0, 0] = 20_000, -20_000  # whose gradient is more than float16 has, before the scale
    x[0, 0] = 2000
    leaves = x.requires_grad_(), bias.clone().requires_grad_()
    alone, beside = (SOFTMAX[log](x, -1, grad.dtype, bias=one, scale=scale) for one in (bias, leaves[1]))
    (expected,) = torch.autograd.grad(alone, x, grad)
    got, got_bias = torch.autograd.grad(beside, leaves, grad)
    if widen:  # rounded by a kernel, or by torch after another kernel
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-2)
    else:
        assert torch.equal(got, expected)
    exact = oracle.backward(grad, beside.detach(), -1, log=log)
    size = oracle.magnitude(grad, beside.detach(), -1, log=log)
    assert ((got.double() - exact * scale).abs() <= 2e-3 * scale * size)[1:].all()
    assert got_bias.dtype == torch.float16


def test_a_wide_bias_is_not_rounded(device: str) -> None:
    x, bias = numbers(40, 0, device=device).view(4, 10), numbers(10, 1, device=device) * 30
    got = ndsoftmax.softmax(x, dtype=torch.bfloat16, bias=bias)
    exact = oracle.masked_forward(x.bfloat16(), -1, torch.ones_like(x, dtype=torch.bool), bias, log=False)
    assert_within(oracle.errors(got, exact, log=False), torch.full_like(exact, 1.1), got, exact)


@pytest.mark.parametrize("regime", ["", "block", "cluster", "online", "split", "strided"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("columns", [4097, 32769])
def test_biases_and_masks_of_rows_that_begin_anywhere(
    device: str, monkeypatch: pytest.MonkeyPatch, regime: str, dtype: torch.dtype, columns: int
) -> None:
    rows = 5
    x = numbers(rows * columns, 0, dtype, device).view(rows, columns)
    bias = numbers(rows * columns, 1, torch.float32 if dtype in HALVES else dtype, device).view(rows, columns)
    mask = numbers(rows * columns, 2, device=device).view(rows, columns) > 1
    monkeypatch.setenv("NDSOFTMAX_REGIME", regime)
    for one in (bias[:1], bias, bias.to(dtype), bias.T.contiguous().T):
        try:
            got = ndsoftmax.softmax(x, bias=one, mask=mask)
        except (ValueError, RuntimeError) as refusal:
            assert "regime" in str(refusal)  # noqa: PT017
            continue
        exact = oracle.masked_forward(x, -1, ~mask, one, log=False)
        # sums of the accumulator round, and so does z, of which no term is larger than 8
        allowed = 1 + (16 + 4 * 8 + 2 * columns**0.5) * (2**-13 if dtype in HALVES else 1)
        assert_within(oracle.errors(got, exact, log=False), torch.full_like(exact, allowed), got, exact)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("shape", "dim", "fused"),
    [
        ((12, 800, 257), -1, {"mask": (12, 1, 257)}),  # so many rows that they are staged
        ((12, 800, 257), -1, {"where": (12, 800, 257)}),
        ((12, 800, 197), -1, {"mask": (800, 197)}),
        ((9, 900, 577), -1, {"where": (9, 1, 577), "scale": -0.7}),
        ((40, 900, 70), -1, {"mask": (900, 70), "bias": (70,)}),
        ((250, 70, 130), -1, {"causal": "lower_right", "bias": (250, 1, 130)}),
        ((16, 12, 40, 512), -1, {"bias": (12, 40, 512)}),
        ((2, 3, 400, 2048), -1, {"mask": (2, 1, 400, 2048)}),
        ((3, 50, 8192), -1, {"causal": True}),
        ((3, 20, 50304), -1, {"where": (20, 50304)}),
        ((2, 19, 64, 72), 1, {"mask": (2, 19, 1, 1)}),
        ((2, 19, 64, 72), 1, {"mask": (19, 64, 72)}),
        ((2, 21, 64, 72), 1, {"mask": (2, 21, 1, 1), "scale": -0.7}),
        ((2, 21, 64, 72), 1, {"mask": (2, 21, 1, 1), "scale": 0.0}),
        ((2, 40, 64, 72), 1, {"where": (2, 1, 64, 72), "scale": -0.7}),
        ((40, 3, 512), 1, {"mask": (40, 1, 512)}),
        ((3, 900, 256), 1, {"mask": (3, 900, 256)}),
        ((700, 8192), -1, {"mask": (8192,)}),
        ((3, 40, 4096), -1, {"mask": (40, 4096), "scale": -0.7}),
    ],
    ids=str,
)
def test_many_rows(device: str, dtype: torch.dtype, shape: tuple[int, ...], dim: int, fused: dict[str, Any]) -> None:
    """Of shapes whose kernels know what is fused, or that masks repeat; NaN stands under them and does not show."""
    count = torch.Size(shape).numel()
    options: dict[str, Any] = {"scale": 0.7, **fused}
    scale = options["scale"]
    included = torch.ones(shape, dtype=torch.bool, device=device)
    for seed, (name, of) in enumerate(fused.items()):
        if name == "scale":
            continue
        if name == "bias":
            options[name] = numbers(torch.Size(of).numel(), seed, dtype, device).view(of)
        elif name == "causal":
            included &= oracle.causal(shape[-2], shape[-1], of).to(device)
        else:
            options[name] = numbers(torch.Size(of).numel(), seed, device=device).view(of) > 0.5
            included &= options[name] if name == "where" else ~options[name]
    # what is not there would show, were it the largest
    x = numbers(count, 7, dtype, device).view(shape) - (300 if dtype in HALVES else 0)
    exact = oracle.masked_forward(x, dim, included, options.get("bias"), scale, log=False)
    hidden = torch.where(included, x, torch.nan).requires_grad_()
    got = ndsoftmax.softmax(hidden, dim, **options)
    allowed = 1 + (16 + 4 * 8 + 2 * shape[dim] ** 0.5) * (2**-13 if dtype in HALVES else 1)
    assert not got.detach().masked_select(~included).any()
    assert_within(oracle.errors(got.detach(), exact, log=False), torch.full_like(exact, allowed), got, exact)
    grad_output = numbers(count, 8, dtype, device).view(shape)
    (grad,) = torch.autograd.grad(got, hidden, torch.where(included, grad_output, torch.nan))
    given = torch.where(included, grad_output, 0)
    exact_grad = oracle.backward(given, exact, dim, log=False) * scale
    assert_close(grad, exact_grad, oracle.magnitude(given, exact, dim, log=False) * 0.7)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("offset", range(4))
@pytest.mark.parametrize("rows", [1, 9000])
def test_masks_of_many_rows_begin_anywhere(device: str, dtype: torch.dtype, offset: int, rows: int) -> None:
    """Of 16 bits, two neighbours of a mask are loaded at once where they lie so; the first and last bytes alone."""
    dim = 257
    x = numbers(9000 * dim, 0, dtype, device).view(9000, dim)
    mask = (numbers(offset + rows * dim, 1, device=device) > 0)[offset:].view(rows, dim)
    got, exact = ndsoftmax.softmax(x, mask=mask), oracle.masked_forward(x, -1, ~mask.expand_as(x), None, log=False)
    allowed = 1 + (16 + 2 * dim**0.5) * (2**-13 if dtype in HALVES else 1)
    assert not got.masked_select(mask).any()
    assert_within(oracle.errors(got, exact, log=False), torch.full_like(exact, allowed), got, exact)


def test_explain_plans_what_runs() -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"bias": torch.zeros(5)}, {"bias": (5,)}),
        ({"scale": 0.5}, {"scale": 0.5}),
        ({"fully_masked": "zero"}, {"fully_masked": "zero"}),
        ({"mask": torch.zeros(5, dtype=torch.bool)}, {"mask": (5,)}),
    ]
    for call, described in cases:
        plan = ndsoftmax.explain((40000, 5), device="cpu", **described)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NDSOFTMAX_REGIME", "warp")  # which takes plain calls of this shape alone
            with pytest.raises((ValueError, RuntimeError), match="regime"):
                ndsoftmax.softmax(torch.zeros(40000, 5), **call)
        assert plan.regime == "block"
        assert ndsoftmax.explain((40000, 5), device="cpu", backward=True, **described).regime == "block"
    causal, full = (ndsoftmax.explain((7, 6, 5), causal=causal, device="H200").bytes for causal in (True, False))
    assert full - causal == 7 * 4 * (4 + 3 + 2 + 1)


@pytest.mark.parametrize("strict", [False, True])
def test_export_of_what_depends_on_data(strict: bool) -> None:
    class Chosen(torch.nn.Module):
        def forward(self, x: Tensor, temperature: Tensor) -> Tensor:
            rows = x[x[:, 0] > 0]
            return ndsoftmax.softmax(rows, mask=rows > 1, scale=temperature.item())

    x, temperature = torch.randn(20, 6), torch.tensor(0.5)
    rows = {0: torch.export.Dim.DYNAMIC}
    exported = torch.export.export(Chosen(), (x, temperature), dynamic_shapes=(rows, {}), strict=strict)
    other = torch.randn(30, 6)
    torch.testing.assert_close(exported.module()(other, temperature), Chosen()(other, temperature))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        compiled = torch.compile(Chosen(), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x, temperature), Chosen()(x, temperature))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: ndsoftmax.softmax(x),
        lambda x: ndsoftmax.softmax(x, causal=True),
        lambda x: ndsoftmax.softmax(x, scale=1.0),
        lambda x: ndsoftmax.softmax(x, scale=0.5),
        lambda x: ndsoftmax.softmax(x, mask=x > 1),
    ],
    ids=["plain", "causal", "scale of 1", "scale", "mask"],
)
def test_dynamic_shapes_are_traced_once(function: Callable[[Tensor], Tensor]) -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    x = torch.randn(5, 6)
    torch.testing.assert_close(torch.compile(function, fullgraph=True, dynamic=True, backend=counter)(x), function(x))
    assert counter.frame_count == 1


def test_export_with_a_scale_of_the_shape() -> None:
    class Scores(torch.nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return ndsoftmax.softmax(q @ q.mT, scale=q.shape[-1] ** -0.5, causal=True)

    q = torch.randn(2, 4, 8)
    exported = torch.export.export(Scores(), (q,), dynamic_shapes={"q": {2: torch.export.Dim("head", min=2, max=64)}})
    other = torch.randn(2, 4, 16)
    torch.testing.assert_close(exported.module()(other), Scores()(other))
