"""The paged cache of one layer: what is written is what is read, exactly or within half a scale."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.cache import Int8Pages, Pages, PlainPages

SIZE = (4, 2, 3, 8)  # blocks, block size, KV heads, head dimension


def plain() -> Pages:
    return PlainPages(torch.zeros(SIZE))


def int8() -> Pages:
    return Int8Pages(torch.zeros(SIZE, dtype=torch.int8), torch.zeros(SIZE[:-1]), torch.float32)


@pytest.mark.parametrize("make", [plain, int8])
def test_tokens_are_read_in_the_order_of_the_blocks(make: type[Pages]) -> None:
    pages = make()
    rows = torch.arange(1.0, 4.0)[:, None, None].expand(3, 3, 8).contiguous()
    pages.write(torch.tensor([5, 6, 0]), rows)  # block 2 offset 1, block 3 offset 0, block 0 offset 0
    read = pages.read(torch.tensor([3, 2, 0]))[:, 0, 0]
    assert read.tolist() == pytest.approx([2, 0, 0, 1, 3, 0])


@pytest.mark.parametrize("make", [plain, int8])
def test_all_sources_are_read_before_a_target_is_written(make: type[Pages]) -> None:
    pages = make()
    pages.write(torch.arange(8), torch.arange(8.0)[:, None, None].expand(8, 3, 8).contiguous())
    pages.copy(torch.tensor([0, 1]), torch.tensor([1, 2]))  # block 1 is the target of one and the source of another
    assert pages.read(torch.arange(4))[:, 1, 3].tolist() == pytest.approx([0, 1, 0, 1, 2, 3, 6, 7])


@given(st.integers(0, 1000), st.floats(1e-6, 1e6))
def test_eight_bits_are_off_by_half_a_scale_at_most(seed: int, magnitude: float) -> None:
    rows = torch.randn(3, 3, 8, generator=torch.Generator().manual_seed(seed)) * magnitude
    rows[1, 2] = 0.0
    pages = int8()
    pages.write(torch.arange(3), rows)
    read = pages.read(torch.tensor([0, 1]))[:3]
    scales = rows.abs().amax(dim=-1, keepdim=True) / 127
    assert ((read - rows).abs() <= scales * 0.5001).all()
    assert read[1, 2].tolist() == [0.0] * 8
