"""The life of a request: `Service.run`. Everything else in this package serves it or shows it over HTTP."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Protocol

from cluster.api import AdmissionAsk, Lane, LimitStatus, Permit, Refusal, Usage
from engine.api import GenerateRequest
from router.attempts import Attempts, TokenSource
from router.auth import Caller
from router.catalog import Catalog, ServedModel
from router.errors import ApiError, Fault, of_refusal
from router.output import Output, TextDelta
from router.schemas import GenerationRequest

DEFAULT_TIMEOUT_S = 600.0
"""Whole-request timeout where the client sets none, so that no request can stay for ever."""


class Admission(Protocol):
    """The admission controller, as an ingress reaches it."""

    async def admit(self, ask: AdmissionAsk) -> Permit | Refusal:
        """Wait for leave to run. Cancelling the wait withdraws the ask, also if it was granted at that moment."""

    def close(self, request_id: str, usage: Usage | None) -> None:
        """Give a permit back with what was used, None: nothing ran. Never blocks, idempotent; it is delivered later."""

    async def limits(self, tenant: str) -> LimitStatus:
        """The tenant's rate limits now."""


class Replicas(TokenSource, Protocol):
    """The replicas of every model."""

    async def is_ready(self) -> bool:
        """Whether a request to any model would be served now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The first event: the request was admitted, to `model`, and this is what the tenant's limits say after it."""

    model: str
    limits: LimitStatus


class Service:
    """Runs requests. One per ingress process; all of its methods belong to one event loop."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        admission: Admission,
        replicas: Replicas,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        self._catalog = catalog
        self._admission = admission
        self._replicas = replicas
        self._timeout_s = timeout_s
        self._draw_seed = draw_seed
        self._background: set[asyncio.Task[None]] = set()
        self.draining = False
        """Set it to refuse new requests; open ones go on."""

    async def run(
        self, request: GenerationRequest, caller: Caller, request_id: str
    ) -> AsyncGenerator[Started | TextDelta, None]:
        """Serve one request: `Started`, then text. `request_id` is unique. Close the generator to end it early.

        Raises ApiError, TimeoutError and the engine's errors, at any point. Once admitted, the request is closed with
        what it used, exactly once, on every path.
        """
        if self.draining:
            raise ApiError(Fault.DRAINING, "this server is shutting down; send the request again")
        lane = caller.lane(request.priority)
        model = self._catalog.resolve(request.model, caller)
        deadline = asyncio.get_running_loop().time() + (request.timeout_s or self._timeout_s)
        refuse_hopeless(request, model)
        async with asyncio.timeout_at(deadline):
            prompt = await asyncio.to_thread(request.encode, model.codec)
            bound = output_bound(request, len(prompt), model.max_model_len)
            job = GenerateRequest(
                request_id=request_id,
                prompt_token_ids=tuple(prompt),
                sampling=request.sampling(
                    max_tokens=bound or model.max_model_len - len(prompt), seed=self._draw_seed()
                ),
                tenant=caller.tenant,
                lane=lane,
            )
            output = self._output(request, job, model)
            permit = await self._admission.admit(ask_for(job, model, bound))
        if isinstance(permit, Refusal):
            raise of_refusal(permit)
        try:
            yield Started(model=model.id, limits=permit.status)
            while (delta := await output.next(deadline)).finish_reason is None:
                yield delta
        finally:
            await self._settle(request_id, output)
        yield delta  # after the permit is back: the client's next request must not find it taken

    async def settled(self) -> None:
        """Wait until what ended requests still have to tell replicas and admission has been said. Bounded."""
        while self._background:
            await asyncio.wait(self._background)

    def _output(self, request: GenerationRequest, job: GenerateRequest, model: ServedModel) -> Output:
        text = model.codec.stream(request.stop, job.sampling.stop_token_ids, request.min_tokens)
        return Output(Attempts(self._replicas, model.id, job), text, len(job.prompt_token_ids))

    async def _settle(self, request_id: str, output: Output) -> None:
        """Close the permit: with the usage the client was told, or else with what the engine says that it was."""
        if output.usage is None:
            await asyncio.shield(self._spawn(self._close_abandoned(request_id, output)))
            return
        self._admission.close(request_id, output.usage)
        if output.runs_on:
            self._spawn(self._stop(output))

    async def _close_abandoned(self, request_id: str, output: Output) -> None:
        usage: Usage | None = None
        try:
            usage = await output.abandon()
        finally:
            self._admission.close(request_id, usage)

    async def _stop(self, output: Output) -> None:
        await output.abandon()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run `work` to its end even if the request's own task is cancelled."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


def ask_for(job: GenerateRequest, model: ServedModel, bound: int | None) -> AdmissionAsk:
    """The admission ask for a job whose client has bounded the output by `bound` tokens, None: not at all."""
    return AdmissionAsk(
        request_id=job.request_id,
        tenant=job.tenant,
        model=model.id,
        lane=Lane(job.lane),
        prompt_tokens=len(job.prompt_token_ids),
        max_output_tokens=bound,
    )


def refuse_hopeless(request: GenerationRequest, model: ServedModel) -> None:
    """Raise ApiError if the text is too long whatever its tokens are, so that none of it needs to be tokenised."""
    chars = model.codec.max_chars_per_token
    if chars is None or request.num_chars <= chars * model.max_model_len:
        return
    message = (
        f"{request.prompt_field}: {request.num_chars} characters are more than {request.num_chars // chars} tokens; "
        f"the model's context is {model.max_model_len} tokens"
    )
    raise ApiError(Fault.CONTEXT_LENGTH_EXCEEDED, message, param=request.prompt_field)


def output_bound(request: GenerationRequest, prompt_tokens: int, max_model_len: int) -> int | None:
    """How many tokens the client lets the output have, None: whatever fits. Raises ApiError if that cannot be.

    A prompt is never cut and a client's max_tokens never lowered; only our own default is, to what fits.
    """
    if prompt_tokens == 0:
        message = f"{request.prompt_field}: is empty once it is tokenised"
        raise ApiError(Fault.INVALID_REQUEST, message, param=request.prompt_field)
    room = max_model_len - prompt_tokens
    bound = request.output_limit
    if room <= 0:
        message = (
            f"{request.prompt_field}: has {prompt_tokens} tokens and leaves no room for an answer; "
            f"the model's context is {max_model_len} tokens"
        )
        raise ApiError(Fault.CONTEXT_LENGTH_EXCEEDED, message, param=request.prompt_field)
    if bound is not None and bound > room:
        message = (
            f"{request.output_limit_field}: {prompt_tokens} tokens of prompt and up to {bound} of output are "
            f"{prompt_tokens + bound}; the model's context is {max_model_len} tokens"
        )
        raise ApiError(Fault.CONTEXT_LENGTH_EXCEEDED, message, param=request.output_limit_field)
    if bound is None and request.default_max_tokens is not None:
        bound = min(request.default_max_tokens, room)
    if request.min_tokens > (bound or room):
        message = f"min_tokens: {request.min_tokens} is more than the output may have, {bound or room}"
        raise ApiError(Fault.INVALID_REQUEST, message, param="min_tokens")
    return bound
