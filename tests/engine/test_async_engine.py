from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from engine.api import EngineDeadError, FinishReason, GenerateRequest, RequestRefusedError, TokenDelta
from engine.async_engine import AsyncEngine
from engine.config import ConfigError
from engine.engine import Engine
from engine.plan import StepPlan, StepResult
from tests.engine.makers import PagedMemoryExecutor, expected_output, make_engine, request, sampling

ENDLESS = sampling(200, ignore_eos=True)


@dataclass
class GatedExecutor(PagedMemoryExecutor):
    """Computes a step whenever the test lets it."""

    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    fail: bool = False

    def execute(self, plan: StepPlan) -> StepResult:
        self.gate.acquire()
        if self.fail:
            raise RuntimeError("out of memory")
        return super().execute(plan)

    def allow(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.gate.release()


async def collect(stream: AsyncIterator[TokenDelta]) -> tuple[list[int], FinishReason | None]:
    tokens: list[int] = []
    async for delta in stream:
        tokens.extend(delta.token_ids)
        if delta.finish_reason is not None:
            return tokens, delta.finish_reason
    return tokens, None


async def settled(engine: AsyncEngine) -> None:
    """Wait until nothing is open; the test's own timeout bounds it."""
    while (stats := engine.stats()).num_running or stats.num_waiting:
        await asyncio.sleep(0)


async def test_concurrent_requests_get_their_own_answers() -> None:
    engine = AsyncEngine(lambda: make_engine(num_blocks=200))
    requests = [request(f"r{number}", num_prompt=1 + number, max_tokens=5 + number % 7) for number in range(32)]
    answers = await asyncio.gather(*(collect(engine.generate(each)) for each in requests))
    for each, (tokens, reason) in zip(requests, answers, strict=True):
        assert tokens == expected_output(each.prompt_token_ids, each.sampling)
        assert reason in (FinishReason.STOP, FinishReason.LENGTH)
    await engine.drain(1.0)


async def test_a_slow_consumer_finds_all_tokens_in_one_delta() -> None:
    executor = GatedExecutor(4)
    engine = AsyncEngine(lambda: make_engine(executor=executor))
    stream = engine.generate(request(max_tokens=6, sampling=sampling(6, ignore_eos=True)))
    executor.allow()
    first = await anext(stream)
    executor.allow(5)
    await settled(engine)
    assert await engine.cancel("r") == 6  # it has ended: all deltas have been delivered
    rest = [delta async for delta in stream]
    assert (len(first.token_ids), [len(delta.token_ids) for delta in rest]) == (1, [5])
    assert rest[0].finish_reason is FinishReason.LENGTH
    await engine.drain(0.0)


async def test_closing_a_stream_frees_its_blocks_within_one_step() -> None:
    executor = GatedExecutor(4)
    engine = AsyncEngine(lambda: make_engine(executor=executor))
    stream = engine.generate(request(sampling=ENDLESS))
    executor.allow()
    await anext(stream)
    await stream.aclose()
    executor.allow()  # the step that may already have been under way
    await settled(engine)
    assert engine.stats().num_used_blocks == 0
    assert engine.stats().num_generated_tokens <= 2
    assert await engine.cancel("r") == engine.stats().num_generated_tokens
    await engine.drain(0.0)


async def test_cancel_answers_with_the_exact_count_and_ends_the_stream() -> None:
    executor = GatedExecutor(4)
    engine = AsyncEngine(lambda: make_engine(executor=executor))
    reader = asyncio.create_task(collect(engine.generate(request(sampling=ENDLESS))))
    executor.allow(5)
    while engine.stats().num_generated_tokens < 5:
        await asyncio.sleep(0)
    cancelling = asyncio.create_task(engine.cancel("r"))
    await asyncio.sleep(0)  # the command is on its way before the step under way may end
    executor.allow()
    count = await cancelling
    tokens, reason = await reader
    assert (len(tokens), reason) == (count, FinishReason.CANCELLED)
    assert await engine.cancel("r") == count
    assert await engine.cancel("never seen") is None
    await engine.drain(0.0)


def test_what_goes_wrong_at_the_start_is_raised_there() -> None:
    def build() -> Engine:
        raise ConfigError("the model does not fit")

    with pytest.raises(ConfigError, match="the model does not fit"):
        AsyncEngine(build)


async def test_refusals_come_before_the_first_delta() -> None:
    executor = GatedExecutor(4)
    engine = AsyncEngine(lambda: make_engine(executor=executor))
    with pytest.raises(RequestRefusedError, match="the prompt is empty"):
        await collect(engine.generate(request(num_prompt=0)))
    first = engine.generate(request(sampling=ENDLESS))
    executor.allow()
    await anext(first)
    with pytest.raises(RequestRefusedError, match="'r' is in use"):
        await collect(engine.generate(request()))
    await first.aclose()
    executor.allow()
    await engine.drain(0.0)


async def test_when_a_step_fails_every_open_request_ends_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    executor = GatedExecutor(4, fail=True)
    engine = AsyncEngine(lambda: make_engine(executor=executor, max_num_seqs=1))
    streams = [asyncio.create_task(collect(engine.generate(request(name)))) for name in ("running", "waiting")]
    await asyncio.sleep(0)
    engine.check_health()
    executor.allow()
    for stream in streams:
        with pytest.raises(EngineDeadError, match="RuntimeError: out of memory"):
            await stream
    with pytest.raises(EngineDeadError):
        await collect(engine.generate(request("late")))
    await engine.drain(0.0)
    with pytest.raises(EngineDeadError):
        engine.check_health()
    assert "the engine died" in caplog.text


async def test_drain_lets_open_requests_finish_and_takes_no_new_ones() -> None:
    executor = GatedExecutor(4)
    engine = AsyncEngine(lambda: make_engine(executor=executor))
    reader = asyncio.create_task(collect(engine.generate(request(sampling=sampling(5, ignore_eos=True)))))
    await asyncio.sleep(0)
    draining = asyncio.create_task(engine.drain(60.0))
    await asyncio.sleep(0)
    with pytest.raises(EngineDeadError, match="shutting down"):
        await collect(engine.generate(request("late")))
    executor.allow(5)
    await draining
    assert await reader == (
        expected_output(request().prompt_token_ids, sampling(5, ignore_eos=True)),
        FinishReason.LENGTH,
    )


async def test_drain_hands_back_what_is_left_when_its_time_is_over() -> None:
    executor = GatedExecutor(4)
    engine = AsyncEngine(lambda: make_engine(executor=executor))
    reader = asyncio.create_task(collect(engine.generate(request(sampling=ENDLESS))))
    executor.allow(3)
    while engine.stats().num_generated_tokens < 3:
        await asyncio.sleep(0)
    draining = asyncio.create_task(engine.drain(0.0))
    while not draining.done():
        executor.allow()
        await asyncio.sleep(0)
    assert (await reader)[1] is FinishReason.HANDED_BACK
    assert engine.stats().num_used_blocks == 0


def open_generate_request(number: int) -> GenerateRequest:
    return request(f"r{number}", num_prompt=1 + number % 40, sampling=sampling(1 + number % 50, ignore_eos=True))


async def test_a_storm_of_disconnects_leaves_nothing_behind() -> None:
    engine = AsyncEngine(lambda: make_engine(num_blocks=60, max_num_seqs=8, max_num_batched_tokens=32))

    async def client(number: int) -> None:
        stream = engine.generate(open_generate_request(number))
        async for delta in stream:
            if number % 3 == 0 and len(delta.token_ids):
                await stream.aclose()
                return

    await asyncio.gather(*map(client, range(300)))
    await settled(engine)
    assert engine.stats().num_used_blocks == 0
    await engine.drain(0.0)
