"""The directory of a sweep, safe against any end of the process.

| file | content |
|---|---|
| ``sweep.json`` | what was asked for, and its sha256 |
| ``runs/<fingerprint>.parquet`` | one row a finished run: a Parquet dataset that grows while the sweep runs |
| ``sweep.parquet`` | the table: one row a scenario, in the order of the axes; written at the end |
| ``report/`` | the page and its figures |

Every file is written under a hidden name and renamed, so a file that has its name is whole. Only one process
at a time holds the directory.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from .columns import ERROR, METRICS, WALL, Cell, arrow_type
from .errors import SweepDirectoryError

DESCRIPTION_FILE, TABLE_FILE = "sweep.json", "sweep.parquet"
FORMAT, FORMAT_VERSION = "hisparsim-sweep", 1
_RUN = "run"


class SweepStore:
    """An open sweep directory.

    Raises:
        SweepDirectoryError: it holds another sweep, something else, finished runs without ``resume``, or is
            in use.
    """

    def __init__(self, path: Path, description: Mapping[str, Any], *, sha256: str, resume: bool) -> None:
        self.path = path
        self.runs = path / "runs"
        existing = _described(path)
        if existing is None and _holds_something(path):
            raise SweepDirectoryError(f"{path}: is not empty and holds no sweep; give a new directory")
        if existing is not None and existing.get("sha256") != sha256:
            raise SweepDirectoryError(
                f"{path}: holds another sweep ({_difference(existing.get('sweep', {}), description)}); "
                "give a new directory"
            )
        if existing is not None and not resume:
            raise SweepDirectoryError(f"{path}: holds this sweep already; continue it with --resume")
        try:
            self.runs.mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] = (path / ".lock").open("w")
        except OSError as error:
            raise self._failed(error) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise SweepDirectoryError(f"{path}: another hisparsim process is writing there") from None
        for left in [*path.glob(".*.partial"), *self.runs.glob(".*.partial")]:
            if left.is_dir():  # a report under way
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)
        told = {"format": FORMAT, "format_version": FORMAT_VERSION, "sha256": sha256, "sweep": description}
        self.write(DESCRIPTION_FILE, (json.dumps(told, indent=2, ensure_ascii=False) + "\n").encode())

    def finished(self) -> dict[str, dict[str, Cell]]:
        """Query: fingerprint -> record of every run that is stored whole."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        found: dict[str, dict[str, Cell]] = {}
        for file in sorted(self.runs.glob("*.parquet")):
            try:
                record = pq.ParquetFile(file).read().to_pylist()[0]
            except (pa.ArrowInvalid, OSError, IndexError):
                continue  # a disk lost it: the run is made again
            if set(record) == {_RUN, *METRICS, ERROR, WALL}:
                found[str(record.pop(_RUN))] = record
        return found

    def add(self, fingerprint: str, record: Mapping[str, Cell]) -> None:
        """Change: store a finished run. Raises SweepDirectoryError where that fails, a full disk included."""
        columns = {_RUN: str, **METRICS, ERROR: str, WALL: float}
        self.write(f"runs/{fingerprint}.parquet", table_bytes(columns, [{_RUN: fingerprint, **record}]))

    def write_table(self, columns: Mapping[str, type], rows: Sequence[Mapping[str, Cell]]) -> Path:
        """Change: write the final table; equal rows give equal bytes. Returns its path."""
        return self.write(TABLE_FILE, table_bytes(columns, rows))

    def write(self, name: str, content: bytes) -> Path:
        """Change: write a file of the directory whole or not at all.

        Raises:
            SweepDirectoryError: it cannot be written; what is stored stays.
        """
        target = self.path / name
        partial = target.parent / f".{target.name}.partial"
        try:
            with partial.open("wb") as out:
                out.write(content)
                out.flush()
                os.fsync(out.fileno())
            partial.rename(target)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise self._failed(error) from None
        return target

    def write_report(self, fill: Callable[[Path], Path]) -> Path:
        """Change: let ``fill`` draw a report into an empty directory, and put it in its place."""
        partial, target = self.path / ".report.partial", self.path / "report"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            page = fill(partial)
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise self._failed(error) from None
        return target / page.name

    def close(self) -> None:
        """Change: let others write there."""
        self._lock.close()

    def _failed(self, error: OSError) -> SweepDirectoryError:
        kept = len(list(self.runs.glob("*.parquet"))) if self.runs.is_dir() else 0
        again = f"; {kept} finished runs are kept, continue with --resume" if kept else ""
        return SweepDirectoryError(f"{self.path}: {error.strerror or error}{again}")


def table_bytes(columns: Mapping[str, type], rows: Sequence[Mapping[str, Cell]]) -> bytes:
    """Query: rows as Parquet, whose bytes depend on nothing but columns and rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(name, arrow_type(kind)) for name, kind in columns.items()])
    arrays = [pa.array([row.get(name) for row in rows], arrow_type(kind)) for name, kind in columns.items()]
    buffer = BytesIO()
    table = pa.Table.from_arrays(arrays, schema=schema)
    pq.write_table(table, buffer, compression="zstd", version="2.6", store_schema=False, use_dictionary=False)
    return buffer.getvalue()


def _described(path: Path) -> dict[str, Any] | None:
    file = path / DESCRIPTION_FILE
    if path.exists() and not path.is_dir():
        raise SweepDirectoryError(f"{path}: is a file; give a directory")
    if not file.is_file():
        return None
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        described = None
    if not isinstance(described, dict) or described.get("format") != FORMAT:
        raise SweepDirectoryError(f"{file}: not the description of a hisparsim sweep; give a new directory")
    if described.get("format_version") != FORMAT_VERSION:
        raise SweepDirectoryError(
            f"{file}: format version {described.get('format_version')}; this hisparsim writes "
            f"{FORMAT_VERSION}"
        )
    return described


def _holds_something(path: Path) -> bool:
    """Query: whether there is more than the traces of a process that died in its first moments."""
    if not path.is_dir():
        return False
    shown = [entry for entry in path.iterdir() if not entry.name.startswith(".")]
    return any(entry.name != "runs" or any(entry.iterdir()) for entry in shown)


def _difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    differing = [key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)]
    return f"its {differing[0]} differs" if differing else "made by another version"
