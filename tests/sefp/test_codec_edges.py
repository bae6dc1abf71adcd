"""The codec where tensors are odd: zeros, subnormals, outliers, short groups, strange shapes; and what it refuses."""

from __future__ import annotations

import math
import re
import warnings

import pytest
import torch

from otaro.errors import WeightError
from otaro.sefp import codec
from otaro.sefp.codec import encode
from otaro.sefp.precision import PRECISIONS, Precision

from . import oracle
from .exact import fractions, of_pattern

RECONSTRUCTIONS = pytest.mark.parametrize("reconstruction", oracle.RECONSTRUCTIONS)
FLOATS = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=lambda d: str(d)[6:])


def random_weight(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def assert_same(a: codec.SefpTensor, b: codec.SefpTensor) -> None:
    assert torch.equal(a.exponents, b.exponents)
    assert torch.equal(a.finest_codes, b.finest_codes)


def assert_one_group_as_the_oracle(weight: torch.Tensor, reconstruction: str) -> None:
    tensor, numbers = encode(weight, reconstruction=reconstruction), fractions(weight)
    e = oracle.shared_exponent(numbers)
    codes = [oracle.finest_code(w, e, reconstruction) for w in numbers]
    assert tensor.exponents.tolist() == [e]
    assert tensor.finest_codes.tolist() == codes
    for p in PRECISIONS:
        m = p.mantissa_bits
        assert fractions(tensor.decode(p)) == [oracle.value(oracle.shifted(c, m), e, m, reconstruction) for c in codes]


# Numbers


@FLOATS
@RECONSTRUCTIONS
def test_both_zeros_have_the_same_code(dtype, reconstruction):
    codes = encode(torch.tensor([0.0, -0.0, 1.0], dtype=dtype), reconstruction=reconstruction).finest_codes
    assert codes[0] == codes[1] == (16 if reconstruction == "midpoint" else 0)


@FLOATS
@RECONSTRUCTIONS
def test_an_all_zero_group_has_the_smallest_exponent(dtype, reconstruction):
    tensor = encode(torch.zeros(2, 64, dtype=dtype), reconstruction=reconstruction)
    assert tensor.exponents.tolist() == [[-15], [-15]]
    for p in PRECISIONS:
        is_zero = reconstruction == "truncate" or p == Precision("E5M3")
        expected = 0.0 if is_zero else 2.0 ** (-15 - p.mantissa_bits - 1)
        assert (tensor.decode(p) == expected).all()


@pytest.mark.parametrize(
    ("largest", "exponent"),
    [
        (2.0**-149, -15),
        (2.0**-24, -15),
        (2.0**-16, -15),
        (2.0**-15 * (1 - 2.0**-24), -15),
        (2.0**-15, -14),
        (2.0**-14, -13),
        (0.5, 0),
        (1 - 2.0**-24, 0),
        (1.0, 1),
        (32768 - 2.0**-9, 15),
        (32768.0, 16),
        (65504.0, 16),
        (65536 - 2.0**-8, 16),
    ],
)
@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
def test_the_exponent_is_the_smallest_power_of_two_above(largest, exponent, sign):
    assert encode(torch.tensor([0.0, sign * largest])).exponents.tolist() == [exponent]


@RECONSTRUCTIONS
@pytest.mark.parametrize(
    ("tiny", "large"),
    [(-1e-45, 40000.0), (-1e-45, 60000.0), (-3e-45, 300.0), (-1e-30, 0.5), (-1e-38, 40000.0), (-1e-45, 2.0**-20)],
)
def test_a_tiny_negative_weight_is_below_zero_whatever_stands_beside_it(tiny, large, reconstruction):
    weight = torch.tensor([tiny, large, -tiny, 0.0])
    assert_one_group_as_the_oracle(weight, reconstruction)
    codes = encode(weight, reconstruction=reconstruction).finest_codes.tolist()
    assert codes[0] == (15 if reconstruction == "midpoint" else -1)
    assert codes[2] == codes[3] == (16 if reconstruction == "midpoint" else 0)


@RECONSTRUCTIONS
@pytest.mark.parametrize("bits", [10, 23], ids=["float16", "float32"])
def test_subnormals_are_numbers_like_any_other(bits, reconstruction):
    dtype = torch.float16 if bits == 10 else torch.float32
    sign = 1 << (dtype.itemsize * 8 - 1)
    patterns = [1, 2, 3, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1]
    weight = torch.stack([of_pattern(p | s, dtype) for p in patterns for s in (0, sign)])
    assert_one_group_as_the_oracle(weight, reconstruction)
    assert_one_group_as_the_oracle(torch.cat([weight, weight.new_tensor([300.0])]), reconstruction)


@RECONSTRUCTIONS
def test_an_outlier_costs_the_tiny_weights_of_its_group_and_no_other(reconstruction):
    weight = torch.full((128,), 0.01)
    weight[5] = 100.0
    tensor = encode(weight, reconstruction=reconstruction)
    assert tensor.exponents.tolist() == [7, -6]
    assert tensor.finest_codes[6] == (16 if reconstruction == "midpoint" else 0)
    alone = encode(weight[64:], reconstruction=reconstruction)
    assert torch.equal(tensor.decode("E5M8")[64:], alone.decode("E5M8"))
    assert (tensor.decode("E5M8")[64:] - 0.01).abs().max() < 2.0**-14


# Shapes


@RECONSTRUCTIONS
@pytest.mark.parametrize("length", [1, 31, 33, 63, 64, 65, 100, 200])
def test_a_row_is_its_groups_one_by_one_the_last_one_short(length, reconstruction):
    weight = random_weight(3, length) * torch.tensor([[1e-3], [1.0], [1e3]])
    tensor = encode(weight, reconstruction=reconstruction)
    assert tensor.exponents.shape == (3, math.ceil(length / 64))
    for row in range(3):
        for group, part in enumerate(weight[row].split(64)):
            alone = encode(part, reconstruction=reconstruction)
            at = slice(64 * group, 64 * group + 64)
            assert tensor.exponents[row, group] == alone.exponents[0]
            assert torch.equal(tensor.finest_codes[row, at], alone.finest_codes)
            assert torch.equal(tensor.decode("E5M5")[row, at], alone.decode("E5M5"))


@RECONSTRUCTIONS
@pytest.mark.parametrize("group_size", [16, 32, 48, 64, 128, 256])
def test_any_group_size_shares_one_exponent_to_a_group(group_size, reconstruction):
    weight = random_weight(2, 400)
    tensor = encode(weight, group_size, reconstruction)
    parts = weight.split(group_size, -1)
    expected = [[oracle.shared_exponent(fractions(part[row])) for part in parts] for row in range(2)]
    assert tensor.exponents.tolist() == expected
    by_part = torch.cat([encode(part, group_size, reconstruction).decode("E5M6") for part in parts], -1)
    assert torch.equal(tensor.decode("E5M6"), by_part)


@RECONSTRUCTIONS
@pytest.mark.parametrize("shape", [(70,), (6, 70), (2, 3, 70), (1, 2, 3, 70)], ids=lambda s: f"rank {len(s)}")
def test_leading_dimensions_are_rows(shape, reconstruction):
    weight = random_weight(*shape)
    tensor = encode(weight, reconstruction=reconstruction)
    assert tensor.exponents.shape == (*shape[:-1], 2)
    assert tensor.finest_codes.shape == tensor.decode("E5M3").shape == shape
    rows = encode(weight.reshape(-1, 70), reconstruction=reconstruction)
    assert torch.equal(tensor.exponents.reshape(-1, 2), rows.exponents)
    assert torch.equal(tensor.decode("E5M7").reshape(-1, 70), rows.decode("E5M7"))


@RECONSTRUCTIONS
def test_a_scalar_is_a_group_of_one(reconstruction):
    scalar = encode(torch.tensor(-0.3), reconstruction=reconstruction)
    row = encode(torch.tensor([-0.3]), reconstruction=reconstruction)
    assert scalar.finest_codes.shape == scalar.codes("E5M4").shape == scalar.decode("E5M4").shape == ()
    assert torch.equal(scalar.exponents, row.exponents)
    assert scalar.decode("E5M4") == row.decode("E5M4")[0]


@RECONSTRUCTIONS
@pytest.mark.parametrize("shape", [(0,), (0, 64), (0, 65), (3, 0), (2, 0, 5), (2, 3, 0)], ids=str)
def test_an_empty_tensor_stays_empty(shape, reconstruction):
    tensor = encode(torch.empty(shape), reconstruction=reconstruction)
    assert tensor.finest_codes.shape == tensor.codes("E5M3").shape == shape
    assert tensor.exponents.shape == (*shape[:-1], math.ceil(shape[-1] / 64))
    assert tensor.decode("E5M4").shape == shape


@pytest.mark.parametrize(
    "view",
    [lambda w: w.T, lambda w: w[::2, 1::3], lambda w: w[:1].expand(5, -1), lambda w: w[:, 7]],
    ids=["transposed", "strided", "expanded", "column"],
)
def test_memory_layout_does_not_matter(view):
    weight = view(random_weight(90, 150))
    assert not weight.is_contiguous()
    assert_same(encode(weight), encode(weight.contiguous()))


@FLOATS
@RECONSTRUCTIONS
def test_neither_encoding_nor_decoding_changes_its_input(dtype, reconstruction):
    weight = random_weight(3, 100).to(dtype)
    before = weight.clone()
    tensor = encode(weight, reconstruction=reconstruction)
    assert torch.equal(weight, before)
    codes, exponents = tensor.finest_codes.clone(), tensor.exponents.clone()
    for p in PRECISIONS:
        tensor.decode(p)
    assert torch.equal(tensor.finest_codes, codes)
    assert torch.equal(tensor.exponents, exponents)


@RECONSTRUCTIONS
def test_a_tensor_of_many_chunks_is_its_rows_one_by_one(reconstruction):
    weight = random_weight(600, 1000)
    assert weight.numel() > 2 * codec._CHUNK
    tensor = encode(weight, reconstruction=reconstruction)
    rows = [encode(row, reconstruction=reconstruction) for row in weight]
    assert torch.equal(tensor.finest_codes, torch.stack([row.finest_codes for row in rows]))
    assert torch.equal(tensor.exponents, torch.stack([row.exponents for row in rows]))
    assert torch.equal(tensor.decode("E5M4"), torch.stack([row.decode("E5M4") for row in rows]))


@RECONSTRUCTIONS
@pytest.mark.parametrize("chunk", [1, 99, 100, 101, 250, 700])
def test_the_size_of_a_chunk_is_invisible(chunk, reconstruction, monkeypatch):
    weight = random_weight(7, 100)
    weight[3:5] *= 1e4  # exponents above 8 in some chunks and not in others
    whole = encode(weight, reconstruction=reconstruction)
    values = whole.decode("E5M5")
    monkeypatch.setattr(codec, "_CHUNK", chunk)
    assert_same(encode(weight, reconstruction=reconstruction), whole)
    assert torch.equal(whole.decode("E5M5"), values)


@FLOATS
@RECONSTRUCTIONS
@pytest.mark.parametrize("length", [64, 100, 128])
def test_decoding_into_a_given_tensor_fills_it_with_the_same_values(length, dtype, reconstruction):
    tensor = encode(random_weight(5, length), reconstruction=reconstruction)
    out = torch.zeros(5, 2 * length, dtype=dtype)[:, :length]  # rows that do not follow one another
    codec.decode_codes(tensor.codes("E5M5"), tensor.exponents, 5, 64, reconstruction, out=out)
    assert torch.equal(out, tensor.decode("E5M5").to(dtype))
    assert torch.equal(codec.decode_codes(tensor.codes("E5M5"), tensor.exponents, 5, 64, reconstruction), out.float())


def test_a_parameter_is_encoded_like_its_data_and_without_a_graph():
    parameter = torch.nn.Parameter(random_weight(2, 70))
    tensor = encode(parameter)
    assert_same(tensor, encode(parameter.data))
    assert not tensor.decode("E5M8").requires_grad


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_bits_per_weight_count_the_exponents_that_are_stored(precision):
    at = precision.mantissa_bits + 1
    assert encode(torch.ones(3, 128)).bits_per_weight(precision) == at + 0.078125 == precision.bits_per_weight()
    assert encode(torch.ones(3, 128), 32).bits_per_weight(precision) == precision.bits_per_weight(32) == at + 5 / 32
    assert encode(torch.ones(3, 96)).bits_per_weight(str(precision)) == at + 10 / 96 > precision.bits_per_weight()
    assert encode(torch.tensor(1.0)).bits_per_weight(precision) == at + 5


# Refusals


@RECONSTRUCTIONS
@FLOATS
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_what_is_not_finite_is_refused_by_name_and_index(bad, dtype, reconstruction):
    weight = torch.ones(3, 4, 130, dtype=dtype)
    weight[1, 2, 129] = bad
    weight[2, 0, 0] = bad
    message = rf"^model\.q_proj\.weight\[1, 2, 129\] is {bad}, .* finite weights only"
    with pytest.raises(WeightError, match=message):
        encode(weight, reconstruction=reconstruction, name="model.q_proj.weight")


@RECONSTRUCTIONS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("bad", [65536.0, -65536.0, 2.0**17, -(2.0**127)])
def test_magnitudes_from_65536_on_are_refused_by_name_and_index(bad, dtype, reconstruction):
    weight = torch.ones(5, 70, dtype=dtype)
    weight[4, 3] = bad
    with pytest.raises(WeightError, match=re.escape(f"lm_head[4, 3] is {bad:g}, and SEFP holds magnitudes below 2^16 = 65536")):
        encode(weight, reconstruction=reconstruction, name="lm_head")


def test_the_first_of_several_refused_weights_is_named_across_chunks(monkeypatch):
    monkeypatch.setattr(codec, "_CHUNK", 100)
    weight = torch.ones(10, 100)
    weight[7, 9], weight[7, 8], weight[9, 0] = math.nan, 1e6, math.inf
    with pytest.raises(WeightError, match=r"^weight\[7, 8\] is 1e\+06"):
        encode(weight)


def test_a_refused_scalar_and_a_refused_view_have_their_own_index():
    with pytest.raises(WeightError, match=r"^bias\[.*\] is nan"):
        encode(torch.tensor(math.nan), name="bias")
    weight = torch.ones(4, 6)
    weight[3, 1] = math.inf
    with pytest.raises(WeightError, match=r"^weight\[1, 3\] is inf"):
        encode(weight.T)


def test_refusing_a_parameter_warns_about_nothing_else():
    parameter = torch.nn.Parameter(torch.tensor([1.0, math.nan]))
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(WeightError, match=r"^weight\[1\] is nan"):
                encode(parameter)
    finally:
        torch.set_warn_always(False)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn],
    ids=lambda d: str(d)[6:],
)
def test_other_types_are_refused_by_name(dtype):
    with pytest.raises(WeightError, match=rf"^router is {re.escape(str(dtype))}; .*float16, bfloat16 and float32"):
        encode(torch.zeros(4, dtype=dtype), name="router")


@pytest.mark.parametrize("group_size", [0, -1, -64])
def test_a_group_has_at_least_one_weight(group_size):
    with pytest.raises(WeightError, match=rf"group_size .*{group_size}$"):
        encode(torch.ones(4), group_size)


@pytest.mark.parametrize("reconstruction", ["round", "Midpoint", "", None], ids=repr)
def test_an_unknown_reconstruction_is_refused_with_the_known_ones(reconstruction):
    with pytest.raises(WeightError, match=rf"{reconstruction!r}; choose from midpoint, truncate"):
        encode(torch.ones(4), reconstruction=reconstruction)
