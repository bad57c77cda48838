"""Who goes next when a model is full: lane, then the tenant that has had least for its weight, then arrival.

**The idea** is that of the virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024,
arXiv 2401.00588). Requests of language models differ a thousandfold in cost, so taking turns request by request is not
fair. Let every tenant have a counter of the tokens it was served, divided by its weight, and always serve the waiting
tenant whose counter is lowest. While two tenants both wait, their counters can be apart by no more than one request of
each, however long they wait: whoever is ahead is not served until the other has caught up. Nothing is ever held back
to keep a share free: a tenant that waits alone gets everything.

A tenant that did not wait for a while must not come back with the credit of its absence and shut the others out. When
a tenant begins to wait, its counter is therefore lifted to the level of those that have been waiting.

**Where ours differs.**

- The whole cost, prompt and reserved output, is charged at the grant; the paper charges output as it is generated.
  An admission controller sees a request twice, at its start and at its end, and what is reserved is held meanwhile
  (quota, KV memory): so reservations are what is shared. Who asks for more output than it needs, pays with its turn.
- Input and output tokens weigh the same, as they do in the quota.
- The level is the counter, before its charge, of the tenant served last. It is never above the lowest counter of those
  that wait, and below it by one request at most. The paper takes that lowest counter; we do not, because a tenant that
  comes and is withdrawn would then leave a trace: others could be lifted by its counter. Our level moves only when
  something is granted.
- There are lanes, each with counters of its own: a lower lane is served only while no higher one waits.
- The queue has one head, and what is behind it waits for it, in its own lane and in those below. A large request would
  otherwise see smaller ones slip past it into every gap, and never find enough room at once.

**Aging.** A request that has been in its lane for `aging_ns` moves to the end of its tenant's line in the lane above,
one lane at a time. So two aging times after it came, any request is in the top lane, where its tenant's line is served
in order and in fair share: no lane starves.

Every operation costs O(log n) for n tenants, amortised: a heap per lane has one valid ticket for each tenant that waits
in it; tickets that are overtaken by events are dropped when they come up, or when they are in the majority.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from cluster.api import AdmissionAsk, Lane, WaitingCount

VIRTUAL_PER_TOKEN = 1 << 20
"""Counters are whole numbers: a token is this much at weight 1, so that dividing by a weight loses next to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiter:
    """A request that waits. `tokens` is what it costs its tenant, `deadline_ns` when it will have waited too long."""

    ask: AdmissionAsk
    weight: int
    tokens: int
    deadline_ns: int


@dataclass(slots=True, kw_only=True, eq=False)
class _Place:
    """Where a waiter stands. `number` is the order of arrival."""

    waiter: Waiter
    number: int
    lane: Lane
    entered_ns: int


class _Ticket(NamedTuple):
    """The claim of a tenant's line to be served next: the smallest goes first."""

    served: int
    number: int
    tenant: str


@dataclass(slots=True, kw_only=True, eq=False)
class _Line:
    """One tenant in one lane: its counter, who waits, and the ticket for the first of them."""

    served: int = 0
    places: OrderedDict[str, _Place] = field(default_factory=OrderedDict)
    ticket: _Ticket | None = None


