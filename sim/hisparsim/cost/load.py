"""What a price depends on: the integer aggregates of one step, or of a stretch of like steps.

Composition (how many decodes, chunks, which graph) is the same in all steps of a load; the counts that move
while contexts grow are an int, or an int64 array [k] with one entry a step.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from mypy_extensions import mypyc_attr
from numpy.typing import NDArray

from hisparsim.cost.curve import Counts
from hisparsim.serving.plan import DecodeBatch, PrefillChunk, StepPlan, WriteBack


@mypyc_attr(native_class=False)
class LoadError(ValueError):
    """Aggregates that cannot come from a step."""


@dataclass(slots=True)
class StepLoad:
    """Aggregates of one step, or of `num_steps` steps of the same composition.

    Built by :meth:`of` from a plan and by :meth:`stretch` for k quiet steps, and not changed afterwards
    (one is built in every step, and a frozen dataclass takes four times as long).
    """

    # Composition: the same in every step.
    num_decodes: int = 0
    """Requests that decode."""
    query_tokens: int = 1
    """Tokens computed for each of them: 1, or 1 + drafts."""
    graph_requests: int = 0
    """Batch size of the CUDA graph that serves the step; 0 = eager."""
    num_prefills: int = 0
    prefill_tokens: int = 0
    """Prompt tokens computed."""
    prefill_past_tokens: int = 0
    """Sum over these tokens of the tokens before them in their request."""
    prefill_selected_rows: int = 0
    """Sum over these tokens of the rows a layer that they attend to: at most top_k each."""
    hot_rows: int = 0
    """Rows a layer of a request's hot buffer."""
    resolve: bool = False
    """The policy looks every selected row up (resident, hot or host) in each indexer layer."""

    # Counts that may move from step to step.
    sum_context_tokens: Counts = 0
    """Sum over the decodes of the tokens each can attend to."""
    max_context_tokens: Counts = 0
    selected_rows: Counts = 0
    """Rows a layer that the decodes' query tokens attend to: at most top_k each."""
    hot_requests: Counts = 0
    """Decodes that read some pages through a hot buffer."""
    missed_millirows: Counts = 0
    """Expected rows missed in one layer, summed over the decodes, times 1000."""
    staged_pages: Counts = 0
    """Pages of earlier context that prefill reads from the host."""
    mirrored_tokens: Counts = 0
    """Tokens whose rows of all layers are copied to the host in the step."""
    write_back_bytes: Counts = 0
    """Bytes of page write-backs that start with the step, for one GPU."""
    expert_tokens: Counts | None = None
    """Tokens that the expert layers see where other replicas share them (EP); None = this step's own."""

    @property
    def num_steps(self) -> int | None:
        """k where some count is an array [k], None for a single step."""
        for name in MOVING:
            value = getattr(self, name)
            if isinstance(value, np.ndarray):
                return len(value)
        return None

    @property
    def decode_tokens(self) -> int:
        return self.num_decodes * self.query_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return self.num_decodes * self.query_tokens + self.prefill_tokens

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        *,
        top_k: int,
        resolve: bool,
        missed_millirows: int = 0,
    ) -> StepLoad:
        """Query: the load of a plan.

        `top_k` is the model's; `resolve` whether the policy runs a residency resolver; `missed_millirows`
        the expected rows missed in one layer, summed over the decodes, times 1000.
        """
        decodes = plan.decodes
        num_decodes = len(decodes.request_ids)
        past = selected = tokens = staged = 0
        for chunk in plan.prefills:
            tokens += chunk.num_tokens
            past += past_tokens(chunk)
            selected += selected_rows(chunk, top_k)
            staged += chunk.staged_pages
        write_back_bytes = 0
        for action in plan.actions:
            if isinstance(action, WriteBack):
                write_back_bytes += action.num_bytes
        if num_decodes:
            context = decodes.context_tokens.tolist()  # the plain sums are faster up to a hundred decodes
            sum_context = decode_rows = sum(context)
            max_context = max(context)
            if max_context > top_k:
                decode_rows = int(np.minimum(decodes.context_tokens, top_k).sum())
            decode_rows *= decodes.query_tokens
            hot_requests = 0
            if decodes.hot_rows:
                hot_requests = int(np.count_nonzero(decodes.resident_pages < decodes.pages))
        else:
            sum_context = max_context = decode_rows = hot_requests = 0
        return cls(
            num_decodes=num_decodes,
            query_tokens=decodes.query_tokens,
            graph_requests=plan.graph_bucket or 0,
            num_prefills=len(plan.prefills),
            prefill_tokens=tokens,
            prefill_past_tokens=past,
            prefill_selected_rows=selected,
            hot_rows=decodes.hot_rows,
            resolve=resolve,
            sum_context_tokens=sum_context,
            max_context_tokens=max_context,
            selected_rows=decode_rows,
            hot_requests=hot_requests,
            missed_millirows=missed_millirows,
            staged_pages=staged,
            mirrored_tokens=plan.mirrored_tokens,
            write_back_bytes=write_back_bytes,
        )

    @classmethod
    def stretch(
        cls,
        decodes: DecodeBatch,
        num_steps: int,
        *,
        top_k: int,
        resolve: bool,
        graph_requests: int,
        growth_tokens: int | None = None,
        hot_requests: Counts = 0,
        missed_millirows: Counts = 0,
        mirrored_tokens: Counts = 0,
        write_back_bytes: Counts = 0,
    ) -> StepLoad:
        """Query: the load of `num_steps` decode-only steps, the first of which is `decodes`.

        Every context grows by `growth_tokens` a step (None: by the query tokens). The counts that depend on
        where pages lie are given: an int, or [num_steps].
        """
        if num_steps < 1 or decodes.num_requests < 1:
            raise LoadError(
                f"a stretch of {num_steps} steps of {decodes.num_requests} decodes: both must be at least 1"
            )
        query = decodes.query_tokens
        growth = query if growth_tokens is None else growth_tokens
        context = decodes.context_tokens
        grown = np.arange(num_steps, dtype=np.int64) * growth
        sum_context = int(context.sum()) + grown * decodes.num_requests
        max_context = int(context.max()) + grown
        selected = sum_context if max_context[-1] <= top_k else _grown_selected_rows(context, grown, top_k)
        return cls(
            num_decodes=decodes.num_requests,
            query_tokens=query,
            graph_requests=graph_requests,
            hot_rows=decodes.hot_rows,
            resolve=resolve,
            sum_context_tokens=sum_context,
            max_context_tokens=max_context,
            selected_rows=selected * query,
            hot_requests=hot_requests,
            missed_millirows=missed_millirows,
            mirrored_tokens=mirrored_tokens,
            write_back_bytes=write_back_bytes,
        )

    def with_expert_tokens(self, tokens: Counts) -> StepLoad:
        """Query: the same load where the expert layers see `tokens` tokens, those of all replicas (EP)."""
        return replace(self, expert_tokens=tokens)

    def step(self, index: int) -> StepLoad:
        """Query: the load of one step of a stretch, all counts plain ints."""
        moved: dict[str, Any] = {
            name: int(value[index]) for name in MOVING if isinstance(value := getattr(self, name), np.ndarray)
        }
        return replace(self, **moved)

    def check(self) -> None:
        """Raise LoadError where a count is negative or arrays differ in length."""
        lengths = set()
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if isinstance(value, np.ndarray):
                lengths.add(len(value))
            if np.any(np.asarray(value) < 0):
                raise LoadError(f"{field.name} is negative: {value}")
        if len(lengths) > 1:
            raise LoadError(f"the arrays of a load differ in length: {sorted(lengths)}")


