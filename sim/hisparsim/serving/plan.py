"""Step plans: what one engine step will do, as immutable snapshots.

A plan is made by :class:`hisparsim.serving.core.ServingCore` and never read again by it. The simulator
prices it (cost model and links), the real runner performs it (kernels and copies). Everything in a plan
is a count, an id or an array of ids; nothing refers back to the ledgers.

Nobody changes a plan or a record once it is made; they are no frozen dataclasses all the same, because
building one of those takes four times as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.int64]
NO_PAGES: IntArray = np.empty(0, np.int64)


class Residency(Enum):
    """Where the computed pages of a request can be read from."""

    FULL = "full"
    """Every computed page is readable on the GPU."""
    MIXED = "mixed"
    """Some pages are readable on the GPU, the others only through the hot buffer."""
    NONE = "none"
    """At most two pages are readable on the GPU."""


@dataclass(slots=True, eq=False)
class DecodeBatch:
    """The decode rows of one step, one entry a request, in scheduling order.

    A request whose ``resident_pages`` is below ``pages`` reads the other pages through its hot buffer. Where
    the policy has no hot buffers every page is readable, and both are ``NO_PAGES``.
    """

    request_ids: tuple[int, ...]
    context_tokens: NDArray[np.int64]
    """[n] tokens each request can attend to, the ones computed in this step included."""
    pages: NDArray[np.int64]
    """[n] pages that hold them."""
    resident_pages: NDArray[np.int64]
    """[n] of those, readable on the GPU without the hot buffer."""
    query_tokens: int
    """Tokens computed for each request: 1, or 1 + drafts under speculation."""
    hot_rows: int
    """Rows a layer of each request's hot buffer (0 where the policy has none)."""

    @property
    def num_requests(self) -> int:
        return len(self.request_ids)


@dataclass(slots=True)
class PrefillChunk:
    """Prompt tokens of one request computed in this step: ``[start_token, start_token + num_tokens)``."""

    request_id: int
    start_token: int
    num_tokens: int
    is_last: bool
    """The chunk ends the prompt: the step yields the request's next token."""
    staged_pages: int
    """Pages of the earlier context that are not on the GPU and are read from the host in this step."""


@dataclass(slots=True, eq=False)
class Admit:
    """A request enters the running batch, the first time or after a preemption."""

    request_id: int
    hit_tokens: int
    """Leading tokens found in a prefix cache (GPU, or GPU and host), not computed again."""
    loaded_tokens: int
    """Of those, tokens that a transfer from a slower tier brings first."""
    resumed: bool
    hit_blocks: tuple[IntArray, ...] = ()
    """Blocks of the shared prefix: ``(pages,)``, with layer groups ``(host pages, indexer pages)``."""


@dataclass(slots=True, eq=False)
class Allocate:
    """Blocks for pages ``[first_page, first_page + n)`` of a request."""

    request_id: int
    first_page: int
    index_blocks: IntArray
    """[n] blocks of the indexer pages (of the only group, where the layout has one)."""
    resident_blocks: IntArray
    """[n, groups] blocks of the resident pages; [n, 0] where the layout has one group."""
    host_blocks: IntArray
    """[n] host blocks, or [0] where the policy has no host tier."""


@dataclass(slots=True, eq=False)
class LeaseHot:
    """A request gets its hot buffer: ``blocks`` is [groups, hot pages]."""

    request_id: int
    blocks: IntArray


@dataclass(slots=True, eq=False)
class WriteBack:
    """Sealed pages of one request are copied to their host blocks (no bytes where rows were mirrored)."""

    transfer_id: int
    request_id: int
    first_page: int
    host_blocks: IntArray
    """[n]"""
    resident_blocks: IntArray
    """[n, groups], or [n, 1] where one block holds a page whole."""
    num_bytes: int
    """Bytes for one GPU that this transfer itself moves."""


