"""`otaro tune` as a user meets it, on the built-in model."""

import errno
import json
import math
import os
import shlex
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

import otaro
from otaro.builtin import MODEL_DIR
from otaro.cli.main import app
from otaro.cli.tune import _show
from otaro.cli.tune_ends import explained
from otaro.errors import TargetError
from otaro.evaluate.run_folder import Run
from otaro.evaluate.subject import Subject
from otaro.file.atomic import alone
from otaro.file.io import NestedDirectory
from otaro.idle import idle
from otaro.tune.trainer import OtaroTrainer
from tests.refusals import misuse

SMALL = ["--steps", "6", "--batch-size", "4", "--sequence-length", "64", "--save-every", "4", "--lr", "1e-3"]
SMALL.append("--no-calibrate")  # whose tests are in test_tune_pack.py


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(otaro_text())
    return path


def otaro_text() -> str:
    from otaro.builtin import topics_training_text

    return topics_training_text()[:20000]


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def tune(text, out, *more):
    return invoke("tune", "builtin", "--data", text, "--out", out, *SMALL, *more)


def steps_of(run):
    """The log, without the only field that time changes."""
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines]


def test_a_run_leaves_a_checkpoint_a_nested_model_and_a_folder_that_tells_everything(text, tmp_path):
    result = tune(text, tmp_path / "run", "--json")
    assert result.exit_code == 0, result.output + repr(result.exception)
    report = json.loads(result.stdout)
    names = ["fp", *map(str, otaro.PRECISIONS)]
    assert list(report["before"]) == list(report["after"]) == names
    stated = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stated["options"]["method"] == "uniform"
    assert stated["training"]["steps"] == 6
    assert set(stated["versions"]) == {"otaro", "torch", "transformers", "python"}
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in log[:-1]] == list(range(1, 7))
    assert report["average"] == {name: log[-1][name] for name in ("averaged", "last", "average", "kept")}
    # what is measured is what was kept
    kept = math.log(math.prod(report["after"][name] for name in names[1:])) / 6
    assert kept == pytest.approx(min(report["average"]["last"], report["average"]["average"]))
    model = otaro.load(tmp_path / "run" / "nested", "E5M3")
    packed_again = otaro.pack(tmp_path / "run" / "model", tmp_path / "again")
    assert packed_again.base.header.model == model.sefp.nested.base.header.model


def test_what_was_tuned_is_what_is_opened_and_measured(text, tmp_path):
    """A bfloat16 model is tuned in float32: a config with bfloat16 would have readers round the weights."""
    from otaro.builtin import MODEL_DIR

    source = shutil.copytree(MODEL_DIR, tmp_path / "source")
    AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.bfloat16).save_pretrained(source)
    tuned = CliRunner().invoke(
        app, ["tune", str(source), "--data", str(text), "--out", str(tmp_path / "run"), *SMALL]
    )
    assert tuned.exit_code == 0, tuned.output + repr(tuned.exception)
    stored = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in stored.values())
    subject = Subject(str(tmp_path / "run" / "model"))
    assert subject.config.dtype == torch.float32
    for model in (AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model"), subject.at("fp")):
        found = model.state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())
    norm = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "nested").model.norm.weight
    assert torch.equal(norm, stored["model.norm.weight"])


@pytest.mark.slow  # forty steps
def test_tuning_for_all_precisions_helps_the_coarsest_most(text, tmp_path):
    result = tune(text, tmp_path / "run", "--steps", 40, "--lr", "1e-3", "--json")
    assert result.exit_code == 0, result.output + repr(result.exception)
    report = json.loads(result.stdout)
    change = {name: report["after"][name] / report["before"][name] for name in report["before"]}
    assert change["E5M3"] < change["E5M8"]
    assert (
        report["after"]["E5M3"] / report["after"]["E5M8"]
        < report["before"]["E5M3"] / report["before"]["E5M8"]
    )


def test_the_recipe_of_the_paper_delays_updates(text, tmp_path):
    result = tune(text, tmp_path / "run", "--recipe", "paper", "--delay", 2, "--steps", 8, "--json")
    assert result.exit_code == 0, result.output + repr(result.exception)
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    low = [record for record in log if record.get("precision") in ("E5M4", "E5M3")]
    assert [record["applied"] for record in low[:2]] == [False, True]
    stated = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (stated["training"]["optimizer"], stated["options"]["reconstruction"]) == ("sgd", "truncate")


