# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Top-k selection over indexer logits: exact, by radix select over the whole 32-bit key.

    logits   [num_rows, max_len]  float32, last dimension dense, row stride a multiple of 16 elements
    lengths  [num_requests]       int32, context tokens of each request, its query tokens included
    indices  [num_rows, k]        int32, ascending positions, then -1
    counts   [num_rows]           int32, how many are valid

`num_rows = num_requests * query_len`, rows of one request being adjacent. Row q of a request sees
`lengths - (query_len - 1 - q)` positions; a padding row has length 0 and gets -1 and count 0.

Rules. Larger logits first; equal logits (0.0 and -0.0 are equal) by the lower position. -inf and NaN are
never selected, so fewer than k may be valid. The result is unique, whatever the number of splits.

Four passes of 8 bits narrow the k-th largest key down to all its 32 bits; a fifth launch writes the
positions. Every split of a row keeps a histogram of its own for every pass, so there is nothing to clear
between launches, no atomic on global memory, and no bounded stash of candidates that clustered logits could
overflow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hisparsim_kernels.aot_types import integer_types
from hisparsim_kernels.arch import arch_of
from hisparsim_kernels.configs import LaunchConfig, find_config
from hisparsim_kernels.errors import (
    ShapeError,
    check_contiguous,
    check_dtype,
    check_range,
    check_rows,
    check_same_device,
    check_shape,
)
from hisparsim_kernels.registry import AotCase

NUM_PASSES = 4
NUM_BINS = 256
MAX_QUERY_LEN = 8
MAX_K = 65536
MAX_LEN = 2**30
"""Positions are int32 and a block past the end must still be representable."""


