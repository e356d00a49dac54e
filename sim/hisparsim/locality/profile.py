"""Locality profiles: how often a decode misses its hot buffer, by name or file.

A profile is a miss curve of coherent layers and a share of incoherent ones, whose selection is drawn anew at
every step. The expected misses of one layer and step are, with q = the share of the context that is not
readable on the GPU otherwise, k the selected rows and B the buffer's rows,

    q k [ (1 - h) mu(B / (q k), n) + h (1 - B / (q n)) ]

which is exact for exchangeable positions (within 2 % of exact LRU for partly resident contexts). A verify
step of m tokens looks up the union of m selections; it misses m (1 - 0.16 (m - 1) / b^2) times as much.
These are misses of the steady state; what cold rows add is :meth:`LocalityProfile.refill`.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hisparsim.locality.miss_curve import CurveTableError, MissCurve
from hisparsim.locality.process import ProcessError, ScoreProcess
from hisparsim.locality.refill import Filling, Refill
from hisparsim.locality.surface import BUFFERS, CONTEXTS
from hisparsim.specs.errors import ScenarioError, unknown_name

_PROFILES = Path(__file__).parent / "profiles"
_UNION_SAVING = 0.16
"""Fit to exact LRU over unions at 100k: 445, 825 rows (m = 2, 4) against 233 at b = 2; within 2 %."""


class ProfileError(ScenarioError):
    """A profile file or counters that make no profile."""


@dataclass(frozen=True)
class LocalityProfile:
    """Expected misses of the hot buffers of a model with `top_k` selected rows."""

    name: str
    source: str
    top_k: int
    curve: MissCurve
    incoherent_share: float
    process: ScoreProcess | None = None
    """What generates selections of this profile; None where it is known by its misses only."""
    scale: float = 1.0
    """Factor on the coherent curve, from a server's counters."""

    def missed_millirows(
        self,
        context_tokens: NDArray[np.int64],
        resident_pages: NDArray[np.int64],
        pages: NDArray[np.int64],
        hot_rows: int,
        query_tokens: int = 1,
    ) -> NDArray[np.int64]:
        """Query: [n] expected rows missed in one layer by each request's step, times 1000.

        Steady state: what cold rows add is :meth:`refill`. Never more with more hot rows; 0 where all pages
        are resident or the buffer holds all rows that are not.
        """
        top_k = float(self.top_k)
        outside = 1.0 - resident_pages / np.maximum(pages, 1)
        selected = outside * np.minimum(context_tokens, top_k)
        buffer = hot_rows / (np.maximum(outside, 1e-12) * top_k)
        context = context_tokens / top_k
        share = self._share(buffer, context, query_tokens)
        if query_tokens > 1:  # rows share less with a larger buffer: never worse than the least
            share = np.minimum(share, self._share(np.full_like(buffer, query_tokens), context, query_tokens))
        millirows: NDArray[np.int64] = np.rint(selected * share * 1000.0).astype(np.int64)
        return millirows

    def refill(
        self,
        context_tokens: NDArray[np.int64],
        resident_pages: NDArray[np.int64],
        pages: NDArray[np.int64],
        cold_pages: NDArray[np.float64],
        hot_rows: int,
        *,
        starts_warm: bool = False,
    ) -> Refill:
        """Query: what `cold_pages` [n], among those that are not resident, add to the steady misses.

        `starts_warm`: the buffer holds the first rows of the context to begin with.
        """
        top_k = float(self.top_k)
        pages = np.maximum(pages, 1)
        outside = np.maximum(1.0 - resident_pages / pages, 1e-12)
        context = context_tokens / top_k
        buffer = np.minimum(hot_rows / (outside * top_k), context)
        cold = cold_pages / pages * np.minimum(context_tokens, top_k)
        if starts_warm:
            cold = cold * np.maximum(1.0 - hot_rows / np.maximum(context_tokens, 1), 0.0)
        return self._filling.refill(cold, buffer, context, self._share(buffer, context, 1))

    @cached_property
    def _filling(self) -> Filling:
        """The curve of all layers together, scaled as steady misses are."""
        buffers, contexts = (grid.ravel() for grid in np.meshgrid(BUFFERS, CONTEXTS))
        return Filling(self._share(buffers, contexts, 1).reshape(len(CONTEXTS), len(BUFFERS)))

    def _share(
        self, buffer: NDArray[np.float64], context: NDArray[np.float64], query_tokens: int
    ) -> NDArray[np.float64]:
        """Query: [n] missed over selected rows of one token, both lengths in units of top_k."""
        coherent = self.curve(buffer, context)
        if self.scale != 1.0:
            coherent = np.minimum(coherent * self.scale, 1.0)
        incoherent = np.maximum(0.0, 1.0 - buffer / context)
        share: NDArray[np.float64] = coherent + (incoherent - coherent) * self.incoherent_share
        if query_tokens > 1:
            near = np.maximum(buffer, query_tokens / 2)
            share = share * (query_tokens * (1.0 - _UNION_SAVING * (query_tokens - 1) / (near * near)))
        return share

    def miss_share(self, context_tokens: int, hot_rows: int) -> float:
        """Query: the share of the selected rows missed by a request without resident pages."""
        missed = self.missed_millirows(
            np.asarray([context_tokens]), np.asarray([0]), np.asarray([1]), hot_rows
        )
        return float(missed[0]) / 1000.0 / min(context_tokens, self.top_k)

    def fitted_to_counters(
        self, *, hits: int, misses: int, context_tokens: int, hot_rows: int, name: str = "counters"
    ) -> LocalityProfile:
        """Query: this profile, scaled to meet a server's hit and miss counters.

        vLLM counts `hisparse_cache_hits` and `_misses` over rows that are not resident; `context_tokens` is
        the typical context behind them. Raises ProfileError for counters that say nothing.
        """
        if hits < 0 or misses < 0 or hits + misses == 0:
            raise ProfileError(
                f"counters of {hits} hits and {misses} misses say nothing; give both, not both 0"
            )
        wanted = misses / (hits + misses)
        incoherent = self.incoherent_share * max(0.0, 1.0 - hot_rows / context_tokens)
        plain = self.miss_share(context_tokens, hot_rows) - incoherent
        if plain <= 0.0:
            raise ProfileError(
                f"a buffer of {hot_rows} rows holds a context of {context_tokens}: its misses tell no profile"
            )
        scale = self.scale * max(0.0, wanted - incoherent) / plain
        source = (
            f"{self.source}; scaled to {wanted:.1%} misses at {hot_rows} rows and {context_tokens} tokens"
        )
        return replace(self, name=name, source=source, scale=scale, process=None)


