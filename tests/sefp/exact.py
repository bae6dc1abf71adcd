"""Between tensors and the oracle's fractions, without rounding."""

from __future__ import annotations

from fractions import Fraction

import torch

from . import oracle

_INTEGERS = {2: torch.int16, 4: torch.int32}


def fractions(tensor: torch.Tensor) -> list[Fraction]:
    """The numbers of a finite float tensor, flat, from their bits."""
    kind = str(tensor.dtype).removeprefix("torch.")
    patterns = tensor.flatten().view(_INTEGERS[tensor.element_size()]).tolist()
    numbers = [oracle.fraction_of_bits(pattern, kind) for pattern in patterns]
    assert all(number is not None for number in numbers)
    return numbers


def of_pattern(pattern: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A scalar tensor from bits."""
    size = dtype.itemsize * 8
    signed = pattern - 2**size if pattern >= 2 ** (size - 1) else pattern
    return torch.tensor(signed, dtype=_INTEGERS[dtype.itemsize]).view(dtype)
