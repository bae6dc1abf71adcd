"""The model under evaluation: the same numbers as packing and loading; never two sets of decoded weights."""

import shutil
import tempfile
import weakref
from pathlib import Path

import pytest
import torch

import otaro
from otaro.builtin import MODEL_DIR
from otaro.errors import CheckpointError, PrecisionError, ShardMissingError
from otaro.evaluate.subject import Subject, parse_precisions
from otaro.runtime import modules
from tests.evaluate.reading import perplexity

NAMES = [str(precision) for precision in otaro.PRECISIONS]
IDS = torch.randint(0, 120, (40,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("architecture", ["llama_tied", "qwen2", "mixtral", "gemma3", "gpt2"])
def test_a_checkpoint_quantized_on_the_fly_is_what_packing_and_loading_gives(
    make_checkpoint, make_nested, architecture
):
    subject, packed = Subject(str(make_checkpoint(architecture))), otaro.load(make_nested(architecture))
    assert subject.precisions == ["fp", *NAMES]
    for name in (*NAMES, "E5M8"):  # and back: one set of weights is decoded over the other
        model = subject.at(name)
        otaro.set_precision(packed, name)
        for path, module in packed.sefp.modules.items():
            weight = model.get_parameter(path if is_expert(path) else f"{path}.weight")
            assert torch.equal(weight, module.weight), f"{path} at {name}"
        for path, tensor in packed.state_dict().items():
            assert torch.equal(model.state_dict()[path], tensor), path
        with torch.inference_mode():
            ours, theirs = (one(IDS[None]).logits for one in (model, packed))
        # The same sums in another order, where experts run together and not one by one.
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def is_expert(path):
    return path.endswith(("gate_up_proj", "experts.down_proj"))


def test_one_set_of_decoded_weights_serves_all_precisions_and_what_is_not_packed_is_not_copied(make_nested):
    subject = Subject(str(make_nested("llama_tied")))
    where = [
        {name: t.data_ptr() for name, t in subject.at(name).named_parameters()} for name in ("E5M8", "E5M3")
    ]
    assert where[0] == where[1]
    model = subject.at("E5M3")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    own = {name: t.data_ptr() for name, t in subject.packed.named_parameters()}
    assert own == {name: where[0][name] for name in own}  # norms


def test_an_interrupted_decoding_is_made_again(make_nested, monkeypatch):
    subject = Subject(str(make_nested("llama")))
    right = subject.at("E5M3").lm_head.weight.clone()
    subject.at("E5M8")
    with monkeypatch.context() as patched:
        patched.setattr(modules.PackedWeight, "decode", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            subject.at("E5M3")
    assert torch.equal(subject.at("E5M3").lm_head.weight, right)


def test_full_precision_is_the_checkpoint_itself(checkpoint_dir):
    from safetensors.torch import load_file

    model = Subject(str(checkpoint_dir), "fp").at("fp")
    for name, stored in load_file(checkpoint_dir / "model.safetensors").items():
        assert torch.equal(model.state_dict()[name], stored.float())


def test_quantizing_on_the_fly_leaves_nothing_behind(checkpoint_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    subject = Subject(str(checkpoint_dir), "E5M8,E5M3")
    values = [perplexity(subject.at(name), IDS, window=16) for name in ("E5M8", "E5M3", "E5M8")]
    assert list(tmp_path.iterdir()) == []
    assert values[0] == values[2] != values[1]
    assert sorted(path.name for path in checkpoint_dir.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def test_the_unquantized_model_can_be_let_go(checkpoint_dir):
    subject = Subject(str(checkpoint_dir), "fp,E5M3")
    full = weakref.ref(subject.at("fp"))
    subject.release_full()
    assert full() is None


def test_all_means_all_that_are_there(nested_dir, copy_of):
    assert Subject(str(nested_dir)).precisions == NAMES
    some = Subject(str(copy_of(nested_dir, planes=(3, 4))))
    assert (some.precisions, some.reference) == (["E5M4", "E5M3"], "E5M4")


def test_a_precision_that_is_not_there_is_refused_before_anything_is_loaded(nested_dir, copy_of):
    with pytest.raises(ShardMissingError, match=r"model-m5.safetensors"):
        Subject(str(copy_of(nested_dir, planes=(3, 4))), "E5M5,E5M3")
    with pytest.raises(PrecisionError, match="is a nested model, which has no fp; evaluate the checkpoint"):
        Subject(str(nested_dir), "fp,E5M8")


@pytest.mark.parametrize(
    ("text", "meaning"),
    [("all", None), ("E5M3,fp, E5M8", ["fp", "E5M8", "E5M3"]), ("E5M4,e5m4", ["E5M4"])],
)
def test_precisions_are_parsed_into_their_order(text, meaning):
    assert parse_precisions(text) == meaning


@pytest.mark.parametrize("text", ["E5M9", "", "all,fp", "e5m9", "fp,"])
def test_odd_precisions_are_refused(text):
    with pytest.raises(PrecisionError, match="give all, or some of fp, E5M8"):
        parse_precisions(text)


def test_a_checkpoint_is_known_by_its_weights_and_config(tmp_path, nested_dir):
    copy = Path(shutil.copytree(MODEL_DIR, tmp_path / "copy"))
    (copy / "quality.json").write_text("{}")
    identity = Subject("builtin").identity
    assert Subject(str(copy)).identity == identity
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    assert Subject(str(copy)).identity != identity
    assert Subject(str(nested_dir)).identity == otaro.load(nested_dir).sefp.nested.base.header.model


def test_what_is_no_model_is_refused(tmp_path, checkpoint_dir):
    with pytest.raises(CheckpointError, match=r"has no config.json"):
        Subject(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model": "builtin", "options": {}}')
    with pytest.raises(CheckpointError, match="describes no model"):
        Subject(str(tmp_path))
    with pytest.raises(CheckpointError, match="neither a directory nor a Hub id"):
        Subject("no such model")
    with pytest.raises(otaro.OtaroError, match="has no tokenizer; copy"):
        _ = Subject(str(checkpoint_dir)).tokenizer


def test_a_checkpoint_that_lacks_a_tensor_is_not_filled_up_with_random_numbers(checkpoint_dir, tmp_path):
    from safetensors.torch import load_file, save_file

    copy = Path(shutil.copytree(checkpoint_dir, tmp_path / "copy"))
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    for name in ("fp", "E5M8"):
        with pytest.raises(CheckpointError, match=r"lacks the tensor model.layers.1.mlp.down_proj.weight"):
            Subject(str(copy), name).at(name)
