"""Who is served, on what terms: organisations, their tenants, the tenants' keys, and models with their prices.

Plain values, and one mutable register of them that belongs to the admission controller. Limits of an organisation bind
all of its tenants together, those of a tenant all of its keys, those of a model everybody; each may be narrowed for a
single model. A child is never freer than its parent, whatever its own limits say, because every scope is asked.

Money is counted in whole picounits (`PICO` of them are one unit of currency): a price per million tokens with up to six
decimals is then a whole number per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum

from cluster.lane import Lane

PICO = 10**12
MILLION = 10**6


class Level(StrEnum):
    """Whose limit."""

    MODEL = "model"
    ORGANISATION = "organisation"
    TENANT = "tenant"
    KEY = "key"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Scope:
    """What a limit covers. `model` None: all models."""

    level: Level
    id: str
    model: str | None = None

    def __str__(self) -> str:
        of_model = "" if self.model is None else f" for model {self.model!r}"
        return f"{self.level} {self.id!r}{of_model}"


class LimitKind(StrEnum):
    """What a limit counts. The values are the names of the fields of `Limits`."""

    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    CONCURRENT_REQUESTS = "concurrent_requests"
    TOKENS_PER_DAY = "tokens_per_day"
    TOKENS_PER_MONTH = "tokens_per_month"
    BUDGET_PER_MONTH = "budget_per_month"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """A quota. None = unlimited, 0 = nothing allowed. `burst_s`: how many seconds' worth of a rate may come at once.

    `budget_per_month` is in picounits. Days and months are those of the time zone of whoever has the limit.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    burst_s: int = 60
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    budget_per_month: int | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and value < 0:
                raise ValueError(f"{each.name} is {value}; a limit is None (unlimited) or at least 0")
        if self.burst_s < 1:
            raise ValueError(f"burst_s is {self.burst_s}; it is at least 1")

    def of(self, kind: LimitKind) -> int | None:
        """The limit of one kind."""
        value: int | None = getattr(self, kind)
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Organisation:
    """A parent of tenants. `time_zone` is an IANA name."""

    id: str
    name: str
    limits: Limits = Limits()
    model_limits: Mapping[str, Limits] = field(default_factory=dict)
    time_zone: str = "UTC"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Who is served. `models` None = all. `weight`: share of capacity when several tenants wait in one lane.

    `parent` is the id of its organisation, None: it has none.
    """

    id: str
    name: str
    weight: int = 1
    max_priority: Lane = Lane.INTERACTIVE
    models: tuple[str, ...] | None = None
    limits: Limits = Limits()
    parent: str | None = None
    model_limits: Mapping[str, Limits] = field(default_factory=dict)
    time_zone: str = "UTC"

    def __post_init__(self) -> None:
        if self.weight < 1:
            raise ValueError(f"the weight of tenant {self.id!r} is {self.weight}; it is at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTerms:
    """What a key may use of its tenant's quota."""

    id: str
    tenant: str
    limits: Limits = Limits()
    model_limits: Mapping[str, Limits] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """What something costs, in everything that is limited."""

    requests: int = 0
    tokens: int = 0
    money: int = 0

    def less(self, paid: Charge) -> Charge:
        """What is still due when `paid` has been paid; never negative."""
        return Charge(
            requests=max(0, self.requests - paid.requests),
            tokens=max(0, self.tokens - paid.tokens),
            money=max(0, self.money - paid.money),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTerms:
    """A model's limits for everybody together, and what its tokens cost.

    Prices are picounits per token. `cached_percent`: how much of a prompt token that did not need to be computed counts
    in quotas, rounded up over the request.
    """

    id: str
    limits: Limits = Limits()
    prompt_price: int = 0
    cached_price: int = 0
    completion_price: int = 0
    cached_percent: int = 100

    def charge(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> Charge:
        """What one request costs. `cached_tokens` are among those of the prompt."""
        computed = prompt_tokens - cached_tokens
        return Charge(
            requests=1,
            tokens=computed + -(-cached_tokens * self.cached_percent // 100) + completion_tokens,
            money=computed * self.prompt_price
            + cached_tokens * self.cached_price
            + completion_tokens * self.completion_price,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeTerms:
    """The limits of one scope."""

    scope: Scope
    limits: Limits
    time_zone: str


class Directory:
    """The organisations, tenants, keys and models in force. An unknown tenant or model raises LookupError.

    A key that is not known has no limits of its own: what it began before it was revoked is still to be settled.
    """

    def __init__(
        self,
        *,
        tenants: Iterable[Tenant],
        models: Iterable[ModelTerms],
        organisations: Iterable[Organisation] = (),
        keys: Iterable[KeyTerms] = (),
    ) -> None:
        self.organisations = {each.id: each for each in organisations}
        self.tenants = {each.id: each for each in tenants}
        self.keys = {each.id: each for each in keys}
        self.models = {each.id: each for each in models}
        for tenant in self.tenants.values():
            if tenant.parent is not None and tenant.parent not in self.organisations:
                raise ValueError(f"tenant {tenant.id!r} has parent {tenant.parent!r}: no such organisation")

    def tenant(self, tenant_id: str) -> Tenant:
        """The tenant with this id."""
        try:
            return self.tenants[tenant_id]
        except KeyError:
            raise LookupError(f"no tenant {tenant_id!r}") from None

    def model(self, model_id: str) -> ModelTerms:
        """The model with this id."""
        try:
            return self.models[model_id]
        except KeyError:
            raise LookupError(f"no model {model_id!r}; there are {sorted(self.models)}") from None

    def terms(self, scope: Scope) -> ScopeTerms | None:
        """The limits of a scope now; None: there is no such organisation, tenant, key or model any more."""
        party: Organisation | Tenant | KeyTerms | ModelTerms | None
        zone = "UTC"
        match scope.level:
            case Level.MODEL:
                party = self.models.get(scope.id)
            case Level.ORGANISATION:
                party = organisation = self.organisations.get(scope.id)
                zone = organisation.time_zone if organisation else zone
            case Level.TENANT:
                party = tenant = self.tenants.get(scope.id)
                zone = tenant.time_zone if tenant else zone
            case Level.KEY:
                party = key = self.keys.get(scope.id)
                owner = self.tenants.get(key.tenant) if key else None
                zone = owner.time_zone if owner else zone
        if party is None:
            return None
        limits = party.limits
        if scope.model is not None and not isinstance(party, ModelTerms):
            limits = party.model_limits.get(scope.model, Limits())
        return ScopeTerms(scope=scope, limits=limits, time_zone=zone)

    def scopes(self, tenant_id: str, key_id: str | None, model_id: str | None) -> list[ScopeTerms]:
        """Every scope that a request falls into, the widest first. `model_id` None: those that hold for all models."""
        tenant = self.tenant(tenant_id)
        parties: list[tuple[Level, Organisation | Tenant | KeyTerms]] = []
        if tenant.parent is not None:
            parties.append((Level.ORGANISATION, self.organisations[tenant.parent]))
        parties.append((Level.TENANT, tenant))
        if key_id is not None and (key := self.keys.get(key_id)):
            parties.append((Level.KEY, key))
        scopes = [Scope(level=Level.MODEL, id=self.model(model_id).id)] if model_id is not None else []
        for level, party in parties:
            scopes.append(Scope(level=level, id=party.id))
            if model_id is not None and model_id in party.model_limits:
                scopes.append(Scope(level=level, id=party.id, model=model_id))
        return [terms for scope in scopes if (terms := self.terms(scope)) is not None]
