"""What only a GPU can show: sizes beyond 2^31, streams, graphs, device indices, memory, and that nothing waits."""

from __future__ import annotations

from collections.abc import Iterator

import ndsoftmax
import oracle
import pytest
import torch
from oracle import assert_close, assert_forward, errors
from strategies import DEVICES, numbers
from torch import Tensor

pytestmark = pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU and a build with CUDA")

GIB = 1 << 30
SHAPES = [
    ((64, 1000), 1),
    ((4, 5000), 1),
    ((2, 100_000), 1),
    ((1, 3_000_000), 1),
    ((8, 50, 60), 1),
    ((1, 500_000, 3), 1),
    ((1, 100_001, 36), 1),  # whose blocks meet
]
every_shape = pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)


@pytest.fixture(autouse=True)
def give_memory_back() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def normal(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return numbers(torch.Size(shape).numel(), seed, device="cuda").view(shape)


@pytest.mark.parametrize(
    ("shape", "dim"),
    [((2**31 + 64, 2), 1), ((3, 2**30), 1), ((1, 2**31 + 10), 1), ((2**21 + 1, 1024), 1), ((2**21 + 1, 8, 128), 1)],
    ids=str,
)
def test_more_than_two_to_the_31_elements(shape: tuple[int, ...], dim: int) -> None:
    elements = torch.Size(shape).numel()
    if torch.cuda.mem_get_info()[0] < 4 * elements + 4 * GIB:
        pytest.skip("needs more GPU memory")
    x = torch.randn(shape, dtype=torch.float16, device="cuda")
    y = ndsoftmax.log_softmax(x, dim)
    for at in (0, -1):  # the first and the last row, whole, in parts that fit into memory as float64
        row, got = (tensor.movedim(dim, -1)[(at,) * (x.dim() - 1)].split(1 << 26) for tensor in (x, y))
        total = torch.stack([part.double().logsumexp(0) for part in row]).logsumexp(0)
        for part, got_part in zip(row, got, strict=True):
            assert (errors(got_part, part.double() - total, log=True) <= 1).all()


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dim", [1, 2, 3, 5, 7, 10, 21, 50, 77, 100, 197, 257, 300, 577, 999, 1023])
def test_so_many_rows_that_they_are_staged(dim: int, dtype: torch.dtype, log: bool) -> None:
    rows = 170_001 if dim < 50 else 34_001
    x = normal((rows, dim)).to(dtype).requires_grad_()
    if dim * dtype.itemsize % 16 != 0:
        asynchronous = ndsoftmax._C.device("cuda").compute_capability >= 80
        tiny = dim * dtype.itemsize < 16
        singles = dtype == torch.float32 and dim > 448  # rather than staged
        assert ndsoftmax.explain(x).staged == (dtype != torch.float64 and (asynchronous or tiny) and not singles)
    assert_forward_and_backward(x, log=log)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        *((3, dim, 180_001) for dim in (5, 8, 12, 16, 21, 24, 29, 32, 40)),  # columns that are neither vectors nor few
        *((2, dim, 262_146) for dim in (3, 12, 19, 30)),
        *((5_001, 31, inner) for inner in (2, 3, 5, 7, 9, 14)),
        *((9_001, dim, 4) for dim in (5, 8, 12)),
        (501, 50, 147),
        (301, 90, 81),
        (65, 300, 199),
        (129, 197, 197),
        *((701, dim, 33) for dim in (90, 127, 501, 1_001, 2_051)),  # of 16 bits folded, as halves of vectors or vectors
        (2_001, 101, 3),
        (129, 700, 147),
        (3, 4_000, 257),
        (1, 20_001, 9),
        (18, 20_001, 9),
        (1, 20_001, 515),
        (2_258, 1, 8_087),
        (1, 2_258, 8_087),
        (1, 50_257, 64),
        (1, 100_001, 7),  # read twice, by smaller blocks
        (1, 130_001, 8),
    ],
    ids=str,
)
def test_columns_that_are_no_vectors(shape: tuple[int, ...], dtype: torch.dtype, log: bool) -> None:
    x = normal(shape).to(dtype).requires_grad_()
    assert_forward_and_backward(x, log=log)
    if ndsoftmax.explain(x, 1, log=log).slabs:  # small ones that follow each other: with gaps between them, columns
        assert_forward_and_backward_apart(shape, dtype, log=log)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(20_591, 39, 7), (31_655, 17, 15), (842, 51, 119), (9_583, 70, 3)], ids=str)