def read(stated):
    """What a run states, without the options that it does not read."""
    unread = idle({**stated["options"], **stated["training"]})
    parts = {
        part: {k: v for k, v in stated[part].items() if k not in unread} for part in ("options", "training")
    }
    return {**stated, **parts}


IDLE = [
    (
        ["--method", "fp", "--distill", "0.5"],
        "--distill 0.5 has no effect with --method fp: all of its steps are",
    ),
    (
        ["--lambda", "3"],
        "--lambda 3 has no effect with --recipe best: it is for --method otaro and bps; leave it out",
    ),
    (["--recipe", "best", "--lambda", "3"], "--lambda 3 has no effect with --recipe best: "),
    (
        ["--recipe", "best", "--method", "uniform", "--lambda", "3"],
        "--lambda 3 has no effect with --method uniform: it is for --method otaro and bps; "
        "--recipe best has no effect with --method uniform: ",
    ),
    (
        ["--method", "uniform", "--recipe", "best"],
        "--recipe best has no effect with --method uniform: a method that is named comes plain, without what "
        "that recipe adds; leave it out",
    ),
    (["--recipe", "best", "--method", "fp"], "--recipe best has no effect with --method fp: "),
    (["--recipe=best", "--method=otaro"], "--recipe best has no effect with --method otaro: "),
    (["--method", "fp", "--lambda", "3"], "--lambda 3 has no effect with --method fp: "),
    (["--method", "fp", "--precisions", "E5M4"], "--precisions E5M4 has no effect with --method fp: "),
    (
        ["--method", "bps", "--delay", "5"],
        "--delay 5 has no effect with --method bps: it is for --method otaro; ",
    ),
    (
        ["--ultra-low", "E5M4", "--accumulate", "mean"],
        "--ultra-low E5M4 has no effect with --recipe best: it is for --method otaro; "
        "--accumulate mean has no effect with --recipe best: it is for --method otaro; leave them out",
    ),
    (["--accumulator", "host"], "--accumulator host has no effect with --recipe best: "),
    (["--leftover", "apply"], "--leftover apply has no effect with --recipe best: "),  # the default, too
    (
        ["--recipe", "paper", "--weights", "1,1,1,1,1,1"],
        "--weights 1,1,1,1,1,1 has no effect with --recipe paper: ",
    ),
    (
        ["--method", "uniform", "--distill-at", "E5M4"],
        "--distill-at E5M4 has no effect with --method uniform: ",
    ),
    (
        ["--distill", "0", "--distill-at", "E5M4"],
        "--distill-at E5M4 has no effect with --distill 0: nothing is ",
    ),
    (
        ["--distill-at", "E5M8"],
        "--distill-at E5M8 has no effect with --recipe best: no step is at a precision of",
    ),
    (
        ["--distill", "0.2", "--precisions", "E5M8,E5M7"],
        "--distill 0.2 has no effect with --precisions E5M8,E5M7: no step is at a precision of --distill-at",
    ),
    (
        ["--recipe", "paper", "--calibrate"],
        "--calibrate has no effect with --recipe paper: it chooses codes that",
    ),
    (
        ["--reconstruction", "truncate", "--calibrate"],
        "--calibrate has no effect with --reconstruction truncate: ",
    ),
    (["--fsdp", "--calibrate"], "--calibrate has no effect with --fsdp: a sharded model cannot be judged; "),
    (
        ["--hold-out", "0", "--average", "0.3"],
        "--average 0.3 has no effect with --hold-out 0: nothing is held out",
    ),
    (
        ["--hold-out", "0", "--eval-tokens", "99"],
        "--eval-tokens 99 has no effect with --hold-out 0: nothing is ",
    ),
    (
        ["--hold-out", "0.1", "--eval-data", "x.txt"],
        "--hold-out 0.1 has no effect with --eval-data x.txt: that is ",
    ),
]


