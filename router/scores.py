"""Log-probabilities with the names of their tokens: what answers show of them, before either endpoint words it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.api import Logprob, PositionLogprobs, TextCodec

LOWEST_LOGPROB = -9999.0
"""OpenAI's word for impossible; JSON has no infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredToken:
    """One token. `raw` are its true bytes, which may be a part of a character; `text` is readable whatever they are.

    `logprob` None: the first token of a prompt, before which nothing stands.
    """

    token_id: int
    text: str
    raw: bytes
    logprob: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionScores:
    """The token that stands at a position, and the likeliest there, best first.

    `text_offset`: where the token begins in the text of the answer, in characters.
    """

    chosen: ScoredToken
    top: tuple[ScoredToken, ...]
    text_offset: int


class Scorer:
    """Names tokens."""

    def __init__(self, codec: TextCodec, num_top: int) -> None:
        self._codec = codec
        self._num_top = num_top

    def scores(self, position: PositionLogprobs, text_offset: int) -> PositionScores:
        """The scores of one position; of the likeliest tokens `num_top` are shown."""
        top = tuple(self._scored(each) for each in position.top[: self._num_top])
        return PositionScores(chosen=self._scored(position.chosen), top=top, text_offset=text_offset)

    def first_of_prompt(self, token_id: int) -> PositionScores:
        """What can be said of a token that nothing stands before."""
        return PositionScores(chosen=self._token(token_id, None), top=(), text_offset=0)

    def _scored(self, logprob: Logprob) -> ScoredToken:
        return self._token(logprob.token_id, max(LOWEST_LOGPROB, logprob.logprob))

    def _token(self, token_id: int, logprob: float | None) -> ScoredToken:
        raw = self._codec.token_bytes(token_id)
        return ScoredToken(token_id=token_id, text=readable(raw), raw=raw, logprob=logprob)


def readable(raw: bytes) -> str:
    """A token's text; where its bytes are no whole characters, OpenAI's notation of them: ``bytes:\\xe2\\x82``."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
