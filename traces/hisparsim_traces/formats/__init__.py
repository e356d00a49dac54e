"""One module a format; the table of them all."""

from __future__ import annotations

from ..rows import Format
from . import azure, mooncake

FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        mooncake.FORMAT,
        azure.AZURE_2023,
        azure.AZURE_2024,
        azure.AZURE_MULTIMODAL,
    )
}
