"""Layers and head run apart: the model's own logits, whatever comes after its head, and never all of them."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from otaro.evaluate import logits
from otaro.evaluate.logits import SlicedModel

IDS = torch.randint(0, 120, (40,), generator=torch.Generator().manual_seed(0))
SIZES = {"vocab_size": 120, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {"num_key_value_heads": 2, "intermediate_size": 112, "head_dim": 24}
OTHERS = {
    "gemma2": {**LLAMA, "final_logit_softcapping": 2.0},
    "gemma3_text": LLAMA,
    "granite": {**LLAMA, "logits_scaling": 0.1},
    "cohere": {**LLAMA, "logit_scale": 3.0},
    "gpt2": {"bos_token_id": 1, "eos_token_id": 2},
    "opt": {"ffn_dim": 112, "word_embed_proj_dim": 96},
    "mixtral": {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "bloom": {},
    "mamba": {"state_size": 8},
}


def random_model(kind):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **OTHERS[kind])).eval()


@pytest.mark.parametrize("kind", OTHERS)
def test_slices_are_parts_of_the_models_own_logits(kind):
    model = random_model(kind)
    sliced = SlicedModel(model)
    assert not sliced.is_whole
    with torch.inference_mode():
        whole = model(IDS[None]).logits[0]
    states = sliced.states(IDS)
    assert states.shape == (40, 96)
    together = torch.cat([sliced.logits(part) for part in states.split(7)])
    # A sum of 96 products, in another order: each rounds by half a unit of what it has grown to, which is
    # below the sum of the products' sizes.
    bound = 96 * torch.finfo(torch.float32).eps * (1 + whole.abs().max()) * 4
    assert (together - whole).abs().max() <= bound
    with torch.inference_mode():
        assert torch.equal(model(IDS[None]).logits[0], whole)  # the model is as before


@pytest.mark.parametrize("kind", OTHERS)
def test_a_frozen_head_says_what_it_said_when_the_model_is_gone(kind):
    sliced = SlicedModel(random_model(kind))
    states = sliced.states(IDS)
    before, frozen = sliced.logits(states), sliced.frozen_head()
    with torch.no_grad():
        sliced.model.get_output_embeddings().weight.zero_()
    assert (frozen(states) - before).abs().max() <= 96 * torch.finfo(torch.float32).eps * (
        1 + before.abs().max()
    ) * 4
    assert not torch.equal(sliced.logits(states), before)


def test_a_head_that_cannot_be_run_apart_is_run_whole():
    model = random_model("gpt2")
    forward = type(model).forward

    class Odd(type(model)):
        def forward(self, input_ids, **options):
            found = forward(self, input_ids, **options).logits
            # depends on more than the states
            return CausalLMOutputWithPast(logits=found + input_ids.unsqueeze(-1))

    model.__class__ = Odd
    sliced = SlicedModel(model)
    assert sliced.is_whole
    with torch.inference_mode():
        whole = model(IDS[None]).logits[0]
    states = sliced.states(IDS)
    assert torch.equal(torch.cat([sliced.logits(part) for part in states.split(7)]), whole)
    assert torch.equal(sliced.frozen_head()(states[:3]), whole[:3])


def test_only_a_slice_of_logits_is_made_at_once(monkeypatch):
    from tests.evaluate.reading import perplexity

    # and four times as many positions where nothing is compared
    monkeypatch.setattr(logits, "SLICE", 120 * 8)
    model, made = random_model("gemma2"), []
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda module, args, output: made.append(output.shape[1]))
    perplexity(model, IDS, window=40)
    assert made[0] == 4  # by which it is tried whether layers and head run apart
    assert max(made[2:]) == 32
    assert sum(made[2:]) == 40


@pytest.mark.parametrize(
    ("dtype", "kept"), [("float16", "float16"), ("bfloat16", "bfloat16"), (None, "float32")]
)
def test_a_frozen_head_takes_16_bits_where_that_loses_nothing(dtype, kept):
    linear = torch.nn.Linear(32, 50, bias=True)
    if dtype:
        linear.weight.data = linear.weight.to(getattr(torch, dtype)).float()
    frozen = logits._FrozenLinear(linear)
    assert str(frozen.kept.dtype) == f"torch.{kept}"
    x = torch.randn(2, 3, 32)
    before = linear(x).detach()
    with torch.no_grad():
        linear.weight.zero_()
        linear.bias.zero_()
    assert (frozen(x) - before).abs().max() <= 32 * torch.finfo(torch.float32).eps * before.abs().max() * 4
