"""`roulant status`: readiness, models and queues of a running service."""

from __future__ import annotations

import sys
from typing import TypeVar

from pydantic import BaseModel, JsonValue, TypeAdapter, ValidationError

from deployments.cli.client import ServiceClient
from deployments.cli.terminal import CliError, say, say_json, stdout

T = TypeVar("T")


class _Model(BaseModel):
    id: str


class _ModelList(BaseModel):
    data: tuple[_Model, ...]


def show_status(client: ServiceClient, *, as_json: bool) -> None:
    """Print what the service says of itself; exits with 1 if it is not ready. Raises CliError."""
    readiness = client.get("/health/ready")
    ready = readiness.status_code == 200
    models = [model.id for model in _parsed(TypeAdapter(_ModelList), client.get_ok("/v1/models").content).data]
    queue = _parsed(TypeAdapter[JsonValue](JsonValue), client.get_ok("/admin/v1/queue").content)
    if as_json:
        say_json({"url": client.url, "ready": ready, "models": models, "queue": queue})
    else:
        say(f"{client.url} is {'ready' if ready else f'not ready: {readiness.text}'}")
        say(f"models: {', '.join(models)}")
        stdout().print_json(data=queue)
    if not ready:
        sys.exit(1)


def _parsed(adapter: TypeAdapter[T], body: bytes) -> T:
    try:
        return adapter.validate_json(body)
    except ValidationError as error:
        raise CliError(f"the service sent something unexpected: {body[:200]!r}") from error
