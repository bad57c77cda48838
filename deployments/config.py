"""What one service is: models, tenants, keys, HTTP, queue bounds. One YAML file, checked whole before anything starts.

A wrong file is refused with `ConfigFileError`, one line per fault, each naming the full path of the key
(``models[0].engine.max_num_seq: unknown key; did you mean 'max_num_seqs'?``).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Self, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from cluster.api import Directory, ModelTerms, QueuePolicy
from deployments.config_terms import (
    Count,
    KeySection,
    LimitsSection,
    ModelName,
    OrganisationSection,
    Party,
    PriceSection,
    Seconds,
    Section,
    TenantSection,
    per_token,
)
from engine.api import EngineError
from engine.config import BatchingMode, Dtype, EngineConfig, ExecutorKind, KvDtype, PrefixCache


class ConfigFileError(ValueError):
    """The configuration cannot be used. The message has one line per fault."""


class EngineSection(Section):
    """The engine of a model; see `engine.config.EngineConfig` for what each key means.

    `record_steps` is a folder here: every replica, also one that replaces another, writes a file of its own into it.
    """

    executor: ExecutorKind = ExecutorKind.MODEL
    dtype: Dtype = Dtype.AUTO
    device: str = "cpu"
    max_model_len: Count | None = None
    max_num_seqs: Count = 32
    max_num_batched_tokens: Count = 512
    max_prefill_tokens_with_decodes: Count | None = None
    batching: BatchingMode = BatchingMode.CONTINUOUS
    max_batch_size: Count | None = None
    max_delay_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    aging_steps: Count = 200
    watermark: Annotated[float, Field(ge=0, lt=1)] = 0.01
    prefix_cache: PrefixCache = PrefixCache.TENANT
    block_size: Count = 16
    kv_dtype: KvDtype = KvDtype.AUTO
    num_kv_blocks: Count | None = None
    memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    num_threads: Count | None = None
    record_steps: str | None = None
    record_max_bytes: Count = 64 << 20

    def engine_config(self, folder: str) -> EngineConfig:
        """The engine's own configuration, for the weights in `folder`. Raises EngineError."""
        return EngineConfig(model=folder, **dict(self))

    def usable_model_len(self, trained_for: int) -> int:
        """The longest prompt plus output of a model trained for so many tokens: a small KV cache bounds it too."""
        length = self.max_model_len or trained_for
        return length if self.num_kv_blocks is None else min(length, self.num_kv_blocks * self.block_size)

    @model_validator(mode="after")
    def _engine_accepts_it(self) -> Self:
        try:
            self.engine_config("")
        except EngineError as error:
            raise ValueError(str(error)) from error
        return self


def config_of_replica(engine: EngineConfig, replica_id: str) -> EngineConfig:
    """`engine` with a record file of the replica's own, in the folder that `record_steps` names so far."""
    if engine.record_steps is None:
        return engine
    return replace(engine, record_steps=str(Path(engine.record_steps) / f"{replica_id}.jsonl"))


class ModelSection(Section):
    """One served model. `model` is a folder, the name of a pulled model or its hub id; by default it is the id.

    `limits` hold for everybody together. `cached_tokens_percent`: how much of a cached prompt token counts in quotas.
    """

    id: ModelName
    model: str | None = None
    aliases: tuple[ModelName, ...] = ()
    replicas: Count = 1
    num_cpus: Annotated[float, Field(ge=0)] = 1
    """Cores that Ray sets aside for each replica."""
    num_gpus: Annotated[float, Field(ge=0)] = 0
    engine: EngineSection = EngineSection()
    limits: LimitsSection = LimitsSection()
    price_per_million: PriceSection = PriceSection()
    cached_tokens_percent: Annotated[int, Field(strict=True, ge=0, le=100)] = 100

    @property
    def source(self) -> str:
        return self.model or self.id

    def terms(self) -> ModelTerms:
        price = self.price_per_million
        return ModelTerms(
            id=self.id,
            limits=self.limits.limits(),
            prompt_price=per_token(price.prompt),
            cached_price=per_token(price.prompt if price.cached_prompt is None else price.cached_prompt),
            completion_price=per_token(price.completion),
            cached_percent=self.cached_tokens_percent,
        )


