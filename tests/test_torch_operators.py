"""The operators under what torch puts around a call: compilers, tracers, modes, subclasses, other kinds of tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import ndsoftmax
import pytest
import torch
from modes import Calls
from strategies import HALVES, numbers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # that torch's forward mode uses
OPS = torch.ops.ndsoftmax
FUNCTIONS = pytest.mark.parametrize("function", [ndsoftmax.softmax, ndsoftmax.log_softmax])


def torchs(function: Any) -> Any:
    return torch.softmax if function is ndsoftmax.softmax else torch.log_softmax


def normal(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return numbers(torch.Size(shape).numel(), 0, dtype, device).view(shape)


@pytest.fixture
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---- operators


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("operator", [OPS.softmax, OPS.log_softmax])
def test_opcheck_forward(device: str, operator: Any, requires_grad: bool) -> None:
    x = normal(3, 4, device=device)
    for input, *others in ((x, [1]), (x.T, [0, -1]), (x.half(), [0], torch.float32), (x[0, 0], [0]), (x[:0], [0])):
        torch.library.opcheck(operator.default, (input.detach().requires_grad_(requires_grad), *others))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("operator", [OPS.softmax_backward, OPS.log_softmax_backward])
def test_opcheck_backward(device: str, operator: Any, requires_grad: bool) -> None:
    x = normal(3, 4, device=device)
    for grad, *others in ((x, [1]), (x.T, [0, 1], torch.float16), (x[0, 0], [0])):
        tensors = (t.detach().requires_grad_(requires_grad) for t in (grad, grad.sin()))
        torch.library.opcheck(operator.default, (*tensors, *others))


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_operators_refuse_what_the_functions_refuse(kind: str) -> None:
    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        x = torch.ones(2, 3)
        for operator in (OPS.softmax, OPS.log_softmax):
            for arguments, error in [
                ((x, [2]), IndexError),
                ((x, [1, -1]), RuntimeError),
                ((x.int(), [1]), TypeError),
                ((x, [1], torch.int32), TypeError),
                ((x.double(), [1], torch.float32), TypeError),
            ]:
                with pytest.raises(error):
                    operator(*arguments)
        for operator in (OPS.softmax_backward, OPS.log_softmax_backward):
            for arguments, error in [
                ((x, x, [2]), IndexError),
                ((x, x[:1], [1]), RuntimeError),
                ((x, x.double(), [1]), RuntimeError),
                ((x, x, [1], torch.float64), TypeError),
            ]:
                with pytest.raises(error):
                    operator(*arguments)


@FUNCTIONS
@pytest.mark.skipif(not torch.cuda.is_available(), reason="autocast changes softmax on CUDA alone")
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64], ids=str)
def test_autocast_as_torch(function: Any, dtype: torch.dtype) -> None:
    x = normal(3, 4, device="cuda", dtype=dtype)
    with torch.autocast("cuda", dtype=torch.float16):
        for asked in (None, torch.float16, torch.float32):
            got, expected = function(x, 1, dtype=asked), torchs(function)(x, 1, dtype=asked)
            assert got.dtype == expected.dtype
            torch.testing.assert_close(got, expected)
        assert function(x, 1, out=torch.empty_like(x)).dtype == dtype


@FUNCTIONS
def test_autocast_leaves_the_cpu_alone(function: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dtype in (*HALVES, torch.float32):
            x = normal(3, 4, device="cpu", dtype=dtype)
            assert function(x, 1).dtype == torchs(function)(x, 1).dtype == dtype


def test_autocast_is_left_to_the_dispatcher(device: str) -> None:
    x = normal(3, 4, device=device)
    assert ndsoftmax._C.are_plain(x, x)
    torch.set_autocast_enabled("cuda", True)  # which the context manager refuses without a GPU
    try:
        assert not ndsoftmax._C.are_plain(x, x)
    finally:
        torch.set_autocast_enabled("cuda", False)


# ---- compilers and tracers


@FUNCTIONS
@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compile(device: str, function: Any, backend: str, dynamic: bool) -> None:
    def model(x: Tensor, f: Any) -> tuple[Tensor, ...]:
        return f(x * 2, -1).sin(), f(x, 0).cos(), f(x, 1, dtype=torch.float64)

    compiled = torch.compile(lambda x: model(x, function), fullgraph=True, backend=backend, dynamic=dynamic)
    for shape in ((3, 4), (5, 6)):
        x = normal(*shape, device=device).requires_grad_()
        got, expected = compiled(x), model(x, torchs(function))
        torch.testing.assert_close(got, expected)
        ours, theirs = (torch.autograd.grad(sum(y.sum() for y in ys), x) for ys in (got, expected))
        torch.testing.assert_close(ours, theirs)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), expected)


@FUNCTIONS
@pytest.mark.usefixtures("_fresh_dynamo")
def test_compile_takes_the_function_itself(device: str, function: Any) -> None:
    x = normal(3, 4, device=device)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, 1), torchs(function)(x, 1))


@FUNCTIONS
@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("dim", [1, (0, 1), [-1]], ids=str)
def test_compile_takes_dims_and_out(device: str, function: Any, dim: Any) -> None:
    x = normal(3, 4, device=device)
    compiled = torch.compile(lambda x, dim, out: function(x, dim, out=out), fullgraph=True, backend="aot_eager")
    out = torch.empty_like(x)
    assert compiled(x, dim, out) is out
    torch.testing.assert_close(out, function(x, dim))


@FUNCTIONS
@pytest.mark.usefixtures("_fresh_dynamo")
def test_compile_takes_a_dim_that_varies(device: str, function: Any) -> None:
    x = normal(3, 4, 5, device=device)
    compiled = torch.compile(lambda x, dim: function(x, dim), fullgraph=True, backend="aot_eager", dynamic=True)
    for dim in (2, 1, -3):
        torch.testing.assert_close(compiled(x, dim), function(x, dim))


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("function", [ndsoftmax.ops.softmax_backward, ndsoftmax.ops.log_softmax_backward])
def test_compile_takes_backward(device: str, function: Any) -> None:
    grad = normal(3, 4, device=device)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(grad, grad.sin(), (0, 1)), function(grad, grad.sin(), (0, 1)))


@FUNCTIONS
@pytest.mark.usefixtures("_fresh_dynamo")
def test_compile_takes_transforms(device: str, function: Any) -> None:
    x = normal(3, 4, device=device, dtype=torch.float64)
    for transform in (torch.func.grad, torch.func.hessian):
        derivative = transform(lambda x: (function(x, 1) ** 2).sum())
        compiled = torch.compile(derivative, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), transform(lambda x: (torchs(function)(x, 1) ** 2).sum())(x))


@FUNCTIONS
@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize(
    ("dim", "error"),
    [(2, IndexError), ("1", TypeError), (1.0, TypeError), ((), ValueError), ((1, 1), RuntimeError)],
    ids=str,
)
def test_compile_says_what_eager_says(device: str, function: Any, dim: Any, error: type[Exception]) -> None:
    x = normal(3, 4, device=device)
    with pytest.raises(error, match=r"(?i)dim") as eager:
        function(x, dim)
    with pytest.raises(error, match=re.escape(str(eager.value))):
        torch.compile(function, backend="aot_eager")(x, dim)
    with pytest.raises(Exception, match=re.escape(str(eager.value).split("'")[0])):
        torch.compile(function, backend="aot_eager", fullgraph=True)(x, dim)


@FUNCTIONS
@pytest.mark.usefixtures("_fresh_dynamo")
def test_compile_says_of_a_dim_that_varies_what_it_was(device: str, function: Any) -> None:
    x = normal(3, 4, device=device)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    compiled(x, 0), compiled(x, 1)
    with pytest.raises(Exception, match=r"Dimension out of range.*but got 5"):
        compiled(x, 5)


@FUNCTIONS
@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor")
def test_compiled_autograd(device: str, function: Any) -> None:
    x = normal(3, 4, device=device).requires_grad_()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        (function(x, 1) ** 2).sum().backward()
    torch.testing.assert_close(x.grad, *torch.autograd.grad((torchs(function)(x, 1) ** 2).sum(), x))


class Model(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ndsoftmax.softmax(x, -1) + ndsoftmax.nn.LogSoftmax(1)(x)


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_export(device: str, strict: bool) -> None:
    x = normal(3, 4, device=device)
    program = torch.export.export(Model(), (x,), dynamic_shapes=({0: torch.export.Dim("rows")},), strict=strict)
    called = [node.target for node in program.graph.nodes]
    assert OPS.softmax.default in called
    assert OPS.log_softmax.default in called
    other = normal(5, 4, device=device)
    torch.testing.assert_close(program.module()(other), Model()(other))


@FUNCTIONS
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_make_fx(device: str, function: Any, mode: str, pre_dispatch: bool) -> None:
    trace = make_fx(lambda x: function(x, 1), tracing_mode=mode, pre_dispatch=pre_dispatch)
    graph = trace(normal(3, 4, device=device))
    assert f"ndsoftmax.{function.__name__}.default" in graph.code


@FUNCTIONS
def test_symbolic_trace(device: str, function: Any) -> None:
    x = normal(3, 4, device=device)
    traced = torch.fx.symbolic_trace(lambda x: function(x, 1))
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [function]
    assert torch.equal(traced(x), function(x, 1))


@FUNCTIONS
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_jit_trace(device: str, function: Any) -> None:
    x = normal(3, 4, device=device)
    traced = torch.jit.trace(lambda x: function(x, 1), x)
    assert f"ndsoftmax::{function.__name__}" in str(traced.graph)
    assert torch.equal(traced(-x), function(-x, 1))


# ---- modes


@FUNCTIONS
def test_dispatch_mode_sees_forward_and_backward(device: str, function: Any) -> None:
    x = normal(3, 4, device=device)
    name = f"ndsoftmax.{function.__name__}"
    with Calls() as calls:
        function(x, 1)
    assert calls.seen == [f"{name}.default"]
    with Calls() as calls:
        function(x.requires_grad_(), 1).backward(x.detach())
    assert f"{name}.default" in calls.seen
    assert f"{name}_backward.default" in calls.seen


@FUNCTIONS
def test_function_mode_sees_the_call(device: str, function: Any) -> None:
    class Functions(TorchFunctionMode):
        def __torch_function__(self, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(called)
            return called(*args, **(kwargs or {}))

    seen: list[Any] = []
    with Functions():
        function(normal(3, 4, device=device), 1)
    assert seen[-1] is function


@FUNCTIONS
def test_fake_tensors(function: Any) -> None:
    with FakeTensorMode():
        x = torch.empty(3, 4, dtype=torch.float16)
        y = function(x, 1, dtype=torch.float32)
        assert isinstance(y, FakeTensor)
        assert (y.shape, y.dtype, y.device.type) == (x.shape, torch.float32, "cpu")
        assert function(x, 1, out=torch.empty_like(x)).shape == x.shape
        assert function(torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), 1).stride() == (60, 1, 15, 3)


@FUNCTIONS
def test_meta_tensors(function: Any) -> None:
    x = torch.empty(3, 4, device="meta", requires_grad=True)
    y = function(x, 1)
    assert y.is_meta
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.is_meta
    with torch.no_grad():
        assert function(x, 1, out=torch.empty_like(x)).is_meta


@FUNCTIONS
def test_the_profiler_sees_forward_and_backward(device: str, function: Any) -> None:
    x = normal(3, 4, device=device)
    name = f"ndsoftmax::{function.__name__}"
    with torch.autograd.profiler.profile() as plain:
        function(x, 1)
    with torch.autograd.profiler.profile() as differentiable:
        function(x.requires_grad_(), 1).backward(x.detach())
    with torch.autograd.profiler.profile() as into, torch.no_grad():
        function(x, 1, out=torch.empty_like(x))
    for profile, names in ((plain, {name}), (differentiable, {name, f"{name}_backward"}), (into, {name})):
        assert names <= {event.key for event in profile.key_averages()}


# ---- kinds of tensors


@FUNCTIONS
def test_a_subclass_without_torch_function_sees_its_operators(device: str, function: Any) -> None:
    class Seeing(Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

        @classmethod
        def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(operator))
            return x

    seen: list[str] = []
    x = normal(3, 4, device=device)
    function(Tensor._make_subclass(Seeing, x), 1)
    assert seen == [f"ndsoftmax.{function.__name__}.default"]


@FUNCTIONS
def test_subclasses_stay_what_they_are(device: str, function: Any) -> None:
    class Named(Tensor):
        @classmethod
        def __torch_function__(cls, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(called)
            return super().__torch_function__(called, types, args, kwargs)

    seen: list[Any] = []
    x = normal(3, 4, device=device)
    assert type(function(x.as_subclass(Named), 1)) is Named
    assert type(function(x, 1, out=torch.empty_like(x).as_subclass(Named))) is Named
    assert seen.count(function) == 2
    assert torch.equal(function(torch.nn.Parameter(x), 1), function(x, 1))


@FUNCTIONS
def test_torch_function_of_a_subclass_is_called(function: Any) -> None:
    class Loud:
        @classmethod
        def __torch_function__(cls, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return called, args, kwargs

    loud = Loud()
    called, args, kwargs = function(loud, 1)
    assert called is function
    assert args == (loud, 1, None)
    assert kwargs == {"out": None}


@FUNCTIONS
def test_tensors_of_tensors_go_to_torch(device: str, function: Any) -> None:
    x = normal(3, 4, device=device)
    two = function(TwoTensor(x, x + 1), 1)
    torch.testing.assert_close((two.a, two.b), (function(x, 1), function(x + 1, 1)))
    ragged = torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged)
    assert all(torch.allclose(a, function(b, 1)) for a, b in zip(function(ragged, -1), (x, x[:2]), strict=True))
    with pytest.raises(TypeError, match="dim must be one int for a TwoTensor"):
        function(TwoTensor(x, x), (0, 1))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_the_old_kind(device: str) -> None:
    x = normal(3, 4, device=device)
    nested = ndsoftmax.softmax(torch.nested.nested_tensor([x, x[:2]]), -1)
    assert all(torch.allclose(a, torch.softmax(b, 1)) for a, b in zip(nested.unbind(), (x, x[:2]), strict=True))
    with pytest.raises(TypeError, match="out must be a strided tensor, but is nested"):
        ndsoftmax.softmax(x, -1, out=torch.nested.nested_tensor([x, x[:2]]))


@FUNCTIONS
def test_functional_tensors(device: str, function: Any) -> None:
    x = normal(3, 4, device=device)
    torch._enable_functionalization(reapply_views=True)
    try:
        y = torch._from_functional_tensor(function(torch._to_functional_tensor(x), 1))
    finally:
        torch._disable_functionalization()
    assert torch.equal(y, function(x, 1))


@FUNCTIONS
def test_what_a_transform_left_behind(device: str, function: Any) -> None:
    left: list[Tensor] = []
    torch.func.grad(lambda x: left.append(x * 2) or x.sum())(normal(3, 4, device=device))
    torch.testing.assert_close(function(left[0], 1), function(normal(3, 4, device=device) * 2, 1))


def test_out_that_is_not_ordinary_memory(device: str) -> None:
    x, memory = normal(3, 4, device=device), torch.zeros(3, 4, dtype=torch.complex64, device=device)
    out = memory.conj().imag
    assert out.is_neg()
    torch.testing.assert_close(ndsoftmax.softmax(x, 1, out=out), ndsoftmax.softmax(x, 1))
    assert torch.equal(memory.imag, -out)


@FUNCTIONS
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_out_that_takes_the_long_way_is_as_exact(device: str, function: Any, dtype: torch.dtype) -> None:
    x = normal(3, 4, device=device, dtype=dtype)
    with Calls():
        got = function(x, 1, dtype=torch.float32, out=torch.empty(3, 4, device=device))
    assert torch.equal(got, function(x, 1, dtype=torch.float32))
