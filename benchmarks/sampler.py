"""What choosing tokens costs, by what the requests of a batch ask for, and whether one of them slows the others.

    python -m benchmarks.sampler [--rows 32] [--vocab 49152] [--rounds 30] [--threads 1] [--spread 4]

Made-up logits of a batch that decodes, each row with 200 tokens of prompt and 100 of output. Every setting is timed
with all rows asking for it, and with one row asking and all others greedy; the settings take turns. "per row" is what a
row adds to a greedy batch, as a share of that batch's time. Medians in milliseconds; the last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.conditions import conditions
from engine.api import SamplingParams, TokenBias
from engine.logprobs import score
from engine.plan import Chunk
from engine.sampler import sample

NUM_PROMPT = 200
NUM_OUTPUT = 100
GREEDY = "greedy"

SETTINGS: dict[str, SamplingParams] = {
    GREEDY: SamplingParams(max_tokens=1000, temperature=0.0),
    "temperature": SamplingParams(max_tokens=1000, temperature=0.8),
    "top_p": SamplingParams(max_tokens=1000, temperature=0.8, top_p=0.9),
    "top_k": SamplingParams(max_tokens=1000, temperature=0.8, top_k=40),
    "min_p": SamplingParams(max_tokens=1000, temperature=0.8, min_p=0.05),
    "penalties": SamplingParams(
        max_tokens=1000, temperature=0.0, presence_penalty=1.0, frequency_penalty=1.0, repetition_penalty=1.1
    ),
    "logit_bias": SamplingParams(
        max_tokens=1000,
        temperature=0.0,
        logit_bias=tuple(TokenBias(token_id=token_id, bias=1.0) for token_id in range(300)),
    ),
    "logprobs": SamplingParams(max_tokens=1000, temperature=0.0, logprobs=5),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One call. `num_asking` rows of the batch ask for `setting`."""

    setting: str
    num_asking: int
    ms: float


def chunk(row: int, sampling: SamplingParams, vocab: int) -> Chunk:
    """A sequence in the middle of its output."""
    rng = random.Random(row)
    prompt = tuple(rng.randrange(vocab) for _ in range(NUM_PROMPT))
    output = tuple(rng.randrange(vocab) for _ in range(NUM_OUTPUT))
    end = NUM_PROMPT + NUM_OUTPUT
    penalised = sampling.has_penalties
    return Chunk(
        sequence_id=str(row),
        token_ids=output[-1:],
        start=end - 1,
        block_ids=(),
        samples=True,
        sampling=sampling,
        seed=row,
        prompt_token_ids=prompt if penalised else (),
        output_token_ids=output if penalised else (),
    )


def measure(setting: str, num_asking: int, logits: torch.Tensor) -> Run:
    """Time one call on a copy of the logits, the copy not included."""
    rows, vocab = logits.shape
    names = [setting] * num_asking + [GREEDY] * (rows - num_asking)
    chunks = [chunk(row, SETTINGS[name], vocab) for row, name in enumerate(names)]
    own = logits.clone()
    started = time.perf_counter()
    token_ids = sample(own, chunks)
    wanting = [row for row, each in enumerate(chunks) if each.sampling.logprobs is not None]
    if wanting:
        score(own[wanting], [token_ids[row] for row in wanting], 5)
    return Run(setting=setting, num_asking=num_asking, ms=1000 * (time.perf_counter() - started))


def nucleus(logits: torch.Tensor) -> float:
    """How many tokens the setting of top-p leaves, in the median row."""
    sampling = SETTINGS["top_p"]
    probs = (logits / sampling.temperature).softmax(dim=-1).sort(dim=-1, descending=True).values
    return float(((probs.cumsum(dim=-1) - probs) < sampling.top_p).sum(dim=-1).double().median())


def report(told: dict[str, object], runs: Sequence[Run], rows: int) -> None:
    """A table of medians for people, all samples as one JSON line for machines."""

    def median(setting: str, num_asking: int) -> float:
        return statistics.median(run.ms for run in runs if (run.setting, run.num_asking) == (setting, num_asking))

    base = median(GREEDY, rows)
    console = Console()
    console.print(", ".join(f"{name} {value}" for name, value in told.items()))
    table = Table("", "all rows", "one row", "per row, alone", "per row, together", box=None)
    for setting in SETTINGS:
        together, alone = median(setting, rows), median(setting, 1)
        table.add_row(
            setting,
            f"{together:.2f} ms",
            f"{alone:.2f} ms",
            f"{100 * (alone - base) / base:.0f} %",
            f"{100 * (together - base) / base / rows:.0f} %",
        )
    console.print(table)
    print(json.dumps({"benchmark": "sampler", "conditions": told, "samples": [asdict(run) for run in runs]}))


def main() -> None:
    """Parse, run the settings in turn, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1, help="what torch computes with")
    parser.add_argument("--spread", type=float, default=4, help="standard deviation of the logits")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logits = arguments.spread * torch.randn(arguments.rows, arguments.vocab, generator=torch.Generator().manual_seed(1))
    told = conditions(
        rows=arguments.rows,
        vocab=arguments.vocab,
        rounds=arguments.rounds,
        threads=arguments.threads,
        spread=arguments.spread,
        top_p_keeps=nucleus(logits),
        dtype="float32",
    )
    runs = []
    for round_number in range(arguments.rounds + 1):
        for setting in SETTINGS:
            for num_asking in (1, arguments.rows):
                run = measure(setting, num_asking, logits)
                if round_number:  # the first warms up
                    runs.append(run)
        print(f"round {round_number} of {arguments.rounds}", file=sys.stderr)
    report(told, runs, arguments.rows)


if __name__ == "__main__":
    main()
