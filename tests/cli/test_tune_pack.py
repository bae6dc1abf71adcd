"""How a run ends: packed plainly, or with codes chosen on its data where held-out data prefer them."""

import json
import math
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

import otaro
from cli.test_tune import SMALL, invoke, otaro_text
from otaro.builtin import MODEL_DIR
from otaro.cli.tune_heldout import HeldOut
from otaro.errors import OtaroError
from otaro.file.coding import read_calibrated

QUICK = [*(flag for flag in SMALL if flag != "--no-calibrate"), "--steps", 2, "--hold-out", 0.4, "--json"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(otaro_text()[:14000])
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The built-in model with its first layer alone: how a run ends does not depend on how many there are."""
    path = tmp_path_factory.mktemp("model") / "small"
    shutil.copytree(MODEL_DIR, path, ignore=shutil.ignore_patterns("*.safetensors"))
    small = AutoModelForCausalLM.from_pretrained(MODEL_DIR)
    small.model.layers, small.config.num_hidden_layers = small.model.layers[:1], 1
    small.save_pretrained(path)
    return path


def tune(model, text, run, *flags):
    done = invoke("tune", model, "--data", text, "--out", run, *QUICK, *flags)
    assert done.exit_code == 0, done.output + repr(done.exception)
    assert not [path.name for path in run.iterdir() if path.name.startswith(".")]
    return json.loads(done.stdout), " ".join(done.stderr.split())


def losses(monkeypatch, calibrated):
    """Have every precision of the calibrated model lose so much."""
    monkeypatch.setattr(HeldOut, "loss", lambda held_out, model: calibrated)


def test_codes_chosen_on_the_data_are_kept_where_held_out_data_prefer_them(
    model, text, tmp_path, monkeypatch
):
    losses(monkeypatch, 0.5)
    run = tmp_path / "run"
    report, told = tune(model, text, run)
    assert "67% of every step's loss is in full precision, as the data are seen once (--full)" in told
    assert (report["full"], report["longest"]) == (2 / 3, 64)
    assert report["packing"]["kept"] == "calibrated"
    assert report["packing"]["calibrated"] == pytest.approx(0.5)
    assert report["packing"]["plain"] > 1
    assert [report["after"][str(p)] for p in otaro.PRECISIONS] == [pytest.approx(math.exp(0.5))] * 6
    assert report["after"]["fp"] > 2  # is not packed, and stays as it was measured
    assert json.loads((run / "perplexity.json").read_text())["after"] == report["after"]
    on = read_calibrated(run / "nested")
    assert (on.text, on.tokens % 512) == ("text.txt", 0)
    assert (run / "nested" / "decoder.json").is_file()
    plain = otaro.pack(run / "model", tmp_path / "plain")
    assert plain.base.header.model != otaro.load(run / "nested", "E5M3").sefp.nested.base.header.model


def test_plain_rounding_is_kept_where_it_is_no_worse(model, text, tmp_path, monkeypatch):
    losses(monkeypatch, 50.0)
    report, _ = tune(model, text, tmp_path / "run")
    assert report["packing"]["kept"] == "plain"
    assert read_calibrated(tmp_path / "run" / "nested") is None
    plain = otaro.pack(tmp_path / "run" / "model", tmp_path / "plain")
    assert (
        plain.base.header.model
        == otaro.load(tmp_path / "run" / "nested", "E5M3").sefp.nested.base.header.model
    )


@pytest.mark.parametrize("flags", [["--lora", 4], ["--method", "fp"], ["--method", "fixed:E5M4"]], ids=str)
def test_what_is_judged_is_the_loss_of_the_file(model, text, tmp_path, flags):
    """At the precisions that were tuned for; of tuning as usual, at all."""
    report, _ = tune(model, text, tmp_path / "run", *flags, "--calibrate")
    packing, own = (
        report["packing"],
        [p for p in otaro.PRECISIONS if "fixed:E5M4" not in flags or str(p) == "E5M4"],
    )
    assert packing["kept"] == min(("plain", "calibrated"), key=packing.get)
    found = math.log(math.prod(report["after"][str(p)] for p in own)) / len(own)
    assert found == pytest.approx(packing[packing["kept"]])


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--hold-out", 0], "nothing is held out to judge it by"),
        (["--reconstruction", "truncate"], "it chooses codes that stand for midpoints, not for --recons"),
    ],
    ids=str,
)
def test_what_cannot_be_calibrated_is_said_before_and_packed_plainly(model, text, tmp_path, flags, why):
    report, told = tune(model, text, tmp_path / "run", *flags)
    assert f"--calibrate: left out, each weight will be rounded by itself: {why}" in told
    assert report["packing"] is None
    assert read_calibrated(tmp_path / "run" / "nested") is None


def test_few_held_out_tokens_judge_nothing(model, text, tmp_path):
    report, told = tune(model, text, tmp_path / "run", "--eval-tokens", 256)
    assert "--calibrate: left out, 256 held-out tokens are too few to judge it by" in told
    assert report["packing"] is None


def test_few_data_are_packed_plainly(model, tmp_path):
    (tmp_path / "few.txt").write_text(otaro_text()[:1000])
    measured_on = ("--hold-out", 0, "--eval-data", tmp_path / "few.txt")
    report, told = tune(model, tmp_path / "few.txt", tmp_path / "run", *measured_on)
    assert (
        "--calibrate: left out, each weight will be rounded by itself: the examples to calibrate on have"
        in told
    )
    assert report["packing"] is None


@pytest.mark.parametrize(
    "error", [OtaroError("layers that branch"), torch.OutOfMemoryError("no room\nat all")], ids=repr
)
def test_whatever_goes_wrong_there_leaves_a_whole_run(model, text, tmp_path, monkeypatch, error):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr("otaro.calibrate.run.pack_calibrated", refuse)
    report, told = tune(model, text, tmp_path / "run")
    assert f"nested is packed plainly: {str(error).splitlines()[0]}" in told
    assert report["packing"] is None
    assert otaro.load(tmp_path / "run" / "nested", "E5M3")


def test_ctrl_c_there_leaves_a_packed_model_and_says_so(model, text, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    run = tmp_path / "run"
    monkeypatch.setattr("otaro.calibrate.run.pack_calibrated", interrupt)
    done = invoke("tune", model, "--data", text, "--out", run, *QUICK)
    assert done.exit_code == 130
    assert f"interrupted: {run}/nested is there, packed plainly, and kept is {run}/checkpoints" in " ".join(
        done.stderr.split()
    )
    assert otaro.load(run / "nested", "E5M3")


def test_a_run_that_was_killed_there_goes_on(model, text, tmp_path, monkeypatch):
    def killed(model, out, *_, **__):
        out.mkdir(parents=True)
        raise SystemExit(9)

    run = tmp_path / "run"
    with monkeypatch.context() as once:
        once.setattr("otaro.calibrate.run.pack_calibrated", killed)
        once.setattr("shutil.rmtree", lambda *_, **__: None)  # as if nobody could tidy up
        assert invoke("tune", model, "--data", text, "--out", run, *QUICK).exit_code == 9
    assert (run / ".calibrated.partial" / "nested").is_dir()
    assert not (run / "result.json").exists()
    again = invoke("tune", "--resume", "--out", run, "--json")
    assert again.exit_code == 0, again.output + repr(again.exception)
    assert "--calibrate: was cut off before, and begins again" in " ".join(again.stderr.split())
    assert json.loads(again.stdout)["packing"]["kept"] in ("plain", "calibrated")
    assert not (run / ".calibrated.partial").exists()
