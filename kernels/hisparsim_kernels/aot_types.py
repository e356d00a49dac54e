"""Argument types of integer kernels for the ahead-of-time cases: nearly all are int32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def integer_types(fn: Any, exceptions: Mapping[str, str] | None = None) -> dict[str, str]:
    """Type of each run-time argument of a jit function.

    That is "*i32" for `..._ptr` and "i32" for the rest, unless named in `exceptions` (names that the function
    lacks are ignored). Upper-case arguments are constexprs and left out.
    """
    named = exceptions or {}
    types = {}
    for name in fn.arg_names:
        if not name.isupper():
            types[name] = named.get(name, "*i32" if name.endswith("_ptr") else "i32")
    return types
