"""GGUF files are packed like checkpoints: by rows, with their tokenizer; refusals of damaged ones."""

import importlib.util
import json
import struct
import warnings

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import otaro
from otaro.errors import CheckpointError, OtaroError
from otaro.export.run import export
from otaro.file.checkpoint import Checkpoint
from otaro.file.gguf import Gguf
from tests.export.conftest import FITTING, decoded, make_fitting  # noqa: F401 (fixtures)
from tests.export.test_gguf_vocabulary import KINDS, TEXTS, make  # noqa: F401

gguf = pytest.importorskip("gguf", reason="gguf is not installed")


@pytest.mark.parametrize("architecture", FITTING)
def test_a_file_has_the_tensors_of_the_model_it_was_made_of(architecture, make_fitting, decoded, tmp_path):  # noqa: F811
    nested = make_fitting(architecture)
    export(
        nested,
        tmp_path / "m.gguf",
        precision="E5M4",
        to="gguf",
        type="F32" if architecture == "qwen2" else None,
    )
    checkpoint, wanted = Checkpoint(tmp_path / "m.gguf"), decoded(nested, "E5M4")
    assert checkpoint.shapes.keys() == wanted.keys()
    for name, values in wanted.items():
        read = checkpoint.read(name).float()
        if "norm" in name and architecture.startswith("gemma"):  # one was added for the file, which rounds
            assert torch.equal(read + 1, values + 1), name
        else:
            assert torch.equal(read, values), name
    original = Checkpoint(nested.parent / "checkpoint").config
    kept = [
        "hidden_size",
        "head_dim",
        "rope_parameters",
        "num_key_value_heads",
        "tie_word_embeddings",
        "layer_types",
    ]
    for setting in [
        *kept,
        "embedding_multiplier",
        "attn_logit_softcapping",
        "query_pre_attn_scalar",
        "num_experts_per_tok",
    ]:
        assert getattr(checkpoint.config, setting, None) == getattr(original, setting, None), setting


def test_biases_of_queries_are_put_back_too(random_model, tmp_path):
    random_model("llama", attention_bias=True).save_pretrained(tmp_path / "checkpoint")
    otaro.pack(tmp_path / "checkpoint", tmp_path / "nested")
    export(tmp_path / "nested", tmp_path / "m.gguf", precision="E5M3", to="gguf")
    original, found = Checkpoint(tmp_path / "checkpoint"), Checkpoint(tmp_path / "m.gguf")
    for name in ("q_proj", "k_proj", "v_proj"):
        name = f"model.layers.1.self_attn.{name}.bias"
        assert torch.equal(found.read(name), original.read(name).float())


