from __future__ import annotations

import pytest
from pydantic import ValidationError

from engine.api import SamplingParams, TextCodec, TokenBias
from router.errors import ApiError, as_api_error
from router.fields import Body
from router.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT: dict[str, object] = {"messages": MESSAGES}
TEXT: dict[str, object] = {"prompt": "hi"}
BOTH = [(ChatRequest, CHAT), (CompletionRequest, TEXT)]


def refused(model: type[Body], body: dict[str, object]) -> ApiError:
    with pytest.raises((ValidationError, ApiError)) as caught:
        model.model_validate(body)
    error = as_api_error(caught.value)
    assert error.row.status == 400
    return error


@pytest.mark.parametrize(("model", "body"), BOTH)
def test_p_val_01_null_is_the_same_as_absence(model: type[Body], body: dict[str, object]) -> None:
    nulls = dict.fromkeys(name for name in model.model_fields if name not in body)
    assert model.model_validate(body | nulls) == model.model_validate(body)


def test_null_inside_a_message_is_the_same_as_absence() -> None:
    message = {"role": "assistant", "content": "hi", "name": None, "refusal": None, "tool_calls": None}
    assert ChatRequest.model_validate({"messages": [message]}).messages[0].content == "hi"


def prompts(request: ChatRequest | CompletionRequest, codec: TextCodec) -> list[tuple[int, ...]]:
    return [prompt.token_ids for prompt in request.encode(codec)]


def text(request: ChatRequest | CompletionRequest, codec: TextCodec) -> str:
    """The only prompt, as its tokens spell it."""
    (token_ids,) = prompts(request, codec)
    return codec.decode(token_ids)


@pytest.mark.parametrize("value", [0, -1, 1.5, 1.0, "10", True, [], {}, float("nan"), float("inf")])
@pytest.mark.parametrize(("model", "body"), BOTH)
def test_p_val_02_max_tokens_is_a_positive_integer(model: type[Body], body: dict[str, object], value: object) -> None:
    assert refused(model, body | {"max_tokens": value}).param == "max_tokens"


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("temperature", [0, 0.7, 2], [-0.1, 2.1, "1", True, float("inf"), float("nan")]),
        ("top_p", [0.1, 1], [0, 1.1, "1"]),
        ("top_k", [-1, 0, 1, 50], [-2, 1.5, True]),
        ("min_p", [0, 1], [-0.1, 1.1]),
        ("seed", [0, -(2**63), 2**63 - 1], [2**63, -(2**63) - 1, 1.5, "1", True]),
        ("min_tokens", [0, 5], [-1, 0.5]),
        ("ignore_eos", [True, False], [1, "true"]),
        ("stream", [True, False], [1, "true"]),
        ("priority", ["interactive", "standard", "batch"], ["urgent", 1, ""]),
        ("timeout_s", [0.5, 60], [0, -1, "1", 1e9]),
        ("model", ["tiny"], ["", 5, []]),
        ("user", ["u"], [5, {}]),
        ("metadata", [{}, {"a": "b"}], [5, {str(i): "" for i in range(17)}]),
        ("n", [1, 16], [0, -1, 1.5, 17, "1", True]),
        ("frequency_penalty", [-2, 0.5, 2], [-2.1, 2.1, "1", True, float("nan")]),
        ("presence_penalty", [-2, 0.5, 2], [-2.1, 2.1, "1", True, float("inf")]),
        ("repetition_penalty", [0.01, 1.3, 100], [0, -1, 0.009, 101, "1", float("nan")]),
        ("prompt_logprobs", [0, 20], [-1, 21, 1.5, True]),
    ],
)
@pytest.mark.parametrize(("model", "body"), BOTH)
def test_p_val_06_every_field_has_its_range(
    model: type[Body], body: dict[str, object], field: str, good: list[object], bad: list[object]
) -> None:
    for value in good:
        model.model_validate(body | {field: value})
    for value in bad:
        assert refused(model, body | {field: value}).param == field


