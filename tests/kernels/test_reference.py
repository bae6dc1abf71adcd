"""The reference, judged by exact arithmetic: fractions, integers, and one numpy.float32 at a time."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from otaro.file.planes import pack_codes
from otaro.kernels import reference
from otaro.sefp.codec import encode
from otaro.sefp.precision import PRECISIONS

from .packed import GRIDS, Packed, make_activations, make_packed, reference_linear

SHAPES = [(2, 1, 64), (2, 31, 32), (1, 33, 32), (2, 65, 64), (2, 100, 96), (1, 130, 128), (3, 200, 64)]


def unit_of(group_size: int) -> int:
    return 64 if group_size % 64 == 0 else 32


def quantized_unit(unit: list[float]) -> tuple[list[int], Fraction | None]:
    """Activations as integers and their power of two, sentence by sentence of the reference's step 2."""
    if not all(math.isfinite(x) for x in unit):
        return [0] * len(unit), None
    exact = [Fraction(x) for x in unit]
    e = -80
    while not all(abs(x) < Fraction(2) ** e for x in exact):
        e += 1
    codes = [round(x / Fraction(2) ** (e - 15)) for x in exact]  # Python rounds ties to even
    if any(abs(code) > 32639 for code in codes):
        e += 1
        codes = [round(x / Fraction(2) ** (e - 15)) for x in exact]
    return codes, Fraction(2) ** (e - 15)


def check_quantized(x: torch.Tensor, group_size: int = 64) -> None:
    codes, scales = reference.quantize(x, group_size)
    unit = unit_of(group_size)
    assert codes.dtype == torch.int16
    assert codes.shape == x.shape
    assert scales.shape == (len(x), -(-x.shape[1] // unit))
    for row, its_codes, its_scales in zip(x.tolist(), codes.tolist(), scales.tolist(), strict=True):
        for number, scale in enumerate(its_scales):
            some = slice(number * unit, (number + 1) * unit)
            expected, power = quantized_unit(row[some])
            assert its_codes[some] == expected
            assert math.isnan(scale) if power is None else Fraction(scale) == power


def stored_codes(packed: Packed, row: int) -> list[int]:
    """A row's codes, read bit by bit as FORMAT.md says."""
    codes = []
    for k in range(packed.length):
        block, i = divmod(k, 32)
        w, rest = divmod(i, 8)
        nibble, b = divmod(rest, 4)
        u = int(packed.base[row, 16 * block + 4 * w + b]) // 16**nibble % 16
        for plane in packed.planes:
            u = 2 * u + int(plane[row, 4 * block + i % 4]) // 2 ** (i // 4) % 2
        codes.append(u - 2**packed.bits)
    return codes


def weight_in_half_steps(code: int, bits: int, truncate: bool) -> int:
    """The value of a code in units of step(m)/2: the codec's two formulas, doubled."""
    return 2 * (code + 1 if code < 0 else code) if truncate else 2 * code + 1 - 2 ** (bits - 3)


def scale_of(packed: Packed, row: int, group: int) -> Fraction:
    """The scale of a group, by the words of the codec."""
    byte = int(packed.scales[row, group])
    sign, e, f = byte >> 7, byte >> 3 & 15, byte & 7
    size = (1 + Fraction(f, 8)) * Fraction(2) ** (e - 7) if e else f * Fraction(2) ** -9
    return (-1) ** sign * size * Fraction(2) ** packed.scale_exponent


# Activations as integers


@pytest.mark.parametrize("group_size", [32, 64, 96, 128])
@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 200])
def test_activations_of_any_length_become_the_integers_that_fractions_give(length, group_size):
    check_quantized(make_activations(3, length), group_size)


def test_ties_go_to_the_even_integer():
    """1.0 makes the grid 2^-14, so that odd multiples of 2^-15 lie in the middle."""
    halves = torch.arange(-63, 64, 2) * 2.0**-15
    x = torch.cat((torch.ones(1), halves[:63])).unsqueeze(0)
    codes, _ = reference.quantize(x, 64)
    assert codes[0, 1:].remainder(2).eq(0).all()
    check_quantized(x)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("power", [-79, -3, 0, 1, 50, 127])
def test_the_exponent_is_raised_from_32639_and_a_half_on_and_not_before(power, sign):
    largest = 32639.5 * 2.0 ** (power - 15)
    below = float(np.nextafter(np.float32(largest), np.float32(0)))
    for value, code in ((largest, 16320), (below, 32639)):  # 16319.75 rounds to 16320
        x = torch.zeros(1, 64)
        x[0, 5] = sign * value
        codes, _ = reference.quantize(x, 64)
        assert codes[0, 5] == sign * code
        check_quantized(x)


@pytest.mark.parametrize(
    "power", [-149, -127, -126, -96, -95, -94, -82, -81, -80, -79, -1, 0, 1, 64, 126, 127]
)
def test_powers_of_two_are_exact_down_to_the_smallest_grid(power):
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 1] = 2.0**power, -(2.0**power)
    check_quantized(x)
    codes, scales = reference.quantize(x, 64)
    assert scales.item() >= 2.0**-95
    if power >= -95:
        assert codes[0, 0].item() * scales.double().item() == 2.0**power