def test_packing_one_says_what_it_came_from(tiny, tmp_path):
    export(tiny, tmp_path / "m.gguf", precision="E5M8", to="gguf", type="F16")
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        otaro.pack(tmp_path / "m.gguf", tmp_path / "nested")
    assert "the weights come from a GGUF file (43 in F16, 13 in F32); what was rounded there stays so" in map(
        str, (note.message for note in notes)
    )
    stated = json.loads((tmp_path / "nested" / "otaro.json").read_text())
    assert stated["source"] == {"gguf": "m.gguf", "types": {"F16": 43, "F32": 13}}
    ids = torch.arange(5, 25).unsqueeze(0)
    models = [otaro.load(directory, "E5M8") for directory in (tiny, tmp_path / "nested")]
    first, second = (model.generate(ids, max_new_tokens=12, do_sample=False) for model in models)
    assert torch.equal(first, second)
    text = "The statement returns a list of 42 words."
    assert AutoTokenizer.from_pretrained(tmp_path / "nested")(text) == AutoTokenizer.from_pretrained(tiny)(
        text
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokenizer_comes_along(kind, make, tmp_path):  # noqa: F811
    nested, tokenizer = make(kind)
    export(nested, tmp_path / "m.gguf", precision="E5M3", to="gguf")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        otaro.pack(tmp_path / "m.gguf", tmp_path / "nested")
    found = AutoTokenizer.from_pretrained(tmp_path / "nested")
    for text in TEXTS:
        assert found(text).input_ids == tokenizer(text).input_ids, text
        assert found.decode(found(text).input_ids) == tokenizer.decode(tokenizer(text).input_ids)
    assert (found.bos_token, found.eos_token, found.chat_template) == ("<s>", "</s>", "{{ messages }}")


@pytest.mark.parametrize("kind", ["Q4_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "BF16"])
def test_every_type_that_gguf_dequantizes_is_read_by_rows(kind, tmp_path):
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    # no exponent is that of NaN
    data = np.random.default_rng(0).integers(0, 60, (6, 512 // block * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("x", data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    wanted = torch.tensor(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]))
    numbers = torch.tensor([4, 0, 5])
    assert torch.equal(Gguf(tmp_path / "m.gguf").rows("x", numbers).float(), wanted[numbers])


def text(word):
    return struct.pack("<Q", len(word)) + word


def header(version=3, tensors=0, settings=0):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, settings)


TENSOR = text(b"x") + struct.pack("<IQQIQ", 2, 32, 4, 0, 0)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "cannot be read"),
        (b"GGML" + bytes(40), "it does not begin as one"),
        (header()[:12], "it ends before its header does, at byte 12"),
        (header(version=1), "its version is 1"),
        (header(version=0x03000000), "big-endian"),
        (header(settings=1 << 60), "it states 1152921504606846976 settings, for which it is too short"),
        (header(tensors=1 << 63), "tensors, for which it is too short"),
        (header(settings=1) + struct.pack("<Q", 1 << 62) + bytes(20), "it ends before its header does"),
        (header(settings=1) + text(b"\xff\xfe") + bytes(20), "is not UTF-8"),
        (header(settings=1) + text(b"a") + struct.pack("<I", 99) + bytes(20), "unknown type 99"),
        (
            header(settings=1) + text(b"a") + struct.pack("<IIQ", 9, 4, 1 << 61) + bytes(20),
            "numbers, for which it is too short",
        ),
        (
            header(settings=1) + text(b"a") + struct.pack("<IIQ", 9, 8, 1 << 61) + bytes(20),
            "values, for which it is too short",
        ),
        (
            header(settings=1) + text(b"a") + struct.pack("<IIQ", 9, 9, 1) * 1 + struct.pack("<IQ", 9, 1) * 9,
            "unknown type 9",
        ),
        (header(settings=2) + (text(b"a") + struct.pack("<IB", 7, 1)) * 2 + bytes(20), "it says 'a' twice"),
        (header(tensors=1) + TENSOR + bytes(40), "it ends before x does"),
        (header(tensors=1) + text(b"x") + struct.pack("<I", 9) + bytes(90), "or has 9 dimensions"),
        (header(tensors=2) + TENSOR * 2 + bytes(90), "is there twice"),
        (
            header(tensors=1) + text(b"x") + struct.pack("<IQQIQ", 2, 32, 1 << 62, 0, 0) + bytes(90),
            "it ends before x does",
        ),
        (
            header(tensors=1) + text(b"x") + struct.pack("<IQQIQ", 2, 32, 4, 0, 1 << 63) + bytes(90),
            "it ends before x does",
        ),
        (
            header(tensors=1) + text(b"x") + struct.pack("<IQQIQ", 2, 33, 4, 2, 0) + bytes(90),
            "Q4_0 comes in blocks of 32",
        ),
        (
            header(tensors=1) + text(b"x") + struct.pack("<IQQIQ", 2, 32, 4, 77, 0) + bytes(90),
            "x is of the unknown type 77",
        ),
        (
            header(settings=1, tensors=1)
            + text(b"general.alignment")
            + struct.pack("<II", 4, 0)
            + TENSOR
            + bytes(600),
            "its alignment is 0",
        ),
    ],
)
def test_damaged_files_are_refused(data, why, tmp_path):
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=why):
        otaro.pack(tmp_path / "m.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_file_cut_anywhere_is_refused(make_fitting, tmp_path):  # noqa: F811
    export(make_fitting("llama"), tmp_path / "whole.gguf", precision="E5M3", to="gguf")
    whole = (tmp_path / "whole.gguf").read_bytes()
    for length in [*range(0, 3000, 97), len(whole) // 2, len(whole) - 64]:
        (tmp_path / "m.gguf").write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            otaro.pack(tmp_path / "m.gguf", tmp_path / "out")


def test_flipped_bytes_of_the_header_end_in_words_or_in_a_model(make_fitting, tmp_path):  # noqa: F811
    export(make_fitting("llama"), tmp_path / "whole.gguf", precision="E5M3", to="gguf")
    whole = (tmp_path / "whole.gguf").read_bytes()
    random = np.random.default_rng(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(60):
            data = bytearray(whole)
            data[int(random.integers(0, 2600))] = int(random.integers(0, 256))
            (tmp_path / "m.gguf").write_bytes(data)
            try:
                otaro.pack(tmp_path / "m.gguf", tmp_path / f"out{number}")
            except OtaroError:
                assert not (tmp_path / f"out{number}").exists()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"general.architecture": "bert"}, "its architecture is 'bert', and llama, qwen2, .* are read here"),
        ({"llama.block_count": 1 << 20}, "it states 1048576 layers and has 21 tensors"),
        ({"split.count": 3}, "it is one of 3 parts"),
        ({"llama.attention.key_length": 23}, "its heads are 23 wide"),
        ({"llama.block_count": "two"}, "its llama.block_count is 'two'"),
        ({"llama.embedding_length": None}, "it does not say llama.embedding_length"),
        ({"llama.embedding_length": 100}, "has shape"),
        ({"llama.block_count": 1}, "it holds blk.1.*, which llama models do not have here"),
        ({"llama.rope.scaling.type": "longrope"}, "its rotary positions are of type longrope"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, why, make_fitting, tmp_path, monkeypatch):  # noqa: F811
    export(make_fitting("llama"), tmp_path / "m.gguf", precision="E5M3", to="gguf")
    stated = Gguf.__init__

    def changed(self, path):
        stated(self, path)
        self.fields = {name: value for name, value in (self.fields | changes).items() if value is not None}

    monkeypatch.setattr(Gguf, "__init__", changed)
    with pytest.raises(CheckpointError, match=why):
        otaro.pack(tmp_path / "m.gguf", tmp_path / "out")


def test_positions_of_llama_3_come_back(random_model, tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    rope |= {"original_max_position_embeddings": 8192}
    random_model("llama", rope_parameters=rope).save_pretrained(tmp_path / "checkpoint")
    otaro.pack(tmp_path / "checkpoint", tmp_path / "nested")
    export(tmp_path / "nested", tmp_path / "m.gguf", precision="E5M3", to="gguf")
    assert Checkpoint(tmp_path / "m.gguf").config.rope_parameters == rope


def test_without_the_package_it_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "m.gguf").write_bytes(header())
    monkeypatch.setitem(importlib.import_module("sys").modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"pip install 'otaro-llm\[gguf\]' brings it"):
        otaro.pack(tmp_path / "m.gguf", tmp_path / "out")