def test_slices_whose_results_begin_elsewhere_within_vectors(
    shape: tuple[int, ...], dtype: torch.dtype, log: bool
) -> None:
    outer, dim, inner = shape
    x = normal((outer, dim + 1, inner)).to(dtype)[:, 1:].requires_grad_()
    assert_forward_and_backward(x, log=log)
    if dtype.itemsize == 2:
        assert not ndsoftmax.explain(x, 1, log=log).staged  # as tiles, they took several times as long


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("inner", [1024, 1028, 1056])
@pytest.mark.parametrize(("outer", "dim"), [(300, 3), (140, 19), (70, 40), (30, 100), (9, 300), (9, 700)])
def test_columns_that_are_vectors(outer: int, dim: int, inner: int, dtype: torch.dtype, log: bool) -> None:
    assert_forward_and_backward(normal((outer, dim, inner)).to(dtype).requires_grad_(), log=log)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [385, 500, 511, 513, 600, 777, 1000, 1023, 1025, 2049, 3000, 4095, 4096])
@pytest.mark.parametrize("rows", [1, 130, 300, 3000])
def test_few_rows(rows: int, dim: int, dtype: torch.dtype, log: bool) -> None:
    assert_forward_and_backward(normal((rows, dim)).to(dtype).requires_grad_(), log=log)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [2, 3, 7, 8, 9, 16, 31, 60, 65, 114, 300, 512, 777, 1024])
@pytest.mark.parametrize(("outer", "inner"), [(1, 3), (1, 85), (13, 2), (3, 130), (40, 5), (2, 64)])
def test_few_columns(outer: int, inner: int, dim: int, dtype: torch.dtype, log: bool) -> None:
    assert_forward_and_backward(normal((outer, dim, inner)).to(dtype).requires_grad_(), log=log)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("dim", "inner"),
    [(577, 1_001), (700, 1_001), (1_300, 1_001), (1_536, 1_020), (2_700, 1_024), (6_000, 1_024)],
)
@pytest.mark.skipif(
    "cuda" in DEVICES and torch.cuda.get_device_capability()[0] != 9, reason="other GPUs' clusters are not known"
)
def test_columns_over_clusters_of_any_size(dim: int, inner: int, dtype: torch.dtype, log: bool) -> None:
    outer = 1
    while ndsoftmax.explain((outer, dim, inner), 1, dtype=dtype).cluster in (1, 2, 4, 8, 16):
        outer += 1
        assert outer < 24, "never planned"
    assert_forward_and_backward(normal((outer, dim, inner)).to(dtype).requires_grad_(), log=log)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("outer", "dim", "inner"),
    [
        (1, 16_384, 2048),
        (2000, 900, 20),  # whole strips
        (1300, 499, 88),
        (27, 1138, 1532),  # tiles that overlap
        (1, 5367, 6200),
        (130, 4095, 256),  # backward, too
        (401, 3001, 32),
    ],
)
def test_columns_of_which_shared_memory_has_a_part(
    outer: int, dim: int, inner: int, dtype: torch.dtype, log: bool
) -> None:
    assert ndsoftmax.explain((outer, dim, inner), 1, dtype=dtype, device="H200").shared_items > 0
    assert_forward_and_backward(normal((outer, dim, inner)).to(dtype).requires_grad_(), log=log)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("inner", [120_001, 60_003, 90_002])
@pytest.mark.parametrize("dim", [2, 3, 4, 7, 12, 13, 17, 20, 21, 24, 31])
def test_columns_whose_vectors_begin_elsewhere_in_each_row(dim: int, inner: int, dtype: torch.dtype, log: bool) -> None:
    may = dtype == torch.float32 or dim <= (20 if inner % 2 == 1 else 3)
    outer = 9
    while may and "begin elsewhere" not in ndsoftmax.explain((outer, dim, inner), 1, dtype=dtype).why:
        outer += 1
        assert outer < 90, "never planned"
    x = normal((outer, dim, inner)).to(dtype)
    assert_forward_and_backward(x.clone().requires_grad_(), log=log)
    assert_forward_and_backward(x[:, :, :-4].requires_grad_(), log=log)  # with gaps between rows
    for row, column, value in ((-1, 1, torch.nan), (dim // 2, 30, torch.inf), (0, 61, -torch.inf), (1, 90, torch.nan)):
        x[1, row, column] = value
    x[2, :, 7] = x[1, 1:, 240] = -torch.inf
    assert_forward((ndsoftmax.log_softmax if log else ndsoftmax.softmax)(x, 1), x, 1, log=log)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [165_001, 170_000, 300_001])
@pytest.mark.parametrize(("rows", "gap"), [(133, 0), (140, 8)])  # so many that clusters have several each
def test_rows_so_wide_that_the_next_arrives_meanwhile(
    rows: int, gap: int, dim: int, dtype: torch.dtype, log: bool
) -> None:
    x, grad = (normal((rows, dim + gap), seed)[:, :dim] for seed in (0, 1))
    y, grad = (x.log_softmax(1) if log else x.softmax(1)).to(dtype), (grad + 1).to(dtype)
    y, grad = (torch.nn.functional.pad(tensor, (0, gap))[:, :dim] for tensor in (y, grad))
    if ndsoftmax._C.device("cuda").compute_capability == 90:
        assert ndsoftmax.explain(y, backward=True, log=log).staged
    backward = ndsoftmax.ops.log_softmax_backward if log else ndsoftmax.ops.softmax_backward
    assert_gradient(backward(grad, y, 1), grad, y, log=log)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("dim", "gap"), [(50_257, 0), (102_400, 0), (102_401, 8), (200_064, 0)])
