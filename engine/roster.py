"""Who is where: the open sequences, those that run, those that wait, and how one moves between the two.

Every move goes through here, so that slot, blocks, place in the queue and the tenant's account change together.
"""

from __future__ import annotations

import bisect
from collections import Counter
from operator import attrgetter

from engine.api import Explanation, FinishReason
from engine.batching import Batching, Crowd
from engine.hold import Hold, Obstacle
from engine.kv_memory import Found, KvMemory
from engine.plan import BlockCopy
from engine.sequence import Sequence, Status
from engine.tenant_shares import TenantShares
from engine.waiting import Head, Place, Urgency, WaitingQueue

_order = attrgetter("lane", "arrival")


class Roster:
    """Owner of all open sequences. `running` is ordered by lane, then arrival."""

    def __init__(self, memory: KvMemory, batching: Batching, aging_steps: int) -> None:
        self.memory = memory
        self.batching = batching
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._shares = TenantShares()
        self._waiting = WaitingQueue(self._shares, aging_steps)
        self._sequences: dict[str, Sequence] = {}
        self._requests: dict[str, list[Sequence]] = {}  # the open sequences of each
        self._step = 0
        self._obstacle: Obstacle | None = None
        self._held: Counter[str] = Counter()  # in how many steps each kind of obstacle has closed the door

    # ---- questions

    @property
    def num_open(self) -> int:
        return len(self._sequences)

    @property
    def sequences(self) -> list[Sequence]:
        """All that have not ended."""
        return list(self._sequences.values())

    def find(self, sequence_id: str) -> Sequence:
        """The open sequence of this name."""
        return self._sequences[sequence_id]

    def of_request(self, request_id: str) -> list[Sequence]:
        """The open sequences of a request."""
        return list(self._requests.get(request_id, ()))

    def of_job(self, name: str) -> list[Sequence]:
        """The open sequences of a request, and of all whose names differ from it after a dot only. Takes time in the
        number of all open requests."""
        parts = [each for request_id, each in self._requests.items() if request_id.startswith(f"{name}.")]
        return [*self.of_request(name), *(sequence for part in parts for sequence in part)]

    def head(self) -> Head | None:
        """Whose turn it is to join."""
        return self._waiting.head(self._step)

    def claimant(self) -> Head | None:
        """Whose turn it is in the highest lane that anybody waits in."""
        return self._waiting.claimant(self._step)

    def urgency(self, sequence: Sequence) -> Urgency:
        """The urgency of a running sequence that still computes what it knows."""
        place = Place.of(sequence, sequence.num_uncomputed)
        return Urgency.of(place, sequence.lane, self._shares.clock(sequence.tenant))

    def delay_s(self, now: float) -> float:
        """For how long nothing will happen unless another sequence comes; more than 0 in dynamic batching only."""
        return self.batching.delay_s(self._crowd(now))

    # ---- moves

    def add(self, choices: list[Sequence]) -> None:
        """Let the sequences of a new request wait; the first computes the prompt for all.

        Whether they can ever fit has been checked at intake.
        """
        for sequence in choices:
            assert sequence.sequence_id not in self._sequences, f"{sequence.sequence_id} is already here"
            self._sequences[sequence.sequence_id] = sequence
            self._shares.open(sequence.tenant, sequence.request.weight)
            sequence.arrival_step = self._step
        self._requests[choices[0].request_id] = list(choices)
        self._lead(choices)

    def begin_step(self, now: float) -> None:
        """A step begins. `now` in seconds, on any clock."""
        self._step += 1
        self.batching.begin(self._crowd(now))

    def end_step(self, obstacle: Obstacle | None) -> None:
        """The step is planned; `obstacle` is what kept the head of the queue, and all behind it, from joining."""
        self._obstacle = obstacle
        if obstacle is not None and self._waiting:
            self._held[obstacle.hold] += 1

    def join(self, head: Head, found: Found) -> BlockCopy | None:
        """The head of the queue takes a slot and its blocks; returns the copy to be made before it computes."""
        sequence = head.sequence
        self._waiting.pop(head, self._step)
        sequence.move_to(Status.RUNNING)
        sequence.waits += self._held - sequence.held_when_queued
        sequence.output_at_join = sequence.num_output
        copy = self.memory.join(sequence, found)
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt - 1)
        bisect.insort(self.running, sequence, key=_order)
        self.batching.joined()
        return copy

    def preempt(self, sequence: Sequence) -> None:
        """A running sequence gives back slot and blocks, and waits again in its old place."""
        assert not sequence.is_protected, f"{sequence.sequence_id} is protected"
        self.running.remove(sequence)
        sequence.move_to(Status.WAITING)
        sequence.num_preemptions += 1
        sequence.preemptions_in_a_row += 1
        self.num_preemptions += 1
        self.memory.release(sequence)
        self.batching.stepped_back()
        self._enqueue(sequence)

    def serve(self, sequence: Sequence, num_tokens: int) -> int:
        """Charge the tenant for the next tokens; returns for how many of them.

        Those that had been computed before were lost through no fault of the tenant.
        """
        end = sequence.num_computed + num_tokens
        num_new = max(0, end - max(sequence.num_computed, sequence.high_water))
        self._shares.charge(sequence.tenant, num_new)
        return num_new

    def computed(self, sequence: Sequence, start: int, end: int) -> None:
        """Tokens `start` to `end` are computed; others may use them from now on."""
        sequence.num_computed = end
        sequence.high_water = max(sequence.high_water, end)
        self.memory.note_computed(sequence, start)
        if end >= sequence.num_prompt:
            self._fork(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence at any point of its life and take back all it holds."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.discard(sequence, self._step)
        sequence.move_to(Status.FINISHED)
        sequence.finish_reason = reason
        self.memory.release(sequence)
        self._shares.close(sequence.tenant)
        del self._sequences[sequence.sequence_id]
        choices = self._requests[sequence.request_id]
        choices.remove(sequence)
        if not choices:
            del self._requests[sequence.request_id]
        self._lead([sibling for sibling in sequence.siblings if sibling.status is Status.WAITING])
        sequence.siblings = []

    def _lead(self, choices: list[Sequence]) -> None:
        """The first of the choices computes the prompt, the others wait for it."""
        if choices:
            leader, *leader.siblings = choices
            self._enqueue(leader)

    def _fork(self, leader: Sequence) -> None:
        """The prompt is computed: the other choices may join and share it."""
        siblings, leader.siblings = leader.siblings, []
        for sibling in siblings:
            if sibling.status is Status.WAITING:
                sibling.forked_from = leader
                sibling.high_water = sibling.num_prompt
                sibling.waits[Hold.SIBLING] = self._step - sibling.arrival_step
                self._enqueue(sibling)

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.held_when_queued = self._held.copy()
        found = self.memory.find(sequence)
        self._waiting.push(sequence, self._step, sequence.num_known - found.num_tokens)

    def _crowd(self, now: float) -> Crowd:
        oldest = self._waiting.oldest()
        waited_s = 0.0 if oldest is None else now - oldest.arrived_s
        return Crowd(num_running=len(self.running), num_waiting=len(self._waiting), waited_s=waited_s)

    # ---- for people

    def explain(self, sequence: Sequence) -> Explanation:
        """Why an open sequence waits or runs. Costs what one sequence costs, whenever somebody asks."""
        waits = sequence.waits.copy()
        if sequence in self._waiting:
            waits += self._held - sequence.held_when_queued
        return Explanation(
            sequence_id=sequence.sequence_id,
            status=sequence.status,
            lane=sequence.lane,
            waited_steps=dict(waits),
            now=self._what_holds(sequence),
            num_preemptions=sequence.num_preemptions,
            num_cached_tokens=sequence.num_cached_tokens,
        )

    def _what_holds(self, sequence: Sequence) -> str | None:
        if sequence.status is Status.RUNNING:
            return None
        if sequence not in self._waiting:
            return "another choice of the same request computes the prompt for all"
        if self._obstacle is None:
            return None
        if self._obstacle.sequence_id == sequence.sequence_id:
            return str(self._obstacle)
        return f"behind {self._obstacle.sequence_id}: {self._obstacle}"

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks and sequences do not add up, or if something idle holds a block."""
        self.memory.check_integrity(self.sequences)
        listed = [sequence for choices in self._requests.values() for sequence in choices]
        assert {*listed} == {*self.sequences} and len(listed) == self.num_open, "requests and sequences differ"
        for sequence in self.sequences:
            running = sequence.status is Status.RUNNING
            assert running == (sequence in self.running), f"{sequence.sequence_id} is {sequence.status}"
            assert running or not sequence.block_ids, f"{sequence.sequence_id} holds blocks but no slot"
        assert self.running == sorted(self.running, key=_order), "the running sequences are out of order"
