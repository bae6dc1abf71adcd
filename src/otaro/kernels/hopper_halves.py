"""What `cuda_src/hopper_halves.cu` serves, and how: products of many tokens at compute capability 9.0."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

import torch

from otaro.kernels import hopper
from otaro.kernels.packed import Packed
from otaro.sefp.precision import COARSEST

UNIT, STAGE = 64, 256
"""Weights of a unit, and of a stage of the ring."""
COLUMNS = (32, 64, 128)
"""Tokens that a block may have."""
GROUPS = (4, 3, 2)
"""Of warps."""
_SLICES = (1, 2, 3, 4, 5, 6, 8)
_TILE, _WARP, _GROUP_WARPS, _BARRIERS = 64, 32, 4, 1024
_LEAST_STAGES, _MOST_STAGES = 2, 6


class Shape(NamedTuple):
    """How the work is cut: constants of hopper_halves.cu."""

    columns: int
    groups: int
    stages: int
    slices: int = 1

    @property
    def threads(self) -> int:
        """Of a block."""
        return _WARP * _GROUP_WARPS * (self.groups + 1)

    @property
    def rows(self) -> int:
        """Of a block."""
        return _TILE * self.groups

    def shared(self, bits: int) -> int:
        """Bytes of shared memory: barriers, the ring of weights and activations."""
        return _BARRIERS + self.stages * self._stage(bits)

    def filling(self, most: int, bits: int) -> Shape:
        """With as many stages as fit, up to where more give nothing."""
        return self._replace(stages=min(_MOST_STAGES, (most - _BARRIERS) // self._stage(bits)))

    def _stage(self, bits: int) -> int:
        weights = self.rows * (132 + 32 * (bits - COARSEST))
        # one more for tokens that are not arranged
        return -(-weights // 128) * 128 + STAGE // 8 * 16 * (self.columns + 1)


def serves(matrices: Sequence[Packed]) -> bool:
    """Whether it does: rows of whole stages with a scale for each unit, on a GPU with the instructions."""
    of_such_rows = all(
        one.group_size == UNIT
        and one.length % STAGE == 0
        and one.scales.data_ptr() % 4 == 0
        and all(plane.data_ptr() % 16 == 0 for plane in one.planes)
        for one in matrices
    )
    return of_such_rows and hopper.has_instructions(matrices[0].base.get_device())


def fits(shape: Shape) -> bool:
    """Into shared memory, and into registers."""
    return shape.stages >= _LEAST_STAGES and (shape.columns <= 64 or shape.groups == 2)


@cache
def shape(most: int, processors: int, tokens: int, rows: tuple[int, ...], stages: int, bits: int) -> Shape:
    """For so many bytes of shared memory and multiprocessors: that which takes least, as measured on an H200.

    A stage takes about as long as its block has rows. Slices that meet cost as much as four to ten stages of
    64 rows.
    """
    columns, found = columns_of(tokens), []
    for groups, slices in product(GROUPS, _SLICES):
        one = Shape(columns, groups, 0, slices).filling(most, bits)
        tiles = sum(-(-count // one.rows) for count in rows) * -(-tokens // columns)
        if not fits(one) or (slices > 1 and (slices > stages or tiles * slices > processors)):
            continue
        rounds = -(-tiles * slices // processors)
        work = rounds * -(-stages // slices) * (groups + 0.25) * (1.15 if one.stages == _LEAST_STAGES else 1)
        found.append((work + (4 + groups * slices / 4 if slices > 1 else 0), one))
    return min(found)[1]


def columns_of(tokens: int) -> int:
    """How many of these are multiplied in a pass."""
    return next((one for one in COLUMNS if tokens <= one), COLUMNS[-1])


def arranged(x: torch.Tensor, columns: int) -> torch.Tensor:
    """Activations [tokens, length] in the order in which the kernel takes stages, in passes of so many."""
    x = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % columns))
    return x.reshape(-1, columns, x.shape[1] // UNIT, 4, 8, 2).permute(0, 2, 4, 1, 3, 5).reshape(x.shape)
