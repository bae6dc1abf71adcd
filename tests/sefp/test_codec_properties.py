"""What holds for any group of weights, proved on exact fractions; where a tempting property fails, the case that breaks it."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations_with_replacement, pairwise

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from otaro.errors import WeightError
from otaro.sefp.codec import encode, finest_codes
from otaro.sefp.precision import PRECISIONS, Precision

from . import oracle
from .exact import fractions

RECONSTRUCTIONS = pytest.mark.parametrize("reconstruction", oracle.RECONSTRUCTIONS)
AT_EVERY_PRECISION = pytest.mark.parametrize("precision", PRECISIONS, ids=str)
BELOW_2_16 = 65535.99609375  # the largest float32 there

anywhere = st.lists(st.floats(-BELOW_2_16, BELOW_2_16, width=32), min_size=1, max_size=16)
on_one_grid = st.integers(-15, 16).flatmap(  # quarters of step(8): whatever is special at a border between codes occurs
    lambda e: st.lists(st.integers(-1023, 1023).map(lambda n: n * 2.0 ** (e - 10)), min_size=1, max_size=16)
)
groups = (anywhere | on_one_grid).map(torch.tensor)
properties = settings(deadline=None, max_examples=60, derandomize=True)


def scale(tensor) -> Fraction:
    """2^e of a tensor that is one group."""
    return Fraction(2) ** int(tensor.exponents)


def errors(weight: torch.Tensor, values: torch.Tensor) -> list[Fraction]:
    return [abs(w - v) for w, v in zip(fractions(weight), fractions(values), strict=True)]


def is_clamped(w: Fraction, top: Fraction) -> bool:
    return w >= top * 15 / 16


@RECONSTRUCTIONS
@properties
@given(weight=groups)
def test_shifting_twice_is_shifting_once(reconstruction, weight):
    tensor = encode(weight, reconstruction=reconstruction)
    for first, second in combinations_with_replacement(PRECISIONS, 2):
        further = tensor.codes(first) >> (first.mantissa_bits - second.mantissa_bits)
        assert torch.equal(further, tensor.codes(second)), f"E5M8 -> {first} -> {second}"
        assert torch.equal(further, tensor.finest_codes >> (8 - second.mantissa_bits)), f"E5M8 -> {second}"


@AT_EVERY_PRECISION
@properties
@given(weight=groups)
def test_truncated_values_encode_to_themselves(precision, weight):
    """Exponents, values and codes come back; only the code -1, a negative weight cut to zero, comes back as zero's code."""
    first = encode(weight, reconstruction="truncate")
    again = encode(first.decode(precision), reconstruction="truncate")
    assert torch.equal(again.exponents, first.exponents)
    assert torch.equal(again.decode(precision), first.decode(precision))
    codes = first.codes(precision)
    assert torch.equal(again.codes(precision), torch.where(codes == -1, 0, codes))


@pytest.mark.parametrize("exponent", [-15, -1, 0, 9, 16])
@AT_EVERY_PRECISION
def test_midpoint_values_have_their_own_codes_on_the_same_exponents(precision, exponent):
    """Exactly, for every code that encoding gives, the clamped one and E5M3's -8 (the value -2^e) included."""
    m = precision.mantissa_bits
    codes = oracle.encodable_codes(m, "midpoint")
    values = torch.tensor([float(oracle.value(code, exponent, m, "midpoint")) for code in codes])
    exponents = torch.tensor([[exponent]], dtype=torch.int8)
    again = finest_codes(values.unsqueeze(0), exponents, len(codes), "midpoint") >> (8 - m)
    assert again[0].tolist() == codes


