"""The dispatcher, on described devices: every problem has a plan, within limits, that writes every element once."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ndsoftmax
import oracle
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from ndsoftmax._C import Device, Plan, coverage, plan
from oracle import assert_close, assert_forward
from strategies import HALVES, Call, calls, dims, dtypes, layouts, numbers, shapes

REGIMES = ("warp", "block", "cluster", "online", "split", "strided")
MIB = 1 << 20


def cuda(compute_capability: int, multiprocessors: int, shared_kib: int, l2_mib: int) -> Device:
    return Device(
        kind="cuda",
        compute_capability=compute_capability,
        multiprocessors=multiprocessors,
        shared_bytes_per_block=shared_kib * 1024,
        l2_bytes=l2_mib * MIB,
    )


DEVICES = {
    "T4": cuda(75, 40, 64, 4),
    "A100": cuda(80, 108, 163, 40),
    "RTX 3090": cuda(86, 82, 99, 6),
    "L4": cuda(89, 58, 99, 48),
    "H200": cuda(90, 132, 227, 60),
    "B200": cuda(100, 148, 227, 126),
    "RTX 5090": cuda(120, 170, 99, 96),
}
ALL_DEVICES = {**DEVICES, "CPU": Device(kind="cpu", threads=8), "one thread": Device(kind="cpu", threads=1)}

Problem = dict[str, Any]  # the arguments of plan() that describe the problem


def problem(
    source: torch.Tensor,
    result: torch.Tensor,
    dim: int | tuple[int, ...],
    *,
    log: bool,
    grad: torch.Tensor | None = None,
) -> Problem:
    tensors = (source, source if grad is None else grad, result)
    return {
        "log": log,
        "backward": grad is not None,
        "source_dtype": str(source.dtype).removeprefix("torch."),
        "result_dtype": str(result.dtype).removeprefix("torch."),
        "sizes": list(source.shape),
        "source_strides": list(tensors[0].stride()),
        "grad_strides": list(tensors[1].stride()),
        "result_strides": list(tensors[2].stride()),
        "dims": [dim] if isinstance(dim, int) else list(dim),
        "offsets": tuple(tensor.storage_offset() for tensor in tensors),
    }


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    shape, dtype = draw(shapes(empty=False)), draw(dtypes)
    forward = draw(st.booleans())
    narrow = dtype == torch.float32 and draw(st.booleans())
    source_dtype = draw(st.sampled_from(HALVES)) if narrow and forward else dtype
    result_dtype = draw(st.sampled_from(HALVES)) if narrow and not forward else dtype
    source = draw(layouts(shape)).tensor(dtype=source_dtype, device="meta")
    grad = None if forward else draw(layouts(shape)).tensor(dtype=source_dtype, device="meta")
    result = draw(st.none() | layouts(shape, expand=False))
    return problem(
        source,
        torch.empty_like(source, dtype=result_dtype) if result is None else result.tensor(0, result_dtype, "meta"),
        draw(dims(len(shape))),
        log=draw(st.booleans()),
        grad=grad,
    )


def contiguous(*sizes: int, dim: int, dtype: torch.dtype = torch.float32, backward: bool = False) -> Problem:
    x = torch.empty(sizes, dtype=dtype, device="meta")
    return problem(x, x, dim, log=False, grad=x if backward else None)


def with_gaps(outer: int, dim: int, inner: int, dtype: torch.dtype) -> torch.Tensor:
    """Between slabs of dim × inner: small ones that follow each other have plans of their own."""
    return torch.empty_strided((outer, dim, inner), (dim * inner + 16, inner, 1), dtype=dtype, device="meta")


def apart(outer: int, dim: int, inner: int, *, dtype: torch.dtype = torch.float32, backward: bool = False) -> Problem:
    x = with_gaps(outer, dim, inner, dtype)
    return problem(x, x, 1, log=False, grad=x if backward else None)


def assert_within_limits(plan: Plan, device: Device) -> None:
    assert plan.regime in REGIMES
    assert plan.grid >= 1
    assert plan.splits >= 1
    assert plan.passes in (1, 2)
    assert plan.why
    if device.kind == "cpu":
        return
    assert 1 <= plan.block <= 1024
    assert plan.block % 32 == 0
    assert 1 <= plan.cluster <= (16 if device.compute_capability >= 90 else 1)
    assert 0 <= plan.shared_bytes <= device.shared_bytes_per_block - 2048  # kernels declare so many themselves


@pytest.mark.parametrize("name", ALL_DEVICES)
@given(problem=problems())
def test_every_problem_has_a_plan_within_limits(name: str, problem: Problem) -> None:
    device = ALL_DEVICES[name]
    chosen = plan(**problem, device=device)
    assert_within_limits(chosen, device)
    assert chosen.outer * chosen.dim * chosen.inner == math.prod(problem["sizes"])
    assert plan(**problem, device=device) == chosen
    assert str(plan(**problem, device=device)) == str(chosen)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [2, 5, 33, 700])
def test_columns_that_begin_anywhere_are_written_once(dim: int, dtype: torch.dtype, backward: bool) -> None:
    """However rows lie to sectors of memory."""
    for inner in (65, 301, 1010, 5011):
        for row in (inner, inner + 1, *(math.ceil(inner / step) * step for step in (8, 16, 32))):
            for place in (0, 1, 16):  # of the result
                shape, strides = (3, dim, inner), (dim * row, row, 1)
                source = torch.empty(3 * dim * row, dtype=dtype, device="meta").as_strided(shape, strides)
                result = torch.empty(place + 3 * dim * row, dtype=dtype, device="meta").as_strided(
                    shape, strides, place
                )
                described = problem(source, result, 1, log=False, grad=source if backward else None)
                assert set(coverage(plan(**described, device=DEVICES["H200"]))) == {1}, (inner, row, place)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [2, 3, 4, 5, 8])
def test_vectors_that_begin_elsewhere_in_each_row_are_written_once(dim: int, dtype: torch.dtype) -> None:
    """However slabs, and rows of these, lie to vectors: gaps of any size."""
    one_multiprocessor = cuda(90, 1, 227, 50)
    staggered = 0
    for inner in (4601, 4602, 6903):
        for row in range(inner, inner + 4):
            for slab in range(dim * row, dim * row + 4):
                x = torch.empty(4 * slab, dtype=dtype, device="meta").as_strided((4, dim, inner), (slab, row, 1))
                chosen = plan(**problem(x, x, 1, log=False), device=one_multiprocessor)
                staggered += "begin elsewhere" in chosen.why
                assert set(coverage(chosen)) == {1}, (inner, row, slab)
    assert staggered >= 24


@pytest.mark.parametrize("regime", [None, *REGIMES])
@pytest.mark.parametrize("name", DEVICES)
@given(problem=problems())
def test_every_element_is_written_once(name: str, regime: str | None, problem: Problem) -> None:
    device = DEVICES[name]
    try:
        forced = plan(**problem, device=device, regime=regime)
    except ValueError:
        assert regime is not None
        return
    assert regime is None or forced.regime == regime
    assert_within_limits(forced, device)
    written = coverage(forced)
    assert len(written) == math.prod(problem["sizes"])
    assert all(times == 1 for times in written)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize(
    ("regime", "shape", "dim"),
    [
        ("warp", (100_000, 77), 1),
        ("block", (1000, 5000), 1),
        ("cluster", (1000, 100_000), 1),
        ("online", (1000, 1_000_000), 1),
        ("split", (1, 10_000_000), 1),
        ("strided", (8, 19, 1024, 1024), 1),
    ],
)
def test_every_regime_can_be_forced_where_it_belongs(name: str, regime: str, shape: tuple[int, ...], dim: int) -> None:
    device = DEVICES[name]
    if device.compute_capability < {"cluster": 90, "block": 80}.get(regime, 0):
        with pytest.raises(ValueError, match=f"{regime}.*compute capability"):
            plan(**contiguous(*shape, dim=dim), device=device, regime=regime)
    else:
        assert plan(**contiguous(*shape, dim=dim), device=device, regime=regime).regime == regime


@pytest.mark.parametrize(
    ("shape", "device", "regime", "cluster"),
    [
        ((28, 600_000), "H200", "cluster", 16),
        ((27, 600_000), "H200", "split", 1),  # so few that two rows for each cluster are not there
        ((205, 655_360), "H200", "cluster", 16),
        ((205, 655_364), "H200", "cluster", 16),
        ((100, 3_276_800), "H200", "cluster", 16),
        ((100, 3_276_804), "H200", "online", 16),
        ((28, 10_000_000), "H200", "online", 16),
        ((27, 10_000_000), "H200", "split", 1),
        ((205, 655_364), "A100", "online", 1),
        ((107, 655_364), "A100", "split", 1),
    ],
)
def test_wide_rows_go_to_clusters_while_these_have_several_each(
    shape: tuple[int, int], device: str, regime: str, cluster: int
) -> None:
    chosen = plan(**contiguous(*shape, dim=1), device=DEVICES[device])
    assert (chosen.regime, chosen.cluster) == (regime, cluster)
    assert_within_limits(chosen, DEVICES[device])


F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("shape", "dtype", "backward", "cluster", "block", "items"),
    [
        ((20, 12_000), F32, False, 8, 192, 2),  # all at once: blocks of 128 threads or more, as many as that makes
        ((20, 17_000), F32, False, 16, 160, 2),
        ((32, 50_304), BF16, False, 16, 160, 3),
        ((128, 9_000), F32, False, 4, 192, 3),
        ((48, 16_000), F32, True, 16, 128, 2),
        ((66, 10_000), F32, True, 8, 160, 2),
        ((67, 10_000), F32, True, 5, 128, 4),  # backward, a multiprocessor to each row
        ((64, 80_000), F32, False, 16, 128, 10),  # not at once with eight vectors a thread
        ((40, 170_000), F32, False, 16, 320, 9),
        ((128, 151_936), BF16, False, 16, 128, 10),  # they fill the registers a few times
        ((309, 50_304), BF16, True, 16, 128, 4),
        ((310, 50_304), BF16, True, 7, 256, 4),  # and more than a few
        ((1767, 151_936), BF16, False, 8, 256, 10),
        ((6710, 40_000), BF16, False, 4, 128, 10),  # four blocks of 128 threads rather than two of 256
        ((2076, 129_280), BF16, False, 7, 256, 10),
        ((2048, 65_536), F32, False, 7, 256, 10),
    ],
)
def test_clusters_of_rows_in_registers(
    shape: tuple[int, int], dtype: torch.dtype, backward: bool, cluster: int, block: int, items: int
) -> None:
    problem = contiguous(*shape, dim=1, dtype=dtype) | {"backward": backward}
    chosen = plan(**problem, device=DEVICES["H200"])
    assert (chosen.regime, chosen.shared_bytes) == ("cluster", 0)
    assert (chosen.cluster, chosen.block, chosen.items) == (cluster, block, items)
    assert_within_limits(chosen, DEVICES["H200"])


@pytest.mark.parametrize(
    ("shape", "dtype", "cluster", "block", "items"),
    [
        ((50_000, 5120), BF16, 1, 224, 3),  # with four vectors a thread, 160: as much again under way
        ((37_000, 3584), F32, 1, 320, 3),
        ((37_001, 3583), F32, 1, 320, 3),
        ((32_000, 8192), BF16, 1, 256, 4),  # with three, too little
        ((700, 5120), BF16, 1, 160, 4),  # all under way at once
        ((26_000, 5000), F32, 3, 128, 4),  # rather than 2 x 160
        ((28_000, 9600), BF16, 3, 128, 4),
        ((100, 5000), BF16, 2, 96, 4),  # of three, blocks would be too small
    ],
)
def test_gradients_have_no_more_under_way_than_memory_needs(
    shape: tuple[int, int], dtype: torch.dtype, cluster: int, block: int, items: int
) -> None:
    chosen = ndsoftmax.explain(shape, 1, dtype=dtype, device="H200", backward=True)
    assert (chosen.cluster, chosen.block, chosen.items) == (cluster, block, items)


@pytest.mark.parametrize(
    ("shape", "dtype", "backward", "device", "regime", "arrives", "shares"),
    [
        ((2, 262_144), F32, False, "H200", "split", False, False),  # clusters would leave most of the GPU idle
        ((3, 262_144), F32, False, "H200", "cluster", False, False),
        ((5, 262_144), F32, False, "RTX 5090", "split", False, False),  # of eight blocks they are smaller
        ((23, 262_144), F32, False, "H200", "cluster", False, True),
        ((22, 262_144), F32, False, "H200", "cluster", False, False),  # too few for that
        ((90, 524_288), BF16, False, "H200", "cluster", False, True),
        ((89, 524_288), BF16, False, "H200", "cluster", False, False),  # of 16 bits, not before three waves
        ((28, 400_000), F32, False, "H200", "cluster", False, True),  # a block a multiprocessor: the sooner
        ((7, 262_144), F32, True, "H200", "cluster", False, False),
        ((8, 262_144), F32, True, "H200", "split", False, False),  # one more than clusters at once
        ((8, 120_000), F32, True, "H200", "cluster", False, False),  # of which a multiprocessor has two
        ((9, 262_144), F32, True, "H200", "split", False, False),
        ((10, 262_144), F32, True, "H200", "cluster", True, False),
        ((27, 100_000), F32, True, "H200", "cluster", False, False),
        ((28, 100_000), F32, True, "H200", "cluster", True, False),  # two turns of the clusters that stay
    ],
)
def test_few_wide_rows(
    shape: tuple[int, int], dtype: torch.dtype, backward: bool, device: str, regime: str, arrives: bool, shares: bool
) -> None:
    problem = contiguous(*shape, dim=1, dtype=dtype) | {"backward": backward}
    chosen = plan(**problem, device=DEVICES[device])
    assert (chosen.regime, chosen.staged) == (regime, arrives)
    if regime == "cluster" and not arrives:
        assert (chosen.shared_bytes > 0) == shares
    assert_within_limits(chosen, DEVICES[device])


@pytest.mark.parametrize(
    ("shape", "dtype", "regime"),
    [
        ((64, 100_000, 2), F32, "cluster"),
        ((64, 100_001, 2), BF16, "cluster"),  # slabs begin within vectors, but never within a pair
        ((1, 3_000_000, 2), BF16, "split"),
        ((26, 20_000, 2), F32, "cluster"),
        ((26, 20_000, 2), BF16, "strided"),  # few and short: words
        ((2000, 1000, 2), F32, "strided"),  # a block would hold them
        ((64, 100_000, 4), F32, "strided"),  # states of so many columns take too many registers
        ((64, 100_000, 2), torch.float64, "strided"),
    ],
)
def test_two_columns_take_turns_in_a_row(shape: tuple[int, ...], dtype: torch.dtype, regime: str) -> None:
    chosen = ndsoftmax.explain(shape, 1, dtype=dtype, device="H200")
    assert (chosen.regime, chosen.interleaved) == (regime, 1 if regime == "strided" else 2)
    if regime != "strided":
        as_row = ndsoftmax.explain((shape[0], 2 * shape[1]), 1, dtype=dtype, device="H200")
        assert (chosen.cluster, chosen.block, chosen.items) == (as_row.cluster, as_row.block, as_row.items)
        assert chosen.workspace_bytes == 2 * as_row.workspace_bytes  # of each column, a state


def test_columns_take_turns_only_where_a_row_of_them_is_whole() -> None:
    device = DEVICES["H200"]
    problem = contiguous(64, 100_000, 2, dim=1)
    assert plan(**problem, device=device).interleaved == 2
    for regime in ("cluster", "split"):
        assert plan(**problem, device=device, regime=regime).interleaved == 2
    with pytest.raises(ValueError, match="not neighbours in memory"):
        plan(**problem, device=device, regime="online")
    shape = (64, 100_000, 2)
    for view in (
        torch.empty(64 * 100_000 * 2 + 1)[1:].view(shape),  # begins within a pair
        torch.empty(64, 100_000, 3, device="meta")[:, :, :2],  # there is something between pairs
        torch.empty(2, 100_000, 64, device="meta").permute(2, 1, 0),  # columns are not neighbours
    ):
        assert ndsoftmax.explain(view, 1, device="H200").regime == "strided"
    assert ndsoftmax.explain(shape, 1, mask=(1, 100_000, 1), device="H200").interleaved == 1
    assert ndsoftmax.explain(shape, 1, device="A100").interleaved == 1


@pytest.mark.parametrize("multiprocessors", [1, 2, 7])
def test_few_rows_have_no_more_blocks_than_the_gpu_has_room_for(multiprocessors: int) -> None:
    chosen = plan(**contiguous(1, 20_000, dim=1), device=cuda(90, multiprocessors, 227, 50))
    assert chosen.regime != "cluster" or chosen.cluster <= max(2, multiprocessors)


@pytest.mark.parametrize("multiprocessors", [1, 4, 16])
@pytest.mark.parametrize("regime", [None, "online"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_clusters_share_what_they_read_twice(multiprocessors: int, regime: str | None, dtype: torch.dtype) -> None:
    device = cuda(90, multiprocessors, 227, 50)
    elements = (3_600_003 * 4 // dtype.itemsize) if regime is None else 200_003
    chosen = plan(**contiguous(4, elements, dim=1, dtype=dtype), device=device, regime=regime)
    assert_within_limits(chosen, device)
    assert (chosen.regime, chosen.cluster) == ("online", min(16, 2 * multiprocessors))
    part = elements * dtype.itemsize // chosen.cluster  # a row's, which shared memory keeps up to 96 KiB of
    assert chosen.passes == (2 if part > 96 << 10 else 1)
    assert all(times == 1 for times in coverage(chosen))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dim", [16, 64, 96, 132, 192, 256, 320, 512, 768, 1000, 1024])
def test_warps_share_blocks_until_these_read_enough(dim: int, dtype: torch.dtype) -> None:
    rows = 1 << 20
    chosen = ndsoftmax.explain((rows, dim), dtype=dtype, device="H200")
    if chosen.staged or chosen.regime != "warp":
        return
    of_a_warp = -(-rows // chosen.grid) * dim * dtype.itemsize / (chosen.block // 32)
    assert chosen.block in (32, 64, 96, 128)
    assert chosen.block == 128 or chosen.block // 32 * of_a_warp >= 3072
    assert chosen.block == 32 or (chosen.block // 32 - 1) * of_a_warp < 3072
    few = ndsoftmax.explain((100, dim), dtype=dtype, device="H200")
    assert few.block == 128 or few.regime != "warp"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kib", [8, 10, 12, 16, 20, 24, 28, 32, 48, 56])
def test_blocks_have_what_memory_needs_under_way(kib: int, dtype: torch.dtype) -> None:
    dim = kib * 1024 // dtype.itemsize
    chosen = ndsoftmax.explain((10_000, dim), dtype=dtype, device="H200")
    assert chosen.regime == "block"
    assert (80 if dtype == torch.bfloat16 else 72) <= 1024 // chosen.block * kib <= 112


@pytest.mark.parametrize(("dtype", "vectors"), [(torch.float32, 6), (torch.bfloat16, 3)])
def test_rows_of_16_bits_that_are_all_under_way_are_exponentiated_once(dtype: torch.dtype, vectors: int) -> None:
    few = ndsoftmax.explain((140, 4120), dtype=dtype, device="H200")
    assert few.regime == "block"
    assert few.items == vectors


@pytest.mark.parametrize(("dim", "dtype"), [(36, torch.float32), (40, torch.float32), (72, torch.float16)])
def test_only_forward_stages_rows_that_start_on_16_bytes(dim: int, dtype: torch.dtype) -> None:
    assert ndsoftmax.explain((1 << 20, dim), dtype=dtype, device="H200").staged
    assert not ndsoftmax.explain((1 << 20, dim), dtype=dtype, device="H200", backward=True).staged
    assert ndsoftmax.explain((1 << 20, dim + 1), dtype=dtype, device="H200", backward=True).staged


@pytest.mark.parametrize(
    ("device", "shape", "dtype", "backward", "meets"),
    [
        ("H200", (1, 500_000, 64), torch.float32, False, True),
        ("H200", (1, 500_000, 64), torch.bfloat16, True, True),
        ("H200", (4, 30_000, 257), torch.bfloat16, False, True),  # folded
        ("H200", (4, 30_000, 257), torch.bfloat16, True, False),
        ("H200", (4, 30_000, 257), torch.float32, False, False),
        ("H200", (1, 700_000, 7), torch.float32, False, True),  # of which all is kept
        ("H200", (1, 80_000, 16), torch.float32, False, False),  # of which L2 keeps all
        ("H200", (1, 500_000, 63), torch.float64, False, False),  # single columns
        ("H200", (1, 300_000, 20_000), torch.float32, False, False),  # more tiles than multiprocessors
        ("H200", (3, 40_000, 700), torch.float32, True, False),  # of which too little is kept
        ("A100", (1, 500_000, 64), torch.float32, False, True),
        ("T4", (1, 500_000, 64), torch.float32, False, False),
    ],
)
def test_blocks_meet_between_two_passes(
    device: str, shape: tuple[int, ...], dtype: torch.dtype, backward: bool, meets: bool
) -> None:
    chosen = ndsoftmax.explain(shape, 1, dtype=dtype, device=device, backward=backward)
    assert (chosen.regime, chosen.passes, chosen.meets) == ("strided", 2, meets)
    if meets:
        operands = 2 if backward else 1
        step = chosen.block * chosen.items * chosen.vector * dtype.itemsize * operands
        assert chosen.grid <= DEVICES[device].multiprocessors
        assert step <= chosen.shared_bytes <= DEVICES[device].shared_bytes_per_block
        assert chosen.workspace_bytes <= MIB
        assert "all at once" in str(chosen)


@pytest.mark.parametrize(
    ("device", "shape", "dtype", "backward", "staggered"),
    [
        ("H200", (16, 21, 263_169), torch.float32, False, True),
        ("H200", (16, 21, 263_170), torch.float32, False, True),
        ("H200", (16, 21, 263_172), torch.float32, False, False),  # vectors
        ("H200", (16, 19, 263_425), torch.bfloat16, False, True),
        ("H200", (16, 2, 263_169), torch.float32, False, True),
        ("H200", (16, 2, 263_169), torch.bfloat16, False, True),
        ("H200", (16, 3, 263_170), torch.bfloat16, False, True),
        ("H200", (16, 4, 263_170), torch.bfloat16, False, False),  # words
        ("H200", (16, 19, 263_426), torch.bfloat16, False, False),
        ("H200", (16, 21, 263_169), torch.bfloat16, False, False),  # more than threads hold without a loss
        ("H200", (16, 21, 263_169), torch.float64, False, False),
        ("H200", (16, 21, 263_169), torch.float32, True, False),
        ("H200", (16, 33, 263_169), torch.float32, False, False),
        ("H200", (2, 21, 66_049), torch.float32, False, False),  # too few to fill the GPU several times
        ("H200", (20_000, 9, 81), torch.float32, False, False),  # strips that would leave lanes idle
        ("H200", (1, 3, 2**30 + 1), torch.float32, False, False),  # more columns than kernels count
        ("A100", (1, 7, 9_999_999), torch.float16, False, True),
        ("T4", (1, 7, 9_999_999), torch.float16, False, False),
    ],
)
def test_vectors_of_columns_begin_elsewhere_in_each_row(
    device: str, shape: tuple[int, ...], dtype: torch.dtype, backward: bool, staggered: bool
) -> None:
    chosen = ndsoftmax.explain(shape, 1, dtype=dtype, device=device, backward=backward)
    assert chosen.regime == "strided"
    assert ("begin elsewhere" in chosen.why) == staggered
    if staggered:
        assert (chosen.vector, chosen.items, chosen.threads_per_row, chosen.passes) == (4, shape[1], 1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (22, 30_430, 49),
        (31, 25_368, 78),
        (10, 55_757, 148),
        (48, 66_698, 265),
        (55, 155_660, 20),
        (270, 60_001, 32),
        (539, 120_001, 17),
        (2, 80_919, 126),
        (1, 500_000, 64),
    ],
    ids=str,
)
def test_columns_that_are_read_twice_leave_few_multiprocessors_idle(
    shape: tuple[int, ...], backward: bool, dtype: torch.dtype
) -> None:
    chosen = ndsoftmax.explain(shape, 1, dtype=dtype, device="H200", backward=backward)
    assert chosen.passes == 2
    assert chosen.block % 32 == 0
    assert chosen.block >= 384  # of fewer threads, two blocks find room
    assert chosen.grid / (-(-chosen.grid // 132) * 132) > 0.8


@pytest.mark.parametrize(
    ("shape", "dtype", "backward", "single"),
    [
        ((3314, 53, 25), torch.bfloat16, False, True),
        ((5530, 28, 37), torch.float16, False, True),
        ((9000, 28, 17), torch.bfloat16, False, True),
        ((10_000, 28, 15), torch.bfloat16, False, True),  # where there are only tiles, too
        ((700, 500, 15), torch.bfloat16, False, False),  # folded
        ((5530, 28, 37), torch.bfloat16, True, True),
        ((2619, 32, 191), torch.bfloat16, False, True),
        ((2000, 28, 257), torch.bfloat16, False, False),  # words
        ((2619, 33, 191), torch.bfloat16, False, False),
        ((5000, 64, 63), torch.bfloat16, False, True),
        ((5000, 65, 63), torch.bfloat16, False, False),
        ((5000, 64, 65), torch.bfloat16, False, False),
        ((5530, 28, 36), torch.bfloat16, False, False),  # halves of vectors
    ],
    ids=str,
)
def test_many_columns_of_16_bits_may_be_single(
    shape: tuple[int, ...], dtype: torch.dtype, backward: bool, single: bool
) -> None:
    chosen = plan(**apart(*shape, dtype=dtype, backward=backward), device=DEVICES["H200"])
    assert chosen.regime == "strided"
    assert (chosen.vector == 1 and not chosen.staged) == single


@pytest.mark.parametrize("device", ["H200", "A100", "RTX 5090"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype", "vector"),
    [
        ((300_000, 2, 5), torch.float32, 1),
        ((20_000, 7, 28), torch.bfloat16, 2),
        ((20_001, 7, 29), torch.float16, 1),
        ((5000, 45, 9), torch.float32, 1),
        ((12_001, 30, 6), torch.bfloat16, 2),
        ((5000, 190, 3), torch.float16, 1),
        ((1 << 20, 3, 2), torch.bfloat16, 2),
    ],
    ids=str,
)
def test_small_slabs_that_follow_each_other_are_runs_in_shared_memory(
    shape: tuple[int, int, int], dtype: torch.dtype, vector: int, backward: bool, device: str
) -> None:
    outer, dim, inner = shape
    if backward:  # which takes more of them
        small = contiguous(outer // 16, dim, inner, dim=1, dtype=dtype, backward=True)
        assert not plan(**small, device=DEVICES[device]).slabs
        outer *= 4
    shape = (outer, dim, inner)
    chosen = plan(**contiguous(*shape, dim=1, dtype=dtype, backward=backward), device=DEVICES[device])
    assert chosen.slabs
    assert (chosen.regime, chosen.staged, chosen.vector, chosen.passes, chosen.cluster) == (
        "strided",
        True,
        vector,
        1,
        1,
    )
    assert chosen.items == -(-dim // chosen.threads_per_row) <= 16  # none has more
    slabs, rest = divmod(chosen.rows_per_block, inner)
    assert rest == 0  # whole ones
    assert chosen.grid == -(-outer // slabs)
    run = -(-slabs * dim * inner * dtype.itemsize // 16) * 16
    assert chosen.shared_bytes == (2 if backward else 1) * (run + 16)  # which may begin within 16 bytes
    assert set(coverage(chosen)) == {1}
    # not with gaps between them, and not where results begin elsewhere within 16 bytes; gradients may
    assert not plan(**apart(*shape, dtype=dtype, backward=backward), device=DEVICES[device]).slabs
    if backward:
        elsewhere = contiguous(*shape, dim=1, dtype=dtype, backward=True) | {"offsets": (0, 1, 0)}
        chosen = plan(**elsewhere, device=DEVICES[device])
        assert (chosen.slabs, chosen.vector) == (True, 1)  # no words
    else:
        elsewhere = contiguous(*shape, dim=1, dtype=dtype) | {"offsets": (0, 0, 1)}
        assert not plan(**elsewhere, device=DEVICES[device]).slabs


def test_slabs_are_held_in_shared_memory_only_where_that_takes_less() -> None:
    def small(*shape: int, device: str = "H200", **options: Any) -> bool:
        return plan(**contiguous(*shape, dim=1, **options), device=DEVICES[device]).slabs

    assert small(396, 41, 37)
    assert not small(395, 41, 37)  # three slabs a multiprocessor, at least
    assert small(18_100, 6, 5)
    assert not small(18_000, 6, 5)  # 16 KiB a multiprocessor
    assert not small(18_100, 6, 5, backward=True)
    assert small(9000, 90, 91)
    assert not small(9000, 91, 93)  # more than 32 KiB
    assert small(9000, 20, 25, backward=True)
    assert not small(9000, 21, 25, backward=True)  # gradients of 32 bits: more than 4 KiB, with their outputs
    assert small(9000, 192, 2, dtype=torch.bfloat16)
    assert not small(9000, 193, 2, dtype=torch.bfloat16)  # more than 16 lanes
    assert small(9000, 20, 50, dtype=torch.bfloat16)
    assert not small(9000, 20, 56, dtype=torch.bfloat16)  # vectors of columns
    assert not small(9000, 20, 25, dtype=torch.float64)
    assert not small(9000, 20, 25, device="T4")
    source = torch.empty(9000, 20, 25, dtype=torch.bfloat16, device="meta")
    assert not plan(**problem(source, source.float(), 1, log=False), device=DEVICES["H200"]).slabs


@pytest.mark.parametrize(
    ("shape", "dtype", "backward", "copies"),
    [
        ((1, 40_000, 1_026), torch.bfloat16, False, 8),  # a sector has a column twice in so many elements of dim
        ((1, 40_000, 1_026), torch.float32, False, 4),
        ((1, 23_302, 1_002), torch.float32, True, 4),
        ((1, 40_000, 1_032), torch.bfloat16, False, 2),  # which vectors divide
        ((3, 8_331, 279), torch.bfloat16, False, 16),
        ((1, 40_000, 1_040), torch.bfloat16, False, None),  # which begin on sectors
        ((1, 9_000, 4_001), torch.bfloat16, False, None),  # more tiles than multiprocessors
        ((2, 60_000, 1_027), torch.float64, False, None),  # which are not folded
        ((3, 60_000, 49), torch.float32, False, None),  # slabs that are tiles
    ],
)
def test_segments_are_folded_to_begin_on_sectors(
    shape: tuple[int, ...], dtype: torch.dtype, backward: bool, copies: int | None
) -> None:
    chosen = plan(**contiguous(*shape, dim=1, dtype=dtype, backward=backward), device=DEVICES["H200"])
    assert (chosen.passes, chosen.sectors) == (2, copies is not None)
    if copies:
        assert chosen.grid <= DEVICES["H200"].multiprocessors
        states = shape[0] * shape[2] * copies * chosen.splits
        assert chosen.workspace_bytes == states * (4 if backward else 8) <= MIB


def test_segments_of_results_of_another_type_are_not_folded_to_begin_on_sectors() -> None:
    x = torch.empty((1, 40_000, 1_032), device="meta")
    for source, result, grad in ((x, x.bfloat16(), x), (x.bfloat16(), x, None)):
        assert not plan(**problem(source, result, 1, log=False, grad=grad), device=DEVICES["H200"]).sectors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("shape", [(3, 2592, 41), (3, 2320, 38)])
def test_segments_that_begin_on_sectors_are_written_once(
    shape: tuple[int, int, int], backward: bool, dtype: torch.dtype
) -> None:
    """However slabs lie to sectors: at any offset, with gaps of any size, and with none, of a dim that sectors fill."""
    outer, dim, inner = shape
    for offset in (0, 1, 5, 15):
        for gap in (0, 1, 8):
            memory = torch.empty(offset + outer * (dim * inner + gap), dtype=dtype, device="meta")
            x = memory[offset:].view(outer, -1)[:, : dim * inner].unflatten(1, (dim, inner))
            described = problem(x, x, 1, log=False, grad=x if backward else None)
            chosen = plan(**described, device=cuda(80, 8, 160, 1))
            assert chosen.sectors
            assert set(coverage(chosen)) == {1}, (offset, gap)


@pytest.mark.parametrize("shape", [(128, 30_000, 129), (1000, 30_000, 65), (8, 100_000, 4_001)])
@pytest.mark.parametrize("backward", [False, True])
def test_columns_are_folded_in_less_than_a_mebibyte(shape: tuple[int, ...], backward: bool) -> None:
    chosen = ndsoftmax.explain(shape, 1, dtype=torch.bfloat16, device="H200", backward=backward)
    assert chosen.passes == 2
    assert chosen.workspace_bytes <= MIB


@pytest.mark.parametrize(
    ("shape", "dim", "items", "segment", "cluster"),
    [
        ((4, 1571, 256), 1, 7, 64, 4),
        ((10, 600, 4096), 1, 10, 64, 1),
        ((4, 4044, 64), 1, 4, 64, 16),
        ((64, 300, 1000), 1, 19, 128, 1),  # rows that begin within sectors, in longer segments
    ],
)
def test_threads_rather_hold_less_of_16_bits(
    shape: tuple[int, ...], dim: int, items: int, segment: int, cluster: int
) -> None:
    chosen = ndsoftmax.explain(shape, dim, dtype=torch.bfloat16, device="H200")
    assert (chosen.vector, chosen.passes) == (8, 1)
    assert (chosen.items, chosen.cluster) == (items, cluster)
    columns = chosen.outer * chosen.inner // (chosen.grid // chosen.cluster)  # of a tile
    assert columns * 2 == segment


@pytest.mark.parametrize(
    ("shape", "dim", "dtype", "segment", "cluster"),
    [
        ((32, 2048, 2048), 1, torch.float32, 128, 8),
        ((12, 2048, 2048), 1, torch.float16, 128, 8),
        ((10, 1500, 2048), 1, torch.bfloat16, 128, 6),
        ((512, 65_536), 0, torch.float32, 128, 2),
        ((512, 65_536), 0, torch.bfloat16, 128, 2),
        ((2048, 1024, 8), 1, torch.bfloat16, 16, 1),
        ((300, 500, 36), 1, torch.bfloat16, 72, 2),  # no vectors of 16 bits, but halves
    ],
)
def test_many_threads_have_four_columns_each(
    shape: tuple[int, ...], dim: int, dtype: torch.dtype, segment: int, cluster: int
) -> None:
    chosen = ndsoftmax.explain(shape, dim, dtype=dtype, device="H200")
    assert (chosen.vector, chosen.passes, chosen.cluster) == (4, 1, cluster)
    assert chosen.items * chosen.vector * dtype.itemsize <= 128
    columns = chosen.outer * chosen.inner // (chosen.grid // chosen.cluster)  # of a tile
    assert columns * dtype.itemsize == segment


@pytest.mark.parametrize(
    ("shape", "dim", "backward", "items", "shared", "segment", "cluster"),
    [
        ((16_384, 2048), 0, False, 32, 16, 64, 16),
        ((32, 2048, 2048), 1, False, 32, 16, 128, 4),
        ((100, 800, 800), 1, False, 25, 9, 128, 2),
        ((2000, 900, 20), 1, False, 32, 16, 40, 1),  # whole strips
        ((128, 4096, 256), 1, True, 16, 8, 128, 16),
    ],
)
def test_threads_share_long_columns_of_16_bits_with_shared_memory(
    shape: tuple[int, ...], dim: int, backward: bool, items: int, shared: int, segment: int, cluster: int
) -> None:
    chosen = ndsoftmax.explain(shape, dim, dtype=torch.bfloat16, device="H200", backward=backward)
    assert (chosen.vector, chosen.passes, chosen.cluster) == (4, 1, cluster)
    assert (chosen.items, chosen.shared_items, chosen.registers) == (items, shared, 32)
    assert chosen.outer * chosen.inner // (chosen.grid // chosen.cluster) * 2 == segment
    assert chosen.shared_bytes >= chosen.shared_items * chosen.vector * 2 * (2 if backward else 1) * chosen.block
    assert 4 * 256 // chosen.block * (chosen.shared_bytes + 1024) <= 228 * 1024  # of a multiprocessor
    assert "in registers and shared memory" in chosen.why
    assert "in 32 registers, or in shared memory" in str(chosen)


@pytest.mark.parametrize(
    ("shape", "dtype", "device", "backward"),
    [
        ((32, 2048, 2048), torch.float32, "H200", False),
        ((64, 64, 65_536), torch.bfloat16, "H200", False),  # a block holds a column
        ((2, 4096, 1024), torch.bfloat16, "H200", False),  # too few waves
        ((204, 1384, 116), torch.bfloat16, "H200", False),  # too few for half as many blocks
        ((40, 1000, 1000), torch.bfloat16, "H200", True),  # tiles would overlap
        ((32, 2048, 2048), torch.bfloat16, "A100", False),  # without clusters, blocks hold columns, or none do
    ],
    ids=str,
)
def test_registers_alone_hold_other_columns(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, backward: bool
) -> None:
    chosen = ndsoftmax.explain(shape, 1, dtype=dtype, device=device, backward=backward)
    assert chosen.shared_items == 0


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("inner", [100, 196, 676, 2052])
def test_columns_of_16_bits_that_8_bytes_divide_are_no_words(inner: int, backward: bool) -> None:
    def of(dim: int) -> Plan:
        return plan(**apart(640, dim, inner, dtype=torch.float16, backward=backward), device=DEVICES["H200"])

    for dim in (33, 80, 512, 2000):
        assert (of(dim).vector, of(dim).passes) == (4, 1)
    assert of(20).vector == 2  # of which a thread has all
    assert of(5).vector == (2 if inner == 100 else 4)  # such that are few are words


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((80, 197, 64), torch.bfloat16),  # too few for all multiprocessors
        ((16, 80, 160, 160), torch.bfloat16),  # no threads have to meet
        ((301_072, 15, 8), torch.bfloat16),  # neighbours would not fill lines
        ((20, 5840, 384), torch.float32),
        ((64, 300, 1000), torch.bfloat16),
    ],
    ids=str,
)
def test_few_threads_hold_whole_vectors_where_that_takes_less(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    chosen = ndsoftmax.explain(shape, 1, dtype=dtype, device="H200")
    assert (chosen.vector * dtype.itemsize, chosen.passes) == (16, 1)
    assert dtype.itemsize == 2 or chosen.items > 8


@pytest.mark.parametrize(
    ("shape", "dtype", "vector_bytes", "most"),
    [
        ((1536, 197, 197), torch.bfloat16, 8, 8),  # halves of vectors
        ((64, 100_000, 3), torch.float32, 16, 10),
        ((300, 5000, 49), torch.float32, 16, 10),
        ((128, 30_000, 9), torch.bfloat16, 16, 10),
    ],
)
def test_backward_reads_folded_columns_once_where_clusters_hold_them(
    shape: tuple[int, ...], dtype: torch.dtype, vector_bytes: int, most: int
) -> None:
    chosen = ndsoftmax.explain(shape, 1, dtype=dtype, device="H200", backward=True)
    assert (chosen.vector * dtype.itemsize, chosen.passes) == (vector_bytes, 1)
    assert most // 2 < chosen.items <= most


def test_a_row_that_is_split_is_read_by_four_blocks_a_multiprocessor() -> None:
    chosen = ndsoftmax.explain((1, 1 << 22), device="H200")
    assert (chosen.regime, chosen.splits, chosen.block, chosen.meets) == ("split", 4 * 132, 256, False)
    assert ndsoftmax.explain((8, 1 << 25), device="H200").splits == 4 * 132 // 8


@pytest.mark.parametrize(
    ("device", "shape", "dtype", "backward", "meets"),
    [
        ("H200", (1, 1 << 24), torch.float32, False, True),
        ("H200", (1, 1 << 24), torch.bfloat16, True, True),
        ("H200", (20, 1_000_003), torch.float16, False, True),
        ("H200", (1, 1 << 22), torch.float32, False, False),  # of which L2 keeps all
        ("H200", (1, 1 << 26), torch.float32, True, False),  # of which too little is kept
        ("H200", (1, 1 << 23), torch.float64, False, False),
        ("H200", (1, 1 << 23, 2), torch.float32, False, False),  # columns that are a row
        ("A100", (1, 1 << 24), torch.bfloat16, False, True),
        ("A100", (55, 76_260), torch.float32, False, False),  # half of the multiprocessors would have no row
        ("T4", (1, 1 << 24), torch.float32, False, False),
    ],
)
def test_blocks_of_split_rows_meet(
    device: str, shape: tuple[int, ...], dtype: torch.dtype, backward: bool, meets: bool
) -> None:
    chosen = ndsoftmax.explain(shape, 1, dtype=dtype, device=device, backward=backward)
    assert (chosen.regime, chosen.passes, chosen.meets) == ("split", 2, meets)
    if meets:
        assert chosen.splits == DEVICES[device].multiprocessors // shape[0]
        assert 0 < chosen.shared_bytes <= DEVICES[device].shared_bytes_per_block
        assert not ndsoftmax.explain(shape, 1, dtype=dtype, device=device, backward=backward, mask=(1, shape[1])).meets


def test_an_unknown_regime_is_refused() -> None:
    with pytest.raises(ValueError, match="warps"):
        plan(**contiguous(8, 8, dim=1), device=DEVICES["H200"], regime="warps")


@pytest.mark.parametrize("name", ALL_DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("sizes", "dim"),
    [
        ((2**31 + 5, 4), 1),
        ((2**31 + 5, 4), 0),
        ((3, 2**31 + 7), 1),
        ((3, 2**31 + 7), 0),
        ((2**33 + 1,), 0),
        ((2**20, 3, 2**20), 1),
        ((5, 2**32, 3), 1),
    ],
    ids=str,
)
def test_more_than_two_to_the_31(name: str, dtype: torch.dtype, sizes: tuple[int, ...], dim: int) -> None:
    chosen = plan(**contiguous(*sizes, dim=dim, dtype=dtype), device=ALL_DEVICES[name])
    assert_within_limits(chosen, ALL_DEVICES[name])
    split = (math.prod(sizes[:dim]), sizes[dim], math.prod(sizes[dim + 1 :]))
    assert (chosen.outer, chosen.dim, chosen.inner) == split


def test_dimensions_merge_where_memory_allows() -> None:
    x = torch.empty(2, 3, 4, 5, 6, device="meta")
    chosen = plan(**problem(x, x, (2, 3), log=False), device=DEVICES["H200"])
    assert (chosen.outer, chosen.dim, chosen.inner) == (6, 20, 6)
    x = torch.empty(2, 21, 8, 9, device="meta").to(memory_format=torch.channels_last)
    chosen = plan(**problem(x, x, 1, log=False), device=DEVICES["H200"])
    assert (chosen.outer, chosen.dim, chosen.inner) == (144, 21, 1)
    assert chosen.regime == "warp"


@pytest.mark.parametrize(
    ("rows", "dim", "dtype", "device", "vector"),
    [
        (32, 197, torch.float32, "H200", 1),  # no whole vectors
        (32, 192, torch.float32, "H200", 4),
        (32, 192, torch.bfloat16, "H200", 8),
        (32, 192, torch.float64, "H200", 1),
        (100_000, 192, torch.float32, "T4", 1),
        (100_000, 3, torch.float32, "T4", 4),  # tiny rows, several of which are whole vectors
        (100_000, 197, torch.bfloat16, "H200", 2),  # staged
        (10_000, 1030, torch.bfloat16, "H200", 8),
    ],
)
def test_warps_hold_vectors_or_elements(rows: int, dim: int, dtype: torch.dtype, device: str, vector: int) -> None:
    chosen = plan(**contiguous(rows, dim, dim=1, dtype=dtype), device=DEVICES[device])
    assert (chosen.regime, chosen.vector) == ("warp", vector)


@pytest.mark.parametrize("result", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "shape", [(1, 2, 5), (15, 3, 3), (1000, 4, 7), (1_000_000, 4, 7), (1500, 16, 31), (4, 3, 1603)]
)
def test_threads_hold_single_columns_of_16_bits_however_short_strips_are(
    shape: tuple[int, int, int], result: torch.dtype
) -> None:
    source = with_gaps(*shape, torch.bfloat16)
    chosen = plan(**problem(source, source.to(result), 1, log=False), device=DEVICES["H200"])
    assert (chosen.regime, chosen.staged, chosen.vector) == ("strided", False, 1)
    assert (chosen.threads_per_row, chosen.passes) == (1, 1)


@pytest.mark.parametrize(
    ("shape", "threads"),  # that share a column
    [
        ((36, 100, 5), 16),
        ((1, 20, 77), 4),
        ((4096, 20, 7), 1),
        ((300, 70, 31), 3),
        ((64, 100, 131), 4),
        ((64, 200, 131), 8),
    ],
)
def test_threads_share_single_columns_of_16_bits_as_long_as_elements_are_few(
    shape: tuple[int, int, int], threads: int
) -> None:
    source = with_gaps(*shape, torch.bfloat16)
    for result in (torch.bfloat16, torch.float32):
        chosen = plan(**problem(source, source.to(result), 1, log=False), device=DEVICES["H200"])
        assert (chosen.regime, chosen.staged, chosen.vector) == ("strided", False, 1)
        assert (chosen.threads_per_row, chosen.passes) == (threads, 1)
    backward = plan(**problem(source, source, 1, log=False, grad=source), device=DEVICES["H200"])
    assert (backward.vector == 1) == (math.prod(shape) < 1_000_000)


@pytest.mark.parametrize(
    ("shape", "dtype", "backward", "vector", "threads"),
    [
        ((1, 2, 603), torch.float32, False, 1, 1),
        ((1, 60, 9), torch.float32, False, 1, 8),  # a warp has all of dim
        ((1, 96, 9), torch.float32, False, 1, 8),
        ((1, 97, 9), torch.float32, False, 1, 16),
        ((1, 114, 85), torch.float32, False, 1, 16),
        ((2, 97, 52), torch.bfloat16, False, 2, 16),
        ((2, 97, 53), torch.bfloat16, False, 1, 16),
        ((1, 29, 24), torch.bfloat16, True, 2, 8),  # two operands, and half of each
        ((1, 768, 3), torch.float32, False, 1, 64),
    ],
)
def test_few_columns_have_as_many_threads_as_leave_each_little(
    shape: tuple[int, ...], dtype: torch.dtype, backward: bool, vector: int, threads: int
) -> None:
    described = contiguous(*shape, dim=1, dtype=dtype, backward=backward)
    chosen = plan(**described, device=DEVICES["H200"])
    assert (chosen.regime, chosen.vector, chosen.threads_per_row, chosen.passes) == ("strided", vector, threads, 1)
    assert (chosen.run, chosen.cluster) == (4, 1)
    assert chosen.rows_per_block == max(chosen.block // threads, 4) * vector  # one each
    few, many = contiguous(16, *shape[1:], dim=1), apart(60_000, *shape[1:])
    assert plan(**few, device=DEVICES["H200"]).run == 4 != plan(**many, device=DEVICES["H200"]).run


@pytest.mark.parametrize(
    ("dim", "dtype", "backward", "few", "lanes"),
    [
        (31, torch.float32, False, 4459, (4, 1)),
        (36, torch.float32, False, 33_675, (4, 2)),
        (28, torch.bfloat16, False, 4360, (2, 1)),
        (101, torch.bfloat16, True, 16_401, (8, 4)),
        (28, torch.bfloat16, False, 40_000, (1, 1)),  # which exponentiate twice
    ],
)
def test_few_staged_rows_are_shared_by_more_lanes(
    dim: int, dtype: torch.dtype, backward: bool, few: int, lanes: tuple[int, int]
) -> None:
    for rows, threads in zip((few, 1 << 20), lanes, strict=True):
        chosen = plan(**contiguous(rows, dim, dim=1, dtype=dtype, backward=backward), device=DEVICES["H200"])
        assert (chosen.regime, chosen.staged, chosen.threads_per_row) == ("warp", True, threads)


def test_narrow_rows_are_staged_before_they_fill_the_gpu() -> None:
    def of(*shape: int, dtype: torch.dtype = torch.float32, backward: bool = False) -> Any:
        return plan(**contiguous(*shape, dim=1, dtype=dtype, backward=backward), device=DEVICES["H200"])

    assert [of(rows, 46).staged for rows in (2500, 3000)] == [False, True]
    assert [of(rows, 90).staged for rows in (4000, 5000)] == [False, True]  # wider ones later
    assert [of(rows, 90, dtype=torch.bfloat16).staged for rows in (2500, 3937)] == [False, True]
    assert [of(rows, 158).staged for rows in (6742, 9451)] == [False, True]
    assert not of(3000, 46, backward=True).staged
    # of tiny rows of which a thread would have eight, and seven vectors, those that are many
    assert [of(rows, 7, dtype=torch.bfloat16).vector for rows in (16_008, 1 << 20)] == [2, 8]


@pytest.mark.parametrize(
    ("shape", "dtype", "backward", "items"),
    [
        ((1, 1187, 12), torch.float32, False, 4),
        ((1, 4096, 8), torch.bfloat16, False, 3),
        ((1, 1336, 17), torch.float32, False, 8),  # with 4, blocks would be large
        ((1, 1187, 12), torch.float32, True, 4),
        ((1, 1187, 17), torch.float32, True, 8),
    ],
)
def test_few_columns_of_a_long_dim_go_to_as_many_blocks_as_leave_each_little(
    shape: tuple[int, ...], dtype: torch.dtype, backward: bool, items: int
) -> None:
    described = contiguous(*shape, dim=1, dtype=dtype, backward=backward)
    chosen = plan(**described, device=DEVICES["H200"])
    assert (chosen.regime, chosen.passes, chosen.items) == ("strided", 1, items)
    assert 1 < chosen.cluster <= chosen.grid <= DEVICES["H200"].multiprocessors
    assert chosen.block <= 256
    masked = ndsoftmax.explain(shape, 1, dtype=dtype, backward=backward, mask=shape, device="H200")
    assert (masked.items, masked.cluster) == (items, chosen.cluster)


@pytest.mark.parametrize(
    ("shape", "backward", "device", "blocks", "items"),
    [
        ((1, 1187, 12), False, "A100", 1, 16),  # where there are no clusters
        ((4, 993, 28), False, "A100", 28, 16),
        ((4, 993, 28), False, "H200", 32, 4),
        ((47, 712, 3), True, "H200", 47, 12),  # whose sums a block takes less to add up than a cluster
    ],
)
def test_where_few_columns_stay(shape: tuple[int, ...], backward: bool, device: str, blocks: int, items: int) -> None:
    chosen = plan(**contiguous(*shape, dim=1, backward=backward), device=DEVICES[device])
    assert (chosen.passes, chosen.grid, chosen.items) == (1, blocks, items)


def test_words_whose_blocks_find_room_at_once_fill_these() -> None:
    def block(*shape: int) -> tuple[int, int]:
        chosen = plan(**contiguous(*shape, dim=1), device=DEVICES["H200"])
        return chosen.block, chosen.cluster

    assert block(37, 157, 318) == (256, 2)
    assert block(200, 157, 318) == (192, 2)


def test_vectors_of_columns_that_fill_the_gpu_with_large_clusters_are_read_twice_and_met() -> None:
    def passes(*shape: int, dtype: torch.dtype = torch.float32, backward: bool = False, device: str = "H200") -> int:
        chosen = plan(**contiguous(*shape, dim=1, dtype=dtype, backward=backward), device=DEVICES[device])
        assert chosen.meets == (chosen.passes == 2)
        return int(chosen.passes)

    assert passes(33, 28213, 13) == 2
    assert passes(24, 23198, 18, dtype=torch.bfloat16, backward=True) == 2
    assert passes(7, 12795, 34) == 1  # which leaves multiprocessors idle
    assert passes(9, 9993, 33) == 1  # which takes less than to meet
    for device in ("H200", "B200"):  # gradients of 32 bits
        assert passes(73, 2947, 54, backward=True, device=device) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [12, 19, 64, 70, 101, 300, 700])
@pytest.mark.parametrize("strip", [5, 9, 49, 64, 204])
def test_threads_have_little_more_of_columns_where_these_are_a_few_more(
    dim: int, strip: int, dtype: torch.dtype
) -> None:
    def few(outer: int) -> Any:
        chosen = plan(**contiguous(outer, dim, strip, dim=1, dtype=dtype), device=DEVICES["H200"])
        words = chosen.vector * dtype.itemsize <= 4 and not chosen.staged
        return chosen if words and chosen.run == 4 and chosen.cluster == 1 else None

    least, most = 1, 1 << 20  # few, and not
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if few(middle) else (least, middle)
    last = few(least)
    assert last.items <= 24
    assert last.grid * last.block >= 132 * 128  # half of the room, at least
    for outer in range(1, least, max(1, least // 50)):
        assert few(outer).items <= last.items  # fewer columns, never more of one


def test_many_single_columns_are_shared_only_into_results_of_another_type() -> None:
    source = torch.empty(4096, 1000, 7, dtype=torch.bfloat16, device="meta")
    assert plan(**problem(source, source, 1, log=False), device=DEVICES["H200"]).vector > 1
    chosen = plan(**problem(source, source.float(), 1, log=False), device=DEVICES["H200"])
    assert (chosen.staged, chosen.vector, chosen.passes) == (False, 1, 1)


@pytest.mark.parametrize(
    ("rows", "dim", "dtype", "backward", "vectors"),  # that a thread of a block has; 0: they are no block's
    [
        (1, 320, torch.float32, False, 0),
        (1, 321, torch.float32, False, 1),
        (660, 560, torch.bfloat16, True, 1),  # gradients that a warp could hold, by as many as others
        (661, 560, torch.bfloat16, True, 0),
        (1, 8192, torch.bfloat16, False, 4),  # of as many bytes
        (264, 1000, torch.float32, False, 2),
        (265, 1000, torch.float32, False, 2),
        (1056, 1000, torch.float32, False, 2),
        (1057, 1000, torch.float32, False, 3),
        (2112, 1000, torch.float32, False, 4),
        (2113, 1000, torch.float32, False, 0),  # as vectors, a warp's
        (300, 1001, torch.float32, False, 2),
        (800, 1001, torch.float32, False, 2),
        (2113, 1001, torch.float32, False, 0),
        (528, 640, torch.float32, False, 0),  # narrow enough for a warp
        (200, 1990, torch.bfloat16, False, 1),
        (302, 1990, torch.bfloat16, False, 2),
        (802, 1169, torch.bfloat16, True, 2),
        (118, 4096, torch.bfloat16, True, 2),
        (1, 4096, torch.float32, False, 4),
        (1, 4100, torch.float32, False, 0),  # a cluster's
    ],
)
def test_few_rows_have_as_many_threads_as_find_room_at_once(
    rows: int, dim: int, dtype: torch.dtype, backward: bool, vectors: int
) -> None:
    described = contiguous(rows, dim, dim=1, dtype=dtype, backward=backward)
    chosen = plan(**described, device=DEVICES["H200"])
    assert (chosen.regime == "block") == (vectors > 0)
    assert vectors in (0, chosen.items)
    most = 512 if vectors == 1 or (backward and dim % (16 // dtype.itemsize) == 0) else 1024
    assert vectors == 0 or -(-rows // DEVICES["H200"].multiprocessors) * chosen.block <= most


@pytest.mark.parametrize(
    ("rows", "dim", "dtype", "backward", "block"),  # threads that hold a row; 0: a warp, or none of its own
    [
        (1056, 1024, torch.float32, True, 0),  # all under way at once
        (1057, 1024, torch.float32, True, 128),
        (90_000, 1024, torch.float32, True, 128),
        (90_000, 1024, torch.bfloat16, True, 64),
        (90_000, 512, torch.float32, True, 64),
        (90_000, 508, torch.float32, True, 0),
        (90_000, 568, torch.float32, True, 0),  # by 96 threads, of which a fourth would have nothing
        (90_000, 1024, torch.float32, False, 0),
        (2000, 1979, torch.bfloat16, False, 64),
        (3696, 1979, torch.bfloat16, False, 64),
        (3697, 1979, torch.bfloat16, False, 0),
        (3000, 1979, torch.float16, True, 128),
        (3000, 1984, torch.bfloat16, True, 128),
    ],
)
def test_blocks_hold_rows_of_a_warp_where_more_of_them_overlap(
    rows: int, dim: int, dtype: torch.dtype, backward: bool, block: int
) -> None:
    chosen = ndsoftmax.explain((rows, dim), dtype=dtype, backward=backward, device="H200")
    assert (chosen.block if chosen.regime == "block" else 0) == block


@pytest.mark.parametrize(
    ("rows", "dim", "warps"),  # of a block
    [
        (2113, 512, 1),
        (4224, 512, 1),
        (4225, 512, 4),
        (4224, 640, 1),
        (8447, 640, 1),
        (8448, 640, 2),
        (8448, 512, 2),
        (2112, 512, 4),
        (2113, 508, 4),
    ],
)
def test_a_warp_is_a_block_where_others_read_while_it_writes(rows: int, dim: int, warps: int) -> None:
    chosen = ndsoftmax.explain((rows, dim), device="H200")
    assert (chosen.regime, chosen.block) == ("warp", 32 * warps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((60000, 26), 1), ((1024, 50257), 1), ((1, 1 << 20), 1), ((16384, 2048), 0), ((64, 100000, 2), 1)],
)
def test_a_scale_alone_changes_no_plan_of_rows_or_gradients(
    shape: tuple[int, ...], dim: int, dtype: torch.dtype
) -> None:
    def planned(**options: Any) -> dict[str, Any]:
        chosen = ndsoftmax.explain(shape, dim, dtype=dtype, device="H200", **options).to_dict()
        return {name: value for name, value in chosen.items() if name != "problem"}

    for scale in (0.5, -0.5):
        assert planned(scale=scale, backward=True) == planned(backward=True)
    if dim == len(shape) - 1:
        assert planned(scale=0.5) == planned()


@pytest.mark.parametrize(
    ("dtype", "biased", "both", "causal", "backward"),
    [(torch.float32, 511, 511, 319, 127), (torch.bfloat16, 640, 127, 127, 95)],
)
def test_narrow_rows_of_which_something_is_fused_are_staged(
    dtype: torch.dtype, biased: int, both: int, causal: int, backward: int
) -> None:
    def is_staged(dim: int, **options: Any) -> bool:
        return ndsoftmax.explain((4096, 8, 30, dim), dtype=dtype, device="H200", **options).staged

    for dim in range(5, 1024, 2):
        assert is_staged(dim, bias=(1, 8, 30, dim)) == (dim <= biased)
        assert is_staged(dim, bias=(1, 8, 30, dim), mask=(4096, 1, 1, dim)) == (dim <= both)
        assert is_staged(dim, causal=True) == (dim <= causal)
        assert is_staged(dim, causal=True, backward=True) == (dim <= backward)
        assert is_staged(dim, mask=(4096, 1, 1, dim)) == (dtype != torch.float32 or dim < 640)


@pytest.mark.parametrize(
    ("dtype", "biased", "both", "masked", "backward"),
    [
        (torch.float32, {24, 32, 40}, 63, 48, {24, 40}),
        (torch.bfloat16, {24, 40, 48, 56, 80, 96}, 80, 104, {24, 40, 48}),
    ],
)
def test_rows_of_vectors_of_which_something_is_fused_are_staged_where_they_are_narrow(
    dtype: torch.dtype, biased: set[int], both: int, masked: int, backward: set[int]
) -> None:
    def is_staged(dim: int, **options: Any) -> bool:
        return ndsoftmax.explain((4096, 8, 32, dim), dtype=dtype, device="H200", **options).staged

    for dim in (24, 32, 40, 48, 56, 64, 80, 96, 104, 112, 128, 256):
        bias, mask = (1, 8, 32, dim), (4096, 1, 1, dim)
        assert is_staged(dim, bias=bias) == (dim in biased)  # of 16 bits, where vectors would leave lanes idle
        assert is_staged(dim, bias=bias, mask=mask) == (dim <= both)
        assert is_staged(dim, mask=mask) == (dim <= masked)
        # where lanes that share a row are no fewer then, they do as well by vectors
        assert is_staged(dim, mask=mask, backward=True) == (dim in backward)


def test_few_rows_of_which_something_is_fused_are_staged_sooner() -> None:
    def is_staged(heads: int, dim: int, dtype: torch.dtype, **options: Any) -> bool:
        return ndsoftmax.explain((heads, dim, dim), dtype=dtype, device="H200", **options).staged

    for heads in (2, 12):
        assert is_staged(heads, 145, torch.bfloat16, bias=(heads, 145, 145)) == (heads > 2)
    for heads in (64, 256):
        assert is_staged(heads, 49, torch.bfloat16, mask=(heads, 1, 49)) == (heads > 64)
        assert not is_staged(heads, 49, torch.bfloat16, mask=(heads, 1, 49), backward=True)
    for heads in (32, 64):
        assert is_staged(heads, 49, torch.float32, mask=(heads, 1, 49)) == (heads > 32)


def test_staged_rows_that_would_meet_in_banks_have_larger_blocks() -> None:
    blocks = {dim: ndsoftmax.explain((500_000, dim), device="H200").block for dim in range(129, 257, 2)}
    larger = {129, 159, 161, 191, 193, 223, 225, 255}  # next to a multiple of as many words as there are banks
    assert blocks == {dim: 128 if dim in larger else 64 for dim in blocks}


def test_gradients_of_which_something_is_fused_go_to_fewer_threads() -> None:
    plain = ndsoftmax.explain((4096, 1000), backward=True, device="H200")
    masked = ndsoftmax.explain((4096, 1000), backward=True, mask=(4096, 1000), device="H200")
    assert plain.regime == masked.regime == "block"
    assert (plain.items, masked.items) == (2, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner", [512, 508, 510, 511])
@pytest.mark.parametrize("backward", [False, True])
def test_columns_are_held_where_masks_are_the_same_for_some_of_outer(
    inner: int, dtype: torch.dtype, backward: bool
) -> None:
    for mask in [(16, 1, 512, 1), (1, 12, 512, inner), (16, 12, 1, inner), (12, 512, 1)]:
        chosen = ndsoftmax.explain((16, 12, 512, inner), 2, dtype=dtype, backward=backward, mask=mask, device="H200")
        assert (chosen.regime, chosen.passes) == ("strided", 1)
        assert "registers" in chosen.why
    scaled = ndsoftmax.explain((16, 12, 512, inner), 2, dtype=dtype, backward=backward, scale=0.5, device="H200")
    assert "registers" in scaled.why
    biased = ndsoftmax.explain((16, 12, 512, inner), 2, dtype=dtype, bias=(12, 1, inner), device="H200")
    assert "registers" in biased.why
    assert biased.beside == ("bias" if dtype == torch.float32 or inner != 511 else None)
    three_groups = ndsoftmax.explain((4, 4, 12, 512, inner), 3, mask=(4, 1, 12, 512, 1), dtype=dtype, device="H200")
    assert "registers" not in three_groups.why


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backward", [False, True])
def test_few_rows_of_up_to_three_elements_have_a_thread_each(dtype: torch.dtype, backward: bool) -> None:
    def is_alone(rows: int, dim: int, **fused: Any) -> bool:
        chosen = ndsoftmax.explain((rows, dim), dtype=dtype, backward=backward, device="H200", **fused)
        return chosen.regime == "strided" and chosen.threads_per_row == 1

    for dim, most in ((1, 16), (2, 16), (3, 128)):
        assert [is_alone(rows, dim) for rows in (255, 256, most * 132, most * 132 + 1)] == [False, True, True, False]
        assert not is_alone(928, dim, mask=(928, dim))
        scaled = ndsoftmax.explain((928, dim), dtype=dtype, backward=backward, scale=0.5, device="H200")
        assert scaled.regime == ("strided" if backward else "warp")  # a factor of rows that lanes hold
    assert not is_alone(928, 4)


@pytest.mark.parametrize(
    ("dtype", "inner", "fused", "vector", "beside"),
    [
        (torch.bfloat16, 512, {"mask": (12, 512, 512)}, 8, "mask"),
        (torch.bfloat16, 512, {"mask": (12, 512, 1)}, 8, None),  # what all columns exclude is not loaded
        (torch.bfloat16, 510, {"mask": (12, 512, 510)}, 2, None),  # of words, which are less than may be copied
        (torch.bfloat16, 511, {"mask": (12, 512, 511)}, 1, None),
        (torch.bfloat16, 512, {"bias": (12, 512, 512)}, 8, "bias"),
        (torch.bfloat16, 510, {"bias": (12, 512, 510)}, 2, "bias"),
        (torch.bfloat16, 511, {"bias": (12, 512, 511)}, 1, None),  # widened, as 16 bits would round what is added
        (torch.bfloat16, 512, {"bias": (12, 512, 1)}, 1, None),
        (torch.bfloat16, 510, {"bias": (12, 512, 510), "mask": (12, 512, 510)}, 1, None),
        (torch.bfloat16, 510, {"bias": (12, 512, 510), "scale": -1.0}, 1, None),
        (torch.float32, 512, {"bias": (12, 512, 512)}, 4, "bias"),
        (torch.float32, 512, {"bias": (12, 512, 512), "mask": (12, 512, 512)}, 4, None),
        (torch.float32, 511, {"bias": (12, 512, 511), "mask": (12, 512, 511)}, 1, "bias"),
        (torch.float32, 511, {"mask": (12, 512, 511)}, 1, None),
    ],
)
def test_what_is_fused_lies_beside_columns(
    dtype: torch.dtype, inner: int, fused: dict[str, Any], vector: int, beside: str | None
) -> None:
    shape = (11, 12, 512, inner)
    chosen = ndsoftmax.explain(shape, 2, dtype=dtype, device="H200", **fused)
    assert (chosen.vector, chosen.beside, chosen.passes) == (vector, beside, 1)
    assert (f"also for the {beside} of" in str(chosen)) == (beside is not None)
    assert ndsoftmax.explain(shape, 2, dtype=dtype, device="H200").beside is None
    small = ndsoftmax.explain(shape, 2, dtype=dtype, device="RTX 4090", **fused)
    assert small.shared_bytes <= 99 * 1024


@pytest.mark.parametrize(
    ("rows", "dim", "source", "result", "backward", "threads"),  # that a row has; 0: it is held in another way
    [
        (1, 2049, torch.bfloat16, torch.float32, False, 0),  # vectors of both begin alike: a block's
        (3000, 513, torch.float32, torch.float32, False, 32),
        (90_000, 449, torch.float32, torch.float32, False, 32),
        (90_000, 447, torch.float32, torch.float32, False, 0),  # staged
        (3000, 319, torch.float32, torch.float32, False, 0),
        (90_000, 513, torch.float32, torch.float32, True, 64),
        (90_000, 385, torch.float32, torch.float32, True, 32),
        (90_000, 193, torch.float32, torch.float32, True, 32),
        (90_000, 191, torch.float32, torch.float32, True, 0),  # staged
        (90_000, 1025, torch.float32, torch.float32, True, 0),
        (90_000, 516, torch.float32, torch.float32, True, 0),
    ],
)
def test_rows_that_begin_anywhere_are_held_element_by_element_where_that_takes_less(
    rows: int, dim: int, source: torch.dtype, result: torch.dtype, backward: bool, threads: int
) -> None:
    x = torch.empty(rows, dim, dtype=source, device="meta")
    described = problem(x, x.to(result), 1, log=False, grad=x if backward else None)
    chosen = plan(**described, device=DEVICES["H200"])
    single = chosen.regime == "strided" and chosen.vector == 1 and chosen.passes == 1 and not chosen.staged
    assert (chosen.threads_per_row if single else 0) == threads
    old = plan(**described, device=DEVICES["T4"])  # which has no such kernels
    assert old.regime != "strided" or old.passes == 2


@pytest.mark.parametrize("result", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "dim", "single"), [(264, 2049, True), (265, 2049, False), (1, 4096, True), (1, 4099, False)]
)
def test_few_rows_of_16_bits_that_begin_elsewhere_in_each_tensor_are_held_element_by_element(
    rows: int, dim: int, single: bool, result: torch.dtype
) -> None:
    source = torch.empty(rows * dim + 1, dtype=torch.bfloat16, device="meta")[1:].view(rows, dim)
    chosen = plan(
        **problem(source, torch.empty(rows, dim, dtype=result, device="meta"), 1, log=False), device=DEVICES["H200"]
    )
    assert (
        (chosen.regime, chosen.vector, chosen.threads_per_row) == ("strided", 1, 256) and not chosen.staged
    ) == single


@pytest.mark.parametrize(("rows", "block"), [(4_300, 128), (8_400, 128), (8_500, 64)])
def test_blocks_are_small_where_rows_fill_the_gpu_twice(rows: int, block: int) -> None:
    assert plan(**contiguous(rows, 400, dim=1), device=DEVICES["H200"]).block == block


@pytest.mark.parametrize(
    ("rows", "dim", "staged"),
    [
        (4200, 301, False),
        (12_000, 301, False),
        (13_000, 301, True),
        (9000, 33, True),
        (2000, 2, False),
        (3000, 2, True),
        (3000, 5, False),
    ],
)
def test_rows_are_staged_where_they_fill_the_gpu_often_enough(rows: int, dim: int, staged: bool) -> None:
    assert plan(**contiguous(rows, dim, dim=1), device=DEVICES["H200"]).staged == staged


@pytest.mark.parametrize(("rows", "tiny"), [(100_000, False), (300_000, True), (4_000_000, True)])
def test_many_rows_of_two_types_that_are_smaller_than_a_vector_are_whole_vectors(rows: int, tiny: bool) -> None:
    source = torch.empty(rows, 3, dtype=torch.float16, device="meta")
    for result, vectors in ((torch.float16, True), (torch.float32, tiny)):
        chosen = plan(**problem(source, source.to(result), 1, log=False), device=DEVICES["H200"])
        assert chosen.staged
        assert (chosen.vector == 8) == vectors


@pytest.mark.parametrize("regime", [None, *REGIMES])
@given(problem=problems())
def test_gpus_before_sm_80_get_the_kernels_they_have(regime: str | None, problem: Problem) -> None:
    try:
        chosen = plan(**problem, device=DEVICES["T4"], regime=regime)
    except ValueError:
        assert regime is not None
        return
    if chosen.regime == "warp":
        assert chosen.vector == 1 or (chosen.staged and chosen.dim < chosen.vector)
    elif chosen.regime == "strided":
        assert (chosen.vector, chosen.passes) == (1, 2)
    else:
        assert chosen.regime in ("online", "split")


def test_rows_misaligned_differently_are_read_in_place() -> None:
    x = torch.empty(64, 2000, device="meta")
    for dim, regime in ((300, "warp"), (1500, "strided")):
        part = x[:, 1 : 1 + dim]
        chosen = plan(**problem(part, torch.empty(part.shape, device="meta"), 1, log=False), device=DEVICES["H200"])
        assert (chosen.regime, chosen.passes) == (regime, 1)


def test_devices_are_values() -> None:
    assert cuda(90, 132, 227, 60) == DEVICES["H200"] != DEVICES["B200"]
    assert "90" in repr(DEVICES["H200"])


@contextmanager
def forced(regime: str) -> Iterator[None]:
    os.environ["NDSOFTMAX_REGIME"] = regime
    try:
        yield
    finally:
        del os.environ["NDSOFTMAX_REGIME"]


@pytest.mark.parametrize("regime", REGIMES)
@given(call=calls(), backward=st.booleans())
def test_every_regime_agrees_with_float64(device: str, regime: str, call: Call, backward: bool) -> None:
    x = call.input(device)
    assume(x.numel() > 0)
    grad = numbers(x.numel(), call.seed + 1, call.dtype, device, scale=0.1).view(x.shape) if backward else None
    here = ndsoftmax._C.device(device, 0, torch.get_num_threads())

    def run() -> torch.Tensor:
        with forced(regime):
            if grad is None:
                return (ndsoftmax.log_softmax if call.log else ndsoftmax.softmax)(x, call.dim)
            operator = ndsoftmax.ops.log_softmax_backward if call.log else ndsoftmax.ops.softmax_backward
            return operator(grad, x, call.dim)

    try:
        plan(**problem(x, torch.empty_like(x), call.dim, log=call.log, grad=grad), device=here, regime=regime)
    except ValueError:
        with pytest.raises(ValueError, match=regime):
            run()
    else:
        assert_result(run(), x, grad, call)


def assert_result(got: torch.Tensor, x: torch.Tensor, grad: torch.Tensor | None, call: Call) -> None:
    if grad is None:
        assert_forward(got, x, call.dim, log=call.log)
    else:
        exact = oracle.backward(grad, x, call.dim, log=call.log)
        assert_close(got, exact, oracle.magnitude(grad, x, call.dim, log=call.log))


@pytest.mark.parametrize(
    ("shape", "backward", "vector"),
    [
        ((2755, 1036, 7), False, 4),
        ((512, 512, 49), False, 4),
        ((203, 265, 99), False, 8),  # halves would be held by clusters of three
        ((1536, 197, 197), True, 4),
        ((140, 80, 101), True, 8),  # by clusters of two
    ],
)
def test_columns_are_folded_as_halves_of_vectors_unless_clusters_are_much_larger(
    shape: tuple[int, ...], backward: bool, vector: int
) -> None:
    chosen = ndsoftmax.explain(shape, 1, dtype=torch.bfloat16, device="H200", backward=backward)
    assert (chosen.vector, chosen.staged, chosen.passes) == (vector, False, 1)


@pytest.mark.parametrize("inner", [3, 7, 10, 11, 15, 17, 66, 101, 203])
@pytest.mark.parametrize("backward", [False, True])
def test_no_16_bit_slices_are_tiles_that_take_long(inner: int, backward: bool) -> None:
    """Their results begin elsewhere within vectors: as tiles, many took longer than torch."""
    long_dims = range(65, 200, 9) if inner < 7 else ()  # tiles of several slabs would be copied element by element
    for dim in (*range(2, 65), *long_dims):
        for elements in (1 << 18, 1 << 25):
            outer = elements // (dim * inner)
            x = torch.empty(outer, dim + 1, inner, dtype=torch.bfloat16, device="meta")[:, 1:]
            y = torch.empty(outer, dim, inner, dtype=torch.bfloat16, device="meta")
            sliced = problem(x, y, 1, log=False, grad=x if backward else None)
            assert not plan(**sliced, device=DEVICES["H200"]).staged


@pytest.mark.parametrize("inner", [3, 7, 10, 11, 15, 17, 66, 101])
@pytest.mark.parametrize("backward", [False, True])
def test_no_16_bit_slabs_with_gaps_that_begin_alike_are_tiles(inner: int, backward: bool) -> None:
    """Of single elements, which took five to ten times longer."""
    for dim in range(2, 200, 3):
        for elements in (1 << 21, 1 << 25):
            gapped = apart(elements // (dim * inner), dim, inner, dtype=torch.bfloat16, backward=backward)
            assert not plan(**gapped, device=DEVICES["H200"]).staged


def test_columns_are_folded_where_dim_is_worth_it() -> None:
    """101 columns of 16 bits are no whole words: four elements of dim are halves of vectors, or eight are vectors, if
    halves would be held by many more blocks. 102, and long strips, are words, and few elements."""
    for dim, inner, backward, folded in (
        (55, 101, False, False),
        (56, 101, False, True),
        (80, 102, False, False),
        (80, 102, True, False),
        (30, 33, True, False),  # one by one
        (70, 33, True, True),
        (1000, 33, False, True),
        (200, 333, False, False),
        (200, 333, True, False),
    ):
        chosen = plan(**apart(1000, dim, inner, dtype=torch.bfloat16, backward=backward), device=DEVICES["H200"])
        assert chosen.regime == "strided"
        assert (chosen.vector in (4, 8)) == folded
        if (dim, inner, backward) == (1000, 33, False):
            assert (chosen.vector, chosen.cluster) == (8, 1)
        elif folded:
            assert chosen.vector == 4


def test_halves_are_folded_where_vectors_would_not_take_less_than_words() -> None:
    """A thread has the states of eight columns of a vector, so that vectors may take larger clusters than words do."""
    for outer, dim, inner, backward, vector, cluster in (
        (198, 1172, 101, True, 4, 8),
        (327, 1140, 149, False, 4, 6),
        (6, 2068, 83, True, 4, 11),  # vectors would be too many a thread, and multiprocessors idle
        (297, 546, 50, False, 2, 2),  # vectors would take fewer blocks than halves, and longer than words
        (800, 1000, 50, True, 2, 7),  # backward, unshifted words take no longer than what is folded
    ):
        chosen = plan(**apart(outer, dim, inner, dtype=torch.bfloat16, backward=backward), device=DEVICES["H200"])
        assert (chosen.regime, chosen.vector, chosen.cluster) == ("strided", vector, cluster)


def test_columns_read_twice_have_smaller_blocks_where_most_multiprocessors_would_be_idle() -> None:
    for dim, columns, backward, meets, block, grid in (
        (129907, 8, False, False, 256, 57),
        (113248, 4, True, False, 256, 74),
        (400000, 8, False, True, 512, 87),
    ):
        chosen = plan(**apart(1, dim, columns, dtype=torch.float32, backward=backward), device=DEVICES["H200"])
        assert (chosen.passes, chosen.meets, chosen.block, chosen.grid) == (2, meets, block, grid)
