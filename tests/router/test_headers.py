from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.api import LimitStatus, WindowStatus
from router.headers import echoed_request_id, go_duration, rate_limit_headers


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.012, "12ms"),
        (0.0001, "1ms"),
        (0.9999, "1s"),
        (1, "1s"),
        (1.5, "1.5s"),
        (1.25, "1.25s"),
        (10, "10s"),
        (60, "1m0s"),
        (360, "6m0s"),
        (3600, "1h0m0s"),
        (86_399.5, "23h59m59.5s"),
    ],
)
def test_durations_read_as_go_prints_them(seconds: float, text: str) -> None:
    assert go_duration(seconds) == text


@given(millis=st.integers(min_value=0, max_value=10**10))
def test_a_duration_can_be_read_back(millis: int) -> None:
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)(?:\.(\d+))?s)?(?:(\d+)ms)?", go_duration(millis / 1000))
    assert match is not None
    hours, minutes, seconds, fraction, small = (group or "0" for group in match.groups())
    assert int(hours) * 3_600_000 + int(minutes) * 60_000 + int(seconds) * 1000 + int(fraction.ljust(3, "0")) + int(
        small
    ) == pytest.approx(millis, abs=1)


def test_a_limit_has_three_headers_and_no_limit_has_none() -> None:
    limits = LimitStatus(tokens=WindowStatus(limit=1000, remaining=0, reset_s=6.0))
    assert rate_limit_headers(limits) == {
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "6s",
    }
    assert rate_limit_headers(LimitStatus()) == {}


@pytest.mark.parametrize("given_id", ["abc", "!~", "x" * 128])
def test_a_sound_request_id_is_echoed(given_id: str) -> None:
    assert echoed_request_id(given_id) == given_id


@pytest.mark.parametrize("given_id", [None, "", "x" * 129, "a b", "a\n", "é", "\x7f"])
def test_any_other_request_id_is_replaced(given_id: str | None) -> None:
    made = echoed_request_id(given_id)
    assert re.fullmatch(r"[0-9a-f]{32}", made)
    assert echoed_request_id(given_id) != made
