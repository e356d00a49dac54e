"""The cost interface: a step's load in, the nanoseconds of its named terms out.

Each term is rounded to whole nanoseconds once, where it is made; the total is their exact sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hisparsim.cost.curve import Counts
from hisparsim.cost.load import StepLoad


@dataclass(frozen=True, slots=True)
class Background:
    """What other flows (write-backs, restores, staging to host) move over a GPU's link meanwhile."""

    h2d_bytes_per_s: float = 0.0
    d2h_bytes_per_s: float = 0.0


QUIET = Background()
"""No flow on the links but the step's own."""


@dataclass(slots=True)
class StepCost:
    """Nanoseconds of a step by term: ints for one step, ints or int64 [k] for k steps."""

    terms: Mapping[str, Counts]
    """Every term, in the order of :class:`~hisparsim.cost.terms.Term`."""
    total_ns: Counts
    """The sum of the terms."""
    h2d_bytes: Counts
    """Bytes that the step itself reads from the host, for one GPU."""
    d2h_bytes: Counts
    """Bytes that the step itself mirrors to the host, for one GPU that writes (write-backs are flows)."""

    def totals(self, num_steps: int) -> NDArray[np.int64]:
        """Query: [num_steps] the total of each step."""
        if isinstance(self.total_ns, np.ndarray):
            return self.total_ns
        return np.full(num_steps, self.total_ns, np.int64)

    def series(self, term: str, num_steps: int) -> NDArray[np.int64]:
        """Query: [num_steps] one term of each step."""
        return np.broadcast_to(np.asarray(self.terms[term], dtype=np.int64), (num_steps,))


class CostModel(Protocol):
    """How long a step takes. Implementations are pure: the same load and background give the same cost."""

    def price(self, load: StepLoad, background: Background = QUIET) -> StepCost:
        """Query: the cost of a load. k steps in one call equal k calls, bit for bit."""

    def front_end_ns(self, prompt_tokens: int) -> int:
        """Query: time of the serial front end (HTTP, template, tokeniser) for one request."""

    def idle_start_ns(self) -> int:
        """Query: time between an arrival at an idle engine and the step that it can be in."""

    def sources(self) -> Mapping[str, str]:
        """Query: where the figures of each term come from, for people."""
