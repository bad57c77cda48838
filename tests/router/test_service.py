from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import pytest

from cluster.api import AdmissionAsk, Lane, LimitStatus, Refusal, RefusalCode, Usage
from engine.api import EngineDeadError, FinishReason, RequestRefusedError, TextCodec, TokenDelta
from router.choice import TextDelta
from router.errors import ApiError
from router.schemas import ChatRequest, CompletionRequest, GenerationRequest
from router.service import Started
from router.work import output_bound
from tests.router.fakes import CALLER, CONTEXT, LIMITS, MODEL, SMALL_CALLER, WEIGHT, House, Step, says

PROMPT_TOKENS = len("u:hi|a:")


def chat(**fields: object) -> ChatRequest:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    return ChatRequest.model_validate(body | fields)


def completion(**fields: object) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": MODEL, "prompt": "hi"} | fields)


def run(house: House, request: GenerationRequest) -> AsyncGenerator[Started | TextDelta, None]:
    return house.service.run(request, CALLER, "r1")


def used(completion_tokens: int) -> Usage:
    """As the fake replica has it, half of the prompt was cached."""
    return Usage(prompt_tokens=PROMPT_TOKENS, completion_tokens=completion_tokens, cached_tokens=PROMPT_TOKENS // 2)


def uncached(completion_tokens: int) -> Usage:
    return Usage(prompt_tokens=PROMPT_TOKENS, completion_tokens=completion_tokens)


async def whole(house: House, request: GenerationRequest) -> tuple[str, TextDelta]:
    """The whole text, and the last event."""
    events = [event async for event in run(house, request)]
    deltas = [event for event in events[1:] if isinstance(event, TextDelta)]
    assert isinstance(events[0], Started)
    assert len(deltas) == len(events) - 1
    assert [delta.finish_reason is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
    return "".join(delta.text for delta in deltas), deltas[-1]


async def test_a_request_runs_from_text_to_text_and_is_charged_what_the_client_is_told(house: House) -> None:
    text, last = await whole(house, chat())
    assert text == "Hello, world"
    usage = used(len("Hello, world") + 1)  # and EOS
    assert (last.finish_reason, last.usage) == (FinishReason.STOP, usage)
    assert house.admission.usages == [usage]
    assert house.replicas.cancelled == []


async def test_the_first_event_tells_the_model_and_the_limits(house: House) -> None:
    async with aclosing(run(house, chat(model="tiny-alias"))) as events:
        assert await anext(events) == Started(model=MODEL, limits=LIMITS)


async def test_admission_and_engine_are_asked_for_the_same_request(house: House) -> None:
    await whole(house, chat(priority="batch", max_tokens=5, seed=3))
    assert house.admission.asks == [
        AdmissionAsk(
            request_id="r1",
            tenant="acme",
            model=MODEL,
            lane=Lane.BATCH,
            prompt_tokens=PROMPT_TOKENS,
            max_output_tokens=5,
            key="k1",
        )
    ]
    (job,) = house.replicas.requests
    assert (job.request_id, job.tenant, job.weight, job.lane) == ("r1", "acme", WEIGHT, 2)
    assert job.timeout_s == pytest.approx(600, abs=60)
    assert house.codec.decode(job.prompt_token_ids) == "u:hi|a:"
    assert (job.sampling.max_tokens, job.sampling.seed) == (5, 3)


async def test_a_chat_without_a_bound_may_fill_the_context_and_admission_hears_that_it_has_none(house: House) -> None:
    await whole(house, chat())
    assert house.admission.asks[0].max_output_tokens is None
    assert house.replicas.requests[0].sampling.max_tokens == CONTEXT - PROMPT_TOKENS


async def test_a_completion_without_a_bound_has_openai_s(house: House) -> None:
    await whole(house, completion())
    assert house.admission.asks[0].max_output_tokens == 16
    assert house.replicas.requests[0].sampling.max_tokens == 16


async def test_a_request_without_a_seed_gets_one_so_that_it_can_be_resumed(house: House) -> None:
    await whole(house, chat())
    assert house.replicas.requests[0].sampling.seed == 4711


async def test_the_length_limit_ends_the_text(house: House) -> None:
    text, last = await whole(house, chat(max_tokens=5))
    assert (text, last.finish_reason) == ("Hello", FinishReason.LENGTH)
    assert house.admission.usages == [used(5)]


async def test_a_stop_string_ends_the_text_and_the_engine_s_work(house: House) -> None:
    text, last = await whole(house, chat(stop=["o, w", "never"]))
    assert (text, last.finish_reason) == ("Hell", FinishReason.STOP)
    await house.service.settled()
    assert house.replicas.cancelled == [("r1", 0)]
    assert house.replicas.num_running == 0
    # Charged as told to the client, though the engine may have been a token or two further.
    assert house.admission.usages == [used(len("Hello, w"))]


async def test_text_that_was_held_back_for_a_stop_string_comes_at_the_end(house: House) -> None:
    events = [event async for event in run(house, chat(stop="world!"))]
    assert "".join(event.text for event in events[1:-1] if isinstance(event, TextDelta)) == "Hello, "
    usage = used(len("Hello, world") + 1)
    assert events[-1] == TextDelta(text="world", finish_reason=FinishReason.STOP, usage=usage)


async def test_a_character_that_stays_incomplete_is_replaced_at_the_end(codec: TextCodec) -> None:
    text, last = await whole(House(codec, "n€"), chat(max_tokens=3))
    assert (text, last.finish_reason) == ("n\ufffd", FinishReason.LENGTH)


async def test_half_of_a_character_is_never_sent(codec: TextCodec) -> None:
    house = House(codec, "né €🙂")
    events = [event async for event in run(house, chat())]
    assert [event.text for event in events if isinstance(event, TextDelta)] == ["n", "é", " ", "€", "🙂", ""]


@pytest.mark.parametrize("when", [0, 1, 3])
async def test_a_client_that_leaves_is_charged_what_the_engine_generated(house: House, when: int) -> None:
    house.replicas.unseen = (1, 2)
    events = run(house, chat())
    for _ in range(when + 1):
        await anext(events)
    await events.aclose()
    expected = used(when + 2) if when else None
    assert house.admission.usages == [expected]
    assert house.replicas.num_running == 0


async def test_a_cancelled_request_settles_before_it_ends(house: House) -> None:
    (h,) = house.codec.encode("H")
    house.replicas.script = lambda _request: [TokenDelta(token_ids=(h,)), asyncio.Event()]
    house.replicas.unseen = (h,)
    reader = asyncio.create_task(whole(house, chat()))
    await house.replicas.waiting.wait()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert house.admission.usages == [uncached(2)]
    assert house.replicas.num_running == 0


async def test_settling_survives_a_second_cancellation(house: House) -> None:
    asked, answer = asyncio.Event(), asyncio.Event()
    really_cancel = house.replicas.cancel

    async def cancel(model: str, request_id: str, index: int | None = None) -> int | None:
        asked.set()
        await answer.wait()
        return await really_cancel(model, request_id, index)

    house.replicas.script = lambda _request: [asyncio.Event()]
    house.replicas.unseen = (1, 2)
    house.replicas.cancel = cancel  # type: ignore[method-assign]
    reader = asyncio.create_task(whole(house, chat()))
    await house.replicas.waiting.wait()
    reader.cancel()
    await asked.wait()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert house.admission.usages == []
    answer.set()
    await house.service.settled()
    assert house.admission.usages == [uncached(2)]


async def test_a_client_that_leaves_the_queue_withdraws_its_ask(house: House) -> None:
    house.admission.gate = asyncio.Event()
    reader = asyncio.create_task(whole(house, chat()))
    while not house.admission.asks:
        await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert house.admission.withdrawn == ["r1"]
    assert house.admission.usages == []


async def test_the_timeout_binds_while_the_request_waits(house: House) -> None:
    house.admission.gate = asyncio.Event()
    with pytest.raises(TimeoutError):
        await whole(house, chat(timeout_s=0.05))
    assert house.admission.withdrawn == [ask.request_id for ask in house.admission.asks]
    assert house.admission.usages == []


async def test_the_timeout_binds_while_the_request_runs(house: House) -> None:
    (h,) = house.codec.encode("H")
    house.replicas.script = lambda _request: [TokenDelta(token_ids=(h,)), asyncio.Event()]
    with pytest.raises(TimeoutError):
        await whole(house, chat(timeout_s=0.2))
    assert house.admission.usages == [uncached(1)]
    assert house.replicas.cancelled == [("r1", None)]


async def test_the_permit_is_back_before_the_client_sees_the_end(house: House) -> None:
    async for event in run(house, chat()):
        if isinstance(event, TextDelta) and event.finish_reason is not None:
            assert len(house.admission.usages) == 1
            return
    pytest.fail("no end")


async def test_a_client_that_leaves_at_the_end_is_charged_in_full(house: House) -> None:
    events = run(house, chat(max_tokens=1))
    await anext(events)
    assert isinstance(await anext(events), TextDelta)
    await events.aclose()
    assert house.admission.usages == [used(1)]


async def test_a_refusal_carries_the_limits_and_reserves_nothing(house: House) -> None:
    limits = LimitStatus()
    house.admission.refusal = Refusal(
        request_id="r1",
        code=RefusalCode.TOKENS_PER_MINUTE,
        message="1000 tokens a minute are used up",
        retry_after_s=4,
        status=limits,
    )
    with pytest.raises(ApiError, match="1000 tokens a minute") as caught:
        await whole(house, chat())
    assert (caught.value.row.status, caught.value.retry_after_s) == (429, 4)
    assert caught.value.limits is limits
    assert (house.replicas.requests, house.admission.usages) == ([], [])


async def test_what_the_engine_refuses_costs_nothing(house: House) -> None:
    house.replicas.script = lambda _request: [RequestRefusedError("can never fit")]
    with pytest.raises(RequestRefusedError):
        await whole(house, chat())
    assert house.admission.usages == [None]


async def test_a_death_that_cannot_be_mended_charges_the_tokens_that_were_sent(house: House) -> None:
    (h,) = house.codec.encode("H")
    house.replicas.script = lambda _request: [TokenDelta(token_ids=(h,)), EngineDeadError("killed")]
    with pytest.raises(EngineDeadError):
        await whole(house, chat())
    assert house.admission.usages == [uncached(3)]


async def test_a_death_in_mid_stream_is_not_seen_in_text_or_usage(house: House) -> None:
    good = says(house.codec, "né world")
    attempts = iter([3, 2, None])

    def dying(request: object) -> list[Step]:
        survives = next(attempts)
        steps = good(request)  # type: ignore[arg-type]
        return steps if survives is None else [*steps[:survives], EngineDeadError("killed")]

    house.replicas.script = dying
    text, last = await whole(house, chat())
    assert text == "né world"
    usage = used(len("né world".encode()) + 1)
    assert last.usage == usage
    assert house.admission.usages == [usage]
    assert [len(request.choices[0].resumed_token_ids) for request in house.replicas.requests] == [0, 3, 5]


async def test_an_engine_error_is_an_error_and_not_an_end(house: House) -> None:
    (h,) = house.codec.encode("H")
    failure = TokenDelta(token_ids=(), finish_reason=FinishReason.ERROR)
    house.replicas.script = lambda _request: [TokenDelta(token_ids=(h,)), failure]
    with pytest.raises(ApiError) as caught:
        await whole(house, chat())
    assert (caught.value.row.status, caught.value.row.code) == (500, "engine_error")
    assert house.admission.usages == [uncached(1)]


async def test_a_broken_replica_call_still_gives_the_permit_back(house: House) -> None:
    house.replicas.script = lambda _request: [RuntimeError("bug")]
    with pytest.raises(RuntimeError):
        await whole(house, chat())
    assert len(house.admission.usages) == 1


async def test_a_draining_service_refuses_and_lets_open_requests_finish(house: House) -> None:
    events = run(house, chat())
    await anext(events)
    house.service.draining = True
    with pytest.raises(ApiError) as caught:
        await anext(house.service.run(chat(), CALLER, "r2"))
    assert (caught.value.row.status, caught.value.headers()["retry-after"]) == (503, "5")
    assert len([event async for event in events]) == len("Hello, world") + 1
    assert len(house.admission.asks) == 1


async def test_priority_and_model_are_checked_before_anything_is_asked(house: House) -> None:
    for request, status in (
        (chat(priority="interactive"), 403),
        (chat(model="org/other"), 403),
        (chat(model="x"), 404),
    ):
        with pytest.raises(ApiError) as caught:
            await anext(house.service.run(request, SMALL_CALLER, "r1"))
        assert caught.value.row.status == status
    assert house.admission.asks == []


async def test_an_unbounded_request_of_a_key_runs_in_the_key_s_lane(house: House) -> None:
    async for _ in house.service.run(chat(), SMALL_CALLER, "r1"):
        pass
    assert house.admission.asks[0].lane is Lane.BATCH


@pytest.mark.parametrize("make", [chat, completion])
def test_the_context_holds_prompt_and_output(make: type[GenerationRequest]) -> None:
    room = CONTEXT - 10
    assert output_bound(make(max_tokens=room), 10, CONTEXT) == room
    with pytest.raises(ApiError) as caught:
        output_bound(make(max_tokens=room + 1), 10, CONTEXT)
    assert (caught.value.row.code, caught.value.param) == ("context_length_exceeded", "max_tokens")
    assert str(CONTEXT) in caught.value.message
    assert str(10 + room + 1) in caught.value.message


@pytest.mark.parametrize(("request_", "field"), [(chat(), "messages"), (completion(), "prompt")])
def test_a_prompt_must_leave_room_for_a_token(request_: GenerationRequest, field: str) -> None:
    assert output_bound(request_, CONTEXT - 1, CONTEXT) in (1, None)
    for prompt_tokens in (CONTEXT, 50 * CONTEXT):
        with pytest.raises(ApiError) as caught:
            output_bound(request_, prompt_tokens, CONTEXT)
        assert (caught.value.row.code, caught.value.param) == ("context_length_exceeded", field)
        assert str(CONTEXT) in caught.value.message
        assert str(prompt_tokens) in caught.value.message


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(ApiError) as caught:
        output_bound(completion(), 0, CONTEXT)
    assert caught.value.param == "prompt"


def test_min_tokens_must_fit_into_the_default_bound() -> None:
    assert output_bound(completion(min_tokens=16), 10, CONTEXT) == 16
    assert output_bound(chat(min_tokens=CONTEXT - 10), 10, CONTEXT) is None
    for request, prompt_tokens in ((completion(min_tokens=17), 10), (chat(min_tokens=CONTEXT - 9), 10)):
        with pytest.raises(ApiError) as caught:
            output_bound(request, prompt_tokens, CONTEXT)
        assert caught.value.param == "min_tokens"


@pytest.mark.parametrize("request_of", [lambda text: completion(prompt=text), lambda text: chat(messages=[
    {"role": "user", "content": text}])])  # fmt: skip
async def test_a_text_that_cannot_fit_however_it_is_cut_is_not_tokenised(
    house: House, monkeypatch: pytest.MonkeyPatch, request_of: Callable[[str], GenerationRequest]
) -> None:
    """A body of megabytes is seconds of work for the tokenizer, and one client could keep it busy."""
    model = house.catalog.resolve(MODEL, CALLER)
    assert model.codec.max_chars_per_token is not None
    for name in ("encode", "encode_chat"):
        monkeypatch.setattr(model.codec, name, lambda _: pytest.fail("the text was tokenised"))
    with pytest.raises(ApiError) as caught:
        await whole(house, request_of("x" * (model.codec.max_chars_per_token * CONTEXT + 1)))
    assert caught.value.row.code == "context_length_exceeded"
    assert house.admission.asks == []


def test_the_context_error_names_the_field_that_the_client_used() -> None:
    with pytest.raises(ApiError) as caught:
        output_bound(chat(max_completion_tokens=CONTEXT), 10, CONTEXT)
    assert caught.value.param == "max_completion_tokens"
