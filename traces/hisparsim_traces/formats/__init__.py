"""One module a format; the table of them all."""

from __future__ import annotations

from ..rows import Format
from . import (
    azure,
    bailian,
    blis,
    burstgpt,
    dynamo,
    llmservingsim,
    mooncake,
    own_parquet,
    plain,
    ragpulse,
    servegen,
    timed_trace,
    weka,
)

FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        mooncake.FORMAT,
        azure.AZURE_2023,
        azure.AZURE_2024,
        azure.AZURE_MULTIMODAL,
        burstgpt.FORMAT,
        weka.FORMAT,
        bailian.FORMAT,
        ragpulse.FORMAT,
        servegen.FORMAT,
        timed_trace.FORMAT,
        dynamo.FORMAT,
        blis.FORMAT,
        llmservingsim.FORMAT,
        own_parquet.FORMAT,
        plain.CSV,
        plain.JSONL,
        plain.PARQUET,
    )
}
