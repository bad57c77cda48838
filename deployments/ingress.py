"""The HTTP front as a Serve deployment: builds the router's application in each of its processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.admission_actor import AdmissionActorLink
from deployments.admission_client import AdmissionClient
from deployments.handles import ServeReplicas
from deployments.logs import log_to_stderr
from deployments.loopback import serve_on_loopback_only
from deployments.operator_views import ServeViews
from engine.api import TextCodec
from router.api import Caller, Catalog, KeyRing, ServedModel, Service, Wiring, build_http_app


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelListing:
    """A served model, as far as the front needs it. `folder` holds its tokenizer."""

    id: str
    aliases: tuple[str, ...]
    folder: str
    max_model_len: int
    created: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressSettings:
    """What a front is built from. `callers` are by digest of their key. `loopback_only`: keep ports to this host."""

    models: tuple[ModelListing, ...]
    callers: Mapping[str, Caller]
    max_body_bytes: int
    loopback_only: bool


@serve.ingress()
class Ingress:
    """Serve calls `__serve_build_asgi_app__` after the constructor, on the event loop that then serves requests."""

    def __init__(
        self,
        settings: IngressSettings,
        link: AdmissionActorLink,
        handles: Mapping[str, DeploymentHandle[Any]],
    ) -> None:
        log_to_stderr()
        if settings.loopback_only:
            serve_on_loopback_only()
        self._settings = settings
        self._link = link
        self._replicas = ServeReplicas(handles, link.snapshot)
        self._admission = AdmissionClient(link)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        catalog = Catalog([_served(listing) for listing in self._settings.models])
        app = build_http_app(
            Wiring(
                service=Service(catalog=catalog, admission=self._admission, replicas=self._replicas),
                keys=KeyRing(self._settings.callers),
                catalog=catalog,
                admission=self._admission,
                replicas=self._replicas,
                operator_views=ServeViews(self._link.snapshot, self._replicas),
                body_limit_bytes=self._settings.max_body_bytes,
            )
        )
        return without_request_id(app)

    async def check_health(self) -> None:
        """Called by Serve, which replaces an ingress that keeps raising."""
        self._admission.check_health()


def without_request_id(app: ASGIApp) -> ASGIApp:
    """Drop the answer's x-request-id: Serve gives every request one and adds it to the answer itself."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)["x-request-id"]
            await send(message)

        await app(scope, receive, send_on)

    return wrapped


def _served(listing: ModelListing) -> ServedModel:
    return ServedModel(
        id=listing.id,
        aliases=listing.aliases,
        max_model_len=listing.max_model_len,
        codec=TextCodec.load(listing.folder),
        created=listing.created,
    )
