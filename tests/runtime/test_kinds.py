"""Kinds of models beside those of the other tests: each packs, opens, generates and is saved again, or is refused by name."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import otaro
from otaro.errors import CheckpointError
from otaro.file.io import NestedDirectory

pytestmark = pytest.mark.filterwarnings("ignore:this .* generates through transformers")

SMALL = {"vocab_size": 120, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}

# With what is odd about each.
KINDS = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 120},  # projections that are no linears
    "gpt_neox": SMALL,  # stored under names that the class does not have; not a decoder by its config, and yet one
    "mamba": {**SMALL, "state_size": 8},  # initial values that reach into packed linears
    "olmo": {**SMALL, "num_key_value_heads": 2},  # no parameter is left unpacked
    "apertus": {**SMALL, "num_key_value_heads": 2},  # numbers without a dimension
    "granitemoe": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},  # expert stacks under other names
    "afmoe": {**SMALL, **EXPERTS, "num_experts": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16},  # as mamba
}
REFUSED = {
    "bert": (SMALL, r"BertLMHeadModel \(bert\) is an encoder as config.json sets it up"),
    "xlm": ({"emb_dim": 64, "n_layers": 2, "n_heads": 4, "n_words": 120}, r"XLMWithLMHeadModel \(xlm\) is an encoder"),
    "llama4_text": (
        {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "intermediate_size_mlp": 96},
        r"model.layers.0.feed_forward.experts: expert weights kept in a form of its own \(llama4_text\) are not supported",
    ),
    "t5": ({"d_model": 64, "num_layers": 2, "vocab_size": 120}, r"transformers cannot build a causal 't5' model"),
}


def save(kind, settings, directory):
    torch.manual_seed(0)
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings, **tokens), dtype=torch.float32)
    model.save_pretrained(directory)


@pytest.mark.parametrize("kind", KINDS)
def test_it_packs_opens_generates_and_is_saved_again(kind, tmp_path):
    save(kind, KINDS[kind], tmp_path / "checkpoint")
    nested = otaro.pack(tmp_path / "checkpoint", tmp_path / "nested")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", experts_implementation="eager")
    for name in nested.schema.packed:
        weight = expected.get_parameter(name)
        weight.data = otaro.encode(weight.data).decode("E5M5")
    model = otaro.load(tmp_path / "nested", "E5M5")
    now = {**model.state_dict(), **{module.packed.name: module.weight for module in model.sefp.modules.values()}}
    for name, tensor in expected.named_parameters():
        assert torch.equal(now[name], tensor), name
    ids = torch.tensor([[5, 50, 17, 3, 99, 8]])
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **options), expected.generate(ids, **options))
    model.save_pretrained(tmp_path / "again")
    files = {path.name: path.read_bytes() for path in (tmp_path / "nested").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == files
    NestedDirectory(tmp_path / "again").verify()


@pytest.mark.parametrize("kind", REFUSED)
def test_it_is_refused_when_packed_and_not_later(kind, make_checkpoint, tmp_path):
    settings, message = REFUSED[kind]
    checkpoint = tmp_path / "checkpoint"
    if kind == "t5":
        AutoConfig.for_model(kind, **settings).save_pretrained(checkpoint)
        (checkpoint / "model.safetensors").write_bytes((make_checkpoint("llama") / "model.safetensors").read_bytes())
    else:
        save(kind, settings, checkpoint)
    with pytest.raises(CheckpointError, match=message):
        otaro.pack(checkpoint, tmp_path / "nested")
    assert not (tmp_path / "nested").exists()
