"""What a long prompt does to the streams that are decoding, by the bound on prefill beside decodes.

    python -m benchmarks.mixed_load [--bounds none,256,128,64,32] [--rounds 3] [--prompt 4000]
                                    [--dtype float32] [--threads 1]

Eight streams decode; after a while a long prompt arrives. A gap is the time between two tokens of one stream; it is
undisturbed when it ends before the long prompt arrives or begins after its last token; the table has medians over all
streams. The time to the long prompt's first token is what the bound costs. The settings take turns, round by round.
Greedy, exact lengths, prompts as token ids, no prefix cache. Progress goes to stderr; the last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.conditions import conditions
from deployments.home import roulant_home
from deployments.models import DEFAULT_MODEL, model_path, pull
from engine.api import GenerateRequest, SamplingParams
from engine.build import build_engine
from engine.config import Dtype, EngineConfig, PrefixCache
from engine.engine import Engine

RESULTS = Path(__file__).parent / "results"

NUM_STREAMS = 8
STREAM_PROMPT = 64
STREAM_TOKENS = 200
ARRIVAL_STEP = 40
"""The long prompt arrives after so many steps: every stream has got so many tokens by then."""
LONG_TOKENS = 8
LONG = "long"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Between two tokens of one stream."""

    began_s: float
    ended_s: float

    @property
    def ms(self) -> float:
        return 1000 * (self.ended_s - self.began_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One pass. `bound` None: none but the step's whole budget."""

    bound: int | None
    undisturbed_ms: float
    median_ms: float
    longest_ms: float
    ttft_s: float
    seconds: float


def request(name: str, num_prompt: int, max_tokens: int) -> GenerateRequest:
    """A request whose prompt depends on its name alone."""
    rng = random.Random(name)
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=tuple(rng.randrange(100, 40_000) for _ in range(num_prompt)),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
    )


def measure(config: EngineConfig, num_prompt: int) -> Run:
    """Load, warm up, then time the streams and the long prompt."""
    engine = build_engine(config)
    engine.add(request("warm-up", 256, 4))
    while engine.has_work:
        engine.step()
    started = time.perf_counter()
    for number in range(NUM_STREAMS):
        engine.add(request(f"stream {number}", STREAM_PROMPT, STREAM_TOKENS))
    times: dict[str, list[float]] = {}
    _step_and_note(engine, times, while_=lambda: len(times.get("stream 0", ())) < ARRIVAL_STEP)
    arrived = time.perf_counter()
    engine.add(request(LONG, num_prompt, LONG_TOKENS))
    _step_and_note(engine, times, while_=lambda: engine.has_work)
    engine.close()
    long = times.pop(LONG)
    gaps = [Gap(began_s=began, ended_s=ended) for tokens in times.values() for began, ended in pairwise(tokens)]
    undisturbed = [gap.ms for gap in gaps if gap.ended_s <= arrived or gap.began_s >= long[-1]]
    return Run(
        bound=config.max_prefill_tokens_with_decodes,
        undisturbed_ms=statistics.median(undisturbed),
        median_ms=statistics.median(gap.ms for gap in gaps),
        longest_ms=max(gap.ms for gap in gaps),
        ttft_s=long[0] - arrived,
        seconds=time.perf_counter() - started,
    )


def _step_and_note(engine: Engine, times: dict[str, list[float]], while_: Callable[[], bool]) -> None:
    """Step, and note when each request got a token."""
    while while_():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            times.setdefault(output.request_id, []).extend(now for _ in output.delta.token_ids)


def report(told: dict[str, object], runs: Sequence[Run]) -> None:
    """A table of medians for people, all samples as one JSON line for machines and in `results/`."""
    console = Console()
    console.print(", ".join(f"{name} {value}" for name, value in told.items()))
    table = Table(
        "bound", "gap undisturbed", "gap", "longest gap", "longest / undisturbed", "longest / gap", "TTFT", box=None
    )
    for bound in dict.fromkeys(run.bound for run in runs):
        group = [run for run in runs if run.bound == bound]
        table.add_row(
            _name(bound),
            f"{statistics.median(run.undisturbed_ms for run in group):.0f} ms",
            f"{statistics.median(run.median_ms for run in group):.0f} ms",
            _spread([run.longest_ms for run in group], ".0f", "ms"),
            _spread([run.longest_ms / run.undisturbed_ms for run in group], ".1f", ""),
            f"{statistics.median(run.longest_ms / run.median_ms for run in group):.1f}",
            _spread([run.ttft_s for run in group], ".1f", "s"),
        )
    console.print(table)
    samples = [{name: getattr(run, name) for name in Run.__slots__} for run in runs]
    line = json.dumps({"benchmark": "mixed_load", "conditions": told, "samples": samples})
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "mixed_load.json").write_text(line + "\n")
    print(line)


def _name(bound: int | None) -> str:
    return "none" if bound is None else str(bound)


def _spread(values: Sequence[float], form: str, unit: str) -> str:
    """The median, and the least and the most."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} - {max(values):{form}}) {unit}"


def _bounds(text: str) -> list[int | None]:
    return [None if part == "none" else int(part) for part in text.split(",")]


def main() -> None:
    """Parse, run the settings in turn, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bounds", type=_bounds, default=[None, 256, 128, 64, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of the long prompt")
    parser.add_argument("--dtype", type=Dtype, default=Dtype.FLOAT32, choices=list(Dtype))
    parser.add_argument("--threads", type=int, help="what torch computes with (default: all cores)")
    arguments = parser.parse_args()
    pull(DEFAULT_MODEL, home=roulant_home())
    folder = str(model_path(DEFAULT_MODEL, roulant_home()))
    told = conditions(
        model=DEFAULT_MODEL,
        dtype=arguments.dtype,
        threads=arguments.threads or "all",
        streams=f"{NUM_STREAMS} of {STREAM_PROMPT} + {STREAM_TOKENS} tokens",
        prompt=f"{arguments.prompt} + {LONG_TOKENS} tokens",
        budget=EngineConfig(model=folder).max_num_batched_tokens,
        rounds=arguments.rounds,
    )
    runs = []
    for round_number in range(1, arguments.rounds + 1):
        for bound in arguments.bounds:
            config = EngineConfig(
                model=folder,
                dtype=arguments.dtype,
                max_prefill_tokens_with_decodes=bound,
                prefix_cache=PrefixCache.OFF,
                num_kv_blocks=1024,
                num_threads=arguments.threads,
            )
            run = measure(config, arguments.prompt)
            runs.append(run)
            found = f"longest gap {run.longest_ms:.0f} ms, TTFT {run.ttft_s:.1f} s"
            print(f"round {round_number} of {arguments.rounds}, bound {_name(bound)}: {found}", file=sys.stderr)
    report(told, runs)


if __name__ == "__main__":
    main()
