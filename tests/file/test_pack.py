"""Packing: what a checkpoint's tensors become, and which checkpoints are refused."""

import json
import os
import pickle
import shutil
import warnings
from math import prod

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

import otaro
from otaro.errors import CheckpointError, FormatError, OtaroWarning, TargetError, WeightError
from otaro.file import pack as pack_module
from otaro.file.header import shard_name
from otaro.file.io import NestedDirectory
from otaro.file.planes import PLANES, unpack_codes
from otaro.file.summary import precision_summary

LAYER = "model.layers.1.self_attn.q_proj.weight"  # [96, 96]


def load_parameters(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto").state_dict()


def names_to_pack(parameters, tied):
    """Matrices and stacks of matrices, but routers and GPT-2's positions; a tied head is the embedding."""
    return {
        name
        for name, tensor in parameters.items()
        if tensor.dim() >= 2
        and not name.endswith(("mlp.gate.weight", "wpe.weight"))
        and not (tied and name == "lm_head.weight")
    }


def read_codes(nested, name):
    planes = [nested.plane(plane).tensor(name) for plane in PLANES]
    return unpack_codes(nested.base.tensor(name), planes, nested.schema.packed[name][-1])


def assert_holds(nested, parameters, tied=False, as_packed=lambda name, weight: weight):
    """Every tensor of the model is in the directory: packed bit for bit as the codec says, or untouched."""
    packed = names_to_pack(parameters, tied)
    assert set(nested.schema.packed) == packed
    for name in packed:
        expected = otaro.encode(
            as_packed(name, parameters[name]), nested.schema.group_size, nested.schema.reconstruction
        )
        assert nested.schema.scale_exponents[name] == expected.scale_exponent, name
        assert torch.equal(nested.scale_bytes(name), expected.scale_bytes), name
        assert torch.equal(read_codes(nested, name), expected.finest_codes), name
    kept = parameters.keys() - packed - ({"lm_head.weight"} if tied else set())
    assert nested.unpacked.keys() == kept
    for name in kept:
        stored = nested.base.tensor(name)
        assert stored.dtype == parameters[name].dtype, name
        assert torch.equal(stored, parameters[name]), name


def files_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def edited_copy(checkpoint, tmp_path, **changes):
    """A copy of a one-file checkpoint with tensors replaced, or removed by None; `__` in a name is a dot."""
    copy = shutil.copytree(checkpoint, tmp_path / "edited")
    tensors = load_file(copy / "model.safetensors")
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file(
        {name: t for name, t in tensors.items() if t is not None},
        copy / "model.safetensors",
        {"format": "pt"},
    )
    return copy


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("share", [0.0, 0.005, 0.3])
def test_exact_zeros_are_counted_and_where_there_are_many_truncation_is_named(
    checkpoint_dir, tmp_path, share
):
    weight = load_file(checkpoint_dir / "model.safetensors")[LAYER]
    zeros = int(share * weight.numel())
    weight.view(-1)[:zeros] = 0
    copy = edited_copy(checkpoint_dir, tmp_path, **{LAYER: weight})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        nested = otaro.pack(copy, tmp_path / "out")
        otaro.pack(copy, tmp_path / "paper", reconstruction="truncate")
    packed = sum(map(prod, nested.schema.packed.values()))
    assert nested.schema.zeros == zeros
    about = [str(one.message) for one in said if "exactly zero" in str(one.message)]
    assert len(about) == (zeros > 0.01 * packed)
    for text in about:
        assert f"{zeros / packed:.1%} of the weights are exactly zero" in text
        assert "--reconstruction truncate keeps them" in text


@pytest.mark.parametrize("precision", [None, "E5M3", "E5M4"])
def test_a_model_that_was_quantized_to_four_bits_is_noticed(checkpoint_dir, tmp_path, precision):
    packed = otaro.pack(checkpoint_dir, tmp_path / "first").schema.packed
    weights = load_file(checkpoint_dir / "model.safetensors")
    coarse = (
        {name: otaro.encode(weights[name].float()).decode(precision) for name in packed} if precision else {}
    )
    copy = edited_copy(checkpoint_dir, tmp_path, **coarse)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        otaro.pack(copy, tmp_path / "out")
        otaro.pack(copy, tmp_path / "paper", reconstruction="truncate")
    about = [one for one in said if "lie on E5M3's grid" in str(one.message)]
    assert len(about) == (precision == "E5M3")


def test_every_tensor_of_every_architecture_is_held(
    make_checkpoint, make_nested, architecture, reconstruction
):
    nested = NestedDirectory(make_nested(architecture, reconstruction))
    assert nested.schema.reconstruction == reconstruction
    assert_holds(nested, load_parameters(make_checkpoint(architecture)), tied=architecture == "llama_tied")


def test_scaled_embeddings_fused_projections_and_convolutions_are_packed(
    make_checkpoint, make_nested, other_architecture, as_packed
):
    nested, parameters = (
        NestedDirectory(make_nested(other_architecture)),
        load_parameters(make_checkpoint(other_architecture)),
    )
    assert_holds(nested, parameters, other_architecture != "phi3", as_packed)
    for name, shape in nested.schema.packed.items():
        assert shape == tuple(as_packed(name, parameters[name]).shape)


def test_all_digests_of_every_architecture_verify(make_nested, architecture):
    nested = NestedDirectory(make_nested(architecture))
    seen = []
    nested.verify(lambda what, done, total: seen.append((what, done, total)))
    packed, kept = nested.schema.packed, nested.unpacked
    expected = [f"{shard_name(3)} {name}" for name in (*kept, *(f"{name}.scales" for name in packed))]
    expected += [f"{shard_name(plane)} {name}" for plane in range(3, 9) for name in packed]
    assert sorted(what for what, _, _ in seen) == sorted(expected)
    assert seen[-1][1] == seen[-1][2] == sum(shard.size for shard in nested.shards())


def test_a_tied_head_is_stored_once_and_an_untied_one_beside_the_embedding(make_nested):
    assert "lm_head.weight" not in NestedDirectory(make_nested("llama_tied")).base.header.entries
    assert "lm_head.weight" in NestedDirectory(make_nested("llama")).schema.packed


def test_norms_keep_a_type_of_their_own(checkpoint_dir, tmp_path):
    norm = torch.linspace(0.1, 3, 96, dtype=torch.float32)
    nested = otaro.pack(edited_copy(checkpoint_dir, tmp_path, model__norm__weight=norm), tmp_path / "out")
    assert torch.equal(nested.base.tensor("model.norm.weight"), norm)
    assert nested.base.tensor("model.norm.weight").dtype == torch.float32
    assert nested.base.tensor("model.layers.0.input_layernorm.weight").dtype == torch.float16


def test_packing_twice_gives_the_same_bytes(make_checkpoint, make_nested, architecture, tmp_path):
    otaro.pack(make_checkpoint(architecture), tmp_path / "again")
    assert files_of(tmp_path / "again") == files_of(make_nested(architecture))


def test_chunk_size_does_not_change_the_bytes(
    make_checkpoint, make_nested, architecture, tmp_path, monkeypatch
):
    monkeypatch.setattr(pack_module, "_CHUNK", 1000)  # 8 rows, so that chunks cross the borders of experts
    otaro.pack(make_checkpoint(architecture), tmp_path / "again")
    assert files_of(tmp_path / "again") == files_of(make_nested(architecture))


def test_shards_are_ordinary_safetensors_files(nested_dir):
    shards = sorted(nested_dir.glob("model-m*.safetensors"))
    assert [path.name for path in shards] == [f"model-m{plane}.safetensors" for plane in range(3, 9)]
    for path in shards:
        with safe_open(path, "pt") as file:
            assert LAYER in file.keys()  # noqa: SIM118 (not a dict)
            assert file.get_tensor(LAYER).dtype == torch.uint8
            assert file.get_tensor(LAYER).shape == (96, 48 if "m3" in path.name else 12)


def test_config_and_sidecars_come_along(checkpoint_dir, tmp_path):
    source = shutil.copytree(checkpoint_dir, tmp_path / "source")
    sidecars = {"tokenizer.json": "{}", "chat_template.jinja": "hello", "LICENSE.txt": "free"}
    for name, text in sidecars.items():
        (source / name).write_text(text)
    (source / "training.log").write_text("not wanted")
    otaro.pack(source, tmp_path / "out", reconstruction="truncate")
    assert {name: (tmp_path / "out" / name).read_text() for name in sidecars} == sidecars
    assert not (tmp_path / "out" / "training.log").exists()
    before, after = (json.loads((d / "config.json").read_text()) for d in (source, tmp_path / "out"))
    assert after.pop("quantization_config") == {
        "quant_method": "sefp",
        "group_size": 64,
        "reconstruction": "truncate",
    }
    assert after.pop("transformers_weights") == "model-m3.safetensors"
    assert after == before


@pytest.mark.parametrize("group_size", [32, 128])
def test_other_group_sizes_are_held(checkpoint_dir, tmp_path, group_size, reconstruction):
    nested = otaro.pack(
        checkpoint_dir, tmp_path / "out", group_size=group_size, reconstruction=reconstruction
    )
    assert nested.schema.group_size == group_size
    assert_holds(nested, load_parameters(checkpoint_dir))


@pytest.mark.parametrize("group_size", [0, -32, 48])
def test_a_group_size_that_is_no_multiple_of_32_is_refused(checkpoint_dir, tmp_path, group_size):
    with pytest.raises(WeightError, match=f"positive multiple of 32, got {group_size}"):
        otaro.pack(checkpoint_dir, tmp_path / "out", group_size=group_size)


def test_an_unknown_reconstruction_is_refused(checkpoint_dir, tmp_path):
    with pytest.raises(WeightError, match="unknown reconstruction 'round'; choose from midpoint, truncate"):
        otaro.pack(checkpoint_dir, tmp_path / "out", reconstruction="round")


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_sharded_checkpoint_gives_the_same_bytes(make_checkpoint, make_nested, tmp_path, name):
    model = AutoModelForCausalLM.from_pretrained(make_checkpoint(name), dtype="auto")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 3
    otaro.pack(tmp_path / "sharded", tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(make_nested(name))


@pytest.mark.parametrize("chunk", [1 << 22, 1000], ids=["one-chunk", "many-chunks"])
def test_a_checkpoint_with_fused_experts_gives_the_same_bytes(
    make_checkpoint, make_nested, tmp_path, monkeypatch, chunk
):
    monkeypatch.setattr(pack_module, "_CHUNK", chunk)
    fused = shutil.copytree(make_checkpoint("mixtral"), tmp_path / "fused")
    save_file(load_parameters(fused), fused / "model.safetensors", {"format": "pt"})
    otaro.pack(fused, tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(make_nested("mixtral"))


def test_progress_names_the_tensor_and_counts_up_to_the_total(checkpoint_dir, tmp_path):
    calls = []
    nested = otaro.pack(checkpoint_dir, tmp_path / "out", progress=lambda *call: calls.append(call))
    names, done, totals = zip(*calls, strict=True)
    assert set(nested.schema.packed) < set(names)
    assert done[0] == 0
    assert list(done) == sorted(done)
    assert done[-1] == sum(a * b for a, b in nested.schema.packed.values())
    assert set(totals) == {done[-1]}


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "last.ckpt"])
def test_pickled_weights_are_refused_unopened(checkpoint_dir, tmp_path, name):
    source = shutil.copytree(checkpoint_dir, tmp_path / "source")
    (source / "model.safetensors").unlink()
    (source / name).write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    with pytest.raises(CheckpointError, match=rf"only pickled weights \({name}\).*save_pretrained"):
        otaro.pack(source, tmp_path / "out")
    assert not (tmp_path / "exploded").exists()
    pickle.loads((source / name).read_bytes())  # the bomb is live
    assert (tmp_path / "exploded").exists()


def test_pickled_weights_beside_safetensors_are_left_alone(checkpoint_dir, nested_dir, tmp_path):
    source = shutil.copytree(checkpoint_dir, tmp_path / "source")
    (source / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    otaro.pack(source, tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(nested_dir)
    assert not (tmp_path / "exploded").exists()


def test_a_directory_without_weights_is_refused(checkpoint_dir, tmp_path):
    source = shutil.copytree(checkpoint_dir, tmp_path / "source")
    (source / "model.safetensors").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"holds no model.safetensors and no "
        r"model.safetensors.index.json",
    ):
        otaro.pack(source, tmp_path / "out")


def test_a_directory_without_config_is_refused(checkpoint_dir, tmp_path):
    source = shutil.copytree(checkpoint_dir, tmp_path / "source")
    (source / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config.json"):
        otaro.pack(source, tmp_path / "out")


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "no-such-model"}', "{}"])
def test_a_config_that_describes_no_model_is_refused(checkpoint_dir, tmp_path, text):
    source = shutil.copytree(checkpoint_dir, tmp_path / "source")
    (source / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config.json|no-such-model"):
        otaro.pack(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (
            {"weight_map": {LAYER: "../elsewhere.safetensors"}},
            "names '../elsewhere.safetensors', which is not a file of",
        ),
        ({"weight_map": {LAYER: "/etc/passwd"}}, "names '/etc/passwd', which is not a file of"),
        ({"weight_map": {LAYER: 5}}, "names 5, which is not a file of"),
        (
            {"weight_map": {LAYER: "model-00009.safetensors"}},
            "lacks model-00009.safetensors, which its index names",
        ),
        ({"weight_map": [LAYER]}, "is not a safetensors index"),
        ({"metadata": {}}, "is not a safetensors index"),
        ([], "is not a safetensors index"),
    ],
    ids=["parent", "absolute", "number", "absent", "list", "no-map", "no-object"],
)
def test_a_bad_index_is_refused(checkpoint_dir, tmp_path, index, message):
    (tmp_path / "elsewhere.safetensors").write_bytes((checkpoint_dir / "model.safetensors").read_bytes())
    source = shutil.copytree(checkpoint_dir, tmp_path / "source")
    (source / "model.safetensors").unlink()
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        otaro.pack(source, tmp_path / "out")


def test_a_missing_tensor_is_named(checkpoint_dir, tmp_path):
    source = edited_copy(checkpoint_dir, tmp_path, **{LAYER: None})
    with pytest.raises(CheckpointError, match=f"lacks the tensor {LAYER}, which llama models need"):
        otaro.pack(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.2.w3.weight"),
        ("qwen3_moe", "model.layers.1.mlp.experts.2.up_proj.weight"),
    ],
)
def test_a_missing_or_misshapen_part_of_an_expert_stack_is_refused(make_checkpoint, tmp_path, name, part):
    source = edited_copy(make_checkpoint(name), tmp_path, **{part: None})
    named = part.replace("block_sparse_moe", "mlp")  # as transformers calls it
    with pytest.raises(
        CheckpointError, match=f"lacks the tensor {named}, a part of model.layers.1.mlp.experts.gate_up_proj"
    ):
        otaro.pack(source, tmp_path / "out")
    shutil.rmtree(source)
    source = edited_copy(make_checkpoint(name), tmp_path, **{part: torch.zeros(8, 96)})
    with pytest.raises(
        CheckpointError,
        match=r"the parts of model.layers.1.mlp.experts.gate_up_proj do not "
        r"add up",
    ):
        otaro.pack(source, tmp_path / "out")


@pytest.mark.parametrize("name", [LAYER, "model.norm.weight"], ids=["packed", "kept"])
def test_a_tensor_of_the_wrong_shape_is_refused(checkpoint_dir, tmp_path, name):
    source = edited_copy(checkpoint_dir, tmp_path, **{name: torch.zeros(64, 32)})
    with pytest.raises(
        CheckpointError,
        match=rf"{name} has shape \[64, 32\], config.json implies \[96(, "
        r"96)?\]",
    ):
        otaro.pack(source, tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64], ids=str)