class HttpSection(Section):
    """Where the service listens, and the largest body it reads."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(strict=True, ge=0, le=65535)] = 8000
    """0: any free port."""
    max_body_bytes: Count = 4 * 1024 * 1024


class IngressSection(Section):
    """The HTTP front: processes that parse, tokenise and stream."""

    replicas: Count = 1
    num_cpus: Annotated[float, Field(ge=0)] = 0
    """Cores that Ray sets aside for each; 0 because a local front shares its cores with the model."""


class AdmissionSection(Section):
    """Bounds of the queue in front of each model; see `cluster.api.QueuePolicy`."""

    max_waiting_per_model: Count = 1024
    max_waiting_per_tenant: Count = 256
    max_wait_s: Seconds = 60.0
    aging_s: Seconds = 10.0

    def queue_policy(self) -> QueuePolicy:
        return QueuePolicy(**dict(self))


class RoulantConfig(Section):
    """A whole service."""

    models: tuple[ModelSection, ...]
    organisations: tuple[OrganisationSection, ...] = ()
    tenants: tuple[TenantSection, ...]
    keys: tuple[KeySection, ...]
    http: HttpSection = HttpSection()
    ingress: IngressSection = IngressSection()
    admission: AdmissionSection = AdmissionSection()

    @field_validator("models", "tenants", "keys")
    @classmethod
    def _one_at_least(cls, entries: tuple[BaseModel, ...]) -> tuple[BaseModel, ...]:
        # Not `Field(min_length=1)`: that also complains when the only entry has a fault of its own.
        if not entries:
            raise ValueError("at least one is needed")
        return entries

    @field_validator("models")
    @classmethod
    def _model_names_are_unique(cls, models: tuple[ModelSection, ...]) -> tuple[ModelSection, ...]:
        _refuse_repeats("model id or alias", [name for model in models for name in (model.id, *model.aliases)])
        return models

    @field_validator("tenants")
    @classmethod
    def _tenant_ids_are_unique(cls, tenants: tuple[TenantSection, ...]) -> tuple[TenantSection, ...]:
        _refuse_repeats("tenant id", [tenant.id for tenant in tenants])
        return tenants

    @field_validator("organisations")
    @classmethod
    def _organisation_ids_are_unique(
        cls, organisations: tuple[OrganisationSection, ...]
    ) -> tuple[OrganisationSection, ...]:
        _refuse_repeats("organisation id", [organisation.id for organisation in organisations])
        return organisations

    @field_validator("keys")
    @classmethod
    def _key_ids_are_unique(cls, keys: tuple[KeySection, ...]) -> tuple[KeySection, ...]:
        _refuse_repeats("key of a tenant", [key.id for key in keys])
        return keys

    def directory(self) -> Directory:
        """Who is served, on what terms."""
        return Directory(
            organisations=[section.organisation() for section in self.organisations],
            tenants=[section.tenant() for section in self.tenants],
            keys=[section.terms() for section in self.keys],
            models=[section.terms() for section in self.models],
        )

    @model_validator(mode="after")
    def _references_exist(self) -> Self:
        if unknown := next(self._unknown_references(), None):
            raise ValueError(unknown)
        return self

    def _unknown_references(self) -> Iterator[str]:
        tenants = [tenant.id for tenant in self.tenants]
        models = [model.id for model in self.models]
        organisations = [organisation.id for organisation in self.organisations]
        for index, key in enumerate(self.keys):
            if key.tenant not in tenants:
                yield f"keys[{index}].tenant: there is no tenant {key.tenant!r}{_hint(key.tenant, tenants)}"
        for tenant in self.tenants:
            for name in set(tenant.models or ()) - set(models):
                yield f"tenant {tenant.id!r} may use {name!r}: no such model id{_hint(name, models)}"
            if tenant.parent is not None and tenant.parent not in organisations:
                hint = _hint(tenant.parent, organisations)
                yield f"tenant {tenant.id!r} has parent {tenant.parent!r}: no such organisation{hint}"
        parties: dict[str, Sequence[Party]] = {
            "organisations": self.organisations,
            "tenants": self.tenants,
            "keys": self.keys,
        }
        for kind, sections in parties.items():
            for index, section in enumerate(sections):
                for name in section.model_limits.keys() - set(models):
                    yield f"{kind}[{index}].model_limits: no such model id {name!r}{_hint(name, models)}"


def load_config(path: Path) -> RoulantConfig:
    """Read and check a YAML file. Raises ConfigFileError; OSError if it cannot be read."""
    try:
        return parse_config(path.read_text(encoding="utf-8"))
    except ConfigFileError as error:
        raise ConfigFileError(f"{path}:\n{error}") from error


def parse_config(text: str) -> RoulantConfig:
    """Check the text of a configuration. Raises ConfigFileError."""
    try:
        document = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ConfigFileError(f"  not valid YAML: {error}") from error
    if not isinstance(document, dict):
        raise ConfigFileError(f"  expected a mapping with the keys {', '.join(RoulantConfig.model_fields)}")
    try:
        return RoulantConfig.model_validate(document)
    except ValidationError as error:
        raise ConfigFileError("\n".join(f"  {line}" for line in _fault_lines(error))) from error


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML says that keys are unique; the stock loader lets the last one win, which hides mistakes."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} appears twice in one mapping", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _fault_lines(error: ValidationError) -> Iterator[str]:
    for fault in error.errors():
        path = _path_text(fault["loc"])
        if fault["type"] == "extra_forbidden":
            key = str(fault["loc"][-1])
            yield f"{path}: unknown key{_hint(key, _known_keys(fault))}"
        elif fault["type"] == "missing":
            yield f"{path}: required"
        else:
            message = fault["msg"].removeprefix("Value error, ")
            yield f"{path}: {message}" if path else message


def _path_text(loc: Sequence[int | str]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")


def _known_keys(fault: ErrorDetails) -> list[str]:
    """The keys of the section in which a fault lies: follow its path from the root through the field types."""
    section: type[BaseModel] = RoulantConfig
    for part in fault["loc"][:-1]:
        if isinstance(part, str) and part in section.model_fields:
            section = _section_in(section.model_fields[part].annotation)
    return list(section.model_fields)


def _section_in(annotation: object) -> type[BaseModel]:
    candidates = (annotation, *get_args(annotation))
    return next(found for found in candidates if isinstance(found, type) and issubclass(found, BaseModel))


def _hint(wrong: str, known: Sequence[str]) -> str:
    """How to go on from a wrong name: the nearest right one, or all of them."""
    near = get_close_matches(wrong, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"


def _refuse_repeats(what: str, names: Sequence[str]) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"{what} used more than once: {', '.join(repeated)}")
