"""Gradients: the backward operators against their formula, and .backward() against autograd, in float64."""

from __future__ import annotations

import math
from typing import Any

import ndsoftmax
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_close
from strategies import FLOATS, HALVES, Call, calls, layouts, numbers
from torch import Tensor

SOFTMAX = {False: ndsoftmax.softmax, True: ndsoftmax.log_softmax}
BACKWARD = {False: ndsoftmax.ops.softmax_backward, True: ndsoftmax.ops.log_softmax_backward}

LAST_CACHE_BYTES = ndsoftmax._C.last_cache_bytes()
no_large_cache = pytest.mark.skipif(LAST_CACHE_BYTES > 128 << 20, reason="too much memory to exceed this cache")


@given(call=calls(), data=st.data())
def test_operator_takes_any_strides(device: str, call: Call, data: st.DataObject) -> None:
    output = call.input(device)  # the operators are formulas: they need no output that sums to one
    grad = data.draw(layouts(call.layout.shape)).tensor(call.seed + 1, call.dtype, device, scale=0.1)
    got = BACKWARD[call.log](grad, output, call.dim)
    exact = oracle.backward(grad, output, call.dim, log=call.log)
    magnitude = oracle.magnitude(grad, output, call.dim, log=call.log)
    assert got.dtype == call.dtype
    assert_close(got, exact, magnitude, eps=torch.finfo(computed_in(call.dtype)).eps)


@given(call=calls(st.just(torch.float32)), narrow=st.sampled_from(HALVES))
def test_operator_narrows_to_input_dtype(device: str, call: Call, narrow: torch.dtype) -> None:
    output, grad = call.input(device), numbers(1, call.seed, device=device)[0].expand(call.layout.shape)
    got = BACKWARD[call.log](grad, output, call.dim, input_dtype=narrow)
    exact = oracle.backward(grad, output, call.dim, log=call.log)
    magnitude = oracle.magnitude(grad, output, call.dim, log=call.log)
    assert got.dtype == narrow
    assert_close(got, exact, magnitude, eps=torch.finfo(torch.float32).eps)


def assert_backward(grad: Tensor, output: Tensor, apart: Tensor, dim: int, *, log: bool) -> None:
    """The kernel's gradient is right in a result apart, and in place over either operand."""
    exact = oracle.backward(grad, output, dim, log=log)
    magnitude = oracle.magnitude(grad, output, dim, log=log)
    over_grad, over_output = grad.clone(), output.clone()
    for g, y, result in ((grad, output, apart), (over_grad, output, over_grad), (grad, over_output, over_output)):
        ndsoftmax._C.backward(g, y, result, (dim,), log, torch.get_num_threads())
        assert_close(result, exact, magnitude, eps=torch.finfo(computed_in(grad.dtype)).eps)


