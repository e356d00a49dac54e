"""What readers of session formats remember between rows."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LastTurn:
    """A session's latest usable row. `service_s` is NaN where the source does not record it."""

    session: int
    row: int
    turn: int
    time_s: float
    service_s: float
    context_tokens: int


@dataclass
class SessionBook:
    """Sessions by name, and the number of rows handed over so far."""

    last: dict[str, LastTurn] = field(default_factory=dict)
    num_rows: int = 0
    _next: int = 0

    def new_session(self) -> int:
        self._next += 1
        return self._next - 1
