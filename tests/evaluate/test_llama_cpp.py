"""GGUF files hold the weights they should, and llama.cpp computes the same from them as we do."""

import copy
import importlib.util
import sys

import numpy as np
import pytest
import torch

import otaro
from otaro.errors import OtaroError
from otaro.evaluate import llama_cpp
from otaro.evaluate.engines import plain_model
from otaro.evaluate.llama_cpp import LlamaBatch, LlamaCpp, gguf_path, write_gguf
from otaro.runtime.load import load_tokenizer

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
needs_llama = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed (pip install 'otaro-llm[llama]')"
)


def read(path):
    """Tensors by name, as float32."""
    reader = gguf.GGUFReader(path)
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}, reader


def decoded(model, name):
    module = model.get_submodule(name)
    return module.packed.decode(8, torch.float32).numpy()


def test_a_file_may_hold_the_tokenizer_too(tiny, tmp_path):
    tokenizer = load_tokenizer(tiny)
    write_gguf(otaro.load(tiny), "F16", tmp_path / "model.gguf", tokenizer)
    fields = read(tmp_path / "model.gguf")[1].fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert tokens == tokenizer.convert_ids_to_tokens(range(1536))
    assert fields["tokenizer.ggml.merges"].contents()[0].replace(" ", "") in tokens
    assert [number for number, kind in enumerate(fields["tokenizer.ggml.token_type"].contents()) if kind == 3] == [0, 1, 2]


def test_a_file_of_float16_holds_the_weights_at_the_finest_precision(tiny, tmp_path):
    model = otaro.load(tiny, "E5M3")  # whatever it runs at
    write_gguf(model, "F16", tmp_path / "model.gguf")
    tensors, reader = read(tmp_path / "model.gguf")
    assert len(tensors) == 1 + 6 * 9 + 1, "the head is tied to the embedding and there once"
    assert (tensors["token_embd.weight"] == decoded(model, "model.embed_tokens").astype(np.float16)).all()
    assert (tensors["blk.5.ffn_down.weight"] == decoded(model, "model.layers.5.mlp.down_proj").astype(np.float16)).all()
    assert (tensors["blk.2.attn_norm.weight"] == model.model.layers[2].input_layernorm.weight.numpy(force=True)).all()
    assert {t.tensor_type.name for t in reader.tensors} == {"F16", "F32"}
    fields = {
        name: reader.fields[name].contents() for name in ("llama.block_count", "llama.rope.freq_base", "llama.vocab_size")
    }
    assert fields == {"llama.block_count": 6, "llama.rope.freq_base": 10000.0, "llama.vocab_size": 1536}
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"], "nothing half-written is left"


