"""One choice as its client sees it: text, log-probabilities, an end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.api import Usage
from engine.api import FinishReason, PositionLogprobs, TextCodec, TextStream, TokenDelta
from router.errors import ApiError, Fault
from router.prompts import EncodedPrompt
from router.schemas import GenerationRequest
from router.scores import PositionScores, Scorer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """Text of the choice with OpenAI's `index` since its last event, and the `scores` of the tokens up to there.

    The choice's last event has the finish reason (STOP or LENGTH), and `prompt_scores` if the client asked for the
    prompt's own. The last event of all choices has the exact usage.
    """

    index: int = 0
    text: str
    scores: tuple[PositionScores, ...] = ()
    finish_reason: FinishReason | None = None
    prompt_scores: tuple[PositionScores, ...] = ()
    usage: Usage | None = None


class ChoiceOutput:
    """Tokens in, text out. `begin`, then `take` until a delta has a finish reason."""

    def __init__(self, index: int, request: GenerationRequest, prompt: EncodedPrompt, codec: TextCodec) -> None:
        self._index = index
        self._request = request
        self._prompt = prompt
        self._codec = codec
        self._text: TextStream = codec.stream(
            request.stop, request.stop_token_ids or (), request.min_tokens, prompt.token_ids
        )
        self._scorer = None if request.num_logprobs is None else Scorer(codec, request.num_logprobs)
        self._opening = "" if prompt.echo is None else prompt.echo.text
        self._output_at = len(self._opening)
        self._scores: list[PositionScores] = []
        """Of tokens whose text has not gone out yet."""
        self._prompt_scores: tuple[PositionScores, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Generated tokens up to the one that ended the text; an end-of-sequence token counts."""
        return self._text.num_tokens

    def begin(self, prompt_logprobs: Sequence[PositionLogprobs]) -> None:
        """Hear what the engine says of the prompt. It is part of the text if it is echoed."""
        if self._scorer is not None and self._request.scores_prompt:
            self._scores.extend(self._of_prompt(self._scorer, prompt_logprobs))
        if self._request.prompt_logprobs is not None:
            scorer = Scorer(self._codec, self._request.prompt_logprobs)
            self._prompt_scores = tuple(self._of_prompt(scorer, prompt_logprobs))

    def take(self, delta: TokenDelta) -> TextDelta | None:
        """What the client sees of a delta, None: nothing yet. Raises TimeoutError; ApiError if the engine failed."""
        text = self._opening + self._push(delta)
        self._opening = ""
        if self._text.stopped or delta.finish_reason is not None:
            return self._end(text, delta.finish_reason)
        return TextDelta(index=self._index, text=text, scores=self._release()) if text else None

    def count(self, delta: TokenDelta) -> None:
        """Take tokens that nobody will see, but that were generated."""
        self._text.push(delta.token_ids)

    def _push(self, delta: TokenDelta) -> str:
        if self._scorer is None:
            return self._text.push(delta.token_ids)
        text = ""
        for token_id, position in zip(delta.token_ids, delta.logprobs, strict=True):
            if self._text.stopped:
                break
            self._scores.append(self._scorer.scores(position, self._output_at + self._text.num_chars))
            text += self._text.push((token_id,))
        return text

    def _end(self, text: str, reason: FinishReason | None) -> TextDelta:
        if not self._text.stopped:
            text += self._text.flush()
            if reason is FinishReason.STOP:
                del self._scores[-1:]  # the token that ends a sequence is no part of the text
        if self._text.stopped:
            reason = FinishReason.STOP
        match reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                return TextDelta(
                    index=self._index,
                    text=text,
                    scores=self._release(),
                    finish_reason=reason,
                    prompt_scores=self._prompt_scores,
                )
            case FinishReason.DEADLINE:
                raise TimeoutError
        raise ApiError(Fault.ENGINE_FAILED, "the engine failed while it generated this answer")

    def _release(self) -> tuple[PositionScores, ...]:
        scores = tuple(self._scores)
        self._scores.clear()
        return scores

    def _of_prompt(self, scorer: Scorer, logprobs: Sequence[PositionLogprobs]) -> list[PositionScores]:
        """The prompt's tokens, of which the first has no log-probability."""
        token_ids, echo = self._prompt.token_ids, self._prompt.echo
        offsets = (0,) * len(token_ids) if echo is None else echo.offsets
        rest = zip(logprobs, offsets[1:], strict=True)
        return [scorer.first_of_prompt(token_ids[0]), *(scorer.scores(each, offset) for each, offset in rest)]
