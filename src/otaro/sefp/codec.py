"""SEFP: weights to codes, codes to values. This module is the law; files and kernels cite it.

A *group* is `group_size` consecutive weights along the last dimension. Its weights share one *scale* s, and
each weight keeps a 9-bit two's-complement *code* on the grid of spacing step(8) = s / 2^8. At m mantissa bits
the code is `code >> (8 - m)`, an arithmetic shift, and the spacing is step(m) = s / 2^m. So a lower precision
is a prefix of the stored bits; nothing is recomputed, and 8 -> 5 -> 3 equals 8 -> 3.

What a code means is the *reconstruction*:

  midpoint   code = floor(w / step(8)) + 16, on borders see below                    (ours, the default)
             value = (code_m + 1/2) * step(m) - step(3)/2
             Every code stands for the middle of its interval, which halves the error. The shift by 16 steps,
             which is step(3)/2, puts a middle on zero at m = 3, where most weights would otherwise lose their
             zero: the coarsest precision is plain symmetric rounding, code_3 * s/8. The grid then reaches
             from -17/16 s to 15/16 s.
  truncate   code = q for w >= 0 and ~q for w < 0, with q = floor(|w| / step(8))     (the paper's)
             value = (code_m + 1 if code_m < 0 else code_m) * step(m)
             One's complement makes the arithmetic shift cut magnitudes toward zero on both sides.

The scale is one byte: a float8 with a sign, four exponent bits and three fraction bits (E4M3), times one
power of two for the whole tensor, the *scale exponent*.

  midpoint   s may be negative, which mirrors the grid. Of both signs the one that needs the smaller |s| is
             taken, positive on a tie, and then the smallest |s| that the byte can say with all weights on the
             grid. Nothing clips.
  truncate   s is a power of two, the smallest above all magnitudes: the paper's shared exponent.

A group of zeros has the scale 0. The scale exponent is the smallest, from -13 to 7, with which the largest
scale of the tensor is at most 448, where float8 ends. Scales 2^-15 times as large and smaller lose fraction
bits, below 2^-17 they are all the same: weights so small beside others do not matter.

By hand, one group, `midpoint`: w = [0.8, -0.3, 0.02]
  s > 0 needs 0.8 / (15/16) = 0.853, s < 0 needs max(0.8 / (17/16), 0.3 / (15/16)) = 0.753: so s < 0.
  Between 1/2 and 1 a float8 has steps of 1/16, so |s| = 13/16: w / step(8) = [-252.06..., 94.5..., -6.3...]
  codes at m = 8    floor + 16    = [-237, 110, 9]    values ((c + .5)/256 - 1/16) s = [.801, -.3, .0206]
  codes at m = 3    >> 5          = [-8, 3, 0]        values  c s / 8                = [.8125, -.3047, 0]

Borders. A weight n step(8), n an integer, lies exactly between two cells of `midpoint`. Zeros do, and so do
all weights of a model that was on a coarser grid before. Were they always put into the cell above, that model
would be moved as a whole. So they go above or below by their place in the group: to code n - 1 + 16 where
that number, counted from 0, has an odd number of ones in binary, else to n + 16. The ends of the grid belong
to their only cell. One cell of E5M8 further down is another code of a coarser precision only where its border
is there too. So a weight is treated alike at each precision whose border it is on, and middles of cells,
which are on borders of finer precisions only, keep their codes when they are encoded again.

Exactness. Every implementation must find the same codes. With n an integer, |n| <= 272, the border n step(8)
has at most 13 significant bits (n has 9, s has 4): it is a float32, and any other float32 is at least 2^-24
of its own size away from it. In float64 a quotient is off by 2^-53 of its size at most, and not at all if it
is an integer. So w / step(8) is n exactly where the weight is on the border, and else on the same side of n
as without rounding. In the same way the need of a group, 16/15 or 16/17 of a float32, is a float8 exactly or
at least 2^-28 of its size away from one. Decoded values have at most 14 significant bits: exact in float32,
rounded once in float16 and bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from otaro.errors import WeightError
from otaro.sefp.precision import COARSEST, FINEST, GROUP_SIZE, SCALE_BITS, Precision
from otaro.sefp.precision import RECONSTRUCTIONS as RECONSTRUCTIONS
from otaro.sefp.precision import Reconstruction as Reconstruction

LARGEST_WEIGHT = 2.0**15  # magnitudes from here on are refused
MIN_SCALE_EXPONENT, MAX_SCALE_EXPONENT = -13, 7
MAX_FLOAT8, MIN_FLOAT8 = 448.0, 2.0**-9  # what a byte says at most, and at least above zero
FRACTION_BITS = 3
MIDPOINT_SHIFT = 1 << (FINEST - COARSEST - 1)  # step(3)/2 in units of step(8)
MIN_CODE, MAX_CODE = -(1 << FINEST), (1 << FINEST) - 1

# Weights encoded or decoded at a time: enough to hide the cost of a torch call, few enough for the L2 cache.
_CHUNK = 1 << 18


@dataclass(frozen=True, eq=False)
class SefpTensor:
    """A weight tensor as shared scales and codes; made by `encode`."""

    scale_bytes: torch.Tensor
    """The scales as the file holds them, uint8 [..., ceil(K / group_size)] for a weight [..., K]."""
    scale_exponent: int
    """The power of two that all of them are multiplied with."""
    finest_codes: torch.Tensor
    """The codes at E5M8, int16, of the weight's shape."""
    group_size: int
    reconstruction: Reconstruction

    @property
    def scales(self) -> torch.Tensor:
        """The scale of each group, float32, the tensor's power of two included."""
        return scale_values(self.scale_bytes, self.scale_exponent)

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
        scales = self.scales.reshape(len(codes), -1)
        values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
        for some in _row_chunks(len(codes), length):
            shifted = codes[some] if m == FINEST else codes[some] >> (FINEST - m)
            decode_codes(shifted, scales[some], m, self.group_size, self.reconstruction, out=values[some])
        return values.reshape(self.finest_codes.shape)

    def bits_per_weight(self, precision: str | Precision) -> float:
        """Stored bits over weights; above `Precision.bits_per_weight` only where rows end in short groups."""
        scale_bits = SCALE_BITS * self.scale_bytes.numel() / max(self.finest_codes.numel(), 1)
        return 1 + Precision(precision).mantissa_bits + scale_bits


