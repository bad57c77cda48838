from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.rate_window import RateWindow
from tests.cluster.makers import MINUTE, Replay, S


def window(limit: int = 60, burst_s: int = 60) -> RateWindow:
    return RateWindow(limit=limit, burst_s=burst_s)


def missing(bucket: RateWindow, now_ns: int) -> Fraction:
    """What is missing, as far as it can be seen from outside: to the nanosecond of refill."""
    wait_ns = bucket.retry_after_ns(bucket.capacity, now_ns)
    assert wait_ns is not None
    return Fraction(wait_ns * bucket.limit, MINUTE)


def test_full_bucket_lets_its_capacity_through_at_once_and_no_more() -> None:
    bucket = window(limit=60)
    for _ in range(60):
        assert bucket.retry_after_ns(1, 0) == 0
        bucket.debit(1, 0)
    assert bucket.retry_after_ns(1, 0) == 1 * S
    assert bucket.retry_after_ns(60, 0) == 60 * S


def test_burst_sets_the_capacity_and_not_the_rate() -> None:
    bucket = window(limit=60, burst_s=10)
    assert bucket.capacity == 10
    bucket.debit(10, 0)
    assert bucket.retry_after_ns(10, 0) == 10 * S
    assert bucket.retry_after_ns(11, 0) is None


def test_small_limit_still_holds_one_unit() -> None:
    bucket = window(limit=1, burst_s=10)
    assert bucket.capacity == 1
    bucket.debit(1, 0)
    assert bucket.retry_after_ns(1, 0) == MINUTE


def test_limit_of_zero_allows_nothing_ever() -> None:
    bucket = window(limit=0)
    assert bucket.retry_after_ns(1, 0) is None
    assert bucket.retry_after_ns(0, 10 * MINUTE) is None
    status = bucket.status(0)
    assert (status.limit, status.remaining, status.reset_s) == (0, 0, 0.0)


def test_more_than_the_capacity_never_fits() -> None:
    assert window(limit=100).retry_after_ns(100, 0) == 0
    assert window(limit=100).retry_after_ns(101, 0) is None


def test_retry_is_exact_where_the_rate_does_not_divide_a_nanosecond() -> None:
    bucket = window(limit=7)
    bucket.debit(7, 0)
    wait_ns = bucket.retry_after_ns(1, 0)
    assert wait_ns == ceil(Fraction(MINUTE, 7)) == 8_571_428_572
    assert bucket.retry_after_ns(1, wait_ns) == 0
    assert bucket.retry_after_ns(1, wait_ns - 1) == 1


def test_overrun_becomes_debt_and_delays_the_next_admission() -> None:
    bucket = window(limit=60)
    debit = bucket.debit(10, 0)
    bucket.settle(debit, 100, 0)
    assert bucket.status(0).remaining == 0
    assert bucket.status(0).reset_s == 100.0
    assert bucket.retry_after_ns(1, 0) == 41 * S


def test_refund_without_refill_restores_everything() -> None:
    bucket = window(limit=60)
    bucket.settle(bucket.debit(50, 0), 0, 0)
    assert bucket.status(0).remaining == 60


def test_refund_after_the_bucket_was_full_mints_nothing() -> None:
    bucket = window(limit=60)
    debit = bucket.debit(10, 0)
    bucket.debit(30, 20 * S)  # the bucket was full again at 10 s
    bucket.settle(debit, 0, 20 * S)
    assert bucket.status(20 * S).remaining == 30


def test_refund_is_what_is_still_missing_of_it() -> None:
    bucket = window(limit=60)
    debit = bucket.debit(10, 0)
    bucket.debit(30, 6 * S)  # 4 of the 10 are still missing
    bucket.settle(debit, 0, 6 * S)
    assert bucket.status(6 * S).remaining == 30
    assert bucket.status(6 * S).reset_s == 30.0


def test_second_refund_sees_the_history_as_the_first_one_corrected_it() -> None:
    bucket = window(limit=60)
    first, second = bucket.debit(5, 0), bucket.debit(5, 0)
    bucket.debit(20, 5 * S)  # 5 are missing just before
    bucket.settle(first, 0, 5 * S)
    bucket.settle(second, 0, 5 * S)  # with the first gone, the bucket was full at 5 s: nothing of this is missing
    assert bucket.status(5 * S).remaining == 40


def test_clock_that_goes_back_neither_mints_nor_burns() -> None:
    bucket = window(limit=60)
    bucket.debit(60, 100 * S)
    assert bucket.retry_after_ns(1, 40 * S) == 61 * S  # asked on the caller's clock
    bucket.settle(bucket.debit(0, 10 * S), 0, 5 * S)
    assert bucket.retry_after_ns(1, 101 * S) == 0
    assert bucket.status(160 * S).remaining == 60


@pytest.mark.parametrize("n", [1, 3, 7])
def test_status_rounds_what_remains_down_and_the_reset_up(n: int) -> None:
    bucket = window(limit=7)
    bucket.debit(n, 0)
    just_before_one_is_back = ceil(Fraction(MINUTE, 7)) - 1
    assert bucket.status(just_before_one_is_back).remaining == 7 - n
    assert bucket.status(just_before_one_is_back + 1).remaining == 8 - n
    assert bucket.status(0).reset_s == ceil(Fraction(n * MINUTE, 7)) / S


