from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from cluster.api import LimitStatus, Refusal, RefusalCode
from engine.api import EngineDeadError, RequestRefusedError
from router.api import build_http_app
from tests.router.fakes import ADMIN_KEY, CONTEXT, CREATED, HELD, KEY, MODEL, SMALL_KEY, House

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": MODEL, "prompt": "hi"}
ENDPOINTS = [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]
RATE_LIMIT_HEADERS = {
    "x-ratelimit-limit-requests": "10",
    "x-ratelimit-remaining-requests": "7",
    "x-ratelimit-reset-requests": "18s",
    "x-ratelimit-limit-tokens": "1000",
    "x-ratelimit-remaining-tokens": "940",
    "x-ratelimit-reset-tokens": "12ms",
}


def key(value: str) -> dict[str, str]:
    return {"authorization": f"Bearer {value}"}


def error_of(response: httpx.Response, status: int) -> dict[str, object]:
    """The error in an answer, after checking its form."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    error: dict[str, object] = body["error"]
    return error


async def test_a_chat_is_answered_whole(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 200
    body = response.json()
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello, world", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 13,
            "total_tokens": 20,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


async def test_a_completion_is_answered_whole(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json=TEXT | {"model": "tiny-alias", "max_tokens": 5})
    body = response.json()
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 5,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


async def test_models_are_listed_as_the_key_may_use_them(client: httpx.AsyncClient) -> None:
    tiny = {
        "id": MODEL,
        "object": "model",
        "created": CREATED,
        "owned_by": "roulant",
        "max_model_len": CONTEXT,
        "vocab_size": 257,
    }
    response = await client.get("/v1/models")
    assert response.json() == {"object": "list", "data": [tiny, tiny | {"id": "org/other"}]}
    response = await client.get("/v1/models", headers=key(SMALL_KEY))
    assert response.json() == {"object": "list", "data": [tiny]}
    assert (await client.get("/v1/models/tiny")).json() == tiny
    assert (await client.get("/v1/models/tiny-alias")).json() == tiny
    assert (await client.get("/v1/models/org/other")).json()["id"] == "org/other"
    assert (await client.get("/v1/models/org%2Fother")).json()["id"] == "org/other"
    assert error_of(await client.get("/v1/models/org/other", headers=key(SMALL_KEY)), 403)["param"] == "model"
    assert error_of(await client.get("/v1/models/nope"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("model", "status"),
    [("nope", 404), ("TINY", 404), ("a/b%2f", 404), ("", 400), (5, 400), (None, 400), ("org/other", 403)],
)
@pytest.mark.parametrize(("path", "body"), [*ENDPOINTS, ("/tokenize", TEXT), ("/detokenize", {"tokens": [1]})])
async def test_a_wrong_model_is_an_error_of_the_field_model(
    client: httpx.AsyncClient, path: str, body: dict[str, object], model: object, status: int
) -> None:
    caller = SMALL_KEY if model == "org/other" else KEY
    response = await client.post(path, json=body | {"model": model}, headers=key(caller))
    assert error_of(response, status)["param"] == "model"


async def test_without_a_model_the_only_one_of_the_key_answers(client: httpx.AsyncClient) -> None:
    body = {"messages": CHAT["messages"]}
    response = await client.post("/v1/chat/completions", json=body, headers=key(SMALL_KEY))
    assert response.json()["model"] == MODEL


async def test_text_to_tokens_and_back(client: httpx.AsyncClient, house: House) -> None:
    response = await client.post("/tokenize", json={"model": MODEL, "prompt": "né\0"})
    tokens = house.codec.encode("né\0")
    assert response.json() == {"count": 4, "max_model_len": CONTEXT, "tokens": tokens}
    response = await client.post("/detokenize", json={"model": MODEL, "tokens": tokens})
    assert response.json() == {"prompt": "né\0"}
    response = await client.post("/tokenize", json=CHAT)
    assert response.json()["tokens"] == house.codec.encode("u:hi|a:")
    assert error_of(await client.post("/detokenize", json={"model": MODEL, "tokens": [257]}), 400)["param"] == "tokens"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_a_wrong_field_is_named_before_any_byte_of_a_stream(
    client: httpx.AsyncClient, house: House, path: str, body: dict[str, object], stream: bool
) -> None:
    response = await client.post(path, json=body | {"max_tokens": 0, "stream": stream})
    assert error_of(response, 400)["param"] == "max_tokens"
    assert house.admission.asks == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_a_prompt_over_the_context_is_refused_with_both_numbers(
    client: httpx.AsyncClient, house: House, path: str, body: dict[str, object], stream: bool
) -> None:
    content = "x" * (50 * CONTEXT)
    long = {"messages": [{"role": "user", "content": content}]} if "messages" in body else {"prompt": content}
    error = error_of(await client.post(path, json=body | long | {"stream": stream}), 400)
    assert error["code"] == "context_length_exceeded"
    assert str(CONTEXT) in str(error["message"])
    error = error_of(await client.post(path, json=body | {"max_tokens": CONTEXT, "stream": stream}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert house.admission.asks == []


@pytest.mark.parametrize("stream", [False, True])
async def test_the_template_s_words_reach_the_client(client: httpx.AsyncClient, stream: bool) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    error = error_of(await client.post("/v1/chat/completions", json=CHAT | {"messages": turns, "stream": stream}), 400)
    assert "roles must alternate" in str(error["message"])
    turns = [{"role": "moderator", "content": "a"}]
    error = error_of(await client.post("/v1/chat/completions", json=CHAT | {"messages": turns, "stream": stream}), 400)
    assert "this model has no role moderator" in str(error["message"])
    assert error["param"] == "messages"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_quota_refusal_is_a_429_with_its_limits(client: httpx.AsyncClient, house: House, stream: bool) -> None:
    house.admission.refusal = Refusal(
        request_id="r1",
        code=RefusalCode.REQUESTS_PER_MINUTE,
        message="10 requests a minute are used up",
        retry_after_s=6,
        status=LimitStatus(),
    )
    response = await client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    error = error_of(response, 429)
    assert (error["code"], error["type"]) == ("requests_per_minute", "rate_limit_error")
    assert response.headers["retry-after"] == "6"
    assert "x-ratelimit-limit-requests" not in response.headers  # the refusal's own limits, not an older answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (RequestRefusedError("can never fit"), 400, "request_refused"),
        (EngineDeadError("the replica was lost"), 503, "engine_dead"),
        (RuntimeError("secret"), 500, "internal_error"),
    ],
)
async def test_a_failure_before_the_first_token_has_its_own_status(
    client: httpx.AsyncClient, house: House, failure: Exception, status: int, code: str, stream: bool
) -> None:
    house.replicas.script = lambda _request: [failure]
    response = await client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    assert error_of(response, status)["code"] == code
    assert "secret" not in response.text
    assert ("retry-after" in response.headers) == (status == 503)
    assert len(house.admission.usages) == 1


async def test_a_timeout_is_a_504_that_is_not_to_be_repeated(client: httpx.AsyncClient, house: House) -> None:
    house.replicas.script = lambda _request: [asyncio.Event()]
    response = await client.post("/v1/chat/completions", json=CHAT | {"timeout_s": 0.05})
    assert error_of(response, 504)["code"] == "timeout"
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/v1/models/tiny",
        "/v1/chat/completions",
        "/v1/completions",
        "/tokenize",
        "/detokenize",
        "/admin/v1/queue",
        "/admin/v1/replicas",
        "/admin/v1/requests/0f3a/explain",
        "/docs",
        "/openapi.json",
        "/metrics",
        "/invocations",
        "/",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE"])
async def test_nothing_answers_without_a_key(client: httpx.AsyncClient, path: str, method: str) -> None:
    del client.headers["authorization"]
    for variant in (path, path + "/", "/" + path, path + "?x=1", "/health/ready/.." + path):
        response = await client.request(method, "http://router" + variant)
        assert response.status_code == 401, variant
        assert response.headers["www-authenticate"] == "Bearer"
        assert "x-ratelimit-limit-requests" not in response.headers


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer sk-secret-guess", "Basic sk-tenant", "sk-tenant"])
async def test_every_bad_key_gets_the_same_401_that_does_not_repeat_it(client: httpx.AsyncClient, header: str) -> None:
    response = await client.get("/v1/models", headers={"authorization": header})
    error = error_of(response, 401)
    assert (error["code"], error["param"]) == ("invalid_api_key", None)
    assert "guess" not in response.text
    del client.headers["authorization"]
    assert (await client.get("/v1/models")).text == response.text


async def test_a_revoked_key_is_refused_at_once(client: httpx.AsyncClient, house: House) -> None:
    assert (await client.get("/v1/models")).status_code == 200
    house.keys.replace({})
    error_of(await client.get("/v1/models"), 401)


async def test_operators_see_the_replicas_and_as_many_steps_as_they_ask_for(client: httpx.AsyncClient) -> None:
    for query, steps in (("", 0), ("?steps=20", 20)):
        response = await client.get(f"/admin/v1/replicas{query}", headers=key(ADMIN_KEY))
        assert (response.status_code, response.json()) == (200, {"steps asked for": steps})
    for wrong in ("-1", "x", "", "1.5", "9" * 5000):
        response = await client.get("/admin/v1/replicas", params={"steps": wrong}, headers=key(ADMIN_KEY))
        assert error_of(response, 400)["param"] == "steps"
    error_of(await client.get("/admin/v1/replicas", headers=key(KEY)), 403)


@pytest.mark.parametrize("prefix", ["", "cmpl-", "chatcmpl-"])
async def test_operators_see_why_a_request_waits_by_the_id_of_its_answer(
    client: httpx.AsyncClient, prefix: str
) -> None:
    path = f"/admin/v1/requests/{prefix}{HELD}/explain"
    response = await client.get(path, headers=key(ADMIN_KEY))
    assert (response.status_code, response.json()) == (200, {"request_id": HELD})
    error_of(await client.get(path), 403)
    unknown = await client.get(f"/admin/v1/requests/{prefix}ffff/explain", headers=key(ADMIN_KEY))
    assert error_of(unknown, 404)["code"] == "request_not_found"


async def test_operators_see_the_queue_and_tenants_do_not(client: httpx.AsyncClient) -> None:
    response = await client.get("/admin/v1/queue", headers=key(ADMIN_KEY))
    assert response.status_code == 200
    assert response.json()["models"][0]["requests"] == {"limit": 10, "remaining": 7, "reset_s": 18.0, "scope": None}
    for path in ("/admin/v1/queue", "/admin/v1/queue/", "/admin", "/admin/v1/nothing"):
        assert error_of(await client.get(path), 403)["code"] == "admin_key_required"
    error_of(await client.get("//admin/v1/queue".replace("//", "http://router//", 1)), 404)


@pytest.mark.parametrize("caller", [KEY, ADMIN_KEY])
@pytest.mark.parametrize("path", ["/docs", "/redoc", "/openapi.json", "/v1/nothing", "/v1/models/", "/tokenize/", "/"])
async def test_an_unknown_route_is_a_404_in_the_same_form(client: httpx.AsyncClient, path: str, caller: str) -> None:
    error_of(await client.get(path, headers=key(caller)), 404)


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/chat/completions"), ("POST", "/v1/models"), ("OPTIONS", "/tokenize")]
)
async def test_a_wrong_method_is_a_405_in_the_same_form(client: httpx.AsyncClient, method: str, path: str) -> None:
    assert error_of(await client.request(method, path), 405)["code"] == "method_not_allowed"


async def test_live_and_ready_need_no_key(client: httpx.AsyncClient, house: House) -> None:
    del client.headers["authorization"]
    assert (await client.get("/health/live")).json() == {"status": "live"}
    assert (await client.head("/health/live")).status_code == 200
    assert (await client.get("/health/ready")).json() == {"status": "ready"}
    for ready in (False, RuntimeError("no actor")):
        house.replicas.ready = ready
        response = await client.get("/health/ready")
        assert error_of(response, 503)["code"] == "not_ready"
        assert response.headers["retry-after"] == "3"
        assert (await client.get("/health/live")).status_code == 200


async def test_a_draining_server_takes_nothing_new(client: httpx.AsyncClient, house: House) -> None:
    house.service.draining = True
    for response in (await client.get("/health/ready"), await client.post("/v1/chat/completions", json=CHAT)):
        assert error_of(response, 503)["code"] == "draining"
        assert response.headers["retry-after"] == "5"
        assert response.headers["connection"] == "close"
    assert (await client.get("/health/live")).status_code == 200


async def test_every_answer_has_a_request_id(client: httpx.AsyncClient) -> None:
    for method, path, status in (
        ("POST", "/v1/completions", 415),
        ("GET", "/nothing", 404),
        ("GET", "/v1/models", 200),
    ):
        response = await client.request(method, path, headers={"x-request-id": "mine-1"})
        assert (response.status_code, response.headers["x-request-id"]) == (status, "mine-1")
    made = (await client.get("/v1/models")).headers["x-request-id"]
    replaced = (await client.get("/v1/models", headers={"x-request-id": "x" * 129})).headers["x-request-id"]
    assert len(made) == len(replaced) == 32
    assert made != replaced
    unknown = await client.get("/v1/models", headers={"x-request-id": "mine-2", "authorization": ""})
    assert unknown.headers["x-request-id"] == "mine-2"


async def test_the_same_request_id_twice_is_two_requests(client: httpx.AsyncClient, house: House) -> None:
    for _ in range(2):
        await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine-1"})
    assert len({ask.request_id for ask in house.admission.asks}) == 2


async def test_every_answer_to_a_key_carries_its_limits(client: httpx.AsyncClient) -> None:
    responses = [
        await client.post("/v1/chat/completions", json=CHAT),
        await client.post("/v1/chat/completions", json=CHAT | {"stream": True}),
        await client.post("/v1/chat/completions", json=CHAT | {"n": 0}),
        await client.get("/v1/models"),
        await client.get("/nothing"),
        await client.get("/admin/v1/queue"),
    ]
    assert [response.status_code for response in responses] == [200, 200, 400, 200, 404, 403]
    for response in responses:
        found = {name: value for name, value in response.headers.items() if name.startswith("x-ratelimit-")}
        assert found == RATE_LIMIT_HEADERS


async def test_limits_that_cannot_be_had_do_not_cost_the_answer(client: httpx.AsyncClient, house: House) -> None:
    house.admission.limits_error = RuntimeError("no actor")
    response = await client.get("/v1/models")
    assert response.status_code == 200
    assert "x-ratelimit-limit-requests" not in response.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_an_admitted_request_carries_the_limits_of_its_permit(
    client: httpx.AsyncClient, house: House, stream: bool
) -> None:
    house.admission.limits_error = RuntimeError("not asked a second time")
    response = await client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    assert response.headers["x-ratelimit-remaining-requests"] == "7"


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        (None, 415),
    ],
)
async def test_a_body_is_json_by_its_header(client: httpx.AsyncClient, content_type: str | None, status: int) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    body = b'{"model": "tiny", "prompt": "hi"}'
    assert (await client.post("/v1/completions", content=body, headers=headers)).status_code == status


async def test_contradicting_content_types_are_refused(client: httpx.AsyncClient) -> None:
    body = b'{"model": "tiny", "prompt": "hi"}'
    twice = [("content-type", "application/json"), ("content-type", "application/json")]
    assert (await client.post("/v1/completions", content=body, headers=twice)).status_code == 200
    both = [("content-type", "application/json"), ("content-type", "text/plain")]
    error_of(await client.post("/v1/completions", content=body, headers=both), 400)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"a": 1, "a": 2}', b"\xff", b'{"a":' * 50_000])
async def test_what_is_not_a_json_object_is_a_400(client: httpx.AsyncClient, body: bytes) -> None:
    response = await client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert error_of(response, 400)["code"] == "invalid_json"


async def test_a_body_over_the_limit_is_refused_while_it_comes(house: House) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            yield b" " * 100

    app = build_http_app(house.wiring(body_limit_bytes=1000))
    headers = key(KEY) | {"content-type": "application/json"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://router") as client:
        response = await client.post("/v1/completions", content=endless(), headers=headers)
        assert error_of(response, 413)["code"] == "body_too_large"
        assert sent == 11
        fits = b'{"model": "tiny", "prompt": "hi"}'.ljust(1000)
        assert (await client.post("/v1/completions", content=fits, headers=headers)).status_code == 200
