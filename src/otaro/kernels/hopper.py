"""What `cuda_src/hopper.cu` serves, and how: several tokens on GPUs of compute capability 9.0."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from otaro.file.planes import blocks
from otaro.kernels import nvrtc
from otaro.kernels.packed import Packed
from otaro.kernels.reference import LANES
from otaro.sefp.precision import COARSEST

CLUSTER, ROWS = 2, 64
"""Blocks of a cluster, rows of a tile: constants of hopper.cu."""
TOKENS = (8, 16)
"""That a cluster may have: TOKENS of hopper.cu."""
COMPILERS = ("NVRTC 13.0",)
"""Whose machine code serves; elsewhere `batch.cu` and `halves.cu` do. Others might use registers that matrix
units still read: one joins when runs/wgmma_registers.py has found nothing in it, and runs/gpu_check.sh no
wrong bit on a GPU. What the sanitizers said of this one, and what they have not seen yet:
benchmarks/results/h200-gpu-check.txt.
"""
_UNIT, _GROUPS, _BARRIERS = 64, 4, 256
_THREADS, _CARRIERS = 640, 128
STAGES = range(2, 7)
"""Of the ring."""


def columns(matrices: Sequence[Packed], tokens: int) -> int | None:
    """Of clusters that take so many tokens; None where another kernel serves.

    Rows must be whole steps of sixteen units with a scale each. Shared memory must hold their tokens'
    activations, or those of two stages.
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


class Shape(NamedTuple):
    """How the work is cut: constants of hopper.cu, and the units of a row."""

    tokens: int
    stages: int
    streamed: bool
    units: int
    bits: int

    @property
    def threads(self) -> int:
        """Of a block."""
        return _THREADS + _CARRIERS * self.streamed

    @property
    def shared(self) -> int:
        """Bytes of shared memory: barriers, sums, digits and terms of a block's lanes, the ring."""
        kept = self.units // CLUSTER * self.tokens * (8 if self.streamed else 2 * _UNIT + 8)
        return _BARRIERS + 4 * _GROUPS * ROWS * self.tokens + kept + self.stages * self._stage

    @property
    def _stage(self) -> int:
        """Bytes of a stage: base, scales and planes of eight units of each row, digits of each token."""
        weights = 2 * ROWS * (132 + 32 * (self.bits - COARSEST))
        return weights + 2 * _GROUPS * 2 * _UNIT * self.tokens * self.streamed

    def filling(self, most: int) -> Shape:
        """With as many stages as fit, up to where more give nothing."""
        fitting = (most - self._replace(stages=0).shared) // self._stage
        return self._replace(stages=min(STAGES.stop - 1, fitting))


@cache
def _columns(device: int, tokens: int, units: int, bits: int) -> int | None:
    found = _shape(device, next(one for one in TOKENS if tokens <= one), units, bits)
    return found and found.tokens


def _shape(device: int, tokens: int, units: int, bits: int) -> Shape | None:
    """Digits are streamed where shared memory does not hold them beside a ring; None where nothing fits."""
    ways = (Shape(tokens, 0, streamed, units, bits) for streamed in (False, True))
    filled = (one.filling(nvrtc.most_shared(device)) for one in ways)
    return next((one for one in filled if one.stages >= STAGES.start), None)


@cache
def kernel(
    device: int, bits: int, truncate: bool, tokens: int, units: int
) -> tuple[nvrtc.Kernel, Shape, int]:
    """The kernel, its shape, and how many of its clusters the GPU runs at a time."""
    shape = _shape(device, tokens, units, bits)
    assert shape  # as `columns` found
    compiled = nvrtc.kernel(
        "hopper.cu", "wide", device, BITS=bits, TRUNCATE=truncate, TOKENS=tokens, STAGES=shape.stages,
        STREAMED=shape.streamed,
    )  # fmt: skip
    return compiled, shape, compiled.clusters(CLUSTER, shape.threads, shape.shared)
