"""A whole service on this host: a Ray cluster of our own, Serve and one configuration, from nothing to nothing.

`serve_until_stopped` is what `roulant serve` runs. The process that calls it owns everything that is started: it is the
Ray driver, the cluster has its own temporary folder and its own random token, and `LocalService.stop` takes all of it
down in bounded time, whatever state it is in.

SIGINT and SIGTERM only set an event, which every stage of the start and every wait looks at. Ray puts a handler of its
own in place of the one for SIGTERM while it starts; that one kills its processes and raises SystemExit, which ends in
the same clean-up. The processes that Ray starts do not die of a Ctrl-C typed at the terminal, so they can be drained.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from urllib.error import URLError
from urllib.request import urlopen

import psutil

from deployments.admission_wire import AdmissionUnreachableError
from deployments.config import RoulantConfig
from deployments.home import export, roulant_home
from deployments.models import model_path
from deployments.serve_mode import FrontKind, choose_front, free_ports, local_settings

logger = logging.getLogger(__name__)

APP_NAME = "roulant"
START_TIMEOUT_S = 180.0
"""For the application to be ready once Ray runs; large models take their time to load."""
DRAIN_TIMEOUT_S = 10.0
DELETE_TIMEOUT_S = 10.0
POLL_S = 0.1
OBJECT_STORE_BYTES = 100 * 2**20
"""Requests and tokens do not pass through the object store; this is about the least that Ray accepts."""


class ServiceError(Exception):
    """The service could not start; the message says why and what may help."""


class StartInterruptedError(Exception):
    """Someone asked to stop before the service was ready."""


class LocalService:
    """Ray, Serve and one application, owned by this process, which must not have imported ray before.

    Use `start` once, then `stop`; `stop` is safe at any moment, also after a start that failed half-way.
    """

    def __init__(self, config: RoulantConfig, *, report: Callable[[str], None] = logger.info) -> None:
        self._config = config
        self._report = report
        self._folder: Path | None = None
        self._deployed = False
        self._port = config.http.port or free_ports(1)[0]

    @property
    def url(self) -> str:
        """Where clients on this host reach it."""
        host = self._config.http.host
        return f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{self._port}"

    def start(self, stop_asked: threading.Event) -> None:
        """Bring everything up; returns when a completion would succeed.

        Raises ServiceError, or StartInterruptedError soon after `stop_asked` is set.
        """
        for model in self._config.models:
            model_path(model.source, roulant_home())
        self._check_port()
        front = choose_front()
        self._set_environment(front)
        self._report("starting Ray")
        self._start_ray()
        _stop_if(stop_asked)
        self._report(f"starting Ray Serve ({front.value})")
        self._start_serve()
        _stop_if(stop_asked)
        self._report("starting the models and the HTTP front")
        self._deploy()
        self._wait_until_ready(stop_asked)

    def stop(self, drain_timeout_s: float = DRAIN_TIMEOUT_S, hurry: threading.Event | None = None) -> None:
        """Let running requests finish for `drain_timeout_s` or until `hurry` is set, then leave nothing behind."""
        ours = psutil.Process().children(recursive=True)
        try:
            ray = sys.modules.get("ray")
            if ray is not None and ray.is_initialized():
                if self._deployed:
                    self._drain(drain_timeout_s, hurry or threading.Event())
                    self._delete_app()
                ray.shutdown()
        finally:
            _end_processes(ours)
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _check_port(self) -> None:
        import socket

        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self._config.http.host, self._port))
            except OSError as error:
                raise ServiceError(f"cannot listen on {self._config.http.host}:{self._port}: {error}") from error

    def _set_environment(self, front: FrontKind) -> None:
        if "ray" in sys.modules:
            raise ServiceError("ray was imported before its settings were made; start the service in a fresh process")
        # Short on purpose: a unix socket's path may have about 100 characters, and Ray puts its sockets deep inside.
        parent = "/tmp" if Path("/tmp").is_dir() else None
        self._folder = Path(tempfile.mkdtemp(prefix="roulant-", dir=parent))
        export(local_settings(front, self._folder, secrets.token_hex(32)))

    def _start_ray(self) -> None:
        import ray

        ray.init(
            address="local",
            namespace=f"roulant-{secrets.token_hex(4)}",
            num_cpus=self._cpus(),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=f"{self._folder}/ray",
        )

    def _cpus(self) -> int:
        """At least what the deployments ask for: a small machine runs them more slowly, but it runs them."""
        asked = sum(model.replicas * model.num_cpus for model in self._config.models)
        asked += self._config.ingress.replicas * self._config.ingress.num_cpus
        return max(os.cpu_count() or 1, int(asked) + 1)

    def _start_serve(self) -> None:
        from ray import serve
        from ray.serve.config import HTTPOptions

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(
            proxy_location="HeadOnly",
            http_options=HTTPOptions(host=self._config.http.host, port=self._port),
        )

    def _deploy(self) -> None:
        from ray import serve

        from deployments.app import build_app

        self._deployed = True
        app = build_app(self._config, loopback_only=_is_loopback(self._config.http.host))
        serve.run_many(
            [serve.RunTarget(target=app, name=APP_NAME, route_prefix="/")],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    def _wait_until_ready(self, stop_asked: threading.Event) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if stop_asked.wait(POLL_S):
                raise StartInterruptedError
            self._raise_if_failed()
            if _answers_ok(f"{self.url}/health/ready"):
                return
        raise ServiceError(f"not ready after {START_TIMEOUT_S:.0f} s; Ray's logs are in {self._keep_logs()}")

    def _raise_if_failed(self) -> None:
        from ray import serve
        from ray.serve.schema import ApplicationStatus

        app = serve.status().applications.get(APP_NAME)
        if app is None or app.status is not ApplicationStatus.DEPLOY_FAILED:
            return
        faults = [f"{name}: {each.message}" for name, each in app.deployments.items() if each.message]
        raise ServiceError("\n".join([app.message, *faults, f"Ray's logs are in {self._keep_logs()}"]))

    def _keep_logs(self) -> Path:
        """Save Ray's logs from the clean-up, for whoever wants to know why a start failed."""
        kept = Path(tempfile.mkdtemp(prefix="roulant-logs-"))
        shutil.copytree(f"{self._folder}/ray/session_latest/logs", kept, dirs_exist_ok=True)
        return kept

    def _drain(self, timeout_s: float, hurry: threading.Event) -> None:
        from deployments.app import admission_link

        link = admission_link(self._config)
        deadline = time.monotonic() + timeout_s
        try:
            while link.drain_blocking() > 0 and time.monotonic() < deadline:
                if hurry.wait(POLL_S):
                    return
        except AdmissionUnreachableError as error:
            logger.warning("running requests are not waited for: %s", error)

    def _delete_app(self) -> None:
        """Let the replicas end by themselves, so that the last bytes of the last answers go out.

        Not `serve.shutdown`: the same, but its call outlives the actor that answers it, which Ray reports as an error.
        """
        from ray import serve

        serve.delete(APP_NAME, _blocking=False)
        deadline = time.monotonic() + DELETE_TIMEOUT_S
        while APP_NAME in serve.status().applications and time.monotonic() < deadline:
            time.sleep(POLL_S)


