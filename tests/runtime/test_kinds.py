"""Kinds of models beside other tests': each packs, opens, generates and is saved, or is refused by name."""

import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import otaro
from otaro.errors import CheckpointError
from otaro.file.io import NestedDirectory

pytestmark = pytest.mark.filterwarnings("ignore:this .* generates through transformers")

SMALL = {
    "vocab_size": 120,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}

# With what is odd about each.
KINDS = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 120},  # projections as [in, out]
    # an odd embedding
    "xglm": {"d_model": 96, "num_layers": 2, "attention_heads": 4, "ffn_dim": 112, "vocab_size": 120},
    # stored under names that the class does not have; not a decoder by its config, and yet one
    "gpt_neox": SMALL,
    "mamba": {**SMALL, "state_size": 8},  # initial values that reach into packed linears
    "olmo": {**SMALL, "num_key_value_heads": 2},  # no parameter is left unpacked
    "apertus": {**SMALL, "num_key_value_heads": 2},  # numbers without a dimension
    # expert stacks under other names
    "granitemoe": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    # as mamba
    "afmoe": {
        **SMALL,
        **EXPERTS,
        "num_experts": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 16,
    },
}
REFUSED = {
    "bert": (SMALL, r"BertLMHeadModel \(bert\) is an encoder as config.json sets it up"),
    "xlm": (
        {"emb_dim": 64, "n_layers": 2, "n_heads": 4, "n_words": 120},
        r"XLMWithLMHeadModel \(xlm\) is "
        r"an encoder",
    ),
    "llama4_text": (
        {
            **SMALL,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_local_experts": 4,
            "intermediate_size_mlp": 96,
        },
        r"layers.0.feed_forward.experts: expert weights kept in a form of its own \(Llama4TextExperts\) are "
        r"not supported",
    ),
    "t5": (
        {"d_model": 64, "num_layers": 2, "vocab_size": 120},
        r"transformers cannot build a causal 't5' "
        r"model",
    ),
}


GEMMA = {**SMALL, "model_type": "gemma3_text", "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16}
SIGHT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}


MASK = torch.ones(1, 1, 8, 8, dtype=torch.bool)  # which old checkpoints of GPTs hold beside the weights

# As their authors store them: kind, settings, what to look for in the names, and the state dict in these
# names.
UPSTREAM = {
    "pythia": (
        "gpt_neox",
        SMALL,
        "embed_out.weight",
        lambda state: (
            {name.replace("lm_head.", "embed_out."): tensor for name, tensor in state.items()}
            | {"gpt_neox.layers.0.attention.bias": MASK}
            | {"gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(8)}
        ),
    ),
    "gpt2": (
        "gpt2",
        KINDS["gpt2"],
        "h.0.attn.c_attn.weight",
        lambda state: (
            {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
            | {"h.0.attn.bias": MASK}
        ),
    ),
    "gemma3 with a tower of sight": (
        "gemma3",
        {"text_config": GEMMA, "vision_config": {**SIGHT, "patch_size": 14}, "mm_tokens_per_image": 4},
        "language_model.model.embed_tokens.weight",
        dict,
    ),
    "a base model": (
        "llama",
        {**SMALL, "num_key_value_heads": 2, "tie_word_embeddings": True},
        "layers.0.self_attn.q_proj.weight",
        lambda state: {name.removeprefix("model."): tensor for name, tensor in state.items()},
    ),
    "the head of two that are tied": (
        "llama",
        {**SMALL, "num_key_value_heads": 2, "tie_word_embeddings": True},
        "lm_head.weight",
        lambda state: {
            name.replace("model.embed_tokens", "lm_head"): tensor for name, tensor in state.items()
        },
    ),
    "granitemoe": (
        "granitemoe",
        KINDS["granitemoe"],
        "model.layers.0.block_sparse_moe.input_linear.weight",
        dict,
    ),
}


def save(kind, settings, directory):
    torch.manual_seed(0)
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **settings, **tokens), dtype=torch.float32
    )
    model.save_pretrained(directory)


@pytest.mark.parametrize("name", UPSTREAM)
def test_a_checkpoint_is_read_under_the_names_that_transformers_reads(name, as_packed, tmp_path):
    kind, settings, looks_like, rename = UPSTREAM[name]
    save(kind, settings, tmp_path)
    stored = rename(load_file(tmp_path / "model.safetensors"))
    assert looks_like in stored
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    expected, found = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    with warnings.catch_warnings():
        # nothing is left out that transformers would not leave out, too
        warnings.simplefilter("error", UserWarning)
        nested = otaro.pack(tmp_path, tmp_path / "nested")
    model = otaro.load(tmp_path / "nested", "E5M8")
    assert isinstance(model, type(expected))
    now = {
        **model.state_dict(),
        **{module.packed.name: module.weight for module in model.sefp.modules.values()},
    }
    for parameter, tensor in expected.named_parameters():
        if parameter in nested.schema.packed:
            tensor = as_packed(parameter, otaro.encode(as_packed(parameter, tensor.data)).decode("E5M8"))
        assert torch.equal(now[parameter], tensor), parameter


def test_a_base_model_whose_head_is_missing_is_refused_by_that_reason(tmp_path):
    config = AutoConfig.for_model("llama", **SMALL, num_key_value_heads=2, tie_word_embeddings=False)
    AutoModel.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"holds a base model, without the head lm_head.weight, and "
        r"nothing can be",
    ):
        otaro.pack(tmp_path, tmp_path / "nested")


@pytest.mark.parametrize("kind", KINDS)
def test_it_packs_opens_generates_and_is_saved_again(kind, as_packed, tmp_path):
    save(kind, KINDS[kind], tmp_path / "checkpoint")
    nested = otaro.pack(tmp_path / "checkpoint", tmp_path / "nested")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", experts_implementation="eager")
    for name in nested.schema.packed:
        weight = expected.get_parameter(name)
        weight.data = as_packed(name, otaro.encode(as_packed(name, weight.data)).decode("E5M5"))
    model = otaro.load(tmp_path / "nested", "E5M5")
    now = {
        **model.state_dict(),
        **{module.packed.name: module.weight for module in model.sefp.modules.values()},
    }
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
        (checkpoint / "model.safetensors").write_bytes(
            (make_checkpoint("llama") / "model.safetensors").read_bytes()
        )
    else:
        save(kind, settings, checkpoint)
    with pytest.raises(CheckpointError, match=message):
        otaro.pack(checkpoint, tmp_path / "nested")
    assert not (tmp_path / "nested").exists()
