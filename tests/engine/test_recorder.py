from __future__ import annotations

import json
import logging
import stat
from pathlib import Path

import pytest

from engine.api import Choice, FinishReason
from engine.config import ConfigError, PrefixCache
from engine.hold import Hold, Obstacle
from engine.plan import BlockCopy, Preemption, PreemptionCause
from engine.record_reader import RecordReader
from engine.recorder import decode
from engine.records import Added, Cancelled, ChunkRecord, Departure, Full, HandedBack, Header, Record, Stepped
from tests.engine.makers import request, run_to_end, sampling
from tests.engine.recorded import NUM_BLOCKS, Recorded


def steps(records: list[Record]) -> list[Stepped]:
    return [record for record in records if isinstance(record, Stepped)]


def test_a_record_tells_what_came_in_what_was_computed_and_who_left_with_how_much(tmp_path: Path) -> None:
    run = Recorded.start(tmp_path / "steps.jsonl")
    asked = request("r", num_prompt=6, sampling=sampling(3, ignore_eos=True))
    run.engine.add(asked)
    output = run_to_end(run.engine)["r"]
    run.engine.close()
    added, *rest = run.records()
    assert added == Added(at_s=1234.5, request=asked)
    chunks = [step.chunks for step in steps(rest)]
    assert chunks == [
        (ChunkRecord(sequence_id="r", start=0, num_tokens=6, token_id=output[0], new_block_ids=(0, 1)),),
        (ChunkRecord(sequence_id="r", start=6, token_id=output[1]),),
        (ChunkRecord(sequence_id="r", start=7, token_id=output[2]),),
    ]
    assert [step.joined for step in steps(rest)] == [("r",), (), ()]
    left = Departure(sequence_id="r", reason=FinishReason.LENGTH, num_blocks=2)
    assert [step.left for step in steps(rest)] == [(), (), (left,)]


def test_steps_are_recorded_with_the_accounts_and_times_of_their_summaries(tmp_path: Path) -> None:
    run = Recorded.start(tmp_path / "steps.jsonl")
    run.live(50)
    summaries = run.engine.recent_steps()
    recorded = steps(run.records())
    assert [(step.step, step.tokens, step.places) for step in recorded] == [
        (summary.step, summary.tokens, summary.places) for summary in summaries
    ]
    assert [step.times.executed - step.times.scheduled for step in recorded] == [each.execute_s for each in summaries]


def test_a_preemption_is_recorded_with_its_cause_and_the_numbers_of_the_choice(tmp_path: Path) -> None:
    run = Recorded.start(tmp_path / "steps.jsonl", num_blocks=8)
    run.engine.add(request("low", num_prompt=16, lane=2, sampling=sampling(8, ignore_eos=True)))
    run.engine.step()
    run.engine.step()
    run.engine.add(request("high", num_prompt=16, lane=0, sampling=sampling(4, ignore_eos=True)))
    run.engine.step()
    last = steps(run.records())[-1]
    assert last.preemptions == (
        Preemption(
            sequence_id="low",
            cause=PreemptionCause.LANE,
            in_favour_of="high",
            lane=2,
            num_lost_tokens=17,
            num_blocks=5,
        ),
    )
    assert last.joined == ("high",)


def test_a_preemption_for_want_of_memory_names_who_needed_the_block(tmp_path: Path) -> None:
    run = Recorded.start(tmp_path / "steps.jsonl", num_blocks=5, watermark=0.0)
    run.engine.add(request("low", num_prompt=4, lane=1, sampling=sampling(8, ignore_eos=True)))
    run.engine.step()
    run.engine.add(request("high", num_prompt=12, lane=0, sampling=sampling(4, ignore_eos=True)))
    run.engine.step()
    run.engine.step()
    (preemption,) = steps(run.records())[-1].preemptions
    assert preemption == Preemption(
        sequence_id="low",
        cause=PreemptionCause.MEMORY,
        in_favour_of="high",
        lane=1,
        num_lost_tokens=5,
        num_blocks=2,
    )


def test_who_joins_again_is_recorded_with_all_of_its_blocks(tmp_path: Path) -> None:
    run = Recorded.start(tmp_path / "steps.jsonl", num_blocks=5, prefix_cache=PrefixCache.OFF)
    run.engine.add(request("low", num_prompt=9, lane=2, sampling=sampling(3, ignore_eos=True)))
    run.engine.step()
    run.engine.add(request("high", num_prompt=16, lane=0, sampling=sampling(1)))
    run_to_end(run.engine)
    first, again = (step for step in steps(run.records()) if "low" in step.joined)
    assert (len(first.chunks[0].new_block_ids), len(again.chunks[0].new_block_ids)) == (3, 3)


def test_a_record_says_what_keeps_the_head_of_the_queue_out(tmp_path: Path) -> None:
    run = Recorded.start(tmp_path / "steps.jsonl", max_num_seqs=1)
    for name in ("first", "second"):
        run.engine.add(request(name))
    run.engine.step()
    obstacle = steps(run.records())[0].obstacle
    assert obstacle is not None
    assert (obstacle.hold, obstacle.sequence_id) == (Hold.SLOT, "second")
    assert obstacle == Obstacle(
        hold=Hold.SLOT, sequence_id="second", num_needed=1, num_available=NUM_BLOCKS - 1, num_kept_free=2
    )


