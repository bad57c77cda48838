"""A whole service on this host: a Ray cluster of its own, Serve and one configuration, from nothing to nothing.

Ray's driver runs in a child process, in a session of its own (`deployments.local_driver`). That has three uses. Ray's
settings are made before Ray is first imported, whatever this process has imported. A Ctrl-C at the terminal reaches
this process only, which can let running requests finish. And whatever happens to the driver - Ray aborts it when Ray's
own processes die - all that was started is in that session, and `LocalService.stop` kills what is left of it.

Should this process be killed, the child finds its stdin closed and stops by itself.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil

from deployments.config import HttpSection, RoulantConfig
from deployments.home import environment_with, roulant_home
from deployments.local_events import DriverEvent, EventKind
from deployments.models import model_path
from deployments.serve_mode import choose_front, free_ports, local_settings

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 30.0
"""For the driver to drain and to stop Ray; the rest is killed."""
KILL_TIMEOUT_S = 5.0
POLL_S = 0.1


class ServiceError(Exception):
    """The service could not start, or it ended by itself; the message says why and what may help."""


class StartInterruptedError(Exception):
    """Someone asked to stop before the service was ready."""


class LocalService:
    """Ray, Serve and one application, owned by this process. Use `start` once, then `stop`, whatever `start` did."""

    def __init__(self, config: RoulantConfig, *, report: Callable[[str], None] = logger.info) -> None:
        http = config.http.model_copy(update={"port": config.http.port or free_ports(1)[0]})
        self._config = config.model_copy(update={"http": http})
        self._report = report
        self._folder: Path | None = None
        self._driver: subprocess.Popen[str] | None = None
        self._is_ready = False

    @property
    def url(self) -> str:
        """Where clients on this host reach it."""
        return local_url(self._config.http)

    @property
    def session_id(self) -> int | None:
        """The POSIX session of everything that was started; None before `start`."""
        return None if self._driver is None else self._driver.pid

    def start(self, stop_asked: threading.Event | None = None) -> None:
        """Bring everything up; returns when a completion would succeed.

        Raises ServiceError or ModelError, or StartInterruptedError soon after `stop_asked` is set.
        """
        for model in self._config.models:
            model_path(model.source, roulant_home())
        _check_free(self._config.http)
        events = self._spawn()
        try:
            self._follow(events, stop_asked or threading.Event())
        finally:
            os.close(events)

    def wait(self, stop_asked: threading.Event) -> None:
        """Return when `stop_asked` is set. Raises ServiceError if the service ends before."""
        assert self._driver is not None, "wait for what was started"
        while not stop_asked.wait(POLL_S):
            if self._driver.poll() is not None:
                raise ServiceError(f"the service ended by itself (exit status {self._driver.returncode})")

    def stop(self, hurry: threading.Event | None = None) -> None:
        """Let running requests finish, for a bounded time or until `hurry` is set, then leave nothing behind."""
        if self._driver is not None:
            assert self._driver.stdin is not None
            self._driver.stdin.close()
            if self._is_ready:
                self._wait_for_end(hurry or threading.Event())
            _kill_session(self._driver.pid)
            self._driver.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _spawn(self) -> int:
        """Start the driver; returns the end of a pipe from which its events can be read."""
        # Short on purpose: a unix socket's path may have about 100 characters, and Ray puts its sockets deep inside.
        parent = "/tmp" if Path("/tmp").is_dir() else None
        self._folder = Path(tempfile.mkdtemp(prefix="roulant-", dir=parent))
        settings = local_settings(choose_front(), self._folder, secrets.token_hex(32))
        events, events_for_driver = os.pipe()
        self._driver = subprocess.Popen(
            [sys.executable, "-m", "deployments.local_driver", str(events_for_driver), str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            env=environment_with(settings),
            pass_fds=[events_for_driver],
            start_new_session=True,
            text=True,
        )
        os.close(events_for_driver)
        assert self._driver.stdin is not None
        self._driver.stdin.write(self._config.model_dump_json() + "\n")
        self._driver.stdin.flush()
        return events

    def _follow(self, events: int, stop_asked: threading.Event) -> None:
        pending = b""
        while not stop_asked.is_set():
            if not select.select([events], [], [], POLL_S)[0]:
                continue
            news = os.read(events, 65536)
            if not news:
                raise ServiceError("the service ended while it was starting; see above")
            *lines, pending = (pending + news).split(b"\n")
            for line in lines:
                event = DriverEvent.model_validate_json(line)
                if event.kind is EventKind.READY:
                    self._is_ready = True
                    return
                if event.kind is EventKind.FAILED:
                    raise ServiceError(event.text)
                self._report(event.text)
        raise StartInterruptedError

    def _wait_for_end(self, hurry: threading.Event) -> None:
        assert self._driver is not None
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while self._driver.poll() is None and time.monotonic() < deadline:
            if hurry.wait(POLL_S):
                return


def serve_until_stopped(
    config: RoulantConfig,
    *,
    ready: Callable[[LocalService], None],
    report: Callable[[str], None] = logger.info,
) -> None:
    """Start a service, call `ready` once it is, run until SIGINT or SIGTERM, drain and stop it.

    A signal during the start stops it too; a second one cuts the draining short. Raises ServiceError, and ModelError
    when a model is not on this host. Call it from the main thread.
    """
    stop_asked, hurry = threading.Event(), threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        (hurry if stop_asked.is_set() else stop_asked).set()

    service = LocalService(config, report=report)
    with _signals(on_signal):
        try:
            service.start(stop_asked)
            ready(service)
            service.wait(stop_asked)
            report("stopping: letting running requests finish")
        except StartInterruptedError:
            report("stopping before the service was ready")
        finally:
            service.stop(hurry)


def local_url(http: HttpSection) -> str:
    """Where clients on this host reach a service."""
    return f"http://{'127.0.0.1' if http.host in ('0.0.0.0', '::') else http.host}:{http.port}"


@contextmanager
def _signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle SIGINT and SIGTERM here and put the old handlers back at the end."""
    before = {each: signal.signal(each, handler) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, old in before.items():
            signal.signal(each, old)


def _check_free(http: HttpSection) -> None:
    """Raise ServiceError if nobody could listen at the address: Ray would say so late and in many words."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((http.host, http.port))
        except OSError as error:
            raise ServiceError(f"cannot listen on {http.host}:{http.port}: {error}") from error


def session_processes(session_id: int) -> list[psutil.Process]:
    """The living processes of a session."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session_id and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def _kill_session(session_id: int) -> None:
    """Kill what is left of a session, until nothing is: a dying process may have started another."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while left := session_processes(session_id):
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=POLL_S)
        if time.monotonic() > deadline:
            logger.error("still running: %s", ", ".join(str(process.pid) for process in left))
            return
