"""The claims of exactness at the head of the codec, over every code and every scale there is."""

from __future__ import annotations

import pytest
import torch

from otaro.sefp.codec import decode_codes, finest_codes, scale_values
from otaro.sefp.precision import PRECISIONS

from . import oracle
from .exact import fractions

RECONSTRUCTIONS = pytest.mark.parametrize("reconstruction", oracle.RECONSTRUCTIONS)
EVERY_BYTE = torch.arange(256).to(torch.uint8)
EXTREME_EXPONENTS = pytest.mark.parametrize(
    "scale_exponent", [min(oracle.SCALE_EXPONENTS), 0, max(oracle.SCALE_EXPONENTS)]
)


@pytest.mark.parametrize("scale_exponent", oracle.SCALE_EXPONENTS)
def test_every_byte_is_the_number_that_the_oracle_says(scale_exponent):
    values = fractions(scale_values(EVERY_BYTE, scale_exponent))
    expected = [number * oracle.POWERS[scale_exponent] for number in oracle.FLOAT8]
    assert values == [*expected, *(-number for number in expected)]


def test_bytes_are_those_of_torchs_float8_but_for_its_two_nans():
    theirs = EVERY_BYTE.view(torch.float8_e4m3fn).float()
    assert EVERY_BYTE[theirs.isnan()].tolist() == [0x7F, 0xFF]
    assert torch.equal(scale_values(EVERY_BYTE, 0)[~theirs.isnan()], theirs[~theirs.isnan()])


@RECONSTRUCTIONS
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@EXTREME_EXPONENTS
def test_float32_holds_the_value_of_every_code_at_every_scale(precision, reconstruction, scale_exponent):
    """In units of step/2 and of the smallest scale values are whole numbers below 2^28, which float64
    multiplies exactly.
    """
    m = precision.mantissa_bits
    codes = torch.arange(-(2**m), 2**m, dtype=torch.int16).expand(256, -1)
    values = decode_codes(
        codes, scale_values(EVERY_BYTE, scale_exponent).unsqueeze(-1), m, codes.shape[1], reconstruction
    )
    halves = (
        2 * (codes.double() + (codes < 0))
        if reconstruction == "truncate"
        else 2 * codes.double() + 1 - 2.0 ** (m - 3)
    )
    smallest = torch.tensor([float(512 * number) for number in oracle.FLOAT8], dtype=torch.float64)
    expected = halves * torch.cat([smallest, -smallest]).unsqueeze(-1)
    assert expected.abs().max() < 2**28
    assert torch.equal(values.double() * 2.0 ** (m + 1 + 9 - scale_exponent), expected)
    for byte in (0x01, 0x3A, 0x7E, 0x7F, 0xB5):  # and these sums are the oracle's
        s = fractions(scale_values(EVERY_BYTE[byte : byte + 1], scale_exponent))[0]
        assert fractions(values[byte]) == [
            oracle.value(code, s, m, reconstruction) for code in codes[0].tolist()
        ]


@RECONSTRUCTIONS
@EXTREME_EXPONENTS
def test_floors_are_right_on_every_border_and_beside_it(reconstruction, scale_exponent):
    """Weights on each border between two codes at every scale, and the nearest float32 on both sides."""
    scales = scale_values(EVERY_BYTE[1:0x7F], scale_exponent)
    if reconstruction == "midpoint":
        scales = torch.cat([scales, -scales])
        borders = torch.arange(-272, 240)
    else:
        scales = scales[torch.frexp(scales).mantissa == 0.5]
        borders = torch.arange(-255, 256)
    border = (borders * scales.unsqueeze(-1) / 256).unsqueeze(-1)
    assert torch.equal(border.squeeze(-1).double() * 256, borders * scales.double().unsqueeze(-1)), (
        "borders are float32s"
    )
    up, down = (
        torch.nextafter(border, torch.full_like(border, toward)) for toward in (torch.inf, -torch.inf)
    )
    weight = torch.cat([border, up, down], -1)
    steps = weight.double() / scales.double().view(-1, 1, 1) * 256
    # what is off the grid
    weight = weight.where((steps >= borders[0]) & (steps < borders[-1] + 1), 0.0).flatten(1)
    codes = finest_codes(weight, scales.unsqueeze(-1), weight.shape[1], reconstruction)
    for row in range(0, len(scales), 7 if len(scales) > 100 else 1):
        s = fractions(scales[row : row + 1])[0]
        expected = [
            oracle.finest_code(w, s, place, reconstruction) for place, w in enumerate(fractions(weight[row]))
        ]
        assert codes[row].tolist() == expected
