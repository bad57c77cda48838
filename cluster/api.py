"""The door of the cluster package: who may go, when, and what it cost.

Pure data, no torch, no ray, no clock. The decision itself is `cluster.admission.AdmissionController`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

__all__ = [
    "AdmissionAsk",
    "Lane",
    "LimitStatus",
    "Limits",
    "Permit",
    "Refusal",
    "RefusalCode",
    "Tenant",
    "Usage",
    "WindowStatus",
]


class Lane(IntEnum):
    """A priority class. Lower goes first."""

    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2


class RefusalCode(StrEnum):
    """Which limit refused. The values are the `code` of the HTTP error."""

    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    CONCURRENT_REQUESTS = "concurrent_requests"
    QUEUE_FULL = "queue_full"
    EXCEEDS_LIMIT = "exceeds_limit"
    """The request alone is larger than the tenant's limit: it can never be admitted."""
    NO_CAPACITY = "no_capacity"
    """No replica of the model could ever hold it, or none has been ready for too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """A tenant's quota. None = unlimited, 0 = nothing allowed. `burst_s`: how many seconds' worth may come at once."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    burst_s: int = 60
    concurrent_requests: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Who is served. `models` None = all. `weight`: share of capacity when several tenants wait in one lane."""

    id: str
    name: str
    weight: int = 1
    max_priority: Lane = Lane.INTERACTIVE
    models: tuple[str, ...] | None = None
    limits: Limits = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionAsk:
    """Leave to run one request. `max_output_tokens` None: the client set no bound, an expectation is reserved."""

    request_id: str
    tenant: str
    model: str
    lane: Lane
    prompt_tokens: int
    max_output_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowStatus:
    """One rate limit as the client may see it. `reset_s`: seconds until it is full again; `remaining` is never < 0."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitStatus:
    """The tenant's rate limits after a decision; None where unlimited."""

    requests: WindowStatus | None = None
    tokens: WindowStatus | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Permit:
    """Leave to run, held until it is closed with the exact usage."""

    request_id: str
    tenant: str
    model: str
    lane: Lane
    reserved_tokens: int
    status: LimitStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why not, and when to come back. `retry_after_s` None: never, unchanged."""

    code: RefusalCode
    message: str
    retry_after_s: int | None
    status: LimitStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Exact tokens of one request, as counted by the engine."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens
