"""A precision as integers: every value is a small integer times a unit of its group, which other formats can
hold.

With s the scale of a group (`sefp.codec`), values at m mantissa bits are n times unit:

  midpoint, m = 3   n = code                      unit = s / 8           n = -8 ... 7
  midpoint, m > 3   n = 2 code + 1 - 2^(m-3)      unit = s / 2^(m+1)     every second integer,
                                                                         a few more of them below zero
  truncate          n = code, + 1 below zero      unit = s / 2^m         n = 1 - 2^m ... 2^m - 1

A scale has four significant bits, so a unit has as many. It may be negative, which no format here minds:
mirroring the integers instead would need an 8 where int4 ends at 7.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from otaro.sefp.codec import Reconstruction, decode_codes, scale_values
from otaro.sefp.precision import COARSEST


@dataclass(frozen=True)
class Grid:
    """The integers of a precision."""

    mantissa_bits: int
    reconstruction: Reconstruction

    @property
    def stride(self) -> int:
        """From one integer to the next."""
        return 2 if self.reconstruction == "midpoint" and self.mantissa_bits > COARSEST else 1

    @property
    def least(self) -> int:
        """The smallest integer."""
        return int(self.integers(torch.tensor([-(1 << self.mantissa_bits)])))

    @property
    def most(self) -> int:
        """The largest."""
        return int(self.integers(torch.tensor([(1 << self.mantissa_bits) - 1])))

    @property
    def levels(self) -> int:
        """How many there are."""
        return (self.most - self.least) // self.stride + 1

    def integers(self, codes: torch.Tensor) -> torch.Tensor:
        """Of codes at this precision."""
        if self.reconstruction == "truncate":
            return codes + (codes < 0)
        return codes if self.stride == 1 else 2 * codes + (1 - (1 << (self.mantissa_bits - COARSEST)))

    def units(self, scales: torch.Tensor) -> torch.Tensor:
        """Of the scales of groups."""
        return scales * 2.0 ** -(self.mantissa_bits + self.stride - 1)

    def fits(self, dtype: torch.dtype, scale_bytes: torch.Tensor) -> bool:
        """Whether a type has the digits for every code at these scales; how small it goes is not asked."""
        scales = scale_values(scale_bytes.unique().view(-1, 1), 0)
        codes = torch.arange(-(1 << self.mantissa_bits), 1 << self.mantissa_bits).expand(len(scales), -1)
        values = decode_codes(codes, scales, self.mantissa_bits, codes.shape[-1], self.reconstruction)
        return torch.equal(values.to(dtype).float(), values)
