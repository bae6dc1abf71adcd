"""Where a model's positions end: a table of them stops a text, rotations go on and the user is told."""

import warnings

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import otaro
from otaro.errors import OtaroError, PositionsWarning

IDS = torch.tensor([[5, 17, 99, 3, 64, 20]])
OPTIONS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
WITH_A_TABLE = {
    "gpt2": {"n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 24},
    "gptj": {"n_embd": 64, "n_layer": 1, "n_head": 2, "rotary_dim": 16, "n_positions": 24},
    "opt": {
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 24,
    },
}


def generated(model, ids=IDS, **options):
    """Tokens, and what was said about positions."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **{**OPTIONS, **options})
    return output[0].tolist(), [str(one.message) for one in caught if one.category is PositionsWarning]


@pytest.mark.parametrize("kind", WITH_A_TABLE)
def test_a_table_of_positions_stops_a_text_and_says_so(kind, tmp_path):
    config = AutoConfig.for_model(kind, vocab_size=120, bos_token_id=1, eos_token_id=2, **WITH_A_TABLE[kind])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "checkpoint")
    otaro.pack(tmp_path / "checkpoint", tmp_path / "nested")
    model = otaro.load(tmp_path / "nested")
    expected, said = generated(model, max_new_tokens=19)
    assert (len(expected), said) == (25, [])  # 24 were read
    for options in ({}, {"num_beams": 2}, {"max_new_tokens": None, "max_length": 26}):
        output, said = generated(model, **{"max_new_tokens": 600, **options})
        assert len(output) == 25
        assert output == expected or "num_beams" in options
        assert said == ["stopped after 19 new tokens: this model has positions for 24 tokens"]
    full = torch.tensor([expected[:24]])
    assert generated(model, full, max_new_tokens=600)[0] == expected
    with pytest.raises(OtaroError, match="the prompt has 25 tokens, and this model has positions for 24"):
        generated(model, torch.tensor([expected]), max_new_tokens=1)


@pytest.mark.parametrize("way", ["decoder", "transformers"])
def test_past_the_positions_it_was_made_for_a_model_is_told_of_once(make_nested, way):
    model = otaro.load(make_nested("llama"), "E5M5")  # made for 64
    options = {"past_key_values": DynamicCache(config=model.config)} if way == "transformers" else {}
    output, said = generated(model, max_new_tokens=59, **options)  # reads 64
    assert (len(output), said) == (65, [])
    options = {"past_key_values": DynamicCache(config=model.config)} if way == "transformers" else {}
    output, said = generated(model, max_new_tokens=70, **options)
    assert len(output) == 76
    assert said == [
        "this text goes past the 64 positions that the model was made for; what it says there may be poor"
    ]
    assert model.generation.served_by == way
    assert generated(model, torch.tensor([output]), max_new_tokens=2)[1] == []  # once
