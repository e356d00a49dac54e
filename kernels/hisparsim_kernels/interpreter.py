"""Make Triton's interpreter right for bf16 and fp8, and fast enough for a test suite.

Stock triton (3.6 to 3.9) keeps bf16 as uint16 and e4m3 as uint8 and computes on the raw bits: a bf16 dot is
wrong by eleven orders of magnitude without an exception, and a cast to bf16 truncates. `activate()` replaces
the handful of builder methods where that happens: operands are decoded to float32, computed on, and encoded
with round-to-nearest-even (e4m3 saturates at 448, as the NVIDIA conversion instruction does). It then runs
`self_test()`, so that a triton whose internals changed fails loudly here and not as a wrong number somewhere
else.

Only processes with TRITON_INTERPRET=1 set before triton is imported may call it; nothing on a GPU's path
does.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from hisparsim_kernels.errors import InterpreterMismatchError

THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Set to 1 by `set_threads`: small tiles run up to 12 times faster on one BLAS thread than on two."""

_TORCH_FP8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
_FP8_MAX = {"fp8e4nv": 448.0, "fp8e5": 57344.0}
_DECODED_FP8 = {
    name: torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    for name, dtype in _TORCH_FP8.items()
}
_active = False


def is_interpreting() -> bool:
    """Whether this process runs kernels in the interpreter (reads TRITON_INTERPRET through triton)."""
    return bool(triton.knobs.runtime.interpret)


def set_threads(num_threads: int = 1) -> None:
    """Limit BLAS and torch to `num_threads`, also where numpy was imported (and OpenBLAS started) before."""
    for variable in THREAD_VARIABLES:
        os.environ[variable] = str(num_threads)
    torch.set_num_threads(num_threads)
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        libraries = {
            line.split()[-1] for line in maps if "openblas" in line and line.rstrip().endswith(".so")
        }
        for path in libraries:
            library = ctypes.CDLL(path)
            for symbol in (
                "scipy_openblas_set_num_threads64_",
                "openblas_set_num_threads64_",
                "openblas_set_num_threads",
            ):
                if hasattr(library, symbol):
                    getattr(library, symbol)(num_threads)


def _is_narrow(dtype: Any) -> bool:
    scalar = dtype.scalar
    return bool(scalar == tl.bfloat16 or scalar.is_fp8())


def _decode(data: np.ndarray, dtype: Any) -> np.ndarray:
    """bf16 (as uint16) or fp8 (as uint8) bits -> float32 values, exactly."""
    scalar = dtype.scalar
    if scalar == tl.bfloat16:
        return (
            (np.ascontiguousarray(data).astype(np.uint32) << np.uint32(16))
            .view(np.float32)
            .reshape(data.shape)
        )
    if scalar.name not in _DECODED_FP8:
        raise InterpreterMismatchError(
            f"no correction for {scalar.name}; e4m3 (fp8e4nv) and e5m2 (fp8e5) have one"
        )
    decoded: np.ndarray = _DECODED_FP8[scalar.name][data]
    return decoded


def _encode(values: np.ndarray, dtype: Any) -> np.ndarray:
    """float values -> bf16 bits (uint16) or fp8 bits (uint8), rounding to nearest even; fp8 saturates."""
    scalar = dtype.scalar
    values = np.ascontiguousarray(values, dtype=np.float32)
    if scalar == tl.bfloat16:
        return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    limit = _FP8_MAX[scalar.name]
    return (
        torch.from_numpy(np.clip(values, -limit, limit)).to(_TORCH_FP8[scalar.name]).view(torch.uint8).numpy()
    )


