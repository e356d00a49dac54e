"""`hisparsim trace ...`: what a trace is, parts of it, other formats, synthetic ones, public ones.

Results go to stdout, talk to stderr. Bad input is one line on stderr and exit code 2.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer

from .cli_options import (
    AsJson,
    BlockTokens,
    ColumnMap,
    Duration,
    File,
    FormatName,
    Limit,
    LoopChoice,
    MaxContext,
    OverLongChoice,
    OverLongOption,
    Seed,
    Strict,
    Target,
    TimeUnit,
    To,
    WrapsChoice,
    WrapsOption,
    options_of,
)
from .errors import TraceError

app = typer.Typer(
    help="Read, describe, convert, synthesise and fetch LLM serving traces.",
    no_args_is_help=True,
    add_completion=False,
)

P = ParamSpec("P")
R = TypeVar("R")


def _reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """A TraceError (or a file that cannot be written) becomes one line on stderr and exit code 2."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except TraceError as error:
            typer.echo(f"error: {error}", err=True)
        except BrokenPipeError:
            sys.stderr.close()  # the reader of stdout has gone: nothing is left to say
            raise typer.Exit(1) from None
        except OSError as error:
            typer.echo(f"error: {error.filename or 'file'}: {error.strerror or error}", err=True)
        raise typer.Exit(2)

    return wrapped


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1))


def _write(trace: Any, out: Path, to: Target | None) -> None:
    from .writing import write_mooncake, write_parquet

    if to is None:
        to = Target.PARQUET if out.suffix == ".parquet" else Target.MOONCAKE
    if out.is_dir():
        raise TraceError("is a folder: name the file to write", path=out)
    partial = out.with_name(".partial-" + out.name)
    try:
        (write_parquet if to is Target.PARQUET else write_mooncake)(trace, partial)
        partial.replace(out)
    except OSError as error:
        raise TraceError(f"cannot be written ({error.strerror or error})", path=out) from error
    finally:
        partial.unlink(missing_ok=True)
    dropped = ", ".join(f"{count} {reason}" for reason, count in trace.loading.rows_dropped.items())
    said = f"{out}: {trace.num_requests} requests" + (f"; left out: {dropped}" if dropped else "")
    if to is Target.MOONCAKE and trace.kind is not None:
        said += "; kinds are not written (Parquet keeps them)"
    typer.echo(said, err=True)


@app.command()
@_reports_errors
def info(
    file: File,
    format: FormatName = None,
    as_json: AsJson = False,
    column_map: ColumnMap = None,
    strict: Strict = False,
    limit: Limit = None,
    block_tokens: BlockTokens = None,
    time_unit: TimeUnit = None,
    seed: Seed = None,
    duration: Duration = None,
    reuse_sample: Annotated[
        float, typer.Option("--reuse-sample", help="Share of block ids followed for reuse by cache size.")
    ] = 1.0,
    plot: Annotated[Path | None, typer.Option("--plot", help="Folder to write figures to.")] = None,
) -> None:
    """What a trace is: rows, lengths, arrivals, burstiness, reuse."""
    from .statistics import file_info

    options = options_of(
        format=format,
        columns=column_map,
        strict=strict,
        limit=limit,
        block_tokens=block_tokens,
        time_unit=time_unit,
        seed=seed,
        duration_s=duration,
    )
    about = file_info(file, reuse_sample=reuse_sample, **options)
    if as_json:
        _print_json(about)
    else:
        from .printing import print_info

        print_info(about)
    if plot is not None:
        from .loading import load
        from .plotting import plot_trace

        for path in plot_trace(load(file, **options), plot):
            typer.echo(str(path), err=True)


@app.command()
@_reports_errors
def head(
    file: File,
    num_requests: Annotated[int, typer.Option("-n", "--num-requests", min=1, help="How many requests.")] = 10,
    format: FormatName = None,
    as_json: AsJson = False,
    column_map: ColumnMap = None,
    block_tokens: BlockTokens = None,
    time_unit: TimeUnit = None,
) -> None:
    """The first requests, without reading the rest."""
    from .loading import load
    from .printing import print_rows, rows_of

    trace = load(
        file,
        limit=num_requests,
        **options_of(format=format, columns=column_map, block_tokens=block_tokens, time_unit=time_unit),
    )
    if as_json:
        _print_json(rows_of(trace))
    else:
        print_rows(trace)


@app.command()
@_reports_errors
def convert(
    file: File,
    out: Annotated[Path, typer.Argument(help="File to write.")],
    to: To = None,
    format: FormatName = None,
    column_map: ColumnMap = None,
    strict: Strict = False,
    limit: Limit = None,
    max_context: MaxContext = None,
    over_long: OverLongOption = OverLongChoice.REJECT,
    wraps: WrapsOption = WrapsChoice.SORT,
    block_tokens: BlockTokens = None,
    time_unit: TimeUnit = None,
    seed: Seed = None,
    duration: Duration = None,
) -> None:
    """Write Mooncake JSONL, or the project's Parquet, which keeps everything."""
    from .loading import load

    options = options_of(
        format=format,
        columns=column_map,
        strict=strict,
        limit=limit,
        max_context_tokens=max_context,
        block_tokens=block_tokens,
        time_unit=time_unit,
        seed=seed,
        duration_s=duration,
    )
    _write(load(file, over_long=over_long.value, wraps=wraps.value, **options), out, to)


