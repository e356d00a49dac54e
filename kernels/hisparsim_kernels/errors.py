"""Named errors of the kernel package, and the metadata checks that raise them.

Every public launch checks its arguments before anything is enqueued. The checks read metadata only (dtype,
shape, stride, device): reading values of a device tensor would wait for the GPU, which a captured graph
forbids. Values that would be out of range on the device are handled there (an index of -1, a length of 0).
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import torch


class KernelInputError(ValueError):
    """An argument of a kernel launch breaks its contract. The message gives the argument, its value and the
    rule.
    """


class DtypeError(KernelInputError):
    """A tensor has the wrong element type."""


class ShapeError(KernelInputError):
    """A tensor has the wrong number of dimensions or a wrong extent."""


class StrideError(KernelInputError):
    """A tensor is not laid out as the kernel reads it."""


class DeviceError(KernelInputError):
    """Tensors lie on different devices, or on one that the kernel cannot reach."""


class RangeError(KernelInputError):
    """A number is outside the range that the kernel can represent (top-k, rows, slots, heads)."""


class ConfigError(KernelInputError):
    """No launch configuration of that name, or one whose data is malformed."""


class BenchFileError(KernelInputError):
    """A file of benchmark rows lacks columns, has no rows, or cannot be drawn in the format asked for."""


class InterpreterMismatchError(RuntimeError):
    """Triton's interpreter does not behave as the correction in `interpreter.py` expects."""


class AotError(RuntimeError):
    """A kernel cannot be compiled ahead of time, or the process is unfit for it."""


def check_tensor(name: str, value: object) -> None:
    """Raise `DtypeError` unless `value` is a torch tensor."""
    if not isinstance(value, torch.Tensor):
        raise DtypeError(f"{name} is a {type(value).__name__}; it must be a torch tensor")


def check_dtype(name: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
    """Raise `DtypeError` unless `tensor` is a tensor whose dtype is one of `allowed`."""
    check_tensor(name, tensor)
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype) for dtype in allowed)
        raise DtypeError(f"{name} has dtype {tensor.dtype}; it must be {names}")


def check_shape(name: str, tensor: torch.Tensor, shape: Sequence[int | None]) -> None:
    """Raise `ShapeError` unless `tensor.shape` equals `shape`; a None entry accepts any extent."""
    check_tensor(name, tensor)
    actual = tuple(tensor.shape)
    if len(actual) != len(shape) or any(
        want is not None and got != want for got, want in zip(actual, shape, strict=True)
    ):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ShapeError(f"{name} has shape {actual}; it must be ({wanted})")


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Raise `StrideError` unless `tensor` is contiguous in row-major order."""
    if not tensor.is_contiguous():
        raise StrideError(
            f"{name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}; it must be contiguous: "
            f"pass {name}.contiguous()"
        )


def check_rows(name: str, tensor: torch.Tensor, multiple_elements: int = 16) -> None:
    """Raise `StrideError` unless the last dimension is dense and the row stride is a multiple of
    `multiple_elements` elements, which is what lets the compiler use 16-byte loads."""
    if tensor.stride(-1) != 1 or (tensor.ndim > 1 and tensor.stride(-2) % multiple_elements != 0):
        raise StrideError(
            f"{name} has strides {tensor.stride()}; the last must be 1 and the row stride a multiple of "
            f"{multiple_elements} elements"
        )


def check_same_device(**tensors: torch.Tensor | None) -> torch.device:
    """Return the one device of all given tensors; raise `DeviceError` if they differ, or if it is a CPU and
    Triton does not interpret."""
    for name, tensor in tensors.items():
        if tensor is not None:
            check_tensor(name, tensor)
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        listing = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise DeviceError(f"tensors lie on different devices ({listing}); they must share one")
    device = next(iter(devices.values()))
    import triton  # late: these checks are imported where triton is not, or before the interpreter is chosen

    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise DeviceError(
            f"{next(iter(devices))} is on {device}, where kernels run in Triton's interpreter only: move the "
            "tensors to cuda, or set TRITON_INTERPRET=1 before triton is imported"
        )
    return device


def check_range(name: str, value: int, low: int, high: int, why: str) -> None:
    """Raise `RangeError` unless `value` is a whole number with `low <= value <= high`; `why` names the rule
    behind the limits."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise RangeError(f"{name} is {value!r}; it must be a whole number in [{low}, {high}]: {why}")
    if not low <= value <= high:
        raise RangeError(f"{name} is {value}; it must lie in [{low}, {high}]: {why}")
