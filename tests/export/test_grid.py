"""A precision as integers times units: every code, every scale byte, every power of two."""

import pytest
import torch

from otaro.export.grid import Grid
from otaro.sefp.codec import MAX_SCALE_EXPONENT, MIN_SCALE_EXPONENT, decode_codes, scale_values

BYTES = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize("bits", range(3, 9))
def test_integers_times_units_are_the_values(bits, reconstruction):
    grid = Grid(bits, reconstruction)
    codes = torch.arange(-(1 << bits), 1 << bits, dtype=torch.int16).expand(256, -1)
    for exponent in range(MIN_SCALE_EXPONENT, MAX_SCALE_EXPONENT + 1):
        scales = scale_values(BYTES, exponent).view(-1, 1)
        wanted = decode_codes(codes, scales, bits, codes.shape[-1], reconstruction)
        assert torch.equal(grid.integers(codes) * grid.units(scales), wanted)


def test_the_integers_are_those_that_the_formats_are_chosen_by():
    found = {bits: Grid(bits, "midpoint") for bits in range(3, 9)}
    assert [(grid.least, grid.most, grid.stride) for grid in found.values()] == [
        (-8, 7, 1), (-33, 29, 2), (-67, 59, 2), (-135, 119, 2), (-271, 239, 2), (-543, 479, 2),
    ]  # fmt: skip
    assert [grid.levels for grid in found.values()] == [16, 32, 64, 128, 256, 512]
    ends = [(Grid(bits, "truncate").least, Grid(bits, "truncate").most) for bits in range(3, 9)]
    assert ends == [(1 - (1 << bits), (1 << bits) - 1) for bits in range(3, 9)]


@pytest.mark.parametrize(
    ("dtype", "reconstruction", "finest"),
    [
        (torch.bfloat16, "midpoint", 3),
        (torch.float16, "midpoint", 6),
        (torch.bfloat16, "truncate", 4),
        (torch.float16, "truncate", 7),
        (torch.float32, "midpoint", 8),
    ],
)
def test_which_types_have_the_digits(dtype, reconstruction, finest):
    assert [bits for bits in range(3, 9) if Grid(bits, reconstruction).fits(dtype, BYTES)] == list(
        range(3, finest + 1)
    )


def test_scales_that_are_powers_of_two_leave_more_digits_to_codes():
    powers = BYTES[(BYTES & 7) == 0]
    assert Grid(8, "truncate").fits(torch.bfloat16, powers)
