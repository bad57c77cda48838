"""The gate that every HTTP request passes: its id, its key, its headers on the way out, and an answer to every error.

It stands around the routes, so that no path, spelling or method of a path is reachable without it.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import cast

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api import LimitStatus
from router.auth import Caller, KeyRing
from router.errors import ApiError, Fault, as_api_error
from router.headers import echoed_request_id, rate_limit_headers
from router.service import Admission

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health/live", "/health/ready"})
"""All that answers without a key."""
ADMIN_PREFIX = "/admin"
LIMITS_TIMEOUT_S = 1.0
"""How long an answer waits for the headers that say what is left; it goes out without them rather than not at all."""


@dataclass(slots=True, kw_only=True)
class Call:
    """One HTTP request. `limits` is what its own admission decision said, once there is one."""

    request_id: str
    caller: Caller | None = None
    limits: LimitStatus | None = None
    answered: bool = False


def call_of(scope: Scope) -> Call:
    """The call that a request belongs to."""
    return cast(Call, scope["state"]["call"])


def caller_of(scope: Scope) -> Caller:
    """Who calls. Only for paths that need a key."""
    caller = call_of(scope).caller
    assert caller is not None, "the gate lets nobody through without a key"
    return caller


class Gate:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, *, keys: KeyRing, admission: Admission) -> None:
        self._app = app
        self._keys = keys
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        call = Call(request_id=echoed_request_id(headers.get("x-request-id")))
        scope.setdefault("state", {})["call"] = call

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.answered = True
                MutableHeaders(scope=message).update(await self._headers(call))
            await send(message)

        try:
            self._authorise(call, scope["path"], headers)
            await self._app(scope, receive, send_with_headers)
        except ClientDisconnect:
            return
        except Exception as error:
            if call.answered:
                raise
            await respond_with(error, call, scope, receive, send_with_headers)

    def _authorise(self, call: Call, path: str, headers: Headers) -> None:
        if path in OPEN_PATHS:
            return
        call.caller = self._keys.authenticate(headers.get("authorization"))
        if path.startswith(ADMIN_PREFIX) and not call.caller.is_admin:
            raise ApiError(Fault.ADMIN_ONLY, "this needs an operator's key")

    async def _headers(self, call: Call) -> dict[str, str]:
        headers = {"x-request-id": call.request_id}
        if call.caller is None:
            return headers
        if call.limits is None:
            try:
                async with asyncio.timeout(LIMITS_TIMEOUT_S):
                    call.limits = await self._admission.limits(call.caller.tenant, call.caller.key_id)
            except Exception:
                logger.warning("no rate-limit headers for tenant %s", call.caller.tenant, exc_info=True)
                return headers
        return headers | rate_limit_headers(call.limits)


async def respond_with(error: Exception, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an error."""
    shown = as_api_error(error)
    if shown.is_ours:
        logger.error("request %s failed", call.request_id, exc_info=error)
    call.limits = shown.limits or call.limits
    response = Response(shown.body(), shown.row.status, shown.headers(), "application/json")
    await response(scope, receive, send)
