from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import preemption, scheduler, waiting
from engine.config import BatchingMode
from engine.hold import Hold, Obstacle
from engine.records import Stepped
from engine.replay import main
from engine.sequence import Sequence
from tests.engine.makers import request, run_to_end, sampling
from tests.engine.recorded import Recorded

Line = dict[str, Any]

RUNS: dict[str, Line] = {
    "continuous": {"max_num_seqs": 6, "aging_steps": 9},
    "long steps": {"max_num_seqs": 6, "max_num_batched_tokens": 64, "max_prefill_tokens_with_decodes": 7},
    "dynamic": {"batching": BatchingMode.DYNAMIC, "max_delay_ms": 900.0, "max_batch_size": 4},
}


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which nearly everything happens."""
    path = tmp_path_factory.mktemp("records") / "steps.jsonl"
    Recorded.start(path, **RUNS["continuous"]).live(1000)
    return path


def changed(record: Path, change: Callable[[list[Line]], object], tmp_path: Path) -> Path:
    """A copy of `record` that has been tampered with."""
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    change(lines)
    copy = tmp_path / "changed.jsonl"
    copy.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return copy


def find(lines: list[Line], kind: str, has: str | None = None, *, after: int = 0) -> int:
    """The index of the first line of this kind, with this key, at or after a position."""
    return next(
        index
        for index, line in enumerate(lines)
        if index >= after and line["kind"] == kind and (has is None or has in line)
    )


@pytest.mark.parametrize("run", RUNS)
def test_a_thousand_steps_are_decided_again_exactly(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = Recorded.start(tmp_path / "steps.jsonl", **RUNS[run])
    recorded.live(1000)
    assert main([str(recorded.path)]) == 0
    out = capsys.readouterr().out
    assert "1,000 steps, " in out
    assert out.endswith("identical: every decision is the recorded one\n")


def test_the_run_that_is_replayed_has_everything_in_it(tmp_path: Path) -> None:
    recorded = Recorded.start(tmp_path / "steps.jsonl", **RUNS["continuous"])
    recorded.live(1000)
    cached = recorded.engine.stats().num_cached_tokens
    seen: Counter[str] = Counter()
    for line in recorded.records():
        seen[line.kind] += 1
        if isinstance(line, Stepped):
            seen.update(each.reason for each in line.left)
            seen.update(each.cause for each in line.preemptions)
            seen["copies"] += len(line.copies)
            seen["recomputed"] += line.tokens.recomputed
            if line.obstacle is not None:
                seen[line.obstacle.hold] += 1
    things = ["stop", "length", "cancelled", "deadline", "handed_back", "lane", "memory", "copies", "recomputed"]
    assert {thing for thing in [*things, "blocks", "slot", "budget", "preemption"] if seen[thing] < 1} == set()
    assert cached > 500


def test_a_record_breaks_off_where_the_engine_died(record: Path, tmp_path: Path, capsys: Any) -> None:
    copy = tmp_path / "died.jsonl"
    copy.write_bytes(record.read_bytes()[:-20])
    assert main([str(copy)]) == 0
    num_lines = len(record.read_text().splitlines())
    assert f"note: line {num_lines} is cut short, and left out\n" in capsys.readouterr().out


def test_a_record_that_has_reached_its_bound_is_replayed_to_there(tmp_path: Path, capsys: Any) -> None:
    run = Recorded.start(tmp_path / "steps.jsonl", record_max_bytes=20_000)
    run.live(100)
    assert main([str(run.path)]) == 0
    assert "note: the record had reached its bound of 20,000 bytes; the engine went on\n" in capsys.readouterr().out


def test_a_changed_decision_is_found_and_shown_with_both_and_the_state(
    record: Path, tmp_path: Path, capsys: Any
) -> None:
    def one_block_elsewhere(lines: list[Line]) -> None:
        chunk = lines[find(lines, "step", "joined", after=400)]["chunks"][-1]
        chunk["new_block_ids"][-1] += 1

    assert main([str(changed(record, one_block_elsewhere, tmp_path))]) == 1
    out = capsys.readouterr().out
    first, field, recorded, now, *state = out.splitlines()
    assert first.startswith("different: step ")
    assert field == "  chunks"
    assert recorded.startswith("    recorded  ChunkRecord(sequence_id=")
    assert now.startswith("    now       ChunkRecord(sequence_id=")
    assert recorded.removeprefix("    recorded  ") != now.removeprefix("    now       ")
    assert state[0] == "before it:"
    assert state[-1].startswith("  blocks: ")
    assert "identical" not in out


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("joined", ["nobody"]),
        ("left", []),
        ("num_waiting", 77),
        ("obstacle", {"hold": "slot", "sequence_id": "r1"}),
        ("copies", [{"source": 1, "target": 2}]),
        ("preemptions", []),
    ],
)
def test_every_field_of_a_step_is_compared(
    key: str, value: object, record: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(lines: list[Line]) -> None:
        lines[find(lines, "step", key)][key] = value

    assert main([str(changed(record, change, tmp_path))]) == 1
    assert capsys.readouterr().out.splitlines()[1] == f"  {key}"


def test_a_changed_token_is_found_in_the_step_that_uses_it(record: Path, tmp_path: Path, capsys: Any) -> None:
    steps: list[int] = []

    def another_token(lines: list[Line]) -> None:
        for number in range(50, len(lines)):
            for chunk in lines[number].get("chunks", ()):
                goes_on = [each["step"] for each in lines[number + 1 : number + 4] if uses(each, chunk)]
                if "token_id" in chunk and chunk["token_id"] < 900 and goes_on:
                    chunk["token_id"] += 1
                    steps.append(goes_on[0])
                    return

    def uses(line: Line, chunk: Line) -> bool:
        end = chunk["start"] + chunk.get("num_tokens", 1)
        return any(
            each["sequence_id"] == chunk["sequence_id"] and each["start"] == end for each in line.get("chunks", ())
        )

    assert main([str(changed(record, another_token, tmp_path))]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"different: step {steps[0]}, ")
    assert out.splitlines()[1] == "  checksum"


@pytest.mark.parametrize("kind", ["step", "added", "cancelled"])
def test_a_missing_line_is_found(kind: str, record: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ended_somebody(lines: list[Line], index: int) -> bool:
        following = lines[find(lines, "step", after=index)]
        return any(each["reason"] == "cancelled" for each in following.get("left", ()))

    def remove(lines: list[Line]) -> None:
        index = find(lines, kind, after=100)
        while kind == "cancelled" and not ended_somebody(lines, index):
            index = find(lines, kind, after=index + 1)
        del lines[index]

    assert main([str(changed(record, remove, tmp_path))]) == 1
    assert capsys.readouterr().out.startswith("different: step ")


def test_a_request_that_is_there_twice_is_found(record: Path, tmp_path: Path, capsys: Any) -> None:
    def repeat(lines: list[Line]) -> None:
        index = find(lines, "added")
        lines.insert(index, lines[index])

    assert main([str(changed(record, repeat, tmp_path))]) == 1
    assert "  now       failed: AssertionError: " in capsys.readouterr().out


@pytest.mark.parametrize("module", [scheduler, preemption])
def test_another_rule_for_victims_decides_otherwise(
    module: object, record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([str(record)]) == 0
    monkeypatch.setattr(module, "first_victim", _first)
    assert main([str(record)]) == 1


def test_another_constant_decides_otherwise(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "TOKENS_PER_STEP_OF_AGE", 1)
    assert main([str(record)]) == 1


def _first(candidates: list[Sequence], _memory: object) -> Sequence | None:
    return next((each for each in candidates if not each.is_protected), None)


def test_a_damaged_line_is_named(record: Path, tmp_path: Path, capsys: Any) -> None:
    lines = record.read_text().splitlines(keepends=True)
    lines[10] = lines[10][:15] + "\n"
    (tmp_path / "damaged.jsonl").write_text("".join(lines))
    assert main([str(tmp_path / "damaged.jsonl")]) == 1
    assert capsys.readouterr().out.startswith("line 11 cannot be read: ")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "No such file"),
        ("", "is not a record of an engine's steps"),
        ("{}\n", "is not a record of an engine's steps"),
        ("\x89PNG\n", "is not a record of an engine's steps"),
        ('{"kind": "header", "version": 0}\n', "has format version 0; this code reads 1"),
        ('{"kind": "header", "version": 1}\n', "has a first line that cannot be read"),
    ],
)
def test_what_is_no_record_is_refused(content: str | None, told: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    assert main([str(path)]) == 2
    assert told in capsys.readouterr().err


def test_a_wrong_option_is_refused_and_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in (["file", "--steps", "x"], 2), ([], 2), (["--help"], 0):
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        assert exit_info.value.code == code
    out = capsys.readouterr()
    assert "'x' is not FIRST:LAST, two step numbers" in out.err
    assert "example: python -m engine.replay steps.jsonl" in out.out


def test_steps_are_shown_as_a_table(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(record), "--steps", "20:29"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1][:3] == ["step", "s", "ms"]
    assert [row[0] for row in rows[2:12]] == [str(number) for number in range(20, 30)]
    assert main([str(record), "--steps", "5000"]) == 0
    assert "note: the record has none of these steps" in capsys.readouterr().out


def test_the_life_of_a_request_is_told_with_what_held_it_up(tmp_path: Path, capsys: Any) -> None:
    run = Recorded.start(tmp_path / "steps.jsonl", num_blocks=5, max_num_seqs=1)
    low = request("r1", num_prompt=4, lane=2, tenant="slow", sampling=sampling(3, ignore_eos=True))
    run.engine.add(request("r11", num_prompt=4, lane=1, sampling=sampling(2, ignore_eos=True)))
    run.engine.add(low)
    run.engine.step()
    run.clock.advance(0.25)
    run.engine.step()
    run.engine.step()  # r1 joins
    run.engine.add(request("r2", num_prompt=4, lane=0, sampling=sampling(1)))
    run_to_end(run.engine)
    run.engine.close()
    assert main([str(run.path), "--request", "r1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:10] == [
        "    0.000 s  r1 came: tenant slow, lane 2, 4 prompt tokens, up to 3 new ones, choices 1, timeout none",
        "    0.000 s  step 1: r1 waits: every slot is taken",
        "    0.250 s  step 3: r1 has waited 2 steps for that",
        "    0.250 s  step 3: r1 joined; 0 tokens were in memory already",
        "    0.250 s  step 3: r1 computed 4 tokens from 0 on, and got its first token",
        "    0.250 s  step 4: r1 stepped back (lane) for r2, and gave up 1 blocks; 4 tokens to compute again",
        f"    0.250 s  step 4: r1 waits: {Obstacle(hold=Hold.PREEMPTION, sequence_id='r1')}",
        "    0.250 s  step 5: r1 has waited 1 step for that",
        "    0.250 s  step 5: r1 joined; 4 tokens were in memory already",
        "    0.250 s  step 6: r1 ended: length, after 3 tokens here",
    ]


def test_an_unknown_request_is_said_to_be_so(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(record), "--request", "nobody"]) == 0
    assert "note: the record has no request 'nobody'" in capsys.readouterr().out


def test_replay_imports_no_torch() -> None:
    code = "import sys, engine.replay; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
