"""The executor that computes in the engine's own process. (Several ranks: another class behind the same Protocol.)"""

from __future__ import annotations

from engine.plan import StepPlan, StepResult
from engine.runner import Runner


class InProcessExecutor:
    """`engine.engine.Executor` over a single runner."""

    def __init__(self, runner: Runner) -> None:
        self._runner: Runner | None = runner

    def execute(self, plan: StepPlan) -> StepResult:
        """See `engine.engine.Executor.execute`."""
        assert self._runner is not None, "the executor is closed"
        return self._runner.run(plan)

    def close(self) -> None:
        """Drop the weights and the cache."""
        self._runner = None
