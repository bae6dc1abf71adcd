"""What a tensor loses: the same whether earlier layers are computed again or not, kept as it is measured,
checked when read.
"""

import json
from dataclasses import asdict

import pytest
import torch

import otaro
from otaro.errors import OtaroError
from otaro.evaluate.decoded import DecodedModel
from otaro.evaluate.sensitivity import MEASURED, Kept, Probe, Reading, Sensitivity, measure
from otaro.file.io import NestedDirectory
from otaro.sefp.precision import Precision

E5M3, E5M8 = Precision("E5M3"), Precision("E5M8")
READING = Reading("0" * 64, 40, 20, "E5M8", "cpu")
WINDOWS = [torch.arange(start, start + 20) for start in (3, 60)]


def opened(directory):
    decoded = DecodedModel(otaro.load(directory), keep_planes=True)
    return decoded, Probe(decoded, WINDOWS, E5M8)


@pytest.mark.parametrize("architecture", ["llama", "llama_tied", "gemma2", "mixtral", "gpt2"])
def test_kept_layers_change_nothing(make_nested, architecture):
    decoded, probe = opened(make_nested(architecture))
    finest = dict.fromkeys(decoded.weights, E5M8)
    assert probe.divergence(finest) == pytest.approx(0, abs=1e-6)  # rounding alone
    for name in decoded.weights:
        changed = {**finest, name: E5M3}
        # Whichever way, the same numbers are computed from the same numbers; a library may add them in
        # another order.
        assert probe.divergence(changed, changed=name) == pytest.approx(
            probe.divergence(changed), abs=1e-6, rel=1e-3
        )
    assert probe.divergence(dict.fromkeys(decoded.weights, E5M3)) > 1e-5


def test_later_layers_cost_less(nested_dir):
    _, probe = opened(nested_dir)
    early, late = (probe.cost(f"model.layers.{layer}.mlp.up_proj.weight") for layer in (0, 1))
    assert probe.cost("model.embed_tokens.weight") == early == late + 1 == probe.cost("lm_head.weight") + 2


def test_an_interrupted_measurement_goes_on_where_it_stopped(nested_dir, tmp_path):
    decoded, probe = opened(nested_dir)
    model, names = NestedDirectory(nested_dir).model, list(decoded.weights)
    seen = []

    def until_the_third(what, done, total):
        seen.append(what)
        if len(seen) == 2 * MEASURED + 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(probe, decoded, Kept(tmp_path, model, names, READING), until_the_third)
    again = Kept(tmp_path, model, names, READING)
    assert again.taken_over == 2
    before = dict(again.sensitivity.divergences)
    counted = []
    found = measure(probe, decoded, again, lambda what, done, total: counted.append((what, done, total)))
    assert found.divergences.keys() == set(names)
    assert {name: found.divergences[name] for name in before} == before
    assert {what for what, _, _ in counted} == {"", *names[2:]}
    assert counted[-1][1] == counted[-1][2] > counted[0][1] == 0
    for name in names:
        losses = found.losses(name)
        assert len(losses) == 6
        assert losses[-1] == 0
        assert min(losses) >= 0
        errors = found.errors[name]
        assert losses[3] == pytest.approx(losses[1] * errors[3] / errors[1])
    other = Kept(tmp_path, model, names, Reading("1" * 64, 40, 20, "E5M8", "cpu"))
    assert other.taken_over == 0
    other.flush()
    assert Kept(tmp_path, model, names, READING).taken_over == len(names)  # another text's are beside it


def test_a_tensor_without_error_loses_nothing():
    found = Sensitivity(READING, {"a": [0.0, 0.0]}, {"a": [0.0] * 5})
    assert found.losses("a") == [0.0] * 6


def test_errors_of_any_size_give_losses_whose_sums_are_finite():
    found = Sensitivity(READING, {"a": [1e6, 1e6]}, {"a": [1e30, 1e-320, 1e30, 0, 1e-320]})
    assert found.losses("a") == [1e6, 1e6, 1e6, 0, 1e6, 0]


def damaged(change):
    row = {**asdict(READING), "divergences": {"a": [2.0, 1.0]}, "errors": {"a": [5, 4, 3, 2, 1]}}
    raw = {"version": 1, "model": "5" * 64, "readings": [row]}
    change(raw, row)
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda raw, row: raw.update(version=0), "version: input should be 1, not '0'"),
        (lambda raw, row: raw.update(model="6" * 64), "about another model"),
        (lambda raw, row: raw.update(readings={}), "readings: input should be a valid list"),
        (lambda raw, row: raw.update(readings=[1]), "readings.0: input should be a valid dictionary"),
        (lambda raw, row: row.pop("tokens"), "readings.0.tokens: field required"),
        (lambda raw, row: row.update(tokens=True), "tokens: input should be a valid integer"),
        (lambda raw, row: row.update(text_sha256="x"), "text_sha256: it should be a SHA-256"),
        (lambda raw, row: row.update(finest="E5M9"), "finest: it should be one of fp, E5M8"),
        (lambda raw, row: row.update(divergences={"b": [1, 1]}), "its divergences are of other tensors"),
        (lambda raw, row: row.update(errors=[]), "errors: input should be a valid dictionary"),
        (
            lambda raw, row: row.update(divergences={"a": [1.0]}),
            "its divergences are not 2 numbers for each tensor",
        ),
        (
            lambda raw, row: row.update(divergences={"a": [1.0, -1.0]}),
            "divergences.a.1: input should be greater than or",
        ),
        (
            lambda raw, row: row.update(divergences={"a": [1.0, "x"]}),
            "divergences.a.1: it should be a number, not 'x'",
        ),
        (
            lambda raw, row: row.update(divergences={"a": [1.0, 10**400]}),
            "divergences.a.1: it should be a number",
        ),
        (
            lambda raw, row: row.update(divergences={"a": [1e308, 1e308]}),
            "divergences.a.0: input should be less than or",
        ),
        (lambda raw, row: row.update(errors={"a": [10**400] * 5}), "errors.a.0: it should be a number"),
        (lambda raw, row: row.update(errors={"a": [1, 2, 3, 4, float("inf")]}), "Infinity is no number"),
    ],
)
def test_a_file_that_is_not_sound_is_refused(tmp_path, change, why):
    (tmp_path / "sensitivity.json").write_text(damaged(change))
    with pytest.raises(OtaroError, match=f"cannot be used: .*{why}.*; move it away to measure anew"):
        Kept(tmp_path, "5" * 64, ["a"], READING)


@pytest.mark.parametrize("text", ["", "{}", "[" * 100_000])
def test_what_is_no_such_file_is_refused(tmp_path, text):
    (tmp_path / "sensitivity.json").write_text(text)
    with pytest.raises(OtaroError, match="cannot be used"):
        Kept(tmp_path, "5" * 64, ["a"], READING)
    (tmp_path / "sensitivity.json").write_text(damaged(lambda raw, row: None))
    assert Kept(tmp_path, "5" * 64, ["a"], READING).taken_over == 1
