"""The answer to a generation request: in one piece or as a stream, for as long as the client is there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import cast

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.answers import FinishWord, Head, UsageAnswer, WholeChoice, Wording
from router.choice import TextDelta
from router.errors import as_api_error
from router.gate import call_of
from router.schemas import GenerationRequest
from router.service import Started
from router.sse import Frames, error_frame

logger = logging.getLogger(__name__)

Events = AsyncGenerator[Started | TextDelta, None]

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class Delivery(Response):
    """Runs `events` while it answers; a client that leaves ends them.

    Nothing is sent before the first text, so that whatever is refused or fails until then has its own status.
    """

    def __init__(self, events: Events, wording: type[Wording], request: GenerationRequest, request_id: str) -> None:
        super().__init__()
        self._events = events
        self._wording = wording
        self._request = request
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            started = cast(Started, await anext(events))
            call_of(scope).limits = started.limits
            id_ = self._wording.id_prefix + self._request_id
            wording = self._wording(Head(id=id_, created=int(time.time()), model=started.model))
            first = cast(TextDelta, await anext(events))
            if self._request.stream:
                await self._stream(wording, first, events, send)
            else:
                answer = await self._whole(wording, first, events)
                await answer(scope, receive, send)

    async def _whole(self, wording: Wording, first: TextDelta, events: Events) -> Response:
        deltas = [first, *[cast(TextDelta, delta) async for delta in events]]
        usage = deltas[-1].usage
        assert usage is not None, "the last event ends the answer"
        answer = wording.whole(self._whole_choices(deltas), UsageAnswer.of(usage))
        return Response(answer.model_dump_json(), media_type="application/json")

    def _whole_choices(self, deltas: list[TextDelta]) -> list[WholeChoice]:
        """All that came of each choice, in the order of their indices."""
        by_index: dict[int, list[TextDelta]] = {}
        for delta in deltas:
            by_index.setdefault(delta.index, []).append(delta)
        return [self._whole_choice(by_index[index]) for index in sorted(by_index)]

    def _whole_choice(self, deltas: list[TextDelta]) -> WholeChoice:
        last = deltas[-1]
        assert last.finish_reason is not None, "every choice has an end"
        return WholeChoice(
            index=last.index,
            text="".join(delta.text for delta in deltas),
            scores=None if self._request.num_logprobs is None else [each for delta in deltas for each in delta.scores],
            finish_reason=cast(FinishWord, last.finish_reason.value),
            prompt_scores=last.prompt_scores,
        )

    async def _stream(self, wording: Wording, first: TextDelta, events: Events, send: Send) -> None:
        async def write(frames: bytes) -> None:
            await send({"type": "http.response.body", "body": frames, "more_body": True})

        frames = Frames(wording, num_choices=self._request.num_outputs, include_usage=self._request.include_usage)
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        await write(frames.opening() + frames.delta(first))
        try:
            async for delta in events:
                await write(frames.delta(cast(TextDelta, delta)))
        except Exception as error:
            shown = as_api_error(error)
            if shown.is_ours:
                logger.error("request %s failed in mid-stream", self._request_id, exc_info=error)
            await write(error_frame(shown))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Run `work`; if the client leaves first, or we are cancelled, cancel it and wait for its end.

    The request's body must have been read: after it, the only message that a server has is the disconnect.
    """
    answering = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    left = False
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        left = not answering.done()
    finally:
        answering.cancel()
        leaving.cancel()
        await asyncio.wait({answering, leaving})
    if not (left and answering.cancelled()):
        answering.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
