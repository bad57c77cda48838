"""Small makers for engine tests: requests, engines without a model, and an executor that proves what it was given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.api import Choice, GenerateRequest, SamplingParams
from engine.config import EngineConfig
from engine.engine import Engine, Executor
from engine.intake import ModelFacts
from engine.plan import Chunk, StepPlan, StepResult
from engine.scheduler import Output, build_scheduler
from engine.sequence import sequence_id

VOCAB = 1000
EOS = 999


def sampling(max_tokens: int = 8, **changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **changes)  # type: ignore[arg-type]


def request(request_id: str = "r", num_prompt: int = 4, max_tokens: int = 8, **changes: object) -> GenerateRequest:
    """A request whose prompt is told by its id and length, so that no two prompts are alike."""
    start = sum(map(ord, request_id)) % 500
    resumed: tuple[int, ...] = changes.pop("resumed_token_ids", ())  # type: ignore[assignment]
    prompt = tuple((start + offset) % EOS for offset in range(num_prompt))
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=changes.pop("sampling", None) or sampling(max_tokens),  # type: ignore[arg-type]
        choices=changes.pop("choices", None) or (Choice(resumed_token_ids=resumed),),  # type: ignore[arg-type]
        **changes,  # type: ignore[arg-type]
    )


def next_token(context: list[int], *, banned: tuple[int, ...] = ()) -> int:
    """What `PagedMemoryExecutor` answers to a context: depends on every token of it and on their order."""
    value = 7
    for token_id in context:
        value = (value * 31 + token_id + 1) % 1_000_003
    token_id = value % VOCAB
    while token_id in banned:
        token_id = (token_id + 1) % VOCAB
    return token_id


def expected_output(prompt: tuple[int, ...], params: SamplingParams, eos: int | None = EOS) -> list[int]:
    """The output of `prompt` when it runs alone and is never interrupted."""
    output: list[int] = []
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos or eos is None else {eos})
    while len(output) < params.max_tokens:
        too_early = len(output) < params.min_tokens
        output.append(next_token([*prompt, *output], banned=tuple(stops) if too_early else ()))
        if not too_early and output[-1] in stops:
            break
    return output


@dataclass
class PagedMemoryExecutor:
    """An executor whose "keys and values" are the tokens themselves, kept in blocks as a real cache would be.

    The next token is a function of the whole context as read back through the block table, so a wrong block, position
    or order, or a block used by two sequences at once, shows as a wrong token.
    """

    block_size: int
    memory: dict[tuple[int, int], int] = field(default_factory=dict)
    max_tokens_seen: int = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.max_tokens_seen = max(self.max_tokens_seen, plan.num_tokens)
        read = [
            [self.memory.get((copy.source, offset), -1) for offset in range(self.block_size)] for copy in plan.copies
        ]
        for copy, tokens in zip(plan.copies, read, strict=True):
            self.memory.update({(copy.target, offset): token_id for offset, token_id in enumerate(tokens)})
        for chunk in plan.chunks:
            for position, token_id in enumerate(chunk.token_ids, start=chunk.start):
                self.memory[self._slot(chunk, position)] = token_id
        return StepResult(token_ids=[self._sample(chunk) for chunk in plan.chunks if chunk.samples])

    def close(self) -> None:
        self.memory.clear()

    def _slot(self, chunk: Chunk, position: int) -> tuple[int, int]:
        return chunk.block_ids[position // self.block_size], position % self.block_size

    def _sample(self, chunk: Chunk) -> int:
        context = [self.memory[self._slot(chunk, position)] for position in range(chunk.end)]
        return next_token(context, banned=chunk.banned_token_ids)


@dataclass
class VirtualClock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def make_engine(
    *,
    num_blocks: int = 64,
    executor: Executor | None = None,
    clock: VirtualClock | None = None,
    max_model_len: int | None = None,
    **changes: Any,
) -> Engine:
    """An engine without a model; one request may use the whole pool. `changes`: other fields of its EngineConfig."""
    config = EngineConfig(**{**DEFAULTS, **changes})
    facts = ModelFacts(
        vocab_size=VOCAB,
        max_model_len=max_model_len or num_blocks * config.block_size,
        eos_token_ids=frozenset({EOS}),
        weight_bytes=0,
        kv_bytes_per_token=1,
    )
    executor = executor or PagedMemoryExecutor(config.block_size)
    return Engine(build_scheduler(config, num_blocks), executor, facts, clock or VirtualClock())


DEFAULTS: dict[str, Any] = {"model": "", "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16}


def run_to_end(engine: Engine, outputs: dict[str, list[int]] | None = None) -> dict[str, list[int]]:
    """Step until nothing is open; the output tokens of every sequence, by its id."""
    outputs = {} if outputs is None else outputs
    while engine.has_work:
        collect(engine.step(), outputs)
    return outputs


def collect(step: list[Output], outputs: dict[str, list[int]]) -> None:
    """Add what a step put out to `outputs`."""
    for output in step:
        outputs.setdefault(sequence_id(output.request_id, output.delta.index), []).extend(output.delta.token_ids)
