"""The GPU memory left for KV, by the formula of vLLM's published concurrency calculator.

    KV GiB per GPU = memory x gpu_memory_utilization - weights per GPU - runtime reserve, rounded to 0.1

Which memory: the calculator takes the nominal 141 GB of an H200, the device reports 143,771 MiB. The 9 GiB
between them are half of a TP8 KV budget, so every budget says which one it took.
"""

from __future__ import annotations

from dataclasses import dataclass

from hisparsim.specs.errors import WeightsDoNotFitError
from hisparsim.specs.models import ModelSpec
from hisparsim.specs.nodes import MemoryFigure, NodeSpec
from hisparsim.specs.weights import GIB, WeightFormat, weight_bytes


@dataclass(frozen=True)
class GpuBudget:
    """Where the memory of one GPU goes, in GiB."""

    memory_figure: MemoryFigure
    memory_gib: float
    gpu_memory_utilization: float
    weights_gib: float
    runtime_reserve_gib: float

    @property
    def unrounded_kv_gib(self) -> float:
        """What is left for KV; negative where the weights do not fit."""
        usable_gib = self.memory_gib * self.gpu_memory_utilization
        return usable_gib - self.weights_gib - self.runtime_reserve_gib

    @property
    def gpu_kv_gib(self) -> float:
        """What is left for KV, rounded to 0.1 GiB as the calculator does before it counts blocks."""
        return round(self.unrounded_kv_gib, 1)


def gpu_budget(
    model: ModelSpec,
    node: NodeSpec,
    *,
    weights: WeightFormat = WeightFormat.FP8,
    memory: MemoryFigure = MemoryFigure.NOMINAL,
    tp: int = 8,
    dp: int = 1,
    ep: bool = False,
    gpu_memory_utilization: float = 0.92,
    runtime_reserve_gib: float = 15.0,
) -> GpuBudget:
    """Query: the memory budget of one GPU.

    Raises WeightsDoNotFitError where less than 0.1 GiB is left for KV.
    """
    per_gpu = weight_bytes(model, weights).per_gpu(tp=tp, dp=dp, ep=ep)
    budget = GpuBudget(
        memory_figure=memory,
        memory_gib=node.gpu_memory_bytes(memory) / GIB,
        gpu_memory_utilization=gpu_memory_utilization,
        weights_gib=per_gpu / GIB,
        runtime_reserve_gib=runtime_reserve_gib,
    )
    if budget.gpu_kv_gib <= 0:
        raise WeightsDoNotFitError(
            f"the weights of {model.name} in {weights.value} do not fit {node.name} at tp {tp} x dp {dp}, "
            f"ep {_on_off(ep)}: {budget.weights_gib:.1f} GiB a GPU and {runtime_reserve_gib:g} GiB reserve "
            f"against {budget.memory_gib:.1f} GiB ({memory.value}) x {gpu_memory_utilization:g}, "
            f"{0.1 - budget.unrounded_kv_gib:.1f} GiB missing; use more GPUs (parallel.tp, parallel.dp with "
            "parallel.ep) or smaller weights (model.weights)"
        )
    return budget


def _on_off(flag: bool) -> str:
    return "on" if flag else "off"
