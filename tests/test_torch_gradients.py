"""Derivatives of every kind and order: autograd, forward mode, torch.func, and what runs them on other terms."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import ndsoftmax
import oracle
import pytest
import torch
import torch.utils.checkpoint
from strategies import HALVES, numbers
from torch import Tensor, func
from torch.autograd import forward_ad, gradcheck, gradgradcheck

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # that torch's forward mode uses
FUNCTIONS = pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
OURS = {False: ndsoftmax.softmax, True: ndsoftmax.log_softmax}
TORCHS = {False: torch.softmax, True: torch.log_softmax}
OPERATORS = {False: torch.ops.ndsoftmax.softmax, True: torch.ops.ndsoftmax.log_softmax}
BACKWARD = {False: ndsoftmax.ops.softmax_backward, True: ndsoftmax.ops.log_softmax_backward}
SHAPES = [(), (0,), (1,), (5,), (3, 4), (3, 0), (2, 1, 3), (2, 3, 2, 2)]
CASES = [(shape, dim) for shape in SHAPES for dim in range(-1, max(len(shape), 1))] + [((2, 3, 2), (0, 2))]


def normal(shape: tuple[int, ...], device: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return numbers(torch.Size(shape).numel(), seed, dtype, device).view(shape)


@FUNCTIONS
@pytest.mark.parametrize(("shape", "dim"), CASES, ids=str)
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap of the old kind, by which gradcheck batches
def test_gradcheck(device: str, shape: tuple[int, ...], dim: Any, log: bool) -> None:
    x = normal(shape, device).requires_grad_()
    batched = x.numel() > 0
    assert gradcheck(
        lambda x: OURS[log](x, dim), (x,), check_forward_ad=True, check_batched_grad=batched, fast_mode=x.numel() > 20
    )
    assert gradgradcheck(lambda x: OURS[log](x, dim), (x,), check_fwd_over_rev=True, check_batched_grad=batched)


@FUNCTIONS
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_backward_operators_are_differentiable(device: str, log: bool) -> None:
    grad, output = (normal((3, 4), device, seed).requires_grad_() for seed in (0, 1))
    for dim in (0, -1, (0, 1)):
        assert gradcheck(
            lambda g, y, dim=dim: BACKWARD[log](g, y, dim),
            (grad, output),
            check_forward_ad=True,
            check_batched_grad=True,
        )
        assert gradgradcheck(lambda g, y, dim=dim: BACKWARD[log](g, y, dim), (grad, output))
        assert gradcheck(lambda g, dim=dim: BACKWARD[log](g, output.detach(), dim), (grad,))
        assert gradcheck(lambda y, dim=dim: BACKWARD[log](grad.detach(), y, dim), (output,))


Transform = Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]
TRANSFORMS: dict[str, Transform] = {
    "grad": lambda f: func.grad(lambda x: f(x).sum()),
    "jacrev": func.jacrev,
    "jacfwd": func.jacfwd,
    "hessian": lambda f: func.hessian(lambda x: f(x).sum()),
    "reverse over reverse": lambda f: func.jacrev(func.jacrev(f)),
    "forward over forward": lambda f: func.jacfwd(func.jacfwd(f)),
    "reverse over forward": lambda f: func.jacrev(func.jacfwd(f)),
    "third derivative": lambda f: func.jacfwd(func.hessian(lambda x: f(x).sum())),
    "vmap": lambda f: func.vmap(f, in_dims=1, out_dims=1),
    "vmap of numbers": lambda f: func.vmap(func.vmap(f)),
    "vmap of grad": lambda f: func.vmap(func.grad(lambda row: f(row.view(1, -1)).sum())),
    "grad of vmap": lambda f: func.grad(lambda x: func.vmap(lambda row: f(row.view(1, -1)))(x).sum()),
    "functionalize": func.functionalize,
    "autograd hessian": lambda f: (
        lambda x: torch.autograd.functional.hessian(
            lambda x: f(x).sum(), x, vectorize=True, outer_jacobian_strategy="forward-mode"
        )
    ),
}


@FUNCTIONS
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("dim", [0, 1])
def test_transforms(device: str, name: str, dim: int, log: bool) -> None:
    x = normal((3, 4), device)
    ours, operators, torchs = (
        TRANSFORMS[name](lambda x, f=f: f(x, dim if x.dim() > 1 else 0) ** 2 * x.detach().sin())(x)
        for f in (OURS[log], lambda x, dim: OPERATORS[log](x, [dim]), TORCHS[log])
    )
    torch.testing.assert_close(ours, torchs)
    torch.testing.assert_close(operators, torchs)


@FUNCTIONS
@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 1)], ids=str)
def test_vmap_of_backward(device: str, in_dims: tuple[int | None, int | None], log: bool) -> None:
    grad, output = normal((3, 3, 4), device), normal((3, 3, 4), device, seed=1)
    arguments = [t if d is not None else t[0] for t, d in zip((grad, output), in_dims, strict=True)]
    got = func.vmap(lambda g, y: BACKWARD[log](g, y, -1), in_dims)(*arguments)
    rows = [t.movedim(d, 0) if d is not None else t.expand(3, 3, 4) for t, d in zip(arguments, in_dims, strict=True)]
    torch.testing.assert_close(got, BACKWARD[log](*rows, -1))


@FUNCTIONS
def test_vmap_names_a_bad_dim_as_seen_inside(device: str, log: bool) -> None:
    for dim in (1, -2):
        with pytest.raises(IndexError, match=r"\[-1, 0\]"):
            func.vmap(lambda row, dim=dim: OURS[log](row, dim))(normal((3, 4), device))


@FUNCTIONS
def test_a_captured_tensor_keeps_its_gradient_inside_a_transform(device: str, log: bool) -> None:
    x, weight = normal((3, 4), device).requires_grad_(), normal((3, 4), device, seed=1)
    func.grad(lambda w: (w * OURS[log](x, 1)).sum())(weight).sum().backward()
    (expected,) = torch.autograd.grad(TORCHS[log](x, 1).sum(), x)
    torch.testing.assert_close(x.grad, expected)


def test_a_captured_tensor_is_written_inside_a_transform(device: str) -> None:
    x = normal((3, 4), device)
    out = torch.empty_like(x)
    grad = func.grad(lambda w: (w * ndsoftmax.softmax(x, 1, out=out)).sum())(x)
    torch.testing.assert_close(out, torch.softmax(x, 1))
    torch.testing.assert_close(grad, out)


@FUNCTIONS
def test_nothing_is_recorded_below_autograd(device: str, log: bool) -> None:
    x = normal((3, 4), device).requires_grad_()
    with torch._C._AutoDispatchBelowAutograd():
        assert not OURS[log](x, 1).requires_grad
        assert not TORCHS[log](x, 1).requires_grad
    assert OURS[log](x, 1).requires_grad


@FUNCTIONS
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_forward_and_reverse_agree_where_the_dtype_widens(device: str, dtype: torch.dtype, log: bool) -> None:
    x = normal((3, 4), device, dtype=dtype)

    def loss(x: Tensor) -> Tensor:
        return (OURS[log](x, 1, dtype=torch.float32) ** 2).sum()

    over, under = func.jacfwd(func.jacrev(loss))(x), func.jacrev(func.jacrev(loss))(x)
    assert over.dtype == under.dtype == dtype
    torch.testing.assert_close(over, under)


@FUNCTIONS
def test_forward_mode(device: str, log: bool) -> None:
    x, tangent = normal((3, 4), device), normal((3, 4), device, seed=1)
    _, expected = func.jvp(lambda x: TORCHS[log](x, 1), (x,), (tangent,))
    with forward_ad.dual_level():
        got = forward_ad.unpack_dual(OURS[log](forward_ad.make_dual(x, tangent), 1)).tangent
        torch.testing.assert_close(got, expected)


@FUNCTIONS
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize(("shape", "dim"), [((256, 1000), 1), ((1000, 64), 0), ((4, 21, 300), 1)], ids=str)
def test_backward_is_as_exact_as_torchs(
    device: str, dtype: torch.dtype, shape: tuple[int, ...], dim: int, log: bool
) -> None:
    torchs = torch.ops.aten._log_softmax_backward_data if log else torch.ops.aten._softmax_backward_data
    ours_and_theirs = []
    for seed in range(0, 40, 2):  # of one, the largest error is luck
        grad = normal(shape, device, seed=seed + 1, dtype=dtype)
        output = TORCHS[log](normal(shape, device, seed=seed, dtype=dtype), dim)
        exact = oracle.backward(grad, output, dim, log=log)
        errors = [
            (result.double() - exact).abs()
            for result in (BACKWARD[log](grad, output, dim), torchs(grad, output, dim, dtype))
        ]
        ours_and_theirs.append([[error.mean().item(), error.max().item()] for error in errors])
    (mean, largest), (their_mean, their_largest) = torch.tensor(ours_and_theirs).mean(0).tolist()
    assert mean <= 1.2 * their_mean
    assert largest <= 1.2 * their_largest


@FUNCTIONS
def test_the_short_path_records_only_what_autograd_would(device: str, log: bool) -> None:
    def short(x: Tensor) -> Any:
        return ndsoftmax._C.plain_forward(x, 1, None, log, lambda *_: "recorded", None)

    x = normal((3, 4), device)
    leaf = x.clone().requires_grad_()
    assert short(leaf) == "recorded"
    assert isinstance(short(x), Tensor)
    with torch.no_grad():
        assert isinstance(short(leaf), Tensor)
    outside = torch.empty_like(x)
    with torch.inference_mode(), torch.enable_grad():  # as torch, which asks nothing of autograd here
        for out in (outside, torch.empty_like(x)):
            assert torch.equal(OURS[log](leaf, 1, out=out), OURS[log](x, 1))


@pytest.fixture
def no_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def long(*_: Any) -> Tensor:
        raise AssertionError

    monkeypatch.setattr(ndsoftmax.functional, "_checked", long)


@pytest.mark.usefixtures("no_long_way")
@FUNCTIONS
@pytest.mark.parametrize("dim", [1, -2, (0, 1)], ids=str)
@pytest.mark.parametrize("scale", [0.5, -3.0])
def test_a_scale_alone_takes_the_short_path(device: str, scale: float, dim: Any, log: bool) -> None:
    x, grad = normal((3, 4), device), normal((3, 4), device, seed=1)
    dims = dim if isinstance(dim, tuple) else (dim,)
    logarithm = x * scale - (x * scale).logsumexp(dims, keepdim=True)
    exact = logarithm if log else logarithm.exp()
    torch.testing.assert_close(OURS[log](x, dim, scale=scale), exact)
    out = torch.empty_like(x)
    assert OURS[log](x, dim, scale=scale, out=out) is out
    torch.testing.assert_close(out, exact)
    assert OURS[log](x.half(), dim, torch.float32, scale=scale).dtype == torch.float32
    leaf = x.clone().requires_grad_()
    y = OURS[log](leaf, dim, scale=scale)
    (got,) = torch.autograd.grad(y, leaf, grad)
    torch.testing.assert_close(got, oracle.backward(grad, exact, dim, log=log) * scale)
    assert gradcheck(lambda x: OURS[log](x, dim, scale=scale), (leaf,))
    assert gradgradcheck(lambda x: OURS[log](x, dim, scale=scale), (leaf,))
    with torch.no_grad():
        assert not OURS[log](leaf, dim, scale=scale).requires_grad
    with pytest.raises(AssertionError):
        OURS[log](x, dim, scale=scale, causal=True)


@pytest.mark.usefixtures("no_long_way")
@FUNCTIONS
@pytest.mark.parametrize("name", ["mask", "where"])
@pytest.mark.parametrize("shape", [(), (4,), (3, 1), (1, 1, 4), (2, 3, 4)], ids=str)
def test_masks_take_the_short_path(device: str, shape: tuple[int, ...], name: str, log: bool) -> None:
    x, grad = normal((2, 3, 4), device), normal((2, 3, 4), device, seed=1)
    mask = normal(shape, device, seed=2) > 0.3
    included = (mask if name == "where" else ~mask).expand(x.shape)
    for dim in (2, (0, -2)):
        dims = dim if isinstance(dim, tuple) else (dim,)
        exact = oracle.masked_forward(x, dims, included, scale=0.5, log=log)
        leaf = x.clone().requires_grad_()
        for given in (x, leaf):
            torch.testing.assert_close(OURS[log](given, dim, scale=0.5, **{name: mask}), exact)
        (got,) = torch.autograd.grad(OURS[log](leaf, dim, scale=0.5, **{name: mask}), leaf, grad)
        alive = grad.where(included, 0)
        torch.testing.assert_close(got, oracle.backward(alive, exact, dims, log=log).where(included, 0) * 0.5)
        assert gradcheck(lambda x, dim=dim: OURS[log](x, dim, scale=0.5, **{name: mask}).where(included, 0), (leaf,))
    others: list[dict[str, Any]] = [
        {name: mask.int()},
        {name: mask.expand(1, 2, 3, 4)},
        {name: 1},
        {"bias": x},
        {"out": torch.empty_like(x)},
        {"mask": mask, "where": mask},
        {"fully_masked": "nan"},
        {"scale": 2},
    ]
    for other in others:
        with pytest.raises(AssertionError):
            OURS[log](x, 2, **{name: mask, **other})


@FUNCTIONS
def test_a_scale_alone_is_as_torch_has_it(device: str, log: bool) -> None:
    x = normal((3, 4), device, dtype=torch.float32)
    for scale in (0.0, -0.0, torch.inf, -torch.inf, torch.nan):
        torch.testing.assert_close(OURS[log](x, 1, scale=scale), TORCHS[log](x * scale, 1), equal_nan=True)
    with pytest.raises(IndexError, match="out of range"):
        OURS[log](x, 2, scale=0.5)
    with pytest.raises(TypeError, match="float16"):
        OURS[log](x.int(), 1, scale=0.5)
    with pytest.raises(RuntimeError, match="shape of input"):
        OURS[log](x, 1, scale=0.5, out=torch.empty(4, 3, device=device))


@FUNCTIONS
def test_transforms_meet_tensors_that_they_do_not_follow(device: str, log: bool) -> None:
    x, grad, weight = (normal((3, 4), device, seed) for seed in range(3))
    mask = x > 0.5
    calls: list[Callable[[], Tensor]] = [
        lambda: OURS[log](x, 1),
        lambda: OURS[log](x.T, 0),
        lambda: OURS[log](x, 1, mask=mask, scale=2.0),
        lambda: BACKWARD[log](grad, x, 1),
        lambda: BACKWARD[log](grad, x.T.contiguous().T, [1], scale=1),
        lambda: BACKWARD[log](grad, x, 1, mask=mask),
    ]
    for call in calls:
        expected = call().nan_to_num(neginf=0)

        def loss(weight: Tensor, call: Callable[[], Tensor] = call) -> Tensor:
            result = call().nan_to_num(neginf=0)
            return (result * weight.reshape(result.shape)).sum()

        assert torch.equal(func.grad(loss)(weight).reshape(expected.shape), expected)


@FUNCTIONS
def test_a_saved_output_that_is_not_plain(device: str, log: bool) -> None:
    def negative(saved: Tensor) -> Tensor:  # the same numbers, but not in memory
        return torch.complex(torch.zeros_like(saved), -saved).conj().imag

    x, grad = normal((3, 4), device).requires_grad_(), normal((3, 4), device, 1)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, negative):
        y = OURS[log](x, 1)
    got = torch.autograd.grad(y, x, grad)
    torch.testing.assert_close(got, torch.autograd.grad(OURS[log](x, 1), x, grad))


@FUNCTIONS
def test_gradients_that_are_not_plain(device: str, log: bool) -> None:
    x = normal((3, 4), device).requires_grad_()
    y = OURS[log](x, 1)
    negative = torch.complex(normal((3, 4), device), normal((3, 4), device, seed=1)).conj().imag
    assert negative.is_neg()
    for grad in (
        negative,
        torch._efficientzerotensor((3, 4), dtype=x.dtype, device=device),
        x.detach().T.contiguous().T,
    ):
        (got,) = torch.autograd.grad(y, x, grad, retain_graph=True)
        torch.testing.assert_close(got, BACKWARD[log](grad.clone(), y.detach(), 1))


@FUNCTIONS
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_batched_gradients(device: str, log: bool) -> None:
    x, grads = normal((3, 4), device).requires_grad_(), normal((5, 3, 4), device, seed=1)
    y = OURS[log](x, 1)
    (got,) = torch.autograd.grad(y, x, grads, is_grads_batched=True, retain_graph=True)
    for row, grad in zip(got, grads, strict=True):
        torch.testing.assert_close(row, torch.autograd.grad(y, x, grad, retain_graph=True)[0])


@FUNCTIONS
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(device: str, reentrant: bool, log: bool) -> None:
    gradients = []
    for function in (OURS[log], TORCHS[log]):
        x = normal((3, 4), device).requires_grad_()
        y = torch.utils.checkpoint.checkpoint(lambda x, f=function: f(x * 2, 1).sin(), x, use_reentrant=reentrant)
        y.sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


@FUNCTIONS
def test_saved_tensors_pass_through_hooks(device: str, log: bool) -> None:
    x = normal((3, 4), device).requires_grad_()
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        y = OURS[log](x, 1)
    assert len(packed) == 1
    assert packed[0].data_ptr() == y.data_ptr()


@FUNCTIONS
def test_a_changed_output_is_noticed(device: str, log: bool) -> None:
    y = OURS[log](normal((3, 4), device).requires_grad_(), 1)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@FUNCTIONS
def test_the_graph_is_freed_without_the_garbage_collector(device: str, log: bool) -> None:
    gc.disable()
    try:
        y = OURS[log](normal((3, 4), device).requires_grad_(), 1)
        node = weakref.ref(y.grad_fn)
        y.sum().backward()
        del y
        assert node() is None
    finally:
        gc.enable()


@FUNCTIONS
def test_results_are_ordinary_tensors(device: str, log: bool) -> None:
    y = OURS[log](normal((3, 4), device), 1)
    assert type(y) is Tensor
    assert y._version == 0
    assert torch.equal(pickle.loads(pickle.dumps(y)), y)
    assert torch.equal(copy.deepcopy(y), y)
    y.resize_(40, 40)
    with torch.inference_mode():
        inside = OURS[log](normal((3, 4), device), 1)
        assert inside.is_inference()
        assert OURS[log](inside, 1, out=torch.empty_like(inside)).is_inference()


@pytest.mark.parametrize("function", [ndsoftmax.softmax, ndsoftmax.log_softmax])
def test_modes_inside_a_transform_are_the_callers(function: Any) -> None:
    torchs = getattr(torch, function.__name__)
    x = torch.randn(4, dtype=torch.double)

    def nested(softmax: Any) -> Any:
        def outer(v: Tensor) -> Tensor:
            def inner(y: Tensor) -> Tensor:
                with torch.no_grad():
                    p = softmax(v, 0)
                return (p * y).sum()

            return torch.func.grad(inner)(v.detach()).square().sum()

        return torch.func.grad(outer)(x)

    torch.testing.assert_close(nested(function), nested(torchs))
    weight, tangent = x.clone().requires_grad_(), torch.randn(4, dtype=torch.double)
    with torch.no_grad():
        for result in torch.func.jvp(lambda v: function(v, 0), (weight,), (tangent,)):
            assert not result.requires_grad
    with torch.inference_mode(), torch.enable_grad():
        assert not function(weight, 0).requires_grad
