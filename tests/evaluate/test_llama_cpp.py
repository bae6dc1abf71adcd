"""GGUF files hold the weights they should, and llama.cpp computes the same from them as we do."""

import importlib.util
import sys

import numpy as np
import pytest
import torch

import otaro
from otaro.errors import OtaroError
from otaro.evaluate import llama_cpp
from otaro.evaluate.engines import plain_model
from otaro.evaluate.llama_cpp import LlamaBatch, LlamaCpp, gguf_file
from otaro.file.io import NestedDirectory

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
needs_llama = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None,
    reason="llama-cpp-python is not installed (pip install 'otaro-llm[llama]')",
)


@pytest.mark.parametrize(("kind", "levels"), [("Q8_0", 127), ("Q5_0", 16), ("Q4_0", 8)])
def test_quantized_files_are_near_the_weights(tiny, tmp_path, kind, levels):
    tensors = {t.name: t for t in gguf.GGUFReader(gguf_file(NestedDirectory(tiny), kind, tmp_path)).tensors}
    assert {t.tensor_type.name for t in tensors.values()} == {kind, "F32"}, "embedding and head too"
    module = otaro.load(tiny).get_submodule("model.layers.0.mlp.up_proj")
    exact = module.packed.decode(8, torch.float32).numpy().reshape(-1, 32)
    written = tensors["blk.0.ffn_up.weight"]
    blocks = gguf.quants.dequantize(written.data, written.tensor_type).reshape(-1, 32)
    largest = np.abs(exact).max(axis=1, keepdims=True)
    assert (np.abs(blocks - exact) <= largest / levels * 1.01).all()


def test_rows_that_do_not_fit_blocks_are_refused(make_nested, tmp_path):
    with pytest.raises(
        OtaroError,
        match=r"Q4_0 needs rows of a multiple of 32 weights, and this model has "
        r"others",
    ):
        gguf_file(NestedDirectory(make_nested("llama")), "Q4_0", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named_and_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    llama_cpp.library.cache_clear()
    with pytest.raises(
        OtaroError,
        match=r"pip install 'otaro-llm\[llama\]' brings it and compiles "
        r"llama.cpp for this CPU",
    ):
        llama_cpp.library()


def error(logits, exact):
    return float((logits.float() - exact).square().mean().sqrt())


@needs_llama
@pytest.mark.parametrize("architecture", ["llama", "llama_tied", "mistral", "qwen2", "qwen3"])
def test_llama_cpp_is_as_near_to_float32_as_torch_in_float16(make_nested, tmp_path, architecture):
    nested = NestedDirectory(make_nested(architecture))
    model = otaro.load(nested.path)
    ids = torch.randint(120, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    plain = plain_model(model)
    with torch.inference_mode():
        exact = plain(torch.tensor([ids])).logits[0, 10:]
        half = plain.half()(torch.tensor([ids])).logits[0, 10:]
    engine = LlamaCpp(gguf_file(nested, "F16", tmp_path), threads=1, positions=64)
    engine.feed(ids[:10])
    engine.feed(ids[20:])
    engine.keep(10)  # and the rest anew
    theirs = []
    for token in ids[10:]:
        engine.feed([token])
        theirs.append(engine.logits())
    engine.close()
    assert 0 < error(torch.stack(theirs), exact) < 2 * error(half, exact)


@needs_llama
def test_sequences_of_a_batch_say_what_each_says_alone(tiny, tmp_path):
    path = gguf_file(NestedDirectory(tiny), "F16", tmp_path)
    together = LlamaBatch(path, threads=1, positions=32, sequences=3)
    prompts = [[5, 6, 7], [100, 3], [9]]
    first = [together.read(number, prompt) for number, prompt in enumerate(prompts)]
    last = together.go_on(first, 4)
    together.close()
    alone = LlamaBatch(path, threads=1, positions=32)
    for number, prompt in enumerate(prompts):
        assert alone.go_on([alone.read(0, prompt)], 4) == [last[number]]
    alone.close()
