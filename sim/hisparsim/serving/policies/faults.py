"""Faults of a user's own policy: whatever it raises becomes one error that names file, error and line."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hisparsim.serving.policy import PolicyError

_LIBRARY = ("hisparsim", "hisparsim_traces", "hisparsim_realrun", "hisparsim_kernels", "hisparsim_reports")


@contextmanager
def policy_faults(name: str) -> Iterator[None]:
    """Change: in the block, an error that ``path/to/file.py:Class`` causes is raised as a PolicyError.

    Errors of the library itself (a broken law, a wedged run) pass as they are, and so does everything where
    the policy is a bundled one.

    Raises:
        PolicyError: the policy raised something, or does not answer as its interface says.
    """
    try:
        yield
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        if ".py:" not in name or type(error).__module__.split(".")[0] in _LIBRARY:
            raise
        message = " ".join(str(error).split())
        told = f"{type(error).__name__}: {message}" if message else type(error).__name__
        raise PolicyError(f"policy {name!r} failed{_place(error, name)}: {told}") from error


def _place(error: BaseException, name: str) -> str:
    """Query: where in the policy's file the error came from, empty where it came from outside of it.

    The event loop raises a copy whose cause is the original, so causes are followed.
    """
    file = Path(name.rsplit(":", 1)[0])
    own: list[traceback.FrameSummary] = []
    cause: BaseException | None = error
    while cause is not None and not own:
        frames = traceback.extract_tb(cause.__traceback__)
        own = [frame for frame in frames if Path(frame.filename).name == file.name]
        cause = cause.__cause__
    return f" in {own[-1].name}, line {own[-1].lineno} of {file}" if own else ""
