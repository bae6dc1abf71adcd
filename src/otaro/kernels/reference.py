"""Arithmetic on packed planes in plain torch: the fallback on any device, and the oracle of every faster
backend.

The value of a stored u = code + 2^m is (u - 2^m) * step(m) with the reconstruction's correction
(`sefp.codec`); `decode` gives these values. `linear` multiplies without leaving the integers for long:

1. A row of weights is cut into *units* of 64 (of 32 where the group size is no multiple of 64); a group is
   one or more of them.
2. `quantize` turns each unit of activations into 16-bit integers a that share a power of two:
   x = a * 2^(e - 15), rounded to nearest, ties to even. e is the smallest integer with |x| < 2^e throughout
   the unit, one more where an |a| would pass 32639, and at least -80. (32639 = 127 * 257: such an integer is
   two signed bytes, which is what byte products want.)
3. The dot product I of a unit is a sum of integers below 2^31 (`dots`), so any order is exact. A weight
   enters as (n u + k) * scale * 2^-shift, see `Meaning`.
4. The product of the weights' scale and the activations' power of two is exact; float32(I) times it is the
   unit's term. Unit i is added to lane i mod 16, units in ascending order; then lane j gets lane j + 8 added,
   then j + 4, j + 2, j + 1. Each operation rounds once, to float32.

So the result is the same to the last bit for every backend, instruction set and number of threads. A unit
with an activation that is not finite gives NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from otaro.file.planes import BLOCK, unpack_codes
from otaro.kernels.packed import Packed
from otaro.sefp.codec import Reconstruction, decode_codes, power_of_two, scale_values
from otaro.sefp.precision import COARSEST

LANES = 16
MAX_ACTIVATION = 32639
MIN_ACTIVATION_EXPONENT = -80
ACTIVATION_BITS = 15

_CHUNK = 1 << 18  # weights


def decode(packed: Packed, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values [rows, length].

    Some rows are decoded at a time, so that the intermediate words stay in the cache and only the result
    touches memory.
    """
    count, device = len(packed.base), packed.base.device
    values = torch.empty(count, packed.length, dtype=dtype, device=device)
    # Only a CPU has a cache to fit into; elsewhere each chunk would cost launches.
    size = max(1, _CHUNK // packed.length) if device.type == "cpu" else max(count, 1)
    for start in range(0, count, size):
        some = slice(start, start + size)
        few = packed.rows(some)
        codes = unpack_codes(few.base, few.planes, few.length)
        scales = scale_values(few.scales, few.scale_exponent)
        decode_codes(codes, scales, few.bits, few.group_size, few.reconstruction, out=values[some])
    return values


def embedding(ids: torch.Tensor, packed: Packed, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values [ids, length] of some rows."""
    return decode(packed.rows(ids), dtype)


def matmul(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Products [tokens, rows] of many tokens with decoded weights, in the type of the activations."""
    return torch.nn.functional.linear(x, decode(packed, x.dtype), bias)


class Meaning(NamedTuple):
    """A weight is (factor * code + constant) * scale * 2^-shift, code raised by one where negative or not."""

    factor: int
    constant: int
    shift: int
    raise_negative: bool


def meaning(mantissa_bits: int, reconstruction: Reconstruction) -> Meaning:
    """How integers stand for weights at this precision."""
    if reconstruction == "truncate":
        return Meaning(1, 0, mantissa_bits, True)
    return Meaning(2, 1 - 2 ** (mantissa_bits - COARSEST), mantissa_bits + 1, False)  # halves become whole


def unit_size(group_size: int) -> int:
    """How many weights one integer dot product covers."""
    return BLOCK if group_size % (2 * BLOCK) else 2 * BLOCK


def quantize(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations [tokens, length] as integers, int16 of the same shape, a power of two per unit, float32."""
    unit = unit_size(group_size)
    units = pad(x.float(), (0, -x.shape[1] % unit)).unflatten(1, (-1, unit))
    finite = units.isfinite().all(-1, keepdim=True)
    units = units.where(finite, 0.0)
    largest = units.abs().amax(-1, keepdim=True)
    exponents = (
        torch.frexp(largest)
        .exponent.where(largest > 0, MIN_ACTIVATION_EXPONENT)
        .clamp(min=MIN_ACTIVATION_EXPONENT)
    )
    exponents += largest * power_of_two(ACTIVATION_BITS - exponents) >= MAX_ACTIVATION + 0.5
    codes = (units * power_of_two(ACTIVATION_BITS - exponents)).round().to(torch.int16)
    scales = power_of_two(exponents - ACTIVATION_BITS).where(finite, torch.nan)
    return codes.flatten(1)[:, : x.shape[1]].contiguous(), scales.squeeze(-1)


def dots(codes: torch.Tensor, packed: Packed) -> torch.Tensor:
    """The integers of step 3, float64 [tokens, rows, units]: it holds them exactly, and multiplies fast."""
    weights = unpack_codes(packed.base, packed.planes, packed.length)
    means = meaning(packed.bits, packed.reconstruction)
    if means.raise_negative:
        weights = weights + (weights < 0)
    weights = weights * means.factor + means.constant
    unit = unit_size(packed.group_size)
    filled = -packed.length % unit
    by_unit = pad(weights.double(), (0, filled)).unflatten(1, (-1, unit))
    return torch.einsum("tuk,ruk->tru", pad(codes.double(), (0, filled)).unflatten(1, (-1, unit)), by_unit)


def linear(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """Products [tokens, rows], float32, of activations [tokens, length] with packed rows."""
    codes, scales = quantize(x, packed.group_size)
    shift = meaning(packed.bits, packed.reconstruction).shift
    units_per_group = packed.group_size // unit_size(packed.group_size)
    count = len(packed.base)
    out = torch.empty(len(x), count, device=x.device)
    # elsewhere each chunk costs launches
    size = max(1, (_CHUNK if x.device.type == "cpu" else _CHUNK << 6) // packed.length)
    for start in range(0, count, size):
        some = slice(start, start + size)
        few = packed.rows(some)
        integers = dots(codes, few)
        steps = scale_values(few.scales, few.scale_exponent - shift)
        steps = steps.repeat_interleave(units_per_group, 1)[:, : integers.shape[-1]]
        terms = integers.float() * (steps * scales[:, None])
        lanes = torch.zeros(*terms.shape[:2], LANES, device=x.device)
        for unit in range(0, terms.shape[-1], LANES):
            piece = terms[..., unit : unit + LANES]
            lanes[..., : piece.shape[-1]] += piece
        while lanes.shape[-1] > 1:
            half = lanes.shape[-1] // 2
            lanes = lanes[..., :half] + lanes[..., half:]
        out[:, some] = lanes[..., 0]
    return out
