"""The admission desk and the client that talks to it, without Ray: the link between them is a call, or breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count

import pytest

from cluster.admission import AdmissionController
from cluster.api import (
    AdmissionAsk,
    Directory,
    KeyTerms,
    Lane,
    Level,
    Limits,
    LimitStatus,
    ModelTerms,
    Permit,
    QueuePolicy,
    Refusal,
    RefusalCode,
    Scope,
    Tenant,
    Usage,
    WallClock,
    WindowStatus,
)
from deployments.admission import SILENT_REPLICA_NS, AdmissionDesk
from deployments.admission_client import AdmissionClient
from deployments.admission_wire import (
    AdmissionUnreachableError,
    CapacityReport,
    Close,
    Exchanged,
    Grants,
    Message,
    Submit,
    Withdraw,
)

SECOND_NS = 1_000_000_000
MODEL = "tiny"
LIMITS = Limits(requests_per_minute=600, tokens_per_minute=60_000)


class Clock:
    def __init__(self) -> None:
        self.now_ns = SECOND_NS

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += round(seconds * SECOND_NS)


class Link:
    """The desk at the end of a wire. `cut`: nothing arrives. `lose_answers`: so many calls arrive unanswered."""

    def __init__(self, desk: AdmissionDesk) -> None:
        self.desk = desk
        self.cut = False
        self.lose_answers = 0
        self.on_decisions: Callable[[], object] = lambda: None
        self.batches: list[tuple[Message, ...]] = []

    async def exchange(self, owner: str, epoch: str | None, messages: tuple[Message, ...]) -> Exchanged:
        self._check()
        self.batches.append(messages)
        answer = await self.desk.exchange(owner, epoch, messages)
        await asyncio.sleep(0)
        if self.lose_answers:
            self.lose_answers -= 1
            raise AdmissionUnreachableError("the answer was lost")
        return answer

    async def grants(self, owner: str, epoch: str, after: int) -> Grants:
        self._check()
        answer = await self.desk.grants(owner, epoch, after)
        self._check()
        if answer.decisions:
            self.on_decisions()
        return answer

    async def limits(self, tenant: str, key: str) -> LimitStatus:
        self._check()
        return await self.desk.limits(tenant, key)

    def _check(self) -> None:
        if self.cut:
            raise AdmissionUnreachableError("the wire is cut")


def new_desk(clock: Clock, life: str = "first") -> AdmissionDesk:
    numbers = count(1)
    directory = Directory(
        tenants=[Tenant(id="acme", name="Acme", limits=LIMITS)],
        models=[ModelTerms(id=MODEL)],
        keys=[KeyTerms(id="acme/key", tenant="acme")],
    )
    controller = AdmissionController(directory, QueuePolicy(), WallClock(wall_ns=0, now_ns=0))
    return AdmissionDesk(controller, clock, grants_wait_s=0.001, new_epoch=lambda: f"{life}-{next(numbers)}")


def ask(request_id: str, prompt_tokens: int = 10) -> AdmissionAsk:
    return AdmissionAsk(
        request_id=request_id,
        tenant="acme",
        model=MODEL,
        lane=Lane.STANDARD,
        prompt_tokens=prompt_tokens,
        max_output_tokens=20,
    )


def report(slots: int = 2, replica: str = "r1", kv_tokens: int = 1000) -> CapacityReport:
    return CapacityReport(replica=replica, model=MODEL, slots=slots, kv_tokens=kv_tokens)


async def held(desk: AdmissionDesk) -> tuple[int, int]:
    """Open reservations and permits."""
    snapshot = await desk.snapshot()
    return snapshot.tenants[0].open_reservations, snapshot.models[0].permits_open


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Let the loops run until something is so; what never comes true fails by this bound."""
    for _ in range(2000):
        if await condition():
            return
        await asyncio.sleep(0.001)
    pytest.fail("it did not come true")


async def settled(desk: AdmissionDesk) -> None:
    async def nothing_held() -> bool:
        return await held(desk) == (0, 0)

    await until(nothing_held)


@pytest.fixture(autouse=True)
def _no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.admission_client.FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr("deployments.admission_client.LONGEST_BACKOFF_S", 0.001)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def link(clock: Clock) -> Link:
    return Link(new_desk(clock))


@pytest.fixture
async def client(link: Link) -> AsyncIterator[AdmissionClient]:
    client = AdmissionClient(link, owner="ingress-1")
    yield client
    await client.aclose(timeout_s=0.0)