limits = st.integers(1, 100)
bursts = st.integers(1, 120)
steps = st.lists(
    st.tuples(
        st.integers(0, 40 * S) | st.sampled_from([0, S, 10 * S]),
        st.sampled_from(["debit", "debit", "less", "less", "more"]),
        st.integers(0, 120),
        st.integers(0, 10),
    ),
    max_size=40,
)


@given(limit=limits, burst_s=bursts, steps=steps)
def test_level_is_that_of_the_history_with_what_was_really_used(
    limit: int, burst_s: int, steps: list[tuple[int, str, int, int]]
) -> None:
    """Any number of open reservations, any order of settling; an overrun counts from when it is known."""
    bucket, replay = window(limit, burst_s), Replay(limit, burst_s)
    kindest = Replay(limit, burst_s)  # overruns too are charged at the time of the reservation
    open_debits = []
    now_ns = 0
    for wait_ns, action, amount, pick in steps:
        now_ns += wait_ns
        if action == "debit":
            open_debits.append((bucket.debit(amount, now_ns), replay.debit(amount, now_ns)))
            kindest.debit(amount, now_ns)
            kindest.debit(0, now_ns)  # keeps the numbers of both histories in step
            replay.debit(0, now_ns)
        elif open_debits:
            debit, number = open_debits.pop(pick % len(open_debits))
            actual = min(amount, debit.units) if action == "less" else debit.units + amount
            bucket.settle(debit, actual, now_ns)
            kindest.correct(number, actual)
            if action == "less":
                replay.correct(number, actual)
            else:
                replay.debit(amount, now_ns)
                kindest.debit(0, now_ns)
        bucket.check_integrity(len(open_debits))
        exact = replay.missing(now_ns)
        assert exact >= kindest.missing(now_ns)
        seen = missing(bucket, now_ns)
        slack = bucket.capacity - replay.capacity  # what of the capacity is not a whole unit, negative
        assert ceil(max(Fraction(0), exact + slack) * MINUTE / limit) == seen * MINUTE / limit


@given(limit=limits, burst_s=bursts, debits=st.lists(st.tuples(st.integers(0, 5 * S), st.integers(0, 50))), n=limits)
def test_retry_after_is_exact(limit: int, burst_s: int, debits: list[tuple[int, int]], n: int) -> None:
    bucket = window(limit, burst_s)
    now_ns = 0
    for wait_ns, units in debits:
        now_ns += wait_ns
        bucket.debit(units, now_ns)
    retry_ns = bucket.retry_after_ns(n, now_ns)
    if retry_ns is None:
        assert n > bucket.capacity
        return
    assert bucket.retry_after_ns(n, now_ns + retry_ns) == 0
    if retry_ns:
        assert bucket.retry_after_ns(n, now_ns + retry_ns - 1) == 1


@given(
    times=st.lists(st.tuples(st.integers(0, 200 * S), st.integers(1, 20)), max_size=30), later=st.integers(0, 100 * S)
)
def test_a_clock_in_disorder_is_the_same_as_one_that_stands_still(times: list[tuple[int, int]], later: int) -> None:
    disordered, ordered = window(limit=60), window(limit=60)
    latest = 0
    for now_ns, units in times:
        latest = max(latest, now_ns)
        disordered.settle(disordered.debit(units, now_ns), units // 2, now_ns)
        ordered.settle(ordered.debit(units, latest), units // 2, latest)
    assert disordered.status(latest + later) == ordered.status(latest + later)


def test_another_limit_keeps_what_is_missing_but_no_debt() -> None:
    bucket = window(limit=1000)
    debit = bucket.debit(600, 0)
    bucket.change(700, 60, 0)
    assert (bucket.left(0), bucket.retry_after_ns(101, 0)) == (100, -(-MINUTE // 700))
    bucket.settle(debit, 200, 0)
    assert bucket.left(0) == 500
    bucket.debit(500, 0)
    bucket.change(60, 60, 0)
    assert (bucket.left(0), bucket.retry_after_ns(1, 0)) == (0, 1 * S)


@given(
    limit=st.integers(1, 100),
    steps=st.lists(st.tuples(st.integers(0, 20 * S), st.integers(0, 60), st.integers(0, 60)), max_size=20),
)
def test_a_change_to_the_same_limit_changes_nothing(limit: int, steps: list[tuple[int, int, int]]) -> None:
    left_alone, changed = window(limit), window(limit)
    now_ns, open_debits = 0, []
    for wait_ns, wanted, really in steps:
        now_ns += wait_ns
        # Without debt, for of that a change forgives what is more than the capacity.
        units = min(wanted, left_alone.left(now_ns))
        changed.change(limit, 60, now_ns)
        open_debits.append((left_alone.debit(units, now_ns), changed.debit(units, now_ns), min(really, units)))
        if really % 3 == 0:
            mine, its, used = open_debits.pop(really % len(open_debits))
            left_alone.settle(mine, used, now_ns)
            changed.settle(its, used, now_ns)
        assert changed.status(now_ns) == left_alone.status(now_ns)
        changed.check_integrity(len(open_debits))
