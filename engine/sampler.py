"""Logits to tokens, vectorised over the batch.

Randomness is one uniform number per token, a hash of (seed, position), and the token is found by inverting the
cumulative distribution in vocabulary order. So a stream depends on its seed and its logits alone: not on its
neighbours, nor on what was sampled before, nor on the process that runs it.
See `engine.randomness`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.penalties import adjust
from engine.randomness import uniform

if TYPE_CHECKING:
    from engine.plan import Chunk

GREEDY_BELOW = 1e-5
"""A temperature below this is taken as 0: what is left of the others is nothing, and the division might overflow."""


def sample(logits: torch.Tensor, chunks: Sequence[Chunk]) -> list[int]:
    """The next token of each chunk.

    logits: [chunks, vocab], float32; changed in place by bias, penalties and bans.
    """
    adjust(logits, chunks)
    token_ids: list[int] = logits.argmax(dim=-1).tolist()
    rows = [row for row, chunk in enumerate(chunks) if chunk.sampling.temperature >= GREEDY_BELOW]
    if rows:
        sampled = _sample_rows(logits[rows], [chunks[row] for row in rows])
        for row, token_id in zip(rows, sampled, strict=True):
            token_ids[row] = token_id
    return token_ids


def _sample_rows(logits: torch.Tensor, chunks: Sequence[Chunk]) -> list[int]:
    """Tokens of the rows that are not greedy. logits: [rows, vocab]."""

    def column(values: list[float]) -> torch.Tensor:  # [rows, 1]
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    temperature = column([chunk.sampling.temperature for chunk in chunks])
    # float64: a cumulative sum over the vocabulary in float32 would move the borders by more than some tokens' mass.
    probs = torch.softmax(logits.double() / temperature, dim=-1)
    if any(chunk.sampling.top_k is not None or chunk.sampling.top_p < 1 for chunk in chunks):
        probs = _keep_top(probs, chunks)
    if any(chunk.sampling.min_p > 0 for chunk in chunks):
        floor = column([chunk.sampling.min_p for chunk in chunks]) * probs.amax(dim=-1, keepdim=True)
        probs = probs.where(probs >= floor, 0.0)
    cumulative = probs.cumsum(dim=-1)
    numbers = column([uniform(chunk.seed, chunk.end) for chunk in chunks])
    target = numbers * cumulative[:, -1:]
    # The first token whose cumulative mass exceeds the target: one with mass of its own, as target < total. Logits that
    # are not numbers have no such token; the last one keeps one broken row from breaking the batch.
    token_ids = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return [int(token_id) for token_id in token_ids]


def _keep_top(probs: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
    """Zero all but the top-k, then all but the smallest set that holds top-p of what is left. probs: [rows, vocab]."""
    vocab = probs.shape[-1]
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    k = torch.tensor([min(chunk.sampling.top_k or vocab, vocab) for chunk in chunks], device=probs.device)[:, None]
    ordered = ordered.where(torch.arange(vocab, device=probs.device) < k, 0.0)
    p = torch.tensor([chunk.sampling.top_p for chunk in chunks], dtype=probs.dtype, device=probs.device)[:, None]
    before = ordered.cumsum(dim=-1) - ordered
    # A row with top_p = 1 keeps everything, rounding of the sum notwithstanding.
    ordered = ordered.where((before < p * ordered.sum(dim=-1, keepdim=True)) | (p >= 1), 0.0)
    return torch.zeros_like(probs).scatter_(-1, index, ordered)
