"""What changes logits before a token is chosen: `engine.api.SamplingParams` says what, and in which order.

Each change touches a few numbers of one row. They are collected over all rows and made at once, so that a batch pays
for what its members ask for and for nothing else, and no row depends on another.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from engine.plan import Chunk


@dataclass(slots=True)
class _Spots:
    """Single logits of a batch, and a number for each. No logit is named twice."""

    rows: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)

    def put(self, row: int, token_ids: Collection[int], numbers: Collection[float]) -> None:
        self.rows += [row] * len(token_ids)
        self.token_ids += token_ids
        self.numbers += numbers

    def change(self, logits: torch.Tensor, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        """Replace the logits here by ``change(logits, numbers)``, both [spots]."""
        if self.rows:
            at = (torch.tensor(self.rows, device=logits.device), torch.tensor(self.token_ids, device=logits.device))
            numbers = torch.tensor(self.numbers, dtype=logits.dtype, device=logits.device)
            logits[at] = change(logits[at], numbers)


def adjust(logits: torch.Tensor, chunks: Sequence[Chunk]) -> None:
    """Change `logits` [chunks, vocab] in place: bias, penalties, and the tokens that must not be chosen."""
    biased, repeated, counted, banned = _Spots(), _Spots(), _Spots(), _Spots()
    for row, chunk in enumerate(chunks):
        sampling = chunk.sampling
        if sampling.logit_bias:
            bias = {each.token_id: each.bias for each in sampling.logit_bias}
            biased.put(row, bias.keys(), bias.values())
        if sampling.repetition_penalty != 1:
            held = {*chunk.prompt_token_ids, *chunk.output_token_ids}
            repeated.put(row, held, [sampling.repetition_penalty] * len(held))
        if sampling.presence_penalty or sampling.frequency_penalty:
            counts = Counter(chunk.output_token_ids)
            penalties = [sampling.presence_penalty + count * sampling.frequency_penalty for count in counts.values()]
            counted.put(row, counts.keys(), penalties)
        if chunk.banned_token_ids:
            ids = set(chunk.banned_token_ids)
            banned.put(row, ids, [-math.inf] * len(ids))
    biased.change(logits, lambda scores, bias: scores + bias)
    repeated.change(logits, lambda scores, penalty: (scores / penalty).where(scores > 0, scores * penalty))
    counted.change(logits, lambda scores, penalty: scores - penalty)
    banned.change(logits, lambda _, infinity: infinity)
