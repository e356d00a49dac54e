"""The CPU's routines against the kernels' float64 references and a sequential LRU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparsim.specs.kv_layout import RowFormat
from hisparsim_kernels.references.indexer import indexer_logits
from hisparsim_kernels.references.lru import HostRow, SequentialHotBuffer
from hisparsim_kernels.references.mla import sparse_mla
from hisparsim_kernels.references.rows import unpack
from hisparsim_kernels.references.topk import topk_reference
from hisparsim_realrun.cpu_kernels import CpuKernels, e4m3_to_float, top_positions
from hisparsim_realrun.devices import open_device
from hisparsim_realrun.geometry import geometry_of
from hisparsim_realrun.hot import HotBuffers
from hisparsim_realrun.pools import Pools


def kernels(bench, row_format: RowFormat = RowFormat.BF16, invariant: bool = False) -> CpuKernels:
    geometry = geometry_of(bench("hybrid", 8).model, row_format, packed=True)
    device = open_device("cpu", threads=1)
    pools = Pools.allocate(geometry, device, num_blocks=8, num_host_blocks=4, num_staging_blocks=0)
    return CpuKernels(pools, 64, invariant=invariant)


def test_every_e4m3_code_is_read_exactly():
    codes = torch.arange(256, dtype=torch.uint8)
    finite = (codes & 0x7F) != 0x7F
    expected = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(e4m3_to_float(codes)[finite], expected[finite])


@pytest.mark.parametrize("row_format", [RowFormat.BF16, RowFormat.FP8_DS_MLA])
@pytest.mark.parametrize("invariant", [False, True])
def test_attention_is_the_reference_s_over_the_rows_that_were_written(row_format, invariant, bench):
    own = kernels(bench, row_format, invariant)
    random = np.random.default_rng(1)
    count, heads = 21, 4
    rows = random.permutation(np.arange(own.page_rows))[:count].astype(np.int64)
    flat = own.pools.geometry.rows_per_block * random.integers(1, 8, count) + rows
    latent, rope = torch.randn(count, 512), torch.randn(count, 64)
    own.write_rows(1, latent, rope, flat)
    slots = np.zeros((5, 64), np.int64)
    counts = np.array([1, 7, 21, 13, 2])
    for line, valid in zip(slots, counts, strict=True):
        line[:valid] = random.permutation(flat)[:valid]
    queries = torch.randn(5, heads, 576)
    got = own.attend(1, queries, slots, counts, 0.07, 2)
    layer = own.pools.layer_rows(1)
    expected, _ = sparse_mla(queries, layer, torch.from_numpy(slots), torch.from_numpy(counts), 0.07)
    assert torch.allclose(got.double(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(own.read_rows(1, flat), unpack(layer[torch.from_numpy(flat)]).float())


@pytest.mark.parametrize("invariant", [False, True])
def test_index_logits_are_the_reference_s_over_the_keys_that_were_written(invariant, bench):
    own = kernels(bench, invariant=invariant)
    tokens, blocks = 150, np.array([3, 1, 6], np.int64)
    positions = np.arange(tokens)
    own.write_keys(1, torch.randn(tokens, 128), blocks[positions // 64], positions % 64)
    queries, weights = torch.randn(2, 4, 128).to(torch.float8_e4m3fn).float(), torch.randn(2, 4)
    got = own.logits(1, queries, weights, blocks, tokens)
    expected = indexer_logits(
        queries[None].to(torch.float8_e4m3fn),
        weights[None],
        own.pools.index_pages(1),
        torch.from_numpy(blocks)[None],
        torch.tensor([tokens]),
        tokens,
        64,
    )
    seen = torch.isfinite(expected[0])
    assert torch.allclose(got.double()[seen], expected[0][seen], rtol=1e-3, atol=1e-3)


@settings(max_examples=40, deadline=None)
@given(
    width=st.integers(1, 40),
    k=st.integers(1, 12),
    values=st.integers(1, 4),
    seed=st.integers(0, 999),
)
def test_top_positions_are_the_reference_s_ties_and_holes_included(width, k, values, seed):
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.integers(0, values, (5, width)).astype(np.float32))
    logits[torch.from_numpy(random.random((5, width)) < 0.2)] = float("-inf")
    expected, counts = topk_reference(logits, torch.full((5,), width), k)
    got = top_positions(logits, k)
    assert got.tolist() == expected.tolist()
    assert np.count_nonzero(got >= 0, 1).tolist() == counts.tolist()


@settings(max_examples=30, deadline=None)
@given(
    steps=st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True), max_size=25),
    warm=st.integers(0, 8),
)
def test_hot_buffers_are_exact_lru(steps, warm):
    hot, oracle = HotBuffers(8, 31), SequentialHotBuffer(8)
    hot.reset(0, warm)
    oracle.holds[:warm] = [HostRow(0, position, 0) for position in range(warm)]
    for wanted in steps:
        found = hot.look_up(0, 0, np.array(wanted))
        expected = oracle.step([HostRow(0, position, 0) for position in wanted])
        assert found.slots.tolist() == [expected.slots[HostRow(0, p, 0)] for p in wanted]
        missed = [wanted[i] for i in np.nonzero(found.missed)[0]]
        assert missed == [miss.row.row for miss in expected.misses]
