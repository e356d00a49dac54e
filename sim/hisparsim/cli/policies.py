"""``hisparsim policies``: the table of residency policies."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .printing import print_json


def policies(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the residency policies with one line each, and their switches (`policy.*`) with defaults.

    `--policy path/to/file.py:Class` takes one of yours.
    """
    from hisparsim.serving.policies import POLICIES, policy_class

    kinds = {name: policy_class(name) for name in POLICIES}
    if as_json:
        rows = [
            {"name": name, "description": kind.summary, "options": dict(kind.options)}
            for name, kind in kinds.items()
        ]
        print_json({"policies": rows})
        return
    width = max(len(name) for name in kinds)
    for name, kind in kinds.items():
        typer.echo(f"{name:<{width}}  {kind.summary}")
        if kind.options:
            switches = ", ".join(f"policy.{key}={_shown(value)}" for key, value in kind.options.items())
            typer.echo(f"{'':<{width}}  {switches}")


def _shown(value: Any) -> str:
    """Query: a default as `--set` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
