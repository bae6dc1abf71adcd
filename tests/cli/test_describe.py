"""`otaro describe`, and what `otaro pack` says of it."""

import json

from typer.testing import CliRunner

from otaro.cli.main import app


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result


def test_pack_describes_the_model_and_describe_does_so_again(tmp_path):
    out = tmp_path / "out"
    assert json.loads(run("pack", "builtin", out, "--json").stdout)["decoder"] is True
    before = (out / "decoder.json").read_text()
    (out / "decoder.json").unlink()
    assert "wrote" in run("describe", out).stdout
    assert (out / "decoder.json").read_text() == before


def test_pack_says_where_no_decoder_serves(make_checkpoint, tmp_path):
    said = " ".join(run("pack", make_checkpoint("gpt2"), tmp_path / "out").stdout.split())
    assert "no decoder.json" in said
    assert "its architecture is gpt2" in said
    assert not (tmp_path / "out" / "decoder.json").exists()
