"""A decode step through all kernels: the answer's bits never depend on where the rows are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from hisparsim_kernels.compare import assert_attention_close
from hisparsim_kernels.gather import gather_rows
from hisparsim_kernels.hot_state import HostGenerations, HotStates
from hisparsim_kernels.indexer import KeyFormat, indexer_logits, write_index_keys
from hisparsim_kernels.mirror import mirror_rows
from hisparsim_kernels.mla_decode import DecodeScratch, sparse_mla_decode
from hisparsim_kernels.page_layout import PageLayout
from hisparsim_kernels.references import indexer as indexer_reference
from hisparsim_kernels.references import mla as mla_reference
from hisparsim_kernels.resolve import resolve
from hisparsim_kernels.resolve_buffers import ResidencyTables, ResolvePlan, ResolveScratch
from hisparsim_kernels.row_format import RowFormat
from hisparsim_kernels.rows import write_rows
from hisparsim_kernels.topk import topk

PAGE, PAGES, TOP_K, HEADS, LAYERS, QUERY_LEN = 16, 8, 48, 8, 2, 2
TOKENS = PAGE * PAGES - 5
HOT_ROWS = QUERY_LEN * TOP_K + 16
SCALE = 1 / math.sqrt(256)


@dataclass(frozen=True)
class Content:
    """What a request's cache holds, wherever it lies: rows of each layer and indexer keys, by position."""

    latent: torch.Tensor
    rope: torch.Tensor
    keys: torch.Tensor
    q: torch.Tensor
    index_q: torch.Tensor
    index_weights: torch.Tensor


def make_content() -> Content:
    generator = torch.Generator().manual_seed(31)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return Content(
        latent=randn(LAYERS, TOKENS, 512) / 2,
        rope=randn(LAYERS, TOKENS, 64),
        keys=randn(TOKENS, 128),
        q=(randn(LAYERS, QUERY_LEN, HEADS, 576) / 2).bfloat16(),
        index_q=randn(1, QUERY_LEN, 32, 128).to(torch.float8_e4m3fn),
        index_weights=randn(1, QUERY_LEN, 32).abs(),
    )


def decode(
    content: Content, row_format: RowFormat, resident_pages: set[int], steps: int = 1
) -> list[torch.Tensor]:
    """Outputs of every layer with the given pages resident and the rest read through the hot buffer."""
    layout = PageLayout.of_groups(row_format.row_bytes, (LAYERS,), page_rows=PAGE)
    hot_pages = -(-HOT_ROWS // PAGE)
    pool = torch.full((2 + 2 * PAGES + hot_pages, layout.block_bytes), 0xFF, dtype=torch.uint8)  # NaN rows
    host = torch.full((PAGES + 1, layout.host_block_bytes), 0xFF, dtype=torch.uint8)
    position = torch.arange(TOKENS)
    # Every page starts in blocks 1 to PAGES, is mirrored to the host in reverse order, and is resident in a
    # later block if at all: nothing may be read from where it was first.
    first = ((1 + position // PAGE) * layout.rows_per_block + position % PAGE).int()
    for layer in range(LAYERS):
        rows = row_format.rows_of(layout.layer_rows(pool, layer))
        write_rows(content.latent[layer], content.rope[layer], first, rows, power_of_two_scales=True)
    host_block = PAGES - 1 - position // PAGE
    host_rows = (host_block * PAGE + position % PAGE).int()
    count = torch.tensor([TOKENS], dtype=torch.int32)
    mirror_rows(pool, host, first, host_rows, count, layout, group=0)
    resident = torch.full((1, PAGES), -1, dtype=torch.int32)
    for page in sorted(resident_pages):
        resident[0, page] = PAGES + 1 + page
        pool[PAGES + 1 + page] = pool[1 + page]
    pool[1 : PAGES + 1] = 0xFF
    tables = ResidencyTables(
        resident_blocks=resident,
        host_blocks=(PAGES - 1 - torch.arange(PAGES, dtype=torch.int32))[None].contiguous(),
        hot_blocks=(2 * PAGES + 1 + torch.arange(hot_pages, dtype=torch.int32))[None].contiguous(),
        host_generations=HostGenerations.allocate(PAGES + 1, "cpu").generations,
        rows_per_block=layout.rows_per_block,
        page_rows=PAGE,
    )
    index_pages = torch.zeros(PAGES, PAGE * 132, dtype=torch.uint8)
    index_slots = position.int()
    write_index_keys(content.keys, index_slots, index_pages, page_size=PAGE, key_format=KeyFormat.E4M3)
    lengths = torch.tensor([TOKENS], dtype=torch.int32)
    state = HotStates.allocate(1, 1, HOT_ROWS, "cpu").group(0)
    scratch = ResolveScratch.allocate(1, QUERY_LEN, TOP_K, HOT_ROWS, PAGE * PAGES, "cpu")
    plan = ResolvePlan.allocate(1, QUERY_LEN, TOP_K, "cpu")
    outputs: list[torch.Tensor] = []
    for step in range(steps):
        logits = torch.full((1, QUERY_LEN, PAGE * PAGES), float("nan"))
        table = torch.arange(PAGES, dtype=torch.int32)[None]
        index_q = content.index_q.float().roll(step, -1).to(torch.float8_e4m3fn)
        indexer_logits(index_q, content.index_weights, index_pages, table, lengths, logits, page_size=PAGE)
        want = indexer_reference.indexer_logits(
            index_q, content.index_weights, index_pages, table, lengths, PAGE * PAGES, PAGE
        )
        chosen, _ = topk(logits[0], lengths, TOP_K, query_len=QUERY_LEN)
        kth = want[0].sort(-1, descending=True).values[:, TOP_K - 1 : TOP_K]
        assert bool((want[0].gather(1, chosen.long()) >= kth - 1e-3).all())
        resolve(
            chosen,
            lengths,
            torch.zeros(1, dtype=torch.int32),
            tables,
            state,
            plan,
            scratch,
            query_len=QUERY_LEN,
        )
        gather_rows(host, pool, plan.miss_host_rows, plan.miss_hot_rows, plan.num_misses, layout, group=0)
        for layer in range(LAYERS):
            out, lse = torch.empty(QUERY_LEN, HEADS, 512), torch.empty(QUERY_LEN, HEADS)
            sparse_mla_decode(
                content.q[layer],
                row_format.rows_of(layout.layer_rows(pool, layer)),
                plan.rows,
                plan.extents,
                scale=SCALE,
                out=out,
                lse=lse,
                scratch=DecodeScratch.create(QUERY_LEN, HEADS, 2, "cpu"),
                num_splits=2,
            )
            plain = row_format.empty_pool(TOKENS)
            write_rows(
                content.latent[layer], content.rope[layer], index_slots, plain, power_of_two_scales=True
            )
            counts = torch.full((QUERY_LEN,), TOP_K, dtype=torch.int32)
            assert_attention_close(
                out, lse, *mla_reference.sparse_mla(content.q[layer], plain, chosen, counts, SCALE)
            )
            outputs += [out, lse]
    return outputs


@pytest.mark.parametrize("row_format", RowFormat, ids=lambda f: f.value)
def test_resident_host_and_mixed_placements_give_the_same_bits_step_after_step(row_format: RowFormat) -> None:
    content = make_content()
    everywhere = decode(content, row_format, set(range(PAGES)), steps=2)
    for pages in (set(), {0, 3, 7}):
        placed = decode(content, row_format, pages, steps=2)
        assert all(torch.equal(a, b) for a, b in zip(everywhere, placed, strict=True))
