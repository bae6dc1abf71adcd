"""Precisions by name: `Precision("E5M4")` is 5 exponent bits for a group and 4 mantissa bits a weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from otaro.errors import PrecisionError

Reconstruction = Literal["midpoint", "truncate"]
RECONSTRUCTIONS: tuple[Reconstruction, ...] = get_args(Reconstruction)

EXPONENT_BITS = 5  # of the names; the paper shares a power of two of so many bits, here a scale is a byte
SCALE_BITS = 8  # of a group
FINEST, COARSEST = 8, 3  # mantissa bits
GROUP_SIZE = 64


@dataclass(frozen=True, order=True, slots=True, init=False, repr=False)
class Precision:
    """One of E5M8, E5M7, E5M6, E5M5, E5M4, E5M3, in capitals or not; more mantissa bits compare as greater.

    >>> Precision("E5M4") < Precision("E5M8")
    True
    >>> Precision("E5M4").mantissa_bits
    4
    """

    mantissa_bits: int

    def __init__(self, name: str | Precision) -> None:
        if isinstance(name, Precision):
            name = str(name)
        if not isinstance(name, str) or name.upper() not in _BITS_BY_NAME:
            raise PrecisionError(f"unknown precision {name!r}; the precisions are {', '.join(_BITS_BY_NAME)}")
        object.__setattr__(self, "mantissa_bits", _BITS_BY_NAME[name.upper()])

    def bits_per_weight(self, group_size: int = GROUP_SIZE) -> float:
        """Sign, mantissa, and this weight's share of its group's scale."""
        return 1 + self.mantissa_bits + SCALE_BITS / group_size

    def __str__(self) -> str:
        return f"E{EXPONENT_BITS}M{self.mantissa_bits}"

    def __repr__(self) -> str:
        return f"Precision('{self}')"


_BITS_BY_NAME = {f"E{EXPONENT_BITS}M{m}": m for m in range(FINEST, COARSEST - 1, -1)}

PRECISIONS: tuple[Precision, ...] = tuple(Precision(name) for name in _BITS_BY_NAME)


def of_mantissa_bits(mantissa_bits: int) -> Precision:
    """The precision with this many mantissa bits."""
    return Precision(f"E{EXPONENT_BITS}M{mantissa_bits}")
