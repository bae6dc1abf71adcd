"""An exported checkpoint is an ordinary one, with the values of its precision."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import otaro
from otaro.errors import DigestError, FormatError, OtaroError, ShardMissingError, TargetError
from otaro.export.checkpoint import spell_out_rope
from otaro.export.run import export
from otaro.export.source import Source

ALL = [
    "llama",
    "llama_tied",
    "qwen2",
    "mixtral",
    "qwen3_moe",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "smollm3",
    "gpt2",
]


@pytest.mark.parametrize("architecture", ALL)
def test_transformers_opens_it_with_the_values_of_the_precision(architecture, make_nested, decoded, tmp_path):
    nested = make_nested(architecture)
    report = export(nested, tmp_path / "out", precision="E5M4", to="hf")
    assert report.exact, report
    model, told = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = model.state_dict()
    for name, wanted in decoded(nested, "E5M4").items():
        assert torch.equal(state[name], wanted), name


@pytest.mark.parametrize("architecture", ["llama_tied", "gpt2", "mixtral"])
def test_a_model_is_given_the_values_of_one_precision_after_another(architecture, make_nested, decoded):
    nested = make_nested(architecture)
    model = AutoModelForCausalLM.from_config(Source(nested, "E5M3").config, dtype=torch.float32)
    for precision in ("E5M8", "E5M3"):
        Source(nested, precision).load_into(model)
        found, wanted = model.state_dict(), decoded(nested, precision)
        assert all(torch.equal(found[name], values) for name, values in wanted.items())
        assert wanted.keys() | model.all_tied_weights_keys.keys() == found.keys()


def test_experts_have_the_names_of_checkpoints_on_the_hub(make_nested, make_checkpoint, tmp_path):
    export(make_nested("mixtral"), tmp_path / "out", precision="E5M3", to="hf")
    written = load_file(tmp_path / "out" / "model.safetensors")
    original = load_file(make_checkpoint("mixtral") / "model.safetensors")
    assert {name: tensor.shape for name, tensor in written.items()} == {
        name: t.shape for name, t in original.items()
    }
    assert any(name.endswith("experts.3.w2.weight") for name in written)


@pytest.mark.parametrize(
    ("precision", "reconstruction", "architecture", "dtype"),
    [
        ("E5M3", "midpoint", "llama", torch.float16),
        ("E5M3", "midpoint", "llama_tied", torch.bfloat16),  # the model's own type
        ("E5M4", "midpoint", "llama_tied", torch.float16),  # which has too few digits now
        ("E5M6", "midpoint", "llama", torch.float16),
        ("E5M7", "midpoint", "llama", torch.float32),
        ("E5M8", "truncate", "llama", torch.float16),
    ],
)
def test_the_type_is_the_smallest_that_is_exact(
    precision, reconstruction, architecture, dtype, make_nested, tmp_path
):
    report = export(make_nested(architecture, reconstruction), tmp_path / "out", precision=precision, to="hf")
    assert report.exact
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written["model.layers.0.mlp.up_proj.weight"].dtype == dtype
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(dtype).removeprefix(
        "torch."
    )


def test_damaged_shards_are_not_exported(make_nested, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(make_nested("llama"), damaged)
    content = bytearray((damaged / "model-m4.safetensors").read_bytes())
    content[-1] ^= 1
    (damaged / "model-m4.safetensors").write_bytes(content)
    with pytest.raises(DigestError, match=r"the bytes of .* are damaged; delete the file"):
        export(damaged, tmp_path / "out", precision="E5M5", to="hf")
    assert not (tmp_path / "out").exists()
    assert export(damaged, tmp_path / "out", precision="E5M3", to="hf").exact  # its shard is sound


def test_a_type_that_rounds_is_said_to(make_nested, decoded, tmp_path):
    nested = make_nested("llama")
    report = export(nested, tmp_path / "out", precision="E5M8", to="hf", type="bfloat16")
    written, wanted = load_file(tmp_path / "out" / "model.safetensors"), decoded(nested, "E5M8")
    errors = {name: float((written[name].float() - values).abs().max()) for name, values in wanted.items()}
    told = report.types["bfloat16"]
    assert not report.exact
    assert told.largest_error == max(errors.values()) == errors[told.worst] > 0
    packed = [name for name in wanted if "norm" not in name]
    assert told.rounded_tensors == len(packed)
    assert told.rounded_weights == sum(int((written[name].float() != wanted[name]).sum()) for name in packed)


def test_a_norm_that_the_type_would_round_keeps_its_own(make_nested, tmp_path):
    report = export(make_nested("qwen3"), tmp_path / "out", precision="E5M3", to="hf")  # a float32 model
    assert report.exact
    assert {kind: one.tensors for kind, one in report.types.items()}["float32"] == 2 * 4 + 1, "the norms"


def test_it_runs_like_the_nested_model(tiny, tmp_path):
    export(tiny, tmp_path / "out", precision="E5M3", to="hf")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(5, 25).unsqueeze(0)
    ours = otaro.load(tiny, "E5M3").generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(plain.generate(ids, max_new_tokens=12, do_sample=False), ours)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()


def test_what_is_missing_or_unknown_is_refused_by_name(make_nested, copy_of, tmp_path):
    nested = copy_of(make_nested("llama"), planes=(3, 4))
    with pytest.raises(ShardMissingError, match=r"E5M5 needs model-m5.safetensors"):
        export(nested, tmp_path / "out", precision="E5M5", to="hf")
    with pytest.raises(OtaroError, match=r"unknown target 'onnx'; choose from .*hf"):
        export(nested, tmp_path / "out", precision="E5M4", to="onnx")
    with pytest.raises(OtaroError, match=r"unknown type 'int3'; choose from float16, bfloat16, float32"):
        export(nested, tmp_path / "out", precision="E5M4", to="hf", type="int3")
    assert not (tmp_path / "out").exists()
    config = json.loads((nested / "config.json").read_text())
    (nested / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    with pytest.raises(
        FormatError,
        match=r"has model.layers.0.mlp.gate_proj.weight as \[112, 96\], "
        r"config.json implies",
    ):
        export(nested, tmp_path / "out", precision="E5M4", to="hf")
    (nested / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(FormatError, match=r"lacks model.layers.2"):
        export(nested, tmp_path / "out", precision="E5M4", to="hf")
    (nested / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(FormatError, match=r"holds model.layers.1.*which llama models by config.json lack"):
        export(nested, tmp_path / "out", precision="E5M4", to="hf")
    (nested / "config.json").unlink()
    with pytest.raises(FormatError, match=r"has no config.json"):
        export(nested, tmp_path / "out", precision="E5M4", to="hf")


def test_only_an_earlier_export_is_replaced(make_nested, tmp_path):
    nested, out = make_nested("llama"), tmp_path / "out"
    export(nested, out, precision="E5M4", to="hf")
    with pytest.raises(
        TargetError,
        match=r"exists; choose another place, or replace an earlier export with "
        r"--overwrite",
    ):
        export(nested, out, precision="E5M3", to="hf")
    export(nested, out, precision="E5M3", to="hf", overwrite=True)
    assert json.loads((out / "otaro-export.json").read_text())["precision"] == "E5M3"
    (out / "notes.txt").write_text("mine")
    with pytest.raises(TargetError, match=r"also holds notes.txt, which is not of the export"):
        export(nested, out, precision="E5M3", to="hf", overwrite=True)
    (out / "otaro-export.json").unlink()
    with pytest.raises(TargetError, match=r"is no earlier export and is not overwritten"):
        export(nested, out, precision="E5M3", to="hf", overwrite=True)


def test_nothing_is_left_of_an_export_that_fails(make_nested, tmp_path, monkeypatch):
    def stop(what, done, total):
        if "checking" in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(make_nested("llama"), tmp_path / "out", precision="E5M4", to="hf", progress=stop)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "phi3"])
def test_rope_is_told_by_its_older_names_too(architecture, make_nested, tmp_path):
    nested = make_nested(architecture)
    export(nested, tmp_path / "out", precision="E5M3", to="hf")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    rope = config["rope_parameters"]
    assert config["rope_theta"] == rope.get("full_attention", rope)["rope_theta"]
    assert (
        AutoConfig.from_pretrained(tmp_path / "out").rope_parameters
        == AutoConfig.from_pretrained(nested).rope_parameters
    )


def test_scaled_rope_is_told_by_its_older_names_too(tmp_path):
    rope = {"rope_type": "linear", "rope_theta": 2e6, "factor": 8.0}
    LlamaConfig(rope_parameters=rope).save_pretrained(tmp_path)
    spell_out_rope(tmp_path / "config.json")
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["rope_theta"], config["rope_scaling"]) == (2e6, {"rope_type": "linear", "factor": 8.0})
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == rope
