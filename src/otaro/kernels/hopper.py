"""What `cuda_src/hopper.cu` serves, and how: several tokens on GPUs of compute capability 9.0."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from otaro.file.planes import blocks
from otaro.kernels import nvrtc
from otaro.kernels.packed import Packed
from otaro.kernels.reference import LANES
from otaro.sefp.precision import COARSEST

CLUSTER, THREADS, ROWS = 2, 640, 64
"""Blocks of a cluster, threads of a block, rows of a tile: constants of hopper.cu."""
TOKENS = (8, 16)
"""That a cluster may have: TOKENS of hopper.cu."""
COMPILERS = ("NVRTC 13.0",)
"""Whose machine code serves; elsewhere `batch.cu` and `halves.cu` do. Others might use registers that matrix
units still read: one joins when runs/wgmma_registers.py has found nothing in it, and runs/gpu_check.sh no
wrong bit on a GPU. What the sanitizers said of this one, and what they have not seen yet:
benchmarks/results/h200-gpu-check.txt.
"""
_UNIT, _GROUPS, _BARRIERS = 64, 4, 256
STAGES = range(2, 7)
"""Of the ring."""


def columns(matrices: Sequence[Packed], tokens: int) -> int | None:
    """Of clusters that take so many tokens; None where another kernel serves.

    Rows must be whole steps of sixteen units with a scale each, and fit into shared memory with their tokens.
    """
    like, device = matrices[0], matrices[0].base.get_device()
    if (
        like.group_size != _UNIT
        or blocks(like.length) % (2 * LANES)
        or any(plane.data_ptr() % 16 for one in matrices for plane in one.planes)
        or any(one.scales.data_ptr() % 4 for one in matrices)
        or not has_instructions(device)
    ):
        return None
    return _columns(device, tokens, blocks(like.length) // 2, like.bits)


@cache
def has_instructions(device: int) -> bool:
    """Whether this GPU has them, and a compiler that is known to handle them."""
    return (
        device >= 0 and torch.cuda.get_device_capability(device) == (9, 0) and nvrtc.compiler() in COMPILERS
    )


@cache
def _columns(device: int, tokens: int, units: int, bits: int) -> int | None:
    least = next(one for one in TOKENS if tokens <= one)
    return least if _stages(device, least, units, bits) >= STAGES.start else None


def _fixed(tokens: int, units: int) -> int:
    """Bytes of shared memory besides the ring: barriers, digits and terms of a block's lanes, sums."""
    return _BARRIERS + units // CLUSTER * tokens * (2 * _UNIT + 8) + 4 * _GROUPS * ROWS * tokens


def _stage(bits: int) -> int:
    """Bytes of a stage of the ring: base, scales and planes of eight units of each row."""
    return 2 * ROWS * (132 + 32 * (bits - COARSEST))


def _stages(device: int, tokens: int, units: int, bits: int) -> int:
    """As many as fit, up to where more give nothing."""
    return min(STAGES.stop - 1, (nvrtc.most_shared(device) - _fixed(tokens, units)) // _stage(bits))


@cache
def kernel(device: int, bits: int, truncate: bool, tokens: int, units: int) -> tuple[nvrtc.Kernel, int, int]:
    """The kernel, its bytes of shared memory, and how many of its clusters the GPU runs at a time."""
    stages = _stages(device, tokens, units, bits)
    compiled = nvrtc.kernel(
        "hopper.cu", "wide", device, BITS=bits, TRUNCATE=truncate, TOKENS=tokens, STAGES=stages
    )
    shared = _fixed(tokens, units) + stages * _stage(bits)
    return compiled, shared, compiled.clusters(CLUSTER, THREADS, shared)
