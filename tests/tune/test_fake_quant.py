"""Training through quantization: the same values as the codec, the gradients of a model that holds them."""

from __future__ import annotations

import contextlib
import copy
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoConfig, AutoModelForCausalLM

from otaro import encode
from otaro.errors import OtaroError
from otaro.file.checkpoint import Checkpoint
from otaro.sefp.precision import PRECISIONS, Precision
from otaro.tune import plain
from otaro.tune.fake_quant import (
    Precisely,
    merge_lora,
    narrow_frozen,
    prepare,
    quantize,
    restore,
    scale_exponent,
)

ARCHITECTURES = ("llama", "llama_tied", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
MOE = ("mixtral", "qwen3_moe")
M8, M4, M3 = Precision("E5M8"), Precision("E5M4"), Precision("E5M3")
IDS = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def make_plain(make_checkpoint):
    """make_plain("qwen2") is a new ordinary float32 model in training mode; the packer says which names it
    would pack.
    """

    @cache
    def load(name: str) -> nn.Module:
        model = AutoModelForCausalLM.from_pretrained(make_checkpoint(name), dtype=torch.float32).train()
        model.packed_names = set(Checkpoint(make_checkpoint(name)).packed)
        return model

    return lambda name="llama": copy.deepcopy(load(name))


def decoded(model: nn.Module, precision: Precision, reconstruction: str = "midpoint") -> nn.Module:
    """The model with its weights replaced by what a packed file would give at this precision."""
    for name in model.packed_names:
        parameter = model.get_parameter(name)
        convolution = ".c_" in name  # GPT-2's, whose groups run along the input too
        weight = parameter.data.T.contiguous() if convolution else parameter.data
        values = encode(weight, 64, reconstruction).decode(precision)
        parameter.data = values.T.contiguous() if convolution else values
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # as prepared models do; others sum in another order
    return model


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def assert_same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, f"{name} has no gradient to compare"
        assert torch.equal(found[name], gradient), name


def assert_as_the_codec(weight: torch.Tensor, group_size: int, reconstruction: str) -> None:
    before = weight.clone()
    for precision in PRECISIONS:
        found = quantize(weight, precision.mantissa_bits, group_size, reconstruction)
        expected = encode(weight, group_size, reconstruction).decode(precision).to(weight.dtype)
        bits = torch.int32 if weight.dtype == torch.float32 else torch.int16
        assert torch.equal(found.view(bits), expected.view(bits)), f"{precision} {weight[found != expected]}"
    assert torch.equal(weight, before)


@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize(
    "shape", [(1,), (64,), (70,), (5, 31), (4, 96), (2, 3, 65), (2, 1, 128), (0, 70)], ids=str
)
def test_values_are_those_of_the_codec(shape, group_size, reconstruction):
    generator = torch.Generator().manual_seed(len(shape) * 1000 + shape[-1])
    weight = torch.randn(shape, generator=generator)
    for spread in (0, 4, 40):  # from weights of one size to magnitudes that differ by 2^40 within a group
        powers = torch.randint(-spread, spread + 1, shape, generator=generator)
        scaled = (weight * 2.0**powers).clamp(-32000, 32000)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert_as_the_codec(scaled.to(dtype), group_size, reconstruction)


def test_a_group_larger_than_the_rows_takes_no_more_than_they_do(reconstruction):
    weight = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))
    found = quantize(weight, 4, 1 << 40, reconstruction)
    assert torch.equal(found, quantize(weight, 4, 64, reconstruction))


def around(numbers: torch.Tensor) -> torch.Tensor:
    """The numbers and their neighbours in float32, of both signs."""
    numbers = numbers.float()
    up, down = (torch.nextafter(numbers, torch.full_like(numbers, end)) for end in (torch.inf, 0.0))
    return torch.cat([down, numbers, up, -down, -numbers, -up])


def borders() -> torch.Tensor:
    """Each border of E5M8 at each scale but powers of two, upright and mirrored, at both kinds of places."""
    groups = []
    for s in torch.arange(8, 16) / 16:
        numbers = torch.cat([torch.tensor([-272]), torch.arange(-272, 240), torch.zeros(54)]).view(-1, 63)
        weight = torch.cat([torch.full((len(numbers), 1), -272), numbers], -1) * s / 256
        turned = weight.clone()
        turned[:, 1:] = weight[:, 1:].roll(1, -1)
        groups += [weight, turned, -weight, -turned]
    return torch.cat(groups)


