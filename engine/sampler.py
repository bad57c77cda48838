"""Logits to tokens, vectorised over the batch.

Randomness is one uniform number per token, a hash of (seed, position), and the token is found by inverting the
cumulative distribution in vocabulary order. So a stream depends on its seed and its logits alone: not on its
neighbours, nor on what was sampled before, nor on the process that runs it.
See `engine.randomness`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.penalties import adjust
from engine.randomness import uniform

if TYPE_CHECKING:
    from engine.api import SamplingParams
    from engine.plan import Chunk

GREEDY_BELOW = 1e-5
"""A temperature below this is taken as 0: what is left of the others is nothing, and the division might overflow."""


NUM_CANDIDATES = 256
"""How many of the likeliest tokens top-k and top-p look at first; to sort the whole vocabulary takes much longer."""


def sample(logits: torch.Tensor, chunks: Sequence[Chunk]) -> list[int]:
    """The next token of each chunk.

    logits: [chunks, vocab], float32; changed in place by bias, penalties and bans.
    """
    adjust(logits, chunks)
    token_ids: list[int] = logits.argmax(dim=-1).tolist()
    drawn = [row for row, chunk in enumerate(chunks) if chunk.sampling.temperature >= GREEDY_BELOW]
    filtered = {row for row in drawn if _is_filtered(chunks[row].sampling, logits.shape[-1])}
    for draw, rows in ((_draw, [row for row in drawn if row not in filtered]), (_draw_from_top, sorted(filtered))):
        if rows:
            part = [chunks[row] for row in rows]
            for row, token_id in zip(rows, draw(_weights(logits[rows], part), part).tolist(), strict=True):
                token_ids[row] = token_id
    return token_ids


def _is_filtered(sampling: SamplingParams, vocab: int) -> bool:
    """Whether it matters which tokens are the likeliest."""
    return sampling.top_p < 1 or (sampling.top_k or vocab) < vocab


def _column(values: list[float], like: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]  # [rows, 1]


def _weights(logits: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
    """The odds of every token against the likeliest, which has 1. logits: [rows, vocab], overwritten."""
    temperature = _column([chunk.sampling.temperature for chunk in chunks], logits, logits.dtype)
    return logits.sub_(logits.amax(dim=-1, keepdim=True)).div_(temperature).exp_()


def _draw(weights: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
    """A place in each row [rows], with the odds that the weights say, and min-p. weights: [rows, places]."""
    if any(chunk.sampling.min_p > 0 for chunk in chunks):
        floor = _column([chunk.sampling.min_p for chunk in chunks], weights, weights.dtype)
        weights = weights.where(weights >= floor, 0.0)  # the likeliest has 1, whatever else other filters left
    # float64: a cumulative sum over the vocabulary in float32 would move the borders by more than some tokens' mass.
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    target = _column([uniform(chunk.seed, chunk.end) for chunk in chunks], weights) * cumulative[:, -1:]
    # The first place whose cumulative mass exceeds the target: one with mass of its own, as target < total. Logits that
    # are not numbers have no such place; the last one keeps one broken row from breaking the batch.
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=weights.shape[-1] - 1)


def _draw_from_top(
    weights: torch.Tensor, chunks: Sequence[Chunk], num_candidates: int = NUM_CANDIDATES
) -> torch.Tensor:
    """Tokens [rows] drawn from the top-k, of these from the smallest set that holds top-p. weights: [rows, vocab].

    Looks at the likeliest `num_candidates` of each row; where they may not be all, again at eight times as many.
    """
    vocab = weights.shape[-1]
    num_candidates = min(num_candidates, vocab)
    best, token_ids = _likeliest(weights, num_candidates)
    k = _column([min(chunk.sampling.top_k or vocab, vocab) for chunk in chunks], weights, torch.long)
    p = _column([chunk.sampling.top_p for chunk in chunks], weights)
    in_top_k = best.where(torch.arange(num_candidates, device=best.device) < k, 0.0)
    cumulative = in_top_k.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:].where(k < vocab, weights.sum(dim=-1, keepdim=True, dtype=torch.float64))
    # A row with top_p = 1 keeps all that top-k left, rounding of the sum notwithstanding.
    is_kept = (in_top_k > 0) & ((cumulative - in_top_k < p * total) | (p >= 1))

    token_ids, in_order = token_ids.sort(dim=-1)  # the order of the vocabulary, as without filters
    places = _draw(in_top_k.where(is_kept, 0.0).gather(-1, in_order), chunks)
    drawn = token_ids.gather(-1, places[:, None])[:, 0]
    if num_candidates < vocab:
        # All were there if the set ends among them, and not between equals of which there may be more.
        least = in_top_k.where(is_kept, math.inf).amin(dim=-1)
        is_sure = (least > best[:, -1]) & ((k <= num_candidates) | (k == vocab))[:, 0]
        if rest := (~is_sure).nonzero()[:, 0].tolist():
            drawn[rest] = _draw_from_top(weights[rest], [chunks[row] for row in rest], 8 * num_candidates)
    return drawn


def _likeliest(weights: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `number` largest weights of each row and their tokens, both [rows, number]; of equals, lower ids first.

    Where some of the equals are left out, it is not said which.
    """
    if number == weights.shape[-1]:
        return weights.sort(dim=-1, descending=True, stable=True)
    values, token_ids = weights.topk(number, dim=-1, sorted=False)
    token_ids, by_id = token_ids.sort(dim=-1)
    values, by_weight = values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return values, token_ids.gather(-1, by_weight)
