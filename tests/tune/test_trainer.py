"""OtaroTrainer among the rest of Trainer: micro-batches, optimizers, schedules, logs, distillation, peers."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

import otaro
from otaro.builtin import MODEL_DIR
from otaro.sefp.precision import PRECISIONS, Precision
from otaro.tune import sliced
from otaro.tune.checkpoints import last_complete_checkpoint, last_good_checkpoint
from otaro.tune.config import BEST, Options
from otaro.tune.data import collate
from otaro.tune.fake_quant import Precisely, prepare, restore
from otaro.tune.trainer import (
    OtaroMixin,
    OtaroTrainer,
    TrainingError,
    losses_by_precision,
    reaches_all,
)

ULTRA_LOW = ("E5M4", "E5M3")
FIELDS = (
    "step",
    "precision",
    "loss",
    "cross_entropy",
    "scores",
    "gradient_norm",
    "lr",
    "tokens_per_second",
    "memory",
)
FIELDS += ("applied", "accumulated")


@pytest.fixture
def fresh(checkpoint_dir):
    """fresh() is a model to train; fresh(torch.float64) where runs of several steps that add up in another
    order are compared.

    A weight near the border of a cell may land on either side of it by rounding alone. In float64 none comes
    that near.
    """
    return lambda dtype=torch.float32: AutoModelForCausalLM.from_pretrained(checkpoint_dir, dtype=dtype)


def examples(count=64, length=10):
    """With a different number of labels in each, so that means of means would be noticed."""
    tokens = torch.randint(3, 120, (count, length), generator=torch.Generator().manual_seed(1))
    return [
        {"input_ids": ids, "labels": ids.where(torch.arange(length) >= n % 4, -100)}
        for n, ids in enumerate(tokens)
    ]


def arguments(directory, **changes):
    run = {
        "use_cpu": True,
        "max_steps": 12,
        "per_device_train_batch_size": 2,
        "train_sampling_strategy": "sequential",
    }
    update = {"optim": "sgd", "learning_rate": 2.0**-7, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    report = {"save_strategy": "no", "logging_steps": 1, "report_to": [], "disable_tqdm": True}
    return TrainingArguments(directory, **{**run, **update, **report, **changes})


def options(**changes):
    settings = {"method": "otaro", "exploration": 30.0, "delay": 3}
    return Options(**{**settings, **changes})


@pytest.fixture
def train(fresh, tmp_path):
    """train(options, argument=...) trains a fresh model and returns the trainer and its log."""

    def run(chosen, *, model=None, data=None, eval_dataset=None, kind=OtaroTrainer, callbacks=(), **changes):
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        directory.mkdir()
        own = {"otaro": chosen, "otaro_log": directory / "log.jsonl", "eval_dataset": eval_dataset}
        settings = arguments(directory, **changes)
        trainer = kind(
            model or fresh(), settings, train_dataset=data or examples(), callbacks=list(callbacks), **own
        )
        trainer.train()
        return trainer, [json.loads(line) for line in own["otaro_log"].read_text().splitlines()]

    return run


class Snapshots(TrainerCallback):
    """The weights after each step."""

    def __init__(self):
        self.weights = []

    def on_step_end(self, args, state, control, model, **kwargs):
        self.weights.append(weights_of(model))


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def assert_close(one, other, tolerance=1e-5):
    """Sums of a thousand terms in float32 are that exact; of float64 models only norms and losses are."""
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=tolerance, rtol=tolerance, msg=name)


def test_micro_batches_add_up_to_the_larger_batch_at_one_precision(train, fresh):
    seen = []

    class Spy(OtaroTrainer):
        def compute_loss(self, *args, **kwargs):
            seen.append((self.state.global_step + 1, str(self.precisely.precision)))
            return super().compute_loss(*args, **kwargs)

    epoch = {"data": examples(46), "max_steps": -1, "num_train_epochs": 1}  # its twelfth step is a short one
    micro = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    small, small_log = train(options(), model=fresh(torch.float64), kind=Spy, **micro, **epoch)
    large, large_log = train(options(), model=fresh(torch.float64), per_device_train_batch_size=4, **epoch)
    steps = [line for line in small_log if "loss" in line]
    assert len(steps) == 12
    assert seen == [(line["step"], line["precision"]) for line in steps for _ in range(4)][:46]
    for one, other in zip(small_log, large_log, strict=True):
        assert (one["applied"], one.get("precision")) == (other["applied"], other.get("precision"))
        assert one.get("loss", 0.0) == pytest.approx(other.get("loss", 0.0), rel=1e-5)
    assert_close(weights_of(small.model), weights_of(large.model))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw_torch"])
def test_a_withheld_step_leaves_the_weights_alone_and_an_applied_one_does_not(train, fresh, optimizer):
    watch = Snapshots()
    trainer, log = train(
        options(), optim=optimizer, weight_decay=0.1, max_grad_norm=1.0, callbacks=[watch], max_steps=20
    )
    steps = [line for line in log if "loss" in line]
    assert not all(line["applied"] for line in steps)
    for line, before, after in zip(steps, [weights_of(fresh()), *watch.weights], watch.weights, strict=False):
        assert equal(before, after) != line["applied"], line["step"]
    leftover = 0 if len(log) == 20 else log[-1]["leftover"]
    assert equal(watch.weights[-1], weights_of(trainer.model)) == (not leftover)
    assert trainer.delayed.count == 0


def test_the_log_tells_everything_about_each_step(train):
    _, log = train(options(), max_steps=20, lr_scheduler_type="cosine")
    collected, steps = 0, [line for line in log if "loss" in line]
    for number, line in enumerate(steps, start=1):
        assert tuple(line) == FIELDS
        assert line["step"] == number
        assert set(line["scores"]) == {str(p) for p in PRECISIONS}
        assert sum(score is None for score in line["scores"].values()) == max(0, 7 - number)
        if number > 6:
            assert line["scores"][line["precision"]] == max(line["scores"].values())
        assert line["loss"] > 0
        assert line["gradient_norm"] > 0
        assert line["tokens_per_second"] > 0
        assert line["memory"] is None or torch.cuda.is_available()
        collected += line["precision"] in ULTRA_LOW
        assert line["applied"] == (line["precision"] not in ULTRA_LOW or collected == 3)
        collected %= 3
        assert line["accumulated"] == collected
    assert log[20:] == ([{"step": 20, "leftover": collected, "applied": True}] if collected else [])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw_torch"])
def test_the_accumulator_may_live_on_the_host(train, optimizer):
    rate = {"optim": optimizer, "learning_rate": 1e-3}
    device, log = train(options(), **rate)
    host, other = train(options(accumulator="host"), **rate)
    assert [line["applied"] for line in log] == [line["applied"] for line in other]
    assert equal(weights_of(device.model), weights_of(host.model))


@pytest.mark.parametrize("method", ["otaro", "bps", "uniform", "fixed:E5M4", "fp"])
def test_every_method_learns(train, method):
    few = examples(4)
    trainer, log = train(
        options(method=method), data=few, optim="adamw_torch", learning_rate=3e-3, max_steps=30
    )
    path = {line["precision"] for line in log if "loss" in line}
    expected = {"fixed:E5M4": {"E5M4"}, "fp": {"fp"}}.get(method)
    assert path == expected if expected else len(path) >= 4
    assert all(line["applied"] for line in log) == (method != "otaro")
    assert sum(line["loss"] for line in log[-6:-1]) < 0.7 * sum(line["loss"] for line in log[:5])
    assert trainer.precisely.precision is None


def test_full_precision_is_plain_trainer_bit_for_bit(train, fresh, tmp_path):
    settings = {
        "optim": "adamw_torch",
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "cosine",
        "gradient_accumulation_steps": 2,
    }
    plain = Trainer(fresh(), arguments(tmp_path, **settings), train_dataset=examples())
    plain.train()
    ours, log = train(options(method="fp"), **settings)
    assert equal(weights_of(plain.model), weights_of(ours.model))
    history = [line for line in plain.state.log_history if "loss" in line]
    assert [line["loss"] for line in log] == pytest.approx([line["loss"] for line in history], rel=1e-6)
    assert [line["gradient_norm"] for line in log] == pytest.approx(
        [line["grad_norm"] for line in history], rel=1e-6
    )
    assert [line["lr"] for line in log] == [line["learning_rate"] for line in history]


def test_the_schedule_advances_on_withheld_steps_and_the_leftover_gets_the_last_rate(train, fresh):
    watch = Snapshots()
    low = options(precisions=(Precision("E5M3"),), delay=4)
    trainer, log = train(low, max_steps=6, lr_scheduler_type="cosine", callbacks=[watch])
    expected = [2.0**-7 * (1 + math.cos(math.pi * step / 6)) / 2 for step in range(6)]
    assert [line["lr"] for line in log[:6]] == pytest.approx(expected)
    assert log[6]["leftover"] == 2
    assert not any(trainer.lr_scheduler.get_last_lr())

    # The last two gradients were taken at the same weights; they lead from there to the end at the rate of
    # step 6.
    assert equal(watch.weights[3], watch.weights[5])
    start = fresh()
    start.load_state_dict(watch.weights[5])
    again, _ = train(low, model=start, data=examples()[8:12], max_steps=2, learning_rate=log[5]["lr"])
    assert equal(weights_of(again.model), weights_of(trainer.model))
    assert not equal(watch.weights[5], weights_of(trainer.model))


def by_hand(model, batch, share, precision="E5M4"):
    """The loss and its gradients, from a student with decoded weights and a teacher with the full ones."""
    ids, labels = (torch.stack([example[key] for example in batch]) for key in ("input_ids", "labels"))
    with torch.no_grad():
        teacher = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    for parameter in model.parameters():
        if parameter.dim() == 2 and precision:
            parameter.data = otaro.encode(parameter.data.float()).decode(precision).to(parameter.dtype)
    student = model(input_ids=ids).logits[:, :-1]
    counted = labels[:, 1:] != -100
    plain = cross_entropy(student[counted], labels[:, 1:][counted])
    divergence = (teacher.exp() * (teacher - student.log_softmax(-1))).sum(-1)[counted].mean()
    (loss := (1 - share) * plain + share * divergence).backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_distillation_mixes_cross_entropy_and_divergence_from_the_full_weights(train, fresh, share):
    loss, gradients = by_hand(fresh(), examples()[:4], share)
    plain, _ = by_hand(fresh(), examples()[:4], 0.0)
    for per_device, micro_batches in ((4, 1), (1, 4)):
        settings = {
            "max_steps": 1,
            "per_device_train_batch_size": per_device,
            "gradient_accumulation_steps": micro_batches,
        }
        trainer, log = train(options(method="fixed:E5M4", distill=share), **settings)
        assert log[0]["loss"] == pytest.approx(loss, rel=1e-5)
        assert log[0]["cross_entropy"] == pytest.approx(plain, rel=1e-5)
        expected = {name: weight - 2.0**-7 * gradients[name] for name, weight in weights_of(fresh()).items()}
        # had the teacher passed any gradient on, these would differ
        assert_close(weights_of(trainer.model), expected)


@pytest.mark.parametrize("in_slices", [False, True], ids=["whole logits", "in slices"])
@pytest.mark.parametrize("distill", [0.0, 0.5])
def test_a_share_in_full_precision_is_a_pass_of_its_own_and_the_teacher_of_the_other(
    train, fresh, monkeypatch, distill, in_slices
):
    """loss = 1/3 CE_0 + 2/3 ((1 - d) CE_m + d KL(p_0, p_m)); no third pass, no gradient through the teacher.

    Norms and losses are in float32: hence 16 of its last bits, of the largest gradient.
    """
    if in_slices:
        monkeypatch.setattr(sliced, "SLICE_BYTES", 5 * 4 * 120)
    full_loss, of_full = by_hand(fresh(torch.float64), examples()[:4], 0.0, None)
    loss, of_low = by_hand(fresh(torch.float64), examples()[:4], distill)
    plain, _ = by_hand(fresh(torch.float64), examples()[:4], 0.0)
    for per_device, micro_batches in ((4, 1), (1, 4)):
        returned, passes = [], []

        class Spy(OtaroTrainer):
            def training_step(self, *args, returned=returned):
                returned.append(super().training_step(*args).item())
                return torch.tensor(returned[-1])

        model = fresh(torch.float64)
        model.model.register_forward_hook(
            lambda module, *_, passes=passes: passes.append(1) if module.training else None
        )
        settings = {
            "max_steps": 1,
            "per_device_train_batch_size": per_device,
            "gradient_accumulation_steps": micro_batches,
        }
        chosen = options(method="fixed:E5M4", full=1 / 3, distill=distill)
        trainer, log = train(chosen, model=model, kind=Spy, **settings)
        assert len(passes) == 2 * micro_batches
        assert log[0]["loss"] == pytest.approx(loss, rel=16 * 2.0**-24)
        assert log[0]["cross_entropy"] == pytest.approx(plain, rel=16 * 2.0**-24)
        assert sum(returned) == pytest.approx(full_loss / 3 + loss * 2 / 3, rel=16 * 2.0**-24)
        after = weights_of(trainer.model)
        for name, weight in weights_of(fresh(torch.float64)).items():
            expected = of_full[name] / 3 + of_low[name] * 2 / 3
            largest = float(expected.abs().max())
            torch.testing.assert_close(
                (weight - after[name]) / 2.0**-7, expected, atol=16 * 2.0**-24 * largest, rtol=0.0
            )
        assert trainer._teacher is None


def test_without_a_share_and_at_full_precision_nothing_is_distilled(train, monkeypatch):
    monkeypatch.setattr(
        "otaro.tune.losses._divergence", lambda *_: pytest.fail("computed although not asked for")
    )
    train(options(distill=0.0), max_steps=8)
    teacher, plain = (train(options(method="fp", distill=share), max_steps=8)[0] for share in (0.5, 0.0))
    assert equal(weights_of(teacher.model), weights_of(plain.model))


def test_a_micro_batch_without_any_label_adds_nothing(train):
    data = examples(8)
    for unlabelled in data[::2]:
        unlabelled["labels"] = torch.full_like(unlabelled["labels"], -100)
    settings = {"max_steps": 4, "gradient_accumulation_steps": 2}
    trainer, log = train(
        options(method="fixed:E5M4", distill=0.5), data=data, per_device_train_batch_size=1, **settings
    )
    assert not any(math.isnan(line["loss"]) for line in log)
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


@pytest.mark.parametrize("chosen", [options(distill=0.5), BEST], ids=["otaro", "best"])
def test_recomputed_activations_change_nothing(train, fresh, chosen):
    """The recomputation happens in the backward pass, which must still be at the precision of the step."""
    plain, _ = train(chosen, model=fresh(torch.float64))
    recomputed, _ = train(chosen, model=fresh(torch.float64), gradient_checkpointing=True)
    assert recomputed.model.is_gradient_checkpointing
    assert_close(weights_of(plain.model), weights_of(recomputed.model), 1e-6)


def test_bf16_keeps_full_weights_and_a_full_accumulator(train):
    _, log = train(options(distill=0.5), max_steps=1)
    trainer, mixed_log = train(options(distill=0.5, delay=1000), bf16=True)
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    assert mixed_log[0]["loss"] == pytest.approx(log[0]["loss"], rel=0.02)
    assert mixed_log[0]["loss"] != log[0]["loss"]
    assert mixed_log[-1]["leftover"] >= 2


def test_the_recipe_best_keeps_full_weights_in_bf16_too(train):
    trainer, log = train(BEST, bf16=True, eval_dataset=examples(4))
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    assert {tensor.dtype for tensor in trainer.average.tensors().values()} == {torch.float32}
    assert trainer.average.count == 6  # of twelve steps
    assert all(math.isfinite(line["loss"]) for line in log[:-1])
    assert log[-1]["kept"] in ("average", "last")


class Stream(torch.utils.data.IterableDataset):
    """Examples without a number."""

    def __iter__(self):
        return iter(examples())


@pytest.mark.parametrize(
    ("data", "changes", "share"),
    [
        (examples(8), {"max_steps": 12}, 2 / 3),  # three times
        (examples(8), {"max_steps": 13}, 1 / 3),
        (examples(8), {"max_steps": -1, "num_train_epochs": 3}, 2 / 3),
        (examples(8), {"max_steps": -1, "num_train_epochs": 3.5}, 1 / 3),
        (Stream(), {"max_steps": 3}, 2 / 3),  # taken to be new
    ],
    ids=["steps", "more steps", "epochs", "more epochs", "stream"],
)
def test_how_often_data_are_seen_says_how_much_is_learnt_in_full_precision(
    train, fresh, data, changes, share
):
    chosen = Options(method="fixed:E5M3", full=None)
    trainer, _ = train(chosen, model=fresh(torch.float64), data=data, **changes)
    assert trainer.full_share == share
    told, _ = train(replace(chosen, full=share), model=fresh(torch.float64), data=data, **changes)
    assert_close(weights_of(trainer.model), weights_of(told.model), 0)


def test_an_average_is_judged_by_the_mean_over_the_precisions_tuned_for(train):
    held = examples(6)
    batch = {key: torch.stack([example[key] for example in held]) for key in held[0]}
    for evaluated in (held, {"one": held, "same": held}):
        trainer, log = train(options(method="bps", average=0.5), eval_dataset=evaluated, max_steps=2)
        found = losses_by_precision(trainer.model, trainer.precisely, PRECISIONS, [batch])
        assert log[-1][log[-1]["kept"]] == pytest.approx(sum(found) / 6, rel=1e-6)


def test_losses_by_precision_are_means_over_all_labels(fresh):
    data = examples(6)
    batches = [{key: torch.stack([e[key] for e in some]) for key in data[0]} for some in (data[:4], data[4:])]
    model, precisely = fresh(), Precisely()
    prepare(model, precisely)
    model.train()
    found = losses_by_precision(model, precisely, [None, *PRECISIONS], batches)
    assert model.training
    assert found == pytest.approx(
        [by_hand(fresh(), data, 0.0, at)[0] for at in (None, *PRECISIONS)], rel=1e-5
    )


def test_losses_by_precision_do_not_count_what_is_padded(fresh):
    first, second = ({key: value.tolist() for key, value in example.items()} for example in examples(2))
    second = {key: value[:-4] for key, value in second.items()}
    counts = [sum(label != -100 for label in example["labels"][1:]) for example in (first, second)]
    model, precisely, join = fresh(), Precisely(), collate(0)
    prepare(model, precisely)
    alone = [
        losses_by_precision(model, precisely, [None], [join([example])])[0] for example in (first, second)
    ]
    (found,) = losses_by_precision(model, precisely, [None], [join([first, second])])
    assert found == pytest.approx(
        sum(mean * count for mean, count in zip(alone, counts, strict=True)) / sum(counts), rel=1e-5
    )


@pytest.fixture
def sft(tmp_path):
    """sft(model, options, argument=...) trains by TRL's SFTTrainer with the mixin; returns it and its log."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")

    def run(model, chosen, data=None, **changes):
        settings = {
            "use_cpu": True,
            "max_steps": 8,
            "per_device_train_batch_size": 2,
            "max_length": 32,
            "save_strategy": "no",
        }
        update = {
            "optim": "sgd",
            "learning_rate": 2.0**-7,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
        }
        arguments = trl.SFTConfig(tmp_path, bf16=False, report_to=[], **{**settings, **update, **changes})
        log = tmp_path / "log.jsonl"
        reader = {"processing_class": AutoTokenizer.from_pretrained(MODEL_DIR)}
        data = datasets.Dataset.from_dict(data or {"text": ["One day a small fox went out."] * 16})
        kind = type("OtaroSFTTrainer", (OtaroMixin, trl.SFTTrainer), {})
        held = data.select(range(4))
        trainer = kind(
            model, arguments, train_dataset=data, eval_dataset=held, **reader, otaro=chosen, otaro_log=log
        )
        trainer.train()
        return trainer, [json.loads(line) for line in log.read_text().splitlines()]

    return run


