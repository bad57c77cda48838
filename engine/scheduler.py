"""Which sequences compute how many tokens in the next step. No torch, no clock.

One rule: every sequence has known tokens and computed tokens, and a step lets computed catch up with known under one
token budget. Chunked prefill, prefix hits, recompute after a preemption and resumed streams all follow from it.

A step is planned in this order:

    make way   a waiting sequence of a higher lane takes slot and memory from running ones of lower lanes, if it cannot
               join otherwise and what they hold suffices.
    decode     every running sequence that lacks a single token computes it. If it needs a block and none is to be had,
               a *later* one of `running`, which is ordered by lane and arrival, steps back; where no later one may be
               taken, it steps back itself. As sequences are planned in order, nothing planned is undone.
    prefill    the rest of the budget, or `max_prefill_tokens_with_decodes` of it, goes to the most urgent prompts (see
               `engine.waiting`), whether they run already or join only now. Whoever joins gets memory for all tokens it
               knows, and computes something at once. If the head of the queue does not fit, nobody passes it; what
               passes whom is decided by urgency, not by size.

Somebody always advances. A sequence that has been preempted twice without a block's worth of output between is
protected: it joins with memory for one more block of output, so it needs nobody's, and nobody may take its own. Hence
every sequence gets somewhere at least on its third run, and none is preempted more than 2 * (1 + output // block_size)
times.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.api import FinishReason, PositionLogprobs, TokenDelta
from engine.batching import batching_for
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.hold import Hold, Obstacle
from engine.kv_memory import Found, KvMemory, must_score_prompt
from engine.plan import BlockCopy, Chunk, Preemption, PreemptionCause, StepPlan, StepResult
from engine.preemption import first_victim, victims_for
from engine.roster import Roster
from engine.sequence import Sequence
from engine.waiting import Head


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a step, or a cancel, has to say to one request."""

    request_id: str
    delta: TokenDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Bounds of every step; see `engine.config.EngineConfig`."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens_with_decodes: int | None = None

    def prefill_tokens(self, num_decoding: int) -> int:
        """What is left for prompts beside so many decodes."""
        rest = self.max_num_batched_tokens - num_decoding
        if num_decoding == 0 or self.max_prefill_tokens_with_decodes is None:
            return rest
        return min(rest, self.max_prefill_tokens_with_decodes)


@dataclass(frozen=True, slots=True)
class _Newcomer:
    """The head of the queue, which may join, and what of it is in memory already."""

    head: Head
    found: Found


