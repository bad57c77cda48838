"""Response headers that every answer may carry: the request's id and the tenant's rate limits."""

from __future__ import annotations

import math
import re
import uuid

from cluster.api import LimitStatus, WindowStatus

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def echoed_request_id(given: str | None) -> str:
    """The id that the answer carries: the client's, if it is at most 128 visible ASCII characters, else a new one."""
    if given is not None and REQUEST_ID.fullmatch(given):
        return given
    return uuid.uuid4().hex


def rate_limit_headers(limits: LimitStatus) -> dict[str, str]:
    """The x-ratelimit headers, in OpenAI's form, and whose limit it is. A limit that there is not has no headers."""
    return _window("requests", limits.requests) | _window("tokens", limits.tokens)


def _window(name: str, window: WindowStatus | None) -> dict[str, str]:
    if window is None:
        return {}
    return {
        f"x-ratelimit-limit-{name}": str(window.limit),
        f"x-ratelimit-remaining-{name}": str(window.remaining),
        f"x-ratelimit-reset-{name}": go_duration(window.reset_s),
    } | ({f"x-ratelimit-scope-{name}": window.scope.level.value} if window.scope else {})


def go_duration(seconds: float) -> str:
    """A duration as Go prints it, to the millisecond, rounded up: ``12ms``, ``1s``, ``1.5s``, ``6m0s``, ``1h0m0s``."""
    millis = math.ceil(seconds * 1000)
    if 0 < millis < 1000:
        return f"{millis}ms"
    minutes, millis = divmod(millis, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{millis // 1000}.{millis % 1000:03}".rstrip("0").rstrip(".") if millis % 1000 else str(millis // 1000)
    if hours:
        return f"{hours}h{minutes}m{text}s"
    return f"{minutes}m{text}s" if minutes else f"{text}s"
