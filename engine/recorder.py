"""The step recorder: writes every decision of the scheduler, and all it depended on, to a file of JSON lines.

What a line says is in `engine.records`; `python -m engine.replay FILE` reads them and takes every decision again. The
file holds prompts as token ids, so only its owner may read it. There is one file for one engine: whoever starts several
replicas gives each a file of its own.

Recording never stops an engine that runs. At `record_max_bytes` the file says so in its last line and ends; a full disk
is logged, once. Only a file that cannot be opened at start-up is an error, for then the operator is there to read it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import zlib
from array import array
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import Field, TypeAdapter

from engine.config import ConfigError, EngineConfig
from engine.intake import ModelFacts
from engine.plan import StepPlan
from engine.records import (
    Added,
    Cancelled,
    ChunkRecord,
    Departure,
    Ended,
    Event,
    Full,
    HandedBack,
    Header,
    Record,
    Step,
    Stepped,
)

logger = logging.getLogger(__name__)


class StepScribe:
    """Puts steps into their recorded form. Remembers what blocks each sequence holds, to tell which are new."""

    def __init__(self) -> None:
        self._block_ids: dict[str, tuple[int, ...]] = {}

    def describe(self, step: Step) -> Stepped:
        """The record of a step; call it for every one, in order."""
        plan, summary = step.plan, step.summary
        cut_off = self._departures(step.cut_off)
        for name in plan.preempted:
            self._block_ids.pop(name, None)
        chunks = self._chunks(plan, step.result.token_ids)
        return Stepped(
            step=summary.step,
            times=step.times,
            joined=plan.joined,
            left=cut_off + self._departures(step.ended),
            preemptions=plan.preemptions,
            chunks=chunks,
            copies=plan.copies,
            obstacle=plan.obstacle,
            num_running=summary.num_running,
            num_waiting=summary.num_waiting,
            num_idle_slots=summary.num_idle_slots,
            tokens=summary.tokens,
            places=summary.places,
            checksum=_checksum(plan),
        )

    def _departures(self, ended: tuple[Ended, ...]) -> tuple[Departure, ...]:
        return tuple(
            Departure(
                sequence_id=each.sequence_id,
                reason=each.reason,
                num_blocks=len(self._block_ids.pop(each.sequence_id, ())),
            )
            for each in ended
        )

    def _chunks(self, plan: StepPlan, token_ids: Iterable[int]) -> tuple[ChunkRecord, ...]:
        sampled = iter(token_ids)
        records = []
        for chunk in plan.chunks:
            num_known_blocks = len(self._block_ids.get(chunk.sequence_id, ()))
            self._block_ids[chunk.sequence_id] = chunk.block_ids
            records.append(
                ChunkRecord(
                    sequence_id=chunk.sequence_id,
                    start=chunk.start,
                    num_tokens=len(chunk.token_ids),
                    token_id=next(sampled) if chunk.samples else None,
                    new_block_ids=chunk.block_ids[num_known_blocks:],
                )
            )
        return tuple(records)


class FileRecorder:
    """See `engine.engine.Recorder`. Raises ConfigError if the file cannot be written."""

    def __init__(self, path: str, header: Header) -> None:
        self._scribe = StepScribe()
        self._max_bytes = header.config.record_max_bytes
        self._last_line = encode(Full(max_bytes=self._max_bytes))
        first_line = encode(header)
        self._num_bytes = len(first_line)
        if self._num_bytes + len(self._last_line) > self._max_bytes:
            raise ConfigError(
                f"record_max_bytes is {self._max_bytes}, but the first line alone takes {self._num_bytes}; raise it"
            )
        try:
            self._file: BinaryIO | None = _begin_file(Path(path), first_line)
        except OSError as error:
            raise ConfigError(f"record_steps: {path} cannot be written: {error}") from error
        logger.warning("every step is recorded in %s, with all prompts as token ids", path)

    def note(self, event: Event) -> None:
        """Record what came in; it is safe on disk with the next step, and so is what it led to."""
        self._write(event)

    def step(self, step: Step) -> None:
        """Record a step."""
        if self._file is not None:
            self._write(self._scribe.describe(step))

    def close(self) -> None:
        """End the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # has been logged if it came up before
                self._file.close()
            self._file = None

    def _write(self, record: Record) -> None:
        if self._file is None:
            return
        try:
            line = encode(record)
            is_full = self._num_bytes + len(line) + len(self._last_line) > self._max_bytes
            self._file.write(self._last_line if is_full else line)
            if is_full or isinstance(record, Stepped):
                self._file.flush()
        except (OSError, ValueError) as error:
            logger.error("the steps are recorded no longer: %s", error)
            self.close()
            return
        self._num_bytes += len(line)
        if is_full:
            logger.warning("the steps are recorded no longer: the file has %d bytes", self._max_bytes)
            self.close()


def open_recorder(config: EngineConfig, num_blocks: int, facts: ModelFacts) -> FileRecorder | None:
    """The recorder that `config` asks for, None if it asks for none. Raises ConfigError."""
    if config.record_steps is None:
        return None
    return FileRecorder(config.record_steps, Header(config=config, num_blocks=num_blocks, facts=facts))


def _begin_file(path: Path, first_line: bytes) -> BinaryIO:
    """A new file that only its owner may read, in a folder that is made if need be. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "wb", opener=partial(os.open, mode=0o600))  # noqa: SIM115 - it stays open as long as the engine
    try:
        file.write(first_line)
        file.flush()
    except OSError:
        with contextlib.suppress(OSError):
            file.close()
        raise
    return file


def encode(record: Record) -> bytes:
    """The line of a record.

    Steps are many and much alike, so what has its default value is left out of them. Elsewhere defaults may change with
    the code, and are written.
    """
    if not isinstance(record, Stepped):
        return _WRITERS[type(record)].dump_json(record) + b"\n"
    return b'{"kind":"step",' + _WRITERS[Stepped].dump_json(record, exclude_defaults=True)[1:] + b"\n"


def decode(line: bytes) -> Record:
    """The record of a line. Raises pydantic's ValidationError, or ConfigError."""
    return _READER.validate_json(line)


_WRITERS: dict[type[Record], TypeAdapter[Any]] = {
    kind: TypeAdapter(kind) for kind in (Header, Added, Cancelled, HandedBack, Stepped, Full)
}
_READER: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="kind")])


def _checksum(plan: StepPlan) -> int:
    return zlib.crc32(array("I", [token_id for chunk in plan.chunks for token_id in chunk.token_ids]))