@no_large_cache
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(("dim", "gap", "offset"), [(67, 0, 1), (257, 3, 0), (2050, 3, 1), (100_003, 0, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES], ids=str)
def test_cpu_rows_that_no_cache_holds(dtype: torch.dtype, dim: int, gap: int, offset: int, log: bool) -> None:
    rows = LAST_CACHE_BYTES // (3 * dim * dtype.itemsize) + 2
    grad, output = (numbers(rows * dim, seed, dtype).view(rows, dim) * 0.1 for seed in (0, 1))
    room = torch.full((rows * (dim + gap) + 2 * offset,), 3.0, dtype=dtype)
    inside = room[offset : room.numel() - offset].view(rows, dim + gap)
    assert_backward(grad, output, inside[:, :dim], 1, log=log)
    for around in (room[:offset], room[room.numel() - offset :], inside[:, dim:]):
        assert (around == 3).all()


@no_large_cache
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(("rows", "dim", "expanded"), [(2, 67, True), (67, 67, False), (5, 1100, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES], ids=str)
def test_cpu_stretches_of_rows_that_no_cache_holds(
    dtype: torch.dtype, rows: int, dim: int, expanded: bool, log: bool
) -> None:
    shape = (LAST_CACHE_BYTES // (2 * rows * dim * dtype.itemsize) + 2, rows, dim)
    count = shape[0] * rows * dim
    output = numbers(count, 1, dtype).view(shape) * 0.1
    if expanded:
        grad = (numbers(count // rows, 0, dtype) * 0.1).view(shape[0], 1, dim).expand(shape)
    else:
        grad = (numbers(count, 0, dtype) * 0.1).view(rows, shape[0], dim).transpose(0, 1)
    room = torch.full((count + 2,), 3.0, dtype=dtype)
    assert_backward(grad, output, room[1:-1].view(shape), 2, log=log)
    assert (room[[0, -1]] == 3).all()


@no_large_cache
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(("width", "offset"), [(1024, 0), (1000, 16), (1003, 0), (1024, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES], ids=str)
def test_cpu_columns_that_no_cache_holds(dtype: torch.dtype, width: int, offset: int, log: bool) -> None:
    shape = (LAST_CACHE_BYTES // (3 * 9 * width * dtype.itemsize) + 2, 9, width)
    count = shape[0] * 9 * width
    grad, output = (numbers(count, seed, dtype).view(shape) * 0.1 for seed in (0, 1))
    room = torch.full((count + offset + 16,), 3.0, dtype=dtype)
    assert_backward(grad, output, room[offset : offset + count].view(shape), 1, log=log)
    assert (room[:offset] == 3).all()
    assert (room[offset + count :] == 3).all()


@no_large_cache
@pytest.mark.parametrize("dim", [1, 2], ids=["columns", "rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES], ids=str)
def test_cpu_result_between_two_elements(dtype: torch.dtype, dim: int) -> None:
    shape = (LAST_CACHE_BYTES // (3 * 16 * 1024 * dtype.itemsize) + 2, 16, 1024)
    count = math.prod(shape)
    grad, output = (numbers(count, seed, dtype).view(shape) * 0.1 for seed in (0, 1))
    memory = bytearray(count * dtype.itemsize + 64)
    to_line = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % 64
    result = torch.frombuffer(memory, dtype=dtype, offset=to_line + dtype.itemsize // 2, count=count).view(shape)
    assert result.data_ptr() % dtype.itemsize
    assert_backward(grad, output, result, dim, log=False)


@given(call=calls(), widen=st.booleans())
def test_backward_is_float64_autograd(device: str, call: Call, widen: bool) -> None:
    dtype = torch.float32 if widen and call.dtype in HALVES else None
    x = call.input(device).requires_grad_()
    y = SOFTMAX[call.log](x, call.dim, dtype=dtype)
    grad = numbers(y.numel(), call.seed + 1, y.dtype, device).view(y.shape)
    (got,) = torch.autograd.grad(y, x, grad)
    x64 = x.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(oracle.forward(x64, call.dim, log=call.log), x64, grad.double())
    assert got.dtype == x.dtype
    assert_close(got, exact, oracle.magnitude(grad, y.detach(), call.dim, log=call.log))


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradient_reaches_what_came_before(device: str, dtype: torch.dtype, log: bool) -> None:
    x = numbers(60, 0, dtype, device).view(3, 4, 5).requires_grad_()
    weight = numbers(60, 1, dtype, device).view(3, 4, 5)
    (SOFTMAX[log](x * 2, (0, 2)) * weight).sum().backward()
    x64 = x.detach().double().requires_grad_()
    (oracle.forward(x64 * 2, (0, 2), log=log) * weight.double()).sum().backward()
    assert x.grad is not None
    assert x64.grad is not None
    magnitude = 2 * oracle.magnitude(weight, oracle.forward(x.detach() * 2, (0, 2), log=log), (0, 2), log=log)
    assert_close(x.grad, x64.grad, magnitude)


def test_no_gradient_is_asked_for_in_vain(device: str) -> None:
    x = numbers(12, 0, device=device).view(3, 4)
    assert not ndsoftmax.softmax(x).requires_grad
    assert ndsoftmax.softmax(x.requires_grad_()).requires_grad
    with torch.no_grad():
        assert not ndsoftmax.softmax(x).requires_grad


@pytest.mark.parametrize("log", [False, True])
def test_operator_says_what_is_wrong(device: str, log: bool) -> None:
    x = numbers(6, 0, device=device).view(2, 3)
    half = x.half()
    wrong: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((None, x), TypeError, "grad_output must be a torch.Tensor"),
        ((x, None), TypeError, "output must be a torch.Tensor"),
        ((x, x[:1]), RuntimeError, "grad_output must have output's shape"),
        ((x, half), RuntimeError, "grad_output must have output's dtype"),
        ((x, x.to("meta")), RuntimeError, "grad_output must have output's device"),
        ((x, x, 2), IndexError, "Dimension out of range"),
        ((x, x, 1.0), TypeError, "dim must be an int"),
        ((x, x, -1, torch.float64), TypeError, "input_dtype"),
        ((x, x, -1, "float32"), TypeError, "input_dtype must be a torch.dtype, but got 'float32'"),
        ((half, half, -1, torch.float32), TypeError, "input_dtype"),
    ]
    for arguments, error, words in wrong:
        with pytest.raises(error, match=words):
            BACKWARD[log](*arguments)


@pytest.mark.parametrize("log", [False, True])
def test_operator_is_recorded_where_either_tensor_asks(device: str, log: bool) -> None:
    grad, output = (numbers(12, seed, device=device).view(3, 4) for seed in range(2))
    for tensor in (grad, output):
        tensor.requires_grad_()
        assert BACKWARD[log](grad, output).requires_grad
        with torch.no_grad():
            assert not BACKWARD[log](grad, output).requires_grad
        tensor.requires_grad_(False)
    assert not BACKWARD[log](grad, output).requires_grad


def computed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