async def test_a_request_is_admitted_and_its_exact_usage_charged(link: Link, client: AdmissionClient) -> None:
    await link.desk.report(report())

    permit = await client.admit(ask("a"))
    assert isinstance(permit, Permit)
    assert await held(link.desk) == (1, 1)
    client.close("a", Usage(prompt_tokens=10, completion_tokens=7))

    await settled(link.desk)
    snapshot = await link.desk.snapshot()
    assert (snapshot.tenants[0].used_requests, snapshot.tenants[0].used_tokens) == (1, 17)


async def test_a_refusal_comes_back_as_one(link: Link, client: AdmissionClient) -> None:
    await link.desk.report(report())

    refusal = await client.admit(ask("a", prompt_tokens=10_000))

    assert isinstance(refusal, Refusal)
    assert (refusal.request_id, refusal.code) == ("a", RefusalCode.KV_CAPACITY_EXCEEDED)
    assert client.num_waiting == 0


async def test_who_waits_is_granted_when_a_place_becomes_free(link: Link, client: AdmissionClient) -> None:
    await link.desk.report(report(slots=1))
    await client.admit(ask("a"))
    second = asyncio.create_task(client.admit(ask("b")))

    async def both_known() -> bool:
        return await held(link.desk) == (2, 1)

    await until(both_known)
    assert not second.done()
    client.close("a", Usage(prompt_tokens=10, completion_tokens=1))

    assert isinstance(await second, Permit)


async def test_what_becomes_due_in_one_tick_travels_in_one_call(link: Link, client: AdmissionClient) -> None:
    await link.desk.report(report(slots=50, kv_tokens=10_000))
    await client.admit(ask("first"))
    link.batches.clear()

    await asyncio.gather(*(client.admit(ask(f"r{index}")) for index in range(40)))

    assert [len(batch) for batch in link.batches if batch] == [40]


async def test_a_cancelled_wait_is_withdrawn(link: Link, client: AdmissionClient) -> None:
    waiting = asyncio.create_task(client.admit(ask("a")))

    async def it_waits() -> bool:
        return await held(link.desk) == (1, 0)

    await until(it_waits)
    waiting.cancel()

    await settled(link.desk)
    assert client.num_waiting == 0


async def test_a_permit_that_arrives_as_the_wait_is_cancelled_is_given_back(
    link: Link, client: AdmissionClient
) -> None:
    await link.desk.report(report())
    waiting = asyncio.create_task(client.admit(ask("a")))
    # Runs after the permit was put into the client's hands and before the one who waits for it does.
    link.on_decisions = lambda: asyncio.get_running_loop().call_soon(waiting.cancel)

    with pytest.raises(asyncio.CancelledError):
        await waiting

    await settled(link.desk)
    assert client.num_open == 0
    assert (await link.desk.snapshot()).tenants[0].used_requests == 0


async def test_a_close_is_delivered_once_although_its_answer_is_lost(link: Link, client: AdmissionClient) -> None:
    await link.desk.report(report())
    await client.admit(ask("a"))
    link.lose_answers = 2

    client.close("a", Usage(prompt_tokens=10, completion_tokens=5))
    client.close("a", Usage(prompt_tokens=10, completion_tokens=9))

    async def acknowledged() -> bool:
        return client.num_open == 0

    await until(acknowledged)
    assert sum(isinstance(each, Close) for batch in link.batches for each in batch) == 3
    assert (await link.desk.snapshot()).tenants[0].used_tokens == 15


async def test_a_submit_whose_answer_is_lost_is_not_admitted_twice(link: Link, client: AdmissionClient) -> None:
    await link.desk.report(report())
    client.start()
    link.lose_answers = 3

    assert isinstance(await client.admit(ask("a")), Permit)

    assert await held(link.desk) == (1, 1)


async def test_a_permit_of_which_nothing_ran_is_not_charged(link: Link, client: AdmissionClient) -> None:
    await link.desk.report(report())
    await client.admit(ask("a"))

    client.close("a", None)

    await settled(link.desk)
    assert (await link.desk.snapshot()).tenants[0].used_requests == 0
    assert isinstance(link.batches[-1][-1], Withdraw)


async def test_a_new_desk_learns_who_runs_who_waits_and_who_has_ended(
    link: Link, client: AdmissionClient, clock: Clock
) -> None:
    await link.desk.report(report(slots=2))
    await client.admit(ask("running"))
    await client.admit(ask("ending"))
    waiting = asyncio.create_task(client.admit(ask("waiting")))

    async def all_known() -> bool:
        return await held(link.desk) == (3, 2)

    await until(all_known)
    link.cut = True
    client.close("ending", Usage(prompt_tokens=10, completion_tokens=3))
    link.desk = new_desk(clock, life="second")
    link.cut = False

    async def told_again() -> bool:
        return await held(link.desk) == (2, 1)

    await until(told_again)
    assert (await link.desk.snapshot()).tenants[0].used_tokens == 13
    await link.desk.report(report(slots=2))
    assert isinstance(await waiting, Permit)


