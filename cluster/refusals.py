"""Why not, in words: each refusal says which limit, its value, what was asked, what is left, and when to retry.

Retry-After is a whole number of seconds, rounded up, at least 1, and as true as can be known:

- a rate limit: exact. When it is over the same request is admitted, unless others of the tenant came in between;
- a full queue: when the place of whoever has waited longest is certain to be free. It may be free sooner;
- concurrent requests, and waiting in vain: nobody knows. `ledger.CONCURRENCY_RETRY_NS` and `NO_CAPACITY_RETRY_S`.
"""

from __future__ import annotations

from dataclasses import replace

from cluster.account import Shortfall
from cluster.api import PICO, AdmissionAsk, LimitKind, LimitStatus, Refusal, RefusalCode
from cluster.model_gate import FullQueue
from cluster.rate_window import NS_PER_S

NS_PER_MS = NS_PER_S // 1000
NO_CAPACITY_RETRY_S = 5
"""A replica takes seconds to minutes to load; asking every few seconds costs nothing and loses little."""

_CODES = {
    LimitKind.REQUESTS_PER_MINUTE: RefusalCode.REQUESTS_PER_MINUTE,
    LimitKind.TOKENS_PER_MINUTE: RefusalCode.TOKENS_PER_MINUTE,
    LimitKind.CONCURRENT_REQUESTS: RefusalCode.CONCURRENT_REQUESTS,
    LimitKind.TOKENS_PER_DAY: RefusalCode.TOKENS_PER_DAY,
    LimitKind.TOKENS_PER_MONTH: RefusalCode.TOKENS_PER_MONTH,
    LimitKind.BUDGET_PER_MONTH: RefusalCode.BUDGET,
}


def whole_seconds(wait_ns: int) -> int:
    """A wait as Retry-After has it: rounded up, at least 1."""
    return max(1, -(-wait_ns // NS_PER_S))


def of_shortfall(ask: AdmissionAsk, shortfall: Shortfall, output_tokens: int, status: LimitStatus) -> Refusal:
    """A quota that does not suffice: now, or ever. `output_tokens`: what the request was to reserve for its output."""
    code, kind = _CODES[shortfall.kind], shortfall.kind
    limit = f"{kind} of {shortfall.scope} is {_amount(kind, shortfall.limit)}"
    retry_after_s = None if shortfall.retry_after_ns is None else whole_seconds(shortfall.retry_after_ns)
    asked = _asked(ask, shortfall, output_tokens)
    if shortfall.limit == 0:
        message = f"{limit}: nothing is allowed"
    elif retry_after_s is None:
        code = RefusalCode.EXCEEDS_LIMIT
        message = f"{limit}, at most {_amount(kind, shortfall.capacity)} at once, and {asked}: it can never be admitted"
    else:
        message = f"{limit}: {asked}, {_amount(kind, shortfall.left)} are left"
    retry_after_ms = None if shortfall.retry_after_ns is None else max(1, -(-shortfall.retry_after_ns // NS_PER_MS))
    refusal = _refusal(ask, code, message, retry_after_s, status)
    return replace(refusal, scope=shortfall.scope, retry_after_ms=retry_after_ms)


def queue_full(ask: AdmissionAsk, full: FullQueue, status: LimitStatus) -> Refusal:
    """No more may wait."""
    whose = "" if full.tenant is None else f" of tenant {full.tenant!r}"
    message = f"the queue of model {ask.model!r} is full: {full.waiting} requests{whose} may wait, and do"
    return _refusal(ask, RefusalCode.QUEUE_FULL, message, whole_seconds(full.wait_ns), status)


def never_fits(ask: AdmissionAsk, largest: int, status: LimitStatus) -> Refusal:
    """No replica could ever hold the prompt."""
    message = (
        f"the prompt has {ask.indivisible_tokens} tokens and the KV memory of the largest replica of model "
        f"{ask.model!r} holds {largest}: it can never run there"
    )
    return _refusal(ask, RefusalCode.KV_CAPACITY_EXCEEDED, message, None, status)


def waited_in_vain(ask: AdmissionAsk, waited_s: float, replicas: int, status: LimitStatus) -> Refusal:
    """The queue time is over."""
    reason = f"its {replicas} replicas were busy" if replicas else "it has no live replica"
    message = f"the request waited {waited_s:g} s for model {ask.model!r}, which is the limit: {reason}"
    return _refusal(ask, RefusalCode.NO_CAPACITY, message, NO_CAPACITY_RETRY_S, status)


def _asked(ask: AdmissionAsk, shortfall: Shortfall, output_tokens: int) -> str:
    asked = _amount(shortfall.kind, shortfall.asked)
    if shortfall.kind in (LimitKind.REQUESTS_PER_MINUTE, LimitKind.CONCURRENT_REQUESTS):
        return f"the request needs {asked}"
    output = "expected output" if ask.max_output_tokens is None else "output"
    return f"the request needs {asked} ({ask.prompt_tokens} prompt + {output_tokens} {output})"


def _amount(kind: LimitKind, units: int) -> str:
    """Units as people write them: money in whole currency, to the millionth."""
    if kind is not LimitKind.BUDGET_PER_MONTH:
        return str(units)
    return f"{units / PICO:.6f}".rstrip("0").rstrip(".")


def _refusal(
    ask: AdmissionAsk, code: RefusalCode, message: str, retry_after_s: int | None, status: LimitStatus
) -> Refusal:
    retry = "" if retry_after_s is None else f"; retry in {retry_after_s} s"
    return Refusal(
        request_id=ask.request_id, code=code, message=message + retry, retry_after_s=retry_after_s, status=status
    )
