"""Who performs a step: this process alone, or ranks under torchrun with NCCL or Gloo.

Rank 0 decides: it broadcasts the blueprint once and then each step's work, with the requests that are new in
it. Every rank applies the same actions to tables of its own and keeps all KV; heads, the MLPs' inner columns
and experts are cut into shards. The host pool is one mapping that all ranks of the node share: rank 0 fills
it, everybody reads it, and a step is broadcast only when the step before has been mirrored.

A rank that dies closes its connections, so the others' next collective fails: that ends the run with one line
that names it.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hisparsim.serving.request import RequestSpec

from .assemble import Blueprint, make_executor
from .copies import CopyEngine
from .devices import Device, open_device
from .errors import RealRunError, RunDied, death_of
from .executor import Executor, StepOutput
from .model import sum_of
from .options import RunOptions
from .residency import RowCounts
from .work import StepWork

TIMEOUT_S = 300
"""A collective that takes longer counts as a dead rank."""


class Crew(Protocol):
    """The ranks of a run, as rank 0 sees them."""

    num_ranks: int

    @property
    def copies(self) -> CopyEngine: ...

    @property
    def row_counts(self) -> RowCounts: ...

    def build(self, plan: Blueprint) -> None:
        """Change: allocate pools and weights on every rank."""

    def register(self, spec: RequestSpec) -> None:
        """Change: a request was submitted."""

    def start(self, work: StepWork) -> None:
        """Change: begin a step."""

    def wait(self) -> StepOutput:
        """Change: the step's output, when it has ended on this rank."""

    def describe(self) -> str:
        """Query: the device in words."""

    def close(self) -> None:
        """Change: let everybody go."""


class Solo:
    """One process, one device."""

    num_ranks = 1

    def __init__(self, options: RunOptions) -> None:
        self.device = open_device(options.device, options.kernels, threads=options.threads)
        self._executor: Executor | None = None
        self._work: StepWork | None = None

    @property
    def executor(self) -> Executor:
        assert self._executor is not None
        return self._executor

    @property
    def copies(self) -> CopyEngine:
        return self.executor.copies

    @property
    def row_counts(self) -> RowCounts:
        return self.executor.residency.counts

    def build(self, plan: Blueprint) -> None:
        self._executor = make_executor(plan, self.device)

    def register(self, spec: RequestSpec) -> None:
        self.executor.content.register(spec)

    def start(self, work: StepWork) -> None:
        self._work = work

    def wait(self) -> StepOutput:
        assert self._work is not None
        return self.executor.run(self._work)

    def describe(self) -> str:
        return describe(self.device, 1)

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close()


@dataclass(frozen=True)
class _Message:
    """What rank 0 sends for a step; ``work`` is None when the run is over."""

    specs: tuple[RequestSpec, ...]
    work: StepWork | None


class _Member:
    """What all ranks do alike."""

    def __init__(self, options: RunOptions) -> None:
        rank, local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        self.rank = rank
        self.num_ranks = int(os.environ["WORLD_SIZE"])
        self.device: Device = open_device(
            options.device, options.kernels, threads=options.threads, local_rank=local_rank
        )
        backend = "cpu:gloo,cuda:nccl" if self.device.is_cuda else "gloo"
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S))
        except (RuntimeError, ValueError, dist.DistError) as error:
            raise RealRunError(
                f"the {self.num_ranks} ranks did not meet: {error}; start them with torchrun"
            ) from None
        mine = (os.uname().nodename, os.getpid())
        self._processes: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(self._processes, mine)
        if len({host for host, _ in self._processes}) > 1:
            raise RealRunError("ranks on more than one node: the host pool is shared within one node only")

    def send(self, message: Any) -> Any:
        """Change: rank 0's object, on every rank.

        Raises:
            RunDied: a rank is gone.
        """
        box = [message]
        try:
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        except (RuntimeError, dist.DistError) as error:
            raise self.death(error) from error
        return box[0]

    def death(self, error: Exception) -> RunDied:
        """Query: the error that says which rank is gone."""
        gone = [rank for rank, (_, pid) in enumerate(self._processes) if not _is_alive(pid)]
        if gone:
            return RunDied(f"rank {gone[0]} of {self.num_ranks} is gone (seen by rank {self.rank})")
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return RunDied(f"rank {self.rank} of {self.num_ranks} lost the others: {first}")

    def combine(self, partials: list[torch.Tensor]) -> torch.Tensor:
        """Change: the sum over all ranks' shards: one all-reduce."""
        total = sum_of(partials)
        try:
            dist.all_reduce(total)
        except (RuntimeError, dist.DistError) as error:
            raise self.death(error) from error
        return total

    def combine_in_order(self, partials: list[torch.Tensor]) -> torch.Tensor:
        """Change: as :meth:`combine`, added shard by shard in ascending order, whatever the ranks."""
        own = torch.stack(partials)
        everybody = [torch.empty_like(own) for _ in range(self.num_ranks)]
        try:
            dist.all_gather(everybody, own)
        except (RuntimeError, dist.DistError) as error:
            raise self.death(error) from error
        return sum_of([partial for rank in everybody for partial in rank])

    def executor(self, plan: Blueprint, path: Path) -> Executor:
        """Change: this rank's executor over the shared host pool."""
        combine = self.combine_in_order if plan.batch_invariant else self.combine
        return make_executor(
            plan,
            self.device,
            rank=self.rank,
            num_ranks=self.num_ranks,
            combine=combine,
            shared_path=path,
        )


