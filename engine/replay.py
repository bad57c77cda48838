"""``python -m engine.replay FILE`` takes every decision of a recorded engine again, and says whether they are the same.

The scheduler is built from the record's first line. It is told what came in, and when; an executor without a model
answers with the tokens that were sampled. What it decides is recorded in its turn and compared with the file, field by
field. The first difference ends the replay: either the file was changed, or the code is not what wrote it, or a
decision depends on something that is not in the record.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Protocol

from engine.api import FinishReason, Logprob, PositionLogprobs
from engine.engine import Engine
from engine.plan import StepPlan, StepResult
from engine.record_reader import DamagedRecordError, NotARecordError, RecordReader
from engine.record_views import RequestLife, StepTable
from engine.recorder import StepScribe
from engine.records import Added, Cancelled, Event, HandedBack, Header, Record, Step, Stepped
from engine.roster import Roster
from engine.scheduler import build_scheduler
from engine.sequence import Status

NUM_WAITING_SHOWN = 10


class View(Protocol):
    """Something to show beside the verdict."""

    def lines(self, record: Record, engine: Engine) -> Iterator[str]:
        """What there is to show once `record` has been replayed by `engine`."""

    @property
    def missing(self) -> str | None:
        """What was looked for and has not come up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first decision that is not the recorded one. `state`: what the scheduler had before it, a line each."""

    line: int
    recorded: Record
    replayed: Record | str
    """What was decided this time; text if it failed."""
    state: tuple[str, ...]


class ScriptedExecutor:
    """Answers each step with what its record says was sampled, at the times that it says."""

    def __init__(self) -> None:
        self._times = deque([0.0])
        self._tokens: dict[str, int] = {}
        self._num_padding = 0

    def load(self, record: Event | Stepped) -> None:
        """What comes next is what `record` says."""
        if not isinstance(record, Stepped):
            self._times = deque([record.at_s])
            return
        times = record.times
        self._times = deque([times.started, times.scheduled, times.executed, times.committed])
        self._tokens = {each.sequence_id: each.token_id for each in record.chunks if each.token_id is not None}
        self._num_padding = record.tokens.graph_padding

    def clock(self) -> float:
        """The recorded times in order, then the last one for ever."""
        return self._times.popleft() if len(self._times) > 1 else self._times[0]

    def execute(self, plan: StepPlan) -> StepResult:
        """Whoever sampled nothing then gets token 0 now; that it samples at all shows when the records are compared."""
        return StepResult(
            token_ids=[self._tokens.get(chunk.sequence_id, 0) for chunk in plan.chunks if chunk.samples],
            scored=tuple(_scores(chunk.scored_token_ids) for chunk in plan.chunks if chunk.scored_token_ids),
            num_padding_tokens=self._num_padding,
        )

    def close(self) -> None:
        """Nothing is held."""


class Replay:
    """A scheduler that lives through a record."""

    def __init__(self, header: Header) -> None:
        scheduler = build_scheduler(header.config, header.num_blocks)
        self._script = ScriptedExecutor()
        self._memo = _Memo()
        self._roster = scheduler.roster
        self.engine = Engine(scheduler, self._script, header.facts, self._script.clock, self._memo)
        self.num_sequences = 0
        self.happened: Counter[str] = Counter()
        """How often what is worth counting has happened, in words."""

    def repeat(self, record: Record, line: int) -> Difference | None:
        """Do again what `record` says was done; None if it came out the same."""
        state = tuple(_state(self._roster))
        try:
            self._do(record)
        except Exception as error:  # whatever it is, the engine that was recorded has not raised it
            replayed = f"failed: {type(error).__name__}: {error}"
            return Difference(line=line, recorded=record, replayed=replayed, state=state)
        if self._memo.record != record:
            return Difference(line=line, recorded=record, replayed=self._memo.record or "nothing", state=state)
        self._count(record)
        return None

    def _do(self, record: Record) -> None:
        assert isinstance(record, Added | Cancelled | HandedBack | Stepped)
        self._script.load(record)
        match record:
            case Added(request=request):
                self.engine.add(request)
            case Cancelled(request_id=request_id, index=index):
                self.engine.cancel(request_id, index)
            case HandedBack():
                self.engine.hand_back()
            case Stepped():
                self.engine.step()

    def _count(self, record: Record) -> None:
        if isinstance(record, Added):
            self.num_sequences += len(record.request.choices)
        elif isinstance(record, HandedBack):
            self.happened["ended: handed_back"] += len(record.sequence_ids)
        elif isinstance(record, Stepped):
            by_now = [each for each in record.left if each.reason is not FinishReason.HANDED_BACK]
            self.happened.update(f"ended: {each.reason}" for each in by_now)
            self.happened.update(f"preempted: {each.cause}" for each in record.preemptions)
            self.happened["copied blocks"] += len(record.copies)


class _Memo:
    """Keeps what the engine's recorder would write; see `engine.engine.Recorder`."""

    def __init__(self) -> None:
        self.record: Record | None = None
        self._scribe = StepScribe()

    def note(self, event: Event) -> None:
        self.record = event

    def step(self, step: Step) -> None:
        self.record = self._scribe.describe(step)

    def close(self) -> None: ...


