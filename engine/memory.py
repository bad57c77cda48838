"""How much memory a model takes, and how much KV cache there is room for beside it. Arithmetic; no torch.

A token's keys and values take ``2 * layers * kv_heads * (head_dim * element_bytes + scale_bytes)``; the cache is what a
share of the memory left beside the weights holds, in whole blocks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from engine.api import GIB
from engine.config import DEFAULT_MEMORY_FRACTION, ConfigError, EngineConfig, KvDtype
from engine.models.shape import ModelShape

logger = logging.getLogger(__name__)

KV_SCALE_BYTES = 4
"""A cache of eight bits has a float32 scale for each token and KV head, one for the key and one for the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What start-up decided. `weight_bytes` are in place already when the plan is made."""

    weight_bytes: int
    kv_bytes_per_token: int
    num_blocks: int
    block_size: int
    max_model_len: int


def kv_bytes_per_token(
    *, num_layers: int, num_kv_heads: int, head_dim: int, element_bytes: int, kv_dtype: KvDtype = KvDtype.AUTO
) -> int:
    """KV cache that one token takes over all layers. `element_bytes`: of the model's own precision."""
    head_bytes = head_dim * element_bytes if kv_dtype is KvDtype.AUTO else head_dim + KV_SCALE_BYTES
    return 2 * num_layers * num_kv_heads * head_bytes


def num_parameters(shape: ModelShape) -> int:
    """How many parameters a model of the four families has; a head that is tied to the embedding is counted once."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = (queries + 2 * keys) * (hidden + shape.qkv_bias) + (queries + shape.out_bias) * hidden
    feed_forward = 2 * inner * (hidden + shape.mlp_bias) + (inner + shape.mlp_bias) * hidden
    norms = 2 * hidden + 2 * shape.head_dim * shape.qk_norm
    embeddings = (1 if shape.tied_head else 2) * shape.vocab_size * hidden
    return embeddings + shape.num_layers * (attention + feed_forward + norms) + hidden


def rank_shape(shape: ModelShape, num_ranks: int) -> ModelShape:
    """The largest share that one of `num_ranks` tensor-parallel ranks has of a model. Raises ConfigError.

    Heads, inner dimension and vocabulary are divided (Shoeybi et al., "Megatron-LM", 2019); norms, and the biases that
    are added after the ranks' sums, are in every rank.
    """
    num_kv_heads = rank_kv_heads(shape.num_heads, shape.num_kv_heads, num_ranks)
    if shape.intermediate_size % num_ranks:
        raise ConfigError(f"an inner dimension of {shape.intermediate_size} cannot be divided among {num_ranks} ranks")
    return replace(
        shape,
        num_kv_heads=num_kv_heads,
        num_heads=shape.num_heads // num_ranks,
        intermediate_size=shape.intermediate_size // num_ranks,
        vocab_size=-(-shape.vocab_size // num_ranks),
    )


def rank_kv_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> int:
    """KV heads of each rank; where there are more ranks than KV heads, several ranks keep the same one.

    Raises ConfigError if the heads cannot be divided among the ranks, or the KV heads neither divided nor repeated.
    """
    if num_heads % num_ranks:
        raise ConfigError(f"{num_heads} attention heads cannot be divided among {num_ranks} ranks")
    if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
        raise ConfigError(f"{num_kv_heads} KV heads can neither be divided among {num_ranks} ranks nor repeated")
    return max(1, num_kv_heads // num_ranks)


def plan_memory(
    config: EngineConfig, *, weight_bytes: int, kv_bytes_per_token: int, max_model_len: int, free_bytes: int
) -> MemoryPlan:
    """Size the cache. Raises ConfigError with the numbers when it cannot be had.

    A cache that cannot hold one request of full length is refused, unless `num_kv_blocks` asks for it by its size: one
    block is enough to run whatever fits into it.
    """
    block_bytes = config.block_size * kv_bytes_per_token
    if config.num_kv_blocks is None:
        num_blocks = _blocks_of_fraction(config, block_bytes, max_model_len, free_bytes)
    else:
        num_blocks = _blocks_as_told(config.num_kv_blocks, config.block_size, block_bytes, max_model_len, free_bytes)
    return MemoryPlan(
        weight_bytes=weight_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
    )


def _blocks_of_fraction(config: EngineConfig, block_bytes: int, max_model_len: int, free_bytes: int) -> int:
    fraction = config.memory_fraction or DEFAULT_MEMORY_FRACTION
    num_blocks = int(free_bytes * fraction) // block_bytes
    num_tokens, needed = num_blocks * config.block_size, -(-max_model_len // config.block_size)
    if num_blocks < needed:
        shorter = f" or lower max_model_len to {num_tokens} or less" if num_blocks else ""
        raise ConfigError(
            f"memory_fraction {fraction:g} of the {free_bytes / GIB:.2f} GiB that are free makes a KV cache of "
            f"{num_blocks} blocks ({num_tokens} tokens), but one request of max_model_len {max_model_len} needs "
            f"{needed} blocks ({needed * block_bytes / GIB:.2f} GiB); raise memory_fraction{shorter}"
        )
    return num_blocks


def _blocks_as_told(num_blocks: int, block_size: int, block_bytes: int, max_model_len: int, free_bytes: int) -> int:
    if num_blocks * block_bytes > free_bytes:
        most = free_bytes // block_bytes
        advice = f"lower num_kv_blocks to {most} or less" if most else "not even one block fits"
        raise ConfigError(
            f"num_kv_blocks {num_blocks} takes {num_blocks * block_bytes / GIB:.2f} GiB of KV cache, "
            f"but {free_bytes / GIB:.2f} GiB are free; {advice}"
        )
    num_tokens, needed = num_blocks * block_size, -(-max_model_len // block_size)
    if num_blocks < needed:
        logger.warning(
            "num_kv_blocks %d makes a KV cache of %d tokens, but one request of max_model_len %d needs %d blocks: "
            "longer prompts are refused, and a request that fills the cache ends there",
            num_blocks,
            num_tokens,
            max_model_len,
            needed,
        )
    return num_blocks
