from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

import pytest

from engine.api import EngineDeadError, FinishReason, GenerateRequest, RequestRefusedError, SamplingParams, TokenDelta
from router.attempts import Attempts
from router.fan_in import Arrival, FanIn
from tests.router.fakes import FakeReplicas, Step


def token(*token_ids: int) -> TokenDelta:
    return TokenDelta(token_ids=token_ids)


def end(*token_ids: int, reason: FinishReason = FinishReason.STOP) -> TokenDelta:
    return TokenDelta(token_ids=token_ids, finish_reason=reason)


def fan_in(*scripts: list[Step]) -> tuple[FakeReplicas, FanIn]:
    """Job 0 follows the first script, and so on."""
    by_id: Mapping[str, list[Step]] = {str(number): script for number, script in enumerate(scripts)}
    replicas = FakeReplicas(lambda request: by_id[request.request_id])
    sampling = SamplingParams(max_tokens=9)
    jobs = [GenerateRequest(request_id=name, prompt_token_ids=(1,), sampling=sampling) for name in by_id]
    return replicas, FanIn([Attempts(replicas, "tiny", job, 1e9) for job in jobs])


async def read(source: FanIn) -> list[Arrival]:
    arrivals = []
    while (arrival := await source.next()) is not None:
        arrivals.append(arrival)
    return arrivals


async def test_jobs_take_turns_and_each_keeps_its_order() -> None:
    _, source = fan_in([token(1), token(2), end(3)], [token(4), end(5)])
    arrivals = await read(source)
    assert [(arrival.job, arrival.delta.token_ids) for arrival in arrivals] == [
        (0, (1,)), (1, (4,)), (0, (2,)), (1, (5,)), (0, (3,)),
    ]  # fmt: skip
    assert await source.next() is None


async def test_one_that_waits_does_not_hold_up_the_others() -> None:
    gate = asyncio.Event()
    _, source = fan_in([gate, end(1)], [token(2), end(3)])
    first_two = [await source.next(), await source.next()]
    assert [arrival.job for arrival in first_two if arrival] == [1, 1]
    gate.set()
    assert await source.next() == Arrival(job=0, delta=end(1))


async def test_a_reader_that_gives_up_waiting_loses_nothing() -> None:
    gate = asyncio.Event()
    _, source = fan_in([gate, end(1)])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await source.next()
    gate.set()
    assert await source.next() == Arrival(job=0, delta=end(1))


async def test_an_error_is_of_one_job_and_the_others_can_be_read_to_their_ends() -> None:
    replicas, source = fan_in([RequestRefusedError("no")], [token(2), asyncio.Event(), end(3)])
    replicas.unseen = (7,)
    with pytest.raises(RequestRefusedError):
        await source.next()
    assert [source.ran(job) for job in (0, 1)] == [False, True]
    assert await source.next() == Arrival(job=1, delta=token(2))
    await source.stop()
    assert await source.next() == Arrival(job=1, delta=end(7, reason=FinishReason.CANCELLED))
    assert await source.next() is None
    await source.close()
    assert replicas.num_running == 0


async def test_a_job_that_is_lost_while_it_is_read_is_not_waited_for() -> None:
    replicas, source = fan_in([asyncio.Event(), end(1)], [token(2), asyncio.Event()])
    await source.next()
    replicas.deaf = EngineDeadError("away")
    await source.stop()
    assert await source.next() is None
    await source.close()
    assert replicas.num_running == 0


async def test_closing_before_anything_was_read_is_fine() -> None:
    replicas, source = fan_in([token(1)])
    await source.stop()
    await source.close()
    assert replicas.requests == []


class TakenBack:
    """A replica whose call is taken back when the client leaves, as Ray Serve does with what a request has called."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def generate(self, model: str, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        yield TokenDelta(token_ids=(1, 2))
        await self.gone.wait()
        raise asyncio.CancelledError

    async def cancel(self, model: str, request_id: str, index: int | None = None) -> int | None:
        self.gone.set()
        return 5


async def test_what_a_call_that_was_taken_back_has_not_told_is_counted_all_the_same() -> None:
    """Found end to end: clients that left in mid-stream were charged nothing, because the read was cancelled first."""
    request = GenerateRequest(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=9))
    jobs = FanIn([Attempts(TakenBack(), "m", request, asyncio.get_running_loop().time() + 60)])
    first = await jobs.next()
    assert first is not None and first.delta.token_ids == (1, 2)
    reading = asyncio.create_task(jobs.next())
    await asyncio.sleep(0)
    reading.cancel()
    await jobs.stop()
    assert await jobs.next() is None
    assert jobs.num_unseen == 3
    await jobs.close()
