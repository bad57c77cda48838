from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from textwrap import indent

import pytest
import yaml

from cluster.api import PICO, KeyTerms, Lane, Limits, ModelTerms, Organisation, Tenant
from deployments.config import (
    ConfigFileError,
    EngineSection,
    ModelSection,
    RoulantConfig,
    config_of_replica,
    load_config,
    parse_config,
)
from engine.config import Dtype, EngineConfig, ExecutorKind

LOCAL = Path(__file__).parents[2] / "deployments" / "configs" / "local.yaml"

SMALL = """
models:
  - id: tiny
tenants:
  - id: acme
keys:
  - {tenant: acme, file: acme, env: ACME_KEY}
"""


def faults(text: str) -> list[str]:
    with pytest.raises(ConfigFileError) as refusal:
        parse_config(text)
    return [line.strip() for line in str(refusal.value).splitlines()]


def test_a_small_file_is_completed_with_defaults() -> None:
    config = parse_config(SMALL)

    assert config.models == (ModelSection(id="tiny"),)
    assert config.models[0].source == "tiny"
    assert config.tenants[0].tenant() == Tenant(id="acme", name="acme")
    assert config.http.host == "127.0.0.1"
    assert config.ingress.replicas == 1


def test_the_local_configuration_serves_two_tenants_of_different_weight_and_quota() -> None:
    config = load_config(LOCAL)

    local, trial = (section.tenant() for section in config.tenants)
    assert [model.id for model in config.models] == ["smollm2-135m-instruct"]
    assert (local.weight, trial.weight) == (4, 1)
    assert trial.limits == Limits(requests_per_minute=20, tokens_per_minute=4000, concurrent_requests=2)
    assert trial.max_priority is Lane.STANDARD
    assert [key.tenant for key in config.keys if key.admin] == ["local"]
    assert config.http.host == "127.0.0.1"


def test_engine_settings_become_the_engines_own_configuration() -> None:
    config = parse_config(
        SMALL.replace(
            "- id: tiny",
            "- {id: tiny, engine: {executor: simulated, dtype: float32, max_num_seqs: 4, num_kv_blocks: 9}}",
        )
    )

    assert config.models[0].engine.engine_config("/models/tiny") == EngineConfig(
        model="/models/tiny",
        executor=ExecutorKind.SIMULATED,
        dtype=Dtype.FLOAT32,
        max_num_seqs=4,
        num_kv_blocks=9,
    )


# One value for each that is neither the default nor refused beside the others.
ENGINE_KEYS = """
executor: simulated
dtype: float16
device: cuda
max_model_len: 128
max_num_seqs: 8
max_num_batched_tokens: 64
max_prefill_tokens_with_decodes: 16
batching: dynamic
max_batch_size: 4
max_delay_ms: 2.5
aging_steps: 7
watermark: 0.25
prefix_cache: shared
block_size: 8
kv_dtype: int8
num_kv_blocks: 9
num_threads: 3
record_steps: /var/records
record_max_bytes: 1000
"""
NOT_IN_YAML = {"model", "simulated_cost"}


def test_every_setting_of_the_engine_can_be_set_and_has_the_engines_default() -> None:
    settable = {field.name: field.default for field in fields(EngineConfig) if field.name not in NOT_IN_YAML}
    section = {name: field.default for name, field in EngineSection.model_fields.items()}

    assert section == settable
    assert EngineSection().engine_config("m") == EngineConfig(model="m")


def test_every_setting_reaches_the_engine() -> None:
    given = yaml.safe_load(ENGINE_KEYS)
    text = SMALL.replace("- id: tiny", "- id: tiny\n    engine:" + indent(ENGINE_KEYS, " " * 6))
    made = parse_config(text).models[0].engine.engine_config("m")

    # memory_fraction excludes num_kv_blocks
    assert {*given, "memory_fraction"} == {field.name for field in fields(EngineConfig)} - NOT_IN_YAML
    assert {name: getattr(made, name) for name in given} == given
    assert EngineSection(memory_fraction=0.25).engine_config("m").memory_fraction == 0.25


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("watermark: 1", "watermark: Input should be less than 1"),
        ("max_delay_ms: .inf", "max_delay_ms: Input should be a finite number"),
        ("aging_steps: 1.5", "aging_steps: Input should be a valid integer"),
        ("prefix_cache: everyone", "prefix_cache: Input should be 'off', 'tenant' or 'shared'"),
        ("max_batch_size: 4", "max_batch_size and max_delay_ms mean nothing with batching: continuous"),
    ],
)
def test_engine_settings_that_cannot_be_are_refused(line: str, fault: str) -> None:
    (told,) = faults(SMALL.replace("- id: tiny", f"- {{id: tiny, engine: {{{line}}}}}"))

    assert told.startswith("models[0].engine")
    assert fault in told