def _correct_builder(interpreter: Any) -> None:
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    np_dtype: Callable[[Any], Any] = interpreter._get_np_dtype
    stock_binary, stock_unary, stock_cast = builder.binary_op, builder.unary_op, builder.cast_impl

    def cast(self: Any, source: Any, target: Any) -> Any:
        if not (_is_narrow(source.dtype) or _is_narrow(target)):
            return stock_cast(self, source, target)
        values = _decode(source.data, source.dtype) if _is_narrow(source.dtype) else source.data
        data = _encode(values, target) if _is_narrow(target) else values.astype(np_dtype(target))
        return handle(data, target.scalar)

    def fp_to_fp(self: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        return cast(self, source, target)

    def binary(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if not _is_narrow(lhs.dtype):
            return stock_binary(self, lhs, rhs, op)
        output = op(_decode(lhs.data, lhs.dtype), _decode(rhs.data, rhs.dtype))
        if output.dtype == np.bool_:
            return handle(output, lhs.dtype.scalar)
        return handle(_encode(output, lhs.dtype), lhs.dtype.scalar)

    def unary(self: Any, arg: Any, op: Any) -> Any:
        if not _is_narrow(arg.dtype):
            return stock_unary(self, arg, op)
        return handle(_encode(op(_decode(arg.data, arg.dtype)), arg.dtype), arg.dtype.scalar)

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if not _is_narrow(z.dtype):
            return handle(x.data * y.data + z.data, z.dtype.scalar)
        x32, y32, z32 = (_decode(operand.data, operand.dtype) for operand in (x, y, z))
        return handle(_encode(x32 * y32 + z32, z.dtype), z.dtype.scalar)

    def dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        a_data = _decode(a.data, a.dtype) if _is_narrow(a.dtype) else a.data
        b_data = _decode(b.data, b.dtype) if _is_narrow(b.dtype) else b.data
        return handle(np.matmul(a_data, b_data, dtype=d.data.dtype) + d.data, d.dtype.scalar)

    def bf16_constant(self: Any, value: float) -> Any:
        return handle(_encode(np.array([value], dtype=np.float32), tl.bfloat16), tl.bfloat16)

    for name, method in {
        "cast_impl": cast,
        "create_fp_to_fp": fp_to_fp,
        "binary_op": binary,
        "unary_op": unary,
        "create_fma": fma,
        "create_dot": dot,
        "get_bf16": bf16_constant,
    }.items():
        setattr(builder, name, method)


def _correct_reductions(interpreter: Any) -> None:
    """Sums, extrema and running sums over bf16 and fp8 work on decoded values."""
    reduce_ops, scan_ops, handle = interpreter.ReduceOps, interpreter.ScanOps, interpreter.TensorHandle

    def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
            tensor = tensor[0] if isinstance(tensor, tuple) else tensor
            if not _is_narrow(tensor.dtype):
                return stock(self, tensor, *args, **kwargs)
            wide = tl.core.tensor(
                handle(_decode(tensor.handle.data, tensor.dtype), tl.float32),
                tl.block_type(tl.float32, list(tensor.handle.data.shape)),
            )
            result = stock(self, wide, *args, **kwargs)
            parts = result if isinstance(result, (list, tuple)) else [result]
            narrow = []
            for part in parts:
                if part.dtype.scalar == tl.float32:
                    data = _encode(part.handle.data, tensor.dtype)
                    kind = tl.block_type(tensor.dtype, list(part.shape)) if part.shape else tensor.dtype
                    part = tl.core.tensor(handle(data, tensor.dtype.scalar), kind)
                narrow.append(part)
            return type(result)(narrow) if isinstance(result, (list, tuple)) else narrow[0]

        return method

    reduce_ops.sum = wrap(reduce_ops.sum)
    reduce_ops.min_max = wrap(reduce_ops.min_max)
    scan_ops.cumsum = wrap(scan_ops.cumsum)
    scan_ops.cumprod = wrap(scan_ops.cumprod)


def _correct_loop_bounds(interpreter: Any) -> None:
    """Loop bounds loaded from memory become Python integers in a way that numpy 2.4 accepts too."""
    stock = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        stock(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def _skip_overflow_conditions(interpreter: Any) -> None:
    """Integer operations build an overflow condition that nothing reads (device asserts are off): half the
    time.
    """
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _patch_language_once_a_launch(interpreter: Any) -> None:
    """Stock re-patches triton.language at each call of a nested jit helper (tl.sum is one); once a launch is
    enough.
    """
    patched: set[str] = set()
    modules_of: dict[Any, frozenset[str]] = {}
    stock_launch = interpreter.GridExecutor.__call__

    def language_modules(fn: Any) -> frozenset[str]:
        if fn not in modules_of:
            found = (value for value in fn.__globals__.values() if value is tl or value is tl.core)
            modules_of[fn] = frozenset(module.__name__ for module in found)
        return modules_of[fn]

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        stock_launch(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = language_modules(self.fn)
        if not wanted <= patched:
            interpreter._patch_lang(self.fn)
            patched.update(wanted)
        return self.rewrite()(*args, **kwargs)

    interpreter.GridExecutor.__call__ = launch
    interpreter.InterpretedFunction.__call__ = call


def activate(num_threads: int = 1) -> None:
    """Correct and speed up the interpreter of this process (idempotent), then run the self-test.

    Raises `InterpreterMismatchError` if TRITON_INTERPRET was not set before triton was imported, if triton's
    internals are not the ones corrected here, or if the self-test finds a wrong value.
    """
    global _active
    if _active:
        return
    if not is_interpreting() or not hasattr(tl.sum, "rewrite"):
        raise InterpreterMismatchError(
            "set TRITON_INTERPRET=1 before triton is imported, then call activate()"
        )
    set_threads(num_threads)
    import triton.runtime.interpreter as interpreter

    try:
        _correct_builder(interpreter)
        _correct_reductions(interpreter)
        _correct_loop_bounds(interpreter)
        _skip_overflow_conditions(interpreter)
        _patch_language_once_a_launch(interpreter)
    except AttributeError as error:
        raise InterpreterMismatchError(f"triton {triton.__version__} has other internals: {error}") from error
    _active = True
    from hisparsim_kernels.interpreter_check import self_test

    self_test()


@contextlib.contextmanager
def permuted_programs(seed: int) -> Iterator[None]:
    """Run the programs of each launch in a seeded random order instead of ascending order.

    A kernel whose result depends on the order of its programs differs under some seed; on a GPU it would be a
    race.
    """
    import triton.runtime.interpreter as interpreter

    builder = interpreter.interpreter_builder
    stock = interpreter.InterpreterBuilder.set_grid_idx
    orders: dict[tuple[int, ...], np.ndarray] = {}

    def set_grid_idx(x: int, y: int, z: int) -> None:
        dims = tuple(builder.grid_dim)
        if dims not in orders:
            orders[dims] = np.random.default_rng(seed).permutation(int(np.prod(dims)))
        index = np.unravel_index(orders[dims][np.ravel_multi_index((x, y, z), dims)], dims)
        stock(builder, *(int(i) for i in index))

    builder.set_grid_idx = set_grid_idx
    try:
        yield
    finally:
        del builder.set_grid_idx
