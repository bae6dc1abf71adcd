"""Cases for driver.cpp: packed weights, activations, and what the reference makes of them, in one file.

    python -m tests.kernels.cases FILE [--few]

A case is eight int64 (number, rows, length, group size, mantissa bits, truncate, scale exponent, tokens),
then base, planes and scales, activations [tokens, length] in float32, the bits of every token as int32; then
what is expected: the activations' integers in int16, their scales in float32, the integers of units in int32
[tokens, rows, units], products [tokens, rows] and values [rows, length] in float32. Where tokens have
different bits, products are those of each at its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from otaro.kernels import reference
from otaro.sefp.codec import MAX_SCALE_EXPONENT, MIN_SCALE_EXPONENT

from .packed import GRIDS, Packed, make_activations, make_packed
from .test_backends import EXTREME_ACTIVATIONS, EXTREME_CODES, MIXES, ONE, SHAPES

FEW_SHAPES = [(3, 33, 64), (2, 96, 32), (9, 192, 64), (5, 576, 64), (2, 1000, 96)]
Case = tuple[Packed, torch.Tensor, Sequence[int]]


def cases(few: bool) -> Iterator[Case]:
    for shape in FEW_SHAPES if few else SHAPES:
        tokens = 8 if shape[1] < 4000 else 3
        for bits, truncate in GRIDS:
            yield (
                make_packed(*shape, seed=sum(shape)).at(bits, truncate),
                make_activations(tokens, shape[1]),
                [bits] * tokens,
            )
    yield from many_tokens(few)
    for mix in MIXES[-5:-4] if few else MIXES:
        for shape in [(19, 600, 64)] if few else [(19, 600, 64), (5, 100, 32), (17, 384, 128)]:
            for truncate in (False, True):
                yield (
                    make_packed(*shape, truncate=truncate),
                    make_activations(len(mix), shape[1], seed=len(mix)),
                    mix,
                )
    if few:
        return
    yield from every_scale_byte()
    yield from the_ends_of_the_range()
    yield from what_is_not_finite()


def many_tokens(few: bool) -> Iterator[Case]:
    for shape, tokens in (
        [((19, 320, 64), 17)] if few else [((19, 960, 64), 67), ((40, 600, 128), 16), ((5, 1000, 96), 15)]
    ):
        for bits, truncate in GRIDS:
            yield (
                make_packed(*shape, seed=tokens).at(bits, truncate),
                make_activations(tokens, shape[1]),
                [bits] * tokens,
            )


def every_scale_byte() -> Iterator[Case]:
    for shape in [(256, 60, 64), (10, 1728, 64), (32, 256, 32), (64, 500, 128)]:
        for scale_exponent in (MIN_SCALE_EXPONENT, MAX_SCALE_EXPONENT):
            whole = make_packed(*shape, scale_exponent=scale_exponent)
            every = torch.arange(256, dtype=torch.uint8).repeat(2)[: whole.scales.numel()]
            whole.scales.copy_(every.view_as(whole.scales))
            x = make_activations(3, shape[1])
            x[1], x[2] = 2.0**-95, x[2] * 2.0**-70
            for bits, truncate in GRIDS:
                yield whole.at(bits, truncate), x, [bits] * 3


def the_ends_of_the_range() -> Iterator[Case]:
    for base, plane in EXTREME_CODES.values():
        for integers in EXTREME_ACTIVATIONS.values():
            x = torch.tensor(integers).repeat(192)[:192].float() * 2.0**-15
            for bits, truncate in GRIDS:
                packed = make_packed(5, 192, 64, bits, truncate)
                packed.base.fill_(base), packed.scales.fill_(ONE)
                for one in packed.planes:
                    one.fill_(plane)
                yield packed, torch.stack((x, -x, x.flip(0))), [bits] * 3


def what_is_not_finite() -> Iterator[Case]:
    largest = torch.finfo(torch.float32).max
    edges = torch.zeros(8, 200)
    edges[1, 3], edges[1, 64] = 32639.5, 32639.498046875
    edges[2, 0], edges[2, 70] = largest, -largest
    edges[3, :50], edges[3, 100:] = 1e-45, 2.0**-95
    edges[4, 0], edges[4, 1:64] = 1.0, torch.arange(-31, 32) * 2.0**-15
    edges[5, 0], edges[5, 80], edges[5, 199] = torch.nan, torch.inf, -torch.inf
    edges[6], edges[7, ::2] = -0.0, 2.0**-81
    for group_size in (32, 64, 96, 128, 256):
        for bits, truncate in GRIDS:
            yield (
                make_packed(3, 200, group_size, bits, truncate, scale_exponent=MAX_SCALE_EXPONENT),
                edges,
                [bits] * 8,
            )


def write(to: BinaryIO, number: int, packed: Packed, x: torch.Tensor, bits: Sequence[int]) -> None:
    codes, scales = reference.quantize(x, packed.group_size)
    products = torch.stack(
        [
            reference.linear(one[None], packed.at(own, packed.truncate))[0]
            for one, own in zip(x, bits, strict=True)
        ]
        if any(own != packed.bits for own in bits)
        else list(reference.linear(x, packed))
    )
    head = (
        number,
        len(packed.base),
        packed.length,
        packed.group_size,
        packed.bits,
        packed.truncate,
        packed.scale_exponent,
    )
    for part in (
        torch.tensor([*map(int, head), len(x)], dtype=torch.int64),
        packed.base,
        *packed.planes,
        packed.scales,
        x,
        torch.tensor(bits, dtype=torch.int32),
        codes,
        scales,
        reference.dots(codes, packed).to(torch.int32),
        products,
        reference.decode(packed),
    ):
        to.write(part.contiguous().numpy().tobytes())


def write_all(path: Path, few: bool) -> int:
    number = 0
    with path.open("wb") as to:
        for number, case in enumerate(cases(few), 1):
            write(to, number, *case)
    return number


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"{write_all(Path(sys.argv[1]), '--few' in sys.argv)} cases")
