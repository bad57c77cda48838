"""The books of one step: where the token budget went, and what the places of the KV cache hold. Both balance."""

from __future__ import annotations

from collections.abc import Iterable

from engine.api import PlaceAccount, TokenAccount
from engine.block_pool import BlockPool
from engine.plan import StepPlan
from engine.sequence import Sequence


def token_account(plan: StepPlan, budget: int, num_padding: int) -> TokenAccount:
    """Where the budget of a step went."""
    return TokenAccount(
        budget=budget,
        decode=plan.num_decode_tokens,
        new_prefill=plan.num_tokens - plan.num_decode_tokens - plan.num_recomputed_tokens,
        recomputed=plan.num_recomputed_tokens,
        speculative_rejected=0,
        graph_padding=num_padding,
        unused=budget - plan.num_tokens - num_padding,
    )


def place_account(pool: BlockPool, running: Iterable[Sequence]) -> PlaceAccount:
    """What the pool holds between two steps. Takes time in the number of running sequences, not of blocks.

    Only a sequence's own last blocks can hold anything but computed tokens, since shared blocks are full.
    """
    size = pool.block_size
    reserved = tail_waste = 0
    for sequence in running:
        num_places = len(sequence.block_ids) * size
        known = min(sequence.num_known, num_places)
        in_last_block = -known % size
        tail_waste += in_last_block
        reserved += num_places - in_last_block - sequence.num_computed
    return PlaceAccount(
        total=pool.num_blocks * size,
        live=pool.num_used * size - reserved - tail_waste,
        reserved=reserved,
        tail_waste=tail_waste,
        cached_idle=pool.num_idle * size,
        free=(pool.num_available - pool.num_idle) * size,
    )
