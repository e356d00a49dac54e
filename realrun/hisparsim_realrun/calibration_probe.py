"""Probes of a calibration: short loads of many compositions, and what each of their steps did and took.

A probe is a closed loop of random prompts under one policy, played by the engine that is to be predicted.
Together they cover what the scenario allows: batches up to `max_num_seqs`, chunks up to
`max_num_batched_tokens`, contexts up to `max_model_len`, requests on the GPU, partly and not at all. Their
lengths and seeds are the calibration's own; no workload that is validated is among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hisparsim.cost.load import StepLoad
from hisparsim.cost.terms import Term
from hisparsim.results.records import RunResult
from hisparsim.serving.policies import policy_class
from hisparsim.specs.scenario import Scenario
from hisparsim.specs.setup import PoolKind
from hisparsim.specs.weights import GIB
from hisparsim_traces import Trace, closed_loop, conversations, poisson

from .engine import RealRun, run_real
from .executor import StepOutput
from .options import RunOptions
from .ranks import Solo
from .work import StepWork

SEED = 77
NOT_IDLE = -1
WARM_UP_STEPS = 3
"""First steps of a probe that are left out: caches and thread pools fill."""
LEAST_OUTPUT = 4
TURNS = 3
"""Turns of the conversations that find, load and stage prefixes."""
POLICIES = ("gpu-only", "host-resident", "hybrid", "prefix-offload")
"""Both kinds of pool, with and without a host tier; every residency a request can have."""
IDLE_RATE_PER_S = 3.0
"""Arrivals of the probe that finds the engine idle, mostly."""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Probe:
    """One short load."""

    policy: str
    pressed: bool
    """The GPU pool holds about half of what may run."""
    users: int
    num_requests: int
    turns: int
    """Of a conversation; 1 = requests without a prefix in common."""
    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    seed: int
    rate_per_s: float | None = None
    """Open arrivals in place of the users."""

    def scenario(self, base: Scenario) -> Scenario:
        """Query: the scenario that the probe runs in."""
        return base.with_overrides(
            [
                f"policy.name={self.policy}",
                f"workload.concurrency={self.users if self.rate_per_s is None else 'null'}",
                "workload.limit=null",
                "workload.rate_per_s=null",
                "workload.time_scale=1",
                *([f"kv.gpu_kv_gib={pressed_gib(base):.6g}"] if self.pressed else []),
            ]
        )

    def trace(self) -> Trace:
        """Query: its requests."""
        if self.turns > 1:
            sessions = max(self.num_requests // self.turns, 1)
            low, high = self.input_tokens
            first, later = (low, max(high // 2, low)), (low, max(high // (2 * self.turns), low))
            return conversations(sessions, self.turns, first, later, self.output_tokens, seed=self.seed)
        if self.rate_per_s is not None:
            lengths = self.input_tokens, self.output_tokens
            return poisson(self.num_requests, self.rate_per_s, *lengths, self.seed)
        return closed_loop(self.num_requests, self.input_tokens, self.output_tokens, seed=self.seed)


@dataclass(frozen=True, eq=False)
class StepSamples:
    """Steps that ran: loads [n] beside nanoseconds [n] by term, overhead between steps included in LAUNCH."""

    loads: tuple[StepLoad, ...]
    terms_ns: dict[Term, NDArray[np.int64]]
    duration_ns: NDArray[np.int64]
    """From a step's start to the next one's, where the loop had work to do."""
    run: NDArray[np.int64]
    """Number of the probe."""
    idled_ns: NDArray[np.int64]
    """From the arrival that ended an idle time to the step's start; NOT_IDLE where there was work before."""

    def __len__(self) -> int:
        return len(self.loads)

    @classmethod
    def joined(cls, parts: Sequence[StepSamples]) -> StepSamples:
        """Query: the samples of several runs, numbered."""
        return cls(
            tuple(load for part in parts for load in part.loads),
            {term: np.concatenate([part.terms_ns[term] for part in parts]) for term in Term},
            np.concatenate([part.duration_ns for part in parts]),
            np.concatenate([np.full(len(part), number, np.int64) for number, part in enumerate(parts)]),
            np.concatenate([part.idled_ns for part in parts]),
        )


class Listener(Solo):
    """A crew of one that notes the load of every step it performs."""

    def __init__(self, options: RunOptions, *, top_k: int, resolve: bool) -> None:
        super().__init__(options)
        self.top_k = top_k
        self.resolve = resolve
        self.loads: list[StepLoad] = []

    def start(self, work: StepWork) -> None:
        self.loads.append(StepLoad.of(work.plan, top_k=self.top_k, resolve=self.resolve))
        super().start(work)

    def wait(self) -> StepOutput:
        output = super().wait()
        millirows = output.missed_rows * 1000 // self.executor.model.num_layers
        self.loads[-1] = replace(self.loads[-1], missed_millirows=millirows)
        return output


