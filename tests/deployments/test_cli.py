from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

from deployments.cli.chat import Conversation, Message
from deployments.cli.client import admin_client, api_client
from deployments.cli.serve import QUESTION, announce, curl_command, first_key, read_config, with_address
from deployments.cli.status import memory_lines
from deployments.cli.terminal import BarProgress, CliError, printable
from deployments.local import LocalService
from deployments.models import DEFAULT_MODEL, Manifest, ManifestFile
from engine.api import GIB, EngineStats, describe_memory
from tests.deployments.command_line import Run
from tests.deployments.fake_service import Canned, FakeService, error, events, fake_service

pytestmark = pytest.mark.usefixtures("home")

COMMANDS = (
    ("serve",),
    ("chat",),
    ("status",),
    ("explain",),
    ("models", "pull"),
    ("models", "list"),
    ("models", "size"),
)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeService]:
    """A service that the environment names, with keys."""
    with fake_service() as running:
        monkeypatch.setenv("ROULANT_URL", running.url)
        monkeypatch.setenv("ROULANT_API_KEY", "rk-tenant")
        monkeypatch.setenv("ROULANT_ADMIN_KEY", "rk-admin")
        yield running


def delta(text: str) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}


ANSWER = events(
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
    delta("It is "),
    delta("Paris."),
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"prompt_tokens": 37, "completion_tokens": 8, "total_tokens": 45}},
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(roulant: Run, command: tuple[str, ...]) -> None:
    assert roulant(*command, "--help") == 0
    assert f"Example: roulant {' '.join(command)}" in roulant.out


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("chat",),
        ("chat", "m", "--temperature", "-1"),
        ("chat", "m", "--json"),
        ("serve", "--port", "70000"),
        ("status", "extra"),
        ("explain",),
        ("models", "size"),
        ("models", "size", "m", "--tp", "0"),
        ("models", "size", "m", "--dtype", "auto"),
        ("models", "size", "m", "--memory", "inf"),
        ("models", "size", "m", "--memory", "nan"),
    ],
    ids=" ".join,
)
def test_wrong_use_exits_with_2(roulant: Run, arguments: tuple[str, ...]) -> None:
    assert roulant(*arguments) == 2
    assert roulant.out == ""
    assert roulant.err != ""


def test_chat_prints_the_answer_and_sends_what_was_asked(roulant: Run, service: FakeService) -> None:
    service.answers["/v1/chat/completions"] = ANSWER
    options = ("--message", QUESTION, "--system", "Be brief.", "--max-tokens", "9", "--temperature", "0")
    assert roulant("chat", "tiny", *options) == 0
    assert roulant.out == "It is Paris.\n"
    (asked,) = service.asked
    assert asked.key == "Bearer rk-tenant"
    assert asked.body == {
        "model": "tiny",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 9,
        "temperature": 0.0,
    }


def test_chat_for_programs(roulant: Run, service: FakeService) -> None:
    service.answers["/v1/chat/completions"] = ANSWER
    assert roulant("chat", "tiny", "-m", "hi", "--json", "--key", "rk-other") == 0
    assert json.loads(roulant.out) == {
        "text": "It is Paris.",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 37, "completion_tokens": 8, "total_tokens": 45},
    }
    assert service.asked[0].key == "Bearer rk-other"
    assert "temperature" not in service.asked[0].body


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (error(401, "no such key"), "the service answered 401: no such key"),
        (Canned(status=502, body="<html>"), "the service answered 502: Bad Gateway"),
        (events(delta("It is"), {"error": {"message": "the engine died"}}), "the engine died"),
        (events(delta("It is"), done=False), "the stream ended before the service said that it was done"),
        (events("surprise"), "the service sent something that is no chat chunk"),
    ],
)
def test_an_error_of_the_service_exits_with_1_and_its_words(
    roulant: Run, service: FakeService, answer: Canned, complaint: str
) -> None:
    service.answers["/v1/chat/completions"] = answer
    assert roulant("chat", "tiny", "-m", "hi") == 1
    assert complaint in roulant.err


def test_no_service_is_an_error_that_says_how_to_start_one(roulant: Run) -> None:
    with fake_service() as gone:
        pass
    assert roulant("chat", "tiny", "-m", "hi", "--url", gone.url, "--key", "k") == 1
    assert f"no service answers at {gone.url}" in roulant.err
    assert "roulant serve" in roulant.err


@pytest.mark.parametrize("url", ["nonsense", "ftp://127.0.0.1", "http://"])
def test_an_address_that_is_none_is_an_error(roulant: Run, url: str) -> None:
    assert roulant("chat", "tiny", "-m", "hi", "--url", url, "--key", "k") == 1
    assert roulant.err.startswith("roulant: ")


def test_no_key_is_an_error_that_says_where_one_may_come_from(roulant: Run) -> None:
    assert roulant("chat", "tiny", "-m", "hi") == 1
    assert "ROULANT_API_KEY" in roulant.err
    assert roulant("status") == 1
    assert "ROULANT_ADMIN_KEY" in roulant.err


