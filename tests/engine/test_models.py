"""Every family against `transformers`, in float32: same logits, same greedy tokens, whatever the chunking."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.api import GenerateRequest, SamplingParams
from engine.build import build_engine
from engine.config import ConfigError, Dtype, EngineConfig
from tests.engine.makers import run_to_end
from tests.engine.tiny_models import write_tiny_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama, tied head": ("llama", {"tie_word_embeddings": True}),
    "llama, biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, one head each": ("llama", {"num_key_value_heads": 6}),
    "llama, scaled rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}


def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(3)
    return [
        tuple(torch.randint(0, 99, (length,), generator=generator).tolist()) for length in (1, 2, 15, 16, 17, 40, 90)
    ]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("budget", "num_blocks"), [(512, 200), (9, 9)])
def test_greedy_tokens_equal_the_reference(variant: str, budget: int, num_blocks: int, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    reference = write_tiny_model(tmp_path, family, **changes)
    engine = build_engine(
        EngineConfig(
            model=str(tmp_path),
            dtype=Dtype.FLOAT32,
            num_threads=1,
            num_kv_blocks=num_blocks,
            max_model_len=128,
            max_num_seqs=4,
            max_num_batched_tokens=budget,
        )
    )
    for number, prompt in enumerate(prompts()):
        params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
        engine.add(GenerateRequest(request_id=str(number), prompt_token_ids=prompt, sampling=params))
    outputs = run_to_end(engine)
    for number, prompt in enumerate(prompts()):
        ids = torch.tensor([prompt])
        expected = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, min_new_tokens=30, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert outputs[str(number)] == expected[0, len(prompt) :].tolist(), f"prompt of {len(prompt)} tokens"
    assert (engine.stats().num_preemptions > 0) == (num_blocks == 9)


def config_for(folder: Path, **changes: object) -> EngineConfig:
    return EngineConfig(model=str(folder), num_kv_blocks=64, **changes)  # type: ignore[arg-type]


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a model folder"):
        build_engine(config_for(tmp_path))


def test_missing_weights_are_named(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama", num_hidden_layers=1)
    write_tiny_model(tmp_path / "other", "llama")
    (tmp_path / "config.json").write_text((tmp_path / "other" / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"lacks weights for layers\.1\.attention\.out\.weight"):
        build_engine(config_for(tmp_path))


def test_weights_of_another_shape_are_named(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama")
    write_tiny_model(tmp_path / "other", "llama", intermediate_size=64)
    (tmp_path / "config.json").write_text((tmp_path / "other" / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"mlp\..*_proj\.weight .* has no place in this model"):
        build_engine(config_for(tmp_path))


def test_a_length_beyond_the_training_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama")
    with pytest.raises(ConfigError, match="max_model_len is 300, but the model was trained for 256 positions"):
        build_engine(config_for(tmp_path, max_model_len=300))


def test_a_sliding_window_shorter_than_the_context_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "mistral", sliding_window=128)
    with pytest.raises(ConfigError, match="a window of 128 tokens"):
        build_engine(config_for(tmp_path))
    assert build_engine(config_for(tmp_path, max_model_len=128)).stats().max_model_len == 128
