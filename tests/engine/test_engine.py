from __future__ import annotations

import random

import pytest

from engine.api import FinishReason, PlaceAccount, RequestRefusedError
from engine.config import PrefixCache, StepCost
from engine.simulated import SimulatedExecutor
from tests.engine.makers import EOS, VOCAB, VirtualClock, expected_output, make_engine, request, run_to_end, sampling


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (request(num_prompt=0), "the prompt is empty"),
        (request(num_prompt=250, max_tokens=7), "250 prompt tokens and max_tokens 7 make 257, over the model's 256"),
        (request(max_tokens=2, resumed_token_ids=(1, 2)), "2 resumed tokens leave nothing of max_tokens 2"),
        (request(sampling=sampling(stop_token_ids=(VOCAB,))), "token ids must lie in 0..999"),
        (request(resumed_token_ids=(-1,)), "token ids must lie in 0..999"),
    ],
)
def test_what_can_never_run_is_refused_with_the_numbers(bad: object, told: str) -> None:
    with pytest.raises(RequestRefusedError, match=told):
        make_engine().check_request(bad)  # type: ignore[arg-type]


def test_a_request_of_exactly_the_full_length_runs() -> None:
    engine = make_engine()
    full = request(num_prompt=250, max_tokens=6)
    engine.check_request(full)
    engine.add(full)
    assert run_to_end(engine) == {"r": expected_output(full.prompt_token_ids, full.sampling)}


def test_eos_and_stop_tokens_end_a_sequence_and_are_its_last_token() -> None:
    engine = make_engine()
    plain = expected_output(request().prompt_token_ids, sampling(8))
    engine.add(request(sampling=sampling(8, stop_token_ids=(plain[3],))))
    deltas = []
    while engine.has_work:
        deltas += [output.delta for output in engine.step()]
    assert [delta.token_ids[0] for delta in deltas] == plain[:4]
    assert deltas[-1].finish_reason is FinishReason.STOP


def test_min_tokens_holds_the_end_back() -> None:
    plain = expected_output(request().prompt_token_ids, sampling(8))
    params = sampling(8, stop_token_ids=(plain[1], plain[2]), min_tokens=6)
    engine = make_engine()
    engine.add(request(sampling=params))
    output = run_to_end(engine)["r"]
    assert output == expected_output(request().prompt_token_ids, params)
    assert not {plain[1], plain[2], EOS} & set(output[:6])


def test_a_sequence_may_end_with_the_first_token_after_min_tokens() -> None:
    plain = expected_output(request().prompt_token_ids, sampling(8))
    engine = make_engine()
    engine.add(request(sampling=sampling(8, stop_token_ids=(plain[3],), min_tokens=3)))
    assert run_to_end(engine)["r"] == plain[:4]


def test_a_cancelled_request_is_among_those_that_left_before_the_next_step() -> None:
    engine = make_engine()
    for name in ("stays", "goes"):
        engine.add(request(name, sampling=sampling(3, ignore_eos=True)))
    engine.step()
    engine.cancel("goes")
    engine.step()
    assert [step.left for step in engine.recent_steps()] == [(), ("goes",)]


def test_every_step_is_accounted_for() -> None:
    clock = VirtualClock()
    executor = SimulatedExecutor(
        vocab_size=VOCAB, cost=StepCost(base_s=1.0, per_token_s=0.5, per_seq_s=0.25), sleep=clock.advance
    )
    engine = make_engine(executor=executor, clock=clock)
    engine.add(request("a", num_prompt=4, sampling=sampling(2, ignore_eos=True)))
    engine.add(request("b", num_prompt=20, sampling=sampling(1, ignore_eos=True)))
    run_to_end(engine)
    first, second = engine.recent_steps()
    assert (first.joined, first.left, first.tokens.new_prefill, first.tokens.decode) == (("a", "b"), (), 16, 0)
    assert (second.joined, second.left, second.tokens.new_prefill, second.tokens.decode) == ((), ("a", "b"), 8, 1)
    assert (first.tokens.budget, first.tokens.unused, second.tokens.unused) == (16, 0, 7)
    # After the first step: 16 tokens are computed, 9 more are known, of which one has no block yet.
    assert first.places == PlaceAccount(total=256, live=16, reserved=8, tail_waste=0, cached_idle=0, free=232)
    assert (first.execute_s, second.execute_s) == (1 + 16 / 2 + 0.5, 1 + 9 / 2 + 0.5)
    assert (first.num_running, second.num_running) == (2, 0)
    assert (second.places.free + second.places.cached_idle, second.places.cached_idle) == (256, 24)
    stats = engine.stats()
    assert (stats.num_prompt_tokens, stats.num_generated_tokens, stats.num_padding_tokens) == (24, 3, 0)


def test_members_join_and_leave_while_others_run() -> None:
    engine = make_engine(max_num_seqs=4)
    for number in range(12):
        engine.add(request(f"r{number}", num_prompt=3, sampling=sampling(2 + number % 5, ignore_eos=True)))
    run_to_end(engine)
    steps = engine.recent_steps()
    changes = [step for step in steps[1:-1] if step.joined or step.left]
    assert len(changes) > len(steps) / 2
    assert max(step.num_running for step in steps) == 4


