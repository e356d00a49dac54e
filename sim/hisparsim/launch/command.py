"""A launch line taken apart: engine, model, flags with their values, JSON and dotted flags merged."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hisparsim.specs.errors import ScenarioError


class LaunchError(ScenarioError):
    """A launch line that is none, or that asks for what cannot be simulated."""


class Engine(Enum):
    VLLM = "vllm"
    SGLANG = "sglang"


@dataclass(frozen=True)
class Command:
    """A launch line's parts. Flag names have dashes and no leading ones; a flag without a value is True."""

    engine: Engine
    model: str
    flags: Mapping[str, Any]
    """JSON objects are dictionaries; ``--a.b c`` has become ``{"a": {"b": "c"}}``."""
    environment: tuple[str, ...]
    """Names of the variables that were set in front of it."""


SHORT = {"tp": "tensor-parallel-size", "dp": "data-parallel-size", "pp": "pipeline-parallel-size"}
SWITCHES = frozenset(("trust-remote-code", "enforce-eager", "async-scheduling", "skip-server-warmup"))
"""Flags without a value, beside those that begin with enable-, disable- or no-."""
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


def read_command(text: str) -> Command:
    """Query: the parts of a launch line; line continuations and quotes as in a shell.

    Raises:
        LaunchError: neither ``vllm serve`` nor an SGLang server, no model, or quotes that do not close.
    """
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise LaunchError(f"the launch line cannot be split into words: {error}") from None
    environment = []
    while words and _ASSIGNMENT.match(words[0]):
        environment.append(words.pop(0).partition("=")[0])
    engine, words = _engine(words)
    flags, free = _flags(words)
    model = flags.pop("model-path", None) or flags.pop("model", None) or (free[0] if free else None)
    if not isinstance(model, str):
        raise LaunchError(f"the launch line names no model: {engine.value} needs one")
    return Command(engine, model, flags, tuple(environment))


def _engine(words: list[str]) -> tuple[Engine, list[str]]:
    """Query: (engine, the words behind the program)."""
    for place, word in enumerate(words):
        name = word.rsplit("/", 1)[-1]
        behind = words[place + 1 :]
        if name == "vllm" and behind[:1] == ["serve"]:
            return Engine.VLLM, behind[1:]
        if name == "vllm.entrypoints.openai.api_server":
            return Engine.VLLM, behind
        if name == "sglang" and behind[:1] in (["serve"], ["launch_server"]):
            return Engine.SGLANG, behind[1:]
        if name == "sglang.launch_server":
            return Engine.SGLANG, behind
    raise LaunchError(
        f"{' '.join(words[:3])!r} starts no server that is known: vllm serve MODEL ..., or "
        "python -m sglang.launch_server --model-path MODEL ..."
    )


def _flags(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Query: (flags, words that belong to none)."""
    flags: dict[str, Any] = {}
    free: list[str] = []
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if not word.startswith("-") or word == "-":
            free.append(word)
            continue
        name, separator, value = word.lstrip("-").partition("=")
        given: Any = value
        if not separator:
            given = True
            if place < len(words) and _is_value(name, words[place]):
                given = words[place]
                place += 1
        first, *path = name.split(".")
        first = SHORT.get(first, first.replace("_", "-"))
        if path:
            _put(flags.setdefault(first, {}), path, _value(given))
        else:
            flags[first] = _merged(flags.get(first), _value(given))
    return flags, free


def _is_value(flag: str, word: str) -> bool:
    """Query: whether a word behind a flag is its value; switches take none, so a model may follow them."""
    if word.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", word):
        return False
    name = flag.replace("_", "-")
    return name not in SWITCHES and not name.startswith(("enable-", "disable-", "no-"))


def _value(given: Any) -> Any:
    """Query: JSON objects and lists read, everything else as it is."""
    if isinstance(given, str) and given[:1] in ("{", "["):
        try:
            return json.loads(given)
        except json.JSONDecodeError as error:
            raise LaunchError(f"{given!r} is not JSON: {error}") from None
    return given


def _put(target: Any, path: list[str], value: Any) -> None:
    if not isinstance(target, dict):
        raise LaunchError(f".{'.'.join(path)} is set inside a value that has no parts: {target!r}")
    for part in path[:-1]:
        target = target.setdefault(part, {})
    target[path[-1]] = value


def _merged(before: Any, value: Any) -> Any:
    return {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
