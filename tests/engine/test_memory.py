from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.api import GIB, describe_memory
from engine.config import ConfigError, EngineConfig, KvDtype
from engine.memory import MemoryPlan, kv_bytes_per_token, num_parameters, plan_memory, rank_shape
from engine.models.shape import ModelShape, shape_of
from tests.engine.makers import make_engine
from tests.engine.tiny_models import CONFIGS, tiny_config

LLAMA_31_8B = shape_of(
    tiny_config(
        "llama",
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )
)
QWEN3_06B = shape_of(
    tiny_config(
        "qwen3",
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
)


def kv_bytes(shape: ModelShape, element_bytes: int, kv_dtype: KvDtype = KvDtype.AUTO) -> int:
    return kv_bytes_per_token(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        element_bytes=element_bytes,
        kv_dtype=kv_dtype,
    )


def test_kv_bytes_of_the_paged_attention_papers_example() -> None:
    # "the KV cache of a single token demands 800 KB": key and value * 40 layers * 5120 hidden * 2 bytes, for OPT-13B
    assert kv_bytes_per_token(num_layers=40, num_kv_heads=40, head_dim=128, element_bytes=2) == 800 * 1024 == 819_200


def test_kv_bytes_of_known_models() -> None:
    # key and value * layers * KV heads * head dimension * bytes
    assert kv_bytes(LLAMA_31_8B, 2) == 2 * 32 * 8 * 128 * 2 == 131_072
    assert kv_bytes(QWEN3_06B, 2) == 2 * 28 * 8 * 128 * 2 == 114_688
    assert kv_bytes(QWEN3_06B, 4) == 229_376


def test_eight_bit_keys_and_values_bring_a_scale_for_each_head() -> None:
    # key and value * layers * KV heads * (a byte for each dimension + a float32)
    assert kv_bytes(LLAMA_31_8B, 2, KvDtype.INT8) == 2 * 32 * 8 * (128 + 4) == 67_584
    assert kv_bytes(LLAMA_31_8B, 4, KvDtype.INT8) == 67_584


def test_parameters_of_llama_31_8b() -> None:
    # qkv   (32 + 8 + 8) * 128 * 4096  =    25,165,824
    # out    32 * 128 * 4096           =    16,777,216
    # mlp     3 * 14,336 * 4096        =   176,160,768
    # norms   2 * 4096                 =         8,192
    #                       a layer:       218,112,000, 32 of them: 6,979,584,000
    # embedding and head  2 * 128,256 * 4096 =                      1,050,673,152
    # last norm                                                             4,096
    assert num_parameters(LLAMA_31_8B) == 6_979_584_000 + 1_050_673_152 + 4_096 == 8_030_261_248


def test_parameters_of_qwen3_06b() -> None:
    # qkv   (16 + 8 + 8) * 128 * 1024  =     4,194,304
    # out    16 * 128 * 1024           =     2,097,152
    # mlp     3 * 3072 * 1024          =     9,437,184
    # norms   2 * 1024 + 2 * 128       =         2,304   (those of query and key are as wide as a head)
    #                       a layer:        15,730,944, 28 of them: 440,466,432
    # embedding, which is the head too    151,936 * 1024 =          155,582,464
    # last norm                                                           1,024
    assert num_parameters(QWEN3_06B) == 440_466_432 + 155_582_464 + 1_024 == 596_049_920


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [*((family, {}) for family in CONFIGS), ("llama", {"attention_bias": True, "mlp_bias": True})],
)
def test_parameters_are_as_many_as_the_reference_has(family: str, changes: dict[str, Any], tied: bool) -> None:
    config = tiny_config(family, tie_word_embeddings=tied, **changes)
    with torch.device("meta"):
        reference = AutoModelForCausalLM.from_config(config)
    assert num_parameters(shape_of(config)) == sum(parameter.numel() for parameter in reference.parameters())


def test_a_rank_has_its_share_of_the_heads_and_all_of_the_norms() -> None:
    share = rank_shape(LLAMA_31_8B, 4)
    assert (share.num_heads, share.num_kv_heads, share.intermediate_size, share.vocab_size) == (8, 2, 3584, 32_064)
    norms = (2 * 32 + 1) * 4096
    assert 4 * num_parameters(share) == num_parameters(LLAMA_31_8B) + 3 * norms
    assert kv_bytes(share, 2) == 131_072 // 4


def test_more_ranks_than_kv_heads_keep_one_each() -> None:
    share = rank_shape(LLAMA_31_8B, 16)
    assert (share.num_heads, share.num_kv_heads) == (2, 1)
    assert kv_bytes(share, 2) == 131_072 // 8


