"""What a synthetic trace is drawn from: a description, as JSON. It holds distributions, never a row of a
trace.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import TraceError
from ..files import open_raw, read_some


def _rising(knots: list[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(knots) < 2 or knots[0][0] != 0 or knots[-1][0] != 1:
        raise ValueError("knots are (probability, value) pairs from probability 0 to 1")
    for (p, v), (q, w) in pairwise(knots):
        if not (p < q and v <= w and v >= 0):
            raise ValueError("knots rise in probability and do not fall in value, from 0 up")
    return knots


Knots = Annotated[list[tuple[float, float]], AfterValidator(_rising)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Arrivals(_Model):
    """When requests (or sessions) come.

    Attributes:
        rate_per_s: mean over the whole trace.
        cv: of the gaps, for gamma and weibull.
        on_s, off_s: mean lengths of bursts and silences, for on-off.
        profile: (start_s, factor) steps by which the rate varies; the last holds on.

    """

    process: Literal["poisson", "gamma", "weibull", "on-off", "at-once"] = "poisson"
    rate_per_s: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    cv: float = Field(default=1.0, gt=0.03, lt=100)
    on_s: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    off_s: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    profile: list[tuple[float, float]] = []

    @model_validator(mode="after")
    def _profile_rises(self) -> Arrivals:
        starts = [start for start, _ in self.profile]
        if starts and (
            starts[0] != 0 or starts != sorted(set(starts)) or any(f <= 0 for _, f in self.profile)
        ):
            raise ValueError("profile steps start at 0 s, rise, and have factors above 0")
        return self


class LengthsLaw(_Model):
    """Joint lengths: two distributions by knots, tied by a Gaussian copula of the given correlation."""

    input_tokens: Knots
    output_tokens: Knots
    correlation: float = Field(default=0.0, ge=-0.99, le=0.99)


class Root(_Model):
    """A common beginning (a system prompt) and the share of requests that have it."""

    share: float = Field(gt=0, le=1)
    blocks: int = Field(ge=1)


class ReuseBin(_Model):
    """For prompts up to `up_to_tokens`: the share of the blocks behind the root that an earlier one had."""

    up_to_tokens: int = Field(ge=1)
    shared: Knots


class Prefixes(_Model):
    """The prefix tree: common roots, and prompts that continue an earlier request's prompt.

    Attributes:
        reuse: bins of rising prompt length; the last holds for all longer prompts.
        recency_requests: how many requests back the continued one lies.
    """

    block_tokens: int = Field(default=512, ge=1)
    roots: list[Root] = []
    reuse: list[ReuseBin] = Field(min_length=1)
    recency_requests: Knots = [(0.0, 1.0), (1.0, 1000.0)]

    @model_validator(mode="after")
    def _bins_rise(self) -> Prefixes:
        bounds = [bin.up_to_tokens for bin in self.reuse]
        if bounds != sorted(set(bounds)):
            raise ValueError("reuse bins have rising up_to_tokens")
        if sum(root.share for root in self.roots) > 1 + 1e-9:
            raise ValueError("shares of the roots add up to at most 1")
        return self


class Shrinking(_Model):
    """Turns whose context was compacted or cut instead of continued.

    Attributes:
        share: of the later turns.
        ratio: the new prompt's length over the context it would have continued.
        shared: the share of the new prompt that still equals that context's beginning.
    """

    share: float = Field(ge=0, le=1)
    ratio: Knots
    shared: Knots


class Sessions(_Model):
    """Turns: each later prompt is its parent's prompt and output and `new_tokens` more, unless it shrinks.

    Attributes:
        max_context_tokens: a session whose next prompt and output would not fit ends instead.
    """

    turns: Knots
    new_tokens: Knots
    think_s: Knots
    max_context_tokens: int = Field(default=1_000_000, ge=2)
    shrinking: Shrinking | None = None


class Description(_Model):
    """Everything a synthetic trace is drawn from; with sessions, input lengths are those of first turns."""

    name: str = Field(min_length=1)
    seed: int = Field(default=0, ge=0)
    num_requests: int = Field(ge=1, le=50_000_000)
    arrivals: Arrivals
    lengths: LengthsLaw
    prefixes: Prefixes | None = None
    sessions: Sessions | None = None
    source: str = ""

    @model_validator(mode="after")
    def _one_kind_of_prefix(self) -> Description:
        if self.prefixes and self.sessions:
            raise ValueError("a description has prefixes or sessions, not both")
        return self


def read_description(path: Path) -> Description:
    """Raises TraceError where the file is missing, not JSON, or breaks a rule, and names the field."""
    with open_raw(path) as file:
        content = read_some(file, -1, path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(f"cannot be read as a description ({error})", path=path) from error
    return parse_description(text, path)


def parse_description(text: str, path: Path | None = None) -> Description:
    try:
        return Description.model_validate(json.loads(text))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "description"
        raise TraceError(f"{field}: {first['msg']}", path=path) from error
    except (ValueError, RecursionError) as error:
        raise TraceError(f"is not JSON ({error})", path=path) from error


def description_text(description: Description) -> str:
    return json.dumps(description.model_dump(exclude_none=True), indent=1) + "\n"


def with_rate(description: Description, rate_per_s: float) -> Description:
    """The same description at another mean rate."""
    if not (rate_per_s > 0 and rate_per_s < float("inf")):
        raise TraceError(f"rate {rate_per_s}: must be a finite number above 0")
    arrivals = description.arrivals.model_copy(update={"rate_per_s": rate_per_s})
    return description.model_copy(update={"arrivals": arrivals})
