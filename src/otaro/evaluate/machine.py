"""What a benchmark has to know of the machine: its processor, its memory's speed, and how much of it this process holds."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import torch


def plain_read(size: int) -> Callable[[], object]:
    """A function that reads so many bytes of memory, on torch's threads, and does next to nothing with them.

    It is a float32 product with a vector: the library reads several rows side by side, which on a server's CPU is a third
    faster than a sum over one stretch of memory.
    """
    matrix = torch.ones(4096, size // 4096 // 4)
    vector = torch.ones(matrix.shape[1])
    return lambda: matrix @ vector


def resident_bytes() -> int | None:
    """Memory of this process that is in RAM; None on systems without /proc.

    What is free but still held, by Python or by the allocator, is given back first: it depends on what ran before.
    """
    gc.collect()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):  # glibc has it, musl does not
        trim(0)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def cpu_name() -> str:
    """The processor, in its maker's words where the system tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
