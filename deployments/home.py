"""Where Roulant keeps its files on this host, and the only place that touches the environment.

`$ROULANT_HOME` (default `~/.cache/roulant`) holds `models/` and `keys/`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

DEFAULT_HOME = "~/.cache/roulant"
DEFAULT_URL = "http://127.0.0.1:8000"
KEY_PREFIX = "rk-"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """How the command line reaches a running service. A key is None when neither the environment nor a file has one."""

    url: str
    api_key: str | None
    admin_key: str | None


def roulant_home() -> Path:
    """The folder of this host's models and keys; it may not exist yet."""
    return Path(os.environ.get("ROULANT_HOME") or DEFAULT_HOME).expanduser()


def secret(name: str, env: str, *, home: Path | None = None) -> str:
    """The value of environment variable `env` if it is set, else the key kept in file `keys/<name>`.

    The key is made when it is first asked for; the file has mode 0600. Processes that ask at once all get the same key.
    """
    if value := os.environ.get(env):
        return value
    path = _key_file(name, home)
    if (kept := _read_key(path)) is not None:
        return kept
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".{name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(KEY_PREFIX + secrets.token_urlsafe(24) + "\n")
            file.flush()
            os.fsync(file.fileno())
        # A link appears whole or not at all, and only one process can make it.
        with suppress(FileExistsError):
            path.hardlink_to(draft)
    finally:
        draft.unlink()
    made = _read_key(path)
    if made is None:
        raise ValueError(f"{path} holds no key; delete it and a new one is made")
    return made


def environment_with(settings: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with some variables set, for a process that it starts."""
    return os.environ | settings


def client_settings() -> ClientSettings:
    """What `ROULANT_URL`, `ROULANT_API_KEY` and `ROULANT_ADMIN_KEY` say; else this host's service and its kept keys.

    Those are the keys of `configs/local.yaml`.
    """
    return ClientSettings(
        url=os.environ.get("ROULANT_URL") or DEFAULT_URL,
        api_key=_present("local", "ROULANT_API_KEY"),
        admin_key=_present("admin", "ROULANT_ADMIN_KEY"),
    )


def _present(name: str, env: str) -> str | None:
    """Like `secret`, but makes nothing."""
    return os.environ.get(env) or _read_key(_key_file(name, None))


def _key_file(name: str, home: Path | None) -> Path:
    return (home or roulant_home()) / "keys" / name


def _read_key(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except FileNotFoundError:
        return None
