from __future__ import annotations

import asyncio

import pytest

from engine.api import EngineDeadError, FinishReason, GenerateRequest, RequestRefusedError, SamplingParams, TokenDelta
from router.attempts import Attempts
from tests.router.fakes import FakeReplicas, Step

REQUEST = GenerateRequest(request_id="r1", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=9, seed=5))
END = TokenDelta(token_ids=(9,), finish_reason=FinishReason.STOP)
DEATH = EngineDeadError("killed")


def token(*token_ids: int) -> TokenDelta:
    return TokenDelta(token_ids=token_ids)


def following(*scripts: list[Step]) -> tuple[FakeReplicas, Attempts]:
    """A request whose first attempt follows the first script, and so on."""
    left = iter(scripts)
    replicas = FakeReplicas(lambda _request: next(left))
    return replicas, Attempts(replicas, "tiny", REQUEST)


async def read(attempts: Attempts) -> list[TokenDelta]:
    deltas = [await attempts.next()]
    while deltas[-1].finish_reason is None:
        deltas.append(await attempts.next())
    return deltas


async def test_tokens_come_as_the_replica_sends_them() -> None:
    replicas, attempts = following([token(1), token(2, 3), END])
    assert await read(attempts) == [token(1), token(2, 3), END]
    assert replicas.requests == [REQUEST]


async def test_a_death_before_the_first_token_is_retried_once_from_the_start() -> None:
    replicas, attempts = following([DEATH], [token(1), END])
    assert await read(attempts) == [token(1), END]
    assert replicas.requests == [REQUEST, REQUEST]


async def test_a_second_death_before_the_first_token_is_the_client_s() -> None:
    replicas, attempts = following([DEATH], [DEATH])
    with pytest.raises(EngineDeadError, match="killed"):
        await read(attempts)
    assert len(replicas.requests) == 2
    assert await attempts.stop() is None


async def test_a_death_in_mid_stream_is_resumed_with_the_tokens_so_far_and_the_same_seed() -> None:
    replicas, attempts = following([token(1), token(2), DEATH], [token(3), END])
    assert await read(attempts) == [token(1), token(2), token(3), END]
    assert [request.resumed_token_ids for request in replicas.requests] == [(), (1, 2)]
    assert [request.sampling.seed for request in replicas.requests] == [5, 5]


async def test_a_stream_is_resumed_twice_at_most() -> None:
    replicas, attempts = following([token(1), DEATH], [DEATH], [token(2), DEATH])
    with pytest.raises(EngineDeadError, match="killed"):
        await read(attempts)
    assert [request.resumed_token_ids for request in replicas.requests] == [(), (1,), (1,)]
    assert await attempts.stop() == 2
    assert replicas.num_running == 0


async def test_a_stream_that_just_ends_counts_as_a_death() -> None:
    _, attempts = following([token(1)], [token(2), END])
    assert await read(attempts) == [token(1), token(2), END]


async def test_a_replica_that_shuts_down_hands_over_without_losing_a_token() -> None:
    last = TokenDelta(token_ids=(2,), finish_reason=FinishReason.CANCELLED)
    replicas, attempts = following([token(1), last], [token(3), END])
    assert await read(attempts) == [token(1), token(2), token(3), END]
    assert replicas.requests[1].resumed_token_ids == (1, 2)


async def test_a_refusal_by_the_engine_is_not_retried_and_costs_nothing() -> None:
    replicas, attempts = following([RequestRefusedError("too long")])
    with pytest.raises(RequestRefusedError):
        await attempts.next()
    assert len(replicas.requests) == 1
    assert await attempts.stop() is None


async def test_a_request_that_was_never_read_has_not_run() -> None:
    replicas, attempts = following([END])
    assert await attempts.stop() is None
    assert (replicas.requests, replicas.cancelled) == ([], [])


async def test_stopping_asks_the_replica_and_closes_the_stream() -> None:
    replicas, attempts = following([token(1), token(2), END])
    replicas.counts = lambda _request: 3
    await attempts.next()
    assert await attempts.stop() == 3
    assert replicas.cancelled == ["r1"]
    assert replicas.num_running == 0


async def test_tokens_of_earlier_attempts_count_too() -> None:
    replicas, attempts = following([token(1), token(2), DEATH], [token(3), token(4), END])
    replicas.counts = lambda _request: 2
    for _ in range(3):
        await attempts.next()
    assert await attempts.stop() == 4


@pytest.mark.parametrize("answer", [None, 0, EngineDeadError("away"), RuntimeError("odd")])
async def test_where_the_replica_does_not_know_what_was_received_counts(answer: int | Exception | None) -> None:
    replicas, attempts = following([token(1, 2), token(3), END])
    replicas.counts = lambda _request: answer
    await attempts.next()
    assert await attempts.stop() == 2


async def test_a_replica_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(FakeReplicas):
        async def cancel(self, model: str, request_id: str) -> int | None:
            await asyncio.Event().wait()
            return None

    monkeypatch.setattr("router.attempts.STOP_TIMEOUT_S", 0.0)
    replicas = Silent(lambda _request: [token(1), END])
    attempts = Attempts(replicas, "tiny", REQUEST)
    await attempts.next()
    assert await attempts.stop() == 1
