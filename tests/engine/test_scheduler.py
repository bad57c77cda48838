"""The scheduler under an executor that reads every token back through the block table."""

from __future__ import annotations

from typing import Any

import pytest

from engine.api import Choice, FinishReason
from engine.config import EngineConfig, PrefixCache
from engine.scheduler import Scheduler, build_scheduler
from engine.sequence import Sequence, Status
from tests.engine.makers import (
    DEFAULTS,
    PagedMemoryExecutor,
    collect,
    expected_output,
    make_engine,
    request,
    run_to_end,
    sampling,
)


def make_scheduler(num_blocks: int = 64, **changes: Any) -> Scheduler:
    return build_scheduler(EngineConfig(**{**DEFAULTS, **changes}), num_blocks)


def step(scheduler: Scheduler, executor: PagedMemoryExecutor) -> list[tuple[str, int, int]]:
    """One turn; what was planned as (sequence, start, tokens)."""
    plan = scheduler.schedule(0.0)
    scheduler.commit(plan, executor.execute(plan))
    return [(chunk.sequence_id, chunk.start, len(chunk.token_ids)) for chunk in plan.chunks]


def add(scheduler: Scheduler, request_id: str, arrival: int, num_prompt: int = 4, **changes: Any) -> Sequence:
    asked = request(request_id, num_prompt, **changes)
    sequence = Sequence(asked, asked.choices[0], arrival=arrival, eos_token_ids=frozenset())
    scheduler.roster.add([sequence])
    return sequence


def test_a_prompt_is_computed_in_chunks_under_the_budget() -> None:
    scheduler, executor = make_scheduler(), PagedMemoryExecutor(4)
    add(scheduler, "long", 1, num_prompt=40)
    assert [step(scheduler, executor) for _ in range(4)] == [
        [("long", 0, 16)],
        [("long", 16, 16)],
        [("long", 32, 8)],
        [("long", 40, 1)],
    ]


def test_a_long_prompt_never_stops_a_running_stream() -> None:
    scheduler, executor = make_scheduler(), PagedMemoryExecutor(4)
    add(scheduler, "stream", 2, num_prompt=4, max_tokens=20)
    step(scheduler, executor)
    add(scheduler, "long", 1, num_prompt=100, lane=0)  # older and in a higher lane: the stream goes on all the same
    for turn in range(6):
        assert sorted(step(scheduler, executor)) == [("long", 15 * turn, 15), ("stream", 4 + turn, 1)]


def test_prompts_beside_decodes_have_a_bound_of_their_own() -> None:
    scheduler, executor = make_scheduler(max_prefill_tokens_with_decodes=6), PagedMemoryExecutor(4)
    add(scheduler, "stream", 1, num_prompt=14, max_tokens=3)
    assert step(scheduler, executor) == [("stream", 0, 14)]  # nothing decodes yet: the whole budget is for prompts
    add(scheduler, "long", 2, num_prompt=40)
    assert step(scheduler, executor) == [("stream", 14, 1), ("long", 0, 6)]
    assert step(scheduler, executor) == [("stream", 15, 1), ("long", 6, 6)]
    assert step(scheduler, executor) == [("long", 12, 16)]


def test_a_short_prompt_is_not_stuck_behind_a_long_one() -> None:
    """Case P-SCH-03: the streams keep their token in every step, and a short prompt passes the long one."""
    scheduler, executor = make_scheduler(max_num_seqs=8), PagedMemoryExecutor(4)
    streams = [f"stream{number}" for number in range(4)]
    for number, name in enumerate(streams):
        add(scheduler, name, number, num_prompt=4, max_tokens=30)
    step(scheduler, executor)
    long = add(scheduler, "long", 10, num_prompt=8 * 12, max_tokens=3)
    step(scheduler, executor)
    add(scheduler, "short", 11, num_prompt=5, max_tokens=1)
    plan = step(scheduler, executor)
    assert [(name, tokens) for name, _, tokens in plan] == [
        *((name, 1) for name in streams),
        ("short", 5),
        ("long", 7),
    ]
    while scheduler.roster.num_open:
        assert sum(tokens for _, _, tokens in step(scheduler, executor)) <= 16
    assert long.token_ids[96:] == expected_output(long.request.prompt_token_ids, sampling(3), eos=None)


def test_a_long_prompt_is_not_passed_for_ever() -> None:
    """A step of age counts as 64 tokens of length, so a prompt of 120 lets shorter ones pass for two steps."""
    scheduler, executor = make_scheduler(max_num_seqs=2), PagedMemoryExecutor(4)
    add(scheduler, "long", 0, num_prompt=120, max_tokens=1)
    served: list[str] = []
    for turn in range(1, 6):
        add(scheduler, f"short{turn}", turn, num_prompt=16, max_tokens=1)
        served += [name for name, _, _ in step(scheduler, executor)]
    assert served == ["short1", "short2", "long", "long", "long"]


