"""Text to tokens and back: chat templates, incremental detokenisation, stop strings. No torch.

Incremental detokenisation. One character may take several tokens, and what a token decodes to can depend on the one
before it. So text is never the sum of single tokens: two marks walk over the ids, ``prefix`` and ``read``. The text of
``ids[prefix:]`` minus the text of ``ids[prefix:read]`` is what the ids after ``read`` add. While that ends in U+FFFD
the last character may be incomplete, and nothing is said. Otherwise it is emitted and both marks move on, so that the
window stays a few tokens long however long the text grows.

The prompt comes before the output. It may end in the middle of a character, if it was given as token ids; then the
output begins with that character, whole, and with nothing else of the prompt.

Stop strings. Text may be sent only if it can no longer turn out to be the beginning of a stop string: the longest
suffix of the unsent text that is a prefix of some stop string is held back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

REPLACEMENT = "\ufffd"
BYTES_OF_A_CHARACTER = 4
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""How SentencePiece vocabularies write a token that is one byte."""


class ChatTemplateError(ValueError):
    """The model's chat template refused the conversation, or the model has none. The message is the template's own."""


class TextCodec:
    """One model's tokenizer and chat template. Every method is pure CPU work and safe to call from several threads.

    `max_chars_per_token` bounds from below how many tokens a text has, without cutting it up; None if unknown.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self.eos_token_ids = eos_token_ids
        self.vocab_size = self._backend.get_vocab_size(with_added_tokens=True)
        # A normaliser may shorten a text before it is cut into tokens; then there is no bound.
        unbounded = self._backend.normalizer is not None
        self.max_chars_per_token = None if unbounded else max(map(len, self._backend.get_vocab()))
        self._added: dict[int, str] = {
            token_id: token.content for token_id, token in self._backend.get_added_tokens_decoder().items()
        }
        self._is_byte_level = b'"ByteLevel"' in self._backend.decoder.__getstate__()

    @classmethod
    def load(cls, model_dir: str | Path) -> Self:
        """Read `tokenizer.json` and its configuration from a model folder; raises OSError if there is none."""
        from transformers import PreTrainedTokenizerFast

        if not (Path(model_dir) / "tokenizer.json").exists():
            raise FileNotFoundError(f"{model_dir} has no tokenizer.json")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(model_dir))
        eos = set(eos_token_ids(Path(model_dir)))
        if tokenizer.eos_token_id is not None:
            eos.add(tokenizer.eos_token_id)
        return cls(tokenizer, frozenset(eos))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with whatever special tokens the tokenizer puts around a plain text."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, ending where the assistant is to speak. Raises ChatTemplateError."""
        from jinja2.exceptions import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise ChatTemplateError(f"the model's chat template refused the messages: {error}") from error
        # The template has written the special tokens itself.
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # Of the tokenizer's ways to encode, the batched ones let other Python threads run meanwhile.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `token_ids`, without special tokens unless they are asked for."""
        return str(self._backend.decode(token_ids, skip_special_tokens=skip_special))

    def pieces(self, token_ids: Sequence[int], *, skip_special: bool = True) -> list[str]:
        """What each token adds to the text. A character belongs to the token that completes it; one that stays
        incomplete at the end is left out."""
        detokeniser = Detokeniser(self, frozenset(), skip_special=skip_special)
        pieces = [detokeniser.push((token_id,)) for token_id in token_ids]
        rest = detokeniser.flush()
        if rest:
            pieces[-1] += rest[: len(rest) - self.num_replacements(self.incomplete_end(token_ids))]
        return pieces

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, which may be a part of a character; those of its name if it is special."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._backend.id_to_token(token_id)
        if token is None:  # vocabularies may have holes
            return b""
        if self._is_byte_level:
            return b"".join(bytes_of_char().get(char, char.encode()) for char in token)
        byte = BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else str(token).replace("▁", " ").encode()

    def incomplete_end(self, token_ids: Sequence[int]) -> bytes:
        """The bytes that `token_ids` end with if these are the beginning of a character; else none."""
        return incomplete_suffix(b"".join(map(self.token_bytes, token_ids[-BYTES_OF_A_CHARACTER:])))

    def num_replacements(self, incomplete: bytes) -> int:
        """How many U+FFFD the tokenizer writes for the beginning of a character."""
        return min(1, len(incomplete)) if self._is_byte_level else len(incomplete)

    def stream(
        self,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        min_tokens: int = 0,
        prompt_token_ids: Sequence[int] = (),
    ) -> TextStream:
        """A detokeniser for one output after a prompt. Stop strings are looked for in what comes after the first
        `min_tokens`."""
        detokeniser = Detokeniser(self, self.eos_token_ids.union(stop_token_ids))
        detokeniser.begin_after(prompt_token_ids)
        return TextStream(detokeniser, StopWatcher(stop) if stop else None, min_tokens)


