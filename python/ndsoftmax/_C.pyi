from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

_Regime = Literal["warp", "block", "cluster", "online", "split", "strided"]

MAX_GROUPS: int
VERSION: str
HAS_CUDA: bool

class Device:
    def __init__(
        self,
        *,
        kind: str = "cuda",
        index: int = 0,
        compute_capability: int = 90,
        multiprocessors: int = 132,
        shared_bytes_per_block: int = 232448,
        l2_bytes: int = 52428800,
        threads: int = 1,
    ) -> None: ...
    kind: str
    index: int
    compute_capability: int
    multiprocessors: int
    shared_bytes_per_block: int
    l2_bytes: int
    threads: int

class Plan:
    regime: _Regime
    ragged: bool
    staged: bool
    meets: bool
    sectors: bool
    beside: Literal["mask", "bias"] | None
    slabs: bool
    log2_dim: int
    vector: int
    items: int
    threads_per_row: int
    rows_per_block: int
    block: int
    cluster: int
    grid: int
    splits: int
    run: int
    interleaved: int
    shared_items: int
    shared_bytes: int
    workspace_bytes: int
    passes: int
    why: str
    outer: int
    dim: int
    inner: int

def forward(input: Tensor, output: Tensor, dims: Sequence[int], log: bool, threads: int) -> None: ...
def backward(
    grad_output: Tensor, output: Tensor, grad_input: Tensor, dims: Sequence[int], log: bool, threads: int
) -> None: ...
def masked_forward(
    input: Tensor,
    output: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    dims: Sequence[int],
    log: bool,
    where: bool,
    scale: float,
    causal: str,
    zero: bool,
    threads: int,
) -> None: ...
def masked_backward(
    grad_output: Tensor,
    output: Tensor,
    grad_input: Tensor,
    mask: Tensor | None,
    dims: Sequence[int],
    log: bool,
    where: bool,
    scale: float,
    causal: str,
    zero: bool,
    threads: int,
) -> None: ...
def are_plain(a: Tensor, b: Tensor, recorded: bool = False) -> bool: ...
def plain_forward(
    input: object,
    dim: object,
    dtype: object,
    log: bool,
    record: Callable[..., Tensor],
    out: object,
    scale: float = 1.0,  # it, mask and where: all, or none
    mask: object = None,
    where: bool = False,
    /,
) -> Tensor | None: ...
def record_forward(
    ctx: Any, input: Tensor, computed: tuple[Tensor, tuple[Sequence[int], torch.dtype | None, bool]]
) -> Tensor: ...
def plain_backward(
    grad_output: object, output: object, dims: object, input_dtype: object, log: bool
) -> Tensor | None: ...
def build_info() -> dict[str, Any]: ...
def last_cache_bytes() -> int: ...
def device(type: str, index: int = 0, threads: int = 1) -> Device: ...
def forced_regime() -> _Regime | None: ...
def plan(
    log: bool,
    backward: bool,
    source_dtype: str,
    result_dtype: str,
    sizes: Sequence[int],
    source_strides: Sequence[int],
    grad_strides: Sequence[int],
    result_strides: Sequence[int],
    dims: Sequence[int],
    device: Device,
    offsets: Sequence[int] = (0, 0, 0),
    regime: str | None = None,
    mask: tuple[Sequence[int], Sequence[int]] | None = None,
    bias: tuple[Sequence[int], Sequence[int]] | None = None,
    bias_dtype: str = "float32",
    scale: float = 1.0,
    causal: str = "",
    zero: bool = False,
) -> Plan: ...
def coverage(plan: Plan) -> list[int]: ...
