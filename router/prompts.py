"""Prompts as tokens, and as the text that an echo repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from engine.api import TextCodec
from router.errors import invalid
from router.fields import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """The prompt's text, and for each of its tokens where in it the token begins, in characters."""

    text: str
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """One prompt. `echo` None: the answer does not repeat it."""

    token_ids: tuple[int, ...]
    echo: Echo | None = None


def encode_prompt(prompt: Prompt, codec: TextCodec, *, echo: bool) -> EncodedPrompt:
    """CPU work. Raises ApiError for a token id that does not exist."""
    if isinstance(prompt, str):
        token_ids = codec.encode(prompt)
    else:
        check_vocabulary(prompt, codec, "prompt")
        token_ids = prompt
    return EncodedPrompt(token_ids=tuple(token_ids), echo=_echo(prompt, token_ids, codec) if echo else None)


def _echo(prompt: Prompt, token_ids: list[int], codec: TextCodec) -> Echo:
    """A text is repeated as it came, token ids as the text that they stand for, without special tokens.

    What the tokenizer puts in front of a text (a beginning-of-sequence token) is at its beginning, 0.
    """
    is_text = isinstance(prompt, str)
    pieces = codec.pieces(token_ids, skip_special=not is_text)
    spelled = "".join(pieces)
    text = prompt if isinstance(prompt, str) else spelled
    lead = len(spelled) - len(text)
    starts = list(accumulate(map(len, pieces), initial=-lead))[:-1]
    return Echo(text=text, offsets=tuple(max(0, start) for start in starts))


def check_vocabulary(token_ids: Sequence[int], codec: TextCodec, param: str) -> None:
    """Raise ApiError if a token id does not exist; the model would use it as an index."""
    worst = max(token_ids, default=0)
    if worst >= codec.vocab_size:
        raise invalid(param, f"token id {worst} does not exist; the vocabulary has {codec.vocab_size} tokens")
