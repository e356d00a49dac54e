"""Miss tables of a score process, measured by exact LRU: how the bundled profiles are made.

    python -m hisparsim.locality.miss_table 0.4 0.99678 0.58544

prints the table of a process with these three parameters (fast share, slow and fast correlation), as it
stands in a profile file. Contexts and buffers are those of top_k 2048, scaled to a smaller top_k: the misses
depend on the ratios only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hisparsim.locality.caches import lru_misses_by_size
from hisparsim.locality.process import ScoreProcess

TOP_K = 2048
HOT_ROWS = (2048, 2560, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768)
CONTEXTS = (
    3072, 4096, 6144, 8192, 16_384, 32_768, 65_536, 131_072, 262_144, 524_288, 1_048_576,
)  # fmt: skip
MEASURED_TOP_K = 256
WARM_UP_STEPS = 1500
"""Four to five slow time scales of the fitted process."""
MEASURED_STEPS = 500
_LEAST_SHARE = 1e-4
"""Below, a table of this many selections only shows chance: the row ends."""


def measure_miss_shares(
    process: ScoreProcess,
    context_tokens: int,
    hot_rows: Sequence[int],
    *,
    top_k: int = MEASURED_TOP_K,
    warm_up_steps: int = WARM_UP_STEPS,
    measured_steps: int = MEASURED_STEPS,
    seed: int = 0,
) -> list[float]:
    """Query: steady miss share for each buffer, which like the context is in units of top_k 2048."""
    selections = process.selections(
        context_tokens * top_k // TOP_K,
        top_k,
        warm_up_steps + measured_steps,
        seed,
        growing=False,
    )
    buffers = [rows * top_k // TOP_K for rows in hot_rows]
    misses = lru_misses_by_size(selections, buffers, skip_steps=warm_up_steps)
    return [float(share) for share in misses.mean(axis=0) / (top_k - 1)]


def table_row(shares: Sequence[float], context_tokens: int, hot_rows: Sequence[int]) -> list[float]:
    """Query: a row of a profile in per cent: it ends where the buffer holds all, or at mere chance."""
    row = []
    for share, rows in zip(shares, hot_rows, strict=True):
        if rows >= context_tokens or share < _LEAST_SHARE:
            break
        row.append(round(100.0 * share, 2))
    return row


def main(arguments: Sequence[str]) -> None:
    """Print the miss table of a process."""
    fast_share, slow, fast = (float(argument) for argument in arguments)
    process = ScoreProcess(fast_share, slow, fast)
    print(f"hot_rows = {list(HOT_ROWS)}\ncontexts = {list(CONTEXTS)}\nmiss_percent = [")
    for context in CONTEXTS:
        print(
            f"    {table_row(measure_miss_shares(process, context, HOT_ROWS), context, HOT_ROWS)},",
            flush=True,
        )
    print("]")


if __name__ == "__main__":
    main(sys.argv[1:])