def run_listening(
    scenario: Scenario, trace: Trace, options: RunOptions, *, skip: int = 0
) -> tuple[RealRun, StepSamples]:
    """Change: a real run and the samples of its steps, the first ``skip`` left out."""
    packed = policy_class(scenario.policy.name).uses_groups
    crew = Listener(options, top_k=scenario.model_spec.index_top_k, resolve=packed)
    run = run_real(scenario, trace, options, crew=crew)
    return run, samples_of(run.result, crew.loads, skip)


def samples_of(result: RunResult, loads: Sequence[StepLoad], skip: int) -> StepSamples:
    """Query: steps of a run with their loads; the pause before the next step is overhead of this one.

    Unless nothing was to do: that pause is nobody's, and the step after it has been waited for.
    """
    steps = result.steps
    start, end = steps["start_ns"], steps["start_ns"] + steps["duration_ns"]
    arrivals, finishes = (np.sort(result.requests[name]) for name in ("arrival_ns", "finish_ns"))
    alive = arrivals.searchsorted(end, "right") - finishes.searchsorted(end, "right")
    gaps = np.where(alive > 0, np.append(start[1:] - end[:-1], 0), 0)
    begun_by = arrivals[np.maximum(arrivals.searchsorted(start, "right") - 1, 0)]
    waited = np.append(True, alive[:-1] == 0)
    terms = {term: steps[f"cost_{term.value}_ns"][skip:].copy() for term in Term}
    terms[Term.LAUNCH] += gaps[skip:]
    return StepSamples(
        tuple(loads[skip:]),
        terms,
        (steps["duration_ns"] + gaps)[skip:],
        np.zeros(len(start[skip:]), np.int64),
        np.where(waited, start - begun_by, NOT_IDLE)[skip:],
    )


def probes_of(scenario: Scenario, *, scale: float = 1.0, seed: int = SEED) -> list[Probe]:
    """Query: the probes that cover a scenario, in an order that mixes policies and batches.

    Args:
        scale: multiplies the number of requests of each.
    """
    limits = scenario.scheduler
    window = limits.max_model_len
    most_output = max(min(window // 8, 24), LEAST_OUTPUT)
    longest = max(window - most_output - 1, 1)
    batches = sorted(
        {1, max(limits.max_num_seqs // 4, 1), max(limits.max_num_seqs // 2, 1), limits.max_num_seqs}
    )
    probes: list[Probe] = []
    for number, policy in enumerate(POLICIES):
        for users in batches:
            lengths = (1, longest) if (number + users) % 2 else (1, max(longest // 3, 1))
            requests = max(round(scale * (4 + 2.5 * users)), 2)
            outputs = (LEAST_OUTPUT, most_output)
            probes.append(Probe(policy, False, users, requests, 1, lengths, outputs, seed + len(probes)))
        requests, outputs = round(scale * 20), (LEAST_OUTPUT, most_output // 2)
        users, lengths = limits.max_num_seqs, (1, max(longest - TURNS * most_output, 1))
        probes.append(Probe(policy, True, users, requests, TURNS, lengths, outputs, seed + len(probes)))
    outputs, lengths = (LEAST_OUTPUT, most_output // 2), (1, longest)
    requests = max(round(scale * 20), 2)
    probes.append(
        Probe(POLICIES[0], False, 1, requests, 1, lengths, outputs, seed + len(probes), IDLE_RATE_PER_S)
    )
    order = np.random.default_rng([seed, 1]).permutation(len(probes))
    return [probes[place] for place in order]


def pressed_gib(scenario: Scenario) -> float:
    """Query: GiB of GPU pool for half of the requests that may run, each half as long as the window."""
    setup = scenario.setup(PoolKind.WHOLE)
    pages = setup.max_pages_per_request * scenario.scheduler.max_num_seqs / 4
    return max(pages, setup.max_pages_per_request) * setup.baseline_block_bytes * 1.25 / GIB


def run_probes(
    scenario: Scenario, probes: Sequence[Probe], options: RunOptions, progress: Progress | None = None
) -> StepSamples:
    """Change: play the probes one after another."""
    parts: list[StepSamples] = []
    for number, probe in enumerate(probes, 1):
        if progress is not None:
            progress(f"probe {number} of {len(probes)}: {probe.policy}, {probe.users} users")
        _, samples = run_listening(probe.scenario(scenario), probe.trace(), options, skip=WARM_UP_STEPS)
        parts.append(samples)
    return StepSamples.joined(parts)


def describe_coverage(samples: StepSamples) -> dict[str, Any]:
    """Query: what the samples cover, for the file and for people."""
    decodes = [load.num_decodes for load in samples.loads]
    contexts = [int(load.max_context_tokens) for load in samples.loads]
    return {
        "num_steps": len(samples),
        "max_decodes": max(decodes),
        "max_prefill_tokens": max(load.prefill_tokens for load in samples.loads),
        "max_context_tokens": max(contexts),
        "steps_with_misses": sum(bool(load.missed_millirows) for load in samples.loads),
        "steps_with_staging": sum(bool(load.staged_pages) for load in samples.loads),
    }
