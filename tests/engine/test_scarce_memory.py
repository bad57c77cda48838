"""A KV cache of a quarter of what is needed: everybody finishes, with the right answer, and nobody is tossed about."""

from __future__ import annotations

import random
from collections import Counter

from engine.api import Choice, GenerateRequest
from engine.sequence import sequence_id
from tests.engine.makers import collect, expected_output, make_engine, request, sampling

BLOCK = 4


def test_a_quarter_of_the_memory_is_enough_for_a_hundred_requests() -> None:
    rng = random.Random(3)
    requests = [
        GenerateRequest(
            request_id=f"r{number}",
            prompt_token_ids=(*range(rng.choice((0, 8, 20))), *(rng.randrange(900) for _ in range(rng.randint(1, 30)))),
            sampling=sampling(rng.randint(10, 60), ignore_eos=True),
            tenant=rng.choice("abc"),
            lane=rng.randrange(3),
            choices=tuple(Choice(index=index) for index in range(rng.choice((1, 1, 1, 2)))),
        )
        for number in range(100)
    ]
    lengths = sorted(len(each.prompt_token_ids) + each.sampling.max_tokens for each in requests)
    num_blocks = sum(lengths[-16:]) // BLOCK // 4  # 16 of the longest at once would need four times as much
    engine = make_engine(num_blocks=num_blocks, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=200)
    outputs: dict[str, list[int]] = {}
    preempted: Counter[str] = Counter()
    waiting = list(requests)
    while waiting or engine.has_work:
        for _ in range(min(len(waiting), 3)):
            engine.add(waiting.pop())
        collect(engine.step(), outputs)
        preempted.update(engine.recent_steps()[-1].preempted)
        engine.check_integrity()
    for each in requests:
        for choice in each.choices:
            name = sequence_id(each.request_id, choice.index)
            assert outputs[name] == expected_output(each.prompt_token_ids, each.sampling)
            assert preempted[name] <= 2 * (1 + len(outputs[name]) // BLOCK)
    assert engine.stats().num_preemptions == preempted.total() > 0
    assert max(preempted.values()) <= 2


def test_recomputed_tokens_change_no_answer_and_are_not_charged() -> None:
    """Case P-SCH-04: memory for three of eight, mixed lanes, 200 tokens each."""
    engine = make_engine(num_blocks=3 * 53, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=220)
    asked = [
        request(f"r{number}", num_prompt=10, lane=1 + number // 4, sampling=sampling(200, ignore_eos=True))
        for number in range(8)
    ]
    outputs: dict[str, list[int]] = {}
    for each in asked:
        engine.add(each)
        for _ in range(3):
            collect(engine.step(), outputs)
    for number in range(6):  # large ones of the highest lane, which push others out
        engine.add(request(f"urgent{number}", num_prompt=180, lane=0, sampling=sampling(1)))
        for _ in range(40):
            collect(engine.step(), outputs)
    while engine.has_work:
        collect(engine.step(), outputs)
    for each in asked:
        assert outputs[each.request_id] == expected_output(each.prompt_token_ids, each.sampling)
    stats = engine.stats()
    assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (80 + 6 * 180, 1600 + 6)
    assert stats.num_preemptions == sum(len(each.preempted) for each in engine.recent_steps()) >= 10
    assert stats.num_recomputed_tokens == sum(each.tokens.recomputed for each in engine.recent_steps()) > 0
    assert stats.num_used_blocks == 0