def test_a_type_that_sefp_does_not_encode_is_refused_by_name(checkpoint_dir, tmp_path, dtype):
    source = edited_copy(checkpoint_dir, tmp_path, **{LAYER: torch.zeros(96, 96).to(dtype)})
    with pytest.raises((WeightError, CheckpointError), match=f"{LAYER}.*{dtype}"):
        otaro.pack(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model.norm.weight", LAYER])
def test_a_type_that_shards_do_not_hold_is_refused_by_name(checkpoint_dir, tmp_path, name):
    shape = (96,) if "norm" in name else (96, 96)
    source = edited_copy(checkpoint_dir, tmp_path, **{name: torch.zeros(shape).to(torch.float8_e4m3fn)})
    with pytest.raises(CheckpointError, match=f"{name} is stored as F8_E4M3, which is not supported"):
        otaro.pack(source, tmp_path / "out")


@pytest.mark.parametrize("keep", [4, 100, -1], ids=["length", "header", "data"])
def test_a_damaged_safetensors_file_is_refused(checkpoint_dir, tmp_path, keep):
    source = shutil.copytree(checkpoint_dir, tmp_path / "source")
    (source / "model.safetensors").write_bytes((checkpoint_dir / "model.safetensors").read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged"):
        otaro.pack(source, tmp_path / "out")


def test_a_tied_head_with_values_of_its_own_is_refused(make_checkpoint, tmp_path):
    source = edited_copy(make_checkpoint("llama_tied"), tmp_path, lm_head__weight=torch.zeros(120, 96))
    with pytest.raises(
        CheckpointError,
        match=r"ties lm_head.weight to "
        r"model.embed_tokens.weight.*tie_word_embeddings",
    ):
        otaro.pack(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "is nan, and SEFP holds finite weights only"),
        (float("-inf"), "is -inf, and SEFP holds finite weights only"),
        (-65536.0, r"is -65536, and SEFP holds magnitudes below 2\^15"),
    ],
    ids=["nan", "infinity", "large"],
)
@pytest.mark.parametrize("chunk", [1 << 22, 1000], ids=["one-chunk", "many-chunks"])
def test_a_weight_that_cannot_be_held_is_named_with_its_index(
    checkpoint_dir, tmp_path, monkeypatch, value, words, chunk
):
    monkeypatch.setattr(pack_module, "_CHUNK", chunk)
    bad = load_file(checkpoint_dir / "model.safetensors")[LAYER].float()
    bad[77, 13] = value
    bad[80, 2] = value
    with pytest.raises(WeightError, match=rf"{LAYER}\[77, 13\] {words}"):
        otaro.pack(edited_copy(checkpoint_dir, tmp_path, **{LAYER: bad}), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["edited"]


@pytest.mark.parametrize("chunk", [1 << 22, 1000], ids=["one-chunk", "many-chunks"])
def test_nan_in_an_expert_is_named_with_its_index_in_the_stack(make_checkpoint, tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(pack_module, "_CHUNK", chunk)
    part = "model.layers.0.block_sparse_moe.experts.3.w3.weight"
    bad = load_file(make_checkpoint("mixtral") / "model.safetensors")[part]
    bad[5, 95] = float("nan")
    with pytest.raises(
        WeightError,
        match=rf"model.layers.0.mlp.experts.gate_up_proj\[3, {112 + 5}, 95\] is "
        r"nan",
    ):
        otaro.pack(edited_copy(make_checkpoint("mixtral"), tmp_path, **{part: bad}), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["edited"]


def test_nan_in_a_convolution_is_named_with_its_index_in_the_checkpoint(make_checkpoint, tmp_path):
    """Which has it as [in, out]; it is packed transposed."""
    name = "transformer.h.1.mlp.c_fc.weight"
    bad = load_file(make_checkpoint("gpt2") / "model.safetensors")[name]
    assert bad.shape == (96, 384)
    bad[5, 300] = float("nan")
    with pytest.raises(WeightError, match=rf"{name}\[5, 300\] is nan"):
        otaro.pack(edited_copy(make_checkpoint("gpt2"), tmp_path, **{name: bad}), tmp_path / "out")


def test_a_nested_model_is_not_packed_again(nested_dir, tmp_path):
    with pytest.raises(CheckpointError, match="is already a nested model; use it as it is"):
        otaro.pack(nested_dir, tmp_path / "out")


def test_a_model_quantized_otherwise_is_refused(checkpoint_dir, tmp_path):
    source = shutil.copytree(checkpoint_dir, tmp_path / "source")
    edit_config(source, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(CheckpointError, match=r"is quantized \(gptq\); pack the checkpoint it was made from"):
        otaro.pack(source, tmp_path / "out")


@pytest.mark.parametrize("more", [{}, {"quantization_config": {"group_size": 64, "bits": 4}}])
def test_a_model_quantized_for_mlx_is_refused(more, checkpoint_dir, tmp_path):
    """`mlx_lm` itself writes the entry twice."""
    source = shutil.copytree(checkpoint_dir, tmp_path / "source")
    edit_config(source, quantization={"group_size": 64, "bits": 4}, **more)
    with pytest.raises(CheckpointError, match=r"is quantized \(MLX\); pack the checkpoint it was made from"):
        otaro.pack(source, tmp_path / "out")


@pytest.mark.parametrize("model", ["", " ", None, 5])
def test_what_names_no_model_is_not_the_current_folder(
    model, checkpoint_dir, nested_dir, tmp_path, monkeypatch
):
    what = f"model={model!r} names no model; give a directory"
    monkeypatch.chdir(checkpoint_dir)
    with pytest.raises(CheckpointError, match=what):
        otaro.pack(model, tmp_path / "out")
    monkeypatch.chdir(nested_dir)
    with pytest.raises(CheckpointError, match=what):
        otaro.load(model)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("out", ["", None, 5])
def test_what_names_no_place_to_write_to_is_refused(out, checkpoint_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TargetError, match=f"out={out!r} names no place to write to"):
        otaro.pack(checkpoint_dir, out)
    assert not list(tmp_path.iterdir())


def test_an_existing_target_is_refused_and_kept_unless_asked_to_overwrite(
    checkpoint_dir, nested_dir, tmp_path
):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(TargetError, match="exists and is not empty; choose another place"):
        otaro.pack(checkpoint_dir, out)
    with pytest.raises(TargetError, match="is not empty and holds no nested model; it is not overwritten"):
        otaro.pack(checkpoint_dir, out, overwrite=True)
    assert files_of(out) == {"notes.txt": b"mine"}
    (out / "model-m3.safetensors").write_text("of an older model")
    (out / "chat_template.jinja").write_text("of an older model")
    with pytest.raises(TargetError, match=r"holds a nested model already; .* replace it with --overwrite"):
        otaro.pack(checkpoint_dir, out)
    otaro.pack(checkpoint_dir, out, overwrite=True)
    assert files_of(out) == {**files_of(nested_dir), "notes.txt": b"mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_other_weights_beside_a_nested_model_are_not_overwritten(checkpoint_dir, nested_dir, tmp_path):
    out = shutil.copytree(nested_dir, tmp_path / "out")
    (out / "model.safetensors").write_text("another model")
    before = files_of(out)
    with pytest.raises(TargetError, match=r"holds another model \(model.safetensors\), which stays as it is"):
        otaro.pack(checkpoint_dir, out, overwrite=True)
    assert files_of(out) == before


def test_overwriting_keeps_the_record_of_the_same_model(checkpoint_dir, nested_dir, tmp_path):
    out = shutil.copytree(nested_dir, tmp_path / "out")
    record = {"model": NestedDirectory(out).base.header.model}
    (out / "quality.json").write_text(json.dumps(record))
    otaro.pack(checkpoint_dir, out, overwrite=True)
    assert json.loads((out / "quality.json").read_text()) == record


def test_overwriting_puts_the_record_of_another_model_aside(checkpoint_dir, make_nested, tmp_path):
    out = shutil.copytree(make_nested("llama", "truncate"), tmp_path / "out")
    record = {"model": NestedDirectory(out).base.header.model}
    name = f"quality-{record['model'][:12]}"
    (out / "quality.json").write_text(json.dumps(record))
    (out / f"{name}.json").write_text("an even older one")
    with pytest.warns(OtaroWarning, match=f"about the model that was there, and is kept as {name}-2.json"):
        otaro.pack(checkpoint_dir, out, overwrite=True)
    assert not (out / "quality.json").exists()
    assert json.loads((out / f"{name}-2.json").read_text()) == record
    assert (out / f"{name}.json").read_text() == "an even older one"


@pytest.mark.parametrize("text", ['{"model": "../../elsewhere"}', '{"model": 5}', "{"])
def test_a_damaged_record_is_put_aside_in_the_same_folder(checkpoint_dir, nested_dir, tmp_path, text):
    out = shutil.copytree(nested_dir, tmp_path / "out")
    (out / "quality.json").write_text(text)
    with pytest.warns(OtaroWarning, match="kept as quality-damaged.json"):
        otaro.pack(checkpoint_dir, out, overwrite=True)
    assert (out / "quality-damaged.json").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_models_that_differ_in_a_norm_differ_in_identity(checkpoint_dir, nested_dir, tmp_path):
    """Or planes and quality records of one would be taken for the other's."""
    norm = load_file(checkpoint_dir / "model.safetensors")["model.norm.weight"].clone()
    norm[0] += 1
    otaro.pack(edited_copy(checkpoint_dir, tmp_path, **{"model.norm.weight": norm}), tmp_path / "out")
    ours, other = NestedDirectory(nested_dir), NestedDirectory(tmp_path / "out")
    assert ours.base.header.model != other.base.header.model
    assert ours.plane(8).header.digests == other.plane(8).header.digests
    shutil.copy(nested_dir / shard_name(8), tmp_path / "out")
    with pytest.raises(FormatError, match="belongs to another model"):
        NestedDirectory(tmp_path / "out").plane(8)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_a_norm_with_which_nothing_runs_is_named_with_its_index(checkpoint_dir, tmp_path, value):
    norm = load_file(checkpoint_dir / "model.safetensors")["model.norm.weight"].clone()
    norm[5] = value
    source = edited_copy(checkpoint_dir, tmp_path, **{"model.norm.weight": norm})
    with pytest.raises(
        WeightError,
        match=rf"model.norm.weight\[5\] is {value}, with which no model runs; "
        r"repair",
    ):
        otaro.pack(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_buffer_may_hold_infinity_but_not_nan():
    pack_module._check_finite("mask", torch.tensor([0.0, -torch.inf]), is_buffer=True)
    with pytest.raises(WeightError, match=r"mask\[1\] is nan"):
        pack_module._check_finite("mask", torch.tensor([0.0, torch.nan]), is_buffer=True)


def test_a_tensor_that_transformers_rearranges_when_it_reads_it_is_read_so(
    checkpoint_dir, tmp_path, monkeypatch
):
    """Its shape may be that of the parameter: taken as it is, a square matrix would be packed transposed."""
    from transformers import conversion_mapping, modeling_utils
    from transformers.core_model_loading import Chunk, Transpose, WeightConverter

    query, gate, up = "self_attn.q_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"
    steps = [
        WeightConverter(source_patterns=query, target_patterns=query, operations=[Transpose(0, 1)]),
        WeightConverter(
            source_patterns="mlp.both.weight", target_patterns=[gate, up], operations=[Chunk(dim=0)]
        ),
    ]
    for module in (conversion_mapping, modeling_utils):
        monkeypatch.setattr(module, "get_model_conversion_mapping", lambda model, *args, **options: steps)
    stored = load_file(checkpoint_dir / "model.safetensors")
    parameters, changes = dict(stored), {}
    for layer in ("model.layers.0.", "model.layers.1."):
        parameters[layer + query] = stored[layer + query].T
        both = torch.cat([stored[layer + gate], stored[layer + up]])
        changes |= {layer + gate: None, layer + up: None, layer + "mlp.both.weight": both}
    source = edited_copy(checkpoint_dir, tmp_path, **changes)
    assert_holds(otaro.pack(source, tmp_path / "out"), parameters)
    found = AutoModelForCausalLM.from_pretrained(source, dtype="auto").state_dict()  # the judge
    assert all(torch.equal(found[name], tensor) for name, tensor in parameters.items())
    short = edited_copy(source, tmp_path / "short", **{"model.layers.0.mlp.both.weight": both[:100]})
    with pytest.raises(
        CheckpointError,
        match=r"layers.0.mlp.gate_proj.weight has shape \[50, 96\], config.json implies "
        r"\[112, 96\]",
    ):
        otaro.pack(short, tmp_path / "none")


def test_a_model_that_does_not_generate_is_refused(checkpoint_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "can_generate", classmethod(lambda cls: False))
    with pytest.raises(
        CheckpointError,
        match=r"LlamaForCausalLM \(llama\) is not a model that generates "
        r"text",
    ):
        otaro.pack(checkpoint_dir, tmp_path / "out")


def test_packing_into_the_checkpoint_itself_loses_nothing(checkpoint_dir, tmp_path):
    source = shutil.copytree(checkpoint_dir, tmp_path / "source")
    for overwrite in (False, True):
        for target in (source, source.parent):
            with pytest.raises(TargetError, match="is or holds the checkpoint itself"):
                otaro.pack(source, target, overwrite=overwrite)
    assert files_of(source) == files_of(checkpoint_dir)


def test_the_current_directory_cannot_be_put_in_place(checkpoint_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TargetError, match="is the current directory"):
        otaro.pack(checkpoint_dir, ".")


def test_tensors_that_the_model_lacks_are_named(checkpoint_dir, tmp_path):
    source = edited_copy(checkpoint_dir, tmp_path, **{"model.layers.7.extra": torch.zeros(3)})
    with pytest.warns(UserWarning, match=r"left out 1 tensors that llama models lack: model.layers.7.extra"):
        otaro.pack(source, tmp_path / "out")


def stored_bits(directory, mantissa_bits):
    """Of all that the shards hold for a precision, counted without our reader."""
    total = 0
    for plane in range(3, mantissa_bits + 1):
        with safe_open(directory / shard_name(plane), "pt") as file:
            total += sum(8 * file.get_tensor(key).nbytes for key in file.keys())  # noqa: SIM118 (not a dict)
    return total


def save_random(directory, kind, dtype=torch.float32, **settings):
    """A checkpoint half of which is the embedding; returns the model."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, vocab_size=4096, **settings, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(directory)
    return model


GEMMA = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "head_dim": 32,
}
XGLM = {"d_model": 96, "ffn_dim": 112, "num_layers": 1, "attention_heads": 4}  # whose embedding is not packed


def test_a_float32_gemma_takes_at_each_precision_the_bits_that_it_is_said_to_take(tmp_path):
    """Its tied embedding is most of it: kept as it is, the model would take 147% of FP16 where the table said
    9.08 bits.
    """
    model = save_random(tmp_path, "gemma3_text", **GEMMA, num_key_value_heads=1, sliding_window=16)
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert model.get_input_embeddings().weight.numel() > 0.7 * weights
    nested = otaro.pack(tmp_path, tmp_path / "nested")
    for precision in otaro.PRECISIONS:
        row = precision_summary(nested, precision)
        assert row.bits_per_weight == stored_bits(nested.path, precision.mantissa_bits) / weights
        assert row.bits_per_weight - precision.bits_per_weight() < 0.05  # norms in float32
        headers = row.ratio_to_fp16 - row.bits_per_weight / 16
        assert 0 < headers < 0.02
    assert precision_summary(nested, otaro.PRECISIONS[0]).ratio_to_fp16 < 0.6


@pytest.mark.parametrize(
    ("values", "stored_in"),
    [
        (lambda table: table, torch.float16),
        (lambda table: table.bfloat16().float(), torch.bfloat16),
        (lambda table: table * 1e8, torch.bfloat16),
    ],
    ids=["any", "bfloat16 in float32", "beyond float16"],
)
def test_large_float32_tensors_that_are_not_packed_are_stored_in_16_bits(tmp_path, values, stored_in):
    model = save_random(tmp_path, "xglm", **XGLM)
    name, table = "model.embed_tokens.weight", values(model.get_input_embeddings().weight.data)
    source = edited_copy(tmp_path, tmp_path, **{name: table})
    with pytest.warns(
        UserWarning,
        match=rf"stored in 16 bits: {name} in {str(stored_in)[6:]}; otaro pack "
        r"--keep-float32",
    ):
        nested = otaro.pack(source, tmp_path / "nested")
    stored = nested.base.tensor(name)
    assert stored.dtype == stored_in
    assert torch.equal(stored, table.to(stored_in))
    assert torch.equal(otaro.load(nested.path).get_input_embeddings().weight, stored.float())
    # norms
    assert {nested.base.tensor(other).dtype for other in nested.unpacked if other != name} == {torch.float32}
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert (
        precision_summary(nested, otaro.PRECISIONS[0]).bits_per_weight
        == stored_bits(nested.path, 8) / weights
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        whole = otaro.pack(source, tmp_path / "whole", keep_float32=True)
    assert torch.equal(whole.base.tensor(name), table)


def test_a_file_in_place_of_the_checkpoint_or_the_target_is_refused(checkpoint_dir, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(CheckpointError, match="file is a file; give the directory of a Hugging Face model"):
        otaro.pack(file, tmp_path / "out")
    with pytest.raises(TargetError, match="file exists and is not a directory"):
        otaro.pack(checkpoint_dir, file, overwrite=True)
    with pytest.raises(TargetError, match="a part of that path is a file, not a directory"):
        otaro.pack(checkpoint_dir, file / "out")
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        (None, "cache has not all of it, .*; give a directory$"),
        (OSError("no network\nsecond line"), r"could not be reached .* \(no network\)$"),
        (OSError(), r"could not be reached .* \(OSError\)$"),
    ],
    ids=["not in the cache", "reason", "no reason"],
)
def test_a_hub_id_that_cannot_be_fetched_is_refused(tmp_path, monkeypatch, cause, told):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(name, **options):
        raise LocalEntryNotFoundError("nothing is there") from cause

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(
        CheckpointError, match=f"there is no directory someone/model here, and the Hub.*{told}"
    ):
        otaro.pack("someone/model", tmp_path / "out")


def test_a_path_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(
        CheckpointError,
        match=r"no/such/directory is neither a directory nor a Hub id "
        r"\(owner/name\)",
    ):
        otaro.pack("no/such/directory", tmp_path / "out")


def test_a_hub_id_is_fetched_without_pickles(checkpoint_dir, nested_dir, tmp_path, monkeypatch):
    import huggingface_hub

    asked = {}
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, **options: asked.update(options, name=name) or str(checkpoint_dir),
    )
    otaro.pack("someone/model", tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(nested_dir)
    assert asked["name"] == "someone/model"
    assert "*.safetensors" in asked["allow_patterns"]
    assert not [pattern for pattern in asked["allow_patterns"] if pattern in ("*", "*.*", "*.bin", "*.pt")]


def test_packing_reads_a_checkpoint_twice_and_holds_little_of_it(checkpoint_dir, tmp_path, in_child):
    """Packing 245 MB, the largest tensor 31 MB, may add at most a third of the checkpoint to the process."""
    sizes = {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 2304, "vocab_size": 20000}
    config = AutoConfig.from_pretrained(
        checkpoint_dir, **sizes, num_attention_heads=12, num_key_value_heads=12, head_dim=64
    )
    with torch.device("meta"):
        shapes = {
            name: tensor.shape
            for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items()
        }
    noise = torch.randn(20000 * 768).half()  # as large as the embedding
    config.save_pretrained(tmp_path / "big")
    file = tmp_path / "big" / "model.safetensors"
    save_file({name: noise[: shape.numel()].reshape(shape).clone() for name, shape in shapes.items()}, file)
    child = in_child(f"""
        import re, resource, otaro
        from pathlib import Path
        def measured():
            read = int(re.search(r"rchar: (\\d+)", Path("/proc/self/io").read_text())[1])
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, read
        otaro.pack({str(checkpoint_dir)!r}, {str(tmp_path / "warm-up")!r})
        before = measured()
        otaro.pack({str(file.parent)!r}, {str(tmp_path / "out")!r})
        print(*(after - before for after, before in zip(measured(), before)))
        """)
    assert child.returncode == 0, child.stderr
    growth, read = map(int, child.stdout.split())
    size, largest = file.stat().st_size, noise.nbytes
    assert size > 200e6
    assert read < 2.1 * size, f"{read / 1e6:.0f} MB read of a file of {size / 1e6:.0f} MB"
    assert growth < size / 3, (
        f"{growth / 1e6:.0f} MB for {size / 1e6:.0f} MB: {growth / largest:.1f} times the largest tensor"
    )
