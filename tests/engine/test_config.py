from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from engine.api import GIB, describe_memory
from engine.config import ConfigError, Dtype, EngineConfig
from engine.hardware import free_memory, resolve_dtype
from engine.memory import plan_memory
from engine.models.shape import shape_of
from tests.engine.makers import make_engine
from tests.engine.tiny_models import tiny_config


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be at least 1"),
        ({"block_size": -1}, "block_size is -1"),
        ({"num_kv_blocks": 0}, "num_kv_blocks is 0"),
        ({"num_kv_blocks": 8, "memory_fraction": 0.5}, "set one of them"),
        ({"memory_fraction": 1.5}, r"memory_fraction is 1.5; it must lie in \(0, 1\]"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, r"max_num_batched_tokens \(32\) is below max_num_seqs"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        EngineConfig(model="m", **settings)  # type: ignore[arg-type]


def test_kv_bytes_per_token_of_known_models() -> None:
    # 2 (key, value) * layers * kv heads * head dim * 2 bytes
    llama = tiny_config(
        "llama", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128
    )
    assert shape_of(llama).kv_bytes_per_token(2) == 2 * 32 * 8 * 128 * 2
    smollm = tiny_config("llama", num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, hidden_size=576)
    assert shape_of(smollm).kv_bytes_per_token(2) == 23_040


def test_the_cache_is_what_the_fraction_holds_in_whole_blocks() -> None:
    plan = plan_memory(
        EngineConfig(model="m", memory_fraction=0.25, block_size=16),
        weight_bytes=GIB,
        kv_bytes_per_token=1000,
        max_model_len=1000,
        free_bytes=1_000_000_000,
    )
    assert plan.num_blocks == 15_625


def test_the_start_up_line_tells_sizes_and_what_fits() -> None:
    stats = make_engine(num_blocks=15_625, block_size=16).stats()
    told = replace(stats, weight_bytes=GIB, kv_bytes_per_token=1000, max_model_len=1000)
    assert describe_memory(told) == (
        "weights 1.00 GiB; KV cache 1,000 bytes per token, 15,625 blocks of 16 tokens = 250,000 tokens, 0.23 GiB; "
        "holds 248 requests of the full 1,000 tokens at once"
    )


def test_a_cache_below_one_full_request_is_refused_with_the_numbers_and_what_to_change() -> None:
    with pytest.raises(ConfigError) as refused:
        plan_memory(
            EngineConfig(model="m", num_kv_blocks=10),
            weight_bytes=0,
            kv_bytes_per_token=1,
            max_model_len=200,
            free_bytes=GIB,
        )
    assert str(refused.value) == (
        "the KV cache has 10 blocks (160 tokens), but one request of max_model_len 200 needs 13 blocks (0.00 GiB, "
        "1.00 GiB are free); raise num_kv_blocks or memory_fraction, or lower max_model_len to 160 or less"
    )


@pytest.mark.parametrize(("num_blocks", "fits"), [(12, False), (13, True)])
def test_the_least_cache_is_one_request_of_full_length(num_blocks: int, fits: bool) -> None:
    config = EngineConfig(model="m", num_kv_blocks=num_blocks)
    try:
        plan_memory(config, weight_bytes=0, kv_bytes_per_token=1, max_model_len=200, free_bytes=GIB)
    except ConfigError:
        assert not fits
    else:
        assert fits


def test_a_cache_larger_than_the_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="lower num_kv_blocks to 4 or less"):
        plan_memory(
            EngineConfig(model="m", num_kv_blocks=5),
            weight_bytes=0,
            kv_bytes_per_token=GIB // 64,
            max_model_len=16,
            free_bytes=GIB,
        )


def test_free_memory_is_a_part_of_what_the_machine_has() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < free_memory(torch.device("cpu")) < total


def test_a_named_precision_is_kept_and_auto_chooses_one() -> None:
    cpu = torch.device("cpu")
    assert resolve_dtype(Dtype.FLOAT16, cpu) is torch.float16
    assert resolve_dtype(Dtype.AUTO, cpu) in (torch.bfloat16, torch.float32)
    assert resolve_dtype(Dtype.AUTO, torch.device("cuda")) is torch.bfloat16


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
