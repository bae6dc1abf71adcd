"""Bytes that a token reads, and planes that are in memory."""

import gc
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import otaro
from otaro.kernels import cpu
from otaro.runtime.footprint import resident_planes, weight_bytes_per_token


def test_an_embedding_that_is_not_the_head_is_left_out(make_nested):
    model = otaro.load(make_nested("llama"))
    rows_and_lengths = 2 * [(96, 96), (48, 96), (48, 96), (96, 96), (112, 96), (112, 96), (96, 112)] + [
        (120, 96)
    ]
    # nibbles of blocks, two scales
    expected = sum(rows * (16 * -(-length // 32) + 2) for rows, length in rows_and_lengths)
    assert weight_bytes_per_token(model, otaro.Precision("E5M3")) == expected


def test_a_head_that_is_not_packed_is_read_too(tmp_path):
    """XGLM's is tied to an embedding that stays as it is."""
    sizes = {"vocab_size": 120, "d_model": 96, "ffn_dim": 128, "num_layers": 1, "attention_heads": 4}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("xglm", **sizes)).save_pretrained(tmp_path)
    otaro.pack(tmp_path, tmp_path / "nested")
    matrices = 4 * 96 * (16 * 3 + 2) + 128 * (16 * 3 + 2) + 96 * (16 * 4 + 2)  # attention, up, down
    assert (
        weight_bytes_per_token(otaro.load(tmp_path / "nested"), otaro.Precision("E5M3"))
        == matrices + 4 * 120 * 96
    )


def test_of_experts_those_count_that_a_token_takes(make_nested):
    model = otaro.load(make_nested("mixtral"))
    precision = otaro.Precision("E5M3")
    two = weight_bytes_per_token(model, precision)
    model.config.num_experts_per_tok = 4
    four = weight_bytes_per_token(model, precision)
    experts = 2 * (2 * 112 * (16 * 3 + 2) + 96 * (16 * 4 + 2))  # layers; gate and up, down
    assert four - two == 2 * experts


@pytest.mark.skipif(bool(cpu.MISSING) or sys.platform != "linux", reason="needs the extension, and /proc")
def test_planes_are_in_memory_from_their_first_use_until_they_are_given_back(tmp_path):
    otaro.pack("builtin", tmp_path / "nested")
    gc.collect()  # packing looked at what it packed
    sizes = {
        bits: (tmp_path / "nested" / f"model-m{bits}.safetensors").stat().st_size for bits in range(3, 9)
    }
    model = otaro.load(tmp_path / "nested", "E5M4")
    assert resident_planes(model)[5] == 0, "it was not even mapped"
    for precision in ("E5M4", "E5M8"):
        model.generate(torch.tensor([[3, 4]]), max_new_tokens=1, precision=precision)
    used = resident_planes(model)
    # All but pages that hold nothing that a product reads: the head of a file, the end of its last page.
    assert all(sizes[bits] - 16384 <= used[bits] <= sizes[bits] + 4096 for bits in sizes)
    otaro.set_precision(model, "E5M4")
    otaro.trim(model)
    left = resident_planes(model)
    assert all(left[bits] < used[bits] // 2 for bits in (5, 6, 7, 8))
    assert left[3] >= sizes[3] - 16384


def test_on_another_device_what_was_copied_there_counts(nested_dir):
    model = otaro.load(nested_dir, "E5M4").to("meta")
    weights = {module.packed for module in model.sefp.modules.values()}
    base = sum(packed.base.nbytes + packed.scales.nbytes for packed in weights)
    plane = sum(packed.plane4.nbytes for packed in weights)
    assert resident_planes(model) == {3: base, 4: plane, 5: 0, 6: 0, 7: 0, 8: 0}
