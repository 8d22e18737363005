"""Named edge cases, and bad input: an error of the right type before anything runs, and nothing changed."""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import re
import shutil
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ndsoftmax
import pytest
import torch
from ndsoftmax._arguments import overlaps_partly
from oracle import assert_forward
from strategies import FLOATS, numbers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader, Dataset

FUNCTIONS = pytest.mark.parametrize("function", [ndsoftmax.softmax, ndsoftmax.log_softmax])


@pytest.mark.parametrize("dim", [0, -1, (0,), (-1,)])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_number_without_dimensions(device: str, dtype: torch.dtype, dim: int | tuple[int]) -> None:
    x = torch.tensor(3.5, dtype=dtype, device=device)
    assert torch.equal(ndsoftmax.softmax(x, dim), torch.ones_like(x))
    assert torch.equal(ndsoftmax.log_softmax(x, dim), torch.zeros_like(x))


@FUNCTIONS
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 4)], ids=str)
def test_empty_tensors(device: str, shape: tuple[int, ...], function: Any) -> None:
    x = torch.empty(shape, device=device)
    out = torch.empty_like(x)
    for dim in range(-len(shape), len(shape)):
        y = function(x, dim)
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        assert function(x, dim, out=out) is out
    assert function(x, tuple(range(len(shape)))).shape == x.shape


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_dim_of_size_one(device: str, dtype: torch.dtype) -> None:
    x = numbers(35, 0, dtype, device).view(5, 1, 7)
    assert torch.equal(ndsoftmax.softmax(x, 1), torch.ones_like(x))
    assert torch.equal(ndsoftmax.log_softmax(x, 1), torch.zeros_like(x))


def test_a_call_does_not_take_the_plan_of_another(device: str) -> None:
    x = torch.randn(6, 8, 20, device=device)
    likes = {  # each of them differs from the first in one thing
        "first": (x, -1),
        "dim": (x, 1),
        "dims": (x, (1, 2)),
        "sizes": (x[:3], -1),
        "strides": (x[:, :, ::2].repeat_interleave(2, 2).transpose(0, 1).contiguous().transpose(0, 1), -1),
        "misaligned": (torch.randn(x.numel() + 1, device=device)[1:].view(x.shape), -1),
        "dtype": (x.double(), -1),
        "rank": (x[0], -1),
    }

    def check(call: str) -> None:
        given, dim = likes[call]
        for function, torchs in ((ndsoftmax.softmax, torch.softmax), (ndsoftmax.log_softmax, torch.log_softmax)):
            flat = given.flatten(1) if isinstance(dim, tuple) else given
            recorded, expected = given.clone().requires_grad_(), flat.clone().requires_grad_()
            result, reference = function(recorded, dim), torchs(expected, 1 if isinstance(dim, tuple) else dim)
            assert torch.allclose(result.flatten(), reference.flatten(), atol=1e-6)
            assert torch.allclose(function(given, dim, out=given.clone()), result, atol=1e-6)
            same = given.clone()
            assert torch.allclose(function(same, dim, out=same), result, atol=1e-6)
            for one in (result, reference):
                one.square().sum().backward()
            assert torch.allclose(recorded.grad.flatten(), expected.grad.flatten(), atol=1e-5)

    for one, other in itertools.permutations(likes, 2):
        check(one)
        check(other)


def test_a_gradient_does_not_take_the_plan_of_another(device: str) -> None:
    """Whose layout, or whose result's dtype, differs alone."""
    output = torch.randn(6, 8, 20, device=device).softmax(1)
    dense = torch.randn(6, 8, 20, device=device)
    grads = {"dense": dense, "expanded": dense[:1].expand(6, 8, 20), "turned": dense.mT.contiguous().mT}
    for one, other in itertools.permutations(itertools.product(grads, (torch.float32, torch.float16)), 2):
        for name, dtype in (one, other):
            grad = grads[name]
            got = ndsoftmax.ops.softmax_backward(grad, output, 1, dtype)
            expected = output * (grad - (grad * output).sum(1, keepdim=True))
            assert torch.allclose(got.float(), expected, atol=1e-6 if dtype == torch.float32 else 1e-3)


