"""What a KV cache of eight bits does to the default model's greedy answers.

    python -m benchmarks.kv_int8 [--tokens 32]

Twenty prompts, float32, the cache in the model's precision against eight bits. Two figures: how far the free-running
answers agree, and how often the next token is the same after the same tokens (each answer of the exact cache is given
back token by token, so that one difference is counted once). The last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass

from benchmarks.conditions import conditions
from deployments.home import roulant_home
from deployments.models import DEFAULT_MODEL, model_path, pull
from engine.api import Choice, GenerateRequest, SamplingParams, TextCodec
from engine.build import build_engine
from engine.config import Dtype, EngineConfig, KvDtype, PrefixCache
from engine.engine import Engine

SUBJECTS = (
    "the sea", "a lighthouse", "bread", "prime numbers", "the moon", "rivers", "an old clock", "trains", "bees", "salt",
    "winter", "a violin", "maps", "glass", "the desert", "spiders", "letters", "bridges", "gold", "sleep",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Of answers with each other: identical ones, tokens until the first difference, next tokens after equal ones."""

    identical: float
    mean_prefix: float
    next_token: float


def start(kv_dtype: KvDtype) -> Engine:
    pull(DEFAULT_MODEL, home=roulant_home())
    return build_engine(
        EngineConfig(
            model=str(model_path(DEFAULT_MODEL, home=roulant_home())),
            dtype=Dtype.FLOAT32,
            kv_dtype=kv_dtype,
            max_model_len=1024,
            num_kv_blocks=1024,
            max_num_seqs=32,
            prefix_cache=PrefixCache.OFF,
        )
    )


def answers(engine: Engine, prompts: list[tuple[int, ...]], max_tokens: int, given: int = 0) -> list[list[int]]:
    """The outputs of all prompts, run together; of each prompt, the last `given` tokens count as output already."""
    params = SamplingParams(max_tokens=max_tokens + given, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        cut = len(prompt) - given
        choice = Choice(resumed_token_ids=prompt[cut:])
        engine.add(
            GenerateRequest(request_id=str(number), prompt_token_ids=prompt[:cut], sampling=params, choices=(choice,))
        )
    outputs: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            outputs[int(output.request_id)].extend(output.delta.token_ids)
    return outputs


def prefix(left: list[int], right: list[int]) -> int:
    """How many tokens are equal before the first difference."""
    return next((at for at, pair in enumerate(zip(left, right, strict=True)) if pair[0] != pair[1]), len(left))


def agreement(prompts: list[tuple[int, ...]], max_tokens: int) -> Agreement:
    exact, rounded = start(KvDtype.AUTO), start(KvDtype.INT8)
    truth, free = answers(exact, prompts, max_tokens), answers(rounded, prompts, max_tokens)
    prefixes = [prefix(left, right) for left, right in zip(truth, free, strict=True)]
    same = 0
    for at in range(max_tokens):
        known = [(*prompt, *output[:at]) for prompt, output in zip(prompts, truth, strict=True)]
        following = answers(rounded, known, 1, given=at)
        same += sum(output[0] == expected[at] for output, expected in zip(following, truth, strict=True))
    return Agreement(
        identical=sum(each == max_tokens for each in prefixes) / len(prompts),
        mean_prefix=statistics.mean(prefixes),
        next_token=same / (max_tokens * len(prompts)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32)
    tokens = parser.parse_args().tokens
    codec = TextCodec.load(model_path(DEFAULT_MODEL, home=roulant_home()))
    messages = [[{"role": "user", "content": f"Tell me something about {subject}."}] for subject in SUBJECTS]
    told = conditions(model=DEFAULT_MODEL, dtype="float32", prompts=len(SUBJECTS), tokens=tokens)
    print(", ".join(f"{name} {value}" for name, value in told.items()))
    found = agreement([tuple(codec.encode_chat(each)) for each in messages], tokens)
    sizes = {kv_dtype: start(kv_dtype).stats().kv_bytes_per_token for kv_dtype in KvDtype}
    print(f"KV bytes per token: {sizes[KvDtype.AUTO]:,} exact, {sizes[KvDtype.INT8]:,} in eight bits")
    print(f"identical answers {found.identical:.0%}, mean equal prefix {found.mean_prefix:.1f} of {tokens} tokens")
    print(f"same next token after the same tokens {found.next_token:.1%}")
    results = {name: getattr(found, name) for name in Agreement.__slots__}
    print(json.dumps({"benchmark": "kv_int8", "conditions": told, "kv_bytes_per_token": sizes, **results}))


if __name__ == "__main__":
    main()
