"""``never-admit``: lets nobody in. Whoever drives it must notice that nothing can ever happen."""

from __future__ import annotations

from mypy_extensions import mypyc_attr

from hisparsim.serving.policies.gpu_only import GpuOnly
from hisparsim.serving.policy import PrefixHit
from hisparsim.serving.request import Request


@mypyc_attr(allow_interpreted_subclasses=True)
class NeverAdmit(GpuOnly):
    name = "never-admit"
    summary = "admits no request (pathological, for tests)"

    def admit(self, request: Request, hit: PrefixHit, num_tokens: int, *, reserve: int) -> bool:
        self.blocked_by = "gpu_blocks"
        return False
