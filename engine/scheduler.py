"""Which sequences compute how many tokens in the next step. No torch, no clock.

One rule: every sequence has known tokens and computed tokens, and a step lets computed catch up with known under one
token budget. Chunked prefill, recompute after a preemption and resumed streams all follow from it.

    running   is ordered by lane, then arrival. Every running sequence that lacks a single token (it decodes) has that
              token of the budget set aside before any prefill is cut to size, so a long prompt never stops a stream.
    victim    when a sequence needs a block and none is free, the *last* of `running` gives up its blocks and slot and
              waits again. As sequences are planned in order, the victim has not been planned yet: nothing is undone.
              The first of `running` is never a victim of another, so somebody always advances: no livelock.
    waiting   is ordered the same way; a preempted sequence keeps its arrival, hence its place. The head joins when
              there is a slot, budget, and memory for *all* its known tokens, which are reserved at once, so that
              half-done prefills never compete for blocks. If the head does not fit, nobody behind it passes: what
              fits later is decided by age, not by size.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from engine.api import FinishReason, TokenDelta
from engine.block_pool import BlockPool
from engine.plan import Chunk, StepPlan, StepResult
from engine.sequence import Sequence, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a step, or a cancel, has to say to one request."""

    request_id: str
    delta: TokenDelta


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.lane, sequence.arrival


class Scheduler:
    """Owner of all sequences and of the block pool. Called from one thread: add, cancel, schedule, commit."""

    def __init__(self, pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._sequences: dict[str, Sequence] = {}
        self._running: list[Sequence] = []
        self._waiting: list[tuple[int, int, Sequence]] = []  # a heap; ended sequences are dropped when they surface
        self.num_preemptions = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._sequences) - len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def find(self, sequence_id: str) -> Sequence | None:
        """The open sequence of this name."""
        return self._sequences.get(sequence_id)

    def open_sequences(self) -> list[Sequence]:
        """All sequences that have not ended."""
        return list(self._sequences.values())

    def add(self, sequence: Sequence) -> None:
        """Let a new sequence wait. Whether it can ever fit has been checked at intake."""
        assert sequence.sequence_id not in self._sequences, f"{sequence.sequence_id} is already here"
        self._sequences[sequence.sequence_id] = sequence
        self._enqueue(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence at any point of its life and take back all it holds."""
        if sequence.status is Status.RUNNING:
            self._running.remove(sequence)
        sequence.move_to(Status.FINISHED)
        sequence.finish_reason = reason
        self.pool.release(sequence.block_ids)
        del self._sequences[sequence.sequence_id]

    def schedule(self) -> StepPlan:
        """Choose the next batch; allocates the blocks that it writes to."""
        num_decoding = sum(sequence.num_uncomputed == 1 for sequence in self._running)
        prefill_budget = self._max_num_batched_tokens - num_decoding
        chunks: list[Chunk] = []
        preempted: list[str] = []
        for sequence in self._each_running():
            num_tokens = 1 if sequence.num_uncomputed == 1 else min(sequence.num_uncomputed, prefill_budget)
            if num_tokens == 0 or not self._make_room(sequence, sequence.num_computed + num_tokens, preempted):
                continue
            if sequence.num_uncomputed > 1:
                prefill_budget -= num_tokens
            chunks.append(_chunk(sequence, num_tokens))
        joined: list[str] = []
        while prefill_budget > 0 and not preempted and (newcomer := self._admit()):
            num_tokens = min(newcomer.num_uncomputed, prefill_budget)
            prefill_budget -= num_tokens
            chunks.append(_chunk(newcomer, num_tokens))
            joined.append(newcomer.sequence_id)
        return StepPlan(chunks=tuple(chunks), joined=tuple(joined), preempted=tuple(preempted))

    def commit(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """Book what was computed; sequences that are done leave at once."""
        sampled = iter(result.token_ids)
        outputs = []
        for chunk in plan.chunks:
            sequence = self._sequences[chunk.sequence_id]
            sequence.num_computed = chunk.end
            if not chunk.samples:
                continue
            token_id = next(sampled)
            sequence.append(token_id)
            delta = TokenDelta(index=sequence.index, token_ids=(token_id,), finish_reason=sequence.finish_reason)
            outputs.append(Output(request_id=sequence.request_id, delta=delta))
            if sequence.finish_reason is not None:
                self.finish(sequence, sequence.finish_reason)
        return outputs

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks and sequences do not add up, or if something idle holds a block."""
        self.pool.check_integrity(sequence.block_ids for sequence in self._sequences.values())
        for sequence in self._sequences.values():
            running = sequence.status is Status.RUNNING
            assert running == (sequence in self._running), f"{sequence.sequence_id} is {sequence.status}"
            assert running or not sequence.block_ids, f"{sequence.sequence_id} holds blocks but no slot"
        assert len(self._running) <= self._max_num_seqs
        if not self._sequences:
            assert self.pool.num_used == 0, f"{self.pool.num_used} blocks are held by nobody"

    def _each_running(self) -> Iterator[Sequence]:
        """Running sequences in order, while preemptions shorten the list from its end."""
        index = 0
        while index < len(self._running):
            yield self._running[index]
            index += 1

    def _make_room(self, sequence: Sequence, num_tokens: int, preempted: list[str]) -> bool:
        """Give `sequence` blocks for `num_tokens`, at the cost of younger ones; False if it had to step back itself."""
        while not self.pool.grow(sequence.block_ids, num_tokens):
            victim = self._running[-1]
            self._preempt(victim)
            preempted.append(victim.sequence_id)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.pop()
        sequence.move_to(Status.WAITING)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.pool.release(sequence.block_ids)
        self._enqueue(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        heapq.heappush(self._waiting, (*_order(sequence), sequence))

    def _admit(self) -> Sequence | None:
        """Let the head of the queue join, if there is a slot and memory for all its known tokens."""
        while self._waiting and self._waiting[0][2].status is Status.FINISHED:
            heapq.heappop(self._waiting)
        if not self._waiting or len(self._running) == self._max_num_seqs:
            return None
        head = self._waiting[0][2]
        if not self.pool.grow(head.block_ids, head.num_known):
            return None
        heapq.heappop(self._waiting)
        head.move_to(Status.RUNNING)
        bisect.insort(self._running, head, key=_order)
        return head


def _chunk(sequence: Sequence, num_tokens: int) -> Chunk:
    start, end = sequence.num_computed, sequence.num_computed + num_tokens
    sampling = sequence.request.sampling
    too_early = sequence.num_output < sampling.min_tokens
    return Chunk(
        sequence_id=sequence.sequence_id,
        token_ids=tuple(sequence.token_ids[start:end]),
        start=start,
        block_ids=tuple(sequence.block_ids),
        samples=end == sequence.num_known,
        sampling=sampling,
        seed=sequence.seed,
        banned_token_ids=(*sequence.eos_token_ids, *sampling.stop_token_ids) if too_early else (),
    )
