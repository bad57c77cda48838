from __future__ import annotations

import json

import pytest
from starlette.exceptions import HTTPException

from cluster.api import LimitStatus, Refusal, RefusalCode
from engine.api import ChatTemplateError, EngineDeadError, EngineError, RequestRefusedError
from router.errors import REFUSALS, ApiError, Fault, as_api_error, field_path, of_refusal


def refusal(code: RefusalCode, retry_after_s: int | None) -> Refusal:
    return Refusal(request_id="r1", code=code, message="because", retry_after_s=retry_after_s, status=LimitStatus())


def test_body_has_the_form_of_openai() -> None:
    error = ApiError(Fault.MODEL_NOT_FOUND, "no such model", param="model")
    assert json.loads(error.body()) == {
        "error": {
            "message": "no such model",
            "type": "not_found_error",
            "param": "model",
            "code": "model_not_found",
        }
    }


def test_half_a_surrogate_pair_in_a_message_does_not_break_the_answer() -> None:
    assert json.loads(ApiError(Fault.INVALID_JSON, "\ud800").body())["error"]["message"] == "\ud800"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestRefusedError("too long"), 400, "request_refused"),
        (ChatTemplateError("roles must alternate"), 400, "chat_template_error"),
        (EngineDeadError("gone"), 503, "engine_dead"),
        (EngineError("out of luck"), 500, "engine_error"),
        (TimeoutError(), 504, "timeout"),
        (HTTPException(404), 404, "route_not_found"),
        (HTTPException(405), 405, "method_not_allowed"),
        (KeyError("secret"), 500, "internal_error"),
    ],
)
def test_every_exception_has_a_status(error: Exception, status: int, code: str) -> None:
    shown = as_api_error(error)
    assert (shown.row.status, shown.row.code) == (status, code)


def test_an_unknown_exception_tells_the_client_nothing_of_itself() -> None:
    assert "secret" not in as_api_error(KeyError("secret")).message


def test_the_template_s_own_words_reach_the_client() -> None:
    shown = as_api_error(ChatTemplateError("roles must alternate"))
    assert "roles must alternate" in shown.message
    assert shown.param == "messages"


@pytest.mark.parametrize("code", list(RefusalCode))
def test_every_refusal_code_names_itself_to_the_client(code: RefusalCode) -> None:
    assert of_refusal(refusal(code, 3), "prompt").row.code == code.value
    assert set(REFUSALS) == set(RefusalCode)


@pytest.mark.parametrize(
    ("code", "retry_after_s", "status", "headers"),
    [
        (RefusalCode.REQUESTS_PER_MINUTE, 7, 429, {"retry-after": "7", "retry-after-ms": "7000"}),
        (RefusalCode.QUEUE_FULL, 0, 429, {"retry-after": "1", "retry-after-ms": "1000"}),
        (RefusalCode.TOKENS_PER_MINUTE, None, 429, {"x-should-retry": "false"}),
        (RefusalCode.CONCURRENT_REQUESTS, None, 429, {"x-should-retry": "false"}),
        (RefusalCode.TOKENS_PER_DAY, 9, 429, {"retry-after": "9", "retry-after-ms": "9000"}),
        (RefusalCode.TOKENS_PER_MONTH, 9, 429, {"retry-after": "9", "retry-after-ms": "9000"}),
        (RefusalCode.BUDGET, 9, 429, {"retry-after": "9", "retry-after-ms": "9000", "x-should-retry": "false"}),
        (RefusalCode.EXCEEDS_LIMIT, None, 400, {}),
        (RefusalCode.NO_CAPACITY, 2, 503, {"retry-after": "2", "retry-after-ms": "2000"}),
        (RefusalCode.KV_CAPACITY_EXCEEDED, None, 400, {}),
    ],
)
def test_refusals_say_when_to_come_back(
    code: RefusalCode, retry_after_s: int | None, status: int, headers: dict[str, str]
) -> None:
    shown = of_refusal(refusal(code, retry_after_s), "prompt")
    assert (shown.row.status, shown.headers()) == (status, headers)


def test_a_prompt_that_no_replica_can_hold_is_a_fault_of_the_prompt_s_field() -> None:
    shown = of_refusal(refusal(RefusalCode.KV_CAPACITY_EXCEEDED, None), "messages")
    assert (shown.param, shown.message) == ("messages", "messages: because")


def test_every_503_says_when_to_come_back() -> None:
    rows = [fault.value for fault in Fault if fault.value.status == 503]
    assert len(rows) == 4
    assert all(row.retry_after_s is not None and row.retry_after_s >= 1 for row in rows)


@pytest.mark.parametrize(
    ("loc", "path"),
    [
        ((), None),
        (("stop",), "stop"),
        (("messages", 0, "content"), "messages[0].content"),
        (("messages", 0, "content", "<parts>", 2, "text"), "messages[0].content[2].text"),
        (("x" * 500,), "x" * 200),
    ],
)
def test_field_paths_are_written_as_openai_does(loc: tuple[int | str, ...], path: str | None) -> None:
    assert field_path(loc) == path
