"""The residency policy: what a request holds, where its pages can be read from, and when that changes.

The scheduler (:mod:`hisparsim.serving.core`) owns the queues, the token counts and the order in which things
happen; a policy owns memory. One engine step calls it like this::

    begin_step()
    for each running request:     extend(request, tokens)     it needs slots; False = it does not get them
                                  may_wait() / leave(victim)  what happens then
                                  seal(request, tokens)       tokens whose content is known: cache full pages
    for the head of the queue:    lookup(request)             what a prefix cache holds of it
                                  admit(request, hit, ...)    take memory, or change nothing and say False
    end_step(scheduled)           write back, lease, release, adopt

and between steps ``notify`` (transfers) and ``leave`` (finished requests). A policy records what it did in
``self.actions``; the real runner performs exactly these records.

To write one: subclass :class:`ResidencyPolicy` (or a policy that is close), implement the abstract methods,
and pass ``--policy path/to/file.py:ClassName``. :mod:`hisparsim.serving.policies.gpu_only` is the shortest
complete example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
from mypy_extensions import mypyc_attr
from numpy.typing import NDArray

from hisparsim.serving.blocks import BlockPool
from hisparsim.serving.limits import ServingLimits
from hisparsim.serving.plan import Action, IntArray, TransferUpdate
from hisparsim.serving.request import NEVER, Request

LateFree: TypeAlias = Callable[[], None]
"""Returns the blocks of a request that left while a step in flight could still write them."""


@mypyc_attr(native_class=False)
class PolicyError(ValueError):
    """A policy cannot work with these limits or options; one line says which and why."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Leading tokens of a request found in caches."""

    tokens: int = 0
    """Found where the request can use them at once."""
    loaded_tokens: int = 0
    """Further tokens that a slower tier holds and must bring first."""
    blocks: tuple[IntArray, ...] = ()
    """Blocks that hold the first ``tokens`` (policy's own order of groups)."""


NO_HIT = PrefixHit()


@dataclass(slots=True)
class Census:
    """Counts of a policy's memory right after a plan: blocks of the GPU pool unless named otherwise.

    ``pinned = resident_pinned + hot + index + orphans``; released pages are readable but count as free.
    """

    free: int = 0
    resident_pinned: int = 0
    resident_released: int = 0
    hot: int = 0
    index: int = 0
    orphans: int = 0
    watched_free: int = 0
    host_used: int = 0
    num_full: int = 0
    num_mixed: int = 0
    num_none: int = 0
    num_hot: int = 0
    pending_transfers: int = 0
    pages_lost: int = 0
    """In this step."""
    pages_adopted: int = 0
    """Since the start."""


REQUIRED = (
    "admission_blocks", "admit", "census", "check", "extend", "fits_alone", "leave", "lookup", "seal",
)  # fmt: skip
"""The abstract methods of :class:`ResidencyPolicy` (compiled classes do not tell theirs)."""


