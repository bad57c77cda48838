"""What every attention backend is given: the ragged batch.

A *slot* here is the place of one token in the cache: slot ``s`` is offset ``s % block_size`` of block
``s // block_size``. (Slots of the batch are the scheduler's word; this module only knows places in memory.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.attention.cache import LayerCache
from engine.plan import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One chunk inside the flat list of tokens: rows `begin` to `end`.

    They attend to the first `context` tokens of the blocks in `block_ids`: [blocks], in order.
    `mask`: [group * query, context], added to the scores, for query rows packed head-major (see the reference
    backend); None when every row sees the whole context, as a single token does.
    """

    begin: int
    end: int
    block_ids: Tensor
    context: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """`new_slots`: [tokens], where each token's key and value go; `segments`: one for each chunk, in order."""

    new_slots: Tensor
    segments: tuple[Segment, ...]


class Attention(Protocol):
    """Store the new keys and values, then let every token attend to its own sequence up to itself."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, batch: AttentionBatch) -> Tensor:
        """query: [tokens, heads, head_dim]; key, value: [tokens, kv_heads, head_dim] -> [tokens, heads * head_dim]."""


def build_batch(
    chunks: Sequence[Chunk], *, block_size: int, group: int, dtype: torch.dtype, device: torch.device
) -> AttentionBatch:
    """Lay out `chunks` one after another; `group` is the number of query heads for each KV head."""
    segments = []
    new_slots = []
    begin = 0
    offsets = torch.arange(block_size, device=device)
    for chunk in chunks:
        block_ids = torch.tensor(chunk.block_ids, device=device)
        first_block = chunk.start // block_size
        slots = (block_ids[first_block:, None] * block_size + offsets).flatten()
        end = begin + len(chunk.token_ids)
        mask = _causal_mask(chunk, dtype, device).repeat(group, 1) if end - begin > 1 else None
        context_blocks = block_ids[: -(-chunk.end // block_size)]
        segments.append(Segment(begin=begin, end=end, block_ids=context_blocks, context=chunk.end, mask=mask))
        skip = first_block * block_size
        new_slots.append(slots[chunk.start - skip : chunk.end - skip])
        begin = end
    return AttentionBatch(new_slots=torch.cat(new_slots), segments=tuple(segments))


def _causal_mask(chunk: Chunk, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[query, context]: 0 where position `start + row` may see the column, else -inf."""
    rows = torch.arange(chunk.start, chunk.end, device=device)[:, None]
    columns = torch.arange(chunk.end, device=device)[None, :]
    return torch.zeros(rows.shape[0], chunk.end, dtype=dtype, device=device).masked_fill(columns > rows, float("-inf"))
