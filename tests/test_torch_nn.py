"""Modules, and what wraps modules."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ndsoftmax
import pytest
import torch
import torch.distributed
from strategies import numbers
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

PAIRS = pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (ndsoftmax.nn.Softmax, torch.nn.Softmax),
        (ndsoftmax.nn.LogSoftmax, torch.nn.LogSoftmax),
    ],
)


def normal(*shape: int, device: str) -> Tensor:
    return numbers(torch.Size(shape).numel(), 0, device=device).view(shape)


@PAIRS
@pytest.mark.parametrize("arguments", [(), (1,), (-1,)], ids=str)
def test_constructor_and_repr(ours: Any, torchs: Any, arguments: tuple[int, ...]) -> None:
    assert repr(ours(*arguments)) == repr(torchs(*arguments))
    assert ours(*arguments).dim == torchs(*arguments).dim
    assert isinstance(ours(*arguments), torchs)


@PAIRS
def test_forward(device: str, ours: Any, torchs: Any) -> None:
    x = normal(3, 4, 5, device=device)
    for dim in (0, 1, -1):
        torch.testing.assert_close(ours(dim)(x), torchs(dim)(x))
    assert torch.equal(
        ours((0, 2))(x), getattr(ndsoftmax, "softmax" if ours is ndsoftmax.nn.Softmax else "log_softmax")(x, (0, 2))
    )


@PAIRS
@pytest.mark.parametrize("rank", [0, 1, 2, 3, 4])
def test_no_dim_warns_and_chooses_as_torch(device: str, ours: Any, torchs: Any, rank: int) -> None:
    x = normal(*range(2, 2 + rank), device=device)
    with pytest.warns(UserWarning, match="Implicit dimension choice") as torchs_warning:
        expected = torchs()(x)
    with pytest.warns(UserWarning, match="Implicit dimension choice") as our_warning:
        got = ours()(x)
    torch.testing.assert_close(got, expected)
    assert str(our_warning[0].message) == str(torchs_warning[0].message)
    assert our_warning[0].filename == __file__


def test_softmax2d(device: str) -> None:
    module = ndsoftmax.nn.Softmax2d()
    assert repr(module) == repr(torch.nn.Softmax2d())
    for shape in ((2, 3, 4, 5), (3, 4, 5)):
        x = normal(*shape, device=device)
        torch.testing.assert_close(module(x), torch.nn.Softmax2d()(x))
    with pytest.raises(ValueError, match="3 or 4 dimensions, but has 2"):
        module(normal(3, 4, device=device))


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize(
    "module", [ndsoftmax.nn.Softmax(), ndsoftmax.nn.LogSoftmax(), ndsoftmax.nn.Softmax(1), ndsoftmax.nn.Softmax2d()]
)
def test_symbolic_trace(module: torch.nn.Module) -> None:
    x = normal(3, 4, 5, device="cpu")
    assert torch.equal(torch.fx.symbolic_trace(torch.nn.Sequential(module))(x), module(x))


@pytest.mark.parametrize(
    "module", [ndsoftmax.nn.Softmax(1), ndsoftmax.nn.LogSoftmax(0), ndsoftmax.nn.Softmax2d()], ids=repr
)
def test_copies(module: torch.nn.Module) -> None:
    x = normal(3, 4, 5, device="cpu")
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)):
        assert type(copied) is type(module)
        assert torch.equal(copied(x), module(x))


class Classifier(torch.nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 4, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return ndsoftmax.log_softmax(self.linear(x), -1)


@pytest.fixture
def _process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_process_group")
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
def test_distributed_data_parallel(device: str) -> None:
    torch.manual_seed(0)
    model = Classifier(device)
    x = normal(6, 8, device=device)
    model(x).square().sum().backward()
    expected = model.linear.weight.grad
    model.zero_grad()
    DistributedDataParallel(model)(x).square().sum().backward()
    torch.testing.assert_close(model.linear.weight.grad, expected)


@pytest.mark.usefixtures("_process_group")
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
def test_fully_sharded_and_distributed_tensors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        mesh = init_device_mesh("cpu", (1,))
        torch.manual_seed(0)
        model = Classifier("cpu")
        x = normal(6, 8, device="cpu")
        expected = model(x).detach()
        torch.testing.assert_close(fully_shard(model, mesh=mesh)(x), expected)
        for dim in (0, 1):
            sharded = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
            y = ndsoftmax.softmax(sharded, dim)
            torch.testing.assert_close(y.full_tensor(), torch.softmax(x, dim))
            y.square().sum().backward()
            assert sharded.grad is not None
