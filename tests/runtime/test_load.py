"""A nested directory runs as an ordinary model with decoded weights would, and is saved as it was."""

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import otaro
from otaro.errors import FormatError, OtaroError, PrecisionError, TargetError
from otaro.file import checkpoint
from otaro.file.io import NestedDirectory
from otaro.packable import Kind, packable

NAMES = [str(precision) for precision in otaro.PRECISIONS]


def files_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_working_directory_may_change_under_a_model(make_nested, monkeypatch, tmp_path):
    """Further shards are opened later, and saving copies them."""
    nested = make_nested("llama")
    for opened in (otaro.load, AutoModelForCausalLM.from_pretrained):
        monkeypatch.chdir(nested.parent)
        model = opened(nested.name)
        monkeypatch.chdir(tmp_path)
        otaro.set_precision(model, "E5M8")
        otaro.set_precision(model, "E5M3")
        model.save_pretrained(tmp_path / opened.__name__)
        assert (
            files_of(tmp_path / opened.__name__).items()
            >= {
                name: data for name, data in files_of(nested).items() if name.endswith(".safetensors")
            }.items()
        )


# The same answers


def test_logits_are_those_of_the_decoded_weights(
    make_nested, decoded_model, logits, architecture, reconstruction, assert_same_logits
):
    model = otaro.load(make_nested(architecture, reconstruction))
    seen = []
    for precision in NAMES:
        otaro.set_precision(model, precision)
        seen.append(logits(model))
        assert_same_logits(model, decoded_model(architecture, precision, reconstruction))
    for finer, coarser in itertools.pairwise(seen):
        assert (finer - coarser).abs().max() > 1e-2  # or the comparison above would not tell precisions apart


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scaled_embeddings_fused_projections_and_convolutions_run_from_their_planes(
    make_nested, decoded_model, assert_same_logits, other_architecture, dtype
):
    model, tokens = otaro.load(make_nested(other_architecture), dtype=dtype), torch.arange(120)
    for precision in ("E5M8", "E5M4"):
        otaro.set_precision(model, precision)
        expected = decoded_model(other_architecture, precision, dtype=dtype)
        assert torch.equal(model.get_input_embeddings()(tokens), expected.get_input_embeddings()(tokens))
        for name, module in model.sefp.modules.items():
            assert torch.equal(module.weight, expected.get_submodule(name).weight), name
        if dtype == torch.float32:
            assert_same_logits(model, expected)


@pytest.mark.parametrize("precision", ["E5M8", "E5M5"])
def test_a_plane_moves_logits_by_more_than_rounding_does(
    decoded_model, logits, assert_same_logits, precision, architecture
):
    """So the tolerance of the tests here cannot hide one."""
    fewer = f"E5M{int(precision[-1]) - 1}"
    expected = decoded_model(architecture, precision)
    finer, coarser = logits(expected), logits(decoded_model(architecture, fewer))
    assert (finer - coarser).abs().max() > assert_same_logits.rounding(expected) * finer.abs().max()


@pytest.mark.parametrize("precision", NAMES)
def test_loading_at_a_precision_is_loading_and_switching_to_it(
    nested_dir, decoded_model, assert_same_logits, precision
):
    model = otaro.load(nested_dir, precision)
    assert set(otaro.precisions_of(model).values()) == {otaro.Precision(precision)}
    assert_same_logits(model, decoded_model("llama", precision))


def test_the_default_is_the_finest_precision_present(nested_dir, copy_of):
    assert set(map(str, otaro.precisions_of(otaro.load(nested_dir)).values())) == {"E5M8"}
    assert set(map(str, otaro.precisions_of(otaro.load(copy_of(nested_dir, planes=(3, 4, 5)))).values())) == {
        "E5M5"
    }


def test_every_linear_and_the_embedding_are_packed_modules(make_nested, architecture):
    model = otaro.load(make_nested(architecture))
    for name, module in model.named_modules():
        assert not isinstance(module, torch.nn.Linear | torch.nn.Embedding), name
    names = set(otaro.precisions_of(model))
    assert {"model.embed_tokens", "lm_head", "model.layers.0.self_attn.q_proj"} <= names
    experts = {
        f"model.layers.{layer}.mlp.experts.{stack}"
        for layer in (0, 1)
        for stack in ("gate_up_proj", "down_proj")
    }
    assert experts <= names if architecture in ("mixtral", "qwen3_moe") else not experts & names