def test_it_mixes_into_trl(sft):
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    _, steps = sft(model, options())
    assert [line["precision"] for line in steps[:6]] == ["E5M8", "E5M7", "E5M6", "E5M5", "E5M4", "E5M3"]
    assert [line["applied"] for line in steps[:6]] == [True, True, True, True, False, False]


def test_the_default_in_trl_is_the_recipe_best(sft):
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    trainer, steps = sft(model, None, learning_rate=5e-5, gradient_checkpointing=True)
    assert (trainer.otaro, trainer.average.count, len(steps)) == (BEST, 4, 9)
    assert steps[-1]["kept"] in ("average", "last")


@pytest.mark.parametrize(("share", "full"), [(0.0, 0.0), (0.5, 0.0), (0.5, 1 / 3)])
def test_trl_trains_through_the_same_quantized_head_and_teacher(train, fresh, sft, share, full):
    """Of itself SFTTrainer takes the head's weights past its forward, and its logits carry no gradients."""
    tokens = torch.randint(3, 120, (8, 10), generator=torch.Generator().manual_seed(1))
    few = {"max_steps": 2, "train_sampling_strategy": "sequential", "gradient_accumulation_steps": 2}
    chosen = Options(method="fixed:E5M3", distill=share, full=full)
    data = [{"input_ids": ids, "labels": ids} for ids in tokens]
    ours, log = train(chosen, model=fresh(torch.float64), data=data, **few)
    theirs, their_log = sft(fresh(torch.float64), chosen, data={"input_ids": tokens.tolist()}, **few)
    assert [line["loss"] for line in their_log] == pytest.approx([line["loss"] for line in log], rel=1e-5)
    assert_close(weights_of(theirs.model), weights_of(ours.model), 1e-6)