def encode(
    weight: torch.Tensor,
    group_size: int = GROUP_SIZE,
    reconstruction: Reconstruction = "midpoint",
    *,
    scale_exponent: int | None = None,
    name: str = "weight",
) -> SefpTensor:
    """Turn a float16, bfloat16 or float32 tensor of any rank into shared scales and codes.

    Groups run along the last dimension; a row whose length is no multiple of `group_size` ends in a short
    group. NaN, infinity and magnitudes of 2^15 and above are refused; the message gives `name` and the index.
    Some rows of a tensor are encoded as the whole is with the whole's `scale_exponent`.

    >>> t = encode(torch.tensor([0.8, -0.3, 0.02]))
    >>> t.scales.tolist(), t.codes("E5M8").tolist(), t.codes("E5M3").tolist()
    ([-0.8125], [-237, 110, 9], [-8, 3, 0])
    >>> t.decode("E5M3").tolist()
    [0.8125, -0.3046875, -0.0]
    """
    if not isinstance(weight, torch.Tensor) or weight.layout != torch.strided:
        raise WeightError(f"{name} is no dense tensor; give one, as to_dense() or torch.tensor() makes it")
    if weight.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise WeightError(f"{name} is {weight.dtype}; SEFP encodes float16, bfloat16 and float32 tensors")
    if group_size < 1:
        raise WeightError(f"group_size must be at least 1, got {group_size}")
    if reconstruction not in RECONSTRUCTIONS:
        raise WeightError(
            f"unknown reconstruction {reconstruction!r}; choose from {', '.join(RECONSTRUCTIONS)}"
        )
    weight = weight.detach()
    if weight.dim() == 0:
        scalar = encode(
            weight.reshape(1), group_size, reconstruction, scale_exponent=scale_exponent, name=name
        )
        codes = scalar.finest_codes.reshape(())
        return SefpTensor(scalar.scale_bytes, scalar.scale_exponent, codes, group_size, reconstruction)

    *lead, length = weight.shape
    groups = -(-length // group_size)
    rows = weight.reshape(-1, length) if weight.numel() else weight.new_empty(0, length)
    needs = group_needs(rows, group_size, reconstruction)
    if not needs_are_met(needs) and (at := first_refused(weight)) is not None:
        raise refusal(name, weight.shape, at, float(weight.flatten()[at]))
    least = smallest_scale_exponent(needs)
    if scale_exponent is None:
        scale_exponent = least
    elif not least <= scale_exponent <= MAX_SCALE_EXPONENT:
        raise WeightError(
            f"{name} needs a scale_exponent from {least} to {MAX_SCALE_EXPONENT}, got {scale_exponent}"
        )
    scale_bytes = round_up(needs, scale_exponent)
    codes = finest_codes(rows, scale_values(scale_bytes, scale_exponent), group_size, reconstruction)
    scale_bytes = scale_bytes.reshape(*lead, groups)
    return SefpTensor(scale_bytes, scale_exponent, codes.reshape(weight.shape), group_size, reconstruction)


def group_needs(rows: torch.Tensor, group_size: int, reconstruction: Reconstruction) -> torch.Tensor:
    """Per group of a matrix the least |s| that holds it, float64, with the sign of s; NaN for NaN weights."""
    length = rows.shape[-1]
    least, most = torch.empty(2, len(rows), -(-length // group_size), dtype=torch.float32, device=rows.device)
    for some, floats in _chunks(rows):
        for at, group in _group_views(floats, group_size):
            least[some, at], most[some, at] = group.amin(-1), group.amax(-1)  # aminmax is four times as slow
    return needs_of(least, most, reconstruction)


def needs_of(least: torch.Tensor, most: torch.Tensor, reconstruction: Reconstruction) -> torch.Tensor:
    """The same, from the least and the largest weight of each group."""
    # never -0, whose byte is 0x80
    below, above = (0.0 - least.double()).clamp_(min=0), (0.0 + most.double()).clamp_(min=0)
    if reconstruction == "truncate":
        largest = torch.maximum(below, above)
        exponents = torch.frexp(largest).exponent  # the smallest e with largest < 2^e
        powers = torch.ldexp(torch.ones_like(largest), exponents)
        return torch.where((largest > 0) & largest.isfinite(), powers, largest)
    upright = torch.maximum(above * 16 / 15, below * 16 / 17)
    mirrored = torch.maximum(below * 16 / 15, above * 16 / 17)
    return torch.where(mirrored < upright, -mirrored, upright)


def smallest_scale_exponent(needs: torch.Tensor) -> int:
    """The smallest allowed one with which the largest need is at most what a byte can say."""
    largest = float(needs.abs().max()) if needs.numel() else 0.0
    exponent = MIN_SCALE_EXPONENT
    while largest > MAX_FLOAT8 * 2.0**exponent:
        exponent += 1
    return exponent


def round_up(needs: torch.Tensor, scale_exponent: int) -> torch.Tensor:
    """Needs as scale bytes: the smallest that a byte can say which is not below, with the need's sign."""
    scaled = needs.abs() * 2.0**-scale_exponent
    # scaled lies in [2^(e-1), 2^e), where a float8 has steps of 2^(e-4)
    exponents = torch.frexp(scaled).exponent
    ones = torch.ones_like(scaled)
    steps = torch.ldexp(ones, exponents - 1 - FRACTION_BITS).clamp_(min=MIN_FLOAT8)
    rounded = (scaled / steps).ceil_().mul_(steps)
    return torch.copysign(rounded, needs).float().to(torch.float8_e4m3fn).view(torch.uint8)


def scale_values(scale_bytes: torch.Tensor, scale_exponent: int) -> torch.Tensor:
    """What scale bytes, uint8, stand for, float32.

    Bit 7 is the sign, then come four bits e and three bits f: (1 + f/8) 2^(e-7), or f 2^-9 where e is 0. So
    every byte has a finite meaning. (Of the two that float8 takes for NaN, 0x7f and 0xff, no writer makes
    use.)
    """
    magnitudes = (scale_bytes & 0x7F).int()
    normal = ((magnitudes << (23 - FRACTION_BITS)) + ((127 - 7) << 23)).view(torch.float32)
    values = torch.where(magnitudes < 1 << FRACTION_BITS, magnitudes * MIN_FLOAT8, normal)
    return torch.where(scale_bytes < 0x80, values, -values).mul_(2.0**scale_exponent)


def border_sides(group_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """For each place in a group 1 where a weight on a border goes to the cell above it, else -1; float64."""
    places = torch.arange(group_size, dtype=torch.int32, device=device)
    for shift in (16, 8, 4, 2, 1):
        places ^= places >> shift
    return 1.0 - 2.0 * (places & 1).double()


def finest_codes(
    rows: torch.Tensor, scales: torch.Tensor, group_size: int, reconstruction: Reconstruction
) -> torch.Tensor:
    """The E5M8 codes, int16, of a matrix of weights on the grids that `scales` give."""
    codes = torch.empty(rows.shape, dtype=torch.int16, device=rows.device)
    steps = (scales.double() * 2.0**-FINEST).where(scales != 0, 1.0).unsqueeze(-1)
    sides = border_sides(group_size, rows.device)
    for some, floats in _chunks(rows, torch.float64):
        if reconstruction == "truncate":
            minus_one_if_negative = floats.sign().clamp_(max=0)
        for at, group in _group_views(floats, group_size):
            group.div_(steps[some, at])
            # middles: a grid that is mirrored has its cells above borders below them
            if reconstruction == "midpoint":
                group.mul_(side := sides[: group.shape[-1]]).floor_().add_(0.5).mul_(side)
        if reconstruction == "truncate":
            codes[some] = floats.trunc_().add_(minus_one_if_negative)  # ~q = -q - 1
        else:
            codes[some] = floats.add_(MIDPOINT_SHIFT - 0.5).clamp_(MIN_CODE, MAX_CODE)
    return codes


def decode_codes(
    codes: torch.Tensor,
    scales: torch.Tensor,
    mantissa_bits: int,
    group_size: int,
    reconstruction: Reconstruction,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Values, float32, of codes that already are at `mantissa_bits`; in `out`, if given, of their shape."""
    values = out.copy_(codes) if out is not None and out.dtype == torch.float32 else codes.float()
    if reconstruction == "truncate":
        values.sub_(values.sign().clamp_(max=0))  # one more where negative
    else:
        values.add_(midpoint_offset(mantissa_bits))
    steps = (scales * 2.0**-mantissa_bits).unsqueeze(-1)
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
    """[..., K] as [..., groups, group_size], in two parts: whole groups, then a short one, with places."""
    length = tensor.shape[-1]
    whole = length // group_size
    if whole:
        yield slice(0, whole), tensor[..., : whole * group_size].unflatten(-1, (whole, group_size))
    if length % group_size:
        yield slice(whole, whole + 1), tensor[..., whole * group_size :].unsqueeze(-2)


def _row_chunks(rows: int, length: int) -> list[slice]:
    size = max(1, _CHUNK // max(length, 1))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _chunks(rows: torch.Tensor, dtype: torch.dtype = torch.float32) -> Iterator[tuple[slice, torch.Tensor]]:
    """A matrix in `dtype`, some rows at a time, to be overwritten: one buffer, as new memory is slow."""
    chunks = _row_chunks(len(rows), rows.shape[-1])
    if chunks:
        buffer = torch.empty(chunks[0].stop, rows.shape[-1], dtype=dtype, device=rows.device)
        for some in chunks:
            yield some, buffer[: some.stop - some.start].copy_(rows[some])


def needs_are_met(needs: torch.Tensor) -> bool:
    """Whether it takes no look at the weights to know that all can be encoded."""
    return not needs.numel() or bool(needs.abs().max() < LARGEST_WEIGHT * 16 / 17)  # false where one is NaN


def first_refused(weight: torch.Tensor) -> int | None:
    """Flat index of the first weight that cannot be encoded, if there is one."""
    bad = ~(weight.flatten().abs() < LARGEST_WEIGHT)  # the negation catches NaN
    return int(bad.nonzero()[0]) if bad.any() else None


def refusal(name: str, shape: Sequence[int], flat_index: int, value: float) -> WeightError:
    """Say which weight cannot be encoded, and why."""
    index: list[int] = []
    for size in reversed(shape):
        flat_index, at = divmod(flat_index, size)
        index.insert(0, at)
    why = f"magnitudes below 2^15 = {LARGEST_WEIGHT:.0f}" if math.isfinite(value) else "finite weights"
    return WeightError(
        f"{name}{index} is {value:g}, and SEFP holds {why} only; repair or rescale the checkpoint"
    )
