"""Paged attention in plain torch: the truth that faster backends are held to.

One scaled-dot-product call for each sequence over its own gathered context, so no token is ever padded. The query
heads that share a KV head are packed as rows of one product (head-major), which reads each key once for the group.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.batch import AttentionBatch, Segment
from engine.attention.cache import LayerCache, Pages


def reference_attention(query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, batch: AttentionBatch) -> Tensor:
    """See `engine.attention.batch.Attention`."""
    tokens, heads, head_dim = query.shape
    kv_heads = key.shape[1]
    cache.keys.write(batch.new_slots, key)
    cache.values.write(batch.new_slots, value)
    # [kv_heads, group, tokens, head_dim], so that a segment's rows are one slice
    packed = query.view(tokens, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    out = torch.empty_like(packed)
    for segment in batch.segments:
        rows = slice(segment.begin, segment.end)
        attended = scaled_dot_product_attention(
            packed[:, :, rows].flatten(1, 2)[None],  # [1, kv_heads, group * rows, head_dim]
            _context(cache.keys, segment)[None],
            _context(cache.values, segment)[None],
            attn_mask=segment.mask,
        )
        out[:, :, rows] = attended.view_as(out[:, :, rows])
    return out.permute(2, 0, 1, 3).reshape(tokens, heads * head_dim)


def _context(pages: Pages, segment: Segment) -> Tensor:
    """Gather what a segment attends to: [kv_heads, context, head_dim]."""
    return pages.read(segment.block_ids)[: segment.context].transpose(0, 1)
