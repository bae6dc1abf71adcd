"""`otaro analyze` as a user meets it: files, tables, JSON, and errors of one line."""

import json
import shlex
import shutil
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from typer.testing import CliRunner

import otaro
from otaro.builtin import MODEL_DIR, topics_training_text
from otaro.cli.main import app

NAMES = [str(p) for p in otaro.PRECISIONS]
SMALL = ["--batches", "2", "--batch-size", "1", "--sequence-length", "32"]


def run(*arguments):
    result = CliRunner().invoke(app, ["analyze", *map(str, arguments)])
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.stdout


def refusal(*arguments):
    """The words of an analysis that must be refused."""
    result = CliRunner().invoke(app, ["analyze", *map(str, arguments)])
    assert result.exit_code != 0
    return str(result.exception) if isinstance(result.exception, otaro.OtaroError) else result.output


def words_of(figure):
    """All text in an SVG, which has to be well-formed."""
    return " ".join(text.strip() for text in ElementTree.parse(figure).getroot().itertext() if text.strip())


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(topics_training_text()[:2000])
    return path


@pytest.fixture
def tuned(tmp_path):
    """A run folder, as far as its path is concerned."""
    steps = [("E5M8", True), ("E5M3", False), ("E5M8", True), ("E5M4", True)]
    lines = [
        {"step": n, "precision": p, "loss": 2.0, "scores": {"E5M8": 0.5, "E5M4": None, "E5M3": 0.1 * n}, "applied": applied}
        for n, (p, applied) in enumerate(steps, 1)
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_a_checkpoint_is_analysed_as_it_was_tuned(text, tmp_path, monkeypatch):
    from otaro.evaluate import gradients, weights
    from otaro.file.coding import Coding, write_coding

    class Enough(Exception):
        pass

    def note(*_, progress, modules="*", **coding):
        seen.append(coding)
        raise Enough

    seen = []
    monkeypatch.setattr(gradients, "analyze_gradients", note)
    monkeypatch.setattr(weights, "analyze_weights", note)
    tuned = shutil.copytree(MODEL_DIR, tmp_path / "tuned")
    write_coding(tuned, Coding(32, "truncate"))
    for words in (("weights",), ("weights", "--reconstruction", "midpoint"), ("gradients", "--text", text, *SMALL)):
        result = CliRunner().invoke(app, ["analyze", words[0], str(tuned), *map(str, words[1:])])
        assert isinstance(result.exception, Enough), result.output + repr(result.exception)
    assert [found["reconstruction"] for found in seen] == ["truncate", "midpoint", "truncate"]
    assert seen[2]["group_size"] == 32


def test_gradients_leaves_figures_and_the_numbers_behind_them(text, tmp_path):
    out = tmp_path / "out"
    shown = run("gradients", "builtin", "--text", text, "--out", out, *SMALL, "--group-size", 32)
    assert "43 modules" in shown
    assert all(name in shown for name in NAMES)
    assert sorted(path.name for path in out.iterdir()) == [
        "gradients-accumulated.svg",
        "gradients-by-layer.svg",
        "gradients-norm.svg",
        "gradients-perturbation.svg",
        "gradients-similarity.svg",
        "gradients.json",
    ]
    stored = json.loads((out / "gradients.json").read_text())
    assert stored["model"] == "builtin"
    assert stored["command"] == (
        f"otaro analyze gradients builtin --text {text} --out {out} --batches 2 --batch-size 1 --sequence-length 32 "
        "--modules '*' --reconstruction midpoint --group-size 32 --device cpu"
    )
    assert set(stored["versions"]) == {"otaro", "torch", "transformers"}
    assert (stored["batches"], stored["tokens"], stored["sequence_length"]) == (2, 64, 32)
    assert len(stored["modules"]) == 43
    assert {(module["layer"], module["projection"]) for module in stored["modules"]} >= {
        (layer, f"mlp.{kind}_proj") for layer in range(6) for kind in ("gate", "up", "down")
    }
    cosines = [stored["overall"][0][column] for column in range(6)]
    assert cosines == sorted(cosines, reverse=True)  # the coarser, the less like E5M8
    assert "layer (–: outside the layers)" in words_of(out / "gradients-by-layer.svg")
    assert "self_attn.q_proj" in words_of(out / "gradients-similarity.svg")
    assert "batches N" in words_of(out / "gradients-accumulated.svg")


def test_weights_leaves_figures_and_the_numbers_behind_them(checkpoint_dir, copy_of):
    model = copy_of(checkpoint_dir)
    shown = run("weights", model)
    assert "outlier group" in shown
    out = model / "analysis"
    assert sorted(path.name for path in out.iterdir()) == ["weights-by-layer.svg", "weights.json", "weights.svg"]
    stored = json.loads((out / "weights.json").read_text())
    assert stored["group_sizes"] == [16, 32, 64, 128, 256]
    assert list(stored["overall"]) == ["16", "32", "64", "128", "256"]
    for found in stored["overall"].values():
        assert sum(found["shifts"].values()) == pytest.approx(1)
        assert list(found["error"].values()) == sorted(found["error"].values())
        assert found["zeros"] == 0
    assert "groups of 256" in words_of(out / "weights.svg")
    assert "down_proj" in words_of(out / "weights-by-layer.svg")
    truncated = json.loads(run("weights", model, "--reconstruction", "truncate", "--json"))
    for size, found in truncated["overall"].items():
        assert all(error > stored["overall"][size]["error"][name] for name, error in found["error"].items())
    otaro.pack(model, model.with_name("packed"))  # the model is as good as before


def test_path_tells_what_a_run_did(tuned):
    shown = run("path", tuned)
    row = next(line for line in shown.splitlines() if "E5M8" in line)
    assert row.replace("│", " ").split() == ["E5M8", "2", "50.0%", "1", "1", "0", "0.500"]
    row = next(line for line in shown.splitlines() if "E5M3" in line)
    assert row.replace("│", " ").split() == ["E5M3", "1", "25.0%", "1", "0", "1", "0.400"]
    stored = json.loads((tuned / "analysis" / "path.json").read_text())
    assert stored["sequence"] == ["E5M8", "E5M3", "E5M8", "E5M4"]
    assert stored["counts"]["E5M8"] == [1, 1, 2, 2]
    assert "hollow" in words_of(tuned / "analysis" / "path.svg")


def test_path_shows_the_pass_in_full_precision_that_every_step_has(tuned):
    assert "besides" not in run("path", tuned)
    config = {"model": "m", "data": "d", "recipe": "best", "options": {"method": "uniform", "full": 1 / 3}, "training": {}}
    (tuned / "config.json").write_text(json.dumps(config))
    shown = run("path", tuned)
    row = next(line for line in shown.splitlines() if "full, besides" in line)
    assert row.replace("│", " ").split() == ["full,", "besides", "4", "100.0%", "2", "2", "-", "-"]
    assert "4 steps, recipe best" in shown
    assert "need no steps of their own" in " ".join(shown.split())
    config["options"] = {"method": "fp"}
    (tuned / "config.json").write_text(json.dumps(config))
    shown = run("path", tuned)
    assert "4 steps, recipe fp" in shown
    assert "besides" not in shown


def test_the_command_in_the_file_makes_the_files_again_and_prints_a_summary_as_json(tuned):
    run("path", tuned, "--out", tuned / "a folder")
    before = {path.name: path.read_text() for path in (tuned / "a folder").iterdir()}
    stored = json.loads(before["path.json"])
    shown = json.loads(run(*shlex.split(stored["command"])[2:], "--json"))
    assert {path.name: path.read_text() for path in (tuned / "a folder").iterdir()} == before
    assert sorted(shown.pop("files")) == sorted(str(tuned / "a folder" / name) for name in before)
    assert shown == {key: value for key, value in stored.items() if key not in ("sequence", "applied")}


def test_path_draws_a_run_in_full_precision(tuned):
    (tuned / "log.jsonl").write_text('{"step": 1, "precision": "fp", "loss": 2.0, "scores": {}, "applied": true}\n')
    assert "full" in run("path", tuned)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["weights", "builtin"], "say where with --out"),
        (["weights", "nowhere/at-all", "--out", "OUT"], "fetching it from the Hub failed"),
        (["weights", "NESTED", "--out", "OUT"], "is a nested model, whose weights are codes already; analyse the checkpoint"),
        (["gradients", "NESTED", "--text", "TEXT", "--out", "OUT"], "is a nested model"),
        (["gradients", "CHECKPOINT", "--text", "TEXT", "--out", "OUT"], "has no tokenizer"),
        (["gradients", "builtin", "--text", "nowhere.txt", "--out", "OUT"], "nowhere.txt does not exist; --text takes .txt"),
        (["gradients", "builtin", "--text", "TEXT", "--out", "OUT"], "2 sequences, and --batches 16 of --batch-size 4 need 64"),
        (["gradients", "builtin", "--text", "TEXT", "--out", "OUT", "--sequence-length", "513"], "more than the 512 positions"),
        (["gradients", "builtin", "--text", "TEXT", "--out", "OUT", *SMALL, "--modules", "x"], "no packed module matches 'x'"),
        (["gradients", "builtin", "--text", "TEXT", "--out", "OUT", *SMALL, "--device", "blah"], "unknown device 'blah'"),
        (["path", "CHECKPOINT", "--out", "OUT"], "holds no log.jsonl"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_analysed_is_refused_and_leaves_nothing(
    arguments, words, text, tmp_path, checkpoint_dir, nested_dir, monkeypatch
):
    places = {"OUT": tmp_path / "out", "TEXT": text, "NESTED": nested_dir, "CHECKPOINT": checkpoint_dir}
    monkeypatch.chdir(tmp_path)
    said = refusal(*(places.get(argument, argument) for argument in arguments))
    assert words in " ".join(said.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused(tuned):
    assert "is a file, not a directory" in refusal("path", tuned, "--out", tuned / "log.jsonl")


@pytest.mark.parametrize("package", ["altair", "vl_convert"])
def test_without_what_draws_the_extra_is_named_before_any_work(tuned, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert "pip install 'otaro-llm[report]'" in refusal("path", tuned)
    assert not (tuned / "analysis").exists()
