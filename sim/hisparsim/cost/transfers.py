"""Transfers that live inside one step: hot gathers, prefill staging, mirroring to the host.

A hot gather is needed in every layer. The layer that owns the indexer waits for its own; in a pure one-token
decode batch the layers that share its top-k are fetched behind it on a copy stream while earlier layers
compute (vLLM 0.33, SGLang's prefetch), so with a gather time g and a compute time c a layer, a group of n
layers stalls for g + (n - 1) max(0, g - c). With verify tokens or a prefill in the batch every layer stalls.
Staging of a prefill's earlier context is fetched one layer ahead: s + (L - 1) max(0, s - c) for L layers.
`overlap` scales what is hidden: 1 as above, 0 nothing.

While rows are mirrored to the host, or a page write-back starts, the link gives both directions less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hisparsim.cost.curve import Counts, either, largest, least, whole_ns
from hisparsim.cost.link_rates import LinkRates
from hisparsim.cost.load import StepLoad
from hisparsim.cost.model import Background
from hisparsim.cost.terms import Term
from hisparsim.specs.kv_layout import PAGE_TOKENS


@dataclass(frozen=True)
class StepTransfers:
    """What the transfers of a step depend on besides its load."""

    rates: LinkRates
    row_bytes: int
    num_layers: int
    """Layers that store KV."""
    num_groups: int
    """Layers that own an indexer, the MTP layer among them where it is cached."""
    overlap: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.overlap <= 1.0:
            raise ValueError(f"overlap is {self.overlap}: a share of the hideable time lies within 0..1")


def transfers_of(
    transfers: StepTransfers,
    load: StepLoad,
    compute_ns: Any,
    background: Background,
    terms: dict[str, Counts],
) -> tuple[Counts, Counts]:
    """Change: add the exposed transfer times of a load to `terms`; (h2d bytes, d2h bytes) of one GPU."""
    gathers = not _is_zero(load.missed_millirows)
    stages = not _is_zero(load.staged_pages)
    mirrors = not _is_zero(load.mirrored_tokens)
    if not (gathers or stages or mirrors):
        return 0, 0
    layers = transfers.num_layers
    token_bytes = layers * transfers.row_bytes
    d2h_bytes = load.mirrored_tokens * token_bytes
    h2d_bytes: Counts = 0
    exposed: Any = 0.0
    if gathers or stages:
        written = d2h_bytes + load.write_back_bytes
        rates = transfers.rates
        rows = load.missed_millirows * 1e-3
        gather_bytes = rows * token_bytes
        staged_bytes = load.staged_pages * (PAGE_TOKENS * token_bytes)
        writing = written / rates.d2h_duplex * 1e9
        per_layer = compute_ns / layers
        if gathers:
            rate, duplex = _available(rates, rates.gather, rates.gather_duplex, background)
            moving = _duplex_ns(gather_bytes, rate, duplex, writing)
            gather = moving / layers + least(1.0, rows) * (rates.read_latency_s * 1e9)
            stall = layers * gather
            if load.query_tokens == 1 and load.prefill_tokens == 0:
                groups = transfers.num_groups
                prefetched = groups * gather + (layers - groups) * largest(0.0, gather - per_layer)
                stall = stall - transfers.overlap * (stall - prefetched)
            exposed = exposed + stall
            terms[Term.HOT_GATHER] = whole_ns(stall)
        if stages:
            rate, duplex = _available(rates, rates.h2d, rates.h2d_duplex, background)
            moving = _duplex_ns(staged_bytes, rate, duplex, writing)
            layer = moving / layers
            ahead = layer + (layers - 1) * largest(0.0, layer - per_layer)
            stall = moving - transfers.overlap * (moving - ahead)
            exposed = exposed + stall
            terms[Term.STAGING] = whole_ns(stall)
        h2d_bytes = whole_ns(gather_bytes) + staged_bytes
    if mirrors:
        d2h_rate: Any = either(h2d_bytes, transfers.rates.d2h_duplex, transfers.rates.d2h)
        left = largest(d2h_rate - background.d2h_bytes_per_s, d2h_rate / 2)
        outlasting = d2h_bytes / left * 1e9 - compute_ns - exposed
        terms[Term.MIRROR] = whole_ns(largest(0.0, outlasting))
    return h2d_bytes, d2h_bytes


def _is_zero(count: Counts) -> bool:
    """Query: the count is the plain number 0 (an array is priced even where all its entries are 0)."""
    return isinstance(count, int) and count == 0


def _available(rates: LinkRates, rate: float, duplex: float, background: Background) -> tuple[float, float]:
    """Query: (rate, rate with the other direction busy) left beside flows that share the link equally."""
    if background.d2h_bytes_per_s > 0:
        rate = duplex
    if background.h2d_bytes_per_s > 0 and rates.h2d != float("inf"):
        rate = min(rate, max(rates.h2d - background.h2d_bytes_per_s, rates.h2d / 2))
    return rate, min(rate, duplex)


def _duplex_ns(num_bytes: Any, rate: float, duplex: float, writing_ns: Any) -> Any:
    """Query: nanoseconds to read bytes that start together with `writing_ns` of writes on the same link."""
    if rate == float("inf"):
        return 0.0 * num_bytes
    alone = num_bytes / rate * 1e9
    slowed = num_bytes / duplex * 1e9
    return least(slowed, alone + writing_ns * (1.0 - duplex / rate))
