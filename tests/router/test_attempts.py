from __future__ import annotations

import asyncio

import pytest

from engine.api import (
    Choice,
    EngineDeadError,
    FinishReason,
    GenerateRequest,
    RequestRefusedError,
    SamplingParams,
    TokenDelta,
)
from router.attempts import Attempts
from tests.router.fakes import FakeReplicas, Step

SAMPLING = SamplingParams(max_tokens=9, seed=5, prompt_logprobs=2)
JOB = GenerateRequest(request_id="r1", prompt_token_ids=(1, 2), sampling=SAMPLING)
PAIR = GenerateRequest(
    request_id="r1", prompt_token_ids=(1, 2), sampling=SAMPLING, choices=(Choice(index=0), Choice(index=1))
)
DEATH = EngineDeadError("killed")


def token(*token_ids: int, index: int = 0) -> TokenDelta:
    return TokenDelta(index=index, token_ids=token_ids)


def end(*token_ids: int, index: int = 0, reason: FinishReason = FinishReason.STOP) -> TokenDelta:
    return TokenDelta(index=index, token_ids=token_ids, finish_reason=reason)


def following(*scripts: list[Step], job: GenerateRequest = JOB, left_s: float = 100) -> tuple[FakeReplicas, Attempts]:
    """A job whose first attempt follows the first script, and so on."""
    left = iter(scripts)
    replicas = FakeReplicas(lambda _request: next(left))
    return replicas, Attempts(replicas, "tiny", job, asyncio.get_running_loop().time() + left_s)


async def read(attempts: Attempts) -> list[TokenDelta]:
    deltas = []
    while not attempts.ended:
        deltas.append(await attempts.next())
    return [delta for delta in deltas if delta is not None]


def resumed(request: GenerateRequest) -> dict[int, tuple[int, ...]]:
    return {choice.index: choice.resumed_token_ids for choice in request.choices}


async def test_tokens_come_as_the_replica_sends_them() -> None:
    replicas, attempts = following([token(1), token(2, 3), end(9)])
    assert await read(attempts) == [token(1), token(2, 3), end(9)]
    assert replicas.requests[0].choices == JOB.choices


async def test_the_replica_is_told_how_much_time_is_left() -> None:
    replicas, attempts = following([DEATH], [end(9)], left_s=100)
    await read(attempts)
    first, second = (request.timeout_s for request in replicas.requests)
    assert first is not None
    assert second is not None
    assert 0 < second <= first <= 100
    replicas, attempts = following([end(9)], left_s=-5)
    await read(attempts)
    assert replicas.requests[0].timeout_s == 0


async def test_a_death_before_the_first_token_is_retried_once_from_the_start() -> None:
    replicas, attempts = following([DEATH], [token(1), end(9)])
    assert await read(attempts) == [token(1), end(9)]
    assert [resumed(request) for request in replicas.requests] == [{0: ()}, {0: ()}]
    assert [request.sampling for request in replicas.requests] == [SAMPLING, SAMPLING]


async def test_a_second_death_before_the_first_token_is_the_client_s() -> None:
    replicas, attempts = following([DEATH], [DEATH])
    with pytest.raises(EngineDeadError, match="killed"):
        await read(attempts)
    assert len(replicas.requests) == 2
    assert (attempts.ended, attempts.ran) == (True, False)


async def test_a_death_in_mid_stream_is_resumed_with_the_tokens_so_far_and_the_same_seed() -> None:
    replicas, attempts = following([token(1), token(2), DEATH], [token(3), end(9)])
    assert await read(attempts) == [token(1), token(2), token(3), end(9)]
    assert [resumed(request) for request in replicas.requests] == [{0: ()}, {0: (1, 2)}]
    assert [request.sampling.seed for request in replicas.requests] == [5, 5]


async def test_the_prompt_is_scored_only_once() -> None:
    replicas, attempts = following([token(1), DEATH], [end(9)])
    await read(attempts)
    assert [request.sampling.prompt_logprobs for request in replicas.requests] == [2, None]


async def test_a_stream_is_resumed_twice_at_most() -> None:
    replicas, attempts = following([token(1), DEATH], [DEATH], [token(2), DEATH])
    with pytest.raises(EngineDeadError, match="killed"):
        await read(attempts)
    assert [resumed(request) for request in replicas.requests] == [{0: ()}, {0: (1,)}, {0: (1,)}]
    assert (attempts.ended, attempts.ran) == (True, True)
    assert replicas.num_running == 0


