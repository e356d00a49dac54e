"""What the core tells its driver: what a step brought back, why a plan looks as it does, what went wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

from mypy_extensions import mypyc_attr

from hisparsim.serving.request import Request


@mypyc_attr(native_class=False)
class Wedged(RuntimeError):
    """Nothing can be scheduled, nothing is under way and nothing will arrive, yet requests are waiting."""


@mypyc_attr(native_class=False)
class ProtocolError(RuntimeError):
    """The driver broke the protocol (plans completed out of order, an unknown request, too many plans)."""


@dataclass(slots=True)
class Completion:
    """What came back with one step."""

    steady: tuple[Request, ...] = ()
    """Requests that gained one token each, as in the step before; their counters lag (``settle``)."""
    left: list[Request] = field(default_factory=list)
    """Requests that gained such a token in the step before and are listed from now on."""
    listed: list[tuple[Request, int]] = field(default_factory=list)
    """The other requests that gained tokens, and how many."""
    finished: list[Request] = field(default_factory=list)
    surplus_tokens: int = 0
    """Tokens computed for requests that had finished already, discarded."""

    @property
    def tokens(self) -> list[tuple[Request, int]]:
        """All requests that gained tokens, and how many."""
        return [*((request, 1) for request in self.steady), *self.listed]


@dataclass(slots=True)
class StepNotes:
    """Why the last plan looks as it does; counters of one ``plan()`` call."""

    waited: bool = False
    """An allocation failed and the scheduler waited for a transfer instead of preempting."""
    victim_in_flight: bool = False
    """The request to preempt was still being computed, so nothing was done in this step."""
    preemptions: int = 0
    admissions: int = 0
    blocked_by: str | None = None
    """What kept the head of the queue out: gpu_blocks, host_blocks, max_num_seqs, token_budget or loading."""
    prefill_tokens: int = 0
    decode_tokens: int = 0
    scheduled: tuple[Request, ...] = ()
    """Requests that the plan lists one by one."""
    steady: tuple[Request, ...] = ()
    """Requests that decode one token as in the plan before."""