def test_a_weight_can_be_looked_at(make_nested, decoded_model, architecture):
    model, decoded = otaro.load(make_nested(architecture), "E5M5"), decoded_model(architecture, "E5M5")
    assert torch.equal(model.lm_head.weight, decoded.lm_head.weight)
    assert torch.equal(model.get_input_embeddings().weight, decoded.get_input_embeddings().weight)
    assert "E5M5" in repr(model.lm_head)
    if architecture in ("mixtral", "qwen3_moe"):
        assert torch.equal(
            model.model.layers[1].mlp.experts.down_proj.weight, decoded.model.layers[1].mlp.experts.down_proj
        )


@pytest.mark.parametrize("name", ["llama", "llama_tied", "mixtral"])
def test_generation_is_that_of_the_decoded_weights(make_nested, decoded_model, name):
    prompt = torch.tensor([[1, 50, 17, 3]])
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    for precision in ("E5M7", "E5M3"):
        expected = decoded_model(name, precision).generate(prompt, **options)
        assert expected.shape == (1, 16)
        assert torch.equal(otaro.load(make_nested(name), precision).generate(prompt, **options), expected)


def test_a_directory_without_planes_is_a_whole_model(nested_dir, copy_of, decoded_model, assert_same_logits):
    for finest, planes in (("E5M3", (3,)), ("E5M5", (3, 4, 5))):
        model = otaro.load(copy_of(nested_dir, planes))
        assert_same_logits(model, decoded_model("llama", finest))


# Types


