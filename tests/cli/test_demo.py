"""`otaro demo`: the story has its table, its samples and its page, and replaces only what an earlier demo left."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from otaro.builtin.documentation import documentation_text
from otaro.cli.main import app

SMALL = ("--steps", "2", "--batch-size", "2", "--sequence-length", "32", "--prompt", "The result")


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """The folder of a demo that replaced an earlier one, and what it said."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "short.txt").write_text(documentation_text("heldout")[:1500])
    (folder / "out" / "usual").mkdir(parents=True)
    (folder / "out" / "usual" / "config.json").write_text("{}")  # all that an earlier demo left, as it was killed early
    words = ["demo", "--text", str(folder / "short.txt"), "--out", str(folder / "out"), *SMALL, "--json"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    return folder, json.loads(done.stdout)


def test_both_ways_of_tuning_are_measured_at_all_precisions_from_the_packed_file(told):
    folder, result = told
    six = {"E5M8", "E5M7", "E5M6", "E5M5", "E5M4", "E5M3"}
    assert set(result["perplexity"]) == {"before", "usual", "otaro"}
    assert all(six <= set(values) for values in result["perplexity"].values())
    for run in ("usual", "otaro"):
        kept = json.loads((folder / "out" / run / "nested" / "quality.json").read_text())["entries"]
        assert {entry["precision"] for entry in kept} == six
    assert list(result["bytes"].values()) == sorted(result["bytes"].values(), reverse=True)
    assert set(result["samples"]) == {"E5M8", "E5M3"}


def test_the_page_shows_both_runs(told):
    folder, result = told
    assert result["report"] == str(folder / "out" / "report.html")
    page = (folder / "out" / "report.html").read_text()
    assert all(name in page for name in ("otaro", "usual", "before tuning"))


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "usual").mkdir()
    (tmp_path / "usual" / "thesis.txt").write_text("years of work")
    refused = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), *SMALL])
    assert "not from an earlier demo" in str(refused.exception)
    assert (tmp_path / "usual" / "thesis.txt").is_file()
