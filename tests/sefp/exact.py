"""Between tensors and the oracle's fractions, without rounding."""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import torch

from . import oracle

UNIT = 24  # every decoded value is a whole multiple of 2^-24 = step(8)/2 in the smallest grid
_INTEGERS = {2: torch.int16, 4: torch.int32}


def fractions(tensor: torch.Tensor) -> list[Fraction]:
    """The numbers of a finite float tensor, flat, from their bits."""
    kind = str(tensor.dtype).removeprefix("torch.")
    patterns = tensor.flatten().view(_INTEGERS[tensor.element_size()]).tolist()
    numbers = [oracle.fraction_of_bits(pattern, kind) for pattern in patterns]
    assert all(number is not None for number in numbers)
    return numbers


def units(values: torch.Tensor) -> torch.Tensor:
    """Values in units of 2^-24. Scaling by a power of two in float64 is exact for everything a float32 holds."""
    return values.double() * 2.0**UNIT


@cache
def value_in_units(code: int, e: int, m: int, reconstruction: str) -> int:
    """The oracle's value in the same units."""
    value = oracle.value(code, e, m, reconstruction) * 2**UNIT
    assert value.denominator == 1
    return value.numerator


def of_pattern(pattern: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A scalar tensor from bits."""
    size = dtype.itemsize * 8
    signed = pattern - 2**size if pattern >= 2 ** (size - 1) else pattern
    return torch.tensor(signed, dtype=_INTEGERS[dtype.itemsize]).view(dtype)