def test_the_newest_plan_is_not_taken_where_another_regime_is_forced(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(3, 40, 2, device=device)
    ndsoftmax.softmax(x, 1)
    monkeypatch.setenv("NDSOFTMAX_REGIME", "warp")
    with pytest.raises(ValueError, match="warp"):
        ndsoftmax.softmax(x, 1)
    monkeypatch.delenv("NDSOFTMAX_REGIME")
    assert torch.allclose(ndsoftmax.softmax(x, 1), x.softmax(1))


@FUNCTIONS
@pytest.mark.parametrize("dim", [2, -3, (0, 2), (-3, 1)])
def test_dim_out_of_range_in_torchs_words(device: str, function: Any, dim: Any) -> None:
    x = torch.zeros(2, 3, device=device)
    wrong = dim if isinstance(dim, int) else next(d for d in dim if not -2 <= d < 2)
    with pytest.raises(IndexError) as torchs:
        torch.softmax(x, wrong)
    with pytest.raises(IndexError, match=re.escape(str(torchs.value))):
        function(x, dim)
    with pytest.raises(IndexError, match=re.escape("[-1, 0], but got 1")):
        function(torch.tensor(1.0, device=device), 1)


@FUNCTIONS
@pytest.mark.parametrize(
    ("dim", "error"),
    [
        (True, TypeError),
        (1.0, TypeError),
        ("1", TypeError),
        (None, TypeError),
        ((0, True), TypeError),
        ((0, 1.0), TypeError),
        ((), ValueError),
        ((1, 1), RuntimeError),
        ((0, -2), RuntimeError),
    ],
    ids=str,
)
def test_bad_dims(device: str, function: Any, dim: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="dim") as raised:
        function(torch.zeros(2, 3, device=device), dim)
    assert raised.type is error


@FUNCTIONS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64], ids=str)
def test_other_dtypes_need_dtype(device: str, function: Any, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="dtype="):
        function(torch.ones(2, 3, dtype=dtype, device=device), 1)


@FUNCTIONS
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, "float32", 1], ids=str)
def test_bad_dtype_arguments(device: str, function: Any, dtype: Any) -> None:
    with pytest.raises(TypeError, match="dtype"):
        function(torch.ones(2, 3, device=device), 1, dtype=dtype)


@FUNCTIONS
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.quint8),
        lambda: [[1.0, 2.0]],
        lambda: None,
        lambda: 1.0,
    ],
    ids=["sparse", "quantized", "list", "None", "float"],
)
def test_what_is_not_a_dense_tensor(function: Any, make: Any) -> None:
    with pytest.raises(TypeError, match="input"):
        function(make(), 1)


