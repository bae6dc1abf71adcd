"""A config.json that does not fit the shards is refused; transformers without the plug-in refuses it all."""

import copy
import json
import pickle

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import otaro
from otaro.errors import FormatError, OtaroError
from otaro.file.io import NestedDirectory

NORM = "model.norm.weight"


@pytest.fixture
def victim(nested_dir, copy_of):
    """A nested directory to damage."""
    return copy_of(nested_dir)


def open_by(how, directory):
    return otaro.load(directory) if how == "otaro.load" else AutoModelForCausalLM.from_pretrained(directory)


def assert_refused_or_right(directory, how):
    # What transformers itself refuses never gets to us.
    refusals = OtaroError if how == "otaro.load" else (OtaroError, OSError, ValueError, AttributeError)
    try:
        model = open_by(how, directory)
    except refusals:
        return
    stored = NestedDirectory(directory).base.tensor(NORM)
    assert torch.equal(model.model.norm.weight, stored.to(model.dtype))


def edit_config(directory, **changes):
    """Change config.json; None removes."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


@pytest.mark.parametrize("how", ["otaro.load", "from_pretrained"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_size": 128},
            r"model.embed_tokens.weight is \[120, 96\] in .*, but the model .* has "
            r"\[120, 128\]",
        ),
        ({"num_hidden_layers": 3}, r"by config.json needs model.layers.2.\S+, which no shard holds"),
        ({"num_hidden_layers": 1}, r"model.layers.1"),
        ({"attention_bias": True}, r"needs model.layers.0.self_attn.q_proj.bias, which no shard holds"),
        ({"model_type": "qwen3"}, r"needs model.layers.0.self_attn.q_norm.weight, which no shard holds"),
    ],
    ids=["width", "more layers", "fewer layers", "biases", "architecture"],
)
def test_a_config_of_another_model_is_refused(victim, changes, message, how):
    edit_config(victim, **changes)
    with pytest.raises(FormatError, match=message):
        open_by(how, victim)


@pytest.mark.parametrize("how", ["otaro.load", "from_pretrained"])
@pytest.mark.parametrize("changes", [{"reconstruction": "truncate"}, {"group_size": 32}], ids=str)
def test_a_config_that_states_other_numbers_is_refused(victim, changes, how):
    edit_config(
        victim,
        quantization_config={"quant_method": "sefp", "group_size": 64, "reconstruction": "midpoint"}
        | changes,
    )
    with pytest.raises(
        FormatError,
        match=r"config.json says group size and reconstruction are .* of "
        r"different models",
    ):
        open_by(how, victim)


@pytest.mark.parametrize("stated", [None, {"quant_method": "gptq"}, {}, "sefp", ["sefp"]], ids=repr)
def test_a_config_that_describes_no_nested_model_is_refused(victim, stated):
    edit_config(victim, quantization_config=stated)
    with pytest.raises(
        FormatError,
        match=r"config.json (does not describe a nested model|describes no "
        r"model)",
    ):
        otaro.load(victim)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model_type": "no-such-model"}'])
def test_a_config_that_describes_no_model_is_refused(victim, text):
    (victim / "config.json").write_text(text)
    with pytest.raises(OtaroError, match=r"config.json"):
        otaro.load(victim)


def test_a_missing_config_is_refused(victim):
    (victim / "config.json").unlink()
    with pytest.raises(FormatError, match=r"has no config.json; fetch it from where the shards came from"):
        otaro.load(victim)


@pytest.mark.parametrize("how", ["otaro.load", "from_pretrained"])
@pytest.mark.parametrize(
    "weight_map", [{}, {NORM: "model-m4.safetensors"}, {NORM: "../elsewhere.safetensors"}, [], None], ids=str
)
def test_an_index_that_leads_past_the_base_shard_is_refused_or_ignored(victim, weight_map, how):
    """Never may a norm be taken from another file, or be left at its initial value."""
    save_file({NORM: torch.zeros(96)}, victim.parent / "elsewhere.safetensors", {"format": "pt"})
    (victim / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    assert_refused_or_right(victim, how)


@pytest.mark.parametrize("how", ["otaro.load", "from_pretrained"])
@pytest.mark.parametrize(
    "file", ["model-m4.safetensors", "../elsewhere.safetensors", "nothing.safetensors", 5, None], ids=str
)
def test_a_config_that_leads_past_the_base_shard_is_refused_or_ignored(victim, file, how):
    save_file({NORM: torch.zeros(96)}, victim.parent / "elsewhere.safetensors", {"format": "pt"})
    edit_config(victim, transformers_weights=file)
    assert_refused_or_right(victim, how)


@pytest.mark.parametrize("how", ["otaro.load", "from_pretrained"])
def test_an_ordinary_checkpoint_beside_the_shards_is_refused_or_ignored(victim, how):
    """transformers prefers model.safetensors to the index."""
    save_file({NORM: torch.zeros(96)}, victim / "model.safetensors", {"format": "pt"})
    assert_refused_or_right(victim, how)


@pytest.mark.parametrize("architecture", ["llama", "llama_tied"], ids=["untied", "tied"])
def test_transformers_alone_stops_instead_of_running_random_weights(make_nested, architecture, in_child):
    child = in_child(f"""
        from transformers import AutoModelForCausalLM
        AutoModelForCausalLM.from_pretrained({str(make_nested(architecture))!r})
        """)
    assert child.returncode == 1
    assert "mismatch" in child.stderr.lower()
    assert "model.embed_tokens.weight" in child.stderr


def test_a_nested_model_is_not_pickled_and_says_what_to_do(make_nested, tmp_path):
    model = otaro.load(make_nested("llama"), "E5M4")
    for attempt in (
        lambda: pickle.dumps(model),
        lambda: torch.save(model, tmp_path / "model.pt"),
        lambda: torch.save({"model": model}, tmp_path / "model.pt"),
    ):
        with pytest.raises(OtaroError, match=r"model.save_pretrained\(DIR\).*otaro.load\(DIR\)"):
            attempt()
    for part in (model.sefp, model.lm_head, model.model.layers[0]):
        with pytest.raises(OtaroError, match="is not pickled: it is files"):
            pickle.dumps(part)


def test_a_copy_generates_on_its_own(make_nested):
    ids = torch.tensor([[5, 17, 99, 3]])
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model = otaro.load(make_nested("llama"), "E5M4")
    expected = model.generate(ids, **options)  # there is a decoder now, which must not be shared
    twin = copy.deepcopy(model)
    assert twin.sefp.decoder is None
    assert twin.sefp.modules["lm_head"] is twin.lm_head
    assert twin.lm_head is not model.lm_head
    otaro.set_precision(twin, "E5M8")
    finer = otaro.load(make_nested("llama"), "E5M8")
    assert torch.equal(twin.generate(ids, **options), finer.generate(ids, **options))
    assert torch.equal(model.generate(ids, **options), expected)
    assert torch.equal(copy.copy(model).generate(ids, **options), expected)
    twin.model.norm.weight.data.zero_()
    assert torch.equal(model.generate(ids, **options), expected)


def test_packed_weights_take_no_lora(make_nested):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = otaro.load(make_nested("llama"), "E5M4")
    config = peft.LoraConfig(target_modules=["q_proj"], r=2)
    with pytest.raises(
        OtaroError, match="take no LoRA: tune the checkpoint they were packed from, with otaro tune --lora"
    ):
        peft.get_peft_model(model, config)
    with pytest.raises(OtaroError, match="take no LoRA"):
        otaro.load(make_nested("llama"), "E5M4").add_adapter(config)


def test_a_packed_embedding_cannot_be_resized(make_nested):
    model = otaro.load(make_nested("llama"), "E5M4")
    for arguments in (
        {"new_num_tokens": 121},
        {"new_num_tokens": 120, "pad_to_multiple_of": 64},
        {"new_num_tokens": 3},
    ):
        with pytest.raises(
            OtaroError,
            match=r"cannot be resized: resize the checkpoint .* and pack that "
            r"again",
        ):
            model.resize_token_embeddings(**arguments)
    assert model.resize_token_embeddings() is model.resize_token_embeddings(120) is model.model.embed_tokens


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_generation_config_is_refused_by_name(victim, text):
    (victim / "generation_config.json").write_text(text)
    with pytest.raises(FormatError, match=r"generation_config\.json is no JSON object"):
        otaro.load(victim)
