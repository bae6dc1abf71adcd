"""bench_table2.py without a GPU: every part runs on small shapes with the reference's arithmetic and made-up
times.
"""

from __future__ import annotations

import json

import bench_peers
import bench_table2 as bench
import gpu
import llama3
import pytest
import table2_decode
import table2_products as products
import torch
from peers import Peer
from transformers import LlamaConfig

from otaro.kernels import cuda, reference
from otaro.sefp.codec import scale_values
from otaro.sefp.precision import PRECISIONS, Precision

pytestmark = pytest.mark.usefixtures("swift_products")


@pytest.fixture
def pretended(monkeypatch):
    """Shapes of a toy, kernels of the reference, and times that grow with the bytes of a precision."""

    def run_products(digits, tokens, matrices, outs, biases=(), first=0, scratch=None):
        results = [reference.linear(digits[first : first + tokens], one) for one in matrices]
        for out, result in zip(outs, results, strict=True):
            out[first : first + tokens] = result

    def run_halves(x, matrices, outs, biases=(), scratch=None, early=False, arranged=False):
        for one, out in zip(matrices, outs, strict=True):
            out.copy_(reference.matmul(x.float(), one))

    def capture(launch, launches):
        for number in range(min(launches, 3)):
            launch(number)

    def alternate(contenders, rounds):
        return {name: 1e-6 * (16 if "float16" in name else int(name[3])) for name in contenders}

    toy = [llama3.Product(one.name, (70,) * len(one.rows), 192, one.count) for one in llama3.PRODUCTS]
    smaller = {"PRODUCTS": toy, "BATCH_SHAPE": (70, 192), "alternate": alternate}
    for name, value in smaller.items():
        monkeypatch.setattr(products, name, value)
    here = {
        "DEVICE": "cpu",
        "ROTATED": 20_000,
        "capture": capture,
        "release": lambda: None,
        "copy_rate": lambda rounds: 4e12,
    }
    for name, value in here.items():
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setattr(cuda, "to_digits", lambda x, group_size, out=None: x.float())
    monkeypatch.setattr(cuda, "products", run_products)
    monkeypatch.setattr(cuda, "multiply_halves", run_halves)
    for name in ("linear", "matmul", "decode"):
        monkeypatch.setattr(cuda, name, getattr(reference, name))
    monkeypatch.setattr(cuda, "Scratch", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def test_accounting_is_the_papers():
    e5m4 = Precision("E5M4")
    assert llama3.weight_bytes(e5m4) / llama3.GIB == pytest.approx(4.791, abs=5e-4)
    assert llama3.cache_bytes(2000, e5m4) / llama3.GIB == pytest.approx(0.080, abs=5e-4)
    assert (llama3.weight_bytes(e5m4) + llama3.cache_bytes(2048, e5m4)) / llama3.GIB < 4.88
    assert (llama3.weight_bytes(None) + llama3.cache_bytes(2000, None)) / llama3.GIB == pytest.approx(
        15.20, abs=5e-3
    )


def test_random_matrices_hold_what_they_say(pretended):
    packed = llama3.random_packed(50, 200)
    sizes = scale_values(packed.scales, packed.scale_exponent)
    assert 2.0**-6 <= sizes.abs().min() < sizes.abs().max() < 2.0**-3
    assert sizes.min() < 0 < sizes.max()
    assert len(packed.planes) == 5
    stored = sum(part.nbytes for part in (packed.base, packed.scales, *packed.planes))
    assert stored == llama3.matrix_bytes(50, 200, PRECISIONS[0])


def test_a_wrong_product_is_told(pretended, monkeypatch):
    right = cuda.products

    def off_by_a_bit(digits, tokens, matrices, outs, **options):
        right(digits, tokens, matrices, outs, **options)
        outs[0] *= 1 + 2**-20

    monkeypatch.setattr(cuda, "products", off_by_a_bit)
    found = set(bench.wrong({"layer": products.layer(1)}))
    assert {"layer/products/head/1/checks/E5M4", "layer/products/o/16/checks/E5M8"} <= found
    assert not any("/32/" in path for path in found)


def test_batches(pretended, capsys):
    results = products.batch(1)
    assert list(results["tokens"]) == ["1", "2", "4", "8", "16", "32", "64", "128"]
    assert not list(bench.wrong(results))
    assert "E5M4 fastest" in capsys.readouterr().out


def test_a_layer_of_several_tokens(pretended, capsys):
    results = {"layer": products.layer(1)}
    assert not list(bench.wrong(results))
    assert list(results["layer"]["products"]) == ["q k v", "o", "gate up", "down", "head"]
    model = results["layer"]["model_seconds"]
    assert model["float16"] / model["E5M4"] == pytest.approx(4)
    assert results["layer"]["summed_seconds"]["64"]["E5M8"] == pytest.approx(4 * 8e-6)
    bars = {bar.what: bar for bar in bench.judged(results)}
    assert bars["a layer's products of 8 tokens at E5M8, times float16"].found == pytest.approx(2)
    assert len(bars) == 3 + 8
    assert all(bar.holds for bar in bars.values())
    assert "a layer, us by tokens" in capsys.readouterr().out
    json.dumps(results)


def test_prompts_are_judged_beside_float16():
    level = dict.fromkeys(("float16", "E5M8", "E5M4", "E5M3"), 1.0)
    seconds = {"500": level | {"E5M8": 1.3, "E5M4": 1.5}, "4000": level}
    missed = [bar.what for bar in bench.judged({"prompts": {"seconds": seconds}}) if not bar.holds]
    assert missed == ["reading 500 tokens at E5M4, time beside float16 of our own"]


def test_products_of_others_are_timed_beside_ours(pretended, monkeypatch):
    monkeypatch.setattr(bench_peers, "alternate", lambda contenders, rounds: dict.fromkeys(contenders, 1.0))
    theirs = []
    calls = {"weights": lambda *shape: [torch.zeros(shape)], "multiply": lambda *given: theirs.append(given)}
    peer = Peer("theirs", (1, 8), **calls, check=None)
    found = bench_peers.one_shape(70, 192, [peer], 1)
    assert not list(bench.wrong(found))
    assert set(found["seconds"]["8"]) == {"float16", "E5M3", "E5M4", "E5M8", "theirs"}
    assert "theirs" not in found["seconds"]["16"]
    assert {x.shape for _, x, _ in theirs} == {(1, 192), (8, 192)}


@pytest.fixture
def toy(pretended, monkeypatch):
    """A model of two small layers, and rounds of four tokens behind twelve."""
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 50}
    shape = LlamaConfig(**small, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    monkeypatch.setattr(llama3, "SHAPE", shape)
    for name, value in {"CONTEXT": 12, "CAPACITY": 16, "STEPS": 4}.items():
        monkeypatch.setattr(table2_decode, name, value)
    return table2_decode


def test_transformers_decodes_after_its_context(toy, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    contender = toy.transformers_contender()
    layers = contender.rewind.__closure__[0].cell_contents.layers
    contender.step()
    assert int(layers[1].cumulative_length) == 13
    times = toy.rounds_of({"one": contender}, 2, steps=3)
    assert int(layers[1].cumulative_length) == 15
    assert len(times["one"]) == 2
    result = toy.through_transformers(1)
    json.dumps(result)
    assert result["tokens_per_s"] > 0


def test_our_decoder_runs_every_precision_and_both_caches(toy, capsys):
    results = {
        "decode": toy.decode(2),
        "transformers": {"tokens_per_s": 1.0, "accounted": {"total_gib": 15.2}},
    }
    rows = results["decode"]["rows"]
    assert len(rows) == 1 + 6 * 2
    assert not list(bench.wrong(results))
    for row in rows.values():
        assert len(row["rounds"]) == 2
        assert row["tokens_per_s"] == 1 / row["seconds"]
    assert rows["E5M4, E5M4 cache"]["cache_allocated"] < rows["E5M4, float16 cache"]["cache_allocated"]
    bars = {bar.what: bar for bar in bench.judged(results)}
    assert len(bars) == 7
    assert bars["GiB of weights and cache at E5M4, by their sizes"].holds
    capsys.readouterr()
    toy.print_table(results)
    table = capsys.readouterr().out
    assert "the paper, E5M4                4.77 GB                95.65       2.45" in table
    assert "ours, E5M4, E5M4 cache" in table
    json.dumps(results)


def test_what_was_not_measured_is_not_judged(toy, capsys):
    failed = {"decode": {"failed": "no memory"}, "transformers": {"failed": "no compiler"}}
    assert list(bench.judged(failed)) == []
    toy.print_table(failed)
    assert capsys.readouterr().out == ""


def test_logits_that_are_no_numbers_are_told(toy, monkeypatch):
    monkeypatch.setattr(gpu, "STD", float("inf"))
    results = {"decode": toy.decode(1)}
    assert list(bench.wrong(results)) == ["decode/rows/float16"]


def test_prompts_are_read_at_every_precision(toy, monkeypatch):
    monkeypatch.setattr(toy, "PROMPTS", (17, 20))
    seconds = toy.prompts(1)["seconds"]
    assert list(seconds) == ["17", "20"]
    assert all(list(one) == ["float16", "E5M8", "E5M4", "E5M3"] for one in seconds.values())


def test_generate_is_timed_beside_the_decoder_that_it_calls(toy, monkeypatch):
    called, advance = [], toy.GpuDecoder.advance
    monkeypatch.setattr(toy.GpuDecoder, "advance", lambda decoder: called.append(0) or advance(decoder))
    result = toy.api(1)
    assert list(result["tokens_per_s"]) == ["decoder", "generate", "generate, streamed"]
    assert min(result["tokens_per_s"].values()) > 0
    assert len(called) >= 3 * 3 * (toy.STEPS - 2)  # three rounds of all three
    assert [bar.asked for bar in bench.judged({"api": result})] == [bench.BY_GENERATE] * 2


def test_a_round_runs_at_its_precision_from_the_context_on(toy):
    decoder = toy.GpuDecoder(toy.packed_model())
    cache = toy.filled(decoder, None)
    for precision in (Precision("E5M3"), Precision("E5M7")):
        contender = toy.Row(decoder, cache, precision, 0).contender()
        contender.rewind()
        assert cache.lengths == [12]
        contender.step()
        assert cache.lengths == [13]
        assert set(decoder.precisions) == {precision.mantissa_bits}


def test_planes_come_one_by_one(toy):
    model, held = toy.growing_model()
    assert list(held) == list(reversed(toy.PRECISIONS))
    assert len(model.lm_head.whole(8).planes) == llama3.ALL_PLANES
    assert len(model.lm_head.whole(3).planes) == 0
