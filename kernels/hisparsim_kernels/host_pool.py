"""The host pool as a kernel argument: a pinned tensor, or the int64 address of a registered mapping."""

from __future__ import annotations

import numbers

import torch

from hisparsim_kernels.errors import (
    DeviceError,
    DtypeError,
    RangeError,
    StrideError,
    check_contiguous,
    check_tensor,
)
from hisparsim_kernels.page_layout import CHUNK_BYTES, PageLayout

MAX_ADDRESS = 2**63 - 1
HostPool = torch.Tensor | int
"""A tensor of whole host blocks ([n, host_block_bytes] uint8; any contiguous shape of it), pinned where
kernels run on a GPU; or an address that the device can read under unified addressing (not so under
confidential computing)."""


def _address(host: object) -> int:
    if not isinstance(host, numbers.Integral):
        raise DtypeError(
            f"host pool is a {type(host).__name__}; it must be a torch tensor or an int64 address"
        )
    address = int(host)
    if not 0 < address <= MAX_ADDRESS:
        raise RangeError(
            f"host address is {address}; it must be the address of the mapped host pool, in [1, 2^63 - 1]"
        )
    if address % CHUNK_BYTES:
        raise StrideError(
            f"host address {address:#x} is not {CHUNK_BYTES}-byte aligned; rows are read 16 bytes at a time"
        )
    return address


def host_argument(host: HostPool, pool: torch.Tensor, layout: PageLayout) -> torch.Tensor | int:
    """What a kernel takes for `host`: int32 words or the address itself.

    Raises `DeviceError` for a pageable tensor beside a CUDA pool or one on a device of its own,
    `StrideError` for one that is not contiguous, not 16-byte aligned or not whole blocks, `RangeError` for an
    address that is no address, `DtypeError` for anything else."""
    if not isinstance(host, torch.Tensor):
        return _address(host)
    check_contiguous("host pool", host)
    num_bytes = host.numel() * host.element_size()
    if num_bytes == 0 or num_bytes % layout.host_block_bytes:
        raise StrideError(
            f"host pool has {num_bytes} bytes; it must be whole blocks of {layout.host_block_bytes} bytes"
        )
    if host.device.type != "cpu" and host.device != pool.device:
        raise DeviceError(
            f"host pool is on {host.device} and the GPU pool on {pool.device}; it must be pinned host memory"
        )
    if host.data_ptr() % CHUNK_BYTES:
        raise StrideError(f"host pool starts at {host.data_ptr():#x}; it must be {CHUNK_BYTES}-byte aligned")
    if pool.device.type == "cuda" and host.device.type == "cpu" and not host.is_pinned():
        raise DeviceError(
            "host pool is pageable memory; a kernel reads only pinned memory: allocate with pin_memory=True"
        )
    return host.view(-1).view(torch.int32)


def pool_argument(pool: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """The GPU pool as int32 words. Raises `StrideError` unless it is contiguous, aligned whole blocks."""
    check_tensor("GPU pool", pool)
    check_contiguous("GPU pool", pool)
    num_bytes = pool.numel() * pool.element_size()
    if num_bytes == 0 or num_bytes % layout.block_bytes:
        raise StrideError(
            f"GPU pool has {num_bytes} bytes; it must be whole blocks of {layout.block_bytes} bytes"
        )
    if pool.data_ptr() % CHUNK_BYTES:
        raise StrideError(f"GPU pool starts at {pool.data_ptr():#x}; it must be {CHUNK_BYTES}-byte aligned")
    return pool.view(-1).view(torch.int32)
