from __future__ import annotations

import json
from pathlib import Path

import pytest

from deployments.models import DEFAULT_MODEL, Manifest
from tests.deployments.command_line import Run

LLAMA_31_8B = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
}


def write_config(folder: Path, config: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_size_of_a_model_for_people(roulant: Run, tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", LLAMA_31_8B)
    # 29,506,425,323 bytes less 8,030,527,488 of weights, in blocks of 16 * 65,536; a request takes 512 of them
    assert roulant("models", "size", str(folder), "--tp", "2", "--memory", "27.48", "--context", "8192") == 0
    rows = (line.partition("  ") for line in roulant.out.splitlines())
    assert {label: value.strip() for label, _, value in rows} == {
        "precision": "bfloat16, KV cache in the same",
        "parameters": "8,030,261,248",
        "weights": "7.48 GiB on each device",
        "KV cache": "65,536 bytes per token on each device",
        "a request": "0.50 GiB on each device at 8,192 tokens",
        "memory": "27.48 GiB on each device, 20.00 of it for the KV cache",
        "holds": "20,481 blocks of 16 tokens = 327,696 tokens",
        "at once": "40 requests of 8,192 tokens",
    }
    assert "Not counted: activations" in roulant.err


def test_the_size_of_a_model_for_programs(roulant: Run, tmp_path: Path) -> None:
    file = write_config(tmp_path, LLAMA_31_8B) / "config.json"
    assert roulant("models", "size", str(file), "--kv-dtype", "int8", "--json") == 0
    assert json.loads(roulant.out) == {
        "tp": 1,
        "dtype": "bfloat16",
        "kv_dtype": "int8",
        "memory_gib": None,
        "context": 131_072,
        "block_size": 16,
        "size": {
            "model_type": "llama",
            "num_parameters": 8_030_261_248,
            "weight_bytes": 16_060_522_496,
            "kv_bytes_per_token": 67_584,
            "max_model_len": 131_072,
        },
        "fit": None,
    }


def test_the_size_of_a_pulled_model(roulant: Run, home: Path) -> None:
    folder = write_config(home / "models" / DEFAULT_MODEL, LLAMA_31_8B)
    (folder / "manifest.json").write_text(Manifest(name=DEFAULT_MODEL, source="here", files={}).model_dump_json())
    assert roulant("models", "size", DEFAULT_MODEL, "--json") == 0
    assert json.loads(roulant.out)["size"]["num_parameters"] == 8_030_261_248


@pytest.mark.parametrize(("memory", "code", "held"), [("30.9", 1, 0), ("31", 0, 1)])
def test_a_memory_without_room_for_one_request_exits_with_1(
    roulant: Run, tmp_path: Path, memory: str, code: int, held: int
) -> None:
    folder = write_config(tmp_path, LLAMA_31_8B)  # 14.96 GiB of weights, and 16 for the longest request
    assert roulant("models", "size", str(folder), "--memory", memory, "--json") == code
    assert json.loads(roulant.out)["fit"]["num_requests"] == held


def test_of_a_model_that_the_engine_does_not_run_only_the_cache_is_told(roulant: Run, tmp_path: Path) -> None:
    gpt2 = write_config(tmp_path, {"model_type": "gpt2"})
    assert roulant("models", "size", str(gpt2)) == 0
    assert "not known for model type 'gpt2'" in roulant.out
    assert "36,864 bytes per token, if all layers have plain attention" in roulant.out
    assert roulant("models", "size", str(gpt2), "--memory", "80") == 1
    assert "the weights of model type 'gpt2' are not known" in roulant.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("nonsense",), "no model is known as 'nonsense'"),
        (("owner/absent",), "roulant models pull owner/absent"),
        (("config", "--tp", "3"), "32 attention heads cannot be divided among 3 ranks"),
        (("config", "--memory", "80", "--context", "131073"), "the model runs 131072 tokens at most"),
    ],
)
def test_a_model_that_cannot_be_sized_is_an_error(
    roulant: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], complaint: str
) -> None:
    write_config(tmp_path / "config", LLAMA_31_8B)
    monkeypatch.chdir(tmp_path)
    assert roulant("models", "size", *arguments) == 1
    assert complaint in roulant.err
    assert roulant.out == ""
