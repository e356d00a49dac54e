"""Azure LLM inference traces: 2023, 2024 and the multimodal one. Lengths and wall-clock arrivals, no prefix
identity.

2023 stamps are naive with 7 fractional digits, 2024 ones carry +00:00 and sometimes no fraction; both
become exact nanoseconds. The multimodal file has NumImages in second place, so columns are found by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..csvbatches import csv_batches, header_of
from ..csvcolumns import chunk_of, datetime_column_ns, token_column, usable
from ..rows import Chunk, Format, Head, Options

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_IMAGES = "NumImages"


def read(path: Path, options: Options) -> Iterator[Chunk]:
    for batch in csv_batches(path):
        batch.require(_COLUMNS, path)
        stamps, inputs, outputs = (batch.columns[name] for name in _COLUMNS)
        time = datetime_column_ns(stamps, "TIMESTAMP")
        given = token_column(inputs, "ContextTokens")
        made = token_column(outputs, "GeneratedTokens")
        good = usable(batch, time, given, made)
        chunk = chunk_of(batch, good, time.values, given, made)
        if _IMAGES in batch.columns:
            chunk.notes = ("images are not counted: ContextTokens is taken as it is",)
        yield chunk


def _zoned(head: Head) -> bool:
    lines = head.raw.split(b"\n", 2)
    stamp = lines[1].split(b",", 1)[0].strip() if len(lines) > 1 else b""
    return stamp.endswith(b"Z") or b"+" in stamp


def _is_azure(head: Head) -> bool:
    return head.kind == "csv" and set(_COLUMNS) <= set(header_of(head.raw))


def recognise_2023(head: Head) -> bool:
    return _is_azure(head) and _IMAGES not in head.header and not _zoned(head)


def recognise_2024(head: Head) -> bool:
    return _is_azure(head) and _IMAGES not in head.header and _zoned(head)


def recognise_multimodal(head: Head) -> bool:
    return _is_azure(head) and _IMAGES in head.header


AZURE_2023 = Format("azure2023", "Azure LLM inference 2023 CSV", read, recognise_2023)
AZURE_2024 = Format("azure2024", "Azure LLM inference 2024 CSV", read, recognise_2024)
AZURE_MULTIMODAL = Format("azure-multimodal", "Azure multimodal inference CSV", read, recognise_multimodal)
