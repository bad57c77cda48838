"""The engine behind an event loop: commands cross to the engine thread, deltas come back, neither side waits.

The loop side owns the open streams; the thread side owns the engine. What crosses is a command in one direction and,
once per step, one batch of outputs in the other. A stream whose consumer is slower than the engine finds all tokens
since its last look in a single delta, so memory is bounded by the output itself and events by what is consumed.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from engine.api import (
    EngineDeadError,
    EngineStats,
    FinishReason,
    GenerateRequest,
    RequestRefusedError,
    StepSummary,
    TokenDelta,
)
from engine.engine import Engine
from engine.scheduler import Output

logger = logging.getLogger(__name__)

Argument = TypeVar("Argument")

ENDED_KEPT = 4096
"""How many ended requests `cancel` still knows the token count of."""


@dataclass(frozen=True, slots=True)
class _Add:
    request: GenerateRequest


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Stop:
    """Cancel what is open and end the thread."""


_Command = _Add | _Cancel | _Stop


class _Stream:
    """What one consumer has not seen yet. Loop side only."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.ended = asyncio.Event()
        self._unseen: list[int] = []
        self._finish_reason: FinishReason | None = None
        self._error: EngineDeadError | None = None
        self._news = asyncio.Event()

    def put(self, delta: TokenDelta) -> None:
        self.num_tokens += len(delta.token_ids)
        self._unseen.extend(delta.token_ids)
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            self.ended.set()
        self._news.set()

    def fail(self, error: EngineDeadError) -> None:
        self._error = error
        self.ended.set()
        self._news.set()

    async def next(self) -> TokenDelta:
        await self._news.wait()
        self._news.clear()
        if self._error is not None:
            raise self._error
        delta = TokenDelta(token_ids=tuple(self._unseen), finish_reason=self._finish_reason)
        self._unseen.clear()
        return delta


class AsyncEngine:
    """`engine.api.Engine` over a thread of its own. Make it and use it on one event loop."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        """Returns when `build` has; raises what it raises.

        The engine is built on its own thread: OpenMP keeps a team of workers for every thread that has ever computed,
        and gives up spinning between operations once all teams together are larger than the machine.
        """
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed: EngineDeadError | None = None
        built: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._run, args=(build, built), name="engine", daemon=True)
        self._thread.start()
        self._engine = built.result()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """See `engine.api.Engine.generate`."""
        stream = self._open(request)
        try:
            while True:
                delta = await stream.next()
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            if not stream.ended.is_set():
                self._commands.put(_Cancel(request.request_id))

    async def cancel(self, request_id: str) -> int | None:
        """See `engine.api.Engine.cancel`."""
        stream = self._streams.get(request_id)
        if stream is None:
            return self._ended.get(request_id)
        self._commands.put(_Cancel(request_id))
        await stream.ended.wait()
        return stream.num_tokens

    def stats(self) -> EngineStats:
        """See `engine.api.Engine.stats`."""
        return self._engine.stats()

    def recent_steps(self) -> list[StepSummary]:
        """See `engine.api.Engine.recent_steps`."""
        return self._engine.recent_steps()

    def check_health(self) -> None:
        """See `engine.api.Engine.check_health`."""
        if not self._thread.is_alive():
            raise self._closed or EngineDeadError("the engine thread has ended")

    async def drain(self, timeout_s: float) -> None:
        """See `engine.api.Engine.drain`."""
        self._closed = self._closed or EngineDeadError("the engine is shutting down")
        open_streams = [asyncio.create_task(stream.ended.wait()) for stream in self._streams.values()]
        if open_streams:
            await asyncio.wait(open_streams, timeout=timeout_s)
        self._commands.put(_Stop())
        await asyncio.to_thread(self._thread.join)

    # ---- loop side

    def _open(self, request: GenerateRequest) -> _Stream:
        if self._closed is not None:
            raise self._closed
        self._engine.check_request(request)
        if request.request_id in self._streams:
            raise RequestRefusedError(f"request id {request.request_id!r} is in use")
        self._loop = asyncio.get_running_loop()
        stream = self._streams[request.request_id] = _Stream()
        self._commands.put(_Add(request))
        return stream

    def _deliver(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            stream = self._streams[output.request_id]
            stream.put(output.delta)
            if output.delta.finish_reason is not None:
                del self._streams[output.request_id]
                self._ended[output.request_id] = stream.num_tokens
        while len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)

    def _fail_all(self, error: EngineDeadError) -> None:
        self._closed = error
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()

    # ---- thread side

    def _run(self, build: Callable[[], Engine], built: Future[Engine]) -> None:
        try:
            engine = build()
        except BaseException as exception:
            built.set_exception(exception)
            return
        built.set_result(engine)
        error = EngineDeadError("the engine has stopped")
        try:
            while self._obey(engine):
                self._post(self._deliver, engine.step())
            self._post(self._deliver, engine.cancel_all())
        except Exception as exception:
            logger.exception("the engine died; its open requests end with an error")
            error = EngineDeadError(f"the engine died: {type(exception).__name__}: {exception}")
        finally:
            engine.close()
            self._post(self._fail_all, error)

    def _obey(self, engine: Engine) -> bool:
        """Carry out the commands that have come in; wait for one if there is nothing else to do. False: stop."""
        while True:
            if not engine.has_work:
                _check_idle(engine)
            elif self._commands.empty():
                return True
            match self._commands.get():
                case _Add(request):
                    engine.add(request)
                case _Cancel(request_id):
                    output = engine.cancel(request_id)
                    if output is not None:
                        self._post(self._deliver, [output])
                case _Stop():
                    return False

    def _post(self, callback: Callable[[Argument], None], argument: Argument) -> None:
        if self._loop is None or self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(callback, argument)


def _check_idle(engine: Engine) -> None:
    """A leaked block costs capacity, not correctness: say it loudly, and go on serving."""
    try:
        engine.check_integrity()
    except AssertionError:
        logger.exception("the engine is idle and its books do not balance")
