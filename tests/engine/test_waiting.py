"""The order in which waiting sequences join."""

from __future__ import annotations

from engine.api import Choice
from engine.sequence import Sequence, Status
from engine.tenant_shares import TenantShares
from engine.waiting import TOKENS_PER_STEP_OF_AGE, WaitingQueue
from tests.engine.makers import request

AGING_STEPS = 10


class Queue:
    """A queue, and the step that it is."""

    def __init__(self) -> None:
        self.shares = TenantShares()
        self.queue = WaitingQueue(self.shares, AGING_STEPS)
        self.step = 0
        self.arrival = 0

    def push(
        self, name: str, num_tokens: int = 4, *, lane: int = 1, tenant: str = "t", weight: int = 1, resumed: int = 0
    ) -> Sequence:
        self.arrival += 1
        asked = request(name, num_prompt=num_tokens, lane=lane, tenant=tenant, weight=weight)
        choice = Choice(resumed_token_ids=(1,) * resumed)
        sequence = Sequence(asked, choice, arrival=self.arrival, eos_token_ids=frozenset())
        sequence.arrival_step = self.step
        self.shares.open(tenant, weight)
        self.queue.push(sequence, self.step, num_tokens)
        return sequence

    def pop(self) -> str:
        head = self.queue.head(self.step)
        assert head is not None
        self.queue.pop(head, self.step)
        return head.sequence.sequence_id

    def order(self) -> list[str]:
        return [self.pop() for _ in range(len(self.queue))]


def test_lane_then_begun_then_tenant_then_length_then_arrival() -> None:
    queue = Queue()
    queue.push("low", 1, lane=2)
    queue.push("other tenant", 1, tenant="spender")
    queue.push("second", 8)
    queue.push("third", 8)
    queue.push("first", 4)
    queue.push("begun", 100, tenant="spender", resumed=1)
    queue.push("high", 1000, lane=0)
    queue.shares.charge("spender", 1)
    assert queue.order() == ["high", "begun", "first", "second", "third", "other tenant", "low"]


def test_nobody_waits_in_an_empty_queue() -> None:
    queue = Queue()
    assert queue.queue.head(0) is None
    assert queue.queue.claimant(0) is None
    assert queue.queue.oldest() is None
    assert len(queue.queue) == 0


def test_age_counts_as_length() -> None:
    queue = Queue()
    queue.push("long", 2 * TOKENS_PER_STEP_OF_AGE)
    queue.step = 1
    queue.push("shorter", TOKENS_PER_STEP_OF_AGE - 1)
    queue.step = 2
    queue.push("too late", 1)
    assert queue.order() == ["shorter", "long", "too late"]


def test_waiting_lifts_from_lane_to_lane() -> None:
    queue = Queue()
    patient = queue.push("patient", 2 * AGING_STEPS * TOKENS_PER_STEP_OF_AGE + 100, lane=2)
    queue.step = AGING_STEPS - 1
    queue.push("middle", lane=1)
    assert queue.pop() == "middle"
    queue.step = 2 * AGING_STEPS
    queue.push("high", lane=0)
    assert queue.pop() == "high"  # equal lanes by then: the shorter one
    queue.step = 3 * AGING_STEPS
    queue.push("new", lane=0)
    assert queue.pop() == "patient"
    assert patient.lane == 0, "it runs in no lane beyond the highest"
    assert patient.waited_steps == 3 * AGING_STEPS


def test_who_joins_keeps_the_lane_that_it_was_lifted_to_and_its_age() -> None:
    queue = Queue()
    sequence = queue.push("sequence", lane=2)
    queue.step = AGING_STEPS
    queue.pop()
    assert sequence.lane == 1
    queue.step = 5 * AGING_STEPS
    queue.queue.push(sequence, queue.step, 4)
    queue.step += AGING_STEPS
    queue.pop()
    assert (sequence.lane, sequence.waited_steps) == (0, 2 * AGING_STEPS)


def test_age_gives_no_claim_to_what_others_hold() -> None:
    queue = Queue()
    queue.push("aged", lane=2)
    queue.step = 5 * AGING_STEPS
    queue.push("named", lane=1)
    head, claimant = queue.queue.head(queue.step), queue.queue.claimant(queue.step)
    assert head is not None and claimant is not None
    assert (head.sequence.sequence_id, claimant.sequence.sequence_id) == ("aged", "named")


def test_who_has_ended_is_passed_over() -> None:
    queue = Queue()
    gone, stays = queue.push("gone", 1), queue.push("stays", 2)
    queue.queue.discard(gone, queue.step)
    gone.move_to(Status.FINISHED)
    assert gone not in queue.queue
    assert stays in queue.queue
    assert queue.queue.oldest() is stays
    assert queue.order() == ["stays"]
    assert queue.queue.head(0) is None
