"""enable() and disable(): torch's own softmax becomes ndsoftmax, and becomes itself again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ndsoftmax
import pytest
import torch
import torch.nn.functional as F
from ndsoftmax import _C
from strategies import FLOATS, numbers
from torch import Tensor

OPERATORS = [
    f"aten::{name}{overload}"
    for name in ("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data")
    for overload in ("", ".out")
]


def dispatch_table() -> list[str]:
    return [torch._C._dispatch_dump(operator) for operator in OPERATORS]


TORCHS = dispatch_table()


def is_enabled() -> bool:
    """Whether torch.softmax runs our kernel."""
    ran: list[None] = []
    run = _C.forward
    _C.forward = lambda *args: ran.append(None) or run(*args)
    try:
        torch.softmax(torch.zeros(2), 0)
    finally:
        _C.forward = run
    return bool(ran)


@pytest.fixture(autouse=True)
def _disabled_at_the_end() -> Iterator[None]:
    yield
    ndsoftmax.disable()
    assert not is_enabled()
    assert dispatch_table() == TORCHS


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that ran, in order."""
    ran: list[str] = []
    for name in ("forward", "backward"):
        run = getattr(_C, name)
        monkeypatch.setattr(_C, name, lambda *args, name=name, run=run: ran.append(name) or run(*args))
    return ran


def normal(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return numbers(torch.Size(shape).numel(), 0, dtype, device).view(shape)


# ---- when it holds


def test_statement() -> None:
    ndsoftmax.enable()
    ndsoftmax.enable()
    assert is_enabled()
    ndsoftmax.disable()
    assert not is_enabled()


def test_block_restores_what_was_before() -> None:
    with ndsoftmax.enable():
        assert is_enabled()
        with ndsoftmax.enable():
            pass
        assert is_enabled()
    assert not is_enabled()
    ndsoftmax.enable()
    with ndsoftmax.enable():
        pass
    assert is_enabled()


def test_block_is_left_after_an_error() -> None:
    with pytest.raises(KeyError), ndsoftmax.enable():
        raise KeyError
    assert not is_enabled()


def test_one_object_opens_several_blocks() -> None:
    enable = ndsoftmax.enable()
    with enable:
        with enable:
            pass
        assert is_enabled()
    assert not is_enabled()
    with enable:
        assert is_enabled()
    assert not is_enabled()


def test_blocks_overlap_in_threads() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with ndsoftmax.enable():
            inside.set()
            assert leave.wait(60)

    thread = threading.Thread(target=other)
    with ndsoftmax.enable():
        thread.start()
        assert inside.wait(60)
    assert is_enabled()
    leave.set()
    thread.join()
    assert not is_enabled()


def test_disable_ends_blocks_too() -> None:
    with ndsoftmax.enable():
        ndsoftmax.disable()
        assert not is_enabled()
    assert not is_enabled()


def test_decorator_holds_inside_the_function_alone() -> None:
    @ndsoftmax.enable()
    def inside(factor: int) -> bool:
        """What it says."""
        return is_enabled() and (factor == 0 or inside(factor - 1))

    assert not is_enabled()
    assert inside(2)
    assert not is_enabled()
    assert inside.__name__ == "inside"
    assert inside.__doc__ == "What it says."


@pytest.mark.parametrize("log", [False, True])
def test_threads_change_it_while_others_compute(device: str, log: bool) -> None:
    function = torch.log_softmax if log else torch.softmax
    x = normal(30, 100, device=device)
    expected = function(x, 1)

    def work(_: int) -> bool:
        with ndsoftmax.enable():
            return torch.allclose(function(x, 1), expected)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(64)))
    assert not is_enabled()


def test_blocks_come_and_go_while_other_threads_are_in_softmax() -> None:
    x, stop = torch.randn(8, 16), threading.Event()
    expected = torch.softmax(x, 1)

    def work() -> bool:
        good = True
        while not stop.is_set():
            good = good and torch.allclose(torch.softmax(x, 1), expected)
        return good

    with ThreadPoolExecutor(3) as pool:
        workers = [pool.submit(work) for _ in range(3)]
        for _ in range(2000):
            with ndsoftmax.enable():
                pass
        stop.set()
        assert all(worker.result() for worker in workers)


def test_what_a_decorator_cannot_hold_in() -> None:
    def generator() -> Iterator[int]:
        yield 1

    with pytest.raises(TypeError, match="generator"):
        ndsoftmax.enable()(generator)


# ---- what it does


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax, F.softmax, F.log_softmax])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_functions(device: str, function: Any, dtype: torch.dtype, kernels: list[str]) -> None:
    x = normal(3, 4, 5, device=device, dtype=dtype).requires_grad_()
    results = []
    for enabled in (False, True):
        if enabled:
            ndsoftmax.enable()
        y = function(x, 1)
        results.append((y, *torch.autograd.grad(y.sin().sum(), x)))
        assert kernels == (["forward", "backward"] if enabled else [])
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(results[1], results[0], rtol=4 * eps, atol=4 * eps)


