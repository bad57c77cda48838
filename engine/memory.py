"""How much KV cache there is room for.

A token's keys and values take ``2 * layers * kv_heads * head_dim * element_bytes``; the cache is what a share of the
memory left beside the weights holds, in whole blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.api import GIB
from engine.config import DEFAULT_MEMORY_FRACTION, ConfigError, EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What start-up decided. `weight_bytes` are in place already when the plan is made."""

    weight_bytes: int
    kv_bytes_per_token: int
    num_blocks: int
    block_size: int
    max_model_len: int


def plan_memory(
    config: EngineConfig, *, weight_bytes: int, kv_bytes_per_token: int, max_model_len: int, free_bytes: int
) -> MemoryPlan:
    """Size the cache. Raises ConfigError with the numbers when it could not hold one request of full length."""
    block_bytes = config.block_size * kv_bytes_per_token
    fraction = config.memory_fraction or DEFAULT_MEMORY_FRACTION
    num_blocks = config.num_kv_blocks or int(free_bytes * fraction) // block_bytes
    needed = -(-max_model_len // config.block_size)
    if num_blocks * block_bytes > free_bytes:
        raise ConfigError(
            f"num_kv_blocks {num_blocks} takes {num_blocks * block_bytes / GIB:.2f} GiB of KV cache, "
            f"but {free_bytes / GIB:.2f} GiB are free; lower num_kv_blocks to {free_bytes // block_bytes} or less"
        )
    if num_blocks < needed:
        raise ConfigError(
            f"the KV cache has {num_blocks} blocks ({num_blocks * config.block_size} tokens), but one request of "
            f"max_model_len {max_model_len} needs {needed} blocks ({needed * block_bytes / GIB:.2f} GiB, "
            f"{free_bytes / GIB:.2f} GiB are free); raise num_kv_blocks or memory_fraction, or lower max_model_len "
            f"to {num_blocks * config.block_size} or less"
        )
    return MemoryPlan(
        weight_bytes=weight_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
    )
