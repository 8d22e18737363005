"""Accuracy: as good as torch.softmax, the same bits each time, NaN and infinities in the same places."""

from __future__ import annotations

from collections.abc import Callable

import ndsoftmax
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_forward, errors, true_errors
from strategies import FLOATS, Call, calls, dtypes, numbers, seeds
from torch import Tensor

OURS = {False: ndsoftmax.softmax, True: ndsoftmax.log_softmax}
TORCHS = {False: torch.softmax, True: torch.log_softmax}
inf, nan = float("inf"), float("nan")

# rows of what: from normally distributed rows
ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "scaled by 100": lambda x: x * 100,
    "shifted by 1e4": lambda x: x + 1e4,
    "shifted by -1e4": lambda x: x - 1e4,
    "constant": lambda x: torch.full_like(x, 0.3),
    "one-hot": lambda x: (x == x.amax(-1, keepdim=True)) * 20.0,
}


def assert_as_accurate_as_torch(x: Tensor, dim: int, log: bool) -> None:
    ours, torchs = (true_errors(function(x, dim), x, dim, log=log) for function in (OURS[log], TORCHS[log]))
    # Rounding the exact result would cost half an ulp at most and a quarter on average: where torch does better than
    # that, as on one-hot rows, it has luck.
    assert ours.max() <= 2 * torchs.max() + 0.5
    assert ours.mean() <= 1.5 * torchs.mean() + 0.25


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", [(512, 21), (128, 1000), (7, 10007)], ids=str)
def test_as_accurate_as_torch(device: str, shape: tuple[int, int], rows: str, dtype: torch.dtype, log: bool) -> None:
    x = ROWS[rows](numbers(shape[0] * shape[1], 0, device=device).view(shape)).to(dtype)
    assert_as_accurate_as_torch(x, -1, log)
    assert_as_accurate_as_torch(x.T.contiguous(), 0, log)


@pytest.mark.parametrize("shape", [(64, 10007, 3), (150, 5000, 5), (150, 5001, 9)], ids=str)
def test_large_terms_do_not_swallow_small_ones(device: str, shape: tuple[int, int, int]) -> None:
    """A column's one large term meets the sums of many threads, each below half an ulp of it."""
    x = torch.zeros(shape)
    hot = torch.randint(shape[1], (shape[0], 1, shape[2]), generator=torch.Generator().manual_seed(0))
    x = x.scatter_(1, hot, 20.0).to(device)
    # on a CPU a thread adds up a whole column, in a few partial sums (one sum, as torch's, is off by some 50 to 90)
    assert true_errors(ndsoftmax.softmax(x, 1), x, 1, log=False).mean() <= (12 if device == "cpu" else 1.5)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_as_accurate_as_torch_over_two_million(device: str, dtype: torch.dtype, log: bool) -> None:
    assert_as_accurate_as_torch(numbers(2_000_003, 0, dtype, device).view(1, -1), -1, log)


@given(call=calls(), shift=st.integers(-100, 100))
def test_an_exact_shift_changes_no_bit(device: str, call: Call, shift: int) -> None:
    x = call.input(device, scale=8).round()  # small integers: exact in every dtype, as are their sums
    assert torch.equal(OURS[call.log](x + shift, call.dim), OURS[call.log](x, call.dim))


@given(call=calls())
def test_run_twice_the_bits_are_the_same(device: str, call: Call) -> None:
    x = call.input(device)
    assert torch.equal(OURS[call.log](x, call.dim), OURS[call.log](x, call.dim))


@pytest.mark.parametrize(
    ("shape", "dim"), [((1, 1 << 21), 1), ((1 << 19, 3), 0), ((3, 70_000), 1), ((2, 40_000, 3), 1)]
)
def test_run_twice_the_bits_are_the_same_where_threads_share_a_row(
    device: str, shape: tuple[int, ...], dim: int
) -> None:
    x = numbers(torch.Size(shape).numel(), 0, device=device).view(shape)
    first = ndsoftmax.softmax(x, dim)
    assert all(torch.equal(ndsoftmax.softmax(x, dim), first) for _ in range(5))


@given(dtype=dtypes, log=st.booleans(), seed=seeds, size=st.integers(1, 3000))
def test_permuting_the_input_permutes_the_output(
    device: str, dtype: torch.dtype, log: bool, seed: int, size: int
) -> None:
    x = numbers(2 * size, seed, dtype, device).view(2, size)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).to(device)
    error = errors(OURS[log](x[:, order], 1), OURS[log](x, 1)[:, order].double(), log=log)
    assert (error <= 8 + 2 * size**0.5).all()


@given(dtype=dtypes, seed=seeds, size=st.integers(1, 3000))
def test_sums_to_one(device: str, dtype: torch.dtype, seed: int, size: int) -> None:
    total = ndsoftmax.softmax(numbers(2 * size, seed, dtype, device).view(2, size), 1).double().sum(1)
    assert ((total - 1).abs() <= 4 * torch.finfo(dtype).eps).all()


specials = st.lists(st.tuples(st.integers(0, 1 << 15), st.sampled_from((nan, inf, -inf))), max_size=12)


@given(call=calls(), specials=specials)
def test_nan_and_infinities_come_out_where_torch_has_them(
    device: str, call: Call, specials: list[tuple[int, float]]
) -> None:
    x = call.input(device).contiguous()
    dim = call.dim if isinstance(call.dim, int) else call.dim[0]
    for position, value in specials if x.numel() else []:
        x.view(-1)[position % x.numel()] = value
    got, torchs = OURS[call.log](x, dim), TORCHS[call.log](x, dim)
    for is_special in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(is_special(got), is_special(torchs))
    assert_forward(got, x, dim, log=call.log)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", [1, 5, 1000, 5000, 200_000])
def test_rows_of_nothing_but_infinities(device: str, size: int, dtype: torch.dtype, dim: int) -> None:
    x = torch.zeros(4, size, dtype=dtype, device=device)
    x[0], x[1], x[2, -1] = -inf, inf, -inf
    x = x.T.contiguous() if dim == 0 else x
    for log in (False, True):
        # in float64, since torch.log_softmax on the CPU overflows in float16
        got, torchs = OURS[log](x, dim), TORCHS[log](x.double(), dim)
        assert torch.equal(got.isnan(), torchs.isnan())
        assert torch.equal(got.isneginf(), torchs.isneginf())
