"""What the replicas of one model can run, and what has been promised of it.

Two things are counted: slots (sequences in the batch) and tokens of KV memory. What there is, is the sum of what live
replicas report; a report counts until `REPLICA_LEASE_NS` after it was made. What is promised, is what open permits
commit: a slot for each sequence, and the KV tokens of the whole request, so that admitted work need not be preempted.

A sum may fit where no single replica does, when the free memory lies in pieces. Admission accepts that: it decides
before placement, and the replica stays the authority on its own memory and lets a sequence wait in its own queue.

A request takes from lower lanes: the replica lets a sequence of a higher lane displace running ones of lower lanes
(see `engine.preemption`), which go on later. So what is promised to lower lanes does not stand in the way of a higher
one, and the promises to each lane and those above it, not to all lanes, are no more than there is. A request that age
has lifted runs in the higher lane, and is safe there; but it displaces nobody, or equals would displace one another.

No request is promised more than there is. One that wants more, of slots or of memory, gets all there is and runs alone:
its sequences take turns in the replicas' own queues, and an output that fills the memory ends there. Only a request of
which a single prompt is larger than the memory of every replica is refused, for it could never begin.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from cluster.api import Lane
from cluster.rate_window import NS_PER_S

REPLICA_LEASE_NS = 30 * NS_PER_S
"""A dead replica is normally reported by whoever sees it die; the lease is for when nobody did."""


class Fit(Enum):
    """Whether a request can run."""

    NOW = auto()
    LATER = auto()
    NEVER = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a request wants, to run in `lane`. `indivisible_tokens` of its `kv_tokens` must fit into one replica for it
    to run at all. `displaces`: whether what lower lanes have been promised counts as free for it."""

    lane: Lane
    sequences: int
    kv_tokens: int
    indivisible_tokens: int = 0
    displaces: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Promise:
    """What one permit commits."""

    lane: Lane
    slots: int
    kv_tokens: int


@dataclass(slots=True)
class Promised:
    """What the permits of some lanes commit, in sum."""

    slots: int = 0
    kv_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    slots: int
    kv_tokens: int
    at_ns: int


class ModelCapacity:
    """One model's replicas, and the commitments of its open permits by request id."""

    def __init__(self) -> None:
        self._reports: dict[str, _Report] = {}
        self._committed: dict[str, _Promise] = {}
        self._lanes = {lane: Promised() for lane in Lane}
        self.slots = 0
        self.kv_tokens = 0
        self.largest_kv_tokens = 0
        """The KV memory of the largest replica."""

    @property
    def replicas(self) -> int:
        return len(self._reports)

    @property
    def committed_slots(self) -> int:
        return self.promised_down_to(Lane.BATCH).slots

    @property
    def committed_kv_tokens(self) -> int:
        return self.promised_down_to(Lane.BATCH).kv_tokens

    @property
    def permits(self) -> int:
        return len(self._committed)

    def report(self, replica: str, slots: int, kv_tokens: int, now_ns: int) -> None:
        """What `replica` can hold at most; renews its lease."""
        if slots < 0 or kv_tokens < 0:
            raise ValueError(f"replica {replica!r} reports {slots} slots and {kv_tokens} KV tokens; neither can be < 0")
        self._reports[replica] = _Report(slots=slots, kv_tokens=kv_tokens, at_ns=now_ns)
        self._sum_up()

    def forget(self, replica: str) -> None:
        """The replica is gone. Permits that ran on it stay committed until they are closed."""
        if self._reports.pop(replica, None):
            self._sum_up()

    def expire(self, now_ns: int) -> None:
        """Forget replicas whose lease has ended."""
        for replica, report in list(self._reports.items()):
            if now_ns - report.at_ns >= REPLICA_LEASE_NS:
                self.forget(replica)

    def fit(self, need: Need) -> Fit:
        """Whether a request can run; without any replica it is too early to say never."""
        if self._reports and need.indivisible_tokens > self.largest_kv_tokens:
            return Fit.NEVER
        promise = self._promise(need)
        in_the_way = self.promised_down_to(need.lane if need.displaces else Lane.BATCH)
        has_slots = in_the_way.slots + promise.slots <= self.slots
        return Fit.NOW if has_slots and in_the_way.kv_tokens + promise.kv_tokens <= self.kv_tokens else Fit.LATER

    def promised_down_to(self, lane: Lane) -> Promised:
        """What `lane` and those above it have been promised."""
        above = [promised for each, promised in self._lanes.items() if each <= lane]
        return Promised(
            slots=sum(promised.slots for promised in above), kv_tokens=sum(promised.kv_tokens for promised in above)
        )

    def commit(self, request_id: str, need: Need) -> None:
        """Promise a request what it needs, whether it fits or not."""
        assert request_id not in self._committed, f"{request_id!r} is committed already"
        promise = self._committed[request_id] = self._promise(need)
        self._lanes[promise.lane].slots += promise.slots
        self._lanes[promise.lane].kv_tokens += promise.kv_tokens

    def release(self, request_id: str) -> None:
        """Take the promise back. Raises KeyError if there is none."""
        promise = self._committed.pop(request_id)
        self._lanes[promise.lane].slots -= promise.slots
        self._lanes[promise.lane].kv_tokens -= promise.kv_tokens

    def check_integrity(self, permits: set[str]) -> None:
        """Assert that exactly `permits` are committed, and that the sums are right."""
        assert set(self._committed) == permits
        for lane, promised in self._lanes.items():
            promises = [promise for promise in self._committed.values() if promise.lane is lane]
            assert promised.slots == sum(promise.slots for promise in promises)
            assert promised.kv_tokens == sum(promise.kv_tokens for promise in promises)
        assert self.slots == sum(report.slots for report in self._reports.values())
        assert self.kv_tokens == sum(report.kv_tokens for report in self._reports.values())

    def _promise(self, need: Need) -> _Promise:
        """What the request wants, but no more than there is; a single sequence runs in a single replica."""
        if not self._reports:
            return _Promise(lane=need.lane, slots=need.sequences, kv_tokens=need.kv_tokens)
        memory = self.largest_kv_tokens if need.sequences == 1 else self.kv_tokens
        slots = min(need.sequences, max(1, self.slots))
        return _Promise(lane=need.lane, slots=slots, kv_tokens=min(need.kv_tokens, memory))

    def _sum_up(self) -> None:
        reports = self._reports.values()
        self.slots = sum(report.slots for report in reports)
        self.kv_tokens = sum(report.kv_tokens for report in reports)
        self.largest_kv_tokens = max((report.kv_tokens for report in reports), default=0)