MOVING = (
    "sum_context_tokens",
    "max_context_tokens",
    "selected_rows",
    "hot_requests",
    "missed_millirows",
    "staged_pages",
    "mirrored_tokens",
    "write_back_bytes",
    "expert_tokens",
)
"""The fields of a load that may be arrays."""


def past_tokens(chunk: PrefillChunk) -> int:
    """Query: the sum, over a chunk's tokens, of the tokens before each in its request."""
    n = chunk.num_tokens
    return n * chunk.start_token + n * (n - 1) // 2


def selected_rows(chunk: PrefillChunk, top_k: int) -> int:
    """Query: the sum, over a chunk's tokens, of the rows each attends to: itself and all before, <= top_k."""
    n, start = chunk.num_tokens, chunk.start_token
    short = min(max(top_k - start, 0), n)
    return short * start + short * (short + 1) // 2 + (n - short) * top_k


def _grown_selected_rows(
    context: NDArray[np.int64], grown: NDArray[np.int64], top_k: int
) -> NDArray[np.int64]:
    """Query: [k] sum over requests of min(context + grown, top_k)."""
    short = context[context < top_k]
    rows = np.full(len(grown), (len(context) - len(short)) * top_k, dtype=np.int64)
    if len(short):
        rows += np.minimum(short[None, :] + grown[:, None], top_k).sum(axis=1)
    return rows
