from __future__ import annotations

import pytest

from router.body import check_media_type, parse
from router.errors import ApiError


@pytest.mark.parametrize(
    "headers",
    [
        ["application/json"],
        ["Application/JSON"],
        ["application/json; charset=utf-8"],
        ['application/json;charset="UTF-8"'],
        ["application/json; version=1"],
        ["application/json", "application/json"],
        ["application/json, application/json; charset=utf-8"],
    ],
)
def test_json_in_utf_8_is_taken(headers: list[str]) -> None:
    check_media_type(headers)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 415),
        ([""], 415),
        (["text/plain"], 415),
        (["application/x-www-form-urlencoded"], 415),
        (["application/jsonp"], 415),
        (["application/json; charset=latin-1"], 415),
        (["application/json", "text/plain"], 400),
        (["application/json, text/plain"], 400),
    ],
)
def test_every_other_media_type_is_refused(headers: list[str], status: int) -> None:
    with pytest.raises(ApiError) as caught:
        check_media_type(headers)
    assert caught.value.row.status == status


def test_an_object_is_parsed() -> None:
    assert parse(b'{"a": [1, 1.5, null, "\\u0000\xc3\xa9"]}') == {"a": [1, 1.5, None, "\0é"]}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "should be a JSON object"),
        (b'"x"', "should be a JSON object"),
        (b"null", "should be a JSON object"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
    ],
    ids=lambda value: value[:12] if isinstance(value, bytes) else None,
)
def test_anything_else_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        parse(body)
    assert (caught.value.row.status, caught.value.row.code) == (400, "invalid_json")


def test_a_key_that_occurs_twice_is_named() -> None:
    with pytest.raises(ApiError) as caught:
        parse(b'{"b": {"a": 1, "c": 2, "a": 3}}')
    assert (caught.value.row.code, caught.value.param) == ("invalid_json", "a")
