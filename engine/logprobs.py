"""Log-probabilities of tokens, chosen and likeliest, for clients that want to see them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from engine.api import Logprob, PositionLogprobs

LEAST = -9999.0
"""What is said of a token that cannot be chosen: JSON has no infinity, and OpenAI's interface says it so."""


def score(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[PositionLogprobs]:
    """The log-probability of one token of each row, and of the `num_top` likeliest; of equals, lower ids come first.

    logits: [rows, vocab], float32.
    """
    scores = logits.log_softmax(dim=-1)
    chosen = scores.gather(1, torch.tensor(token_ids, device=scores.device)[:, None])[:, 0].tolist()
    tops = [_likeliest(row, num_top) for row in scores] if num_top else [()] * len(token_ids)
    return [
        PositionLogprobs(chosen=_logprob(token_id, value), top=top)
        for token_id, value, top in zip(token_ids, chosen, tops, strict=True)
    ]


def _likeliest(scores: torch.Tensor, num_top: int) -> tuple[Logprob, ...]:
    """scores: [vocab]."""
    least = scores.topk(min(num_top, len(scores))).values[-1]
    ids = (scores >= least).nonzero()[:, 0].tolist()  # more than wanted where some are equal; in order of id
    pairs = zip(ids, scores[ids].tolist(), strict=True)
    best = sorted((_logprob(token_id, value) for token_id, value in pairs), key=lambda each: -each.logprob)
    return tuple(best[:num_top])


def _logprob(token_id: int, value: float) -> Logprob:
    return Logprob(token_id=token_id, logprob=LEAST if math.isnan(value) else max(value, LEAST))