@triton.jit
def _ordered_key(value):
    """uint32 key whose unsigned order is the order of float32 `value`; both zeros get one key."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _segment(
    lengths_ptr, row, split, max_len, QUERY_LEN: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Half-open range of positions that this split of the row covers, in whole blocks."""
    length = tl.load(lengths_ptr + row // QUERY_LEN) - (QUERY_LEN - 1 - (row % QUERY_LEN).to(tl.int32))
    length = tl.maximum(tl.minimum(length, max_len), 0)
    span = (length + BLOCK * NUM_SPLITS - 1) // (BLOCK * NUM_SPLITS) * BLOCK
    begin = split * span
    return begin, tl.minimum(begin + span, length)


@triton.jit
def _narrow(
    hist_ptr, state_ptr, greater_ptr, row, K: tl.constexpr, PASS: tl.constexpr, NUM_SPLITS: tl.constexpr
):
    """State after `PASS` passes: key prefix, how many keys equal to it are still wanted, and of each split
    the number of keys above it and (of the last pass) equal to it."""
    splits = tl.arange(0, NUM_SPLITS)
    bins = tl.arange(0, 256)
    tile_ptr = hist_ptr + (row * 4 + PASS - 1) * NUM_SPLITS * 256
    tile = tl.load(tile_ptr + splits[:, None] * 256 + bins[None, :])  # [NUM_SPLITS, 256]
    total = tl.sum(tile, axis=0)  # [256]
    if PASS == 1:
        prefix = tl.zeros((), tl.uint32)
        wanted = tl.minimum(tl.sum(total), K)
        greater = tl.zeros([NUM_SPLITS], tl.int32)
    else:
        prefix = tl.load(state_ptr + (row * 4 + PASS - 1) * 2).to(tl.uint32, bitcast=True)
        wanted = tl.load(state_ptr + (row * 4 + PASS - 1) * 2 + 1)
        greater = tl.load(greater_ptr + (row * 4 + PASS - 1) * NUM_SPLITS + splits)
    from_here = tl.cumsum(total, 0, reverse=True)  # keys in this bin and above
    chosen = tl.sum((from_here >= wanted).to(tl.int32)) - 1
    wanted -= tl.sum(tl.where(bins > chosen, total, 0))
    prefix = (prefix << 8) | chosen.to(tl.uint32)
    greater += tl.sum(tl.where(bins[None, :] > chosen, tile, 0), axis=1)
    equal = tl.sum(tl.where(bins[None, :] == chosen, tile, 0), axis=1)
    return prefix, wanted, greater, equal


@triton.jit
def topk_histogram_kernel(
    logits_ptr, lengths_ptr, hist_ptr, state_ptr, greater_ptr, logits_stride, max_len,
    K: tl.constexpr, QUERY_LEN: tl.constexpr, PASS: tl.constexpr, NUM_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (num_rows, NUM_SPLITS): histogram of the next 8 key bits among keys that carry the prefix found so
    far."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    if PASS > 0:
        prefix, wanted, greater, _ = _narrow(hist_ptr, state_ptr, greater_ptr, row, K, PASS, NUM_SPLITS)
        if split == 0:
            tl.store(state_ptr + (row * 4 + PASS) * 2, prefix.to(tl.int32, bitcast=True))
            tl.store(state_ptr + (row * 4 + PASS) * 2 + 1, wanted)
            tl.store(greater_ptr + (row * 4 + PASS) * NUM_SPLITS + tl.arange(0, NUM_SPLITS), greater)
    begin, end = _segment(lengths_ptr, row, split, max_len, QUERY_LEN, NUM_SPLITS, BLOCK)
    counts = tl.zeros([256], tl.int32)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        # The bound of the load is the capacity, which is known to be aligned: 16-byte loads.
        value = tl.load(logits_ptr + row * logits_stride + at, mask=at < max_len, other=float("-inf"))
        key = _ordered_key(value)
        counted = (at < end) & (value > float("-inf"))
        if PASS > 0:
            counted = counted & ((key >> (32 - 8 * PASS)) == prefix)
        digit = ((key >> (24 - 8 * PASS)) & 0xFF).to(tl.int32)
        counts += tl.histogram(digit, 256, mask=counted)
    hist_row_ptr = hist_ptr + ((row * 4 + PASS) * NUM_SPLITS + split) * 256
    tl.store(hist_row_ptr + tl.arange(0, 256), counts)


@triton.jit
def topk_write_kernel(
    logits_ptr, lengths_ptr, hist_ptr, state_ptr, greater_ptr, indices_ptr, counts_ptr, logits_stride,
    max_len,
    K: tl.constexpr, K_PADDED: tl.constexpr, QUERY_LEN: tl.constexpr, NUM_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (num_rows, NUM_SPLITS): write the positions of the selected keys in ascending order."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    threshold, wanted, greater, equal = _narrow(hist_ptr, state_ptr, greater_ptr, row, K, 4, NUM_SPLITS)
    before = tl.arange(0, NUM_SPLITS) < split
    equal_seen = tl.sum(tl.where(before, equal, 0))
    written = tl.sum(tl.where(before, greater, 0)) + tl.minimum(equal_seen, wanted)
    if split == 0:
        count = tl.sum(greater) + wanted
        tail = tl.arange(0, K_PADDED)
        tl.store(indices_ptr + row * K + tail, -1, mask=(tail >= count) & (tail < K))
        tl.store(counts_ptr + row, count)
    begin, end = _segment(lengths_ptr, row, split, max_len, QUERY_LEN, NUM_SPLITS, BLOCK)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        # The bound of the load is the capacity, which is known to be aligned: 16-byte loads.
        value = tl.load(logits_ptr + row * logits_stride + at, mask=at < max_len, other=float("-inf"))
        key = _ordered_key(value)
        finite = (at < end) & (value > float("-inf"))
        tied = (finite & (key == threshold)).to(tl.int32)
        rank = equal_seen + tl.cumsum(tied, 0)  # 1 for the first key equal to the threshold
        taken = ((finite & (key > threshold)) | ((tied > 0) & (rank <= wanted))).to(tl.int32)
        slot = written + tl.cumsum(taken, 0) - 1
        tl.store(indices_ptr + row * K + slot, at, mask=taken > 0)
        equal_seen += tl.sum(tied)
        written += tl.sum(taken)


@dataclass(frozen=True)
class TopkScratch:
    """Persistent scratch of a top-k launch; contents are meaningless between launches and never need
    clearing.

    hist    [num_rows, 4, num_splits, 256]  int32, histogram of each pass and split
    state   [num_rows, 4, 2]                int32, key prefix and number still wanted before each pass
    greater [num_rows, 4, num_splits]       int32, keys above the prefix in each split
    """

    hist: torch.Tensor
    state: torch.Tensor
    greater: torch.Tensor

    @staticmethod
    def allocate(num_rows: int, num_splits: int, device: torch.device | str) -> TopkScratch:
        """Scratch for up to `num_rows` rows of a configuration with `num_splits` splits."""
        return TopkScratch(
            hist=torch.empty(num_rows, NUM_PASSES, num_splits, NUM_BINS, dtype=torch.int32, device=device),
            state=torch.empty(num_rows, NUM_PASSES, 2, dtype=torch.int32, device=device),
            greater=torch.empty(num_rows, NUM_PASSES, num_splits, dtype=torch.int32, device=device),
        )


def topk_config(max_len: int, device: torch.device) -> tuple[LaunchConfig, LaunchConfig]:
    """Histogram and write configuration for rows of capacity `max_len`; depends on capacities only, so that a
    captured graph keeps its grid."""
    name = "short" if max_len <= 16384 else "medium" if max_len <= 131072 else "long"
    arch = arch_of(device)
    return find_config("topk", "topk_histogram", name, arch), find_config("topk", "topk_write", name, arch)


def check_topk(
    logits: torch.Tensor, lengths: torch.Tensor, k: int, query_len: int,
    indices: torch.Tensor, counts: torch.Tensor, scratch: TopkScratch, num_splits: int,
) -> None:  # fmt: skip
    """Raise the named error of `errors` that fits if an argument of `topk` breaks its contract."""
    check_dtype("logits", logits, torch.float32)
    check_shape("logits", logits, (None, None))
    num_rows, max_len = logits.shape
    check_range("query_len", query_len, 1, MAX_QUERY_LEN, "query rows of one request")
    check_range("k", k, 1, MAX_K, "selected positions of one row")
    check_range("max_len", max_len, 1, MAX_LEN, "positions are int32")
    check_rows("logits", logits)
    if num_rows % query_len:
        raise ShapeError(f"logits has {num_rows} rows; it must have a multiple of query_len {query_len}")
    check_dtype("lengths", lengths, torch.int32)
    check_contiguous("lengths", lengths)
    check_shape("lengths", lengths, (num_rows // query_len,))
    for name, tensor, shape in (("indices", indices, (num_rows, k)), ("counts", counts, (num_rows,))):
        check_dtype(name, tensor, torch.int32)
        check_shape(name, tensor, shape)
        check_contiguous(name, tensor)
    for name, tensor, line in (
        ("hist", scratch.hist, (NUM_PASSES, num_splits, NUM_BINS)),
        ("state", scratch.state, (NUM_PASSES, 2)),
        ("greater", scratch.greater, (NUM_PASSES, num_splits)),
    ):
        check_dtype(f"scratch.{name}", tensor, torch.int32)
        check_shape(f"scratch.{name}", tensor, (None, *line))
        check_contiguous(f"scratch.{name}", tensor)
        check_range(
            f"rows of scratch.{name}", tensor.shape[0], num_rows, 2**31 - 1, f"logits have {num_rows} rows"
        )
    check_same_device(
        logits=logits, lengths=lengths, indices=indices, counts=counts,
        hist=scratch.hist, state=scratch.state, greater=scratch.greater,
    )  # fmt: skip


def topk(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    *,
    query_len: int = 1,
    indices: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    scratch: TopkScratch | None = None,
    config: tuple[LaunchConfig, LaunchConfig] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the k largest logits' positions of each row to `indices` [num_rows, k] and their number to
    `counts`.

    Outputs and scratch left out are allocated, which a captured graph must not do: pass persistent ones
    there. Raises `DtypeError`, `ShapeError`, `StrideError`, `DeviceError` or `RangeError` before anything is
    launched."""
    check_shape("logits", logits, (None, None))
    check_range("k", k, 1, MAX_K, "selected positions of one row")
    histogram_config, write_config = config or topk_config(logits.shape[1], logits.device)
    num_splits = int(write_config.meta["NUM_SPLITS"])
    num_rows = logits.shape[0]
    if indices is None:
        indices = torch.empty(num_rows, k, dtype=torch.int32, device=logits.device)
    if counts is None:
        counts = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if scratch is None:
        scratch = TopkScratch.allocate(num_rows, num_splits, logits.device)
    check_topk(logits, lengths, k, query_len, indices, counts, scratch, num_splits)
    if num_rows == 0:
        return indices, counts
    grid = (num_rows, num_splits)
    work = (scratch.hist, scratch.state, scratch.greater)
    shape = (logits.stride(0), logits.shape[1])
    for radix_pass in range(NUM_PASSES):
        topk_histogram_kernel[grid](
            logits, lengths, *work, *shape, K=k, QUERY_LEN=query_len, PASS=radix_pass,
            **histogram_config.launch_arguments(),
        )  # fmt: skip
    topk_write_kernel[grid](
        logits, lengths, *work, indices, counts, *shape, K=k, K_PADDED=triton.next_power_of_2(k),
        QUERY_LEN=query_len,
        **write_config.launch_arguments(),
    )  # fmt: skip
    return indices, counts


_AOT_TYPES = {"logits_ptr": "*fp32"}


def _aot_cases() -> tuple[AotCase, ...]:
    cases: list[AotCase] = []
    for name in ("short", "medium", "long"):
        for radix_pass, query_len in ((0, 1), (1, 1), (3, 4)):
            cases.append(
                AotCase(
                    "topk_histogram", name, topk_histogram_kernel,
                    integer_types(topk_histogram_kernel, _AOT_TYPES),
                    {"K": 2048, "QUERY_LEN": query_len, "PASS": radix_pass},
                    divisible_by_16=frozenset({"logits_stride", "max_len"}),
                    shape=f"pass{radix_pass}",
                )
            )  # fmt: skip
        cases.append(
            AotCase(
                "topk_write", name, topk_write_kernel, integer_types(topk_write_kernel, _AOT_TYPES),
                {"K": 2048, "K_PADDED": 2048, "QUERY_LEN": 4},
                divisible_by_16=frozenset({"logits_stride", "max_len"}),
            )
        )  # fmt: skip
    return tuple(cases)


AOT_CASES = _aot_cases()
