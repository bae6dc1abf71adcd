"""`otaro report` as a user meets it, on a run of the built-in model."""

import json
import shutil

import pytest
from typer.testing import CliRunner

import otaro
from otaro.builtin import heldout_text, topics_training_text
from otaro.cli.main import app


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("report")
    (home / "text.txt").write_text(topics_training_text()[:20000])
    out, small = home / "run", ["--steps", 3, "--batch-size", 4, "--sequence-length", 64]
    done(
        "tune",
        "builtin",
        "--data",
        home / "text.txt",
        "--out",
        out,
        "--recipe",
        "paper",
        "--group-size",
        32,
        *small,
    )
    return out


def done(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.stdout


def report(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "held.txt"
    path.write_text(heldout_text()[:2000])
    return path


def perplexities(model, text, *more):
    words = ("eval", model, "--text", text, "--window", 128, "--precision", "E5M8,E5M3", *more)
    return {entry["precision"]: entry["value"] for entry in json.loads(done(*words, "--json"))["entries"]}


def test_a_checkpoint_is_measured_and_packed_as_it_was_tuned(run_folder, tmp_path, text):
    moved = shutil.copytree(run_folder / "model", tmp_path / "elsewhere")
    assert json.loads((moved / "otaro.json").read_text()) == {"group_size": 32, "reconstruction": "truncate"}
    as_packed = perplexities(run_folder / "nested", text)
    assert perplexities(moved, text) == as_packed
    # the paper's is worse
    assert perplexities(moved, text, "--reconstruction", "midpoint")["E5M3"] < as_packed["E5M3"]
    stored = json.loads((moved / "quality.json").read_text())["entries"]
    codings = [(entry["group_size"], entry["reconstruction"]) for entry in stored]
    assert codings == 2 * [(32, "truncate")] + 2 * [(32, "midpoint")]
    assert "--group-size" not in stored[0]["command"]
    assert stored[2]["command"].endswith(" --group-size 32 --reconstruction midpoint")
    packed = json.loads(done("pack", moved, tmp_path / "packed", "--json"))
    assert packed["model"] == otaro.load(run_folder / "nested", "E5M3").sefp.nested.base.header.model


def test_a_page_never_joins_a_model_with_itself_quantized_otherwise(run_folder, tmp_path, text):
    run = shutil.copytree(run_folder, tmp_path / "run")
    own = perplexities(run / "nested", text)
    assert perplexities(run / "model", text) == own
    other = perplexities(run / "model", text, "--reconstruction", "midpoint", "--group-size", 64)
    done("report", run)
    page = (run / "report.html").read_text()
    apart = page.index("quantized in groups of 64, midpoint")
    for values, together in ((own, True), (other, False)):
        assert [cell(value) in page[:apart] for value in values.values()] == [together] * 2
        assert all(cell(value) in page for value in values.values())
    assert "cost" in done("eval", run / "model", "--text", text, "--window", 128, "--precision", "E5M3,fp")


def cell(value):
    return f">{value:,.2f}" if value < 1000 else f">{value:,.0f}"


def test_a_run_of_tune_becomes_a_page_in_its_folder(run_folder):
    result = report(run_folder, "--json")
    assert result.exit_code == 0, result.output + repr(result.exception)
    target = run_folder / "report.html"
    assert json.loads(result.stdout) == {"out": str(target), "bytes": target.stat().st_size, "runs": ["run"]}
    page = target.read_text()
    stored = json.loads((run_folder / "perplexity.json").read_text())
    for stage in ("before", "after"):
        assert all(f">{value:.2f} <small>" in page for value in stored[stage].values())


def test_runs_side_by_side_go_where_it_is_said(run_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert report(run_folder, run_folder / "nested").stdout.startswith("report.html (")
    assert "<title>OTARo report: run and nested</title>" in (tmp_path / "report.html").read_text()
    result = report(run_folder, "--out", tmp_path / "new" / "page.html")
    assert result.exit_code == 0, result.output + repr(result.exception)
    assert "One model, six precisions" in (tmp_path / "new" / "page.html").read_text()


def test_a_report_replaces_a_report_and_nothing_else(run_folder, tmp_path, monkeypatch):
    mine, page = tmp_path / "precious.html", tmp_path / "page.html"
    mine.write_text("<!doctype html><title>mine</title><style></style><title>OTARo report: x</title>")
    with monkeypatch.context() as patched:  # refused before anything is read
        patched.setattr("otaro.evaluate.run_folder.read_runs", None)
        refused = report(run_folder, "--out", mine).exception
    told = f"{mine} is there, and no report of ours; choose another --out, or remove it"
    assert isinstance(refused, otaro.OtaroError)
    assert told in str(refused)
    assert mine.read_text().startswith("<!doctype html><title>mine")
    older = '<!doctype html>\n<html lang="en">\n<head>\n<title>OTARo report: run</title>\n<style>'
    page.write_text(older)
    for _ in range(2):
        assert report(run_folder, "--out", page).exit_code == 0
    assert page.read_text().count('<meta name="generator" content="otaro report">') == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere is not a directory"),
        (["."], "is neither a run folder"),
        (["{run}", "--out", "."], ". is a directory; name the file to write"),
    ],
)
def test_what_cannot_be_reported_is_refused(run_folder, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    result = report(*(argument.format(run=run_folder) for argument in arguments))
    assert isinstance(result.exception, otaro.OtaroError)
    assert words in str(result.exception)
    assert not list(tmp_path.iterdir())
