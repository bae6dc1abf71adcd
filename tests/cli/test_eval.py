"""`otaro eval` as a user meets it, and what its record does to the model's folder."""

import json
import shutil

import pytest
from typer.testing import CliRunner

import otaro
from otaro.builtin import MODEL_DIR, heldout_text
from otaro.cli import console
from otaro.cli.main import app
from tests.refusals import misuse


@pytest.fixture
def model(tiny, tmp_path):
    """A nested model to write into."""
    return shutil.copytree(tiny, tmp_path / "model")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "held.txt"
    path.write_text(heldout_text()[:600])
    return path


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def run(*arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result


def test_an_evaluation_is_a_table_json_and_a_record_that_inspect_shows(model, text, task_files, monkeypatch):
    monkeypatch.setattr(console.out, "_width", 200)
    tasks = ("--tasks", "arc_easy,boolq", "--data-dir", task_files, "--limit", 3)
    words = (
        "eval",
        model,
        "--text",
        text,
        "--window",
        64,
        "--divergence",
        "--precision",
        "E5M8,E5M3",
        *tasks,
    )
    shown = run(*words).stdout
    report = json.loads(run(*words, "--json").stdout)
    assert report["entries"] == json.loads((model / "quality.json").read_text())["entries"]
    assert [(entry["precision"], entry["kind"]) for entry in report["entries"]] == [
        *(("E5M8", "perplexity"), ("E5M8", "task"), ("E5M8", "task")),
        *(("E5M3", "perplexity"), ("E5M3", "divergence"), ("E5M3", "task"), ("E5M3", "task")),
    ]
    fine, coarse = (
        next(e["value"] for e in report["entries"] if e["precision"] == name) for name in ("E5M8", "E5M3")
    )
    heading = shown[shown.index("Quality by precision") :]
    for word in (
        "perplexity",
        "cost",
        "KL",
        "arc_easy",
        "acc_norm",
        "first 3",
        "average",
        "tokens/s",
        "held.txt",
        "64/64",
    ):
        assert word in heading
    row = next(line for line in shown.splitlines() if "E5M3 " in line and "±" in line)
    assert f"{coarse:.2f}" in row
    assert f"{coarse / fine - 1:+.1%}" in row
    scores = [
        entry["value"]
        for entry in report["entries"]
        if entry["kind"] == "task" and entry["precision"] == "E5M3"
    ]
    assert report["averages"]["E5M3"]["value"] == pytest.approx(sum(scores) / 2)
    assert f"{50 * sum(scores):.1f} ±" in row
    inspected = run("inspect", model).stdout
    assert row in inspected
    assert json.loads(run("inspect", model, "--json").stdout)["quality"]["entries"] == report["entries"]


def test_a_narrow_terminal_gets_the_tasks_in_a_table_of_their_own(model, task_files, text, monkeypatch):
    monkeypatch.setattr(console.out, "_width", 80)
    tasks = ("--tasks", "arc_easy,boolq", "--data-dir", task_files, "--limit", 3)
    words = ("eval", model, "--text", text, "--window", 64, "--divergence", "-p", "E5M8,E5M3")
    shown = run(*words, *tasks).stdout
    assert "Quality by task" in shown
    assert "arc_easy" in shown
    assert "…" not in shown
    assert max(len(line) for line in shown.splitlines() if line[0] in "┏┃┡│└") <= 80


def test_a_narrow_terminal_gets_a_table_for_each_text(model, text, tmp_path, monkeypatch):
    other = tmp_path / "another_text.txt"
    other.write_text(text.read_text()[:300])
    words = ("--window", 64, "--divergence", "--precision", "E5M8,E5M3")
    for each in (text, other):
        run("eval", model, "--text", each, *words)
    for width, tables in ((80, 2), (200, 1)):
        monkeypatch.setattr(console.out, "_width", width)
        shown = run("inspect", model).stdout
        assert shown.count("Quality by precision") == tables
        assert all(word in shown for word in (text.name, other.name, "same token"))
        assert "…" not in shown


def test_devices_are_told_apart_where_there_is_more_than_one(model, text, monkeypatch):
    monkeypatch.setattr(console.out, "_width", 200)
    words = ("eval", model, "--text", text, "--window", 64, "--precision", "E5M3")
    assert " cpu" not in run(*words).stdout
    record = json.loads((model / "quality.json").read_text())
    elsewhere = {**record["entries"][0], "device": "abacus", "tokens_per_second": 2.0}
    (model / "quality.json").write_text(json.dumps({**record, "entries": [*record["entries"], elsewhere]}))
    shown = run("inspect", model).stdout
    assert shown.count("on cpu") == shown.count("on abacus") == 2  # of perplexity and of tokens/s


def test_a_folder_with_a_record_is_as_good_as_before(model, text, tmp_path):
    before = otaro.load(model, "E5M4").lm_head.weight
    run("eval", model, "--text", text, "--window", 64, "--precision", "E5M3")
    assert json.loads(run("verify", model, "--json").stdout)["ok"]
    loaded = otaro.load(model, "E5M4")
    assert (loaded.lm_head.weight == before).all()
    loaded.save_pretrained(tmp_path / "saved")
    shutil.copy(model / "quality.json", tmp_path / "saved")
    loaded.save_pretrained(tmp_path / "saved")
    kept = (tmp_path / "saved" / "quality.json").read_bytes()
    assert kept == (model / "quality.json").read_bytes()  # it is about the same model
    run("pack", "builtin", model, "--overwrite", "--reconstruction", "truncate")
    assert not (model / "quality.json").exists()


def test_an_ordinary_checkpoint_keeps_its_record_and_the_builtin_model_only_where_told(text, tmp_path):
    checkpoint = shutil.copytree(MODEL_DIR, tmp_path / "checkpoint")
    words = ("--text", text, "--window", 64, "--precision", "fp,E5M3")
    own = json.loads(run("eval", checkpoint, *words, "--json").stdout)
    assert (own["quality"], own["reference"]) == (str(checkpoint / "quality.json"), "fp")
    assert [entry["precision"] for entry in own["entries"]] == ["fp", "E5M3"]
    nowhere = run("eval", "builtin", *words)
    assert "not kept; --out DIR" in nowhere.stdout
    assert not (MODEL_DIR / "quality.json").exists()
    there = json.loads(run("eval", "builtin", *words, "--out", tmp_path / "there", "--json").stdout)
    assert [entry["value"] for entry in there["entries"]] == [entry["value"] for entry in own["entries"]]
    assert json.loads((tmp_path / "there" / "quality.json").read_text())["entries"] == there["entries"]


def test_the_record_of_another_model_is_neither_shown_nor_added_to(model, text):
    run("eval", model, "--text", text, "--window", 64, "--precision", "E5M3")
    record = json.loads((model / "quality.json").read_text())
    (model / "quality.json").write_text(json.dumps({**record, "model": "0" * 64}))
    inspected = run("inspect", model)
    assert "about another model (000000000000)" in inspected.stderr
    assert "perplexity" not in inspected.stdout
    assert json.loads(run("inspect", model, "--json").stdout)["quality"] is None
    refused = invoke("eval", model, "--text", text)
    assert "about another model" in str(refused.exception)
    assert json.loads((model / "quality.json").read_text())["model"] == "0" * 64


def test_a_damaged_record_does_not_hide_the_model(model):
    (model / "quality.json").write_text('{"schema": 1, "model": "\x1b[2J"}')
    inspected = run("inspect", model)
    assert "E5M3" in inspected.stdout
    assert "no quality record that can be read" in inspected.stderr.replace("\n", " ")
    assert "\x1b[2J" not in inspected.output


def test_an_interruption_says_what_is_kept(model, text, monkeypatch):
    from otaro.evaluate import run as evaluation

    measure, done = evaluation.read, []

    def once(*arguments, **options):
        if done:
            raise KeyboardInterrupt
        done.append(1)
        return measure(*arguments, **options)

    words = ("eval", model, "--text", text, "--window", 64, "--precision", "E5M8,E5M3")
    with monkeypatch.context() as patched:
        patched.setattr(evaluation, "read", once)
        done.append(1)
        assert "interrupted; nothing was finished yet" in invoke(*words).stderr
        done.clear()
        stopped = invoke(*words)
    assert stopped.exit_code == 130
    assert "interrupted; what was finished is kept in" in stopped.stderr
    assert len(json.loads((model / "quality.json").read_text())["entries"]) == 1
    assert len(json.loads(run(*words, "--json").stdout)["entries"]) == 2


def test_what_a_reader_should_know_is_said_also_when_the_numbers_come_from_the_record(model, text, tmp_path):
    row = {"question": "is it", "passage": "word " * 600, "idx": 0, "label": 1}
    (tmp_path / "boolq.json").write_text(json.dumps([row]))
    words = ("eval", model, "--text", text, "--precision", "E5M8", "--tasks", "boolq", "--data-dir", tmp_path)
    for shown in (run(*words).stdout, run(*words).stdout, run("inspect", model).stdout):
        assert "fewer than the window of 512: measured as one short window" in shown
        assert "boolq: 2 requests did not fit the model's context and lost their beginning" in shown


def test_help_explains_every_option():
    shown = run("eval", "--help").stdout
    assert all(
        option in shown for option in ("--text", "--tasks", "--data-dir", "--divergence", "--again", "--out")
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "there is nothing to measure: give --text FILE"),
        (
            ["--tasks", "boolq", "--window", "64"],
            "--window says how to measure with --text, which is not given",
        ),
        (["--tasks", "boolq", "--divergence"], "--divergence says how to measure with --text"),
        (["--text", "builtin", "--limit", "5"], "--limit says how to measure with --tasks"),
        (["--text", "builtin", "--precision", "E4"], "--precision E4: choose from all, fp, E5M8"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_make_no_sense_are_refused_below_the_usage(tiny, options, words):
    assert misuse(invoke("eval", tiny, *options)).startswith(words)
    assert not (tiny / "quality.json").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--text", "builtin", "--window", "1024"], "a window of 1024 tokens is more than the 512 positions"),
        (
            ["--text", "builtin", "--window", "64", "--stride", "128"],
            "the stride must be between 1 and the window of 64",
        ),
        (["--text", "builtin", "--precision", "fp"], "has no fp"),
        (["--text", "builtin", "--device", "abacus"], "unknown device"),
        (["--tasks", "boolq", "--data-dir", "nowhere"], "--data-dir nowhere has no boolq.jsonl.gz"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_measured_is_refused(tiny, options, words):
    result = invoke("eval", tiny, *options)
    assert isinstance(result.exception, otaro.OtaroError), result.output
    assert words in str(result.exception)
    assert not (tiny / "quality.json").exists()


def test_a_model_without_a_tokenizer_is_refused(make_nested):
    result = invoke("eval", make_nested("llama"), "--text", "builtin")
    assert "has no tokenizer; copy the tokenizer files of the original model into it" in str(result.exception)
