from __future__ import annotations

import math

import pytest

from engine.config import BatchingMode, ConfigError, EngineConfig
from engine.models.shape import shape_of
from tests.engine.tiny_models import tiny_config

AT_LEAST_ONE = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_prefill_tokens_with_decodes",
    "max_batch_size",
    "aging_steps",
    "block_size",
    "num_kv_blocks",
    "num_threads",
    "record_max_bytes",
)


@pytest.mark.parametrize("name", AT_LEAST_ONE)
def test_a_count_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is 0; it must be at least 1$"):
        EngineConfig(model="m", **{name: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"num_kv_blocks": 8, "memory_fraction": 0.5}, "set one of them"),
        ({"memory_fraction": 0.0}, r"memory_fraction is 0.0; it must lie in \(0, 1\]"),
        ({"memory_fraction": 1.5}, r"memory_fraction is 1.5; it must lie in \(0, 1\]"),
        ({"watermark": -0.1}, r"watermark is -0.1; it must lie in \[0, 1\)"),
        ({"watermark": 1.0}, r"watermark is 1.0; it must lie in \[0, 1\)"),
        ({"watermark": math.nan}, "watermark is nan"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, r"max_num_batched_tokens \(32\) is below max_num_seqs"),
        ({"max_delay_ms": -1.0}, "max_delay_ms is -1.0; it must be a number that is not negative"),
        ({"max_delay_ms": math.nan}, "max_delay_ms is nan"),
        ({"max_delay_ms": math.inf}, "max_delay_ms is inf"),
        ({"max_batch_size": 8}, "mean nothing with batching: continuous"),
        ({"max_delay_ms": 5.0}, "mean nothing with batching: continuous"),
        (
            {"batching": BatchingMode.DYNAMIC, "max_batch_size": 33},
            r"max_batch_size \(33\) is above max_num_seqs \(32\)",
        ),
        ({"batching": BatchingMode.STATIC, "max_delay_ms": 5.0}, "max_delay_ms is for batching: dynamic"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        EngineConfig(model="m", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"num_kv_blocks": 1, "max_num_seqs": 1, "max_num_batched_tokens": 1, "block_size": 1},
        {"memory_fraction": 1.0, "watermark": 0.0},
        {"batching": BatchingMode.STATIC, "max_batch_size": 32},
        {"batching": BatchingMode.DYNAMIC, "max_batch_size": 1, "max_delay_ms": 5.0},
    ],
)
def test_settings_at_their_bounds_are_taken(settings: dict[str, object]) -> None:
    EngineConfig(model="m", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "gpt2"}, "model type 'gpt2' is not one that the engine runs: llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
    ],
)
def test_models_that_the_decoder_cannot_run_are_refused_by_name(changes: dict[str, object], told: str) -> None:
    config = tiny_config("llama")
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ConfigError, match=told):
        shape_of(config)
