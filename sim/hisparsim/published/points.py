"""The published points: scenario, trace and figures of each."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import numpy as np

from hisparsim.des.simulate import simulate
from hisparsim.results.metrics import run_row
from hisparsim.specs.scenario import Scenario
from hisparsim_traces import Trace, closed_loop, conversations

_SHORTEST = 0.8
"""Share of the nominal length from which the serving client draws uniformly."""


@dataclass(frozen=True)
class PublishedPoint:
    """One published run. ``figures`` maps a metric of ``replay --json`` to its published value."""

    set_name: str
    label: str
    overrides: tuple[str, ...]
    trace: Trace
    figures: dict[str, float]


@dataclass(frozen=True)
class PointResult:
    """A point's published figures beside the simulated ones."""

    point: PublishedPoint
    simulated: dict[str, float]

    def errors(self) -> dict[str, float]:
        """Query: (simulated - published) / published of each figure."""
        return {name: self.simulated[name] / value - 1 for name, value in self.point.figures.items()}


def published_points(only: str | None = None) -> Iterator[PublishedPoint]:
    """Query: the points of all sets, or of one.

    Raises:
        ValueError: no set has that name.
    """
    text = resources.files("hisparsim.published").joinpath("points.toml").read_text(encoding="utf-8")
    sets = tomllib.loads(text)["sets"]
    names = [entry["name"] for entry in sets]
    if only is not None and only not in names:
        raise UnknownSetError(f"no published set is named {only!r}; there are: {', '.join(names)}")
    for entry in sets:
        if only is None or entry["name"] == only:
            make = _conversation_point if entry["kind"] == "conversations" else _closed_loop_point
            for point in entry["points"]:
                yield make(entry, point)


class UnknownSetError(ValueError):
    """A set of published points that is not there."""


def simulate_point(point: PublishedPoint) -> PointResult:
    """The simulated figures of a point."""
    scenario = Scenario.load(None, point.overrides)
    result = simulate(scenario, point.trace)
    row = run_row(result)
    steps = result.steps  # published means of running requests leave out moments without any
    row["mean_running"] = float(np.average(steps["running"], weights=steps["duration_ns"]))
    return PointResult(point, {name: _metric(row, name) for name in point.figures})


def _metric(row: dict[str, Any], name: str) -> float:
    value: Any = row
    for part in name.split("."):
        value = value[part]
    return float(value)


def _conversation_point(entry: dict[str, Any], point: list[Any]) -> PublishedPoint:
    policy, drafts, users, count, tpot_ms, tokens_per_s_gpu, running = point
    trace = conversations(
        count, entry["turns"], entry["first_tokens"], entry["later_tokens"], entry["output_tokens"]
    )
    overrides = (*entry["set"], f"policy.name={policy}", f"speculation.draft_tokens={drafts}")
    if policy == "hybrid":  # the runs had 128 GiB of ordinary offload, which brings indexer pages back
        overrides = (*overrides, "policy.indexer_offload=true")
    figures = {
        "tpot_s.mean": tpot_ms / 1e3,
        "total_tokens_per_s": tokens_per_s_gpu * 8,
        "mean_running": running,
    }
    label = f"{policy}, {'MTP3' if drafts else 'no MTP'}, {users} users"
    return PublishedPoint(entry["name"], label, (*overrides, f"workload.concurrency={users}"), trace, figures)


def _closed_loop_point(entry: dict[str, Any], point: list[Any]) -> PublishedPoint:
    policy, prompt, output, users, ttft_ms, tpot_ms = point
    count = 10 * users
    rng = np.random.default_rng([prompt, output, users])
    drawn = [rng.integers(int(_SHORTEST * n), n + 1, count).astype(np.int64) for n in (prompt, output)]
    trace = replace(closed_loop(count, prompt, output), input_tokens=drawn[0], output_tokens=drawn[1])
    overrides = (*entry["set"], f"policy.name={policy}", f"workload.concurrency={users}")
    figures = {"ttft_s.mean": ttft_ms / 1e3, "tpot_s.mean": tpot_ms / 1e3}
    label = f"{policy}, {prompt:,} in, {output:,} out, {users} users"
    return PublishedPoint(entry["name"], label, overrides, trace, figures)
