"""The routines of a step on a CPU, in torch and numpy: index keys, top-k, row packing, sparse MLA.

Each reads and writes the pools' own bytes, in the formats of :mod:`hisparsim_kernels`, whose float64
references the tests compare them with. With ``invariant`` every product has a fixed shape (``TILE`` tokens,
``KEY_TILE`` keys, padded), so that a token's bits do not depend on what else is in the batch.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hisparsim_kernels.references.rows import pack
from hisparsim_kernels.row_format import E4M3_MAX, LATENT_COLUMNS, SCALE_TILE, SMALLEST_AMAX, RowFormat

from .geometry import INDEX_DIM
from .pools import Pools

TILE = 16
"""Tokens of one product under ``invariant``, and of one attention tile always."""
KEY_TILE = 512
"""Index keys of one product under ``invariant``."""
PREFILL_TILE = 64
"""Tokens whose index logits are held at once."""
Ints = NDArray[np.int64]


def padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x [n, ...] -> [rows, ...], zeros behind it."""
    if len(x) == rows:
        return x
    out = x.new_zeros((rows, *x.shape[1:]))
    out[: len(x)] = x
    return out


class CpuKernels:
    """Routines over one rank's pools."""

    def __init__(self, pools: Pools, top_k: int, *, invariant: bool) -> None:
        self.pools = pools
        self.top_k = top_k
        self.invariant = invariant
        self.page_rows = pools.geometry.layout.page_rows

    # -- products ---------------------------------------------------------------------------------

    def matmul(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [tokens, a] @ weight [a, b]."""
        if not self.invariant:
            return x @ weight
        tiles = [padded(x[i : i + TILE], TILE) @ weight for i in range(0, len(x), TILE)]
        return torch.cat(tiles)[: len(x)]

    def per_head(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [tokens, heads, a], weight [heads, a, b] -> [tokens, heads, b]."""
        if not self.invariant:
            return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)
        tiles = [
            torch.bmm(padded(x[i : i + TILE], TILE).transpose(0, 1).contiguous(), weight).transpose(0, 1)
            for i in range(0, len(x), TILE)
        ]
        return torch.cat(tiles)[: len(x)]

    # -- rows -------------------------------------------------------------------------------------

    def write_rows(self, layer: int, latent: torch.Tensor, rope: torch.Tensor, rows: Ints) -> None:
        """Change: pack latent [n, 512] and rope [n, 64] into flat rows [n] of a layer."""
        packed = pack(latent, rope, self.pools.geometry.row_format).contiguous().view(torch.uint8)
        row_bytes = self.pools.geometry.layout.row_bytes
        self.pools.layer_items(layer)[rows] = packed.numpy().reshape(-1).view(f"V{row_bytes}")

    def copy_from_host(self, layer: int, host_rows: Ints, rows: Ints) -> None:
        """Change: fetch host rows [n] of a layer into flat rows [n]."""
        host = self.pools.host_items()
        self.pools.layer_items(layer)[rows] = host[self.pools.host_item(layer, host_rows)]

    def copy_to_host(self, layer: int, rows: Ints, host_rows: Ints) -> None:
        """Change: mirror flat rows [n] of a layer into host rows [n]."""
        host = self.pools.host_items()
        host[self.pools.host_item(layer, host_rows)] = self.pools.layer_items(layer)[rows]

    def read_rows(self, layer: int, rows: Ints) -> torch.Tensor:
        """[n, 576] float32: what flat rows [n] of a layer hold."""
        items = self.pools.layer_items(layer).take(rows)
        raw = torch.from_numpy(items.view(np.uint8).reshape(len(rows), -1))
        if self.pools.geometry.row_format is RowFormat.BF16:
            return raw.view(torch.bfloat16).float()
        codes = e4m3_to_float(raw[:, :LATENT_COLUMNS])
        scales_end = LATENT_COLUMNS + 4 * (LATENT_COLUMNS // SCALE_TILE)
        scales = raw[:, LATENT_COLUMNS:scales_end].contiguous().view(torch.float32)
        latent = codes.view(len(rows), -1, SCALE_TILE) * scales[:, :, None]
        rope = raw[:, scales_end:].contiguous().view(torch.bfloat16).float()
        return torch.cat([latent.view(len(rows), -1), rope], 1)

    # -- index ------------------------------------------------------------------------------------

    def write_keys(self, unit: int, keys: torch.Tensor, blocks: Ints, places: Ints) -> None:
        """Change: store index keys [n, 128] at rows ``places`` [n] of the indexer pages in ``blocks`` [n]."""
        scale = keys.abs().amax(1).clamp_min(SMALLEST_AMAX) / E4M3_MAX
        codes = (keys / scale[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        stored, scales = self._key_views(unit)
        where = (torch.from_numpy(blocks), torch.from_numpy(places))
        stored[where] = codes.view(torch.uint8)
        scales[where] = scale

    def _key_views(self, unit: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [blocks, page rows, 128] uint8 and scales [blocks, page rows] float32, views of the pool."""
        pages = self.pools.index_pages(unit)
        codes = self.page_rows * INDEX_DIM
        stored = pages[:, :codes].view(len(pages), self.page_rows, INDEX_DIM)
        return stored, pages[:, codes:].view(torch.float32)

    def logits(
        self, unit: int, queries: torch.Tensor, weights: torch.Tensor, blocks: Ints, num_tokens: int
    ) -> torch.Tensor:
        """[n, tokens] sum over heads of weight * relu(query . key), over one request's indexer pages.

        queries [n, heads, 128] float32, weights [n, heads], blocks [pages] of ``num_tokens`` tokens.
        """
        count, heads, _ = queries.shape
        stored, scales = self._key_views(unit)
        where = torch.from_numpy(blocks[: -(-num_tokens // self.page_rows)])
        keys = e4m3_to_float(stored[where]).view(-1, INDEX_DIM)[:num_tokens]
        scale = scales[where].view(-1)[:num_tokens]
        flat = queries.reshape(count * heads, INDEX_DIM)
        score = self._scores(flat, keys).view(count, heads, num_tokens)
        return (torch.relu_(score) * weights[:, :, None]).sum(1) * scale

    def _scores(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        if not self.invariant:
            return queries @ keys.T
        columns = []
        for first in range(0, len(keys), KEY_TILE):
            part = padded(keys[first : first + KEY_TILE], KEY_TILE).T.contiguous()
            tiles = [padded(queries[i : i + TILE], TILE) @ part for i in range(0, len(queries), TILE)]
            columns.append(torch.cat(tiles)[: len(queries)])
        return torch.cat(columns, 1)[:, : len(keys)]

    def select(
        self,
        unit: int,
        queries: torch.Tensor,
        weights: torch.Tensor,
        blocks: Ints,
        start: int,
        keep_newest: torch.Tensor,
    ) -> Ints:
        """[n, top_k] ascending positions of the largest logits, -1 behind them.

        Query i stands at position ``start + i`` and sees the positions up to its own; equal logits go by the
        lower position. Queries of ``keep_newest`` [n] select their own position in any case.
        """
        parts = []
        for first in range(0, len(queries), PREFILL_TILE):
            part = slice(first, first + PREFILL_TILE)
            own = torch.arange(start + first, start + first + len(queries[part]))
            logits = self.logits(unit, queries[part], weights[part], blocks, int(own[-1]) + 1)
            kept = keep_newest[part]
            logits[torch.arange(len(own))[kept], own[kept]] = float("inf")
            logits.masked_fill_(torch.arange(logits.shape[1]) > own[:, None], float("-inf"))
            parts.append(top_positions(logits, self.top_k))
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

        The first ``counts`` [n] entries of each line count; they are summed in the order given. Heads are
        computed in ``num_shards`` equal parts.
        """
        heads = queries.shape[1]
        step = heads // num_shards
        outs = []
        for first in range(0, len(queries), TILE):
            part = slice(first, first + TILE)
            count = len(queries[part])
            keys = self.read_rows(layer, rows[part].reshape(-1)).view(count, -1, queries.shape[2])
            masked = torch.arange(keys.shape[1]) >= torch.from_numpy(counts[part])[:, None]
            q = queries[part]
            if self.invariant:
                keys, q = padded(keys, TILE), padded(q, TILE)
                masked = padded(masked, TILE)
            transposed = keys.transpose(1, 2)
            values = keys[:, :, :LATENT_COLUMNS]
            shards = []
            for head in range(0, heads, step):
                score = torch.bmm(q[:, head : head + step].contiguous(), transposed).mul_(scale)
                score.masked_fill_(masked[:, None], float("-inf"))
                shards.append(torch.bmm(torch.softmax(score, -1), values))
            outs.append(torch.cat(shards, 1)[:count])
        return torch.cat(outs)


def e4m3_to_float(codes: torch.Tensor) -> torch.Tensor:
    """codes uint8 -> float32. The bits are moved into a half (exponent bias 15 instead of 7) and scaled."""
    wide = codes.contiguous().view(torch.int8).to(torch.int16)
    wide = wide.bitwise_left_shift_(7).bitwise_and_(-16385)  # 0xBFFF: the second copy of the sign goes
    return wide.view(torch.float16).float().mul_(256.0)


def top_positions(logits: torch.Tensor, k: int) -> Ints:
    """[n, k] ascending positions of the k largest of each line, the lower position first among equals.

    -inf is never selected; the rest of a line is -1.
    """
    count, width = logits.shape
    out = np.full((count, k), -1, np.int64)
    if width > k:
        threshold = torch.topk(logits, k, sorted=False).values.amin(1, keepdim=True)
        chosen = logits >= threshold
        if int(chosen.sum()) > count * k:
            above = logits > threshold
            tied = logits == threshold
            room = k - above.sum(1, keepdim=True)
            chosen = above | (tied & (tied.cumsum(1) <= room))
        chosen &= logits > float("-inf")
    else:
        chosen = logits > float("-inf")
    lines, positions = (index.numpy() for index in chosen.nonzero(as_tuple=True))
    firsts = np.searchsorted(lines, np.arange(count))
    out[lines, np.arange(len(lines)) - firsts[lines]] = positions
    return out
