"""SEFP: weights to codes, codes to values. This module is the law; files and kernels cite it.

A *group* is `group_size` consecutive weights along the last dimension. Its weights share one exponent `e`, the smallest
integer with |w| < 2^e for all of them, and each weight keeps a 9-bit two's-complement *code* on the grid of spacing
step(8) = 2^(e-8). At m mantissa bits the code is `code >> (8 - m)`, an arithmetic shift, and the spacing is
step(m) = 2^(e-m). So a lower precision is a prefix of the stored bits; nothing is recomputed, and 8 -> 5 -> 3 equals 8 -> 3.

What a code means is the *reconstruction*:

  truncate   code = q for w >= 0 and ~q for w < 0, with q = floor(|w| / step(8))     (the paper's)
             value = (code_m + 1 if code_m < 0 else code_m) * step(m)
             One's complement makes the arithmetic shift cut magnitudes toward zero on both sides.
  midpoint   code = min(floor(w / step(8)) + 16, 255)                                (ours, the default)
             value = (code_m + 1/2) * step(m) - step(3)/2
             Every code stands for the middle of its interval, which halves the error. The shift by 16 steps, which is
             step(3)/2, puts a middle on zero at m = 3, where most weights would otherwise lose their zero: the coarsest
             precision is then plain rounding. The price is a clamp for w >= 15/16 * 2^e.

By hand, one group, `midpoint`: w = [0.8, -0.3, 0.02]
  e = 0 (0.8 < 2^0), step(8) = 1/256, so w / step(8) = [204.8, -76.8, 5.12]
  codes at m = 8    floor + 16         = [220, -61, 21]       values (c + .5)/256 - 1/16 = [.799, -.299, .0215]
  codes at m = 3    >> 5               = [6, -2, 0]           values  c / 8              = [.75,  -.25,  0]

Exactness. Exponents come from the bits of the float, never from a logarithm, and all scaling is by powers of two, so
encoding makes no rounding but the floor that defines it. Decoded values are small integers times a power of two:
  float32   holds all of them exactly;
  float16   all, except code_3 = -8 of `midpoint` at E5M3 in a group with e = 16, which is -65536 (float16 ends at 65504);
  bfloat16  all, except `midpoint` at E5M8 beyond 2^e/2, where odd multiples of step(8)/2 need 9 significant bits of 8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from otaro.errors import WeightError
from otaro.sefp.precision import COARSEST, EXPONENT_BITS, FINEST, GROUP_SIZE, Precision

Reconstruction = Literal["midpoint", "truncate"]
RECONSTRUCTIONS: tuple[Reconstruction, ...] = get_args(Reconstruction)

MIN_EXPONENT, MAX_EXPONENT = -15, 16  # what 5 bits hold; an all-zero group has the smallest
MIDPOINT_SHIFT = 1 << (FINEST - COARSEST - 1)  # step(3)/2 in units of step(8)
MAX_CODE = (1 << FINEST) - 1

# Weights encoded or decoded at a time: enough to hide the cost of a torch call, few enough for the L2 cache.
_CHUNK = 1 << 18


@dataclass(frozen=True, eq=False)
class SefpTensor:
    """A weight tensor as shared exponents and codes; made by `encode`."""

    exponents: torch.Tensor
    """The integers e, int8, of shape [..., ceil(K / group_size)] for a weight of shape [..., K]."""
    finest_codes: torch.Tensor
    """The codes at E5M8, int16, of the weight's shape."""
    group_size: int
    reconstruction: Reconstruction

    def codes(self, precision: str | Precision) -> torch.Tensor:
        """The codes at `precision`, int16: the stored ones shifted right."""
        return self.finest_codes >> (FINEST - Precision(precision).mantissa_bits)

    def decode(self, precision: str | Precision) -> torch.Tensor:
        """The values at `precision`, float32."""
        m = Precision(precision).mantissa_bits
        if self.finest_codes.numel() == 0:
            return self.finest_codes.float()
        length = self.finest_codes.shape[-1] if self.finest_codes.dim() else 1
        codes = self.finest_codes.reshape(-1, length)
        exponents = self.exponents.reshape(len(codes), -1)
        values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
        for some in _row_chunks(len(codes), length):
            shifted = codes[some] if m == FINEST else codes[some] >> (FINEST - m)
            decode_codes(shifted, exponents[some], m, self.group_size, self.reconstruction, out=values[some])
        return values.reshape(self.finest_codes.shape)

    def bits_per_weight(self, precision: str | Precision) -> float:
        """Stored bits over weights; above `Precision.bits_per_weight` only where rows end in a short group."""
        exponent_bits = EXPONENT_BITS * self.exponents.numel() / max(self.finest_codes.numel(), 1)
        return 1 + Precision(precision).mantissa_bits + exponent_bits


