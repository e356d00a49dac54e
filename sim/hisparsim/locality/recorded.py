"""Recorded selections: streams drawn into a top-k file, and the misses of hot buffers that are fed with one.

    python -m hisparsim.locality.recorded run.topk 2048 4096 8192

prints what LRU, FIFO, random and Belady buffers of so many rows miss, in per cent of the selected rows. A
*stream* is one request in one layer group (`hisparsim_traces.topk`). The newest token of a step is written by
the step itself, so it is no miss; it takes a slot of the buffer where it is selected.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hisparsim.locality.caches import CacheError, Replacement, Selection, count_misses, lru_misses_by_size
from hisparsim.locality.miss_table import table_row
from hisparsim.locality.process import uniform_selections
from hisparsim.locality.profile import LocalityProfile
from hisparsim_traces.topk import TopkReader, TopkWriter

Ints = NDArray[np.int64]


class RecordingError(ValueError):
    """A recording that cannot be drawn, or says too little."""


@dataclass(frozen=True, eq=False)
class RecordedStream:
    """One request's selections in one layer group, in order of step; a step recorded twice counts once, as it
    was last.
    """

    request: int
    group: int
    contexts: Ints
    """[steps] tokens of context, the step's own included."""
    selections: tuple[Selection, ...]
    """[steps] positions selected, ascending."""


def draw_recording(
    path: str | Path,
    profile: LocalityProfile,
    *,
    context_tokens: Sequence[int],
    num_groups: int,
    num_steps: int,
    seed: int = 0,
) -> None:
    """Change: write a top-k file of a profile's own process, one request for each of `context_tokens`.

    The first groups are incoherent, as many as the profile's share says. The same arguments give the same
    bytes. Raises RecordingError where the profile is known by its misses only.
    """
    if profile.process is None:
        raise RecordingError(
            f"locality profile {profile.name!r} is known by its misses only: draw one with a [process]"
        )
    num_incoherent = round(profile.incoherent_share * num_groups)
    about = {"profile": profile.name, "source": profile.source, "seed": seed}
    streams: list[tuple[int, int, int, Iterator[Selection]]] = []
    for request, context in enumerate(context_tokens):
        for group in range(num_groups):
            own = int(np.random.SeedSequence([seed, request, group]).generate_state(1, np.uint64)[0])
            draw = uniform_selections if group < num_incoherent else profile.process.selections
            streams.append((request, group, context, draw(context, profile.top_k, num_steps, own)))
    with TopkWriter(path, top_k=profile.top_k, num_groups=num_groups, about=about) as writer:
        for step in range(num_steps):
            for request, group, context, selections in streams:
                writer.append(step, group, request, context + step + 1, np.sort(next(selections)))


def read_streams(path: str | Path) -> list[RecordedStream]:
    """Query: every stream of a top-k file, by request and group; 8 bytes a recorded position.

    Raises hisparsim_traces.TraceError for a file that is cut, damaged or none.
    """
    found: dict[tuple[int, int], dict[int, tuple[int, Selection]]] = {}
    for batch in TopkReader(path):
        for record in range(len(batch)):
            steps = found.setdefault((int(batch.request[record]), int(batch.group[record])), {})
            steps[int(batch.step[record])] = (int(batch.context[record]), batch.selected(record))
    return [
        RecordedStream(
            request,
            group,
            np.asarray([steps[step][0] for step in sorted(steps)], dtype=np.int64),
            tuple(steps[step][1] for step in sorted(steps)),
        )
        for (request, group), steps in sorted(found.items())
    ]


def stream_misses(
    stream: RecordedStream, hot_rows: Sequence[int], replacement: Replacement, *, seed: int = 0
) -> NDArray[np.int64]:
    """Query: [steps, len(hot_rows)] rows that each step misses in a buffer that starts empty.

    `seed` is for RANDOM. Raises CacheError where a selection exceeds the smallest buffer.
    """
    most = max((len(selection) for selection in stream.selections), default=0)
    if hot_rows and min(hot_rows) < most:
        raise CacheError(f"a buffer of {min(hot_rows)} rows cannot hold a selection of {most}")
    # A row beyond all, selected at every step, stands for the newest token that the counts leave out: so all
    # recorded rows are counted, whether or not a step selects its newest token, in one row more of buffer.
    mark = 1 + max((int(selection[-1]) for selection in stream.selections if len(selection)), default=0)
    marked = [np.append(selection, mark) for selection in stream.selections]
    sizes = [rows + 1 for rows in hot_rows]
    if replacement is Replacement.LRU:
        misses = lru_misses_by_size(marked, sizes)
    else:
        counts = [count_misses(marked, size, replacement, seed=seed) for size in sizes]
        misses = np.stack(counts, axis=1) if counts else np.zeros((len(marked), 0), np.int64)
    return misses - _written(stream)[:, None]


