"""Throughput of a list of requests that are all there at the start, by the number of slots.

    python -m benchmarks.offline [--requests 24] [--slots 1,8,32] [--repeats 3] [--dtype auto]

The requests are the same for every number of slots and the runs are interleaved, so the ratio between two rows is what
sharing a batch is worth on this machine. Greedy, exact output lengths, prompts as token ids. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.conditions import conditions
from deployments.home import roulant_home
from deployments.models import DEFAULT_MODEL, model_path, pull
from engine.api import GenerateRequest, SamplingParams
from engine.build import build_engine
from engine.config import Dtype, EngineConfig
from engine.engine import Engine

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One pass over all requests."""

    slots: int
    seconds: float
    output_tokens: int
    steps: int
    mean_decoding: float
    padding_tokens: int

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds


def make_requests(count: int, seed: int) -> list[GenerateRequest]:
    """Prompt lengths lognormal around 64 (8 to 256), output lengths around 32 (8 to 96)."""
    rng = random.Random(seed)

    def length(median: int, low: int, high: int) -> int:
        return min(high, max(low, round(median * math.exp(rng.gauss(0, 0.6)))))

    return [
        GenerateRequest(
            request_id=str(number),
            prompt_token_ids=tuple(rng.randrange(100, 40_000) for _ in range(length(64, 8, 256))),
            sampling=SamplingParams(max_tokens=length(32, 8, 96), temperature=0.0, ignore_eos=True),
        )
        for number in range(count)
    ]


def finish(engine: Engine) -> list[int]:
    """Step until nothing is open; how many sequences decoded in each step."""
    decoding = []
    while engine.has_work:
        engine.step()
        decoding.append(engine.recent_steps()[-1].tokens.decode)
    return decoding


def measure(config: EngineConfig, requests: Sequence[GenerateRequest]) -> Run:
    """Load, warm up with one request, then time all of them."""
    engine = build_engine(config)
    engine.add(requests[0])
    finish(engine)
    warm_up = engine.stats()
    started = time.perf_counter()
    for request in requests:
        engine.add(request)
    decoding = finish(engine)
    seconds = time.perf_counter() - started
    stats = engine.stats()
    engine.close()
    return Run(
        slots=config.max_num_seqs,
        seconds=seconds,
        output_tokens=stats.num_generated_tokens - warm_up.num_generated_tokens,
        steps=len(decoding),
        mean_decoding=statistics.mean(decoding),
        padding_tokens=stats.num_padding_tokens,
    )


def report(told: dict[str, object], runs: Sequence[Run]) -> None:
    """A table of medians for people, all samples as one JSON line for machines and in `results/`."""
    console = Console()
    console.print(", ".join(f"{name} {value}" for name, value in told.items()))
    table = Table("slots", "output tokens/s (min - max)", "ratio", "steps", "decoding per step", "padding tokens")
    by_slots = {
        slots: [run for run in runs if run.slots == slots] for slots in dict.fromkeys(run.slots for run in runs)
    }
    base = statistics.median(run.tokens_per_s for run in next(iter(by_slots.values())))
    for slots, group in by_slots.items():
        speeds = sorted(run.tokens_per_s for run in group)
        median = statistics.median(speeds)
        table.add_row(
            str(slots),
            f"{median:.1f} ({speeds[0]:.1f} - {speeds[-1]:.1f})",
            f"{median / base:.2f}",
            str(group[0].steps),
            f"{group[0].mean_decoding:.1f}",
            str(group[0].padding_tokens),
        )
    console.print(table)
    samples = [{"slots": run.slots, "seconds": run.seconds, "output_tokens": run.output_tokens} for run in runs]
    line = json.dumps({"benchmark": "offline", "conditions": told, "samples": samples})
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "offline.json").write_text(line + "\n")
    print(line)


def main() -> None:
    """Parse, run interleaved, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--slots", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", type=Dtype, default=Dtype.AUTO, choices=list(Dtype))
    arguments = parser.parse_args()
    pull(DEFAULT_MODEL, home=roulant_home())
    folder = str(model_path(DEFAULT_MODEL, roulant_home()))
    requests = make_requests(arguments.requests, arguments.seed)
    rounds = [slots for _ in range(arguments.repeats) for slots in arguments.slots]
    runs = [
        measure(
            EngineConfig(
                model=folder, dtype=arguments.dtype, max_num_seqs=slots, max_model_len=1024, num_kv_blocks=1024
            ),
            requests,
        )
        for slots in track(rounds, description="runs", console=Console(stderr=True))
    ]
    settings = {name: getattr(arguments, name) for name in ("dtype", "requests", "seed", "repeats")}
    report(conditions(model=DEFAULT_MODEL, **settings), runs)


if __name__ == "__main__":
    main()
