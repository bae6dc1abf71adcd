"""The codec against exact arithmetic: every half-precision number, and samples of the other formats."""

from __future__ import annotations

import doctest
from functools import cache

import pytest
import torch

from otaro.errors import WeightError
from otaro.sefp import codec, precision
from otaro.sefp.codec import encode
from otaro.sefp.precision import PRECISIONS

from . import oracle
from .exact import fractions

RECONSTRUCTIONS = pytest.mark.parametrize("reconstruction", oracle.RECONSTRUCTIONS)
AT_EVERY_PRECISION = pytest.mark.parametrize("precision", PRECISIONS, ids=str)


def all_patterns(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def encodable_float16() -> torch.Tensor:
    patterns = all_patterns(torch.float16)
    return patterns[patterns.abs() < 32768]  # false for NaN


def encodable_bfloat16() -> torch.Tensor:
    patterns = all_patterns(torch.bfloat16)
    return patterns[patterns.abs() < 32768]


def random_float32(count: int = 20_000) -> torch.Tensor:
    """Half uniform bit patterns, half with 24 random significant bits where the exponents of SEFP are."""
    generator = torch.Generator().manual_seed(3)
    anywhere = torch.randint(-(2**31), 2**31, (count // 2,), generator=generator).to(torch.int32)
    significands = torch.randint(-(2**24) + 1, 2**24, (count // 2,), generator=generator).float()
    near = torch.ldexp(significands, torch.randint(-50, -8, (count // 2,), generator=generator))
    both = torch.cat([anywhere.view(torch.float32), near])
    return both[both.abs() < 32768]


def float32_around_powers_of_two() -> torch.Tensor:
    """2^k for all k of float32, subnormal ones too, with both neighbours and signs; not 2^15 and up."""
    powers = torch.cat([1 << torch.arange(23), torch.arange(1, 144) << 23]).to(torch.int32)
    magnitudes = torch.cat([powers - 1, powers, powers + 1]).view(torch.float32)
    both = torch.cat([magnitudes, -magnitudes])
    return both[both.abs() < 32768]


def alone(weights: torch.Tensor) -> torch.Tensor:
    return weights.unsqueeze(-1)


def shuffled(weights: torch.Tensor) -> torch.Tensor:
    order = torch.randperm(len(weights), generator=torch.Generator().manual_seed(1))
    return weights[order][: len(weights) // 64 * 64].view(-1, 64)


def neighbours(weights: torch.Tensor) -> torch.Tensor:
    return weights[weights.float().abs().argsort()][: len(weights) // 64 * 64].view(-1, 64)


def spanning(weights: torch.Tensor) -> torch.Tensor:
    """Each group takes one weight from each of 64 strata of magnitude."""
    return neighbours(weights).flatten().view(64, -1).T.contiguous()


def beside_a_larger_one(weights: torch.Tensor) -> torch.Tensor:
    """Pairs of every weight with a random one of at least its magnitude: all exponents it can meet occur."""
    by_magnitude = weights[weights.float().abs().argsort()]
    at = torch.arange(len(weights))
    ahead = torch.rand(len(weights), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    larger = at + (ahead * (len(weights) - at)).long()
    return torch.stack([by_magnitude, by_magnitude[larger]], -1)


INPUTS = {
    "every float16 alone": lambda: alone(encodable_float16()),
    "every float16, shuffled": lambda: shuffled(encodable_float16()),
    "every float16, neighbours": lambda: neighbours(encodable_float16()),
    "every float16, groups spanning all magnitudes": lambda: spanning(encodable_float16()),
    "every float16 beside a larger one": lambda: beside_a_larger_one(encodable_float16()),
    "every bfloat16 alone": lambda: alone(encodable_bfloat16()),
    "every bfloat16 beside a larger one": lambda: beside_a_larger_one(encodable_bfloat16()),
    "random float32 alone": lambda: alone(random_float32()),
    "random float32, shuffled": lambda: shuffled(random_float32()),
    "random float32 beside a larger one": lambda: beside_a_larger_one(random_float32()),
    "float32 around powers of two alone": lambda: alone(float32_around_powers_of_two()),
    "float32 around powers of two beside a larger one": lambda: beside_a_larger_one(
        float32_around_powers_of_two()
    ),
}
FROM_EVERY_INPUT = pytest.mark.parametrize("source", INPUTS)


@cache
def groups(source: str) -> torch.Tensor:
    """Weights with one group to a row."""
    return INPUTS[source]()


SPANS = (2.0**15, 2.0**-3, 2.0**-16)
"""A tensor has one scale exponent: weights small beside others have coarse scales, and are tried alone."""


@cache
def tensors(source: str) -> list[torch.Tensor]:
    """All groups as one tensor, then those below a limit each as one."""
    largest = groups(source).float().abs().amax(-1)
    below = [groups(source)[largest < limit] for limit in SPANS]
    return [one for one in below if len(one)]


@FROM_EVERY_INPUT
@RECONSTRUCTIONS
def test_scales_and_codes_are_the_oracles(source, reconstruction):
    for weight in tensors(source):
        size = weight.shape[-1]
        numbers = fractions(weight)
        k, scales, codes = oracle.encoded(
            [numbers[i : i + size] for i in range(0, len(numbers), size)], reconstruction
        )
        tensor = encode(weight, size, reconstruction)
        assert tensor.scale_exponent == k
        assert (tensor.scale_bytes.dtype, tensor.scales.dtype) == (torch.uint8, torch.float32)
        assert tensor.scales.shape == (len(weight), 1)
        assert fractions(tensor.scales) == scales
        assert tensor.finest_codes.dtype == torch.int16
        assert tensor.finest_codes.tolist() == codes
        exact = torch.tensor(codes)
        for p in PRECISIONS:
            assert torch.equal(
                tensor.codes(p).long(), exact.div(2 ** (8 - p.mantissa_bits), rounding_mode="floor")
            )


def test_the_inputs_are_what_their_names_promise():
    assert len(encodable_float16()) == 2 * 30 * 2**10
    assert len(encodable_bfloat16()) == 2 * (127 + 15) * 2**7
    beside = tensors("every float16 beside a larger one")
    met = [encode(one, 2) for one in beside]
    assert [one.scale_exponent for one in met] == [7, -11, -13]
    assert len(met[0].scale_bytes.unique()) > 240, "nearly all of 254 that there are"
    significands = random_float32().view(torch.int32) & 0x7FFFFF
    assert ((significands & 0x7F) != 0).sum() > 19_000 // 2  # more than 16 significant bits
    span = groups("every float16, groups spanning all magnitudes").float().abs()
    assert (span.amax(-1) / span.median(-1).values > 1000).all()


@RECONSTRUCTIONS
def test_every_infinity_and_every_nan_of_float16_is_refused_at_its_place(reconstruction):
    refused = all_patterns(torch.float16)
    refused = refused[~refused.isfinite()]
    assert len(refused) == 2 * 2**10
    for weight in refused:
        row = torch.stack([torch.ones_like(weight), weight])
        kind = "nan" if weight.isnan() else f"{float(weight)}"
        with pytest.raises(WeightError, match=rf"^layer\[1\] is {kind}, .*finite"):
            encode(row, reconstruction=reconstruction, name="layer")


def float16_bit_fields(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sign, significand with its one explicit, exponent field, of |w| = significand * 2^(field - 25)."""
    pattern = weight.view(torch.int16).long() & 0xFFFF
    field, fraction = (pattern >> 10) & 31, pattern & 1023
    return pattern >> 15, torch.where(field > 0, fraction | 1024, fraction), field.clamp(min=1)


@pytest.mark.parametrize("exponent", range(-15, 16))
def test_truncation_of_float16_cuts_its_own_mantissa_bits(exponent):
    """For every weight below 2^e: line the significand up with the shared exponent, keep m bits."""
    weight = encodable_float16()
    weight = weight[weight.float().abs() < 2.0**exponent]
    reaching = torch.full_like(weight, 2.0 ** (exponent - 1))  # makes the shared exponent e
    sign, significand, field = float16_bit_fields(weight)
    tensor = encode(torch.stack([weight, reaching], -1), 2, "truncate")
    assert (tensor.scales == 2.0**exponent).all()
    negative = (sign == 1) & (significand > 0)
    for at in PRECISIONS:
        dropped = (exponent - at.mantissa_bits) - (field - 25)
        assert dropped.min() > 0  # so a shift is all there is to it
        cut = significand >> dropped
        in_steps = tensor.decode(at)[:, 0] * 2.0 ** (at.mantissa_bits - exponent)
        assert torch.equal(in_steps, torch.where(negative, -cut, cut).float())
        assert torch.equal(tensor.codes(at)[:, 0].long(), torch.where(negative, ~cut, cut))


@pytest.mark.parametrize("module", [codec, precision], ids=lambda module: module.__name__)
def test_the_examples_in_the_docstrings_run(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def test_the_example_worked_by_hand_is_right():
    tensor = encode(torch.tensor([0.8, -0.3, 0.02]))
    assert tensor.scales.tolist() == [-13 / 16]
    assert tensor.codes("E5M8").tolist() == [-237, 110, 9]
    assert [round(v, 4) for v in tensor.decode("E5M8").tolist()] == [0.8014, -0.2999, 0.0206]
    assert tensor.codes("E5M3").tolist() == [-8, 3, 0]
    assert [round(v, 4) for v in tensor.decode("E5M3").tolist()] == [0.8125, -0.3047, 0]