@AT_EVERY_PRECISION
@properties
@given(weight=groups)
@example(weight=torch.tensor([-0.5, 0.49]))  # falls
@example(weight=torch.tensor([-0.5, 0.5]))
@example(weight=torch.tensor([-0.95, 0.5]))  # rises
@example(weight=torch.tensor([-15 / 16]))
@example(weight=torch.tensor([-65500.0]))  # rises out of the range
@example(weight=torch.tensor([-(2.0**-16)]))  # could not fall further
def test_midpoint_values_encode_to_themselves_but_for_two_cases(precision, weight):
    """The cases: at E5M3 a weight below -15/16 * 2^e becomes -2^e and raises the exponent; at the others -2^(e-1), where it
    alone reaches the upper half of the range, moves half a step toward zero and lets the exponent fall."""
    first = encode(weight)
    values, top = first.decode(precision), scale(first)
    numbers = fractions(weight)
    rises = precision == Precision("E5M3") and any(w < -top * 15 / 16 for w in numbers)
    reaching = [w for w in numbers if abs(w) >= top / 2]
    falls = precision > Precision("E5M3") and int(first.exponents) > -15 and all(w == -top / 2 for w in reaching)
    if rises and top == 2**16:
        with pytest.raises(WeightError, match=r"is -65536"):
            encode(values)
        return
    again = encode(values)
    assert int(again.exponents) - int(first.exponents) == rises - falls
    if not rises and not falls:
        assert torch.equal(again.codes(precision), first.codes(precision))
        assert torch.equal(again.decode(precision), values)


@properties
@given(groups)
def test_truncation_error_never_grows_with_a_mantissa_bit(weight):
    tensor = encode(weight, reconstruction="truncate")
    by_precision = [errors(weight, tensor.decode(p)) for p in PRECISIONS]  # finest first
    for finer, coarser in pairwise(by_precision):
        assert all(f <= c for f, c in zip(finer, coarser, strict=True))


def test_midpoint_error_of_a_single_weight_may_grow_with_a_mantissa_bit():
    """Only the bound halves with every bit: zero is on the grid of E5M3, and half a step off all finer ones."""
    tensor = encode(torch.tensor([0.5, 0.0]))
    assert tensor.exponents.tolist() == [0]
    assert [float(tensor.decode(p)[1]) for p in PRECISIONS] == [2.0**-9, 2.0**-8, 2.0**-7, 2.0**-6, 2.0**-5, 0.0]


@AT_EVERY_PRECISION
@properties
@given(weight=groups)
def test_truncation_is_off_by_less_than_one_step_toward_zero(precision, weight):
    tensor = encode(weight, reconstruction="truncate")
    step = scale(tensor) / 2**precision.mantissa_bits
    for w, v in zip(fractions(weight), fractions(tensor.decode(precision)), strict=True):
        assert abs(v) <= abs(w)
        assert v * w >= 0
        assert abs(w - v) < step


@AT_EVERY_PRECISION
@properties
@given(weight=groups)
def test_midpoint_is_off_by_at_most_half_a_step_below_the_clamp(precision, weight):
    tensor = encode(weight)
    top = scale(tensor)
    step = top / 2**precision.mantissa_bits
    for w, error in zip(fractions(weight), errors(weight, tensor.decode(precision)), strict=True):
        assert is_clamped(w, top) or error <= step / 2


@AT_EVERY_PRECISION
@pytest.mark.parametrize("exponent", [-15, 0, 16])
@properties
@given(high=st.lists(st.integers(15 * 2**20, 2**24 - 1), min_size=1, max_size=8))
def test_clamped_midpoint_is_off_by_less_than_half_a_step_and_half_a_coarsest_step(precision, exponent, high):
    """For 15/16 * 2^e <= w < 2^e every precision gives its top value, 15/16 * 2^e - step(m)/2. So the error is at least
    step(m)/2 and below (step(3) + step(m))/2; it stays above step(3)/2 near 2^e however many bits there are."""
    weight = torch.tensor(high).float() * 2.0 ** (exponent - 24)
    tensor = encode(weight)
    top, m = scale(tensor), precision.mantissa_bits
    assert top == Fraction(2) ** exponent
    assert (tensor.finest_codes == 255).all()
    step, coarsest = top / 2**m, top / 8
    for w, v in zip(fractions(weight), fractions(tensor.decode(precision)), strict=True):
        assert v == top * 15 / 16 - step / 2
        assert step / 2 <= w - v < (coarsest + step) / 2


