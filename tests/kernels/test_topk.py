"""Top-k: exact positions over rows that hurt, independence of splits and program order, and named errors."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparsim_kernels.configs import LaunchConfig, configs_of
from hisparsim_kernels.errors import DeviceError, DtypeError, RangeError, ShapeError, StrideError
from hisparsim_kernels.interpreter import permuted_programs
from hisparsim_kernels.references.topk import topk_reference
from hisparsim_kernels.topk import TopkScratch, topk

INF = float("inf")


def small_config(num_splits: int, block: int = 128) -> tuple[LaunchConfig, LaunchConfig]:
    """A configuration whose blocks are small, so that short test rows cross many of them."""
    histogram, write = (
        LaunchConfig(kernel, "test", 4, 1, {"NUM_SPLITS": num_splits, "BLOCK": block})
        for kernel in ("topk_histogram", "topk_write")
    )
    return histogram, write


def normal(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def clustered(rows: int, length: int) -> torch.Tensor:
    """Values that share 24 key bits: a bounded candidate stash overflows on these."""
    low = torch.randint(0, 200, (rows, length), generator=torch.Generator().manual_seed(5), dtype=torch.int32)
    return (low + 0x3F800000).view(torch.float32)


def with_holes(rows: int, length: int) -> torch.Tensor:
    """-inf, NaN, both zeros and +inf sprinkled over normal values."""
    values = normal(rows, length)
    for start, special in enumerate((-INF, float("nan"), 0.0, -0.0, INF)):
        values[:, start::7] = special
    return values


@dataclass(frozen=True)
class Case:
    """One batch of rows; `lengths` are contexts of requests, each with `query_len` rows."""

    name: str
    make: Callable[[int, int], torch.Tensor]
    lengths: tuple[int, ...]
    k: int
    max_len: int = 1024
    query_len: int = 1


CASES = (
    Case("random", normal, (1024, 1000), 64),
    Case("all-equal", torch.ones, (1024, 700), 64),
    Case("few-values", lambda r, n: normal(r, n).round(), (1024, 1023), 100),
    Case("clustered", clustered, (1024, 1024), 128),
    Case("clustered-one-value-short-of-all", clustered, (129, 128), 128),
    Case("negative-only", lambda r, n: -normal(r, n).abs() - 1, (900, 3), 16),
    Case("signed-zeros-tie", lambda r, n: torch.zeros(r, n).copysign(normal(r, n)), (500, 1024), 33),
    Case("holes", with_holes, (1024, 800), 500),
    Case("fewer-than-k", normal, (10, 0, 63, 64, 65), 64),
    Case("all-lengths-zero", normal, (0, 0, 0), 8),
    Case("short-and-long-rows-mixed", normal, (1024, 5, 1024, 0, 130, 1024), 32),
    Case("no-finite-value", lambda r, n: torch.full((r, n), -INF), (1024,), 8),
    Case("k-is-one", normal, (1024, 1), 1),
    Case("k-not-a-power-of-two", normal, (1024, 77), 77),
    Case("query-2", normal, (300, 1), 40, query_len=2),
    Case("query-3", clustered, (130, 2, 0), 40, query_len=3),
    Case("query-4", normal, (1024, 3), 40, query_len=4),
)


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_positions_and_counts_equal_a_stable_sort(case: Case, num_splits: int) -> None:
    rows = len(case.lengths) * case.query_len
    logits = case.make(rows, case.max_len)
    for row in range(rows):  # what lies past the end must not matter
        end = case.lengths[row // case.query_len] - (case.query_len - 1 - row % case.query_len)
        logits[row, max(end, 0) :] = float("nan") if row % 2 else INF
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    indices = torch.full((rows, case.k), -77, dtype=torch.int32)
    counts = torch.full((rows,), -77, dtype=torch.int32)
    topk(
        logits, lengths, case.k, query_len=case.query_len, indices=indices, counts=counts,
        config=small_config(num_splits),
    )  # fmt: skip
    want_indices, want_counts = topk_reference(logits, lengths, case.k, case.query_len)
    assert torch.equal(counts, want_counts)
    assert torch.equal(indices, want_indices)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    k=st.integers(1, 40),
    length=st.integers(0, 256),
    levels=st.sampled_from([2, 9, 10**6]),
)
def test_the_selection_holds_the_laws_of_a_top_k(seed: int, k: int, length: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-levels, levels, (1, 256), generator=generator).float() / 8
    indices, counts = topk(logits, torch.tensor([length], dtype=torch.int32), k, config=small_config(2, 64))
    chosen = indices[0, : int(counts)].long()
    assert int(counts) == min(k, length)
    assert (indices[0, int(counts) :] == -1).all()
    assert (chosen.diff() > 0).all()  # ascending, so distinct
    assert length == 0 or int(chosen.max()) < length
    left_out = torch.ones(length, dtype=torch.bool)
    left_out[chosen] = False
    if left_out.any():
        worst = logits[0, chosen].min()
        assert logits[0, :length][left_out].max() <= worst
        tied_out = torch.nonzero(left_out & (logits[0, :length] == worst)).flatten()
        tied_in = chosen[logits[0, chosen] == worst]
        assert len(tied_out) == 0 or tied_in.max() < tied_out.min()  # ties by the lower position


def test_a_million_positions_select_2048_under_the_shipped_configuration() -> None:
    logits = clustered(1, 2**20)
    logits[0, ::3] = normal(1, 2**20)[0, ::3]
    lengths = torch.tensor([2**20 - 5], dtype=torch.int32)
    indices, counts = topk(logits, lengths, 2048)
    want_indices, want_counts = topk_reference(logits, lengths, 2048)
    assert torch.equal(counts, want_counts)
    assert torch.equal(indices, want_indices)


def test_a_replay_on_the_same_buffers_forgets_the_rows_before() -> None:
    config = small_config(4)
    scratch = TopkScratch.allocate(3, 4, "cpu")
    for tensor in vars(scratch).values():
        tensor.fill_(0x5A5A5A5A)
    indices, counts = torch.empty(3, 32, dtype=torch.int32), torch.empty(3, dtype=torch.int32)
    logits, lengths = torch.empty(3, 1024), torch.empty(3, dtype=torch.int32)
    for seed, ends in enumerate(((1024, 1024, 1024), (3, 0, 1024), (0, 0, 0), (64, 1024, 1))):
        logits.copy_(normal(3, 1024, seed=seed))
        lengths.copy_(torch.tensor(ends))
        got = topk(logits, lengths, 32, indices=indices, counts=counts, scratch=scratch, config=config)
        assert got[0].data_ptr() == indices.data_ptr() and got[1].data_ptr() == counts.data_ptr()
        want_indices, want_counts = topk_reference(logits, lengths, 32)
        assert torch.equal(indices, want_indices) and torch.equal(counts, want_counts)


def test_the_order_in_which_programs_run_does_not_matter() -> None:
    logits, lengths = clustered(4, 1024), torch.tensor([1024, 1000, 0, 90], dtype=torch.int32)
    want, _ = topk_reference(logits, lengths, 100)
    for seed in range(3):
        with permuted_programs(seed):
            assert torch.equal(topk(logits, lengths, 100, config=small_config(4))[0], want)


def test_output_stays_inside_its_buffers() -> None:
    indices, counts = torch.full((4, 20), -77, dtype=torch.int32), torch.full((4,), -77, dtype=torch.int32)
    lengths = torch.tensor([256, 9], dtype=torch.int32)
    topk(normal(2, 256), lengths, 20, indices=indices[1:3], counts=counts[1:3], config=small_config(2))
    assert (indices[0] == -77).all() and (indices[3] == -77).all()
    assert counts[0] == -77 and counts[3] == -77


def test_rows_past_two_gigaelements_are_addressed_in_64_bits() -> None:
    script = """
        import mmap, torch
        from hisparsim_kernels import interpreter
        interpreter.activate()
        from hisparsim_kernels.configs import LaunchConfig
        from hisparsim_kernels.topk import topk
        LAZY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE: pages exist once touched
        rows, stride = 3, 2**30 + 64
        memory = mmap.mmap(-1, rows * stride * 4, flags=LAZY)
        logits = torch.frombuffer(memory, dtype=torch.float32).view(rows, stride)[:, : 2**30]
        logits[2, 7], logits[2, 40] = 2.0, 3.0
        meta = {"NUM_SPLITS": 1, "BLOCK": 64}
        config = [LaunchConfig(k, "t", 4, 1, meta) for k in ("topk_histogram", "topk_write")]
        indices, counts = topk(logits, torch.tensor([0, 0, 50], dtype=torch.int32), 2, config=config)
        assert indices.tolist() == [[-1, -1], [-1, -1], [7, 40]], indices
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr


