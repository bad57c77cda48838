from __future__ import annotations

import logging
import subprocess
from pathlib import Path

import pytest

from deployments.serve_mode import FrontKind, choose_front, free_ports, local_settings

CONFIG = """
frontend stats
    bind :9101
frontend http
    bind 127.0.0.1:8000
listen more_stats
  bind *:8404
"""


@pytest.fixture
def printing_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for HAProxy that prints its arguments and the configuration it is given."""
    binary = tmp_path / "binary with a space"
    binary.write_text('#!/bin/sh\necho "$@"\ncat "$3"\n')
    binary.chmod(0o700)
    monkeypatch.setattr("deployments.serve_mode.haproxy_binary", lambda: str(binary))
    return binary


def test_haproxys_open_listeners_become_sockets_in_the_services_folder(tmp_path: Path, printing_binary: Path) -> None:
    folder = tmp_path / "service"
    folder.mkdir()
    config = folder / "haproxy.cfg"
    config.write_text(CONFIG)
    wrapper = local_settings(FrontKind.HAPROXY, folder, "token")["RAY_SERVE_HAPROXY_BINARY_PATH"]

    said = subprocess.run([wrapper, "-db", "-f", config], check=True, capture_output=True, text=True).stdout

    assert said.splitlines()[0] == f"-db -f {config}"
    assert [line.strip() for line in said.splitlines() if "bind" in line] == [
        f"bind unix@{folder}/9101.sock mode 600",
        "bind 127.0.0.1:8000",
        f"bind unix@{folder}/8404.sock mode 600",
    ]


def test_two_services_share_no_file_and_no_port(tmp_path: Path, printing_binary: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    one, two = (local_settings(FrontKind.HAPROXY, folder, folder.name) for folder in folders)

    shared = {name for name in one if one[name] == two[name] and not name.endswith("_IMPORT_PATH")}
    assert not any(name.endswith(("_PORT", "_PATH", "_LOC", "_BASE", "_FILE", "_TOKEN")) for name in shared)


def test_without_haproxy_serves_own_proxy_listens(tmp_path: Path) -> None:
    settings = local_settings(FrontKind.SERVE_PROXY, tmp_path, "token")

    assert settings["RAY_SERVE_ENABLE_DIRECT_INGRESS"] == "0"
    assert not any("HAPROXY" in name or "HA_PROXY" in name for name in settings)


def test_a_host_that_cannot_run_haproxy_is_told_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")

    with caplog.at_level(logging.WARNING):
        assert choose_front() is FrontKind.SERVE_PROXY

    assert caplog.messages == ["no HAProxy for Darwin arm64: using Ray Serve's own proxy"]


def test_free_ports_are_different() -> None:
    assert len(set(free_ports(20))) == 20
