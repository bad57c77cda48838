"""The paged KV cache of one layer, in the model's precision or in eight bits.

Eight bits: the key and the value of each token have one scale for each KV head, its largest magnitude over 127; the
numbers are stored as whole multiples of it. So a stored number is off by half a scale at most, a token's precision does
not depend on its neighbours, and what has been written need never be scaled again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

LARGEST = 127


class Pages(Protocol):
    """The keys, or the values, of all blocks of one layer."""

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Put `rows` [tokens, kv_heads, head_dim] into the places `slots` [tokens] of the cache."""

    def read(self, block_ids: Tensor) -> Tensor:
        """What `block_ids` [blocks] hold, in order: [blocks * block_size, kv_heads, head_dim]."""

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks. All sources are read before any target is written."""


@dataclass(frozen=True, slots=True)
class PlainPages:
    """`data`: [num_blocks, block_size, kv_heads, head_dim]."""

    data: Tensor

    def write(self, slots: Tensor, rows: Tensor) -> None:
        self.data.flatten(0, 1)[slots] = rows

    def read(self, block_ids: Tensor) -> Tensor:
        return self.data.index_select(0, block_ids).flatten(0, 1)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        self.data[targets] = self.data[sources]


@dataclass(frozen=True, slots=True)
class Int8Pages:
    """`data`: int8 [num_blocks, block_size, kv_heads, head_dim]; `scales`: float32 [num_blocks, block_size, kv_heads].

    `dtype` is what is read. A scale in float32 costs four bytes for each head; in half precision its own rounding would
    add to the error of every number, and a large activation would overflow it.
    """

    data: Tensor
    scales: Tensor
    dtype: torch.dtype

    def write(self, slots: Tensor, rows: Tensor) -> None:
        rows = rows.float()
        scales = rows.abs().amax(dim=-1) / LARGEST  # [tokens, kv_heads]
        divisors = scales.where(scales > 0, 1.0)[..., None]  # a head that is all zeros stays so
        self.data.flatten(0, 1)[slots] = (rows / divisors).round().clamp(-LARGEST, LARGEST).to(torch.int8)
        self.scales.flatten(0, 1)[slots] = scales

    def read(self, block_ids: Tensor) -> Tensor:
        data = self.data.index_select(0, block_ids).flatten(0, 1)
        scales = self.scales.index_select(0, block_ids).flatten(0, 1)
        return (data * scales[..., None]).to(self.dtype)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        self.data[targets] = self.data[sources]
        self.scales[targets] = self.scales[sources]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """Keys and values of one layer."""

    keys: Pages
    values: Pages
