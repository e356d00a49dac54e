"""The state right after a plan as one row of the log format."""

from __future__ import annotations

from hisparsim.serving.core import ServingCore
from hisparsim.serving.lockstep import LockstepStep
from hisparsim.serving.progress import StepNotes
from hisparsim.serving.request import Request


def log_row(core: ServingCore, step: LockstepStep) -> dict[str, int]:
    """Query: column -> value; docs/conformance.md says what each column counts."""
    census, notes = step.census, core.notes
    return {
        "step": step.index,
        "running": len(core.running),
        "waiting": len(core.waiting),
        "sched_prefill_tokens": notes.prefill_tokens,
        "sched_decode_tokens": notes.decode_tokens,
        "sched_reqs": len(notes.scheduled) + len(notes.steady),
        "preemptions": core.num_preemptions,
        "free_gpu_blocks": census.free,
        "pinned_blocks": census.resident_pinned + census.hot + census.index + census.orphans,
        "resident_pinned": census.resident_pinned,
        "resident_unpinned_readable": census.resident_released,
        "hot_blocks": census.hot,
        "indexer_blocks": census.index,
        "host_used": census.host_used,
        "n_full": census.num_full,
        "n_mixed": census.num_mixed,
        "n_none": census.num_none,
        "n_hot": census.num_hot,
        "pages_lost": census.pages_lost,
        "pending_spills": census.pending_transfers,
        "unpinned_free_total": census.watched_free,
        "stall_break": int(notes.waited),
        "finished": step.finished,
        "prefix_hit_tokens": core.prefix_hit_tokens,
        "all_resident_flag": _all_resident(notes),
        "pages_adopted_cum": census.pages_adopted,
        "victim_inflight": int(notes.victim_in_flight),
        "orphan_pinned": census.orphans,
    }


def _all_resident(notes: StepNotes) -> int:
    return int(all(_is_resident(request) for request in (*notes.scheduled, *notes.steady)))


def _is_resident(request: Request) -> bool:
    ledger = request.ledger
    return ledger is not None and ledger.num_readable == ledger.num_pages
