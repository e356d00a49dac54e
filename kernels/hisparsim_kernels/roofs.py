"""Peaks that a measured rate is compared with, by device name. Figures are data sheets', not measurements."""

from __future__ import annotations

from dataclasses import dataclass

from hisparsim_kernels.registry import Roof


@dataclass(frozen=True)
class Peaks:
    """Bytes a second of the memory and of the host link (one direction), and dense operations a second."""

    hbm_bytes_per_s: float
    pcie_bytes_per_s: float
    bf16_flop_per_s: float
    fp8_flop_per_s: float
    source: str

    def of(self, roof: Roof) -> float:
        """The peak of one roof, in bytes or operations a second."""
        return {
            Roof.HBM: self.hbm_bytes_per_s,
            Roof.PCIE: self.pcie_bytes_per_s,
            Roof.TENSOR_BF16: self.bf16_flop_per_s,
            Roof.TENSOR_FP8: self.fp8_flop_per_s,
        }[roof]


PEAKS = {
    "H200": Peaks(4.8e12, 64e9, 989e12, 1979e12, "NVIDIA H200 data sheet (SXM, dense); PCIe 5 x16"),
    "H100": Peaks(3.35e12, 64e9, 989e12, 1979e12, "NVIDIA H100 data sheet (SXM, dense); PCIe 5 x16"),
    "B200": Peaks(8.0e12, 64e9, 2250e12, 4500e12, "NVIDIA HGX B200 data sheet (dense); PCIe 5 x16"),
}


def peaks_of(device_name: str) -> Peaks | None:
    """Peaks of the device whose marketing name contains a known key; None for an unknown device."""
    return next((peaks for key, peaks in PEAKS.items() if key in device_name), None)


def share_of_roof(
    roof: Roof, peaks: Peaks | None, moved_bytes: int, flops: int, time_s: float
) -> float | None:
    """Achieved rate over the peak, 0 to 1; None where the device's peaks are unknown."""
    if peaks is None:
        return None
    work = moved_bytes if roof in (Roof.HBM, Roof.PCIE) else flops
    return work / time_s / peaks.of(roof)
