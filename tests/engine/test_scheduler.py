"""The scheduler under an executor that reads every token back through the block table."""

from __future__ import annotations

from typing import Any

import pytest

from engine.api import Choice, FinishReason
from engine.config import EngineConfig
from engine.scheduler import Scheduler, build_scheduler
from engine.sequence import Sequence, Status
from tests.engine.makers import DEFAULTS, PagedMemoryExecutor, expected_output, request, sampling


def make_scheduler(num_blocks: int = 64, **changes: Any) -> Scheduler:
    return build_scheduler(EngineConfig(**{**DEFAULTS, **changes}), num_blocks)


def step(scheduler: Scheduler, executor: PagedMemoryExecutor) -> list[tuple[str, int, int]]:
    """One turn; what was planned as (request, start, tokens)."""
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
    add(scheduler, "long", 1, num_prompt=100, lane=0)  # older and in a higher lane: planned first, all the same
    for turn in range(6):
        assert step(scheduler, executor) == ([("stream", 4, 1), ("long", 0, 15)] if turn == 0 else
            [("long", 15 * turn, 15), ("stream", 4 + turn, 1)])  # fmt: skip


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


def test_the_youngest_of_the_lowest_lane_gives_way_and_keeps_its_tokens() -> None:
    scheduler, executor = make_scheduler(num_blocks=4), PagedMemoryExecutor(4)
    old = add(scheduler, "old", 1, num_prompt=7, max_tokens=9)
    young = add(scheduler, "young", 2, num_prompt=7, max_tokens=9)
    while not young.num_preemptions:
        step(scheduler, executor)
    assert (young.status, young.block_ids, young.num_computed) == (Status.WAITING, [], 0)
    assert old.num_preemptions == 0
    kept = young.token_ids[young.num_prompt :]
    assert kept == expected_output(young.request.prompt_token_ids, sampling(len(kept)), eos=None)
    while scheduler.roster.num_open:
        step(scheduler, executor)
    assert young.token_ids[7:] == expected_output(young.request.prompt_token_ids, sampling(9), eos=None)
    assert young.finish_reason is FinishReason.LENGTH


def test_nobody_joins_in_a_step_that_preempts() -> None:
    scheduler, executor = make_scheduler(num_blocks=4), PagedMemoryExecutor(4)
    add(scheduler, "old", 1, num_prompt=8)
    add(scheduler, "young", 2, num_prompt=8)
    step(scheduler, executor)
    add(scheduler, "third", 3, num_prompt=1, lane=0)  # there is room for it, and it is first in the queue
    plan = scheduler.schedule(0.0)
    assert (plan.preempted, plan.joined) == (("young",), ())


def test_a_head_that_does_not_fit_is_not_overtaken() -> None:
    scheduler, executor = make_scheduler(num_blocks=4), PagedMemoryExecutor(4)
    add(scheduler, "running", 1, num_prompt=6, max_tokens=2)
    step(scheduler, executor)
    add(scheduler, "large", 2, num_prompt=12)
    add(scheduler, "small", 3, num_prompt=1)
    assert step(scheduler, executor) == [("running", 6, 1)]
    assert [name for name, _, _ in step(scheduler, executor)] == ["large", "small"]


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_a_cancel_takes_back_everything_at_any_point(steps_before: int) -> None:
    scheduler, executor = make_scheduler(), PagedMemoryExecutor(4)
    sequence = add(scheduler, "gone", 1, num_prompt=20)
    for _ in range(steps_before):
        step(scheduler, executor)
    scheduler.roster.finish(sequence, FinishReason.CANCELLED)
    assert (scheduler.roster.memory.pool.num_used, scheduler.roster.num_open) == (0, False)
    scheduler.roster.check_integrity()
    assert scheduler.schedule(0.0).chunks == ()


def test_an_ended_sequence_cannot_move() -> None:
    sequence = Sequence(request(), Choice(), arrival=1, eos_token_ids=frozenset())
    sequence.move_to(Status.FINISHED)
    with pytest.raises(AssertionError, match="finished -> running"):
        sequence.move_to(Status.RUNNING)
