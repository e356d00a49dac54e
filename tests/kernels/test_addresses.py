"""Rows past 2^31: every kernel addresses them in 64 bits, shown on pools that are never committed."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

# A pool of this size passes 2^31 bytes (and, for attention, 2^31 elements) without using memory: pages that
# nobody writes are never committed. Each child uses the last rows only. A 32-bit product of row and width
# wraps.
OVERFLOW_PRELUDE = """
import mmap, torch
from hisparsim_kernels.interpreter import activate
activate()
def lazy(*shape):  # bytes that exist once they are touched (MAP_NORESERVE)
    memory = mmap.mmap(-1, shape[0] * shape[1], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    return torch.frombuffer(memory, dtype=torch.uint8).view(shape)
ROWS = 4_000_000
far = torch.arange(ROWS - 64, ROWS, dtype=torch.int32)
generator = torch.Generator().manual_seed(1)
latent, rope = torch.randn(64, 512, generator=generator), torch.randn(64, 64, generator=generator)
"""


OVERFLOW_CHILDREN = {
    "rows": """
from hisparsim_kernels.rows import read_rows, write_rows
pool = torch.empty(ROWS, 576, dtype=torch.bfloat16)
write_rows(latent, rope, far, pool)
out = torch.empty(64, 576, dtype=torch.bfloat16)
read_rows(pool, far, out)
assert torch.equal(pool[-64:, :512], latent.bfloat16()) and torch.equal(out, pool[-64:])
""",
    "mla_decode": """
from hisparsim_kernels.mla_decode import DecodeScratch, sparse_mla_decode
from hisparsim_kernels.references.mla import sparse_mla
pool = torch.empty(ROWS, 576, dtype=torch.bfloat16)
pool[-64:, :512], pool[-64:, 512:] = latent.bfloat16(), rope.bfloat16()
q, slots = torch.randn(1, 8, 576).bfloat16(), far[None].contiguous()
counts = torch.tensor([64], dtype=torch.int32)
out, lse = torch.empty(1, 8, 512), torch.empty(1, 8)
sparse_mla_decode(q, pool, slots, counts, scale=0.05, out=out, lse=lse,
                  scratch=DecodeScratch.create(1, 8, 2, "cpu"), num_splits=2)
assert (out.double() - sparse_mla(q, pool, slots, counts, 0.05)[0]).abs().max() < 1e-2
""",
    "mla_prefill": """
from hisparsim_kernels.mla_prefill import sparse_mla_prefill
from hisparsim_kernels.references.mla import sparse_mla
pool = torch.empty(2 * ROWS, 656, dtype=torch.uint8)
from hisparsim_kernels.references.rows import pack
from hisparsim_kernels.row_format import RowFormat
pool[-64:] = pack(latent, rope, RowFormat.FP8_DS_MLA)
q, slots = torch.randn(1, 8, 576).bfloat16(), (far + ROWS)[None].contiguous()
counts = torch.tensor([64], dtype=torch.int32)
out, lse = torch.empty(1, 8, 512), torch.empty(1, 8)
sparse_mla_prefill(q, pool, slots, counts, scale=0.05, out=out, lse=lse)
assert (out.double() - sparse_mla(q, pool, slots, counts, 0.05)[0]).abs().max() < 1e-2
""",
    "indexer": """
from hisparsim_kernels.hot_state import HostGenerations, HotStates, renew_host_blocks, reset_requests
from hisparsim_kernels.indexer import KeyFormat, indexer_logits, write_index_keys
from hisparsim_kernels.references.indexer import indexer_logits as reference
pages = torch.empty(20_000, 209_920, dtype=torch.uint8)
table = torch.tensor([[19_999, 19_998]], dtype=torch.int32)
slots = (table.repeat_interleave(64, 1)[0] * 64 + torch.arange(128).int() % 64).int()
write_index_keys(torch.randn(128, 128), slots, pages, page_size=64, key_format=KeyFormat.E4M3)
q, weights = torch.randn(1, 1, 32, 128).to(torch.float8_e4m3fn), torch.rand(1, 1, 32)
lengths, logits = torch.tensor([128], dtype=torch.int32), torch.empty(1, 1, 128)
indexer_logits(q, weights, pages, table, lengths, logits, page_size=64)
want = reference(q, weights, pages, table, lengths, 128, 64)
assert (logits.double() - want).abs().max() < 1e-3 * want.abs().max()
""",
    "mirror-and-gather": """
from hisparsim_kernels.gather import gather_rows
from hisparsim_kernels.mirror import mirror_rows
from hisparsim_kernels.page_layout import PageLayout
layout = PageLayout.of_groups(656, (4,))
blocks = 55_000  # these kernels count words of four bytes: more than 2^31 of them
pool, host = lazy(blocks, layout.block_bytes), lazy(blocks, layout.host_block_bytes)
pool[blocks - 1].random_(0, 256)
rows = ((blocks - 1) * layout.rows_per_block + torch.arange(64)).int()
host_rows = ((blocks - 1) * 64 + torch.arange(64)).int()
hot = rows - layout.rows_per_block
count = torch.tensor([64], dtype=torch.int32)
mirror_rows(pool, host, rows, host_rows, count, layout, group=0)
gather_rows(host, pool, host_rows, hot, count, layout, group=0)
used = 4 * layout.page_bytes
assert torch.equal(host[blocks - 1, :used], pool[blocks - 1, :used])
assert torch.equal(pool[blocks - 2, :used], pool[blocks - 1, :used])
""",
    "pages": """
from hisparsim_kernels.page_layout import GroupTables, PageLayout
from hisparsim_kernels.pages import Direction, copy_pages, stage_pages
layout = PageLayout.of_groups(656, (4,))
blocks = 55_000
pool, host = lazy(blocks, layout.block_bytes), lazy(blocks, layout.host_block_bytes)
pool[blocks - 1].random_(0, 256)
i32 = lambda *values: torch.tensor(values, dtype=torch.int32)
tables, zero, one = GroupTables.of(layout, "cpu"), i32(0), i32(1)
def copy(block, host_block, direction):
    copy_pages(host, pool, i32(block), i32(host_block), zero, one, layout, tables, direction)
copy(blocks - 1, blocks - 1, Direction.TO_HOST)
copy(blocks - 2, blocks - 1, Direction.TO_GPU)
used, page = 4 * layout.page_bytes, layout.page_bytes
assert torch.equal(host[blocks - 1, :used], pool[blocks - 1, :used])
assert torch.equal(pool[blocks - 2, :used], pool[blocks - 1, :used])
staged = torch.zeros(128, 656, dtype=torch.uint8)
stage_pages(host, pool, i32(-1, blocks - 1), i32(blocks - 1, -1), staged, layout, group=0, layer_in_group=3)
want = pool[blocks - 1, 3 * page : 4 * page].view(64, 656)
assert torch.equal(staged[:64], want) and torch.equal(staged[64:], want)
""",
    "grouped_gemm": """
from hisparsim_kernels.grouped_gemm import grouped_gemm
weight = torch.empty(300, 4096, 2048, dtype=torch.bfloat16)
weight[299] = torch.randn(4096, 2048).bfloat16()
x = torch.randn(2, 2048).bfloat16()
offsets = torch.tensor([0] * 300 + [2], dtype=torch.int32)
out = torch.empty(2, 4096)
grouped_gemm(x, weight, offsets, out)
want = x.double() @ weight[299].double().T
assert (out.double() - want).norm() < 1e-4 * want.norm()
""",
}


OVERFLOW_COUNTEREXAMPLE = """
import triton, triton.language as tl
@triton.jit
def narrow(pool_ptr, rows_ptr, out_ptr):
    row = tl.load(rows_ptr + tl.arange(0, 64))
    at = row[:, None] * 576 + tl.arange(0, 64)[None, :]
    tl.store(out_ptr + tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :], tl.load(pool_ptr + at))
pool = torch.empty(ROWS, 576, dtype=torch.bfloat16)
pool[-64:, :64] = rope.bfloat16()
out = torch.zeros(64, 64, dtype=torch.bfloat16)
narrow[(1,)](pool, far, out)
assert torch.equal(out, rope.bfloat16())
"""


def run_child(source: str, directory: Any) -> subprocess.CompletedProcess[str]:
    script = directory / "child.py"
    script.write_text(OVERFLOW_PRELUDE + source)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    return subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("name", OVERFLOW_CHILDREN)
def test_rows_past_two_to_the_31_are_addressed_in_64_bits(name: str, tmp_path: Any) -> None:
    done = run_child(OVERFLOW_CHILDREN[name], tmp_path)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr[-2000:]}"


def test_the_overflow_check_does_catch_a_kernel_with_32_bit_offsets(tmp_path: Any) -> None:
    assert run_child(OVERFLOW_COUNTEREXAMPLE, tmp_path).returncode != 0
