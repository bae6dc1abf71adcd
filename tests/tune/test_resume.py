"""A run killed however often and wherever goes on to the same weights, path and accumulator, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from otaro.tune.checkpoints import forget_steps_after, last_complete_checkpoint
from otaro.tune.trainer import ACCUMULATOR_STEM, AVERAGE_STEM, STATE_FILE

ACCUMULATOR, AVERAGE = f"{ACCUMULATOR_STEM}.safetensors", f"{AVERAGE_STEM}.safetensors"

STEPS, EVERY = 12, 3  # as in DRIVER

# Trains on from the last complete checkpoint, again and again, each time in a fork of its own that is killed
# in some place at some step, and the last time to the end. Prints which checkpoint could be relied on
# afterwards.
DRIVER = """
import json, os, signal, sys, traceback
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, TrainerCallback, TrainingArguments
from otaro.tune.config import BEST, Options
from otaro.tune.checkpoints import forget_steps_after, last_complete_checkpoint
from otaro.tune.trainer import OtaroTrainer

directory, checkpoint, method, kills, settings = json.loads({told!r})
directory = Path(directory)
log = directory / "log.jsonl"
planned = None

def die(*place):
    if list(place) == planned:
        os.kill(os.getpid(), signal.SIGKILL)

class Killer(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        die("between steps", state.global_step)
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        die("after the backward pass", state.global_step)
        if planned == ["in the middle of a line of the log", state.global_step]:
            log.write_text(log.read_text()[:-20])
            os.kill(os.getpid(), signal.SIGKILL)

class Mortal(OtaroTrainer):
    def _save_optimizer_and_scheduler(self, output_dir):
        die("after saving the model", self.state.global_step)
        super()._save_optimizer_and_scheduler(output_dir)
        die("after saving the optimizer", self.state.global_step)

def touch(self, touch=Path.touch):
    if self.name == "otaro_complete":
        die("before the completion mark", number(self.parent))
    touch(self)

def number(checkpoint):
    return int(checkpoint.name.partition("-")[2])

def train():
    tokens = torch.randint(3, 120, (14, 10), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        directory, use_cpu=True, max_steps=12, per_device_train_batch_size=2,  # 7 steps an epoch, shuffled
        optim="sgd" if method == "otaro" else "adamw_torch",
        learning_rate=2.0**-7 if method == "otaro" else 1e-3, lr_scheduler_type="cosine", seed=3,
        save_strategy="steps", save_steps=3, report_to=[], disable_tqdm=True, **settings,
    )
    options = BEST if method == "best" else Options(method=method, exploration=30.0, delay=3)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    data = [dict(input_ids=ids, labels=ids) for ids in tokens]
    own = dict(otaro=options, otaro_log=log, eval_dataset=data[:4])
    trainer = Mortal(model, arguments, train_dataset=data, callbacks=[Killer()], **own)
    last = last_complete_checkpoint(directory)
    forget_steps_after(log, number(last) if last else 0)
    trainer.train(resume_from_checkpoint=str(last) if last else None)
    die("after training", trainer.state.global_step)
    torch.save(model.state_dict(), directory / "final.pt")

torch.set_num_threads(1)
Path.touch = touch
reliable = []
for planned in [*kills, None]:
    child = os.fork()
    if not child:
        os.dup2(2, 1)
        try:
            train()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == (-signal.SIGKILL if planned else 0), (planned, status)
    last = last_complete_checkpoint(directory)
    reliable.append(number(last) if last else None)
print(json.dumps(reliable))
"""


@pytest.fixture
def run(in_child, checkpoint_dir):
    """run(directory, method, kills) trains to the end through all kills; returns the last complete checkpoint
    after each.
    """

    def train(directory, method, kills=(), **settings):
        directory.mkdir()
        child = in_child(
            DRIVER.format(
                told=json.dumps([str(directory), str(checkpoint_dir), method, list(kills), settings])
            )
        )
        assert child.returncode == 0, child.stderr
        return json.loads(child.stdout)

    return train


def log_of(directory):
    """Without the only field that time changes."""
    lines = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines]


def assert_same_run(one: Path, other: Path):
    weights, others = (torch.load(directory / "final.pt") for directory in (one, other))
    assert weights.keys() == others.keys()
    assert [name for name in weights if not torch.equal(weights[name], others[name])] == []
    assert log_of(one) == log_of(other)
    for step in range(EVERY, STEPS + 1, EVERY):
        for name in (STATE_FILE, ACCUMULATOR, AVERAGE):
            files = [directory / f"checkpoint-{step}" / name for directory in (one, other)]
            assert files[0].exists() == files[1].exists()
            assert not files[0].exists() or files[0].read_bytes() == files[1].read_bytes(), files[0]


# Each with the checkpoint that can be relied on afterwards.
KILLS = {
    "otaro": [
        ("between steps", 2, None),
        ("after saving the optimizer", 3, None),
        ("after the backward pass", 7, 6),  # two gradients wait in the accumulator
        ("in the middle of a line of the log", 8, 6),
        ("after saving the model", 9, 6),
        ("after saving the optimizer", 9, 6),
        ("before the completion mark", 9, 6),
        ("between steps", 11, 9),
        ("before the completion mark", 12, 9),
    ],
    # Uniform draws; weights are averaged from the seventh step on.
    "best": [
        ("between steps", 4, 3),
        ("after saving the optimizer", 9, 6),
        ("after the backward pass", 10, 9),
    ],
}


@pytest.mark.parametrize("method", KILLS)
def test_a_run_killed_again_and_again_ends_as_if_nothing_had_happened(run, method, tmp_path):
    assert run(tmp_path / "whole", method) == [STEPS]
    reliable = run(tmp_path / "killed", method, [kill[:2] for kill in KILLS[method]])
    assert reliable == [*(kill[2] for kill in KILLS[method]), STEPS]
    assert_same_run(tmp_path / "whole", tmp_path / "killed")

    steps = [line for line in log_of(tmp_path / "whole") if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    if method == "otaro":
        assert [line["accumulated"] for line in steps][5] == 2
        assert (tmp_path / "whole" / "checkpoint-6" / ACCUMULATOR).is_file()
        assert any(line["applied"] for line in steps if line["precision"] in ("E5M4", "E5M3"))
    holding = [
        step
        for step in range(EVERY, STEPS + 1, EVERY)
        if (tmp_path / f"whole/checkpoint-{step}" / AVERAGE).is_file()
    ]
    assert holding == ([9, 12] if method == "best" else [])
    assert ("kept" in log_of(tmp_path / "whole")[-1]) == (method == "best")


def test_what_was_left_over_is_applied_once_by_a_run_that_was_killed_after_its_last_step(run, tmp_path):
    """The last checkpoint holds the accumulator as it was before; so the log must forget the leftover."""
    run(tmp_path / "whole", "otaro")
    assert "leftover" in log_of(tmp_path / "whole")[-1]
    assert run(tmp_path / "killed", "otaro", [("after training", STEPS)]) == [STEPS, STEPS]
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_the_last_complete_checkpoint_is_kept_until_the_next_one_is_complete(run, tmp_path):
    runs = tmp_path / "runs"
    assert run(runs, "otaro", [("before the completion mark", 6)], save_total_limit=1) == [3, STEPS]
    assert [path.name for path in runs.glob("checkpoint-*")] == [f"checkpoint-{STEPS}"]


def test_the_newest_complete_checkpoint_is_the_last_by_number(tmp_path):
    assert last_complete_checkpoint(tmp_path) is None
    for step in (90, 100, 110):
        (tmp_path / f"checkpoint-{step}").mkdir()
    assert last_complete_checkpoint(tmp_path) is None
    for step in (90, 100):
        (tmp_path / f"checkpoint-{step}" / "otaro_complete").touch()
    assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-100"


def test_forget_steps_after_drops_later_and_cut_off_lines(tmp_path):
    log = tmp_path / "log.jsonl"
    forget_steps_after(log, 3)
    assert not log.exists()
    lines = [json.dumps({"step": step, "loss": 1.5}) + "\n" for step in range(1, 6)]
    log.write_text("".join(lines) + '{"step": 6, "lo')
    forget_steps_after(log, 3)
    assert log.read_text() == "".join(lines[:3])
    log.write_text("".join(lines[:2]) + '{"step": 3, "loss": 1')
    forget_steps_after(log, 3)
    assert log.read_text() == "".join(lines[:2])
    forget_steps_after(log, 0)
    assert log.read_text() == ""
