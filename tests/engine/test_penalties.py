"""What is done to logits before a token is chosen, against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine.api import Logprob, SamplingParams, TokenBias
from engine.logprobs import LEAST, score
from engine.penalties import adjust
from engine.plan import Chunk

LOGITS = (2.0, 1.0, -1.0, 0.0)


def chunk(
    prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), banned: tuple[int, ...] = (), **params: Any
) -> Chunk:
    return Chunk(
        sequence_id="r",
        token_ids=(0,),
        start=0,
        block_ids=(0,),
        samples=True,
        sampling=SamplingParams(max_tokens=9, temperature=0.0, **params),
        seed=0,
        banned_token_ids=banned,
        prompt_token_ids=prompt,
        output_token_ids=output,
    )


def adjusted(each: Chunk) -> list[float]:
    logits = torch.tensor([LOGITS])
    adjust(logits, [each])
    return [round(value, 5) for value in logits[0].tolist()]


@pytest.mark.parametrize(
    ("each", "expected"),
    [
        (chunk(prompt=(0, 0), output=(1,)), [2.0, 1.0, -1.0, 0.0]),
        # Presence and frequency look at the output only (case P-COR-03).
        (chunk(prompt=(0, 0), presence_penalty=2.0), [2.0, 1.0, -1.0, 0.0]),
        (chunk(prompt=(0, 0), frequency_penalty=2.0), [2.0, 1.0, -1.0, 0.0]),
        (chunk(output=(1, 1, 2), presence_penalty=0.5), [2.0, 0.5, -1.5, 0.0]),
        (chunk(output=(1, 1, 2), frequency_penalty=0.5), [2.0, 0.0, -1.5, 0.0]),
        (chunk(output=(1, 1, 2), frequency_penalty=0.5, presence_penalty=-1.0), [2.0, 1.0, -0.5, 0.0]),
        # Repetition looks at both, divides what is positive and multiplies what is not.
        (chunk(prompt=(0,), output=(2, 2), repetition_penalty=2.0), [1.0, 1.0, -2.0, 0.0]),
        # Bias comes first: what it makes positive is divided.
        (
            chunk(prompt=(2,), repetition_penalty=2.0, logit_bias=(TokenBias(token_id=2, bias=5.0),)),
            [2.0, 1.0, 2.0, 0.0],
        ),
        (chunk(banned=(0, 3)), [-math.inf, 1.0, -1.0, -math.inf]),
    ],
)
def test_each_change_is_the_documented_one(each: Chunk, expected: list[float]) -> None:
    assert adjusted(each) == expected


def test_rows_do_not_touch_one_another() -> None:
    logits = torch.tensor([LOGITS] * 4)
    logits[3] = math.nan
    adjust(
        logits,
        [
            chunk(),
            chunk(output=(0,), presence_penalty=1.0),
            chunk(logit_bias=(TokenBias(token_id=1, bias=-100.0),)),
            chunk(banned=(1,)),
        ],
    )
    assert logits[:3].tolist() == [[2.0, 1.0, -1.0, 0.0], [1.0, 1.0, -1.0, 0.0], [2.0, -99.0, -1.0, 0.0]]


def test_log_probabilities_are_of_all_tokens_and_the_likeliest_come_first() -> None:
    (found,) = score(torch.tensor([[0.0, math.log(2), math.log(2), -math.inf]]), [0], 3)
    assert found.chosen.logprob == pytest.approx(math.log(1 / 5))
    assert [each.token_id for each in found.top] == [1, 2, 0]  # equals in order of their ids
    assert [each.logprob for each in found.top[:2]] == [pytest.approx(math.log(2 / 5))] * 2
    (impossible,) = score(torch.tensor([[0.0, -math.inf]]), [1], 0)
    assert (impossible.chosen, impossible.top) == (Logprob(token_id=1, logprob=LEAST), ())


def test_more_of_the_likeliest_than_there_are_tokens_is_all_of_them() -> None:
    (found,) = score(torch.tensor([[0.0, 1.0]]), [0], 20)
    assert [each.token_id for each in found.top] == [1, 0]