def test_many_wide_rows_that_clusters_hold(dim: int, gap: int, dtype: torch.dtype, log: bool) -> None:
    x = normal((133, dim + gap))[:, :dim].to(dtype)
    if ndsoftmax._C.device("cuda").compute_capability >= 90 and dtype == torch.float32:
        assert ndsoftmax.explain(x, log=log).regime == "cluster"
    assert_forward((ndsoftmax.log_softmax if log else ndsoftmax.softmax)(x), x, 1, log=log)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("floats", "gap"),
    [
        (327_684, 0),
        (330_001, 8),
        (400_001, 8),
        (655_364, 0),
        (688_132, 0),
        (700_000, 0),
        (1_300_003, 8),
        (2_000_001, 0),
    ],
)
def test_many_rows_wider_than_the_registers_of_clusters(floats: int, gap: int, dtype: torch.dtype, log: bool) -> None:
    dim = floats * 4 // dtype.itemsize
    x = normal((29, dim + gap))[:, :dim].to(dtype)
    if ndsoftmax._C.device("cuda").compute_capability == 90 and dtype != torch.float64:
        chosen = ndsoftmax.explain(x, log=log)
        assert (chosen.regime, chosen.staged, chosen.shared_bytes > 0) == ("cluster", False, True)
        assert chosen.passes == (1 if floats <= (655_360 if dtype == torch.float32 else 688_128) else 2)
    # in shared memory, or in what is read twice; and in the former in any case
    x[0, -3], x[1, -7], x[2, -1], x[3, -2] = 40, torch.inf, torch.nan, -torch.inf
    x[4, 300_000 * 4 // dtype.itemsize], x[5, 300_001 * 4 // dtype.itemsize], x[6, :] = torch.nan, 40, -torch.inf
    function = ndsoftmax.log_softmax if log else ndsoftmax.softmax
    y = function(x, 1)
    assert_forward(y, x, 1, log=log)
    if dtype.itemsize == 2:
        assert_forward(function(x, 1, torch.float32), x, 1, log=log)
    assert function(x, 1, out=x) is x
    torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)  # in place: nothing is read once it was written


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    ("dtype", "rows", "dim", "gap", "cluster"),
    [
        (torch.float32, 130, 170_000, 0, 16),
        (torch.float32, 130, 170_001, 8, 16),
        (torch.float32, 67, 256_000, 0, 16),
        (torch.float32, 130, 300_001, 8, 16),
        (torch.float16, 490, 175_001, 0, 8),
        (torch.bfloat16, 490, 262_143, 8, 8),
        (torch.float16, 130, 360_001, 0, 16),
        (torch.bfloat16, 90, 524_280, 0, 16),
    ],
)
def test_rows_that_clusters_have_in_registers_and_shared_memory(
    dtype: torch.dtype, rows: int, dim: int, gap: int, cluster: int, log: bool
) -> None:
    some = normal((9, dim + gap)).to(dtype)
    some[0, dim - 1], some[1, 0], some[2, dim - 4], some[3, dim // 2] = 40, torch.inf, torch.nan, 60
    some[4, :] = some[5, : dim - 3] = -torch.inf
    # so many that clusters come in several waves, to be compared with some
    x = some.repeat(rows // 9 + 1, 1)[:rows, :dim]
    if ndsoftmax._C.device("cuda").compute_capability == 90:
        chosen = ndsoftmax.explain(x, log=log)
        assert (chosen.cluster, chosen.shared_bytes > 0, chosen.passes) == (cluster, True, 1)
    function = ndsoftmax.log_softmax if log else ndsoftmax.softmax
    y = function(x, 1)
    assert_forward(y[:9], x[:9], 1, log=log)
    for first in range(9, rows, 9):
        part = y[first : first + 9]  # whose rows may begin elsewhere within vectors
        torch.testing.assert_close(part, y[: len(part)], rtol=8 * torch.finfo(dtype).eps, atol=1e-7, equal_nan=True)
    assert function(x, 1, out=x) is x
    torch.testing.assert_close(x[-9:], y[-9:], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("floats", "gap"), [(1_450_008, 0), (1_450_009, 8), (1_500_003, 0)])
def test_many_rows_that_clusters_read_twice(
    floats: int, gap: int, dtype: torch.dtype, log: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NDSOFTMAX_REGIME", "online")  # forward, it would be clusters that keep more
    dim = floats * 2 if dtype.itemsize == 2 else floats
    x = normal((29, dim + gap))[:, :dim].to(dtype)
    if ndsoftmax._C.device("cuda").compute_capability == 90:
        for backward in (False, True):
            chosen = ndsoftmax.explain(x, backward=backward, log=log)
            assert (chosen.regime, chosen.cluster) == ("online", 16)
    assert_forward_and_backward(x.requires_grad_(), log=log)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("dim", "gap", "regime"),
    [(2042, 0, "warp"), (2049, 7, "warp"), (2056, 0, "warp"), (2297, 0, "warp"), (2298, 3, "block"), (2304, 0, "warp")],
)
def test_rows_of_16_bits_past_what_a_warp_holds_of_others(
    dim: int, gap: int, regime: str, dtype: torch.dtype, log: bool
) -> None:
    x = normal((8009, dim + gap))[:, :dim].to(dtype)  # so many that they are not all under way at once
    if ndsoftmax._C.device("cuda").compute_capability >= 80:
        assert ndsoftmax.explain(x, log=log).regime == regime
    assert_forward_and_backward(x.requires_grad_(), log=log)


def assert_forward_and_backward(x: Tensor, *, log: bool) -> None:
    y = (ndsoftmax.log_softmax if log else ndsoftmax.softmax)(x, 1)
    assert_forward(y.detach(), x.detach(), 1, log=log)
    grad = numbers(x.numel(), 1, device="cuda").view(x.shape).to(x.dtype)
    y.backward(grad)
    assert_gradient(x.grad, grad, y.detach(), log=log)


def assert_forward_and_backward_apart(
    shape: tuple[int, ...], dtype: torch.dtype, *, log: bool, vector: int | None = None
) -> None:
    """Of slabs of dim × inner with gaps between them, also in the output; `vector`: columns of a word, forward."""
    outer, dim, inner = shape
    x, whole = (normal((outer, dim + 8, inner), seed).to(dtype) for seed in (0, 1))
    x, y, gaps = x[:, :dim], whole[:, :dim], whole[:, dim:].clone()
    chosen = ndsoftmax.explain(x, 1, log=log)
    assert not chosen.slabs
    assert vector in (None, chosen.vector)
    (ndsoftmax.log_softmax if log else ndsoftmax.softmax)(x, 1, out=y)
    assert_forward(y, x, 1, log=log)
    assert torch.equal(whole[:, dim:], gaps)  # untouched
    backward = ndsoftmax.ops.log_softmax_backward if log else ndsoftmax.ops.softmax_backward
    assert_gradient(backward(x, y, 1), x, y, log=log)


def assert_gradient(got: Tensor, grad: Tensor, y: Tensor, *, log: bool) -> None:
    exact, terms = oracle.backward(grad, y, 1, log=log), oracle.magnitude(grad, y, 1, log=log)
    eps = torch.finfo(torch.float64 if y.dtype == torch.float64 else torch.float32).eps  # what it is computed in
    assert_close(got, exact, terms, eps)


@every_shape
def test_runs_on_the_current_stream_in_order(shape: tuple[int, ...], dim: int) -> None:
    x, late = torch.zeros(shape, device="cuda"), normal(shape)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.copy_(late)
        y = ndsoftmax.softmax(x, dim)
        x.zero_()
    stream.synchronize()
    assert_forward(y, late, dim, log=False)


@every_shape
def test_captured_in_a_graph_and_replayed(shape: tuple[int, ...], dim: int) -> None:
    x = normal(shape)
    ndsoftmax.ops.softmax_backward(x, ndsoftmax.softmax(x, dim), dim)  # torch asks for a run before capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ndsoftmax.softmax(x, dim)
        grad = ndsoftmax.ops.softmax_backward(x, y, dim)
    for seed in (1, 2):
        x.copy_(normal(shape, seed))
        graph.replay()
        assert torch.equal(y, ndsoftmax.softmax(x, dim))
        assert torch.equal(grad, ndsoftmax.ops.softmax_backward(x, y, dim))


@every_shape
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_synchronizes(shape: tuple[int, ...], dim: int) -> None:
    x, out = normal(shape).requires_grad_(), torch.empty(shape, device="cuda")

    def work() -> None:
        ndsoftmax.softmax(x, dim).sum().backward()
        ndsoftmax.log_softmax(x.detach(), dim, out=out)

    for _ in range(2):  # loading a kernel and getting memory may wait; the second run adds to a gradient that is there
        work()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        torch.cuda._sleep(400_000_000)
        slept = torch.cuda.Event()
        slept.record()
        work()
        assert not slept.query(), "the calls waited for the work before them"
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_transposed_input_is_read_in_place(dtype: torch.dtype) -> None:
    x = torch.randn(4096, 2048, device="cuda").to(dtype)
    for view, dim in ((x.T, 0), (x.T, 1), (x[:, ::2], 1), (x.view(64, 64, 2048).transpose(0, 1), 2)):
        expected = torch.empty_like(view).untyped_storage().nbytes()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = ndsoftmax.softmax(view, dim)
        assert torch.cuda.max_memory_allocated() - before == expected
        assert_forward(y, view, dim, log=False)
        del y


def test_a_shared_row_takes_less_than_a_mebibyte_of_workspace() -> None:
    x = normal((1, 1 << 24))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = ndsoftmax.softmax(x, 1)
    assert torch.cuda.max_memory_allocated() - before < y.nbytes + (1 << 20)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@every_shape
def test_runs_where_the_tensor_is(shape: tuple[int, ...], dim: int) -> None:
    x, grad = normal(shape, 1), normal(shape, 2)
    there = torch.zeros(shape, device="cuda:1", requires_grad=True)
    grad_there = torch.zeros(shape, device="cuda:1")
    torch.cuda.synchronize(1)
    with torch.cuda.device(1):
        torch.cuda._sleep(100_000_000)
    with torch.no_grad():  # (kernels on another device or stream would see zeros)
        there.copy_(x)
        grad_there.copy_(grad)
    y = ndsoftmax.softmax(there, dim)
    (got,) = torch.autograd.grad(y, there, grad_there)
    with ndsoftmax.enable():
        z = torch.softmax(there.detach(), dim)
    assert (y.device, got.device, torch.cuda.current_device()) == (there.device, there.device, 0)
    # (torch itself gets the oracle's ulp() wrong on a device that is not current, when that is still busy)
    y, got, z = y.detach().to("cuda:0"), got.to("cuda:0"), z.to("cuda:0")
    assert torch.equal(z, y)
    assert_forward(y, x, dim, log=False)
    exact = oracle.backward(grad, y, dim, log=False)
    assert_close(got, exact, oracle.magnitude(grad, y, dim, log=False))
    with pytest.raises(RuntimeError, match="device"):
        ndsoftmax.softmax(there.detach(), dim, out=torch.empty(shape, device="cuda:0"))


def test_an_index_names_the_device() -> None:
    properties = torch.cuda.get_device_properties(0)
    here = ndsoftmax._C.device("cuda", 0)
    assert here.compute_capability == 10 * properties.major + properties.minor
    assert here.multiprocessors == properties.multi_processor_count


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("outer", "dim"),
    [
        *((300, dim) for dim in (12_500, 17_001)),
        *((3, dim) for dim in (2_500, 20_003, 65_000)),
        *((40, dim) for dim in (131_072, 170_001, 200_003, 400_000)),  # partly in shared memory, or there altogether
        *((1, dim) for dim in (150_001, 1_500_000)),
    ],
)
def test_two_columns_that_take_turns_in_a_row(
    outer: int, dim: int, dtype: torch.dtype, log: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = ndsoftmax.log_softmax if log else ndsoftmax.softmax
    size = outer * dim * 2
    memory = normal((size + 6,)).to(dtype)
    memory[7::991] *= 6  # of one column or the other
    x = memory[:size].view(outer, dim, 2).requires_grad_()
    chosen = ndsoftmax.explain(x, 1, log=log)
    assert_forward_and_backward(x, log=log)
    if ndsoftmax._C.device("cuda").compute_capability < 90:
        return
    assert chosen.interleaved == 2 or (dtype.itemsize == 2 and dim < 65_000)
    assert ndsoftmax.explain(x, 1, log=log, backward=True).interleaved == 2 or dim == 400_000
    monkeypatch.setenv("NDSOFTMAX_REGIME", "split" if chosen.regime == "split" else "cluster")
    for offset in (0, 2, 6):  # in place, so that slabs begin alike: anywhere within vectors, but not within a pair
        copies = memory, memory.clone(), memory.clone()
        given, x, again = (copy[offset : offset + size].view(outer, dim, 2) for copy in copies)
        assert function(x, 1, out=x) is x
        assert_forward(x, given, 1, log=log)
        assert torch.equal(function(again, 1, out=again), x)
    special = given.clone()
    special[0, 5, 0], special[0, 9, 1], special[-1, :, 0] = torch.nan, torch.inf, -torch.inf
    got, y = function(special, 1), function(given.clone(), 1)
    assert torch.equal(got.isnan(), torch.log_softmax(special, 1).isnan())
    if outer > 1:  # what the others have is as it was
        assert torch.equal(got[-1, :, 1], y[-1, :, 1])
        assert torch.equal(got[1:-1], y[1:-1])


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("outer", "inner"), [(1, 24), (3, 33), (2, 834), (1, 2)])
def test_columns_so_long_that_blocks_meet(outer: int, inner: int, dtype: torch.dtype, log: bool) -> None:
    x = normal(longer_than_l2_keeps(outer, inner, dtype.itemsize)).to(dtype).requires_grad_()
    chosen = ndsoftmax.explain(x, 1, log=log)
    vectors = inner % (16 // dtype.itemsize) == 0
    strided = chosen.regime == "strided"  # two columns may be a row, which is split
    folded = not vectors and dtype.itemsize < 8
    if ndsoftmax._C.device("cuda").compute_capability >= 80 and strided and chosen.passes == 2:
        # folded ones of 32 bits do where all is kept, which depends on the GPU
        assert chosen.meets == (vectors or folded) or (folded and dtype.itemsize == 4)
    assert_forward_and_backward(x, log=log)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (22, 30_431, 49),  # slabs that are tiles, folded or not, of which some threads have nothing to do
        (5, 60_001, 100),
        (2, 60_001, 260),
        (1, 60_001, 801),  # segments
        (1, 60_001, 1_032),
        (1, 60_001, 1_040),
    ],
    ids=str,
)
def test_columns_that_are_read_twice(shape: tuple[int, ...], dtype: torch.dtype, log: bool) -> None:
    x = normal(shape).to(dtype)
    gaps = x[:, 3:-3]  # between slabs
    if dtype != torch.float64:
        assert all(
            ndsoftmax.explain(given, 1, log=log, backward=backward).passes == 2
            for given in (x, gaps)
            for backward in (False, True)
        )
    assert_forward_and_backward(x.requires_grad_(), log=log)
    assert_forward_and_backward(gaps.detach().requires_grad_(), log=log)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 40_000, 1_026), (3, 41_232, 333)], ids=str)
