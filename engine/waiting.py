"""The waiting sequences, in the order in which they are to join.

First by lane; then those that have begun already, so that a stream that was interrupted goes on before others start;
then by the tenant's virtual time; then the shortest first. Two kinds of aging keep everybody moving:

    lane      for every `aging_steps` that a sequence has waited it stands one lane higher, beyond the highest lane if
              need be, so that no stream of newcomers can pass it for ever.
    length    a step of age counts as much as `TOKENS_PER_STEP_OF_AGE` tokens of length. All sequences age alike, so the
              order of any two by length never changes and a heap can hold them.

There is a heap for each lane and tenant. The head of the whole is the best of their heads: the search takes time in
the number of tenants that wait, not of sequences.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from engine.sequence import Sequence, Status
from engine.tenant_shares import TenantShares

TOKENS_PER_STEP_OF_AGE = 64
"""A prompt of 4,000 tokens lets shorter ones pass for about sixty steps, which is some seconds."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a sequence stands among those of its lane and tenant. `length` is in tokens, corrected for its age."""

    is_fresh: bool
    length: int
    arrival: int

    @classmethod
    def of(cls, sequence: Sequence, num_tokens: int) -> Place:
        """The place of a sequence that has `num_tokens` to compute before it can go on."""
        length = num_tokens + TOKENS_PER_STEP_OF_AGE * sequence.arrival_step
        return cls(is_fresh=sequence.num_output == 0, length=length, arrival=sequence.arrival)


@dataclass(frozen=True, slots=True, order=True)
class Urgency:
    """Who is served first among sequences that compute their prompts or wait to: the least."""

    lane: int
    is_fresh: bool
    clock: float
    length: int
    arrival: int

    @classmethod
    def of(cls, place: Place, lane: int, clock: float) -> Urgency:
        """`clock`: the tenant's virtual time."""
        return cls(lane=lane, is_fresh=place.is_fresh, clock=clock, length=place.length, arrival=place.arrival)


@dataclass(frozen=True, slots=True, order=True)
class Head:
    """The sequence whose turn it is to join."""

    urgency: Urgency
    sequence: Sequence


@dataclass(frozen=True, slots=True, order=True)
class _Entry:
    place: Place
    sequence: Sequence


class WaitingQueue:
    """Sequences with status WAITING that may join."""

    def __init__(self, shares: TenantShares, aging_steps: int) -> None:
        self._shares = shares
        self._aging_steps = aging_steps
        self._heaps: dict[int, dict[str, list[_Entry]]] = {}  # lane -> tenant -> its sequences
        self._members: dict[str, Sequence] = {}  # in the order in which they came

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._members

    def push(self, sequence: Sequence, step: int, num_tokens: int) -> None:
        """Let `sequence` wait from `step` on; it has about `num_tokens` to compute before it can go on."""
        sequence.queued_step = step
        heap = self._heaps.setdefault(sequence.request.lane, {}).setdefault(sequence.tenant, [])
        heapq.heappush(heap, _Entry(Place.of(sequence, num_tokens), sequence))
        self._members[sequence.sequence_id] = sequence

    def head(self, step: int) -> Head | None:
        """Who joins next; None if nobody waits."""
        return min((head for lane in self._heaps for head in self._heads(lane, step)), default=None)

    def claimant(self, step: int) -> Head | None:
        """Who joins next of the highest lane that a request here has *named*; None if nobody waits.

        Age lets a sequence join before others, but gives it no right to take what a lower lane has.
        """
        for lane in sorted(self._heaps):
            if heads := self._heads(lane, step):
                return min(heads)
        return None

    def _heads(self, lane: int, step: int) -> list[Head]:
        """The most urgent sequence of each tenant in a lane."""
        tenants = self._heaps[lane]
        heads = []
        for tenant, heap in list(tenants.items()):
            while heap and heap[0].sequence.status is Status.FINISHED:
                heapq.heappop(heap)
            if not heap:
                del tenants[tenant]
                continue
            urgency = Urgency.of(heap[0].place, self._lane(heap[0].sequence, step), self._shares.clock(tenant))
            heads.append(Head(urgency, heap[0].sequence))
        return heads

    def pop(self, head: Head, step: int) -> None:
        """The head joins, and keeps the lane that it has been lifted to."""
        sequence = head.sequence
        entry = heapq.heappop(self._heaps[sequence.request.lane][sequence.tenant])
        assert entry.sequence is sequence, "only the head may join"
        sequence.lane = max(0, self._lane(sequence, step))
        self.discard(sequence, step)

    def discard(self, sequence: Sequence, step: int) -> None:
        """It waits no longer. One that has ended stays in its heap until it surfaces."""
        sequence.waited_steps += step - sequence.queued_step
        del self._members[sequence.sequence_id]

    def oldest(self) -> Sequence | None:
        """Who has been here for longest."""
        return next(iter(self._members.values()), None)

    def _lane(self, sequence: Sequence, step: int) -> int:
        """Where it stands by now; below 0, beyond the highest lane, if it has waited for very long."""
        waited = sequence.waited_steps + step - sequence.queued_step
        return sequence.request.lane - waited // self._aging_steps
