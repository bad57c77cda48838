"""Several prompts, several outputs, log-probabilities and echo, over HTTP."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from cluster.api import Usage
from router.api import build_http_app
from tests.router.fakes import KEY, MODEL, House, says
from tests.router.test_http_streams import chunks_of

ANSWERS = ("one", "two words", "3", "and the fourth")


@pytest.fixture
async def four(house: House) -> Any:
    """A client of a model that says `ANSWERS`, one for each choice."""
    house.replicas.script = says(house.codec, *ANSWERS)
    transport = httpx.ASGITransport(app=build_http_app(house.wiring()))
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
        yield client


async def test_p_str_07_every_choice_of_a_chat_stream_has_its_own_role_text_and_end(
    four: httpx.AsyncClient,
) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "n": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    *chunks, last = chunks_of(await four.post("/v1/chat/completions", json=body))
    pieces: dict[int, list[Any]] = {index: [] for index in range(4)}
    for chunk in chunks:
        for choice in chunk["choices"]:  # type: ignore[attr-defined]
            pieces[choice["index"]].append(choice)
    for index, text in enumerate(ANSWERS):
        deltas = [piece["delta"] for piece in pieces[index]]
        assert [delta["role"] for delta in deltas if "role" in delta] == ["assistant"]
        assert "".join(delta.get("content", "") for delta in deltas) == text
        assert [piece["finish_reason"] for piece in pieces[index] if piece["finish_reason"]] == ["stop"]
        assert pieces[index][-1]["finish_reason"] == "stop"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == sum(len(text) + 1 for text in ANSWERS)  # type: ignore[index]


async def test_p_val_08_every_prompt_gets_its_own_answers_in_its_own_place(
    four: httpx.AsyncClient, house: House
) -> None:
    prompts = [f"prompt {number}" for number in range(8)]
    body = {"model": MODEL, "prompt": prompts, "n": 2, "echo": True, "max_tokens": 50}
    whole = (await four.post("/v1/completions", json=body)).json()
    expected = [prompts[index // 2] + ANSWERS[index % 2] for index in range(16)]
    assert [choice["index"] for choice in whole["choices"]] == list(range(16))
    assert [choice["text"] for choice in whole["choices"]] == expected
    assert whole["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert whole["usage"]["completion_tokens"] == 8 * (4 + 10)
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 8 * 4
    streamed = [""] * 16
    for chunk in chunks_of(await four.post("/v1/completions", json={**body, "stream": True})):
        for choice in chunk["choices"]:  # type: ignore[attr-defined]
            streamed[choice["index"]] += choice["text"]
    assert streamed == expected
    usage = Usage(prompt_tokens=64, completion_tokens=112, cached_tokens=32)
    assert house.admission.usages == [usage, usage]


async def test_p_val_02_nothing_but_the_prompt_s_own_scores(four: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0}
    (choice,) = (await four.post("/v1/completions", json=body)).json()["choices"]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


async def test_offsets_of_an_answer_go_on_where_its_echo_ends(four: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": "abc", "logprobs": 1, "max_tokens": 2}
    for echo, offsets in ((True, [0, 1, 2, 3, 4]), (False, [0, 1])):
        (choice,) = (await four.post("/v1/completions", json=body | {"echo": echo})).json()["choices"]
        assert choice["logprobs"]["text_offset"] == offsets


async def test_p_val_07_an_echo_has_what_followed_a_nul(four: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": "left\u0000right", "echo": True, "max_tokens": 1}
    (choice,) = (await four.post("/v1/completions", json=body)).json()["choices"]
    assert choice["text"] == "left\u0000righto"


async def test_a_chat_s_log_probabilities_name_every_token_once(four: httpx.AsyncClient) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "logprobs": True,
        "top_logprobs": 2,
    }
    (choice,) = (await four.post("/v1/chat/completions", json=body)).json()["choices"]
    content = choice["logprobs"]["content"]
    assert bytes(byte for position in content for byte in position["bytes"]) == b"one"
    assert {len(position["top_logprobs"]) for position in content} == {2}
    chunks = chunks_of(await four.post("/v1/chat/completions", json={**body, "stream": True}))
    streamed = [
        position
        for chunk in chunks
        for piece in chunk["choices"]  # type: ignore[attr-defined]
        for position in (piece["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content


@pytest.mark.parametrize("n", [0, -1, 1.5, 17])
async def test_p_str_07_a_number_of_choices_that_cannot_be_is_refused(four: httpx.AsyncClient, n: float) -> None:
    answer = await four.post("/v1/completions", json={"model": MODEL, "prompt": "hi", "n": n})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
