"""Everything that can go wrong, and the one table that says how HTTP shows it.

Code raises `ApiError`, or any exception that `as_api_error` knows; nothing else chooses a status. The body is OpenAI's:
``{"error": {"message", "type", "param", "code"}}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from pydantic import ValidationError
from starlette.exceptions import HTTPException

from cluster.api import LimitStatus, Refusal, RefusalCode
from engine.api import ChatTemplateError, EngineDeadError, EngineError, RequestRefusedError

MAX_PARAM_CHARS = 200
REPLACEMENT_WAIT_S = 3
"""A dead replica was replaced after 2.4 s when measured; whole seconds, rounded up."""
DRAIN_WAIT_S = 5
"""After a drain begins another ingress has the traffic; there is no exact figure, so a short one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How one fault is shown. `retry_after_s`: what Retry-After says where the place of the error knows no better."""

    status: int
    type: str
    code: str
    retry_after_s: int | None = None
    headers: Mapping[str, str]


def _row(status: int, type_: str, code: str, retry_after_s: int | None = None, **headers: str) -> Row:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Row(status=status, type=type_, code=code, retry_after_s=retry_after_s, headers=named)


class Fault(Enum):
    """The table. `x-should-retry: false` tells OpenAI's clients not to send the same request again by themselves."""

    INVALID_REQUEST = _row(400, "invalid_request_error", "invalid_request")
    INVALID_JSON = _row(400, "invalid_request_error", "invalid_json")
    UNKNOWN_PARAMETER = _row(400, "invalid_request_error", "unknown_parameter")
    UNSUPPORTED_PARAMETER = _row(400, "invalid_request_error", "unsupported_parameter")
    CONTEXT_LENGTH_EXCEEDED = _row(400, "invalid_request_error", "context_length_exceeded")
    CHAT_TEMPLATE = _row(400, "invalid_request_error", "chat_template_error")
    ENGINE_REFUSED = _row(400, "invalid_request_error", "request_refused")
    EXCEEDS_LIMIT = _row(400, "invalid_request_error", "exceeds_limit")
    KV_CAPACITY_EXCEEDED = _row(400, "invalid_request_error", "kv_capacity_exceeded")
    INVALID_API_KEY = _row(401, "authentication_error", "invalid_api_key", www_authenticate="Bearer")
    PRIORITY_NOT_ALLOWED = _row(403, "permission_error", "priority_not_allowed")
    MODEL_NOT_ALLOWED = _row(403, "permission_error", "model_not_allowed")
    ADMIN_ONLY = _row(403, "permission_error", "admin_key_required")
    MODEL_NOT_FOUND = _row(404, "not_found_error", "model_not_found")
    REQUEST_NOT_FOUND = _row(404, "not_found_error", "request_not_found")
    ROUTE_NOT_FOUND = _row(404, "not_found_error", "route_not_found")
    METHOD_NOT_ALLOWED = _row(405, "invalid_request_error", "method_not_allowed")
    BODY_TOO_LARGE = _row(413, "invalid_request_error", "body_too_large")
    MEDIA_TYPE = _row(415, "invalid_request_error", "unsupported_media_type")
    REQUESTS_PER_MINUTE = _row(429, "rate_limit_error", "requests_per_minute")
    TOKENS_PER_MINUTE = _row(429, "rate_limit_error", "tokens_per_minute")
    CONCURRENT_REQUESTS = _row(429, "rate_limit_error", "concurrent_requests")
    TOKENS_PER_DAY = _row(429, "rate_limit_error", "tokens_per_day")
    TOKENS_PER_MONTH = _row(429, "rate_limit_error", "tokens_per_month")
    BUDGET = _row(429, "insufficient_quota", "budget", x_should_retry="false")
    QUEUE_FULL = _row(429, "rate_limit_error", "queue_full")
    INTERNAL = _row(500, "server_error", "internal_error")
    ENGINE_FAILED = _row(500, "server_error", "engine_error")
    NO_CAPACITY = _row(503, "server_error", "no_capacity", REPLACEMENT_WAIT_S)
    NOT_READY = _row(503, "server_error", "not_ready", REPLACEMENT_WAIT_S)
    ENGINE_DEAD = _row(503, "server_error", "engine_dead", REPLACEMENT_WAIT_S)
    DRAINING = _row(503, "server_error", "draining", DRAIN_WAIT_S, connection="close")
    TIMEOUT = _row(504, "timeout_error", "timeout", x_should_retry="false")


REFUSALS: Mapping[RefusalCode, Fault] = {
    RefusalCode.REQUESTS_PER_MINUTE: Fault.REQUESTS_PER_MINUTE,
    RefusalCode.TOKENS_PER_MINUTE: Fault.TOKENS_PER_MINUTE,
    RefusalCode.CONCURRENT_REQUESTS: Fault.CONCURRENT_REQUESTS,
    RefusalCode.TOKENS_PER_DAY: Fault.TOKENS_PER_DAY,
    RefusalCode.TOKENS_PER_MONTH: Fault.TOKENS_PER_MONTH,
    RefusalCode.BUDGET: Fault.BUDGET,
    RefusalCode.QUEUE_FULL: Fault.QUEUE_FULL,
    RefusalCode.EXCEEDS_LIMIT: Fault.EXCEEDS_LIMIT,
    RefusalCode.NO_CAPACITY: Fault.NO_CAPACITY,
    RefusalCode.KV_CAPACITY_EXCEEDED: Fault.KV_CAPACITY_EXCEEDED,
}