class FairQueue:
    """The waiting requests of one model. Deadlines are expected to follow arrival."""

    def __init__(self, *, aging_ns: int) -> None:
        self._aging_ns = aging_ns
        self._lanes = {lane: _LaneQueue() for lane in Lane}
        self._places: OrderedDict[str, _Place] = OrderedDict()
        self._of_tenant: dict[str, OrderedDict[str, Waiter]] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._places)

    def push(self, waiter: Waiter, now_ns: int) -> None:
        """Let `waiter` wait in the lane that it asked for."""
        ask = waiter.ask
        assert ask.request_id not in self._places, f"{ask.request_id!r} waits already"
        self._arrivals += 1
        place = _Place(waiter=waiter, number=self._arrivals, lane=ask.lane, entered_ns=now_ns)
        self._places[ask.request_id] = place
        self._of_tenant.setdefault(ask.tenant, OrderedDict())[ask.request_id] = waiter
        self._lanes[ask.lane].enter(place)

    def head(self) -> Waiter | None:
        """Who goes next; None if nobody waits."""
        place = self._head()
        return place.waiter if place else None

    def pop(self) -> Waiter:
        """Serve the head: its tenant is charged. Raises LookupError if nobody waits."""
        place = self._head()
        if place is None:
            raise LookupError("nobody waits")
        self._lanes[place.lane].serve(place)
        self._strike_off(place.waiter)
        return place.waiter

    def remove(self, request_id: str) -> Waiter:
        """Take out a waiter wherever it stands; nobody is charged. Raises KeyError if it does not wait."""
        place = self._places[request_id]
        self._lanes[place.lane].leave(place)
        self._strike_off(place.waiter)
        return place.waiter

    def age(self, now_ns: int) -> None:
        """Move everyone whose time in a lane is over up by one lane."""
        for lane in (Lane.STANDARD, Lane.BATCH):
            while (place := self._lanes[lane].first_entered()) and now_ns - place.entered_ns >= self._aging_ns:
                self._lanes[lane].leave(place)
                place.lane, place.entered_ns = Lane(lane - 1), now_ns
                self._lanes[place.lane].enter(place)

    def lane_of(self, waiter: Waiter) -> Lane:
        """The lane that a waiter has been lifted to; of one that does not wait here yet, the one it asked for."""
        place = self._places.get(waiter.ask.request_id)
        return place.lane if place else waiter.ask.lane

    def oldest(self) -> Waiter | None:
        """Who has waited longest."""
        return next(iter(self._places.values())).waiter if self._places else None

    def oldest_of(self, tenant: str) -> Waiter | None:
        """Who of `tenant` has waited longest."""
        return next(iter(self._of_tenant.get(tenant, {}).values()), None)

    def count_of(self, tenant: str) -> int:
        """How many requests of `tenant` wait."""
        return len(self._of_tenant.get(tenant, ()))

    def counts(self) -> tuple[WaitingCount, ...]:
        """How many wait, by lane and tenant."""
        counts = Counter((place.lane, place.waiter.ask.tenant) for place in self._places.values())
        return tuple(WaitingCount(lane=lane, tenant=tenant, count=n) for (lane, tenant), n in sorted(counts.items()))

    def check_integrity(self, waiting: set[str]) -> None:
        """Assert that exactly `waiting` wait, each in one line, and that each line has its valid ticket."""
        assert self._places.keys() == waiting
        assert sum(len(lane.places) for lane in self._lanes.values()) == len(self._places)
        assert sum(len(waiters) for waiters in self._of_tenant.values()) == len(self._places)
        assert all(waiters for waiters in self._of_tenant.values())
        for request_id, place in self._places.items():
            assert self._lanes[place.lane].places[request_id] is place
        for lane in self._lanes.values():
            lane.check_integrity()

    def _head(self) -> _Place | None:
        return next((place for lane in Lane if (place := self._lanes[lane].head())), None)

    def _strike_off(self, waiter: Waiter) -> None:
        ask = waiter.ask
        del self._places[ask.request_id]
        waiters = self._of_tenant[ask.tenant]
        del waiters[ask.request_id]
        if not waiters:
            del self._of_tenant[ask.tenant]


class _LaneQueue:
    """One lane: a line for each tenant, and who entered when."""

    def __init__(self) -> None:
        self.places: OrderedDict[str, _Place] = OrderedDict()
        self._lines: dict[str, _Line] = {}
        self._tickets: list[_Ticket] = []
        self._level = 0

    def enter(self, place: _Place) -> None:
        """Stand at the end of the tenant's line."""
        ask = place.waiter.ask
        line = self._lines.setdefault(ask.tenant, _Line())
        self.places[ask.request_id] = line.places[ask.request_id] = place
        if len(line.places) == 1:
            line.served = max(line.served, self._level)
            self._draw_ticket(ask.tenant, line)

    def head(self) -> _Place | None:
        """The first of the line that has had least."""
        while self._tickets:
            ticket = self._tickets[0]
            line = self._lines[ticket.tenant]
            if line.ticket is ticket:
                return next(iter(line.places.values()))
            heappop(self._tickets)
        return None

    def serve(self, place: _Place) -> None:
        """Charge the tenant of the head for it and let it go."""
        line = self._lines[place.waiter.ask.tenant]
        self._level = line.served
        line.served += max(1, place.waiter.tokens) * VIRTUAL_PER_TOKEN // place.waiter.weight
        self.leave(place)

    def leave(self, place: _Place) -> None:
        """Step out of the line."""
        ask = place.waiter.ask
        line = self._lines[ask.tenant]
        was_first = next(iter(line.places)) == ask.request_id
        del self.places[ask.request_id]
        del line.places[ask.request_id]
        if was_first:
            self._draw_ticket(ask.tenant, line)

    def first_entered(self) -> _Place | None:
        """Who has been in this lane longest."""
        return next(iter(self.places.values()), None)

    def check_integrity(self) -> None:
        """Assert that lines, places and tickets agree."""
        assert sum(len(line.places) for line in self._lines.values()) == len(self.places)
        assert len(self._tickets) <= self._most_tickets()
        valid = [ticket for ticket in self._tickets if self._lines[ticket.tenant].ticket is ticket]
        assert sorted(ticket.tenant for ticket in valid) == sorted(t for t, line in self._lines.items() if line.places)
        for ticket in valid:
            line = self._lines[ticket.tenant]
            assert ticket.served == line.served >= self._level
            assert ticket.number == next(iter(line.places.values())).number

    def _draw_ticket(self, tenant: str, line: _Line) -> None:
        """The first of the line is another one now, or the line is empty."""
        line.ticket = None
        if line.places:
            first = next(iter(line.places.values()))
            line.ticket = _Ticket(served=line.served, number=first.number, tenant=tenant)
            heappush(self._tickets, line.ticket)
        if len(self._tickets) > self._most_tickets():
            self._tickets = [ticket for ticket in self._tickets if self._lines[ticket.tenant].ticket is ticket]
            heapify(self._tickets)

    def _most_tickets(self) -> int:
        """More than this and most of them are no longer valid."""
        return 2 * len(self._lines) + 8