def test_zeros_subnormals_and_the_largest_floats_are_no_exceptions():
    largest = torch.finfo(torch.float32).max
    for values in (
        [0.0],
        [-0.0, 0.0],
        [1e-45, -1e-45],
        [1.17e-38],
        [largest, -largest],
        [largest, 1e-45, 1.0],
    ):
        x = torch.zeros(1, 70)
        x[0, : len(values)] = torch.tensor(values)
        check_quantized(x)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_what_is_not_finite_makes_its_unit_nan_and_no_other(bad):
    x = torch.ones(2, 200)
    x[1, 70] = bad
    check_quantized(x)
    packed = make_packed(3, 200, 64)
    product = reference_linear(x, packed)
    assert product[0].isfinite().all()
    assert product[1].isnan().all()


# Products


@pytest.mark.parametrize(("bits", "truncate"), GRIDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integer_dots_are_the_exact_sums_of_weights_times_activations(shape, bits, truncate):
    packed = make_packed(*shape, bits, truncate)
    codes, _ = reference.quantize(make_activations(2, packed.length), packed.group_size)
    dots = reference.dots(codes, packed)
    unit = unit_of(packed.group_size)
    halves = 2 if truncate else 1  # the integers count steps for `truncate`, half steps for `midpoint`
    for row in range(shape[0]):
        weights = [weight_in_half_steps(code, bits, truncate) for code in stored_codes(packed, row)]
        for token, activations in enumerate(codes.tolist()):
            products = [w * a for w, a in zip(weights, activations, strict=True)]
            sums = [sum(products[start : start + unit]) for start in range(0, packed.length, unit)]
            assert [halves * int(dot) for dot in dots[token, row]] == sums
            assert all(abs(one) < halves * 2**31 for one in sums)


@pytest.mark.parametrize(("bits", "truncate"), GRIDS)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 2100, 64), (1, 1100, 96)], ids=str)
def test_products_are_added_in_the_order_that_the_contract_says(shape, bits, truncate):
    packed = make_packed(*shape, bits, truncate)
    x = make_activations(2, packed.length)
    codes, scales = reference.quantize(x, packed.group_size)
    dots = reference.dots(codes, packed).long().numpy()
    got = reference_linear(x, packed).numpy()
    per_group = packed.group_size // unit_of(packed.group_size)
    shift = bits if truncate else bits + 1
    for token in range(len(x)):
        for row in range(shape[0]):
            lanes = [np.float32(0)] * 16
            for unit, dot in enumerate(dots[token, row]):
                step = np.float32(scale_of(packed, row, unit // per_group) / 2**shift)
                lanes[unit % 16] += np.float32(dot) * (step * scales[token, unit].numpy())
            for half in (8, 4, 2, 1):
                lanes = [lanes[j] + lanes[j + half] for j in range(half)]
            assert lanes[0].dtype == np.float32
            assert got[token, row].tobytes() == lanes[0].tobytes()


@pytest.mark.parametrize(("bits", "truncate"), GRIDS)
@pytest.mark.parametrize(("rows", "length", "scale_exponent"), [(2, 130, -3), (256, 1, -13), (256, 1, 7)])
def test_decoded_values_are_the_exact_ones(bits, truncate, rows, length, scale_exponent):
    packed = make_packed(rows, length, 64, bits, truncate, scale_exponent=scale_exponent)
    if rows == 256:
        packed.scales[:, 0] = torch.arange(256)
    values = reference.decode(packed)
    for row in range(rows):
        for k, code in enumerate(stored_codes(packed, row)):
            step = scale_of(packed, row, k // 64) / 2**bits
            assert Fraction(values[row, k].item()) == weight_in_half_steps(code, bits, truncate) * step / 2


# How good it is


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_integer_activations_are_about_as_good_as_float16_ones(precision, reconstruction):
    """Weights enter exactly, so the error is that of rounding the activations: a step over the root of 12.

    The largest of 64 normal numbers lies below 4 nearly always, which makes the step 2^-13 and the error
    3.5e-5 at most; where it lies below 2 the error is half of that. The design page measured 3.4e-5.
    """
    generator = torch.Generator().manual_seed(3)
    weight = encode(torch.randn(256, 2048, generator=generator) * 0.02, reconstruction=reconstruction)
    base, planes = pack_codes(weight.finest_codes)
    truncate, planes = reconstruction == "truncate", planes[: precision.mantissa_bits - 3]
    packed = Packed(base, weight.scale_bytes, planes, 2048, 64, truncate, weight.scale_exponent)
    x = torch.randn(4, 2048, generator=generator)
    values = weight.decode(precision).double()
    exact = x.double() @ values.T

    def error(product: torch.Tensor) -> float:
        return float((product.double() - exact).norm() / exact.norm())

    integer = error(reference_linear(x, packed))
    steps = reference.quantize(x, 64)[1]
    implied = float(steps.square().mean().sqrt()) / math.sqrt(12)
    assert implied <= 1.02 * 2.0**-13 / math.sqrt(12)  # a few units in a hundred reach beyond 4
    # 8,192 roundings give their mean square to a percent or two
    assert integer == pytest.approx(implied, rel=0.05)
    assert integer <= 2 * error(x.half().double() @ values.T)
