"""What holds for any group of weights, proved on exact fractions; cases that break tempting properties."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations_with_replacement, pairwise

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from otaro.sefp.codec import encode, finest_codes, scale_values
from otaro.sefp.precision import PRECISIONS, Precision

from . import oracle
from .exact import fractions

RECONSTRUCTIONS = pytest.mark.parametrize("reconstruction", oracle.RECONSTRUCTIONS)
AT_EVERY_PRECISION = pytest.mark.parametrize("precision", PRECISIONS, ids=str)
BELOW_2_15 = 32767.998046875  # the largest float32 there

anywhere = st.lists(st.floats(-BELOW_2_15, BELOW_2_15, width=32), min_size=1, max_size=16)
on_one_grid = st.tuples(st.integers(-15, 15), st.sampled_from((8, 9, 11, 13, 15))).flatmap(
    # quarters of step(8) of a scale: whatever is special at a border between codes occurs
    lambda es: st.lists(
        st.integers(-1023, 1023).map(lambda n: n * es[1] / 16 * 2.0 ** (es[0] - 10)), min_size=1, max_size=16
    )
)
groups = (anywhere | on_one_grid).map(torch.tensor)
properties = settings(deadline=None, max_examples=60, derandomize=True)


def scale_of(tensor) -> Fraction:
    """Of a tensor that is one group."""
    return fractions(tensor.scales)[0]


@RECONSTRUCTIONS
@properties
@given(weight=groups)
def test_shifting_twice_is_shifting_once(reconstruction, weight):
    tensor = encode(weight, reconstruction=reconstruction)
    for first, second in combinations_with_replacement(PRECISIONS, 2):
        further = tensor.codes(first) >> (first.mantissa_bits - second.mantissa_bits)
        assert torch.equal(further, tensor.codes(second)), f"E5M8 -> {first} -> {second}"
        assert torch.equal(further, tensor.finest_codes >> (8 - second.mantissa_bits)), f"E5M8 -> {second}"


@properties
@given(weight=groups)
@example(weight=torch.tensor([17 / 16, -15 / 16]))
@example(weight=torch.tensor([1.0, -1.0]))
def test_the_scale_holds_the_group_and_no_smaller_one_of_either_sign_does(weight):
    tensor, numbers = encode(weight), fractions(weight)
    s, unit = scale_of(tensor), oracle.POWERS[tensor.scale_exponent]
    assert oracle.holds(s, numbers)
    if any(numbers) and abs(s) > oracle.SCALES[1] * unit:
        smaller = oracle.SCALES[oracle.SCALES.index(abs(s) / unit) - 1] * unit
        assert not oracle.holds(smaller, numbers)
        assert not oracle.holds(-smaller, numbers)


@AT_EVERY_PRECISION
@properties
@given(weight=groups)
@example(weight=torch.tensor([-17 / 16, 15 / 16]))  # both ends of the grid
def test_midpoint_is_off_by_at_most_half_a_step(precision, weight):
    """Nothing clips."""
    tensor = encode(weight)
    half = abs(scale_of(tensor)) / 2**precision.mantissa_bits / 2
    for w, v in zip(fractions(weight), fractions(tensor.decode(precision)), strict=True):
        assert abs(w - v) <= half


@AT_EVERY_PRECISION
@properties
@given(weight=groups)
def test_truncated_values_encode_to_themselves(precision, weight):
    """Scales, unless all was cut to zero, values and codes; only -1, a negative cut to zero, becomes 0."""
    first = encode(weight, reconstruction="truncate")
    values = first.decode(precision)
    again = encode(values, reconstruction="truncate")
    assert torch.equal(again.decode(precision), values)
    codes = first.codes(precision)
    assert torch.equal(again.codes(precision), torch.where(codes == -1, 0, codes))
    if values.any():
        assert torch.equal(again.scales, first.scales)


@pytest.mark.parametrize("byte", [0x01, 0x07, 0x08, 0x35, 0x7E, 0xB9])
@AT_EVERY_PRECISION
def test_midpoint_values_have_their_own_codes_on_the_same_scales(precision, byte):
    """Exactly, for every code there is, E5M3's -8 (the value -s) included."""
    m = precision.mantissa_bits
    codes = range(-(2**m), 2**m)
    scales = scale_values(torch.tensor([[byte]], dtype=torch.uint8), 0)
    s = fractions(scales)[0]
    values = torch.tensor([float(oracle.value(code, s, m, "midpoint")) for code in codes])
    assert (finest_codes(values.unsqueeze(0), scales, len(codes), "midpoint") >> (8 - m))[0].tolist() == list(
        codes
    )


@AT_EVERY_PRECISION
@properties
@given(weight=groups)
@example(weight=torch.tensor([-17 / 16, 15 / 16, 0.0, -1 / 16, 1 / 32, 5 / 256, -7 / 8]))
def test_midpoint_values_are_encoded_as_the_weights_were(precision, weight):
    """On the same scales; a group of values may need a smaller one."""
    first = encode(weight)
    again = finest_codes(first.decode(precision).unsqueeze(0), first.scales.unsqueeze(0), 64, "midpoint")[0]
    assert torch.equal(again >> (8 - precision.mantissa_bits), first.codes(precision))