@pytest.mark.parametrize(
    ("changes", "num_ranks", "told"),
    [
        ({}, 3, "32 attention heads cannot be divided among 3 ranks"),
        ({"num_heads": 12}, 3, "8 KV heads can neither be divided among 3 ranks nor repeated"),
        ({"num_heads": 48}, 12, "8 KV heads can neither be divided among 12 ranks nor repeated"),
        ({"intermediate_size": 4098}, 4, "an inner dimension of 4098 cannot be divided among 4 ranks"),
    ],
)
def test_ranks_that_cannot_share_the_model_are_refused(changes: dict[str, Any], num_ranks: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        rank_shape(replace(LLAMA_31_8B, **changes), num_ranks)


def plan(free_bytes: int = GIB, kv_bytes_per_token: int = 1, max_model_len: int = 200, **settings: Any) -> MemoryPlan:
    return plan_memory(
        EngineConfig(model="m", **settings),
        weight_bytes=0,
        kv_bytes_per_token=kv_bytes_per_token,
        max_model_len=max_model_len,
        free_bytes=free_bytes,
    )


def test_the_cache_is_what_the_fraction_holds_in_whole_blocks() -> None:
    assert plan(1_000_000_000, 1000, memory_fraction=0.25).num_blocks == 15_625
    assert plan(1_000_000_000 - 1, 1000, memory_fraction=0.25).num_blocks == 15_624
    assert plan(1_000_000_000, 1000).num_blocks == 31_250, "half, where nothing is said"


def test_the_start_up_line_tells_sizes_and_what_fits() -> None:
    stats = make_engine(num_blocks=15_625, block_size=16).stats()
    told = replace(stats, weight_bytes=GIB, kv_bytes_per_token=1000, max_model_len=1000)
    assert describe_memory(told) == (
        "weights 1.00 GiB; KV cache 1,000 bytes per token, 15,625 blocks of 16 tokens = 250,000 tokens, 0.23 GiB; "
        "holds 248 requests of the full 1,000 tokens at once"
    )


@pytest.mark.parametrize(("free_bytes", "fits"), [(2 * 13 * 16, True), (2 * 13 * 16 - 1, False)])
def test_the_least_share_of_the_memory_is_one_request_of_full_length(free_bytes: int, fits: bool) -> None:
    if fits:
        assert plan(free_bytes).num_blocks == 13
    else:
        with pytest.raises(ConfigError):
            plan(free_bytes)


def test_a_share_below_one_full_request_is_refused_with_the_numbers_and_what_to_change() -> None:
    with pytest.raises(ConfigError) as refused:
        plan(GIB, GIB // 64, memory_fraction=0.75)
    assert str(refused.value) == (
        "memory_fraction 0.75 of the 1.00 GiB that are free makes a KV cache of 3 blocks (48 tokens), but one request "
        "of max_model_len 200 needs 13 blocks (3.25 GiB); raise memory_fraction or lower max_model_len to 48 or less"
    )


def test_a_share_without_a_single_block_is_not_told_to_lower_the_length_to_nothing() -> None:
    with pytest.raises(ConfigError, match=r"0 blocks \(0 tokens\).* \(104.00 GiB\); raise memory_fraction$"):
        plan(GIB, GIB // 2)


@pytest.mark.parametrize(("num_blocks", "warned"), [(1, True), (12, True), (13, False)])
def test_a_number_of_blocks_is_kept_and_told_of_where_it_is_below_one_full_request(
    num_blocks: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert plan(num_kv_blocks=num_blocks).num_blocks == num_blocks
    told = [
        f"num_kv_blocks {num_blocks} makes a KV cache of {num_blocks * 16} tokens, but one request of max_model_len "
        "200 needs 13 blocks: longer prompts are refused, and a request that fills the cache ends there"
    ]
    assert caplog.messages == (told if warned else [])


def test_more_blocks_than_the_memory_holds_are_refused() -> None:
    assert plan(GIB, GIB // 64, max_model_len=16, num_kv_blocks=4).num_blocks == 4
    with pytest.raises(ConfigError) as refused:
        plan(GIB, GIB // 64, max_model_len=16, num_kv_blocks=5)
    assert str(refused.value) == (
        "num_kv_blocks 5 takes 1.25 GiB of KV cache, but 1.00 GiB are free; lower num_kv_blocks to 4 or less"
    )
    with pytest.raises(ConfigError, match="not even one block fits"):
        plan(GIB, GIB // 8, num_kv_blocks=1)
