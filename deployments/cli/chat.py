"""`roulant chat`: a conversation with a model over HTTP, printed as it is written."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict, dataclass, field

from pydantic import BaseModel, ValidationError

from deployments.cli.client import ServiceClient
from deployments.cli.terminal import CliError, printable, say_json, stderr, stdout


class _Delta(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    delta: _Delta = _Delta()
    finish_reason: str | None = None


class _Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class _Chunk(BaseModel):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn, as the service reads it."""

    role: str
    content: str


@dataclass(slots=True, kw_only=True)
class Conversation:
    """The messages so far. `finish_reason` and `usage` are those of the last whole answer."""

    client: ServiceClient
    model: str
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    messages: list[Message] = field(init=False)
    finish_reason: str | None = field(default=None, init=False)
    usage: _Usage | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.messages = [Message(role="system", content=self.system)] if self.system is not None else []

    def ask(self, text: str) -> Generator[str, None, None]:
        """Say `text` and yield the answer in pieces. Closed early, what was heard is kept; after CliError, nothing."""
        self.messages.append(Message(role="user", content=text))
        heard: list[str] = []
        try:
            for piece in self._pieces():
                heard.append(piece)
                yield piece
        except CliError:
            heard.clear()
            raise
        finally:
            if heard:
                self.messages.append(Message(role="assistant", content="".join(heard)))
            else:
                self.messages.pop()

    def _pieces(self) -> Generator[str, None, None]:
        body: dict[str, object] = {
            "model": self.model,
            "messages": [asdict(message) for message in self.messages],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        options = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        body |= {name: value for name, value in options.items() if value is not None}
        with closing(self.client.events("/v1/chat/completions", body)) as events:
            for data in events:
                try:
                    chunk = _Chunk.model_validate_json(data)
                except ValidationError as error:
                    raise CliError(f"the service sent something that is no chat chunk: {data[:200]}") from error
                self.usage = chunk.usage or self.usage
                for choice in chunk.choices:
                    self.finish_reason = choice.finish_reason or self.finish_reason
                    if choice.delta.content:
                        yield choice.delta.content


def say_once(conversation: Conversation, message: str, *, as_json: bool) -> None:
    """One question, one answer on stdout. Raises CliError."""
    if not as_json:
        _print_answer(conversation, message)
        return
    text = "".join(conversation.ask(message))
    usage = conversation.usage.model_dump() if conversation.usage is not None else None
    say_json({"text": text, "finish_reason": conversation.finish_reason, "usage": usage})


def converse(conversation: Conversation) -> None:
    """Questions from the terminal until end of file or an empty line. An error ends one answer, not the whole."""
    stderr().print("Ctrl-C stops an answer; Ctrl-D or an empty line ends the conversation.", style="dim")
    while True:
        try:
            question = stdout().input("[bold]> [/bold]")
        except (EOFError, KeyboardInterrupt):
            return
        if not question.strip():
            return
        try:
            _print_answer(conversation, question)
        except CliError as error:
            stderr().print(str(error), style="red", markup=False, soft_wrap=True)


def _print_answer(conversation: Conversation, question: str) -> None:
    console = stdout()
    with closing(conversation.ask(question)) as pieces:
        try:
            for piece in pieces:
                console.print(printable(piece), end="", markup=False, soft_wrap=True)
        except KeyboardInterrupt:
            console.print(" [stopped]", style="dim", markup=False, end="")
    console.print()
