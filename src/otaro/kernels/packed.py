"""Packed rows: what every function of a backend computes with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from otaro.file.planes import unpack_exponent_words
from otaro.sefp.codec import Reconstruction
from otaro.sefp.precision import COARSEST


class Packed(NamedTuple):
    """Some rows of a packed weight, in the order in which the operations take them: `ops.linear(x, *packed)`.

    Its precision is the one that base and planes make up: no plane is E5M3, five are E5M8.
    """

    base: torch.Tensor
    """uint8 [rows, 16 n], n being the blocks of a row."""
    exponents: torch.Tensor
    """int8 [rows, groups]; or, as a GPU keeps them, the file's stream of five bits each, int32 (`planes.exponent_words`)."""
    planes: Sequence[torch.Tensor]
    """uint8 [rows, 4 n] each, plane 4 first."""
    length: int
    group_size: int
    truncate: bool

    @property
    def bits(self) -> int:
        """Mantissa bits."""
        return COARSEST + len(self.planes)

    @property
    def reconstruction(self) -> Reconstruction:
        """What codes mean."""
        return "truncate" if self.truncate else "midpoint"

    @property
    def streamed(self) -> bool:
        """Whether exponents are the file's stream."""
        return self.exponents.dtype == torch.int32

    def unstreamed(self) -> Packed:
        """The same with exponents in int8."""
        if not self.streamed:
            return self
        return self._replace(
            exponents=unpack_exponent_words(self.exponents, (len(self.base), -(-self.length // self.group_size)))
        )

    def rows(self, some: slice | torch.Tensor) -> Packed:
        """Some of its rows."""
        exponents = self.unstreamed().exponents[some]
        return self._replace(base=self.base[some], exponents=exponents, planes=[p[some] for p in self.planes])
