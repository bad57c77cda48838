"""A rate limit that is exact: a bucket in whole numbers, with reservations that can be given back in part.

**The bucket.** `limit` units flow in per minute, up to a capacity of `burst_s` seconds' worth. We keep what is
*missing* from a full bucket, f(t). It rises by n when n units are debited, and falls at the rate of the limit until it
is 0. One number says it all: the instant at which the bucket will be full again, known as the theoretical arrival time
of the generic cell rate algorithm (ITU-T I.371). Multiplied by the limit that instant is a whole number, and so is
everything else: a nanosecond is worth `limit`, a unit is worth one minute in nanoseconds, nothing is ever divided.

A bucket that starts full lets through at most capacity + limit units in any one minute, and never more than its
capacity at once. Debt is allowed: a settlement may cost more than was reserved; f then exceeds the capacity and the
next admission waits.

**Giving back.** A reservation i debits n_i at t_i and later turns out to have needed r less. The bucket must then stand
where it would stand if n_i - r had been debited at t_i. Putting r back is too much when the bucket has been full since:
a full bucket has already forgotten the debit, and r would be minted. Let g be the history with the smaller debit, and
d = f - g. At t_i, d is r. While neither bucket is full both fall at the same rate, and later debits raise both alike: d
stays. When g reaches 0, d is f itself, and falls with it. So d(t) is the smaller of r and the lowest f has been:

    d(now) = min(r, min of f over (t_i, now])

f falls between debits, so its minima are just before each later debit, and now. Call the minimum in this formula the
*floor* of reservation i. It follows that

- a debit at t lowers every floor to f(t) at most, taken just before the debit;
- floors are sorted: an older reservation looks back over more, so its floor is not above a younger one's;
- giving back d lowers f by d on all of (t_i, now], up to a stretch before the lowest point that no longer counts
  (there d is larger, but never so large that f falls under its new lowest point). So the floors of i and of all
  younger reservations fall by d, and those of older ones to i's new floor at most. After that the floors are those of
  the corrected history: any number of refunds, in any order, is exact, not only the first.

Reservations with equal floors stay equal, so we keep them as groups: a list sorted both by age and by floor. A debit
merges groups at the young end, a lookup is a binary search, a refund adds a pass over the younger groups. There are
never more groups than open reservations.

An overrun is debited when it becomes known, like a debit of that moment: never kinder than charging it at t_i.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from cluster.api import WindowStatus

NS_PER_S = 1_000_000_000
NS_PER_MINUTE = 60 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Debit:
    """Units taken and not yet settled. Debits are numbered in the order in which they were made."""

    number: int
    units: int


@dataclass(slots=True, kw_only=True, eq=False)
class _Floor:
    """Open reservations with one floor: those younger than the group before, up to number `youngest`."""

    youngest: int
    missing: int
    open: int


class RateWindow:
    """`limit` units per minute, `burst_s` seconds' worth at once but at least one unit; a limit of 0 allows nothing.

    Time that goes backwards stands still: it neither mints nor burns.
    """

    def __init__(self, *, limit: int, burst_s: int) -> None:
        self.limit = limit
        self._capacity = _capacity(limit, burst_s)
        self._latest_ns = 0
        self._full_at = 0  # scaled by the limit
        self._numbers = 0
        self._floors: list[_Floor] = []

    @property
    def capacity(self) -> int:
        """The most units that can be taken at once, ever."""
        return self._capacity // NS_PER_MINUTE

    def retry_after_ns(self, units: int, now_ns: int) -> int | None:
        """How long until `units` can be taken: 0 = now, None = never. Exact if nothing else happens meanwhile."""
        excess = units * NS_PER_MINUTE - self._capacity
        if not self.limit or excess > 0:
            return None
        excess += self._missing(now_ns)
        if excess <= 0:
            return 0
        return -(-excess // self.limit) + max(now_ns, self._latest_ns) - now_ns

    def debit(self, units: int, now_ns: int) -> Debit:
        """Take `units`, whether they are there or not: who may not go into debt asks `retry_after_ns` first."""
        self._advance(now_ns)
        self._full_at += units * NS_PER_MINUTE
        self._numbers += 1
        missing = self._full_at - self._latest_ns * self.limit
        self._floors.append(_Floor(youngest=self._numbers, missing=missing, open=1))
        return Debit(number=self._numbers, units=units)

    def settle(self, debit: Debit, units: int, now_ns: int) -> None:
        """Replace an open debit by what was really used: less is given back exactly, more is debited now. Once only."""
        self._advance(now_ns)
        k = bisect_left(self._floors, debit.number, key=lambda floor: floor.youngest)
        floor = self._floors[k]
        overrun = (units - debit.units) * NS_PER_MINUTE
        back = min(max(-overrun, 0), floor.missing)
        for younger in self._floors[k:]:
            younger.missing -= back
        self._full_at += max(overrun, 0) - back
        floor.open -= 1
        k = self._merge_older(k)
        if not floor.open:
            del self._floors[k]

    def left(self, now_ns: int) -> int:
        """What can be taken now; never negative."""
        return max(0, self._capacity - self._missing(now_ns)) // NS_PER_MINUTE

    def change(self, limit: int, burst_s: int, now_ns: int) -> None:
        """Another limit from now on. What is missing stays missing, but no more than the new capacity.

        What is missing is counted in units, whatever the rate at which they come back; so floors stay what they are.
        """
        self._advance(now_ns)
        capacity = _capacity(limit, burst_s)
        missing = min(self._missing(now_ns), capacity)
        self.limit, self._capacity = limit, capacity
        self._full_at = self._latest_ns * limit + missing
        for floor in self._floors:
            floor.missing = min(floor.missing, missing)
        if self._floors:
            self._merge_older(len(self._floors) - 1)

    def status(self, now_ns: int) -> WindowStatus:
        """What the client may see; a debt shows as nothing remaining."""
        missing = self._missing(now_ns)
        return WindowStatus(
            limit=self.limit,
            remaining=self.left(now_ns),
            reset_s=-(-missing // self.limit) / NS_PER_S if self.limit else 0.0,
        )

    def check_integrity(self, open_debits: int) -> None:
        """Assert that the floors are sorted and speak of exactly `open_debits` reservations."""
        assert sum(floor.open for floor in self._floors) == open_debits
        assert all(floor.open > 0 and floor.missing >= 0 for floor in self._floors)
        for older, younger in zip(self._floors, self._floors[1:], strict=False):
            assert older.youngest < younger.youngest and older.missing <= younger.missing

    def _missing(self, now_ns: int) -> int:
        return max(0, self._full_at - max(now_ns, self._latest_ns) * self.limit)

    def _advance(self, now_ns: int) -> None:
        """Move to now, and lower the floors to what is missing now, just before something changes."""
        self._latest_ns = max(now_ns, self._latest_ns)
        missing = self._missing(now_ns)
        self._full_at = self._latest_ns * self.limit + missing
        if self._floors and self._floors[-1].missing > missing:
            self._floors[-1].missing = missing
            self._merge_older(len(self._floors) - 1)

    def _merge_older(self, k: int) -> int:
        """Lower the floors of older groups to that of group `k` by merging them into it; returns where it is now."""
        group = self._floors[k]
        first = k
        while first > 0 and self._floors[first - 1].missing >= group.missing:
            first -= 1
            group.open += self._floors[first].open
        del self._floors[first:k]
        return first


def _capacity(limit: int, burst_s: int) -> int:
    return max(limit * burst_s * NS_PER_S, NS_PER_MINUTE) if limit else 0
