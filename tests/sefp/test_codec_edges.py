"""The codec where tensors are odd: zeros, subnormals, outliers, short groups, strange shapes; refusals."""

from __future__ import annotations

import math
import re
import warnings
from itertools import pairwise

import pytest
import torch

from otaro.errors import WeightError
from otaro.sefp import codec
from otaro.sefp.codec import encode
from otaro.sefp.precision import PRECISIONS

from . import oracle
from .exact import fractions, of_pattern

RECONSTRUCTIONS = pytest.mark.parametrize("reconstruction", oracle.RECONSTRUCTIONS)
FLOATS = pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32], ids=lambda d: str(d)[6:]
)


def random_weight(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def assert_same(a: codec.SefpTensor, b: codec.SefpTensor) -> None:
    assert a.scale_exponent == b.scale_exponent
    assert torch.equal(a.scale_bytes, b.scale_bytes)
    assert torch.equal(a.finest_codes, b.finest_codes)


def assert_one_group_as_the_oracle(weight: torch.Tensor, reconstruction: str) -> None:
    tensor = encode(weight, reconstruction=reconstruction)
    k, (s,), (codes,) = oracle.encoded([fractions(weight)], reconstruction)
    assert (tensor.scale_exponent, fractions(tensor.scales)) == (k, [s])
    assert tensor.finest_codes.tolist() == codes
    for p in PRECISIONS:
        m = p.mantissa_bits
        assert fractions(tensor.decode(p)) == [
            oracle.value(oracle.shifted(c, m), s, m, reconstruction) for c in codes
        ]


# Numbers


@FLOATS
@pytest.mark.parametrize("largest", [1.0, -1.0], ids=["mirrored", "upright"])
@pytest.mark.parametrize("border", [0, 32, -64, 16, -240, 8, -3, 239])
def test_a_weight_on_a_border_is_put_above_or_below_by_its_place_and_so_evenly(dtype, largest, border):
    weight = torch.tensor([-largest * border / 256] * 64 + [largest], dtype=dtype)
    tensor = encode(weight, 65)
    assert tensor.scales.tolist() == [-largest]
    codes = tensor.finest_codes[:64].tolist()
    assert codes[:8] == [border + 16 - below for below in (0, 1, 1, 0, 1, 0, 0, 1)]
    assert codes.count(border + 16) == codes.count(border + 15) == 32
    for p in PRECISIONS:
        m, errors = p.mantissa_bits, (tensor.decode(p) - weight)[:64]
        if (border + 16) % 2 ** (8 - m) == 0:  # a border of this precision too
            assert errors.abs().unique().tolist() == [0.5 / 2**m]
            assert errors.sum() == 0
        else:
            assert errors.unique().numel() == 1


def test_both_zeros_are_on_the_same_border():
    weight = torch.tensor([0.0, -0.0] * 32 + [1.0])
    assert torch.equal(encode(weight, 65).finest_codes, encode(weight.abs(), 65).finest_codes)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_ends_of_the_grid_belong_to_their_only_cell_at_every_place(sign):
    weight = sign * torch.tensor([-17 / 16, 15 / 16]).repeat_interleave(4)[[0, 1, 4, 5, 2, 3, 6, 7]]
    tensor = encode(weight)
    assert tensor.scales.tolist() == [sign]
    assert tensor.finest_codes.tolist() == [-256, -256, 255, 255, -256, -256, 255, 255]


def test_a_pruned_matrix_errs_at_e5m4_less_than_at_e5m3_and_more_than_at_e5m5():
    """In its weights, and in its rows' sums, where errors to one side would add up."""
    weight = random_weight(256, 640)
    weight[weight.abs() < weight.abs().quantile(0.3, -1, keepdim=True)] = 0.0
    assert 0.29 < float((weight == 0).float().mean()) < 0.31
    errors = [(encode(weight).decode(p) - weight).double() for p in ("E5M5", "E5M4", "E5M3")]
    for finer, coarser in pairwise(errors):
        assert finer.square().mean() < coarser.square().mean()
        assert finer.sum(-1).square().mean() < coarser.sum(-1).square().mean()


@pytest.mark.parametrize("finer", PRECISIONS[:-1], ids=str)
def test_weights_on_the_grid_of_e5m3_err_by_half_a_step_of_a_finer_one_to_both_sides(finer):
    """So a model that was quantized before is not moved as a whole."""
    coarse = torch.randint(-8, 8, (64, 64), generator=torch.Generator().manual_seed(0)) / 8.0
    coarse[:, 5] = -1.0  # which no smaller scale holds
    errors = (encode(coarse).decode(finer) - coarse) * 2.0**finer.mantissa_bits
    assert torch.equal(errors.abs(), torch.full_like(errors, 0.5))
    assert errors.sum(-1).unique().tolist() == [0.0]


@FLOATS
def test_truncation_keeps_both_zeros(dtype):
    assert encode(torch.tensor([0.0, -0.0, 1.0], dtype=dtype), reconstruction="truncate").finest_codes[
        :2
    ].tolist() == [0, 0]


@FLOATS
@RECONSTRUCTIONS
def test_a_group_of_zeros_has_the_scale_zero_and_stays_zero_at_every_precision(dtype, reconstruction):
    weight = torch.cat([torch.zeros(1, 64, dtype=dtype), torch.ones(1, 64, dtype=dtype)])
    tensor = encode(weight, reconstruction=reconstruction)
    assert tensor.scale_bytes[0].tolist() == [0]
    assert all((tensor.decode(p)[0] == 0).all() for p in PRECISIONS)


@pytest.mark.parametrize(
    ("weight", "scale"),
    [
        ([15 / 16], -0.9375),  # mirrored, needs 15/17
        ([1.0], -1.0),  # mirrored, needs 16/17
        ([17 / 16], -1.0),  # the end of the longer side
        ([17 / 16 * (1 + 2.0**-23)], -1.125),
        ([15 / 16, -15 / 16], 1.0),  # a tie: upright; the end of the shorter side
        ([15 / 16 * (1 + 2.0**-23), -15 / 16], -1.0),
        ([-17 / 16, 15 / 16], 1.0),
        ([17 / 16, -15 / 16], -1.0),
        ([1.0, -1.0], 1.125),
        ([2.0**-30], -(2.0**-22)),  # the smallest there is
        ([32768 * (1 - 2.0**-24)], -(2.0**15)),
    ],
)
def test_the_scale_is_the_smallest_that_holds_the_group(weight, scale):
    assert encode(torch.tensor(weight)).scales.tolist() == [scale]


@pytest.mark.parametrize(
    ("largest", "exponent"),
    [
        (2.0**-149, -22),
        (2.0**-23, -22),
        (2.0**-22, -21),
        (2.0**-15 * (1 - 2.0**-24), -15),
        (2.0**-15, -14),
        (0.5, 0),
        (1 - 2.0**-24, 0),
        (1.0, 1),
        (32768 - 2.0**-9, 15),
    ],
)
@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
def test_the_papers_scale_is_the_smallest_power_of_two_above(largest, exponent, sign):
    assert encode(torch.tensor([0.0, sign * largest]), reconstruction="truncate").scales.tolist() == [
        2.0**exponent
    ]


def test_scales_that_are_small_beside_the_largest_lose_fraction_bits_and_then_differences():
    """With 448 as the largest a byte holds four bits down to 2^-6, then multiples of 2^-9."""
    needed = torch.tensor([448.0, 2.0**-6 * 1.875, 2.0**-7 * 1.875, 2.0**-9 * 1.875, 2.0**-12])
    tensor = encode((needed * 15 / 16).repeat_interleave(2).view(5, 2) * torch.tensor([1.0, -1.0]))
    assert tensor.scale_exponent == 0
    assert tensor.scales.flatten().tolist() == [448.0, 2.0**-6 * 1.875, 2.0**-6, 2.0**-8, 2.0**-9]


@RECONSTRUCTIONS
def test_rows_are_encoded_as_the_whole_is_with_its_scale_exponent(reconstruction):
    weight = random_weight(6, 128) * 10.0 ** torch.arange(-5.0, 1.0).unsqueeze(-1)
    whole = encode(weight, reconstruction=reconstruction)
    rows = [encode(row, reconstruction=reconstruction, scale_exponent=whole.scale_exponent) for row in weight]
    assert torch.equal(whole.scale_bytes, torch.stack([row.scale_bytes for row in rows]))
    assert torch.equal(whole.finest_codes, torch.stack([row.finest_codes for row in rows]))
    with pytest.raises(WeightError, match=r"^weight needs a scale_exponent from -7 to 7, got -13"):
        encode(torch.tensor([3.0]), scale_exponent=-13)
    with pytest.raises(WeightError, match="to 7, got 8"):
        encode(torch.tensor([3.0]), scale_exponent=8)


@RECONSTRUCTIONS
@pytest.mark.parametrize(
    ("tiny", "large"),
    [(-1e-45, 30000.0), (-3e-45, 300.0), (-1e-30, 0.5), (-1e-38, 30000.0), (-1e-45, 2.0**-20)],
)
def test_a_tiny_negative_weight_is_below_zero_whatever_stands_beside_it(tiny, large, reconstruction):
    weight = torch.tensor([tiny, large, -tiny, 0.0])
    assert_one_group_as_the_oracle(weight, reconstruction)
    codes = encode(weight, reconstruction=reconstruction).finest_codes.tolist()
    # mirrored, as large is positive
    assert (codes[0], codes[2]) == ((16, 15) if reconstruction == "midpoint" else (-1, 0))


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
    assert tensor.scales.tolist() == (
        [-96.0, -0.009765625] if reconstruction == "midpoint" else [128.0, 2.0**-6]
    )
    assert tensor.finest_codes[6] == (15 if reconstruction == "midpoint" else 0)
    alone = encode(weight[64:], reconstruction=reconstruction)
    assert torch.equal(tensor.decode("E5M8")[64:], alone.decode("E5M8"))
    assert (tensor.decode("E5M8")[64:] - 0.01).abs().max() < 2.0**-14


# Shapes


@RECONSTRUCTIONS
@pytest.mark.parametrize("length", [1, 31, 33, 63, 64, 65, 100, 200])
def test_a_row_is_its_groups_one_by_one_the_last_one_short(length, reconstruction):
    weight = random_weight(3, length) * torch.tensor([[0.1], [1.0], [10.0]])
    tensor = encode(weight, reconstruction=reconstruction)
    assert tensor.scales.shape == (3, math.ceil(length / 64))
    for row in range(3):
        for group, part in enumerate(weight[row].split(64)):
            alone = encode(part, reconstruction=reconstruction)
            at = slice(64 * group, 64 * group + 64)
            assert tensor.scales[row, group] == alone.scales[0]
            assert torch.equal(tensor.finest_codes[row, at], alone.finest_codes)
            assert torch.equal(tensor.decode("E5M5")[row, at], alone.decode("E5M5"))


@RECONSTRUCTIONS
@pytest.mark.parametrize("group_size", [16, 32, 48, 64, 128, 256])
def test_any_group_size_shares_one_scale_to_a_group(group_size, reconstruction):
    weight = random_weight(2, 400)
    tensor = encode(weight, group_size, reconstruction)
    parts = weight.split(group_size, -1)
    _, scales, _ = oracle.encoded(
        [fractions(part[row]) for row in range(2) for part in parts], reconstruction
    )
    assert fractions(tensor.scales) == scales
    by_part = torch.cat([encode(part, group_size, reconstruction).decode("E5M6") for part in parts], -1)
    assert torch.equal(tensor.decode("E5M6"), by_part)


@RECONSTRUCTIONS
@pytest.mark.parametrize("shape", [(70,), (6, 70), (2, 3, 70), (1, 2, 3, 70)], ids=lambda s: f"rank {len(s)}")
def test_leading_dimensions_are_rows(shape, reconstruction):
    weight = random_weight(*shape)
    tensor = encode(weight, reconstruction=reconstruction)
    assert tensor.scales.shape == (*shape[:-1], 2)
    assert tensor.finest_codes.shape == tensor.decode("E5M3").shape == shape
    rows = encode(weight.reshape(-1, 70), reconstruction=reconstruction)
    assert torch.equal(tensor.scales.reshape(-1, 2), rows.scales)
    assert torch.equal(tensor.decode("E5M7").reshape(-1, 70), rows.decode("E5M7"))


@RECONSTRUCTIONS
def test_a_scalar_is_a_group_of_one(reconstruction):
    scalar = encode(torch.tensor(-0.3), reconstruction=reconstruction)
    row = encode(torch.tensor([-0.3]), reconstruction=reconstruction)
    assert scalar.finest_codes.shape == scalar.codes("E5M4").shape == scalar.decode("E5M4").shape == ()
    assert torch.equal(scalar.scales, row.scales)
    assert scalar.decode("E5M4") == row.decode("E5M4")[0]


@RECONSTRUCTIONS
@pytest.mark.parametrize("shape", [(0,), (0, 64), (0, 65), (3, 0), (2, 0, 5), (2, 3, 0)], ids=str)
def test_an_empty_tensor_stays_empty(shape, reconstruction):
    tensor = encode(torch.empty(shape), reconstruction=reconstruction)
    assert tensor.finest_codes.shape == tensor.codes("E5M3").shape == shape
    assert tensor.scales.shape == (*shape[:-1], math.ceil(shape[-1] / 64))
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
    codes, scales = tensor.finest_codes.clone(), tensor.scale_bytes.clone()
    for p in PRECISIONS:
        tensor.decode(p)
    assert torch.equal(tensor.finest_codes, codes)
    assert torch.equal(tensor.scale_bytes, scales)


@RECONSTRUCTIONS
def test_a_tensor_of_many_chunks_is_its_rows_one_by_one(reconstruction):
    weight = random_weight(600, 1000)
    assert weight.numel() > 2 * codec._CHUNK
    tensor = encode(weight, reconstruction=reconstruction)
    rows = [encode(row, reconstruction=reconstruction) for row in weight]
    assert torch.equal(tensor.finest_codes, torch.stack([row.finest_codes for row in rows]))
    assert torch.equal(tensor.scales, torch.stack([row.scales for row in rows]))
    assert torch.equal(tensor.decode("E5M4"), torch.stack([row.decode("E5M4") for row in rows]))


@RECONSTRUCTIONS
@pytest.mark.parametrize("chunk", [1, 99, 100, 101, 250, 700])
def test_the_size_of_a_chunk_is_invisible(chunk, reconstruction, monkeypatch):
    weight = random_weight(7, 100)
    weight[3:5] *= 1e3
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
    codec.decode_codes(tensor.codes("E5M5"), tensor.scales, 5, 64, reconstruction, out=out)
    assert torch.equal(out, tensor.decode("E5M5").to(dtype))
    alone = codec.decode_codes(tensor.codes("E5M5"), tensor.scales, 5, 64, reconstruction)
    assert torch.equal(alone, tensor.decode("E5M5"))


def test_a_parameter_is_encoded_like_its_data_and_without_a_graph():
    parameter = torch.nn.Parameter(random_weight(2, 70))
    tensor = encode(parameter)
    assert_same(tensor, encode(parameter.data))
    assert not tensor.decode("E5M8").requires_grad


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_bits_per_weight_count_the_scales_that_are_stored(precision):
    at = precision.mantissa_bits + 1
    assert encode(torch.ones(3, 128)).bits_per_weight(precision) == at + 0.125 == precision.bits_per_weight()
    assert (
        encode(torch.ones(3, 128), 32).bits_per_weight(precision)
        == precision.bits_per_weight(32)
        == at + 8 / 32
    )
    assert (
        encode(torch.ones(3, 96)).bits_per_weight(str(precision))
        == at + 16 / 96
        > precision.bits_per_weight()
    )
    assert encode(torch.tensor(1.0)).bits_per_weight(precision) == at + 8


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
@pytest.mark.parametrize("bad", [32768.0, -32768.0, 2.0**17, -(2.0**127)])
def test_magnitudes_from_32768_on_are_refused_by_name_and_index(bad, dtype, reconstruction):
    weight = torch.ones(5, 70, dtype=dtype)
    weight[4, 3] = bad
    with pytest.raises(
        WeightError,
        match=re.escape(f"lm_head[4, 3] is {bad:g}, and SEFP holds magnitudes below 2^15 = 32768"),
    ):
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
    [
        torch.float64,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
    ],
    ids=lambda d: str(d)[6:],
)
def test_other_types_are_refused_by_name(dtype):
    with pytest.raises(
        WeightError,
        match=rf"^router is {re.escape(str(dtype))}; .*float16, bfloat16 and "
        r"float32",
    ):
        encode(torch.zeros(4, dtype=dtype), name="router")


@pytest.mark.parametrize("group_size", [0, -1, -64])
def test_a_group_has_at_least_one_weight(group_size):
    with pytest.raises(WeightError, match=rf"group_size .*{group_size}$"):
        encode(torch.ones(4), group_size)


@pytest.mark.parametrize(
    "weight", [torch.eye(3).to_sparse(), [0.5, 1.0], None], ids=["sparse", "list", "None"]
)
def test_what_is_no_dense_tensor_is_refused_by_name(weight):
    with pytest.raises(WeightError, match=r"up_proj is no dense tensor; give one, as to_dense\(\)"):
        encode(weight, name="up_proj")


@pytest.mark.parametrize("reconstruction", ["round", "Midpoint", "", None], ids=repr)
def test_an_unknown_reconstruction_is_refused_with_the_known_ones(reconstruction):
    with pytest.raises(WeightError, match=rf"{reconstruction!r}; choose from midpoint, truncate"):
        encode(torch.ones(4), reconstruction=reconstruction)
