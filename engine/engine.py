"""The loop of the engine: schedule, execute, commit, for ever. One thread; no event loop, no torch.

`Engine` owns the scheduler; it checks requests at intake, and accounts for what every step did.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.api import (
    EngineStats,
    FinishReason,
    GenerateRequest,
    PlaceAccount,
    RequestRefusedError,
    StepSummary,
    TokenAccount,
    TokenDelta,
)
from engine.plan import StepPlan, StepResult
from engine.scheduler import Output, Scheduler
from engine.sequence import Sequence

STEPS_KEPT = 4096
"""Summaries kept for whoever asks what the engine has been doing; about a minute or more of steps."""


class Executor(Protocol):
    """Who computes a step: in this process, on several ranks, or not at all (simulated)."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute all chunks of `plan`; blocks until the sampled tokens are known."""

    def close(self) -> None:
        """Give back memory and processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What was found out about the model: bounds for requests, the tokens that end a sequence, and sizes."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    weight_bytes: int
    kv_bytes_per_token: int


class Engine:
    """Schedule, execute, commit. All methods but `check_request` and the snapshots belong to the engine thread."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, facts: ModelFacts, max_num_seqs: int, clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._facts = facts
        self._max_num_seqs = max_num_seqs
        self._clock = clock
        self._left: list[str] = []
        self._steps: deque[StepSummary] = deque(maxlen=STEPS_KEPT)
        self._num_steps = 0
        self._num_requests = 0
        self._num_sequences = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._num_padding_tokens = 0

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def step(self) -> list[Output]:
        """One turn of the belt. Finished sequences have left when this returns; waiting ones join in the next turn."""
        started = self._clock()
        plan = self._scheduler.schedule()
        scheduled = self._clock()
        result = self._executor.execute(plan)
        executed = self._clock()
        outputs = self._scheduler.commit(plan, result)
        self._account(plan, result, outputs, (started, scheduled, executed, self._clock()))
        return outputs

    def check_request(self, request: GenerateRequest) -> None:
        """Raise RequestRefusedError if `request` can never run here. Reads nothing that changes."""
        prompt, sampling = request.prompt_token_ids, request.sampling
        if not prompt:
            raise RequestRefusedError("the prompt is empty; it must have at least one token")
        total = len(prompt) + sampling.max_tokens
        if total > self._facts.max_model_len:
            raise RequestRefusedError(
                f"{len(prompt)} prompt tokens and max_tokens {sampling.max_tokens} make {total}, "
                f"over the model's {self._facts.max_model_len}; shorten the prompt or lower max_tokens"
            )
        resumed = max(request.choices, key=lambda choice: len(choice.resumed_token_ids)).resumed_token_ids
        if resumed and len(resumed) >= sampling.max_tokens:
            raise RequestRefusedError(
                f"{len(resumed)} resumed tokens leave nothing of max_tokens {sampling.max_tokens}"
            )
        known = (
            *prompt,
            *(token for choice in request.choices for token in choice.resumed_token_ids),
            *sampling.stop_token_ids,
        )
        if min(known) < 0 or max(known) >= self._facts.vocab_size:
            raise RequestRefusedError(f"token ids must lie in 0..{self._facts.vocab_size - 1}")

    def add(self, request: GenerateRequest) -> None:
        """Let a checked request wait for its slot."""
        self._num_requests += 1
        self._num_prompt_tokens += len(request.prompt_token_ids)
        for choice in request.choices:
            self._num_sequences += 1
            sequence = Sequence(
                request, arrival=self._num_sequences, eos_token_ids=self._facts.eos_token_ids, choice=choice
            )
            self._scheduler.add(sequence)

    def cancel(self, request_id: str, index: int | None = None) -> list[Output]:
        """End the open sequences of a request, or that of one choice, now. They may just have ended by themselves."""
        return [
            self._end(sequence, FinishReason.CANCELLED)
            for sequence in self._scheduler.open_sequences()
            if sequence.request_id == request_id and index in (None, sequence.index)
        ]

    def hand_back(self) -> list[Output]:
        """End every open request, for another engine to go on with."""
        return [self._end(sequence, FinishReason.HANDED_BACK) for sequence in self._scheduler.open_sequences()]

    def _end(self, sequence: Sequence, reason: FinishReason) -> Output:
        self._scheduler.finish(sequence, reason)
        self._left.append(sequence.sequence_id)
        delta = TokenDelta(index=sequence.index, finish_reason=reason)
        return Output(request_id=sequence.request_id, delta=delta)

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks, slots and sequences do not add up."""
        self._scheduler.check_integrity()

    def close(self) -> None:
        """Give back what the executor holds."""
        self._executor.close()

    def stats(self) -> EngineStats:
        """The present counts; may be read from another thread, where it can be one step old."""
        pool = self._scheduler.pool
        return EngineStats(
            max_num_seqs=self._max_num_seqs,
            max_model_len=self._facts.max_model_len,
            weight_bytes=self._facts.weight_bytes,
            kv_bytes_per_token=self._facts.kv_bytes_per_token,
            block_size=pool.block_size,
            num_blocks=pool.num_blocks,
            num_used_blocks=pool.num_used,
            num_cached_blocks=0,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_steps=self._num_steps,
            num_requests=self._num_requests,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=0,
            num_generated_tokens=self._num_generated_tokens,
            num_recomputed_tokens=0,
            num_padding_tokens=self._num_padding_tokens,
            num_idle_slot_steps=0,
            num_preemptions=self._scheduler.num_preemptions,
        )

    def recent_steps(self) -> list[StepSummary]:
        """The last `STEPS_KEPT` steps, oldest first; may be read from another thread."""
        return list(self._steps)

    def _account(
        self, plan: StepPlan, result: StepResult, outputs: list[Output], times: tuple[float, float, float, float]
    ) -> None:
        started, scheduled, executed, committed = times
        num_decode = sum(chunk.samples and len(chunk.token_ids) == 1 for chunk in plan.chunks)
        self._num_steps += 1
        self._num_generated_tokens += len(outputs)
        self._num_padding_tokens += result.num_padding_tokens
        self._left.extend(output.request_id for output in outputs if output.delta.finish_reason is not None)
        self._steps.append(
            StepSummary(
                step=self._num_steps,
                joined=plan.joined,
                left=tuple(self._left),
                preempted=plan.preempted,
                num_running=self._scheduler.num_running,
                num_waiting=self._scheduler.num_waiting,
                num_idle_slots=0,
                tokens=TokenAccount(
                    budget=plan.num_tokens,
                    decode=num_decode,
                    new_prefill=plan.num_tokens - num_decode,
                    recomputed=0,
                    speculative_rejected=0,
                    graph_padding=0,
                    unused=0,
                ),
                places=PlaceAccount(total=0, live=0, reserved=0, tail_waste=0, cached_idle=0, free=0),
                schedule_s=scheduled - started,
                execute_s=executed - scheduled,
                commit_s=committed - executed,
            )
        )
        self._left.clear()
