"""What stands in for the rest of the house: a one-byte-one-token tokenizer, an admission, replicas with a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cluster.api import AdmissionAsk, Lane, LimitStatus, Permit, Refusal, Usage, WindowStatus
from engine.api import (
    Choice,
    FinishReason,
    GenerateRequest,
    Logprob,
    PositionLogprobs,
    TextCodec,
    TokenDelta,
)
from router.api import Caller, Catalog, KeyRing, ServedModel, Service, Wiring, hash_key

EOS = "<eos>"
TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('this model has no role ' + message['role']) -}}
{%- endif -%}
{%- if loop.previtem is defined and loop.previtem['role'] == message['role'] -%}
{{- raise_exception('roles must alternate') -}}
{%- endif -%}
{{- message['role'][0] + ':' + message['content'] + '|' -}}
{%- endfor -%}
{{- 'a:' -}}"""
"""``[user: hi]`` becomes ``u:hi|a:``."""

MODEL = "tiny"
CONTEXT = 64
CREATED = 1_700_000_000
WEIGHT = 3
LIMITS = LimitStatus(
    requests=WindowStatus(limit=10, remaining=7, reset_s=18.0),
    tokens=WindowStatus(limit=1000, remaining=940, reset_s=0.012),
)

KEY, SMALL_KEY, ADMIN_KEY = "sk-tenant", "sk-small", "sk-admin"
CALLER = Caller(tenant="acme", key_id="k1")
SMALL_CALLER = Caller(
    tenant="small",
    key_id="k2",
    models=frozenset({MODEL}),
    max_lane=Lane.STANDARD,
    default_lane=Lane.BATCH,
)
ADMIN = Caller(tenant="ops", key_id="k3", is_admin=True)


