"""Arrays of other libraries go in and come out as what they were."""

from __future__ import annotations

from typing import Any

import ndsoftmax
import numpy as np
import pytest
import torch
from strategies import numbers

FUNCTIONS = pytest.mark.parametrize("function", [ndsoftmax.softmax, ndsoftmax.log_softmax])
X = numbers(60, 0).view(3, 4, 5).numpy()


def read_only(array: Any) -> Any:
    array = array.copy()
    array.setflags(write=False)
    return array


ARRAYS = {
    "float64": X.astype(np.float64),
    "float16": X.astype(np.float16),
    "permuted": X.transpose(2, 0, 1),
    "stepped": X[:, ::2],
    "backwards": X[::-1, :, ::-1],
    "broadcast": np.broadcast_to(X[0], (3, 4, 5)),
    "read-only": read_only(X),
    "foreign byte order": X.astype(X.dtype.newbyteorder()),
    "field of a record": np.zeros((2, 3, 4), dtype=[("flag", "i1"), ("value", "f4")])["value"],
    "number": np.array(2.5),
    "empty": X[:0],
}


@FUNCTIONS
@pytest.mark.parametrize("name", ARRAYS)
def test_numpy(function: Any, name: str) -> None:
    x = ARRAYS[name]
    before = x.copy()
    for dim in range(max(x.ndim, 1)):
        y = function(x, dim)
        assert type(y) is np.ndarray
        assert y.shape == x.shape
        assert y.dtype == x.dtype.newbyteorder("=")
        assert y.flags.writeable
        native = np.ascontiguousarray(x, dtype=y.dtype).reshape(x.shape)
        tolerance = 4 * np.finfo(y.dtype).eps
        np.testing.assert_allclose(y, function(torch.from_numpy(native.copy()), dim), tolerance, tolerance)
    np.testing.assert_array_equal(x, before)


@FUNCTIONS
def test_numpy_into_a_tensor(function: Any) -> None:
    out = torch.empty(2, 3)
    assert function(X[0, :2, :3].astype(np.float32), 1, out=out) is out
    np.testing.assert_allclose(out, function(X[0, :2, :3].astype(np.float32), 1), rtol=1e-6)


def test_numpy_goes_in_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    as_tensor = ndsoftmax.functional.as_tensor
    monkeypatch.setattr(ndsoftmax.functional, "as_tensor", lambda x: seen.append(as_tensor(x)) or seen[-1])
    for name in ("float64", "permuted", "stepped", "broadcast"):
        ndsoftmax.softmax(ARRAYS[name], 0)
        assert seen[-1].data_ptr() == ARRAYS[name].ctypes.data


@FUNCTIONS
def test_integers_need_dtype(function: Any) -> None:
    with pytest.raises(TypeError, match="dtype="):
        function(np.arange(6), 0)
    y = function(np.arange(6), 0, dtype=torch.float64)
    assert y.dtype == np.float64


@FUNCTIONS
@pytest.mark.parametrize("bad", [[1.0, 2.0], np.array(["a"]), np.array([None]), np.float32(1), 1.0], ids=repr)
def test_what_is_no_array_of_numbers(function: Any, bad: Any) -> None:
    with pytest.raises(TypeError, match="input"):
        function(bad, 0)


class Array:
    """As CuPy and JAX have it: DLPack and a namespace to come back to."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()

    def __array_namespace__(self) -> Any:
        return Array

    @staticmethod
    def from_dlpack(source: Any) -> Array:
        return Array(torch.from_dlpack(source))


@FUNCTIONS
def test_any_array_of_the_standard(device: str, function: Any) -> None:
    x = numbers(12, 0, device=device).view(3, 4)
    y = function(Array(x), 1)
    assert type(y) is Array
    assert torch.equal(y.tensor, function(x, 1))


@FUNCTIONS
@pytest.mark.parametrize("name", ["cupy", "jax.numpy"])
def test_real_libraries(function: Any, name: str) -> None:
    library = pytest.importorskip(name)
    x = library.asarray(X)
    y = function(x, 1)
    assert type(y) is type(x)
    np.testing.assert_allclose(y.get() if name == "cupy" else np.asarray(y), function(X, 1), rtol=1e-6)


class OfNoLibrary:
    """An array of the standard, whose module takes none back."""

    def __dlpack__(self, **_: Any) -> Any:
        return torch.zeros(3).__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return torch.zeros(3).__dlpack_device__()


@FUNCTIONS
def test_results_that_cannot_be_arrays_are_refused(function: Any) -> None:
    with pytest.raises(TypeError, match=r"dtype is torch\.bfloat16, which NumPy has not"):
        function(X, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="input is a OfNoLibrary, whose library takes nothing back"):
        function(OfNoLibrary())
    bias = torch.zeros(X.shape[-1], dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="bias requires grad, but input is an array"):
        function(X, bias=bias)
    with torch.no_grad():
        assert type(function(X.astype("float64"), bias=bias)) is type(X)
