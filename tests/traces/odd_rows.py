"""Rows of public formats, made by hand."""

from __future__ import annotations

import json
from pathlib import Path


def lines(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mooncake(
    timestamp: object, length: int, output: int = 1, ids: list[int] | None = None
) -> dict[str, object]:
    ids = list(range(-(-length // 512))) if ids is None else ids
    return {"timestamp": timestamp, "input_length": length, "output_length": output, "hash_ids": ids}


BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
