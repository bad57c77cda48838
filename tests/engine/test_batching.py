"""When sequences may join: as slots come free, or only once the whole batch before them has ended."""

from __future__ import annotations

import pytest

from engine.config import BatchingMode
from engine.engine import Engine
from tests.engine.makers import VirtualClock, make_engine, request, run_to_end, sampling


def add(engine: Engine, name: str, max_tokens: int) -> None:
    engine.add(request(name, sampling=sampling(max_tokens, ignore_eos=True)))


def joins(engine: Engine) -> list[list[str]]:
    """Who joined together, step by step; steps without a newcomer left out."""
    return [list(step.joined) for step in engine.recent_steps() if step.joined]


def idle_slots(engine: Engine) -> list[int]:
    return [step.num_idle_slots for step in engine.recent_steps()]


def test_continuous_members_come_and_go_at_every_step() -> None:
    engine = make_engine(max_num_seqs=2)
    for name, max_tokens in (("long", 4), ("short", 1), ("next", 1)):
        add(engine, name, max_tokens)
    run_to_end(engine)
    assert joins(engine) == [["long", "short"], ["next"]]
    assert idle_slots(engine) == [0] * 4


@pytest.mark.parametrize("mode", [BatchingMode.STATIC, BatchingMode.DYNAMIC])
def test_a_batch_runs_to_its_end_before_the_next_is_formed(mode: BatchingMode) -> None:
    engine = make_engine(max_num_seqs=2, batching=mode)
    for name, max_tokens in (("long", 4), ("short", 1), ("next", 1), ("last", 1)):
        add(engine, name, max_tokens)
    run_to_end(engine)
    assert joins(engine) == [["long", "short"], ["next", "last"]]
    assert idle_slots(engine) == [1, 1, 1, 2, 2]
    assert engine.stats().num_idle_slot_steps == 7


def test_a_static_batch_has_all_its_slots_and_a_dynamic_one_as_many_as_it_found() -> None:
    for mode, idle in ((BatchingMode.STATIC, 3), (BatchingMode.DYNAMIC, 0)):
        engine = make_engine(max_num_seqs=4, batching=mode)
        add(engine, "only", 3)
        engine.step()
        add(engine, "late", 1)
        engine.step()
        assert joins(engine) == [["only"]]
        assert idle_slots(engine) == [idle, idle]
        run_to_end(engine)
        assert joins(engine) == [["only"], ["late"]]


def test_a_batch_is_no_larger_than_it_may_be() -> None:
    engine = make_engine(max_num_seqs=4, batching=BatchingMode.STATIC, max_batch_size=2)
    for number in range(3):
        add(engine, str(number), 1)
    run_to_end(engine)
    assert joins(engine) == [["0", "1"], ["2"]]


def test_a_dynamic_batch_waits_for_company_but_not_for_longer_than_it_may() -> None:
    clock = VirtualClock()
    engine = make_engine(max_num_seqs=2, batching=BatchingMode.DYNAMIC, max_delay_ms=500.0, clock=clock)
    assert engine.delay_s == 0.0  # nobody is there to wait for company
    add(engine, "first", 1)
    clock.advance(0.2)
    assert engine.delay_s == pytest.approx(0.3)
    engine.step()
    assert joins(engine) == []
    clock.advance(0.3)
    assert engine.delay_s == 0.0
    engine.step()
    assert joins(engine) == [["first"]]

    add(engine, "second", 1)
    add(engine, "third", 1)
    assert engine.delay_s == 0.0
    engine.step()
    assert joins(engine) == [["first"], ["second", "third"]]


@pytest.mark.parametrize("mode", [BatchingMode.STATIC, BatchingMode.DYNAMIC])
def test_a_member_that_had_to_step_back_returns_and_no_stranger_takes_its_seat(mode: BatchingMode) -> None:
    engine = make_engine(num_blocks=26, max_num_seqs=4, max_batch_size=3, batching=mode)
    for name, max_tokens in (("first to end", 40), ("last to end", 52), ("youngest", 60)):
        add(engine, name, max_tokens)
    engine.step()
    add(engine, "stranger", 1)
    run_to_end(engine)
    assert engine.stats().num_preemptions == 1
    assert joins(engine) == [["first to end", "last to end", "youngest"], ["youngest"], ["stranger"]]
    assert [idle_slots(engine)[step - 1] for step in (30, 40)] == [0, 1], "its seat is not an idle one"
    (returned,) = [step for step in engine.recent_steps() if step.joined == ("youngest",)]
    assert returned.num_running == 2


def test_members_that_end_before_they_join_leave_no_seat_behind() -> None:
    engine = make_engine(max_num_seqs=3, max_num_batched_tokens=4, batching=BatchingMode.STATIC)
    for name in ("a", "b", "c"):
        add(engine, name, 3)
    engine.step()
    engine.cancel("b")
    engine.cancel("c")
    add(engine, "stranger", 1)
    run_to_end(engine)
    assert joins(engine) == [["a"], ["stranger"]]