@pytest.mark.parametrize(
    ("flags", "words"), IDLE, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_an_option_that_has_no_effect_is_refused_beside_the_one_that_decides_so(tmp_path, flags, words):
    words_before = ["tune", "builtin", "--data", "builtin", "--out", tmp_path / "run"]
    assert misuse(invoke(*words_before, *flags)).startswith(words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "flags",
    [
        [
            "--method",
            "fp",
            "--distill",
            "0",
            "--full",
            "0",
            "--no-calibrate",
            "--average",
            "0",
            "--l2-sp",
            "0",
        ],
        ["--hold-out", "0", "--eval-data", "x.txt", "--eval-tokens", "99", "--calibrate", "--average", "0.5"],
        ["--hold-out", "0", "--average", "0", "--no-calibrate"],
        ["--recipe", "paper", "--lambda", "3", "--delay", "5", "--ultra-low", "E5M3", "--leftover", "apply"],
        ["--recipe", "paper", "--method", "fp", "--lr", "1e-4"],
        ["--recipe", "paper", "--method", "otaro"],
        ["--recipe", "best"],
        ["--method", "bps", "--lambda", "0", "--distill", "0.5", "--distill-at", "E5M3", "--full", "0.5"],
        ["--method", "fixed:E5M3", "--distill", "0.5", "--calibrate", "--group-size", "32"],
        ["--weights", "1,1,1,1,1,1", "--distill-at", "E5M8"],
    ],
    ids=" ".join,
)
def test_what_is_read_or_asks_for_nothing_is_taken(monkeypatch, tmp_path, flags):
    monkeypatch.setattr("otaro.cli.tune.TuningRun.go", lambda run: {})
    done = invoke("tune", "builtin", "--data", "builtin", "--out", tmp_path / "run", "--json", *flags)
    assert done.exit_code == 0, done.output + repr(done.exception)


@pytest.mark.parametrize(
    ("flags", "rate", "added"),
    [
        ([], 5e-5, {"weights": [0.0, 0.0, 0.0, 1.0, 1.25, 2.6], "full": None, "distill": 0.5, "l2_sp": 0.0}),
        ([], 5e-5, {"calibrate": True, "average": 0.5}),
        (["--method", "fp"], 5e-5, {"weights": [1.0] * 6, "full": 0.0, "distill": 0.0, "average": 0.0}),
        (["--method", "fp", "--calibrate"], 5e-5, {"full": 0.0, "calibrate": True, "average": 0.0}),
        (
            ["--method", "bps", "--l2-sp", "5"],
            5e-5,
            {"full": 0.0, "distill": 0.0, "l2_sp": 5.0, "average": 0.0},
        ),
        (["--method", "fixed:E5M4", "--lr", "2e-4", "--full", "0.5"], 2e-4, {"full": 0.5, "distill": 0.0}),
        (["--no-calibrate"], 5e-5, {"full": None, "calibrate": False}),
        (["--average", "0"], 5e-5, {"full": None, "distill": 0.5, "average": 0.0}),
        (
            ["--method", "uniform"],
            5e-5,
            {"weights": [1.0] * 6, "full": 0.0, "distill": 0.0, "calibrate": False},
        ),
        (["--full", "0.25", "--no-calibrate"], 5e-5, {"full": 0.25, "distill": 0.5, "calibrate": False}),
        (
            ["--recipe", "paper", "--method", "bps"],
            1e-5,
            {"full": 0.0, "calibrate": False, "reconstruction": "truncate"},
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_recipe_adds_is_for_its_own_method_unless_asked_for(
    monkeypatch, tmp_path, flags, rate, added
):
    chosen = []
    monkeypatch.setattr("otaro.cli.tune.TuningRun.go", lambda run: chosen.append(run) or {})
    done = CliRunner().invoke(
        app, ["tune", "builtin", "--data", "builtin", "--out", str(tmp_path), "--json", *flags]
    )
    assert done.exit_code == 0, done.output + repr(done.exception)
    stated = chosen[0].stated
    assert stated["training"]["lr"] == rate
    assert {name: stated["options"][name] for name in added} == added
    # as the report has it: it makes the same run again, as far as it was read
    told = Run("run", tmp_path, stated, *[None] * 9).command
    assert CliRunner().invoke(app, [*shlex.split(told)[1:], "--json"]).exit_code == 0
    assert read(chosen[1].stated) == {**read(stated), "recipe": "best"}


# of other methods: tests/tune/test_resume.py
@pytest.mark.parametrize("flags", [[], ["--lora", "4"]], ids=" ".join)
def test_resuming_needs_no_other_option_and_ends_in_the_same_weights(text, tmp_path, flags):
    if "--lora" in flags:
        pytest.importorskip("peft", reason="peft is not installed")
    run = tmp_path / "run"
    whole = json.loads(tune(text, run, *flags, "--json").stdout)
    weights = load_file(run / "model" / "model.safetensors")
    for gone in (run / "checkpoints" / "checkpoint-6", run / "nested"):  # else it would be complete
        shutil.rmtree(gone)
    log = steps_of(run)
    again = invoke("tune", "--resume", "--out", run, "--json")
    assert again.exit_code == 0, again.output + repr(again.exception)
    assert f"--resume: goes on from {run}/checkpoints/checkpoint-4" in again.stderr.splitlines()
    assert json.loads(again.stdout)["after"] == whole["after"]
    assert steps_of(run) == log
    resumed = load_file(run / "model" / "model.safetensors")
    assert all(torch.equal(resumed[name], weight) for name, weight in weights.items())


@pytest.fixture(scope="module")
def done(text, tmp_path_factory):
    """A finished run of six steps; do not write into it."""
    run = tmp_path_factory.mktemp("done") / "run"
    result = tune(text, run)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return run


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            ["--distill", "0.1", "--lr", "1e-5"],
            "--distill is 0.1, the run has 0.5; --lr is 1e-05, the run has 0.001.",
        ),
        (["--recipe", "paper"], "--recipe is paper, the run has best."),
        (["--method", "bps"], "--method is bps, the run has uniform."),
        (["--lambda", "2"], "--lambda is 2.0, the run has 5.0."),
        (
            ["--weights", "1,1,1,1,1,2"],
            "--weights is 1.0,1.0,1.0,1.0,1.0,2.0, the run has 0.0,0.0,0.0,1.0,1.25,2.6.",
        ),
        (["--bf16"], "--bf16 is on, the run has off."),
        (["--lora", "4"], "--lora is 4, the run has not given."),
        (["--hold-out", "0.2"], "--hold-out is 0.2, the run has 0.05."),
        (["--steps", "5"], "--steps is 5, the run has 6: it may be raised, not lowered."),
        (["--epochs", "3"], "--epochs is 3.0, but the run counts --steps."),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_that_differ_from_those_of_a_run_are_named_with_both_values(done, more, words):
    result = invoke("tune", "--resume", "--out", done, *more)
    assert isinstance(result.exception, otaro.OtaroError)
    assert f"--resume: {words}" in str(result.exception)
    assert str(done) in str(result.exception)


def test_options_of_a_run_go_by_the_names_that_they_had_then(done, copy_of):
    run = copy_of(done)
    stated = json.loads((run / "config.json").read_text())
    then = stated["options"] | {"pull": 5.0, "rates": "same"}
    del then["l2_sp"]
    (run / "config.json").write_text(json.dumps(stated | {"options": then}))
    refused = invoke("tune", "--resume", "--out", run, "--l2-sp", 1)
    assert "--resume: --l2-sp is 1.0, the run has 5.0." in str(refused.exception)


def test_the_number_of_processes_belongs_to_a_run(done, copy_of):
    run = copy_of(done)
    stated = json.loads((run / "config.json").read_text())
    words = "has 2 process(es), this is 1; go on with: {} -m otaro tune --resume --out {}"
    for launcher in ("accelerate launch --use_fsdp --num_processes 2", "torchrun --nproc_per_node 2"):
        now = (
            {"processes": 2, "launcher": f"{launcher} -m otaro"}
            if "accelerate" in launcher
            else {"processes": 2}
        )
        (run / "config.json").write_text(json.dumps({**stated, "launcher": None, **now}))
        assert words.format(launcher, run) in str(invoke("tune", "--resume", "--out", run).exception)


def test_a_run_that_goes_on_may_be_told_all_that_it_has(done, copy_of):
    """As by the command that older reports show: also what it does not read."""
    run = copy_of(done)
    same = ["--method", "uniform", "--lambda", 5, "--delay", 10, "--accumulate", "sum", "--steps", 6]
    again = invoke("tune", "--resume", "--out", run, *same)
    assert again.exit_code == 0, again.output + repr(again.exception)
    assert "this run is complete" in again.stderr


def test_resuming_notices_other_data_and_another_model_by_their_content(text, done, copy_of, tmp_path):
    model = Path(shutil.copytree(MODEL_DIR, tmp_path / "model"))
    edited = tmp_path / "edited.txt"
    edited.write_text(text.read_text().replace("the", "teh", 1))
    other = invoke("tune", "--resume", "--out", done, "--data", edited)
    assert f"--resume: the examples made of {edited} (SHA-256 " in str(other.exception)
    assert "changed since the run in" in str(other.exception)

    moved = Path(shutil.copy(text, tmp_path / "moved.txt"))
    # other names, the same content
    same = invoke("tune", model, "--resume", "--out", copy_of(done), "--data", moved)
    assert same.exit_code == 0, same.output + repr(same.exception)

    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][0] += 0.5
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    assert (model / "model.safetensors").stat().st_size == (MODEL_DIR / "model.safetensors").stat().st_size
    other = invoke("tune", model, "--resume", "--out", done)
    assert f"--resume: the weights or the config of {model} (SHA-256 " in str(other.exception)


def test_a_finished_run_may_be_given_more_steps(text, done, copy_of, tmp_path):
    """At the rates that a run of so many steps has by then."""
    run = copy_of(done)
    longer = invoke("tune", "--resume", "--out", run, "--steps", 10, "--json")
    assert longer.exit_code == 0, longer.output + repr(longer.exception)
    assert json.loads(longer.stdout)["steps"] == 10
    rates = [record["lr"] for record in steps_of(run) if "lr" in record]
    assert rates[6:] == pytest.approx(
        [1e-3 * (1 + math.cos(math.pi * step / 10)) / 2 for step in range(6, 10)]
    )
    assert json.loads((run / "config.json").read_text())["training"]["steps"] == 10
    state = json.loads((run / "checkpoints" / "checkpoint-10" / "otaro_state.json").read_text())
    assert state["averaged"] == 4  # of the steps since: those before lie partly outside of the last five
    again = invoke("tune", "--resume", "--out", run, "--json")
    assert json.loads(again.stdout) == json.loads(longer.stdout)


def test_files_beside_the_models_of_a_run_stay_when_it_goes_on(done, copy_of):
    run = copy_of(done)
    record = json.dumps({"model": NestedDirectory(run / "nested").model})
    for folder in (run / "model", run / "nested"):
        (folder / "notes").write_text("mine")
        (folder / "quality.json").write_text(record)
        (folder / "analysis").mkdir()
        (folder / "analysis" / "weights.json").write_text("{}")
    (run / "model" / "adapter_model.safetensors").write_text("mine")
    longer = invoke("tune", "--resume", "--out", run, "--steps", 8)
    assert longer.exit_code == 0, longer.output + repr(longer.exception)
    for folder in (run / "model", run / "nested"):
        assert (folder / "notes").read_text() == "mine"
        assert (folder / "analysis" / "weights.json").read_text() == "{}"
        (aside,) = folder.glob("quality-*.json")
        assert aside.read_text() == record
    assert (run / "model" / "adapter_model.safetensors").read_text() == "mine"


def test_a_run_whose_checkpoints_are_gone_keeps_its_model(done, copy_of):
    run = copy_of(done)
    shutil.rmtree(run / "checkpoints")
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    longer = invoke("tune", "--resume", "--out", run, "--steps", 8)
    assert longer.exit_code != 0
    assert "has no checkpoint left to go on from" in str(longer.exception)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files


def test_a_damaged_checkpoint_is_passed_over_and_that_is_said(done, copy_of):
    run = copy_of(done)
    (run / "result.json").unlink()
    newest, before = (run / "checkpoints" / f"checkpoint-{step}" for step in (6, 4))
    with (newest / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    result = invoke("tune", "--resume", "--out", run)
    assert result.exit_code == 0, result.output + repr(result.exception)
    said = result.stderr.splitlines()
    assert f"--resume: {newest} is passed over: it is damaged, or its weights are not finite" in said
    assert f"--resume: goes on from {before}" in said


def test_a_complete_run_that_is_resumed_says_that_there_is_nothing_to_do_and_does_nothing(
    done, copy_of, monkeypatch
):
    run = copy_of(done)
    files = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with monkeypatch.context() as once:
        once.delattr("otaro.cli.tune_run.TuningRun._load")  # nothing is even read
        assert invoke("tune", "--resume", "--out", run, "--save-every", 3).exit_code == 0
        result = invoke("tune", "--resume", "--out", run, "--json")
    assert result.exit_code == 0, result.output + repr(result.exception)
    assert result.stderr == "--resume: this run is complete: nothing to do; a larger --steps would go on\n"
    assert json.loads(result.stdout)["steps"] == 6
    assert json.loads(result.stdout)["after"] == json.loads((run / "perplexity.json").read_text())["after"]
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == files


def test_a_longer_run_is_not_complete_because_the_shorter_one_was(done, copy_of, monkeypatch):
    """Killed when its last checkpoint was written, with the models of the shorter one still in place."""

    def killed(*_):
        raise SystemExit(9)

    run = copy_of(done)
    with monkeypatch.context() as once:
        once.setattr("otaro.cli.tune_run.TuningRun._tuned", killed)
        assert invoke("tune", "--resume", "--out", run, "--steps", 8).exit_code == 9
    assert not (run / "result.json").exists()
    result = invoke("tune", "--resume", "--out", run, "--json")
    assert result.exit_code == 0, result.output + repr(result.exception)
    assert f"--resume: goes on from {run}/checkpoints/checkpoint-8" in result.stderr.splitlines()
    assert json.loads(result.stdout)["steps"] == 8
    shorter, longer = (load_file(one / "model" / "model.safetensors") for one in (done, run))
    assert any(not torch.equal(shorter[name], weight) for name, weight in longer.items())


def test_the_examples_to_measure_on_may_be_others_or_none(text, tmp_path):
    (tmp_path / "other.txt").write_text(text.read_text()[:3000])
    quick = ["--steps", 2, "--json"]
    none = tune(text, tmp_path / "none", "--hold-out", 0, *quick)
    assert none.exit_code == 0, none.output + repr(none.exception)
    assert (json.loads(none.stdout)["before"], json.loads(none.stdout)["after"]) == ({}, {})
    assert not (tmp_path / "none" / "perplexity.json").exists()
    other = json.loads(tune(text, tmp_path / "run", "--eval-data", tmp_path / "other.txt", *quick).stdout)
    assert list(other["after"]) == ["fp", *map(str, otaro.PRECISIONS)]
    missing = tune(text, tmp_path / "missing", "--eval-data", "nowhere.jsonl", *quick)
    assert "nowhere.jsonl does not exist; --eval-data takes" in str(missing.exception)
    sums = [json.loads((tmp_path / run / "config.json").read_text())["sha256"] for run in ("none", "run")]
    assert sums[0]["data"] == sums[1]["data"]  # nothing is held out of either
    assert json.loads(none.stdout)["average"] is None
    shown = tune(text, tmp_path / "shown", "--hold-out", 0, "--steps", 1)
    assert "nothing is held out to judge the mean of the weights by" in " ".join(shown.stderr.split())
    assert "Perplexity" not in shown.stdout
    assert "tuned checkpoint" in shown.stdout


def test_perplexity_of_few_tokens_or_of_none_says_so(capsys):
    result = {
        "out": "run",
        "seconds": 1.0,
        "steps": 2,
        "before": {"fp": 2.0},
        "after": {"fp": 1.0},
        "longest": 64,
    }
    few = "24 tokens, in sequences of up to 64; too few to tell precisions apart"
    for tokens, words in ((24, few), (2_000, "measured on 2,000 tokens, in sequences of up to 64\n")):
        _show({**result, "tokens": tokens})
        assert words in capsys.readouterr().out
    for kept, words in (
        (
            "average",
            "last 75 steps were averaged: their mean is kept, as its held-out loss is 2.1000 and "
            "that of the last",
        ),
        (
            "last",
            "last 75 steps were averaged: the last weights are kept, as their held-out loss is 2.2000 "
            "and that of",
        ),
    ):
        _show({**result, "tokens": 1, "average": {"averaged": 75, "last": 2.2, "average": 2.1, "kept": kept}})
        assert words in " ".join(capsys.readouterr().out.split())
    _show({**result, "before": {}, "after": {}, "tokens": 0})
    assert "nothing was held out, so nothing was measured" in capsys.readouterr().out


def test_a_sequence_longer_than_the_model_has_positions_is_shortened_and_that_is_said(text, tmp_path):
    result = tune(text, tmp_path / "run", "--sequence-length", 4096, "--steps", 1, "--hold-out", 0)
    assert result.exit_code == 0, result.output + repr(result.exception)
    assert (
        " ".join(result.stderr.split()).count(
            "--sequence-length 4096 is shortened to the 512 positions of this model"
        )
        == 1
    )


def test_bfloat16_needs_no_gpu(text, tmp_path):
    result = tune(text, tmp_path / "run", "--bf16", "--steps", 2, "--hold-out", 0)
    assert result.exit_code == 0, result.output + repr(result.exception)
    assert (
        load_file(tmp_path / "run" / "model" / "model.safetensors")["model.norm.weight"].dtype
        == torch.float32
    )


@pytest.mark.parametrize(
    "place", ["transformers.TrainingArguments", "otaro.tune.trainer.OtaroTrainer.__init__"]
)
def test_what_another_library_refuses_is_one_line_and_leaves_no_folder(text, tmp_path, monkeypatch, place):
    def refuse(*_, **__):
        raise ValueError("your setup\ncannot do that")

    monkeypatch.setattr(place, refuse)
    result = tune(text, tmp_path / "run")
    assert isinstance(result.exception, otaro.OtaroError)
    assert str(result.exception) == "this run cannot be set up: your setup"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        (
            "ACCELERATE_MIXED_PRECISION",
            "fp16",
            "accelerate was told to compute in fp16; leave that to --bf16",
        ),
        ("ACCELERATE_USE_DEEPSPEED", "true", "DeepSpeed is not supported"),
    ],
)
def test_settings_of_a_launcher_that_do_not_fit_are_refused(
    text, tmp_path, monkeypatch, variable, value, words
):
    monkeypatch.setenv(variable, value)
    assert words in str(tune(text, tmp_path / "run").exception)
    assert not (tmp_path / "run").exists()


def fail_at(monkeypatch, step, fail):
    """Call `fail` at the beginning of a step."""
    usual = OtaroTrainer.training_step

    def training_step(trainer, *args, **kwargs):
        if trainer.state.global_step + 1 == step:
            fail()
        return usual(trainer, *args, **kwargs)

    monkeypatch.setattr(OtaroTrainer, "training_step", training_step)


def test_a_run_that_failed_before_its_first_checkpoint_does_not_stand_in_the_way(text, tmp_path, monkeypatch):
    def fail():
        raise RuntimeError("no more")

    with monkeypatch.context() as once:
        fail_at(once, 3, fail)
        assert str(tune(text, tmp_path / "run").exception) == "no more"
    assert (tmp_path / "run" / "log.jsonl").is_file()  # kept, to see what it did
    again = Path(shutil.copytree(tmp_path / "run", tmp_path / "again"))
    resumed = invoke("tune", "--resume", "--out", again)
    assert resumed.exit_code == 0, resumed.output + repr(resumed.exception)
    assert "--resume: no checkpoint yet: starts from the beginning" in resumed.stderr.splitlines()
    assert tune(text, tmp_path / "run").exit_code == 0
    assert steps_of(again) == steps_of(tmp_path / "run")
    assert [record["step"] for record in steps_of(tmp_path / "run") if "loss" in record] == list(range(1, 7))
    taken = tune(text, tmp_path / "run")
    assert "holds a run already; go on with `otaro tune --resume --out" in str(taken.exception)


@pytest.fixture
def in_the_foreground():
    """As a user has it; a shell that starts the tests in the background has them ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("number", "status", "step"),
    [(signal.SIGINT, 130, 6), (signal.SIGTERM, 143, 3)],
    ids=["Ctrl-C", "SIGTERM"],
)
@pytest.mark.usefixtures("in_the_foreground")
def test_an_interrupted_run_says_what_is_kept_and_how_to_go_on(
    text, tmp_path, monkeypatch, number, status, step
):
    run = tmp_path / "run"
    fail_at(monkeypatch, step, lambda: os.kill(os.getpid(), number))
    result = tune(text, run, "--hold-out", 0)
    assert result.exit_code == status
    said = " ".join(result.stderr.split())
    if step > 4:
        assert (
            f"interrupted: kept is {run}/checkpoints/checkpoint-4; go on with: otaro tune --resume --out "
            f"{run}" in said
        )
    else:
        assert "interrupted: nothing is kept, as the first checkpoint comes after 4 steps" in said
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_a_run_without_memory_ends_in_a_sentence_that_says_what_to_try_and_what_is_kept(
    text, tmp_path, monkeypatch
):
    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    fail_at(monkeypatch, 6, fail)
    stopped = tune(text, tmp_path / "run", "--hold-out", 0).exception
    assert isinstance(stopped, otaro.OtaroError)
    tries = (
        "--batch-size",
        "--grad-accum",
        "--gradient-checkpointing",
        "--optimizer adamw8bit",
        "--lora",
        "--fsdp",
    )
    assert all(part in str(stopped) for part in ("out of memory", *tries, "checkpoint-4; go on with"))


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")]
)
def test_so_does_one_without_memory_on_the_host(error):
    run = SimpleNamespace(kept=lambda: "this is kept")
    with (
        pytest.raises(otaro.OtaroError, match=r"out of memory; try a smaller --batch-size .*; this is kept"),
        explained(run),
    ):
        raise error


FULL = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
CUT_OFF = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FULL, "the disk is full; free some space or choose another place; "),
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full; free some space or "),
        (CUT_OFF, "a checkpoint could not be written to its end, for lack of space perhaps; free some space"),
    ],
    ids=["safetensors", "the system", "torch"],
)
@pytest.mark.parametrize(
    ("place", "kept"),
    [("model", "checkpoint-6; go on with: "), ("checkpoint-4", "nothing is kept, as the first checkpoint ")],
)
def test_a_full_disk_is_said_in_one_line(text, tmp_path, monkeypatch, error, words, place, kept):
    run, save = tmp_path / "run", PreTrainedModel.save_pretrained

    def full(model, target, *more, **settings):
        if place in str(target):
            raise error
        save(model, target, *more, **settings)

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    stopped = tune(text, run).exception
    assert isinstance(stopped, TargetError)
    assert str(stopped).startswith(f"cannot write {run}")
    assert f": {words}" in str(stopped)
    assert kept in str(stopped)
    assert "\n" not in str(stopped)


@pytest.mark.parametrize(
    "error", [SafetensorError("header too large"), OSError(errno.EIO, "no"), OSError("no")]
)
def test_other_failures_of_a_file_are_not_a_full_disk(tmp_path, error):
    with pytest.raises(type(error)) as raised, explained(SimpleNamespace(out=tmp_path)):
        raise error
    assert raised.value is error


def test_two_runs_in_one_folder_are_refused(text, tmp_path):
    with alone(tmp_path / "run"):
        assert "another process is writing" in str(tune(text, tmp_path / "run").exception)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--method", "magic"], "--method magic: choose from"),
        (["--method", "fixed:E5M9"], "--method fixed:E5M9"),
        (["--weights", "1,2"], "--weights gives 2 numbers for 6"),
        (["--weights", "one"], "--weights one: give numbers"),
        (["--l2-sp", "23", "--lr", "0.1"], "--l2-sp 23 undoes every step at --lr 0.1"),
        (["--l2-sp", "-1"], "--l2-sp -1.0: must be a number, and not negative"),
        (
            ["--method", "fp", "--full", "0.5"],
            "--full 0.5: --method fp has all of its loss in full precision",
        ),
        (["--average", "70"], "--average 70.0: must be between 0 and 1"),
        (["--epochs", "1"], "--epochs and --steps contradict"),
        (["--hold-out", "1"], "--hold-out 1.0: must be 0 or more, and less than 1"),
        (["--eval-tokens", "1"], "--eval-tokens 1: must be at least 2"),
        (["--save-every", "0"], "--save-every 0: must be at least 1"),
        (["--weights", "1,x"], "--weights 1,x: give numbers separated by commas"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_makes_no_sense_is_refused_in_the_flags_own_spelling(text, tmp_path, more, words):
    assert misuse(tune(text, tmp_path / "run", *more)).startswith(words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--fsdp"], "--fsdp shares weights out over several processes; start them with torchrun"),
        (["--resume"], "holds no run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_here_is_refused(text, tmp_path, more, words):
    result = tune(text, tmp_path / "run", *more)
    assert isinstance(result.exception, otaro.OtaroError)
    assert words in str(result.exception)
    assert not (tmp_path / "run").exists()


def test_only_a_resumed_run_needs_no_model_and_no_data(tmp_path):
    assert misuse(invoke("tune", "--out", tmp_path / "run")).startswith("MODEL is missing; only --resume")
    assert misuse(invoke("tune", "builtin", "--out", tmp_path / "run")).startswith("--data is missing")


def test_a_folder_with_something_in_it_is_not_touched(text, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    assert "exists and is not empty" in str(tune(text, tmp_path).exception)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
