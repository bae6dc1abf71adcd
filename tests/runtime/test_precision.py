"""Switching precision: for all modules, for some, for a while; refusals change nothing."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

import otaro
from otaro.errors import PrecisionError, ShardMissingError

NAMES = [str(precision) for precision in otaro.PRECISIONS]


@pytest.fixture
def model(nested_dir):
    return otaro.load(nested_dir)


def precisions(model):
    return {name: str(precision) for name, precision in otaro.precisions_of(model).items()}


def buffers(model):
    return {name: buffer.data_ptr() for name, buffer in model.named_buffers() if "packed" in name}


def test_one_precision_sets_every_module(model):
    for precision in [*NAMES, otaro.Precision("E5M6")]:
        otaro.set_precision(model, precision)
        assert set(precisions(model).values()) == {str(precision)}
    assert set(precisions(model)) == {
        "model.embed_tokens",
        "lm_head",
        *(f"model.layers.{layer}.self_attn.{part}_proj" for layer in (0, 1) for part in "qkvo"),
        *(f"model.layers.{layer}.mlp.{part}_proj" for layer in (0, 1) for part in ("gate", "up", "down")),
    }


def test_patterns_set_what_they_match_later_ones_win_and_the_rest_stays(model):
    otaro.set_precision(model, "E5M7")
    otaro.set_precision(
        model, {"model.layers.*": "E5M3", "*.self_attn.[qk]_proj": "E5M5", "lm_hea?": otaro.Precision("E5M8")}
    )
    for name, precision in precisions(model).items():
        if name == "lm_head":
            assert precision == "E5M8"
        elif name == "model.embed_tokens":
            assert precision == "E5M7"
        else:
            assert precision == ("E5M5" if name.endswith(("q_proj", "k_proj")) else "E5M3"), name
    otaro.set_precision(model, {"*.q_proj": "E5M8", "*": "E5M4"})
    assert set(precisions(model).values()) == {"E5M4"}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("E5M2", "unknown precision 'E5M2'; the precisions are E5M8, E5M7, E5M6, E5M5, E5M4, E5M3"),
        (4, "unknown precision 4"),
        ({"*": "E5M3", "lm_head": "e5m2"}, "unknown precision 'e5m2'"),
        (
            {"*": "E5M3", "*.query": "E5M4"},
            r"no packed module matches '\*.query'; names look like "
            r"'model.embed_tokens'",
        ),
        ({"lm_head.weight": "E5M4"}, "no packed module matches 'lm_head.weight'"),
        ({"LM_HEAD": "E5M4"}, "no packed module matches 'LM_HEAD'"),
        ({"model.norm": "E5M4"}, "no packed module matches 'model.norm'"),
    ],
    ids=repr,
)
def test_a_precision_or_pattern_that_does_not_exist_is_refused_and_nothing_changes(model, asked, message):
    otaro.set_precision(model, {"*": "E5M6", "lm_head": "E5M8"})
    before = precisions(model)
    with pytest.raises(PrecisionError, match=message):
        otaro.set_precision(model, asked)
    with pytest.raises(PrecisionError, match=message), otaro.at_precision(model, asked):
        pytest.fail("the block must not be entered")
    assert precisions(model) == before


def test_an_empty_mapping_changes_nothing(model):
    otaro.set_precision(model, "E5M5")
    otaro.set_precision(model, {})
    assert set(precisions(model).values()) == {"E5M5"}


@pytest.mark.parametrize("name", ["llama_tied", "qwen2", "mixtral"])
def test_modules_at_different_precisions_compute_accordingly(
    make_nested, decoded_model, logits, name, assert_same_logits
):
    """Each packed parameter at its own precision; a tied head and embedding at the two ends."""
    model = otaro.load(make_nested(name))
    names = sorted(otaro.precisions_of(model))
    chosen = {module: NAMES[at % 6] for at, module in enumerate(names)} | {
        "model.embed_tokens": "E5M3",
        "lm_head": "E5M8",
    }
    otaro.set_precision(model, chosen)
    assert precisions(model) == chosen
    answer = logits(model)
    assert_same_logits(model, decoded_model(name, lambda at: chosen[at.removesuffix(".weight")]))
    otaro.set_precision(model, {"model.embed_tokens": "E5M8", "lm_head": "E5M3"})
    assert (logits(model) - answer).abs().max() > 1e-2


def test_at_precision_holds_inside_the_block_only(model, logits):
    otaro.set_precision(model, {"*": "E5M6", "lm_head": "E5M8"})
    before, answer = precisions(model), logits(model)
    with otaro.at_precision(model, "E5M3"):
        assert set(precisions(model).values()) == {"E5M3"}
        assert (logits(model) - answer).abs().max() > 1e-2
    assert precisions(model) == before
    assert torch.equal(logits(model), answer)


def test_at_precision_nests_and_takes_patterns(model):
    otaro.set_precision(model, "E5M8")
    with otaro.at_precision(model, {"*.mlp.*": "E5M4"}):
        outer = precisions(model)
        with otaro.at_precision(model, "E5M3"):
            assert set(precisions(model).values()) == {"E5M3"}
        assert precisions(model) == outer
        assert (outer["model.layers.0.mlp.up_proj"], outer["lm_head"]) == ("E5M4", "E5M8")
    assert set(precisions(model).values()) == {"E5M8"}


def test_at_precision_restores_after_an_exception(model):
    otaro.set_precision(model, "E5M7")

    def fail():
        with otaro.at_precision(model, "E5M3"):
            otaro.set_precision(model, "E5M5")  # even what the block itself changed
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert set(precisions(model).values()) == {"E5M7"}


@pytest.mark.parametrize("asked", ["E5M6", {"lm_head": "E5M6", "*.mlp.*": "E5M4"}], ids=["all", "one"])
def test_a_missing_shard_is_refused_by_name_and_nothing_changes(nested_dir, copy_of, logits, asked):
    model = otaro.load(copy_of(nested_dir, planes=(3, 4, 5, 7)), "E5M3")
    answer = logits(model)
    with pytest.raises(
        ShardMissingError,
        match=r"E5M6 needs model-m6.safetensors, which .* lacks \(it is complete up to "
        r"E5M5\)",
    ):
        otaro.set_precision(model, asked)
    with pytest.raises(ShardMissingError, match=r"model-m6.safetensors"), otaro.at_precision(model, asked):
        pytest.fail("the block must not be entered")
    assert set(precisions(model).values()) == {"E5M3"}
    assert torch.equal(logits(model), answer)


def test_a_shard_that_was_added_is_found_without_reloading(
    nested_dir, copy_of, decoded_model, assert_same_logits
):
    directory = copy_of(nested_dir, planes=(3,))
    model = otaro.load(directory)
    for plane in range(4, 9):
        with pytest.raises(ShardMissingError, match=f"E5M{plane} needs model-m{plane}.safetensors"):
            otaro.set_precision(model, f"E5M{plane}")
        name = f"model-m{plane}.safetensors"
        (directory / name).write_bytes((nested_dir / name).read_bytes())
        otaro.set_precision(model, f"E5M{plane}")
        assert_same_logits(model, decoded_model("llama", f"E5M{plane}"))


def test_an_ordinary_model_is_refused(checkpoint_dir):
    ordinary = AutoModelForCausalLM.from_pretrained(checkpoint_dir)
    message = r"this LlamaForCausalLM has no precision to switch; pass a whole model as otaro.load\(DIR\)"
    with pytest.raises(PrecisionError, match=message):
        otaro.set_precision(ordinary, "E5M4")
    with pytest.raises(PrecisionError, match=message):
        otaro.precisions_of(ordinary)
    with pytest.raises(PrecisionError, match=message), otaro.at_precision(ordinary, "E5M4"):
        pytest.fail("the block must not be entered")


@pytest.mark.parametrize("name", ["llama_tied", "mixtral"])
def test_switching_moves_no_weights(make_nested, logits, name):
    model = otaro.load(make_nested(name), "E5M8")
    before = buffers(model)
    assert len(before) > 50
    for precision in [*NAMES, *reversed(NAMES)]:
        otaro.set_precision(model, precision)
        logits(model)
        assert buffers(model) == before


def test_going_up_adds_planes_and_keeps_the_rest_in_place(model, nested_dir):
    model = otaro.load(nested_dir, "E5M3")
    base = buffers(model)
    otaro.set_precision(model, "E5M5")
    after = buffers(model)
    assert {name: after[name] for name in base} == base
    assert {name.rpartition(".")[2] for name in after.keys() - base.keys()} == {"plane4", "plane5"}


def test_a_tied_head_and_embedding_share_their_planes(make_nested):
    model = otaro.load(make_nested("llama_tied"))
    assert model.lm_head.packed.base.data_ptr() == model.model.embed_tokens.packed.base.data_ptr()
    assert model.lm_head.packed.plane8.data_ptr() == model.model.embed_tokens.packed.plane8.data_ptr()


@pytest.mark.parametrize(
    ("name", "loaded"), [("llama", "E5M8"), ("llama", "E5M4"), ("llama_tied", "E5M4"), ("mixtral", "E5M8")]
)
def test_a_deep_copy_runs_and_switches_on_its_own(make_nested, logits, name, loaded):
    """Loaded at E5M8 a switch writes integers alone, at E5M4 the copy attaches planes of its own."""
    model = otaro.load(make_nested(name), loaded)
    otaro.set_precision(model, "E5M4")
    answer = logits(model)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), answer)
    otaro.set_precision(twin, "E5M8")
    assert set(precisions(twin).values()) == {"E5M8"}
    assert (logits(twin) - answer).abs().max() > 1e-2
    assert set(precisions(model).values()) == {"E5M4"}
    assert torch.equal(logits(model), answer)
    otaro.set_precision(model, "E5M8")
    assert torch.equal(logits(twin), logits(model))