def make_codec(folder: Path) -> TextCodec:
    """One token per byte, then EOS; `encode` adds nothing."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(str(folder))
    return TextCodec.load(str(folder))


class FakeAdmission:
    """Admits everything, unless there is a `refusal`, or `gate` is not set yet. Remembers all it is told."""

    def __init__(self) -> None:
        self.refusal: Refusal | None = None
        self.gate: asyncio.Event | None = None
        self.asks: list[AdmissionAsk] = []
        self.withdrawn: list[str] = []
        self.closed: list[tuple[str, Usage | None]] = []
        self.limits_error: Exception | None = None

    async def admit(self, ask: AdmissionAsk) -> Permit | Refusal:
        self.asks.append(ask)
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.withdrawn.append(ask.request_id)
                raise
        if self.refusal is not None:
            return self.refusal
        return Permit(
            request_id=ask.request_id,
            tenant=ask.tenant,
            model=ask.model,
            lane=ask.lane,
            prompt_tokens=ask.prompt_tokens,
            reserved_tokens=ask.prompt_tokens + (ask.max_output_tokens or 0),
            status=LIMITS,
            num_sequences=ask.num_sequences,
            weight=WEIGHT,
        )

    def close(self, request_id: str, usage: Usage | None) -> None:
        self.closed.append((request_id, usage))

    async def limits(self, tenant: str, key: str) -> LimitStatus:
        if self.limits_error is not None:
            raise self.limits_error
        return LIMITS

    @property
    def usages(self) -> list[Usage | None]:
        """What was closed, in order; fails if a request was closed twice."""
        ids = [request_id for request_id, _ in self.closed]
        assert len(ids) == len(set(ids))
        return [usage for _, usage in self.closed]


Step = TokenDelta | Exception | asyncio.Event
"""What a scripted replica does next: deliver, fail, or wait."""
Script = Callable[[GenerateRequest], list[Step]]


class FakeReplicas:
    """Every attempt at a request follows `script(request)`, until it is cancelled: then `unseen` are the tokens that
    each choice had generated without telling yet. `deaf`: no replica knows of any request, or what asking raises."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[GenerateRequest] = []
        self.cancelled: list[tuple[str, int | None]] = []
        self.unseen: tuple[int, ...] = ()
        self.deaf: bool | Exception = False
        self.ready: bool | Exception = True
        self.num_running = 0
        self.waiting = asyncio.Event()
        """Set whenever a script waits for an event of its own."""
        self._runs: dict[str, _Run] = {}

    async def generate(self, model: str, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        self.requests.append(request)
        run = self._runs[request.request_id] = _Run({choice.index for choice in request.choices})
        self.num_running += 1
        try:
            for step in self.script(request):
                for index in run.take_cancelled():
                    yield TokenDelta(index=index, token_ids=self.unseen, finish_reason=FinishReason.CANCELLED)
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    self.waiting.set()
                    await run.wait(step)
                elif step.index in run.open:
                    if step.finish_reason is not None:
                        run.open.discard(step.index)
                    yield step
            for index in run.take_cancelled():
                yield TokenDelta(index=index, token_ids=self.unseen, finish_reason=FinishReason.CANCELLED)
        finally:
            self.num_running -= 1

    async def cancel(self, model: str, request_id: str, index: int | None = None) -> int | None:
        self.cancelled.append((request_id, index))
        if isinstance(self.deaf, Exception):
            raise self.deaf
        if self.deaf or request_id not in self._runs:
            return None
        self._runs[request_id].cancel(index)
        return 0

    async def is_ready(self) -> bool:
        if isinstance(self.ready, Exception):
            raise self.ready
        return self.ready


class _Run:
    """One request in a replica."""

    def __init__(self, indices: set[int]) -> None:
        self.open = indices
        self._cancelled: set[int] = set()
        self._news = asyncio.Event()

    def cancel(self, index: int | None) -> None:
        self._cancelled |= self.open if index is None else self.open & {index}
        self._news.set()

    def take_cancelled(self) -> list[int]:
        """The choices that are to end now."""
        taken = sorted(self._cancelled & self.open)
        self.open -= self._cancelled
        return taken

    async def wait(self, event: asyncio.Event) -> None:
        """Until `event`, or until something is cancelled."""
        waits = [asyncio.create_task(each.wait()) for each in (event, self._news)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


def says(codec: TextCodec, *texts: str) -> Script:
    """A model whose answer to everything is `texts[0]`, as choice 1 `texts[1]` and so on, a token at a time in turn."""

    def script(request: GenerateRequest) -> list[Step]:
        answers = [_answer(codec, texts[choice.index % len(texts)], request, choice) for choice in request.choices]
        return [step for turn in zip_longest(*answers) for step in turn if step is not None]

    return script


def _answer(codec: TextCodec, text: str, request: GenerateRequest, choice: Choice) -> list[Step]:
    (eos,) = codec.eos_token_ids
    sampling = request.sampling
    tokens = [*codec.encode(text), eos][: sampling.max_tokens]
    reason = FinishReason.STOP if tokens and tokens[-1] == eos else FinishReason.LENGTH
    start = len(choice.resumed_token_ids)
    deltas = [
        TokenDelta(index=choice.index, token_ids=(token,), logprobs=scores_of(sampling.logprobs, (token,)))
        for token in tokens[start:]
    ] or [TokenDelta(index=choice.index)]
    deltas[-1] = replace(deltas[-1], finish_reason=reason)
    if choice is request.choices[0]:
        prompt = scores_of(sampling.prompt_logprobs, request.prompt_token_ids[1:])
        deltas[0] = replace(deltas[0], prompt_logprobs=prompt, num_cached_tokens=len(request.prompt_token_ids) // 2)
    return [*deltas]


def scores_of(num_top: int | None, token_ids: Sequence[int]) -> tuple[PositionLogprobs, ...]:
    """Log-probabilities for `token_ids`: token t has -t, the likeliest at every place are the tokens 1, 2, ..."""
    if num_top is None:
        return ()
    top = tuple(Logprob(token_id=token, logprob=-float(token)) for token in range(1, num_top + 1))
    return tuple(
        PositionLogprobs(chosen=Logprob(token_id=token, logprob=-float(token)), top=top) for token in token_ids
    )


HELD = "0f3a"
"""The request that an engine holds."""


class FakeViews:
    async def queue(self) -> object:
        return {"models": [LIMITS]}

    async def replicas(self, num_steps: int) -> object:
        return {"steps asked for": num_steps}

    async def explain(self, request_id: str) -> object | None:
        return {"request_id": request_id} if request_id == HELD else None


class House:
    """A whole router over fakes."""

    def __init__(self, codec: TextCodec, *texts: str) -> None:
        self.codec = codec
        self.admission = FakeAdmission()
        self.replicas = FakeReplicas(says(codec, *(texts or ("Hello, world",))))
        self.catalog = Catalog(
            [
                ServedModel(id=MODEL, max_model_len=CONTEXT, codec=codec, created=CREATED, aliases=("tiny-alias",)),
                ServedModel(id="org/other", max_model_len=CONTEXT, codec=codec, created=CREATED),
            ]
        )
        self.keys = KeyRing({hash_key(KEY): CALLER, hash_key(SMALL_KEY): SMALL_CALLER, hash_key(ADMIN_KEY): ADMIN})
        self.service = Service(
            catalog=self.catalog, admission=self.admission, replicas=self.replicas, draw_seed=lambda: 4711
        )

    def wiring(self, *, body_limit_bytes: int = 4 * 1024 * 1024) -> Wiring:
        return Wiring(
            service=self.service,
            keys=self.keys,
            catalog=self.catalog,
            admission=self.admission,
            replicas=self.replicas,
            operator_views=FakeViews(),
            body_limit_bytes=body_limit_bytes,
        )
