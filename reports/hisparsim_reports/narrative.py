"""One paragraph in plain words: what was replayed, which policy did what, and what stood in the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hisparsim.results import RequestStatus, RunResult
from hisparsim.results.metrics import Metrics, compute_metrics, scenario_value
from hisparsim.results.steady import SteadyVerdict

from .numbers import count, ratio, seconds, share, three_digits

BASELINE = "gpu-only"
BOUND_BY = {
    "gpu_blocks": "GPU memory for KV",
    "host_blocks": "the host pool",
    "pcie": "PCIe",
    "compute": "GPU compute",
    "arrivals": "nothing but the arrivals",
}
"""``bound_by`` in words."""
SAME = 0.02
"""Figures closer than this share are called the same."""


def paragraph(runs: Sequence[RunResult], metrics: Sequence[Metrics] | None = None) -> str:
    """Query: the runs of one trace in a few sentences; runs without finished requests are named as such."""
    if not runs:
        return "Nothing was replayed."
    measured = [compute_metrics(run) for run in runs] if metrics is None else list(metrics)
    sentences = [_subject(runs)]
    served: dict[str, Metrics] = {}
    for run, m in zip(runs, measured, strict=True):
        if m.num_measured:
            served[run.policy] = m
        else:
            sentences.append(f"Under {run.policy} no request finished.")
    if served:
        sentences += _comparison(served)
        sentences += _load(served)
        sentences += _steadiness(served)
    sentences += _left_out(runs)
    return " ".join(sentences)


def _subject(runs: Sequence[RunResult]) -> str:
    trace, scenario = runs[0].trace, runs[0].scenario
    model = scenario_value(scenario, "model.preset") or "the model"
    node = scenario_value(scenario, "node.preset") or "the node"
    tp, dp = (scenario_value(scenario, f"parallel.{key}") for key in ("tp", "dp"))
    layout = f" (TP{tp}" + (f", DP{dp}" if dp and dp != 1 else "") + ")" if tp else ""
    policies = "one policy" if len(runs) == 1 else f"{len(runs)} policies"
    span = f" over {seconds(float(trace['span_s']))}" if trace.get("span_s") else ""
    scale = scenario_value(scenario, "workload.time_scale")
    stretched = f", with arrival times multiplied by {scale:g}" if scale not in (None, 1, 1.0) else ""
    memory = scenario_value(scenario, "node.memory")
    taken = f" GPU memory is taken as {memory}." if memory else ""
    return (
        f"{count(runs[0].num_requests)} requests of {trace.get('name', 'a trace')} "
        f"({count(trace.get('sum_input_tokens'))} prompt and {count(trace.get('sum_output_tokens'))} output "
        f"tokens{span}{stretched}) were replayed on {model}, {node}{layout}, under {policies}.{taken}"
    )


def _comparison(served: Mapping[str, Metrics]) -> list[str]:
    """Query: the policy that stands out, as factors of the baseline, and the others in brief."""
    base_name = BASELINE if BASELINE in served else next(iter(served))
    base = served[base_name]
    sentences = [
        f"{base_name} yields {three_digits(base.output_tokens_per_s)} output tokens a second with "
        f"{three_digits(base.mean_running)} requests running on average; half of its requests wait "
        f"{seconds(base.ttft_s.p50)} or less for their first token, then get one every "
        f"{seconds(base.tpot_s.p50)}."
    ]
    others = {name: m for name, m in served.items() if name != base_name}
    if not others:
        return sentences
    rates = [m.output_tokens_per_s for m in served.values()]
    if max(rates) <= min(rates) * (1 + SAME):
        best = min(served, key=lambda name: served[name].ttft_s.p50 or 0.0)
        sentences.append(f"All policies yield that throughput within {share(SAME)}.")
    else:
        best = max(served, key=lambda name: served[name].output_tokens_per_s)
    if best == base_name:
        sentences.append("No other policy does better.")
    else:
        m = others.pop(best)
        sentences.append(
            f"{best} does best: {_times(m.output_tokens_per_s, base.output_tokens_per_s)} that throughput "
            f"({three_digits(m.output_tokens_per_s)} tokens a second) with {three_digits(m.mean_running)} "
            f"running, a median wait {_longer(m.ttft_s.p50, base.ttft_s.p50)} ({seconds(m.ttft_s.p50)}), "
            f"a token every {seconds(m.tpot_s.p50)}."
        )
    if others:
        told = [
            f"{name} {_times(m.output_tokens_per_s, base.output_tokens_per_s)} with a median wait "
            f"{_longer(m.ttft_s.p50, base.ttft_s.p50)} ({seconds(m.ttft_s.p50)})"
            for name, m in others.items()
        ]
        sentences.append(f"The others, as multiples of {base_name}'s throughput: {_listed(told)}.")
    return sentences


def _load(served: Mapping[str, Metrics]) -> list[str]:
    """Query: offered load against capacity, and what binds, policies of the same answer together."""
    sentences = []
    loads: dict[str, list[str]] = {}
    for name, m in served.items():
        if m.offered_load is not None:
            loads.setdefault(f"{m.offered_load:.2f}×", []).append(name)
    if loads:
        told = [f"{load}{_under(names, served)}" for load, names in loads.items()]
        sentences.append(f"The offered load against what the node can sustain is {'; '.join(told)}.")
    bound: dict[str, list[str]] = {}
    for name, m in served.items():
        if m.bound_by is not None:
            bound.setdefault(BOUND_BY.get(m.bound_by, m.bound_by), []).append(name)
    if bound:
        told = [f"{what}{_under(names, served)}" for what, names in bound.items()]
        sentences.append(f"What binds is {'; '.join(told)}.")
    return sentences


def _steadiness(served: Mapping[str, Metrics]) -> list[str]:
    """Query: policies whose latencies depend on how long the trace is."""
    names: dict[SteadyVerdict, list[str]] = {}
    for name, m in served.items():
        names.setdefault(m.steady_state.verdict, []).append(name)
    sentences = []
    if growing := names.get(SteadyVerdict.GROWING):
        sentences.append(
            f"{_listed(growing)} {_verb(growing, 'reaches', 'reach')} no steady state: requests pile up as "
            "long as they arrive, and with a longer trace the waits would be longer."
        )
    if short := names.get(SteadyVerdict.TOO_SHORT):
        sentences.append(f"The trace is too short to show a steady state{_under(short, served)}.")
    return sentences


def _left_out(runs: Sequence[RunResult]) -> list[str]:
    """Query: requests that did not run to their end, by reason, where there are any."""
    words = {
        RequestStatus.REJECTED: "rejected",
        RequestStatus.SKIPPED: "skipped as too long",
        RequestStatus.CANCELLED: "cancelled",
        RequestStatus.UNFINISHED: "unfinished",
    }
    sentences = []
    for run in runs:
        counts = {word: int(run.has_status(status).sum()) for status, word in words.items()}
        told = [f"{count(number)} {word}" for word, number in counts.items() if number]
        if told:
            sentences.append(f"Under {run.policy} {_listed(told)}.")
    return sentences


def _times(value: float | None, base: float | None) -> str:
    return ratio(value / base) if value is not None and base else ratio(None)


def _longer(value: float | None, base: float | None) -> str:
    """Query: a duration against another: ``12.5× shorter``."""
    if not value or not base:
        return "that cannot be compared"
    if abs(value / base - 1) <= SAME:
        return "about as long"
    return f"{ratio(base / value)} shorter" if value < base else f"{ratio(value / base)} longer"


def _verb(names: Sequence[str], one: str, several: str) -> str:
    return one if len(names) == 1 else several


def _under(names: Sequence[str], served: Mapping[str, Metrics]) -> str:
    """Query: which policies a figure is of, nothing where it is of all of them."""
    return "" if len(names) == len(served) else f" under {_listed(names)}"


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
