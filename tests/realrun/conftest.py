"""A small model and loads of requests, run in lockstep on real tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from hisparsim.locality.profile import load_profile
from hisparsim.serving.core import ServingCore
from hisparsim.serving.limits import ServingLimits
from hisparsim.serving.lockstep import Lags
from hisparsim.serving.policies import policy_class
from hisparsim.serving.request import RequestSpec
from hisparsim.specs.kv_layout import RowFormat
from hisparsim.specs.models import ModelSpec, load_model
from hisparsim_realrun.assemble import blueprint, make_executor
from hisparsim_realrun.devices import open_device
from hisparsim_realrun.executor import Executor
from hisparsim_realrun.geometry import geometry_of, sliced
from hisparsim_realrun.lockstep import LockstepLog, LockstepRunner
from hisparsim_realrun.options import RunOptions, SelectionMode

PAGE = 64


def tiny(num_layers: int = 3) -> ModelSpec:
    """The first layers of tiny-dsa, as small as its geometry allows: two experts, 64 selected rows."""
    changes = {"index_top_k": 64, "num_dense_layers": 1, "vocab_size": 256, "index_topk_freq": 2}
    changes |= {"index_skip_topk_offset": 1, "num_heads": 4}
    return sliced(load_model("tiny-dsa"), num_layers, 2).model_copy(update=changes)


@dataclass
class ClosedLoop:
    """So many users at a time; ``requests`` are (prompt, output, keys) in order of submission."""

    requests: list[tuple[int, int, np.ndarray[Any, Any] | None]]
    users: int
    _next: int = 0

    def first(self) -> list[RequestSpec]:
        return [self._take() for _ in range(min(self.users, len(self.requests)))]

    def after(self, request_id: int) -> RequestSpec | None:
        return self._take() if self._next < len(self.requests) else None

    def _take(self) -> RequestSpec:
        prompt, output, keys = self.requests[self._next]
        self._next += 1
        return RequestSpec(self._next, prompt, output, keys)


def loop(lengths: list[tuple[int, int]], users: int, shared_tokens: int = 0) -> ClosedLoop:
    """Users whose prompts begin with the same ``shared_tokens`` tokens."""
    requests = []
    for number, (prompt, output) in enumerate(lengths):
        keys = ((number + 1) << 32) + np.arange((prompt + output) // PAGE, dtype=np.int64)
        shared = min(shared_tokens, prompt) // PAGE
        keys[:shared] = np.arange(shared)
        requests.append((prompt, output, keys))
    return ClosedLoop(requests, users)


@dataclass
class Bench:
    """One policy on small pools."""

    policy: str
    num_blocks: int
    model: ModelSpec = field(default_factory=tiny)
    row_format: RowFormat = RowFormat.BF16
    draft_tokens: int = 0
    async_depth: int = 2
    max_batched_tokens: int = 96
    num_host_blocks: int = 40
    seed: int = 5
    invariant: bool = True
    selection: SelectionMode = SelectionMode.MODEL
    kernels: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def limits(self) -> ServingLimits:
        kind = policy_class(self.policy)
        geometry = geometry_of(
            self.model, self.row_format, packed=kind.uses_groups, with_mtp=self.draft_tokens > 0
        )
        hot_rows = self.model.index_top_k * (self.draft_tokens + 1) + PAGE
        base = ServingLimits(
            num_blocks=self.num_blocks,
            max_num_seqs=4,
            max_num_batched_tokens=self.max_batched_tokens,
            max_model_len=640,
            block_bytes=geometry.layout.block_bytes,
            host_block_bytes=geometry.layout.host_block_bytes,
            async_depth=self.async_depth,
            draft_tokens=self.draft_tokens,
            offload_blocks=12,
        )
        if not kind.uses_groups:
            return base
        return replace(
            base,
            num_groups=geometry.num_groups,
            hot_pages=-(-hot_rows // PAGE),
            hot_rows=hot_rows,
            num_host_blocks=self.num_host_blocks,
        )

    def core(self) -> ServingCore:
        return ServingCore(self.limits, policy_class(self.policy)(self.limits, **self.options))

    def executor(self, core: ServingCore) -> Executor:
        options = RunOptions(
            batch_invariant=self.invariant,
            keep_hidden=True,
            inline_copies=True,
            selection=self.selection,
        )
        profile = load_profile("glm-5.1", self.model.index_top_k)
        plan = blueprint(self.model, self.row_format, core.limits, core.policy, profile, options, self.seed)
        return make_executor(plan, open_device("cpu", self.kernels, threads=1))

    def run(
        self,
        users: ClosedLoop,
        *,
        lags: Lags | None = None,
        accepted: Callable[..., int] = lambda request, drafts: 0,
        change: Callable[[Executor], None] = lambda executor: None,
        max_steps: int | None = None,
    ) -> BenchRun:
        """Change: run in lockstep to the end; ``change`` may spoil the executor first."""
        core = self.core()
        executor = self.executor(core)
        change(executor)
        runner = LockstepRunner(core, executor.run, executor.content.register, accepted=accepted, check=True)
        log = runner.run(users, lags or Lags(), max_steps=max_steps)
        return BenchRun(log, executor, core)


@dataclass
class BenchRun:
    log: LockstepLog
    executor: Executor
    core: ServingCore

    @property
    def hidden(self) -> dict[tuple[int, int], torch.Tensor]:
        assert self.executor.hidden is not None
        return self.executor.hidden

    def differences(self, other: BenchRun) -> list[tuple[int, int]]:
        """Tokens (request, position) whose hidden states differ in some bit, of those that both computed."""
        both = self.hidden.keys() & other.hidden.keys()
        return sorted(key for key in both if not torch.equal(self.hidden[key], other.hidden[key]))


@pytest.fixture(scope="session")
def bench() -> type[Bench]:
    return Bench


@pytest.fixture(scope="session")
def closed_loop() -> Callable[..., ClosedLoop]:
    return loop
