"""``thrash``: gives a running request a new page only when nobody else runs, so that everybody is preempted.

The oldest request always gets on, so runs end, after the worst number of preemptions.
"""

from __future__ import annotations

from typing import Any

from mypy_extensions import mypyc_attr

from hisparsim.serving.limits import ServingLimits
from hisparsim.serving.policies.gpu_only import GpuOnly
from hisparsim.serving.policy import LateFree, PrefixHit
from hisparsim.serving.request import Request


@mypyc_attr(allow_interpreted_subclasses=True)
class Thrash(GpuOnly):
    name = "thrash"
    grows_quietly = False
    summary = "preempts everybody else for each new page (pathological, for tests)"

    def __init__(self, limits: ServingLimits, **options: Any) -> None:
        super().__init__(limits, **options)
        self._num_running = 0

    def admit(self, request: Request, hit: PrefixHit, num_tokens: int, *, reserve: int) -> bool:
        admitted = super().admit(request, hit, num_tokens, reserve=reserve)
        self._num_running += admitted
        return admitted

    def extend(self, request: Request, num_tokens: int) -> bool:
        if self._num_running > 1:
            self.blocked_by = "gpu_blocks"
            return False
        return super().extend(request, num_tokens)

    def leave(self, request: Request, *, finished: bool, in_flight: bool) -> LateFree | None:
        self._num_running -= 1
        return super().leave(request, finished=finished, in_flight=in_flight)
