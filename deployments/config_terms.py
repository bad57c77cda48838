"""Who is served on what terms, as the configuration says it: limits, prices, organisations, tenants, keys."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool

from cluster.api import MILLION, PICO, KeyTerms, Lane, Limits, Organisation, Tenant


def _known_time_zone(name: str) -> str:
    try:
        ZoneInfo(name)
    except (ValueError, OSError, ZoneInfoNotFoundError):
        raise ValueError(f"{name!r} is no time zone; names look like 'Europe/Berlin'") from None
    return name


Count = Annotated[int, Field(strict=True, ge=1)]
Quota = Annotated[int, Field(strict=True, ge=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Money = Annotated[Decimal, Field(ge=0, le=10**9, max_digits=15, decimal_places=6)]
"""An amount of whatever currency the operator thinks in, to the millionth."""
Name = Annotated[str, Field(strict=True, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
ModelName = Annotated[str, Field(strict=True, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,255}$")]
TimeZone = Annotated[str, AfterValidator(_known_time_zone)]
PriorityName = Literal["interactive", "standard", "batch"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LimitsSection(Section):
    """A quota; an absent key is unlimited, 0 allows nothing. See `cluster.api.Limits`."""

    requests_per_minute: Quota | None = None
    tokens_per_minute: Quota | None = None
    burst_s: Count = 60
    concurrent_requests: Quota | None = None
    tokens_per_day: Quota | None = None
    tokens_per_month: Quota | None = None
    budget_per_month: Money | None = None

    def limits(self) -> Limits:
        budget = None if self.budget_per_month is None else int(self.budget_per_month * PICO)
        return Limits(**(dict(self) | {"budget_per_month": budget}))


class PriceSection(Section):
    """What a million tokens cost. `cached_prompt` absent: as much as the others of the prompt."""

    prompt: Money = Decimal(0)
    cached_prompt: Money | None = None
    completion: Money = Decimal(0)


def per_token(price_per_million: Decimal) -> int:
    """A price in picounits per token."""
    return int(price_per_million * PICO) // MILLION


class Party(Section):
    """Whoever has limits, for all models together and for single ones."""

    limits: LimitsSection = LimitsSection()
    model_limits: dict[ModelName, LimitsSection] = {}

    def limits_by_model(self) -> dict[str, Limits]:
        return {model: section.limits() for model, section in self.model_limits.items()}


class OrganisationSection(Party):
    """A parent of tenants, which share its limits."""

    id: Name
    name: str | None = None
    time_zone: TimeZone = "UTC"

    def organisation(self) -> Organisation:
        return Organisation(
            id=self.id,
            name=self.name or self.id,
            limits=self.limits.limits(),
            model_limits=self.limits_by_model(),
            time_zone=self.time_zone,
        )


class TenantSection(Party):
    """Who is served. `models` absent: all of them. `parent` is the id of an organisation."""

    id: Name
    name: str | None = None
    weight: Count = 1
    max_priority: PriorityName = "interactive"
    models: tuple[ModelName, ...] | None = None
    parent: Name | None = None
    time_zone: TimeZone = "UTC"

    def tenant(self) -> Tenant:
        return Tenant(
            id=self.id,
            name=self.name or self.id,
            weight=self.weight,
            max_priority=Lane[self.max_priority.upper()],
            models=self.models,
            limits=self.limits.limits(),
            parent=self.parent,
            model_limits=self.limits_by_model(),
            time_zone=self.time_zone,
        )


class KeySection(Party):
    """A key of a tenant: the value of the variable `env` if it is set, else kept in `$ROULANT_HOME/keys/<file>`.

    The file is made, with a random key in it, when it is first needed.
    """

    tenant: Name
    file: Name
    env: Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")]
    admin: StrictBool = False

    @property
    def id(self) -> str:
        return f"{self.tenant}/{self.file}"

    def terms(self) -> KeyTerms:
        return KeyTerms(
            id=self.id, tenant=self.tenant, limits=self.limits.limits(), model_limits=self.limits_by_model()
        )
