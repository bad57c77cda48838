"""The HTTP side: routes, each a few lines between a validated body and an answer."""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import dataclass
from typing import Protocol

from fastapi import FastAPI
from fastapi.encoders import jsonable_encoder
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from router import body
from router.answers import (
    ChatWording,
    CompletionWording,
    DetokenizeAnswer,
    HealthAnswer,
    ModelAnswer,
    ModelList,
    TokenizeAnswer,
    Wording,
)
from router.auth import KeyRing
from router.catalog import Catalog
from router.delivery import Delivery
from router.errors import ApiError, Fault
from router.gate import Gate, caller_of
from router.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, GenerationRequest, TokenizeRequest
from router.service import Admission, Replicas, Service

logger = logging.getLogger(__name__)

DEFAULT_BODY_LIMIT_BYTES = 4 * 1024 * 1024
MAX_STEPS_DIGITS = 6
READY_TIMEOUT_S = 2.0
"""Readiness that cannot be found out in this time is none."""


class OperatorViews(Protocol):
    """What operators may look at; every answer is anything that can be told as JSON."""

    async def queue(self) -> object:
        """Per model what waits, what is admitted and what the engines hold; per tenant what is reserved and used."""

    async def replicas(self, num_steps: int) -> object:
        """Per model and replica the engine's counts and its last `num_steps` steps."""

    async def explain(self, request_id: str) -> object | None:
        """Why each sequence of a request runs or waits in its engine; None: no engine holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """What the routes need."""

    service: Service
    keys: KeyRing
    catalog: Catalog
    admission: Admission
    replicas: Replicas
    operator_views: OperatorViews
    body_limit_bytes: int = DEFAULT_BODY_LIMIT_BYTES


def build_http_app(wiring: Wiring) -> FastAPI:
    """The application. Without `openapi_url` FastAPI has no page of documentation, which would need no key."""
    app = FastAPI(title="Roulant", openapi_url=None, redirect_slashes=False)
    routes = Routes(wiring)
    for method, path, endpoint in (
        ("GET", "/v1/models", routes.list_models),
        ("GET", "/v1/models/{name:path}", routes.show_model),
        ("POST", "/v1/chat/completions", routes.chat),
        ("POST", "/v1/completions", routes.complete),
        ("POST", "/tokenize", routes.tokenize),
        ("POST", "/detokenize", routes.detokenize),
        ("GET", "/admin/v1/queue", routes.show_queue),
        ("GET", "/admin/v1/replicas", routes.show_replicas),
        ("GET", "/admin/v1/requests/{id}/explain", routes.explain_request),
        ("GET", "/health/live", routes.live),
        ("GET", "/health/ready", routes.ready),
    ):
        app.add_api_route(path, endpoint, methods=[method, "HEAD"] if method == "GET" else [method])
    app.add_exception_handler(HTTPException, _leave_to_the_gate)
    app.add_middleware(Gate, keys=wiring.keys, admission=wiring.admission)
    return app


async def _leave_to_the_gate(_request: Request, error: Exception) -> Response:
    """Unknown routes and wrong methods are answered where all other errors are."""
    raise error


class Routes:
    """The endpoints."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring

    async def list_models(self, request: Request) -> Response:
        models = self._wiring.catalog.visible(caller_of(request.scope))
        return answer(ModelList(data=[ModelAnswer.of(model) for model in models]))

    async def show_model(self, request: Request) -> Response:
        model = self._wiring.catalog.resolve(request.path_params["name"], caller_of(request.scope))
        return answer(ModelAnswer.of(model))

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, ChatRequest, ChatWording)

    async def complete(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest, CompletionWording)

    async def tokenize(self, request: Request) -> Response:
        asked = await body.read(request, TokenizeRequest, self._wiring.body_limit_bytes)
        model = self._wiring.catalog.resolve(asked.model, caller_of(request.scope))
        tokens = await asyncio.to_thread(asked.encode, model.codec)
        return answer(TokenizeAnswer(count=len(tokens), max_model_len=model.max_model_len, tokens=tokens))

    async def detokenize(self, request: Request) -> Response:
        asked = await body.read(request, DetokenizeRequest, self._wiring.body_limit_bytes)
        model = self._wiring.catalog.resolve(asked.model, caller_of(request.scope))
        return answer(DetokenizeAnswer(prompt=await asyncio.to_thread(asked.decode, model.codec)))

    async def show_queue(self) -> Response:
        return JSONResponse(jsonable_encoder(await self._wiring.operator_views.queue()))

    async def show_replicas(self, request: Request) -> Response:
        asked = request.query_params.get("steps", "0")
        if not asked.isdecimal() or len(asked) > MAX_STEPS_DIGITS:
            raise ApiError(Fault.INVALID_REQUEST, f"steps: {asked!r} is not a number of steps", param="steps")
        return JSONResponse(jsonable_encoder(await self._wiring.operator_views.replicas(int(asked))))

    async def explain_request(self, request: Request) -> Response:
        # Clients know the request by the id of its answer, which begins with the kind of the answer.
        name = request.path_params["id"].rpartition("-")[2]
        view = await self._wiring.operator_views.explain(name)
        if view is None:
            raise ApiError(
                Fault.REQUEST_NOT_FOUND,
                f"no engine holds a request {name!r}; it waits for admission, has ended, or never was",
            )
        return JSONResponse(jsonable_encoder(view))

    async def live(self) -> Response:
        return answer(HealthAnswer(status="live"))

    async def ready(self) -> Response:
        if self._wiring.service.draining:
            raise ApiError(Fault.DRAINING, "this server is shutting down")
        if not await self._replicas_ready():
            raise ApiError(Fault.NOT_READY, "the models are not ready yet")
        return answer(HealthAnswer(status="ready"))

    async def _replicas_ready(self) -> bool:
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                return await self._wiring.replicas.is_ready()
        except Exception:
            logger.warning("readiness is unknown", exc_info=True)
            return False

    async def _generate(self, request: Request, model: type[GenerationRequest], wording: type[Wording]) -> Response:
        asked = await body.read(request, model, self._wiring.body_limit_bytes)
        request_id = uuid.uuid4().hex
        events = self._wiring.service.run(asked, caller_of(request.scope), request_id)
        return Delivery(events, wording, asked, request_id)


def answer(value: BaseModel) -> Response:
    """A 200 with a JSON body."""
    return Response(value.model_dump_json(), media_type="application/json")
