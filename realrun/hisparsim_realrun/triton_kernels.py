"""The Triton kernels of :mod:`hisparsim_kernels` behind the same methods as the CPU's own routines.

They run on a GPU, or in Triton's interpreter at tiny sizes, which proves their wiring on a CPU. Index queries
are quantised to e4m3 with one scale a head, folded into the head's weight. Prefill's selections come back to
the host, which places them by the block tables; decodes stay on the device (:mod:`.device_decode`).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hisparsim_kernels.arch import arch_of
from hisparsim_kernels.gather import gather_rows
from hisparsim_kernels.indexer import HEADS_SUPPORTED, KeyFormat, indexer_logits, write_index_keys
from hisparsim_kernels.mirror import mirror_rows
from hisparsim_kernels.mla_decode import DecodeScratch, decode_config, plan_splits, sparse_mla_decode
from hisparsim_kernels.mla_invariant import BATCH_INVARIANT_SPLITS
from hisparsim_kernels.row_format import E4M3_MAX, LATENT_COLUMNS, SMALLEST_AMAX
from hisparsim_kernels.rows import write_rows
from hisparsim_kernels.topk import topk

from .cpu_kernels import PREFILL_TILE, CpuKernels
from .geometry import INDEX_DIM

Ints = NDArray[np.int64]


class TritonKernels(CpuKernels):
    """Routines over one rank's pools, on the pools' device. Products stay torch's."""

    def _device_ints(self, values: Ints) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(self.pools.gpu.device, non_blocking=True)

    # -- rows -------------------------------------------------------------------------------------

    def write_rows(self, layer: int, latent: torch.Tensor, rope: torch.Tensor, rows: Ints) -> None:
        """Change: pack latent [n, 512] and rope [n, 64] into flat rows [n] of a layer."""
        write_rows(
            latent.contiguous(), rope.contiguous(), self._device_ints(rows), self.pools.layer_rows(layer)
        )

    def copy_from_host(self, layer: int, host_rows: Ints, rows: Ints) -> None:
        """Change: fetch host rows [n] of a layer into flat rows [n]."""
        geometry = self.pools.geometry
        gather_rows(
            self.pools.host,
            self.pools.gpu,
            self._device_ints(host_rows),
            self._device_ints(rows),
            self._device_ints(np.array([len(rows)])),
            geometry.layout,
            group=geometry.group_of(layer),
            first_layer=geometry.layer_in_group(layer),
            num_layers=1,
        )

    def copy_to_host(self, layer: int, rows: Ints, host_rows: Ints) -> None:
        """Change: mirror flat rows [n] of a layer into host rows [n]."""
        geometry = self.pools.geometry
        mirror_rows(
            self.pools.gpu,
            self.pools.host,
            self._device_ints(rows),
            self._device_ints(host_rows),
            self._device_ints(np.array([len(rows)])),
            geometry.layout,
            group=geometry.group_of(layer),
            first_layer=geometry.layer_in_group(layer),
            num_layers=1,
        )

    # -- index ------------------------------------------------------------------------------------

    def write_keys(self, unit: int, keys: torch.Tensor, blocks: Ints, places: Ints) -> None:
        """Change: store index keys [n, 128] at rows ``places`` [n] of the indexer pages in ``blocks`` [n]."""
        write_index_keys(
            keys.contiguous(),
            self._device_ints(blocks * self.page_rows + places),
            self.pools.index_pages(unit),
            page_size=self.page_rows,
            key_format=KeyFormat.E4M3,
        )

    def select(
        self,
        unit: int,
        queries: torch.Tensor,
        weights: torch.Tensor,
        blocks: Ints,
        start: int,
        keep_newest: torch.Tensor,
    ) -> Ints:
        """[n, top_k] ascending positions of the largest logits, -1 behind them; as on the CPU."""
        codes, weights = quantised(queries, weights)
        pages = -(-(start + len(queries)) // self.page_rows)
        table = self._device_ints(blocks[:pages])
        parts = []
        for first in range(0, len(queries), PREFILL_TILE):
            part = slice(first, first + PREFILL_TILE)
            own = np.arange(start + first, start + first + len(codes[part]))
            logits = torch.empty(len(own), 1, pages * self.page_rows, device=codes.device)
            lengths = self._device_ints(own + 1)
            indexer_logits(
                codes[part, None].contiguous(),
                weights[part, None].contiguous(),
                self.pools.index_pages(unit),
                table.expand(len(own), -1).contiguous(),
                lengths,
                logits,
                page_size=self.page_rows,
            )
            newest = self._device_ints(own).long()
            keep = keep_newest[part].to(codes.device)
            flat = logits[:, 0]
            flat[torch.arange(len(own), device=codes.device)[keep], newest[keep]] = float("inf")
            indices, _ = topk(flat, lengths, self.top_k)
            parts.append(indices.cpu().numpy().astype(np.int64))
        return np.concatenate(parts)

    # -- attention --------------------------------------------------------------------------------

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        rows: Ints,
        counts: Ints,
        scale: float,
        num_shards: int,
    ) -> torch.Tensor:
        """[n, heads, 512] sparse MLA of queries [n, heads, 576] over flat rows [n, top_k].

        The kernel computes each head on its own, so ``num_shards`` changes nothing.
        """
        assert queries.shape[1] % num_shards == 0
        return self.attend_rows(layer, queries, self._device_ints(rows), self._device_ints(counts), scale)

    def attend_rows(
        self, layer: int, queries: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """As :meth:`attend`, for rows [n, top_k] and counts [n] that are on the device (int32)."""
        tokens, heads, _ = queries.shape
        q = queries.to(torch.bfloat16).contiguous()
        splits = BATCH_INVARIANT_SPLITS
        if not self.invariant:
            config = decode_config(self.pools.geometry.row_format, heads, arch_of(q.device))
            splits = plan_splits(tokens, heads, self.top_k, config)
        out = torch.empty(tokens, heads, LATENT_COLUMNS, device=q.device)
        sparse_mla_decode(
            q,
            self.pools.layer_rows(layer),
            rows,
            counts,
            scale=scale,
            out=out,
            lse=torch.empty(tokens, heads, device=q.device),
            scratch=DecodeScratch.create(tokens, heads, splits, q.device),
            num_splits=splits,
        )
        return out.to(queries.dtype)


def quantised(queries: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [n, heads, 128] as e4m3 and weights [n, heads] times their scales, heads as the kernel has."""
    count, heads, _ = queries.shape
    served = min(size for size in HEADS_SUPPORTED if size >= heads)
    wide = queries.float()
    scale = wide.abs().amax(-1).clamp_min(SMALLEST_AMAX) / E4M3_MAX
    codes = torch.zeros(count, served, INDEX_DIM, device=queries.device)
    codes[:, :heads] = wide / scale[..., None]
    scaled = torch.zeros(count, served, device=queries.device)
    scaled[:, :heads] = weights.float() * scale
    return codes.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scaled
