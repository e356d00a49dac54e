"""Tables and JSON on stdout, talk on stderr."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer


def print_json(value: Any) -> None:
    """Change: write one JSON document to stdout."""
    from hisparsim.results.directory import to_json

    typer.echo(to_json(value))


def say(message: str) -> None:
    """Change: write a line for people to stderr."""
    typer.echo(message, err=True)


def format_rows(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Query: a table as text, the first column aligned left, the others right."""
    cells = [list(headers), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    lines = [_line(row, widths) for row in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def transpose(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Query: headers and rows with rows and columns exchanged: few runs read best side by side."""
    columns = [list(column) for column in zip(headers, *rows, strict=True)]
    return columns[0], columns[1:]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
    return "  ".join([row[0].ljust(widths[0]), *padded[1:]]).rstrip()
