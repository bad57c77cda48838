"""Keeps a replica's gRPC port on this host.

Ray Serve 2.60 opens, in every replica and every mode, a server for calls between deployments on ``[::]``, and has no
setting for it. Callers on the same host reach it at 127.0.0.1. A deployment's constructor runs before its replica opens
that port, so it can name another host for it; this module is the only place that reaches into Ray's private parts.
"""

from __future__ import annotations

_OPENS_PORT = "add_port_to_grpc_server"


def serve_on_loopback_only() -> None:
    """Make this process open its replica port on 127.0.0.1. Call in a deployment's constructor.

    Raises RuntimeError if this Ray version opens the port in another way: better no service than an open port.
    """
    from ray.serve._private import replica as serve_replica

    original = getattr(serve_replica, _OPENS_PORT, None)
    if original is None:
        raise RuntimeError("this version of Ray Serve opens replica ports in a way that cannot be kept to this host")

    def add_loopback_port(server: object, _address: str) -> int:
        port: int = original(server, "127.0.0.1:0")
        return port

    setattr(serve_replica, _OPENS_PORT, add_loopback_port)
