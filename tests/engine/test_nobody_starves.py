"""More work than there is room for, in the highest lane, for ever: the lowest lane gets its turn all the same."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine import Engine
from tests.engine.makers import make_engine, request, sampling

STEPS_EACH = 3


def steps_until_served(engine: Engine, lane: int, arrivals: list[int], limit: int) -> int | None:
    """When one request of `lane` gets its first token, if `arrivals` of lane 0 come at each step, over and over.

    When it comes, the slots are taken.
    """
    for name in ("first", "second"):
        engine.add(request(name, num_prompt=4, lane=0, sampling=sampling(STEPS_EACH, ignore_eos=True)))
    engine.step()
    engine.add(request("patient", num_prompt=4, lane=lane, sampling=sampling(1)))
    for step in range(limit):
        for number in range(arrivals[step % len(arrivals)]):
            params = sampling(STEPS_EACH, ignore_eos=True)
            engine.add(request(f"{step}-{number}", num_prompt=4, lane=0, sampling=params))
        if any(output.request_id == "patient" for output in engine.step()):
            return step
    return None


@settings(max_examples=300)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(1, 2), st.integers(1, 6))
def test_a_lower_lane_waits_for_who_came_within_its_aging_time_and_for_nobody_else(
    arrivals: list[int], lane: int, aging_steps: int
) -> None:
    """A request of lane n is ahead of all of lane 0 that come n * aging_steps steps after it, or later.

    So before it go at most those that came earlier, two slots at a time, and those that hold the slots at that moment.
    """
    head_start = lane * aging_steps + 1
    ahead = sum(arrivals[step % len(arrivals)] for step in range(head_start))
    bound = head_start + STEPS_EACH * (ahead // 2 + 2)
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=64, num_blocks=400, aging_steps=aging_steps)
    served = steps_until_served(engine, lane, arrivals, limit=bound + 1)
    assert served is not None and served <= bound


def test_without_age_it_would_wait_for_ever() -> None:
    """Case P-SCH-05: 150 % of what there is room for; the bound above is the work of aging and of nothing else."""
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=64, num_blocks=400, aging_steps=10**6)
    assert steps_until_served(engine, 2, [1], limit=300) is None
    aging = make_engine(max_num_seqs=2, max_num_batched_tokens=64, num_blocks=400, aging_steps=10)
    assert steps_until_served(aging, 2, [1], limit=300) == 20


def test_what_is_not_in_the_cache_is_not_kept_waiting_by_what_is() -> None:
    """Case P-SCH-05: nineteen of twenty prompts share a hot prefix; cold ones wait no more than five times as long."""
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=16, num_blocks=400)
    hot = tuple(range(200, 240))
    arrived: dict[str, int] = {}
    waited: dict[str, list[int]] = {"hot": [], "cold": []}
    for step in range(400):
        if step % 4 == 0:
            kind = "cold" if step % 80 == 40 else "hot"
            prompt = (*hot, step % 100) if kind == "hot" else tuple((7 * step + at) % 190 for at in range(41))
            asked = request(f"{kind}-{step}", sampling=sampling(2, ignore_eos=True))
            engine.add(type(asked)(request_id=asked.request_id, prompt_token_ids=prompt, sampling=asked.sampling))
            arrived[asked.request_id] = step
        for output in engine.step():
            if output.request_id in arrived:
                waited[output.request_id.split("-")[0]].append(step - arrived.pop(output.request_id) + 1)
    assert len(waited["cold"]) == 5
    assert max(waited["cold"]) <= 5 * max(waited["hot"])
