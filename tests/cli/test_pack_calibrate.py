"""`otaro pack --calibrate`."""

import json

import pytest
from typer.testing import CliRunner

from otaro.cli.main import app
from otaro.export.run import export
from otaro.file.coding import read_calibrated
from otaro.file.io import NestedDirectory
from tests.refusals import misuse


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_builtin_model_is_calibrated_on_the_builtin_text(tmp_path):
    done = invoke("pack", "builtin", tmp_path / "out", "--calibrate", "builtin", "--samples", 2, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout.splitlines()[-1])
    windows = json.loads((tmp_path / "out" / "otaro.json").read_text())["calibrated"]["windows"]
    assert report["calibrated"]["tokens"] == windows[0] * windows[1]
    NestedDirectory(tmp_path / "out").verify()
    assert (
        f"calibrated on {report['calibrated']['tokens']:,} tokens of builtin"
        in invoke("inspect", tmp_path / "out").stdout
    )
    told = json.loads(invoke("inspect", tmp_path / "out", "--json").stdout.splitlines()[-1])
    assert told["calibrated"] == {"text": "builtin", "tokens": report["calibrated"]["tokens"]}


@pytest.mark.parametrize(
    "stated",
    [
        {},
        {"calibrated": 7},
        {"calibrated": {"text": "a", "windows": [1]}},
        {"calibrated": {"text": "a", "windows": [-1, -1]}},
        {"calibrated": {"text": ["a"], "windows": [1, 512]}},
    ],
)
def test_a_strange_record_is_not_shown_as_a_calibration(stated, tmp_path):
    (tmp_path / "otaro.json").write_text(json.dumps(stated))
    assert read_calibrated(tmp_path) is None


def test_the_name_of_a_text_controls_no_terminal(tmp_path):
    record = {"text": "\x1b[2J" + "a" * 999, "windows": [2, 512]}
    (tmp_path / "otaro.json").write_text(json.dumps({"calibrated": record}))
    found = read_calibrated(tmp_path)
    assert found.tokens == 1024
    assert found.text.isprintable()
    assert len(found.text) < 300


def test_what_is_packed_plainly_is_named(tmp_path, monkeypatch):
    """A window of 256 tokens is fewer than the 384 inputs of `down`."""
    monkeypatch.setattr("otaro.calibrate.text.LENGTH", 256)
    done = invoke("pack", "builtin", tmp_path / "out", "--calibrate", "builtin", "--samples", 1)
    assert done.exit_code == 0, done.output
    assert "calibrated on 256 tokens of builtin" in " ".join(done.stdout.split())
    assert (
        "packed plainly: model.layers.0.mlp.down_proj.weight: it reads fewer tokens than it has inputs"
        in done.stdout
    )


def test_a_gguf_file_is_calibrated_with_the_tokenizer_inside(tiny, tmp_path):
    pytest.importorskip("gguf", reason="gguf is not installed")
    export(tiny, tmp_path / "m.gguf", precision="E5M8", to="gguf", type="F16")
    done = invoke("pack", tmp_path / "m.gguf", tmp_path / "out", "--calibrate", "builtin", "--samples", 2)
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "out" / "otaro.json").read_text()).keys() >= {"source", "calibrated"}
    assert {path.name for path in tmp_path.iterdir()} == {"m.gguf", "out"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--calibrate", "no-such-file.txt"], "--calibrate no-such-file.txt does not exist"),
        (["--calibrate", ""], "--calibrate is empty"),
        (["--calibrate", "builtin", "--device", "foo"], "unknown device 'foo'"),
        (["--calibrate", "builtin", "--device", "cuda:99"], "device 'cuda:99': this"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_their_own_words(words, said, tmp_path):
    done = invoke("pack", "builtin", tmp_path / "out", *words)
    assert done.exit_code != 0
    assert said in str(done.exception) + " ".join(done.output.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("option", "value"), [("--samples", 3), ("--device", "cuda")])
def test_options_of_calibrating_alone_are_refused_without_it(option, value, tmp_path):
    told = misuse(invoke("pack", "builtin", tmp_path / "out", option, value))
    assert told.startswith(f"{option} is for packing with --calibrate TEXT")
    assert list(tmp_path.iterdir()) == []