FLOAT8 = torch.arange(8, 16)
SPECIAL = {
    "zeros": torch.tensor([0.0, -0.0]).repeat(3, 97).roll(1, -1),
    "zeros among others": torch.tensor([0.0, 1.0, -0.0, -3.0, 0.0]).repeat(2, 50),
    "not laid out row by row": torch.randn(128, 70, generator=torch.Generator().manual_seed(0)).T,
    "the ends of the grid": around(torch.cat([FLOAT8 * 15, FLOAT8 * 17]) / 2.0**12),
    "powers of two": around(2.0 ** torch.arange(-30, 15)),
    "borders of cells": around(torch.cat([torch.arange(1, 273) * n / 2.0**12 for n in FLOAT8])),
    "borders beside the largest": torch.cat(
        [torch.tensor([-17 * 13 / 256]), around(torch.arange(1, 240) * 13 / 2.0**12)]
    ),
    "every border": borders(),
    "where float8 ends": around(torch.tensor([448.0, 480.0]) * 17 / 16 / 2.0**9),
    "far below the largest": torch.cat([torch.tensor([100.0]), around(2.0 ** torch.arange(-40, 0))]),
    "below the smallest scale": torch.tensor(
        [2.0**-22, -(2.0**-23), 2.0**-29, -(2.0**-30), 1e-30, -1e-30, 0.0, -0.0]
    ),
    "subnormal": torch.tensor([1e-45, -1e-45, 1e-39, -1e-39, 20.0, -20.0]),
    "the largest": torch.tensor([32767.998, -32767.998, 1.0, -1.0, 1e-30, -1e-30]),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_values_are_those_of_the_codec_at_the_edges(name, reconstruction):
    assert_as_the_codec(SPECIAL[name], 64, reconstruction)
    assert_as_the_codec(SPECIAL[name].unsqueeze(-1), 64, reconstruction)  # each alone in its group
    assert_as_the_codec(SPECIAL[name].unsqueeze(-1), 1, reconstruction)


@given(
    st.lists(st.floats(-32767, 32767, width=32), min_size=1, max_size=100),
    st.sampled_from(["midpoint", "truncate"]),
)
@settings(max_examples=80, deadline=None)
def test_values_are_those_of_the_codec_for_any_numbers(numbers, reconstruction):
    assert_as_the_codec(torch.tensor(numbers), 32, reconstruction)


def test_a_part_is_quantized_as_in_the_whole(reconstruction):
    """Whose largest group leaves the small ones few scales to choose from."""
    whole = torch.randn(40, 96, generator=torch.Generator().manual_seed(0)) * 2.0 ** -torch.arange(
        40
    ).unsqueeze(-1)
    expected, exponent = encode(whole, 32, reconstruction), scale_exponent(whole, 32, reconstruction)
    assert exponent.item() == expected.scale_exponent
    for m in (8, 3):
        parts = [quantize(part, m, 32, reconstruction, None, exponent) for part in whole.split(7)]
        assert torch.equal(torch.cat(parts), expected.decode(f"E5M{m}"))
    assert not torch.equal(quantize(whole[16:], 3, 32, reconstruction), expected.decode(M3)[16:])


def test_many_weights_together_have_the_values_of_each_alone(reconstruction, monkeypatch):
    monkeypatch.setattr(plain, "TOGETHER", 1000)
    monkeypatch.setattr(plain, "_CHUNK_ON_CPU", 200)
    generator, precisely = torch.Generator().manual_seed(0), Precisely(64, reconstruction)
    shapes = [(3, 64), (5, 70), (0, 64), (2, 3, 65), (20, 128), (1,), (7, 64), (128, 9)]
    types = [torch.float32, torch.bfloat16, torch.float16, torch.float32]
    weights = [
        (torch.randn(shape, generator=generator) * 10.0**-i).to(types[i % 4])
        for i, shape in enumerate(shapes)
    ]
    weights[-1] = weights[-1].T
    for dtype in (None, torch.bfloat16):
        found = precisely.values_of_all(weights, M4, dtype)
        for weight, values in zip(weights, found, strict=True):
            expected = encode(weight, 64, reconstruction).decode(M4).to(dtype or weight.dtype)
            assert torch.equal(values, expected)
            assert values.dtype == expected.dtype


def test_groups_of_zeros_have_the_scale_zero_without_a_sign(reconstruction):
    """However long the tensor, and so whichever instruction took the larger of 0 and -0."""
    for zeros in (torch.zeros(300, 64), -torch.zeros(300, 64), torch.zeros(1), -torch.zeros(1)):
        assert not encode(zeros, 64, reconstruction).scale_bytes.any()


# Gradients --------------------------------------------------------------------------------------------------

CASES = (
    [("llama", p) for p in PRECISIONS]
    + [(a, p) for a in ARCHITECTURES[1:] for p in (M4, M3)]
    + [(a, M8) for a in MOE]
)


def prepared(model: nn.Module, reconstruction: str = "midpoint") -> tuple[nn.Module, Precisely]:
    prepare(model, precisely := Precisely(64, reconstruction))
    return model, precisely


@pytest.mark.parametrize(("architecture", "precision"), CASES, ids=str)
def test_gradients_are_those_of_the_decoded_weights(make_plain, architecture, precision, reconstruction):
    holding = decoded(make_plain(architecture), precision, reconstruction)
    model, precisely = prepared(make_plain(architecture), reconstruction)
    with precisely.at(precision):
        assert_same_gradients(gradients(model), gradients(holding))


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("architecture", ["llama_tied", "qwen2", "mixtral"])
def test_weights_that_are_made_again_give_the_gradients_of_held_ones_bit_for_bit(
    make_plain, architecture, bf16
):
    found = []
    for hold in (True, False):
        model, precisely = prepared(make_plain(architecture))
        precisely.hold = hold
        dtype = torch.bfloat16 if bf16 else None
        with precisely.at(M4, dtype), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            found.append(gradients(model))
    assert_same_gradients(*found)


@pytest.mark.parametrize("hold", [True, False], ids=["held", "made again"])
def test_rows_of_an_embedding_and_single_experts_are_quantized_as_in_the_whole(make_plain, hold):
    """Beside a row that nobody looks up, or another expert, so large that it takes scales from all others."""

    def uneven() -> nn.Module:
        model = make_plain("mixtral")
        for parameter in map(model.get_parameter, model.packed_names):
            if parameter.dim() == 3 or parameter is model.get_input_embeddings().weight:
                parameter.data[1:] *= 2.0**-13
        return model

    model, precisely = prepared(uneven())
    precisely.hold = hold
    with precisely.at(M4):
        found = gradients(model)
    assert_same_gradients(found, gradients(decoded(uneven(), M4)))
    precisely.scale_exponent = lambda whole: None  # each part on its own
    with precisely.at(M4):
        alone = gradients(model)
    assert not torch.equal(alone["model.norm.weight"], found["model.norm.weight"])


def test_a_backward_pass_after_the_precision_was_left_is_still_at_it(make_plain):
    model, precisely = prepared(make_plain())
    precisely.hold = False
    with precisely.at(M3):
        expected = gradients(model)
        loss = model(input_ids=IDS, labels=IDS).loss
    model.zero_grad()
    loss.backward()
    assert_same_gradients({name: p.grad for name, p in model.named_parameters()}, expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_exactly_what_will_be_packed_is_quantized_and_the_state_dict_keeps_its_keys(make_plain, architecture):
    model = make_plain(architecture)
    keys = list(model.state_dict())
    modules = [model.get_submodule(name) for name in prepare(model, Precisely())]
    assert list(model.state_dict()) == keys
    # a tied head goes by the name of the embedding
    parameters = {id(p): name for name, p in model.named_parameters()}
    assert {
        parameters[id(p)] for m in modules for n, p in m.named_parameters() if n != "bias"
    } == model.packed_names


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_without_a_precision_it_is_the_ordinary_model_bit_for_bit(make_plain, architecture):
    plain, (model, _) = make_plain(architecture), prepared(make_plain(architecture))
    if architecture in MOE:
        plain.set_experts_implementation("eager")
    assert torch.equal(logits(model), logits(plain))
    assert_same_gradients(gradients(model), gradients(plain))


@pytest.mark.parametrize("architecture", ["llama_tied", "mixtral"])
def test_restore_brings_back_classes_settings_and_behaviour(make_plain, architecture):
    plain, (model, precisely) = make_plain(architecture), prepared(make_plain(architecture))
    precisely.precision = M3
    assert not torch.equal(logits(model), logits(plain))
    restore(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert torch.allclose(logits(model), logits(plain), atol=1e-4)
    assert getattr(model.config, "_experts_implementation", None) == getattr(
        plain.config, "_experts_implementation", None
    )
    assert [set(m.__dict__) for m in model.modules()] == [set(m.__dict__) for m in plain.modules()]
    prepare(model, precisely)
    assert not torch.equal(logits(model), logits(plain))


@pytest.mark.parametrize("architecture", ["llama_tied", "mixtral"])
def test_a_deep_copy_has_one_precision_of_its_own(make_plain, architecture):
    model, precisely = prepared(make_plain(architecture))
    twin, full = copy.deepcopy(model), logits(model)
    (of_twin,) = {m.precisely for m in twin.modules() if hasattr(m, "precisely")}
    of_twin.precision = M3
    assert torch.equal(logits(model), full)
    assert not torch.equal(logits(twin), full)
    precisely.precision = M3
    assert torch.equal(logits(model), logits(twin))


@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(make_plain, architecture, reentrant):
    model, precisely = prepared(make_plain(architecture))
    with precisely.at(M3):
        expected = gradients(model)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        assert_same_gradients(gradients(model), expected)


def test_preparing_twice_changes_nothing_or_is_refused_and_so_is_a_model_without_linears(make_plain):
    with pytest.raises(OtaroError, match="Sequential has no linear layer"):
        prepare(nn.Sequential(nn.LayerNorm(4)), Precisely())
    model, precisely = prepared(make_plain("mixtral"))
    classes = [type(m) for m in model.modules()]
    with contextlib.suppress(OtaroError):
        prepare(model, precisely)
    assert [type(m) for m in model.modules()] == classes


def test_the_padding_row_of_an_embedding_still_gets_no_gradient():
    table = nn.Embedding(5, 70, padding_idx=1)
    table.get_input_embeddings = lambda: table
    _, precisely = prepared(table)
    with precisely.at(M3):
        table(torch.tensor([0, 1, 4])).sum().backward()
    assert table.weight.grad.abs().amax(-1).tolist() == [1, 0, 0, 0, 1]


def test_precisions_nest_and_are_restored_after_exceptions():
    precisely = Precisely()
    with precisely.at(M8):
        with contextlib.suppress(ZeroDivisionError), precisely.at(M3):
            with precisely.at(None):
                assert precisely.precision is None
            assert precisely.precision == M3
            _ = 1 / 0
        assert precisely.precision == M8
    assert precisely.precision is None


# LoRA: what is quantized is the merged weight ---------------------------------------------------------------


def with_lora(model: nn.Module, **changes: object) -> nn.Module:
    peft = pytest.importorskip("peft", reason="peft, which makes LoRA layers, is not installed")
    torch.manual_seed(0)  # the adapters, B too, start at random
    linears = [
        name for name, module in model.named_modules() if type(module) is nn.Linear and name != "lm_head"
    ]
    settings = {"target_modules": linears, "init_lora_weights": False, **changes}
    config = peft.LoraConfig(r=4, lora_alpha=6, **settings)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("precision", [M8, M3], ids=str)
def test_lora_gives_the_output_of_the_merged_model_quantized(make_plain, precision):
    lora, precisely = with_lora(make_plain()), Precisely()
    full, expected = logits(lora), logits(decoded(copy.deepcopy(lora).merge_and_unload(), precision))
    prepare(lora, precisely)
    assert torch.equal(logits(lora), full)
    with precisely.at(precision):
        assert torch.equal(logits(lora), expected)
        prepare(unloaded := lora.merge_and_unload(), precisely)
        assert torch.equal(logits(unloaded), expected)


def test_merging_lora_in_place_or_turning_it_off_leaves_weights_quantized(make_plain):
    on, off = (logits(decoded(m, M3)) for m in (with_lora(make_plain()).merge_and_unload(), make_plain()))
    lora, precisely = prepared(with_lora(make_plain()))
    with precisely.at(M3):
        with lora.disable_adapter():
            turned_off = logits(lora)
        lora.merge_adapter()
        assert (torch.equal(logits(lora), on), torch.equal(turned_off, off)) == (True, True)


def test_lora_gradients_reach_a_and_b_only_and_follow_the_chain_rule(make_plain):
    of_merged = gradients(decoded(with_lora(make_plain()).merge_and_unload(), M4).requires_grad_(True))
    lora, precisely = prepared(with_lora(make_plain()))
    with precisely.at(M4):
        found = gradients(lora)
    reached = [name for name, gradient in found.items() if ".lora_" in name and gradient.abs().max() > 0]
    assert len(reached) == len(found) == 2 * 2 * 7  # A and B, two layers of seven linears
    assert all(p.grad is None for name, p in lora.named_parameters() if name not in found)
    layer = lora.base_model.model.model.layers[0].mlp.up_proj
    a, b, of_weight = (
        layer.lora_A.default.weight,
        layer.lora_B.default.weight,
        of_merged["model.layers.0.mlp.up_proj.weight"],
    )
    torch.testing.assert_close(a.grad, 1.5 * b.detach().T @ of_weight)  # alpha / r = 1.5
    torch.testing.assert_close(b.grad, 1.5 * of_weight @ a.detach().T)


@pytest.mark.parametrize("variant", ["use_rslora", "use_dora"])
def test_variants_of_lora_are_merged_rightly_or_refused(make_plain, variant):
    lora, precisely = with_lora(make_plain(), **{variant: True}), Precisely()
    for parameter in (p for name, p in lora.named_parameters() if "magnitude" in name):
        parameter.data *= 1.5  # as if trained; it starts where it changes nothing
    expected = logits(decoded(copy.deepcopy(lora).merge_and_unload(), M4))
    with contextlib.suppress(OtaroError), precisely.at(M4):
        prepare(lora, precisely)
        torch.testing.assert_close(logits(lora), expected)


def test_lora_dropout_is_refused(make_plain):
    with pytest.raises(OtaroError, match="LoRA dropout cannot be combined"):
        prepare(with_lora(make_plain(), lora_dropout=0.1), Precisely())


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("llama", {"target_modules": ["embed_tokens"]}),
        ("mixtral", {"target_parameters": ["experts.gate_up_proj"]}),
    ],
)
def test_lora_on_other_modules_is_refused(make_plain, name, target):
    with pytest.raises(OtaroError, match="only LoRA on linear layers can be quantized as merged"):
        prepare(with_lora(make_plain(name), **{"target_modules": [], **target}), Precisely())


@pytest.mark.parametrize("kept", ["embed_tokens", "lm_head"])
def test_an_embedding_or_head_that_peft_tunes_beside_the_adapters_is_quantized_as_it_will_be_packed(
    make_plain, kept
):
    lora = with_lora(make_plain(), modules_to_save=[kept])
    tuned = next(p for name, p in lora.named_parameters() if f"{kept}.modules_to_save" in name)
    tuned.data *= 1.25  # away from the original, which is still there
    merged = merge_lora(copy.deepcopy(lora))
    merged.packed_names = make_plain().packed_names
    expected = decoded(merged, M3)
    lora, precisely = prepared(lora)
    with precisely.at(M3):
        assert torch.equal(logits(lora), logits(expected))
        found = gradients(lora)
        with lora.disable_adapter():
            assert torch.equal(logits(lora), logits(decoded(make_plain(), M3)))
    name = next(name for name in found if "modules_to_save" in name)
    of_decoded = gradients(expected.requires_grad_(True))
    assert torch.equal(found[name], of_decoded[f"{'model.' if kept == 'embed_tokens' else ''}{kept}.weight"])


def test_single_tuned_tokens_are_refused(make_plain):
    with pytest.raises(OtaroError, match="name the embedding in modules_to_save"):
        prepare(with_lora(make_plain(), trainable_token_indices=[3, 5]), Precisely())


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("architecture", ["gemma3", "phi3", "gpt2"])
def test_scaled_embeddings_fused_projections_and_convolutions_are_tuned_as_they_are_packed(
    make_plain, architecture, bf16
):
    plain, (model, precisely) = make_plain(architecture).eval(), prepared(make_plain(architecture).eval())
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        assert torch.equal(logits(model), logits(plain))
        with precisely.at(M3, torch.bfloat16 if bf16 else None):
            seen, found = logits(model), gradients(model)
        expected = decoded(make_plain(architecture).eval(), M3)
        assert torch.equal(seen, logits(expected))
        assert not torch.equal(seen, logits(plain))
        assert_same_gradients(found, gradients(expected))
    restore(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]


def test_an_embedding_that_is_not_packed_and_a_head_tied_to_it_are_tuned_as_they_are(tmp_path):
    """As a nested file has them: what tuning shows of a precision is what the file will show."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 120, "d_model": 96, "ffn_dim": 112, "num_layers": 2, "attention_heads": 4}
    plain = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("xglm", **sizes), dtype=torch.float32
    ).eval()
    plain.save_pretrained(tmp_path)
    plain.packed_names = set(Checkpoint(tmp_path).packed)
    assert "model.embed_tokens.weight" not in plain.packed_names
    model, precisely = prepared(copy.deepcopy(plain))
    assert torch.equal(logits(model), logits(plain))
    with precisely.at(M3):
        assert torch.equal(logits(model), logits(decoded(copy.deepcopy(plain), M3)))


def test_adapters_of_convolutions_are_refused(make_plain):
    with pytest.raises(OtaroError, match="c_attn: only LoRA on linear layers can be quantized as merged"):
        prepare(with_lora(make_plain("gpt2"), target_modules=["c_attn"], fan_in_fan_out=True), Precisely())


# LoRA over weights in their own type, which costs nothing but memory ----------------------------------------

OWN = {
    "llama": torch.float16,
    "llama_tied": torch.bfloat16,
    "mistral": torch.bfloat16,
    "mixtral": torch.bfloat16,
}
OWN |= {"gemma": torch.bfloat16}


def narrow(model: nn.Module, dtype: torch.dtype, **changes: object) -> nn.Module:
    lora = with_lora(model, **changes)
    narrow_frozen(lora, dtype)
    return lora


@pytest.mark.parametrize("architecture", OWN)
def test_frozen_matrices_stay_in_their_own_type_and_all_else_is_in_float32(make_plain, architecture):
    plain, lora = make_plain(architecture), narrow(make_plain(architecture), OWN[architecture])
    names = {
        name.replace("base_model.model.", "").replace("base_layer.", ""): p
        for name, p in lora.named_parameters()
    }
    assert {name for name, p in names.items() if p.dtype == OWN[architecture]} == plain.packed_names
    assert {p.dtype for name, p in names.items() if name not in plain.packed_names} == {torch.float32}
    assert all(torch.equal(names[name].float(), p) for name, p in plain.named_parameters())


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("architecture", OWN)
def test_types_of_frozen_weights_change_no_bit_of_logits_and_gradients(make_plain, architecture, bf16):
    both = with_lora(make_plain(architecture)), narrow(make_plain(architecture), OWN[architecture])
    for precision in (None, M8, M3):
        outputs, found = [], []
        for lora in both:
            precisely = Precisely()
            prepare(lora, precisely)
            dtype = torch.bfloat16 if bf16 else None
            with precisely.at(precision, dtype), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                outputs.append(logits(lora))
                found.append(gradients(lora))
            restore(lora)
        assert torch.equal(*outputs)
        assert_same_gradients(found[1], found[0])


@pytest.mark.parametrize("architecture", ["llama_tied", "mixtral"])
def test_merging_for_good_gives_the_bits_that_were_tuned_whatever_the_types(make_plain, architecture):
    """peft would round the sum to the frozen weight's type, and autocast the factors' product to bfloat16."""
    lora, precisely = prepared(narrow(make_plain(architecture), torch.bfloat16))
    seen = []
    layer = lora.base_model.model.model.layers[0].self_attn.q_proj
    values = precisely.values
    precisely.values = lambda weight, *rest: seen.append(weight.detach()) or values(weight, *rest)
    with precisely.at(M3), torch.autocast("cpu", torch.bfloat16):
        layer(torch.ones(1, layer.in_features))
    precisely.values = values
    with precisely.at(M3):
        expected = logits(lora)
    merged = merge_lora(lora)
    merged.packed_names = make_plain(architecture).packed_names
    assert {p.dtype for p in merged.parameters()} == {torch.float32}
    assert torch.equal(merged.model.layers[0].self_attn.q_proj.weight, *seen)
    assert not torch.equal(seen[0], seen[0].bfloat16().float())
    assert torch.equal(logits(decoded(merged, M3)), expected)


def fresh_bytes_saved(model: nn.Module) -> dict[tuple[int, ...], int]:
    """Bytes that autograd keeps for the backward and that are no parameter, by shape, two sides sorted."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in own:
            saved[place] = tensor  # and alive, so that no other takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=IDS, labels=IDS).loss
    found: dict[tuple[int, ...], int] = {}
    for tensor in saved.values():
        shape = tuple(sorted(tensor.shape))
        found[shape] = found.get(shape, 0) + tensor.untyped_storage().nbytes()
    loss.backward()
    return found


@pytest.mark.parametrize("precision", [None, M3], ids=["full precision", "E5M3"])
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("architecture", ["llama", "llama_tied", "mistral", "mixtral"])
def test_of_frozen_weights_no_copy_is_kept_for_the_backward_pass(make_plain, architecture, bf16, precision):
    lora, precisely = prepared(narrow(make_plain(architecture), torch.bfloat16))
    weights = {tuple(sorted(p.shape[-2:])) for p in lora.parameters() if p.dtype == torch.bfloat16}
    weights |= {tuple(sorted(p.shape)) for p in lora.parameters() if p.dim() == 3}
    with (
        precisely.at(precision, torch.bfloat16 if bf16 else None),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        saved = fresh_bytes_saved(lora)
    assert saved  # activations
    assert {shape: bytes for shape, bytes in saved.items() if shape in weights} == {}


def test_quantized_experts_are_gone_when_their_layer_is_done(make_plain):
    """Hooks of ours hide from others what they keep, so here it is the memory itself that is looked at."""
    lora, precisely = prepared(narrow(make_plain("mixtral"), torch.bfloat16))
    made, values = [], precisely.values

    def watched(weight: torch.Tensor, *how: object) -> torch.Tensor:
        quantized = values(weight, *how)
        if len(weight) == lora.config.num_local_experts:  # a stack
            made.append(StorageWeakRef(quantized.untyped_storage()))
        return quantized

    precisely.values = watched
    with precisely.at(M3):
        loss = lora(input_ids=IDS, labels=IDS).loss
        assert len(made) == 2 * 2  # layers, stacks
        assert all(memory.expired() for memory in made)
        loss.backward()


@pytest.mark.parametrize("architecture", ["llama_tied", "mixtral"])
def test_gradient_checkpointing_of_lora_gives_the_same_gradients(make_plain, architecture):
    lora, precisely = prepared(narrow(make_plain(architecture), torch.bfloat16))
    with precisely.at(M3):
        expected = gradients(lora)
        lora.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
        assert_same_gradients(gradients(lora), expected)


# Held weights: quantized once for a step --------------------------------------------------------------------


def test_weights_are_quantized_on_entry_and_let_go_on_exit(make_plain):
    model, precisely = prepared(make_plain())
    linear = model.model.layers[0].mlp.up_proj
    with precisely.at(M3):
        outer = linear.held
        assert torch.equal(outer, encode(linear.weight.detach()).decode(M3))
        with precisely.at(None):
            assert linear.held is None  # a teacher's pass in between
        with precisely.at(M4, torch.bfloat16):
            assert torch.equal(linear.held, encode(linear.weight.detach()).decode(M4).bfloat16())
        assert linear.held is outer
    assert linear.held is None
    assert not any("held" in name for name in model.state_dict())


def test_under_autocast_gradients_are_those_of_the_decoded_weights(make_plain):
    model, precisely = prepared(make_plain())
    with precisely.at(M4, torch.bfloat16), torch.autocast("cpu", torch.bfloat16):
        found = gradients(model)
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(decoded(make_plain(), M4))
    assert all(gradient.dtype == torch.float32 for gradient in found.values())
    assert_same_gradients(found, expected)


def test_a_weight_that_is_only_a_part_of_itself_is_left_to_the_forward(make_plain):
    model, precisely = prepared(make_plain())
    linear = model.model.layers[0].mlp.up_proj
    # as FSDP and ZeRO leave it in between
    whole, linear.weight.data = linear.weight.data, linear.weight.data.flatten()[:100]
    with precisely.at(M3):
        assert linear.held is None
        linear.weight.data = whole  # gathered
        assert torch.equal(linear(torch.eye(whole.shape[1])).T, encode(whole).decode(M3))