class Detokeniser:
    """Tokens in, whole characters out. See the module's docstring for the two marks.

    Tokens in `hidden` (end of sequence) have no text. `num_chars`: how much text has come out, incomplete end excluded.
    """

    def __init__(self, codec: TextCodec, hidden: frozenset[int], *, skip_special: bool = True) -> None:
        self._codec = codec
        self._hidden = hidden
        self._skip_special = skip_special
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0
        self._prompt_chars = 0
        """How much of the text after `read` is the prompt's."""
        self.num_chars = 0

    def begin_after(self, prompt_token_ids: Sequence[int]) -> None:
        """Take over the character that the prompt leaves incomplete, if it does. Before the first `push`."""
        incomplete = self._codec.incomplete_end(prompt_token_ids)
        num_bytes = 0
        while num_bytes < len(incomplete):
            self._ids.insert(0, prompt_token_ids[-1 - len(self._ids)])
            num_bytes += len(self._codec.token_bytes(self._ids[0]))
        if incomplete:
            self._prompt_chars = len(self._decode(self._ids)) - self._codec.num_replacements(incomplete)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now."""
        self._ids.extend(token_id for token_id in token_ids if token_id not in self._hidden)
        text = self._pending()
        if text.endswith(REPLACEMENT):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        self._prompt_chars = 0
        if self._prefix > 64:
            del self._ids[: self._prefix]
            self._read -= self._prefix
            self._prefix = 0
        self.num_chars += len(text)
        return text

    def flush(self) -> str:
        """What an incomplete last character leaves: one U+FFFD as the tokenizer writes it, or nothing."""
        text = self._pending()
        self._prefix = self._read = len(self._ids)
        return text

    def _pending(self) -> str:
        known = self._decode(self._ids[self._prefix : self._read])
        return self._decode(self._ids[self._prefix :])[len(known) + self._prompt_chars :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._codec.decode(token_ids, skip_special=self._skip_special)


class StopWatcher:
    """Cuts a text before the first stop string; holds back what may still become one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The part of the text so far that is safe to send."""
        self._held += text
        found = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            safe, self._held = self._held[: min(found)], ""
            return safe
        keep = self._longest_open_suffix()
        safe, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return safe

    def flush(self) -> str:
        """What was held back; the text has ended and it did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _longest_open_suffix(self) -> int:
        longest = min(len(self._held), max(map(len, self._stop)) - 1)
        for length in range(longest, 0, -1):
            suffix = self._held[-length:]
            if any(stop.startswith(suffix) for stop in self._stop):
                return length
        return 0


class TextStream:
    """One output as it is written: tokens in, text that may be sent out.

    The deltas, flush included, are the same text however the tokens were grouped, so a stream and a whole answer agree.
    """

    def __init__(self, detokeniser: Detokeniser, watcher: StopWatcher | None, min_tokens: int) -> None:
        self._detokeniser = detokeniser
        self._watcher = watcher
        self._min_tokens = min_tokens
        self.num_tokens = 0

    @property
    def num_chars(self) -> int:
        """How many characters the tokens so far have made certain, sent out or not."""
        return self._detokeniser.num_chars

    @property
    def stopped(self) -> bool:
        """Whether a stop string was completed; the text has been cut before it."""
        return self._watcher is not None and self._watcher.stopped

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that is safe to send now. Tokens after a completed stop string are not taken and not counted."""
        if self._watcher is None:
            self.num_tokens += len(token_ids)
            return self._detokeniser.push(token_ids)
        parts = []
        for token_id in token_ids:
            if self._watcher.stopped:
                break
            self.num_tokens += 1
            text = self._detokeniser.push((token_id,))
            parts.append(self._watcher.push(text) if self.num_tokens > self._min_tokens else text)
        return "".join(parts)

    def flush(self) -> str:
        """The rest, at the natural end of the output. May itself complete a stop string: look at `stopped` after."""
        if self._watcher is None:
            return self._detokeniser.flush()
        if self.stopped:
            return ""
        return self._watcher.push(self._detokeniser.flush()) + self._watcher.flush()


def eos_token_ids(model_dir: Path) -> tuple[int, ...]:
    """The end-of-sequence ids that a model folder declares, generation config before model config; may be several."""
    for name in ("generation_config.json", "config.json"):
        path = model_dir / name
        declared = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        if declared is not None:
            return tuple(declared) if isinstance(declared, list) else (declared,)
    return ()


@cache
def bytes_of_char() -> Mapping[str, bytes]:
    """How byte-level vocabularies write bytes: printable ones as themselves, the others as the characters from U+0100.

    From GPT-2's ``bytes_to_unicode``.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = (byte for byte in range(256) if byte not in printable)
    chars = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return {char: bytes((byte,)) for byte, char in chars.items()}


def incomplete_suffix(data: bytes) -> bytes:
    """What UTF-8 text that ends with `data` has of a last character that lacks its end; empty if it is whole."""
    for length in range(1, min(len(data), BYTES_OF_A_CHARACTER - 1) + 1):
        lead = data[-length]
        if lead >= 0xC0:
            size = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return data[-length:] if length < size else b""
        if lead < 0x80:
            break
    return b""
