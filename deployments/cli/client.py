"""The HTTP side of the commands that talk to a running service."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from pydantic import BaseModel, ValidationError

from deployments.cli.terminal import CliError
from deployments.home import client_settings

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 30.0
STREAM_TIMEOUT_S = 600.0
"""A chat may wait its turn in a queue before the first token comes."""


class ErrorBody(BaseModel):
    """What a service says about an error; other keys are not looked at."""

    message: str


class ErrorAnswer(BaseModel):
    """An error as the body of an answer, or as an event in a stream."""

    error: ErrorBody


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceClient:
    """One service and one key. Every method raises CliError with a message for the person who typed the command."""

    http: httpx.Client
    url: str

    def get(self, path: str) -> httpx.Response:
        """Any answer of the service, whatever its status."""
        with self._told_to_people():
            return self.http.get(path)

    def get_ok(self, path: str) -> httpx.Response:
        """The answer, which is not an error."""
        answer = self.get(path)
        _raise_for_error(answer)
        return answer

    def events(self, path: str, body: Mapping[str, object]) -> Generator[str, None, None]:
        """POST `body` and yield the data of each event but the closing one. Closing the iterator ends the request."""
        timeout = httpx.Timeout(STREAM_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        with self._told_to_people(), self.http.stream("POST", path, json=body, timeout=timeout) as answer:
            if answer.is_error:
                answer.read()
                _raise_for_error(answer)
            for line in answer.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:"):
                    continue
                if data == "[DONE]":
                    return
                if (error := _error_in(data)) is not None:
                    raise CliError(error)
                yield data
        raise CliError("the stream ended before the service said that it was done")

    @contextmanager
    def _told_to_people(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise CliError(f"no service answers at {self.url} ({error}); start one with: roulant serve") from error
        except httpx.InvalidURL as error:
            raise CliError(f"{self.url!r} is not an address: {error}") from error
        except httpx.HTTPError as error:
            raise CliError(f"the connection to {self.url} failed: {type(error).__name__} {error}") from error


@contextmanager
def api_client(url: str | None, key: str | None) -> Iterator[ServiceClient]:
    """A tenant's client: the options, else the environment, else this host's own key. Raises CliError without a key."""
    settings = client_settings()
    with _client(url or settings.url, key or settings.api_key, "ROULANT_API_KEY") as client:
        yield client


@contextmanager
def admin_client(url: str | None, key: str | None) -> Iterator[ServiceClient]:
    """The operator's client; otherwise as `api_client`."""
    settings = client_settings()
    with _client(url or settings.url, key or settings.admin_key, "ROULANT_ADMIN_KEY") as client:
        yield client


@contextmanager
def _client(url: str, key: str | None, variable: str) -> Iterator[ServiceClient]:
    if key is None:
        raise CliError(f"no key: give --key or set {variable} (a service started on this host makes one)")
    headers = {"Authorization": f"Bearer {key}"}
    timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    with httpx.Client(base_url=url, headers=headers, timeout=timeout) as http:
        yield ServiceClient(http=http, url=url)


def _raise_for_error(answer: httpx.Response) -> None:
    if answer.is_error:
        said = _error_in(answer.text) or answer.reason_phrase
        raise CliError(f"the service answered {answer.status_code}: {said}")


def _error_in(data: str) -> str | None:
    try:
        return ErrorAnswer.model_validate_json(data).error.message
    except ValidationError:
        return None