def test_waiting_sequences_join_in_the_step_after_a_slot_is_free() -> None:
    scheduler, executor = make_scheduler(max_num_seqs=1), PagedMemoryExecutor(4)
    add(scheduler, "first", 1, max_tokens=1)
    add(scheduler, "second", 2, max_tokens=1)
    assert step(scheduler, executor) == [("first", 0, 4)]
    assert (len(scheduler.roster.running), scheduler.roster.num_open) == (0, 1)
    assert step(scheduler, executor) == [("second", 0, 4)]
    assert not scheduler.roster.num_open


def test_lanes_go_before_arrival() -> None:
    scheduler, executor = make_scheduler(max_num_seqs=1), PagedMemoryExecutor(4)
    add(scheduler, "batch", 1, max_tokens=1, lane=2)
    add(scheduler, "interactive", 2, max_tokens=1, lane=0)
    assert step(scheduler, executor)[0][0] == "interactive"
    assert step(scheduler, executor)[0][0] == "batch"


def test_a_higher_lane_takes_a_slot_from_the_lowest_one() -> None:
    """Case P-SCH-02, slots: its first token comes in the step of its prompt; who was displaced goes on unharmed."""
    engine = make_engine(max_num_seqs=2)
    outputs: dict[str, list[int]] = {}
    for name, lane in (("standard", 1), ("batch", 2)):
        engine.add(request(name, max_tokens=12, lane=lane))
    for _ in range(3):
        collect(engine.step(), outputs)
    engine.add(request("urgent", num_prompt=10, max_tokens=2, lane=0))
    collect(engine.step(), outputs)
    last = engine.recent_steps()[-1]
    assert (last.joined, last.preempted, len(outputs["urgent"])) == (("urgent",), ("batch",), 1)
    (displaced,) = engine.explain("batch")
    assert (displaced.status, displaced.num_preemptions) == ("waiting", 1)
    run_to_end(engine, outputs)
    for name in ("standard", "batch"):
        assert outputs[name] == expected_output(request(name).prompt_token_ids, sampling(12))
    assert engine.stats().num_preemptions == 1


def test_a_higher_lane_takes_memory_from_the_lowest_one() -> None:
    """Case P-SCH-02, memory: slots are free, blocks are not."""
    engine = make_engine(num_blocks=8)
    outputs: dict[str, list[int]] = {}
    for number in range(2):
        engine.add(request(f"low{number}", num_prompt=8, max_tokens=6, lane=2, sampling=sampling(6, ignore_eos=True)))
    for _ in range(4):
        collect(engine.step(), outputs)
    assert engine.stats().num_used_blocks >= 4
    engine.add(request("urgent", num_prompt=20, max_tokens=1, lane=0))
    for _ in range(2):
        collect(engine.step(), outputs)
    assert len(outputs["urgent"]) == 1
    assert engine.stats().num_preemptions in (1, 2)
    run_to_end(engine, outputs)
    for number in range(2):
        prompt = request(f"low{number}", num_prompt=8).prompt_token_ids
        assert outputs[f"low{number}"] == expected_output(prompt, sampling(6, ignore_eos=True))


def test_equals_never_displace_one_another() -> None:
    """Case P-SCH-02: order of service is order of arrival, and nobody is preempted while memory is free."""
    engine = make_engine(max_num_seqs=2)
    for number in range(8):
        engine.add(request(f"r{number}", max_tokens=5, lane=1))
    run_to_end(engine)
    joined = [name for each in engine.recent_steps() for name in each.joined]
    assert joined == [f"r{number}" for number in range(8)]
    assert engine.stats().num_preemptions == 0


def test_nobody_is_preempted_in_vain() -> None:
    scheduler, executor = make_scheduler(num_blocks=8), PagedMemoryExecutor(4)
    add(scheduler, "high", 1, num_prompt=16, max_tokens=8, lane=0)
    add(scheduler, "low", 2, num_prompt=4, max_tokens=8, lane=2)
    step(scheduler, executor)
    step(scheduler, executor)
    assert len(scheduler.roster.running) == 2
    add(scheduler, "large", 3, num_prompt=24, max_tokens=1, lane=1)  # what `low` holds would not be enough for it
    plan = scheduler.schedule(0.0)
    assert plan.preempted == ()


def test_age_lifts_a_waiter_but_gives_it_nothing_of_what_others_hold() -> None:
    scheduler, executor = make_scheduler(max_num_seqs=1, aging_steps=2), PagedMemoryExecutor(4)
    add(scheduler, "running", 1, max_tokens=12, lane=2)
    step(scheduler, executor)
    add(scheduler, "patient", 2, max_tokens=1, lane=2)
    for number in range(8):
        assert step(scheduler, executor)[0][0] == "running"
        add(scheduler, f"new{number}", 10 + number, max_tokens=1, lane=2)
    while (served := step(scheduler, executor)[0][0]) == "running":
        pass
    assert served == "patient"


