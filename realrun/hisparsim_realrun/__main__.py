"""``python -m hisparsim_realrun``: the runner's own commands, as torchrun starts them on each rank."""

from __future__ import annotations

import sys

import typer

from .cli import app

USER_ERROR = 2


def main() -> None:
    """Change: run one command line; errors that a user can mend are one line and exit code 2."""
    try:
        app(prog_name="python -m hisparsim_realrun")
    except ValueError as error:
        typer.echo(f"hisparsim: {error}", err=True)
        sys.exit(USER_ERROR)


if __name__ == "__main__":
    main()
