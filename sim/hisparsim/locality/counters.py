"""A server's counters of hot-buffer hits and misses, turned into a locality profile.

vLLM 0.33 counts `vllm:hisparse_cache_hits`, `_misses` and `_host_to_device_bytes` in Prometheus' text format,
one line an engine; a counter's name may end in `_total`. Rows found resident are not counted.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from hisparsim.locality.profile import (
    LocalityProfile,
    ProfileError,
    load_profile,
    profile_names,
)
from hisparsim.specs.errors import unknown_name

_PROFILES = Path(__file__).parent / "profiles"
_PREFIX = "vllm:hisparse_"
_LINE = re.compile(
    rf"{_PREFIX}(cache_hits|cache_misses|host_to_device_bytes)(?:_total)?(?:{{[^}}]*}})?\s+(\S+)"
)


@dataclass(frozen=True)
class HotCounters:
    """Counts of a server since it started, all engines together."""

    hits: int
    misses: int
    h2d_bytes: int

    def since(self, before: HotCounters) -> HotCounters:
        """Query: what was counted after ``before``. Raises ProfileError where counts fell (a restart)."""
        after = HotCounters(
            self.hits - before.hits, self.misses - before.misses, self.h2d_bytes - before.h2d_bytes
        )
        if min(after.hits, after.misses, after.h2d_bytes) < 0:
            raise ProfileError("the later counters are below the earlier ones: the server was restarted")
        return after


def read_counters(path: Path) -> HotCounters:
    """Query: the counters in a file of Prometheus text.

    Raises:
        ProfileError: no such file, or it has no such counters.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"counters file {str(path)!r} cannot be read: {error}") from None
    sums = {"cache_hits": 0.0, "cache_misses": 0.0, "host_to_device_bytes": 0.0}
    found = False
    for line in text.splitlines():
        match = _LINE.match(line.strip())
        if match is None:
            continue
        try:
            sums[match.group(1)] += float(match.group(2))
        except ValueError:
            raise ProfileError(f"counters file {str(path)!r}: {line!r} holds no number") from None
        found = True
    if not found:
        raise ProfileError(
            f"counters file {str(path)!r} has no {_PREFIX}cache_hits or _misses: HiSparse is off, or it "
            "is not what /metrics answered"
        )
    return HotCounters(
        round(sums["cache_hits"]), round(sums["cache_misses"]), round(sums["host_to_device_bytes"])
    )


def write_profile(
    counters: HotCounters, path: Path, *, base: str, context_tokens: int, hot_rows: int
) -> LocalityProfile:
    """Change: write the profile file of a server; returns the fitted profile.

    The base profile keeps its shape over buffers and contexts; its misses are scaled to the counters'.

    Raises:
        ProfileError: counters that say nothing, or a buffer that holds the whole context.
    """
    if base not in profile_names():
        raise unknown_name("locality profile", base, profile_names())
    table = tomllib.loads((_PROFILES / f"{base}.toml").read_text(encoding="utf-8"))
    while "miss_percent" not in table:
        below = (_PROFILES / f"{table.pop('base')}.toml").read_text(encoding="utf-8")
        table = {**tomllib.loads(below), **table}
    fitted = load_profile(base, int(table["top_k"])).fitted_to_counters(
        hits=counters.hits,
        misses=counters.misses,
        context_tokens=context_tokens,
        hot_rows=hot_rows,
        name=path.stem,
    )
    rows = [
        [min(round(percent * fitted.scale, 4), 100.0) for percent in row] for row in table["miss_percent"]
    ]
    text = [
        f'base = "{base}"',
        f'source = "{fitted.source}"',
        "miss_percent = [",
        *(f"    {row}," for row in rows),
        "]",
        "",
        "[process]",
        "# None: a profile known by its misses generates no selections.",
    ]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return fitted