def test_choices_that_part_are_recorded_with_the_block_they_copy(tmp_path: Path) -> None:
    run = Recorded.start(tmp_path / "steps.jsonl")
    run.engine.add(request("r", num_prompt=6, choices=(Choice(), Choice(index=1))))
    run.engine.step()
    run.engine.step()
    assert steps(run.records())[1].copies == (BlockCopy(source=1, target=2),)


def test_cancels_deadlines_and_hand_backs_are_recorded_with_the_reason(tmp_path: Path) -> None:
    run = Recorded.start(tmp_path / "steps.jsonl")
    run.engine.add(request("gone", max_tokens=20))
    run.engine.add(request("late", max_tokens=20, timeout_s=1.0))
    run.engine.add(request("kept", num_prompt=5, max_tokens=20))
    run.engine.step()
    run.engine.cancel("gone")
    run.clock.advance(1.0)
    run.engine.step()
    run.engine.hand_back()
    run.engine.close()
    records = run.records()
    assert Cancelled(at_s=1234.5, request_id="gone") in records
    assert steps(records)[1].left == (
        Departure(sequence_id="gone", reason=FinishReason.CANCELLED, num_blocks=1),
        Departure(sequence_id="late", reason=FinishReason.DEADLINE, num_blocks=1),
    )
    assert records[-1] == HandedBack(at_s=1235.5, sequence_ids=("kept",))


def test_an_id_that_is_used_again_before_the_next_step_is_told_apart(tmp_path: Path) -> None:
    run = Recorded.start(tmp_path / "steps.jsonl")
    run.engine.add(request("r", num_prompt=9, max_tokens=20))
    run.engine.step()
    run.engine.cancel("r")
    run.engine.add(request("r", num_prompt=4, max_tokens=20))
    run.engine.step()
    again = steps(run.records())[1]
    assert again.left == (Departure(sequence_id="r", reason=FinishReason.CANCELLED, num_blocks=3),)
    assert len(again.chunks[0].new_block_ids) == 1


def test_recording_changes_nothing(tmp_path: Path) -> None:
    assert Recorded.start(tmp_path / "steps.jsonl").live(300) == Recorded.start(None).live(300)


def test_the_file_is_the_owners_and_there_without_waiting_for_the_end(tmp_path: Path) -> None:
    run = Recorded.start(tmp_path / "new" / "steps.jsonl")
    run.engine.add(request())
    run.engine.step()
    assert run.path is not None
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o600
    assert [record.kind for record in RecordReader(run.path)] == ["added", "step"]
    run.engine.close()


def test_at_its_bound_the_record_says_so_and_ends_but_the_engine_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = Recorded.start(tmp_path / "whole.jsonl")
    cut = Recorded.start(tmp_path / "cut.jsonl", record_max_bytes=20_000)
    assert cut.live(100) == whole.live(100)
    assert cut.path is not None
    assert 19_000 < cut.path.stat().st_size <= 20_000
    records = cut.records()
    assert records == whole.records()[: len(records)]
    last = json.loads(cut.path.read_text().splitlines()[-1])
    assert last == {"kind": "full", "max_bytes": 20_000}
    assert Full(**last).max_bytes == 20_000
    assert caplog.text.count("the steps are recorded no longer") == 1


def test_a_bound_below_the_first_line_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="record_max_bytes is 100, but the first line alone takes"):
        Recorded.start(tmp_path / "steps.jsonl", record_max_bytes=100)


def test_a_file_that_cannot_be_written_is_refused_at_start_up(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"record_steps: .*/file/steps.jsonl cannot be written: .*File exists"):
        Recorded.start(tmp_path / "file" / "steps.jsonl")
    with pytest.raises(ConfigError, match=r"record_steps: .* cannot be written: .*Is a directory"):
        Recorded.start(tmp_path)
    with pytest.raises(ConfigError, match=r"record_steps: /dev/full cannot be written: .*No space left on device"):
        Recorded.start(Path("/dev/full"))


def test_a_disk_that_fills_up_ends_the_record_and_not_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Recorded.start(tmp_path / "steps.jsonl")
    full_disk = Path("/dev/full").open("wb")  # noqa: SIM115
    recorder = run.engine._recorder
    recorder._file.close()  # type: ignore[union-attr]
    recorder._file = full_disk  # type: ignore[union-attr]
    with caplog.at_level(logging.ERROR):
        assert run.live(100) == Recorded.start(None).live(100)
    assert full_disk.closed
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        "the steps are recorded no longer: [Errno 28] No space left on device"
    ]


def test_the_first_line_holds_what_the_scheduler_is_built_from(tmp_path: Path) -> None:
    run = Recorded.start(tmp_path / "steps.jsonl", num_blocks=9, aging_steps=3)
    run.engine.close()
    assert run.path is not None
    header = decode(run.path.read_bytes().splitlines()[0])
    assert isinstance(header, Header)
    assert (header.num_blocks, header.config.aging_steps, header.facts.eos_token_ids) == (9, 3, frozenset({999}))
