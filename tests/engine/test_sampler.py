from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.api import SamplingParams
from engine.plan import Chunk
from engine.randomness import _mix, uniform
from engine.sampler import _draw_from_top, sample


def chunk(position: int = 1, banned: tuple[int, ...] = (), **params: Any) -> Chunk:
    """A chunk whose next token stands at `position`."""
    return Chunk(
        sequence_id="r",
        token_ids=(0,),
        start=position - 1,
        block_ids=(0,),
        samples=True,
        sampling=SamplingParams(max_tokens=1, **params),
        seed=params.get("seed", 0),
        banned_token_ids=banned,
    )


def draw(logits: torch.Tensor, number: int, **params: Any) -> Counter[int]:
    """How often each token comes up over `number` positions."""
    return Counter(sample(logits.repeat(number, 1), [chunk(position, **params) for position in range(1, number + 1)]))


def test_the_hash_is_fixed_for_all_time() -> None:
    assert _mix(0) == 0xE220A8397B1DCDAF  # the first output of SplitMix64 with seed 0, as published
    # A resumed stream must meet the same numbers on another machine and in a later version.
    assert [uniform(0, 0), uniform(0, 1), uniform(1, 0), uniform(-1, 7)] == [
        0.6524484863740322,
        0.03401170130434639,
        0.36818951565166946,
        0.10134950925237729,
    ]


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 10**6))
def test_uniform_lies_in_the_half_open_unit_interval(seed: int, position: int) -> None:
    assert 0 <= uniform(seed, position) < 1


def test_temperature_zero_takes_the_largest() -> None:
    assert sample(torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]]), [chunk(temperature=0.0)] * 2) == [1, 0]


def test_banned_tokens_are_never_taken() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    assert sample(logits.clone(), [chunk(temperature=0.0, banned=(1,))]) == [2]
    assert sample(logits.clone(), [chunk(temperature=1.0, banned=(0, 2))]) == [1]


def test_frequencies_follow_the_softmax() -> None:
    probs = torch.tensor([0.5, 0.3, 0.2])
    seen = draw(probs.log(), 20_000)
    for token_id, prob in enumerate(probs.tolist()):
        assert seen[token_id] / 20_000 == pytest.approx(prob, abs=0.015)  # more than four standard deviations


def test_temperature_sharpens() -> None:
    seen = draw(torch.tensor([0.6, 0.4]).log(), 20_000, temperature=0.5)
    assert seen[0] / 20_000 == pytest.approx(0.36 / 0.52, abs=0.015)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.39}, {0}),
        ({"top_p": 0.41}, {0, 1}),
        ({"top_p": 1e-9}, {0}),
        ({"min_p": 0.51}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        # over the mass that top-k left, the first token has 4/7 = 0.571
        ({"top_k": 2, "top_p": 0.57}, {0}),
        ({"top_k": 2, "top_p": 0.58}, {0, 1}),
    ],
)
def test_filters_keep_just_the_tokens_they_name(params: dict[str, Any], kept: set[int]) -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).double().log()
    assert set(draw(logits, 500, **params)) == kept


def step_by_step(logits: list[float], params: dict[str, Any], number: float) -> int:
    """The token that the filters, one after the other, and `number` choose; nothing is vectorised or left out."""
    odds = [math.exp((logit - max(logits)) / params["temperature"]) for logit in logits]
    ranked = sorted(range(len(odds)), key=lambda token_id: (-odds[token_id], token_id))
    kept = ranked[: params["top_k"]]
    total, before, nucleus = sum(odds[token_id] for token_id in kept), 0.0, []
    for token_id in kept:
        if params["top_p"] == 1 or before < params["top_p"] * total:
            nucleus.append(token_id)
        before += odds[token_id]
    left = sorted(token_id for token_id in nucleus if odds[token_id] >= params["min_p"])
    target = number * sum(odds[token_id] for token_id in left)
    for token_id in left:
        target -= odds[token_id]
        if target < 0:
            return token_id
    return left[-1]


@pytest.mark.parametrize("num_candidates", [1, 2, 5, 256])
@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {
                # Few different ones, so that many are equal.
                "logits": st.lists(st.sampled_from([-4.0, -2.0, -1.0, 0.0, 1.0]), min_size=24, max_size=24),
                "top_k": st.sampled_from([None, 1, 2, 3, 7, 23, 24, 99]),
                "top_p": st.sampled_from([1.0, 0.03, 0.37, 0.61, 0.93]),
                "min_p": st.sampled_from([0.0, 0.01, 0.2, 0.9]),
                "temperature": st.sampled_from([0.5, 1.0, 3.0]),
            }
        ),
        min_size=1,
        max_size=4,
    )
)
def test_looking_at_few_tokens_first_changes_no_choice(num_candidates: int, rows: list[dict[str, Any]]) -> None:
    """Also where whole plateaus of equals lie across the border of what is looked at."""
    chunks = [
        chunk(position, **{name: row[name] for name in row if name != "logits"}) for position, row in enumerate(rows)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_draw_from_top, "__defaults__", (num_candidates,))
        taken = sample(torch.tensor([row["logits"] for row in rows]), chunks)
    expected = [step_by_step(row["logits"], row, uniform(0, each.end)) for row, each in zip(rows, chunks, strict=True)]
    assert taken == expected


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(40, 200, generator=torch.Generator().manual_seed(1))
    kinds: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0}]
    chunks = [chunk(position=row, seed=row, **kinds[row % 5]) for row in range(1, 41)]
    together = sample(logits.clone(), chunks)
    alone = [sample(logits[row : row + 1].clone(), [chunks[row]])[0] for row in range(40)]
    backwards = sample(logits.flip(0), chunks[::-1])[::-1]
    assert together == alone == backwards


def test_seeds_and_positions_give_different_streams() -> None:
    flat = torch.zeros(1, 1000)
    by_seed = {sample(flat.clone(), [chunk(5, seed=seed)])[0] for seed in range(50)}
    by_position = {sample(flat.clone(), [chunk(position, seed=5)])[0] for position in range(1, 51)}
    assert min(len(by_seed), len(by_position)) > 40


def test_a_token_without_mass_is_not_taken_at_the_edge_of_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.sampler.uniform", lambda seed, position: 0.0)
    assert sample(torch.tensor([[float("-inf"), 0.0, 0.0]]), [chunk()]) == [1]


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 9e-6])
def test_a_vanishing_temperature_is_greedy(temperature: float) -> None:
    logits = torch.tensor([[1.0, 1.0001, -50.0]])
    assert {sample(logits.clone(), [chunk(position, temperature=temperature)])[0] for position in range(1, 50)} == {1}


def test_logits_that_are_not_numbers_do_not_reach_other_rows() -> None:
    logits = torch.tensor([[float("nan")] * 4, [0.0, 9.0, 0.0, 0.0]])
    broken, healthy = sample(logits, [chunk(), chunk(top_k=1)])
    assert 0 <= broken < 4
    assert healthy == 1
