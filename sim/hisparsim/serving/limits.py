"""The plain numbers that the serving core decides by, resolved from a scenario or from an engine's log."""

from __future__ import annotations

from dataclasses import dataclass

from mypy_extensions import mypyc_attr


@mypyc_attr(native_class=False)
class LimitsError(ValueError):
    """A pool or a limit that cannot serve; the message names the value, the rule and the setting."""


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """Pool sizes and scheduler limits of one engine (one data-parallel replica)."""

    num_blocks: int
    """Blocks of the GPU pool, the null block included."""
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_tokens: int = 64
    num_groups: int = 0
    """Layer groups that a resident (or hot) page takes a block each of; 0 = one block holds a page whole."""
    hot_pages: int = 0
    """Pages a group of a request's hot buffer."""
    hot_rows: int = 0
    """Rows a layer of that buffer (its last page may be used in part)."""
    num_host_blocks: int = 0
    """Blocks of the host pool, the null block included; 0 = none."""
    block_bytes: int = 0
    """Bytes of a GPU block."""
    host_block_bytes: int = 0
    """Bytes of all layers' rows of one page in the host pool, without padding."""
    async_depth: int = 2
    """Plans in flight at a time: 2 = the next step is scheduled before the last one's tokens are known."""
    watermark: float = 0.0
    """Share of the pool that an admission must leave free while something runs."""
    draft_tokens: int = 0
    """Speculative tokens a step verifies for each request."""
    prefix_caching: bool = True
    offload_blocks: int = 0
    """Pages that an ordinary prefix-offload tier holds (per rank), for policies that have one."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "page_tokens", "async_depth"):
            if getattr(self, name) < 1:
                raise LimitsError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.num_blocks < 2:
            raise LimitsError(f"the GPU pool has {self.num_blocks} blocks: at least 2 are needed")

    @property
    def max_in_flight_tokens(self) -> int:
        """Tokens that may be scheduled and not yet settled: one batch for each plan in flight."""
        return self.async_depth * self.max_num_batched_tokens

    @property
    def admission_cap_pages(self) -> int:
        """Resident pages that an admission reserves at most (vLLM 0.33: the in-flight window)."""
        return -(-min(self.max_in_flight_tokens, self.max_model_len) // self.page_tokens)

    @property
    def hot_blocks(self) -> int:
        """Blocks of one request's hot buffer over all groups."""
        return self.num_groups * self.hot_pages

    @property
    def transition_watermark(self) -> int:
        """Free blocks under which requests start to read from the host (vLLM 0.33: a lease, or a tenth)."""
        return max(self.hot_blocks, self.num_blocks // 10)

    @property
    def watermark_blocks(self) -> int:
        return int(self.watermark * self.num_blocks)

    def pages(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_tokens)
