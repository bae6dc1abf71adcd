"""Arithmetic on packed planes in plain torch: the fallback on any device, and the oracle of every faster backend.

The value of a stored u = code + 2^m is (u - 2^m) * step(m) with the reconstruction's correction (`sefp.codec`); `decode` gives
these values. `linear` multiplies without leaving the integers for long:

1. A row of weights is cut into *units* of 64 (of 32 where the group size is no multiple of 64); a group is one or more of them.
2. `quantise` turns each unit of activations into 16-bit integers a that share a power of two: x = a * 2^(e - 15), rounded to
   nearest, ties to even. e is the smallest integer with |x| < 2^e throughout the unit, one more where an |a| would pass 32639,
   and at least -80. (32639 = 127 * 257: such an integer is two signed bytes, which is what byte products want.)
3. The dot product I of a unit is a sum of integers below 2^31 (`dots`), so any order is exact. A weight enters as
   (n u + k) * 2^(exponent - shift), see `Meaning`.
4. float32(I), times both powers of two, is the unit's term. Unit i is added to lane i mod 16, units in ascending order;
   then lane j gets lane j + 8 added, then j + 4, j + 2, j + 1. Each operation rounds once, to float32.

So the result is the same to the last bit for every backend, instruction set and number of threads. A unit with an activation
that is not finite gives NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from otaro.errors import KernelError
from otaro.file.planes import BLOCK, unpack_codes
from otaro.sefp.codec import MAX_EXPONENT, MIN_EXPONENT, Reconstruction, decode_codes, power_of_two
from otaro.sefp.precision import COARSEST

LANES = 16
MAX_ACTIVATION = 32639
MIN_ACTIVATION_EXPONENT = -80
ACTIVATION_BITS = 15

_CHUNK = 1 << 18  # weights


def decode(
    base: torch.Tensor,
    exponents: torch.Tensor,
    planes: Sequence[torch.Tensor],
    *,
    length: int,
    group_size: int,
    reconstruction: Reconstruction,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Values [rows, length] of packed rows: base [rows, 16 n], exponents [rows, groups], planes [rows, 4 n] each.

    The precision is the one that base and planes make up: no plane gives E5M3, five give E5M8. Some rows are decoded at a time,
    so that the intermediate words stay in the cache and only the result touches memory.
    """
    _check_exponents(exponents)
    values = torch.empty(len(base), length, dtype=dtype, device=base.device)
    # Only a CPU has a cache to fit into; elsewhere each chunk would cost launches.
    size = max(1, _CHUNK // length) if base.device.type == "cpu" else max(len(base), 1)
    for start in range(0, len(base), size):
        some = slice(start, start + size)
        codes = unpack_codes(base[some], [plane[some] for plane in planes], length)
        decode_codes(codes, exponents[some], COARSEST + len(planes), group_size, reconstruction, out=values[some])
    return values


def embedding(
    ids: torch.Tensor,
    base: torch.Tensor,
    exponents: torch.Tensor,
    planes: Sequence[torch.Tensor],
    *,
    length: int,
    group_size: int,
    reconstruction: Reconstruction,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Values [ids, length] of some rows."""
    _check_exponents(exponents)  # all of them: whether a weight is refused must not depend on the rows
    return decode(
        base[ids], exponents[ids], [plane[ids] for plane in planes],
        length=length, group_size=group_size, reconstruction=reconstruction, dtype=dtype,
    )  # fmt: skip


def matmul(
    x: torch.Tensor,
    base: torch.Tensor,
    exponents: torch.Tensor,
    planes: Sequence[torch.Tensor],
    *,
    length: int,
    group_size: int,
    reconstruction: Reconstruction,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Products [tokens, rows] of many tokens with decoded weights, in the type of the activations."""
    weight = decode(base, exponents, planes, length=length, group_size=group_size, reconstruction=reconstruction, dtype=x.dtype)
    return torch.nn.functional.linear(x, weight, bias)


class Meaning(NamedTuple):
    """A weight is (factor * code + constant) * 2^(exponent - shift), its code raised by one where negative or not."""

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


def quantise(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations [tokens, length] as integers, int16 of the same shape, and a power of two for each unit, float32."""
    unit = unit_size(group_size)
    units = pad(x.float(), (0, -x.shape[1] % unit)).unflatten(1, (-1, unit))
    finite = units.isfinite().all(-1, keepdim=True)
    units = units.where(finite, 0.0)
    largest = units.abs().amax(-1, keepdim=True)
    exponents = torch.frexp(largest).exponent.where(largest > 0, MIN_ACTIVATION_EXPONENT).clamp(min=MIN_ACTIVATION_EXPONENT)
    exponents += largest * power_of_two(ACTIVATION_BITS - exponents) >= MAX_ACTIVATION + 0.5
    codes = (units * power_of_two(ACTIVATION_BITS - exponents)).round().to(torch.int16)
    scales = power_of_two(exponents - ACTIVATION_BITS).where(finite, torch.nan)
    return codes.flatten(1)[:, : x.shape[1]].contiguous(), scales.squeeze(-1)


def dots(
    codes: torch.Tensor,
    base: torch.Tensor,
    planes: Sequence[torch.Tensor],
    *,
    length: int,
    group_size: int,
    reconstruction: Reconstruction,
) -> torch.Tensor:
    """The integers of step 3, as float64 [tokens, rows, units]: doubles hold them exactly, and have a fast matrix product."""
    weights = unpack_codes(base, planes, length)
    means = meaning(COARSEST + len(planes), reconstruction)
    if means.raise_negative:
        weights = weights + (weights < 0)
    weights = weights * means.factor + means.constant
    unit = unit_size(group_size)
    filled = -length % unit
    by_unit = pad(weights.double(), (0, filled)).unflatten(1, (-1, unit))
    return torch.einsum("tuk,ruk->tru", pad(codes.double(), (0, filled)).unflatten(1, (-1, unit)), by_unit)


def linear(
    x: torch.Tensor,
    base: torch.Tensor,
    exponents: torch.Tensor,
    planes: Sequence[torch.Tensor],
    *,
    length: int,
    group_size: int,
    reconstruction: Reconstruction,
) -> torch.Tensor:
    """Products [tokens, rows], float32, of activations [tokens, length] with packed rows."""
    _check_exponents(exponents)
    codes, scales = quantise(x, group_size)
    shift = meaning(COARSEST + len(planes), reconstruction).shift
    units_per_group = group_size // unit_size(group_size)
    out = torch.empty(len(x), len(base), device=x.device)
    size = max(1, (_CHUNK if x.device.type == "cpu" else _CHUNK << 6) // length)  # elsewhere each chunk costs launches
    for start in range(0, len(base), size):
        some = slice(start, start + size)
        integers = dots(
            codes, base[some], [p[some] for p in planes], length=length, group_size=group_size, reconstruction=reconstruction
        )
        steps = power_of_two(exponents[some].int() - shift).repeat_interleave(units_per_group, 1)[:, : integers.shape[-1]]
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


def _check_exponents(exponents: torch.Tensor) -> None:
    """No file holds others, and with others products of powers of two are not exact. A GPU would have to be waited for."""
    if exponents.device.type != "cpu" or not exponents.numel():
        return
    least, most = (int(one) for one in exponents.aminmax())
    if least < MIN_EXPONENT or most > MAX_EXPONENT:
        raise KernelError(f"exponents must lie between {MIN_EXPONENT} and {MAX_EXPONENT}, not between {least} and {most}")
