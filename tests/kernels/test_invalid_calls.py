"""Every tensor argument of every launch, spoiled in every way, ends in a named error that gives it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hisparsim_kernels.errors import KernelInputError, RangeError, StrideError
from hisparsim_kernels.gather import gather_rows
from hisparsim_kernels.grouped_gemm import grouped_gemm
from hisparsim_kernels.hot_state import HostGenerations, HotStates, renew_host_blocks, reset_requests
from hisparsim_kernels.indexer import KeyFormat, indexer_logits, write_index_keys
from hisparsim_kernels.mirror import mirror_rows
from hisparsim_kernels.mla_decode import DecodeScratch, sparse_mla_decode
from hisparsim_kernels.mla_invariant import sparse_mla_prefill_invariant
from hisparsim_kernels.mla_prefill import sparse_mla_prefill
from hisparsim_kernels.page_layout import GroupTables, PageLayout
from hisparsim_kernels.pages import Direction, copy_pages, stage_pages
from hisparsim_kernels.resolve import resolve
from hisparsim_kernels.resolve_buffers import ResidencyTables, ResolvePlan, ResolveScratch
from hisparsim_kernels.rows import read_rows, write_rows
from hisparsim_kernels.topk import TopkScratch, topk, topk_config

LAYOUT = PageLayout.of_groups(656, (2, 1), page_rows=4)
Arguments = dict[str, Any]


def i32(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


def u8(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.uint8)


def attention() -> Arguments:
    return {
        "q": torch.zeros(2, 8, 576).bfloat16(), "rows": torch.zeros(32, 576).bfloat16(), "slots": i32(2, 32),
        "counts": i32(2), "scale": 0.1, "out": torch.empty(2, 8, 512), "lse": torch.empty(2, 8),
    }  # fmt: skip


def decode() -> Arguments:
    return attention() | {"scratch": DecodeScratch.create(2, 8, 8, "cpu"), "num_splits": 4}


def prefill_invariant() -> Arguments:
    return attention() | {"scratch": DecodeScratch.create(2, 8, 8, "cpu")}


def indexer() -> Arguments:
    return {
        "q": torch.zeros(2, 2, 32, 128).bfloat16(), "weights": torch.zeros(2, 2, 32),
        "pages": u8(4, 64 * 256),
        "table": i32(2, 2), "lengths": i32(2), "logits": torch.empty(2, 2, 128), "page_size": 64,
    }  # fmt: skip


def index_keys() -> Arguments:
    return {
        "keys": torch.zeros(3, 128), "slots": i32(3), "pages": u8(4, 64 * 132), "page_size": 64,
        "key_format": KeyFormat.E4M3,
    }  # fmt: skip


def selecting() -> Arguments:
    splits = int(topk_config(64, torch.device("cpu"))[1].meta["NUM_SPLITS"])
    return {
        "logits": torch.zeros(2, 64), "lengths": i32(2), "k": 8, "indices": i32(2, 8), "counts": i32(2),
        "scratch": TopkScratch.allocate(2, splits, "cpu"),
    }  # fmt: skip


def resolving() -> Arguments:
    tables = ResidencyTables(i32(2, 6), i32(2, 6), i32(2, 4), i32(20), rows_per_block=8, page_rows=4)
    return {
        "selection": i32(1, 8), "lengths": i32(1), "request_slots": i32(1), "tables": tables,
        "state": HotStates.allocate(1, 2, 16, "cpu").group(0),
        "plan": ResolvePlan.allocate(1, 1, 8, "cpu"),
        "scratch": ResolveScratch.allocate(1, 1, 8, 16, 24, "cpu"),
    }  # fmt: skip


def gathering() -> Arguments:
    return {
        "host": u8(2, LAYOUT.host_block_bytes), "pool": u8(2, LAYOUT.block_bytes), "miss_host_rows": i32(3),
        "miss_hot_rows": i32(3), "num_misses": i32(1), "layout": LAYOUT, "group": 0,
    }  # fmt: skip


def mirroring() -> Arguments:
    return {
        "pool": u8(2, LAYOUT.block_bytes), "host": u8(2, LAYOUT.host_block_bytes), "pool_rows": i32(3),
        "host_rows": i32(3), "num_rows": i32(1), "layout": LAYOUT, "group": 0,
    }  # fmt: skip


def copying() -> Arguments:
    return {
        "host": u8(2, LAYOUT.host_block_bytes), "pool": u8(2, LAYOUT.block_bytes), "blocks": i32(2),
        "host_blocks": i32(2), "groups": i32(2), "num_pages": i32(1), "layout": LAYOUT,
        "tables": GroupTables.of(LAYOUT, "cpu"), "direction": Direction.TO_GPU,
    }  # fmt: skip


def staging() -> Arguments:
    return {
        "host": u8(2, LAYOUT.host_block_bytes), "pool": u8(2, LAYOUT.block_bytes), "blocks": i32(2),
        "host_blocks": i32(2), "staged": u8(8, 656), "layout": LAYOUT, "group": 0, "layer_in_group": 0,
    }  # fmt: skip


def gemm_fp8() -> Arguments:
    return {
        "x": u8(5, 256).view(torch.float8_e4m3fn), "weight": u8(3, 128, 256).view(torch.float8_e4m3fn),
        "offsets": i32(4), "out": torch.empty(5, 128),
        "x_scale": torch.zeros(5, 2), "w_scale": torch.zeros(3, 1, 2),
    }  # fmt: skip


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], Arguments]]] = {
    "write_rows": (
        write_rows,
        lambda: {
            "latent": torch.zeros(3, 512),
            "rope": torch.zeros(3, 64),
            "slots": i32(3),
            "rows": u8(9, 656),
        },
    ),
    "read_rows": (
        read_rows,
        lambda: {"rows": u8(9, 656), "slots": i32(3), "out": torch.empty(3, 576).bfloat16()},
    ),
    "write_index_keys": (write_index_keys, index_keys),
    "indexer_logits": (indexer_logits, indexer),
    "topk": (topk, selecting),
    "resolve": (resolve, resolving),
    "reset_requests": (
        reset_requests,
        lambda: {"states": HotStates.allocate(1, 2, 8, "cpu"), "request_slots": i32(2)},
    ),
    "renew_host_blocks": (
        renew_host_blocks,
        lambda: {"hosts": HostGenerations.allocate(9, "cpu"), "blocks": i32(1)},
    ),
    "gather_rows": (gather_rows, gathering),
    "mirror_rows": (mirror_rows, mirroring),
    "copy_pages": (copy_pages, copying),
    "stage_pages": (stage_pages, staging),
    "sparse_mla_decode": (sparse_mla_decode, decode),
    "sparse_mla_prefill": (sparse_mla_prefill, attention),
    "sparse_mla_prefill_invariant": (sparse_mla_prefill_invariant, prefill_invariant),
    "grouped_gemm": (grouped_gemm, gemm_fp8),
}

SPOILERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "wrong dtype": lambda t: torch.zeros(t.shape, dtype=torch.float64),
    "no dimension": lambda t: torch.zeros((), dtype=t.dtype),
    "a dimension more": lambda t: torch.zeros((*t.shape, 1), dtype=t.dtype),
    "every second element": lambda t: torch.zeros((*t.shape[:-1], 2 * t.shape[-1]), dtype=t.dtype)[..., ::2],
    "another device": lambda t: torch.zeros(t.shape, dtype=t.dtype, device="meta"),
}
BYTES_OF_ANY_KIND = ("host", "pool")
"""Taken as bytes: their element type and number of dimensions are free, whole blocks are not."""


def tensors_of(arguments: Arguments) -> list[tuple[str, str]]:
    """Names of all tensors: argument and, inside a dataclass, attribute."""
    found = []
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            found.append((name, ""))
        elif name in ("tables", "state", "states", "plan", "scratch", "hosts"):
            found += [(name, key) for key, inner in vars(value).items() if isinstance(inner, torch.Tensor)]
    return found


@pytest.mark.parametrize("call", CALLS)
def test_the_calls_below_are_valid_before_they_are_spoiled(call: str) -> None:
    launch, build = CALLS[call]
    launch(**build())


@pytest.mark.parametrize("call", CALLS)
def test_a_spoiled_tensor_is_refused_by_a_named_error_that_gives_the_argument(call: str) -> None:
    launch, build = CALLS[call]
    wrong = []
    for name, attribute in tensors_of(build()):
        for spoiler, spoil in SPOILERS.items():
            arguments = build()
            tensor = getattr(arguments[name], attribute) if attribute else arguments[name]
            if name in BYTES_OF_ANY_KIND and spoiler in ("wrong dtype", "a dimension more"):
                continue
            if spoiler == "every second element" and tensor.shape[-1] == 1:
                continue  # contiguous whatever its stride
            arguments[name] = (
                replace(arguments[name], **{attribute: spoil(tensor)}) if attribute else spoil(tensor)
            )
            try:
                launch(**arguments)
            except KernelInputError as error:
                outcome = (
                    "" if (attribute or name).split("_")[0] in str(error) else f"does not name it: {error}"
                )
            except Exception as error:
                outcome = f"{type(error).__name__} {error}"
            else:
                outcome = "accepted"
            if outcome:
                wrong.append(f"{name} {attribute} {spoiler}: {outcome}")
    assert not wrong, "\n".join(wrong)


def test_a_pool_that_starts_off_a_16_byte_boundary_is_refused() -> None:
    bytes_ = u8(9 * 656 + 16)
    shift = (4 - bytes_.data_ptr()) % 16
    rows = bytes_[shift : shift + 9 * 656].view(9, 656)
    with pytest.raises(StrideError, match=r"rows starts at 0x[0-9a-f]*4; it must be 16-byte aligned"):
        read_rows(rows, i32(3), torch.empty(3, 576).bfloat16())


def test_a_page_of_no_tokens_is_refused() -> None:
    with pytest.raises(RangeError, match="page_size is 0"):
        write_index_keys(**(index_keys() | {"page_size": 0}))


def test_scratch_whose_partials_are_short_is_refused() -> None:
    short = DecodeScratch(torch.empty(512), torch.empty(2 * 64))
    with pytest.raises(RangeError, match="scratch holds 1 partials"):
        sparse_mla_decode(**(decode() | {"scratch": short}))


def test_cpu_tensors_outside_the_interpreter_are_refused() -> None:
    script = """
        import torch
        from hisparsim_kernels.errors import DeviceError
        from hisparsim_kernels.rows import read_rows
        try:
            read_rows(torch.zeros(9, 656).byte(), torch.zeros(3).int(), torch.zeros(3, 576).bfloat16())
        except DeviceError as error:
            assert "rows is on cpu" in str(error) and "TRITON_INTERPRET=1" in str(error)
        else:
            raise AssertionError("accepted")
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert run.returncode == 0, run.stderr
