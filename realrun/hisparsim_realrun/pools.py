"""The two memories: one GPU byte pool of blocks, one host byte pool, and copies of pages between them.

    GPU pool   [num_blocks + staging blocks, block_bytes]   ids as in the ledgers; block 0 holds zeros
    host pool  [num_host_blocks, host_block_bytes]          all layers of a page, pinned beside a GPU

Memory that nobody has written holds 0xFF bytes, which every row format reads as NaN: a read of a page that
was never written, or of the wrong block, ends the run instead of giving plausible numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from hisparsim.serving.plan import IntArray

from .devices import Device, host_memory_bytes
from .errors import RealRunError
from .geometry import INDEX_PAGE_BYTES, Geometry

POISON = 0xFF
Rows = NDArray[np.void]
"""Rows as opaque items of ``row_bytes`` bytes: copying them is one memcpy each."""


@dataclass(frozen=True, eq=False)
class Pools:
    """Both pools of one rank. ``num_blocks`` counts the ledger's blocks; staging blocks follow them."""

    geometry: Geometry
    gpu: torch.Tensor
    host: torch.Tensor
    num_blocks: int
    num_staging_blocks: int

    @classmethod
    def allocate(
        cls,
        geometry: Geometry,
        device: Device,
        *,
        num_blocks: int,
        num_host_blocks: int,
        num_staging_blocks: int,
        shared_path: Path | None = None,
    ) -> Pools:
        """Change: both pools, poisoned. ``shared_path`` names the file that local ranks map as host pool.

        Raises:
            RealRunError: they do not fit into the memory that is available.
        """
        layout = geometry.layout
        gpu_bytes = (num_blocks + num_staging_blocks) * layout.block_bytes
        host_bytes = max(num_host_blocks, 1) * layout.host_block_bytes
        _require("GPU pool", gpu_bytes, device.memory_bytes(), "kv.num_gpu_blocks or kv.gpu_kv_gib")
        in_ram = host_bytes + (0 if device.is_cuda else gpu_bytes)
        _require("host pool", in_ram, host_memory_bytes(), "kv.host_pool_gib or kv.prefix_offload_gib")
        gpu = torch.full(
            (num_blocks + num_staging_blocks, layout.block_bytes),
            POISON,
            dtype=torch.uint8,
            device=device.torch_device,
        )
        gpu[0].zero_()
        shape = (max(num_host_blocks, 1), layout.host_block_bytes)
        if shared_path is not None:
            host = torch.from_file(str(shared_path), shared=True, size=host_bytes, dtype=torch.uint8)
            host = host.view(shape)
            _register(host, device)
        else:
            host = torch.empty(shape, dtype=torch.uint8, pin_memory=device.is_cuda)
            host.fill_(POISON)
        return cls(geometry, gpu, host, num_blocks, num_staging_blocks)

    # -- views ------------------------------------------------------------------------------------

    def layer_rows(self, layer: int) -> torch.Tensor:
        """[n, row elements] the GPU pool as rows of one layer: flat row i of the layer is row i."""
        geometry = self.geometry
        rows = geometry.layout.layer_rows(self.gpu, geometry.layer_in_group(layer))
        return rows.view(geometry.row_format.torch_dtype)

    def layer_items(self, layer: int) -> Rows:
        """[n] the same rows as opaque items (CPU pools only)."""
        layout = self.geometry.layout
        flat: Rows = self.gpu.numpy().reshape(-1).view(f"V{layout.row_bytes}")
        return flat[self.geometry.layer_in_group(layer) * layout.page_rows :]

    def host_items(self) -> Rows:
        """[n] rows of the host pool: row r of layer l of block b is item ``host_item(b, l) + r``."""
        flat: Rows = self.host.numpy().reshape(-1).view(f"V{self.geometry.layout.row_bytes}")
        return flat

    def host_item(self, layer: int, host_rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Items of ``host_rows`` (block * page rows + row) in one layer."""
        layout = self.geometry.layout
        pages = layout.host_block_bytes // layout.page_bytes
        block, row = np.divmod(host_rows, layout.page_rows)
        items: NDArray[np.int64] = (block * pages + layer) * layout.page_rows + row
        return items

    def index_pages(self, unit: int) -> torch.Tensor:
        """[blocks, bytes] one indexer's part of each block that holds index keys."""
        first = self.geometry.index_offset_bytes + unit * INDEX_PAGE_BYTES
        return self.gpu[:, first : first + INDEX_PAGE_BYTES]

    # -- pages ------------------------------------------------------------------------------------

    def copy_to_host(self, blocks: IntArray, host_blocks: IntArray) -> int:
        """Change: copy pages ([n, groups] blocks, [n] host blocks) to the host; returns the bytes."""
        return self._copy(blocks, host_blocks, to_host=True)

    def copy_to_gpu(self, blocks: IntArray, host_blocks: IntArray) -> int:
        """Change: copy pages from the host; returns the bytes."""
        return self._copy(blocks, host_blocks, to_host=False)

    def _copy(self, blocks: IntArray, host_blocks: IntArray, *, to_host: bool) -> int:
        moved = 0
        for group in range(blocks.shape[1]):
            first, size = self._group_bytes(group)
            for block, host_block in zip(blocks[:, group].tolist(), host_blocks.tolist(), strict=True):
                on_gpu = self.gpu[block, :size]
                on_host = self.host[host_block, first : first + size]
                if to_host:
                    on_host.copy_(on_gpu, non_blocking=True)
                else:
                    on_gpu.copy_(on_host, non_blocking=True)
                moved += size
        return moved

    def _group_bytes(self, group: int) -> tuple[int, int]:
        """Where a group lies in a host block, and its bytes; a whole page takes its index keys along."""
        layout = self.geometry.layout
        if not self.geometry.packed:
            return 0, layout.host_block_bytes
        first = layout.first_layers[group] * layout.page_bytes
        return first, layout.group_layers[group] * layout.page_bytes


def _require(what: str, wanted: int, available: int, setting: str) -> None:
    if wanted > available:
        raise RealRunError(
            f"the {what} takes {wanted / 2**30:.2f} GiB, {available / 2**30:.2f} GiB are available: "
            f"lower {setting}"
        )


def _register(host: torch.Tensor, device: Device) -> None:
    """Change: pin a mapping that several ranks share."""
    if not device.is_cuda:
        return
    status = torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel(), 0)  # type: ignore[no-untyped-call]
    if int(status) != 0:
        raise RealRunError(
            f"pinning the shared host pool of {host.numel() / 2**30:.1f} GiB failed (CUDA error "
            f"{int(status)}): raise the limit on locked memory (ulimit -l)"
        )
