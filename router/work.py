"""One HTTP request as admission and engine see it: a permit to ask for, and a job for each of its prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.api import AdmissionAsk, Lane, Permit
from engine.api import Choice, GenerateRequest
from router.catalog import ServedModel
from router.errors import Fault, invalid
from router.prompts import EncodedPrompt
from router.schemas import GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A request whose prompts are tokens. OpenAI's index of an output is ``prompt * n + choice``."""

    request_id: str
    tenant: str
    key: str
    lane: Lane
    request: GenerationRequest
    model: ServedModel
    prompts: tuple[EncodedPrompt, ...]

    def ask(self) -> AdmissionAsk:
        """One permit for all of it. Raises ApiError if a prompt and its output cannot be."""
        lengths = [len(prompt.token_ids) for prompt in self.prompts]
        bounds = [output_bound(self.request, length, self.model.max_model_len) for length in lengths]
        known = [bound for bound in bounds if bound is not None]
        return AdmissionAsk(
            request_id=self.request_id,
            tenant=self.tenant,
            key=self.key,
            model=self.model.id,
            lane=self.lane,
            prompt_tokens=sum(lengths),
            max_output_tokens=sum(known) * self.request.n if len(known) == len(bounds) else None,
            num_sequences=self.request.num_outputs,
            longest_prompt_tokens=max(lengths) if len(lengths) > 1 else None,
        )

    def jobs(self, permit: Permit, draw_seed: Callable[[], int]) -> list[GenerateRequest]:
        """What each prompt asks of an engine, in the lane of the permit, to which waiting may have lifted it.

        Without a seed of the client's each prompt gets one of its own.
        """
        return [self._job(number, prompt, permit, draw_seed()) for number, prompt in enumerate(self.prompts)]

    def _job(self, number: int, prompt: EncodedPrompt, permit: Permit, seed: int) -> GenerateRequest:
        room = self.model.max_model_len - len(prompt.token_ids)
        bound = output_bound(self.request, len(prompt.token_ids), self.model.max_model_len)
        return GenerateRequest(
            request_id=self.request_id if len(self.prompts) == 1 else f"{self.request_id}.{number}",
            prompt_token_ids=prompt.token_ids,
            sampling=self.request.sampling(max_tokens=room if bound is None else bound, seed=seed),
            tenant=self.tenant,
            weight=permit.weight,
            lane=permit.lane,
            choices=tuple(Choice(index=index) for index in range(self.request.n)),
        )


def refuse_hopeless(request: GenerationRequest, model: ServedModel) -> None:
    """Raise ApiError for what is wrong whatever the prompt's tokens are, so that none of it needs to be tokenised."""
    request.check_vocabulary(model.codec)
    chars = model.codec.max_chars_per_token
    if chars is None or request.num_chars <= chars * model.max_model_len:
        return
    reason = (
        f"{request.num_chars} characters are more than {request.num_chars // chars} tokens; "
        f"the model's context is {model.max_model_len} tokens"
    )
    raise invalid(request.prompt_field, reason, Fault.CONTEXT_LENGTH_EXCEEDED)


def output_bound(request: GenerationRequest, prompt_tokens: int, max_model_len: int) -> int | None:
    """How many tokens the client lets an output have, None: whatever fits. Raises ApiError if that cannot be.

    A prompt is never cut and a client's max_tokens never lowered; only our own default is, to what fits.
    """
    if prompt_tokens == 0:
        raise invalid(request.prompt_field, "is empty once it is tokenised")
    room = max_model_len - prompt_tokens
    bound = request.output_limit
    if room <= 0:
        reason = f"{prompt_tokens} tokens leave no room for an answer; the model's context is {max_model_len} tokens"
        raise invalid(request.prompt_field, reason, Fault.CONTEXT_LENGTH_EXCEEDED)
    if bound is not None and bound > room:
        reason = (
            f"{prompt_tokens} tokens of prompt and up to {bound} of output are {prompt_tokens + bound}; "
            f"the model's context is {max_model_len} tokens"
        )
        raise invalid(request.output_limit_field, reason, Fault.CONTEXT_LENGTH_EXCEEDED)
    if bound is None and request.default_max_tokens is not None:
        bound = min(request.default_max_tokens, room)
    most = room if bound is None else bound
    if request.min_tokens > most:
        raise invalid("min_tokens", f"{request.min_tokens} is more than the output may have, {most}")
    return bound
