"""Reading event streams as strictly as they were promised."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(slots=True)
class Choice:
    """One output of a stream."""

    text: str = ""
    finish_reason: str | None = None


@dataclass(slots=True, kw_only=True)
class Stream:
    """What came: the id, the text and the end of each output, when each chunk came, and what it cost."""

    id: str | None = None
    choices: dict[int, Choice] = field(default_factory=dict)
    at: list[float] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False

    @property
    def text(self) -> str:
        """Of the only output."""
        (choice,) = self.choices.values()
        return choice.text


Watch = Callable[[Stream], None]


async def read(http: httpx.AsyncClient, body: dict[str, Any], watch: Watch | None = None) -> Stream:
    """The stream that `body` asks for, to its end; `watch` sees it grow. Asserts framing, and that ends are final."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    stream = Stream()
    heads: set[tuple[Any, ...]] = set()
    async with http.stream("POST", path, json=body | {"stream": True}) as answer:
        if answer.status_code != 200:
            raise AssertionError((await answer.aread()).decode())
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for data in _events(answer):
            assert not stream.done
            if data == "[DONE]":
                stream.done = True
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                stream.error = chunk["error"]
                continue
            assert stream.error is None
            heads.add((chunk["id"], chunk["object"], chunk["created"], chunk["model"]))
            stream.id = chunk["id"]
            stream.at.append(time.monotonic())
            stream.usage = chunk.get("usage")
            for choice in chunk["choices"]:
                _add(stream, choice)
            if watch is not None:
                watch(stream)
    assert len(heads) <= 1
    return stream


async def _events(answer: httpx.Response) -> AsyncIterator[str]:
    """The data of each event; every one is a line and a blank line."""
    blank = True
    async for line in answer.aiter_lines():
        if not blank:
            assert line == ""
            blank = True
        elif line.startswith(":"):
            continue
        else:
            assert line.startswith("data: ")
            blank = False
            yield line.removeprefix("data: ")
    assert blank


def _add(stream: Stream, delta: dict[str, Any]) -> None:
    choice = stream.choices.setdefault(delta["index"], Choice())
    text = delta["text"] if "text" in delta else delta["delta"].get("content") or ""
    assert choice.finish_reason is None
    choice.text += text
    choice.finish_reason = delta["finish_reason"]