@pytest.mark.parametrize(
    ("field", "neutral", "other"),
    [
        ("ttft_slo_s", [], [1.0]),
    ],
)
@pytest.mark.parametrize(("model", "body"), BOTH)
def test_what_is_not_offered_is_refused_by_name_unless_it_changes_nothing(
    model: type[Body], body: dict[str, object], field: str, neutral: list[object], other: list[object]
) -> None:
    for value in neutral:
        model.model_validate(body | {field: value})
    for value in other:
        error = refused(model, body | {field: value})
        assert (error.param, error.row.code) == (field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("model", "body", "param"),
    [
        (ChatRequest, {"tools": [{"type": "function"}]}, "tools"),
        (ChatRequest, {"tool_choice": "required"}, "tool_choice"),
        (ChatRequest, {"functions": [{}]}, "functions"),
        (ChatRequest, {"function_call": {"name": "f"}}, "function_call"),
        (ChatRequest, {"store": True}, "store"),
        (ChatRequest, {"response_format": {"type": "json_object"}}, "response_format.type"),
        (ChatRequest, {"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema"),
        (CompletionRequest, {"best_of": 2}, "best_of"),
        (CompletionRequest, {"best_of": 3, "n": 2}, "best_of"),
        (CompletionRequest, {"suffix": "x"}, "suffix"),
    ],
)
def test_an_endpoint_s_own_features_that_are_not_offered(
    model: type[Body], body: dict[str, object], param: str
) -> None:
    error = refused(model, (CHAT if model is ChatRequest else TEXT) | body)
    assert (error.param, error.row.code) == (param, "unsupported_parameter")


def test_neutral_values_of_those_features_are_taken() -> None:
    ChatRequest.model_validate(
        CHAT
        | {
            "logprobs": False,
            "tools": [],
            "tool_choice": "none",
            "parallel_tool_calls": True,
            "response_format": {"type": "text"},
            "store": False,
        }
    )
    CompletionRequest.model_validate(TEXT | {"best_of": 2, "n": 2, "suffix": ""})


def test_the_message_about_a_feature_says_what_is_taken() -> None:
    message = refused(ChatRequest, CHAT | {"tool_choice": "required"}).message
    assert message == 'tool_choice: not offered by this server; leave it out or send "none" or "auto"'


@pytest.mark.parametrize(("model", "body"), BOTH)
def test_an_unknown_key_is_named(model: type[Body], body: dict[str, object]) -> None:
    error = refused(model, body | {"max_token": 5})
    assert (error.param, error.row.code) == ("max_token", "unknown_parameter")


@pytest.mark.parametrize("value", ["", [""], ["a", ""], [1], "x" * 1001, ["x" * 10_000], 5, {}, ["a"] * 17, ["\ud800"]])
def test_p_val_05_a_stop_that_cannot_work_is_refused(value: object) -> None:
    assert refused(ChatRequest, CHAT | {"stop": value}).param == "stop"


def test_p_val_05_stop_is_a_string_or_up_to_sixteen() -> None:
    assert ChatRequest.model_validate(CHAT | {"stop": "a"}) == ChatRequest.model_validate(CHAT | {"stop": ["a"]})
    assert ChatRequest.model_validate(CHAT | {"stop": []}) == ChatRequest.model_validate(CHAT)
    assert ChatRequest.model_validate(CHAT | {"stop": ["a"] * 16}).stop == ("a",) * 16


def test_p_val_05_the_limits_on_stop_are_stated() -> None:
    assert "at most 16" in refused(ChatRequest, CHAT | {"stop": ["a"] * 17}).message
    assert "at most 1000" in refused(ChatRequest, CHAT | {"stop": "x" * 1001}).message


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ({"role": "user"}, "messages"),
        ([5], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": 7, "content": "hi"}], "messages[0].role"),
        ([{"role": "", "content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {}}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([*MESSAGES, {"role": "user", "content": [{"type": "image_url", "text": ""}]}], "messages[1].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "hi", "tool_calls": []}], "messages[0].tool_calls"),
    ],
)
def test_p_val_06_a_wrong_message_is_named_by_its_path(messages: object, param: str) -> None:
    assert refused(ChatRequest, {"messages": messages}).param == param