@FUNCTIONS
def test_an_unsupported_device_is_named(function: Any) -> None:
    # The one way to a device that is not here. Of mtia, because fakes of xpu ask a CUDA build of torch 2.11 for one.
    with FakeTensorMode(), pytest.raises(RuntimeError, match="mtia"):
        function(torch.zeros(2, 3, device="mtia:0"), 1)


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.13", reason="such devices are made by what torch 2.13 has")
def test_a_device_of_someone_elses() -> None:
    script = """
        import torch, ndsoftmax
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
        _setup_privateuseone_for_python_backend("elsewhere")
        there = torch._C._acc.create_empty_tensor((3, 4), torch.float32)
        assert not ndsoftmax._C.are_plain(there, there)
        try:
            ndsoftmax.softmax(there, 1)
        except RuntimeError as error:
            assert "elsewhere:0" in str(error) and "CPU, CUDA or meta" in str(error), error
        else:
            raise AssertionError
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


@FUNCTIONS
def test_more_dims_than_there_can_be(device: str, function: Any) -> None:
    for dims in ((0,) * 13, (0,) * 13 + (1,), (1,) * 10_000):
        with pytest.raises(RuntimeError, match="appears multiple times"):
            function(torch.zeros(2, 3, device=device), dims)


@FUNCTIONS
def test_axis_is_dim(device: str, function: Any) -> None:
    torchs: Any = torch.softmax if function is ndsoftmax.softmax else torch.log_softmax
    x = numbers(24, 0, device=device).view(2, 3, 4)
    expected = torchs(x.double(), axis=1)
    torch.testing.assert_close(function(x, axis=1).double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(function(x * 2, axis=1, scale=0.5).double(), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(TypeError, match="either dim or axis, but got dim=0 and axis=1"):
        function(x, 0, axis=1)


@FUNCTIONS
def test_no_dim_at_all(device: str, function: Any) -> None:
    x, operator = torch.zeros(2, 3, device=device), getattr(torch.ops.ndsoftmax, function.__name__)
    for call in (lambda: function(x, ()), lambda: operator(x, []), lambda: operator(x.to("meta"), [])):
        with pytest.raises(ValueError, match="dim must name at least one dimension"):
            call()


@FUNCTIONS
def test_more_unrelated_dimensions_than_kernels_step_through(device: str, function: Any) -> None:
    torchs = torch.softmax if function is ndsoftmax.softmax else torch.log_softmax
    x, grad = (numbers(15, seed, device=device).as_strided((2,) * 14, (1,) * 14) for seed in (0, 1))  # none merge
    torch.testing.assert_close(function(x, -1), torchs(x, -1))
    leaf = x.contiguous().requires_grad_()
    got, expected = (torch.autograd.grad(f(leaf, -1), leaf, grad) for f in (function, torchs))
    torch.testing.assert_close(got, expected)


def overlapping(device: str) -> dict[str, tuple[Tensor, Tensor]]:
    memory = torch.zeros(40, device=device)
    square = torch.zeros(4, 4, device=device)
    return {
        "shifted by one": (memory[:12].view(3, 4), memory[1:13].view(3, 4)),
        "shifted by a row": (memory[:12].view(3, 4), memory[4:16].view(3, 4)),
        "shifted back": (memory[4:16].view(3, 4), memory[:12].view(3, 4)),
        "last with first": (memory[:12].view(3, 4), memory[11:23].view(3, 4)),
        "first with last": (memory[11:23].view(3, 4), memory[:12].view(3, 4)),
        "input in steps": (memory[:24].view(3, 8)[:, ::2], memory[14:26].view(3, 4)),
        "transposed": (square, square.T),
        "other steps": (memory[:12].view(3, 4), memory[:24].view(3, 8)[:, ::2]),
        "with itself": (torch.zeros(3, 4, device=device), torch.zeros(4, device=device).expand(3, 4)),
        "with itself, apart": (torch.zeros(2, 2, 4, device=device), memory[:32].view(2, 16)[:, :4].expand(2, 2, 4)),
        "with itself, windows": (torch.zeros(3, 4, device=device), memory.as_strided((3, 4), (2, 1))),
    }


@FUNCTIONS
@pytest.mark.parametrize("case", overlapping("cpu"))
def test_out_may_not_overlap(device: str, function: Any, case: str) -> None:
    x, out = overlapping(device)[case]
    x.copy_(numbers(x.numel(), 0, device=device).view(x.shape))
    assert_refused(function, x, out, "overlap")


@FUNCTIONS
@pytest.mark.parametrize("case", overlapping("cpu"))
def test_a_profiler_lets_out_overlap_no_more(device: str, function: Any, case: str) -> None:
    x, out = overlapping(device)[case]
    with torch.autograd.profiler.profile():
        assert_refused(function, x, out, "overlap")
        memory = torch.zeros(24, device=device)
        with pytest.raises(RuntimeError, match="overlap bias"):
            function(torch.zeros(4, 6, device=device), 0, bias=memory[:6], out=memory.view(4, 6))


@FUNCTIONS
def test_an_out_apart_from_the_input_or_the_input_is_plain(device: str, function: Any) -> None:
    memory = torch.zeros(24, device=device)
    a, b = memory[:12].view(3, 4), memory[12:].view(3, 4)
    for x, out in ((a, b), (b, a), (a, a)):
        assert ndsoftmax._C.plain_forward(x, 1, None, function is ndsoftmax.log_softmax, None, out) is out


@FUNCTIONS
def test_out_must_fit(device: str, function: Any) -> None:
    x = numbers(12, 0, device=device).view(3, 4)
    for shape in ((4, 3), (12,), (0,), (3,), (3, 5), (3, 4, 1), ()):
        assert_refused(function, x, torch.zeros(shape, device=device), "out must have the shape of input")
    assert_refused(function, x, torch.zeros(3, 4, dtype=torch.float64, device=device), "dtype")
    assert_refused(function, x, torch.zeros(3, 4, dtype=torch.int32, device=device), "dtype")
    assert_refused(function, x.half(), torch.zeros(3, 4, dtype=torch.float16, device=device), "dtype", torch.float32)
    assert_refused(function, x, torch.zeros(3, 4, device="meta"), "device")
    if device != "cpu":
        assert_refused(function, x, torch.zeros(3, 4), "device")
    with pytest.raises(TypeError, match="out"):
        function(x, 1, out=[0.0])


@FUNCTIONS
def test_out_takes_no_part_in_autograd(device: str, function: Any) -> None:
    x = numbers(12, 0, device=device).view(3, 4)
    leaf = x.clone().requires_grad_()
    assert_refused(function, leaf, torch.zeros(3, 4, device=device), "grad")
    assert_refused(function, x, torch.zeros(3, 4, device=device, requires_grad=True), "grad")
    with torch.no_grad():
        out = torch.zeros(3, 4, device=device)
        function(leaf, 1, out=out)
        assert torch.equal(out, function(x, 1))


@FUNCTIONS
def test_out_counts_as_written(device: str, function: Any) -> None:
    x = numbers(12, 0, device=device).view(3, 4)
    weight = torch.ones(3, 4, device=device, requires_grad=True)
    for out in (torch.zeros(3, 4, device=device), torch.zeros(4, 3, device=device).T, x):  # dense, strided, the input
        before, product = out._version, weight * out
        function(x, 1, out=out)
        assert out._version > before
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


@FUNCTIONS
def test_out_of_inference_mode(device: str, function: Any) -> None:
    x = numbers(12, 0, device=device).view(3, 4)
    with torch.inference_mode():
        out = torch.zeros(3, 4, device=device)
        assert torch.equal(function(x, 1, out=out), function(x, 1))
    with pytest.raises(RuntimeError, match="inference"):
        function(x, 1, out=out)


def assert_refused(function: Any, x: Tensor, out: Tensor, match: str, dtype: torch.dtype | None = None) -> None:
    def state(tensor: Tensor) -> Any:
        return tensor._version, tuple(tensor.shape), tensor.stride(), None if tensor.is_meta else tensor.tolist()

    before = state(x), state(out)
    with pytest.raises(RuntimeError, match=match):
        function(x, 1, dtype=dtype, out=out)
    assert (state(x), state(out)) == before


@FUNCTIONS
def test_out_between_the_elements_of_the_input(device: str, function: Any) -> None:
    memory = numbers(48, 0, device=device)
    for x, out in [
        (memory.view(6, 8)[:, ::2], memory.view(6, 8)[:, 1::2]),
        (memory.view(6, 8)[::2], memory.view(6, 8)[1::2]),
        (memory.view(6, 8)[:, :4], memory.view(6, 8)[:, 4:]),
        (memory[:24].view(6, 4), memory[24:].view(6, 4)),
    ]:
        before = x.clone()
        function(x, 1, out=out)
        assert torch.equal(x, before)
        assert_forward(out, before, 1, log=function is ndsoftmax.log_softmax)


@FUNCTIONS
def test_a_bad_call_changes_neither_input_nor_out(device: str, function: Any) -> None:
    x, out = numbers(12, 0, device=device).view(3, 4), torch.zeros(3, 4, device=device)
    for dim, error in [(2, IndexError), ("1", TypeError), ((0, 0), RuntimeError)]:
        with pytest.raises(error):
            function(x, dim, out=out)
        with pytest.raises(error):
            function(x, dim, out=x)
    assert torch.equal(x, numbers(12, 0, device=device).view(3, 4))
    assert x._version == 0
    assert not out.any()
    assert out._version == 0


@FUNCTIONS
def test_the_negative_bit_is_honoured(device: str, function: Any) -> None:
    x = torch.complex(numbers(12, 0, device=device), numbers(12, 1, device=device)).view(3, 4).conj().imag
    assert x.is_neg()
    assert_forward(function(x, 1), x.resolve_neg(), 1, log=function is ndsoftmax.log_softmax)


@FUNCTIONS
def test_a_tensor_of_zeros_without_memory(device: str, function: Any) -> None:
    zeros = torch._efficientzerotensor((3, 4), device=device)
    assert torch.equal(function(zeros, 1), function(torch.zeros(3, 4, device=device), 1))


@FUNCTIONS
def test_eight_threads_at_once(device: str, function: Any) -> None:
    inputs = [numbers(300_000, seed, device=device).view(30, 10, 1000) for seed in range(16)]
    expected = [function(x, dim) for x in inputs for dim in range(3)]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda call: function(*call), [(x, dim) for x in inputs for dim in range(3)]))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


class Rows(Dataset[Tensor]):
    """Rows that a DataLoader's worker normalizes."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return ndsoftmax.softmax(numbers(600_000, index).view(3, -1))


