"""A service as the command line sees one: canned answers on a real socket, and what was asked of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@dataclass(frozen=True, slots=True, kw_only=True)
class Canned:
    """What to answer."""

    status: int = 200
    body: str = "{}"
    content_type: str = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request that came."""

    path: str
    key: str | None
    body: Mapping[str, object]


@dataclass(slots=True, kw_only=True)
class FakeService:
    """Answers by path; 404 for a path without an answer."""

    url: str
    answers: dict[str, Canned] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)


def events(*data: object, done: bool = True) -> Canned:
    """An event stream of JSON values."""
    lines = [f"data: {json.dumps(each)}\n\n" for each in data]
    return Canned(body="".join([*lines, "data: [DONE]\n\n" if done else ""]), content_type="text/event-stream")


def error(status: int, message: str) -> Canned:
    """An error in the service's format."""
    return Canned(
        status=status, body=json.dumps({"error": {"message": message, "type": "t", "param": None, "code": "c"}})
    )


@contextmanager
def fake_service() -> Iterator[FakeService]:
    """Serve on a free port until the block is left."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(b"{}")

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers["Content-Length"])))

        def _answer(self, body: bytes) -> None:
            service.asked.append(Asked(path=self.path, key=self.headers["Authorization"], body=json.loads(body)))
            canned = service.answers.get(self.path, error(404, f"no route {self.path}"))
            self.send_response(canned.status)
            self.send_header("Content-Type", canned.content_type)
            self.end_headers()
            self.wfile.write(canned.body.encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name it has
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        service = FakeService(url=f"http://127.0.0.1:{server.server_port}")
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield service
        finally:
            server.shutdown()
            thread.join()
