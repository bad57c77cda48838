"""What the real model answers, in float32: its sampling, its stop strings and its cache, seen from outside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from deployments.home import roulant_home
from deployments.models import DEFAULT_MODEL, model_path
from engine.text import TextCodec
from tests.e2e.conftest import Running
from tests.e2e.sse import read
from tests.e2e.test_nothing_leaks import held_in_the_end

pytestmark = [pytest.mark.e2e, pytest.mark.model]

VOCABULARY = 49152
REPEATED = "The number is 1" + "0" * 50
"""Goes on with the token that it repeats."""
STORY = "Once upon a time there was a small"
ROUNDING = 1e-3
"""Between two ways to compute one log-probability in float32."""


@pytest.fixture
async def http(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {running.api_key}"}
    async with httpx.AsyncClient(base_url=running.url, headers=headers, timeout=120.0) as http:
        yield http


def greedy(**more: Any) -> dict[str, Any]:
    return {"model": DEFAULT_MODEL, "temperature": 0} | more


async def answer(http: httpx.AsyncClient, **more: Any) -> dict[str, Any]:
    response = await http.post("/v1/completions", json=greedy(**more))
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    return whole


async def refusal(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> str | None:
    """The field that a 400 names."""
    response = await http.post(path, json=body)
    assert response.status_code == 400, response.text
    param: str | None = response.json()["error"]["param"]
    return param


async def scores(http: httpx.AsyncClient, **more: Any) -> list[dict[str, float]]:
    """The best log-probabilities of each of three tokens."""
    whole = await answer(http, prompt=REPEATED, max_tokens=3, logprobs=20, **more)
    best: list[dict[str, float]] = whole["choices"][0]["logprobs"]["top_logprobs"]
    return best


def lead(best: dict[str, float], first: str, second: str) -> float:
    return best[first] - best[second]


PENALTIES: tuple[dict[str, int], ...] = ({}, {"presence_penalty": 2}, {"frequency_penalty": 2})


async def test_p_cor_03_what_is_only_in_the_prompt_is_not_penalised(http: httpx.AsyncClient) -> None:
    plain, presence, frequency = [(await scores(http, **penalty))[0] for penalty in PENALTIES]
    assert presence == pytest.approx(plain, abs=ROUNDING)
    assert frequency == pytest.approx(plain, abs=ROUNDING)


async def test_p_cor_03_except_by_a_repetition_penalty(http: httpx.AsyncClient) -> None:
    plain = (await scores(http))[0]
    penalised = (await scores(http, repetition_penalty=1.3))[0]
    assert penalised != pytest.approx(plain, abs=ROUNDING)


async def test_p_cor_03_what_was_generated_is_penalised(http: httpx.AsyncClient) -> None:
    plain, presence, frequency = [await scores(http, **penalty) for penalty in PENALTIES]
    first = max(plain[0], key=lambda token: plain[0][token])
    for penalised in (presence, frequency):
        known = plain[1].keys() & penalised[1].keys()
        assert first in known
        assert known - {first}
        for other in known - {first}:
            moved = lead(penalised[1], first, other) - lead(plain[1], first, other)
            assert moved == pytest.approx(-2.0, abs=0.01)


async def test_p_str_02_no_piece_of_a_stop_string_is_sent_wherever_it_begins(http: httpx.AsyncClient) -> None:
    whole = await answer(http, prompt=STORY, max_tokens=24)
    text = whole["choices"][0]["text"]
    turn = asyncio.Semaphore(16)

    async def one(start: int, length: int, *, several: bool) -> None:
        stop = text[start : start + length]
        stops = [stop, stop + "?", stop + "??", stop + "???"] if several else [stop]
        kept = text[: text.index(stop)]
        body = greedy(prompt=STORY, max_tokens=24, stop=stops, stream_options={"include_usage": True})
        async with turn:
            stream = await read(http, body)
            body.pop("stream_options")
            together = (await http.post("/v1/completions", json=body)).json()
        assert stream.usage is not None
        assert stream.text == kept == together["choices"][0]["text"]
        assert stream.choices[0].finish_reason == together["choices"][0]["finish_reason"] == "stop"
        assert stream.usage["completion_tokens"] == together["usage"]["completion_tokens"]
        assert stream.usage["completion_tokens"] <= 24

    lengths = (1, 2, 3, 5, 8, 13, 20)
    starts = range(0, len(text) - max(lengths), 2)
    sweep = [(start, lengths[start // 2 % len(lengths)], start % 8 == 0) for start in starts]
    assert len(sweep) > 20
    await asyncio.gather(*(one(start, length, several=several) for start, length, several in sweep))


async def test_p_str_02_a_stop_string_that_never_comes_holds_little_back(http: httpx.AsyncClient) -> None:
    whole = await answer(http, prompt=STORY, max_tokens=24)
    stream = await read(http, greedy(prompt=STORY, max_tokens=24, stop=["@" * 20]))
    assert stream.text == whole["choices"][0]["text"]
    assert len(stream.at) > 12


async def test_p_cor_06_a_neighbour_finds_nothing_of_ours_in_the_cache(
    running: Running, http: httpx.AsyncClient
) -> None:
    prompt = [1000 + number % 700 for number in range(2000)]

    async def cached(http: httpx.AsyncClient, **more: Any) -> int:
        whole = await answer(http, prompt=prompt, max_tokens=1, **more)
        assert whole["usage"]["prompt_tokens"] == len(prompt)
        return int(whole["usage"]["prompt_tokens_details"]["cached_tokens"])

    headers = {"Authorization": f"Bearer {running.neighbour_key}"}
    async with httpx.AsyncClient(base_url=running.url, headers=headers, timeout=120.0) as neighbour:
        assert await cached(http) == 0
        assert await cached(http) > len(prompt) / 2
        assert await cached(neighbour, user="local") == 0
        assert len(prompt) / 2 < await cached(neighbour) < len(prompt)


async def test_p_val_03_and_04_what_is_refused_disturbs_no_neighbour(running: Running, http: httpx.AsyncClient) -> None:
    asked = greedy(prompt=STORY, max_tokens=48)
    undisturbed = await read(http, asked)
    chat, completions = "/v1/chat/completions", "/v1/completions"
    model: dict[str, Any] = {"model": DEFAULT_MODEL}
    prompts: list[Any] = ["", [""], [], [[]], None]
    empty: list[tuple[str, dict[str, Any]]] = [
        *((completions, model | {"prompt": prompt}) for prompt in prompts),
        (completions, model),
        (chat, model | {"messages": []}),
        (chat, model),
    ]
    biases: list[dict[str, Any]] = [
        {str(VOCABULARY): 1},
        {str(VOCABULARY + 100000): 1},
        {"-1": 1},
        {"abc": 1},
        {"5": 101},
        {"5": -101},
        {"5": "x"},
    ]

    neighbours = [asyncio.create_task(read(http, asked)) for _ in range(10)]
    headers = {"Authorization": f"Bearer {running.neighbour_key}"}
    async with httpx.AsyncClient(base_url=running.url, headers=headers, timeout=60.0) as other:
        for _ in range(3):
            named = [await refusal(other, path, body) for path, body in empty]
            assert named == ["prompt"] * 6 + ["messages"] * 2
            named = [await refusal(other, completions, greedy(prompt="Hi", logit_bias=bias)) for bias in biases]
            assert named == ["logit_bias"] * len(biases)
    assert [stream.text for stream in await asyncio.gather(*neighbours)] == [undisturbed.text] * 10
    assert not any((await held_in_the_end(running)).values())


async def test_p_val_04_a_bias_forbids_a_token_or_makes_it_certain(http: httpx.AsyncClient) -> None:
    async def first(bias: dict[str, int]) -> tuple[str, float]:
        whole = await answer(http, prompt=STORY, max_tokens=1, logprobs=0, logit_bias=bias)
        chosen = whole["choices"][0]["logprobs"]
        return chosen["tokens"][0], chosen["token_logprobs"][0]

    usual, _ = await first({})
    forced = [await first({str(token_id): 100}) for token_id in range(1000, 1005)]
    assert len({token for token, _ in forced} - {usual}) == 5
    assert [logprob for _, logprob in forced] == pytest.approx([0.0] * 5, abs=ROUNDING)
    (usual_id,) = TextCodec.load(model_path(DEFAULT_MODEL, roulant_home())).encode(usual)
    other, _ = await first({str(usual_id): -100})
    assert other != usual


async def test_p_str_07_alternatives_are_told_apart_and_counted(http: httpx.AsyncClient) -> None:
    asked = greedy(prompt=STORY, max_tokens=12, n=4, seed=7, stream_options={"include_usage": True}) | {
        "temperature": 1
    }
    stream = await read(http, asked)
    asked.pop("stream_options")
    together = (await http.post("/v1/completions", json=asked)).json()
    alone = (await http.post("/v1/completions", json=asked | {"n": 1})).json()
    texts = [stream.choices[index].text for index in range(4)]
    assert texts == [choice["text"] for choice in together["choices"]]
    assert len(set(texts)) == 4
    assert texts[0] == alone["choices"][0]["text"]
    assert stream.usage is not None
    assert stream.usage == together["usage"] | {"prompt_tokens_details": stream.usage["prompt_tokens_details"]}
