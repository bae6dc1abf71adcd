"""Packed rows: what every function of a backend computes with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from otaro.sefp.codec import Reconstruction
from otaro.sefp.precision import COARSEST


class Packed(NamedTuple):
    """Some rows of a packed weight, in the order in which the operations take them: `ops.linear(x, *packed)`.

    Its precision is the one that base and planes make up: no plane is E5M3, five are E5M8.
    """

    base: torch.Tensor
    """uint8 [rows, 16 n], n being the blocks of a row."""
    scales: torch.Tensor
    """uint8 [rows, groups]: scale bytes as the file has them (`codec.scale_values`)."""
    planes: Sequence[torch.Tensor]
    """uint8 [rows, 4 n] each, plane 4 first."""
    length: int
    group_size: int
    truncate: bool
    scale_exponent: int
    """Scales are multiplied with two to this power."""

    @property
    def bits(self) -> int:
        """Mantissa bits."""
        return COARSEST + len(self.planes)

    @property
    def reconstruction(self) -> Reconstruction:
        """What codes mean."""
        return "truncate" if self.truncate else "midpoint"

    def rows(self, some: slice | torch.Tensor) -> Packed:
        """Some of its rows."""
        return self._replace(
            base=self.base[some], scales=self.scales[some], planes=[p[some] for p in self.planes]
        )


class Stack(NamedTuple):
    """Matrices of one form, one for each expert, among the rows of a larger one."""

    whole: Packed
    first: int
    """Row at which the first expert's begin."""
    rows: int
    """Of one expert."""
    stride: int
    """Rows from one expert's to the next one's."""

    def of(self, expert: int) -> Packed:
        """Those of one expert."""
        start = self.first + expert * self.stride
        return self.whole.rows(slice(start, start + self.rows))
