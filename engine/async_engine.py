"""The engine behind an event loop: commands cross to the engine thread, deltas come back, neither side waits.

The loop side owns the open streams; the thread side owns the engine. What crosses is a command in one direction and,
once per step, one batch of outputs in the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from engine.api import (
    EngineDeadError,
    EngineStats,
    Explanation,
    GenerateRequest,
    RequestRefusedError,
    StepSummary,
    TokenDelta,
)
from engine.engine import Engine
from engine.scheduler import Output
from engine.streams import Stream

logger = logging.getLogger(__name__)

Argument = TypeVar("Argument")

IDLE_CHECK_AFTER_S = 1.0
"""The books are checked when nothing has come for so long: on a large pool that takes some milliseconds."""

ENDED_KEPT = 4096
"""How many ended requests `cancel` still knows the token count of."""


@dataclass(frozen=True, slots=True)
class _Add:
    request: GenerateRequest


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class _Explain:
    request_id: str
    answer: asyncio.Future[list[Explanation]]


@dataclass(frozen=True, slots=True)
class _Stop:
    """Cancel what is open and end the thread."""


_Command = _Add | _Cancel | _Explain | _Stop


class AsyncEngine:
    """`engine.api.Engine` over a thread of its own. Make it and use it on one event loop."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        """Returns when `build` has; raises what it raises.

        The engine is built on its own thread: OpenMP keeps a team of workers for every thread that has ever computed,
        and gives up spinning between operations once all teams together are larger than the machine.
        """
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()
        self._asked: set[asyncio.Future[list[Explanation]]] = set()
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
            while (delta := await stream.next()) is not None:
                yield delta
        finally:
            if not stream.ended.is_set():
                self._commands.put(_Cancel(request.request_id))

    async def cancel(self, request_id: str, index: int | None = None) -> int | None:
        """See `engine.api.Engine.cancel`."""
        stream = self._streams.get(request_id)
        if stream is None:
            return self._ended.get(request_id)
        self._commands.put(_Cancel(request_id, index))
        if index is None:
            await stream.ended.wait()
        elif index in stream.choices:
            await stream.choices[index].ended.wait()
        return stream.num_tokens

    def stats(self) -> EngineStats:
        """See `engine.api.Engine.stats`."""
        return self._engine.stats()

    def recent_steps(self) -> list[StepSummary]:
        """See `engine.api.Engine.recent_steps`."""
        return self._engine.recent_steps()

    async def explain(self, request_id: str) -> list[Explanation]:
        """See `engine.api.Engine.explain`."""
        if self._closed is not None and not self._thread.is_alive():
            return []
        answer: asyncio.Future[list[Explanation]] = asyncio.get_running_loop().create_future()
        self._asked.add(answer)
        self._commands.put(_Explain(request_id, answer))
        try:
            return await answer
        finally:
            self._asked.discard(answer)

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

    def _open(self, request: GenerateRequest) -> Stream:
        if self._closed is not None:
            raise self._closed
        self._engine.check_request(request)
        if request.request_id in self._streams:
            raise RequestRefusedError(f"request id {request.request_id!r} is in use")
        self._loop = asyncio.get_running_loop()
        stream = self._streams[request.request_id] = Stream(request)
        self._commands.put(_Add(request))
        return stream

    def _deliver(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            stream = self._streams[output.request_id]
            stream.put(output.delta)
            if stream.ended.is_set():
                del self._streams[output.request_id]
                self._ended[output.request_id] = stream.num_tokens
        while len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)

    def _fail_all(self, error: EngineDeadError) -> None:
        self._closed = error
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()
        for answer in self._asked:
            _resolve(answer, [])

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
            self._post(self._deliver, engine.hand_back())
        except Exception as exception:
            logger.exception("the engine died; its open requests end with an error")
            error = EngineDeadError(f"the engine died: {type(exception).__name__}: {exception}")
        finally:
            engine.close()
            self._post(self._fail_all, error)

    def _obey(self, engine: Engine) -> bool:
        """Carry out the commands that have come in; wait for one if there is nothing else to do. False: stop."""
        while (command := self._next_command(engine)) is not None:
            match command:
                case _Add(request):
                    engine.add(request)
                case _Cancel(request_id, index):
                    self._post(self._deliver, engine.cancel(request_id, index))
                case _Explain(request_id, answer):
                    self._post(partial(_resolve, answer), engine.explain(request_id))
                case _Stop():
                    return False
        return True

    def _next_command(self, engine: Engine) -> _Command | None:
        """The next command; None if there is a step to do first."""
        with contextlib.suppress(queue.Empty):
            if engine.has_work:
                delay_s = engine.delay_s
                return self._commands.get(timeout=delay_s) if delay_s > 0 else self._commands.get_nowait()
            with contextlib.suppress(queue.Empty):
                return self._commands.get(timeout=IDLE_CHECK_AFTER_S)
            _check_idle(engine)
            return self._commands.get()
        return None

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


def _resolve(answer: asyncio.Future[list[Explanation]], explanations: list[Explanation]) -> None:
    if not answer.done():
        answer.set_result(explanations)
