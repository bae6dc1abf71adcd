"""SEFP in exact arithmetic: what the design says, sentence by sentence, with integers and fractions and
nothing else.

It shares no line and no trick with the codec: scales are looked up in a list of all, shifts are floor
divisions, floats are taken apart bit by bit. Slow, and easy to check by reading.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from fractions import Fraction
from functools import cache

RECONSTRUCTIONS = ("midpoint", "truncate")
MANTISSA_BITS = (8, 7, 6, 5, 4, 3)
SCALE_EXPONENTS = range(-13, 8)

FIELDS = {"float16": (5, 10), "bfloat16": (8, 7), "float32": (8, 23)}
"""Exponent bits and fraction bits of a float."""

POWERS = {e: Fraction(2) ** e for e in range(-200, 130)}
FLOAT8 = [Fraction(f, 512) for f in range(8)] + [
    (8 + f) * POWERS[e - 10] for e in range(1, 16) for f in range(8)
]
"""What the bytes 0x00 to 0x7f stand for."""
SCALES = FLOAT8[:-1]
"""Those that writers use: in ascending order, from 0 to 448."""


@cache
def fraction_of_bits(pattern: int, kind: str) -> Fraction | None:
    """The number that a float's bit pattern stands for; None for infinities and NaN."""
    exponent_bits, fraction_bits = FIELDS[kind]
    fraction = pattern % 2**fraction_bits
    field = pattern // 2**fraction_bits % 2**exponent_bits
    negative = pattern // 2 ** (fraction_bits + exponent_bits) % 2
    if field == 2**exponent_bits - 1:
        return None
    significand = fraction if field == 0 else 2**fraction_bits + fraction
    bias = 2 ** (exponent_bits - 1) - 1
    magnitude = significand * POWERS[max(field, 1) - bias - fraction_bits]
    return -magnitude if negative else magnitude


def fraction_of_float(number: float) -> Fraction:
    """A number that float32 holds, exactly."""
    (pattern,) = struct.unpack("<I", struct.pack("<f", number))
    fraction = fraction_of_bits(pattern, "float32")
    assert fraction is not None
    return fraction


def holds(scale: Fraction, group: list[Fraction]) -> bool:
    """Whether `midpoint`'s grid with this scale, which may be negative, reaches all weights."""
    return all(-17 * abs(scale) <= 16 * w * (1 if scale >= 0 else -1) <= 15 * abs(scale) for w in group)


def need(group: list[Fraction], reconstruction: str) -> Fraction:
    """The least scale that holds a group, of any number there is; negative where that is less."""
    if not any(group):
        return Fraction(0)
    if reconstruction == "truncate":
        largest, e = max(abs(w) for w in group), -30  # no scale is smaller
        while not largest < POWERS[e]:
            e += 1
        return POWERS[e]
    above, below = max(max(group), 0), max(-min(group), 0)
    upright = max(above * Fraction(16, 15), below * Fraction(16, 17))
    mirrored = max(below * Fraction(16, 15), above * Fraction(16, 17))
    return -mirrored if mirrored < upright else upright


def scale_exponent(needs: list[Fraction]) -> int:
    """The first one with which the largest need is at most 448."""
    return next(k for k in SCALE_EXPONENTS if max(map(abs, needs), default=0) <= 448 * POWERS[k])


def scale(needed: Fraction, k: int) -> Fraction:
    """The first float8 that is not below the need, with its sign and the power of two."""
    found = SCALES[bisect_left(SCALES, abs(needed) / POWERS[k])] * POWERS[k]
    return -found if needed < 0 else found


def finest_code(w: Fraction, s: Fraction, place: int, reconstruction: str) -> int:
    """The code at 8 mantissa bits of the weight at a place of its group."""
    if reconstruction == "truncate":
        q = abs(w) // (s / 256) if s else 0
        return q if w >= 0 else -q - 1
    q = w / s * 256 if s else Fraction(0)
    assert -272 <= q <= 240
    below = q == q // 1 and bin(place).count("1") % 2 == 1
    return min(max(q // 1 - below + 16, -256), 255)


def shifted(code: int, m: int) -> int:
    """The code at m mantissa bits, of a code at 8."""
    return code // 2 ** (8 - m)


@cache
def value(code: int, s: Fraction, m: int, reconstruction: str) -> Fraction:
    """The value of a code that is at m mantissa bits."""
    step = s / 2**m
    if reconstruction == "truncate":
        return (code + 1 if code < 0 else code) * step
    return (code + Fraction(1, 2)) * step - s / 16


def encoded(groups: list[list[Fraction]], reconstruction: str) -> tuple[int, list[Fraction], list[list[int]]]:
    """Scale exponent, scales and E5M8 codes of a tensor that is these groups."""
    needs = [need(group, reconstruction) for group in groups]
    k = scale_exponent(needs)
    scales = [scale(one, k) for one in needs]
    codes = [
        [finest_code(w, s, place, reconstruction) for place, w in enumerate(group)]
        for group, s in zip(groups, scales, strict=True)
    ]
    return k, scales, codes
