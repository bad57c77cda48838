"""Reads what `engine.recorder` has written, line by line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from pydantic import ValidationError

from engine.config import ConfigError
from engine.recorder import decode
from engine.records import FORMAT_VERSION, Full, Header, Record


class NotARecordError(Exception):
    """The file is not a record, or not one that this version of the code reads. The message says which."""


class DamagedRecordError(Exception):
    """A line in the middle cannot be read. The message says which."""


class RecordReader:
    """One file. `line` is the number of the last line read, `ending` why the record ends where it does, if not by a
    full last line."""

    def __init__(self, path: Path) -> None:
        """Raises NotARecordError; OSError if the file cannot be read."""
        self._path = path
        self.line = 1
        self.ending: str | None = None
        with path.open("rb") as file:
            self.header = _header(file.readline(), path)

    def __iter__(self) -> Iterator[Record]:
        """What follows the header. Raises DamagedRecordError."""
        with self._path.open("rb") as file:
            for line in islice(file, 1, None):
                if not line.endswith(b"\n"):
                    self.ending = f"line {self.line + 1} is cut short, and left out"
                    return
                self.line += 1
                record = _read(line, self.line)
                if isinstance(record, Full):
                    self.ending = f"the record had reached its bound of {record.max_bytes:,} bytes; the engine went on"
                    return
                yield record


def _header(line: bytes, path: Path) -> Header:
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    if not isinstance(fields, dict) or fields.get("kind") != "header":
        raise NotARecordError(f"{path} is not a record of an engine's steps")
    if fields.get("version") != FORMAT_VERSION:
        raise NotARecordError(f"{path} has format version {fields.get('version')}; this code reads {FORMAT_VERSION}")
    try:
        header = decode(line)
    except (ValidationError, ConfigError) as error:
        raise NotARecordError(f"{path} has a first line that cannot be read: {error}") from error
    assert isinstance(header, Header)
    return header


def _read(line: bytes, number: int) -> Record:
    try:
        record = decode(line)
    except (ValidationError, ConfigError) as error:
        raise DamagedRecordError(f"line {number} cannot be read: {error}") from error
    if isinstance(record, Header):
        raise DamagedRecordError(f"line {number} is a second first line: two records in one file?")
    return record
