"""What a model takes and what fits beside it, from its `config.json` alone: no weights, no device, no network.

Counted are weights and KV cache. Not counted are activations, which grow with the tokens of a step, and what the
device's own software takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import ConfigError, Dtype, KvDtype
from engine.memory import kv_bytes_per_token, num_parameters, rank_kv_heads, rank_shape
from engine.models.shape import ARCHITECTURES, read_config, shape_of

ELEMENT_BYTES = {Dtype.BFLOAT16: 2, Dtype.FLOAT16: 2, Dtype.FLOAT32: 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What each rank of a model takes. None: not known, because the engine does not run models of this type."""

    model_type: str
    num_parameters: int | None
    """Of the whole model."""
    weight_bytes: int | None
    kv_bytes_per_token: int
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFit:
    """What a rank's memory holds beside the weights. `num_requests`: so many of the length asked about at once."""

    kv_bytes: int
    num_blocks: int
    num_tokens: int
    num_requests: int


def size_model(path: Path, *, num_ranks: int, dtype: Dtype, kv_dtype: KvDtype) -> ModelSize:
    """Size the model of a folder or a `config.json`. Raises ConfigError.

    Weights are counted for the families that the engine runs. Of others the KV cache is known, if all their layers have
    plain attention and their configuration has the usual names.
    """
    if dtype not in ELEMENT_BYTES:
        raise ConfigError(f"dtype {dtype} depends on the hardware; name one of {', '.join(ELEMENT_BYTES)}")
    config = read_config(path)
    if config.model_type in ARCHITECTURES:
        return _size_known(config, num_ranks, dtype, kv_dtype)
    return _size_other(config, num_ranks, dtype, kv_dtype)


def fit_cache(size: ModelSize, *, memory_bytes: int, block_size: int, context: int) -> CacheFit:
    """What `memory_bytes` of a rank hold, when requests are `context` tokens long. Raises ConfigError."""
    if size.weight_bytes is None:
        raise ConfigError(
            f"the weights of model type {size.model_type!r} are not known, and so neither is what fits beside them; "
            f"counted are {', '.join(ARCHITECTURES)}"
        )
    if context > size.max_model_len:
        raise ConfigError(f"the model runs {size.max_model_len} tokens at most, so no request has {context}")
    kv_bytes = max(0, memory_bytes - size.weight_bytes)
    num_blocks = kv_bytes // (block_size * size.kv_bytes_per_token)
    return CacheFit(
        kv_bytes=kv_bytes,
        num_blocks=num_blocks,
        num_tokens=num_blocks * block_size,
        num_requests=num_blocks // -(-context // block_size),
    )


def _size_known(config: Any, num_ranks: int, dtype: Dtype, kv_dtype: KvDtype) -> ModelSize:
    shape = shape_of(config)
    share = rank_shape(shape, num_ranks)
    return ModelSize(
        model_type=config.model_type,
        num_parameters=num_parameters(shape),
        weight_bytes=num_parameters(share) * ELEMENT_BYTES[dtype],
        kv_bytes_per_token=kv_bytes_per_token(
            num_layers=share.num_layers,
            num_kv_heads=share.num_kv_heads,
            head_dim=share.head_dim,
            element_bytes=ELEMENT_BYTES[dtype],
            kv_dtype=kv_dtype,
        ),
        max_model_len=min(shape.max_positions, shape.sliding_window or shape.max_positions),
    )


def _size_other(config: Any, num_ranks: int, dtype: Dtype, kv_dtype: KvDtype) -> ModelSize:
    if config.is_encoder_decoder:
        raise ConfigError(f"a model of type {config.model_type!r} is no decoder-only model")
    try:
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        return ModelSize(
            model_type=config.model_type,
            num_parameters=None,
            weight_bytes=None,
            kv_bytes_per_token=kv_bytes_per_token(
                num_layers=config.num_hidden_layers,
                num_kv_heads=rank_kv_heads(heads, kv_heads, num_ranks),
                head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
                element_bytes=ELEMENT_BYTES[dtype],
                kv_dtype=kv_dtype,
            ),
            max_model_len=config.max_position_embeddings,
        )
    except AttributeError as error:
        raise ConfigError(f"a model of type {config.model_type!r} cannot be sized: {error}") from error
