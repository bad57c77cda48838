"""What it costs to admit by memory, too boldly or too timidly: preemptions against empty slots. Virtual time, no model.

    python -m benchmarks.scarce_memory [--growth 0,16,32,64,128,256] [--watermarks 0,0.01,0.05] [--shares 1.0,0.5,0.25]
                                       [--requests 400] [--seeds 5]

Every setting serves the same requests, all there from the start, with lengths drawn log-uniformly. `share` is the KV
memory as a share of what the slots would fill with sequences of mean length. A step costs what the simulated executor's
default cost model says, so time is a count of steps, tokens and sequences, and the same on every machine. `growth` is
how many tokens ahead a newcomer leaves room for those that run; `most` how often the unluckiest request stepped back.
Progress goes to stderr; the last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product

from rich.console import Console
from rich.table import Table

from benchmarks.conditions import conditions
from engine.api import GenerateRequest, SamplingParams
from engine.batching import ContinuousBatching
from engine.block_pool import BlockPool
from engine.config import PrefixCache, StepCost
from engine.engine import Engine
from engine.intake import ModelFacts
from engine.kv_memory import KvMemory
from engine.roster import Roster
from engine.scheduler import Scheduler, StepLimits
from engine.simulated import SimulatedExecutor

VOCAB = 1000
BLOCK_SIZE = 16
MAX_NUM_SEQS = 32
MAX_NUM_BATCHED_TOKENS = 512
AGING_STEPS = 200
PROMPT_TOKENS = (16, 512)
OUTPUT_TOKENS = (16, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is varied."""

    share: float
    growth: int
    watermark: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What came out for one seed."""

    setting: Setting
    seed: int
    tokens_per_s: float
    mean_running: float
    preemptions: int
    most: int
    recomputed: float
    """Tokens computed again, as a share of all that had to be computed."""


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def log_uniform(rng: random.Random, bounds: tuple[int, int]) -> int:
    """A length between the bounds whose logarithm is uniform."""
    return round(math.exp(rng.uniform(*map(math.log, bounds))))


def requests(num: int, seed: int) -> list[GenerateRequest]:
    """Prompts that have nothing in common, and outputs of exact lengths."""
    rng = random.Random(seed)
    return [
        GenerateRequest(
            request_id=str(number),
            prompt_token_ids=tuple(rng.randrange(VOCAB) for _ in range(log_uniform(rng, PROMPT_TOKENS))),
            sampling=SamplingParams(max_tokens=log_uniform(rng, OUTPUT_TOKENS), temperature=0.0, ignore_eos=True),
        )
        for number in range(num)
    ]


def build(setting: Setting, num_blocks: int, clock: Clock) -> Engine:
    """An engine without a model, with the rules of memory that `setting` names."""
    memory = KvMemory(
        BlockPool(num_blocks, BLOCK_SIZE),
        prefix_cache=PrefixCache.TENANT,
        watermark=setting.watermark,
        growth_tokens=setting.growth,
    )
    limits = StepLimits(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS)
    facts = ModelFacts(
        vocab_size=VOCAB,
        max_model_len=PROMPT_TOKENS[1] + OUTPUT_TOKENS[1],
        eos_token_ids=frozenset(),
        weight_bytes=0,
        kv_bytes_per_token=0,
    )
    executor = SimulatedExecutor(vocab_size=VOCAB, cost=StepCost(), sleep=clock.sleep)
    return Engine(Scheduler(Roster(memory, ContinuousBatching(), AGING_STEPS), limits), executor, facts, clock)


def measure(setting: Setting, num_requests: int, seed: int) -> Run:
    """Serve all requests; count."""
    asked = requests(num_requests, seed)
    lengths = [len(each.prompt_token_ids) + each.sampling.max_tokens for each in asked]
    num_blocks = math.ceil(setting.share * MAX_NUM_SEQS * statistics.mean(lengths) / BLOCK_SIZE)
    clock = Clock()
    engine = build(setting, max(num_blocks, math.ceil(max(lengths) / BLOCK_SIZE)), clock)
    for request in asked:
        engine.add(request)
    running, stepped_back = [], Counter[str]()
    while engine.has_work:
        engine.step()
        summary = engine.recent_steps()[-1]
        running.append(summary.num_running)
        stepped_back.update(summary.preempted)
    stats = engine.stats()
    return Run(
        setting=setting,
        seed=seed,
        tokens_per_s=stats.num_generated_tokens / clock.now,
        mean_running=statistics.mean(running),
        preemptions=stats.num_preemptions,
        most=max(stepped_back.values(), default=0),
        recomputed=stats.num_recomputed_tokens / sum(lengths),
    )


def report(told: dict[str, object], runs: Sequence[Run]) -> None:
    """A table of medians over the seeds for people, all samples as one JSON line for machines."""
    console = Console()
    console.print(", ".join(f"{name} {value}" for name, value in told.items()))
    table = Table("share", "growth", "watermark", "tokens/s", "running", "preemptions", "most", "recomputed", box=None)
    for setting in dict.fromkeys(run.setting for run in runs):
        group = [run for run in runs if run.setting == setting]
        table.add_row(
            f"{setting.share:.2f}",
            str(setting.growth),
            f"{setting.watermark:.2f}",
            f"{statistics.median(run.tokens_per_s for run in group):.0f}",
            f"{statistics.median(run.mean_running for run in group):.1f}",
            f"{statistics.median(run.preemptions for run in group):.0f}",
            str(max(run.most for run in group)),
            f"{100 * statistics.median(run.recomputed for run in group):.1f} %",
        )
    console.print(table)
    print(json.dumps({"benchmark": "scarce_memory", "conditions": told, "samples": [asdict(run) for run in runs]}))


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    """Parse, run all settings for all seeds, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--growth", type=_numbers, default=[0, 16, 32, 64, 128, 256])
    parser.add_argument("--watermarks", type=_numbers, default=[0, 0.01, 0.05])
    parser.add_argument("--shares", type=_numbers, default=[1.0, 0.5, 0.25])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    told = conditions(
        slots=MAX_NUM_SEQS,
        prompts=PROMPT_TOKENS,
        outputs=OUTPUT_TOKENS,
        requests=arguments.requests,
        seeds=arguments.seeds,
        cost=asdict(StepCost()),
    )
    runs = []
    for share, growth, watermark in product(arguments.shares, arguments.growth, arguments.watermarks):
        setting = Setting(share=share, growth=int(growth), watermark=watermark)
        runs += [measure(setting, arguments.requests, seed) for seed in range(arguments.seeds)]
        print(f"{setting}: {runs[-1].tokens_per_s:.0f} tokens/s", file=sys.stderr)
    report(told, runs)


if __name__ == "__main__":
    main()
