"""``hisparsim policies``: the table of residency policies."""

from __future__ import annotations

from typing import Annotated

import typer

from .printing import print_json


def policies(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the residency policies with one line each. `--policy path/to/file.py:Class` takes one of yours."""
    from hisparsim.serving.policies import POLICIES, policy_class

    lines = {name: policy_class(name).summary for name in POLICIES}
    if as_json:
        print_json({"policies": [{"name": name, "description": line} for name, line in lines.items()]})
        return
    width = max(len(name) for name in lines)
    for name, line in lines.items():
        typer.echo(f"{name:<{width}}  {line}")
