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
    for words in (
        ("weights",),
        ("weights", "--reconstruction", "midpoint"),
        ("gradients", "--text", text, *SMALL),
    ):
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
        "gradients-by-layer.svg",
        "gradients-similarity.svg",
        "gradients.json",
    ]
    stored = json.loads((out / "gradients.json").read_text())
    assert stored["model"] == "builtin"
    assert stored["command"] == (
        f"otaro analyze gradients builtin --text {text} --out {out} --batches 2 --batch-size 1 "
        "--sequence-length 32 "
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
    assert "self_attn.q_proj" in words_of(out / "gradients-by-layer.svg")
    assert "1.00" in words_of(out / "gradients-similarity.svg")


def test_the_command_in_the_file_makes_the_files_again_and_prints_a_summary_as_json(text, tmp_path):
    out = tmp_path / "a folder"
    run("gradients", "builtin", "--text", text, "--out", out, *SMALL, "--modules", "*.layers.1.mlp.*")
    before = sorted(map(str, out.iterdir()))
    stored = json.loads((out / "gradients.json").read_text())
    shutil.rmtree(out)
    shown = json.loads(run(*shlex.split(stored["command"])[2:], "--json"))
    assert sorted(map(str, out.iterdir())) == sorted(shown.pop("files")) == before
    assert json.loads((out / "gradients.json").read_text()) == stored
    assert shown == {key: value for key, value in stored.items() if key != "modules"}


def test_weights_leaves_the_numbers_behind_its_table(checkpoint_dir, copy_of):
    model = copy_of(checkpoint_dir)
    shown = run("weights", model)
    assert "outlier group" in shown
    out = model / "analysis"
    assert sorted(path.name for path in out.iterdir()) == ["weights.json"]
    stored = json.loads((out / "weights.json").read_text())
    assert list(stored["overall"]) == ["16", "32", "64", "128", "256"]
    for found in stored["overall"].values():
        assert list(found["error"].values()) == sorted(found["error"].values())
    truncated = json.loads(run("weights", model, "--reconstruction", "truncate", "--json"))
    for size, found in truncated["overall"].items():
        assert all(error > stored["overall"][size]["error"][name] for name, error in found["error"].items())
    otaro.pack(model, model.with_name("packed"))  # the model is as good as before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["weights", "builtin"], "say where with --out"),
        (
            ["weights", "nowhere/at-all", "--out", "OUT"],
            "no directory nowhere/at-all here, and the Hub's cache has not all of it; unset HF_HUB_OFFLINE",
        ),
        (
            ["weights", "NESTED", "--out", "OUT"],
            "is a nested model, whose weights are codes already; analyse the checkpoint",
        ),
        (["gradients", "NESTED", "--text", "TEXT", "--out", "OUT"], "is a nested model"),
        (["gradients", "CHECKPOINT", "--text", "TEXT", "--out", "OUT"], "has no tokenizer"),
        (
            ["gradients", "builtin", "--text", "nowhere.txt", "--out", "OUT"],
            "nowhere.txt does not exist; --text takes .txt",
        ),
        (
            ["gradients", "builtin", "--text", "TEXT", "--out", "OUT"],
            "2 sequences, and --batches 16 of --batch-size 4 need 64",
        ),
        (
            ["gradients", "builtin", "--text", "TEXT", "--out", "OUT", "--sequence-length", "513"],
            "more than the 512 positions",
        ),
        (
            ["gradients", "builtin", "--text", "TEXT", "--out", "OUT", *SMALL, "--modules", "x"],
            "no packed module matches 'x'",
        ),
        (
            ["gradients", "builtin", "--text", "TEXT", "--out", "OUT", *SMALL, "--device", "blah"],
            "unknown device 'blah'",
        ),
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


def test_a_place_that_cannot_be_written_is_refused(checkpoint_dir, text):
    assert "is a file, not a directory" in refusal("weights", checkpoint_dir, "--out", text)


@pytest.mark.parametrize("package", ["altair", "vl_convert"])
def test_without_what_draws_the_extra_is_named_before_any_work(text, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    said = refusal("gradients", "builtin", "--text", text, "--out", tmp_path / "out", *SMALL)
    assert "pip install 'otaro-llm[report]'" in said
    assert not (tmp_path / "out").exists()
