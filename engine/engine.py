"""The loop of the engine: schedule, execute, commit, for ever. One thread; no event loop, no torch.

`Engine` checks requests at intake, ends those whose time is over, and accounts for what every step did.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from engine.account import place_account, token_account
from engine.api import (
    EngineStats,
    Explanation,
    FinishReason,
    GenerateRequest,
    StepSummary,
    TokenDelta,
)
from engine.intake import ModelFacts, refuse_impossible
from engine.plan import StepPlan, StepResult
from engine.records import Added, Cancelled, Ended, Event, HandedBack, Step, StepTimes
from engine.scheduler import Output, Scheduler
from engine.sequence import Sequence, sequence_id

STEPS_KEPT = 4096
"""Summaries kept for whoever asks what the engine has been doing; about a minute or more of steps."""


class Executor(Protocol):
    """Who computes a step: in this process, on several ranks, or not at all (simulated)."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute all chunks of `plan`; blocks until the sampled tokens are known."""

    def close(self) -> None:
        """Give back memory and processes."""


class Recorder(Protocol):
    """Who writes down what the engine is told, and what it does. Never raises."""

    def note(self, event: Event) -> None:
        """Something came in between two steps."""

    def step(self, step: Step) -> None:
        """A step is over."""

    def close(self) -> None:
        """Nothing more will come."""


@dataclass(frozen=True, slots=True, order=True)
class _Deadline:
    """When the sequences with these arrival numbers have to have ended. Another request may have the name by then."""

    due_s: float
    first_arrival: int
    last_arrival: int
    request_id: str


