"""Other grids to round weights to: what llama.cpp and torchao store at about as many bits, and other nested grids.

Each function takes weights [..., in] and returns the values that its format would hold, in float32. Bits per weight count
what a file needs, scales included.

  int4, int8   torchao's symmetric groups of 64 along the input: scale = largest magnitude / 7.5 (127.5), codes -8..7
               (-128..127), the scale kept in float16
  Q4_0 Q5_0    llama.cpp's, blocks of 32: the value of largest magnitude, with its sign, becomes code -8 (-16)
  Q8_0         blocks of 32, scale = largest magnitude / 127

`zero at E5M4` and `zero nowhere` are nested like `midpoint` and differ in where the grid lies: `midpoint` moves it by half a
step of E5M3, so that E5M3 holds zero. Moved by half a step of E5M4 it is E5M4 that does, unmoved none does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from otaro.sefp.codec import MIN_EXPONENT, power_of_two
from otaro.sefp.precision import Precision
from otaro.tune.fake_quant import Precisely

Round = Callable[[torch.Tensor], torch.Tensor]


def in_groups(weight: torch.Tensor, size: int) -> torch.Tensor:
    """[..., groups, size] in float32, the last group filled up with zeros."""
    values = weight.detach().float()
    short = -values.shape[-1] % size
    return nn.functional.pad(values, (0, short)).view(*values.shape[:-1], -1, size)


def joined(groups: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The way back."""
    return groups.flatten(-2)[..., : like.shape[-1]]


def integers(weight: torch.Tensor, bits: int, group_size: int = 64) -> torch.Tensor:
    """Round to nearest in symmetric groups."""
    values, most = in_groups(weight, group_size), 2 ** (bits - 1)
    scale = (values.abs().amax(-1, keepdim=True) / (most - 0.5)).clamp(min=2**-24).half().float()
    return joined((values / scale).round().clamp(-most, most - 1) * scale, weight)


def signed_blocks(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Q4_0 and Q5_0."""
    values, half = in_groups(weight, 32), 2 ** (bits - 1)
    largest = values.gather(-1, values.abs().argmax(-1, keepdim=True))
    scale = largest / -half
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
    codes = (values * inverse + (half + 0.5)).trunc().clamp(0, 2 * half - 1) - half
    return joined(codes * scale.half().float(), weight)


def q8_0(weight: torch.Tensor) -> torch.Tensor:
    """Q8_0; ties are rounded away from zero."""
    values = in_groups(weight, 32)
    scale = values.abs().amax(-1, keepdim=True) / 127
    scaled = values * torch.where(scale == 0, 0.0, 1.0 / scale)
    codes = (scaled.abs() + 0.5).floor() * scaled.sign()
    return joined(codes * scale.half().float(), weight)


OTHERS: dict[str, tuple[float, Round]] = {  # bits per weight, rounding
    "int4": (4 + 16 / 64, lambda weight: integers(weight, 4)),
    "int8": (8 + 16 / 64, lambda weight: integers(weight, 8)),
    "Q4_0": (4 + 16 / 32, lambda weight: signed_blocks(weight, 4)),
    "Q5_0": (5 + 16 / 32, lambda weight: signed_blocks(weight, 5)),
    "Q8_0": (8 + 16 / 32, q8_0),
}


def shifted_grid(weight: torch.Tensor, mantissa_bits: int, zero_bits: int | None, group_size: int = 64) -> torch.Tensor:
    """Middles of nested intervals, moved so that the grid of `zero_bits` holds zero; None moves nothing."""
    values = in_groups(weight, group_size)
    exponents = ((values.abs().amax(-1, keepdim=True).view(torch.int32) >> 23) - 126).clamp(min=MIN_EXPONENT)
    moved = 0.0 if zero_bits is None else 2.0 ** (8 - zero_bits - 1)  # in steps of E5M8
    codes = (values * power_of_two(8 - exponents) + moved).floor().clamp(-256, 255)
    shift = 2.0 ** (8 - mantissa_bits)
    return joined((((codes / shift).floor() + 0.5) * shift - moved) * power_of_two(exponents - 8), weight)


class Rounding(Precisely):
    """Modules prepared with it read their weights through another rounding; None still means as they are."""

    def __init__(self, rounding: Callable[[torch.Tensor, Precision], torch.Tensor]) -> None:
        super().__init__()
        self.rounding = rounding

    def values(self, weight: torch.Tensor, precision: Precision | None, dtype: torch.dtype) -> torch.Tensor:
        """What the weight is rounded to."""
        return (weight.detach() if precision is None else self.rounding(weight, precision)).to(dtype)

    def values_of_all(
        self, weights: Sequence[torch.Tensor], precision: Precision, dtype: torch.dtype | None
    ) -> list[torch.Tensor]:
        """One by one."""
        return [self.values(weight, precision, dtype or weight.dtype) for weight in weights]


def precisely_for(quantizer: str, group_size: int, reconstruction: str) -> Precisely:
    """What modules of a row are prepared with."""
    if quantizer == "sefp":
        return Precisely(group_size, "truncate" if reconstruction == "truncate" else "midpoint")
    if quantizer == "truncate":
        return Precisely(group_size, "truncate")
    if quantizer in OTHERS:
        rounding = OTHERS[quantizer][1]
        return Rounding(lambda weight, precision: rounding(weight))
    zero_bits = {"zero at E5M4": 4, "zero nowhere": None}[quantizer]
    return Rounding(lambda weight, precision: shifted_grid(weight, precision.mantissa_bits, zero_bits, group_size))