def test_activations_are_float32_unless_asked_otherwise(nested_dir, logits):
    assert logits(otaro.load(nested_dir)).dtype == torch.float32
    assert logits(otaro.load(nested_dir, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen2", "mixtral"])
@pytest.mark.parametrize("how", ["load", "to"])
def test_a_narrower_type_gives_what_the_ordinary_model_gives_in_it(
    make_nested, decoded_model, logits, name, dtype, how
):
    if how == "load":
        model, expected = (
            otaro.load(make_nested(name), "E5M4", dtype=dtype),
            decoded_model(name, "E5M4", dtype=dtype),
        )
    else:  # this narrows the rotary frequencies too, in both
        model, expected = (
            otaro.load(make_nested(name), "E5M4").to(dtype),
            decoded_model(name, "E5M4").to(dtype),
        )
    assert {tensor.dtype for tensor in model.parameters()} == {dtype}
    assert model.lm_head.weight.dtype == dtype
    assert logits(model).dtype == dtype
    torch.testing.assert_close(logits(model), logits(expected))


def test_types_convert_back_and_forth(nested_dir, logits):
    model = otaro.load(nested_dir, "E5M6")
    weight = model.lm_head.weight
    assert logits(model.to(torch.float16)).dtype == torch.float16
    assert logits(model.to(torch.float32)).dtype == torch.float32
    assert torch.equal(model.lm_head.weight, weight)


# Through transformers


def test_from_pretrained_opens_a_nested_directory(nested_dir, decoded_model, assert_same_logits):
    model = AutoModelForCausalLM.from_pretrained(nested_dir, dtype=torch.float32)
    assert_same_logits(model, decoded_model("llama", "E5M8"))


def test_from_pretrained_takes_a_precision(nested_dir, decoded_model, assert_same_logits):
    config = otaro.SefpConfig(precision="E5M4")
    model = AutoModelForCausalLM.from_pretrained(nested_dir, dtype=torch.float32, quantization_config=config)
    assert set(map(str, otaro.precisions_of(model).values())) == {"E5M4"}
    assert_same_logits(model, decoded_model("llama", "E5M4"))


def test_from_pretrained_keeps_the_numbers_of_the_file(make_nested, decoded_model, assert_same_logits):
    """A config given for its precision alone has defaults for the rest, which are not the file's."""
    model = AutoModelForCausalLM.from_pretrained(
        make_nested("llama", "truncate"),
        dtype=torch.float32,
        quantization_config=otaro.SefpConfig(precision="E5M4"),
    )
    assert_same_logits(model, decoded_model("llama", "E5M4", "truncate"))


def test_from_pretrained_uses_the_stored_type_by_default(make_nested):
    assert AutoModelForCausalLM.from_pretrained(make_nested("llama")).lm_head.weight.dtype == torch.float16
    assert (
        AutoModelForCausalLM.from_pretrained(make_nested("llama_tied")).lm_head.weight.dtype == torch.bfloat16
    )


def test_from_pretrained_accepts_a_device_map(nested_dir, logits):
    model = AutoModelForCausalLM.from_pretrained(nested_dir, dtype=torch.float32, device_map="cpu")
    assert torch.equal(logits(model), logits(otaro.load(nested_dir)))


def test_an_unknown_precision_is_refused(nested_dir):
    with pytest.raises(PrecisionError, match=r"unknown precision 'E5M9'; the precisions are E5M8, .*, E5M3"):
        otaro.load(nested_dir, "E5M9")
    with pytest.raises(PrecisionError, match=r"precision=\['E5M4'\]: give one such as E5M4"):
        otaro.load(nested_dir, ["E5M4"])
    with pytest.raises(PrecisionError, match="unknown precision 'm4'"):
        AutoModelForCausalLM.from_pretrained(nested_dir, quantization_config=otaro.SefpConfig(precision="m4"))


def test_the_builtin_model_is_refused_with_advice():
    with pytest.raises(
        FormatError, match="the built-in model is an ordinary checkpoint; pack it first: otaro pack builtin"
    ):
        otaro.load("builtin")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux which files are mapped")
def test_only_the_shards_that_the_precision_needs_are_mapped(nested_dir, copy_of, logits):
    directory = copy_of(nested_dir)

    def mapped():
        paths = {
            line.split(maxsplit=5)[-1]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "model-m" in line
        }
        return sorted(Path(path).name for path in paths if path.startswith(str(directory)))

    model = otaro.load(directory, "E5M4")
    logits(model)
    assert mapped() == ["model-m3.safetensors", "model-m4.safetensors"]
    otaro.set_precision(model, "E5M6")
    assert mapped() == [f"model-m{plane}.safetensors" for plane in (3, 4, 5, 6)]


# Importing


def test_importing_otaro_imports_neither_torch_nor_transformers():
    code = (
        "import sys, otaro; print({'torch', 'transformers', 'safetensors', 'numpy'} & sys.modules.keys() "
        "or 'light')"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.stdout == "light\n", child.stderr


def test_every_public_name_can_be_had(in_child):
    child = in_child("import otaro; print([name for name in otaro.__all__ if getattr(otaro, name) is None])")
    assert child.stdout == "[]\n", child.stderr
    with pytest.raises(AttributeError, match="module 'otaro' has no attribute 'nothing'"):
        otaro.nothing  # noqa: B018 (asking is the test)


def test_the_plug_in_works_when_otaro_is_imported_first(nested_dir):
    code = f"""import otaro, sys
assert "transformers" not in sys.modules
from transformers import AutoModelForCausalLM
print(*set(otaro.precisions_of(AutoModelForCausalLM.from_pretrained({str(nested_dir)!r})).values()))"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.stdout == "E5M8\n", child.stderr


def test_the_plug_in_works_when_transformers_is_imported_and_used_first(nested_dir, in_child):
    child = in_child(f"""
        import sys
        from transformers import AutoModelForCausalLM
        assert "otaro" not in sys.modules
        try:
            AutoModelForCausalLM.from_pretrained({str(nested_dir)!r})
        except RuntimeError:
            print("refused")
        import otaro
        print(*set(otaro.precisions_of(AutoModelForCausalLM.from_pretrained({str(nested_dir)!r})).values()))
        """)
    assert child.stdout == "refused\nE5M8\n", child.stderr


# Saving


def test_saving_writes_the_same_bytes(make_nested, architecture, tmp_path):
    otaro.load(make_nested(architecture)).save_pretrained(tmp_path / "saved")
    assert files_of(tmp_path / "saved") == files_of(make_nested(architecture))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("precision", NAMES)
def test_saving_writes_the_same_bytes_whatever_the_run_was_at(nested_dir, tmp_path, precision, dtype):
    otaro.load(nested_dir, precision, dtype=dtype).save_pretrained(tmp_path / "saved")
    assert files_of(tmp_path / "saved") == files_of(nested_dir)


@pytest.mark.parametrize("planes", [(3,), (3, 4), (3, 4, 5, 6, 7)], ids=len)
def test_saving_a_directory_without_some_planes_writes_the_same_bytes(
    make_nested, reconstruction, copy_of, tmp_path, planes
):
    directory = copy_of(make_nested("llama", reconstruction), planes)
    otaro.load(directory).save_pretrained(tmp_path / "saved")
    assert files_of(tmp_path / "saved") == files_of(directory)
    NestedDirectory(tmp_path / "saved").verify()


def test_saving_from_transformers_writes_the_same_bytes(nested_dir, tmp_path):
    config = otaro.SefpConfig(precision="E5M4")
    AutoModelForCausalLM.from_pretrained(nested_dir, quantization_config=config).save_pretrained(
        str(tmp_path / "saved")
    )
    assert files_of(tmp_path / "saved") == files_of(nested_dir)


def test_what_was_saved_can_be_saved_again(make_nested, tmp_path):
    otaro.load(make_nested("llama_tied")).save_pretrained(tmp_path / "first")
    otaro.load(tmp_path / "first").save_pretrained(tmp_path / "second")
    assert files_of(tmp_path / "second") == files_of(make_nested("llama_tied"))


def test_a_changed_norm_is_saved_changed(nested_dir, tmp_path, logits):
    model = otaro.load(nested_dir)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    model.save_pretrained(tmp_path / "saved")
    again = otaro.load(tmp_path / "saved")
    assert torch.equal(again.model.norm.weight, model.model.norm.weight)
    assert torch.equal(logits(again), logits(model))
    NestedDirectory(tmp_path / "saved").verify()
    before, after = files_of(nested_dir), files_of(tmp_path / "saved")
    # all of them name the model
    changed = {"decoder.json", *(f"model-m{plane}.safetensors" for plane in range(3, 9))}
    assert {name for name in before if before[name] != after[name]} == changed


@pytest.mark.parametrize("planes", [(3, 4), tuple(range(3, 9))], ids=len)
def test_a_changed_norm_makes_another_model_and_the_old_norm_the_old_one(
    nested_dir, copy_of, tmp_path, planes
):
    source = copy_of(nested_dir, planes)
    model = otaro.load(source)
    identities = []
    for number, factor in enumerate((1.0, 2.0, 1.0, 0.5)):
        with torch.no_grad():
            model.model.norm.weight.copy_(NestedDirectory(source).base.tensor("model.norm.weight") * factor)
        model.save_pretrained(tmp_path / str(number))
        saved = NestedDirectory(tmp_path / str(number))
        saved.require(saved.finest)
        identities.append(saved.base.header.model)
    original = NestedDirectory(nested_dir).base.header.model
    assert identities[0] == identities[2] == original
    assert len(set(identities)) == 3


def test_saving_and_packing_the_same_tensors_give_the_same_model(checkpoint_dir, nested_dir, tmp_path):
    """With all planes at hand the identity is that of the content, whoever writes it."""
    ordinary, model = (
        AutoModelForCausalLM.from_pretrained(checkpoint_dir),
        otaro.load(nested_dir, dtype=torch.float16),
    )
    with torch.no_grad():
        for each in (ordinary, model):
            each.model.norm.weight.mul_(2)
    ordinary.save_pretrained(tmp_path / "checkpoint")
    otaro.pack(tmp_path / "checkpoint", tmp_path / "packed")
    model.save_pretrained(tmp_path / "saved")
    assert files_of(tmp_path / "saved") == files_of(tmp_path / "packed")


def test_what_the_rule_packs_of_other_architectures_goes_round(
    other_architecture, make_nested, tmp_path, logits
):
    model = otaro.load(make_nested(other_architecture), "E5M5")
    model.save_pretrained(tmp_path / "saved")
    assert files_of(tmp_path / "saved") == files_of(make_nested(other_architecture))
    assert torch.equal(logits(otaro.load(tmp_path / "saved", "E5M5")), logits(model))


@pytest.fixture
def older(make_checkpoint, tmp_path, monkeypatch):
    """A Gemma as versions before this rule packed it: the embedding and the head that is tied to it are
    stored as they are.
    """
    monkeypatch.setattr(
        checkpoint, "packable", lambda model: [one for one in packable(model) if one.kind is Kind.LINEAR]
    )
    assert "model.embed_tokens.weight" in otaro.pack(make_checkpoint("gemma"), tmp_path / "older").unpacked
    return tmp_path / "older"


def test_a_model_that_was_packed_by_an_older_rule_opens_as_it_was_packed(
    older, make_checkpoint, tmp_path, logits
):
    """The head is tied to an embedding that is not packed: a name that the model has and the file has not."""
    model = otaro.load(older, "E5M5")
    ordinary = AutoModelForCausalLM.from_pretrained(make_checkpoint("gemma"), dtype=torch.float32)
    assert torch.equal(
        model.get_input_embeddings()(torch.arange(120)), ordinary.get_input_embeddings()(torch.arange(120))
    )
    assert "lm_head.weight" in model.state_dict()
    assert "lm_head.weight" not in NestedDirectory(older).unpacked
    model.save_pretrained(tmp_path / "saved")
    assert files_of(tmp_path / "saved") == files_of(older)
    again = otaro.load(tmp_path / "saved", "E5M5")
    assert torch.equal(logits(again), logits(model))
    with torch.no_grad():
        again.get_input_embeddings().weight.mul_(2)  # the head's as well
    again.save_pretrained(tmp_path / "changed")
    assert torch.equal(logits(otaro.load(tmp_path / "changed", "E5M5")), logits(again))


def test_tensors_that_the_file_has_no_place_for_are_not_lost_in_silence(older, nested_dir, tmp_path):
    model = otaro.load(older)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 2)
    with pytest.raises(
        OtaroError,
        match=r"lm_head.weight is no longer tied to model.embed_tokens.weight; "
        r"save_pretrained",
    ):
        model.save_pretrained(tmp_path / "saved")
    model = otaro.load(nested_dir)
    model.value_head = torch.nn.Linear(96, 1)
    with pytest.raises(OtaroError, match=r"value_head.weight is none of the nested model's; save_pretrained"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_changed_bias_keeps_its_type_when_the_model_runs_in_it(make_nested, tmp_path):
    model = otaro.load(make_nested("qwen2"), dtype=torch.float16)
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.bias.add_(1)
    model.save_pretrained(tmp_path / "saved")
    stored = NestedDirectory(tmp_path / "saved").base.tensor("model.layers.1.self_attn.q_proj.bias")
    assert stored.dtype == torch.float16
    assert torch.equal(stored, model.model.layers[1].self_attn.q_proj.bias)


def test_changed_settings_are_saved_changed(nested_dir, tmp_path):
    model = otaro.load(nested_dir)
    model.generation_config.max_new_tokens = 77
    model.config.rms_norm_eps = 0.25
    model.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "generation_config.json").read_text())["max_new_tokens"] == 77
    before, after = (
        json.loads((directory / "config.json").read_text()) for directory in (nested_dir, tmp_path / "saved")
    )
    assert after == before | {"rms_norm_eps": 0.25}


@pytest.mark.parametrize(
    "file",
    [
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "adapter_model.safetensors",
        "config.json",
    ],
)
def test_saving_beside_other_weights_is_refused_and_loses_nothing(file, nested_dir, copy_of):
    target = copy_of(nested_dir)
    if file == "config.json":  # of a model in a form that is not looked for here
        (target / "model-m3.safetensors").unlink()
    (target / file).write_text("of another model")
    before = files_of(target)
    with pytest.raises(
        TargetError,
        match=rf"holds another model \({file}\), which stays as it is; choose "
        r"another folder",
    ):
        otaro.load(nested_dir).save_pretrained(target)
    assert files_of(target) == before


def test_saving_over_a_directory_keeps_its_other_files(nested_dir, make_nested, copy_of, tmp_path):
    target = copy_of(make_nested("llama", "truncate"))
    (target / "tokenizer.json").write_text("mine")
    (target / "runs").mkdir()
    (target / "runs" / "log").write_text("mine")
    (target / "link").symlink_to("nowhere")
    source = copy_of(nested_dir, planes=(3, 4))
    otaro.load(source).save_pretrained(target)
    assert (target / "tokenizer.json").read_text() == (target / "runs" / "log").read_text() == "mine"
    shutil.rmtree(target / "runs")
    (target / "tokenizer.json").unlink()
    (target / "link").unlink()
    assert files_of(target) == files_of(source)


def test_saving_over_the_own_directory_keeps_it_whole(nested_dir, copy_of, logits):
    directory = copy_of(nested_dir)
    model = otaro.load(directory, "E5M4")
    model.save_pretrained(directory)
    assert files_of(directory) == files_of(nested_dir)
    otaro.set_precision(model, "E5M8")
    assert torch.equal(logits(model), logits(otaro.load(nested_dir)))


def test_saving_over_a_file_is_refused(nested_dir, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(TargetError, match="file exists and is not a directory"):
        otaro.load(nested_dir).save_pretrained(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_saving_other_weights_or_straight_to_the_hub_is_refused(nested_dir, tmp_path):
    model = otaro.load(nested_dir)
    for options in ({"state_dict": {}}, {"push_to_hub": True}):
        with pytest.raises(OtaroError, match="a nested model is saved from its own planes"):
            model.save_pretrained(tmp_path / "saved", **options)
    model.save_pretrained(tmp_path / "saved", is_main_process=False)
    assert not (tmp_path / "saved").exists()


def test_tying_again_changes_nothing(make_nested):
    model = otaro.load(make_nested("llama_tied"), "E5M5")
    before = model.lm_head.weight
    model.tie_weights()  # as lm-evaluation-harness does
    assert torch.equal(model.lm_head.weight, before)
    assert model.lm_head.packed is model.get_input_embeddings().packed