EXCEPTIONS: Mapping[type[Exception], Fault] = {
    RequestRefusedError: Fault.ENGINE_REFUSED,
    EngineDeadError: Fault.ENGINE_DEAD,
    EngineError: Fault.ENGINE_FAILED,
    ChatTemplateError: Fault.CHAT_TEMPLATE,
}
"""Exceptions whose own message is fit for the client; a class before its bases."""

VALIDATION: Mapping[str, Fault] = {
    "extra_forbidden": Fault.UNKNOWN_PARAMETER,
    "unsupported_parameter": Fault.UNSUPPORTED_PARAMETER,
}
"""pydantic's error types that have a fault of their own; all others are INVALID_REQUEST."""

REASONS: Mapping[str, str] = {
    "extra_forbidden": "unknown parameter",
    "missing": "is required",
    "model_type": "should be an object",
}
"""pydantic's error types that we word differently; it speaks of Python."""

ROUTING: Mapping[int, Fault] = {404: Fault.ROUTE_NOT_FOUND, 405: Fault.METHOD_NOT_ALLOWED}


class ApiError(Exception):
    """An error as a client is to see it. `limits`: the tenant's limits as a refusal left them, where it says so."""

    def __init__(
        self,
        fault: Fault,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
        retry_after_ms: int | None = None,
        limits: LimitStatus | None = None,
    ) -> None:
        super().__init__(message)
        self.row: Row = fault.value
        self.message = message
        self.param = param
        self.retry_after_s = self.row.retry_after_s if retry_after_s is None else retry_after_s
        self.retry_after_ms = retry_after_ms
        self.limits = limits

    @property
    def is_ours(self) -> bool:
        """Whether this is a fault of the server, to be looked into."""
        return self.row.status == 500

    def headers(self) -> dict[str, str]:
        """The headers that this error adds to the answer."""
        headers = dict(self.row.headers)
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, self.retry_after_s))
            headers["retry-after-ms"] = str(self.retry_after_ms or 1000 * max(1, self.retry_after_s))
        elif self.row.status == 429:
            headers["x-should-retry"] = "false"  # the limit is 0: no wait makes room
        return headers

    def body(self) -> bytes:
        """The answer's body. ASCII, so that half a surrogate pair quoted from a request cannot break the answer."""
        detail = {"message": self.message, "type": self.row.type, "param": self.param, "code": self.row.code}
        return json.dumps({"error": detail}).encode("ascii")


def as_api_error(error: Exception) -> ApiError:
    """The error that a client sees for any exception. Unknown ones become a bare 500; the caller logs those."""
    match error:
        case ApiError():
            return error
        case ValidationError():
            return _of_validation(error)
        case HTTPException(status_code=status) if status in ROUTING:
            return ApiError(ROUTING[status], error.detail)
        case TimeoutError():
            return ApiError(Fault.TIMEOUT, "the request did not finish within its timeout")
    for kind, fault in EXCEPTIONS.items():
        if isinstance(error, kind):
            return ApiError(fault, str(error), param="messages" if fault is Fault.CHAT_TEMPLATE else None)
    return ApiError(Fault.INTERNAL, "the server failed to answer this request")


def of_refusal(refusal: Refusal, prompt_field: str) -> ApiError:
    """The error for a refused admission of a request whose prompt is in the field `prompt_field`."""
    fault = REFUSALS[refusal.code]
    param = prompt_field if fault is Fault.KV_CAPACITY_EXCEEDED else None
    message = f"{param}: {refusal.message}" if param else refusal.message
    return ApiError(
        fault,
        message,
        param=param,
        retry_after_s=refusal.retry_after_s,
        retry_after_ms=refusal.retry_after_ms,
        limits=refusal.status,
    )


def invalid(param: str, reason: str, fault: Fault = Fault.INVALID_REQUEST) -> ApiError:
    """The error for a field that does not go with the rest of the request, or with the model."""
    return ApiError(fault, f"{param}: {reason}", param=param)


def _of_validation(error: ValidationError) -> ApiError:
    """The first complaint, in the order of the model's fields."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    param = field_path(first["loc"])
    fault = VALIDATION.get(first["type"], Fault.INVALID_REQUEST)
    reason = REASONS.get(first["type"], first["msg"])
    return ApiError(fault, f"{param}: {reason}" if param else reason, param=param)


def field_path(loc: tuple[int | str, ...]) -> str | None:
    """pydantic's location as OpenAI writes it: ``messages[0].content``. None for the body as a whole.

    Names in angle brackets are the tags of our own unions, not keys.
    """
    path = ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not (step.startswith("<") and step.endswith(">")):
            path += f".{step}" if path else step
    return path[:MAX_PARAM_CHARS] or None
