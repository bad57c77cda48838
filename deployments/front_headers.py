"""What clients may not say to Ray Serve.

Serve gives meaning to some request headers of its own - a timeout, a wish that leaving should not end the request, a
session to stay with - and reads them before the application does: its answers then are not ours, and bytes that are not
UTF-8 make it answer 500. The router has fields for what is offered, so here these headers end. `middlewares` is named
in Serve's settings (`deployments.serve_mode`) and stands around all of Serve in each process that speaks HTTP.
"""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api import echoed_request_id

REQUEST_ID = b"x-request-id"
SERVES_OWN = frozenset(
    {b"x-request-timeout-seconds", b"x-request-disconnect-disabled", b"serve-multiplexed-model-id", b"x-session-id"}
)
"""With dashes; Serve takes underscores in some of them for the same."""


class CleanHeaders:
    """ASGI middleware: no header of Serve's from outside, and exactly one request id, fit to be echoed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "headers": clean(scope["headers"])}
        await self._app(scope, receive, send)


def clean(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """`headers` as Serve may see them. Of two request ids the first counts."""
    given = next((value.decode("latin-1") for name, value in headers if name == REQUEST_ID), None)
    kept = [(name, value) for name, value in headers if name != REQUEST_ID and _dashed(name) not in SERVES_OWN]
    return [*kept, (REQUEST_ID, echoed_request_id(given).encode("ascii"))]


def middlewares() -> list[Middleware]:
    """For Serve, which calls this by its path."""
    return [Middleware(CleanHeaders)]


def _dashed(name: bytes) -> bytes:
    return name.lower().replace(b"_", b"-")
