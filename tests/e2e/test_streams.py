"""Streams by the hundred: every one is framed, ends once, and leaves nothing behind when its client hangs up."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from deployments.local import session_processes
from tests.e2e.conftest import CRAMPED_MODEL, CRAMPED_SLOTS, SIMULATED_MODEL, Running
from tests.e2e.sse import read
from tests.e2e.test_nothing_leaks import held_in_the_end, queue_of

pytestmark = [pytest.mark.e2e, pytest.mark.model]

NUM_STREAMS = 500
CONCURRENCY = 16
NUM_HANG_UPS = 300
READS_BEFORE = 3


def stream_body(number: int) -> dict[str, Any]:
    """Of either endpoint; one or three outputs; ended by length, or by a stop string or end token that comes."""
    rng = random.Random(number)
    body: dict[str, Any] = {
        "model": SIMULATED_MODEL,
        "max_tokens": rng.randint(1, 30),
        "n": rng.choice((1, 1, 3)),
        "seed": number,
        "ignore_eos": rng.random() < 0.5,
        "stream_options": {"include_usage": True},
    }
    if rng.random() < 0.5:
        body["stop"] = ["e", "a"][: rng.randint(1, 2)]
    if rng.random() < 0.5:
        return body | {"prompt": f"Tell me {number}"}
    return body | {"messages": [{"role": "user", "content": f"Tell me {number}"}]}


async def test_p_str_04_five_hundred_streams_all_end_as_they_should(running: Running) -> None:
    headers = {"Authorization": f"Bearer {running.api_key}"}
    turn = asyncio.Semaphore(CONCURRENCY)

    async def one(number: int) -> list[str | None]:
        body = stream_body(number)
        async with turn:
            stream = await read(http, body)
        assert stream.done
        assert stream.error is None
        assert sorted(stream.choices) == list(range(body["n"]))
        assert stream.usage is not None
        return [choice.finish_reason for choice in stream.choices.values()]

    async with httpx.AsyncClient(base_url=running.url, headers=headers, timeout=60.0) as http:
        ends = await asyncio.gather(*(one(number) for number in range(NUM_STREAMS)))
    assert len(ends) == NUM_STREAMS
    assert {end for each in ends for end in each} == {"stop", "length"}


def request_bytes(running: Running, *, stream: bool) -> bytes:
    flag = "true" if stream else "false"
    body = f'{{"model":"{SIMULATED_MODEL}","prompt":"Once","max_tokens":2000,"ignore_eos":true,"stream":{flag}}}'
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {running.api_key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    ).encode()


async def hang_up(running: Running, number: int) -> None:
    """Every third waits for a whole answer and gives up; the others leave a stream, half of them by a reset."""
    address = urlsplit(running.url)
    stream = number % 3 != 0
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(request_bytes(running, stream=stream))
    if stream:
        for _ in range(READS_BEFORE):
            assert (await reader.readuntil(b"data: ")).endswith(b"data: ")
    else:
        await asyncio.sleep(1.0)
    if number % 2:
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()


def generated(queue: dict[str, Any]) -> int:
    return sum(int(engine["num_generated_tokens"]) for model in queue["models"] for engine in model["engines"])


async def test_p_str_06_three_hundred_clients_hang_up_and_nothing_runs_on(running: Running) -> None:
    before = generated(await queue_of(running))
    turn = asyncio.Semaphore(CONCURRENCY)

    async def one(number: int) -> None:
        async with turn:
            await hang_up(running, number)

    await asyncio.gather(*(one(number) for number in range(NUM_HANG_UPS)))
    assert not any((await held_in_the_end(running)).values())
    spent = generated(await queue_of(running)) - before
    assert NUM_HANG_UPS < spent < NUM_HANG_UPS * 2000 / 4
    assert generated(await queue_of(running)) - before == spent


async def test_p_str_05_a_killed_replica_is_not_seen_in_any_stream(running: Running) -> None:
    headers = {"Authorization": f"Bearer {running.api_key}"}
    bodies = [
        {"model": CRAMPED_MODEL, "prompt": f"Tell me {number}", "max_tokens": 300, "seed": number, "ignore_eos": True}
        for number in range(2 * CRAMPED_SLOTS)
    ]

    async def whole(body: dict[str, Any]) -> str:
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    async with httpx.AsyncClient(base_url=running.url, headers=headers, timeout=120.0) as http:
        alone = [await read(http, body) for body in bodies[:2]]
        streams = [asyncio.create_task(read(http, body)) for body in bodies]
        answers = [asyncio.create_task(whole(body)) for body in bodies[:2]]
        await asyncio.sleep(1.0)
        (actor,) = [each for each in session_processes(running.session_id) if CRAMPED_MODEL in " ".join(each.cmdline())]
        actor.kill()
        ended = await asyncio.gather(*streams)
        texts = await asyncio.gather(*answers)

    assert [stream.error for stream in ended] == [None] * len(bodies)
    assert all(stream.done and stream.choices[0].finish_reason == "length" for stream in ended)
    assert [stream.text for stream in ended[:2]] == [stream.text for stream in alone] == list(texts)
    assert not any((await held_in_the_end(running)).values())