@mypyc_attr(allow_interpreted_subclasses=True)
class ResidencyPolicy(ABC):
    """See the module's docstring for the life of a step."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for ``hisparsim policies``."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Option -> default. ``policy.<option>`` in a scenario sets it; its type is the default's."""
    uses_groups: ClassVar[bool] = False
    """The pool is laid out in layer groups (indexer, resident and hot pages of one block size)."""
    starts_warm: ClassVar[bool] = False
    """A request's hot buffer holds the first rows of its context to begin with; otherwise it starts empty."""
    grows_quietly: ClassVar[bool] = False
    """While blocks are free, decodes that take pages and cache full ones start no transfer and change nothing
    for anybody else, so that stretches of them can be taken at once."""

    def __init__(self, limits: ServingLimits, **options: Any) -> None:
        unknown = set(options) - set(self.options)
        if unknown:
            known = ", ".join(sorted(self.options)) or "none"
            raise PolicyError(f"policy {self.name} has no option {sorted(unknown)[0]!r} (it has: {known})")
        for option, value in options.items():
            default = self.options[option]
            if type(value) is not type(default) and not (isinstance(default, float) and type(value) is int):
                raise PolicyError(
                    f"policy.{option} = {value!r}: policy {self.name} takes a {type(default).__name__} "
                    f"(default {default!r})"
                )
        self.limits = limits
        self.option_values = {**self.options, **options}
        self.pool = BlockPool(limits.num_blocks, "GPU pool")
        self.actions: list[Action] = []
        self.defers_frees = False
        """Blocks of a request that a step in flight may still write come back only after that step."""
        self.mirrors_prefill = False
        """Rows computed by prefill are copied to the host during the step."""
        self.mirrors_decode = False
        """So are rows computed by decodes."""
        self.blocked_by: str | None = None
        """Why the last ``extend`` or ``admit`` said no: ``gpu_blocks`` or ``host_blocks``."""

    # -- queries ----------------------------------------------------------------------------------

    @abstractmethod
    def lookup(self, request: Request) -> PrefixHit:
        """What caches hold of a request that is about to be admitted. Changes nothing."""

    @abstractmethod
    def admission_blocks(self, request: Request) -> tuple[int, int]:
        """(GPU, host) blocks that admitting the request without any hit asks for. Changes nothing."""

    def lacks(self, request: Request) -> str | None:
        """What a cold admission lacks now: ``gpu_blocks``, ``host_blocks`` or None. Changes nothing."""
        return "gpu_blocks" if self.admission_blocks(request)[0] > self.pool.num_free else None

    def may_wait(self) -> bool:
        """Whether a failed allocation should wait for a transfer rather than preempt. Changes nothing."""
        return False

    def missing_blocks(self, request: Request, num_tokens: int) -> int:
        """GPU blocks that an admitted request lacks to hold so many tokens. Changes nothing."""
        return max(self.limits.pages(num_tokens) - self._pages_of(request), 0)

    def draft_blocks(self) -> int:
        """GPU blocks that a request's drafts of one step may take at most. Changes nothing."""
        drafts = self.limits.draft_tokens
        return self.limits.pages(1 + 2 * drafts) if drafts else 0

    def quiet_until(self, request: Request) -> int:
        """Computed tokens below which a decode of one token needs neither ``extend`` nor ``seal`` nor
        anything in ``end_step``. Changes nothing.

        The default knows slots and keys; a policy with further events takes the least of them.
        """
        ledger = request.ledger
        if ledger is None or ledger.wants_more or ledger.paused:
            return 0
        # With two plans in flight the scheduler knows one token less than it has planned.
        return min(request.slot_tokens, request.next_seal + self.limits.async_depth - 2)

    def looks_at_all(self) -> bool:
        """Whether ``end_step`` has to see every scheduled request of this plan, not only those with something
        of their own to do. Changes nothing."""
        return False

    @abstractmethod
    def census(self, running: Sequence[Request]) -> Census:
        """Counts for the log. Changes nothing."""

    @abstractmethod
    def fits_alone(self, request: Request) -> str | None:
        """None if an empty engine can serve the request to its end, else one line that says what is short."""

    # -- changes ----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Start a plan: forget the counts of the one before."""
        self.blocked_by = None

    @abstractmethod
    def admit(self, request: Request, hit: PrefixHit, num_tokens: int, *, reserve: int) -> bool:
        """Take memory for the hit and the first ``num_tokens`` after it, or change nothing and say False.

        ``reserve`` blocks must stay free besides.
        """

    def admit_loading(self, request: Request, hit: PrefixHit, *, reserve: int, promised: int) -> bool:
        """As :meth:`admit` for a hit that is loaded before anything is computed.

        It must also leave the ``promised`` blocks, which prefills under way count on.
        """
        return self.admit(request, hit, 0, reserve=reserve + promised)

    @abstractmethod
    def extend(self, request: Request, num_tokens: int) -> bool:
        """Take slots for ``num_tokens`` more of a request, or change nothing and say False."""

    def resume(self, request: Request, num_tokens: int, *, reserve: int) -> bool:
        """As :meth:`extend` for a request whose load is complete: all that is known of it must fit."""
        missing = self.missing_blocks(request, min(request.known, self.limits.max_model_len))
        if missing + reserve > self.pool.num_free:
            self.blocked_by = "gpu_blocks"
            return False
        return self.extend(request, num_tokens)

    @abstractmethod
    def seal(self, request: Request, num_tokens: int) -> None:
        """The first ``num_tokens`` have known content: cache the pages that they fill. Sets ``next_seal``."""

    def end_step(self, scheduled: Sequence[tuple[Request, int]]) -> None:  # noqa: B027
        """Residency work after scheduling. Pairs give the tokens computed and known once the step is done.

        Steady decodes (see :meth:`quiet_until`) are left out unless :meth:`looks_at_all`.
        """

    def loaded(self, request: Request) -> None:  # noqa: B027
        """The load that a request waits for is complete; its pages hold their content."""

    @abstractmethod
    def leave(self, request: Request, *, finished: bool, in_flight: bool) -> LateFree | None:
        """Take everything back from a request that finished or is preempted.

        With ``in_flight`` a step under way may still write its blocks: they are detached now and come back
        when the returned function is called.
        """

    def notify(self, updates: Sequence[TransferUpdate]) -> None:  # noqa: B027
        """Transfers moved on."""

    # -- laws -------------------------------------------------------------------------------------

    @abstractmethod
    def check(self, running: Sequence[Request]) -> None:
        """Laws L1 to L5 over every ledger of the policy.

        Raises:
            LawBroken: with both sides.
        """

    # -- helpers ----------------------------------------------------------------------------------

    @staticmethod
    def _pages_of(request: Request) -> int:
        return request.ledger.num_pages if request.ledger is not None else 0

    def _slots(self, num_tokens: int) -> int:
        """Pages for so many tokens and the drafts of one step behind them."""
        limits = self.limits
        return limits.pages(min(num_tokens + limits.draft_tokens, limits.max_model_len))

    def _known_pages(self, request: Request) -> int:
        """Pages of all that is known of a request: its prompt, and after a preemption its output too."""
        return self.limits.pages(min(request.known, self.limits.max_model_len))

    def _end_pages(self, request: Request) -> int:
        return self.limits.pages(min(request.end_tokens, self.limits.max_model_len))

    def _capacity(self, request: Request) -> int:
        """Pages that a ledger should have room for from the start."""
        return self.limits.pages(min(request.end_tokens + 1, self.limits.max_model_len)) + 2

    def _plan_seal(self, request: Request, num_cached: int) -> None:
        """Set ``next_seal``, so many leading pages being cached."""
        keys = request.page_keys
        if self.limits.prefix_caching and keys is not None and num_cached < len(keys):
            request.next_seal = (num_cached + 1) * self.limits.page_tokens
        else:
            request.next_seal = NEVER

    @staticmethod
    def _too_large(request: Request, needed: int, wants: str, pool: BlockPool, settings: str) -> str | None:
        """None if the empty pool has so many blocks, else the line for :meth:`fits_alone`."""
        if needed <= pool.num_usable:
            return None
        return (
            f"request {request.request_id} needs {needed:,} {wants}, the {pool.name} has "
            f"{pool.num_usable:,} ({settings})"
        )


def key_array(keys: Sequence[int]) -> NDArray[np.int64]:
    return np.array(keys, np.int64)
