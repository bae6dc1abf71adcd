"""Layers on a GPU, as vLLM runs them there: eager, and recorded as a CUDA graph for each number of tokens."""

import pytest
import torch

from otaro.file.io import NestedDirectory
from otaro.sefp.precision import Precision
from otaro.vllm.shares import PackedShare, Shares

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

QKV = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
TABLE = "model.embed_tokens.weight"


def layer_of(nested, names, device, dtype, precision="E5M5"):
    sizes = [nested.schema.packed[name][0] for name in names]
    layer = Shares("layer", sizes, sum(sizes), dtype)
    for index, name in enumerate(names):
        rows, length = nested.schema.packed[name]
        layer.take(index, PackedShare(nested, name, slice(0, rows), slice(0, length)))
    layer.attach(Precision(precision), torch.device(device))
    return layer


@pytest.mark.parametrize("tokens", [1, 8, 32, 300])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_recorded_layer_computes_what_an_eager_one_does(tiny, tokens, dtype):
    nested = NestedDirectory(tiny)
    layer = layer_of(nested, QKV, "cuda", dtype)
    x, recorded = torch.randn(2, tokens, nested.schema.packed[QKV[0]][1], dtype=dtype, device="cuda")
    eager = layer.linear(x, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product = layer.linear(recorded, None)
    recorded.copy_(x)
    graph.replay()
    if tokens > 8:  # the library's product, which may choose another order of sums while it is recorded
        torch.testing.assert_close(product, eager)
        return
    assert torch.equal(product, eager)
    assert torch.equal(product.cpu(), layer_of(nested, QKV, "cpu", dtype).linear(x.cpu(), None))


def test_a_recorded_lookup_and_head_read_the_same_rows(tiny):
    nested = NestedDirectory(tiny)
    layer = layer_of(nested, [TABLE], "cuda", torch.bfloat16)
    ids, recorded = torch.tensor([[5, 0, 1535], [1, 1, 1]], device="cuda")
    graph = torch.cuda.CUDAGraph()
    layer.linear(layer.embedding(ids), None)
    with torch.cuda.graph(graph):
        rows = layer.embedding(recorded)
        logits = layer.linear(rows, None)
    recorded.copy_(ids)
    graph.replay()
    plain = layer_of(nested, [TABLE], "cpu", torch.bfloat16)
    assert torch.equal(rows.cpu(), plain.embedding(ids.cpu()))
    assert torch.equal(logits.cpu(), plain.linear(rows.cpu(), None))