def test_after_a_storm_of_cancels_every_count_is_back_to_zero() -> None:
    rng = random.Random(7)
    clock = VirtualClock()
    executor = SimulatedExecutor(vocab_size=VOCAB, cost=StepCost(), sleep=clock.advance)
    engine = make_engine(num_blocks=80, max_num_seqs=16, max_num_batched_tokens=64, executor=executor, clock=clock)
    pending = [
        request(f"r{number}", rng.randint(1, 100), rng.randint(1, 60), lane=rng.randrange(3)) for number in range(300)
    ]
    ended: list[str] = []
    opened: list[str] = []
    while pending or engine.has_work:
        for _ in range(min(len(pending), rng.randint(0, 6))):
            opened.append(pending[-1].request_id)
            engine.add(pending.pop())
        if opened and rng.random() < 0.5:
            cancelled = engine.cancel(rng.choice(opened))
            ended += [output.request_id for output in cancelled]
        ended += [output.request_id for output in engine.step() if output.delta.finish_reason]
        engine.check_integrity()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert stats.num_preemptions > 0
    assert sorted(ended) == sorted(f"r{number}" for number in range(300))


@pytest.mark.parametrize("prefix_cache", [PrefixCache.OFF, PrefixCache.TENANT])
def test_what_can_never_fit_is_refused_and_what_outgrows_the_memory_ends_there(prefix_cache: PrefixCache) -> None:
    """Case P-SCH-01: a pool smaller than the largest request; small ones behind it are served."""
    engine = make_engine(num_blocks=8, max_model_len=256, prefix_cache=prefix_cache)
    with pytest.raises(RequestRefusedError, match="33 tokens can never fit: the whole KV cache holds 32"):
        engine.check_request(request(num_prompt=33, max_tokens=1))
    outgrows = request("outgrows", num_prompt=8, sampling=sampling(200, ignore_eos=True))
    engine.check_request(outgrows)
    engine.add(outgrows)
    small = [request(f"small{number}", num_prompt=4, max_tokens=3) for number in range(10)]
    for each in small:
        engine.add(each)
    outputs = run_to_end(engine)
    assert outputs["outgrows"] == expected_output(outgrows.prompt_token_ids, outgrows.sampling)[:25]
    assert all(outputs[each.request_id] == expected_output(each.prompt_token_ids, each.sampling) for each in small)
    assert engine.stats().num_preemptions <= 3


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_a_request_ends_in_the_step_after_its_time_is_over(num_steps: int) -> None:
    """Waiting, while it computes its prompt, and while it decodes."""
    clock = VirtualClock()
    engine = make_engine(clock=clock)
    engine.add(request(num_prompt=20, max_tokens=50, timeout_s=5.0))
    for _ in range(num_steps):
        engine.step()
    clock.advance(5.0)
    (last,) = engine.step()
    assert last.delta.finish_reason is FinishReason.DEADLINE
    assert (engine.has_work, engine.stats().num_used_blocks) == (False, 0)


def test_the_deadline_of_one_that_has_ended_does_not_end_another_of_the_same_name() -> None:
    clock = VirtualClock()
    engine = make_engine(clock=clock)
    engine.add(request("again", max_tokens=1, timeout_s=5.0))
    run_to_end(engine)
    engine.add(request("again", max_tokens=3, timeout_s=50.0))
    clock.advance(10.0)
    assert run_to_end(engine) == {"again": expected_output(request("again").prompt_token_ids, sampling(3))}


def test_a_waiting_request_is_told_what_it_waits_for() -> None:
    engine = make_engine(max_num_seqs=1)
    for name in ("runs", "first", "second"):
        engine.add(request(name, max_tokens=50))
    for _ in range(3):
        engine.step()
    (runs,), (first,), (second,) = (engine.explain(name) for name in ("runs", "first", "second"))
    assert (runs.status, runs.now) == ("running", None)
    assert (first.now, first.waited_steps) == ("every slot is taken", {"slot": 3})
    assert second.now == "behind first: every slot is taken"


def test_a_prompt_for_which_no_budget_is_left_is_told_so() -> None:
    engine = make_engine()
    for name in ("first", "second"):
        engine.add(request(name, num_prompt=40))
    for _ in range(3):
        engine.step()
    assert [engine.explain(name)[0].waited_steps for name in ("first", "second")] == [{}, {"budget": 2}]
    assert (engine.stats().num_running, engine.stats().num_waiting) == (2, 0)
    engine.cancel("first")
    engine.add(request("third"))
    assert (engine.stats().num_running, engine.stats().num_waiting) == (1, 1)


def test_the_parts_of_a_job_are_explained_together() -> None:
    engine = make_engine()
    for name in ("job.0", "job.1", "job2.0", "jo"):
        engine.add(request(name))
    assert [each.sequence_id for each in engine.explain("job")] == ["job.0", "job.1"]
    assert engine.explain("job.") == engine.explain("other") == []


def test_a_chance_of_memory_is_told_with_its_numbers() -> None:
    engine = make_engine(num_blocks=8)
    engine.add(request("runs", num_prompt=8, max_tokens=20))
    engine.step()
    engine.add(request("large", num_prompt=20, max_tokens=2))
    engine.step()
    (large,) = engine.explain("large")
    assert large.now == "needs 5 blocks, 5 are free or cached, 4 are kept for the growth of running sequences"
