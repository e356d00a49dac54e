"""``hisparsim recommend``: one configuration for a trace and an objective, in words and as engine flags."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .printing import print_json, say
from .replay import DEFAULT_POLICIES
from .sweep import execution_of, progress

if TYPE_CHECKING:
    from hisparsim.sweep.engine_flags import EngineFlags
    from hisparsim.sweep.recommend import Recommendation


def recommend(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="A trace file or a bundled trace's name.")],
    slo: Annotated[
        list[str] | None, typer.Option(help="metric=limit, such as ttft_s.p99=10; repeats.")
    ] = None,
    node: Annotated[str | None, typer.Option(help="Node preset, such as h200x8.")] = None,
    model: Annotated[str | None, typer.Option(help="Model preset, such as glm-5.3.")] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="A policy; repeats. Default: the main ones.")
    ] = None,
    scenario: Annotated[Path | None, typer.Option(help="Scenario file (TOML).")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value, kept as it is; repeats.")
    ] = None,
    concurrency: Annotated[int | None, typer.Option(help="Users in a closed loop.", min=1)] = None,
    limit: Annotated[int | None, typer.Option(help="The first requests of the trace only.", min=1)] = None,
    jobs: Annotated[int | None, typer.Option(help="Worker processes; default: one a core.", min=1)] = None,
    executor: Annotated[str, typer.Option(help="processes or ray.")] = "processes",
    address: Annotated[str | None, typer.Option(help="Address of a Ray cluster.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Search policies and sizes for a trace; answer in plain words, with flags for vLLM and SGLang."""
    from hisparsim.serving.policies import policy_class
    from hisparsim.specs.scenario import Origin, Scenario, known_keys
    from hisparsim.sweep.engine_flags import sglang_flags, vllm_flags
    from hisparsim.sweep.ranking import parse_slo
    from hisparsim.sweep.recommend import Trials
    from hisparsim.sweep.recommend import recommend as search
    from hisparsim.sweep.runner import running
    from hisparsim.sweep.shelf import Shelf, put
    from hisparsim_traces import load as load_trace

    given = list(overrides or [])
    given += [f"node.preset={node}"] if node else []
    given += [f"model.preset={model}"] if model else []
    given += [f"workload.concurrency={concurrency}"] if concurrency else []
    execution = execution_of(executor, jobs, address)
    objectives = [parse_slo(text) for text in slo or []]
    names = list(dict.fromkeys(policy or DEFAULT_POLICIES))
    for name in names:
        policy_class(name)
    base = Scenario.load(scenario, given)
    fixed = [key for key in known_keys() if base.origin(key) in (Origin.SET, Origin.FILE)]
    played = load_trace(trace, limit=limit)
    with (
        progress("runs", None) as advance,
        running(
            lambda place: Shelf({"trace": put(played, place / "trace")}),
            execution,
            on_done=lambda *_: advance(1),
        ) as runner,
    ):
        found = search(Trials(base, played, "trace", runner), names, objectives, fixed)
    flags = (vllm_flags(found.best.scenario), sglang_flags(found.best.scenario))
    if as_json:
        print_json(_answer(found, flags))
    else:
        _print(found, flags)


def _answer(found: Recommendation, flags: tuple[EngineFlags, ...]) -> dict[str, Any]:
    from hisparsim.sweep.wording import sentences

    def told(tried: Any) -> dict[str, Any]:
        metrics = (
            "output_tokens_per_s",
            "ttft_s.p50",
            "ttft_s.p99",
            "tpot_s.p50",
            "bound_by",
            "host_memory_gib",
        )
        return {**tried.values, **{name: tried.record.get(name) for name in metrics}}

    return {
        "policy": found.best.policy,
        "scenario": found.best.scenario.model_dump(mode="json"),
        "margin": found.margin,
        "margin_of": None if found.tightest is None else str(found.tightest),
        "meets_slo": not found.broken,
        "bound_by": found.best.record["bound_by"],
        "flags": {each.engine: str(each) for each in flags},
        "versions": {each.engine: each.version for each in flags},
        "notes": {each.engine: each.note for each in flags if each.note is not None},
        "best": told(found.best),
        "next_best": [told(other) for other in found.others],
        "sensitivity": [{"change": move.what, **told(move.tried)} for move in found.moves],
        "text": " ".join(sentences(found)),
    }


def _print(found: Recommendation, flags: tuple[EngineFlags, ...]) -> None:
    from hisparsim.sweep.wording import sentences

    for sentence in sentences(found):
        typer.echo(sentence)
    commands = {"vllm": "vllm serve MODEL", "sglang": "python -m sglang.launch_server --model-path MODEL"}
    for each in flags:
        typer.echo(f"\n{each.engine} {each.version}:\n{commands[each.engine]} {each}")
        if each.note is not None:
            say(f"{each.engine}: {each.note}")
