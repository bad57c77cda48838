"""The replicas of all models as the router sees them, over Ray Serve's handles."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, cast

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from cluster.api import AdmissionSnapshot
from deployments.replica import ReplicaReport
from engine.api import EngineDeadError, EngineError, Explanation, GenerateRequest, TokenDelta

CALL_TIMEOUT_S = 2.0
"""For questions that a live replica answers at once."""


class ServeReplicas:
    """Implements `router.api.Replicas`. Raises what the engine raises; a lost replica is EngineDeadError."""

    def __init__(
        self,
        handles: Mapping[str, DeploymentHandle[Any]],
        admission_snapshot: Callable[[], Awaitable[AdmissionSnapshot]],
    ) -> None:
        self._handles = handles
        self._streaming = {model: handle.options(stream=True) for model, handle in handles.items()}
        self._admission_snapshot = admission_snapshot
        self.models = tuple(handles)

    async def generate(self, model: str, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        """See `engine.api.Engine.generate`; closing the iterator early cancels the request."""
        response = cast(DeploymentResponseGenerator[TokenDelta], self._streaming[model].generate.remote(request))
        try:
            async for delta in response:
                yield delta
        except (RayError, RayServeException) as error:
            raise _as_engine_error(error) from error
        finally:
            # After the last delta this does nothing; before it, it raises CancelledError in the replica's generator.
            response.cancel()  # type: ignore[no-untyped-call]

    async def cancel(self, model: str, request_id: str, index: int | None = None) -> int | None:
        """End a request, or one of its choices, wherever it runs; returns its output tokens so far, None if no replica
        knows it.

        All replicas are asked, because Serve does not tell which one it chose. Raises EngineDeadError if none answers.
        """
        answers = await self._ask_all(model, "cancel", request_id, index)
        return next((answer for answer in answers if answer is not None), None)

    async def explain(self, model: str, request_id: str) -> list[Explanation]:
        """Why the open sequences of a request wait or run; empty if no replica has any. All replicas are asked.

        Raises EngineDeadError if none answers.
        """
        answers = await self._ask_all(model, "explain", request_id)
        return [explanation for answer in answers for explanation in answer]

    async def is_ready(self) -> bool:
        """Whether every model has a replica that answers and that admission counts on."""
        with contextlib.suppress(EngineError):
            snapshot = await self._admission_snapshot()
            admitting = {model.model for model in snapshot.models if model.slots > 0}
            if not admitting.issuperset(self._handles):
                return False
            return all(await asyncio.gather(*(self.reports(model) for model in self._handles)))
        return False

    async def reports(self, model: str, num_steps: int = 0) -> list[ReplicaReport]:
        """Counts and last steps of every replica of `model` that answers. Raises EngineDeadError if none does."""
        return await self._ask_all(model, "report", num_steps)

    async def _ask_all(self, model: str, method: str, *args: object) -> list[Any]:
        try:
            response = self._handles[model].broadcast(method, *args)
            answers = await response.results_async(timeout_s=CALL_TIMEOUT_S, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError) as error:
            raise _as_engine_error(error) from error
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        if errors and len(errors) == len(answers):
            raise _as_engine_error(errors[0]) from errors[0]
        return [answer for answer in answers if not isinstance(answer, BaseException)]


def _as_engine_error(error: Exception) -> EngineError:
    """What the engine raised in the replica, without Ray's wrapping; anything else means that the replica is lost."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, EngineError):
        return cause
    return EngineDeadError(f"the replica was lost: {type(cause).__name__}: {cause}")