def test_a_million_faults_cost_no_more_than_one() -> None:
    assert refused(ChatRequest, {"messages": [5] * 1_000_000}).param == "messages[0]"
    assert refused(DetokenizeRequest, {"tokens": [-1] * 1_000_000}).param == "tokens[0]"
    assert refused(ChatRequest, CHAT | {str(i): 1 for i in range(100_000)}).message == (
        "has 100001 keys; at most 100 are taken"
    )


@pytest.mark.parametrize(
    "prompt", ["", [""], [], [[]], None, 5, True, {}, [True], [-1], [1.5], [1, "a"], [[1.0]], [None], "\ud800"]
)
def test_p_val_03_a_prompt_that_is_none_is_refused(prompt: object) -> None:
    assert refused(CompletionRequest, {"prompt": prompt}).param == "prompt"
    assert refused(CompletionRequest, {}).param == "prompt"


@pytest.mark.parametrize("prompt", ["hi", ["hi"]])
def test_a_prompt_of_text(codec: TextCodec, prompt: object) -> None:
    assert prompts(CompletionRequest.model_validate({"prompt": prompt}), codec) == [tuple(codec.encode("hi"))]


@pytest.mark.parametrize("prompt", [[1, 2], [[1, 2]]])
def test_a_prompt_of_token_ids(codec: TextCodec, prompt: object) -> None:
    assert prompts(CompletionRequest.model_validate({"prompt": prompt}), codec) == [(1, 2)]


@pytest.mark.parametrize(("prompt", "expected"), [(["hi", "yo"], ["hi", "yo"]), ([[1], "hi"], [(1,), "hi"])])
def test_several_prompts_keep_their_order(codec: TextCodec, prompt: object, expected: list[str | tuple[int]]) -> None:
    ids = [tuple(codec.encode(each)) if isinstance(each, str) else each for each in expected]
    assert prompts(CompletionRequest.model_validate({"prompt": prompt}), codec) == ids


def test_the_number_of_prompts_and_of_outputs_is_bounded() -> None:
    CompletionRequest.model_validate({"prompt": ["a"] * 32, "n": 2})
    error = refused(CompletionRequest, {"prompt": ["a"] * 33})
    assert (error.param, error.message) == ("prompt", "prompt: at most 32 prompts are taken, not 33")
    error = refused(CompletionRequest, {"prompt": ["a"] * 32, "n": 3})
    assert (error.param, error.message) == (
        "n",
        "n: 32 prompts with 3 outputs each are 96 outputs; at most 64 are taken",
    )


def test_the_wrong_one_of_several_prompts_is_named() -> None:
    error = refused(CompletionRequest, {"prompt": ["a", ""]})
    assert (error.param, error.message) == ("prompt", "prompt: [1] is empty")


@pytest.mark.parametrize(
    "value",
    [
        5,
        [],
        {"-1": 1},
        {"abc": 1},
        {"": 1},
        {"01": 1},
        {" 1": 1},
        {"1.0": 1},
        {"٣": 1},
        {"1": 101},
        {"1": -101},
        {"1": float("nan")},
        {"1": "x"},
        {"1": True},
        {"1": []},
        {str(token): 1 for token in range(301)},
    ],
)
@pytest.mark.parametrize(("model", "body"), BOTH)
def test_p_val_04_a_wrong_bias_is_refused(model: type[Body], body: dict[str, object], value: object) -> None:
    assert refused(model, body | {"logit_bias": value}).param == "logit_bias"