def encode(
    weight: torch.Tensor,
    group_size: int = GROUP_SIZE,
    reconstruction: Reconstruction = "midpoint",
    *,
    name: str = "weight",
) -> SefpTensor:
    """Turn a float16, bfloat16 or float32 tensor of any rank into shared exponents and codes.

    Groups run along the last dimension; a row whose length is no multiple of `group_size` ends in a short group. NaN,
    infinity and magnitudes of 2^16 and above are refused; the message gives `name` and the index.

    >>> t = encode(torch.tensor([0.8, -0.3, 0.02]))
    >>> t.exponents.tolist(), t.codes("E5M8").tolist(), t.codes("E5M3").tolist()
    ([0], [220, -61, 21], [6, -2, 0])
    >>> t.decode("E5M3").tolist()
    [0.75, -0.25, 0.0]
    """
    if weight.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise WeightError(f"{name} is {weight.dtype}; SEFP encodes float16, bfloat16 and float32 tensors")
    if group_size < 1:
        raise WeightError(f"group_size must be at least 1, got {group_size}")
    if reconstruction not in RECONSTRUCTIONS:
        raise WeightError(f"unknown reconstruction {reconstruction!r}; choose from {', '.join(RECONSTRUCTIONS)}")
    weight = weight.detach()
    if weight.dim() == 0:
        scalar = encode(weight.reshape(1), group_size, reconstruction, name=name)
        return SefpTensor(scalar.exponents, scalar.finest_codes.reshape(()), group_size, reconstruction)

    *lead, length = weight.shape
    groups = -(-length // group_size)
    rows = weight.reshape(-1, length) if weight.numel() else weight.new_empty(0, length)
    exponents = shared_exponents(rows, group_size)
    if exponents.numel() and int(exponents.max()) > MAX_EXPONENT:
        at = first_refused(weight)
        assert at is not None  # a group's exponent says so
        raise refusal(name, weight.shape, at, float(weight.flatten()[at]))
    codes = finest_codes(rows, exponents, group_size, reconstruction)
    exponents = exponents.to(torch.int8).reshape(*lead, groups)
    return SefpTensor(exponents, codes.reshape(weight.shape), group_size, reconstruction)


def shared_exponents(rows: torch.Tensor, group_size: int) -> torch.Tensor:
    """Per group of a matrix the smallest e >= -15 with |w| < 2^e, int32; NaN and infinity give an e that is never allowed.

    A float32 is below 2^(field - 126), field being its 8 exponent bits, and no smaller power of two will do, unless it is so
    small that e is -15 anyway. A NaN makes the largest of its group NaN; its field is 255, like that of infinity.
    """
    length = rows.shape[-1]
    largest = torch.empty(len(rows), -(-length // group_size), dtype=torch.float32, device=rows.device)
    for some, floats in _chunks(rows):
        for at, group in _group_views(floats.abs_(), group_size):
            largest[some, at] = group.amax(-1)
    fields = (largest.view(torch.int32) & 0x7FFFFFFF) >> 23
    return fields.sub_(126).clamp_(min=MIN_EXPONENT)


def finest_codes(rows: torch.Tensor, exponents: torch.Tensor, group_size: int, reconstruction: Reconstruction) -> torch.Tensor:
    """The E5M8 codes, int16, of a matrix of weights on the grids that `exponents` give."""
    codes = torch.empty(rows.shape, dtype=torch.int16, device=rows.device)
    scales = power_of_two(FINEST - exponents.int()).unsqueeze(-1)
    may_underflow = exponents.numel() > 0 and int(exponents.max()) > FINEST
    for some, floats in _chunks(rows):
        if reconstruction == "truncate" or may_underflow:
            minus_one_if_negative = floats.sign().clamp_(max=0)
        for at, group in _group_views(floats, group_size):
            group.mul_(scales[some, at])
        if reconstruction == "truncate":
            codes[some] = floats.trunc_().add_(minus_one_if_negative)  # ~q = -q - 1
            continue
        if may_underflow:
            # Scaling down made a tiny negative weight -0, but its floor is -1.
            floats = torch.where(floats == 0, minus_one_if_negative, floats)
        # Floor first, then shift: adding before the floor would round tiny negative weights up to the next code.
        codes[some].copy_(floats.floor_()).add_(MIDPOINT_SHIFT).clamp_(max=MAX_CODE)
    return codes


def decode_codes(
    codes: torch.Tensor,
    exponents: torch.Tensor,
    mantissa_bits: int,
    group_size: int,
    reconstruction: Reconstruction,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Values, float32, of codes that already are at `mantissa_bits`; written to `out`, of the codes' shape, if given."""
    values = out.copy_(codes) if out is not None and out.dtype == torch.float32 else codes.float()
    if reconstruction == "truncate":
        values.sub_(values.sign().clamp_(max=0))  # one more where negative
    else:
        values.add_(midpoint_offset(mantissa_bits))
    steps = power_of_two(exponents.int() - mantissa_bits).unsqueeze(-1)
    for at, group in _group_views(values, group_size):
        group.mul_(steps[..., at, :])
    return values if out is None or out is values else out.copy_(values)


def midpoint_offset(mantissa_bits: int) -> float:
    """What `midpoint` adds to a code, in units of step(m): the half step, less step(3)/2."""
    return 0.5 - 2.0 ** (mantissa_bits - COARSEST - 1)


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """2^exponent as float32, exactly, by writing the exponent field; for int32 exponents from -126 to 127."""
    return ((exponents + 127) << 23).view(torch.float32)


def _group_views(tensor: torch.Tensor, group_size: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """[..., K] as [..., groups, group_size], in two parts: the whole groups, then a short one; each with its place."""
    length = tensor.shape[-1]
    whole = length // group_size
    if whole:
        yield slice(0, whole), tensor[..., : whole * group_size].unflatten(-1, (whole, group_size))
    if length % group_size:
        yield slice(whole, whole + 1), tensor[..., whole * group_size :].unsqueeze(-2)


def _row_chunks(rows: int, length: int) -> list[slice]:
    size = max(1, _CHUNK // max(length, 1))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _chunks(rows: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """A matrix in float32, some rows at a time, to be overwritten: one buffer serves all, as new memory is slow."""
    chunks = _row_chunks(len(rows), rows.shape[-1])
    if chunks:
        buffer = torch.empty(chunks[0].stop, rows.shape[-1], dtype=torch.float32, device=rows.device)
        for some in chunks:
            yield some, buffer[: some.stop - some.start].copy_(rows[some])


def first_refused(weight: torch.Tensor) -> int | None:
    """Flat index of the first weight that cannot be encoded, if there is one."""
    bad = ~(weight.flatten().abs() < 2.0**MAX_EXPONENT)  # the negation catches NaN
    return int(bad.nonzero()[0]) if bad.any() else None


def refusal(name: str, shape: Sequence[int], flat_index: int, value: float) -> WeightError:
    """Say which weight cannot be encoded, and why."""
    index: list[int] = []
    for size in reversed(shape):
        flat_index, at = divmod(flat_index, size)
        index.insert(0, at)
    why = f"magnitudes below 2^{MAX_EXPONENT} = {2**MAX_EXPONENT}" if math.isfinite(value) else "finite weights"
    return WeightError(f"{name}{index} is {value:g}, and SEFP holds {why} only; repair or rescale the checkpoint")
