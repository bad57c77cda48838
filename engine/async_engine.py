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
    index: int | None = None


@dataclass(frozen=True, slots=True)
class _Stop:
    """Cancel what is open and end the thread."""


_Command = _Add | _Cancel | _Stop


class _Unseen:
    """What the consumer of one choice has not seen yet."""

    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []
        self.ended = asyncio.Event()
        self.num_tokens = 0

    def put(self, delta: TokenDelta) -> None:
        self.deltas.append(delta)
        self.num_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.ended.set()

    def take(self) -> TokenDelta:
        """All that has come since the last look, as one delta."""
        deltas, self.deltas = self.deltas, []
        if len(deltas) == 1:
            return deltas[0]
        return TokenDelta(
            index=deltas[0].index,
            token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
            finish_reason=deltas[-1].finish_reason,
            logprobs=tuple(each for delta in deltas for each in delta.logprobs),
            prompt_logprobs=deltas[0].prompt_logprobs,
            num_cached_tokens=deltas[0].num_cached_tokens,
        )


class _Stream:
    """What one consumer has not seen yet, of all choices of its request. Loop side only."""

    def __init__(self, request: GenerateRequest) -> None:
        self.choices = {choice.index: _Unseen() for choice in request.choices}
        self.ended = asyncio.Event()
        self._error: EngineDeadError | None = None
        self._news: dict[int, None] = {}  # indices with something unseen, oldest first
        self._has_news = asyncio.Event()

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices.values())

    def put(self, delta: TokenDelta) -> None:
        self.choices[delta.index].put(delta)
        self._news[delta.index] = None
        self._has_news.set()
        if all(choice.ended.is_set() for choice in self.choices.values()):
            self.ended.set()

    def fail(self, error: EngineDeadError) -> None:
        self._error = error
        self.ended.set()
        for choice in self.choices.values():
            choice.ended.set()
        self._has_news.set()

    async def next(self) -> TokenDelta | None:
        """What is new for one of the choices, None: all have ended and have been seen."""
        if not self._news and self.ended.is_set() and self._error is None:
            return None
        await self._has_news.wait()
        if self._error is not None:
            raise self._error
        index = next(iter(self._news))
        del self._news[index]
        if not self._news:
            self._has_news.clear()
        return self.choices[index].take()


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
        stream = self._streams[request.request_id] = _Stream(request)
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
        while True:
            if not engine.has_work:
                _check_idle(engine)
            elif self._commands.empty():
                return True
            match self._commands.get():
                case _Add(request):
                    engine.add(request)
                case _Cancel(request_id, index):
                    self._post(self._deliver, engine.cancel(request_id, index))
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