@pytest.mark.parametrize("gap", [0, 8])  # results apart have none
@pytest.mark.parametrize("offset", [0, 16, 32])  # bytes; results apart have none
def test_segments_that_begin_on_sectors(
    shape: tuple[int, int, int], dtype: torch.dtype, offset: int, gap: int, log: bool
) -> None:
    outer, dim, inner = shape
    offset //= dtype.itemsize
    memory = normal((offset + outer * (dim * inner + gap),)).to(dtype)
    x = memory[offset:].view(outer, -1)[:, : dim * inner].unflatten(1, (dim, inner))
    assert_forward_and_backward(x.detach().requires_grad_(), log=log)
    if gap == 0:
        function = ndsoftmax.log_softmax if log else ndsoftmax.softmax
        y = function(x, 1)
        assert torch.equal(function(x, 1, out=x), y)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("dim", "inner"), [*((dim, inner) for dim in (17, 33, 64) for inner in (17, 25, 49, 63)), (26, 191), (32, 251)]
)
def test_many_columns_of_16_bits_that_are_single(dim: int, inner: int, dtype: torch.dtype, log: bool) -> None:
    assert_forward_and_backward_apart((2_500_000 // dim // inner, dim, inner), dtype, log=log, vector=1)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("outer", "dim", "inner"),
    [
        (200_000, 2, 5),  # single columns: of one lane,
        (50_001, 5, 7),
        (20_000, 11, 9),
        (9001, 16, 15),
        (4000, 47, 11),  # of several
        (2001, 190, 3),
        (600, 305, 9),
        (60_001, 3, 14),  # words
        (30_000, 7, 10),
        (12_001, 12, 14),
        (6000, 30, 14),
        (2000, 150, 6),
    ],
)
def test_small_slabs_that_follow_each_other(outer: int, dim: int, inner: int, dtype: torch.dtype, log: bool) -> None:
    given = normal((outer, dim, inner)).to(dtype)
    function = ndsoftmax.log_softmax if log else ndsoftmax.softmax
    backward = ndsoftmax.ops.log_softmax_backward if log else ndsoftmax.ops.softmax_backward
    if ndsoftmax._C.device("cuda").compute_capability >= 80:
        assert ndsoftmax.explain(given, 1, log=log).slabs  # and of the gradient, unless it has many lanes a column
    assert_forward_and_backward(given.clone().requires_grad_(), log=log)
    y, grad = function(given, 1), numbers(given.numel(), 1, device="cuda").view(given.shape).to(dtype)
    for offset in (1, 2, 5):  # in place, where runs begin anywhere, and of gradients that begin elsewhere than outputs
        x = torch.empty(given.numel() + offset, dtype=dtype, device="cuda")[offset:].view(given.shape)
        assert function(x.copy_(given), 1, out=x) is x
        assert_forward(x, given, 1, log=log)
        assert_gradient(backward(x.copy_(grad), y, 1), grad, y, log=log)
    special = given.clone()
    special[0, 0, 0], special[1, -1, 1], special[-1, 0, -1] = torch.nan, torch.inf, -torch.inf
    special[2, :, 2] = -torch.inf
    special[3, 1:, 1], special[3, 0, 1] = -torch.inf, 0
    assert_forward(function(special, 1), special, 1, log=log)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "offset"), [(1, 0), (1, 5), (3, 1), (7, 0)])
