from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.api import Lane, WaitingCount
from cluster.fair_queue import FairQueue, Waiter
from tests.cluster.makers import S, waiter

AGING_NS = 10 * S


def queue(*waiters: Waiter) -> FairQueue:
    made = FairQueue(aging_ns=AGING_NS)
    for each in waiters:
        made.push(each, 0)
    return made


def order(waiting: FairQueue) -> list[str]:
    return [waiting.pop().ask.request_id for _ in range(len(waiting))]


def names() -> Iterator[str]:
    return (f"r{number}" for number in count())


def test_one_tenant_is_served_in_order_of_arrival() -> None:
    assert order(queue(waiter("r"), waiter("s"), waiter("t"))) == ["r", "s", "t"]


def test_higher_lane_goes_first_whatever_the_tenant_had() -> None:
    waiting = queue(
        waiter("b", lane=Lane.BATCH), waiter("s", lane=Lane.STANDARD), waiter("i", lane=Lane.INTERACTIVE, tokens=10**6)
    )
    assert order(waiting) == ["i", "s", "b"]


def test_tenants_take_turns_by_tokens_and_not_by_requests() -> None:
    large = [waiter(f"large{n}", "a", tokens=300) for n in range(2)]
    small = [waiter(f"small{n}", "b", tokens=100) for n in range(6)]
    assert order(queue(*large, *small)) == [
        "large0", "small0", "small1", "small2", "large1", "small3", "small4", "small5",
    ]  # fmt: skip


def test_weight_is_a_share() -> None:
    heavy = [waiter(f"h{n}", "a", weight=3) for n in range(6)]
    light = [waiter(f"l{n}", "b", weight=1) for n in range(2)]
    assert order(queue(*heavy, *light)) == ["h0", "l0", "h1", "h2", "h3", "l1", "h4", "h5"]


def test_equal_tenants_go_by_arrival() -> None:
    assert order(queue(waiter("r", "z"), waiter("s", "a"))) == ["r", "s"]


def test_withdrawn_head_gives_its_tenants_turn_to_the_next_of_its_line() -> None:
    waiting = queue(waiter("r", "a"), waiter("s", "b"), waiter("t", "a"))
    assert waiting.remove("r").ask.request_id == "r"
    assert order(waiting) == ["s", "t"]


def test_tenant_that_was_away_has_no_credit_for_it() -> None:
    name = names()
    waiting = queue()
    for _ in range(50):
        waiting.push(waiter(next(name), "busy"), 0)
        waiting.pop()
    for n in range(3):
        waiting.push(waiter(f"busy{n}", "busy"), 0)
        waiting.push(waiter(f"back{n}", "back"), 0)
    assert order(waiting) == ["back0", "busy0", "back1", "busy1", "back2", "busy2"]


def test_leaving_and_coming_back_wins_nothing() -> None:
    waiting = queue(waiter("a0", "a", tokens=1000), waiter("b0", "b", tokens=1000))
    waiting.pop()
    waiting.push(waiter("a1", "a"), 0)
    waiting.remove("a1")
    waiting.push(waiter("a2", "a"), 0)
    assert order(waiting) == ["b0", "a2"]


def test_withdrawing_leaves_no_trace() -> None:
    plain, visited = queue(), queue()
    for waiting in (plain, visited):
        waiting.push(waiter("a0", "a", tokens=500), 0)
        waiting.push(waiter("b0", "b", tokens=50), 0)
        waiting.pop()
    visited.push(waiter("c0", "c"), 0)
    visited.remove("c0")
    for waiting in (plain, visited):
        for n in range(3):
            for tenant in "cab":
                waiting.push(waiter(f"{tenant}{n + 1}", tenant, tokens=70), 0)
    assert order(plain) == order(visited)


def test_those_who_come_and_leave_again_leave_nothing_behind() -> None:
    """Behind a head that does not move, withdrawn requests would otherwise pile up tickets for ever."""
    waiting = queue(waiter("head", "a"), waiter("busy", "b"))
    for n in range(100):
        waiting.push(waiter(f"r{n}", "c"), 0)
        waiting.remove(f"r{n}")
    waiting.check_integrity({"head", "busy"})
    assert order(waiting) == ["head", "busy"]


def test_waiter_moves_up_one_lane_when_its_time_in_a_lane_is_over() -> None:
    waiting = queue(waiter("b", lane=Lane.BATCH), waiter("s", lane=Lane.STANDARD))
    waiting.age(AGING_NS - 1)
    assert [each.lane for each in waiting.counts()] == [Lane.STANDARD, Lane.BATCH]
    waiting.age(AGING_NS)
    assert [each.lane for each in waiting.counts()] == [Lane.INTERACTIVE, Lane.STANDARD]
    waiting.age(2 * AGING_NS - 1)
    assert waiting.counts()[1].lane is Lane.STANDARD
    waiting.age(2 * AGING_NS)
    assert waiting.counts() == (WaitingCount(lane=Lane.INTERACTIVE, tenant="a", count=2),)


