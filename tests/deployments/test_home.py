from __future__ import annotations

import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deployments.home import client_settings, roulant_home, secret


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("ROULANT_URL", "ROULANT_API_KEY", "ROULANT_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ROULANT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_home_is_the_variable_or_the_users_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert roulant_home() == home
    monkeypatch.setenv("ROULANT_HOME", "")
    assert roulant_home() == Path.home() / ".cache" / "roulant"


def test_a_secret_is_made_once_and_only_its_owner_can_read_it(home: Path) -> None:
    made = secret("local", "ROULANT_API_KEY")
    file = home / "keys" / "local"
    assert made.startswith("rk-")
    assert len(made) == len("rk-") + 32
    assert file.read_text() == made + "\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert secret("local", "ROULANT_API_KEY") == made
    assert secret("admin", "ROULANT_ADMIN_KEY") != made
    assert sorted(path.name for path in file.parent.iterdir()) == ["admin", "local"]


def test_a_secret_in_the_environment_wins_and_is_not_kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROULANT_API_KEY", "mine")
    assert secret("local", "ROULANT_API_KEY") == "mine"
    assert not home.exists()


def test_all_who_ask_at_the_same_moment_get_the_same_secret(home: Path) -> None:
    starting = threading.Barrier(8)

    def ask(_: int) -> str:
        starting.wait()
        return secret("local", "ROULANT_API_KEY")

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(ask, range(8)))) == 1


def test_an_empty_key_file_is_an_error_that_says_what_to_do(home: Path) -> None:
    (home / "keys").mkdir(parents=True)
    (home / "keys" / "local").touch()
    with pytest.raises(ValueError, match="delete it"):
        secret("local", "ROULANT_API_KEY")


def test_a_client_finds_this_hosts_service_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    before = client_settings()
    assert (before.url, before.api_key, before.admin_key) == ("http://127.0.0.1:8000", None, None)
    kept = secret("admin", "ROULANT_ADMIN_KEY")
    monkeypatch.setenv("ROULANT_URL", "http://elsewhere:1")
    monkeypatch.setenv("ROULANT_API_KEY", "given")
    after = client_settings()
    assert (after.url, after.api_key, after.admin_key) == ("http://elsewhere:1", "given", kept)