@properties
@given(groups)
def test_truncation_error_never_grows_with_a_mantissa_bit(weight):
    tensor = encode(weight, reconstruction="truncate")
    exact = fractions(weight)
    by_precision = [
        [abs(w - v) for w, v in zip(exact, fractions(tensor.decode(p)), strict=True)] for p in PRECISIONS
    ]  # finest first
    for finer, coarser in pairwise(by_precision):
        assert all(f <= c for f, c in zip(finer, coarser, strict=True))


def test_midpoint_error_of_a_single_weight_may_grow_with_a_mantissa_bit():
    """Only the bound halves with every bit: zero is on the grid of E5M3, half a step off all finer ones."""
    tensor = encode(torch.tensor([0.0, -1.0]))
    assert tensor.scales.tolist() == [1.0]
    assert [float(tensor.decode(p)[0]) for p in PRECISIONS] == [
        2.0**-9,
        2.0**-8,
        2.0**-7,
        2.0**-6,
        2.0**-5,
        0.0,
    ]


@AT_EVERY_PRECISION
@properties
@given(weight=groups)
def test_truncation_is_off_by_less_than_one_step_toward_zero(precision, weight):
    tensor = encode(weight, reconstruction="truncate")
    step = scale_of(tensor) / 2**precision.mantissa_bits
    for w, v in zip(fractions(weight), fractions(tensor.decode(precision)), strict=True):
        assert abs(v) <= abs(w)
        assert v * w >= 0
        assert abs(w - v) < step or w == v


@properties
@given(groups)
def test_midpoint_at_e5m3_is_rounding_to_the_nearest_multiple_of_an_eighth_of_the_scale(weight):
    """Symmetric int4 as others have it: codes from -8 to 7 times s/8. Halves go either way."""
    tensor = encode(weight)
    s = scale_of(tensor)
    for w, code, v in zip(
        fractions(weight), tensor.codes("E5M3").tolist(), fractions(tensor.decode("E5M3")), strict=True
    ):
        assert v == code * s / 8
        assert -8 <= code <= 7
        assert abs(w - v) <= abs(s) / 16


@AT_EVERY_PRECISION
@properties
@given(weight=groups)
def test_truncation_is_odd(precision, weight):
    """Values change sign with the weight; codes of other weights than zero are complemented."""
    there, back = encode(weight, reconstruction="truncate"), encode(-weight, reconstruction="truncate")
    assert torch.equal(back.scales, there.scales)
    assert torch.equal(back.decode(precision), -there.decode(precision))
    codes = there.codes(precision)
    assert torch.equal(back.codes(precision), torch.where(weight == 0, codes, ~codes))


@properties
@given(groups)
def test_a_mirrored_group_has_the_mirrored_scale_and_the_same_codes_unless_both_signs_do(weight):
    there, back = encode(weight), encode(-weight)
    numbers = fractions(weight)
    tie = oracle.need(numbers, "midpoint") == oracle.need([-w for w in numbers], "midpoint")
    assert scale_of(back) == (scale_of(there) if tie else -scale_of(there))
    if not tie:
        assert torch.equal(back.finest_codes, there.finest_codes)


@RECONSTRUCTIONS
@AT_EVERY_PRECISION
@properties
@given(weight=groups)
def test_a_larger_weight_never_has_a_smaller_value(precision, reconstruction, weight):
    """Equal ones have the same, but on borders."""
    weight = weight.sort().values
    tensor = encode(weight, reconstruction=reconstruction)
    values, step = tensor.decode(precision), float(tensor.scales) / 2**precision.mantissa_bits
    larger = weight[1:] > weight[:-1]
    assert (values[1:] >= values[:-1])[larger].all()
    off_borders = values != weight - step / 2
    equal = (weight[1:] == weight[:-1]) & off_borders[1:] & off_borders[:-1]
    assert (values[1:] == values[:-1])[equal].all()


@RECONSTRUCTIONS
@properties
@given(weight=groups, power=st.integers(-18, 14))
def test_scaling_a_group_by_a_power_of_two_scales_its_values_alone(reconstruction, weight, power):
    """As long as its scale has all fraction bits, codes do not depend on it."""
    first = encode(weight, reconstruction=reconstruction)
    assume(bool(weight.any()) and abs(scale_of(first)) >= oracle.POWERS[-19])
    by = 2.0 ** (power - int(torch.frexp(weight.abs().max()).exponent))
    scaled = weight * by
    assume(torch.equal(scaled / by, weight))
    second = encode(scaled, reconstruction=reconstruction)
    assert torch.equal(second.scales, first.scales * by)
    assert torch.equal(second.finest_codes, first.finest_codes)
    assert torch.equal(second.decode("E5M4"), first.decode("E5M4") * by)


def test_four_bits_and_an_eighth_hold_a_coarsest_weight():
    assert Precision("E5M3").bits_per_weight() == 4.125
