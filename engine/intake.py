"""What is refused at intake, because it could never run; with the numbers, so that the caller can do something."""

from __future__ import annotations

from dataclasses import dataclass

from engine.api import GenerateRequest, RequestRefusedError

MAX_CHOICES = 64
"""Far above what the interface offers; a bound on what one request can ask of the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What was found out about the model: bounds for requests, the tokens that end a sequence, and sizes."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    weight_bytes: int
    kv_bytes_per_token: int


def refuse_impossible(request: GenerateRequest, facts: ModelFacts, *, kv_tokens: int) -> None:
    """Raise RequestRefusedError if `request` can never run here. `kv_tokens`: what the whole KV memory holds.

    A request that might outgrow the KV memory is let in: it may well end before; if it does not, it ends when the
    memory is full of it, with finish reason LENGTH.
    """
    prompt, sampling = request.prompt_token_ids, request.sampling
    if not prompt:
        raise RequestRefusedError("the prompt is empty; it must have at least one token")
    _refuse_lengths(request, facts.max_model_len, kv_tokens)
    indices = [choice.index for choice in request.choices]
    if not 1 <= len(set(indices)) == len(indices) <= MAX_CHOICES:
        raise RequestRefusedError(f"choices have 1 to {MAX_CHOICES} different indices; these are {indices[:8]}")
    resumed = [token_id for choice in request.choices for token_id in choice.resumed_token_ids]
    biased = [each.token_id for each in sampling.logit_bias]
    known = (*prompt, *resumed, *biased, *sampling.stop_token_ids)
    if min(known) < 0 or max(known) >= facts.vocab_size:
        raise RequestRefusedError(f"token ids must lie in 0..{facts.vocab_size - 1}")


def _refuse_lengths(request: GenerateRequest, max_model_len: int, kv_tokens: int) -> None:
    prompt, max_tokens = request.prompt_token_ids, request.sampling.max_tokens
    total = len(prompt) + max_tokens
    if total > max_model_len:
        raise RequestRefusedError(
            f"{len(prompt)} prompt tokens and max_tokens {max_tokens} make {total}, "
            f"over the model's {max_model_len}; shorten the prompt or lower max_tokens"
        )
    num_resumed = max((len(choice.resumed_token_ids) for choice in request.choices), default=0)
    if num_resumed and num_resumed >= max_tokens:
        raise RequestRefusedError(f"{num_resumed} resumed tokens leave nothing of max_tokens {max_tokens}")
    if len(prompt) + num_resumed > kv_tokens:
        raise RequestRefusedError(
            f"{len(prompt) + num_resumed} tokens can never fit: the whole KV cache holds {kv_tokens}"
        )
