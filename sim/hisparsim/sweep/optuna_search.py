"""Multi-objective search by Optuna's tree-structured Parzen estimator over the points of a grid.

Needs the extra ``[search]``. Trials are asked for in batches of fixed size and told in their order, so
what is tried depends on the seed alone and not on how many workers there are or which is faster.
"""

from __future__ import annotations

import warnings
from typing import Any

from .axes import Axis, Value
from .columns import ERROR, Record
from .errors import MissingLibraryError
from .grid import Rules
from .ranking import violated
from .search import COMPLETE, Candidates, Verdict, prefixes

BATCH = 8
MAX_ASKS = 10
"""Asks for each combination wanted, since the sampler repeats itself where it is sure."""
UNDEFINED_COST = 1e12
"""What Optuna is told of an objective that has no value."""


def optuna_search(candidates: Candidates, num_trials: int, seed: int) -> dict[int, Verdict]:
    """Change: try ``num_trials`` different combinations; returns what became of each that was tried.

    The sampler may come back to a combination: that costs no run and counts for nothing.

    Raises:
        MissingLibraryError: Optuna is not installed.
    """
    try:
        import optuna
    except ModuleNotFoundError:
        raise MissingLibraryError("--search optuna needs optuna: pip install 'hisparsim[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the constraints of the sampler are marked experimental
        sampler = optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=min(10, num_trials), constraints_func=_constraints
        )
        study = optuna.create_study(directions=["minimize"] * len(candidates.objectives), sampler=sampler)
        prefix = prefixes(candidates.plan, len(candidates))[0]
        verdicts: dict[int, Verdict] = {}
        wanted, num_asked = min(num_trials, len(candidates)), 0
        while len(verdicts) < wanted and num_asked < MAX_ASKS * wanted:
            batch = [study.ask() for _ in range(min(BATCH, wanted - len(verdicts)))]
            num_asked += len(batch)
            chosen = [candidates.find(_suggest(trial, candidates)) for trial in batch]
            early = candidates.evaluate(chosen, prefix)
            if candidates.constraints and prefix is not None:
                sound = [i for i, r in zip(chosen, early, strict=True) if not _is_broken(r, candidates)]
            else:
                sound = chosen
            whole = dict(zip(sound, candidates.evaluate(sound, None), strict=True))
            for trial, i, record in zip(batch, chosen, early, strict=True):
                verdict = COMPLETE if i in whole else Verdict(prefix, _reason(record, candidates))
                verdicts[i] = verdict
                _tell(study, trial, whole.get(i, record), candidates)
    return verdicts


def _suggest(trial: Any, candidates: Candidates) -> dict[str, Value]:
    """Change: let the sampler choose a value of every axis that applies; the values as a point holds them."""
    definition = candidates.plan.definition
    rules, full = Rules(definition.conditions), dict(definition.fixed)
    undecided: list[Axis] = list(definition.axes)
    keys = set(definition.axis_keys)
    while undecided:  # axes first that the conditions of others ask about; conditions have no circles
        ready = next(
            axis for axis in undecided if all(not rules.needs(key) & keys - set(full) for key in axis.keys)
        )
        undecided.remove(ready)
        active = [key for key in ready.keys if rules.active(key, full)]
        i = trial.suggest_int(",".join(ready.keys), 0, len(ready.values) - 1) if active else 0
        full |= dict(zip(ready.keys, ready.values[i], strict=True))
    return {key: full[key] for key in definition.axis_keys if rules.active(key, full)}


def _tell(study: Any, trial: Any, record: Record, candidates: Candidates) -> None:
    costs = [objective.cost(record) for objective in candidates.objectives]
    excess = [constraint.excess(record) for constraint in candidates.constraints]
    failed = record[ERROR] is not None
    limited = [
        min(max(value, -UNDEFINED_COST), UNDEFINED_COST) for value in (1.0 if failed else 0.0, *excess)
    ]
    trial.set_user_attr("constraints", limited)
    study.tell(trial, [min(cost, UNDEFINED_COST) for cost in costs])


def _constraints(trial: Any) -> list[float]:
    """Query: what Optuna reads as broken where above 0."""
    values: list[float] = trial.user_attrs["constraints"]
    return values


def _is_broken(record: Record, candidates: Candidates) -> bool:
    return record[ERROR] is not None or bool(violated(record, candidates.constraints))


def _reason(record: Record, candidates: Candidates) -> str:
    if record[ERROR] is not None:
        return "failed"
    return f"pruned: not {violated(record, candidates.constraints)[0]}"