class Engine:
    """Schedule, execute, commit. All methods but `check_request` and the snapshots belong to the engine thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        facts: ModelFacts,
        clock: Callable[[], float],
        recorder: Recorder | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._roster = scheduler.roster
        self._memory = scheduler.roster.memory
        self._executor = executor
        self._facts = facts
        self._clock = clock
        self._recorder = recorder
        self._deadlines: list[_Deadline] = []
        self._cut_off: list[Ended] = []
        self._steps: deque[StepSummary] = deque(maxlen=STEPS_KEPT)
        self._num_sequences = 0
        self._num_steps = 0
        self._num_requests = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._num_recomputed_tokens = 0
        self._num_padding_tokens = 0
        self._num_idle_slot_steps = 0

    @property
    def has_work(self) -> bool:
        return self._roster.num_open > 0

    @property
    def delay_s(self) -> float:
        """For how long a step would do nothing unless another request comes; 0: there is something to do."""
        now = self._clock()
        until_due = self._deadlines[0].due_s - now if self._deadlines else self._roster.delay_s(now)
        return max(0.0, min(until_due, self._roster.delay_s(now)))

    def step(self) -> list[Output]:
        """One turn of the belt. Finished sequences have left when this returns; waiting ones join in the next turn."""
        started = self._clock()
        outputs = self._end_overdue(started)
        plan = self._scheduler.schedule(started)
        scheduled = self._clock()
        result = self._executor.execute(plan) if plan.chunks else StepResult(token_ids=[])
        executed = self._clock()
        committed = self._scheduler.commit(plan, result)
        times = StepTimes(started=started, scheduled=scheduled, executed=executed, committed=self._clock())
        self._account(plan, result, committed, times)
        return outputs + committed

    def check_request(self, request: GenerateRequest) -> None:
        """Raise RequestRefusedError if `request` can never run here. Reads nothing that changes."""
        refuse_impossible(request, self._facts, kv_tokens=self._memory.num_tokens)

    def add(self, request: GenerateRequest) -> None:
        """Let a checked request wait for its slots."""
        now = self._clock()
        if self._recorder is not None:
            self._recorder.note(Added(at_s=now, request=request))
        self._num_requests += 1
        self._num_prompt_tokens += len(request.prompt_token_ids)
        choices = []
        for choice in request.choices:
            self._num_sequences += 1
            choices.append(
                Sequence(
                    request,
                    choice,
                    arrival=self._num_sequences,
                    eos_token_ids=self._facts.eos_token_ids,
                    arrived_s=now,
                )
            )
        self._roster.add(choices)
        if request.timeout_s is not None:
            due_s = now + request.timeout_s
            due = _Deadline(due_s, choices[0].arrival, choices[-1].arrival, request.request_id)
            heapq.heappush(self._deadlines, due)

    def cancel(self, request_id: str, index: int | None = None) -> list[Output]:
        """End the open sequences of a request, or that of one choice, now. They may just have ended by themselves."""
        if self._recorder is not None:
            self._recorder.note(Cancelled(at_s=self._clock(), request_id=request_id, index=index))
        found = self._roster.of_request(request_id)
        return self._end([each for each in found if index in (None, each.index)], FinishReason.CANCELLED)

    def hand_back(self) -> list[Output]:
        """End every open request, for another engine to go on with."""
        sequences = self._roster.sequences
        if self._recorder is not None:
            names = tuple(each.sequence_id for each in sequences)
            self._recorder.note(HandedBack(at_s=self._clock(), sequence_ids=names))
        return self._end(sequences, FinishReason.HANDED_BACK)

    def explain(self, request_id: str) -> list[Explanation]:
        """See `engine.api.Engine.explain`."""
        return [self._roster.explain(each) for each in self._roster.of_job(request_id)]

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks, slots and sequences do not add up."""
        self._roster.check_integrity()

    def close(self) -> None:
        """Give back what the executor holds, and end the record."""
        self._executor.close()
        if self._recorder is not None:
            self._recorder.close()

    def stats(self) -> EngineStats:
        """The present counts; may be read from another thread, where it can be one step old."""
        pool = self._memory.pool
        num_running, num_open = len(self._roster.running), self._roster.num_open
        return EngineStats(
            max_num_seqs=self._scheduler.limits.max_num_seqs,
            max_model_len=self._facts.max_model_len,
            weight_bytes=self._facts.weight_bytes,
            kv_bytes_per_token=self._facts.kv_bytes_per_token,
            block_size=pool.block_size,
            num_blocks=pool.num_blocks,
            num_used_blocks=pool.num_used,
            num_cached_blocks=pool.num_idle,
            num_running=num_running,
            num_waiting=max(0, num_open - num_running),
            num_steps=self._num_steps,
            num_requests=self._num_requests,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._memory.num_found_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_recomputed_tokens=self._num_recomputed_tokens,
            num_padding_tokens=self._num_padding_tokens,
            num_preemptions=self._roster.num_preemptions,
            num_idle_slot_steps=self._num_idle_slot_steps,
        )

    def recent_steps(self) -> list[StepSummary]:
        """The last `STEPS_KEPT` steps, oldest first; may be read from another thread."""
        return list(self._steps)

    def _end_overdue(self, now: float) -> list[Output]:
        outputs = []
        while self._deadlines and self._deadlines[0].due_s <= now:
            due = heapq.heappop(self._deadlines)
            choices = self._roster.of_request(due.request_id)
            late = [each for each in choices if due.first_arrival <= each.arrival <= due.last_arrival]
            outputs += self._end(late, FinishReason.DEADLINE)
        return outputs

    def _end(self, sequences: list[Sequence], reason: FinishReason) -> list[Output]:
        outputs = []
        for sequence in sequences:
            self._roster.finish(sequence, reason)
            self._cut_off.append(Ended(sequence_id=sequence.sequence_id, reason=reason))
            delta = TokenDelta(index=sequence.index, finish_reason=reason)
            outputs.append(Output(request_id=sequence.request_id, delta=delta))
        return outputs

    def _account(self, plan: StepPlan, result: StepResult, outputs: list[Output], times: StepTimes) -> None:
        num_running = len(self._roster.running)
        num_idle = self._roster.batching.num_idle_slots(num_running)
        self._num_steps += 1
        self._num_generated_tokens += sum(len(output.delta.token_ids) for output in outputs)
        self._num_recomputed_tokens += plan.num_recomputed_tokens
        self._num_padding_tokens += result.num_padding_tokens
        self._num_idle_slot_steps += num_idle
        cut_off, ended = tuple(self._cut_off), tuple(_ended(outputs))
        self._cut_off.clear()
        summary = StepSummary(
            step=self._num_steps,
            joined=plan.joined,
            left=tuple(each.sequence_id for each in cut_off + ended),
            preempted=plan.preempted,
            num_running=num_running,
            num_waiting=self._roster.num_open - num_running,
            num_idle_slots=num_idle,
            tokens=token_account(plan, self._scheduler.limits.max_num_batched_tokens, result.num_padding_tokens),
            places=place_account(self._memory.pool, self._roster.running),
            schedule_s=times.scheduled - times.started,
            execute_s=times.executed - times.scheduled,
            commit_s=times.committed - times.executed,
        )
        self._steps.append(summary)
        if self._recorder is not None:
            step = Step(plan=plan, result=result, summary=summary, cut_off=cut_off, ended=ended, times=times)
            self._recorder.step(step)


def _ended(outputs: list[Output]) -> Iterator[Ended]:
    for output in outputs:
        if (reason := output.delta.finish_reason) is not None:
            yield Ended(sequence_id=sequence_id(output.request_id, output.delta.index), reason=reason)
