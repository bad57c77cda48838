"""Hundreds of requests in virtual time, with clients that leave at any moment: at the end nothing is left over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from operator import attrgetter
from random import Random

import pytest

from cluster.api import AdmissionAsk, Lane, Permit, Queued, QueuePolicy, Refusal, RefusalCode
from tests.cluster.makers import (
    MINUTE,
    MODEL,
    OWNER,
    S,
    ask,
    assert_nothing_open,
    controller,
    permit,
    tenant,
    used,
)


class Storm:
    """Clients, replicas and a clock; everything that happens is drawn from one seed."""

    def __init__(self, seed: int, num_requests: int) -> None:
        self.rng = Random(seed)
        self.door = controller(
            tenant("a", weight=3, tokens_per_minute=60_000, concurrent_requests=60),
            tenant("b", requests_per_minute=600),
            tenant("c"),
            slots=8,
            kv_tokens=6000,
            policy=QueuePolicy(max_waiting_per_model=120, max_waiting_per_tenant=60, max_wait_s=20, aging_s=3),
        )
        self.now_ns = 0
        self.asks: dict[str, AdmissionAsk] = {}
        self.outcomes: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.charged: Counter[str] = Counter()
        self._events: list[tuple[int, int, Callable[[str], None], str]] = []
        self._numbers = count()
        for n in range(num_requests):
            self._at(self.rng.randrange(60 * S), self._arrive, f"r{n}")
        for tick in range(1000):
            self._at(tick * S // 10, self._tick, "")

    def run(self) -> None:
        while self._events:
            self.now_ns, _, happen, request_id = heappop(self._events)
            happen(request_id)
            for decision in self.door.dispatch(self.now_ns):
                self._decided(decision)
            self.door.check_integrity()

    def _at(self, when_ns: int, happen: Callable[[str], None], request_id: str) -> None:
        heappush(self._events, (when_ns, next(self._numbers), happen, request_id))

    def _arrive(self, request_id: str) -> None:
        rng = self.rng
        self.asks[request_id] = ask(
            request_id,
            rng.choice("abc"),
            lane=rng.choice(list(Lane)),
            prompt=rng.randrange(1, 900),
            output=rng.choice([None, rng.randrange(1, 900)]),
            sequences=rng.choice([1, 1, 1, 3, 20]),
        )
        outcome = self.door.submit(self.asks[request_id], OWNER, self.now_ns)
        if isinstance(outcome, Permit | Refusal):
            self._decided(outcome)
        if rng.random() < 0.3:
            self._at(self.now_ns + rng.randrange(15 * S), self._cancel, request_id)

    def _decided(self, outcome: Permit | Refusal) -> None:
        if isinstance(outcome, Permit):
            self._at(self.now_ns + self.rng.randrange(3 * S), self._finish, outcome.request_id)
        else:
            self.outcomes[outcome.code] += 1
            self.ended[outcome.request_id] += 1

    def _cancel(self, request_id: str) -> None:
        if self.door.withdraw(request_id, self.now_ns):
            self.outcomes["cancelled"] += 1
            self.ended[request_id] += 1

    def _finish(self, request_id: str) -> None:
        usage = used(self.asks[request_id].prompt_tokens, self.rng.randrange(900))
        if self.door.close(request_id, usage, self.now_ns):
            self.charged[self.asks[request_id].tenant] += usage.total_tokens
            self.outcomes["finished"] += 1
            self.ended[request_id] += 1

    def _tick(self, _: str) -> None:
        self.door.renew(OWNER, self.now_ns)
        self.door.report_replica(MODEL, "m-1", 8, 6000, self.now_ns)


@pytest.mark.parametrize("seed", range(5))
def test_storm_with_random_cancels_ends_with_all_counts_zero(seed: int) -> None:
    storm = Storm(seed, num_requests=600)
    storm.run()
    assert storm.ended == Counter(list(storm.asks))  # each request ended exactly once
    assert storm.outcomes["finished"] > 100
    assert storm.outcomes["cancelled"] > 50
    assert storm.outcomes[RefusalCode.NO_CAPACITY] + storm.outcomes[RefusalCode.QUEUE_FULL] > 0
    snapshot = storm.door.snapshot(storm.now_ns)
    assert_nothing_open(snapshot)
    assert {each.tenant: each.used_tokens for each in snapshot.tenants} == storm.charged


def test_two_tenants_share_a_busy_model_three_to_one() -> None:
    """Both always have requests waiting; each request runs for as long as it has tokens."""
    rng = Random(7)
    door = controller(tenant("a", weight=3), tenant("b", weight=1), slots=4, kv_tokens=4000)
    names = (f"r{n}" for n in count())
    ends: list[tuple[int, int, str]] = []
    number = count()
    waiting: Counter[str] = Counter()
    served: Counter[str] = Counter()
    now_ns = 0

    def run(granted: Permit) -> None:
        served[granted.tenant] += granted.reserved_tokens
        heappush(ends, (now_ns + granted.reserved_tokens * S // 1000, next(number), granted.request_id))

    def fill() -> None:
        for tenant_id in ("a", "b"):
            while waiting[tenant_id] < 4:
                wanted = ask(next(names), tenant_id, prompt=rng.randrange(1, 500), output=rng.randrange(1, 400))
                outcome = door.submit(wanted, OWNER, now_ns)
                if isinstance(outcome, Permit):
                    run(outcome)
                else:
                    waiting[tenant_id] += 1

    fill()
    for _ in range(5000):
        now_ns, _, request_id = heappop(ends)
        door.close(request_id, None, now_ns)
        door.report_replica(MODEL, "m-1", 4, 4000, now_ns)
        for decision in door.dispatch(now_ns):
            waiting[permit(decision).tenant] -= 1
            run(permit(decision))
        fill()
    assert served["a"] / served["b"] == pytest.approx(3, rel=0.02)


def test_steady_flood_of_high_priority_keeps_no_low_request_waiting_beyond_its_deadline() -> None:
    """120 % of what the model can do, for five minutes, and one batch request every ten seconds."""
    policy = QueuePolicy(aging_s=5, max_wait_s=30, max_waiting_per_tenant=20)
    door = controller(tenant("a"), tenant("b"), slots=1, policy=policy)
    names = (f"high{n}" for n in count())
    running: list[Permit] = [permit(door.submit(ask("first", lane=Lane.INTERACTIVE), OWNER, 0))]
    asked_at: dict[str, int] = {}
    ended_at: dict[str, int] = {}
    granted_low = 0
    for second in range(5 * MINUTE // S):
        now_ns = second * S
        door.renew(OWNER, now_ns)
        door.report_replica(MODEL, "m-1", 1, 10_000, now_ns)
        high = [ask(next(names), "a", lane=Lane.INTERACTIVE) for _ in range(2 if second % 5 == 0 else 1)]
        decisions: list[Permit | Refusal | Queued] = [door.submit(each, OWNER, now_ns) for each in high]
        if second % 10 == 0:
            low = f"low{second}"
            asked_at[low] = second
            decisions.append(door.submit(ask(low, "b", lane=Lane.BATCH), OWNER, now_ns))
        # The replica has one slot, and finishes what is in the highest lane.
        running.sort(key=attrgetter("lane"))
        if running:
            door.close(running.pop(0).request_id, used(10, 10), now_ns)
        decisions += door.dispatch(now_ns)
        granted = [decision for decision in decisions if isinstance(decision, Permit)]
        ended_at.update({each.request_id: second for each in decisions if not isinstance(each, Queued)})
        granted_low += sum(each.tenant == "b" for each in granted)
        running += granted
    for low, second in asked_at.items():
        if second + 30 < 300:
            assert ended_at[low] - second <= 30
    assert granted_low >= 25
