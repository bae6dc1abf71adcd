"""What `cuda_src/halves.cu` serves, and how: products of many tokens, weights made float16 in registers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

import torch

from otaro.kernels.packed import Packed
from otaro.sefp.precision import COARSEST

MOST_TOKENS = 128
"""Beyond, decoded weights and the library are faster (E5M4, measured on an H200)."""
DTYPES = (torch.float16, torch.bfloat16)
"""Of activations that it serves."""
UNIT = 64
_WARP, _GROUP_ROWS = 32, 32
_COLUMNS = (32, 64)
_MOST_WARPS, _MOST_STAGES = 8, 6
_SLICES = (1, 2, 3, 4, 5, 6, 8)


class Shape(NamedTuple):
    """How the work is cut: constants of halves.cu."""

    columns: int
    groups: int
    parts: int
    units: int
    stages: int
    slices: int = 1

    @property
    def threads(self) -> int:
        """Of a block."""
        return _WARP * self.groups * self.parts

    @property
    def rows(self) -> int:
        """Of a block."""
        return _GROUP_ROWS * self.groups

    def shared(self, bits: int) -> int:
        """Bytes of shared memory: the ring of weights and activations, and sums of all parts but one."""
        return self.stages * self.stage(bits) + self._apart()

    def filling(self, most: int, bits: int) -> Shape:
        """With as many stages as fit, up to where more give nothing."""
        return self._replace(stages=min(_MOST_STAGES, (most - self._apart()) // self.stage(bits)))

    def stage(self, bits: int) -> int:
        """Bytes of a stage of the ring."""
        return self.units * (self.rows * (33 + 8 * (bits - COARSEST)) + 2 * UNIT * self.columns)

    def _apart(self) -> int:
        return (self.parts - 1) * 4 * self.rows * self.columns


def serves(matrices: Sequence[Packed], tokens: int, dtype: torch.dtype) -> bool:
    """Whether it does, and is faster than decoded weights."""
    return tokens <= MOST_TOKENS and dtype in DTYPES and all(one.group_size % UNIT == 0 for one in matrices)


def as_many(tokens: int) -> int:
    """How many tokens may share a launch that was made for so many."""
    return next((one for one in _COLUMNS if tokens <= one), -(-tokens // _COLUMNS[-1]) * _COLUMNS[-1])


@cache
def shape(most: int, processors: int, tokens: int, rows: tuple[int, ...], units: int, bits: int) -> Shape:
    """For so many bytes of shared memory and multiprocessors: what takes least, as measured on an H200."""
    columns = min(as_many(tokens), _COLUMNS[-1])
    found = []
    for groups, parts, each in product(range(1, _MOST_WARPS + 1), (1, 2, 4), (4, 2)):
        plain = Shape(columns, groups, parts, each, 2).filling(most, bits)
        if parts <= each and groups * parts <= _MOST_WARPS and plain.stages >= 2:
            tiles, stages = sum(-(-count // plain.rows) for count in rows), -(-units // each)
            for slices in _SLICES[: max(1, sum(one <= stages for one in _SLICES))]:
                rounds = -(-tiles * -(-tokens // columns) * slices // processors)
                work = rounds * -(-stages // slices) * _stage_work(plain, bits)
                meet = 8 + slices / 4 + 20 * (rounds - 1) if slices > 1 else 2 * rounds
                found.append((work + meet, plain._replace(slices=slices)))
    return min(found)[1]


def _stage_work(shape: Shape, bits: int) -> float:
    """In units of 32 rows that a quarter of a multiprocessor has one after the other, some 270 + 9 `columns`
    cycles each.
    """
    warps = -(-shape.groups * shape.parts // 4)
    work = warps * shape.units / shape.parts
    if warps == 1:  # nothing to do while it waits
        work *= 1.8
    # Parts that meet, loads that are short, loads that are late; or 22 bytes a cycle from the second-level
    # cache
    work *= (
        (1.08 if shape.parts == 4 else 1)
        * (1.25 if shape.units == 2 else 1)
        * (1.1 if shape.stages == 2 else 1)
    )
    return max(work, shape.stage(bits) / (22 * (270 + 9 * shape.columns)))
