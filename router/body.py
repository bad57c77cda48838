"""From the bytes of a request to a validated object.

JSON is stricter here than Python's: UTF-8 only, no key twice in an object (the two readers of such a body could
disagree on what was asked), an object at the top. ``NaN`` and ``Infinity``, which are not JSON, are read all the same:
no field takes them, and so the error can name the field.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from starlette.requests import Request

from router.errors import ApiError, Fault
from router.fields import Body

BodyT = TypeVar("BodyT", bound=Body)


async def read(request: Request, model: type[BodyT], limit_bytes: int) -> BodyT:
    """The request's body as a `model`. Raises ApiError or pydantic's ValidationError, both fit for `as_api_error`."""
    check_media_type(request.headers.getlist("content-type"))
    return model.model_validate(parse(await read_bytes(request, limit_bytes)))


def check_media_type(headers: Sequence[str]) -> None:
    """Take application/json in any case, also with charset=utf-8 and also if said twice; nothing else."""
    said = {value.strip().lower() for header in headers for value in header.split(",")}
    kinds = {value.partition(";")[0].strip() for value in said}
    if len(kinds) > 1:
        raise ApiError(Fault.INVALID_REQUEST, "the Content-Type headers contradict each other")
    charsets = {_charset(value) for value in said}
    if kinds != {"application/json"} or not charsets <= {"", "utf-8", "utf8"}:
        raise ApiError(Fault.MEDIA_TYPE, "send JSON in UTF-8, with the header 'Content-Type: application/json'")


def _charset(media_type: str) -> str:
    for parameter in media_type.split(";")[1:]:
        name, _, value = parameter.partition("=")
        if name.strip() == "charset":
            return value.strip().strip('"')
    return ""


async def read_bytes(request: Request, limit_bytes: int) -> bytes:
    """The body, refused as soon as more than `limit_bytes` have come, whatever Content-Length says."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit_bytes:
            raise ApiError(Fault.BODY_TOO_LARGE, f"the body is larger than {limit_bytes} bytes")
    return bytes(body)


def parse(body: bytes) -> dict[str, object]:
    """The JSON object in `body`. Raises ApiError."""
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise ApiError(Fault.INVALID_JSON, f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise ApiError(Fault.INVALID_JSON, "the body is nested too deeply") from error
    except ValueError as error:
        raise ApiError(Fault.INVALID_JSON, f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ApiError(Fault.INVALID_JSON, "the body should be a JSON object")
    return value


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ApiError(Fault.INVALID_JSON, f"the key {twice[:100]!r} occurs twice in one object", param=twice[:100])
    return value
