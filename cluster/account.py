"""The account of one scope: a meter for each of its limits, and what was reserved and used.

A meter is a rate window or a calendar window; both answer the same few questions, so that the ledger can ask every
limit of every scope alike. No two limits share a meter. Concurrent requests need none: they are open reservations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from cluster.api import WindowStatus
from cluster.calendar_window import CalendarWindow, Period, WallClock
from cluster.directory import Charge, LimitKind, Limits, Scope, ScopeTerms
from cluster.rate_window import NS_PER_S, RateWindow

CONCURRENCY_RETRY_NS = NS_PER_S
"""Nobody knows when a running request ends: the shortest wait that can be told to a client."""

METERED = tuple(kind for kind in LimitKind if kind is not LimitKind.CONCURRENT_REQUESTS)
_PERIODS = {
    LimitKind.TOKENS_PER_DAY: Period.DAY,
    LimitKind.TOKENS_PER_MONTH: Period.MONTH,
    LimitKind.BUDGET_PER_MONTH: Period.MONTH,
}


Meter = RateWindow | CalendarWindow


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """The limit that binds longest. `capacity`: what it can hold at most. `retry_after_ns` None: waiting is no use."""

    scope: Scope
    kind: LimitKind
    limit: int
    capacity: int
    asked: int
    left: int
    retry_after_ns: int | None


@dataclass(frozen=True, slots=True)
class MeterDebit:
    """What was taken from one meter, which the account may no longer have when it is settled."""

    kind: LimitKind
    meter: Meter
    settle: Callable[[int, int], None]
    """Replace the debit by so many units, at such a time."""


class Account:
    """One scope's. Its counters say what is reserved now and what was used since the account was opened."""

    def __init__(self, terms: ScopeTerms, clock: WallClock) -> None:
        self.scope = terms.scope
        self.limits = Limits()
        self.meters: dict[LimitKind, Meter] = {}
        self.open = 0
        self.reserved_tokens = 0
        self.used = Charge()
        self._clock = clock
        self.put_in_force(terms, 0)

    def put_in_force(self, terms: ScopeTerms, now_ns: int) -> None:
        """Change the limits; what was used under the old ones stays used under the new."""
        self.limits = terms.limits
        for kind in METERED:
            limit = terms.limits.of(kind)
            match self.meters.get(kind):
                case _ if limit is None:
                    self.meters.pop(kind, None)
                case None:
                    self.meters[kind] = self._meter(kind, limit, terms)
                case RateWindow() as window:
                    window.change(limit, terms.limits.burst_s, now_ns)
                case CalendarWindow() as window:
                    window.change(limit, terms.time_zone, now_ns)

    def shortfalls(self, charge: Charge, now_ns: int) -> list[Shortfall]:
        """Every limit of this scope that has no room for `charge` now."""
        found = []
        for kind, meter in self.meters.items():
            asked = units(kind, charge)
            retry_after_ns = meter.retry_after_ns(asked, now_ns)
            if retry_after_ns != 0:
                shortfall = Shortfall(
                    scope=self.scope,
                    kind=kind,
                    limit=meter.limit,
                    capacity=meter.capacity,
                    asked=asked,
                    left=meter.left(now_ns),
                    retry_after_ns=retry_after_ns,
                )
                found.append(shortfall)
        limit = self.limits.concurrent_requests
        if limit is not None and self.open >= limit:
            shortfall = Shortfall(
                scope=self.scope,
                kind=LimitKind.CONCURRENT_REQUESTS,
                limit=limit,
                capacity=limit,
                asked=1,
                left=0,
                retry_after_ns=CONCURRENCY_RETRY_NS if limit else None,
            )
            found.append(shortfall)
        return found

    def reserve(self, charge: Charge, due: Charge, now_ns: int) -> list[MeterDebit]:
        """Reserve `charge`; what is `due` of it, as a part may be paid, is taken from every limit, into debt too."""
        self.open += 1
        self.reserved_tokens += charge.tokens
        return [MeterDebit(kind, meter, _take(meter, units(kind, due), now_ns)) for kind, meter in self.meters.items()]

    def settle(self, reserved: Charge, used: Charge, prepaid: Charge) -> None:
        """Count a reservation as ended; its debits are settled one by one. `prepaid` was counted as used before."""
        self.open -= 1
        self.reserved_tokens -= reserved.tokens
        self.used = Charge(
            requests=self.used.requests + used.requests - prepaid.requests,
            tokens=self.used.tokens + used.tokens - prepaid.tokens,
            money=self.used.money + used.money - prepaid.money,
        )

    def window_status(self, kind: LimitKind, now_ns: int) -> WindowStatus | None:
        """One rate limit as a client may see it, None: there is none."""
        meter = self.meters.get(kind)
        return replace(meter.status(now_ns), scope=self.scope) if isinstance(meter, RateWindow) else None

    def output_room(self, prompt_tokens: int, prompt_price: int, completion_price: int) -> int | None:
        """The most output tokens that a request with such a prompt could ever reserve; None = any number."""
        rooms = [
            meter.capacity - prompt_tokens
            for kind, meter in self.meters.items()
            if kind in (LimitKind.TOKENS_PER_MINUTE, LimitKind.TOKENS_PER_DAY, LimitKind.TOKENS_PER_MONTH)
        ]
        budget = self.meters.get(LimitKind.BUDGET_PER_MONTH)
        if budget is not None and completion_price:
            rooms.append((budget.capacity - prompt_tokens * prompt_price) // completion_price)
        return max(0, min(rooms)) if rooms else None

    def check_integrity(self, open_charges: list[Charge], open_debits: list[MeterDebit]) -> None:
        """Assert that the account agrees with its open reservations."""
        assert self.open == len(open_charges)
        assert self.reserved_tokens == sum(charge.tokens for charge in open_charges)
        for meter in self.meters.values():
            if isinstance(meter, RateWindow):
                meter.check_integrity(sum(debit.meter is meter for debit in open_debits))

    def _meter(self, kind: LimitKind, limit: int, terms: ScopeTerms) -> Meter:
        if period := _PERIODS.get(kind):
            return CalendarWindow(limit=limit, period=period, time_zone=terms.time_zone, clock=self._clock)
        return RateWindow(limit=limit, burst_s=terms.limits.burst_s)


def _take(meter: Meter, amount: int, now_ns: int) -> Callable[[int, int], None]:
    match meter:
        case RateWindow() as window:
            return partial(window.settle, window.debit(amount, now_ns))
        case CalendarWindow() as window:
            return partial(window.settle, window.debit(amount, now_ns))


def units(kind: LimitKind, charge: Charge) -> int:
    """How much of `charge` a limit of this kind counts."""
    match kind:
        case LimitKind.REQUESTS_PER_MINUTE:
            return charge.requests
        case LimitKind.BUDGET_PER_MONTH:
            return charge.money
        case _:
            return charge.tokens
