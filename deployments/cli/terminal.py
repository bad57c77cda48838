"""What the commands print with: data on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from deployments.model_sources import PullProgress
from deployments.models import ModelError, NoProgress


class CliError(Exception):
    """A command failed; the message is for the person who typed it."""


def stdout() -> Console:
    """Where data goes. Made anew for each use: stdout may have been redirected since."""
    return Console(file=sys.stdout, highlight=False)


def stderr() -> Console:
    """Where progress and complaints go."""
    return Console(file=sys.stderr, highlight=False)


def say(line: str) -> None:
    """One line on stdout, as it is: never wrapped, styled or held back."""
    print(line, flush=True)  # noqa: T201 - the one place that prints


def say_json(data: Mapping[str, object] | Sequence[object]) -> None:
    """Data for programs."""
    say(json.dumps(data, indent=2, ensure_ascii=False))


def complain(message: str) -> None:
    """Why a command failed."""
    stderr().print(f"roulant: {message}", style="red", markup=False, soft_wrap=True)


def printable(text: str) -> str:
    """`text` without control characters: what a model writes must not steer the terminal."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t")


@contextmanager
def pull_progress() -> Iterator[PullProgress]:
    """Shows a pull on a terminal, and nothing where nobody looks. Turns ModelError into CliError."""
    console = stderr()
    try:
        if not console.is_terminal:
            yield NoProgress()
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[sizes]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            yield BarProgress(bar)
    except ModelError as error:
        raise CliError(str(error)) from error


class BarProgress:
    """One bar for the present step; it only pulses until the step says how far it is."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task: TaskID | None = None

    def step(self, text: str) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(text, total=None, sizes="")

    def advance(self, done: int, total: int) -> None:
        if self._task is not None:
            self._bar.update(self._task, completed=done, total=total, sizes=f"{done / 1e6:.0f}/{total / 1e6:.0f} MB")
