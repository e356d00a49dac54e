"""Bytes of one KV row: the formats, their layout, and nothing else.

| format | bytes | layout |
|---|---|---|
| bf16 | 1152 | 512 bf16 latent, 64 bf16 rope |
| fp8_ds_mla | 656 | 512 e4m3 latent; 4 float32 scales, one for each 128 columns; 64 bf16 rope |

Both are multiples of 16 bytes, so a row of a 16-byte aligned pool starts aligned. fp8_ds_mla is what Hopper's
public sparse kernels read (FlashMLA README; vLLM `fp8_ds_mla`).
"""

from __future__ import annotations

from enum import Enum

import torch

from hisparsim_kernels import errors

LATENT_COLUMNS = 512
ROPE_COLUMNS = 64
ROW_COLUMNS = LATENT_COLUMNS + ROPE_COLUMNS
SCALE_TILE = 128
ROW_ALIGNMENT_BYTES = 16
E4M3_MAX = 448.0
SMALLEST_AMAX = 1e-4
"""Largest magnitudes of a tile are raised to this before the scale is made (FlashMLA tests, clamp_min)."""


class RowFormat(Enum):
    """How one token's row of one layer is stored."""

    BF16 = "bf16"
    FP8_DS_MLA = "fp8_ds_mla"

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return 1152 if self is RowFormat.BF16 else 656

    @property
    def torch_dtype(self) -> torch.dtype:
        """Element type of a pool of such rows."""
        return torch.bfloat16 if self is RowFormat.BF16 else torch.uint8

    @property
    def row_elements(self) -> int:
        """Elements of `torch_dtype` in one row."""
        return self.row_bytes // self.torch_dtype.itemsize

    def rows_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Bytes [n, row_bytes] uint8 (a layer's part of the GPU pool) as the kernels take them.

        Raises `DtypeError`, `ShapeError` or `StrideError` for anything else."""
        errors.check_dtype("rows", rows, torch.uint8)
        errors.check_shape("rows", rows, (None, self.row_bytes))
        errors.check_contiguous("rows", rows)
        if rows.storage_offset() % ROW_ALIGNMENT_BYTES:
            raise errors.StrideError(
                f"rows start {rows.storage_offset()} bytes into their storage; that must be a multiple of "
                f"{ROW_ALIGNMENT_BYTES}"
            )
        return rows.view(self.torch_dtype)

    def empty_pool(self, num_rows: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """An uninitialised pool [num_rows, row_elements]."""
        return torch.empty(num_rows, self.row_elements, dtype=self.torch_dtype, device=device)


def row_format_of(rows: torch.Tensor, name: str = "rows") -> RowFormat:
    """The format of a contiguous pool, by element type and width. Raises `DtypeError`, `ShapeError` or
    `StrideError` for anything that is not one."""
    errors.check_dtype(name, rows, torch.bfloat16, torch.uint8)
    row_format = RowFormat.BF16 if rows.dtype == torch.bfloat16 else RowFormat.FP8_DS_MLA
    errors.check_shape(name, rows, (None, row_format.row_elements))
    errors.check_contiguous(name, rows)
    if rows.data_ptr() % ROW_ALIGNMENT_BYTES:
        raise errors.StrideError(
            f"{name} starts at {rows.data_ptr():#x}; it must be {ROW_ALIGNMENT_BYTES}-byte aligned: scales "
            "and rope values are read by their own types, rows 16 bytes at a time"
        )
    return row_format
