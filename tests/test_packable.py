"""One rule of what is packed: what it says of a model, and that packing, loading and tuning all follow it."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, XGLMConfig

import otaro
from otaro.file.io import NestedDirectory
from otaro.packable import Kind, embedding_scale, packable, scaled
from otaro.tune.fake_quant import Precisely, prepare
from tests.conftest import ALL

XGLM = {"vocab_size": 120, "ffn_dim": 112, "num_layers": 1, "attention_heads": 4}


def kinds_of(model):
    return {one.name.replace("layers.0.", "").replace("h.0.", ""): str(one.kind) for one in packable(model)}


def test_it_names_each_tensor_and_its_kind(random_model):
    of_experts = kinds_of(random_model("mixtral", num_hidden_layers=1))
    projections = [f"model.self_attn.{part}_proj.weight" for part in "qkvo"]
    assert of_experts == {
        "model.embed_tokens.weight": "embedding",
        **dict.fromkeys(projections, "linear"),
        "model.mlp.experts.gate_up_proj": "experts",
        "model.mlp.experts.down_proj": "experts",
        "lm_head.weight": "head",
    }
    of_gpt2 = kinds_of(random_model("gpt2", num_hidden_layers=1))
    convolutions = [
        f"transformer.{part}.weight" for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    assert of_gpt2 == {
        "transformer.wte.weight": "embedding",
        **dict.fromkeys(convolutions, "conv1d"),
        "lm_head.weight": "head",
    }


@pytest.mark.parametrize("architecture", ALL)
def test_packing_loading_and_tuning_follow_it(random_model, make_nested, architecture):
    model = random_model(architecture)
    rule = packable(model)
    with torch.device("meta"):
        described = AutoModelForCausalLM.from_config(model.config)
    assert [(*one[:3], one.shape) for one in packable(described)] == [(*one[:3], one.shape) for one in rule]
    nested = NestedDirectory(make_nested(architecture))
    tied = model.all_tied_weights_keys
    assert nested.schema.packed == {one.name: one.shape for one in rule if one.name not in tied}
    loaded = otaro.load(nested.path)
    assert set(loaded.sefp.modules) == {one.name if one.kind is Kind.EXPERTS else one.path for one in rule}
    assert packable(loaded) == []  # nothing that could be packed was left
    assert set(prepare(model, Precisely())) == {one.path for one in rule}


def test_gpt2s_convolutions_are_packed_with_groups_along_the_input():
    model = AutoModelForCausalLM.from_config(GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=120))
    shapes = {one.path: (tuple(one.module.weight.shape), one.shape) for one in packable(model)}
    assert shapes["transformer.h.0.attn.c_attn"] == ((64, 192), (192, 64))
    assert shapes["transformer.wte"] == ((120, 64), (120, 64))


@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3"])
def test_a_gemmas_embedding_scales_by_the_root_of_its_width(random_model, name):
    table = random_model(name, dtype="float32").get_input_embeddings()
    assert embedding_scale(table) == float(torch.tensor(96**0.5))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        table.weight.data = table.weight.data.to(dtype)
        rows = nn.functional.embedding(torch.arange(120), table.weight)
        with torch.no_grad():
            assert torch.equal(table(torch.arange(120)), scaled(rows, embedding_scale(table)))


class Doubled(nn.Embedding):
    """Says that it scales, and does more."""

    embed_scale = 3.0

    def forward(self, ids):
        return super().forward(ids) * self.embed_scale + 1


@pytest.mark.parametrize(("width", "scale"), [(64, 8.0), (96, None)])
def test_an_embedding_that_scales_as_no_stand_in_would_stays_with_the_head_that_is_tied_to_it(width, scale):
    """XGLM multiplies by a number that is not rounded: the same where rounding does nothing to it."""
    model = AutoModelForCausalLM.from_config(XGLMConfig(d_model=width, **XGLM))
    assert embedding_scale(model.get_input_embeddings()) == scale
    outer = {"model.embed_tokens.weight", "lm_head.weight"}
    assert {one.name for one in packable(model)} & outer == (set() if scale is None else outer)
    model.set_input_embeddings(Doubled(120, width))
    assert not {one.name for one in packable(model)} & {"model.embed_tokens.weight"}


def test_experts_that_cannot_be_read_one_after_the_other_are_refused_whoever_asks():
    sizes = {
        "vocab_size": 120,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 96,
    }
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("gpt_oss", **sizes, num_local_experts=4)
        )
    words = (
        r"model.layers.0.mlp.experts: expert weights stored as \[in, out\] \(GptOssExperts\) are not "
        r"supported"
    )
    for ask in (packable, lambda model: prepare(model, Precisely())):
        with pytest.raises(otaro.errors.CheckpointError, match=words):
            ask(model)
