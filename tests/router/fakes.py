"""What stands in for the rest of the house: a one-byte-one-token tokenizer, an admission, replicas with a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cluster.api import AdmissionAsk, Lane, LimitStatus, Permit, Refusal, Usage, WindowStatus
from engine.api import FinishReason, GenerateRequest, TextCodec, TokenDelta
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
        )

    def close(self, request_id: str, usage: Usage | None) -> None:
        self.closed.append((request_id, usage))

    async def limits(self, tenant: str) -> LimitStatus:
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
    """Every attempt at a request follows `script(request)`. `counts` is what `cancel` answers."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[GenerateRequest] = []
        self.cancelled: list[str] = []
        self.counts: Callable[[GenerateRequest], int | Exception | None] = lambda _request: None
        self.ready: bool | Exception = True
        self.num_running = 0
        self.waiting = asyncio.Event()
        """Set whenever a script waits for an event of its own."""

    async def generate(self, model: str, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        self.requests.append(request)
        self.num_running += 1
        try:
            for step in self.script(request):
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    self.waiting.set()
                    await step.wait()
                else:
                    yield step
        finally:
            self.num_running -= 1

    async def cancel(self, model: str, request_id: str) -> int | None:
        self.cancelled.append(request_id)
        count = self.counts(self.requests[-1])
        if isinstance(count, Exception):
            raise count
        return count

    async def is_ready(self) -> bool:
        if isinstance(self.ready, Exception):
            raise self.ready
        return self.ready


def says(codec: TextCodec, text: str) -> Script:
    """A model whose answer to everything is `text`, a token at a time, and then its end."""

    def script(request: GenerateRequest) -> list[Step]:
        (eos,) = codec.eos_token_ids
        tokens = [*codec.encode(text), eos][: request.sampling.max_tokens]
        start = len(request.resumed_token_ids)
        steps: list[Step] = [TokenDelta(token_ids=(token,)) for token in tokens[start:-1]]
        reason = FinishReason.STOP if tokens[-1] == eos else FinishReason.LENGTH
        return [*steps, TokenDelta(token_ids=(tokens[-1],), finish_reason=reason)]

    return script


class FakeViews:
    async def queue(self) -> object:
        return {"models": [LIMITS]}

    async def replicas(self, num_steps: int) -> object:
        return {"steps asked for": num_steps}


class House:
    """A whole router over fakes."""

    def __init__(self, codec: TextCodec, text: str = "Hello, world") -> None:
        self.codec = codec
        self.admission = FakeAdmission()
        self.replicas = FakeReplicas(says(codec, text))
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
