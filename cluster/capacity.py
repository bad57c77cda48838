"""What the replicas of one model can run, and what has been promised of it.

Two things are counted: slots (sequences in the batch) and tokens of KV memory. What there is, is the sum of what live
replicas report; a report counts until `REPLICA_LEASE_NS` after it was made. What is promised, is what open permits
commit: a slot for each sequence, and the KV tokens of the whole request, so that admitted work need not be preempted.

A sum may fit where no single replica does, when the free memory lies in pieces. Admission accepts that: it decides
before placement, and the replica stays the authority on its own memory and lets a sequence wait in its own queue.

No request is promised more than there is. One that wants more, of slots or of memory, gets all there is and runs alone:
its sequences take turns in the replicas' own queues, and an output that fills the memory ends there. Only a request of
which a single prompt is larger than the memory of every replica is refused, for it could never begin.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

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
    """What a request wants. `indivisible_tokens` of its `kv_tokens` must fit into one replica for it to run at all."""

    sequences: int
    kv_tokens: int
    indivisible_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Promise:
    """What one permit commits."""

    slots: int
    kv_tokens: int


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
        self.committed_slots = 0
        self.committed_kv_tokens = 0
        self.slots = 0
        self.kv_tokens = 0
        self.largest_kv_tokens = 0
        """The KV memory of the largest replica."""

    @property
    def replicas(self) -> int:
        return len(self._reports)

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
        has_slots = self.committed_slots + promise.slots <= self.slots
        return Fit.NOW if has_slots and self.committed_kv_tokens + promise.kv_tokens <= self.kv_tokens else Fit.LATER

    def commit(self, request_id: str, need: Need) -> None:
        """Promise a request what it needs, whether it fits or not."""
        assert request_id not in self._committed, f"{request_id!r} is committed already"
        promise = self._committed[request_id] = self._promise(need)
        self.committed_slots += promise.slots
        self.committed_kv_tokens += promise.kv_tokens

    def release(self, request_id: str) -> None:
        """Take the promise back. Raises KeyError if there is none."""
        promise = self._committed.pop(request_id)
        self.committed_slots -= promise.slots
        self.committed_kv_tokens -= promise.kv_tokens

    def check_integrity(self, permits: set[str]) -> None:
        """Assert that exactly `permits` are committed, and that the sums are right."""
        assert set(self._committed) == permits
        assert self.committed_slots == sum(promise.slots for promise in self._committed.values())
        assert self.committed_kv_tokens == sum(promise.kv_tokens for promise in self._committed.values())
        assert self.slots == sum(report.slots for report in self._reports.values())
        assert self.kv_tokens == sum(report.kv_tokens for report in self._reports.values())

    def _promise(self, need: Need) -> _Promise:
        """What the request wants, but no more than there is; a single sequence runs in a single replica."""
        if not self._reports:
            return _Promise(slots=need.sequences, kv_tokens=need.kv_tokens)
        memory = self.largest_kv_tokens if need.sequences == 1 else self.kv_tokens
        return _Promise(slots=min(need.sequences, max(1, self.slots)), kv_tokens=min(need.kv_tokens, memory))

    def _sum_up(self) -> None:
        reports = self._reports.values()
        self.slots = sum(report.slots for report in reports)
        self.kv_tokens = sum(report.kv_tokens for report in reports)
        self.largest_kv_tokens = max((report.kv_tokens for report in reports), default=0)
