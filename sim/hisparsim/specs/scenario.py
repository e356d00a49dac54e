"""The scenario: one frozen object that says everything a run depends on, read from one TOML file.

    scenario = Scenario.load("mine.toml", overrides=["parallel.tp=4", "kv.hot_rows=8192"])

Keys that are not given take their defaults; an unknown key is an error that names the nearest one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator

from hisparsim.specs.errors import ScenarioError, UnknownNameError, nearest_key, unknown_name
from hisparsim.specs.kv_layout import RowFormat, auto_row_format
from hisparsim.specs.models import ModelSpec, load_model
from hisparsim.specs.nodes import NodeSpec, load_node
from hisparsim.specs.sections import (
    CostSection,
    KvDtype,
    KvSection,
    LinksSection,
    LocalitySection,
    ModelSection,
    NodeSection,
    ParallelSection,
    PolicySection,
    SchedulerSection,
    SloSection,
    SpeculationSection,
    WorkloadSection,
)
from hisparsim.specs.setup import MAX_HOST_DRAM_SHARE, MAX_HOT_ROWS, PoolKind, ServingSetup, build_setup
from hisparsim.specs.weights import GIB

if TYPE_CHECKING:
    from hisparsim.specs.resolve import ResolvedValue

DEFAULT_HOST_POOL_GIB = 384.0
DEFAULT_PREFIX_OFFLOAD_GIB = 512.0


class Origin(Enum):
    """Where a value of a scenario came from."""

    DEFAULT = "default"
    PRESET = "preset"
    FILE = "file"
    SET = "--set"
    DERIVED = "derived"


class Scenario(BaseModel):
    """Everything a run depends on. Frozen; `check()` holds what goes beyond single values."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelSection = ModelSection()
    node: NodeSection = NodeSection()
    parallel: ParallelSection = ParallelSection()
    kv: KvSection = KvSection()
    scheduler: SchedulerSection = SchedulerSection()
    policy: PolicySection = PolicySection()
    speculation: SpeculationSection = SpeculationSection()
    cost: CostSection = CostSection()
    links: LinksSection = LinksSection()
    locality: LocalitySection = LocalitySection()
    workload: WorkloadSection = WorkloadSection()
    slo: SloSection = SloSection()
    seed: Annotated[int, Field(ge=0)] = 0

    _origins: dict[str, Origin] = PrivateAttr(default_factory=dict)

    @field_validator("seed", mode="before")
    @classmethod
    def _seed_is_no_truth_value(cls, value: Any) -> Any:
        """Query: the seed; a TOML `true` is no number."""
        if isinstance(value, bool):
            raise ValueError("input should not be true or false")
        return value

    # --- reading -------------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: Iterable[str] = ()) -> Scenario:
        """Query: the scenario of a TOML file (None: all defaults) with `section.key=value` overrides.

        The result is checked. Raises ScenarioError with one line for a file, key or value that is wrong.
        """
        values: dict[str, Any] = {}
        origins: dict[str, Origin] = {}
        if path is not None:
            values = _read_toml(Path(path))
            origins = dict.fromkeys(_dotted(values), Origin.FILE)
        return cls._build(values, origins)._apply(overrides).check()

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Scenario:
        """Query: the scenario of nested values (as a TOML file would hold them), checked."""
        nested = {key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()}
        return cls._build(nested, dict.fromkeys(_dotted(nested), Origin.FILE)).check()

    def with_overrides(self, overrides: Iterable[str]) -> Scenario:
        """Query: this scenario with `section.key=value` overrides laid over it, checked."""
        return self._apply(overrides).check()

    def _apply(self, overrides: Iterable[str]) -> Scenario:
        values = self.model_dump(mode="json", exclude_unset=True)
        origins = dict(self._origins)
        for override in overrides:
            key, separator, text = override.partition("=")
            key = key.strip()
            if not separator or not key:
                raise ScenarioError(f"--set {override!r}: expected section.key=value")
            _require_known([key])
            section, _, name = key.rpartition(".")
            target = values.setdefault(section, {}) if section else values
            target[name] = _parse(text.strip(), free=section == "policy")
            origins[key] = Origin.SET
        return type(self)._build(values, origins)

    @classmethod
    def _build(cls, values: dict[str, Any], origins: dict[str, Origin]) -> Scenario:
        for name, value in values.items():
            if name in _sections() and not isinstance(value, dict):
                raise ScenarioError(f"{name} = {value!r}: {name} is a section; give [{name}] and its keys")
        _require_known(_dotted(values))
        try:
            scenario = cls.model_validate(values)
        except ValidationError as error:
            raise ScenarioError(_one_line(error)) from None
        scenario._origins.update(origins)
        return scenario

    # --- what the values mean ------------------------------------------------------------------------

    @cached_property
    def model_spec(self) -> ModelSpec:
        """The model's geometry."""
        return load_model(self.model.preset)

    @cached_property
    def node_spec(self) -> NodeSpec:
        """The node."""
        return load_node(self.node.preset)

    @property
    def row_format(self) -> RowFormat:
        """The row format in force, `auto` resolved."""
        if self.kv.dtype is KvDtype.AUTO:
            return auto_row_format(self.node_spec.architecture)
        return RowFormat(self.kv.dtype.value)

    @property
    def query_len(self) -> int:
        """Tokens of one decode: the next one and the drafts."""
        return 1 + self.speculation.draft_tokens

    @property
    def hot_rows(self) -> int:
        """Hot buffer rows a request; the engine's rule (query_len + 1) x top_k where none are given."""
        if self.kv.hot_rows is not None:
            return self.kv.hot_rows
        return (self.query_len + 1) * self.model_spec.index_top_k

    @property
    def host_pool_gib(self) -> float:
        """Host pool of one DP replica in GiB."""
        if self.kv.host_pool_gib is not None:
            return self.kv.host_pool_gib
        return min(DEFAULT_HOST_POOL_GIB, self._host_share_gib())

    @property
    def prefix_offload_gib(self) -> float:
        """Ordinary offload tier of one DP replica in GiB."""
        if self.kv.prefix_offload_gib is not None:
            return self.kv.prefix_offload_gib
        return min(DEFAULT_PREFIX_OFFLOAD_GIB, self._host_share_gib())

    def setup(self, pool: PoolKind) -> ServingSetup:
        """Query: what the serving core needs for a policy that uses `pool`; the scenario is checked first."""
        return build_setup(self.check(), pool)

    def resolved(self) -> tuple[ResolvedValue, ...]:
        """Query: every value in force with where it came from, preset figures and derived ones included."""
        from hisparsim.specs.resolve import resolve

        return resolve(self)

    def origin(self, key: str) -> Origin:
        """Query: where the value of a dotted key came from."""
        return self._origins.get(key, Origin.DEFAULT)

    # --- rules ---------------------------------------------------------------------------------------

    def check(self) -> Scenario:
        """Query: this scenario, if it can be timed; raises ScenarioError with one line where it cannot."""
        model, node, parallel = self.model_spec, self.node_spec, self.parallel
        num_gpus = parallel.tp * parallel.dp
        if num_gpus > node.num_gpus:
            raise ScenarioError(
                f"parallel.tp {parallel.tp} x parallel.dp {parallel.dp} = {num_gpus} GPUs, {node.name} has "
                f"{node.num_gpus}: timing covers one node (`hisparsim capacity` counts several)"
            )
        if model.num_heads % parallel.tp:
            raise ScenarioError(
                f"parallel.tp = {parallel.tp} does not divide the {model.num_heads} heads of {model.name}"
            )
        if self.speculation.draft_tokens and not model.num_mtp_layers:
            raise ScenarioError(
                f"speculation.draft_tokens = {self.speculation.draft_tokens}: {model.name} has no MTP layer"
            )
        self._check_scheduler()
        self._check_hot_rows()
        self._check_host_memory("kv.host_pool_gib", self.host_pool_gib)
        self._check_host_memory("kv.prefix_offload_gib", self.prefix_offload_gib)
        return self

    def _check_scheduler(self) -> None:
        model, scheduler = self.model_spec, self.scheduler
        if scheduler.max_model_len > model.max_position_embeddings:
            raise ScenarioError(
                f"scheduler.max_model_len = {scheduler.max_model_len} exceeds the "
                f"{model.max_position_embeddings} positions of {model.name}"
            )
        if scheduler.max_num_batched_tokens < scheduler.max_num_seqs * self.query_len:
            raise ScenarioError(
                f"scheduler.max_num_batched_tokens = {scheduler.max_num_batched_tokens} is less than "
                f"max_num_seqs {scheduler.max_num_seqs} x {self.query_len} tokens of a decode; raise it or "
                "lower scheduler.max_num_seqs"
            )

    def _check_hot_rows(self) -> None:
        least = self.query_len * self.model_spec.index_top_k
        if not least <= self.hot_rows <= MAX_HOT_ROWS:
            raise ScenarioError(
                f"kv.hot_rows = {self.hot_rows} is outside {least}..{MAX_HOT_ROWS}: at least query_len "
                f"{self.query_len} x top_k {self.model_spec.index_top_k}, at most what 16-bit slots number"
            )

    def _check_host_memory(self, key: str, gib: float) -> None:
        share = self._host_share_gib()
        if gib > share:
            raise ScenarioError(
                f"{key} = {gib:g} GiB x {self.parallel.dp} replicas exceeds {MAX_HOST_DRAM_SHARE:.0%} of the "
                f"{self.node_spec.host_dram_bytes / GIB:.0f} GiB of {self.node_spec.name}; at most "
                f"{share:g} GiB"
            )

    def _host_share_gib(self) -> float:
        """Query: GiB of host memory that one replica may pin, whole GiB where there is at least one."""
        share = MAX_HOST_DRAM_SHARE * self.node_spec.host_dram_bytes / GIB / self.parallel.dp
        return float(int(share)) if share >= 1 else share