def test_p_val_04_a_bias_is_a_number_for_a_token_of_the_vocabulary(codec: TextCodec) -> None:
    last = codec.vocab_size - 1
    good = ChatRequest.model_validate(CHAT | {"logit_bias": {"0": -100, str(last): 100.0, "5": None}})
    assert good.logit_bias == (TokenBias(token_id=0, bias=-100.0), TokenBias(token_id=last, bias=100.0))
    good.check_vocabulary(codec)
    for wrong in (last + 1, last + 100_001):
        for field, value in (("logit_bias", {str(wrong): 1}), ("stop_token_ids", [wrong])):
            with pytest.raises(ApiError, match=f"token id {wrong} does not exist") as caught:
                ChatRequest.model_validate(CHAT | {field: value}).check_vocabulary(codec)
            assert caught.value.param == field


def test_a_chat_s_log_probabilities_are_on_before_their_number_is_chosen() -> None:
    assert ChatRequest.model_validate(CHAT).num_logprobs is None
    assert ChatRequest.model_validate(CHAT | {"logprobs": True}).num_logprobs == 0
    assert ChatRequest.model_validate(CHAT | {"logprobs": True, "top_logprobs": 20}).num_logprobs == 20
    assert ChatRequest.model_validate(CHAT | {"top_logprobs": 0}).num_logprobs is None
    for wrong in ({"top_logprobs": 2}, {"top_logprobs": 2, "logprobs": False}, {"logprobs": True, "top_logprobs": 21}):
        assert refused(ChatRequest, CHAT | wrong).param == "top_logprobs"
    assert refused(ChatRequest, CHAT | {"logprobs": 1}).param == "logprobs"


def test_a_completion_s_log_probabilities_are_a_number() -> None:
    for value in (0, 20):
        assert CompletionRequest.model_validate(TEXT | {"logprobs": value}).num_logprobs == value
    for wrong in (-1, 21, True, 1.5):
        assert refused(CompletionRequest, TEXT | {"logprobs": wrong}).param == "logprobs"


def test_the_engine_scores_the_prompt_for_an_echo_and_for_a_field_of_its_own() -> None:
    def scored(**fields: object) -> int | None:
        request = CompletionRequest.model_validate(TEXT | fields)
        return request.sampling(max_tokens=1, seed=1).prompt_logprobs

    assert scored(logprobs=3) is None
    assert scored(echo=True) is None
    assert scored(logprobs=0, echo=True) == 0
    assert scored(logprobs=3, echo=True, prompt_logprobs=2) == 3
    assert scored(logprobs=3, echo=True, prompt_logprobs=5) == 5
    assert scored(prompt_logprobs=0) == 0


@pytest.mark.parametrize(("model", "body"), BOTH)
def test_a_stream_does_not_carry_prompt_logprobs(model: type[Body], body: dict[str, object]) -> None:
    assert refused(model, body | {"prompt_logprobs": 1, "stream": True}).param == "prompt_logprobs"


def test_p_val_02_no_output_at_all_is_for_an_echo() -> None:
    assert CompletionRequest.model_validate(TEXT | {"max_tokens": 0, "echo": True}).output_limit == 0
    assert "echo" in refused(CompletionRequest, TEXT | {"max_tokens": 0}).message
    assert refused(ChatRequest, CHAT | {"max_completion_tokens": 0}).param == "max_completion_tokens"


def test_a_token_id_beyond_the_vocabulary_is_refused(codec: TextCodec) -> None:
    last = codec.vocab_size - 1
    assert prompts(CompletionRequest.model_validate({"prompt": [last]}), codec) == [(last,)]
    with pytest.raises(ApiError) as caught:
        CompletionRequest.model_validate({"prompt": [0, last + 1]}).encode(codec)
    assert (caught.value.row.status, caught.value.param) == (400, "prompt")
    with pytest.raises(ApiError) as caught:
        DetokenizeRequest.model_validate({"tokens": [last + 1]}).decode(codec)
    assert (caught.value.row.status, caught.value.param) == (400, "tokens")