def test_whoever_steps_back_keeps_its_tokens() -> None:
    scheduler, executor = make_scheduler(num_blocks=6), PagedMemoryExecutor(4)
    old = add(scheduler, "old", 1, num_prompt=7, max_tokens=2)
    step(scheduler, executor)
    young = add(scheduler, "young", 2, num_prompt=7, max_tokens=9)
    higher = add(scheduler, "higher", 3, num_prompt=16, max_tokens=4, lane=0)
    for _ in range(200):
        if not scheduler.roster.num_open:
            break
        step(scheduler, executor)
        scheduler.roster.check_integrity()
    assert (old.status, young.status, higher.status) == (Status.FINISHED,) * 3
    assert young.token_ids[7:] == expected_output(young.request.prompt_token_ids, sampling(9), eos=None)
    assert higher.token_ids[16:] == expected_output(higher.request.prompt_token_ids, sampling(4), eos=None)


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_a_cancel_takes_back_everything_at_any_point(steps_before: int) -> None:
    scheduler, executor = make_scheduler(), PagedMemoryExecutor(4)
    sequence = add(scheduler, "gone", 1, num_prompt=20)
    for _ in range(steps_before):
        step(scheduler, executor)
    scheduler.roster.finish(sequence, FinishReason.CANCELLED)
    assert (scheduler.roster.memory.pool.num_used, scheduler.roster.num_open) == (0, 0)
    scheduler.roster.check_integrity()
    assert scheduler.schedule(0.0).chunks == ()


def test_an_ended_sequence_cannot_move() -> None:
    sequence = Sequence(request(), Choice(), arrival=1, eos_token_ids=frozenset())
    sequence.move_to(Status.FINISHED)
    with pytest.raises(AssertionError, match="finished -> running"):
        sequence.move_to(Status.RUNNING)


def test_two_backlogged_tenants_share_by_their_weights() -> None:
    engine = make_engine(num_blocks=400, prefix_cache=PrefixCache.OFF)
    for number in range(60):
        for tenant, weight in (("small", 1), ("large", 3)):
            engine.add(request(f"{tenant}{number}", num_prompt=20, tenant=tenant, weight=weight, sampling=sampling(1)))
    outputs: dict[str, list[int]] = {}
    while len(outputs) < 60:
        collect(engine.step(), outputs)
    served = [sum(name.startswith(tenant) for name in outputs) for tenant in ("small", "large")]
    assert served[0] == pytest.approx(15, abs=2)
    assert sum(served) >= 60


def test_a_tenant_that_has_left_does_not_set_the_clock_for_those_that_come() -> None:
    """What `steady` has had by then is not held against it: it goes on having its half."""
    engine = make_engine(num_blocks=400, prefix_cache=PrefixCache.OFF, max_num_seqs=2)
    for tenant, number in [("brief", 0), *(("steady", number) for number in range(30))]:
        engine.add(request(f"{tenant}{number}", num_prompt=16, tenant=tenant, sampling=sampling(1)))
    outputs: dict[str, list[int]] = {}
    while len(outputs) < 15:
        collect(engine.step(), outputs)
    for number in range(30):
        engine.add(request(f"new{number}", num_prompt=16, tenant="new", sampling=sampling(1)))
    seen = len(outputs)
    while len(outputs) < seen + 10:
        collect(engine.step(), outputs)
    assert sum(name.startswith("steady") for name in list(outputs)[seen:]) in (4, 5, 6)


def test_protection_ends_with_a_block_of_output() -> None:
    scheduler, executor = make_scheduler(), PagedMemoryExecutor(4)
    sequence = add(scheduler, "sequence", 1, max_tokens=12)
    sequence.preemptions_in_a_row = 2
    counts = []
    for _ in range(5):
        step(scheduler, executor)
        counts.append(sequence.preemptions_in_a_row)
    assert counts == [2, 2, 2, 0, 0]


def test_protection_asks_for_a_block_of_output_since_the_last_return() -> None:
    """What it had produced before does not count, or one that has much would never be protected."""
    scheduler, executor = make_scheduler(), PagedMemoryExecutor(4)
    sequence = add(scheduler, "sequence", 1, max_tokens=20)
    for _ in range(6):
        step(scheduler, executor)
    scheduler.roster.preempt(sequence)
    sequence.preemptions_in_a_row = 2
    counts: list[int] = []
    while len(counts) < 5:
        num_output = sequence.num_output
        step(scheduler, executor)
        if sequence.num_output > num_output:
            counts.append(sequence.preemptions_in_a_row)
    assert counts == [2, 2, 2, 0, 0]
