"""Checkpoints of packed integers: compressed-tensors itself unpacks them, and transformers opens them."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import otaro
from otaro.errors import OtaroError
from otaro.export.bits import pack_bits, unpack_bits
from otaro.export.compressed_tensors import integer_bits
from otaro.export.grid import Grid
from otaro.export.run import export
from otaro.sefp.codec import MAX_SCALE_EXPONENT, MIN_SCALE_EXPONENT
from tests.export.conftest import every_code

needed = pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_bits_come_back(bits):
    numbers = torch.arange(1 << bits, dtype=torch.int16).repeat(2).view(4, -1).flip(0)
    words = pack_bits(numbers.reshape(1, -1), bits)
    assert words.shape == (1, numbers.numel() * bits // 32)
    assert torch.equal(unpack_bits(words, bits), numbers.reshape(1, -1))
    stream = int.from_bytes(words.numpy().tobytes(), "little")
    assert [
        stream >> bits * i & (1 << bits) - 1 for i in range(numbers.numel())
    ] == numbers.flatten().tolist()


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_those_of_the_library(bits):
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    numbers = torch.randint(0, 1 << bits, (5, 96), generator=torch.Generator().manual_seed(0))
    signed = (numbers - (1 << bits - 1)).to(torch.int8)
    assert torch.equal(pack_bits(numbers, bits), pack_to_int32(signed, bits))


def test_which_precisions_have_integers():
    assert [integer_bits(Grid(bits, "midpoint")) for bits in range(3, 9)] == [4, 8, 8, None, None, None]
    assert [integer_bits(Grid(bits, "truncate")) for bits in range(3, 9)] == [4, 8, 8, 8, 8, None]


@pytest.mark.parametrize(
    "architecture", ["llama", "llama_tied", "qwen2", "qwen3", "phi3", "gemma3", "granite", "olmo2"]
)
@pytest.mark.parametrize("precision", ["E5M3", "E5M5"])
def test_transformers_opens_it_with_the_values_of_the_precision(
    architecture, precision, make_fitting, decoded, tmp_path
):
    nested = make_fitting(architecture)
    report = export(nested, tmp_path / "out", precision=precision, to="compressed-tensors")
    assert report.exact, report
    assert {"E5M3": "int4", "E5M5": "int8"}[precision] in report.types
    settings = {
        "dequantize": True,
        **json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"],
    }
    config = json.loads((tmp_path / "out" / "config.json").read_text()) | {"quantization_config": settings}
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    model, told = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype="auto", output_loading_info=True
    )
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = model.state_dict()
    for name, wanted in decoded(nested, precision).items():
        if "norm" not in name:  # the loader rounds those of a float32 model to its 16 bits
            assert torch.equal(state[name].float(), wanted), name


def test_experts_lie_one_by_one_and_come_out_the_same(random_model, tmp_path):
    random_model("mixtral", intermediate_size=128).save_pretrained(tmp_path / "checkpoint")
    otaro.pack(tmp_path / "checkpoint", tmp_path / "nested")
    assert export(tmp_path / "nested", tmp_path / "out", precision="E5M3", to="compressed-tensors").exact
    export(tmp_path / "nested", tmp_path / "hf", precision="E5M3", to="hf")
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto") for name in ("out", "hf")]
    ids = torch.arange(3, 23).unsqueeze(0)
    with torch.no_grad():
        found, wanted = (model(ids).logits for model in models)
    assert torch.equal(found, wanted)
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.layers.1.block_sparse_moe.gate" in stated["ignore"]
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight_packed" in load_file(
        tmp_path / "out" / "model.safetensors"
    )


@pytest.mark.parametrize(
    ("bits", "reconstruction", "dtype", "least_exponent"),
    [
        (3, "midpoint", torch.bfloat16, -13),
        (3, "midpoint", torch.float16, -12),
        (4, "midpoint", torch.float16, -10),
        (5, "midpoint", torch.float16, -9),
        (3, "truncate", torch.bfloat16, -13),
        (7, "truncate", torch.float16, -8),
    ],
)
def test_every_code_at_every_scale_is_held_exactly(bits, reconstruction, dtype, least_exponent):
    """As integers times scales in the type of the scales; float16 ends at steps of 2^-24."""
    for exponent in range(MIN_SCALE_EXPONENT, MAX_SCALE_EXPONENT + 1):
        rows = every_code(bits, reconstruction, exponent)
        width = integer_bits(rows.grid)
        integers = unpack_bits(pack_bits(rows.integers + (1 << width - 1), width), width) - (1 << width - 1)
        found = integers.to(dtype) * rows.units(64).to(dtype).repeat_interleave(64, -1)
        assert torch.equal(found.float(), rows.values()) == (exponent >= least_exponent)


def test_truncated_models_and_what_runs(make_fitting, tmp_path):
    export(make_fitting("llama", "truncate"), tmp_path / "out", precision="E5M3", to="compressed-tensors")
    export(make_fitting("llama", "truncate"), tmp_path / "hf", precision="E5M3", to="hf")
    ids = torch.arange(3, 23).unsqueeze(0)
    with torch.no_grad():
        found, wanted = (
            AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)(ids).logits
            for name in ("out", "hf")
        )
    assert (found - wanted).abs().max() < 2.0**-16 * wanted.abs().max()


def test_what_is_not_whole_words_stays_in_full(make_fitting, tmp_path):
    report = export(make_fitting("llama"), tmp_path / "out", precision="E5M3", to="compressed-tensors")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written["model.layers.0.mlp.down_proj.weight"].dtype == torch.float16, "rows of 112"
    assert written["model.layers.0.mlp.up_proj.weight_scale"].shape == (112, 3), (
        "rows of 96 are three groups of 32"
    )
    assert report.types["int4"].tensors == 2 * 6
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert stated["ignore"] == ["lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]


def test_precisions_without_integers_are_refused(make_fitting, tmp_path):
    with pytest.raises(
        OtaroError,
        match=r"no integers that hold E5M6 \(midpoint\): they end at eight bits; "
        r"export a lower",
    ):
        export(make_fitting("llama"), tmp_path / "out", precision="E5M6", to="compressed-tensors")
    with pytest.raises(OtaroError, match=r"no linear layer of this mistral model has rows of whole words"):
        export(make_fitting("mistral"), tmp_path / "out", precision="E5M3", to="compressed-tensors")
    assert not list(tmp_path.iterdir())