def known_keys() -> tuple[str, ...]:
    """Query: all scenario keys, dotted, in the order of the file (`policy.*` takes more)."""
    keys: list[str] = []
    for name, info in Scenario.model_fields.items():
        section = info.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            keys += [f"{name}.{field}" for field in section.model_fields]
        else:
            keys.append(name)
    return tuple(keys)


def _sections() -> tuple[str, ...]:
    return tuple(dict.fromkeys(key.split(".")[0] for key in known_keys() if "." in key))


def _require_known(keys: Iterable[str]) -> None:
    known = known_keys()
    for key in keys:
        if key in known or (key.startswith("policy.") and key.count(".") == 1 and key != "policy."):
            continue
        closest = nearest_key(key, known)
        if closest is None:
            raise unknown_name("scenario key", key, known)
        raise UnknownNameError(f"unknown scenario key {key!r} (did you mean {closest!r}?)")


def _dotted(values: Mapping[str, Any]) -> list[str]:
    keys: list[str] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            keys += [f"{name}.{key}" for key in value]
        else:
            keys.append(name)
    return keys


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ScenarioError(f"scenario file {str(path)!r} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ScenarioError(f"scenario file {str(path)!r} is not a TOML file: {error}") from None


def _parse(text: str, *, free: bool) -> Any:
    """Query: an override's value: text that its field types, or (`free`) TOML where it is that, else text."""
    if text.lower() in ("null", "none"):
        return None
    if not free:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{key} = {first['input']!r}: {message}{more}"
