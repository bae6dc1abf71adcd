"""decoder.json: written where a decoder serves the model, exact, and left out elsewhere."""

import json

import numpy as np
import pytest
import torch

import otaro
from otaro.errors import OtaroError
from otaro.kernels import cpu
from otaro.runtime.architectures import describe
from otaro.runtime.decoder_file import decoder_text, write_decoder_file
from tests.runtime.test_decode import MORE, SERVED


def test_numbers_are_exact_in_float32(make_nested):
    model = otaro.load(make_nested("granite"), "E5M3")
    stated, described = json.loads(decoder_text(model)), describe(model)
    for name in ("eps", "scale", "embedding_scale", "residual_scale", "logit_scale"):
        assert np.float32(stated[name]) == np.float32(getattr(described, name))
    frequencies = np.array(stated["ropes"][0]["frequencies"], np.float32)
    assert np.array_equal(frequencies, described.ropes[0].frequencies.numpy())


def test_fused_matrices_and_experts_are_rows_of_their_tensors(make_nested):
    layer = json.loads(decoder_text(otaro.load(make_nested("phi3"), "E5M3")))["layers"][0]
    assert layer["query"] == {"tensor": "model.layers.0.self_attn.qkv_proj.weight", "first": 0, "rows": 96}
    assert layer["value"] == {"tensor": "model.layers.0.self_attn.qkv_proj.weight", "first": 144, "rows": 48}
    layer = json.loads(decoder_text(otaro.load(make_nested("mixtral"), "E5M3")))["layers"][1]
    assert layer["up"] == {
        "tensor": "model.layers.1.mlp.experts.gate_up_proj",
        "first": 112,
        "rows": 112,
        "stride": 224,
    }
    assert layer["experts"] == {"router": "model.layers.1.mlp.gate.weight", "chosen": 2, "normalize": True}


def test_packing_describes_what_a_decoder_serves(tmp_path, make_checkpoint):
    for name, served in (("llama", True), ("gpt2", False)):
        for overwrite in (False, True):
            otaro.pack(make_checkpoint(name), tmp_path / name, overwrite=overwrite)
            assert (tmp_path / name / "decoder.json").exists() == served


def test_models_that_no_decoder_serves_are_refused(make_nested):
    directory = make_nested("gpt2")
    with pytest.raises(OtaroError, match="runs in Python only: its architecture is gpt2"):
        write_decoder_file(directory)
    assert not (directory / "decoder.json").exists()


@pytest.mark.parametrize("name", [*SERVED, *MORE])
def test_ropes_are_those_of_transformers(make_nested, name):
    model = otaro.load(make_nested(name), "E5M3")
    rotary, ropes = model.model.rotary_emb, describe(model).ropes
    kinds = list(rotary.rope_type) if isinstance(rotary.rope_type, dict) else [None]
    for kind, rope in zip(kinds, ropes, strict=True):
        theirs = rotary(torch.empty(0), torch.arange(60).unsqueeze(0), *([] if kind is None else [kind]))
        for ours, table in zip(rope.tables(60), theirs, strict=True):
            # Of the same angles; cosines in float32 are right to a unit in the last place.
            assert torch.allclose(ours, table[0, :, : ours.shape[1]], rtol=0, atol=2**-23 * rope.scale)


@pytest.mark.skipif(bool(cpu.MISSING), reason=cpu.MISSING or "built")
def test_cosines_and_sines_are_the_nearest_floats():
    positions = np.arange(0, 200_000, 7, dtype=np.float32)
    angles = (positions[:, None] * np.array([1.0, 0.1, 1e-3], np.float32)).ravel()
    cosines, sines = np.empty_like(angles), np.empty_like(angles)
    cpu._cpu.angles(angles, cosines, sines)
    assert np.array_equal(cosines, np.cos(angles.astype(np.float64)).astype(np.float32))
    assert np.array_equal(sines, np.sin(angles.astype(np.float64)).astype(np.float32))
