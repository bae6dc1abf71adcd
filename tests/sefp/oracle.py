"""SEFP in exact arithmetic: what the design says, sentence by sentence, with integers and fractions and nothing else.

It shares no line and no trick with the codec: exponents are found by counting up, shifts are floor divisions, floats are
taken apart bit by bit. Slow, and easy to check by reading.
"""

from __future__ import annotations

import struct
from fractions import Fraction
from functools import cache

RECONSTRUCTIONS = ("midpoint", "truncate")
MANTISSA_BITS = (8, 7, 6, 5, 4, 3)
EXPONENTS = range(-15, 17)

FIELDS = {"float16": (5, 10), "bfloat16": (8, 7), "float32": (8, 23)}
"""Exponent bits and fraction bits of a float."""

POWERS = {e: Fraction(2) ** e for e in range(-200, 130)}


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


def shared_exponent(group: list[Fraction]) -> int:
    """The smallest integer e with a < 2^e, a being the largest magnitude, but at least -15."""
    largest = max(abs(w) for w in group)
    e = -15
    while not largest < POWERS[e]:
        e += 1
    return e


def step(e: int, m: int) -> Fraction:
    """The spacing at m mantissa bits."""
    return POWERS[e - m]


def finest_code(w: Fraction, e: int, reconstruction: str) -> int:
    """The code at 8 mantissa bits."""
    if reconstruction == "truncate":
        q = abs(w) // step(e, 8)
        return q if w >= 0 else -q - 1
    return max(-256, min(255, (w + step(e, 3) / 2) // step(e, 8)))


def shifted(code: int, m: int) -> int:
    """The code at m mantissa bits, of a code at 8."""
    return code // 2 ** (8 - m)


@cache
def value(code: int, e: int, m: int, reconstruction: str) -> Fraction:
    """The value of a code that is at m mantissa bits."""
    if reconstruction == "truncate":
        return (code + 1 if code < 0 else code) * step(e, m)
    return (code + Fraction(1, 2)) * step(e, m) - step(e, 3) / 2


def encodable_codes(m: int, reconstruction: str) -> list[int]:
    """The codes at m bits that encoding can give: |w| < 2^e leaves `midpoint` none below -240 at 8 bits."""
    lowest = -240 if reconstruction == "midpoint" else -256
    return sorted({shifted(code, m) for code in range(lowest, 256)})
