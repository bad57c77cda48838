from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.api import GIB
from engine.config import ConfigError, Dtype, KvDtype
from engine.sizing import CacheFit, ModelSize, fit_cache, size_model
from tests.engine.tiny_models import tiny_config, write_tiny_model

OPT_13B = {
    "model_type": "opt",
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "ffn_dim": 20_480,
    "max_position_embeddings": 2048,
}


def size(path: Path, num_ranks: int = 1, dtype: Dtype = Dtype.FLOAT16) -> ModelSize:
    return size_model(path, num_ranks=num_ranks, dtype=dtype, kv_dtype=KvDtype.AUTO)


def config_file(folder: Path, **keys: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(keys))
    return path


def test_a_model_is_sized_from_its_configuration_alone(tmp_path: Path) -> None:
    reference = write_tiny_model(tmp_path, "qwen2")
    (tmp_path / "model.safetensors").unlink()
    num_parameters = sum(parameter.numel() for parameter in reference.parameters())
    assert size(tmp_path, dtype=Dtype.FLOAT32) == ModelSize(
        model_type="qwen2",
        num_parameters=num_parameters,
        weight_bytes=4 * num_parameters,
        kv_bytes_per_token=2 * 3 * 2 * 8 * 4,
        max_model_len=256,
    )
    assert size(tmp_path / "config.json") == size(tmp_path)


def test_ranks_share_weights_and_cache(tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    whole, half = size(tmp_path), size(tmp_path, num_ranks=2)
    assert half.num_parameters == whole.num_parameters
    assert half.kv_bytes_per_token == whole.kv_bytes_per_token // 2
    # 101 rows of the vocabulary make 51 and 50, and 3 * 2 + 1 norms of 48 are in both: what the larger rank has
    assert 2 * (half.weight_bytes or 0) == (whole.weight_bytes or 0) + 2 * (2 * 48 + 7 * 48)


def test_a_sliding_window_bounds_the_length_that_the_engine_runs(tmp_path: Path) -> None:
    tiny_config("mistral", sliding_window=64).save_pretrained(tmp_path)
    assert size(tmp_path).max_model_len == 64


def test_of_a_model_that_the_engine_does_not_run_the_cache_is_known(tmp_path: Path) -> None:
    assert size(config_file(tmp_path, **OPT_13B)) == ModelSize(
        model_type="opt", num_parameters=None, weight_bytes=None, kv_bytes_per_token=819_200, max_model_len=2048
    )
    with pytest.raises(ConfigError, match="the weights of model type 'opt' are not known"):
        fit_cache(size(tmp_path), memory_bytes=GIB, block_size=16, context=16)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"model_type": "t5"}, "'t5' is no decoder-only model"),
        ({"model_type": "mamba"}, "'mamba' cannot be sized: .*num_attention_heads"),
        ({"model_type": "llama", "hidden_size": "wide"}, "hidden_size"),
        ({"model_type": "llama", "num_attention_heads": 0}, "division"),
        ({"hidden_size": 48}, "model_type"),
    ],
)
def test_a_configuration_that_cannot_be_sized_is_refused(keys: dict[str, object], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        size(config_file(tmp_path, **keys))


def test_a_precision_that_the_hardware_would_choose_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name one of bfloat16, float16, float32"):
        size(tmp_path, dtype=Dtype.AUTO)


SMALL = ModelSize(model_type="llama", num_parameters=1000, weight_bytes=2000, kv_bytes_per_token=10, max_model_len=100)


def test_the_memory_beside_the_weights_holds_whole_blocks_and_whole_requests() -> None:
    # 1,279 bytes are 7 blocks of 160; a request of 33 tokens takes 3 of them
    assert fit_cache(SMALL, memory_bytes=3279, block_size=16, context=33) == CacheFit(
        kv_bytes=1279, num_blocks=7, num_tokens=112, num_requests=2
    )
    assert fit_cache(SMALL, memory_bytes=3280, block_size=16, context=32).num_requests == 4


def test_a_memory_below_the_weights_holds_nothing() -> None:
    assert fit_cache(SMALL, memory_bytes=1999, block_size=16, context=1) == CacheFit(
        kv_bytes=0, num_blocks=0, num_tokens=0, num_requests=0
    )


def test_a_context_above_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="the model runs 100 tokens at most, so no request has 101"):
        fit_cache(SMALL, memory_bytes=GIB, block_size=16, context=101)