def serve_until_stopped(
    config: RoulantConfig,
    *,
    ready: Callable[[LocalService], None],
    report: Callable[[str], None] = logger.info,
) -> None:
    """Start a service, call `ready` once it is, run until SIGINT or SIGTERM, drain and stop it.

    A signal during the start stops it too; a second one cuts the draining short. Raises ServiceError, and ModelError
    when a model is not on this host. Call it from the main thread of a process that has not imported ray.
    """
    stop_asked, hurry = threading.Event(), threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        (hurry if stop_asked.is_set() else stop_asked).set()

    service = LocalService(config, report=report)
    with _signals(on_signal) as take_signals_back:
        try:
            service.start(stop_asked)
            take_signals_back()
            ready(service)
            stop_asked.wait()
            report("stopping: letting running requests finish")
        except StartInterruptedError:
            report("stopping before the service was ready")
        finally:
            take_signals_back()
            service.stop(hurry=hurry)


@contextmanager
def _signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[Callable[[], None]]:
    """Handle SIGINT and SIGTERM here and put the old handlers back at the end; yields how to retake them from Ray."""

    def take() -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, handler)

    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    take()
    try:
        yield take
    finally:
        for each, old in before.items():
            signal.signal(each, old)


def _is_loopback(host: str) -> bool:
    return host in ("127.0.0.1", "localhost", "::1")


def _stop_if(stop_asked: threading.Event) -> None:
    if stop_asked.is_set():
        raise StartInterruptedError


def _answers_ok(url: str) -> bool:
    try:
        with urlopen(url, timeout=2.0) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def _end_processes(processes: list[psutil.Process]) -> None:
    """Kill those that are still there; psutil does not take a reused process id for the process it knew."""
    _, alive = psutil.wait_procs(processes, timeout=2.0)
    for process in alive:
        logger.warning("process %d outlived the shutdown and is killed", process.pid)
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=2.0)
