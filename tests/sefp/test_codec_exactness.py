"""Which float formats hold the decoded values: the claims at the head of the codec, over every code and exponent there is."""

from __future__ import annotations

import pytest
import torch

from otaro.sefp.codec import decode_codes, encode
from otaro.sefp.precision import PRECISIONS

from . import oracle
from .exact import units, value_in_units

EVERY_GRID = pytest.mark.parametrize(
    ("precision", "reconstruction"), [(p, r) for p in PRECISIONS for r in oracle.RECONSTRUCTIONS], ids=str
)
EXPONENTS = torch.tensor(list(oracle.EXPONENTS), dtype=torch.int8).unsqueeze(-1)


def every_value(precision, reconstruction) -> tuple[list[int], torch.Tensor]:
    """The codes that encoding can give at a precision, and their values [32 exponents, codes]."""
    m = precision.mantissa_bits
    codes = oracle.encodable_codes(m, reconstruction)
    rows = torch.tensor(codes, dtype=torch.int16).expand(len(EXPONENTS), -1)
    return codes, decode_codes(rows, EXPONENTS, m, len(codes), reconstruction)


def lost_by(dtype: torch.dtype, precision, reconstruction) -> set[tuple[int, int]]:
    """The (exponent, code) whose value does not survive `dtype`."""
    codes, values = every_value(precision, reconstruction)
    lost = (values.to(dtype).float() != values).nonzero().tolist()
    return {(oracle.EXPONENTS[row], codes[column]) for row, column in lost}


@pytest.mark.parametrize("reconstruction", oracle.RECONSTRUCTIONS)
@pytest.mark.parametrize("exponent", oracle.EXPONENTS)
def test_encoding_gives_exactly_the_codes_that_count_as_encodable(exponent, reconstruction):
    """Half steps from one end of the range to the other meet every interval."""
    weight = torch.arange(-511, 512) * 2.0 ** (exponent - 9)
    tensor = encode(weight, len(weight), reconstruction)
    assert tensor.exponents.tolist() == [exponent]
    for precision in PRECISIONS:
        got = tensor.codes(precision).unique().tolist()
        assert got == oracle.encodable_codes(precision.mantissa_bits, reconstruction)


@EVERY_GRID
def test_float32_holds_every_value(precision, reconstruction):
    codes, values = every_value(precision, reconstruction)
    m = precision.mantissa_bits
    expected = [[value_in_units(code, e, m, reconstruction) for code in codes] for e in oracle.EXPONENTS]
    assert torch.equal(units(values), torch.tensor(expected).double())


@EVERY_GRID
def test_float16_holds_every_value_but_minus_65536(precision, reconstruction):
    exception = str(precision) == "E5M3" and reconstruction == "midpoint"
    assert lost_by(torch.float16, precision, reconstruction) == ({(16, -8)} if exception else set())
    assert oracle.value(-8, 16, 3, "midpoint") == -65536


@EVERY_GRID
def test_bfloat16_holds_every_value_but_the_outer_half_of_midpoint_at_e5m8(precision, reconstruction):
    """Values there are odd multiples n of step(8)/2. From |n| = 257 on, which is |value| > 2^e / 2, n has 9 bits."""
    exceptions = set()
    if str(precision) == "E5M8" and reconstruction == "midpoint":
        codes = oracle.encodable_codes(8, "midpoint")
        exceptions = {(e, code) for e in oracle.EXPONENTS for code in codes if abs(2 * code - 31) > 256}
        assert all(abs(oracle.value(code, e, 8, "midpoint")) > oracle.POWERS[e] / 2 for e, code in exceptions)
    assert lost_by(torch.bfloat16, precision, reconstruction) == exceptions