def test_what_is_built_on_softmax(device: str, kernels: list[str]) -> None:
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(8, 2, device=device)
    x = normal(6, 2, 8, device=device)
    target = torch.arange(6, device=device).remainder(8)
    calls = {
        "nn.Softmax": lambda: torch.nn.Softmax(1)(x),
        "Tensor.log_softmax": lambda: x.log_softmax(-1),
        "MultiheadAttention": lambda: attention(x, x, x)[0],
        "cross_entropy": lambda: F.cross_entropy(x[:, 0], target),
        "gumbel_softmax": lambda: torch.manual_seed(1) and F.gumbel_softmax(x),
    }
    for name, call in calls.items():
        expected = call()
        kernels.clear()
        with ndsoftmax.enable():
            got = call()
        assert "forward" in kernels, name
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_out(device: str, function: Any, kernels: list[str]) -> None:
    x = normal(3, 4, device=device)
    expected = function(x, 1)
    fits, empty, steps = (
        torch.empty(3, 4, device=device),
        torch.empty(0, device=device),
        torch.empty(3, 8, device=device),
    )
    with ndsoftmax.enable():
        for out, ours in ((fits, True), (steps[:, ::2], True), (empty, False)):
            kernels.clear()
            version = out._version
            assert function(x, 1, out=out) is out
            torch.testing.assert_close(out, expected)
            assert out._version > version
            assert kernels == ["forward"] * ours
        function(x, 1, out=x)
    torch.testing.assert_close(x, expected)


@pytest.mark.parametrize("name", ["_softmax_backward_data", "_log_softmax_backward_data"])
def test_out_of_backward(device: str, name: str, kernels: list[str]) -> None:
    operator = getattr(torch.ops.aten, name)
    grad, output = normal(3, 4, device=device), normal(3, 4, device=device).sin()
    expected = operator(grad, output, 1, torch.float32)
    keyword = operator.out._schema.arguments[-1].name
    with ndsoftmax.enable():
        for out, ours in ((torch.empty_like(grad), True), (torch.empty(0, device=device), False)):
            kernels.clear()
            operator.out(grad, output, 1, torch.float32, **{keyword: out})
            torch.testing.assert_close(out, expected)
            assert kernels == ["backward"] * ours


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_results_are_contiguous(device: str, function: Any, kernels: list[str]) -> None:
    with ndsoftmax.enable():
        x = normal(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last).requires_grad_()
        y = function(x, 1)
        (grad,) = torch.autograd.grad(y, x, x.detach())
    assert kernels == ["forward", "backward"]
    assert y.is_contiguous()
    assert grad.is_contiguous()


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_torch_keeps_its_errors(device: str, function: Any) -> None:
    x = normal(3, 4, device=device)
    for bad in ((x, 2), (x.int(), 1), (x.to(torch.complex64), 1)):
        with pytest.raises((IndexError, NotImplementedError), match=r"Dimension|not implemented") as torchs:
            function(*bad)
        with ndsoftmax.enable(), pytest.raises(torchs.type) as ours:
            function(*bad)
        assert str(ours.value) == str(torchs.value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch fuses this cast on CUDA alone")
@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_half_to_float(function: Any, kernels: list[str]) -> None:
    x = normal(3, 4, device="cuda", dtype=torch.float16).requires_grad_()
    expected = function(x, 1, dtype=torch.float32)
    with ndsoftmax.enable():
        y = function(x, 1, dtype=torch.float32)
        (grad,) = torch.autograd.grad(y, x, expected)
    assert kernels == ["forward", "backward"]
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(grad, *torch.autograd.grad(expected, x, expected))


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_compiled_graphs_use_it(device: str, function: Any, kernels: list[str]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: function(x, 1).sin(), backend="aot_eager", fullgraph=True)
    x = normal(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last).requires_grad_()
    expected = torch.autograd.grad(compiled(x).sum(), x)
    assert not kernels
    with ndsoftmax.enable():
        torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x), expected)
    assert kernels == ["forward", "backward"]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # that torch's forward mode uses
def test_transforms_use_it(device: str, kernels: list[str]) -> None:
    x = normal(3, 4, device=device, dtype=torch.float64)

    def hessian() -> Tensor:
        return torch.func.hessian(lambda x: (torch.softmax(x, 1) ** 2).sum())(x)

    expected = hessian()
    with ndsoftmax.enable():
        torch.testing.assert_close(hessian(), expected)
    assert "forward" in kernels