def send_softmax(x: Tensor, pipe: Any) -> None:
    pipe.send_bytes(ndsoftmax.softmax(x).numpy().tobytes())


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_computes_right() -> None:
    x = numbers(4_000_000, 0).view(4, -1)
    expected = ndsoftmax.softmax(x).numpy().tobytes()  # starts the threads that a child does not inherit
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=send_softmax, args=(x, send))
    child.start()
    try:
        assert receive.poll(60), "the child hangs"
        assert receive.recv_bytes() == expected
    finally:
        child.kill()
        child.join()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_dataloader_workers_compute_right() -> None:
    expected = [ndsoftmax.softmax(numbers(600_000, index).view(3, -1)) for index in range(4)]
    loader = DataLoader(Rows(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60)
    assert all(torch.equal(a, b) for a, b in zip(loader, expected, strict=True))


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
def test_the_extension_needs_neither_torch_nor_cuda_nor_python_libraries() -> None:
    headers = subprocess.run(
        ["readelf", "-d", ndsoftmax._C.__file__], capture_output=True, text=True, check=True
    ).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", headers)
    assert any(library.startswith("libc.") for library in needed)
    assert not [library for library in needed if re.match(r"lib(torch|c10|cudart|cuda|python)", library)]


def test_build_info() -> None:
    info = ndsoftmax.build_info()
    assert info["version"] == ndsoftmax.__version__
    assert info["cpu_capability"] in info["cpu_instruction_sets"]
    assert info["compiler"]
    assert bool(info["cuda_version"]) == bool(info["architectures"]) == info["cuda"]


@FUNCTIONS
def test_more_dimensions_than_kernels_step_through(function: Any, device: str) -> None:
    x = torch.randn([3] * 12 + [1, 2], device=device).permute(*range(13, -1, -1))[(slice(None, None, 2),) * 14]
    assert_forward(function(x, 5), x, 5, log=function is ndsoftmax.log_softmax)
    out = torch.empty_like(x)
    assert torch.equal(function(x, (0, 7), out=out), function(x, (0, 7)))
    x = x.detach().requires_grad_()
    function(x, 3).square().sum().backward()
    reference = x.detach().double().requires_grad_()
    (torch.softmax if function is ndsoftmax.softmax else torch.log_softmax)(reference, 3).square().sum().backward()
    torch.testing.assert_close(x.grad.double(), reference.grad, rtol=1e-4, atol=1e-5)


def test_interleaved_views_are_told_apart_at_once() -> None:
    memory = torch.randn(4_000_000)
    for a, b in ((memory[::2], memory[1::2]), (memory.view(-1, 2)[:, 0], memory.view(-1, 2)[:, 1])):
        expected = torch.softmax(a.double(), 0)
        ndsoftmax.softmax(a, 0, out=b)
        torch.testing.assert_close(b.double(), expected, rtol=1e-5, atol=0)
    with pytest.raises(RuntimeError, match="overlap"):
        ndsoftmax.softmax(memory[0:99:3], 0, out=memory[1:66:2])


def test_rows_that_threads_share_need_little_memory() -> None:
    """Statistics pass between threads through memory that must not grow with the tensor."""
    program = """
import resource, torch, ndsoftmax
x = torch.randn(4_000_000, 2)
out = torch.empty(4_000_000)
ndsoftmax.softmax(x[:1000, 0], 0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ndsoftmax.softmax(x[:, 0], 0, out=out)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 40_000  # KiB; the output alone is 16,000


def test_freed_storage_is_an_error() -> None:
    x, y, mask = torch.randn(3, 4), torch.randn(3, 4), torch.zeros(3, 4, dtype=torch.bool)
    for freed in (y, mask):
        freed.untyped_storage().resize_(0)
    for call in (
        lambda: ndsoftmax.softmax(y, 1),
        lambda: ndsoftmax.softmax(x, 1, out=y),
        lambda: ndsoftmax.ops.softmax_backward(x, y, 1),
        lambda: ndsoftmax.softmax(x, 1, mask=mask),
        lambda: ndsoftmax.softmax(x, 1, where=mask),
        lambda: ndsoftmax.softmax(x, 1, bias=y),
    ):
        with pytest.raises(RuntimeError, match="storage"):
            call()


def test_a_mask_that_is_freed_before_backward_is_an_error() -> None:
    x, mask = torch.randn(3, 4, requires_grad=True), torch.zeros(3, 4, dtype=torch.bool)
    y = ndsoftmax.softmax(x, 1, mask=mask)
    mask.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="storage"):
        y.sum().backward()


def test_an_expanded_out_is_refused_without_a_list_of_its_elements() -> None:
    many = torch.zeros(1).expand(1 << 20, 1 << 20)
    with pytest.raises(RuntimeError, match="overlap itself"):
        ndsoftmax.softmax(many, 1, out=many)


def test_halves_of_one_matrix_do_not_overlap() -> None:
    matrix = torch.randn(50, 24)
    expected = torch.softmax(matrix[:, :12].double(), 1)
    ndsoftmax.softmax(matrix[:, :12], 1, out=matrix[:, 12:])
    torch.testing.assert_close(matrix[:, 12:].double(), expected, rtol=1e-5, atol=1e-7)
    for first in (1, 11):
        with pytest.raises(RuntimeError, match="overlap"):
            ndsoftmax.softmax(matrix[:, :12], 1, out=matrix[:, first : first + 12])


@FUNCTIONS
def test_a_dim_beyond_64_bits(function: Any) -> None:
    for dim in (2**63, -(2**70), (0, 2**64)):
        with pytest.raises(IndexError):
            function(torch.zeros(2, 3), dim)


@pytest.mark.parametrize(("strides", "sizes"), [((2, 3), (2, 2)), ((2, 5, 6), (2, 2, 2)), ((4, 9), (4, 2))])
def test_views_whose_strides_are_not_nested_are_told_apart_exactly(strides: Any, sizes: Any) -> None:
    memory = torch.zeros(60)
    steps = [range(0, size * stride, stride) for size, stride in zip(sizes, strides, strict=True)]
    taken = {sum(step) for step in itertools.product(*steps)}
    out = memory.as_strided(sizes, strides, 0)
    assert len(taken) == out.numel()
    for start in range(1, 15):
        meet = not taken.isdisjoint(start + at for at in taken)
        assert overlaps_partly(memory.as_strided(sizes, strides, start), out) == meet


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "GOMP_parallel"), reason="needs a torch with OpenMP")
def test_no_threads_beside_torchs() -> None:
    script = """
        import os, torch, ndsoftmax
        torch.set_num_threads(2)
        x = torch.randn(400, 4000)
        torch.softmax(x, -1)
        before = len(os.listdir("/proc/self/task"))
        ndsoftmax.softmax(x, -1)
        ndsoftmax.softmax(x, 0)
        print(len(os.listdir("/proc/self/task")) - before)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "0"