def test_a_loss_of_trl_that_passes_the_quantized_head_by_is_refused(sft, fresh):
    with pytest.raises(TrainingError, match="loss_type='nll'"):
        sft(fresh(), options(), loss_type="dft")


@pytest.mark.parametrize("kept", [None, "embed_tokens", "lm_head"])
def test_lora_trains_through_the_weights_as_they_will_be_packed(train, fresh, kept):
    """The adapters through the merged weight, and a module that is tuned in whole beside them as it is."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    saved = {"modules_to_save": [kept]} if kept else {}
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM", **saved
    )
    model = peft.get_peft_model(fresh(), config)
    before, (trainer, _) = weights_of(model), train(options(), model=model, max_steps=20)
    after = weights_of(trainer.model)
    tuned_names = {name for name in before if "lora_" in name or "modules_to_save" in name}
    assert len([name for name in tuned_names if "modules_to_save" in name]) == (kept is not None)
    assert {name for name in before if not torch.equal(before[name], after[name])} == tuned_names
    batch = {key: torch.stack([example[key] for example in examples(4)]) for key in ("input_ids", "labels")}
    tuned = losses_by_precision(trainer.model, trainer.precisely, list(PRECISIONS), [batch])
    restore(trainer.model)
    merged, precisely = trainer.model.merge_and_unload(), Precisely()
    prepare(merged, precisely)
    assert losses_by_precision(merged, precisely, list(PRECISIONS), [batch]) == pytest.approx(tuned, rel=1e-5)


@pytest.mark.parametrize("full", [0.0, 1 / 3])
def test_compiled_steps_give_the_same_path_and_weights_from_one_graph(train, fresh, full):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    chosen = options(method="uniform", full=full, distill=0.5, distill_at=PRECISIONS)

    class Compiled(OtaroTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.compile_steps(backend="aot_eager")  # the same graphs, without a compiler's minute

    plain, log = train(chosen, model=fresh(torch.float64))
    compiled, compiled_log = train(chosen, model=fresh(torch.float64), kind=Compiled)
    assert len({line["precision"] for line in log}) >= 4
    assert [line["precision"] for line in log] == [line["precision"] for line in compiled_log]
    assert_close(weights_of(compiled.model), weights_of(plain.model))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 3 <= graphs <= 5  # the layer as student and as teacher, and the losses: no graph per precision


def test_a_checkpoint_without_its_optimizer_is_not_called_complete(train):
    trainer, _ = train(options(), save_strategy="steps", save_steps=6, save_only_model=True)
    run = Path(trainer.args.output_dir)
    assert (run / "checkpoint-12" / "model.safetensors").is_file()
    assert last_complete_checkpoint(run) is None


def test_neither_leftovers_nor_averages_touch_the_best_weights_that_were_loaded_at_the_end(train):
    held = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 6, "save_steps": 6}

    held |= {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    with pytest.warns(UserWarning, match="no average takes their place"):
        trainer, log = train(options(delay=100, average=0.5), eval_dataset=examples(4), **held)
    assert log[-1]["leftover"] > 0
    assert log[-1]["applied"] is False
    best = load_file(Path(trainer.state.best_model_checkpoint) / "model.safetensors")
    assert all(
        torch.equal(parameter, best[name])
        for name, parameter in weights_of(trainer.model).items()
        if name in best
    )


def test_a_loss_that_is_no_number_stops_the_run_and_leaves_its_checkpoints_alone(train, fresh, tmp_path):
    class Broken(OtaroTrainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return loss * math.nan if self.state.global_step == 7 else loss

    with pytest.raises(TrainingError) as stopped:
        train(
            replace(BEST, average=0.7),
            eval_dataset=examples(4),
            kind=Broken,
            save_strategy="steps",
            save_steps=3,
        )
    last = last_complete_checkpoint(tmp_path / "0")
    assert last.name == "checkpoint-6"
    assert re.search(
        rf"the loss became nan at step 8, trained at E5M\d; the last good checkpoint is {last}",
        str(stopped.value),
    )
    assert all(weight.isfinite().all() for weight in load_file(last / "otaro_average.safetensors").values())


@pytest.mark.parametrize("method", ["uniform", "otaro"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_is_neither_applied_nor_kept_though_the_loss_is_finite(
    train, tmp_path, method, bad
):
    """Of a delayed update, too: the accumulator must not carry it into a later one, or into a checkpoint."""
    trainers, steps = [], Snapshots()

    class Broken(OtaroTrainer):
        def training_step(self, model, *args, **kwargs):
            trainers[:] = [self]
            if self.state.global_step == 7:
                model.lm_head.weight.register_hook(
                    lambda gradient: gradient.index_fill(1, torch.tensor(3), bad)
                )
            return super().training_step(model, *args, **kwargs)

    chosen = options(method=method, precisions=(Precision("E5M3"),), delay=3)
    with pytest.raises(TrainingError) as stopped:
        train(chosen, kind=Broken, callbacks=[steps], save_strategy="steps", save_steps=3)
    last = tmp_path / "0" / "checkpoint-6"
    assert re.search(
        rf"the norm of the gradient became {bad} at step 8, trained at E5M3, while the loss was [\d.]+; "
        rf"the last good checkpoint is {last}",
        str(stopped.value),
    )
    (trainer,) = trainers
    after = weights_of(trainer.model)
    assert all(torch.equal(after[name], weight) for name, weight in steps.weights[-1].items())
    if method == "otaro":
        assert trainer.delayed.count == 7 % 3
        assert all(total.isfinite().all() for total in trainer.delayed.tensors().values())


@pytest.mark.parametrize("place", ["weight", "accumulator", "mean"])
def test_a_checkpoint_of_numbers_that_are_none_is_not_written(train, tmp_path, place):
    """Whatever made them so: a step of the optimizer that overflows, say, which no gradient foretells."""

    class Spoiled(OtaroTrainer):
        def _save_checkpoint(self, *args):
            if self.state.global_step == 6:
                kept = {
                    "weight": self.model.named_parameters,
                    "accumulator": self.delayed.tensors,
                    "mean": self.average.tensors,
                }
                dict(kept[place]())["model.norm.weight"].data[7] = math.inf
            super()._save_checkpoint(*args)

    chosen, judged = (
        options(precisions=(Precision("E5M3"),), delay=100, average=0.9),
        {"eval_dataset": examples(4)},
    )
    words = (
        r"model\.norm\.weight was no longer finite after step 6; the last good checkpoint is "
        rf"{tmp_path}/0/checkpoint-3"
    )
    with pytest.raises(TrainingError, match=words):
        train(chosen, kind=Spoiled, save_strategy="steps", save_steps=3, **judged)
    assert [path.name for path in (tmp_path / "0").glob("checkpoint-*")] == ["checkpoint-3"]


def test_weights_that_are_no_numbers_at_the_end_are_refused(train):
    class Spoil(TrainerCallback):
        def on_train_end(self, args, state, control, model, **kwargs):
            model.model.norm.weight.data[7] = math.nan

    with pytest.raises(
        TrainingError,
        match=r"the weight model\.norm\.weight was no longer finite after "
        r"step 12",
    ):
        train(options(method="fp"), callbacks=[Spoil()])


def test_the_last_good_checkpoint_is_one_whose_weights_are_all_finite(tmp_path):
    for step, value in ((10, 1.0), (20, 2.0), (30, math.nan)):
        (folder := tmp_path / f"checkpoint-{step}").mkdir()
        save_file(
            {"weight": torch.tensor([[0.0, value]]), "empty": torch.empty(0, 4)}, folder / "model.safetensors"
        )
        (folder / "otaro_complete").touch()
    assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-30"
    assert last_good_checkpoint(tmp_path) == tmp_path / "checkpoint-20"
    assert last_good_checkpoint(tmp_path / "checkpoint-10") is None


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "otaro_state.json"])
def test_a_checkpoint_that_was_cut_off_is_not_gone_on_from(tmp_path, name):
    for step in (10, 20):
        (folder := tmp_path / f"checkpoint-{step}").mkdir()
        save_file({"weight": torch.zeros(400)}, folder / "model.safetensors")
        torch.save({"state": torch.zeros(400)}, folder / "optimizer.pt")
        (folder / "otaro_state.json").write_text(json.dumps({"count": 1}))
        (folder / "otaro_complete").touch()
    assert last_good_checkpoint(tmp_path) == tmp_path / "checkpoint-20"
    whole = (tmp_path / "checkpoint-20" / name).read_bytes()
    (tmp_path / "checkpoint-20" / name).write_bytes(whole[: len(whole) // 2])
    assert last_good_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


@pytest.mark.parametrize("leftover", ["apply", "drop"])
def test_what_still_waits_at_the_end_is_applied_or_dropped(train, leftover):
    steps = Snapshots()
    trainer, log = train(
        options(precisions=(Precision("E5M3"),), delay=5, leftover=leftover), callbacks=[steps]
    )
    assert log[-1] == {"step": 12, "leftover": 2, "applied": leftover == "apply"}
    same = [
        torch.equal(weight, steps.weights[-1][name]) for name, weight in weights_of(trainer.model).items()
    ]
    assert all(same) if leftover == "drop" else not any(same)


SHARDED_IN_BFLOAT16 = """
import os
os.environ |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
import torch
from transformers import AutoModelForCausalLM, TrainingArguments
from otaro.tune.config import Options
from otaro.tune.trainer import OtaroTrainer

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
fsdp = dict(fsdp=True, fsdp_config=dict(state_dict_type="SHARDED_STATE_DICT"))
quiet = dict(save_strategy="no", report_to=[], disable_tqdm=True)
arguments = TrainingArguments({directory!r}, use_cpu=True, bf16=True, max_steps=1, **fsdp, **quiet)
model = AutoModelForCausalLM.from_pretrained({checkpoint!r}, dtype=torch.float32)
data = [dict(input_ids=torch.arange(8), labels=torch.arange(8))] * 8
trainer = OtaroTrainer(model, arguments, train_dataset=data, otaro=Options(method="fixed:E5M8"))
seen = set()
layer = model.model.layers[0].self_attn.q_proj
layer.register_forward_hook(
    lambda module, inputs, output: seen.add((str(module.weight.dtype), str(output.dtype)))
)
trainer.train()
assert trainer.is_fsdp_enabled
print(seen)
"""


def test_weights_that_are_shared_out_are_quantized_as_they_are_and_multiplied_in_bfloat16(
    in_child, checkpoint_dir, tmp_path
):
    """FSDP would hand them out in bfloat16, whose eight bits are no longer those that are packed."""
    child = in_child(
        SHARDED_IN_BFLOAT16.format(directory=str(tmp_path / "run"), checkpoint=str(checkpoint_dir))
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines()[-1] == "{('torch.float32', 'torch.bfloat16')}"


# a tied head, biases, experts
@pytest.mark.parametrize("architecture", ["llama_tied", "qwen2", "mixtral", "qwen3_moe"])
def test_every_weight_of_a_model_is_reached_by_the_loss_unless_one_is_not_used(random_model, architecture):
    """Experts are told apart from an unused weight: those in one stack have a gradient whichever is taken."""
    model = random_model(architecture).float()
    prepare(model, Precisely(64, "midpoint"))
    assert reaches_all(model)
    assert all(weight.grad is None for weight in model.parameters())
    model.model.unused = torch.nn.Linear(2, 2)
    assert not reaches_all(model)
    model.model.unused.requires_grad_(False)
    assert reaches_all(model)
