from __future__ import annotations

import os

import torch

from engine.config import Dtype
from engine.hardware import free_memory, resolve_dtype


def test_free_memory_is_a_part_of_what_the_machine_has() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < free_memory(torch.device("cpu")) < total


def test_a_named_precision_is_kept_and_auto_chooses_one() -> None:
    cpu = torch.device("cpu")
    assert resolve_dtype(Dtype.FLOAT16, cpu) is torch.float16
    assert resolve_dtype(Dtype.AUTO, cpu) in (torch.bfloat16, torch.float32)
    assert resolve_dtype(Dtype.AUTO, torch.device("cuda")) is torch.bfloat16
