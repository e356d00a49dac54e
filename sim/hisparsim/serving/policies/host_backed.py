"""What policies share that keep every page of a request in a host pool and read it through hot buffers."""

from __future__ import annotations

from typing import Any

from mypy_extensions import mypyc_attr

from hisparsim.serving.blocks import BlockPool
from hisparsim.serving.limits import ServingLimits
from hisparsim.serving.policy import PolicyError, ResidencyPolicy
from hisparsim.serving.request import Request


@mypyc_attr(allow_interpreted_subclasses=True)
class HostBacked(ResidencyPolicy):
    """A policy with layer groups, a hot buffer a request, and a host block for every page."""

    uses_groups = True

    def __init__(self, limits: ServingLimits, **options: Any) -> None:
        super().__init__(limits, **options)
        if limits.num_groups < 1 or limits.hot_pages < 1 or limits.num_host_blocks < 2:
            raise PolicyError(f"policy {self.name} needs layer groups, a hot buffer and a host pool")
        self.host = BlockPool(limits.num_host_blocks, "host pool")

    def lacks(self, request: Request) -> str | None:
        if self.admission_blocks(request)[1] > self.host.num_free:
            return "host_blocks"
        return super().lacks(request)

    def fits_alone(self, request: Request) -> str | None:
        return self._too_large(
            request, self._end_pages(request), "host blocks at its end", self.host, "kv.host_pool_gib"
        )
