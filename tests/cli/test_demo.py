"""`otaro demo`: the story has its table, its samples and its page, and replaces only an earlier demo."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from otaro.builtin.documentation import documentation_text
from otaro.cli import demo, demo_story
from otaro.cli.demo import MARK
from otaro.cli.main import app
from otaro.file.io import NestedDirectory
from otaro.file.summary import summarize

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


def test_one_file_shows_what_it_can(told):
    """A text whose precision changes, a switch's time, an upgrade by one shard with the bits of the whole."""
    folder, result = told
    assert [name for name, _ in result["changing"]] == ["E5M8", "E5M3", "E5M5", "E5M8"]
    assert "".join(text for _, text in result["changing"])
    assert all(0 < seconds < 1 for seconds in result["switch"].values())
    assert all(rate > 0 for rate in result["decode"].values())
    nested, upgraded = folder / "out" / "otaro" / "nested", folder / "out" / "upgrade"
    assert result["upgrade"] == {
        "shard": "model-m4.safetensors",
        "bytes": (nested / "model-m4.safetensors").stat().st_size,
        "same": True,
    }
    assert sorted(path.name for path in upgraded.glob("*.safetensors")) == [
        "model-m3.safetensors",
        "model-m4.safetensors",
    ]
    timed = json.loads((folder / "out" / "otaro" / "bench.json").read_text())
    assert {row["precision"]: row["decode"] for row in timed["precisions"]} == result["decode"]


def test_for_people_it_says_what_to_see_and_what_to_type_next(told, capsys):
    folder, result = told
    nested = folder / "out" / "otaro" / "nested"
    summary = summarize(NestedDirectory(nested))
    demo._show(summary, result["perplexity"])
    bench = SimpleNamespace(precisions=[], machine="a Xeon", threads=2, device="cpu", kernels="cpu:avx2")
    for row in summary.precisions:
        figures = {"decode": 100.0, "weight_bytes": 5, "switch": 4e-6, "bandwidth_share": 0.1}
        bench.precisions.append(SimpleNamespace(precision=row.precision, **figures))
    upgraded = demo_story.Upgrade(
        Path("there"), "model-m4.safetensors", "E5M3", "E5M4", "it lacks m4", 5, True
    )
    demo_story.show(summary, [("E5M8", "one"), ("E5M3", "[two]")], "The prompt", upgraded, bench)
    demo._next(Path("report.html"), Path("demo") / "nested")
    said = capsys.readouterr().out
    assert "Perplexity on unseen text" in said
    assert "  prompt  The prompt\n  E5M8    one\n  E5M3    [two]\n" in said
    assert "it answers:\n  it lacks m4\n" in said
    assert "speed hardly follows the bits here" in said
    assert "docs/" not in said  # who installed a wheel has none
    story = said[said.index("One text") : said.index("All of it with figures")]
    assert max(map(len, story.splitlines())) <= 80
    assert "4 us" in said
    commands = re.findall(
        r"^  otaro (\w+) ", re.sub(r"^  \S+/otaro ", "  otaro ", said, flags=re.MULTILINE), re.MULTILINE
    )
    assert commands == ["chat", "fit", "pack"]


@pytest.mark.parametrize(
    ("usual", "ours", "words"),
    [
        (
            (10.0, 12.0),
            (10.08, 11.4),
            "nowhere more than 0.8% behind tuning as usual (at E5M8); it is ahead at E5M3 (5.0%).",
        ),
        ((10.0, 12.0), (9.9, 12.0), "level with tuning as usual, or ahead; it is ahead at E5M8 (1.0%)."),
        (
            (10.0, 12.0),
            (10.4, 12.6),
            "nowhere more than 5.0% behind tuning as usual (at E5M3); it is ahead at none.",
        ),
    ],
)
def test_the_words_follow_the_figures_whichever_way_they_came_out(usual, ours, words):
    names = ("E5M8", "E5M3")
    said = demo.verdict(names, dict(zip(names, usual, strict=True)), dict(zip(names, ours, strict=True)))
    assert words in said
    assert f"tuned as usual by {usual[1] / usual[0] - 1:+.1%}" in said


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
    assert isinstance(
        CliRunner().invoke(app, ["demo", "--out", str(tmp_path), *SMALL]).exception, EnoughError
    )


@pytest.mark.parametrize("folder", ["before", "usual", "otaro"])
def test_a_folder_of_somebody_else_is_left_alone(tmp_path, folder):
    (tmp_path / folder).mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / folder / name).write_text("{}")
    refused = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), *SMALL])
    assert f"{tmp_path / folder} is there and was not made by a demo" in str(refused.exception)
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted(
        [folder, "config.json", "model.safetensors"]
    )


def test_a_wrong_name_costs_nothing(tmp_path):
    (tmp_path / "usual").mkdir()
    (tmp_path / "usual" / MARK).touch()
    (tmp_path / "usual" / "result").touch()
    for flag in ("--model", "--text"):
        assert (
            CliRunner()
            .invoke(app, ["demo", flag, str(tmp_path / "typo.txt"), "--out", str(tmp_path), *SMALL])
            .exit_code
        )
        assert (tmp_path / "usual" / "result").exists()


def test_a_page_that_is_no_report_stays(tmp_path):
    (tmp_path / "usual").mkdir()
    (tmp_path / "usual" / MARK).touch()
    (tmp_path / "report.html").write_text("mine")
    refused = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), *SMALL])
    assert f"{tmp_path / 'report.html'} is there, and no report of ours" in str(refused.exception)
    assert (tmp_path / "report.html").read_text() == "mine"
    assert (tmp_path / "usual" / MARK).exists()  # nothing was made room for


def test_a_demo_does_not_replace_what_it_is_given(tmp_path):
    (tmp_path / "usual").mkdir()
    (tmp_path / "usual" / MARK).touch()
    text = tmp_path / "usual" / "text.txt"
    text.write_text("to be measured on")
    refused = CliRunner().invoke(app, ["demo", "--text", str(text), "--out", str(tmp_path), *SMALL])
    assert f"--text {text} lies in {tmp_path / 'usual'}, which this demo would replace" in str(
        refused.exception
    )
    assert text.is_file()
