"""Where the time of a step goes: one clock a rank, marked at the end of each stretch of work."""

from __future__ import annotations

import time

import torch

from hisparsim.cost.terms import Term

from .devices import Device


class StepClock:
    """Adds the time since the last mark to a term.

    On a CPU work is done when its call returns, so marks read the wall clock. On a GPU they record events on
    the stream, read when the step has ended; nothing waits in between.
    """

    def __init__(self, device: Device) -> None:
        self._on_gpu = device.is_cuda
        self._last_ns = 0
        self._events: list[tuple[Term | None, torch.cuda.Event]] = []
        self.terms_ns: dict[Term, int] = {}

    def start(self) -> None:
        """Change: a step begins."""
        self.terms_ns = {}
        self._events = []
        self._last_ns = time.perf_counter_ns()
        if self._on_gpu:
            self._record(None)

    def mark(self, term: Term) -> None:
        """Change: the work since the last mark was of this term."""
        if self._on_gpu:
            self._record(term)
            return
        now = time.perf_counter_ns()
        self.terms_ns[term] = self.terms_ns.get(term, 0) + now - self._last_ns
        self._last_ns = now

    def split(self, decode: Term, prefill: Term, decode_tokens: int, tokens: int) -> None:
        """Change: the work since the last mark served decodes and prefill together, token for token."""
        if not 0 < decode_tokens < tokens:
            self.mark(decode if decode_tokens else prefill)
            return
        before = self.terms_ns.get(prefill, 0)
        self.mark(prefill)
        if not self._on_gpu:
            share = (self.terms_ns[prefill] - before) * decode_tokens // tokens
            self.terms_ns[prefill] -= share
            self.terms_ns[decode] = self.terms_ns.get(decode, 0) + share

    def finish(self) -> dict[Term, int]:
        """Query: nanoseconds by term, after the device has been waited for."""
        for (_, before), (term, after) in zip(self._events, self._events[1:], strict=False):
            assert term is not None
            elapsed = round(before.elapsed_time(after) * 1e6)
            self.terms_ns[term] = self.terms_ns.get(term, 0) + elapsed
        self._events = []
        return dict(self.terms_ns)

    def _record(self, term: Term | None) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append((term, event))
