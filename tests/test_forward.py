"""softmax and log_softmax of any tensor, against float64."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys

import ndsoftmax
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_forward
from strategies import FLOATS, HALVES, Call, calls, layouts, numbers

SOFTMAX = {False: ndsoftmax.softmax, True: ndsoftmax.log_softmax}


@given(call=calls())
def test_any_tensor_any_dim(device: str, call: Call) -> None:
    x = call.input(device, scale=10)
    before = x.clone()
    y = SOFTMAX[call.log](x, call.dim)
    assert (y.dtype, y.device) == (x.dtype, x.device)
    assert y.stride() == torch.empty_like(x).stride()
    assert torch.equal(x, before)
    assert_forward(y, x, call.dim, log=call.log)


@given(call=calls(), data=st.data())
def test_out_of_any_strides_and_nothing_beside_it(device: str, call: Call, data: st.DataObject) -> None:
    x = call.input(device)
    out = data.draw(layouts(x.shape, expand=False)).tensor(1, call.dtype, device)
    memory = torch.empty(0, dtype=call.dtype, device=device).set_(out.untyped_storage())
    before, version = memory.clone(), out._version
    assert SOFTMAX[call.log](x, call.dim, out=out) is out
    assert out._version > version
    assert_forward(out, x, call.dim, log=call.log)
    out.copy_(before.as_strided(out.shape, out.stride(), out.storage_offset()))
    assert torch.equal(memory, before)


@given(call=calls(), data=st.data())
def test_in_place(device: str, call: Call, data: st.DataObject) -> None:
    layout = data.draw(layouts(call.layout.shape, expand=False))
    x, beside = (layout.tensor(call.seed, call.dtype, device) for _ in range(2))
    fresh = SOFTMAX[call.log](x, call.dim)
    SOFTMAX[call.log](x, call.dim, out=beside)  # aligned as x is: on CUDA a fresh output may have another plan
    assert SOFTMAX[call.log](x, call.dim, out=x) is x
    assert torch.equal(x, fresh if device == "cpu" else beside)
    assert torch.equal(x, beside)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    ("shape", "dim", "offset"),
    [
        ((40, 21, 1003), 1, 0),
        ((9, 100, 770), 1, 2),
        ((600, 2001), 0, 1),
        ((3000, 262), 0, 0),
        ((70, 10, 100), 1, 0),
        # float32 vectors of which every other row begins within a sector
        ((9, 512, 196), 1, 0),
        ((9, 3, 1004), 1, 4),
        ((5000, 84), 0, 0),
    ],
)
def test_columns_that_begin_anywhere(
    device: str, shape: tuple[int, ...], dim: int, offset: int, log: bool, dtype: torch.dtype
) -> None:
    """On CUDA, tiles of such columns overlap: in place, none may read what another has written."""
    count = math.prod(shape)
    x = numbers(offset + count, 0, dtype, device)[offset:].view(shape)
    y = SOFTMAX[log](x, dim)
    assert_forward(y, x, dim, log=log)
    beside = torch.empty(offset + count, dtype=dtype, device=device)[offset:].view(shape)  # aligned as x is
    SOFTMAX[log](x, dim, out=beside)
    if device == "cpu":  # which has one plan for all of these
        assert torch.equal(y, beside)
        assert torch.equal(beside, SOFTMAX[log](x, dim, out=x))
        return
    assert_forward(beside, x, dim, log=log)
    saved = x.clone()
    assert_forward(SOFTMAX[log](x, dim, out=x), saved, dim, log=log)
    # words of 16 bits that may begin a column earlier are not for calls in place: those have another plan
    if dtype == torch.float32 or offset % 2 or shape[-1] % 2 == 0:
        assert torch.equal(x, beside)


@given(call=calls(st.sampled_from(HALVES)))
def test_half_to_float(device: str, call: Call) -> None:
    x = call.input(device, scale=10)
    y = SOFTMAX[call.log](x, call.dim, dtype=torch.float32)
    assert y.dtype == torch.float32
    assert_forward(y, x, call.dim, log=call.log)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("source", [*FLOATS, torch.int64, torch.uint8, torch.bool], ids=str)
def test_dtype_casts_first_as_torch_does(device: str, source: torch.dtype, dtype: torch.dtype, log: bool) -> None:
    x = numbers(60, seed=0, device=device, scale=3).abs().to(source).view(3, 4, 5)
    y = SOFTMAX[log](x, 1, dtype=dtype)
    assert y.dtype == dtype
    assert_forward(y, x if source in HALVES and dtype == torch.float32 else x.to(dtype), 1, log=log)


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_complex_with_dtype_keeps_the_real_part_as_torch_does(device: str) -> None:
    x = torch.complex(numbers(12, 0, device=device), numbers(12, 1, device=device)).view(3, 4)
    assert_forward(ndsoftmax.softmax(x, 1, dtype=torch.float32), x.real, 1, log=False)


@pytest.mark.parametrize("dim", [1, -1, (1, 2, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_channels_last_stays_channels_last(device: str, dtype: torch.dtype, dim: int | tuple[int, ...]) -> None:
    x = numbers(2 * 21 * 8 * 9, 0, dtype, device).view(2, 21, 8, 9).to(memory_format=torch.channels_last)
    y = ndsoftmax.softmax(x, dim)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert_forward(y, x, dim, log=False)


def test_dim_defaults_to_the_last_and_a_list_is_a_tuple(device: str) -> None:
    x = numbers(60, 0, device=device).view(3, 4, 5)
    assert torch.equal(ndsoftmax.softmax(x), ndsoftmax.softmax(x, 2))
    assert torch.equal(ndsoftmax.log_softmax(x), ndsoftmax.log_softmax(x, 2))
    assert torch.equal(ndsoftmax.softmax(x, [0, 2]), ndsoftmax.softmax(x, (-1, 0)))


@pytest.mark.parametrize("log", [False, True])
def test_arguments_by_place_and_by_name(device: str, log: bool) -> None:
    x = numbers(12, 0, torch.float16, device).view(3, 4)
    expected = (torch.log_softmax if log else torch.softmax)(x, 0, torch.float32)
    for places, names in [
        ((x, 0, torch.float32), {}),
        ((x, 0), {"dtype": torch.float32}),
        ((x,), {"dim": 0, "dtype": torch.float32}),
        ((x,), {"dtype": torch.float32, "dim": 0, "out": None}),
        ((), {"dtype": torch.float32, "dim": 0, "input": x}),
    ]:
        torch.testing.assert_close(SOFTMAX[log](*places, **names), expected)
    for places, names in [
        ((), {}),
        ((), {"dim": 0}),
        ((x, 0), {"dim": 0}),
        ((x, 0, None), {"dtype": None}),
        ((x, 0, None, None), {}),
        ((x,), {"dims": 0}),
    ]:
        with pytest.raises(TypeError, match=r"softmax\(\)"):
            SOFTMAX[log](*places, **names)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dim", [5, 10, 127, 128, 257, 1000])
def test_out_begins_anywhere_and_ends_where_it_ends(device: str, dtype: torch.dtype, dim: int) -> None:
    x = numbers(7 * dim, 0, dtype, device).view(7, dim)
    for offset in range(18):
        room = torch.full((7 * dim + 40,), 3.0, dtype=dtype, device=device)
        out = room[offset : offset + 7 * dim].view(7, dim)
        for log, function in ((False, ndsoftmax.softmax), (True, ndsoftmax.log_softmax)):
            function(x, out=out)
            assert_forward(out, x, -1, log=log)
            assert (room[:offset] == 3).all()
            assert (room[offset + 7 * dim :] == 3).all()


@pytest.mark.skipif(sys.platform != "linux", reason="guards pages by Linux's mprotect")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_short_rows_touch_no_other_memory(dtype: torch.dtype) -> None:
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 3 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (address, address + 2 * page):  # reading there ends the process
        assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(guard), page, 0) == 0
    elements = page // dtype.itemsize
    values = torch.frombuffer(memory, dtype=dtype, count=elements, offset=page)
    values.copy_(torch.randn(elements))
    for dim in range(1, 41):
        for rows in (1, 2, 3, 12, elements // dim):
            for at in (0, elements - rows * dim):  # right after a guard, right before one
                x = values[at : at + rows * dim].view(rows, dim)
                out = torch.full((elements,), 7, dtype=dtype)
                got = ndsoftmax.softmax(x, -1, out=out[at : at + rows * dim].view(rows, dim))
                torch.testing.assert_close(got, torch.softmax(x.double(), -1).to(dtype))
                assert (out[:at] == 7).all()
                assert (out[at + rows * dim :] == 7).all()
                grad = ndsoftmax.ops.softmax_backward(x, got, -1)
                y, g = got.double(), x.double()
                torch.testing.assert_close(grad, (y * (g - (g * y).sum(-1, keepdim=True))).to(dtype))