def test_a_conversation_remembers_what_was_said_and_forgets_what_failed(service: FakeService) -> None:
    with api_client(None, None) as client:
        conversation = Conversation(client=client, model="tiny")
        service.answers["/v1/chat/completions"] = ANSWER
        assert list(conversation.ask("one")) == ["It is ", "Paris."]
        service.answers["/v1/chat/completions"] = events(delta("half"), {"error": {"message": "broken"}})
        with pytest.raises(CliError, match="broken"):
            list(conversation.ask("two"))
        service.answers["/v1/chat/completions"] = ANSWER
        stopped = conversation.ask("three")
        assert next(stopped) == "It is "
        stopped.close()
    assert conversation.messages == [
        Message(role="user", content="one"),
        Message(role="assistant", content="It is Paris."),
        Message(role="user", content="three"),
        Message(role="assistant", content="It is "),
    ]


def test_a_conversation_at_the_terminal_survives_an_error(
    roulant: Run, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.answers["/v1/chat/completions"] = error(429, "slow down")
    questions = iter(["one", "two", ""])
    monkeypatch.setattr("builtins.input", lambda: next(questions))
    assert roulant("chat", "tiny") == 0
    assert roulant.err.count("slow down") == 2


def test_a_models_text_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\r\a\n\tç中") == "a[2Jb\n\tç中"


QUEUE = {
    "models": [
        {
            "admission": {
                "model": "tiny",
                "waiting": [{"lane": 2, "tenant": "trial", "count": 3}],
                "permits_open": 5,
                "replicas": 2,
                "slots": 64,
                "kv_tokens": 4096,
                "committed_slots": 5,
                "committed_kv_tokens": 100,
            },
            "engines": [
                {"max_num_seqs": 32, "num_blocks": 100, "num_used_blocks": 7, "num_running": 4, "num_waiting": 1}
            ],
        }
    ],
    "tenants": [
        {"tenant": "trial", "open_reservations": 8, "reserved_tokens": 90, "used_requests": 11, "used_tokens": 1234}
    ],
}


@pytest.fixture
def busy(service: FakeService) -> FakeService:
    service.answers["/health/ready"] = Canned(body='{"status": "ready"}')
    service.answers["/v1/models"] = Canned(body=json.dumps({"object": "list", "data": [{"id": "tiny"}]}))
    service.answers["/admin/v1/queue"] = Canned(body=json.dumps(QUEUE))
    return service


def test_status_for_people(roulant: Run, busy: FakeService) -> None:
    assert roulant("status") == 0
    lines = [line.split() for line in roulant.out.splitlines()]
    assert lines[0] == [busy.url, "is", "ready"]
    assert ["tiny", "2", "5", "4/32", "7/100", "3", "batch/trial,", "1", "in", "replicas"] in lines
    assert ["trial", "8", "90", "11", "1234"] in lines
    assert {asked.key for asked in busy.asked} == {"Bearer rk-admin"}


def test_status_for_programs_has_everything_that_the_service_says(roulant: Run, busy: FakeService) -> None:
    assert roulant("status", "--json") == 0
    assert json.loads(roulant.out) == {"url": busy.url, "ready": True, "models": ["tiny"], "queue": QUEUE}


def test_the_memory_of_each_replica_is_told_in_a_line(service: FakeService) -> None:
    stats = EngineStats(
        max_num_seqs=8,
        max_model_len=64,
        weight_bytes=2 * GIB,
        kv_bytes_per_token=1024,
        block_size=16,
        num_blocks=1000,
        num_used_blocks=0,
        num_cached_blocks=0,
        num_running=0,
        num_waiting=0,
        num_steps=0,
        num_requests=0,
        num_prompt_tokens=0,
        num_cached_tokens=0,
        num_generated_tokens=0,
        num_recomputed_tokens=0,
        num_padding_tokens=0,
        num_preemptions=0,
        num_idle_slot_steps=0,
    )
    replicas = {"replicas": [{"model": "tiny", "stats": asdict(stats), "steps": []}]}
    service.answers["/admin/v1/replicas"] = Canned(body=json.dumps(replicas))
    with admin_client(service.url, "rk-admin") as client:
        assert memory_lines(client) == [f"tiny: {describe_memory(stats)}"]


EXPLANATION = {
    "request_id": "0f3a",
    "model": "tiny",
    "sequences": [
        {
            "sequence_id": "0f3a",
            "status": "waiting",
            "lane": 2,
            "waited_steps": {"slot": 31},
            "now": "every slot is taken",
            "num_preemptions": 1,
            "num_cached_tokens": 16,
        }
    ],
}


def test_a_request_is_explained_to_people_and_programs(roulant: Run, service: FakeService) -> None:
    service.answers["/admin/v1/requests/cmpl-0f3a/explain"] = Canned(body=json.dumps(EXPLANATION))
    assert roulant("explain", "cmpl-0f3a") == 0
    last = roulant.out.splitlines()[-1].split()
    assert last == ["0f3a", "waiting", "batch", "16", "1", "31", "slot", "every", "slot", "is", "taken"]
    assert roulant("explain", "cmpl-0f3a", "--json") == 0
    assert json.loads(roulant.out) == EXPLANATION
    assert service.asked[0].key == "Bearer rk-admin"


@pytest.mark.parametrize("name", ["ffff", "../../queue", "?x=1"])
def test_a_request_that_no_engine_holds_exits_with_1(roulant: Run, busy: FakeService, name: str) -> None:
    assert roulant("explain", name) == 1
    assert "404" in roulant.err
    assert busy.asked[0].path.startswith("/admin/v1/requests/")


def test_status_of_a_service_that_is_not_ready_exits_with_1(roulant: Run, busy: FakeService) -> None:
    busy.answers["/health/ready"] = error(503, "the models are not ready yet")
    assert roulant("status", "--json") == 1
    assert json.loads(roulant.out)["ready"] is False


def test_status_with_a_tenants_key_says_what_the_service_says(roulant: Run, busy: FakeService) -> None:
    busy.answers["/admin/v1/queue"] = error(403, "only an admin key may do this")
    assert roulant("status") == 1
    assert "only an admin key may do this" in roulant.err


def test_models_are_listed(roulant: Run, home: Path) -> None:
    assert roulant("models", "list", "--json") == 0
    assert json.loads(roulant.out) == []
    folder = home / "models" / "tiny"
    folder.mkdir(parents=True)
    manifest = Manifest(name="tiny", source="made here", files={"a": ManifestFile(num_bytes=2_000_000, sha256="0")})
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    assert roulant("models", "list", "--json") == 0
    assert json.loads(roulant.out) == [{"name": "tiny", "num_bytes": 2_000_000, "source": "made here"}]
    assert roulant("models", "list") == 0
    assert roulant.out.splitlines()[1].split() == ["tiny", "2", "made", "here"]


def test_a_model_that_cannot_be_pulled_is_an_error(roulant: Run) -> None:
    assert roulant("models", "pull", "nonsense") == 1
    assert "no model is known as 'nonsense'" in roulant.err


def test_each_step_of_a_pull_starts_a_bar_of_its_own() -> None:
    screen = Console(file=StringIO(), force_terminal=True, width=100)
    with Progress(TextColumn("{task.description} {task.fields[sizes]}"), console=screen, auto_refresh=False) as bar:
        progress = BarProgress(bar)
        progress.step("fetching")
        progress.advance(59_500_000, 92_900_000)
        (fetching,) = bar.tasks
        assert (fetching.description, fetching.completed, fetching.total) == ("fetching", 59_500_000, 92_900_000)
        assert fetching.fields["sizes"] == "60/93 MB"
        progress.step("converting")
        (converting,) = bar.tasks
        assert (converting.description, converting.completed, converting.total) == ("converting", 0, None)
        assert converting.fields["sizes"] == ""


@pytest.mark.parametrize("text", ["models: []", "nonsense: 1", ": :"])
def test_serve_refuses_a_wrong_configuration_before_it_starts_anything(roulant: Run, tmp_path: Path, text: str) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(text)
    assert roulant("serve", str(file)) == 1
    assert str(file) in roulant.err
    assert roulant("serve", str(tmp_path / "missing.yaml")) == 1


def test_host_and_port_replace_the_configurations() -> None:
    config = read_config(None)
    assert with_address(config, host=None, port=None) == config
    moved = with_address(config, host="0.0.0.0", port=0)
    assert (moved.http.host, moved.http.port) == ("0.0.0.0", 0)
    assert moved.http.max_body_bytes == config.http.max_body_bytes


def test_the_printed_curl_is_one_line_that_any_shell_reads() -> None:
    line = curl_command("http://127.0.0.1:1", "rk-a'b $HOME", 'it\'s "x"')
    assert "\n" not in line
    words = shlex.split(line)
    assert words[:3] == ["curl", "-sS", "http://127.0.0.1:1/v1/chat/completions"]
    assert "Authorization: Bearer rk-a'b $HOME" in words
    assert json.loads(words[-1]) == {
        "model": 'it\'s "x"',
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
    }


def test_a_ready_service_says_how_to_use_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROULANT_API_KEY", "rk-mine")
    config = with_address(read_config(None), host=None, port=1234)
    key = first_key(config)
    assert key is not None
    assert key.tenant == "local"
    announce(config, LocalService(config))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "ready: http://127.0.0.1:1234"
    assert curl_command("http://127.0.0.1:1234", "rk-mine", DEFAULT_MODEL) in lines
    assert any(line.startswith("status:") and "roulant status" in line for line in lines)