async def test_limits_are_asked_for_and_left_out_while_nobody_answers(link: Link, client: AdmissionClient) -> None:
    scope = Scope(level=Level.TENANT, id="acme")
    requests = (await client.limits("acme", "acme/key")).requests
    assert requests == WindowStatus(limit=600, remaining=600, reset_s=0.0, scope=scope)

    link.cut = True

    assert await client.limits("acme", "acme/key") == LimitStatus()


async def test_a_desk_that_drains_refuses_newcomers_and_counts_the_others(link: Link, client: AdmissionClient) -> None:
    await link.desk.report(report())
    await client.admit(ask("a"))

    assert await link.desk.drain() == 1
    refusal = await client.admit(ask("b"))

    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.retry_after_s) == (RefusalCode.NO_CAPACITY, 5)
    client.close("a", Usage(prompt_tokens=10, completion_tokens=1))
    await settled(link.desk)
    assert await link.desk.drain() == 0


async def test_a_model_that_nobody_serves_is_refused_and_the_rest_of_the_batch_taken(clock: Clock) -> None:
    desk = new_desk(clock)
    await desk.report(report())
    registered = await desk.exchange("ingress", None, ())
    stray = AdmissionAsk(
        request_id="stray", tenant="acme", model="huge", lane=Lane.STANDARD, prompt_tokens=1, max_output_tokens=1
    )

    answer = await desk.exchange("ingress", registered.epoch, (Submit(ask=stray), Submit(ask=ask("good"))))
    grants = await desk.grants("ingress", registered.epoch, 0)

    assert answer.accepted
    assert [(type(each), each.request_id) for each in grants.decisions] == [(Refusal, "stray"), (Permit, "good")]


async def test_decisions_are_repeated_until_they_are_acknowledged(clock: Clock) -> None:
    desk = new_desk(clock)
    await desk.report(report(slots=3))
    epoch = (await desk.exchange("ingress", None, ())).epoch
    await desk.exchange("ingress", epoch, (Submit(ask=ask("a")), Submit(ask=ask("b"))))

    first = await desk.grants("ingress", epoch, 0)
    again = await desk.grants("ingress", epoch, 0)
    await desk.exchange("ingress", epoch, (Submit(ask=ask("c")),))
    later = await desk.grants("ingress", epoch, first.last)

    assert [each.request_id for each in first.decisions] == ["a", "b"]
    assert again == first
    assert [each.request_id for each in later.decisions] == ["c"]
    assert later.last == 3


async def test_messages_of_an_unknown_epoch_are_not_taken(clock: Clock) -> None:
    desk = new_desk(clock)

    answer = await desk.exchange("ingress", "of-another-life", (Submit(ask=ask("a")),))

    assert answer == Exchanged(epoch="first-1", accepted=False)
    assert await desk.grants("ingress", "of-another-life", 0) == Grants(known=False, last=0)
    assert await held(desk) == (0, 0)


async def test_a_silent_ingress_loses_its_permits_and_has_to_register_again(clock: Clock) -> None:
    desk = new_desk(clock)
    await desk.report(report())
    epoch = (await desk.exchange("ingress", None, ())).epoch
    await desk.exchange("ingress", epoch, (Submit(ask=ask("a")),))

    clock.advance(29)
    desk.tick()
    assert await held(desk) == (1, 1)
    clock.advance(1)
    desk.tick()

    assert await held(desk) == (0, 0)
    assert not (await desk.exchange("ingress", epoch, ())).accepted


async def test_a_silent_replica_is_not_counted_on(clock: Clock) -> None:
    desk = new_desk(clock)
    await desk.report(report(slots=2, replica="old"))
    clock.now_ns += SILENT_REPLICA_NS
    await desk.report(report(slots=3, replica="new"))

    desk.tick()

    model = (await desk.snapshot()).models[0]
    assert (model.replicas, model.slots) == (1, 3)


async def test_a_replica_whose_capacity_has_changed_is_still_counted_on(clock: Clock) -> None:
    """The old figures' time was over ten seconds later, and took the live replica along."""
    desk = new_desk(clock)
    await desk.report(report(slots=2))
    clock.advance(5)
    await desk.report(report(slots=3))
    clock.advance(6)

    desk.tick()

    assert (await desk.snapshot()).models[0].slots == 3
