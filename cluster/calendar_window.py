"""Limits for a day or a month, by the calendar of a time zone.

**The clock.** Periods begin by the wall clock, which people and programs set; everything else here runs on a monotonic
one. If a clock that jumps could begin a period, a jump would mint quota, and one back and forth would mint it twice. So
`WallClock` reads the wall once, at the start, and then moves with the monotonic clock; later readings only pull it
along, by at most one part in `SLEW` of the time that passes. It never goes back. A true difference heals; a jump of a
day and back again an hour later costs or gains six minutes.

**The window.** What was reserved in a period is settled in it. A settlement that comes when the period is over changes
nothing, as that quota is gone: neither is a late refund minted into the new period, nor an overrun burnt there.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum, auto
from zoneinfo import ZoneInfo

NS_PER_S = 1_000_000_000
SLEW = 10


class WallClock:
    """Nanoseconds since 1970, as a function of monotonic nanoseconds; see the module."""

    def __init__(self, *, wall_ns: int, now_ns: int) -> None:
        self._wall_ns = wall_ns
        self._at_ns = now_ns

    def at(self, now_ns: int) -> int:
        """The wall's time when the monotonic clock says `now_ns`."""
        return self._wall_ns + max(0, now_ns - self._at_ns)

    def correct(self, wall_ns: int, now_ns: int) -> None:
        """The wall says `wall_ns`: go towards it, a little."""
        expected = self.at(now_ns)
        most = max(0, now_ns - self._at_ns) // SLEW
        self._wall_ns = expected + max(-most, min(wall_ns - expected, most))
        self._at_ns = max(now_ns, self._at_ns)


class Period(Enum):
    """How long a calendar limit lasts."""

    DAY = auto()
    MONTH = auto()


@dataclass(frozen=True, slots=True)
class Span:
    """One day or month, in wall nanoseconds; the end belongs to the next."""

    start_ns: int
    end_ns: int


def span_of(period: Period, time_zone: str, wall_ns: int) -> Span:
    """The day or month of `time_zone` in which `wall_ns` lies. Raises zoneinfo.ZoneInfoNotFoundError."""
    zone = ZoneInfo(time_zone)
    local = datetime.fromtimestamp(wall_ns // NS_PER_S, UTC).astimezone(zone)
    first = local.date() if period is Period.DAY else local.date().replace(day=1)
    following = first + timedelta(days=1 if period is Period.DAY else 32)
    if period is Period.MONTH:
        following = following.replace(day=1)
    start, end = (datetime(day.year, day.month, day.day, tzinfo=zone) for day in (first, following))
    return Span(start_ns=int(start.timestamp()) * NS_PER_S, end_ns=int(end.timestamp()) * NS_PER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalendarDebit:
    """Units taken in the period that begins at `period_ns`, and not yet settled."""

    period_ns: int
    units: int


class CalendarWindow:
    """`limit` units in each period. See `cluster.account`."""

    def __init__(self, *, limit: int, period: Period, time_zone: str, clock: WallClock) -> None:
        self.limit = limit
        self._period = period
        self._time_zone = time_zone
        self._clock = clock
        self._span = Span(0, 0)
        self._taken = 0

    @property
    def capacity(self) -> int:
        """The most units that can be taken at once, ever."""
        return self.limit

    @property
    def period(self) -> Period:
        return self._period

    @property
    def time_zone(self) -> str:
        return self._time_zone

    def retry_after_ns(self, units: int, now_ns: int) -> int | None:
        """How long until `units` can be taken: 0 = now, None = never. A refund may make it sooner."""
        self._advance(now_ns)
        if units > self.limit or not self.limit:
            return None
        if self._taken + units <= self.limit:
            return 0
        return self._span.end_ns - self._clock.at(now_ns)

    def debit(self, units: int, now_ns: int) -> CalendarDebit:
        """Take `units`, whether they are there or not."""
        self._advance(now_ns)
        self._taken += units
        return CalendarDebit(period_ns=self._span.start_ns, units=units)

    def settle(self, debit: CalendarDebit, units: int, now_ns: int) -> None:
        """Replace a debit by what was really used, if its period is not over."""
        self._advance(now_ns)
        if debit.period_ns == self._span.start_ns:
            self._taken += units - debit.units

    def left(self, now_ns: int) -> int:
        """What can still be taken in this period; never negative."""
        self._advance(now_ns)
        return max(0, self.limit - self._taken)

    def reset_ns(self, now_ns: int) -> int:
        """How long until the next period begins."""
        self._advance(now_ns)
        return self._span.end_ns - self._clock.at(now_ns)

    def change(self, limit: int, time_zone: str, now_ns: int) -> None:
        """Another limit from now on; what was taken in this period stays taken."""
        self._advance(now_ns)
        self.limit = limit
        if time_zone != self._time_zone:
            self._time_zone = time_zone
            start_ns = self._span.start_ns
            self._span = span_of(self._period, time_zone, self._clock.at(now_ns))
            # A debit that is open names the period in which it was made; it must still find it.
            self._span = Span(start_ns, self._span.end_ns)

    def _advance(self, now_ns: int) -> None:
        wall_ns = self._clock.at(now_ns)
        if wall_ns >= self._span.end_ns:
            self._span = span_of(self._period, self._time_zone, wall_ns)
            self._taken = 0
