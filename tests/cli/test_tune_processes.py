"""`otaro tune` in two processes on a CPU, as torchrun and accelerate launch start it, without any setting of
theirs.

Launches are few and shared, since most of their time goes into imports.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import otaro
from otaro.builtin import MODEL_DIR, topics_training_text
from otaro.cli.main import app, main
from otaro.cli.tune_run import TuningRun
from otaro.tune import processes
from otaro.tune.config import recipe

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this build of torch cannot run several processes through gloo",
)

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "otaro"]
ACCELERATE = [
    "-m",
    "accelerate.commands.launch",
    "--use_fsdp",
    "--fsdp_version",
    "2",
    "--fsdp_auto_wrap_policy",
]
ACCELERATE += ["TRANSFORMER_BASED_WRAP", "--fsdp_state_dict_type", "FULL_STATE_DICT", "--num_processes", "2"]
ACCELERATE += ["--main_process_port", "0", "-m", "otaro"]
# Plain SGD, with all that must be shared out or averaged: what a rounding changes stays a rounding, unlike
# with Adam.
SETTINGS = ["--optimizer", "sgd", "--lr", "1e-3", "--l2-sp", "5", "--steps", "8", "--sequence-length", "32"]
SETTINGS += ["--save-every", "3", "--hold-out", "0.1", "--eval-tokens", "1200", "--json"]


def launch(how, *arguments):
    """The command as a process group of its own."""
    unset = ("PYTEST_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "ACCELERATE_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(unset)}
    environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, *how, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


def finished(process):
    try:
        out, err = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


def report_of(process):
    """The JSON that exactly one of the processes printed."""
    status, out, err = finished(process)
    assert status == 0, err[-5000:]
    assert "find_unused_parameters" not in err  # of which DDP would warn in every process
    (line,) = out.splitlines()
    return json.loads(line)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def text(folder):
    (folder / "text.txt").write_text(topics_training_text()[:12000])
    return folder / "text.txt"


@pytest.fixture(scope="module")
def alone(folder, text):
    """One process with twice the batch."""
    arguments = ["tune", "builtin", "--data", text, "--out", folder / "alone", "--batch-size", 4, *SETTINGS]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output + repr(result.exception)
    return folder / "alone", json.loads(result.stdout)


@pytest.fixture(scope="module")
def whole(folder, text):
    """Two processes, started by torchrun."""
    run = folder / "whole"
    return run, report_of(
        launch(TORCHRUN, "tune", "builtin", "--data", text, "--out", run, "--batch-size", 2, *SETTINGS)
    )


@pytest.fixture(scope="module")
def resumed(folder, text):
    """Killed after a checkpoint, all processes of the group at once, and resumed without any other option."""
    run = folder / "killed"
    process = launch(TORCHRUN, "tune", "builtin", "--data", text, "--out", run, "--batch-size", 2, *SETTINGS)
    deadline = time.monotonic() + 300
    while not (run / "checkpoints" / "checkpoint-3" / "otaro_complete").exists():
        assert process.poll() is None, process.communicate()[1][-5000:]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for pid in _descendants(process.pid):  # torchrun puts each into a session of its own
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    assert not (run / "model").exists()
    return run, report_of(launch(TORCHRUN, "tune", "--resume", "--out", run, "--json"))


@pytest.fixture(scope="module")
def sharded(folder, text):
    """With FSDP2, started by accelerate launch."""
    run = folder / "sharded"
    return run, report_of(
        launch(ACCELERATE, "tune", "builtin", "--data", text, "--out", run, "--batch-size", 2, *SETTINGS)
    )


def _descendants(pid):
    listed = subprocess.run(
        ["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    parents = {int(child): int(parent) for child, parent in (line.split() for line in listed.splitlines())}
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def weights_of(run):
    return load_file(run / "model" / "model.safetensors")


def log_of(run):
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines]


@pytest.mark.parametrize(
    "case", ["whole", *(pytest.param(one, marks=pytest.mark.slow) for one in ("resumed", "sharded"))]
)
def test_two_processes_leave_one_run_equal_to_one_process_with_twice_the_batch(request, case, alone):
    (run, report), (alone_run, alone_report) = request.getfixturevalue(case), alone
    assert {path.name for path in run.iterdir()} == {path.name for path in alone_run.iterdir()}
    told = [
        [(line["step"], line.get("precision"), line.get("kept")) for line in log_of(one)]
        for one in (run, alone_run)
    ]
    assert told[0] == told[1]
    assert told[0][-1][2] == report["average"]["kept"]
    assert report["steps"] == 8
    for when in ("before", "after"):
        assert report[when] == pytest.approx(alone_report[when], rel=1e-3)
    weights, expected, start = (
        weights_of(run),
        weights_of(alone_run),
        load_file(MODEL_DIR / "model.safetensors"),
    )
    assert weights.keys() == expected.keys()
    # the half of a batch, lost or doubled in one of eight steps, is more than a hundredth of the way
    for name in expected:
        assert (weights[name] - expected[name]).norm() < 0.01 * (
            expected[name] - start[name].float()
        ).norm(), name
    nested = otaro.load(run / "nested", "E5M3").sefp.nested.base.header.model
    assert nested == otaro.pack(run / "model", run / "again").base.header.model
    stated = json.loads((run / "config.json").read_text())
    assert (stated["processes"], stated["training"]["fsdp"]) == (2, case == "sharded")
    how = ACCELERATE if case == "sharded" else TORCHRUN
    if Path("/proc/self/cmdline").is_file():
        assert stated["launcher"] == shlex.join([sys.executable, *how])


def test_a_run_of_two_processes_that_was_killed_goes_on_to_the_same_weights(whole, resumed):
    weights, others = weights_of(whole[0]), weights_of(resumed[0])
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert log_of(whole[0]) == log_of(resumed[0])
    assert whole[1]["after"] == resumed[1]["after"]


def test_a_refusal_of_the_first_process_is_said_once_and_ends_the_others_that_wait_for_it(folder, text):
    (run := folder / "taken").mkdir()
    (run / "mine.txt").write_text("mine")
    started = time.monotonic()
    status, out, err = finished(launch(TORCHRUN, "tune", "builtin", "--data", text, "--out", run))
    assert (status, out) == (1, "")
    assert time.monotonic() - started < 200
    assert err.count("error:") == 1, err
    assert f"--out {run} exists and is not empty" in " ".join(err.split())
    assert "otaro/cli" not in err  # no traceback of ours; torchrun has one of its own
    assert [path.name for path in run.iterdir()] == ["mine.txt"]


def test_how_to_go_on_names_the_launcher_of_the_run(monkeypatch, tmp_path):
    """Its own command line if that can be seen; else what the environment tells of it."""
    out = tmp_path / "a run"
    (tool := tmp_path / "torchrun").touch(0o755)
    for key, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    ours = ["tune", "builtin", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["otaro", *ours])

    def said(*parent):
        monkeypatch.setattr(processes, "_command_of", lambda pid: [*parent])
        run = TuningRun("builtin", "builtin", out, *recipe("best"))
        monkeypatch.setattr(
            "otaro.tune.checkpoints.last_good_checkpoint", lambda folder: folder / "checkpoint-3"
        )
        before, _, command = run.kept().partition("; go on with: ")
        assert before == f"kept is {out}/checkpoints/checkpoint-3"
        return command

    end = f"-m otaro tune --resume --out '{out}'"
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    assert said("bash") == f"torchrun --nproc_per_node 2 {end}"
    typed = ["--nproc_per_node", "2", "-m", "otaro", *ours]
    assert said("/bin/python", str(tool), *typed) == f"{tool} --nproc_per_node 2 {end}"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert said("/bin/python", str(tool), *typed) == f"torchrun --nproc_per_node 2 {end}"
    by_accelerate = ["python", "-m", "accelerate.commands.launch", "--use_fsdp", "-m", "otaro", *ours]
    assert said(*by_accelerate) == f"python -m accelerate.commands.launch --use_fsdp {end}"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert said() == f"accelerate launch --num_processes 2 {end}"


def test_an_error_is_said_by_the_first_process_to_meet_one(monkeypatch):
    class Store(dict):
        def add(self, key, amount):
            self[key] = self.get(key, 0) + amount
            return self[key]

    monkeypatch.setattr(processes, "_joined", {"store": Store()})
    assert [processes.may_speak() for _ in range(3)] == [True, False, False]


def test_what_fails_in_one_process_alone_before_they_meet_is_said_after_a_while(monkeypatch):
    for key, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    waited = []
    monkeypatch.setattr(processes.time, "sleep", waited.append)
    assert processes.may_speak()
    assert waited == [processes.GRACE]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_process_has_the_time_to_say_what_is_wrong_with_the_command_line(monkeypatch, rank):
    for key, value in {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    waited, left = [], []
    monkeypatch.setattr(processes.time, "sleep", waited.append)
    monkeypatch.setattr(processes, "mute_others", lambda: None)
    monkeypatch.setattr(os, "_exit", lambda status: left.append((status, len(waited))))
    monkeypatch.setattr(sys, "argv", ["otaro", "tune", "builtin", "--data", "x", "--out", "y", "--lr", "0"])
    with pytest.raises(SystemExit):
        main()
    assert left[0] == (2, rank)  # the second waited before it ended
    assert waited == [processes.GRACE] * rank


def test_other_commands_are_one_process_s_work(monkeypatch):
    for key, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    result = CliRunner().invoke(app, ["demo"])
    assert isinstance(result.exception, otaro.OtaroError)
    assert "`otaro demo` is one process's work; start it without torchrun" in str(result.exception)


def test_more_processes_than_gpus_are_refused(monkeypatch):
    for key, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(processes, "_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    with pytest.raises(
        otaro.OtaroError,
        match=r"2 processes cannot share 1 GPU\(s\); start as many as "
        r"there are",
    ):
        processes.join()


def test_processes_that_cannot_become_one_run_are_refused(monkeypatch, tmp_path, text):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    result = CliRunner().invoke(app, ["tune", "builtin", "--data", str(text), "--out", str(tmp_path / "run")])
    assert isinstance(result.exception, otaro.OtaroError)
    assert "mpirun" in str(result.exception)
    assert not (tmp_path / "run").exists()
