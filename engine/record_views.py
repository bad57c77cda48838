"""What `engine.replay` shows to people: steps as a table, and the life of one request."""

from __future__ import annotations

import re
from collections.abc import Iterator

from engine.engine import Engine
from engine.records import Added, Cancelled, HandedBack, Record, Stepped

HEADINGS = (
    f"{'step':>7} {'s':>9} {'ms':>6} {'run':>4} {'wait':>5} {'decode':>6} {'prompt':>6} {'again':>6} {'left':>6} "
    f"{'free':>7}  what changed"
)
LEGEND = (
    "s: since the record began; ms: the whole step; decode, prompt, again, left: tokens of the budget; "
    "free: places of the KV cache, cached ones included; + joined, - ended, ! stepped back"
)


class StepTable:
    """The steps whose number lies in `wanted`, a line each."""

    def __init__(self, wanted: range) -> None:
        self._wanted = wanted
        self._clock = _Since()
        self._has_headings = False

    def lines(self, record: Record, _engine: Engine) -> Iterator[str]:
        """See `engine.replay.View`."""
        since_s = self._clock.at(record)
        if not isinstance(record, Stepped) or record.step not in self._wanted:
            return
        if not self._has_headings:
            self._has_headings = True
            yield LEGEND
            yield HEADINGS
        tokens, free = record.tokens, record.places.free + record.places.cached_idle
        yield (
            f"{record.step:>7} {since_s:>9.3f} {(record.times.committed - record.times.started) * 1000:>6.1f} "
            f"{record.num_running:>4} {record.num_waiting:>5} {tokens.decode:>6} {tokens.new_prefill:>6} "
            f"{tokens.recomputed:>6} {tokens.unused:>6} {free:>7}  {_changes(record)}"
        )

    @property
    def missing(self) -> str | None:
        """See `engine.replay.View`."""
        return None if self._has_headings else "the record has none of these steps"


class RequestLife:
    """All that happened to one request, and what held it up, in the scheduler's own words."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._clock = _Since()
        self._has_come = False
        self._names = re.compile(rf"{re.escape(request_id)}(#\d+)?")
        self._held: dict[str, _Held] = {}
        self._num_sampled: dict[str, int] = {}

    def lines(self, record: Record, engine: Engine) -> Iterator[str]:
        """See `engine.replay.View`."""
        since_s = self._clock.at(record)
        match record:
            case Added(request=request) if request.request_id == self._request_id:
                self._has_come = True
                yield (
                    f"{since_s:9.3f} s  {self._request_id} came: tenant {request.tenant}, lane {request.lane}, "
                    f"{len(request.prompt_token_ids)} prompt tokens, up to {request.sampling.max_tokens} new ones, "
                    f"choices {len(request.choices)}, timeout {_seconds(request.timeout_s)}"
                )
            case Cancelled(request_id=self._request_id, index=index):
                yield f"{since_s:9.3f} s  {self._request_id}{'' if index is None else f' choice {index}'}: cancelled"
            case HandedBack(sequence_ids=names):
                yield from (f"{since_s:9.3f} s  {name} was handed back" for name in names if self._is_mine(name))
            case Stepped():
                yield from (f"{since_s:9.3f} s  step {record.step}: {line}" for line in self._step(record, engine))

    @property
    def missing(self) -> str | None:
        """See `engine.replay.View`."""
        return None if self._has_come else f"the record has no request {self._request_id!r}"

    def _step(self, record: Stepped, engine: Engine) -> Iterator[str]:
        yield from self._moves(record)
        for explanation in engine.explain(self._request_id):
            name, why = explanation.sequence_id, explanation.now
            held = self._held.get(name)
            if why is not None and held is not None and held.is_like(why):
                held.num_steps += 1
                continue
            yield from self._let_go(name)
            if why is not None:
                self._held[name] = _Held(why)
                yield f"{name} waits: {why}"

    def _moves(self, record: Stepped) -> Iterator[str]:
        chunks = {chunk.sequence_id: chunk for chunk in record.chunks if self._is_mine(chunk.sequence_id)}
        for name in filter(self._is_mine, record.joined):
            yield from self._let_go(name)
            start = chunks[name].start if name in chunks else 0
            yield f"{name} joined; {start} tokens were in memory already"
        for name, chunk in chunks.items():
            sampled = chunk.token_id is not None
            self._num_sampled[name] = self._num_sampled.get(name, 0) + sampled
            if chunk.num_tokens > 1 or (sampled and self._num_sampled[name] == 1):
                what = f"{name} computed {chunk.num_tokens} tokens from {chunk.start} on"
                yield what + (", and got its first token" if sampled and self._num_sampled[name] == 1 else "")
        for each in record.preemptions:
            if self._is_mine(each.sequence_id):
                yield (
                    f"{each.sequence_id} stepped back ({each.cause}) for {each.in_favour_of}, and gave up "
                    f"{each.num_blocks} blocks; {each.num_lost_tokens} tokens to compute again"
                )
        for departure in record.left:
            name = departure.sequence_id
            if self._is_mine(name):
                yield from self._let_go(name)
                yield f"{name} ended: {departure.reason}, after {self._num_sampled.get(name, 0)} tokens here"

    def _let_go(self, name: str) -> Iterator[str]:
        if (held := self._held.pop(name, None)) is not None:
            yield f"{name} has waited {held.num_steps} step{'s'[: held.num_steps > 1]} for that"

    def _is_mine(self, name: str) -> bool:
        return self._names.fullmatch(name) is not None


class _Held:
    """What holds a sequence up, and for how many steps it has."""

    def __init__(self, why: str) -> None:
        self._kind = _kind(why)
        self.num_steps = 1

    def is_like(self, why: str) -> bool:
        """Whether `why` is the same but for its numbers and whom it names."""
        return _kind(why) == self._kind


def _seconds(timeout_s: float | None) -> str:
    return "none" if timeout_s is None else f"{timeout_s:g} s"


def _kind(why: str) -> str:
    behind, _, reason = why.rpartition(": ")
    return ("behind " if behind else "") + re.sub(r"\d+", "#", reason)


class _Since:
    """Times since the first of them."""

    def __init__(self) -> None:
        self._first_s: float | None = None

    def at(self, record: Record) -> float:
        match record:
            case Stepped(times=times):
                now = times.started
            case Added(at_s=now) | Cancelled(at_s=now) | HandedBack(at_s=now):
                pass
            case _:
                return 0.0
        if self._first_s is None:
            self._first_s = now
        return now - self._first_s


def _changes(record: Stepped) -> str:
    parts = [f"+{name}" for name in record.joined]
    parts += [f"-{each.sequence_id} ({each.reason})" for each in record.left]
    parts += [f"!{each.sequence_id} ({each.cause}, for {each.in_favour_of})" for each in record.preemptions]
    if record.obstacle is not None and record.num_waiting:
        parts.append(f"{record.obstacle.sequence_id} waits: {record.obstacle}")
    return "; ".join(parts)
