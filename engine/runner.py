"""One rank's share of the model: weights, KV cache, and the step that turns a plan into tokens."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from engine.attention.batch import Attention, LayerCache, build_batch
from engine.models.decoder import Decoder
from engine.models.shape import ModelShape
from engine.plan import StepPlan, StepResult
from engine.sampler import sample


def allocate_cache(
    shape: ModelShape, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[LayerCache]:
    """The KV cache of all layers, zeroed."""
    size = (num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
    layers = range(shape.num_layers)
    return [LayerCache(keys=_zeros(size, dtype, device), values=_zeros(size, dtype, device)) for _ in layers]


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU, memory that is zeroed when it is first touched: torch writes all of it at once, seconds at start-up."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(size) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(size)


class Runner:
    """Runs plans on one device. A batch is one flat list of tokens; there is no padding anywhere."""

    def __init__(
        self, decoder: Decoder, shape: ModelShape, attention: Attention, cache: list[LayerCache], block_size: int
    ) -> None:
        self._decoder = decoder
        self._shape = shape
        self._attention = attention
        self._cache = cache
        self._block_size = block_size

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute every chunk, and sample where a chunk ends at its sequence's last known token."""
        sampling = [chunk for chunk in plan.chunks if chunk.samples]
        hidden = self._forward(plan)
        if not sampling:
            return StepResult(token_ids=[])
        # Scores for the whole prompt are never computed: only the rows whose next token is wanted.
        logits = self._decoder.logits(hidden[self._last_rows(plan)])
        return StepResult(token_ids=sample(logits, sampling))

    def _forward(self, plan: StepPlan) -> Tensor:
        device = self._decoder.embed.weight.device
        dtype = self._decoder.embed.weight.dtype
        token_ids = torch.tensor([token_id for chunk in plan.chunks for token_id in chunk.token_ids], device=device)
        positions = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in plan.chunks]).to(device)
        batch = build_batch(
            plan.chunks, block_size=self._block_size, group=self._shape.group, dtype=dtype, device=device
        )

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self._attention(query, key, value, self._cache[layer], batch)

        hidden: Tensor = self._decoder(token_ids, positions, attend)  # [tokens, hidden]
        return hidden

    def _last_rows(self, plan: StepPlan) -> list[int]:
        rows = []
        end = 0
        for chunk in plan.chunks:
            end += len(chunk.token_ids)
            if chunk.samples:
                rows.append(end - 1)
        return rows
