"""An executor without a model: the scheduler, the block pool and the service around them are the real ones.

It costs the time that a cost model says, on a clock of the caller's choice, and "samples" tokens that depend on
(seed, position, last token) alone, as real sampling does, so that interleaving must not change a stream. There are no
logits, so bias and penalties change nothing; tokens that are banned are not taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from engine.api import Logprob, PositionLogprobs
from engine.config import StepCost
from engine.plan import Chunk, StepPlan, StepResult
from engine.randomness import uniform


class SimulatedExecutor:
    """`sleep(seconds)` lets the time of a step pass: `time.sleep`, or the advance of a virtual clock."""

    def __init__(self, *, vocab_size: int, cost: StepCost, sleep: Callable[[float], None]) -> None:
        self._vocab_size = vocab_size
        self._cost = cost
        self._sleep = sleep

    def execute(self, plan: StepPlan) -> StepResult:
        cost = self._cost
        self._sleep(cost.base_s + cost.per_token_s * plan.num_tokens + cost.per_seq_s * len(plan.chunks))
        sampling = [chunk for chunk in plan.chunks if chunk.samples]
        token_ids = [self._sample(chunk) for chunk in sampling]
        return StepResult(
            token_ids=token_ids,
            logprobs=tuple(
                None if chunk.sampling.logprobs is None else self._score(token_id, chunk.sampling.logprobs)
                for chunk, token_id in zip(sampling, token_ids, strict=True)
            ),
            scored=tuple(
                tuple(self._score(token_id, chunk.sampling.prompt_logprobs or 0) for token_id in chunk.scored_token_ids)
                for chunk in plan.chunks
                if chunk.scored_token_ids
            ),
        )

    def close(self) -> None:
        """Nothing is held."""

    def _sample(self, chunk: Chunk) -> int:
        token_id = int(uniform(chunk.seed ^ chunk.token_ids[-1], chunk.end) * self._vocab_size)
        while token_id in chunk.banned_token_ids:
            token_id = (token_id + 1) % self._vocab_size
        return token_id

    def _score(self, token_id: int, num_top: int) -> PositionLogprobs:
        """Every token is as likely as any other here."""
        logprob = -math.log(self._vocab_size)
        top = tuple(Logprob(token_id=each, logprob=logprob) for each in range(num_top))
        return PositionLogprobs(chosen=Logprob(token_id=token_id, logprob=logprob), top=top)
