from __future__ import annotations

import json

import httpx
import pytest

from cluster.api import Usage
from engine.api import EngineDeadError, TextCodec
from router.api import build_http_app
from tests.router.fakes import KEY, MODEL, House, says

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
TEXT = {"model": MODEL, "prompt": "hi", "stream": True}
ENDPOINTS = [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]
TEXT_OF_ALL_KINDS = 'né "quoted" \\ \n€🙂\u2028end'


def events_of(response: httpx.Response) -> list[str]:
    """The data of each event, after checking the framing."""
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    body = response.content.decode("utf-8")
    assert body.endswith("\n\n")
    events = body.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]


def chunks_of(response: httpx.Response) -> list[dict[str, object]]:
    """The chunks of a stream that ended well."""
    *chunks, done = events_of(response)
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def text_of(chunks: list[dict[str, object]]) -> str:
    text = ""
    for chunk in chunks:
        for choice in chunk["choices"]:  # type: ignore[attr-defined]
            text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return text


async def test_a_chat_stream_is_role_text_end_done(client: httpx.AsyncClient) -> None:
    chunks = chunks_of(await client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 2}))
    head = {key: chunks[0][key] for key in ("id", "object", "created", "model")}
    assert str(head["id"]).startswith("chatcmpl-")
    assert (head["object"], head["model"]) == ("chat.completion.chunk", MODEL)

    def chunk(delta: dict[str, str], finish_reason: str | None = None) -> dict[str, object]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return head | {"choices": [choice]}

    assert chunks == [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "H"}),
        chunk({"content": "e"}),
        chunk({}, "length"),
    ]


async def test_a_completion_stream_is_text_end_done(client: httpx.AsyncClient) -> None:
    chunks = chunks_of(await client.post("/v1/completions", json=TEXT | {"max_tokens": 2}))
    head = {key: chunks[0][key] for key in ("id", "object", "created", "model")}
    assert str(head["id"]).startswith("cmpl-")
    assert (head["object"], head["model"]) == ("text_completion", MODEL)

    def chunk(text: str, finish_reason: str | None = None) -> dict[str, object]:
        return head | {"choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}]}

    assert chunks == [chunk("H"), chunk("e"), chunk("", "length")]


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_usage_is_nowhere_unless_asked_for(
    client: httpx.AsyncClient, path: str, body: dict[str, object], options: object
) -> None:
    chunks = chunks_of(await client.post(path, json=body | {"stream_options": options}))
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_usage_comes_last_with_no_choices_and_equals_the_whole_answer_s(
    client: httpx.AsyncClient, path: str, body: dict[str, object]
) -> None:
    chunks = chunks_of(await client.post(path, json=body | {"stream_options": {"include_usage": True}}))
    whole = (await client.post(path, json=body | {"stream": False})).json()
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert (chunks[-1]["usage"], chunks[-1]["choices"]) == (whole["usage"], [])
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"  # type: ignore[index]


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_streams_and_whole_answers_agree_on_text_and_usage(
    codec: TextCodec, path: str, body: dict[str, object]
) -> None:
    lengths = range(1, len(TEXT_OF_ALL_KINDS.encode()) + 2)
    stops = [TEXT_OF_ALL_KINDS[at : at + 3] for at in range(len(TEXT_OF_ALL_KINDS) - 3)]
    variants: list[dict[str, object]] = [{"max_tokens": length} for length in lengths]
    variants += [{"max_tokens": 40, "stop": stop} for stop in (*stops, ["end", "en", "\n€🙂"])]
    house = House(codec, TEXT_OF_ALL_KINDS)
    app = build_http_app(house.wiring())
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://router", headers=headers
    ) as client:
        for fields in variants:
            asked = body | fields | {"stream_options": {"include_usage": True}}
            chunks = chunks_of(await client.post(path, json=asked))
            whole = (await client.post(path, json=body | fields | {"stream": False})).json()
            choice = whole["choices"][0]
            assert text_of(chunks) == (choice["text"] if "text" in choice else choice["message"]["content"])
            assert chunks[-1]["usage"] == whole["usage"]
            assert chunks[-2]["choices"][0]["finish_reason"] == choice["finish_reason"]  # type: ignore[index]
            if "stop" in fields and isinstance(fields["stop"], str):
                assert text_of(chunks) == TEXT_OF_ALL_KINDS[: TEXT_OF_ALL_KINDS.index(fields["stop"])]


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_an_error_in_mid_stream_is_an_event_and_the_stream_ends_without_done(
    client: httpx.AsyncClient, house: House, path: str, body: dict[str, object]
) -> None:
    good = says(house.codec, "Hello, world")
    house.replicas.script = lambda request: [*good(request)[:2], EngineDeadError("the replica was lost")]
    *chunks, last = [json.loads(event) for event in events_of(await client.post(path, json=body))]
    assert last == {
        "error": {"message": "the replica was lost", "type": "server_error", "param": None, "code": "engine_dead"}
    }
    # Three attempts of two tokens each.
    assert text_of(chunks) == "Hello,"
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])


async def test_an_unknown_error_in_mid_stream_tells_nothing_of_itself(client: httpx.AsyncClient, house: House) -> None:
    good = says(house.codec, "Hello")
    house.replicas.script = lambda request: [*good(request)[:2], RuntimeError("secret")]
    response = await client.post("/v1/chat/completions", json=CHAT)
    last = json.loads(events_of(response)[-1])
    assert last["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert house.admission.usages == [Usage(prompt_tokens=7, completion_tokens=2, cached_tokens=3)]


@pytest.mark.parametrize("stop", ["H", "Hello, world"])
async def test_an_empty_answer_is_still_a_whole_stream(client: httpx.AsyncClient, stop: str) -> None:
    chunks = chunks_of(await client.post("/v1/chat/completions", json=CHAT | {"stop": stop}))
    assert text_of(chunks) == ""
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "stop"]  # type: ignore[index]
