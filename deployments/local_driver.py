"""The Ray driver of a local service, as a process of its own: see `deployments.local`, which starts it.

``python -m deployments.local_driver EVENTS_FD FOLDER`` reads one line from stdin, the configuration in JSON, brings the
service up, and says on EVENTS_FD what it does, one `DriverEvent` in JSON on a line. It stops when stdin ends, whether
the parent closed it or is dead.
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
import traceback
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import ray
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.schema import ApplicationStatus

from deployments.admission_wire import AdmissionUnreachableError
from deployments.app import admission_link, build_app
from deployments.config import RoulantConfig
from deployments.local import local_url
from deployments.local_events import DriverEvent, EventKind
from deployments.logs import log_to_stderr

logger = logging.getLogger(__name__)

APP_NAME = "roulant"
START_TIMEOUT_S = 300.0
"""For the application to be ready once Ray runs; large models take their time to load."""
DRAIN_TIMEOUT_S = 10.0
DELETE_TIMEOUT_S = 5.0
POLL_S = 0.1
OBJECT_STORE_BYTES = 100 * 2**20
"""Requests and tokens do not pass through the object store; this is about the least that Ray accepts."""


class StartError(Exception):
    """The service did not come up; the message says why."""


class Driver:
    """Brings one service up and down. `events_fd` is written to; `folder` holds what Ray writes."""

    def __init__(self, config: RoulantConfig, folder: Path, events_fd: int) -> None:
        self._config = config
        self._folder = folder
        self._events_fd = events_fd
        self._stop_asked = threading.Event()
        threading.Thread(target=self._watch_stdin, name="stdin", daemon=True).start()

    def run(self) -> None:
        """From start to stop. Raises StartError."""
        self._say(EventKind.STEP, "starting Ray")
        self._start_ray()
        self._say(EventKind.STEP, "starting Ray Serve")
        self._start_serve()
        self._say(EventKind.STEP, "starting the models and the HTTP front")
        self._deploy()
        self._wait_until_ready()
        self._say(EventKind.READY)
        self._stop_asked.wait()
        self._drain()
        self._delete_app()
        ray.shutdown()
        # The parent does it too, unless it is dead.
        shutil.rmtree(self._folder, ignore_errors=True)

    def fail(self, message: str) -> None:
        """Tell the parent why there will be no service."""
        self._say(EventKind.FAILED, message)

    def _say(self, kind: EventKind, text: str = "") -> None:
        os.write(self._events_fd, DriverEvent(kind=kind, text=text).model_dump_json().encode() + b"\n")

    def _watch_stdin(self) -> None:
        while sys.stdin.readline():
            pass
        self._stop_asked.set()

    def _start_ray(self) -> None:
        ray.init(
            address="local",
            num_cpus=self._cpus(),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
            object_store_memory=OBJECT_STORE_BYTES,
            namespace=f"roulant-{secrets.token_hex(4)}",
            _temp_dir=str(self._folder / "ray"),
        )

    def _cpus(self) -> int:
        """At least what the deployments ask for: a small machine runs them more slowly, but it runs them."""
        asked = sum(model.replicas * model.num_cpus for model in self._config.models)
        asked += self._config.ingress.replicas * self._config.ingress.num_cpus
        return max(os.cpu_count() or 1, int(asked) + 1)

    def _start_serve(self) -> None:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        http = self._config.http
        serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host=http.host, port=http.port))

    def _deploy(self) -> None:
        app = build_app(self._config, loopback_only=is_loopback(self._config.http.host))
        serve.run_many(
            [serve.RunTarget(target=app, name=APP_NAME, route_prefix="/")],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            self._raise_if_failed()
            if _answers_ok(f"{local_url(self._config.http)}/health/ready"):
                return
            if self._stop_asked.wait(POLL_S):
                raise StartError("asked to stop before it was ready")
        raise StartError(f"not ready after {START_TIMEOUT_S:.0f} s; Ray's logs are in {self._keep_logs()}")

    def _raise_if_failed(self) -> None:
        app = serve.status().applications.get(APP_NAME)
        if app is None or app.status is not ApplicationStatus.DEPLOY_FAILED:
            return
        # A message is a traceback of tracebacks; its last line says what was wrong, and the logs have the rest.
        faults = [
            f"{name}: {each.message.strip().splitlines()[-1]}" for name, each in app.deployments.items() if each.message
        ]
        raise StartError("\n".join([*(faults or [app.message]), f"Ray's logs are in {self._keep_logs()}"]))

    def _keep_logs(self) -> Path:
        """Save Ray's logs from the clean-up, for whoever wants to know why a start failed."""
        kept = Path(tempfile.mkdtemp(prefix="roulant-logs-"))
        shutil.copytree(self._folder / "ray" / "session_latest" / "logs", kept, dirs_exist_ok=True)
        return kept

    def _drain(self) -> None:
        link = admission_link(self._config)
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        try:
            while link.drain_blocking() > 0 and time.monotonic() < deadline:
                time.sleep(POLL_S)
        except AdmissionUnreachableError as error:
            logger.warning("running requests are not waited for: %s", error)

    def _delete_app(self) -> None:
        """Let the replicas end by themselves, so that the last bytes of the last answers go out.

        Not `serve.shutdown`, whose call outlives the actor that answers it, which Ray reports as an error.
        """
        serve.delete(APP_NAME, _blocking=False)
        deadline = time.monotonic() + DELETE_TIMEOUT_S
        while APP_NAME in serve.status().applications and time.monotonic() < deadline:
            time.sleep(POLL_S)


def is_loopback(host: str) -> bool:
    """Whether a service on `host` is reachable from this machine only."""
    return host in ("127.0.0.1", "localhost", "::1")


def _answers_ok(url: str) -> bool:
    try:
        with urlopen(url, timeout=5.0) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def main() -> None:
    """See the module."""
    # The parent decides when to stop; a signal to its group must not do it behind its back.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log_to_stderr()
    events_fd, folder = int(sys.argv[1]), Path(sys.argv[2])
    driver = Driver(RoulantConfig.model_validate_json(sys.stdin.readline()), folder, events_fd)
    try:
        driver.run()
    except StartError as error:
        driver.fail(str(error))
    except Exception:
        driver.fail(traceback.format_exc())


if __name__ == "__main__":
    main()
