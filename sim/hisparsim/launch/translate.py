"""From a launch line to a scenario: what each flag became, and every flag that is not modelled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hisparsim.launch.command import Command, Engine, LaunchError, read_command
from hisparsim.launch.notebook import Notebook
from hisparsim.launch.sglang import RATIO_KEY, translate_sglang
from hisparsim.launch.vllm import translate_vllm
from hisparsim.specs.models import load_model, model_names
from hisparsim.specs.scenario import Scenario
from hisparsim.specs.setup import gpu_kv_gib

VERSIONS = {Engine.VLLM: "vLLM 0.33", Engine.SGLANG: "SGLang 0.5.23"}
"""The versions whose flags and defaults are known."""


@dataclass(frozen=True)
class Translation:
    """A launch line as a scenario."""

    engine: str
    settings: Mapping[str, Any]
    """Scenario key -> value."""
    origins: Mapping[str, str]
    """Scenario key -> the flag that gave it."""
    unmodelled: tuple[str, ...]
    """One sentence a flag that the simulation leaves out, beginning with the flag."""
    notes: tuple[str, ...]

    def scenario(self) -> Scenario:
        """Query: the scenario, checked. Raises ScenarioError where it cannot be simulated."""
        return Scenario.load(None, [f"{key}={_plain(value)}" for key, value in self.settings.items()])

    def toml(self) -> str:
        """Query: the scenario file, each value with the flag it came from, the rest as comments."""
        lines = [f"# From a launch line of {self.engine}."]
        lines += [f"# NOT MODELLED {sentence}" for sentence in self.unmodelled]
        lines += [f"# {note}" for note in self.notes]
        sections: dict[str, list[str]] = {}
        for key, value in self.settings.items():
            section, _, name = key.rpartition(".")
            sections.setdefault(section, []).append(f"{name} = {_toml(value)}  # {self.origins[key]}")
        for section, entries in sections.items():
            lines += ["", f"[{section}]", *entries]
        return "\n".join(lines) + "\n"


def translate_command(text: str, *, node: str = "h200x8") -> Translation:
    """Query: the scenario of a launch line on a node.

    Raises:
        LaunchError: the line starts no known server, its model is unknown, or a value is none.
    """
    command = read_command(text)
    book = Notebook(dict(command.flags))
    preset, weights = _model(command)
    book.set("model.preset", preset, command.model)
    book.set("model.weights", _weights(book, weights), "the model's name")
    book.set("node.preset", node, "--node of this command")
    if command.engine is Engine.VLLM:
        translate_vllm(book)
    else:
        translate_sglang(book, load_model(preset).index_top_k)
    if "scheduler.max_model_len" not in book.settings:
        window = load_model(preset).max_position_embeddings
        book.set("scheduler.max_model_len", window, "the model's own window")
    book.finish()
    book.notes += [f"environment {name}: not read" for name in command.environment]
    _fit_batch(book)
    ratio = book.settings.pop(RATIO_KEY, None)
    if ratio is not None:
        _host_pool(book, float(ratio))
    return Translation(
        VERSIONS[command.engine], book.settings, book.origins, tuple(book.unmodelled), tuple(book.notes)
    )


def _model(command: Command) -> tuple[str, str]:
    """Query: (preset, weight format) of a model's name or path.

    A name ends in -FP8, -NVFP4 and so on; GLM without an ending is bf16, DeepSeek is published in fp8.
    """
    name = command.model.rstrip("/").rsplit("/", 1)[-1].lower()
    found = [preset for preset in model_names() if name.startswith(preset)]
    if not found:
        known = ", ".join(model_names())
        raise LaunchError(
            f"model {command.model!r} is unknown: known are {known}; write a preset file and set model.preset"
        )
    preset = max(found, key=len)
    rest = name[len(preset) :]
    for ending, weights in (("nvfp4", "nvfp4"), ("fp4", "nvfp4"), ("w4a8", "w4a8"), ("fp8", "fp8")):
        if ending in rest:
            return preset, weights
    return preset, "fp8" if preset.startswith("deepseek") else "bf16"


def _weights(book: Notebook, weights: str) -> str:
    """Change: the weight format, `--quantization` before the name's."""
    given = book.take("quantization", "q")
    known = {"fp8": "fp8", "w4afp8": "w4a8", "modelopt_fp4": "nvfp4", "nvfp4": "nvfp4", "modelopt": "nvfp4"}
    if given is None:
        return weights
    if given not in known:
        book.not_modelled(f"quantization {given}", f"weights are taken as {weights}")
        return weights
    return known[given]


def _fit_batch(book: Notebook) -> None:
    """Change: no more running requests than one step's tokens can hold, as the engines themselves limit."""
    tokens = int(book.settings["scheduler.max_num_batched_tokens"])
    query = 1 + int(book.settings.get("speculation.draft_tokens", 0))
    seqs = book.settings.get("scheduler.max_num_seqs")
    if seqs is not None and int(seqs) * query > tokens:
        book.set("scheduler.max_num_seqs", tokens // query, f"{seqs} lowered to one step's tokens")


def _host_pool(book: Notebook, ratio: float) -> None:
    """Change: the host pool in GiB as `ratio` times the KV of one GPU, at most what the node may pin."""
    plain = {key: value for key, value in book.settings.items() if key != "kv.hot_rows"}
    scenario = Scenario.load(None, [f"{key}={_plain(value)}" for key, value in plain.items()])
    wanted = ratio * gpu_kv_gib(scenario)
    most = scenario.with_overrides(["kv.host_pool_gib=null"]).node_spec.host_dram_bytes * 0.95 / 2**30
    replicas = int(book.settings.get("parallel.dp", 1))
    if wanted > most / replicas:
        book.notes.append(f"host pool of {wanted:.0f} GiB exceeds the node's memory and was cut to it")
    pool = min(wanted, float(int(most / replicas)))
    origin = f"host_to_device_ratio {ratio:g} x {gpu_kv_gib(scenario):g} GiB of KV on a GPU"
    book.set("kv.host_pool_gib", round(pool, 1), origin)
    book.origins.pop(RATIO_KEY, None)


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return _plain(value)
