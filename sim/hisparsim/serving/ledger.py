"""What a policy keeps about one request that holds memory."""

from __future__ import annotations

from mypy_extensions import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class RequestLedger:
    """What a policy keeps about a request that holds memory. Policies add their own fields."""

    __slots__ = ("num_pages", "num_readable", "paused", "wants_more")

    def __init__(self) -> None:
        self.num_pages = 0
        """Pages allocated."""
        self.num_readable = 0
        """Pages readable on the GPU (or about to be written there)."""
        self.paused = False
        """The request may not be scheduled until a transfer is done."""
        self.wants_more = False
        """The next scheduling pass must call ``extend`` even if the slots suffice (a lease is due)."""
