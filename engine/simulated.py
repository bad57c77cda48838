"""An executor without a model: the scheduler, the block pool and the service around them are the real ones.

It costs the time that a cost model says, on a clock of the caller's choice, and "samples" tokens that depend on
(seed, position, last token) alone, as real sampling does, so that interleaving must not change a stream.
"""

from __future__ import annotations

from collections.abc import Callable

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
        return StepResult(token_ids=[self._sample(chunk) for chunk in plan.chunks if chunk.samples])

    def close(self) -> None:
        """Nothing is held."""

    def _sample(self, chunk: Chunk) -> int:
        token_id = int(uniform(chunk.seed ^ chunk.token_ids[-1], chunk.end) * self._vocab_size)
        while token_id in chunk.banned_token_ids:
            token_id = (token_id + 1) % self._vocab_size
        return token_id
