"""`roulant status` and `roulant explain`: what a running service says of itself, and of one request."""

from __future__ import annotations

import sys
from typing import TypeVar
from urllib.parse import quote

from pydantic import BaseModel, JsonValue, TypeAdapter, ValidationError
from rich.table import Table

from cluster.api import Lane
from deployments.cli.client import ServiceClient
from deployments.cli.terminal import CliError, say, say_json, stdout
from engine.api import EngineStats, Explanation, describe_memory

T = TypeVar("T")


class _Model(BaseModel):
    id: str


class _ModelList(BaseModel):
    data: tuple[_Model, ...]


class _Waiting(BaseModel):
    lane: Lane
    tenant: str
    count: int


class _Admission(BaseModel):
    model: str
    waiting: tuple[_Waiting, ...]
    permits_open: int
    replicas: int


class _Engine(BaseModel):
    max_num_seqs: int
    num_blocks: int
    num_used_blocks: int
    num_running: int
    num_waiting: int


class _ModelQueue(BaseModel):
    admission: _Admission
    engines: tuple[_Engine, ...]


class _Tenant(BaseModel):
    tenant: str
    open_reservations: int
    reserved_tokens: int
    used_requests: int
    used_tokens: int


class _Queue(BaseModel):
    """What of `/admin/v1/queue` is shown to people; programs get all of it."""

    models: tuple[_ModelQueue, ...]
    tenants: tuple[_Tenant, ...]


class _Explanation(BaseModel):
    model: str
    sequences: tuple[Explanation, ...]


class _Replica(BaseModel):
    model: str
    stats: EngineStats


class _Replicas(BaseModel):
    replicas: tuple[_Replica, ...]


def memory_lines(client: ServiceClient) -> list[str]:
    """For each replica, what it found room for. Raises CliError."""
    body = client.get_ok("/admin/v1/replicas").content
    replicas = _parsed(TypeAdapter(_Replicas), body).replicas
    return [f"{replica.model}: {describe_memory(replica.stats)}" for replica in replicas]


def show_status(client: ServiceClient, *, as_json: bool) -> None:
    """Print what the service says of itself; exits with 1 if it is not ready. Raises CliError."""
    readiness = client.get("/health/ready")
    ready = readiness.status_code == 200
    models = [model.id for model in _parsed(TypeAdapter(_ModelList), client.get_ok("/v1/models").content).data]
    queue = client.get_ok("/admin/v1/queue").content
    if as_json:
        whole = _parsed(TypeAdapter[JsonValue](JsonValue), queue)
        say_json({"url": client.url, "ready": ready, "models": models, "queue": whole})
    else:
        say(f"{client.url} is {'ready' if ready else f'not ready: {readiness.text}'}")
        say(f"models: {', '.join(models)}\n")
        _show_queue(_parsed(TypeAdapter(_Queue), queue))
    if not ready:
        sys.exit(1)


def show_explanation(client: ServiceClient, request_id: str, *, as_json: bool) -> None:
    """Print why each sequence of a request runs or waits. Raises CliError, also if no engine holds the request."""
    body = client.get_ok(f"/admin/v1/requests/{quote(request_id, safe='')}/explain").content
    if as_json:
        say_json(_parsed(TypeAdapter[dict[str, JsonValue]](dict[str, JsonValue]), body))
        return
    explanation = _parsed(TypeAdapter(_Explanation), body)
    table = Table("sequence", "is", "lane", "cached tokens", "preempted", "waited (steps)", "waits because", box=None)
    for each in explanation.sequences:
        waited = ", ".join(f"{steps} {reason}" for reason, steps in each.waited_steps.items())
        table.add_row(
            each.sequence_id,
            each.status,
            Lane(each.lane).name.lower(),
            str(each.num_cached_tokens),
            str(each.num_preemptions),
            waited or "not at all",
            each.now or "-",
        )
    say(f"in an engine of {explanation.model}\n")
    stdout().print(table)


def _show_queue(queue: _Queue) -> None:
    models = Table("model", "replicas", "permits", "running", "KV blocks", "waiting", box=None)
    for each in queue.models:
        waiting = [f"{entry.count} {entry.lane.name.lower()}/{entry.tenant}" for entry in each.admission.waiting]
        in_engines = sum(engine.num_waiting for engine in each.engines)
        models.add_row(
            each.admission.model,
            str(each.admission.replicas),
            str(each.admission.permits_open),
            f"{sum(engine.num_running for engine in each.engines)}/{sum(e.max_num_seqs for e in each.engines)}",
            f"{sum(engine.num_used_blocks for engine in each.engines)}/{sum(e.num_blocks for e in each.engines)}",
            ", ".join([*waiting, *([f"{in_engines} in replicas"] if in_engines else [])]) or "nobody",
        )
    tenants = Table("tenant", "open requests", "reserved tokens", "requests so far", "tokens so far", box=None)
    for tenant in queue.tenants:
        counts = (tenant.open_reservations, tenant.reserved_tokens, tenant.used_requests, tenant.used_tokens)
        tenants.add_row(tenant.tenant, *map(str, counts))
    stdout().print(models, "", tenants, sep="\n")


def _parsed(adapter: TypeAdapter[T], body: bytes) -> T:
    try:
        return adapter.validate_json(body)
    except ValidationError as error:
        raise CliError(f"the service sent something unexpected: {body[:200]!r}") from error