class Leader(_Member):
    """Rank 0: plans, broadcasts, and performs its own part."""

    def __init__(self, options: RunOptions) -> None:
        super().__init__(options)
        self._executor: Executor | None = None
        self._specs: list[RequestSpec] = []
        self._work: StepWork | None = None
        self._over = False

    @property
    def _own(self) -> Executor:
        assert self._executor is not None
        return self._executor

    @property
    def copies(self) -> CopyEngine:
        return self._own.copies

    @property
    def row_counts(self) -> RowCounts:
        return self._own.residency.counts

    def build(self, plan: Blueprint) -> None:
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        descriptor, name = tempfile.mkstemp(prefix="hisparsim-host-pool-", dir=folder)
        os.close(descriptor)
        path = Path(name)
        try:
            self.send((plan, path))
            self._executor = self.executor(plan, path)
            self.send("ready")
        finally:
            path.unlink(missing_ok=True)

    def register(self, spec: RequestSpec) -> None:
        self._own.content.register(spec)
        self._specs.append(spec)

    def start(self, work: StepWork) -> None:
        message = _Message(tuple(self._specs), work)
        self._specs.clear()
        self._work = work
        try:
            self.send(message)
        except RunDied:
            self._over = True
            raise

    def wait(self) -> StepOutput:
        assert self._work is not None
        try:
            return self._own.run(self._work)
        except RunDied:
            self._over = True
            raise

    def describe(self) -> str:
        return describe(self.device, self.num_ranks)

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close()
        if not self._over:
            self._over = True
            with suppress(RunDied):
                self.send(_Message((), None))
        if dist.is_initialized():
            dist.destroy_process_group()


def follow(options: RunOptions) -> None:
    """Change: the life of a rank beside rank 0, until the run is over.

    Raises:
        RunDied: rank 0 or another rank is gone, or this rank cannot go on.
    """
    member = _Member(options)
    first = member.send(None)
    if isinstance(first, _Message):  # the scenario could not be run
        dist.destroy_process_group()
        return
    executor = member.executor(*first)
    member.send(None)
    while True:
        message: _Message = member.send(None)
        if message.work is None:
            break
        for spec in message.specs:
            executor.content.register(spec)
        try:
            executor.run(message.work)
        except Exception as error:
            raise death_of(error) or error from error
    dist.destroy_process_group()


def describe(device: Device, num_ranks: int) -> str:
    """Query: a device in words."""
    if device.is_cuda:
        name = torch.cuda.get_device_name(device.torch_device)
    else:
        name = f"CPU, {torch.get_num_threads()} compute threads"
    ranks = f", {num_ranks} ranks" if num_ranks > 1 else ""
    return f"{name}, {device.kernels.value} kernels{ranks}"


def _is_alive(pid: int) -> bool:
    """Query: whether a process of this machine still runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"