def test_rows_so_few_and_long_that_their_blocks_meet(rows: int, offset: int, dtype: torch.dtype, log: bool) -> None:
    elements = ndsoftmax._C.device("cuda").l2_bytes // 2 // dtype.itemsize
    dim = elements // rows | (1 if offset else 0)  # odd: rows begin and end within vectors
    given = normal((rows, dim)).to(dtype)
    if ndsoftmax._C.device("cuda").compute_capability >= 80:
        assert ndsoftmax.explain(given, 1, log=log).meets
        assert ndsoftmax.explain(given, 1, log=log, backward=True).meets
    assert_forward_and_backward(given.clone().requires_grad_(), log=log)
    function = ndsoftmax.log_softmax if log else ndsoftmax.softmax
    x = torch.empty(rows * dim + offset, dtype=dtype, device="cuda")[offset:].view(rows, dim).copy_(given)
    assert function(x, 1, out=x) is x  # in place, where tensors begin anywhere and alike
    assert_forward(x, given, 1, log=log)
    special = given.clone()
    special[0, 5], special[-1, 9] = torch.nan, -torch.inf
    got = function(special, 1)
    assert torch.equal(got.isnan(), torch.log_softmax(special, 1).isnan())
    assert rows == 1 or got[-1, 9] == (-torch.inf if log else 0)


