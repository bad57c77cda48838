"""What a consumer finds that looked away for a while."""

from __future__ import annotations

from engine.api import FinishReason, Logprob, PositionLogprobs, TokenDelta
from engine.streams import Unseen


def position(token_id: int) -> PositionLogprobs:
    return PositionLogprobs(chosen=Logprob(token_id=token_id, logprob=-1.0))


def test_several_deltas_become_one_with_all_that_they_said() -> None:
    unseen = Unseen()
    first = TokenDelta(
        index=2, token_ids=(7,), logprobs=(position(7),), prompt_logprobs=(position(5),), num_cached_tokens=16
    )
    unseen.put(first)
    unseen.put(TokenDelta(index=2, token_ids=(8,), logprobs=(position(8),)))
    unseen.put(TokenDelta(index=2, token_ids=(9,), logprobs=(position(9),), finish_reason=FinishReason.LENGTH))
    assert unseen.take() == TokenDelta(
        index=2,
        token_ids=(7, 8, 9),
        finish_reason=FinishReason.LENGTH,
        logprobs=(position(7), position(8), position(9)),
        prompt_logprobs=(position(5),),
        num_cached_tokens=16,
    )
    assert unseen.num_tokens == 3
    assert unseen.ended.is_set()
