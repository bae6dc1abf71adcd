"""How a checkpoint says what it was tuned for, and what is not believed of it."""

import json

import pytest

from otaro.errors import CheckpointError, WeightError
from otaro.file.coding import CODING_FILE, Coding, choose_coding, read_coding, write_coding

PAPER = Coding(64, "truncate")


def run_config(home, **options):
    """The config of a run folder of before there was otaro.json, and the folder of its checkpoint."""
    (home / "model").mkdir(parents=True)
    (home / "config.json").write_text(
        json.dumps({"model": "builtin", "options": {"method": "otaro", **options}})
    )
    return home / "model"


def test_a_checkpoint_is_quantized_as_asked_for_then_as_tuned_then_by_default(tmp_path):
    assert read_coding(tmp_path) is None
    assert choose_coding(tmp_path) == Coding(64, "midpoint")
    write_coding(tmp_path, Coding(32, "truncate"))
    assert read_coding(tmp_path) == choose_coding(tmp_path) == Coding(32, "truncate")
    assert choose_coding(tmp_path, group_size=128) == Coding(128, "truncate")
    assert choose_coding(tmp_path, reconstruction="midpoint") == Coding(32, "midpoint")


def test_older_run_folders_say_it_in_their_config(tmp_path, monkeypatch):
    model = run_config(tmp_path / "run", group_size=64, reconstruction="truncate")
    assert choose_coding(model) == PAPER
    monkeypatch.chdir(model)
    assert choose_coding(type(model)()) == PAPER  # given as "."
    write_coding(model, Coding(32))
    assert choose_coding(model) == Coding(32)  # the checkpoint's own word counts


def test_a_config_one_level_up_that_is_no_runs_says_nothing(tmp_path):
    assert choose_coding(run_config(tmp_path / "older")) == Coding()  # of a run before these were options
    (tmp_path / "model").mkdir()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_coding(tmp_path / "model") is None
    other = run_config(tmp_path / "run", group_size=64, reconstruction="truncate").rename(
        tmp_path / "run" / "else"
    )
    assert read_coding(other) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no JSON object"), ("[64]", "no JSON object"), ("[" * 100_000, "no JSON object"),
        ("\xff", "no JSON object"),
        ("{}", "group_size is 'None'"), ('{"group_size": 64}', "reconstruction is 'None'"),
        ('{"group_size": 48, "reconstruction": "midpoint"}', "group_size is '48'"),
        ('{"group_size": true, "reconstruction": "midpoint"}', "group_size is 'True'"),
        ('{"group_size": 64.0, "reconstruction": "midpoint"}', "group_size is '64.0'"),
        ('{"group_size": 1e400, "reconstruction": "midpoint"}', "group_size is 'inf'"),
        ('{"group_size": 64, "reconstruction": ["midpoint"]}', "reconstruction is"),
    ],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_what_says_it_wrongly_is_refused_by_name_unless_nobody_asks(tmp_path, text, words):
    (tmp_path / CODING_FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=f"otaro.json should say how .*{words}.*; mend or remove it"):
        choose_coding(tmp_path, group_size=32)
    assert choose_coding(tmp_path, 32, "truncate") == Coding(32, "truncate")


def test_a_huge_file_is_not_read(tmp_path):
    with (tmp_path / CODING_FILE).open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(CheckpointError, match=r"otaro.json should say"):
        choose_coding(tmp_path)


@pytest.mark.parametrize("size", [0, -32, 33, True, 1 << 32])
def test_a_group_size_that_there_is_not_is_refused(tmp_path, size):
    with pytest.raises(WeightError, match="group_size must be a positive multiple of 32"):
        choose_coding(tmp_path, group_size=size)