def test_blocks_meet_on_several_streams_at_once() -> None:
    """Each of these calls wants the whole GPU; others, which may begin before they end, have some of it meanwhile."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    inputs = [normal(longer_than_l2_keeps(1, inner, 4), inner) for inner in (32, 36, 40)]
    inputs.append(normal((2, inputs[0].numel() | 1)))
    if ndsoftmax._C.device("cuda").compute_capability >= 80:
        assert all(ndsoftmax.explain(x, 1).meets for x in inputs)
    small = normal((64, 1000))
    right = [ndsoftmax.softmax(x, 1) for x in inputs]
    wrong = torch.zeros(len(streams), dtype=torch.long, device="cuda")
    torch.cuda.synchronize()
    for turn in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if turn % 10 == 0:
                    torch.cuda._sleep(1_000_000)
                ndsoftmax.softmax(small, 1)
                outputs = [ndsoftmax.softmax(inputs[i], 1) for _ in range(3)]
                for y in outputs:
                    wrong[i] += (y != right[i]).any()
    torch.cuda.synchronize()
    assert wrong.sum() == 0


def longer_than_l2_keeps(outer: int, inner: int, itemsize: int) -> tuple[int, int, int]:
    """A shape of which L2 has room for three times as much: more than the planner expects to find there again."""
    elements = ndsoftmax._C.device("cuda").l2_bytes // 3 // itemsize
    return outer, elements // (outer * inner) | 1, inner


def test_memory_of_another_stream_lives_until_it_is_read() -> None:
    x, stream = normal((2048, 4096)), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        outputs = [ndsoftmax.softmax(x, 1) for _ in range(8)]
    torch.cuda.current_stream().wait_stream(stream)
    assert all(torch.equal(y, outputs[0]) for y in outputs)


def test_masks_are_not_expanded() -> None:
    x = normal((64, 16, 128, 256))
    mask = normal((64, 1, 1, 256)) > 0
    bias = normal((128, 256))
    ndsoftmax.softmax(x, mask=mask, bias=bias)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = ndsoftmax.softmax(x, mask=mask, bias=bias, causal=True, scale=0.5)
    assert torch.cuda.max_memory_allocated() - before == y.numel() * y.element_size()


@pytest.mark.parametrize("scale", [1.0, 0.25, -1.5])
@pytest.mark.parametrize("broadcast", [(), (1,), (3,), (0, 1), (2,), (0, 3)])  # dimensions that share a mask
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("dim", "inner"), [(19, 264), (19, 263), (80, 66), (300, 64), (300, 63), (900, 33), (2100, 36), (7000, 9)]
)
def test_masked_columns(dim: int, inner: int, dtype: torch.dtype, broadcast: tuple[int, ...], scale: float) -> None:
    x = normal((3, 4, dim, inner)).to(dtype).requires_grad_()
    mask = normal(tuple(1 if i in broadcast else size for i, size in enumerate(x.shape)), seed=1) < 0.5
    if 2 in broadcast:  # all of a column, or nothing
        mask[0] = False
    included = ~mask.expand(x.shape)
    y = ndsoftmax.softmax(x, 2, mask=mask, scale=scale)
    exact = oracle.masked_forward(x.detach(), 2, included, scale=scale, log=False)
    shift = (x.detach().double() * scale).abs().amax() if dtype == torch.float32 else 1
    assert_close(y.detach(), exact, exact * (1 + shift), torch.finfo(dtype).eps)
    grad = (normal(x.shape, seed=2) + 1).to(dtype)
    (grad_input,) = torch.autograd.grad(y, x, grad)
    alive = grad.where(included, 0)
    exact_grad = oracle.backward(alive, y.detach(), 2, log=False) * scale
    assert_close(grad_input, exact_grad, oracle.magnitude(alive, y.detach(), 2, log=False) * abs(scale))


def view(tensor: torch.Tensor, before: int) -> torch.Tensor:
    """The same elsewhere, so many elements after where memory begins."""
    return torch.cat((tensor.flatten()[:before], tensor.flatten()))[before:].view(tensor.shape)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("broadcast", [(), (1,), (3,), (0, 1), (2,)])  # dimensions that share a mask, or a bias
@pytest.mark.parametrize("begin", [0, 1, 3])  # elements before the mask, or the bias, and twice as many before columns
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("dim", "inner"), [(19, 264), (19, 263), (80, 66), (300, 64), (300, 63), (900, 33), (3, 98_304)]
)
def test_columns_beside_masks_and_biases_that_begin_anywhere(
    dim: int, inner: int, dtype: torch.dtype, begin: int, broadcast: tuple[int, ...], log: bool
) -> None:
    function = ndsoftmax.log_softmax if log else ndsoftmax.softmax
    x = view(normal((3, 4, dim, inner)).to(dtype), 2 * begin).requires_grad_()
    other = normal(tuple(1 if i in broadcast else size for i, size in enumerate(x.shape)), seed=1)
    mask = view(other < 0.5, begin)
    included = ~mask.expand(x.shape) if 2 not in broadcast else torch.ones_like(x, dtype=torch.bool)
    for fused, scale in ((other.to(dtype), 0.5), (other.to(dtype), -0.5), (other, 1.0)):
        bias = view(fused, begin)
        for where in (None, included):
            y = function(x, 2, bias=bias, where=where, scale=scale)
            alive = included if where is not None else torch.ones_like(included)
            exact = oracle.masked_forward(x.detach(), 2, alive, bias, scale, log=log)
            shift = (
                (x.detach().double() * abs(scale) + bias.double().abs()).abs().amax() if dtype == torch.float32 else 1
            )
            size = exact.where(alive, 0).abs() + 1 if log else exact
            assert_close(y.detach(), exact, size * (1 + shift), torch.finfo(dtype).eps)
    y = function(x, 2, where=included)
    exact = oracle.masked_forward(x.detach(), 2, included, log=log)
    size = exact.where(included, 0).abs() + 1 if log else exact
    shift = x.detach().double().abs().amax() if dtype == torch.float32 else 1
    assert_close(y.detach(), exact, size * (1 + shift), torch.finfo(dtype).eps)
    grad = (normal(x.shape, seed=2) + 1).to(dtype)
    (grad_input,) = torch.autograd.grad(y, x, grad)
    alive = grad.where(included, 0)
    output = y.detach().double().clamp(min=-1e9)  # whose exponential is zero, too
    assert_close(grad_input, oracle.backward(alive, output, 2, log=log), oracle.magnitude(alive, output, 2, log=log))


@pytest.mark.parametrize("broadcast", [(), (0, 1), (1,), (0, 1, 2)])  # dimensions that share a mask, or a bias
@pytest.mark.parametrize("begin", [0, 1, 3, 4])  # elements before the mask, or the bias, and twice as many before rows
@pytest.mark.parametrize("scale", [0.5, -0.5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [41, 203, 1025, 1030, 2304, 4099, 10007, 50257])
def test_rows_that_begin_anywhere_beside_masks_and_biases(
    dim: int, dtype: torch.dtype, scale: float, begin: int, broadcast: tuple[int, ...]
) -> None:
    shape = (3, 2, 5, dim)
    x = view(normal(shape).to(dtype), 2 * begin).requires_grad_()
    other = normal(tuple(1 if i in broadcast else size for i, size in enumerate(shape)), seed=1)
    mask = view(other < 0.5, begin)
    included = ~mask.expand(shape)
    y = ndsoftmax.softmax(x, mask=mask, scale=scale)
    exact = oracle.masked_forward(x.detach(), 3, included, scale=scale, log=False)
    shift = (x.detach().double() * abs(scale)).abs().amax() if dtype == torch.float32 else 1
    assert_close(y.detach(), exact, exact * (1 + shift), torch.finfo(dtype).eps)
    grad = (normal(shape, seed=2) + 1).to(dtype)
    (grad_input,) = torch.autograd.grad(y, x, grad)
    alive = grad.where(included, 0)
    exact_grad = oracle.backward(alive, y.detach(), 3, log=False) * scale
    assert_close(grad_input, exact_grad, oracle.magnitude(alive, y.detach(), 3, log=False) * abs(scale))

    bias = view(other.to(dtype), begin)
    y = ndsoftmax.softmax(x.detach(), bias=bias, scale=scale)
    biased = x.detach().double() * scale + bias.double()
    exact = torch.softmax(biased, 3)
    shift = biased.abs().amax() if dtype == torch.float32 else 1
    assert_close(y, exact, exact * (1 + shift), torch.finfo(dtype).eps)


def test_masked_calls_are_captured_in_a_graph() -> None:
    x, mask = normal((32, 1000)), normal((32, 1000)) > 0
    ndsoftmax.softmax(x, mask=mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ndsoftmax.softmax(x, mask=mask, causal=True, scale=2.0)
    mask.logical_not_()
    x.copy_(normal((32, 1000), seed=1))
    graph.replay()
    assert torch.equal(y, ndsoftmax.softmax(x, mask=mask, causal=True, scale=2.0))
