"""Selections written to a top-k trace (:mod:`hisparsim_traces.topk`), and played back from one.

One record a decoded token and index unit: its step counts the request's output tokens, its group is the unit.
A token that is decoded again (a rejected draft's place) is recorded again; the last record counts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hisparsim_traces import TraceError
from hisparsim_traces.topk import TopkReader, TopkWriter

from .errors import RealRunError
from .geometry import Unit
from .work import Span

Ints = NDArray[np.int64]


class SelectionRecorder:
    """Writes what decodes select."""

    def __init__(self, path: Path, *, top_k: int, num_units: int, model: str) -> None:
        """Raises RealRunError where the file cannot be made."""
        try:
            self._writer = TopkWriter(path, top_k=top_k, num_groups=num_units, about={"model": model})
        except OSError as error:
            raise RealRunError(f"selections cannot be written to {path}: {error.strerror}") from None

    def note(self, span: Span, unit: Unit, selection: Ints, prompt_tokens: int) -> None:
        """Change: record a decode's selection [count, top_k]; prompt tokens among them are left out."""
        for position, chosen in zip(range(span.start, span.end), selection, strict=True):
            if position >= prompt_tokens:
                step = position - prompt_tokens
                self._writer.append(step, unit.index, span.request_id, position + 1, chosen[chosen >= 0])

    def close(self) -> None:
        """Change: write the file's end."""
        self._writer.close()


class RecordedSelections:
    """Plays recorded selections back."""

    def __init__(self, path: Path, *, top_k: int, num_units: int) -> None:
        """Raises RealRunError for a file that is no top-k trace or one of another model."""
        try:
            reader = TopkReader(path)
            batches = list(reader)
        except (TraceError, OSError) as error:
            raise RealRunError(f"selections of {path}: {error}") from None
        if (reader.head.top_k, reader.head.num_groups) != (top_k, num_units):
            raise RealRunError(
                f"selections of {path} are of {reader.head.top_k} rows in {reader.head.num_groups} groups; "
                f"the model selects {top_k} in {num_units}"
            )
        self._chosen: dict[tuple[int, int, int], Ints] = {}
        for batch in batches:
            for record in range(len(batch)):
                key = (int(batch.request[record]), int(batch.group[record]), int(batch.step[record]))
                self._chosen[key] = batch.selected(record)

    def replace(self, span: Span, unit: Unit, selection: Ints, prompt_tokens: int) -> Ints:
        """Query: ``selection`` [count, top_k] with the recorded tokens' lines put in place."""
        out = selection.copy()
        for line, position in enumerate(range(span.start, span.end)):
            chosen = self._chosen.get((span.request_id, unit.index, position - prompt_tokens))
            if chosen is not None:
                out[line] = -1
                out[line, : len(chosen)] = chosen
        return out
