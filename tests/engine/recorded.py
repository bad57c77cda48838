"""Recorded engines without a model, and a run in which nearly everything happens."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.api import Choice, GenerateRequest, Logprob, PositionLogprobs
from engine.config import EngineConfig
from engine.engine import Engine
from engine.intake import ModelFacts
from engine.plan import StepPlan, StepResult
from engine.record_reader import RecordReader
from engine.recorder import open_recorder
from engine.records import Record
from engine.scheduler import build_scheduler
from tests.engine.makers import DEFAULTS, EOS, VOCAB, PagedMemoryExecutor, VirtualClock, sampling

NUM_BLOCKS = 40


class ScoringExecutor(PagedMemoryExecutor):
    """Also scores prompts, if badly."""

    def execute(self, plan: StepPlan) -> StepResult:
        wanted = [chunk.scored_token_ids for chunk in plan.chunks if chunk.scored_token_ids]
        scored = tuple(tuple(PositionLogprobs(chosen=Logprob(token_id=t, logprob=-1.0)) for t in ids) for ids in wanted)
        return replace(super().execute(plan), scored=scored)


@dataclass
class Recorded:
    """An engine that records to `path`, None: that does not."""

    path: Path | None
    engine: Engine
    clock: VirtualClock

    @classmethod
    def start(cls, path: Path | None, *, num_blocks: int = NUM_BLOCKS, **changes: Any) -> Recorded:
        config = EngineConfig(**{**DEFAULTS, "record_steps": None if path is None else str(path), **changes})
        facts = ModelFacts(
            vocab_size=VOCAB,
            max_model_len=num_blocks * config.block_size,
            eos_token_ids=frozenset({EOS}),
            weight_bytes=0,
            kv_bytes_per_token=1,
        )
        clock = VirtualClock(now=1234.5)
        recorder = open_recorder(config, num_blocks, facts)
        executor = ScoringExecutor(config.block_size)
        engine = Engine(build_scheduler(config, num_blocks), executor, facts, clock, recorder)
        return cls(path, engine, clock)

    def live(self, num_steps: int, seed: int = 0) -> list[str]:
        """Random arrivals, cancels and steps; at the end all that is open is handed back. Returns all that was put out.

        Many prompts begin alike; a third have several choices; some time out; lanes and tenants differ.
        """
        chance, said = random.Random(seed), []
        for number in range(num_steps):
            if chance.random() < 0.3:
                self.engine.add(_some_request(number, chance))
            if chance.random() < 0.1:
                index = chance.choice([None, 0, 1])
                said += self.engine.cancel(f"r{number - chance.randrange(5)}", index)
            said += self.engine.step()
            self.clock.advance(chance.random())
        said += self.engine.hand_back()
        self.engine.close()
        return [str(output) for output in said]

    def records(self) -> list[Record]:
        """What has been recorded, the first line left out; ends the engine."""
        self.engine.close()
        assert self.path is not None
        return list(RecordReader(self.path))


def _some_request(number: int, chance: random.Random) -> GenerateRequest:
    shared, own = chance.choice([0, 4, 9, 13]), chance.randrange(1, 20)
    tenant = chance.choice("abc")
    max_tokens = chance.choice([0, 1, 5, 18, 60])
    resumed = tuple(chance.randrange(EOS) for _ in range(2)) if max_tokens > 2 and chance.random() < 0.2 else ()
    prompt_logprobs = 1 if chance.random() < 0.1 else None
    return GenerateRequest(
        request_id=f"r{number}",
        prompt_token_ids=(*range(100, 100 + shared), *(chance.randrange(90) for _ in range(own))),
        sampling=sampling(max_tokens, prompt_logprobs=prompt_logprobs, stop_token_ids=tuple(range(20))),
        tenant=tenant,
        weight=1 + "abc".index(tenant),
        lane=chance.choice([0, 1, 1, 2]),
        timeout_s=chance.choice([None, None, 6.0]),
        choices=tuple(Choice(index=index, resumed_token_ids=resumed) for index in range(chance.choice([1, 1, 3]))),
    )
