"""Other grids to round weights to: what llama.cpp and torchao store at as many bits, and nested ones.

Each function takes weights [..., in] and returns the values that its format would hold, in float32. Bits per
weight count what a file needs, scales included.

  int4, int8   torchao's symmetric groups of 64 along the input: scale = largest magnitude / 7.5 (127.5),
               kept in float16, codes -8..7 (-128..127)
  Q4_0 Q5_0    llama.cpp's, blocks of 32: the value of largest magnitude, with its sign, becomes code -8 (-16)
  Q8_0         blocks of 32, scale = largest magnitude / 127
  Q4_K         blocks of 32 with a scale and a minimum of six bits each, eight blocks to a pair of float16
               that these are multiples of. llama.cpp takes Q5_0 where rows are no multiple of 256, as in the
               study's models; here the last superblock of a row is shorter

The others are nested like `midpoint`, and differ in one thing from it. In the scale of a group:

  pow2              a power of two above all magnitudes, which clamps the largest weights; as in version 1
  E5M2              two fraction bits and a sign, and no power of two for the whole tensor

Or in where the grid lies: `midpoint` moves it by half a step of E5M3, so that E5M3 holds zero.

  zero at E5M4      by half a step of E5M4
  zero nowhere      not at all
  zero a sixth off  by a third of a step of E5M3: zero is a sixth of a step off a middle at every precision
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from otaro.sefp.codec import border_sides, power_of_two
from otaro.sefp.precision import FINEST, GROUP_SIZE, Precision
from otaro.tune.fake_quant import Precisely
from otaro.tune.plain import exponents_for, scales_for

Round = Callable[[Tensor], Tensor]
Exponent = Tensor | None
Scales = Literal["E4M3", "E5M2", "pow2"]
TOGETHER = 16  # weights of one shape


def in_groups(weight: Tensor, size: int) -> Tensor:
    """[..., groups, size] in float32, the last group filled up with zeros."""
    values = weight.detach().float()
    short = -values.shape[-1] % size
    return nn.functional.pad(values, (0, short)).view(*values.shape[:-1], -1, size)


def joined(groups: Tensor, like: Tensor) -> Tensor:
    return groups.flatten(-2)[..., : like.shape[-1]]


def integers(weight: Tensor, bits: int, group_size: int = 64) -> Tensor:
    """Round to nearest in symmetric groups."""
    values, most = in_groups(weight, group_size), 2 ** (bits - 1)
    scale = (values.abs().amax(-1, keepdim=True) / (most - 0.5)).clamp(min=2**-24).half().float()
    return joined((values / scale).round().clamp(-most, most - 1) * scale, weight)


def signed_blocks(weight: Tensor, bits: int) -> Tensor:
    values, half = in_groups(weight, 32), 2 ** (bits - 1)
    largest = values.gather(-1, values.abs().argmax(-1, keepdim=True))
    scale = largest / -half
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
    codes = (values * inverse + (half + 0.5)).trunc().clamp(0, 2 * half - 1) - half
    return joined(codes * scale.half().float(), weight)


def q8_0(weight: Tensor) -> Tensor:
    """Q8_0; ties are rounded away from zero."""
    values = in_groups(weight, 32)
    scale = values.abs().amax(-1, keepdim=True) / 127
    scaled = values * torch.where(scale == 0, 0.0, 1.0 / scale)
    codes = (scaled.abs() + 0.5).floor() * scaled.sign()
    return joined(codes * scale.half().float(), weight)


def q4_k(weight: Tensor) -> Tensor:
    """Q4_K: of 21 steps of each block that with the least squared error, larger weights counting more."""
    values = in_groups(in_groups(weight, 256).flatten(-2), 32)  # of the blocks eight to a superblock
    importance = values.square().mean(-1, keepdim=True).sqrt() + values.abs()
    low, high = values.amin(-1, keepdim=True).clamp(max=0), values.amax(-1, keepdim=True)
    span = (high - low).clamp(min=1e-30)
    best_scale, best_low, least = span / 15, low, torch.full_like(low, torch.inf)
    total, first = importance.sum(-1, keepdim=True), (importance * values).sum(-1, keepdim=True)
    for levels in (None, *(14 + 0.1 * i for i in range(21))):
        codes = ((values - low) * ((levels or 15) / span)).round().clamp(0, 15)
        weighted = importance * codes
        linear, square = weighted.sum(-1, keepdim=True), (weighted * codes).sum(-1, keepdim=True)
        scale, start = span / 15, low
        if levels is not None:  # the line through these codes; no minimum above zero
            product = (weighted * values).sum(-1, keepdim=True)
            determinant = total * square - linear * linear
            start = ((square * first - linear * product) / determinant).clamp(max=0)
            scale = torch.where(start < 0, (total * product - first * linear) / determinant, product / square)
        error = (importance * (scale * codes + start - values).square()).sum(-1, keepdim=True)
        better = error < least  # and finite
        best_scale, best_low = torch.where(better, scale, best_scale), torch.where(better, start, best_low)
        least = torch.where(better, error, least)

    def of_six_bits(of_blocks: Tensor) -> Tensor:
        many = of_blocks.clamp(min=0).view(*of_blocks.shape[:-2], -1, 8)
        largest = many.amax(-1, keepdim=True)
        codes = (many * (63 / largest.clamp(min=1e-30))).round()
        return (codes * (largest / 63).half().float()).view(of_blocks.shape)

    scales, lows = of_six_bits(best_scale), of_six_bits(-best_low)
    codes = ((values + lows) / scales.where(scales > 0, 1.0)).round().clamp(0, 15)
    return joined(codes * scales - lows, weight)


OTHERS: dict[str, tuple[float, Round]] = {  # bits per weight, rounding
    "int4": (4 + 16 / 64, lambda weight: integers(weight, 4)),
    "int8": (8 + 16 / 64, lambda weight: integers(weight, 8)),
    "Q4_K": (4 + 2 * 6 / 32 + 2 * 16 / 256, q4_k),
    "Q4_0": (4 + 16 / 32, lambda weight: signed_blocks(weight, 4)),
    "Q5_0": (5 + 16 / 32, lambda weight: signed_blocks(weight, 5)),
    "Q8_0": (8 + 16 / 32, q8_0),
}


class Rounding(Precisely):
    """Modules prepared with it read their weights through another rounding; None still means as they are."""

    def __init__(self, rounding: Callable[[Tensor, Precision], Tensor]) -> None:
        super().__init__()
        self.rounding = rounding

    def scale_exponent(self, whole: Tensor) -> Tensor | None:
        """There is none, unless the rounding has scales of such a kind."""
        return None

    def rounded(self, weight: Tensor, precision: Precision, scale_exponent: Exponent = None) -> Tensor:
        """The values of its grid, float32."""
        return self.rounding(weight, precision)

    def values(
        self, weight: Tensor, precision: Precision | None, dtype: torch.dtype, scale_exponent: Exponent = None
    ) -> Tensor:
        """What the weight is rounded to."""
        values = weight.detach() if precision is None else self.rounded(weight, precision, scale_exponent)
        return values.to(dtype)

    def values_of_all(
        self, weights: Sequence[Tensor], precision: Precision, dtype: torch.dtype | None
    ) -> list[Tensor]:
        """Equal shapes together: most of a small operation on a GPU is its launch, and here are many."""
        alike: dict[torch.Size, list[int]] = {}
        for i, weight in enumerate(weights):
            alike.setdefault(weight.shape, []).append(i)
        values = list(weights)
        for same in alike.values():
            for members in (same[start : start + TOGETHER] for start in range(0, len(same), TOGETHER)):
                found = self.rounded_stack(torch.stack([weights[i].detach() for i in members]), precision)
                for i, one in zip(members, found, strict=True):
                    values[i] = one.to(dtype or weights[i].dtype)
        return values

    def rounded_stack(self, weights: Tensor, precision: Precision) -> Tensor:
        """Each of several weights."""
        return self.rounded(weights, precision)


class Nested(Rounding):
    """Middles of nested intervals, on other scales than ours or moved by another distance."""

    def __init__(self, scales: Scales, moved: float, group_size: int = GROUP_SIZE) -> None:
        super().__init__(self.rounded)
        self.scales, self.moved, self.group_size = scales, moved, group_size
        """`moved` is in steps of E5M8."""

    def scale_exponent(self, whole: Tensor) -> Tensor | None:
        """As ours, of needs that depend on where the grid lies."""
        return _largest(self._needs(whole)) if self.precision and self.scales == "E4M3" else None

    def rounded(self, weight: Tensor, precision: Precision, scale_exponent: Exponent = None) -> Tensor:
        """The middles, float32."""
        values = in_groups(weight, self.group_size)
        step = (self._group_scales(weight, scale_exponent) * 2.0**-FINEST).unsqueeze(-1).double()
        codes = values.double() / step.where(step != 0, 1.0)
        if self.moved == int(self.moved):
            version_1 = self.scales == "pow2"
            sides = 1.0 if version_1 else border_sides(self.group_size, weight.device)
            codes = (codes * sides).floor().add(0.5) * sides
        codes = (codes + self.moved).floor().clamp(-(2**FINEST), 2**FINEST - 1)
        cell = 2.0 ** (FINEST - precision.mantissa_bits)
        return joined((((codes / cell).floor() + 0.5) * cell - self.moved) * step, weight).float()

    def rounded_stack(self, weights: Tensor, precision: Precision) -> Tensor:
        """Each with a scale exponent of its own."""
        each = self._needs(weights).flatten(1)
        exponents = exponents_for(each.flatten(), [each.shape[1]] * len(each))
        return self.rounded(weights, precision, exponents.view(-1, 1, 1))

    def _needs(self, weight: Tensor) -> Tensor:
        """The least |s| of each group with which nothing clips, negative where s is."""
        values, reach = in_groups(weight, self.group_size).double(), self.moved * 2.0**-FINEST
        below, above = values.amin(-1).neg().clamp(min=0), values.amax(-1).clamp(min=0)
        longer, shorter = torch.maximum(below, above), torch.minimum(below, above)
        needs = torch.maximum(longer / (1 + reach), shorter / (1 - reach))
        return torch.where(above > below, -needs, needs)

    def _group_scales(self, weight: Tensor, scale_exponent: Exponent) -> Tensor:
        if self.scales == "pow2":
            largest = in_groups(weight, self.group_size).abs().amax(-1)
            return power_of_two(torch.frexp(largest).exponent.clamp(min=-15))
        needs = self._needs(weight)
        if self.scales == "E4M3":
            return scales_for(needs, _largest(needs) if scale_exponent is None else scale_exponent)
        units = power_of_two((torch.frexp(needs).exponent - 3).clamp(min=-16))
        return torch.copysign((needs.abs() / units).ceil() * units, needs).float()


def _largest(needs: Tensor) -> Tensor:
    return exponents_for(needs.flatten(), [needs.numel()])[0]


NESTED: dict[str, tuple[Scales, float]] = {  # scales, distance
    "pow2": ("pow2", 16),
    "E5M2": ("E5M2", 16),
    "zero at E5M4": ("E4M3", 8),
    "zero nowhere": ("E4M3", 0),
    "zero a sixth off": ("E4M3", 32 / 3),
}


def precisely_for(quantizer: str, group_size: int, reconstruction: str) -> Precisely:
    """What modules of a row are prepared with."""
    if quantizer in ("sefp", "truncate"):
        return Precisely(group_size, "truncate" if "truncate" in (quantizer, reconstruction) else "midpoint")
    if quantizer in OTHERS:
        rounding = OTHERS[quantizer][1]
        return Rounding(lambda weight, precision: rounding(weight))
    return Nested(*NESTED[quantizer], group_size)