def profile_names() -> tuple[str, ...]:
    """Query: the names of the bundled profiles."""
    return tuple(sorted(path.stem for path in _PROFILES.glob("*.toml")))


def load_profile(name: str, top_k: int) -> LocalityProfile:
    """Query: the profile called `name`, or of a file where `name` ends in `.toml`, for a model's `top_k`.

    Raises UnknownNameError with the known names, or ProfileError for a file that is no profile.
    """
    if name.endswith(".toml"):
        path = Path(name)
    elif name in profile_names():
        path = _PROFILES / f"{name}.toml"
    else:
        raise unknown_name("locality profile", name, profile_names())
    table = _read(name, path)
    try:
        return _from_table(path.stem, table, top_k)
    except KeyError as error:
        raise ProfileError(f"locality profile {name!r} lacks {error.args[0]!r}") from None
    except (CurveTableError, ProcessError, TypeError, ValueError) as error:
        raise ProfileError(f"locality profile {name!r}: {error}") from None


def _read(name: str, path: Path) -> dict[str, Any]:
    """Query: a profile's table, laid over the bundled one that its `base` names."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ProfileError(f"locality profile file {name!r} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ProfileError(f"locality profile file {name!r} is not a TOML file: {error}") from None
    base = table.pop("base", None)
    if base is None:
        return table
    if base not in profile_names():
        raise unknown_name("locality profile", str(base), profile_names())
    return {**_read(base, _PROFILES / f"{base}.toml"), **table}


def _from_table(name: str, table: dict[str, Any], top_k: int) -> LocalityProfile:
    shares = [[percent / 100.0 for percent in row] for row in table["miss_percent"]]
    curve = MissCurve(int(table["top_k"]), table["hot_rows"], table["contexts"], shares)
    layers = table["layers"]
    process = ScoreProcess(**table["process"]) if table.get("process") else None
    return LocalityProfile(
        name=name,
        source=str(table["source"]),
        top_k=top_k,
        curve=curve,
        incoherent_share=layers["incoherent"] / layers["total"],
        process=process,
    )