def replay_file(reader: RecordReader, views: Sequence[View] = ()) -> Iterator[str]:
    """Replay a record; yields what there is to say. Raises DifferenceError, DamagedRecordError."""
    replay = Replay(reader.header)
    for record in reader:
        difference = replay.repeat(record, reader.line)
        if difference is not None:
            raise DifferenceError(difference)
        for view in views:
            yield from view.lines(record, replay.engine)
    yield from (f"note: {view.missing}" for view in views if view.missing)
    yield from _summary(replay, reader)


class DifferenceError(Exception):
    """A decision is not the recorded one."""

    def __init__(self, difference: Difference) -> None:
        super().__init__("\n".join(_tell(difference)))


def _scores(token_ids: Sequence[int]) -> tuple[PositionLogprobs, ...]:
    """Scores that nobody will see; the scheduler counts them."""
    return tuple(PositionLogprobs(chosen=Logprob(token_id=token_id, logprob=0.0)) for token_id in token_ids)


def _state(roster: Roster) -> Iterator[str]:
    for each in roster.running:
        tokens = f"{each.num_known} tokens known, {each.num_computed} computed"
        yield f"running {each.sequence_id}: lane {each.lane}, {tokens}, {len(each.block_ids)} blocks"
    waiting = [each for each in roster.sequences if each.status is Status.WAITING]
    for each in islice(waiting, NUM_WAITING_SHOWN):
        yield f"waiting {each.sequence_id}: lane {each.lane}, {each.num_known} tokens known"
    if len(waiting) > NUM_WAITING_SHOWN:
        yield f"and {len(waiting) - NUM_WAITING_SHOWN} more wait"
    pool = roster.memory.pool
    yield f"blocks: {pool.num_used} used, {pool.num_idle} cached, {pool.num_available - pool.num_idle} free"


def _summary(replay: Replay, reader: RecordReader) -> Iterator[str]:
    stats = replay.engine.stats()
    if reader.ending:
        yield f"note: {reader.ending}"
    yield f"{stats.num_steps:,} steps, {stats.num_requests:,} requests of {replay.num_sequences:,} sequences"
    yield (
        f"{stats.num_prompt_tokens:,} prompt tokens, {stats.num_cached_tokens:,} cached, "
        f"{stats.num_recomputed_tokens:,} computed again, {stats.num_generated_tokens:,} generated"
    )
    yield ", ".join(f"{what} {count:,}" for what, count in sorted(replay.happened.items()) if count) or "nobody ended"
    if stats.num_running or stats.num_waiting:
        yield f"at the end of the record {stats.num_running} ran and {stats.num_waiting} waited"
    yield "identical: every decision is the recorded one"


def _tell(difference: Difference) -> Iterator[str]:
    recorded, replayed = difference.recorded, difference.replayed
    what = f"step {recorded.step}" if isinstance(recorded, Stepped) else f"what was {recorded.kind}"
    yield f"different: {what}, on line {difference.line}"
    if isinstance(replayed, str) or type(recorded) is not type(replayed):
        yield f"  recorded  {recorded}"
        yield f"  now       {replayed}"
    else:
        for field in fields(recorded):
            yield from _tell_field(field.name, getattr(recorded, field.name), getattr(replayed, field.name))
    yield "before it:"
    yield from (f"  {line}" for line in difference.state)


def _tell_field(name: str, recorded: object, replayed: object) -> Iterator[str]:
    if recorded == replayed:
        return
    yield f"  {name}"
    if isinstance(recorded, tuple) and isinstance(replayed, tuple) and set(recorded) != set(replayed):
        yield from (f"    recorded  {each}" for each in recorded if each not in replayed)
        yield from (f"    now       {each}" for each in replayed if each not in recorded)
    else:
        yield f"    recorded  {recorded}"
        yield f"    now       {replayed}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m engine.replay",
        description="Take every decision of a recorded engine again, and compare. Exit code 0: all are the same; "
        "1: one is not, or the file is damaged; 2: wrong use, or not a record.",
        epilog="example: python -m engine.replay steps.jsonl --steps 100:120 --request chatcmpl-1",
    )
    parser.add_argument("file", type=Path, help="what EngineConfig.record_steps has written")
    parser.add_argument("--steps", type=_step_range, metavar="FIRST:LAST", help="show these steps, a line each")
    parser.add_argument("--request", metavar="ID", help="show the life of one request: why it waited, when it ran")
    return parser.parse_args(arguments)


def _step_range(text: str) -> range:
    first, _, last = text.partition(":")
    try:
        return range(int(first), int(last or first) + 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST:LAST, two step numbers") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = _parse(arguments)
    views: list[View] = []
    if options.steps is not None:
        views.append(StepTable(options.steps))
    if options.request is not None:
        views.append(RequestLife(options.request))
    try:
        reader = RecordReader(options.file)
    except (NotARecordError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    try:
        for line in replay_file(reader, views):
            sys.stdout.write(line + "\n")
    except (DifferenceError, DamagedRecordError) as error:
        sys.stdout.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly when `head` has seen enough
    sys.exit(main())