def test_every_shipped_configuration_selects_the_same_positions() -> None:
    logits, lengths = normal(2, 9008), torch.tensor([9001, 4097], dtype=torch.int32)
    want, _ = topk_reference(logits, lengths, 2048)
    by_name: dict[str, dict[str, LaunchConfig]] = {}
    for config in configs_of("topk"):
        by_name.setdefault(config.name, {})[config.kernel] = config
    for parts in by_name.values():
        got, _ = topk(logits, lengths, 2048, config=(parts["topk_histogram"], parts["topk_write"]))
        assert torch.equal(got, want)


LENGTHS = torch.tensor([256, 256], dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"logits": normal(2, 256).double()}, DtypeError, "float64"),
        ({"logits": normal(256, 2).T}, StrideError, r"\(1, 2\)"),
        ({"logits": normal(2, 250)}, StrideError, "multiple of 16"),
        ({"logits": normal(2, 1, 256)}, ShapeError, "any, any"),
        ({"lengths": LENGTHS.long()}, DtypeError, "int64"),
        ({"lengths": torch.zeros(4, dtype=torch.int32)[::2]}, StrideError, "contiguous"),
        ({"lengths": LENGTHS[:1]}, ShapeError, r"\(1,\)"),
        ({"lengths": LENGTHS.to("meta")}, DeviceError, "meta"),
        ({"k": 0}, RangeError, "k is 0"),
        ({"k": 2.5}, RangeError, "k is 2.5; it must be a whole number"),
        ({"logits": torch.empty(2, 0)}, RangeError, "max_len is 0"),
        ({"logits": [1.0]}, DtypeError, "logits is a list"),
        (
            {"query_len": 4, "lengths": LENGTHS[:0]},
            ShapeError,
            "2 rows; it must have a multiple of query_len 4",
        ),
        ({"query_len": 9}, RangeError, "query_len is 9"),
        ({"indices": torch.zeros(2, 9, dtype=torch.int32)}, ShapeError, r"\(2, 9\)"),
        ({"scratch": TopkScratch.allocate(1, 1, "cpu")}, RangeError, "2 rows"),
        (
            {"scratch": TopkScratch.allocate(2, 3, "cpu")},
            ShapeError,
            r"scratch.hist has shape \(2, 4, 3, 256\)",
        ),
    ],
)
def test_a_wrong_argument_is_refused_with_its_value(
    change: dict[str, object], error: type, words: str
) -> None:
    arguments: dict[str, object] = {"logits": normal(2, 256), "lengths": LENGTHS, "k": 8} | change
    with pytest.raises(error, match=words):
        topk(**arguments)  # type: ignore[arg-type]
