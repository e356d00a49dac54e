"""The run directory: what a run leaves on disk.

| file | content |
|---|---|
| ``run.json`` | policy, scenario as resolved, trace, summary, metrics, versions, machine, wall time |
| ``requests.parquet`` | one row a request |
| ``steps.parquet`` | one row an engine step |
| ``itl.parquet`` | inter-token gaps and how often each occurred |
| ``timeline.parquet`` | the run over time, binned |
| ``decisions.parquet`` | one row a decision, on request |

Equal results give equal bytes in every file; in ``run.json`` all but ``machine``, ``versions``,
``written_at`` and ``wall_s``. Everything is written under a temporary name and renamed at the end.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .errors import RunDirectoryError
from .metrics import compute_metrics
from .records import REQUEST_COLUMNS, STEP_COLUMNS, Columns, RunResult
from .timeline import bin_timeline

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = "hisparsim-run"
FORMAT_VERSION = 1
RUN_FILE = "run.json"
LISTING_FILE = "runs.json"
"""In a directory of several runs: the names of their directories, in the order asked for."""
VARYING_FIELDS = ("written_at", "wall_s", "machine", "versions")
"""Fields of ``run.json`` that may differ between equal results."""
_DESCRIBED = {"policy": str, "scenario": dict, "trace": dict, "summary": dict, "wall_s": float | int}
"""What every description holds, and of which kind."""
_LIBRARIES = ("hisparsim", "numpy", "simpy", "pyarrow")


@contextmanager
def published(path: Path) -> Iterator[Path]:
    """Change: yield an empty directory that becomes ``path`` when the block ends without an error.

    On an error nothing is left; a killed process leaves at most a hidden ``.NAME.partial-PID`` beside it.

    Raises:
        RunDirectoryError: ``path`` exists already.
        OSError: ``path``, which it names, cannot be written (a full disk).
    """
    refuse_existing(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / f".{path.name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        refuse_existing(path)
        partial.rename(path)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(
                error.errno, f"{os.strerror(error.errno)}; nothing is left of it", str(path)
            ) from None
        raise


def refuse_existing(path: Path) -> None:
    """Query: raise RunDirectoryError where ``path`` exists, or cannot be made.

    Results are never written over.
    """
    if path.exists():
        raise RunDirectoryError(
            f"{path}: exists already; results are never overwritten: give a new directory"
        )
    refuse_unwritable(path)


def refuse_unwritable(path: Path) -> None:
    """Query: raise RunDirectoryError where no new file or directory can be made at ``path``.

    Commands ask before anything runs, not after minutes of it.
    """
    if path.is_dir():
        raise RunDirectoryError(f"{path}: is a directory: name the file to write")
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir():
        raise RunDirectoryError(f"{path}: cannot be made, {above} is a file: give another place")
    if not os.access(above, os.W_OK | os.X_OK):
        raise RunDirectoryError(f"{path}: cannot be made, {above} must not be written: give another place")


def write_run(result: RunResult, path: Path, decisions: Columns | None = None) -> None:
    """Change: write a run to the new directory ``path``.

    Raises:
        RunDirectoryError: ``path`` exists already.
    """
    with published(path) as directory:
        (directory / RUN_FILE).write_text(to_json(describe_run(result)) + "\n", encoding="utf-8")
        order = [name for name in REQUEST_COLUMNS if name in result.requests]
        _write_table(directory / "requests.parquet", {name: result.requests[name] for name in order})
        order = [name for name in STEP_COLUMNS if name in result.steps]
        order += [name for name in result.steps if name not in STEP_COLUMNS]
        _write_table(directory / "steps.parquet", {name: result.steps[name] for name in order})
        gap_ns, weight = result.itl
        _write_table(directory / "itl.parquet", {"gap_ns": gap_ns, "weight": weight})
        _write_table(directory / "timeline.parquet", bin_timeline(result))
        if decisions is not None:
            _write_table(directory / "decisions.parquet", decisions)


def read_run(path: Path) -> RunResult:
    """Query: the run in a directory that :func:`write_run` wrote.

    Raises:
        RunDirectoryError: not a run directory, or one of another format version.
    """
    described = read_description(path)
    itl = _read_table(path / "itl.parquet")
    return RunResult(
        policy=described["policy"],
        scenario=described["scenario"],
        trace=described["trace"],
        wall_s=described["wall_s"],
        summary=described["summary"],
        requests=_read_table(path / "requests.parquet"),
        steps=_read_table(path / "steps.parquet"),
        itl=(itl["gap_ns"], itl["weight"]),
    )


def read_description(path: Path) -> dict[str, Any]:
    """Query: the content of ``run.json``. Raises RunDirectoryError as :func:`read_run` does."""
    file = path / RUN_FILE
    if not file.is_file():
        raise RunDirectoryError(f"{path}: not a run directory: it has no {RUN_FILE}")
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RunDirectoryError(f"{file}: not JSON ({error})") from error
    if not isinstance(described, dict) or described.get("format") != FORMAT:
        raise RunDirectoryError(f"{file}: not the description of a hisparsim run")
    if described.get("format_version") != FORMAT_VERSION:
        raise RunDirectoryError(
            f"{file}: format version {described.get('format_version')}; this hisparsim reads {FORMAT_VERSION}"
        )
    for key, kind in _DESCRIBED.items():
        if not isinstance(described.get(key), kind):
            raise RunDirectoryError(f"{file}: {key} is missing or of the wrong kind; run it again")
    return described


def find_runs(path: Path) -> list[Path]:
    """Query: the run directories that ``path`` is or holds, in the order in which they were run.

    Raises:
        RunDirectoryError: there is none.
    """
    if (path / RUN_FILE).is_file():
        return [path]
    children = sorted(path.iterdir()) if path.is_dir() else []
    found = [run for run in children if (run / RUN_FILE).is_file() and not run.name.startswith(".")]
    if not found:
        raise RunDirectoryError(f"{path}: holds no run directory (none with a {RUN_FILE})")
    listing = path / LISTING_FILE
    names: Any = []
    if listing.is_file():
        try:
            names = json.loads(listing.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise RunDirectoryError(f"{listing}: not JSON ({error})") from None
    if not isinstance(names, list):
        raise RunDirectoryError(f"{listing}: not a list of run directories")
    return sorted(found, key=lambda run: names.index(run.name) if run.name in names else len(names))


def describe_run(result: RunResult) -> dict[str, Any]:
    """Query: the content of ``run.json``, JSON-able through :func:`to_json`."""
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "policy": result.policy,
        "trace": result.trace,
        "scenario": result.scenario,
        "summary": result.summary,
        "metrics": compute_metrics(result).flat(),
        "wall_s": result.wall_s,
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "platform": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "num_cpus": os.cpu_count(),
        },
        "versions": {"python": platform.python_version(), **_library_versions()},
    }


def to_json(value: Any) -> str:
    """Query: ``value`` as JSON text; numpy scalars, enums and paths become plain, NaN is refused."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _library_versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            module = sys.modules.get(name)
            versions[name] = str(getattr(module, "__version__", "unknown"))
    return versions


def _write_table(path: Path, columns: Columns) -> None:
    """Change: write columns as parquet whose bytes depend on nothing but the columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table: pa.Table = pa.table({name: pa.array(np.asarray(column)) for name, column in columns.items()})
    pq.write_table(table, path, compression="zstd", version="2.6", store_schema=False, use_dictionary=False)


def _read_table(path: Path) -> dict[str, NDArray[Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise RunDirectoryError(f"{path}: missing; the run directory is incomplete: run it again")
    try:
        table = pq.ParquetFile(path).read()
    except (pa.ArrowException, OSError) as error:
        raise RunDirectoryError(f"{path}: damaged or cut short ({error}): run it again") from None
    return {name: table.column(name).to_numpy() for name in table.column_names}
