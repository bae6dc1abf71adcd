"""`otaro tune --lora` from a checkpoint in bfloat16 to a nested model: what was tuned is what is packed."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import otaro
from otaro.builtin import MODEL_DIR, topics_training_text
from otaro.cli import tune_model
from otaro.cli.main import app
from otaro.tune import fake_quant, sliced
from otaro.tune.config import Training

PRECISIONS = [otaro.Precision(name) for name in ("E5M8", "E5M3")]


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """The built-in model in bfloat16."""
    directory = tmp_path_factory.mktemp("half")
    AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.bfloat16).save_pretrained(directory)
    AutoTokenizer.from_pretrained(MODEL_DIR).save_pretrained(directory)
    return directory


def test_what_was_tuned_is_what_is_packed_bit_for_bit(half, tmp_path, monkeypatch):
    tuned = {}
    merge = fake_quant.merge_lora

    def watched(model):
        for name, layer in model.get_base_model().named_modules():
            if hasattr(layer, "lora_A"):
                assert layer.base_layer.weight.dtype == torch.bfloat16
                weight = fake_quant.merged_weight(layer.base_layer.weight, *fake_quant._factors(layer))
                tuned[name] = [
                    fake_quant.quantize(weight, p.mantissa_bits, 64, "midpoint") for p in PRECISIONS
                ]
        return merge(model)

    monkeypatch.setattr(fake_quant, "merge_lora", watched)
    monkeypatch.setattr(sliced, "SLICE_BYTES", 1 << 16)
    (tmp_path / "text.txt").write_text(topics_training_text()[:20000])
    settings = [
        "--steps",
        3,
        "--batch-size",
        2,
        "--sequence-length",
        64,
        "--lr",
        "1e-2",
        "--eval-tokens",
        64,
        "--lora",
        4,
    ]
    settings.append("--no-calibrate")  # which chooses other codes
    command = ["tune", half, "--data", tmp_path / "text.txt", "--out", tmp_path / "run", *settings]
    done = CliRunner().invoke(app, [str(part) for part in command])
    assert done.exit_code == 0, done.output + repr(done.exception)
    assert len(tuned) == 7 * 6  # of six layers
    assert "memory: about " in done.stderr
    nested = otaro.load(tmp_path / "run" / "nested", "E5M8")
    changed = 0
    for number, precision in enumerate(PRECISIONS):
        otaro.set_precision(nested, precision)
        for name, weights in tuned.items():
            assert torch.equal(nested.get_submodule(name).weight.float(), weights[number]), name
            changed += not torch.equal(weights[number], weights[number].bfloat16().float())
    assert changed


def test_a_checkpoint_is_loaded_in_its_type_only_where_nothing_is_rounded(half, tmp_path, monkeypatch):
    kinds = []
    load = AutoModelForCausalLM.from_pretrained

    def watched(path, dtype):
        kinds.append(dtype)
        return load(path, dtype=dtype)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", watched)
    model = tune_model.load_model(half, Training(lora=4))
    assert model.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight.dtype == torch.bfloat16
    mixed = load(half, dtype=torch.bfloat16)
    mixed.model.norm.float()
    mixed.model.norm.weight.data += 2.0**-20
    mixed.save_pretrained(tmp_path)
    model = tune_model.load_model(tmp_path, Training(lora=4))
    assert torch.equal(model.get_base_model().model.norm.weight, mixed.model.norm.weight)
    assert model.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight.dtype == torch.bfloat16
    assert kinds == [torch.bfloat16, torch.float32]


def test_a_model_without_plain_linears_takes_no_adapters(make_checkpoint):
    with pytest.raises(
        otaro.OtaroError, match="--lora adapts plain linear layers, and GPT2LMHeadModel has none; tune it"
    ):
        tune_model.load_model(make_checkpoint("gpt2"), Training(lora=4))


def test_the_8_bit_optimizer_without_its_package_is_refused_in_words(half, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        otaro.OtaroError,
        match=r"adamw8bit needs the package bitsandbytes; install it with: "
        r".* -m pip install",
    ):
        tune_model.load_model(half, Training(optimizer="adamw8bit"))


def test_a_run_that_cannot_fit_is_refused_before_its_first_step(half, tmp_path, monkeypatch):
    monkeypatch.setattr("otaro.tune.memory.device_bytes", lambda device: 10_000_000)
    (tmp_path / "text.txt").write_text(topics_training_text()[:20000])
    command = ["tune", half, "--data", tmp_path / "text.txt", "--out", tmp_path / "run", "--steps", 3]
    done = CliRunner().invoke(app, [str(part) for part in command])
    assert isinstance(done.exception, otaro.OtaroError)
    assert "weights, gradients and optimizer alone take" in str(done.exception)
    assert "what takes less: --lora 16" in str(done.exception)
