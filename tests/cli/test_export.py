"""`otaro export` at the command line."""

import json

import pytest
from typer.testing import CliRunner

from otaro.cli.main import app
from otaro.errors import OtaroError


def run(*arguments):
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def test_it_says_that_everything_is_exact(make_nested, tmp_path):
    done = run(make_nested("llama"), tmp_path / "out", "--precision", "E5M3", "--to", "hf")
    assert done.exit_code == 0, done.output
    assert "tensors: 21 in float16" in done.output
    assert "read back: all 21 tensors equal E5M3 bit for bit" in done.output


def test_it_says_where_and_how_far_it_is_not(make_nested, tmp_path):
    done = run(make_nested("llama"), tmp_path / "m.gguf", "-p", "E5M8", "--to", "gguf", "--type", "F16")
    assert done.exit_code == 0, done.output
    assert "read back: 5 of 21 tensors equal E5M8 bit for bit; in F16 16 are rounded" in done.output
    assert "the model has no tokenizer" in done.output


def test_json_says_it_in_numbers(make_nested, tmp_path):
    done = run(make_nested("llama"), tmp_path / "out", "-p", "E5M4", "--to", "mlx", "--json")
    told = json.loads(done.output)
    assert (told["exact"], told["target"], told["precision"]) == (True, "mlx", "E5M4")
    assert sum(one["tensors"] for one in told["types"]) == 21
    assert told["bytes"] == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())


def test_refusals_are_errors_of_ours(make_nested, tmp_path):
    done = run(make_nested("llama"), tmp_path / "out", "-p", "E5M8", "--to", "compressed-tensors")
    assert isinstance(done.exception, OtaroError)
    assert run(make_nested("llama"), tmp_path / "out", "-p", "E5M8", "--to", "onnx").exit_code == 2


@pytest.mark.parametrize("missing", ["--to", "--precision"])
def test_what_must_be_said(missing, make_nested, tmp_path):
    options = {"--to": "hf", "--precision": "E5M3"}
    given = [word for name, value in options.items() if name != missing for word in (name, value)]
    assert run(make_nested("llama"), tmp_path / "out", *given).exit_code == 2
