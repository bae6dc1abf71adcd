"""`otaro tune` as a user meets it, on the built-in model."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import otaro
from otaro.cli.main import app
from otaro.evaluate.subject import Subject

SMALL = ["--steps", "6", "--batch-size", "4", "--sequence-length", "64", "--save-every", "4", "--lr", "1e-3"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(otaro_text())
    return path


def otaro_text() -> str:
    from otaro.builtin import topics_training_text

    return topics_training_text()[:20000]


def tune(text, out, *more):
    return CliRunner().invoke(app, ["tune", "builtin", "--data", str(text), "--out", str(out), *SMALL, *map(str, more)])


def test_a_run_leaves_a_checkpoint_a_nested_model_and_a_folder_that_tells_everything(text, tmp_path):
    result = tune(text, tmp_path / "run", "--json")
    assert result.exit_code == 0, result.output + repr(result.exception)
    report = json.loads(result.stdout)
    names = ["fp", *map(str, otaro.PRECISIONS)]
    assert list(report["before"]) == list(report["after"]) == names
    stated = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stated["options"]["method"] == "uniform"
    assert stated["training"]["steps"] == 6
    assert set(stated["versions"]) == {"otaro", "torch", "transformers", "python"}
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in log] == list(range(1, 7))
    model = otaro.load(tmp_path / "run" / "nested", "E5M3")
    packed_again = otaro.pack(tmp_path / "run" / "model", tmp_path / "again")
    assert packed_again.base.header.model == model.sefp.nested.base.header.model


def test_what_was_tuned_is_what_is_opened_and_measured(text, tmp_path):
    """A bfloat16 model is tuned in float32: a config that still said bfloat16 would have every reader round the weights."""
    from otaro.builtin import MODEL_DIR

    source = shutil.copytree(MODEL_DIR, tmp_path / "source")
    AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.bfloat16).save_pretrained(source)
    tuned = CliRunner().invoke(app, ["tune", str(source), "--data", str(text), "--out", str(tmp_path / "run"), *SMALL])
    assert tuned.exit_code == 0, tuned.output + repr(tuned.exception)
    stored = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in stored.values())
    subject = Subject(str(tmp_path / "run" / "model"))
    assert subject.config.dtype == torch.float32
    for model in (AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model"), subject.at("fp")):
        found = model.state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())
    norm = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "nested").model.norm.weight
    assert torch.equal(norm, stored["model.norm.weight"])


def test_tuning_for_all_precisions_helps_the_coarsest_most(text, tmp_path):
    result = tune(text, tmp_path / "run", "--steps", 40, "--lr", "1e-3", "--json")
    assert result.exit_code == 0, result.output + repr(result.exception)
    report = json.loads(result.stdout)
    change = {name: report["after"][name] / report["before"][name] for name in report["before"]}
    assert change["E5M3"] < change["E5M8"]
    assert report["after"]["E5M3"] / report["after"]["E5M8"] < report["before"]["E5M3"] / report["before"]["E5M8"]


def test_the_recipe_of_the_paper_delays_updates(text, tmp_path):
    result = tune(text, tmp_path / "run", "--recipe", "paper", "--delay", 2, "--steps", 8, "--json")
    assert result.exit_code == 0, result.output + repr(result.exception)
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    low = [record for record in log if record.get("precision") in ("E5M4", "E5M3")]
    assert [record["applied"] for record in low[:2]] == [False, True]
    stated = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (stated["training"]["optimizer"], stated["options"]["reconstruction"]) == ("sgd", "truncate")


@pytest.mark.parametrize(
    ("flags", "rate", "added"),
    [
        ([], 1e-4, {"weights": [1.0, 1.0, 1.0, 1.0, 1.25, 2.6], "distill": 0.5, "pull": 23.0, "average": 0.7, "rates": "size"}),
        (["--method", "fp"], 5e-5, {"weights": [1.0] * 6, "distill": 0.0, "pull": 0.0, "average": 0.0, "rates": "same"}),
        (["--method", "bps", "--pull", "5"], 5e-5, {"distill": 0.0, "pull": 5.0, "average": 0.0, "rates": "same"}),
        (["--method", "fixed:E5M4", "--lr", "2e-4"], 2e-4, {"distill": 0.0, "pull": 0.0}),
        (["--method", "uniform", "--average", "0"], 1e-4, {"distill": 0.5, "pull": 23.0, "average": 0.0}),
        (["--recipe", "paper", "--method", "bps"], 1e-5, {"distill": 0.0, "pull": 0.0, "reconstruction": "truncate"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_recipe_adds_is_for_its_own_method_unless_asked_for(monkeypatch, tmp_path, flags, rate, added):
    chosen = []
    monkeypatch.setattr("otaro.cli.tune.TuningRun.go", lambda run: chosen.append(run) or {})
    done = CliRunner().invoke(app, ["tune", "builtin", "--data", "builtin", "--out", str(tmp_path), "--json", *flags])
    assert done.exit_code == 0, done.output + repr(done.exception)
    stated = chosen[0].stated
    assert stated["training"]["lr"] == rate
    assert {name: stated["options"][name] for name in added} == added


@pytest.mark.parametrize("flags", [[], ["--lora", "4"], ["--method", "otaro"]], ids=" ".join)
def test_resuming_needs_the_same_options_and_ends_in_the_same_weights(text, tmp_path, flags):
    if "--lora" in flags:
        pytest.importorskip("peft", reason="peft is not installed")
    whole = json.loads(tune(text, tmp_path / "whole", *flags, "--json").stdout)
    again = tune(text, tmp_path / "whole", *flags, "--resume", "--json")  # from its last checkpoint, at step 4
    assert again.exit_code == 0, again.output + repr(again.exception)
    assert json.loads(again.stdout)["after"] == whole["after"]
    other = tune(text, tmp_path / "whole", *flags, "--resume", "--distill", 0.1)
    assert "--resume: options differ" in str(other.exception)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--method", "magic"], "--method magic: choose from"),
        (["--method", "fixed:E5M9"], "--method fixed:E5M9"),
        (["--weights", "1,2"], "--weights gives 2 numbers for 6"),
        (["--weights", "one"], "--weights one: give numbers"),
        (["--lr", "0.1"], "--pull 23 undoes every step at --lr 0.1"),
        (["--pull", "-1"], "--pull -1.0: must be a number, and not negative"),
        (["--average", "70"], "--average 70.0: must be between 0 and 1"),
        (["--epochs", "1"], "--epochs and --steps contradict"),
        (["--sequence-length", "4096"], "--sequence-length 4096 is more than the 512 positions"),
        (["--resume"], "holds no run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_makes_no_sense_is_refused_in_the_flags_own_spelling(text, tmp_path, more, words):
    result = tune(text, tmp_path / "run", *more)
    assert result.exit_code != 0
    assert isinstance(result.exception, otaro.OtaroError)
    assert words in str(result.exception)
    assert not (tmp_path / "run" / "log.jsonl").exists()


def test_a_folder_with_something_in_it_is_not_touched(text, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    assert "exists and is not empty" in str(tune(text, tmp_path).exception)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
