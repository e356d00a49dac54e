"""Indexer logits against the float64 reference: formats, page sizes, ragged lengths, verification rows."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from hisparsim_kernels import errors
from hisparsim_kernels.indexer import KeyFormat, indexer_logits, write_index_keys
from hisparsim_kernels.references import indexer as reference


@dataclass(frozen=True)
class Case:
    name: str
    lengths: tuple[int, ...] = (700, 130)
    heads: int = 32
    query_len: int = 1
    page_size: int = 64
    max_tokens: int = 1024
    extra_bytes: int = 0


CASES = (
    Case("glm-heads-32"),
    Case("deepseek-heads-64", heads=64),
    Case("heads-16", heads=16),
    Case("page-61", page_size=61, max_tokens=976),
    Case("page-2", page_size=2, lengths=(33,), max_tokens=64),
    Case("page-576", page_size=576, max_tokens=1152, lengths=(1152, 577)),
    Case("length-zero", lengths=(0, 5)),
    Case("all-lengths-zero", lengths=(0, 0)),
    Case("one-token", lengths=(1,), query_len=1),
    Case("mtp-1", query_len=2),
    Case("mtp-2-odd", query_len=3),
    Case("mtp-3", query_len=4),
    Case("mtp-3-longer-than-the-context", query_len=4, lengths=(2, 0, 4)),
    Case("full", lengths=(1024,)),
    Case("length-past-the-capacity", lengths=(5000,), max_tokens=256),
    Case("capacity-not-a-multiple", lengths=(1000,), max_tokens=1000),
    Case("layer-of-a-wide-block", extra_bytes=4096 + 16),
    Case("batch-over-heads", lengths=tuple(range(1, 40)), heads=16, max_tokens=64),
)


def make_inputs(case: Case, key_format: KeyFormat) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(case.name))
    requests, pages_each = len(case.lengths), -(-case.max_tokens // case.page_size)
    page_bytes = case.page_size * key_format.token_bytes
    stride = -(-(page_bytes + case.extra_bytes) // 16) * 16
    blocks = torch.full((requests * pages_each + 1, stride), 0xFF, dtype=torch.uint8)
    pages = blocks[:, case.extra_bytes :] if case.extra_bytes else blocks
    order = torch.randperm(requests * pages_each, generator=generator) + 1
    table = order.reshape(requests, pages_each).int()
    for request, length in enumerate(case.lengths):
        token = torch.arange(min(length, case.max_tokens))
        slots = table[request, token // case.page_size] * case.page_size + token % case.page_size
        keys = torch.randn(len(token), 128, generator=generator)
        reference.write_keys(keys, slots.int(), pages, case.page_size, key_format)
        table[request, -(-min(length, case.max_tokens) // case.page_size) :] = -7  # no entry here may be read
    q = torch.randn(requests, case.query_len, case.heads, 128, generator=generator).to(key_format.torch_dtype)
    weights = torch.randn(requests, case.query_len, case.heads, generator=generator)
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    return {"q": q, "weights": weights, "pages": pages, "table": table, "lengths": lengths}


@pytest.mark.parametrize("key_format", KeyFormat, ids=lambda f: f.value)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_equal_the_reference_and_infinities_stand_at_the_same_places(
    case: Case, key_format: KeyFormat
) -> None:
    inputs = make_inputs(case, key_format)
    logits = torch.full((len(case.lengths), case.query_len, case.max_tokens), float("nan"))
    indexer_logits(**inputs, logits=logits, page_size=case.page_size, fill=True)
    want = reference.indexer_logits(**inputs, max_tokens=case.max_tokens, page_size=case.page_size)
    assert not logits.isnan().any()
    assert torch.equal(logits.isinf(), want.isinf())
    seen = ~want.isinf()
    if seen.any():
        error = (logits.double() - want)[seen].abs().max().item()
        assert error <= 1e-4 * max(1.0, want[seen].abs().max().item()), f"largest error {error}"


def test_without_fill_only_the_columns_past_the_last_block_keep_their_old_content() -> None:
    case = Case("unfilled", lengths=(130, 0), max_tokens=1024)
    inputs = make_inputs(case, KeyFormat.E4M3)
    logits = torch.full((2, 1, 1024), 7.0)
    indexer_logits(**inputs, logits=logits, page_size=64)
    assert bool((logits[0, 0, :130] != 7.0).all()) and bool(logits[0, 0, 130:256].isinf().all())
    assert bool((logits[0, 0, 256:] == 7.0).all()) and bool((logits[1] == 7.0).all())


@pytest.mark.parametrize("key_format", KeyFormat, ids=lambda f: f.value)
@pytest.mark.parametrize("page_size", [61, 64])
def test_written_keys_equal_the_reference_byte_for_byte(key_format: KeyFormat, page_size: int) -> None:
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(37, 128, generator=generator) * 3
    keys[5] = 0.0
    slots = torch.randperm(4 * page_size, generator=generator)[:37].int()
    slots[7] = -1
    stride = -(-page_size * key_format.token_bytes // 16) * 16
    got = torch.full((4, stride), 0xA5, dtype=torch.uint8)
    want = got.clone()
    write_index_keys(keys, slots, got, page_size=page_size, key_format=key_format)
    reference.write_keys(keys, slots, want, page_size, key_format)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("q", lambda q: q.float(), errors.DtypeError, "q has dtype torch.float32"),
        ("q", lambda q: q[..., :64], errors.ShapeError, "64"),
        ("q", lambda q: q.repeat(1, 5, 1, 1), errors.RangeError, "query_len is 5"),
        ("q", lambda q: q[:, :, :20].contiguous(), errors.RangeError, "heads is 20"),
        ("weights", lambda w: w.double(), errors.DtypeError, "weights has dtype torch.float64"),
        ("pages", lambda p: p[:, 4:], errors.ShapeError, "needs 8448"),
        ("pages", lambda p: torch.zeros(9, 8450, dtype=torch.uint8), errors.StrideError, "8450"),
        ("table", lambda t: t[:, :3].contiguous(), errors.ShapeError, "3 pages of 64"),
        ("table", lambda t: t.long(), errors.DtypeError, "int64"),
        ("lengths", lambda n: n.repeat_interleave(2)[::2], errors.StrideError, "lengths"),
    ],
)
def test_an_invalid_call_is_refused_with_the_value(name, change, error, message) -> None:  # type: ignore[no-untyped-def]
    inputs = make_inputs(Case("calls", lengths=(10, 20), max_tokens=256), KeyFormat.E4M3)
    inputs[name] = change(inputs[name])
    with pytest.raises(error, match=message):
        indexer_logits(**inputs, logits=torch.empty(2, 1, 256), page_size=64)
