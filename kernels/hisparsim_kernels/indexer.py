# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Indexer logits over paged keys: logit[t, j] = sum over heads of weight[t, h] * relu(q[t, h] . key_j).

    q         [requests, query_len, heads, 128]  e4m3 or bf16, contiguous; query_len 1 to 4
    weights   [requests, query_len, heads]       float32; query and softmax scales folded in
    pages     [num_pages, >= page bytes]         uint8 view of the pool, one page a row; see below
    table     [requests, max_pages]              int32, page of each `page_size` tokens
    lengths   [requests]                         int32, tokens that the last query sees; 0 is legal
    logits    [requests, query_len, max_tokens]  float32, contiguous

| key format | bytes a token | layout of a page of P tokens |
|---|---|---|
| e4m3 | 132 | P x 128 e4m3, then P float32 scales, one a token |
| bf16 | 256 | P x 128 bf16 |

Query i of a request (0 <= i < query_len) sees lengths - (query_len - 1 - i) tokens. Columns past that are
-inf up to the end of the block that holds the last token, and with `fill` up to `max_tokens`; without it they
are not written, since top-k takes the lengths. The grid is fixed by `max_tokens`; programs past a request's
length leave at once.

Keys are the left operand of the product (tokens are its rows), so that 128 tokens fill the tensor cores
whatever the number of heads is.
"""

from __future__ import annotations

from enum import Enum

import torch
import triton
import triton.language as tl

from hisparsim_kernels import errors
from hisparsim_kernels.arch import arch_of
from hisparsim_kernels.configs import LaunchConfig, find_config
from hisparsim_kernels.registry import AotCase

HEAD_DIM: tl.constexpr = tl.constexpr(128)
MAX_QUERY_LEN = 4
MAX_PAGE_SIZE = 1 << 20
HEADS_SUPPORTED = (16, 32, 64, 128)
LONG_TOKENS = 131072
MAX_GRID_Y = 65535


class KeyFormat(Enum):
    """How one indexer key is stored."""

    E4M3 = "e4m3"
    BF16 = "bf16"

    @property
    def token_bytes(self) -> int:
        """Bytes a token and layer."""
        return 132 if self is KeyFormat.E4M3 else 256

    @property
    def torch_dtype(self) -> torch.dtype:
        """Element type of queries and keys."""
        return torch.float8_e4m3fn if self is KeyFormat.E4M3 else torch.bfloat16


@triton.jit
def _logits_kernel(
    q_ptr,
    weights_ptr,
    pages_ptr,  # uint8
    table_ptr,
    lengths_ptr,
    logits_ptr,
    PAGE_STRIDE: tl.constexpr,  # bytes
    MAX_PAGES: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    HEADS: tl.constexpr,
    FP8: tl.constexpr,
    FILL: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * (BLOCK_KEYS * BLOCKS)
    length = tl.minimum(tl.load(lengths_ptr + request), MAX_TOKENS)
    last = tl.minimum(first + BLOCK_KEYS * BLOCKS, MAX_TOKENS)
    if not FILL:
        last = tl.minimum(last, length)
    dim = tl.arange(0, HEAD_DIM)
    head = tl.arange(0, HEADS)
    for start in range(first, last, BLOCK_KEYS):
        token = start + tl.arange(0, BLOCK_KEYS)
        seen = token < length
        page = tl.load(table_ptr + request * MAX_PAGES + token // PAGE_SIZE, mask=seen, other=0).to(tl.int64)
        within = token % PAGE_SIZE
        page_at = pages_ptr + page * PAGE_STRIDE
        if FP8:
            keys_at = (page_at + within * HEAD_DIM).to(tl.pointer_type(tl.float8e4nv))
            scale_at = (page_at + PAGE_SIZE * HEAD_DIM + within * 4).to(tl.pointer_type(tl.float32))
            scale = tl.load(scale_at, mask=seen, other=0.0)
        else:
            keys_at = (page_at + within * (2 * HEAD_DIM)).to(tl.pointer_type(tl.bfloat16))
        keys = tl.load(keys_at[:, None] + dim[None, :], mask=seen[:, None], other=0.0)
        for i in tl.static_range(QUERY_LEN):
            query = request * QUERY_LEN + i
            q = tl.load(q_ptr + (query * HEADS + head)[:, None] * HEAD_DIM + dim[None, :])
            weight = tl.load(weights_ptr + query * HEADS + head)
            score = tl.dot(keys, tl.trans(q))
            logit = tl.sum(tl.maximum(score, 0.0) * weight[None, :], 1)
            if FP8:
                logit = logit * scale
            logit = tl.where(token < length - (QUERY_LEN - 1 - i), logit, float("-inf"))
            tl.store(logits_ptr + query * MAX_TOKENS + token, logit, mask=token < MAX_TOKENS)


def indexer_config(key_format: KeyFormat, max_tokens: int, arch: str) -> LaunchConfig:
    """The default configuration: programs of 512 keys, of 2,048 where the capacity passes 131,072 tokens."""
    return find_config(
        "indexer", "indexer_logits", key_format.value + ("-long" if max_tokens > LONG_TOKENS else ""), arch
    )


def _check_pages(pages: torch.Tensor, page_bytes: int) -> None:
    errors.check_dtype("pages", pages, torch.uint8)
    errors.check_shape("pages", pages, (None, None))
    if pages.shape[1] < page_bytes:
        raise errors.ShapeError(f"pages has {pages.shape[1]} bytes a page; this page size needs {page_bytes}")
    if pages.stride(1) != 1 or pages.stride(0) % 16 or pages.storage_offset() % 16:
        raise errors.StrideError(
            f"pages has strides {pages.stride()} and offset {pages.storage_offset()}; "
            "bytes must be dense, page stride and offset multiples of 16 (key loads are 16 bytes wide)"
        )


@triton.jit(do_not_specialize=["num_tokens"])
def _write_keys_kernel(
    keys_ptr,
    slots_ptr,
    pages_ptr,  # uint8
    num_tokens,
    PAGE_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
    live = slot >= 0
    dim = tl.arange(0, HEAD_DIM)[None, :]
    keys = tl.load(keys_ptr + token[:, None] * HEAD_DIM + dim, mask=live[:, None], other=0.0)
    within = slot % PAGE_SIZE
    page_at = pages_ptr + slot // PAGE_SIZE * PAGE_STRIDE
    if FP8:
        wide = keys.to(tl.float32)
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(wide), 1), 1e-4), 448.0)
        codes = tl.div_rn(wide, tl.broadcast_to(scale[:, None], wide.shape)).to(tl.float8e4nv)
        keys_at = (page_at + within * HEAD_DIM).to(tl.pointer_type(tl.float8e4nv))
        tl.store(keys_at[:, None] + dim, codes, mask=live[:, None])
        scale_at = (page_at + PAGE_SIZE * HEAD_DIM + within * 4).to(tl.pointer_type(tl.float32))
        tl.store(scale_at, scale, mask=live)
    else:
        keys_at = (page_at + within * (2 * HEAD_DIM)).to(tl.pointer_type(tl.bfloat16))
        tl.store(keys_at[:, None] + dim, keys.to(tl.bfloat16), mask=live[:, None])


def write_index_keys(
    keys: torch.Tensor, slots: torch.Tensor, pages: torch.Tensor, *, page_size: int, key_format: KeyFormat
) -> None:
    """Enqueue storing of new tokens' keys [tokens, 128] (bf16 or float32) into their pages.

    `slots` [tokens] int32 is page x page_size + place in the page; -1 writes nothing. An e4m3 key's scale is
    its largest magnitude / 448, at least 1e-4 / 448. Raises a `KernelInputError` before anything is enqueued.
    """
    errors.check_dtype("keys", keys, torch.bfloat16, torch.float32)
    errors.check_shape("keys", keys, (None, HEAD_DIM.value))
    errors.check_dtype("slots", slots, torch.int32)
    errors.check_shape("slots", slots, (keys.shape[0],))
    errors.check_contiguous("keys", keys)
    errors.check_contiguous("slots", slots)
    errors.check_range("page_size", page_size, 1, MAX_PAGE_SIZE, "a page holds at least one token")
    _check_pages(pages, page_size * key_format.token_bytes)
    device = errors.check_same_device(keys=keys, slots=slots, pages=pages)
    if keys.shape[0] == 0:
        return
    config = find_config("indexer", "write_index_keys", key_format.value, arch_of(device))
    _write_keys_kernel[(triton.cdiv(keys.shape[0], config.meta["BLOCK_TOKENS"]),)](
        keys,
        slots,
        pages,
        keys.shape[0],
        PAGE_STRIDE=pages.stride(0),
        PAGE_SIZE=page_size,
        FP8=key_format is KeyFormat.E4M3,
        **config.launch_arguments(),
    )


def indexer_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    logits: torch.Tensor,
    *,
    page_size: int,
    fill: bool = False,
    config: LaunchConfig | None = None,
) -> None:
    """Enqueue the logits of every query over its request's keys into `logits`; see the module for shapes.

    `pages` may be a strided view: the layer's part of blocks that hold several layers. Raises a
    `KernelInputError` before anything is enqueued.
    """
    errors.check_dtype("q", q, torch.float8_e4m3fn, torch.bfloat16)
    key_format = KeyFormat.E4M3 if q.dtype == torch.float8_e4m3fn else KeyFormat.BF16
    errors.check_shape("q", q, (None, None, None, HEAD_DIM.value))
    requests, query_len, heads, _ = q.shape
    errors.check_range(
        "query_len", query_len, 1, MAX_QUERY_LEN, "one token and up to three drafts are verified at once"
    )
    if heads not in HEADS_SUPPORTED:
        raise errors.RangeError(f"heads is {heads}; the indexer kernel serves {HEADS_SUPPORTED}")
    errors.check_range("page_size", page_size, 1, MAX_PAGE_SIZE, "a page holds at least one token")
    errors.check_dtype("weights", weights, torch.float32)
    errors.check_shape("weights", weights, (requests, query_len, heads))
    _check_pages(pages, page_size * key_format.token_bytes)
    errors.check_dtype("table", table, torch.int32)
    errors.check_shape("table", table, (requests, None))
    errors.check_dtype("lengths", lengths, torch.int32)
    errors.check_shape("lengths", lengths, (requests,))
    errors.check_dtype("logits", logits, torch.float32)
    errors.check_shape("logits", logits, (requests, query_len, None))
    for name, tensor in {
        "q": q,
        "weights": weights,
        "table": table,
        "lengths": lengths,
        "logits": logits,
    }.items():
        errors.check_contiguous(name, tensor)
    device = errors.check_same_device(
        q=q, weights=weights, pages=pages, table=table, lengths=lengths, logits=logits
    )
    max_tokens, max_pages = logits.shape[2], table.shape[1]
    if max_pages * page_size < max_tokens:
        raise errors.ShapeError(
            f"table has {max_pages} pages of {page_size} tokens; logits has {max_tokens} columns"
        )
    if requests == 0 or max_tokens == 0:
        return
    if config is None:
        config = indexer_config(key_format, max_tokens, arch_of(device))
    keys_a_program = config.meta["BLOCK_KEYS"] * config.meta["BLOCKS"]
    errors.check_range(
        "columns of logits", max_tokens, 1, MAX_GRID_Y * keys_a_program, f"{keys_a_program} keys a program"
    )
    _logits_kernel[(requests, triton.cdiv(max_tokens, keys_a_program))](
        q,
        weights,
        pages,
        table,
        lengths,
        logits,
        PAGE_STRIDE=pages.stride(0),
        MAX_PAGES=max_pages,
        MAX_TOKENS=max_tokens,
        PAGE_SIZE=page_size,
        QUERY_LEN=query_len,
        HEADS=heads,
        FP8=key_format is KeyFormat.E4M3,
        FILL=fill,
        **config.launch_arguments(),
    )


def _aot_cases() -> tuple[AotCase, ...]:
    common = {"weights_ptr": "*fp32", "pages_ptr": "*u8", "table_ptr": "*i32", "lengths_ptr": "*i32"}
    common["logits_ptr"] = "*fp32"
    cases = []
    for key_format in KeyFormat:
        fp8 = key_format is KeyFormat.E4M3
        types = common | {"q_ptr": "*fp8e4nv" if fp8 else "*bf16"}
        layout: dict[str, int | bool] = {"PAGE_STRIDE": 209920, "PAGE_SIZE": 64, "FP8": fp8}
        for heads, query_len, tokens in ((32, 1, 131072), (32, 4, 131072), (64, 1, 131072), (64, 4, 1 << 20)):
            sizes = {"HEADS": heads, "QUERY_LEN": query_len, "MAX_TOKENS": tokens, "MAX_PAGES": tokens // 64}
            config = key_format.value + ("-long" if tokens > LONG_TOKENS else "")
            label = f"h{heads}" + (f" mtp{query_len - 1}" if query_len > 1 else "")
            constants = layout | sizes | {"FILL": False}
            cases.append(AotCase("indexer_logits", config, _logits_kernel, types, constants, shape=label))
        write_types = {"keys_ptr": "*bf16", "slots_ptr": "*i32", "pages_ptr": "*u8", "num_tokens": "i32"}
        cases.append(AotCase("write_index_keys", key_format.value, _write_keys_kernel, write_types, layout))
    return tuple(cases)


AOT_CASES = _aot_cases()
