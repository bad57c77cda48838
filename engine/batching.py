"""When waiting sequences may join the batch: three policies over one scheduler, so that they can be compared.

Continuous batching (Yu et al., "Orca", OSDI 2022) lets sequences join at every step. The other two are how servers
batched before: a batch is formed, runs until its last member has ended, and only then the next one is formed. The slots
of members that have ended stay empty meanwhile; they are counted as idle, for they are what continuous batching saves.

    dynamic   as in Triton Inference Server: a batch is formed once `max_batch_size` wait, or the oldest has waited for
              `max_delay_s`; without a delay, at once with whoever waits.
    static    with whoever waits, into a batch of always `max_batch_size` slots, filled or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.config import BatchingMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Who is there: how many run, how many wait, and for how long the oldest of these has."""

    num_running: int
    num_waiting: int
    waited_s: float


class Batching(Protocol):
    """What the scheduler asks before anybody joins, and tells when membership changes."""

    def begin(self, crowd: Crowd, /) -> None:
        """A step begins."""

    @property
    def has_seat(self) -> bool:
        """Whether one more may join."""

    def joined(self) -> None:
        """A sequence has joined."""

    def stepped_back(self) -> None:
        """A sequence has been preempted; it is still a member."""

    def num_idle_slots(self, num_running: int, /) -> int:
        """Slots that are held empty until the batch is done."""

    def delay_s(self, crowd: Crowd, /) -> float:
        """For how long nothing will happen unless another sequence comes."""


class ContinuousBatching:
    """Everybody joins when there is room; there is nothing to remember."""

    has_seat = True

    def begin(self, _crowd: Crowd, /) -> None: ...

    def joined(self) -> None: ...

    def stepped_back(self) -> None: ...

    def num_idle_slots(self, _num_running: int, /) -> int:
        return 0

    def delay_s(self, _crowd: Crowd, /) -> float:
        return 0.0


class WholeBatches:
    """One batch after the other. `keeps_size`: a batch has `max_batch_size` slots even if fewer wait."""

    def __init__(self, *, max_batch_size: int, max_delay_s: float, keeps_size: bool) -> None:
        self._max_batch_size = max_batch_size
        self._max_delay_s = max_delay_s
        self._keeps_size = keeps_size
        self._num_seats = 0  # of members that have not joined yet, or have been preempted
        self._batch_size = 0

    @property
    def has_seat(self) -> bool:
        return self._num_seats > 0

    def begin(self, crowd: Crowd, /) -> None:
        if crowd.num_running:
            self._num_seats = min(self._num_seats, crowd.num_waiting)
        elif self.delay_s(crowd) > 0:
            self._num_seats = self._batch_size = 0
        else:
            self._num_seats = min(crowd.num_waiting, self._max_batch_size)
            self._batch_size = self._max_batch_size if self._keeps_size and crowd.num_waiting else self._num_seats

    def joined(self) -> None:
        self._num_seats -= 1

    def stepped_back(self) -> None:
        self._num_seats += 1

    def num_idle_slots(self, num_running: int, /) -> int:
        return max(0, self._batch_size - self._num_seats - num_running)

    def delay_s(self, crowd: Crowd, /) -> float:
        if crowd.num_running or not 0 < crowd.num_waiting < self._max_batch_size:
            return 0.0
        return max(0.0, self._max_delay_s - crowd.waited_s)


def batching_for(mode: BatchingMode, *, max_batch_size: int, max_delay_s: float) -> Batching:
    """The policy of this name."""
    if mode is BatchingMode.CONTINUOUS:
        return ContinuousBatching()
    is_static = mode is BatchingMode.STATIC
    return WholeBatches(max_batch_size=max_batch_size, max_delay_s=max_delay_s, keeps_size=is_static)
