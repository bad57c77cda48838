"""The whole scheduler under any order of arrivals, steps, cancels, resumes, forks, timeouts and preemptions.

The executor keeps tokens in blocks as a real cache would, and reads them back through the block table: a wrong hit of
the prefix cache, a missing copy, or a block written by two sequences shows as a wrong token.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import Choice, FinishReason, GenerateRequest, PlaceAccount, RequestRefusedError
from engine.config import BatchingMode, PrefixCache
from engine.engine import Engine
from engine.scheduler import Output
from engine.sequence import sequence_id
from tests.engine.makers import PagedMemoryExecutor, VirtualClock, expected_output, make_engine, sampling

BLOCK = 4


@dataclass(frozen=True)
class Arrival:
    """A request to come. `shared` tokens of its prompt are those that every prompt of its family begins with."""

    shared: int
    own: int
    max_tokens: int
    lane: int
    tenant: str
    num_choices: int
    resumed: bool
    timeout_s: float | None


@dataclass(frozen=True)
class Cancel:
    number: int
    index: int | None


arrivals = st.builds(
    Arrival,
    shared=st.sampled_from([0, 0, 3, 4, 8, 13]),
    own=st.integers(1, 20),
    max_tokens=st.integers(0, 18),
    lane=st.integers(0, 2),
    tenant=st.sampled_from(["a", "b", "c"]),
    num_choices=st.sampled_from([1, 1, 1, 2, 4]),
    resumed=st.booleans(),
    timeout_s=st.sampled_from([None, None, None, 5.0]),
)
cancels = st.builds(Cancel, number=st.integers(0, 10), index=st.sampled_from([None, 0, 1]))
operations = st.lists(
    st.one_of(arrivals, arrivals, st.just("step"), st.just("step"), cancels), min_size=12, max_size=40
)
settings_of_engine = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(5, 16),
        "max_num_seqs": st.integers(2, 6),
        "max_num_batched_tokens": st.integers(6, 40),
        "max_prefill_tokens_with_decodes": st.sampled_from([None, 1, 4, 9]),
        "prefix_cache": st.sampled_from(PrefixCache),
        "aging_steps": st.sampled_from([1, 5, 200]),
        "watermark": st.sampled_from([0.0, 0.1]),
        "batching": st.sampled_from([BatchingMode.CONTINUOUS] * 3 + [BatchingMode.STATIC, BatchingMode.DYNAMIC]),
    }
)


@dataclass
class Run:
    """An engine, what was asked of it, and what it has said."""

    engine: Engine
    executor: PagedMemoryExecutor
    clock: VirtualClock
    requests: dict[str, GenerateRequest] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, FinishReason] = field(default_factory=dict)
    preemptions: dict[str, int] = field(default_factory=dict)

    def add(self, arrival: Arrival) -> None:
        number = len(self.requests)
        prompt = (*range(100, 100 + arrival.shared), *((17 * number + i) % 90 for i in range(arrival.own)))
        params = sampling(arrival.max_tokens)
        whole = expected_output(prompt, params)
        # An output that has ended is not resumed.
        given_back = tuple(whole[: len(whole) // 2]) if arrival.resumed else ()
        request = GenerateRequest(
            request_id=f"r{number}",
            prompt_token_ids=prompt,
            sampling=params,
            tenant=arrival.tenant,
            weight=1 + ord(arrival.tenant) % 3,
            lane=arrival.lane,
            timeout_s=arrival.timeout_s,
            choices=tuple(
                Choice(index=index, resumed_token_ids=given_back if index % 2 == 0 else ())
                for index in range(arrival.num_choices)
            ),
        )
        with contextlib.suppress(RequestRefusedError):
            self.engine.check_request(request)
            self.requests[request.request_id] = request
            self.engine.add(request)

    def step(self) -> None:
        self.hear(self.engine.step())
        self.clock.advance(1.0)
        for name in self.engine.recent_steps()[-1].preempted:
            self.preemptions[name] = self.preemptions.get(name, 0) + 1

    def hear(self, outputs: list[Output]) -> None:
        for output in outputs:
            name = sequence_id(output.request_id, output.delta.index)
            assert name not in self.ends, f"{name} went on after its end"
            self.outputs.setdefault(name, []).extend(output.delta.token_ids)
            if output.delta.finish_reason is not None:
                self.ends[name] = output.delta.finish_reason

    def check(self) -> None:
        self.engine.check_integrity()
        steps = self.engine.recent_steps()
        if steps:
            tokens, places = steps[-1].tokens, steps[-1].places
            assert tokens.budget == (
                tokens.decode + tokens.new_prefill + tokens.recomputed + tokens.speculative_rejected
                + tokens.graph_padding + tokens.unused
            )  # fmt: skip
            assert min(tokens.unused, tokens.decode, tokens.new_prefill, tokens.recomputed) >= 0
            assert min(places.live, places.reserved, places.tail_waste, places.cached_idle, places.free) >= 0

    def places(self) -> PlaceAccount:
        """What the pool holds, counted place by place."""
        roster = self.engine._roster
        pool = roster.memory.pool
        live: set[tuple[int, int]] = set()
        reserved: set[tuple[int, int]] = set()
        everything: set[tuple[int, int]] = set()
        for each in roster.running:
            spots = [(block_id, offset) for block_id in each.block_ids for offset in range(BLOCK)]
            everything.update(spots)
            live.update(spots[: each.num_computed])
            known = min(each.num_known, len(spots))
            in_last_block = -known % BLOCK
            reserved.update(spots[each.num_computed : known] + spots[known + in_last_block :])
        return PlaceAccount(
            total=pool.num_blocks * BLOCK,
            live=len(live),
            reserved=len(reserved),
            tail_waste=len(everything - live - reserved),
            cached_idle=sum(pool.idle_blocks().values()) * BLOCK,
            free=pool.num_blocks * BLOCK - len(everything) - sum(pool.idle_blocks().values()) * BLOCK,
        )

    def expected(self, request: GenerateRequest, choice: Choice) -> list[int]:
        """What the client is to be told of a choice that ended by itself."""
        whole = expected_output(request.prompt_token_ids, request.sampling)
        capacity = self.engine._memory.num_tokens
        return whole[: capacity + 1 - len(request.prompt_token_ids)][len(choice.resumed_token_ids) :]


@settings(max_examples=2000)
@given(operations, settings_of_engine)
def test_any_interleaving_gives_everybody_the_output_of_an_undisturbed_run(
    operations: list[Arrival | Cancel | str], changes: dict[str, Any]
) -> None:
    clock, executor = VirtualClock(), PagedMemoryExecutor(BLOCK)
    engine = make_engine(executor=executor, clock=clock, block_size=BLOCK, max_model_len=60, **changes)
    run = Run(engine, executor, clock)
    for operation in operations:
        if isinstance(operation, Arrival):
            run.add(operation)
        elif isinstance(operation, Cancel):
            run.hear(engine.cancel(f"r{operation.number}", operation.index))
        else:
            run.step()
            assert engine.recent_steps()[-1].places == run.places()
        run.check()
    num_steps = 0
    while engine.has_work:
        run.step()
        run.check()
        num_steps += 1
        assert num_steps < 5000, "somebody never gets anywhere"
    assert engine.stats().num_used_blocks == 0
    assert executor.max_tokens_seen <= changes["max_num_batched_tokens"]
    for request in run.requests.values():
        for choice in request.choices:
            name = sequence_id(request.request_id, choice.index)
            expected = run.expected(request, choice)
            if run.ends[name] in (FinishReason.STOP, FinishReason.LENGTH):
                assert run.outputs[name] == expected
            else:
                assert run.outputs[name] == expected[: len(run.outputs[name])]
            bound = 2 * (1 + len(run.outputs[name]) // BLOCK)
            assert run.preemptions.get(name, 0) <= bound
