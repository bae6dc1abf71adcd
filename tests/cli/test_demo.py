"""`otaro demo`: the story has its table, its samples and its page, and replaces only what an earlier demo left."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from otaro.builtin.documentation import documentation_text
from otaro.cli.demo import MARK
from otaro.cli.main import app

SMALL = ("--steps", "2", "--batch-size", "2", "--sequence-length", "32", "--prompt", "The result")


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """The folder of a demo that replaced an earlier one, and what it said."""
    folder = tmp_path_factory.mktemp("demo")
    for name, part, length in (("short.txt", "heldout", 1500), ("data.txt", "tuning", 20_000)):
        (folder / name).write_text(documentation_text(part)[:length])
    (folder / "out" / "usual").mkdir(parents=True)
    (folder / "out" / "usual" / MARK).touch()  # all that an earlier demo left, as it was killed early
    given = ("--text", str(folder / "short.txt"), "--data", str(folder / "data.txt"))
    words = ["demo", *given, "--out", str(folder / "out"), *SMALL, "--json"]
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


def test_the_page_shows_what_the_table_says(told):
    folder, result = told
    assert result["report"] == str(folder / "out" / "report.html")
    page = (folder / "out" / "report.html").read_text()
    for values in result["perplexity"].values():
        assert all(f"{values[precision]:.2f}" in page for precision in ("E5M8", "E5M3"))


def test_unless_told_otherwise_it_measures_on_held_out_documentation(tmp_path, monkeypatch):
    class EnoughError(Exception):
        pass

    def measure(subject, text, keep):
        assert text.content == documentation_text("heldout")
        raise EnoughError

    monkeypatch.setattr("otaro.cli.demo._measure", measure)
    assert isinstance(CliRunner().invoke(app, ["demo", "--out", str(tmp_path), *SMALL]).exception, EnoughError)


@pytest.mark.parametrize("folder", ["before", "usual", "otaro"])
def test_a_folder_of_somebody_else_is_left_alone(tmp_path, folder):
    (tmp_path / folder).mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / folder / name).write_text("{}")
    refused = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), *SMALL])
    assert f"{tmp_path / folder} is there and was not made by a demo" in str(refused.exception)
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted([folder, "config.json", "model.safetensors"])


def test_a_wrong_name_costs_nothing(tmp_path):
    (tmp_path / "usual").mkdir()
    (tmp_path / "usual" / MARK).touch()
    (tmp_path / "usual" / "result").touch()
    for flag in ("--model", "--text"):
        assert CliRunner().invoke(app, ["demo", flag, str(tmp_path / "typo.txt"), "--out", str(tmp_path), *SMALL]).exit_code
        assert (tmp_path / "usual" / "result").exists()


def test_a_demo_does_not_replace_what_it_is_given(tmp_path):
    (tmp_path / "usual").mkdir()
    (tmp_path / "usual" / MARK).touch()
    text = tmp_path / "usual" / "text.txt"
    text.write_text("to be measured on")
    refused = CliRunner().invoke(app, ["demo", "--text", str(text), "--out", str(tmp_path), *SMALL])
    assert f"--text {text} lies in {tmp_path / 'usual'}, which this demo would replace" in str(refused.exception)
    assert text.is_file()