async def test_only_choices_that_go_on_are_resumed_each_with_its_own_tokens() -> None:
    replicas, attempts = following(
        [token(1), token(5, index=1), end(2), token(6, index=1), DEATH], [end(7, index=1)], job=PAIR
    )
    deltas = await read(attempts)
    assert deltas == [token(1), token(5, index=1), end(2), token(6, index=1), end(7, index=1)]
    assert resumed(replicas.requests[1]) == {1: (5, 6)}


async def test_a_choice_that_its_reader_has_ended_is_neither_read_nor_resumed() -> None:
    replicas, attempts = following(
        [token(1), token(5, index=1), token(2), token(6, index=1), DEATH], [end(7, index=1)], job=PAIR
    )
    assert await attempts.next() == token(1)
    await attempts.end(0)
    assert replicas.cancelled == [("r1", 0)]
    assert await read(attempts) == [token(5, index=1), token(6, index=1), end(7, index=1)]
    assert resumed(replicas.requests[1]) == {1: (5, 6)}


async def test_the_last_choice_to_be_ended_ends_it_all() -> None:
    _, attempts = following([token(1), token(2)])
    await attempts.next()
    ending = attempts.end(0)
    assert attempts.ended
    assert await attempts.next() is None
    await ending


async def test_a_stream_that_just_ends_counts_as_a_death() -> None:
    _, attempts = following([token(1)], [token(2), end(9)])
    assert await read(attempts) == [token(1), token(2), end(9)]


async def test_a_replica_that_shuts_down_hands_over_without_losing_a_token() -> None:
    handed_back = [end(2, reason=FinishReason.HANDED_BACK), end(6, index=1, reason=FinishReason.HANDED_BACK)]
    replicas, attempts = following([token(1), *handed_back], [end(3), end(7, index=1)], job=PAIR)
    assert await read(attempts) == [token(1), token(2), token(6, index=1), end(3), end(7, index=1)]
    assert resumed(replicas.requests[1]) == {0: (1, 2), 1: (6,)}


@pytest.mark.parametrize("error", [RequestRefusedError("too long"), RuntimeError("bug")])
async def test_other_errors_are_not_retried_and_nothing_ran(error: Exception) -> None:
    replicas, attempts = following([error])
    with pytest.raises(type(error)):
        await attempts.next()
    assert len(replicas.requests) == 1
    assert (attempts.ended, attempts.ran) == (True, False)


async def test_a_job_that_was_never_read_has_not_run_and_will_not() -> None:
    replicas, attempts = following([end(9)])
    await attempts.stop()
    assert await attempts.next() is None
    assert (attempts.ended, attempts.ran) == (True, False)
    assert (replicas.requests, replicas.cancelled) == ([], [])


async def test_after_stopping_what_was_generated_until_then_still_comes() -> None:
    replicas, attempts = following([token(1), token(2), end(9)])
    replicas.unseen = (2, 3)
    await attempts.next()
    await attempts.stop()
    assert await read(attempts) == [end(2, 3, reason=FinishReason.CANCELLED)]
    assert replicas.cancelled == [("r1", None)]


async def test_a_stopped_job_is_not_resumed() -> None:
    replicas, attempts = following([token(1), token(2)], [end(9)])
    replicas.script = lambda _request: [token(1), DEATH]
    await attempts.next()
    replicas._runs["r1"].open.clear()  # the cancel comes too late to be seen
    await attempts.stop()
    with pytest.raises(EngineDeadError):
        await attempts.next()
    assert len(replicas.requests) == 1


@pytest.mark.parametrize("deaf", [True, EngineDeadError("away"), RuntimeError("odd")])
async def test_where_no_replica_knows_the_job_nothing_is_waited_for(deaf: bool | Exception) -> None:
    replicas, attempts = following([token(1, 2), token(3), end(9)])
    replicas.deaf = deaf
    await attempts.next()
    await attempts.stop()
    assert (attempts.ended, attempts.ran) == (True, True)


async def test_a_replica_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(FakeReplicas):
        async def cancel(self, model: str, request_id: str, index: int | None = None) -> int | None:
            await asyncio.Event().wait()
            return None

    monkeypatch.setattr("router.attempts.CANCEL_TIMEOUT_S", 0.0)
    attempts = Attempts(Silent(lambda _request: [token(1), end(9)]), "tiny", JOB, 1e9)
    await attempts.next()
    await attempts.stop()
    assert attempts.ended
    await attempts.close()
