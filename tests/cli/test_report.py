"""`otaro report` as a user meets it, on a run of the built-in model."""

import json

import pytest
from typer.testing import CliRunner

import otaro
from otaro.builtin import topics_training_text
from otaro.cli.main import app


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("report")
    (home / "text.txt").write_text(topics_training_text()[:20000])
    out, small = home / "run", ["--steps", "3", "--batch-size", "4", "--sequence-length", "64"]
    result = CliRunner().invoke(app, ["tune", "builtin", "--data", str(home / "text.txt"), "--out", str(out), *small])
    assert result.exit_code == 0, result.output + repr(result.exception)
    return out


def report(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_a_run_of_tune_becomes_a_page_in_its_folder(run_folder):
    result = report(run_folder, "--prompt", "Return a list", "--prompt", "The class", "--max-new-tokens", 3, "--json")
    assert result.exit_code == 0, result.output + repr(result.exception)
    target = run_folder / "report.html"
    assert json.loads(result.stdout) == {"out": str(target), "bytes": target.stat().st_size, "runs": ["run"]}
    page = target.read_text()
    stored = json.loads((run_folder / "perplexity.json").read_text())
    for stage in ("before", "after"):
        assert all(f">{value:.2f} <small>" in page for value in stored[stage].values())
    kept = json.loads((run_folder / "samples.json").read_text())
    assert list(kept["texts"]) == ["Return a list", "The class"]
    assert all(list(texts) == list(map(str, otaro.PRECISIONS)) for texts in kept["texts"].values())
    assert "Return a list …" in page


def test_runs_side_by_side_go_where_it_is_said(run_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert report(run_folder, run_folder / "nested", "--no-samples").stdout.startswith("report.html (")
    assert "<title>OTARo report: run and nested</title>" in (tmp_path / "report.html").read_text()
    result = report(run_folder, "--no-samples", "--out", tmp_path / "new" / "page.html")
    assert result.exit_code == 0, result.output + repr(result.exception)
    assert "without --no-samples" in (tmp_path / "new" / "page.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere is not a directory"),
        (["."], "is neither a run folder"),
        (["{run}", "--no-samples", "--out", "."], ". is a directory; name the file to write"),
        (["{run}", "--prompt", ""], "holds no token"),
    ],
)
def test_what_cannot_be_reported_is_refused(run_folder, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    result = report(*(argument.format(run=run_folder) for argument in arguments))
    assert isinstance(result.exception, otaro.OtaroError)
    assert words in str(result.exception)
    assert not list(tmp_path.iterdir())
