"""What a newcomer does, done by a machine: `make serve`, the curl that it prints, Ctrl-C. Nothing may be left of it.

Run by hand: `python -m tests.e2e.readme_commands`. Not part of the test suite, because it installs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from uuid import uuid4

import psutil

ROOT = Path(__file__).parents[2]
MARK = "ROULANT_README_CHECK"
"""A variable by which every process that comes from ours is known, whatever parent it has by then."""
START_BOUND_S = 1200
"""For an installation and the model's download on a slow line; a warm start takes seconds."""
ANSWER_BOUND_S = 120
STOP_BOUND_S = 90


class CheckError(Exception):
    """A promise of the README that does not hold."""


def main() -> None:
    """Check the promises in order; the first that is broken ends it with exit code 1."""
    mark = uuid4().hex
    try:
        if "make serve" not in commands_in((ROOT / "README.md").read_text()):
            raise CheckError("README.md does not show the command `make serve`")
        port = free_port()
        with make_serve(port, mark) as (process, lines):
            printed = read_until_ready(process, lines, f"ready: http://127.0.0.1:{port}")
            print("answer:", ask(printed))  # noqa: T201
            press_ctrl_c(process)
        check_nothing_is_left(mark, port)
    except CheckError as error:
        sys.exit(f"README commands: {error}")
    finally:
        kill_what_is_left(mark)
    print("README commands: make serve answered, and Ctrl-C left nothing behind")  # noqa: T201


def commands_in(readme: str) -> list[str]:
    """The lines of the README's shell blocks."""
    blocks = re.findall(r"```(?:sh|bash|console)\n(.*?)```", readme, flags=re.DOTALL)
    return [line.strip().removeprefix("$ ").split("  #")[0].strip() for block in blocks for line in block.splitlines()]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def make_serve(port: int, mark: str) -> Iterator[tuple[subprocess.Popen[str], Queue[str | None]]]:
    """`make serve` in a process group of its own, as a terminal has it, and its lines; None after the last."""
    process = subprocess.Popen(
        ["make", "serve", f"PORT={port}"],
        cwd=ROOT,
        env={**os.environ, MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    lines: Queue[str | None] = Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line.rstrip("\n"))
        lines.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield process, lines
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_until_ready(process: subprocess.Popen[str], lines: Queue[str | None], ready: str) -> list[str]:
    """What was printed up to the line `ready`."""
    printed: list[str] = []
    while True:
        try:
            line = lines.get(timeout=START_BOUND_S)
        except Empty:
            raise CheckError(f"no `ready:` line; the last lines were\n{tail(printed)}") from None
        if line is None:
            raise CheckError(f"`make serve` ended with {process.wait()} before it was ready:\n{tail(printed)}")
        printed.append(line)
        if line == ready:
            return printed
        if line.startswith("ready:"):
            raise CheckError(f"expected the line {ready!r}, got {line!r}")


def ask(printed: list[str]) -> str:
    """Run the printed curl as a person would paste it; returns the answer, which names Paris."""
    curls = [line for line in printed if line.startswith("curl ")]
    if len(curls) != 1:
        raise CheckError(f"expected one line with a curl command, got {len(curls)}:\n{tail(printed)}")
    result = subprocess.run(["sh", "-c", curls[0]], capture_output=True, text=True, timeout=ANSWER_BOUND_S, check=False)
    try:
        answer = str(json.loads(result.stdout)["choices"][0]["message"]["content"])
    except (json.JSONDecodeError, LookupError, TypeError):
        raise CheckError(f"the printed curl got no completion: {result.stdout}{result.stderr}") from None
    if "Paris" not in answer:
        raise CheckError(f"the capital of France is not {answer!r}")
    return answer


def press_ctrl_c(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(timeout=STOP_BOUND_S)
    except subprocess.TimeoutExpired:
        raise CheckError(f"`make serve` still runs {STOP_BOUND_S} s after Ctrl-C") from None


def check_nothing_is_left(mark: str, port: int) -> None:
    if left := [f"{process.pid} {process.name()}" for process in marked(mark)]:
        raise CheckError(f"processes outlived `make serve`: {', '.join(left)}")
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise CheckError(f"something still listens on port {port}")


def marked(mark: str) -> list[psutil.Process]:
    """The living processes that come from our `make serve`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue  # gone meanwhile, or not ours to look at
    return found


def kill_what_is_left(mark: str) -> None:
    for process in marked(mark):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def tail(lines: list[str]) -> str:
    return "\n".join(lines[-30:])


if __name__ == "__main__":
    main()