@AT_EVERY_PRECISION
def test_both_ends_of_the_clamped_error_are_reached(precision):
    """15/16 * 2^e is clamped already, at the price of nothing; the last float below 2^e pays the supremum less one ulp."""
    step = Fraction(1, 2**precision.mantissa_bits)
    weight = torch.tensor([15 / 16, 1 - 2.0**-24])
    tensor = encode(weight)
    assert tensor.codes("E5M8").tolist() == [255, 255]
    assert errors(weight, tensor.decode(precision)) == [step / 2, (Fraction(1, 8) + step) / 2 - Fraction(1, 2**24)]


@properties
@given(groups)
def test_midpoint_codes_go_from_minus_240_to_255_which_begins_at_239_of_256(weight):
    tensor = encode(weight)
    top = scale(tensor)
    for w, code in zip(fractions(weight), tensor.finest_codes.tolist(), strict=True):
        assert (code == 255) == (w >= top * 239 / 256)
        assert code >= -240  # the design's lower clamp never acts


@properties
@given(groups)
def test_midpoint_at_e5m3_is_rounding_to_the_nearest_step_below_the_clamp(weight):
    """Halves go up."""
    tensor = encode(weight)
    top = scale(tensor)
    for w, v in zip(fractions(weight), fractions(tensor.decode("E5M3")), strict=True):
        nearest = (w / (top / 8) + Fraction(1, 2)) // 1 * (top / 8)
        assert v == (top * 7 / 8 if is_clamped(w, top) else nearest)


@AT_EVERY_PRECISION
@properties
@given(weight=groups)
def test_truncation_is_odd(precision, weight):
    """Values change sign with the weight; codes of other weights than zero are complemented."""
    there, back = encode(weight, reconstruction="truncate"), encode(-weight, reconstruction="truncate")
    assert torch.equal(back.exponents, there.exponents)
    assert torch.equal(back.decode(precision), -there.decode(precision))
    codes = there.codes(precision)
    assert torch.equal(back.codes(precision), torch.where(weight == 0, codes, ~codes))


@AT_EVERY_PRECISION
@properties
@given(weight=groups)
def test_midpoint_is_odd_except_on_borders_and_beyond_the_clamp(precision, weight):
    """On the border between two codes both signs take the code above, so that the two values sum up to one step."""
    there, back = encode(weight), encode(-weight)
    top, m = scale(there), precision.mantissa_bits
    step = top / 2**m
    for w, v, u in zip(*map(fractions, (weight, there.decode(precision), back.decode(precision))), strict=True):
        if abs(w) < top * 15 / 16:
            on_border = (w + top / 16) % step == 0
            assert v + u == (step if on_border else 0)


@RECONSTRUCTIONS
@AT_EVERY_PRECISION
@properties
@given(weight=groups)
def test_a_larger_weight_never_has_a_smaller_value(precision, reconstruction, weight):
    weight = weight.sort().values
    values = encode(weight, reconstruction=reconstruction).decode(precision)
    assert (values[1:] >= values[:-1]).all()


@RECONSTRUCTIONS
@properties
@given(weight=groups, exponent=st.integers(-15, 15))
def test_scaling_a_group_by_a_power_of_two_scales_its_values_alone(reconstruction, weight, exponent):
    """As long as the exponent is in its range and the float holds the scaled weight, codes do not depend on it."""
    first = encode(weight, reconstruction=reconstruction)
    by = 2.0 ** (exponent - int(first.exponents))
    scaled = weight * by
    assume(torch.equal(scaled / by, weight) and bool(weight.any()))
    assume(int(first.exponents) > -15 and exponent > -15)
    second = encode(scaled, reconstruction=reconstruction)
    assert second.exponents.tolist() == [exponent]
    assert torch.equal(second.finest_codes, first.finest_codes)
    assert torch.equal(second.decode("E5M4"), first.decode("E5M4") * by)
