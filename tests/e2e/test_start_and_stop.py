"""`roulant serve` as people use it: what it says, where it listens, and that it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from deployments.config import load_config
from deployments.local import LocalService, ServiceError, session_processes
from deployments.serve_mode import free_ports
from tests.e2e.conftest import LOCAL_CONFIG, on_any_port, simulated_model

pytestmark = [pytest.mark.e2e, pytest.mark.model]

CONFIG = """
models: [{id: simulated, model: smollm2-135m-instruct, num_cpus: 0, engine: {executor: simulated, num_kv_blocks: 600}}]
tenants: [{id: local}]
keys: [{tenant: local, file: local, env: ROULANT_API_KEY}]
"""


@contextmanager
def serving(config: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """`roulant serve`; whatever a test does, it is asked to stop and waited for."""
    command = [sys.executable, "-m", "deployments.cli", "serve", str(config), "--port", str(port)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"ROULANT_API_KEY": "rk-start-and-stop"}
    ) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def driver_of(process: subprocess.Popen[str]) -> psutil.Process | None:
    """The process in which Ray's driver runs, once there is one."""
    for child in psutil.Process(process.pid).children():
        try:
            if "deployments.local_driver" in child.cmdline():
                return child
        except psutil.NoSuchProcess:
            continue
    return None


def listening(processes: list[psutil.Process]) -> set[tuple[str, int]]:
    connections = [each for process in processes for each in process.net_connections(kind="inet")]
    return {(each.laddr.ip, each.laddr.port) for each in connections if each.status == psutil.CONN_LISTEN}


def test_serve_listens_on_loopback_only_and_leaves_nothing_behind(default_model: str, tmp_path: Path) -> None:
    config = tmp_path / "simulated.yaml"
    config.write_text(CONFIG)
    (port,) = free_ports(1)

    with serving(config, port) as process:
        assert process.stdout is not None
        lines = list(iter(process.stdout.readline, f"ready: http://127.0.0.1:{port}\n"))
        started = psutil.Process(process.pid).children(recursive=True)
        sockets = listening(started)
        driver = driver_of(process)
        assert driver is not None
        folder = Path(driver.cmdline()[-1])
        answer = httpx.post(
            f"http://127.0.0.1:{port}/v1/completions",
            headers={"Authorization": "Bearer rk-start-and-stop"},
            json={"model": "simulated", "prompt": "Hello", "max_tokens": 3, "ignore_eos": True},
            timeout=30.0,
        )
        process.send_signal(signal.SIGINT)
        exit_status = process.wait()

    assert any("curl" in line for line in lines)
    assert answer.json()["usage"]["completion_tokens"] == 3
    assert ("127.0.0.1", port) in sockets
    assert {ip for ip, _ in sockets} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert exit_status == 0
    assert [each for each in started if is_alive(each)] == []
    assert not folder.exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_a_start_that_is_interrupted_leaves_nothing_behind(default_model: str, tmp_path: Path) -> None:
    config = tmp_path / "simulated.yaml"
    config.write_text(CONFIG)
    (port,) = free_ports(1)

    with serving(config, port) as process:
        while (driver := driver_of(process)) is None:
            assert process.poll() is None
        while not driver.children():  # Ray's first process
            assert process.poll() is None
        started = [driver, *driver.children(recursive=True)]
        process.send_signal(signal.SIGINT)
        exit_status = process.wait()

    assert exit_status == 0
    assert session_processes(driver.pid) == []
    assert [each for each in started if is_alive(each)] == []


def test_a_port_that_is_taken_is_said_before_anything_starts(default_model: str) -> None:
    config = on_any_port(load_config(LOCAL_CONFIG), simulated_model())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        http = config.http.model_copy(update={"port": taken.getsockname()[1]})
        service = LocalService(config.model_copy(update={"http": http}))

        with pytest.raises(ServiceError, match="cannot listen on 127"):
            service.start()

    assert service.session_id is None