def test_waiter_that_moved_up_stands_behind_those_of_its_tenant_who_were_there() -> None:
    waiting = queue(waiter("old", lane=Lane.STANDARD))
    waiting.push(waiter("new", lane=Lane.INTERACTIVE), 1 * S)
    waiting.age(AGING_NS)
    waiting.push(waiter("newest", lane=Lane.INTERACTIVE), AGING_NS)
    assert order(waiting) == ["new", "old", "newest"]


def test_no_lane_starves_under_a_flood_of_a_higher_one() -> None:
    """One grant per second, two interactive arrivals per second from each of two tenants, one batch request."""
    name = names()
    waiting = queue(waiter("batch", "patient", lane=Lane.BATCH))
    served_at = {}
    for second in range(60):
        for tenant in ("a", "b", "a", "b"):
            waiting.push(waiter(next(name), tenant, lane=Lane.INTERACTIVE), second * S)
        waiting.age(second * S)
        served_at[waiting.pop().ask.request_id] = second
    assert served_at["batch"] <= 2 * AGING_NS // S + 2


def test_three_to_one_weights_give_three_to_one_tokens() -> None:
    name = names()
    waiting = queue()
    served: Counter[str] = Counter()
    sizes = {"heavy": (50, 900, 130), "light": (700, 40, 333)}
    for step in range(6000):
        while waiting.count_of("heavy") < 5:
            waiting.push(waiter(next(name), "heavy", weight=3, tokens=sizes["heavy"][step % 3]), 0)
        while waiting.count_of("light") < 5:
            waiting.push(waiter(next(name), "light", weight=1, tokens=sizes["light"][step % 3]), 0)
        granted = waiting.pop()
        served[granted.ask.tenant] += granted.tokens
    assert served["heavy"] / served["light"] == pytest.approx(3, rel=0.01)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 500)), min_size=30, max_size=80),
    st.fixed_dictionaries({tenant: st.integers(1, 5) for tenant in "abc"}),
)
def test_tenants_that_wait_are_never_apart_by_more_than_a_request_of_each(
    arrivals: list[tuple[str, int]], weights: dict[str, int]
) -> None:
    name = names()
    waiting = queue(*(waiter(next(name), t, tokens=tokens, weight=weights[t]) for t, tokens in arrivals))
    largest = {t: max((tokens for of, tokens in arrivals if of == t), default=0) / weights[t] for t in "abc"}
    served = dict.fromkeys("abc", 0.0)
    backlogged = {t for t in "abc" if waiting.count_of(t)}
    while backlogged:
        granted = waiting.pop()
        served[granted.ask.tenant] += granted.tokens / granted.weight
        backlogged = {t for t in backlogged if waiting.count_of(t)}
        for one in backlogged:
            for other in backlogged:
                assert served[one] - served[other] <= largest[one] + largest[other] + 1e-3


class QueueMachine(RuleBasedStateMachine):
    """Pushes, pops, withdrawals and time in any order: nobody is lost, nobody is there twice, lanes are respected."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue(aging_ns=AGING_NS)
        self.waiting: dict[str, Waiter] = {}
        self.names = names()
        self.now_ns = 0

    @rule(
        tenant=st.sampled_from("abcd"), lane=st.sampled_from(Lane), tokens=st.integers(0, 300), weight=st.integers(1, 4)
    )
    def push(self, tenant: str, lane: Lane, tokens: int, weight: int) -> None:
        arrival = waiter(next(self.names), tenant, lane=lane, tokens=tokens, weight=weight)
        self.waiting[arrival.ask.request_id] = arrival
        self.queue.push(arrival, self.now_ns)

    @precondition(lambda self: self.waiting)
    @rule()
    def pop(self) -> None:
        highest = self.queue.counts()[0].lane
        head = self.queue.head()
        in_highest = {each.tenant for each in self.queue.counts() if each.lane is highest}
        granted = self.queue.pop()
        assert granted is head
        assert granted.ask.tenant in in_highest
        assert self.waiting.pop(granted.ask.request_id) is granted

    @precondition(lambda self: self.waiting)
    @rule(pick=st.integers(0, 1000))
    def withdraw(self, pick: int) -> None:
        request_id = sorted(self.waiting)[pick % len(self.waiting)]
        assert self.queue.remove(request_id) is self.waiting.pop(request_id)

    @rule(wait_s=st.sampled_from([1, 5, 10, 25]))
    def age(self, wait_s: int) -> None:
        self.now_ns += wait_s * S
        self.queue.age(self.now_ns)

    @invariant()
    def counts_agree(self) -> None:
        self.queue.check_integrity(set(self.waiting))
        assert len(self.queue) == sum(each.count for each in self.queue.counts()) == len(self.waiting)
        assert self.queue.oldest() is next(iter(self.waiting.values()), None)
        for tenant in "abcd":
            mine = [each for each in self.waiting.values() if each.ask.tenant == tenant]
            assert self.queue.count_of(tenant) == len(mine)
            assert self.queue.oldest_of(tenant) is (mine[0] if mine else None)


TestQueueMachine = QueueMachine.TestCase
