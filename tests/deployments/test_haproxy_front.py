from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.haproxy_front import write_wrapper
from deployments.serve_mode import free_ports, haproxy_binary

TEMPLATE = """
defaults
    mode http
    timeout connect 5s
    timeout client 5s
    timeout server 5s
    errorfile 503 {folder}/serves-own-500.http
frontend prometheus
    bind :9101
    http-request use-service prometheus-exporter
frontend http_frontend
    bind fd@{fd}
    http-request return status 200 content-type text/plain string "success" if {{ path -i /-/healthz }}
    use_backend nobody if {{ path_beg / }}
backend nobody
    server gone 127.0.0.1:{nobody}
"""


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Where a real HAProxy listens that has no server to hand requests to."""
    binary = haproxy_binary()
    assert binary is not None, "these tests need the HAProxy that comes with Ray Serve"
    wrapper = write_wrapper(tmp_path, binary)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        os.set_inheritable(listening.fileno(), True)
        config = tmp_path / "haproxy.cfg"
        config.write_text(TEMPLATE.format(folder=tmp_path, fd=listening.fileno(), nobody=free_ports(1)[0]))
        process = subprocess.Popen([wrapper, "-db", "-f", config], pass_fds=[listening.fileno()])
        try:
            yield listening.getsockname()[1]
        finally:
            process.terminate()
            process.wait()


def answer_to(port: int, request: bytes) -> http.client.HTTPResponse:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(request)
        response = http.client.HTTPResponse(connection, method="GET")
        response.begin()
        response.body = response.read()  # type: ignore[attr-defined]
        return response


def code_of(response: http.client.HTTPResponse) -> str:
    assert response.headers.get_all("content-type") == ["application/json"]
    error = json.loads(response.body)["error"]  # type: ignore[attr-defined]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["code"])


def test_without_a_server_a_request_is_told_to_come_again(port: int) -> None:
    response = answer_to(port, b"GET /v1/models HTTP/1.1\r\n\r\n")

    assert (response.status, code_of(response)) == (503, "not_ready")
    assert response.headers["retry-after"] == "3"
    assert len(response.headers.get_all("x-request-id") or []) == 1


@pytest.mark.parametrize(
    ("request_line", "status", "code"),
    [
        (b"FOO /v1/models", 405, "method_not_allowed"),
        (b"get /v1/models", 405, "method_not_allowed"),
        (b"GET /-/healthz", 404, "route_not_found"),
        (b"GET *", 404, "route_not_found"),
    ],
)
def test_what_must_not_pass_is_refused_in_the_routers_words(
    port: int, request_line: bytes, status: int, code: str
) -> None:
    response = answer_to(port, request_line + b" HTTP/1.1\r\n\r\n")

    assert (response.status, code_of(response)) == (status, code)
    assert len(response.headers.get_all("x-request-id") or []) == 1


def test_a_configuration_is_changed_once_however_often_haproxy_starts_on_it(tmp_path: Path) -> None:
    wrapper = write_wrapper(tmp_path, "/bin/true")
    config = tmp_path / "haproxy.cfg"
    config.write_text(TEMPLATE.format(folder=tmp_path, fd=3, nobody=4))

    subprocess.run([wrapper, "-f", config], check=True)
    once = config.read_text()
    subprocess.run([wrapper, "-f", config], check=True)

    assert once == config.read_text()
    assert "serves-own-500" not in once
