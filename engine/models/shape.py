"""The numbers of a decoder-only model, read from its `config.json`; what the decoder cannot do is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import ConfigError

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes and switches of one decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_head: bool
    sliding_window: int | None

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.num_heads // self.num_kv_heads


def read_config(model_dir: str | Path) -> Any:
    """The `transformers` configuration object of a model folder or a `config.json`. Raises ConfigError."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(model_dir), local_files_only=True)
    except (OSError, ValueError, ArithmeticError, StrictDataclassError) as error:
        raise ConfigError(f"{model_dir} is not a model folder or its configuration: {error}") from error


def shape_of(config: Any) -> ModelShape:
    """Sizes from a `transformers` configuration. Raises ConfigError if the decoder cannot run such a model."""
    kind = config.model_type
    if kind not in ARCHITECTURES:
        raise ConfigError(f"model type {kind!r} is not one that the engine runs: {', '.join(ARCHITECTURES)}")
    if config.hidden_act != "silu":
        raise ConfigError(f"activation {config.hidden_act!r} is not supported; the decoder has silu")
    heads = config.num_attention_heads
    bias = bool(getattr(config, "attention_bias", False))
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    return ModelShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        norm_eps=config.rms_norm_eps,
        max_positions=config.max_position_embeddings,
        qkv_bias=bias or kind == "qwen2",
        out_bias=bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=kind == "qwen3",
        tied_head=bool(config.tie_word_embeddings),
        sliding_window=window,
    )
