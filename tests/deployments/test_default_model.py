"""The default model as it lies on disk, whichever source it came from."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.models import is_whole


def test_it_is_whole(smollm2: Path) -> None:
    assert is_whole(smollm2)


def test_its_settings_are_those_it_was_trained_with(smollm2: Path) -> None:
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(smollm2)
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.max_position_embeddings == 8192
    assert config.rope_parameters["rope_theta"] == 100000
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert config.tie_word_embeddings is True
    assert GenerationConfig.from_pretrained(smollm2).eos_token_id == 2


def test_its_chat_template_introduces_the_model_when_nobody_else_does(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    question = {"role": "user", "content": "Hi"}
    render = tokenizer.apply_chat_template
    assert render([question], tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render([{"role": "system", "content": "Be brief."}, question], tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a\n\n1. x", ["a", "ĊĊ", "1", ".", "Ġx"]),
        ("I have  12", ["I", "Ġhave", "ĠĠ", "1", "2"]),
        ("<|im_start|>user", ["<|im_start|>", "user"]),
    ],
)
def test_its_tokenizer_cuts_digits_one_by_one_and_knows_its_marks(smollm2: Path, text: str, pieces: list[str]) -> None:
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(smollm2).tokenize(text) == pieces


def test_it_knows_the_capital_of_france(smollm2: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(str(prompt), add_special_tokens=False, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
