"""Kinds of bugs that public servers and kernels have had, shown to be absent as far as a CPU can show it.

docs/kernels.md has the table: kind of bug, test, or why a GPU is needed.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton.runtime.interpreter as stock_interpreter
from torch.utils._python_dispatch import TorchDispatchMode

from hisparsim_kernels.gather import gather_rows
from hisparsim_kernels.grouped_gemm import grouped_gemm
from hisparsim_kernels.hot_state import HostGenerations, HotStates, renew_host_blocks, reset_requests
from hisparsim_kernels.indexer import KeyFormat, indexer_logits, write_index_keys
from hisparsim_kernels.interpreter import permuted_programs
from hisparsim_kernels.mirror import mirror_rows
from hisparsim_kernels.mla_decode import DecodeScratch, sparse_mla_decode
from hisparsim_kernels.mla_prefill import sparse_mla_prefill
from hisparsim_kernels.page_layout import GroupTables, PageLayout
from hisparsim_kernels.pages import Direction, copy_pages, stage_pages
from hisparsim_kernels.resolve import resolve
from hisparsim_kernels.resolve_buffers import ResidencyTables, ResolvePlan, ResolveScratch
from hisparsim_kernels.rows import read_rows, write_rows
from hisparsim_kernels.topk import TopkScratch, topk, topk_config

LAYOUT = PageLayout.of_groups(1152, (2,), page_rows=16)

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


class Call:
    """One launch on persistent tensors: `run` enqueues it, `values` change, `outputs` are compared."""

    def __init__(
        self, run: Callable[[], None], values: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]
    ) -> None:
        self.run, self.values, self.outputs = run, values, outputs


def decode_call(kind: str) -> Call:
    generator = torch.Generator().manual_seed(3)
    pool = torch.randn(200, 576, generator=generator).bfloat16()
    q = torch.randn(3, 8, 576, generator=generator).bfloat16()
    slots = torch.randint(-1, 200, (3, 96), generator=generator).int()
    counts = torch.tensor([96, 30, 0], dtype=torch.int32)
    out, lse = torch.empty(3, 8, 512), torch.empty(3, 8)
    scale, scratch = 1 / math.sqrt(256), DecodeScratch.create(3, 8, 4, "cpu")

    def run() -> None:
        if kind == "decode":
            sparse_mla_decode(
                q, pool, slots, counts, scale=scale, out=out, lse=lse, scratch=scratch, num_splits=4
            )
        else:
            sparse_mla_prefill(q, pool, slots, counts, scale=scale, out=out, lse=lse)

    return Call(run, {"counts": counts, "slots": slots}, {"out": out, "lse": lse})


def indexer_call() -> Call:
    generator = torch.Generator().manual_seed(4)
    pages = torch.zeros(9, 64 * 132, dtype=torch.uint8)
    keys = torch.randn(9 * 64, 128, generator=generator)
    write_index_keys(keys, torch.arange(9 * 64).int(), pages, page_size=64, key_format=KeyFormat.E4M3)
    q = torch.randn(3, 2, 32, 128, generator=generator).to(torch.float8_e4m3fn)
    weights = torch.randn(3, 2, 32, generator=generator)
    table = torch.randperm(9, generator=generator).int().reshape(3, 3).contiguous()
    lengths = torch.tensor([192, 70, 0], dtype=torch.int32)
    logits = torch.empty(3, 2, 192)

    def run() -> None:
        indexer_logits(q, weights, pages, table, lengths, logits, page_size=64, fill=True)

    return Call(run, {"lengths": lengths}, {"logits": logits})


def topk_call() -> Call:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(3, 512, generator=generator)
    lengths = torch.tensor([512, 40, 0], dtype=torch.int32)
    indices, counts = torch.empty(3, 64, dtype=torch.int32), torch.empty(3, dtype=torch.int32)
    splits = int(topk_config(512, torch.device("cpu"))[1].meta["NUM_SPLITS"])
    scratch = TopkScratch.allocate(3, splits, "cpu")

    def run() -> None:
        topk(logits, lengths, 64, indices=indices, counts=counts, scratch=scratch)

    return Call(run, {"lengths": lengths}, {"indices": indices, "counts": counts})


def gemm_call() -> Call:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(40, 256, generator=generator).bfloat16()
    weight = torch.randn(3, 128, 256, generator=generator).bfloat16()
    offsets = torch.tensor([0, 7, 7, 33], dtype=torch.int32)
    out = torch.empty(40, 128)
    return Call(lambda: grouped_gemm(x, weight, offsets, out), {"offsets": offsets}, {"out": out})


def rows_call() -> Call:
    generator = torch.Generator().manual_seed(7)
    latent, rope = torch.randn(9, 512, generator=generator), torch.randn(9, 64, generator=generator)
    slots = torch.tensor([3, -1, 5, 0, 8, -1, 9, 2, 1], dtype=torch.int32)
    pool, back = torch.zeros(10, 576, dtype=torch.bfloat16), torch.empty(9, 576, dtype=torch.bfloat16)

    def run() -> None:
        write_rows(latent, rope, slots, pool)
        read_rows(pool, slots, back)

    return Call(run, {"slots": slots}, {"back": back})


def transfer_call() -> Call:
    generator = torch.Generator().manual_seed(8)
    pool = torch.randint(0, 256, (4, LAYOUT.block_bytes), dtype=torch.uint8, generator=generator)
    host = torch.zeros(3, LAYOUT.host_block_bytes, dtype=torch.uint8)
    rows = (LAYOUT.rows_per_block + torch.arange(16)).int()
    host_rows = torch.randperm(48, generator=generator)[:16].int()
    hot = (3 * LAYOUT.rows_per_block + torch.arange(16)).int()
    count = torch.tensor([16], dtype=torch.int32)

    def run() -> None:
        mirror_rows(pool, host, rows, host_rows, count, LAYOUT, group=0)
        gather_rows(host, pool, host_rows, hot, count, LAYOUT, group=0)

    return Call(run, {"count": count, "host_rows": host_rows}, {})


CALLS: dict[str, Callable[[], Call]] = {
    "mla_decode": lambda: decode_call("decode"),
    "mla_prefill": lambda: decode_call("prefill"),
    "indexer": indexer_call,
    "topk": topk_call,
    "grouped_gemm": gemm_call,
    "rows": rows_call,
    "mirror-and-gather": transfer_call,
}
EACH_CALL = pytest.mark.parametrize("name", CALLS)


def resolve_call() -> Call:
    tables = ResidencyTables(
        torch.full((2, 6), -1, dtype=torch.int32), torch.arange(12, dtype=torch.int32).view(2, 6),
        torch.arange(8, dtype=torch.int32).view(2, 4), torch.zeros(20, dtype=torch.int32),
        rows_per_block=8, page_rows=4,
    )  # fmt: skip
    states = HotStates.allocate(1, 2, 16, "cpu")
    state, plan = states.group(0), ResolvePlan.allocate(2, 2, 8, "cpu")
    scratch = ResolveScratch.allocate(2, 2, 8, 16, 24, "cpu")
    selection, lengths = torch.arange(32, dtype=torch.int32).view(4, 8) % 24, torch.full((2,), 24).int()
    slots = torch.tensor([1, 0], dtype=torch.int32)
    hosts, blocks = (
        HostGenerations(tables.host_generations, torch.zeros(1).int()),
        torch.tensor([3, -1]).int(),
    )

    def run() -> None:
        reset_requests(states, slots)
        renew_host_blocks(hosts, blocks)
        resolve(selection, lengths, slots, tables, state, plan, scratch, query_len=2)

    return Call(run, {"selection": selection, "lengths": lengths, "slots": slots, "blocks": blocks}, {})


def pages_call() -> Call:
    generator = torch.Generator().manual_seed(8)
    pool = torch.randint(0, 256, (4, LAYOUT.block_bytes), dtype=torch.uint8, generator=generator)
    host = torch.zeros(3, LAYOUT.host_block_bytes, dtype=torch.uint8)
    blocks, host_blocks = torch.tensor([3, 0, 2]).int(), torch.tensor([0, 2, -1]).int()
    groups, count = torch.zeros(3, dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    tables = GroupTables.of(LAYOUT, "cpu")
    staged = torch.zeros(48, 1152, dtype=torch.uint8)

    def run() -> None:
        for direction in Direction:
            copy_pages(host, pool, blocks, host_blocks, groups, count, LAYOUT, tables, direction)
        stage_pages(host, pool, blocks, host_blocks, staged, LAYOUT, group=0, layer_in_group=1)

    return Call(run, {"blocks": blocks, "host_blocks": host_blocks, "count": count}, {})


# Host code only: `resolve` changes its own state, so a second run is another step; `test_resolve` replays it.
HOST_CALLS = CALLS | {"resolve": resolve_call, "pages": pages_call}
EACH_HOST_CALL = pytest.mark.parametrize("name", HOST_CALLS)


def poison(call: Call) -> None:
    for output in call.outputs.values():
        output.fill_(float("nan") if output.is_floating_point() else -77)


@EACH_CALL
def test_a_replay_with_changed_values_writes_every_output_anew(name: str) -> None:
    """Same tensors, other values, poisoned outputs: the result is that of a fresh run."""
    call, fresh = CALLS[name](), CALLS[name]()
    call.run()
    for changed in (call, fresh):
        for value in changed.values.values():
            value.copy_(value.flip(0) if value.numel() > 1 else value // 2)
        if name == "grouped_gemm":
            changed.values["offsets"].copy_(torch.tensor([0, 0, 20, 21]))
        poison(changed)
        changed.run()
    for key, output in call.outputs.items():
        assert torch.equal(output, fresh.outputs[key]), key
        assert not (output.isnan().any() if output.is_floating_point() else (output == -77).any()), key


@EACH_CALL
@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_of_programs_does_not_matter(name: str, seed: int) -> None:
    ascending, permuted = CALLS[name](), CALLS[name]()
    ascending.run()
    with permuted_programs(seed):
        permuted.run()
    for key, output in ascending.outputs.items():
        assert torch.equal(output, permuted.outputs[key]), key


class Recorder(TorchDispatchMode):
    """Names every torch operation of the host code around a launch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Replace kernels by a record of grid, sizes and addresses, so that host code alone runs."""
    seen: list[tuple[Any, ...]] = []

    def describe(value: Any) -> Any:
        return value.data_ptr() if isinstance(value, torch.Tensor) else value

    def record(self: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        named = tuple((key, describe(value)) for key, value in sorted(keywords.items()))
        seen.append((self.fn.__name__, grid, tuple(describe(value) for value in arguments), named))

    monkeypatch.setattr(stock_interpreter.InterpretedFunction, "run", record)
    yield seen


@EACH_HOST_CALL
def test_host_code_allocates_nothing_and_never_waits_for_the_device(
    name: str, launches: list[tuple[Any, ...]]
) -> None:
    call = HOST_CALLS[name]()
    launches.clear()
    with Recorder() as recorder:
        call.run()
    allowed = {"aten::view.dtype", "aten::view", "aten::detach", "aten::alias"}
    assert launches and set(recorder.names) <= allowed, sorted(set(recorder.names) - allowed)


@EACH_HOST_CALL
def test_grids_sizes_and_addresses_are_the_same_whatever_the_values_are(
    name: str, launches: list[tuple[Any, ...]]
) -> None:
    call = HOST_CALLS[name]()
    launches.clear()
    call.run()
    first = list(launches)
    for value in call.values.values():
        value.zero_()
    launches.clear()
    call.run()
    assert launches == first


def test_the_number_of_rows_is_no_compile_time_constant_of_any_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch or chunk of another size must not compile again: constants stay, and an integer that changes is
    not specialised (1 and multiples of 16 would be)."""
    seen: list[tuple[Any, ...]] = []

    def record(self: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        seen.append((self, arguments, constants))

    monkeypatch.setattr(stock_interpreter.InterpretedFunction, "run", record)
    weight = torch.zeros(3, 128, 256).bfloat16()
    pool, scratch = torch.zeros(50, 576).bfloat16(), DecodeScratch.create(64, 8, 4, "cpu")

    def run(rows: int) -> None:
        ints = torch.zeros(rows, dtype=torch.int32)
        x, out = torch.zeros(rows, 256).bfloat16(), torch.empty(rows, 128)
        grouped_gemm(x, weight, torch.zeros(4, dtype=torch.int32), out)
        write_rows(torch.zeros(rows, 512), torch.zeros(rows, 64), ints, pool)
        read_rows(pool, ints, torch.empty(rows, 576).bfloat16())
        pages = torch.zeros(9, 64 * 132, dtype=torch.uint8)
        write_index_keys(torch.zeros(rows, 128), ints, pages, page_size=64, key_format=KeyFormat.E4M3)
        q, slots = torch.zeros(rows, 8, 576).bfloat16(), torch.zeros(rows, 64, dtype=torch.int32)
        out, lse = torch.empty(rows, 8, 512), torch.empty(rows, 8)
        sparse_mla_prefill(q, pool, slots, ints, scale=0.1, out=out, lse=lse)
        sparse_mla_decode(q, pool, slots, ints, scale=0.1, out=out, lse=lse, scratch=scratch, num_splits=4)
        host = torch.zeros(3, LAYOUT.host_block_bytes, dtype=torch.uint8)
        blocks = torch.zeros(3, LAYOUT.block_bytes, dtype=torch.uint8)
        staged = torch.zeros(rows * LAYOUT.page_rows, 1152, dtype=torch.uint8)
        stage_pages(host, blocks, ints, ints, staged, LAYOUT, group=0, layer_in_group=1)

    for rows in (16, 1, 37):
        run(rows)
    launches = len(seen) // 3
    for first, *others in zip(*(seen[i * launches : (i + 1) * launches] for i in range(3)), strict=True):
        kernel, arguments, constants = first
        unspecialised = kernel.kwargs["do_not_specialize"] or ()
        for other_kernel, other_arguments, other_constants in others:
            assert other_kernel is kernel and other_constants == constants, kernel.fn.__name__
            for name, one, other in zip(kernel.arg_names, arguments, other_arguments, strict=False):
                if isinstance(one, int) and one != other:
                    assert name in unspecialised, f"{name} of {kernel.fn.__name__}"


GUARD = 64


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A contiguous tensor inside a larger buffer filled with a pattern, and the buffer."""
    count = math.prod(shape)
    buffer = torch.full((count + 2 * GUARD,), 77, dtype=dtype)
    return buffer[GUARD : GUARD + count].view(shape), buffer


def test_nothing_is_written_around_the_outputs_of_any_kernel() -> None:
    generator = torch.Generator().manual_seed(9)
    pool = torch.randn(50, 576, generator=generator).bfloat16()
    q = torch.randn(3, 5, 576, generator=generator).bfloat16()
    slots, counts = torch.randint(-1, 50, (3, 37), generator=generator).int(), torch.tensor([37, 1, 0]).int()
    buffers = []

    def output(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        inner, buffer = guarded(shape, dtype)
        buffers.append(buffer)
        return inner

    scratch = DecodeScratch(output(3 * 3 * 5 * 512), output(2 * 3 * 3 * 5))
    sparse_mla_decode(
        q,
        pool,
        slots,
        counts,
        scale=0.1,
        out=output(3, 5, 512),
        lse=output(3, 5),
        scratch=scratch,
        num_splits=3,
    )
    sparse_mla_prefill(q, pool, slots, counts, scale=0.1, out=output(3, 5, 512), lse=output(3, 5))
    x, weight = torch.randn(7, 128).bfloat16(), torch.randn(2, 48, 128).bfloat16()
    grouped_gemm(x, weight, torch.tensor([0, 2, 6]).int(), output(7, 48))
    index_pages = output(3, 61 * 256, dtype=torch.uint8)
    index_slots = torch.tensor([0, 60, 61, 182]).int()
    keys = torch.randn(4, 128)
    write_index_keys(keys, index_slots, index_pages, page_size=61, key_format=KeyFormat.BF16)
    index_q = torch.randn(1, 3, 16, 128).bfloat16()
    table = torch.tensor([[2, 0, 1]]).int()
    lengths = torch.tensor([150]).int()
    logits = output(1, 3, 177)
    indexer_logits(
        index_q, torch.randn(1, 3, 16), index_pages, table, lengths, logits, page_size=61, fill=True
    )
    rows = output(11, 576, dtype=torch.bfloat16)
    write_rows(torch.randn(3, 512), torch.randn(3, 64), torch.tensor([0, 10, -1]).int(), rows)
    read_rows(rows, torch.tensor([10, -1, 0]).int(), output(3, 576, dtype=torch.bfloat16))
    for buffer in buffers:
        assert bool((buffer[:GUARD] == 77).all()) and bool((buffer[-GUARD:] == 77).all())