def test_every_replica_records_to_a_file_of_its_own() -> None:
    section = EngineSection(record_steps="/var/records")
    engine = section.engine_config("m")

    assert config_of_replica(engine, "r1") == replace(engine, record_steps="/var/records/r1.jsonl")
    assert config_of_replica(EngineConfig(model="m"), "r1") == EngineConfig(model="m")


@pytest.mark.parametrize(
    ("section", "usable"),
    [
        (EngineSection(), 8192),
        (EngineSection(max_model_len=1000), 1000),
        (EngineSection(num_kv_blocks=513), 8192),
        (EngineSection(num_kv_blocks=511), 511 * 16),
        (EngineSection(num_kv_blocks=100, block_size=8, max_model_len=1000), 800),
    ],
)
def test_a_small_cache_bounds_the_length_of_requests(section: EngineSection, usable: int) -> None:
    assert section.usable_model_len(8192) == usable


def test_a_misspelled_key_is_named_by_its_full_path_with_the_right_name() -> None:
    text = SMALL.replace("- id: tiny", "- {id: tiny, engine: {max_num_seq: 4}}")

    assert faults(text) == ["models[0].engine.max_num_seq: unknown key; did you mean 'max_num_seqs'?"]


def test_a_misspelled_key_at_the_top_is_named_too() -> None:
    assert faults(SMALL + "htpp: {}\n") == ["htpp: unknown key; did you mean 'http'?"]


def test_a_key_that_resembles_nothing_is_answered_with_all_keys() -> None:
    text = SMALL.replace("- id: acme", "- {id: acme, xyzzy: 1}")

    known = "limits, model_limits, id, name, weight, max_priority, models, parent, time_zone"
    assert faults(text) == [f"tenants[0].xyzzy: unknown key; known: {known}"]


def test_all_faults_are_reported_at_once() -> None:
    text = SMALL.replace("- id: tiny", "- {id: tiny, replicas: 0}").replace("- id: acme", "- {id: acme, weight: -1}")

    assert [fault.partition(":")[0] for fault in faults(text)] == ["models[0].replicas", "tenants[0].weight"]


def test_a_key_given_twice_is_refused() -> None:
    (fault, *_) = faults(SMALL + "http: {port: 1}\nhttp: {port: 2}\n")

    assert fault == "not valid YAML: the key 'http' appears twice in one mapping"


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("- id: tiny", "- {id: tiny, engine: {dtype: int3}}", "'bfloat16', 'float16' or 'float32'"),
        ("- id: tiny", "- {id: tiny, engine: {executor: gpu}}", "'model' or 'simulated'"),
        ("- id: acme", "- {id: acme, max_priority: urgent}", "'interactive', 'standard' or 'batch'"),
    ],
)
def test_a_wrong_choice_is_answered_with_the_choices(old: str, new: str, fault: str) -> None:
    assert fault in faults(SMALL.replace(old, new))[0]


@pytest.mark.parametrize("value", ["true", "1.5", "'3'", "-1"])
def test_a_quota_is_a_whole_number_that_is_not_negative(value: str) -> None:
    text = SMALL.replace("- id: acme", f"- {{id: acme, limits: {{requests_per_minute: {value}}}}}")

    assert faults(text)[0].startswith("tenants[0].limits.requests_per_minute: ")


def test_settings_that_the_engine_refuses_are_refused_at_load() -> None:
    text = SMALL.replace("- id: tiny", "- {id: tiny, engine: {num_kv_blocks: 4, memory_fraction: 0.5}}")

    assert faults(text) == [
        "models[0].engine: num_kv_blocks and memory_fraction both size the KV cache; set one of them"
    ]


def test_a_key_of_an_unknown_tenant_is_refused_with_the_nearest_one() -> None:
    assert faults(SMALL.replace("tenant: acme", "tenant: acne")) == [
        "keys[0].tenant: there is no tenant 'acne'; did you mean 'acme'?"
    ]