@dataclass(slots=True, kw_only=True)
class _Draft:
    """A plan in the making. `newcomer`: who joins next; `obstacle`: why nobody more may join in this step."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    joined: list[str] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    num_decode: int = 0
    num_recomputed: int = 0
    newcomer: _Newcomer | None = None
    obstacle: Obstacle | None = None

    def plan(self) -> StepPlan:
        return StepPlan(
            chunks=tuple(self.chunks),
            copies=tuple(self.copies),
            joined=tuple(self.joined),
            preemptions=tuple(self.preemptions),
            obstacle=self.obstacle,
            num_decode_tokens=self.num_decode,
            num_recomputed_tokens=self.num_recomputed,
        )


class Scheduler:
    """Plans steps, and books what they computed. Called from one thread, `schedule` and `commit` in turn."""

    def __init__(self, roster: Roster, limits: StepLimits) -> None:
        self.roster = roster
        self.limits = limits
        self._memory = roster.memory

    def schedule(self, now: float) -> StepPlan:
        """Choose the next batch, and give out the blocks that it writes to. `now` in seconds, on any clock."""
        self.roster.begin_step(now)
        draft = _Draft()
        self._make_way(draft)
        self._plan_decodes(draft)
        self._plan_prompts(draft)
        self.roster.end_step(draft.obstacle)
        return draft.plan()

    def commit(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """Book what was computed; sequences that are done leave at once."""
        token_ids, scored = iter(result.token_ids), iter(result.scored)
        logprobs = iter(result.logprobs or (None,) * len(result.token_ids))
        outputs = []
        for chunk in plan.chunks:
            sequence = self.roster.find(chunk.sequence_id)
            self.roster.computed(sequence, chunk.start, chunk.end)
            if chunk.scored_token_ids:
                sequence.prompt_logprobs[chunk.start : chunk.end] = next(scored)
            if chunk.samples:
                outputs.append(self._take_token(sequence, next(token_ids), next(logprobs)))
            elif sequence.request.sampling.max_tokens == 0 and not sequence.num_uncomputed:
                sequence.finish_reason = FinishReason.LENGTH
                outputs.append(_output(sequence))
            if sequence.finish_reason is not None:
                self.roster.finish(sequence, sequence.finish_reason)
        return outputs

    def _make_way(self, draft: _Draft) -> None:
        """Let heads of the queue join at the cost of lower lanes, as many as can then compute something."""
        roster = self.roster
        budget = self.limits.prefill_tokens(sum(sequence.is_decoding for sequence in roster.running))
        while budget > 0 and (head := roster.claimant()) is not None:
            prey = [each for each in roster.running if each.lane > head.sequence.request.lane]
            found = self._memory.find(head.sequence)
            obstacle = self._obstacle_to(head.sequence, found) if prey else None
            if obstacle is None or obstacle.hold is Hold.BATCH:
                return
            victims = victims_for(
                prey,
                self._memory,
                num_blocks=obstacle.num_needed + obstacle.num_kept_free - obstacle.num_available,
                num_slots=int(obstacle.hold is Hold.SLOT),
                kept=frozenset(found.shared),
            )
            for victim in victims:
                self._preempt(victim, draft, PreemptionCause.LANE, head.sequence)
            found = self._memory.find(head.sequence)  # what the victims had is not held any more
            if self._obstacle_to(head.sequence, found) is not None:
                return
            self._join(_Newcomer(head, found), draft)
            budget -= head.sequence.num_uncomputed

    def _plan_decodes(self, draft: _Draft) -> None:
        running = self.roster.running
        index = 0
        while index < len(running):
            sequence = running[index]
            if not sequence.is_decoding:
                index += 1
            elif self._make_room(sequence, index, draft):
                self._serve(sequence, 1, draft)
                index += 1
            # else it has stepped back, and the next one stands in its place

    def _plan_prompts(self, draft: _Draft) -> None:
        roster = self.roster
        budget = self.limits.prefill_tokens(len(draft.chunks))
        residents = [Head(roster.urgency(each), each) for each in roster.running if not each.is_decoding]
        residents.sort(reverse=True)
        while budget > 0:
            newcomer = self._next_to_join(draft)
            if newcomer is not None and (not residents or newcomer.head < residents[-1]):
                self._join(newcomer, draft)
                budget -= self._serve(newcomer.head.sequence, budget, draft)
            elif residents:
                budget -= self._serve(residents.pop().sequence, budget, draft)
            else:
                return
        for resident in residents:
            resident.sequence.waits[Hold.BUDGET] += 1
        head = roster.head()
        if head is not None and draft.obstacle is None:
            draft.obstacle = Obstacle(hold=Hold.BUDGET, sequence_id=head.sequence.sequence_id)

    def _next_to_join(self, draft: _Draft) -> _Newcomer | None:
        """The head of the queue if it can join now. Asked again and again, works it out once."""
        if draft.newcomer is None and draft.obstacle is None and (head := self.roster.head()) is not None:
            found = self._memory.find(head.sequence)
            draft.obstacle = self._obstacle_to(head.sequence, found)
            draft.newcomer = None if draft.obstacle else _Newcomer(head, found)
        return draft.newcomer

    def _obstacle_to(self, sequence: Sequence, found: Found) -> Obstacle | None:
        """What keeps the head of the queue from joining."""
        running = self.roster.running
        is_full = len(running) == self.limits.max_num_seqs
        rivals = [each for each in running if each.lane <= sequence.request.lane]
        num_needed = self._memory.blocks_needed(sequence, found)
        num_kept_free = self._memory.room_to_grow(rivals) if rivals else 0
        num_available = self._memory.pool.num_available
        if not self.roster.batching.has_seat:
            hold = Hold.BATCH
        elif is_full:
            hold = Hold.SLOT
        elif num_needed + num_kept_free > num_available:
            hold = Hold.BLOCKS
        else:
            return None
        return Obstacle(
            hold=hold,
            sequence_id=sequence.sequence_id,
            num_needed=num_needed,
            num_available=num_available,
            num_kept_free=num_kept_free,
        )

    def _make_room(self, sequence: Sequence, index: int, draft: _Draft) -> bool:
        """Give `sequence`, at `index`, blocks for what it knows; False if it had to step back itself."""
        while not self._memory.grow(sequence):
            victim = first_victim(self.roster.running[index + 1 :], self._memory) or sequence
            self._preempt(victim, draft, PreemptionCause.MEMORY, sequence)
            if victim is sequence:
                return False
        return True

    def _serve(self, sequence: Sequence, limit: int, draft: _Draft) -> int:
        """Let it compute up to `limit` tokens; returns how many."""
        num_tokens = min(sequence.num_uncomputed, limit)
        num_new = self.roster.serve(sequence, num_tokens)
        draft.num_recomputed += num_tokens - num_new
        if sequence.is_decoding and sequence.num_computed >= sequence.num_prompt:
            draft.num_decode += num_new
        draft.chunks.append(_chunk(sequence, num_tokens))
        return num_tokens

    def _join(self, newcomer: _Newcomer, draft: _Draft) -> None:
        copy = self.roster.join(newcomer.head, newcomer.found)
        if copy is not None:
            draft.copies.append(copy)
        draft.joined.append(newcomer.head.sequence.sequence_id)
        draft.newcomer = None

    def _preempt(self, sequence: Sequence, draft: _Draft, cause: PreemptionCause, taker: Sequence) -> None:
        draft.copies = [copy for copy in draft.copies if copy.target not in sequence.block_ids]
        preemption = Preemption(
            sequence_id=sequence.sequence_id,
            cause=cause,
            in_favour_of=taker.sequence_id,
            lane=sequence.lane,
            num_lost_tokens=self._memory.loss(sequence),
            num_blocks=len(sequence.block_ids),
        )
        self.roster.preempt(sequence)
        draft.preemptions.append(preemption)
        draft.obstacle = Obstacle(hold=Hold.PREEMPTION, sequence_id=sequence.sequence_id)

    def _take_token(self, sequence: Sequence, token_id: int, logprobs: PositionLogprobs | None) -> Output:
        sequence.append(token_id)
        if sequence.num_output - sequence.output_at_join >= self._memory.pool.block_size:
            sequence.preemptions_in_a_row = 0
        if sequence.num_known > self._memory.num_tokens and sequence.finish_reason is None:
            sequence.finish_reason = FinishReason.LENGTH  # it has all the memory there is
        return _output(sequence, (token_id,), () if logprobs is None else (logprobs,))


def build_scheduler(config: EngineConfig, num_blocks: int) -> Scheduler:
    """The scheduler that `config` asks for, over a pool of `num_blocks`."""
    memory = KvMemory(
        BlockPool(num_blocks, config.block_size), prefix_cache=config.prefix_cache, watermark=config.watermark
    )
    batching = batching_for(
        config.batching,
        max_batch_size=config.max_batch_size or config.max_num_seqs,
        max_delay_s=config.max_delay_ms / 1000,
    )
    limits = StepLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_prefill_tokens_with_decodes=config.max_prefill_tokens_with_decodes,
    )
    return Scheduler(Roster(memory, batching, config.aging_steps), limits)


def _output(sequence: Sequence, token_ids: tuple[int, ...] = (), logprobs: tuple[PositionLogprobs, ...] = ()) -> Output:
    """What the client is told now; the first time also what concerns the prompt."""
    tells_prompt = not sequence.told and sequence.forked_from is None
    sequence.told = True
    delta = TokenDelta(
        index=sequence.index,
        token_ids=token_ids,
        finish_reason=sequence.finish_reason,
        logprobs=logprobs,
        prompt_logprobs=tuple(sequence.prompt_logprobs) if tells_prompt else (),
        num_cached_tokens=sequence.num_cached_tokens if tells_prompt else 0,
    )
    return Output(request_id=sequence.request_id, delta=delta)


def _chunk(sequence: Sequence, num_tokens: int) -> Chunk:
    start, end = sequence.num_computed, sequence.num_computed + num_tokens
    sampling = sequence.request.sampling
    samples = end == sequence.num_known and sampling.max_tokens > 0
    too_early = samples and sequence.num_output < sampling.min_tokens
    penalised = samples and sampling.has_penalties
    return Chunk(
        sequence_id=sequence.sequence_id,
        token_ids=tuple(sequence.token_ids[start:end]),
        start=start,
        block_ids=tuple(sequence.block_ids),
        samples=samples,
        sampling=sampling,
        seed=sequence.seed,
        banned_token_ids=(*sequence.eos_token_ids, *sampling.stop_token_ids) if too_early else (),
        prompt_token_ids=sequence.request.prompt_token_ids if penalised else (),
        output_token_ids=tuple(sequence.token_ids[sequence.num_prompt :]) if penalised else (),
        scored_token_ids=sequence.request.prompt_token_ids[start + 1 : end + 1] if must_score_prompt(sequence) else (),
    )
