"""The door of the cluster package: who may go, when, and what it cost.

Pure data, no torch, no ray, no clock. The decision itself is `cluster.admission.AdmissionController`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cluster.calendar_window import WallClock
from cluster.directory import (
    MILLION,
    PICO,
    Charge,
    Directory,
    KeyTerms,
    Level,
    LimitKind,
    Limits,
    ModelTerms,
    Organisation,
    Scope,
    Tenant,
)
from cluster.lane import Lane

__all__ = [
    "MILLION",
    "PICO",
    "AdmissionAsk",
    "AdmissionSnapshot",
    "Charge",
    "Directory",
    "KeyTerms",
    "Lane",
    "Level",
    "LimitKind",
    "LimitStatus",
    "Limits",
    "ModelSnapshot",
    "ModelTerms",
    "Organisation",
    "Permit",
    "QueuePolicy",
    "Queued",
    "Refusal",
    "RefusalCode",
    "Scope",
    "Tenant",
    "TenantSnapshot",
    "Usage",
    "WaitingCount",
    "WallClock",
    "WindowStatus",
]


class RefusalCode(StrEnum):
    """Which limit refused. The values are the `code` of the HTTP error."""

    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    CONCURRENT_REQUESTS = "concurrent_requests"
    TOKENS_PER_DAY = "tokens_per_day"
    TOKENS_PER_MONTH = "tokens_per_month"
    BUDGET = "budget"
    QUEUE_FULL = "queue_full"
    EXCEEDS_LIMIT = "exceeds_limit"
    """The request alone is larger than a limit that it falls under: it can never be admitted."""
    NO_CAPACITY = "no_capacity"
    """No replica was free, or none there, for too long."""
    KV_CAPACITY_EXCEEDED = "kv_capacity_exceeded"
    """A prompt alone is larger than the KV memory of every replica: it can never run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePolicy:
    """Bounds of the queue in front of each model.

    `max_waiting_per_tenant` counts one tenant's requests for one model. A request waits `max_wait_s` at most; each
    `aging_s` that it has waited in its lane lifts it by one lane.
    """

    max_waiting_per_model: int = 1024
    max_waiting_per_tenant: int = 256
    max_wait_s: float = 60.0
    aging_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionAsk:
    """Leave to run one request: one sequence, or several under one permit.

    `prompt_tokens` and `max_output_tokens` are sums: each prompt counts once, however many outputs it has; None: the
    client set no bound, an expectation is reserved. `longest_prompt_tokens` None: there is one prompt.
    """

    request_id: str
    tenant: str
    model: str
    lane: Lane
    prompt_tokens: int
    max_output_tokens: int | None
    num_sequences: int = 1
    longest_prompt_tokens: int | None = None
    key: str | None = None
    """The id of the key that asks, whose limits bind too; None: only the tenant's do."""

    def __post_init__(self) -> None:
        if self.prompt_tokens < 0 or (self.max_output_tokens or 0) < 0 or self.num_sequences < 1:
            raise ValueError(
                f"request {self.request_id!r} asks for {self.prompt_tokens} prompt tokens, {self.max_output_tokens} "
                f"output tokens and {self.num_sequences} sequences; no tokens can be negative, no request is empty"
            )

    @property
    def indivisible_tokens(self) -> int:
        """What one replica must hold at least."""
        return self.prompt_tokens if self.longest_prompt_tokens is None else self.longest_prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowStatus:
    """One rate limit as the client may see it. `reset_s`: seconds until it is full again; `remaining` is never < 0."""

    limit: int
    remaining: int
    reset_s: float
    scope: Scope | None = None
    """Whose limit it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitStatus:
    """The rate limits after a decision: of all scopes those with the least left. None where unlimited."""

    requests: WindowStatus | None = None
    tokens: WindowStatus | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Permit:
    """Leave to run, held until it is closed with the exact usage."""

    request_id: str
    tenant: str
    model: str
    lane: Lane
    """The one to run in: that of the ask, or a higher one if the request has waited long."""
    prompt_tokens: int
    reserved_tokens: int
    """The prompt and the output that was asked for or expected."""
    status: LimitStatus
    num_sequences: int = 1
    weight: int = 1
    """The tenant's."""
    key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why not, and when to come back. `retry_after_s` None: never, unchanged. `scope`: whose quota it was, if one."""

    request_id: str
    code: RefusalCode
    message: str
    retry_after_s: int | None
    status: LimitStatus
    scope: Scope | None = None
    retry_after_ms: int | None = None
    """The same, finer, where it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """The request waits; a later `dispatch` decides it. `waiting` counts it and all others that wait for the model."""

    request_id: str
    waiting: int
    waiting_of_tenant: int
    deadline_ns: int
    """When it will be refused if it still waits, on the clock that the caller passes in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Exact tokens of one request, as counted by the engine.

    `cached_tokens`: how many of the prompt's did not need to be computed; see `ModelTerms` for how they are charged.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        if self.prompt_tokens < 0 or self.completion_tokens < 0:
            raise ValueError(f"usage cannot be negative: {self.prompt_tokens} + {self.completion_tokens} tokens")
        if not 0 <= self.cached_tokens <= self.prompt_tokens:
            raise ValueError(f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens cannot have been cached")

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingCount:
    """How many requests of one tenant wait in one lane; a request that aged counts in the lane it was lifted to."""

    lane: Lane
    tenant: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSnapshot:
    """One model as admission sees it. `slots` and `kv_tokens` are what its live replicas report, summed."""

    model: str
    waiting: tuple[WaitingCount, ...]
    permits_open: int
    replicas: int
    slots: int
    kv_tokens: int
    committed_slots: int
    committed_kv_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSnapshot:
    """One tenant's account. Open reservations are those of waiting and of running requests; used counts since start."""

    tenant: str
    open_reservations: int
    reserved_tokens: int
    used_requests: int
    used_tokens: int
    limits: LimitStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSnapshot:
    """The admission controller at one moment, for operators."""

    models: tuple[ModelSnapshot, ...]
    tenants: tuple[TenantSnapshot, ...]
