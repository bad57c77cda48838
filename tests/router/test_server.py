"""The application behind a real server: what clients see of it, and what it sees of clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator

import openai
import pytest
import uvicorn

from cluster.api import LimitStatus, Refusal, RefusalCode, Usage
from engine.api import TokenDelta
from router.api import build_http_app
from tests.router.fakes import CONTEXT, KEY, MODEL, House

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
PROMPT_TOKENS = 7


@pytest.fixture
async def port(house: House) -> AsyncIterator[int]:
    """A server on a free port, on the test's own event loop."""
    config = uvicorn.Config(build_http_app(house.wiring()), port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    yield int(listener.getsockname()[1])
    server.should_exit = True
    await serving
    listener.close()


@pytest.fixture
async def client(port: int) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0) as client:
        yield client


async def test_the_openai_client_lists_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL, "org/other"]
    assert (await client.models.retrieve("org/other")).id == "org/other"


async def test_the_openai_client_chats(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.choices[0].message.content == "Hello, world"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 20
    follow_up = [*MESSAGES, answer.choices[0].message.model_dump(), {"role": "user", "content": "and?"}]
    again = await client.chat.completions.create(model=MODEL, messages=follow_up)  # type: ignore[arg-type]
    assert again.choices[0].finish_reason == "stop"


async def test_the_openai_client_streams_a_chat(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello, world"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 13


async def test_the_openai_client_completes(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="hi", max_tokens=5, extra_body={"top_k": 5})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hello", "length")


async def test_the_openai_client_streams_a_completion(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model=MODEL, prompt=[1, 2], max_tokens=5, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello"


async def test_the_openai_client_sees_typed_errors(client: openai.AsyncOpenAI, house: House) -> None:
    chat = client.chat.completions
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError) as missing:
        await chat.create(model="nope", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await chat.create(model=MODEL, messages=MESSAGES, temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        await chat.create(model=MODEL, messages=[{"role": "user", "content": "x" * CONTEXT}], stream=True)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.PermissionDeniedError):
        await client.get("/../admin/v1/queue", cast_to=object)
    house.admission.refusal = Refusal(
        request_id="r1",
        code=RefusalCode.TOKENS_PER_MINUTE,
        message="used up",
        retry_after_s=9,
        status=LimitStatus(),
    )
    with pytest.raises(openai.RateLimitError) as spent:
        await chat.create(model=MODEL, messages=MESSAGES)
    assert (spent.value.code, spent.value.response.headers["retry-after"]) == ("tokens_per_minute", "9")


async def open_request(port: int, *, stream: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a chat over a bare socket."""
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": %s}' % (
        b"true" if stream else b"false"
    )
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: router\r\nauthorization: Bearer {KEY}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer


async def leave(writer: asyncio.StreamWriter, *, reset: bool) -> None:
    """Close a connection, by RST if `reset`."""
    if reset:
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def until_closed(house: House, count: int) -> None:
    async with asyncio.timeout(10):
        while len(house.admission.closed) < count:
            await asyncio.sleep(0)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_ends_its_request(port: int, house: House, stream: bool, reset: bool) -> None:
    (h,) = house.codec.encode("H")
    house.replicas.script = lambda _request: [TokenDelta(token_ids=(h,)), asyncio.Event()]
    house.replicas.unseen = (h,)
    for count in range(1, 11):
        house.replicas.waiting.clear()
        reader, writer = await open_request(port, stream=stream)
        if stream:
            await reader.readuntil(b'"content":"H"')
        await house.replicas.waiting.wait()
        await leave(writer, reset=reset)
        await until_closed(house, count)
    assert house.admission.usages == [Usage(prompt_tokens=PROMPT_TOKENS, completion_tokens=2)] * 10
    assert len(house.replicas.cancelled) == 10
    assert house.replicas.num_running == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_in_the_queue_withdraws_its_ask(port: int, house: House, stream: bool) -> None:
    house.admission.gate = asyncio.Event()
    _, writer = await open_request(port, stream=stream)
    async with asyncio.timeout(10):
        while not house.admission.asks:
            await asyncio.sleep(0)
        await leave(writer, reset=False)
        while not house.admission.withdrawn:
            await asyncio.sleep(0)
    assert house.admission.closed == []
    assert house.replicas.requests == []


async def test_a_hundred_streams_at_once_are_each_served_and_closed_once(
    client: openai.AsyncOpenAI, house: House
) -> None:
    async def one() -> str:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert await asyncio.gather(*(one() for _ in range(100))) == ["Hello, world"] * 100
    assert (
        house.admission.usages
        == [Usage(prompt_tokens=PROMPT_TOKENS, completion_tokens=13, cached_tokens=PROMPT_TOKENS // 2)] * 100
    )
    assert house.replicas.num_running == 0
