"""How each endpoint words log-probabilities.

``token`` and the like are names for people. Programs take ``bytes``: a character may be spread over several tokens, so
the names do not add up to the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, Field

from router.scores import PositionScores, ScoredToken

Scores = Sequence[PositionScores]


class TokenLogprob(BaseModel):
    """A token of a chat."""

    token: str
    logprob: float | None
    bytes: list[int]


class PositionLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """A chat's."""

    content: list[PositionLogprob]
    refusal: None = None

    @classmethod
    def of(cls, scores: Scores) -> ChatLogprobs:
        return cls(
            content=[
                PositionLogprob(
                    token=position.chosen.text,
                    logprob=position.chosen.logprob,
                    bytes=list(position.chosen.raw),
                    top_logprobs=[
                        TokenLogprob(token=token.text, logprob=token.logprob, bytes=list(token.raw))
                        for token in position.top
                    ],
                )
                for position in scores
            ]
        )


class TextLogprobs(BaseModel):
    """A completion's. `top_logprobs` has the token that stands there too, if it is not among the likeliest."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    @classmethod
    def of(cls, scores: Scores) -> TextLogprobs:
        return cls(
            tokens=[position.chosen.text for position in scores],
            token_logprobs=[position.chosen.logprob for position in scores],
            top_logprobs=[_by_text(position) for position in scores],
            text_offset=[position.text_offset for position in scores],
        )


def _by_text(position: PositionScores) -> dict[str, float] | None:
    """Where two tokens look the same, the likelier one stands for both."""
    if position.chosen.logprob is None:
        return None
    found: dict[str, float] = {}
    for token in (*position.top, position.chosen):
        if token.logprob is not None:
            found.setdefault(token.text, token.logprob)
    return found


class PromptTokenLogprob(BaseModel):
    """vLLM's form. `rank` counts from 1; None: it is not among the likeliest that were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = Annotated[
    list[dict[str, PromptTokenLogprob] | None] | None, Field(exclude_if=lambda value: value is None)
]
"""One entry for each token of the prompt, by token id: the token that stands there, and the likeliest. The first is
null. The key is left out of answers to clients that did not ask."""


def prompt_logprobs(scores: Scores) -> PromptLogprobs:
    """None if there are none."""
    return [_by_id(position) for position in scores] or None


def _by_id(position: PositionScores) -> dict[str, PromptTokenLogprob] | None:
    if position.chosen.logprob is None:
        return None
    ranked: dict[str, PromptTokenLogprob] = {}
    for rank, token in enumerate(position.top, 1):
        ranked[str(token.token_id)] = _prompt_token(token, rank)
    ranked.setdefault(str(position.chosen.token_id), _prompt_token(position.chosen, None))
    return ranked


def _prompt_token(token: ScoredToken, rank: int | None) -> PromptTokenLogprob:
    assert token.logprob is not None
    return PromptTokenLogprob(logprob=token.logprob, rank=rank, decoded_token=token.text)