def test_a_tenant_cannot_be_given_a_model_that_is_not_served() -> None:
    text = SMALL.replace("- id: acme", "- {id: acme, models: [huge]}")

    assert faults(text) == ["tenant 'acme' may use 'huge': no such model id; known: tiny"]


def test_one_name_cannot_stand_for_two_models() -> None:
    text = SMALL.replace("- id: tiny", "- id: tiny\n  - {id: other, aliases: [tiny]}")

    assert faults(text) == ["models: model id or alias used more than once: tiny"]


@pytest.mark.parametrize("text", ["", "[]", "just words"])
def test_a_file_that_is_no_mapping_is_told_what_is_expected(text: str) -> None:
    assert faults(text) == [f"expected a mapping with the keys {', '.join(RoulantConfig.model_fields)}"]


def test_an_empty_list_of_models_is_refused() -> None:
    assert faults(SMALL.replace("models:\n  - id: tiny", "models: []")) == ["models: at least one is needed"]


def test_a_fault_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_text("models: 1\n")

    with pytest.raises(ConfigFileError, match=r"service\.yaml:\n  models: "):
        load_config(path)


SCOPES = """
organisations:
  - {id: group, time_zone: Europe/Berlin, limits: {budget_per_month: 12.5}}
models:
  - id: tiny
    limits: {concurrent_requests: 5}
    price_per_million: {prompt: 0.15, completion: 0.6}
    cached_tokens_percent: 25
  - {id: big, price_per_million: {prompt: 2, cached_prompt: 0.000001, completion: 10}}
tenants:
  - {id: acme, parent: group, time_zone: Asia/Tokyo, limits: {tokens_per_day: 0}, model_limits: {big: {burst_s: 7}}}
keys:
  - {tenant: acme, file: ci, env: CI_KEY, limits: {requests_per_minute: 3}, model_limits: {tiny: {burst_s: 9}}}
"""


def test_every_scope_s_limits_reach_the_directory() -> None:
    directory = parse_config(SCOPES).directory()
    assert directory.organisations["group"] == Organisation(
        id="group", name="group", limits=Limits(budget_per_month=125 * PICO // 10), time_zone="Europe/Berlin"
    )
    assert directory.tenants["acme"] == Tenant(
        id="acme",
        name="acme",
        parent="group",
        time_zone="Asia/Tokyo",
        limits=Limits(tokens_per_day=0),
        model_limits={"big": Limits(burst_s=7)},
    )
    assert directory.keys["acme/ci"] == KeyTerms(
        id="acme/ci",
        tenant="acme",
        limits=Limits(requests_per_minute=3),
        model_limits={"tiny": Limits(burst_s=9)},
    )
    assert directory.models["tiny"] == ModelTerms(
        id="tiny",
        limits=Limits(concurrent_requests=5),
        prompt_price=150_000,
        cached_price=150_000,
        completion_price=600_000,
        cached_percent=25,
    )
    assert directory.models["big"].cached_price == 1


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        (
            "parent: group",
            "parent: grup",
            "tenant 'acme' has parent 'grup': no such organisation; did you mean 'group'?",
        ),
        ("{big: {", "{bog: {", "tenants[0].model_limits: no such model id 'bog'; did you mean 'big'?"),
        ("Asia/Tokyo", "Asia/Edo", "tenants[0].time_zone: 'Asia/Edo' is no time zone; names look like 'Europe/Berlin'"),
        ("12.5", "-1", "organisations[0].limits.budget_per_month: Input should be greater than or equal to 0"),
        ("{burst_s: 9}", "{burst: 9}", "keys[0].model_limits.tiny.burst: unknown key; did you mean 'burst_s'?"),
        (
            "0.000001",
            "0.0000001",
            "models[1].price_per_million.cached_prompt: Decimal input should have no more than 6 decimal places",
        ),
    ],
)
def test_faults_of_scopes_are_named(before: str, after: str, fault: str) -> None:
    assert faults(SCOPES.replace(before, after)) == [fault]


def test_a_tenant_s_keys_have_names_of_their_own() -> None:
    again = SMALL + "  - {tenant: acme, file: acme, env: OTHER_KEY}\n"
    assert faults(again) == ["keys: key of a tenant used more than once: acme/acme"]
