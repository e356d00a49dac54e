"""The tokens of one step, all spans in one line: where their rows go, and which spans attend together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from .errors import RunDied
from .residency import Residency
from .selection import ProfileSelection
from .work import Span

if TYPE_CHECKING:
    from .device_decode import Placed

Ints = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class StepTokens:
    """Decodes first, then prefill chunks."""

    spans: tuple[Span, ...]
    parts: tuple[slice, ...]
    """Of each span, its tokens in the line."""
    positions: Ints
    num_decode_tokens: int
    rows: dict[int, Ints] = field(default_factory=dict)
    """Group -> [tokens] flat rows where the new rows go."""
    passes: tuple[tuple[int, ...], ...] = ()
    """Spans by number that attend together: their staged pages fit into the staging blocks."""
    queries: dict[int, torch.Tensor] = field(default_factory=dict)
    """Span -> [units, n, 128] queries of its output tokens, under a locality profile."""
    keys: torch.Tensor | None = None
    """[units, tokens, 128] index keys, under a locality profile."""
    placed: Placed | None = None
    """Rows of the decodes' selections in the unit at hand, where the device resolves them."""

    @property
    def num_decodes(self) -> int:
        return sum(not span.is_prefill for span in self.spans)


def step_tokens(
    spans: tuple[Span, ...],
    residency: Residency,
    num_staging_blocks: int,
    process: ProfileSelection | None,
) -> StepTokens:
    """Change: the tokens of a step, with queries and keys drawn where a locality profile gives them.

    Raises:
        RunDied: a token has no place, or a span stages more pages than there is room for.
    """
    ends = np.cumsum([span.count for span in spans])
    tokens = StepTokens(
        spans,
        tuple(slice(int(end) - span.count, int(end)) for end, span in zip(ends, spans, strict=True)),
        np.concatenate([np.arange(span.start, span.end) for span in spans]),
        sum(span.count for span in spans if not span.is_prefill),
    )
    for group in range(residency.geometry.num_groups):
        tokens.rows[group] = np.concatenate([residency.new_rows(span, group) for span in spans])
    tokens.passes = _passes(spans, residency, num_staging_blocks)
    if process is not None:
        tokens.keys = process.keys(spans)
        for number, span in enumerate(spans):
            if process.num_model_queries(span) < span.count:
                tokens.queries[number] = process.queries(span)
    return tokens


def _passes(
    spans: tuple[Span, ...], residency: Residency, num_staging_blocks: int
) -> tuple[tuple[int, ...], ...]:
    """Spans whose staged pages fit together, in order."""
    passes: list[list[int]] = [[]]
    room = num_staging_blocks
    for number, span in enumerate(spans):
        absent = residency.num_absent_pages(span) if span.is_prefill else 0
        if absent > num_staging_blocks:
            raise RunDied(
                f"request {span.request_id} stages {absent} pages, there is room for {num_staging_blocks}"
            )
        if absent > room:
            passes.append([])
            room = num_staging_blocks
        passes[-1].append(number)
        room -= absent
    return tuple(tuple(numbers) for numbers in passes)
