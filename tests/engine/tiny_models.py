"""Tiny random-weight models of every family, written to a folder as `transformers` would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 101,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": 100,
        "bos_token_id": 99,
        "pad_token_id": None,
    }
    if family in ("mistral", "qwen3"):
        sizes["head_dim"] = 16  # not hidden_size / heads
    if family == "mistral":
        sizes["sliding_window"] = None
    return CONFIGS[family](**{**sizes, **changes})


def write_tiny_model(folder: Path, family: str, **changes: Any) -> PreTrainedModel:
    """Random weights, large enough that logits differ clearly; returns the reference model in float32."""
    torch.manual_seed(0)
    config = tiny_config(family, initializer_range=0.3, **changes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # biases and norms start as zeros and ones, which would hide a mistake
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * (0.2 if "norm" in name else 0.5))
    model.save_pretrained(folder)
    return model.eval()
