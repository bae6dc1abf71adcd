"""L2-SP and the average: alone, and in a trainer, where held-out data judge it."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, TrainerCallback, TrainingArguments

from otaro.errors import OtaroWarning
from otaro.tune.config import ConfigError, Options
from otaro.tune.steady import WeightAverage
from otaro.tune.trainer import OtaroTrainer

RATE = 2.0**-7


class Snapshots(TrainerCallback):
    """The weights after each step."""

    def __init__(self):
        self.weights = []

    def on_step_end(self, args, state, control, model, **kwargs):
        self.weights.append(
            {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        )


@pytest.fixture
def train(checkpoint_dir, tmp_path):
    """Ten steps of plain SGD; returns the trainer, the weights at the start and after each step, and the log.

    `judge` is given the model and says what its loss is; unless told otherwise the average is always better.
    """

    def run(method="uniform", model=None, steps=10, judge="average", **steady):
        tokens = torch.randint(3, 120, (32, 10), generator=torch.Generator().manual_seed(1))
        arguments = TrainingArguments(
            tmp_path, use_cpu=True, max_steps=steps, per_device_train_batch_size=2,
            train_sampling_strategy="sequential", optim="sgd", learning_rate=RATE,
            lr_scheduler_type="constant", max_grad_norm=0.0, save_strategy="no", report_to=[],
            disable_tqdm=True,
        )  # fmt: skip
        model = model or AutoModelForCausalLM.from_pretrained(checkpoint_dir, dtype=torch.float32)
        start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        snapshots, log = Snapshots(), tmp_path / "log.jsonl"
        data = [{"input_ids": ids, "labels": ids} for ids in tokens]
        options = Options(method=method, **steady)
        log.unlink(missing_ok=True)
        trainer = OtaroTrainer(
            model, arguments, train_dataset=data, callbacks=[snapshots], otaro=options, otaro_log=log
        )
        if judge == "average":
            losses = iter((2.0, 1.0) * 2)  # the last weights are judged first
            trainer.judge = lambda: next(losses)
        elif judge is not None:
            trainer.judge = lambda: judge(trainer.model)
        trainer.train()
        return trainer, start, snapshots.weights, [json.loads(line) for line in log.read_text().splitlines()]

    return run


# In a trainer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "last"), [(0.3, 3), (0.5, 5), (1.0, 10), (0.01, 1)])
def test_an_averaged_run_ends_with_the_mean_of_its_last_weights(train, share, last):
    trainer, _, after, _ = train(average=share)
    assert trainer.average.count == last
    for name, parameter in trainer.model.named_parameters():
        mean = torch.stack([weights[name].double() for weights in after[-last:]]).mean(0)
        torch.testing.assert_close(parameter.detach().double(), mean, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("kept", ["average", "last"])
def test_held_out_data_decide_between_the_average_and_the_last_weights(train, kept):
    """By a loss that is the distance from what is to win."""
    wanted = "model.norm.weight"
    _, _, after, _ = train()
    mean = torch.stack([weights[wanted].double() for weights in after[-5:]]).mean(0)
    best = mean if kept == "average" else after[-1][wanted].double()
    seen = []

    def distance(model):
        seen.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
        return float((seen[-1][wanted].double() - best).norm())

    trainer, _, after, log = train(judge=distance, average=0.5)
    assert all(torch.equal(seen[0][name], after[-1][name]) for name in after[-1])
    ended = dict(trainer.model.named_parameters())
    assert all(torch.equal(ended[name], weight) for name, weight in seen[kept == "average"].items())
    assert not torch.equal(seen[0][wanted], seen[1][wanted])
    losses = {"last": float((seen[0][wanted].double() - best).norm())}
    losses["average"] = float((seen[1][wanted].double() - best).norm())
    assert log[-1] == {"step": 10, "averaged": 5, **losses, "kept": kept} == trainer.judgement


def test_an_average_that_is_no_better_or_no_number_is_dropped(train):
    for of_average in (1.0, float("nan")):
        losses = iter((1.0, of_average))
        trainer, _, after, log = train(judge=lambda model, losses=losses: next(losses), average=0.5, steps=2)
        assert log[-1]["kept"] == "last"
        assert all(
            torch.equal(parameter, after[-1][name]) for name, parameter in trainer.model.named_parameters()
        )


def test_where_nothing_is_held_out_the_last_weights_stay_and_that_is_said(train):
    with pytest.warns(OtaroWarning, match="nothing is held out to judge the mean of the weights by"):
        trainer, _, after, log = train(judge=None, average=0.5)
    assert trainer.average is None
    assert len(log) == 10
    assert all(
        torch.equal(parameter, after[-1][name]) for name, parameter in trainer.model.named_parameters()
    )


def test_averaging_does_not_change_the_way(train):
    _, _, plain, log = train()
    _, _, averaged, averaged_log = train(average=0.5)
    assert all(
        torch.equal(one[name], other[name])
        for one, other in zip(plain, averaged, strict=True)
        for name in one
    )
    assert [line["loss"] for line in log] == [line["loss"] for line in averaged_log[:-1]]


def test_gradients_left_over_at_the_end_are_applied_and_averaged_too(train):
    trainer, _, after, log = train("otaro", average=0.01)
    assert log[-2]["applied"]
    assert log[-2]["leftover"]
    assert trainer.average.count == 2
    weight = trainer.model.model.norm.weight
    assert not torch.equal(weight, after[-1]["model.norm.weight"])


def test_pulled_weights_go_back_by_their_share_of_the_way_after_the_first_step(train):
    _, start, plain, _ = train("fixed:E5M4")
    _, _, pulled, _ = train("fixed:E5M4", l2_sp=0.25 / RATE)
    for name in start:
        expected = start[name] + 0.75 * (plain[0][name] - start[name])
        torch.testing.assert_close(pulled[0][name], expected, atol=1e-7, rtol=1e-6)


def test_a_way_back_that_would_undo_every_step_is_refused(train):
    with pytest.raises(ConfigError, match="--l2-sp"):
        train(l2_sp=1 / RATE)


def test_pulled_adapters_take_the_merged_weight_back_by_its_share_and_no_more(train, checkpoint_dir):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=True)

    def adapted():
        torch.manual_seed(7)
        return peft.get_peft_model(
            AutoModelForCausalLM.from_pretrained(checkpoint_dir, dtype=torch.float32), config
        )

    def updates(weights):
        names = [name.partition(".lora_A")[0] for name in weights if "lora_A" in name]
        return [
            weights[f"{name}.lora_B.default.weight"] @ weights[f"{name}.lora_A.default.weight"]
            for name in names
        ]

    few = {"method": "fixed:E5M4", "steps": 1}
    _, _, plain, _ = train(model=adapted(), **few)
    trainer, start, pulled, _ = train(model=adapted(), l2_sp=0.25 / RATE, average=0.7, **few)
    for whole, held in zip(updates(plain[0]), updates(pulled[0]), strict=True):
        assert whole.any()
        torch.testing.assert_close(held, 0.75 * whole, atol=1e-9, rtol=1e-5)
    tuned = {
        name
        for name, parameter in trainer.model.named_parameters()
        if not torch.equal(parameter, start[name])
    }
    assert tuned
    assert all("lora_" in name for name in tuned)


def test_a_second_run_of_the_same_trainer_has_its_own_average(train):
    trainer, _, after, _ = train(average=0.3)
    trainer.train()
    assert trainer.average.count == 3
    mean = torch.stack([weights["model.norm.weight"].double() for weights in after[-3:]]).mean(0)
    torch.testing.assert_close(trainer.model.model.norm.weight.detach().double(), mean, atol=1e-7, rtol=1e-6)


# Alone ------------------------------------------------------------------------------------------------------


def test_the_mean_of_bfloat16_weights_is_kept_in_float32():
    average, weight = WeightAverage(1.0), nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    for step in range(1, 1001):  # the last ones add less than bfloat16 can tell from nothing
        weight.data.fill_(1.0 if step > 500 else 0.0)
        average.add({"w": weight}, step, 1000)
    average.swap({"w": weight})
    torch.testing.assert_close(weight.detach(), torch.full((2,), 0.5, dtype=torch.bfloat16))


def test_an_average_goes_on_from_what_it_was():
    first, second, third = (nn.Parameter(torch.full((2, 2), value)) for value in (1.0, 3.0, 8.0))
    whole, resumed = WeightAverage(1.0), WeightAverage(1.0)
    for step, weight in enumerate((first, second), 1):
        whole.add({"w": weight}, step, 3)
    resumed.restore(whole.count, whole.tensors(), {"w": torch.device("cpu")})
    resumed.add({"w": third}, 3, 3)
    resumed.swap({"w": first})
    torch.testing.assert_close(first.detach(), torch.full((2, 2), 4.0))
