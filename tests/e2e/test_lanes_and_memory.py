"""A replica that is full: higher lanes come first, equals wait their turn, and what can never fit delays nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import CRAMPED_KV_TOKENS, CRAMPED_MODEL, CRAMPED_SLOTS, Running
from tests.e2e.sse import Stream, read
from tests.e2e.test_nothing_leaks import held_in_the_end

pytestmark = [pytest.mark.e2e, pytest.mark.model]


def body(number: int, max_tokens: int, **more: Any) -> dict[str, Any]:
    fixed = {"model": CRAMPED_MODEL, "max_tokens": max_tokens, "seed": number, "ignore_eos": True}
    return fixed | {"prompt": f"Number {number}"} | more


@pytest.fixture
async def http(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {running.api_key}"}
    async with httpx.AsyncClient(base_url=running.url, headers=headers, timeout=120.0) as http:
        yield http


async def engine(running: Running) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {running.admin_key}"}
    async with httpx.AsyncClient(base_url=running.url, headers=headers, timeout=30.0) as http:
        answer = await http.get("/admin/v1/replicas")
    (replica,) = [each for each in answer.json()["replicas"] if each["model"] == CRAMPED_MODEL]
    stats: dict[str, Any] = replica["stats"]
    return stats


async def all_running(running: Running, number: int) -> None:
    while (await engine(running))["num_running"] < number:
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("full", ["slots", "memory"])
async def test_p_sch_02_a_higher_lane_is_served_before_any_of_a_full_house_ends(
    running: Running, http: httpx.AsyncClient, full: str
) -> None:
    num_low = CRAMPED_SLOTS if full == "slots" else CRAMPED_SLOTS - 1
    third = CRAMPED_KV_TOKENS // 3
    num_prompt, num_high_prompt = (10, 10) if full == "slots" else (third - 200, third)
    low = [body(number, 190, priority="batch", prompt=[number + 5] * num_prompt) for number in range(num_low)]
    alone = await read(http, low[-1])
    before = (await engine(running))["num_preemptions"]

    ends: list[str] = []

    async def run(name: str, asked: dict[str, Any]) -> Stream:
        def first(stream: Stream) -> None:
            if len(stream.at) == 1:
                ends.append(f"first of {name}")

        stream = await read(http, asked, first)
        ends.append(name)
        return stream

    lows = [asyncio.create_task(run("low", each)) for each in low]
    await all_running(running, num_low)
    high = await run("high", body(99, 10, priority="interactive", prompt=[99] * num_high_prompt))
    streams = await asyncio.gather(*lows)

    assert ends.index("first of high") < ends.index("low")
    assert high.choices[0].finish_reason == "length"
    assert [stream.choices[0].finish_reason for stream in streams] == ["length"] * num_low
    assert streams[-1].text == alone.text
    assert (await engine(running))["num_preemptions"] == before + 1


async def test_p_sch_02_equals_are_served_in_the_order_of_arrival_and_never_displaced(
    running: Running, http: httpx.AsyncClient
) -> None:
    before = (await engine(running))["num_preemptions"]
    order: list[int] = []

    async def run(number: int) -> None:
        def first(stream: Stream) -> None:
            if len(stream.at) == 1:
                order.append(number)

        await read(http, body(number, 30 + number), first)

    tasks = []
    for number in range(3 * CRAMPED_SLOTS):
        tasks.append(asyncio.create_task(run(number)))
        await asyncio.sleep(0.1)
    await asyncio.gather(*tasks)
    assert order == list(range(3 * CRAMPED_SLOTS))
    assert (await engine(running))["num_preemptions"] == before


async def test_an_operator_is_told_what_became_of_a_request(running: Running, http: httpx.AsyncClient) -> None:
    begun: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def first(stream: Stream) -> None:
        if not begun.done():
            assert stream.id is not None
            begun.set_result(stream.id)

    stream = asyncio.create_task(read(http, body(0, 400), first))
    path = f"/admin/v1/requests/{await begun}/explain"
    headers = {"Authorization": f"Bearer {running.admin_key}"}
    during = await http.get(path, headers=headers)
    await stream
    after = await http.get(path, headers=headers)

    (sequence,) = during.json()["sequences"]
    assert (during.json()["model"], sequence["status"], sequence["now"]) == (CRAMPED_MODEL, "running", None)
    assert (after.status_code, after.json()["error"]["code"]) == (404, "request_not_found")


async def test_p_sch_01_what_can_never_fit_is_refused_and_delays_nobody(
    running: Running, http: httpx.AsyncClient
) -> None:
    never = await http.post("/v1/completions", json=body(0, 1, prompt=[1] * (CRAMPED_KV_TOKENS + 1)))
    small = await asyncio.gather(*(read(http, body(number, 20)) for number in range(10)))
    assert never.status_code == 400
    assert [stream.usage or stream.choices[0].finish_reason for stream in small] == ["length"] * 10
    assert not any((await held_in_the_end(running)).values())