def test_queries_and_keys_are_put_into_the_order_of_llama(tiny, tmp_path):
    model = otaro.load(tiny)
    write_gguf(model, "F16", tmp_path / "model.gguf")
    tensors, _ = read(tmp_path / "model.gguf")
    for ours, theirs in (("q_proj", "attn_q"), ("k_proj", "attn_k")):
        rows, written = decoded(model, f"model.layers.1.self_attn.{ours}"), tensors[f"blk.1.{theirs}.weight"]
        for head in range(len(rows) // 32):
            for pair in range(16):  # 2i and 2i + 1 turn together there, i and i + 16 here
                at = 32 * head
                assert (written[at + 2 * pair] == rows[at + pair].astype(np.float16)).all()
                assert (written[at + 2 * pair + 1] == rows[at + pair + 16].astype(np.float16)).all()
    values = decoded(model, "model.layers.1.self_attn.v_proj").astype(np.float16)
    assert (tensors["blk.1.attn_v.weight"] == values).all()


def test_only_the_architecture_llama_is_reordered(make_nested, tmp_path):
    model = otaro.load(make_nested("qwen2"))
    write_gguf(model, "F16", tmp_path / "model.gguf")
    tensors, _ = read(tmp_path / "model.gguf")
    attention = model.model.layers[0].self_attn
    assert (tensors["blk.0.attn_q.weight"] == decoded(model, "model.layers.0.self_attn.q_proj").astype(np.float16)).all()
    assert (tensors["blk.0.attn_k.bias"] == attention.k_proj.bias.numpy(force=True)).all()
    assert "output.weight" in tensors, "this head is not tied"


@pytest.mark.parametrize(("kind", "levels"), [("Q8_0", 127), ("Q5_0", 16), ("Q4_0", 8)])
def test_quantized_files_are_near_the_weights(tiny, tmp_path, kind, levels):
    model = otaro.load(tiny)
    write_gguf(model, kind, tmp_path / "model.gguf")
    tensors, reader = read(tmp_path / "model.gguf")
    assert {t.tensor_type.name for t in reader.tensors} == {kind, "F32"}, "embedding and head too"
    exact = decoded(model, "model.layers.0.mlp.up_proj").reshape(-1, 32)
    blocks = tensors["blk.0.ffn_up.weight"].reshape(-1, 32)
    largest = np.abs(exact).max(axis=1, keepdims=True)
    assert (np.abs(blocks - exact) <= largest / levels * 1.01).all()


def test_rows_that_do_not_fit_blocks_are_refused(make_nested, tmp_path):
    with pytest.raises(OtaroError, match=r"down_proj.weight has rows of 112 weights; Q4_0 needs a multiple of 32"):
        write_gguf(otaro.load(make_nested("llama")), "Q4_0", tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())


def test_other_architectures_are_refused_by_name(make_nested, tmp_path):
    with pytest.raises(OtaroError, match=r"models of type mixtral cannot be written for llama.cpp here; llama, mistral"):
        write_gguf(otaro.load(make_nested("mixtral")), "F16", tmp_path / "model.gguf")


def test_a_file_is_named_by_its_model(tiny, nested_dir, tmp_path):
    first, second = (gguf_path(otaro.load(directory), "F16", tmp_path) for directory in (tiny, nested_dir))
    assert first != second
    assert first.name.endswith("E5M8-F16.gguf")


@pytest.mark.parametrize("module", ["llama_cpp", "gguf"])
def test_a_missing_package_is_named_and_how_to_get_it(tiny, tmp_path, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    llama_cpp.library.cache_clear()
    with pytest.raises(OtaroError, match=r"pip install 'otaro-llm\[llama\]' brings it and compiles llama.cpp for this CPU"):
        llama_cpp.library() if module == "llama_cpp" else write_gguf(otaro.load(tiny), "F16", tmp_path / "x.gguf")


def error(logits, exact):
    return float((logits.float() - exact).square().mean().sqrt())


@needs_llama
@pytest.mark.parametrize("architecture", ["llama", "llama_tied", "mistral", "qwen2", "qwen3"])
def test_llama_cpp_is_as_near_to_float32_as_torch_in_float16(make_nested, tmp_path, architecture):
    model = otaro.load(make_nested(architecture))
    write_gguf(model, "F16", tmp_path / "model.gguf")
    ids = torch.randint(120, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    plain = plain_model(model)
    with torch.inference_mode():
        exact = plain(torch.tensor([ids])).logits[0, 10:]
        half = plain.half()(torch.tensor([ids])).logits[0, 10:]
    engine = LlamaCpp(tmp_path / "model.gguf", threads=1, positions=64)
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
def test_rotary_frequencies_that_are_not_plain_are_carried_over(make_nested, tmp_path):
    model = otaro.load(make_nested("llama"))
    model.model.rotary_emb.inv_freq.mul_(torch.linspace(1, 0.25, 12))
    write_gguf(model, "F16", tmp_path / "model.gguf")
    tensors, _ = read(tmp_path / "model.gguf")
    assert np.allclose(tensors["rope_freqs.weight"], 1 / np.linspace(1, 0.25, 12))
    ids = list(range(30, 50))
    plain = plain_model(model)
    with torch.inference_mode():
        exact, half = (one(torch.tensor([ids])).logits[0, -1] for one in (plain, copy.deepcopy(plain).half()))
    engine = LlamaCpp(tmp_path / "model.gguf", threads=1, positions=64)
    engine.feed(ids)
    assert error(engine.logits(), exact) < 2 * error(half, exact)
    engine.close()


@needs_llama
def test_sequences_of_a_batch_say_what_each_says_alone(tiny, tmp_path):
    write_gguf(otaro.load(tiny), "F16", tmp_path / "model.gguf")
    together = LlamaBatch(tmp_path / "model.gguf", threads=1, positions=32, sequences=3)
    prompts = [[5, 6, 7], [100, 3], [9]]
    first = [together.read(number, prompt) for number, prompt in enumerate(prompts)]
    last = together.go_on(first, 4)
    together.close()
    alone = LlamaBatch(tmp_path / "model.gguf", threads=1, positions=32)
    for number, prompt in enumerate(prompts):
        assert alone.go_on([alone.read(0, prompt)], 4) == [last[number]]
    alone.close()
