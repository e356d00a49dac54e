"""Requests as the scheduler sees them: token counts, and the content identity of their pages."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from hisparsim.serving.ledger import RequestLedger

NEVER = 1 << 62
"""A token count that is never reached."""


class Status(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    """Blocks are held while a transfer from a slower tier fills them."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    CANCELLED = "cancelled"


@dataclass(slots=True, eq=False)
class RequestSpec:
    """A request as it is submitted.

    ``page_keys`` holds the content key of each page that the prompt and the output fill completely
    (``(prompt_tokens + output_tokens) // page_tokens`` of them or more): equal keys mean equal content and
    equal content before it. ``None`` means that nothing is shared.
    """

    request_id: int
    prompt_tokens: int
    output_tokens: int
    page_keys: NDArray[np.int64] | None = None


class Request:
    """Counters of one request between submission and finish (vLLM's names in brackets).

    With two plans in flight the scheduler runs ahead of the tokens it knows: ``computed`` counts scheduled
    tokens, ``known`` only prompt and tokens that came back, ``placeholders`` bridges the two.
    """

    __slots__ = (
        "base_completed", "base_planned", "computed", "drafts", "end_tokens", "given_up_at", "hit_tokens",
        "in_flight", "key_list", "known", "last_plan", "ledger", "next_seal", "num_preemptions",
        "output_tokens", "page_keys", "placeholders", "prefilling", "prompt_tokens", "request_id",
        "slot_tokens", "stale", "status", "steady", "steady_since", "steady_through", "times_given_up",
        "wake",
    )  # fmt: skip

    def __init__(self, spec: RequestSpec) -> None:
        self.request_id = spec.request_id
        self.prompt_tokens = spec.prompt_tokens
        self.output_tokens = 0
        """Tokens produced and returned."""
        self.end_tokens = spec.prompt_tokens + spec.output_tokens
        """Prompt plus the tokens that were asked for."""
        self.page_keys = spec.page_keys
        self.key_list: list[int] | None = None
        self.status = Status.WAITING
        self.known = spec.prompt_tokens
        """Prompt and returned tokens [num_tokens]."""
        self.computed = 0
        """Tokens whose KV is computed or scheduled to be [num_computed_tokens]."""
        self.placeholders = 0
        """Output tokens in flight [num_output_placeholders]."""
        self.in_flight = 0
        """Scheduled tokens whose step has not come back [num_in_flight_tokens]."""
        self.stale = 0
        """Of those, tokens scheduled before a preemption [num_stale_output_tokens]."""
        self.drafts = 0
        """Speculative tokens to verify in the next step."""
        self.prefilling = True
        """The last scheduled chunk did not reach the end of what is known."""
        self.slot_tokens = 0
        """Tokens that the held pages can take without another allocation."""
        self.next_seal = 0
        """Known tokens at which the policy wants to hear of it (another page is full)."""
        self.last_plan = 0
        """Sequence number of the last plan that computes tokens of it."""
        self.num_preemptions = 0
        self.given_up_at = -1
        """Most tokens that it had computed when it preempted itself while nobody else held memory."""
        self.times_given_up = 0
        """How often that happened at this token."""
        self.hit_tokens: int | None = None
        """Prefix tokens found at the first admission."""
        self.steady = False
        """Gains one token in every plan; its counters are brought up to date when somebody looks."""
        self.steady_since = 0
        """Last plan that lists it one by one; the later ones imply it."""
        self.steady_through = -1
        """Last plan whose token came to it unlisted."""
        self.base_planned = 0
        self.base_completed = 0
        self.wake = 0
        """First plan in which something may happen to it besides one more token."""
        self.ledger: RequestLedger | None = None
        """What the policy keeps about it while it holds memory."""

    def keys(self, num_pages: int) -> list[int]:
        """Content keys of the first ``num_pages`` pages, as plain ints."""
        if self.page_keys is None:
            return []
        if self.key_list is None:
            self.key_list = self.page_keys.tolist()
        return self.key_list[:num_pages]

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.value}, prompt {self.prompt_tokens}, "
            f"computed {self.computed}, known {self.known}, end {self.end_tokens})"
        )
