"""What the machine offers: memory that is free, and the precision it computes in."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from engine.config import Dtype


def free_memory(device: torch.device) -> int:
    """Bytes that may still be taken on `device`; on a CPU the smaller of the host's and the control group's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # counts what the page cache would give back
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        host = int(fields["MemAvailable"].split()[0]) * 1024
    return min([host, *_control_group_free()])


def _control_group_free() -> list[int]:
    root = Path("/sys/fs/cgroup")
    limit, current = root / "memory.max", root / "memory.current"
    if not limit.exists() or not current.exists() or limit.read_text().strip() == "max":
        return []
    return [int(limit.read_text()) - int(current.read_text())]


def resolve_dtype(dtype: Dtype, device: torch.device) -> torch.dtype:
    """The precision to use on `device`; see `Dtype.AUTO`."""
    if dtype is not Dtype.AUTO:
        resolved: torch.dtype = getattr(torch, dtype)
        return resolved
    return torch.bfloat16 if device.type != "cpu" or _cpu_has_bfloat16() else torch.float32


def _cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 itself: AVX-512 BF16 or AMX on x86, the bf16 extension on ARM."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.machine() == "arm64"
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(cpuinfo.read_text().split())
