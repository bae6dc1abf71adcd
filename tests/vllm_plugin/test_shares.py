"""What processes hold of packed weights makes up the whole, to the last bit; vLLM itself is not needed for
that."""

import pytest
import torch

from otaro.errors import FormatError, OtaroError, ShardMissingError
from otaro.file.io import NestedDirectory
from otaro.runtime.modules import PackedWeight
from otaro.sefp.precision import PRECISIONS, Precision
from otaro.vllm.shares import PackedShare, Shares, dealt

LAYER = "model.layers.0."
QKV = [f"{LAYER}self_attn.{part}_proj.weight" for part in "qkv"]
DOWN = f"{LAYER}mlp.down_proj.weight"
E5M8 = Precision("E5M8")


@pytest.fixture
def nested(tiny):
    return NestedDirectory(tiny)


def whole(nested, name, bits):
    weight = PackedWeight(nested, name)
    weight.attach("cpu")
    weight.reach(bits)
    return weight


def layer_of(nested, shares, precision=E5M8, padded=None):
    sizes = [share.shape[0] for share in shares]
    layer = Shares("layer", sizes, padded or sum(sizes), torch.float32)
    for index, share in reversed(list(enumerate(shares))):
        layer.take(index, share)
    layer.attach(precision, torch.device("cpu"))
    return layer


def everything(nested, name):
    rows, length = nested.schema.packed[name]
    return PackedShare(nested, name, slice(0, rows), slice(0, length))


def test_rows_and_inputs_are_dealt_out_in_order_and_heads_fewer_than_processes_twice():
    assert [dealt(96, 32, rank, 3) for rank in range(3)] == [slice(0, 32), slice(32, 64), slice(64, 96)]
    assert [dealt(96, 96, rank, 3) for rank in range(3)] == [slice(0, 96)] * 3
    assert [dealt(64, 32, rank, 4).start for rank in range(4)] == [0, 0, 32, 32]


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("tokens", [3, 20])
def test_products_of_parts_of_the_rows_are_parts_of_the_product(nested, precision, tokens):
    bits, (rows, length) = precision.mantissa_bits, nested.schema.packed[QKV[0]]
    x = torch.randn(tokens, length)
    parts = [
        PackedShare(nested, QKV[0], dealt(rows, rows // 2, rank, 2), slice(0, length)) for rank in range(2)
    ]
    products = [layer_of(nested, [part], precision).linear(x, None) for part in parts]
    expected = whole(nested, QKV[0], bits).linear(x, bits, None)
    if tokens <= 8:  # on integers
        assert torch.equal(torch.cat(products, 1), expected)
    else:
        torch.testing.assert_close(torch.cat(products, 1), expected)


def test_rows_stay_where_the_file_is_mapped(nested):
    rows, length = nested.schema.packed[QKV[0]]
    part = PackedShare(nested, QKV[0], slice(rows // 2, rows), slice(0, length))
    part.attach("cpu")
    stored = nested.base.tensor(QKV[0])
    assert part.base.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_parts_of_the_inputs_have_the_same_values(nested, precision):
    bits, (rows, length) = precision.mantissa_bits, nested.schema.packed[DOWN]
    values = []
    for rank in range(2):
        part = PackedShare(nested, DOWN, slice(0, rows), dealt(length, length // 2, rank, 2))
        part.attach("cpu")
        part.reach(bits)
        values.append(part.decode(bits, torch.float32))
    assert torch.equal(torch.cat(values, 1), whole(nested, DOWN, bits).decode(bits, torch.float32))


def test_fused_matrices_have_scales_of_their_own_and_come_in_any_order(nested):
    assert len({nested.schema.scale_exponents[name] for name in QKV}) > 1, "the model does not show it"
    x = torch.randn(2, 3, nested.schema.packed[QKV[0]][1])
    layer = layer_of(nested, [everything(nested, name) for name in QKV])
    bias = torch.randn(sum(layer.sizes))
    alone = [
        whole(nested, name, 8).linear(x.view(6, -1), 8, part)
        for name, part in zip(QKV, bias.split(layer.sizes), strict=True)
    ]
    assert torch.equal(layer.linear(x, bias), torch.cat(alone, 1).view(2, 3, -1))


def test_padding_of_a_vocabulary_is_zero_and_rows_are_looked_up(nested):
    table = "model.embed_tokens.weight"
    rows, length = nested.schema.packed[table]
    layer = layer_of(nested, [everything(nested, table)], padded=rows + 64)
    logits = layer.linear(torch.randn(2, length), None)
    assert logits.shape == (2, rows + 64)
    assert not logits[:, rows:].any()
    ids = torch.tensor([[1, 0], [5, 7]])
    expected = whole(nested, table, 8).decode(8, torch.float32)[ids]
    assert torch.equal(layer.embedding(ids), expected)


def test_groups_are_not_cut(nested):
    rows, length = nested.schema.packed[DOWN]
    with pytest.raises(
        OtaroError,
        match=r"down_proj.weight: 384 inputs dealt out by 96 would cut its "
        r"groups of 64",
    ):
        PackedShare(nested, DOWN, slice(0, rows), dealt(length, length // 4, 0, 4))


def test_a_layer_that_lacks_a_matrix_is_refused(nested):
    layer = Shares("model.layers.0.self_attn.qkv_proj", [128, 64, 64], 256, torch.float32)
    layer.take(0, everything(nested, QKV[0]))
    with pytest.raises(FormatError, match="qkv_proj: 1 of 3 matrices"):
        layer.attach(E5M8, torch.device("cpu"))


def test_a_plane_that_is_missing_is_refused_and_taken_when_it_comes(copy_of, tiny):
    nested = NestedDirectory(copy_of(tiny, planes=(3, 4)))
    layer = layer_of(nested, [everything(nested, DOWN)], Precision("E5M4"))
    with pytest.raises(ShardMissingError, match=r"E5M5 needs model-m5.safetensors"):
        layer.require(Precision("E5M5"))
    (nested.path / "model-m5.safetensors").write_bytes((tiny / "model-m5.safetensors").read_bytes())
    layer.require(Precision("E5M5"))
    layer.reach(Precision("E5M5"))
    layer.bits = 5
    x = torch.randn(2, nested.schema.packed[DOWN][1])
    assert torch.equal(layer.linear(x, None), whole(nested, DOWN, 5).linear(x, 5, None))
