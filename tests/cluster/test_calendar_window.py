from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.calendar_window import SLEW, CalendarWindow, Period, WallClock, span_of
from tests.cluster.makers import S

HOUR = 3600 * S
DAY = 24 * HOUR


def ns(text: str, zone: str = "UTC") -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()) * S


def window(
    limit: int = 100, *, at: str = "2026-12-05T10:00", period: Period = Period.DAY, zone: str = "UTC"
) -> CalendarWindow:
    """A window whose monotonic clock begins at 0 when the wall says `at` in UTC."""
    return CalendarWindow(limit=limit, period=period, time_zone=zone, clock=WallClock(wall_ns=ns(at), now_ns=0))


@pytest.mark.parametrize(
    ("period", "zone", "at", "start", "end"),
    [
        (Period.DAY, "UTC", "2026-12-05T10:00", "2026-12-05T00:00", "2026-12-06T00:00"),
        (Period.DAY, "UTC", "2026-12-05T00:00", "2026-12-05T00:00", "2026-12-06T00:00"),
        (Period.MONTH, "UTC", "2026-12-31T23:59", "2026-12-01T00:00", "2027-01-01T00:00"),
        (Period.MONTH, "UTC", "2028-02-29T12:00", "2028-02-01T00:00", "2028-03-01T00:00"),
        # The clock goes forward in Berlin: a day of 23 hours. And back: one of 25.
        (Period.DAY, "Europe/Berlin", "2026-03-29T12:00", "2026-03-28T23:00", "2026-03-29T22:00"),
        (Period.DAY, "Europe/Berlin", "2026-10-25T12:00", "2026-10-24T22:00", "2026-10-25T23:00"),
        (Period.DAY, "Asia/Kathmandu", "2026-12-05T18:14", "2026-12-04T18:15", "2026-12-05T18:15"),
    ],
)
def test_days_and_months_are_those_of_the_time_zone(period: Period, zone: str, at: str, start: str, end: str) -> None:
    span = span_of(period, zone, ns(at))
    assert (span.start_ns, span.end_ns) == (ns(start), ns(end))


@given(st.integers(0, 4 * 10**9), st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Pacific/Apia"]))
def test_a_moment_lies_in_its_span_and_the_next_one_follows_at_once(wall_s: int, zone: str) -> None:
    for period in Period:
        span = span_of(period, zone, wall_s * S)
        assert span.start_ns <= wall_s * S < span.end_ns
        assert span_of(period, zone, span.end_ns).start_ns == span.end_ns


def test_what_is_taken_is_back_when_the_day_is_over_and_not_before() -> None:
    day = window(limit=100, at="2026-12-05T10:00")
    day.debit(90, 0)
    assert (day.retry_after_ns(10, 0), day.left(0), day.reset_ns(0)) == (0, 10, 14 * HOUR)
    assert day.retry_after_ns(101, 0) is None
    assert day.retry_after_ns(11, 0) == 14 * HOUR
    assert (day.retry_after_ns(11, 14 * HOUR - 1), day.left(14 * HOUR - 1)) == (1, 10)
    assert (day.retry_after_ns(100, 14 * HOUR), day.left(14 * HOUR)) == (0, 100)


def test_settling_gives_back_within_the_period_and_changes_no_other() -> None:
    day = window(limit=100, at="2026-12-05T23:00")
    soon, late = day.debit(50, 0), day.debit(50, 0)
    day.settle(soon, 20, HOUR // 2)
    assert day.left(HOUR // 2) == 30
    day.debit(60, HOUR)
    day.settle(late, 10, HOUR)
    assert day.left(HOUR) == 40
    overrun = day.debit(40, HOUR)
    day.settle(overrun, 70, HOUR)
    assert day.left(HOUR) == 0
    assert day.retry_after_ns(1, HOUR) == DAY


def test_a_limit_of_0_allows_not_even_what_costs_nothing() -> None:
    assert window(limit=0).retry_after_ns(0, 0) is None


def test_another_limit_keeps_what_was_taken() -> None:
    day = window(limit=100)
    taken = day.debit(80, 0)
    day.change(90, "UTC", 0)
    assert day.left(0) == 10
    day.change(50, "Europe/Berlin", 0)
    assert day.left(0) == 0
    day.settle(taken, 20, 0)
    assert day.left(0) == 30


def test_a_clock_that_jumps_neither_mints_nor_burns() -> None:
    """A day ahead and back again: the wall that counts has moved by a tenth of the time that passed."""
    clock = WallClock(wall_ns=ns("2026-12-05T10:00"), now_ns=0)
    day = CalendarWindow(limit=100, period=Period.DAY, time_zone="UTC", clock=clock)
    day.debit(100, 0)
    for hour in range(1, 6):
        clock.correct(ns("2026-12-06T10:00") + hour * HOUR, hour * HOUR)
        assert day.left(hour * HOUR) == 0
    assert clock.at(5 * HOUR) == ns("2026-12-05T15:00") + 5 * HOUR // SLEW
    clock.correct(ns("2026-12-05T15:00"), 5 * HOUR)
    clock.correct(ns("2026-12-05T20:00"), 10 * HOUR)
    assert clock.at(10 * HOUR) == ns("2026-12-05T20:00")


@given(st.lists(st.tuples(st.integers(0, 2 * DAY), st.integers(-3 * DAY, 3 * DAY)), max_size=20))
def test_the_wall_never_goes_back_and_never_runs_more_than_a_tenth_off(steps: list[tuple[int, int]]) -> None:
    clock = WallClock(wall_ns=0, now_ns=0)
    now_ns = before = 0
    for waited_ns, jump_ns in steps:
        now_ns += waited_ns
        clock.correct(now_ns + jump_ns, now_ns)
        passed = clock.at(now_ns) - before
        assert waited_ns - waited_ns // SLEW <= passed <= waited_ns + waited_ns // SLEW
        before = clock.at(now_ns)
