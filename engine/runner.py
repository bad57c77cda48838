"""One rank's share of the model: weights, KV cache, and the step that turns a plan into tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.api import PositionLogprobs
from engine.attention.batch import Attention, build_batch
from engine.attention.cache import Int8Pages, LayerCache, Pages, PlainPages
from engine.config import KvDtype
from engine.logprobs import score
from engine.models.decoder import Decoder
from engine.models.shape import ModelShape
from engine.plan import BlockCopy, Chunk, StepPlan, StepResult
from engine.sampler import sample

ROWS_SCORED_AT_ONCE = 64
"""Bounds the scores of a prompt, [rows, vocab], to some megabytes."""


def allocate_cache(
    shape: ModelShape, *, num_blocks: int, block_size: int, dtype: torch.dtype, kv_dtype: KvDtype, device: torch.device
) -> list[LayerCache]:
    """The KV cache of all layers, zeroed."""
    size = (num_blocks, block_size, shape.num_kv_heads, shape.head_dim)

    def pages() -> Pages:
        if kv_dtype is KvDtype.AUTO:
            return PlainPages(_zeros(size, dtype, device))
        return Int8Pages(_zeros(size, torch.int8, device), _zeros(size[:-1], torch.float32, device), dtype)

    return [LayerCache(keys=pages(), values=pages()) for _ in range(shape.num_layers)]


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
        self._copy(plan.copies)
        hidden = self._forward(plan)
        sampling = [chunk for chunk in plan.chunks if chunk.samples]
        token_ids: list[int] = []
        logprobs: tuple[PositionLogprobs | None, ...] = ()
        if sampling:
            # Scores for the whole prompt are never computed: only the rows whose next token is wanted.
            logits = self._decoder.logits(hidden[self._last_rows(plan)])
            token_ids = sample(logits, sampling)
            logprobs = _logprobs(logits, token_ids, sampling)
        return StepResult(token_ids=token_ids, logprobs=logprobs, scored=self._score_prompts(plan, hidden))

    def _copy(self, copies: tuple[BlockCopy, ...]) -> None:
        if not copies:
            return
        device = self._decoder.embed.weight.device
        sources = torch.tensor([copy.source for copy in copies], device=device)
        targets = torch.tensor([copy.target for copy in copies], device=device)
        for layer in self._cache:
            layer.keys.copy(sources, targets)
            layer.values.copy(sources, targets)

    def _score_prompts(self, plan: StepPlan, hidden: Tensor) -> tuple[tuple[PositionLogprobs, ...], ...]:
        """What the model itself thinks of the prompts that want to know; nothing is adjusted."""
        scored = []
        begin = 0
        for chunk in plan.chunks:
            wanted, num_top = chunk.scored_token_ids, chunk.sampling.prompt_logprobs or 0
            scores: list[PositionLogprobs] = []
            for first in range(0, len(wanted), ROWS_SCORED_AT_ONCE):
                token_ids = wanted[first : first + ROWS_SCORED_AT_ONCE]
                rows = hidden[begin + first : begin + first + len(token_ids)]
                scores += score(self._decoder.logits(rows), token_ids, num_top)
            if wanted:
                scored.append(tuple(scores))
            begin += len(chunk.token_ids)
        return tuple(scored)

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


def _logprobs(logits: Tensor, token_ids: list[int], chunks: list[Chunk]) -> tuple[PositionLogprobs | None, ...]:
    """The scores of the tokens just chosen, for the rows that want them; empty if none does. logits: [rows, vocab]."""
    wanting = [row for row, chunk in enumerate(chunks) if chunk.sampling.logprobs is not None]
    if not wanting:
        return ()
    found: list[PositionLogprobs | None] = [None] * len(chunks)
    num_top = max(chunks[row].sampling.logprobs or 0 for row in wanting)
    for row, scores in zip(wanting, score(logits[wanting], [token_ids[row] for row in wanting], num_top), strict=True):
        found[row] = replace(scores, top=scores.top[: chunks[row].sampling.logprobs])
    return tuple(found)
