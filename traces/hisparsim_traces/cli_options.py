"""The options that several trace commands share, and what `load` makes of them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from .errors import TraceError


class Target(StrEnum):
    MOONCAKE = "mooncake"
    PARQUET = "parquet"


class LoopChoice(StrEnum):
    THINK = "think"
    GAPS = "gaps"
    SERVICE = "service"
    OPEN = "open"


class WrapsChoice(StrEnum):
    SORT = "sort"
    CONTINUE = "continue"
    ERROR = "error"


class OverLongChoice(StrEnum):
    REJECT = "reject"
    SKIP = "skip"
    TRUNCATE = "truncate"
    SKIP_SESSION = "skip-session"


File = Annotated[str, typer.Argument(help="A trace file or folder, or the name of a bundled trace.")]
FormatName = Annotated[
    str | None, typer.Option("--format", help="Name of the format; detected when left out.")
]
ColumnMap = Annotated[
    list[str] | None,
    typer.Option("--map", help="FIELD=COLUMN or FIELD=COLUMN:UNIT for plain files, such as arrival=ts:ms."),
]
Strict = Annotated[bool, typer.Option("--strict", help="A dropped or changed row is an error.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Only the first so many kept requests.")]
MaxContext = Annotated[
    int | None, typer.Option("--max-context", min=2, help="Longest prompt plus output, in tokens.")
]
OverLongOption = Annotated[OverLongChoice, typer.Option("--over-long", help="What happens to longer ones.")]
WrapsOption = Annotated[
    WrapsChoice, typer.Option("--wraps", help="Where stamps jump back by more than a minute.")
]
BlockTokens = Annotated[int | None, typer.Option("--block-tokens", min=1, help="Tokens a block id covers.")]
TimeUnit = Annotated[str | None, typer.Option("--time-unit", help="s, ms, us or ns, for timed_trace.")]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Seed of what is drawn.")]
Duration = Annotated[float | None, typer.Option("--duration", help="Seconds to draw, for client models.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
To = Annotated[Target | None, typer.Option("--to", help="Format to write; by OUT's suffix when left out.")]


def options_of(**given: Any) -> dict[str, Any]:
    """The options of `load` that were given."""
    mapped = given.pop("columns", None)
    options = {name: value for name, value in given.items() if value is not None and value is not False}
    if mapped:
        columns: dict[str, str] = {}
        for item in mapped:
            name, equals, column = item.partition("=")
            if not (name and equals and column):
                raise TraceError(f"--map {item!r}: must be FIELD=COLUMN or FIELD=COLUMN:UNIT")
            columns[name] = column
        options["columns"] = columns
    return options