@app.command("slice")
@_reports_errors
def slice_(
    file: File,
    out: Annotated[Path, typer.Argument(help="File to write.")],
    start: Annotated[float, typer.Option("--start", help="First second kept.")] = 0.0,
    end: Annotated[float | None, typer.Option("--end", help="First second left out.")] = None,
    limit: Limit = None,
    loop: Annotated[LoopChoice, typer.Option("--loop", help="How turns start.")] = LoopChoice.THINK,
    service_scale: Annotated[float, typer.Option("--service-scale", help="For --loop service.")] = 1.0,
    gap_cap: Annotated[
        float | None, typer.Option("--gap-cap", help="Longest pause, in the trace's own seconds.")
    ] = None,
    time_scale: Annotated[
        float, typer.Option("--time-scale", help="0.5 doubles the rate; applied last.")
    ] = 1.0,
    spread: Annotated[
        float | None,
        typer.Option(
            "--spread-ties", help="Spread arrivals of one stamp over so many seconds, first of all."
        ),
    ] = None,
    wraps: WrapsOption = WrapsChoice.SORT,
    to: To = None,
    format: FormatName = None,
    column_map: ColumnMap = None,
    block_tokens: BlockTokens = None,
    time_unit: TimeUnit = None,
) -> None:
    """A part of a trace, at another speed: window, limit, loop, gap cap, time scale, in this order."""
    from .loading import load
    from .replay import prepare, spread_ties

    trace = load(
        file,
        wraps=wraps.value,
        **options_of(format=format, columns=column_map, block_tokens=block_tokens, time_unit=time_unit),
    )
    if spread is not None:
        trace = spread_ties(trace, spread)
    part = prepare(
        trace,
        start_s=start,
        end_s=end,
        limit=limit,
        loop=loop.value,
        service_scale=service_scale,
        gap_cap_s=gap_cap,
        time_scale=time_scale,
    )
    _write(part, out, to)


@app.command()
@_reports_errors
def synth(
    description: Annotated[str, typer.Argument(help="A description file, or the name of a bundled one.")],
    out: Annotated[Path, typer.Argument(help="File to write.")],
    seed: Seed = None,
    num_requests: Annotated[int | None, typer.Option("-n", "--num-requests", min=1)] = None,
    rate: Annotated[float | None, typer.Option("--rate", help="Requests (or sessions) per second.")] = None,
    to: To = None,
) -> None:
    """Draw a trace from a description."""
    from .bundled import BUNDLED, description_of
    from .files import exists
    from .synth.description import parse_description, read_description, with_rate
    from .synth.draw import synthesise

    path = Path(description)
    if not exists(path) and description in BUNDLED:
        law = parse_description(description_of(description))
    else:
        law = read_description(path)
    if rate is not None:
        law = with_rate(law, rate)
    _write(synthesise(law, seed=seed, num_requests=num_requests), out, to)


@app.command()
@_reports_errors
def fit(
    file: File,
    out: Annotated[Path, typer.Argument(help="Description to write, JSON.")],
    format: FormatName = None,
    as_json: AsJson = False,
    column_map: ColumnMap = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed the description carries.")] = 0,
    block_tokens: BlockTokens = None,
    time_unit: TimeUnit = None,
) -> None:
    """Write the description a trace looks drawn from (no row of it), and say how close a draw comes."""
    from .loading import load
    from .printing import print_fit
    from .synth.description import description_text
    from .synth.fit import fit as fit_description
    from .synth.fit_report import fit_report

    trace = load(
        file, **options_of(format=format, columns=column_map, block_tokens=block_tokens, time_unit=time_unit)
    )
    law = fit_description(trace, seed=seed)
    report = fit_report(trace, law)
    out.write_text(description_text(law), "utf-8")
    if as_json:
        _print_json(report)
    else:
        print_fit(report)


@app.command()
@_reports_errors
def fetch(
    name: Annotated[str, typer.Argument(help="A name of the catalogue.")],
    folder: Annotated[Path, typer.Option("--to", help="Folder to put it in.")] = Path("."),
    sha256: Annotated[
        str | None, typer.Option("--sha256", help="Hash to demand instead of the catalogue's.")
    ] = None,
    unpinned: Annotated[
        bool, typer.Option("--unpinned", help="Accept a file whose hash is not known.")
    ] = False,
    attempts: Annotated[int, typer.Option("--attempts", min=1)] = 5,
) -> None:
    """Download a public trace with its licence, checked, resumed where it broke off."""
    from .catalogue import find
    from .fetching import fetch as fetch_entry

    entry = find(name)
    typer.echo(f"{entry.title} - {entry.licence} - {entry.attribution}", err=True)
    fetched = fetch_entry(entry, folder, sha256=sha256, unpinned=unpinned, attempts=attempts)
    _print_json({"path": str(fetched.path), "sha256": fetched.sha256, "size_bytes": fetched.size_bytes})


@app.command()
@_reports_errors
def catalogue(as_json: AsJson = False) -> None:
    """Public traces: format, licence, size and where they live."""
    from dataclasses import asdict

    from .catalogue import catalogue as entries
    from .printing import print_catalogue

    if as_json:
        _print_json([asdict(entry) for entry in entries().values()])
    else:
        print_catalogue(list(entries().values()))


@app.command()
@_reports_errors
def topk(file: Annotated[Path, typer.Argument(help="A file of recorded top-k selections.")]) -> None:
    """How recorded top-k selections move, as JSON."""
    from .topk import TopkReader
    from .topk_statistics import topk_summary

    reader = TopkReader(file)
    _print_json({"top_k": reader.head.top_k, "num_groups": reader.head.num_groups, **topk_summary(reader)})