@pytest.mark.parametrize("given", ["left\0right", "\0left", "left\0"])
def test_p_val_07_nul_is_a_character_like_any_other(codec: TextCodec, given: str) -> None:
    assert text(CompletionRequest.model_validate({"prompt": given}), codec) == given
    chat = ChatRequest.model_validate({"messages": [{"role": "user", "content": given}]})
    assert text(chat, codec) == f"u:{given}|a:"


def test_parts_are_joined_and_developer_is_system(codec: TextCodec) -> None:
    chat = ChatRequest.model_validate(
        {
            "messages": [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            ]
        }
    )
    assert text(chat, codec) == "s:be brief|u:ab|a:"


def test_p_str_03_stream_options_need_a_stream() -> None:
    assert refused(ChatRequest, CHAT | {"stream_options": {}}).param == "stream_options"
    assert refused(ChatRequest, CHAT | {"stream": False, "stream_options": {}}).param == "stream_options"
    stream = CHAT | {"stream": True}
    assert not ChatRequest.model_validate(stream | {"stream_options": {}}).include_usage
    assert ChatRequest.model_validate(stream | {"stream_options": {"include_usage": True}}).include_usage
    error = refused(ChatRequest, stream | {"stream_options": {"include_usage": 1}})
    assert error.param == "stream_options.include_usage"


def test_the_two_names_of_the_output_bound_must_agree() -> None:
    chat = ChatRequest.model_validate(CHAT | {"max_completion_tokens": 5})
    assert (chat.output_limit, chat.output_limit_field) == (5, "max_completion_tokens")
    assert ChatRequest.model_validate(CHAT | {"max_tokens": 5, "max_completion_tokens": 5}).output_limit == 5
    error = refused(ChatRequest, CHAT | {"max_tokens": 4, "max_completion_tokens": 5})
    assert error.param == "max_completion_tokens"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_p_cor_04_min_tokens_stays_below_the_output_bound(field: str) -> None:
    ChatRequest.model_validate(CHAT | {field: 4, "min_tokens": 4})
    error = refused(ChatRequest, CHAT | {field: 4, "min_tokens": 5})
    assert (error.param, error.message) == ("min_tokens", f"min_tokens: 5 is more than {field}, 4")


def test_sampling_carries_every_field() -> None:
    body = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": 7,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [3, 4],
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"7": -3},
        "logprobs": True,
        "top_logprobs": 2,
        "prompt_logprobs": 1,
    }
    assert ChatRequest.model_validate(CHAT | body).sampling(max_tokens=9, seed=1) == SamplingParams(
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=7,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=(3, 4),
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias=(TokenBias(token_id=7, bias=-3.0),),
        logprobs=2,
        prompt_logprobs=1,
    )


def test_sampling_defaults_are_openai_s_and_the_seed_is_drawn() -> None:
    assert ChatRequest.model_validate(CHAT).sampling(max_tokens=9, seed=1) == SamplingParams(max_tokens=9, seed=1)


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_may_be_off_in_two_spellings(top_k: int) -> None:
    assert ChatRequest.model_validate(CHAT | {"top_k": top_k}).sampling(max_tokens=9, seed=1).top_k is None


def test_tokenize_takes_a_text_or_a_conversation(codec: TextCodec) -> None:
    assert TokenizeRequest.model_validate(TEXT).encode(codec) == codec.encode("hi")
    assert codec.decode(TokenizeRequest.model_validate(CHAT).encode(codec)) == "u:hi|a:"
    assert TokenizeRequest.model_validate({"prompt": ""}).encode(codec) == []
    assert refused(TokenizeRequest, TEXT | CHAT).param == "messages"
    with pytest.raises(ApiError) as caught:
        TokenizeRequest.model_validate({}).encode(codec)
    assert caught.value.param == "prompt"
