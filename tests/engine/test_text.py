"""Text out of tokens: whole characters, no piece of a stop string, the same text however the tokens are grouped."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Metaspace, Replace, Sequence, Strip
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from engine.text import ChatTemplateError, StopWatcher, TextCodec, TextStream

SAMPLES = (
    "The capital of France is Paris.",
    "emoji 👩‍👩‍👧‍👦 family, flags 🇫🇷🇯🇵, skin 👍🏽!",
    "日本語のテキスト、한국어, العربية, हिन्दी",
    "e\u0301 combining, z\u0335\u0321 zalgo, \u200bzero width",
    "  leading and   inner   spaces\n\n\ttabs\r\n",
    'code: def f(x): return {"a": [1, 2, 3]}  # ünïcödé',
    "left\u0000right",
    "",
)


@pytest.fixture(scope="module")
def codec(smollm2: Path) -> TextCodec:
    return TextCodec.load(smollm2)


def pieces(stream: TextStream, token_ids: list[int], size: int) -> list[str]:
    sent = [stream.push(token_ids[start : start + size]) for start in range(0, len(token_ids), size)]
    return [*sent, stream.flush()]


@pytest.mark.parametrize("text", SAMPLES)
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_deltas_add_up_to_the_text_and_never_split_a_character(codec: TextCodec, text: str, size: int) -> None:
    sent = pieces(codec.stream(), codec.encode(text), size)
    assert "".join(sent) == text
    assert not any("\ufffd" in piece for piece in sent)


def test_a_cut_off_character_is_the_same_in_every_grouping(codec: TextCodec) -> None:
    token_ids = codec.encode("🇫🇷 한국어 👩‍👩‍👧")
    for length in range(1, len(token_ids)):
        whole = codec.decode(token_ids[:length])
        for size in (1, 2, 100):
            sent = pieces(codec.stream(), token_ids[:length], size)
            assert "".join(sent) == whole
            assert not any("\ufffd" in piece for piece in sent[:-1])


def test_end_tokens_are_counted_but_have_no_text(codec: TextCodec) -> None:
    (eos,) = codec.eos_token_ids
    stream = codec.stream(stop_token_ids=codec.encode("X"))
    assert stream.push([*codec.encode("yes"), *codec.encode("X"), eos]) + stream.flush() == "yes"
    assert stream.num_tokens == 3


@pytest.mark.parametrize("text", SAMPLES)
def test_the_bytes_of_tokens_are_the_text_s_though_no_token_is_a_character(codec: TextCodec, text: str) -> None:
    assert b"".join(codec.token_bytes(token_id) for token_id in codec.encode(text)) == text.encode()


def test_every_token_has_bytes_and_a_special_one_those_of_its_name(codec: TextCodec) -> None:
    assert all(codec.token_bytes(token_id) for token_id in range(codec.vocab_size))
    (end,) = codec.encode("<|im_end|>")
    assert codec.token_bytes(end) == b"<|im_end|>"


@pytest.mark.parametrize("text", SAMPLES)
def test_pieces_add_up_to_the_text(codec: TextCodec, text: str) -> None:
    token_ids = codec.encode(text)
    pieces_of_text = codec.pieces(token_ids)
    assert len(pieces_of_text) == len(token_ids)
    assert "".join(pieces_of_text) == text


def test_pieces_leave_out_an_incomplete_end_and_keep_special_tokens_only_if_asked_to(codec: TextCodec) -> None:
    assert "".join(codec.pieces(codec.encode("n日")[:-1])) == "n"
    token_ids = codec.encode("<|im_start|>user")
    assert codec.pieces(token_ids) == ["", "user"]
    assert codec.pieces(token_ids, skip_special=False) == ["<|im_start|>", "user"]


@pytest.mark.parametrize("size", [1, 100])
def test_an_output_finishes_the_prompt_s_last_character_and_repeats_nothing_of_the_prompt(
    codec: TextCodec, size: int
) -> None:
    """Prompts of token ids may end anywhere; elsewhere the first delta then held the prompt once more."""
    token_ids = codec.encode("The end: 日本語の🇫🇷 and 👩‍👩‍👧 done")
    for cut in range(1, len(token_ids)):
        before = "".join(codec.pieces(token_ids[:cut]))
        after = "".join(pieces(codec.stream(prompt_token_ids=token_ids[:cut]), token_ids[cut:], size))
        assert before + after == codec.decode(token_ids)


def test_a_replacement_character_of_the_prompt_s_own_is_not_repeated(codec: TextCodec) -> None:
    prompt = codec.encode("broken: \ufffd")
    assert pieces(codec.stream(prompt_token_ids=prompt), codec.encode(" ok"), 1) == [" ok", ""]


def test_a_character_that_was_the_prompt_s_is_finished_for_a_vocabulary_that_falls_back_to_bytes() -> None:
    backend = Tokenizer(WordLevel({"▁one": 0, "<0xE2>": 1, "<0x82>": 2, "<0xAC>": 3, "▁two": 4}, unk_token="▁one"))
    backend.decoder = Sequence([Replace("▁", " "), ByteFallback(), Fuse(), Strip(content=" ", left=1)])
    codec = TextCodec(PreTrainedTokenizerFast(tokenizer_object=backend), frozenset())
    assert b"".join(map(codec.token_bytes, (0, 1, 2, 3))).decode() == " one€"
    for cut in (2, 3):
        assert pieces(codec.stream(prompt_token_ids=[0, 1, 2, 3][:cut]), [0, 1, 2, 3, 4][cut:], 1)[-2:] == [" two", ""]
        assert "".join(pieces(codec.stream(prompt_token_ids=[0, 1, 2, 3][:cut]), [0, 1, 2, 3, 4][cut:], 1)) == "€ two"


def test_characters_are_counted_as_they_become_certain(codec: TextCodec) -> None:
    stream = codec.stream(stop=["never"])
    counts = []
    for token_id in codec.encode("n日本"):
        stream.push((token_id,))
        counts.append(stream.num_chars)
    assert counts[-1] == 3
    assert counts == sorted(counts)


def test_text_goes_on_in_a_long_stream(codec: TextCodec) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 40
    assert "".join(pieces(codec.stream(), codec.encode(text), 1)) == text


def test_a_stop_string_is_cut_wherever_it_lies(codec: TextCodec) -> None:
    text = "One two three. Four — fünf, 六 seven eight nine ten."
    token_ids = codec.encode(text)
    for begin in range(len(text)):
        for length in (1, 2, 5, 20):
            stop = text[begin : begin + length]
            at = text.find(stop)
            for size in (1, 100):
                stream = codec.stream(stop=[stop, "never " * 5])
                sent = "".join(pieces(stream, token_ids, size))
                assert (sent, stream.stopped) == (text[:at], True)


def test_tokens_are_counted_up_to_the_one_that_completes_the_stop_string(codec: TextCodec) -> None:
    token_ids = codec.encode("alpha beta gamma delta")
    counts = set()
    for size in (1, 2, 100):
        stream = codec.stream(stop=["beta"])
        pieces(stream, token_ids, size)
        counts.add(stream.num_tokens)
    (count,) = counts
    assert "beta" in codec.decode(token_ids[:count])
    assert "beta" not in codec.decode(token_ids[: count - 1])


def test_stop_strings_are_not_looked_for_before_min_tokens(codec: TextCodec) -> None:
    token_ids = codec.encode("stop " * 10)
    stream = codec.stream(stop=["stop"], min_tokens=6)
    sent = "".join(pieces(stream, token_ids, 1))
    assert stream.num_tokens > 6
    assert sent.startswith(codec.decode(token_ids[:6]))


def test_the_chat_template_ends_where_the_assistant_speaks(codec: TextCodec) -> None:
    token_ids = codec.encode_chat([{"role": "user", "content": "Hi"}])
    special = codec.encode("<|im_start|>assistant\n")
    assert token_ids[-len(special) :] == special
    assert "user\nHi" in codec.decode(token_ids)


def test_a_template_that_refuses_says_so(codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec._tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        codec.encode_chat([{"role": "user", "content": "Hi"}])


def test_spaces_survive_where_a_text_of_its_own_begins_without_one() -> None:
    """SentencePiece tokenizers write the space in front of a word, and drop the one in front of the text."""
    backend = Tokenizer(WordLevel({"▁one": 0, "▁two": 1, "▁three": 2}, unk_token="▁one"))
    backend.decoder = Metaspace()
    codec = TextCodec(PreTrainedTokenizerFast(tokenizer_object=backend), frozenset())
    assert pieces(codec.stream(), [0, 1, 2], 1) == ["one", " two", " three", ""]


def test_a_folder_without_a_tokenizer_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=tmp_path.name):
        TextCodec.load(tmp_path)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    watcher = StopWatcher(["END", "ENOUGH"])
    assert [watcher.push(text) for text in ("a", "bE", "N", "x", "E")] == ["a", "b", "", "ENx", ""]
    assert (watcher.flush(), watcher.stopped) == ("E", False)


def test_the_first_of_several_stop_strings_wins() -> None:
    watcher = StopWatcher(["cd", "bcde"])
    assert watcher.push("abcdef") == "a"
    assert watcher.stopped


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_a_watched_text_is_cut_before_its_first_stop_string(text: str, stop: list[str], data: st.DataObject) -> None:
    watcher = StopWatcher(stop)
    sent = ""
    rest = text
    while rest and not watcher.stopped:
        size = data.draw(st.integers(1, 5))
        sent += watcher.push(rest[:size])
        rest = rest[size:]
        assert not any(each in sent for each in stop)
    sent += watcher.flush()
    if watcher.stopped:
        assert any(text[len(sent) :].startswith(each) for each in stop)
    else:
        assert sent == text
        assert not any(each in text for each in stop)
