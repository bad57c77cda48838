"""What ingresses and the admission actor say to each other.

Everything an ingress has to say in one tick travels as one `exchange`; decisions come back through one outstanding
`grants` call. Both may be lost and are then repeated: every message is idempotent by its request id, and decisions
are numbered and repeated until they have been acknowledged.

An *epoch* names one registration of one ingress in one life of the actor. An ingress whose epoch is not (or no longer)
known is told the new one, and says everything again: the permits it holds, what waits, what has to be closed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cluster.api import AdmissionAsk, LimitStatus, Permit, Refusal, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Ask for leave to run."""

    ask: AdmissionAsk


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """Nothing ran and nothing will: forget the request, whatever stage it is at, and charge nothing."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """The request has ended; this is what it used."""

    request_id: str
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Reopen:
    """This permit was given in an earlier epoch and is still in use."""

    permit: Permit


Message = Submit | Withdraw | Close | Reopen


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """The messages were taken, or (`accepted` false) none was, because `epoch` is a new one."""

    epoch: str
    accepted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Grants:
    """Decisions up to number `last`. `known` false: the epoch is not known here, register again."""

    known: bool
    last: int
    decisions: tuple[Permit | Refusal, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityReport:
    """What one replica can hold at most: sequences at once, and tokens in its KV cache."""

    replica: str
    model: str
    slots: int
    kv_tokens: int


class AdmissionUnreachableError(Exception):
    """The admission actor did not answer; whether it has taken what was said is not known."""


class AdmissionLink(Protocol):
    """The admission actor as an ingress reaches it. Every method raises AdmissionUnreachableError."""

    async def exchange(self, owner: str, epoch: str | None, messages: tuple[Message, ...]) -> Exchanged:
        """Take `messages` in their order, all or none."""

    async def grants(self, owner: str, epoch: str, after: int) -> Grants:
        """Wait (bounded) for decisions numbered above `after`; those up to it are acknowledged and forgotten."""

    async def limits(self, tenant: str, key: str) -> LimitStatus:
        """The rate limits of a tenant and its key now."""
