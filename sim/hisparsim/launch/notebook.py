"""What a translation collects: scenario keys with the flag that set them, and flags that are not modelled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hisparsim.launch.command import LaunchError

# fmt: off
HARMLESS = frozenset(
    (
        "api-key", "api-server-count", "chat-template", "chat-template-content-format", "config-format",
        "disable-log-requests", "disable-log-stats", "disable-uvicorn-access-log", "download-dir",
        "enable-auto-tool-choice", "enable-log-requests", "enable-metrics", "enable-request-id-headers",
        "generation-config", "hf-config-path", "hf-token", "host", "load-format", "log-level",
        "log-level-http", "log-requests", "max-log-len", "model-loader-extra-config",
        "model-loader-threads", "override-generation-config", "port", "reasoning-parser", "revision",
        "root-path", "safetensors-load-strategy", "seed", "random-seed", "served-model-name",
        "show-time-cost", "skip-server-warmup", "ssl-certfile", "ssl-keyfile", "tokenizer",
        "tokenizer-mode", "tokenizer-path", "tool-call-parser", "tool-parser-plugin",
        "trust-remote-code", "uvicorn-log-level", "watchdog-timeout", "warmups", "dist-init-addr",
        "dist-timeout",
    )
)
# fmt: on
"""Flags that change no step's time and no decision: names, formats, logs, how weights are loaded."""


@dataclass
class Notebook:
    """Filled while flags are read."""

    flags: dict[str, Any]
    """Flags not yet read."""
    settings: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """Scenario key -> the flag, or the engine's default, that gave it."""
    unmodelled: list[str] = field(default_factory=list)
    """Sentences that begin with the flag."""
    notes: list[str] = field(default_factory=list)

    def take(self, *names: str) -> Any:
        """Change: the value of the first of these flags that was given, None where none was."""
        found = None
        for name in names:
            value = self.flags.pop(name, None)
            if found is None and value is not None:
                found = value
        return found

    def set(self, key: str, value: Any, origin: str) -> None:
        """Change: a scenario key."""
        self.settings[key] = value
        self.origins[key] = origin

    def whole(self, *names: str, least: int | None = None) -> int | None:
        """Change: a flag's whole number; 142k, 8K and 1M count in thousands, as vLLM's do.

        Raises:
            LaunchError: no whole number, or one below ``least``.
        """
        value = self.take(*names)
        if value is None:
            return None
        count = self.as_whole(f"--{names[0]}", value)
        if least is not None and count < least:
            raise LaunchError(f"--{names[0]} {value!r}: at least {least} is needed")
        return count

    @staticmethod
    def as_whole(what: str, value: Any) -> int:
        """Query: the whole number that a flag, or an entry of a JSON flag, gives."""
        text = str(value)
        factor = {"k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}.get(text[-1:], 1)
        digits = text[:-1] if factor > 1 else text
        try:
            return round(float(digits) * factor)
        except (ValueError, OverflowError):
            raise LaunchError(f"{what} {value!r}: a whole number is needed") from None

    def number(self, *names: str) -> float | None:
        """Change: a flag's number."""
        value = self.take(*names)
        return None if value is None else self.as_number(f"--{names[0]}", value)

    @staticmethod
    def as_number(what: str, value: Any) -> float:
        """Query: the finite number that a flag, or an entry of a JSON flag, gives."""
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise LaunchError(f"{what} {value!r}: a number is needed")
        return number

    @staticmethod
    def as_object(what: str, value: Any) -> dict[str, Any]:
        """Query: an entry of a JSON flag that is an object itself, empty where it is left out."""
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise LaunchError(f"{what} {value!r}: a JSON object is needed")
        return dict(value)

    def json(self, name: str) -> dict[str, Any]:
        """Change: a flag's JSON object, empty where it was not given."""
        return self.as_object(f"--{name}", self.take(name))

    def not_modelled(self, flag: str, why: str) -> None:
        """Change: name a flag that the simulation leaves out."""
        self.unmodelled.append(f"--{flag}: {why}")

    def leftover(self, path: str, values: Mapping[str, Any]) -> None:
        """Change: name every entry of a JSON flag that nobody read."""
        for key, value in values.items():
            self.not_modelled(f"{path}.{key}", f"not modelled (given {value!r})")

    def finish(self) -> None:
        """Change: name every flag that nobody read."""
        for name, value in self.flags.items():
            shown = "" if value is True else f" {value}" if not isinstance(value, dict) else " {...}"
            if name in HARMLESS:
                self.notes.append(f"--{name}{shown}: changes nothing that is simulated")
            else:
                self.not_modelled(f"{name}{shown}", "not modelled")
        self.flags.clear()
