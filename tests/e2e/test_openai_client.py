"""The official client against the real model through Ray Serve."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionUserMessageParam

from deployments.models import DEFAULT_MODEL
from tests.e2e.conftest import CRAMPED_MODEL, SIMULATED_MODEL, Running

pytestmark = [pytest.mark.e2e, pytest.mark.model]

QUESTION: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


@pytest.fixture
def client(running: Running) -> Iterator[OpenAI]:
    with running.client() as client:
        yield client


def test_models_are_listed_and_shown(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [DEFAULT_MODEL, SIMULATED_MODEL, CRAMPED_MODEL]
    assert client.models.retrieve(DEFAULT_MODEL).id == DEFAULT_MODEL


def test_a_chat_is_answered(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=DEFAULT_MODEL, messages=QUESTION, temperature=0)

    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (37, 8, 45)


def test_a_streamed_chat_says_the_same_piece_by_piece(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=DEFAULT_MODEL, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    finish_reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert text == ANSWER
    assert finish_reasons == ["stop"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.usage.total_tokens for chunk in chunks if chunk.usage] == [45]


def test_a_completion_and_its_stream_agree(client: OpenAI) -> None:
    prompt = "The capital of France is"

    whole = client.completions.create(model=DEFAULT_MODEL, prompt=prompt, max_tokens=6, temperature=0)
    pieces = client.completions.create(model=DEFAULT_MODEL, prompt=prompt, max_tokens=6, temperature=0, stream=True)

    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert "Paris" in whole.choices[0].text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 6


def test_an_answer_has_one_request_id_and_the_rate_limits(running: Running) -> None:
    with running.http() as http:
        answer = http.get("/v1/models", headers={"x-request-id": "from-the-client"})

    assert answer.headers.get_list("x-request-id") == ["from-the-client"]
    assert answer.headers["x-ratelimit-limit-requests"] == "100000"


def test_a_wrong_key_is_an_authentication_error(running: Running) -> None:
    with running.client(key="rk-wrong") as client, pytest.raises(openai.AuthenticationError) as error:
        client.models.list()

    assert error.value.code == "invalid_api_key"


def test_an_unknown_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="no-such-model", messages=QUESTION)

    assert (error.value.code, error.value.param) == ("model_not_found", "model")


def test_a_bad_field_is_named(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=DEFAULT_MODEL, messages=QUESTION, temperature=-1)

    assert error.value.param == "temperature"


def test_a_prompt_over_the_context_is_refused_before_it_queues(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=DEFAULT_MODEL, prompt="word " * 9000, max_tokens=1)

    assert (error.value.code, error.value.param) == ("context_length_exceeded", "prompt")


def test_an_exhausted_quota_is_a_rate_limit_error_that_says_when_to_come_back(running: Running) -> None:
    def exhaust(client: OpenAI) -> None:
        for _ in range(100):  # 20 a minute are allowed
            client.completions.create(model=SIMULATED_MODEL, prompt="Hello", max_tokens=1)

    with running.client(key=running.trial_key) as client, pytest.raises(openai.RateLimitError) as error:
        exhaust(client)

    assert error.value.code == "requests_per_minute"
    assert int(error.value.response.headers["retry-after"]) >= 1
    assert error.value.response.headers["x-ratelimit-remaining-requests"] == "0"


def test_an_operators_page_is_closed_to_tenants(running: Running) -> None:
    with running.http() as http:
        assert http.get("/admin/v1/queue").status_code == 403