def _written(stream: RecordedStream) -> NDArray[np.bool_]:
    """Query: [steps] whether a step selects its newest token, which no earlier step has selected."""
    seen = np.zeros(int(stream.contexts.max(initial=0)) + 1, dtype=bool)
    written = np.zeros(len(stream.selections), dtype=bool)
    for step, (context, selection) in enumerate(zip(stream.contexts, stream.selections, strict=True)):
        newest = len(selection) > 0 and selection[-1] == context - 1
        written[step] = newest and not seen[context - 1]
        seen[selection] = True
    return written


def recorded_miss_shares(
    streams: Sequence[RecordedStream],
    hot_rows: Sequence[int],
    replacement: Replacement,
    *,
    skip_steps: int = 0,
    seed: int = 0,
) -> list[float]:
    """Query: the miss curve: for each buffer the share of the selected rows, the newest token not counted,
    that is missed; over all streams, without their first `skip_steps`, which only fill the buffers.

    Raises RecordingError where nothing is left to count, CacheError as `stream_misses`.
    """
    missed, looked_up = np.zeros(len(hot_rows), np.int64), 0
    for stream in streams:
        missed += stream_misses(stream, hot_rows, replacement, seed=seed)[skip_steps:].sum(axis=0)
        for context, selection in zip(
            stream.contexts[skip_steps:], stream.selections[skip_steps:], strict=True
        ):
            looked_up += len(selection) - int(len(selection) > 0 and selection[-1] == context - 1)
    if not looked_up:
        raise RecordingError(f"no selected row is left after {skip_steps} steps of {len(streams)} streams")
    return [float(share) for share in missed / looked_up]


def profile_text(
    streams: Sequence[RecordedStream],
    *,
    top_k: int,
    hot_rows: Sequence[int],
    skip_steps: int,
    source: str,
) -> str:
    """Query: a profile file (`locality.profile = "mine.toml"`) of what LRU buffers miss in a recording.

    A row for each request, at its mean context after `skip_steps`; all groups alike, so the share of
    incoherent layers is within the curve. Raises RecordingError where fewer than two contexts were recorded.
    """
    rows: dict[int, list[float]] = {}
    for request in sorted({stream.request for stream in streams}):
        own = [stream for stream in streams if stream.request == request]
        contexts = np.concatenate([stream.contexts[skip_steps:] for stream in own])
        shares = recorded_miss_shares(own, hot_rows, Replacement.LRU, skip_steps=skip_steps)
        context = round(float(contexts.mean()))
        rows[context] = table_row(shares, context, hot_rows)
    if len(rows) < 2:
        raise RecordingError(f"a profile takes requests of at least 2 contexts; {len(rows)} was recorded")
    table = "".join(f"    {rows[context]},\n" for context in sorted(rows))
    quoted = source.replace("\\", "\\\\").replace('"', '\\"')
    return (
        f'source = "{quoted}"\ntop_k = {top_k}\nhot_rows = {list(hot_rows)}\ncontexts = {sorted(rows)}\n'
        f"miss_percent = [\n{table}]\n\n[layers]\nincoherent = 0\ntotal = 1\n"
    )


def main(arguments: Sequence[str]) -> None:
    """Print the miss curves of a recording, its first half left out."""
    streams = read_streams(arguments[0])
    hot_rows = [int(argument) for argument in arguments[1:]]
    skip = max((len(stream.selections) for stream in streams), default=0) // 2
    print("replacement" + "".join(f"{rows:>9}" for rows in hot_rows))
    for replacement in Replacement:
        shares = recorded_miss_shares(streams, hot_rows, replacement, skip_steps=skip)
        print(f"{replacement.value:<11}" + "".join(f"{100 * share:>8.2f}%" for share in shares), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