@dataclass(slots=True, eq=False)
class Load:
    """Pages brought from the host to the GPU before the request may run (ordinary offload, restore)."""

    transfer_id: int
    request_id: int
    num_pages: int
    num_bytes: int
    host_keys: NDArray[np.int64]
    """[n] content keys of the pages in the host tier."""
    blocks: IntArray
    """[n] blocks that receive them."""


@dataclass(slots=True, eq=False)
class Restore:
    """A page is copied from its host block to the GPU before the step computes: it is written on there."""

    transfer_id: int
    request_id: int
    page: int
    host_block: int
    resident_blocks: IntArray
    """[groups]"""
    num_bytes: int
    """Bytes for one GPU."""


@dataclass(slots=True, eq=False)
class Release:
    """A request stops holding pages; the pool may reuse their blocks and they stay readable until then."""

    request_id: int
    pages: IntArray


@dataclass(slots=True, eq=False)
class Lose:
    """The pool reused a block of these pages: the request reads them from the host from now on."""

    request_id: int
    pages: IntArray


@dataclass(slots=True, eq=False)
class Adopt:
    """Pages of a prefix found on the GPU are read there again: ``blocks`` is [n, groups]."""

    request_id: int
    pages: IntArray
    blocks: IntArray


@dataclass(slots=True)
class Preempt:
    """A running request goes back to the queue and will compute its context again."""

    request_id: int
    computed_tokens: int


@dataclass(slots=True)
class Finish:
    """A request left the engine: all tokens produced, stopped early, or cancelled."""

    request_id: int
    output_tokens: int
    cancelled: bool


Action: TypeAlias = (
    Admit | Allocate | LeaseHot | WriteBack | Load | Restore | Release | Lose | Adopt | Preempt | Finish
)


@dataclass(slots=True, eq=False)
class StepPlan:
    """One engine step. ``actions`` are in the order in which the ledgers changed.

    A plan without tokens only starts transfers (:class:`Load`, :class:`Restore`) that requests wait for.
    """

    plan_id: int
    decodes: DecodeBatch
    prefills: tuple[PrefillChunk, ...]
    actions: tuple[Action, ...]
    mirrored_tokens: int
    """Tokens whose rows are copied to the host during this step, besides the write-backs."""
    graph_bucket: int | None
    """Batch size of the CUDA graph that serves the step, None for eager (a prefill is in it)."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        decodes = self.decodes.num_requests * self.decodes.query_tokens
        return decodes + sum(chunk.num_tokens for chunk in self.prefills)

    @property
    def computes(self) -> bool:
        """Whether the step computes any token."""
        return bool(self.decodes.request_ids or self.prefills)

    def later(self, num_steps: int) -> StepPlan:
        """Query: the plan of so many quiet steps later: contexts are longer, nothing has changed hands."""
        now = self.decodes
        decodes = DecodeBatch(
            now.request_ids,
            now.context_tokens + num_steps,
            now.pages,
            now.resident_pages,
            now.query_tokens,
            now.hot_rows,
        )
        return StepPlan(
            self.plan_id + num_steps, decodes, self.prefills, (), self.mirrored_tokens, self.graph_bucket
        )


def graph_bucket(batch: int) -> int:
    """Batch size of the CUDA graph that serves ``batch`` decodes (vLLM's default capture sizes)."""
    if batch <= 2:
        return max(batch, 1)
    if batch <= 8:
        return (batch + 3) // 4 * 4
    if batch <= 256:
        return (batch + 7) // 8 * 8
    return (batch + 15) // 16 * 16


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing can be scheduled now. ``reason`` is for people."""

    reason: str


class TransferPhase(Enum):
    ENQUEUED = "enqueued"
    DONE = "done"


@dataclass(slots=True)
class TransferUpdate:
    """News of a transfer that a plan asked for."""

    transfer_id: int
    phase: TransferPhase


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step produced.

    ``accepted`` gives, for requests where it is not one token, how many tokens the step yielded;
    ``stopped`` names requests that met a stop condition with this step's last token.
    """

    accepted: dict[int, int] | None = None
    stopped: frozenset[int] = frozenset()
