"""The trainer against Algorithm 1 of the paper, read line by line.

`algorithm_1` shares nothing with otaro.tune: it writes decoded weights into an ordinary model and asks
autograd. Both run in float32 on the CPU, and their weights must be equal to the last bit. The learning rate
is a power of two, so that lr * g is exact: torch's SGD computes w - lr * g with one rounding, and the plain
formula then does, too.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainingArguments

import otaro
from otaro.tune.config import Options
from otaro.tune.trainer import OtaroTrainer

STEPS, BATCH, LENGTH = 60, 2, 12
LAMBDA, DELAY, LR = 30.0, 3, 2.0**-7
ULTRA_LOW = ("E5M4", "E5M3")
FINEST_FIRST = ("E5M8", "E5M7", "E5M6", "E5M5", "E5M4", "E5M3")


@pytest.fixture
def load(make_checkpoint):
    return lambda architecture: AutoModelForCausalLM.from_pretrained(
        make_checkpoint(architecture), dtype=torch.float32
    )


def examples():
    """Some labels are left out, a different number in each batch."""
    tokens = torch.randint(3, 120, (STEPS * BATCH, LENGTH), generator=torch.Generator().manual_seed(5))
    for number, ids in enumerate(tokens):
        labels = ids.clone()
        labels[: number % 5] = -100
        yield {"input_ids": ids, "labels": labels}


def loss_of(model, batch):
    """Mean cross entropy over the tokens that have a label."""
    logits = model(input_ids=torch.stack([example["input_ids"] for example in batch])).logits
    targets = torch.nn.functional.pad(
        torch.stack([example["labels"] for example in batch]), (0, 1), value=-100
    )[:, 1:]
    total = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    return total / (targets != -100).sum()


def algorithm_1(model, batches, reconstruction, reduction, exploration=LAMBDA, delay=DELAY):
    """Weights, path, scores, the delayed updates and the leftover; the numbers are the lines of the paper's
    listing.

    What the paper leaves open is done as the design page says: precisions never tried come first, finest
    first, as does the finer one of a tie; what is left in the accumulator at the end is applied.
    """
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    visits, last_loss = dict.fromkeys(FINEST_FIRST, 0), {}
    accumulated, i = {}, 0
    path, standings, updates = [], [], []

    def update(gradients):
        for name, weight in weights.items():
            weight -= LR * gradients[name]

    def reduced():
        return {name: total / i if reduction == "mean" else total for name, total in accumulated.items()}

    for t, batch in enumerate(batches, start=1):  # 1
        scores = {  # 2
            b: exploration * math.sqrt(math.log(t) / visits[b]) - last_loss[b] if visits[b] else math.inf
            for b in FINEST_FIRST
        }
        chosen = max(FINEST_FIRST, key=scores.get)  # 3
        for name, parameter in model.named_parameters():  # Q(w, b*): all matrices, not the norms
            weight = weights[name]
            quantized = (
                otaro.encode(weight, 64, reconstruction).decode(chosen)
                if weight.dim() == 2
                else weight.clone()
            )
            parameter.data, parameter.grad = quantized, None
        loss = loss_of(model, batch)  # 4
        loss.backward()  # 5
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        visits[chosen] += 1
        last_loss[chosen] = loss.item()
        if chosen in ULTRA_LOW:  # 6
            if i == 0:  # 7
                accumulated = gradients  # 8
            else:  # 9
                accumulated = {name: accumulated[name] + gradients[name] for name in weights}  # 10
            i += 1  # 12
            if i == delay:  # 13
                update(reduced())  # 14
                updates.append(t)
                i = 0  # 15
        else:  # 17
            update(gradients)  # 18
        path.append(chosen)
        standings.append({b: None if math.isinf(score) else score for b, score in scores.items()})
    if i:
        update(reduced())
    return weights, path, standings, updates, i


def trained(model, directory, **options):
    """Weights and log of the trainer on the same batches."""
    arguments = TrainingArguments(
        directory,
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        train_sampling_strategy="sequential",
        optim="sgd",
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        weight_decay=0.0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    settings = {"method": "otaro", "exploration": LAMBDA, "delay": DELAY, **options}
    log = directory / "log.jsonl"
    data = list(examples())
    OtaroTrainer(model, arguments, train_dataset=data, otaro=Options(**settings), otaro_log=log).train()
    return dict(model.named_parameters()), [json.loads(line) for line in log.read_text().splitlines()]


def batches():
    data = list(examples())
    return [data[start : start + BATCH] for start in range(0, len(data), BATCH)]


@pytest.mark.parametrize(
    ("architecture", "reduction", "reconstruction"),
    [
        ("llama", "sum", "midpoint"),
        ("llama", "sum", "truncate"),
        ("llama", "mean", "midpoint"),
        ("llama_tied", "sum", "truncate"),
    ],
)
def test_sixty_steps_of_the_trainer_equal_algorithm_1_exactly(
    load, architecture, reconstruction, reduction, tmp_path
):
    expected, path, scores, updates, leftover = algorithm_1(
        load(architecture), batches(), reconstruction, reduction
    )
    weights, log = trained(load(architecture), tmp_path, reconstruction=reconstruction, accumulate=reduction)

    steps = [line for line in log if "precision" in line]
    assert [line["precision"] for line in steps] == path
    assert [line["scores"] for line in steps] == scores
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name]), name

    # The run was a telling one: all precisions, several delayed updates with others in between.
    assert set(path) == set(FINEST_FIRST)
    assert len(updates) >= 4
    assert (
        sum(any(b not in ULTRA_LOW for b in path[a:z]) for a, z in zip([0, *updates], updates, strict=False))
        >= 4
    )
    assert [line["step"] for line in steps if line["precision"] in ULTRA_LOW and line["applied"]] == updates
    assert log[STEPS:] == ([{"step": STEPS, "leftover": leftover, "applied": True}] if leftover else [])


def test_a_delay_of_one_is_path_search_alone(load, tmp_path):
    (tmp_path / "other").mkdir()
    expected, path, *_ = algorithm_1(load("llama"), batches(), "midpoint", "sum", delay=1)
    for directory, options in ((tmp_path, {"delay": 1}), (tmp_path / "other", {"method": "bps"})):
        weights, log = trained(load("llama"), directory, **options)
        assert [line["precision"] for line in log] == path
        assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_what_is_left_over_at_the_end_is_applied(load, reduction, tmp_path):
    """With a delay that is never reached; and without exploration, so that losses alone make the path."""
    expected, path, _, updates, leftover = algorithm_1(
        load("llama"), batches(), "midpoint", reduction, 0.0, 1000
    )
    assert leftover >= 2
    assert not updates
    weights, log = trained(load("llama"), tmp_path, exploration=0.0, delay=1000, accumulate=reduction)
    assert [line["precision"] for line in log[:STEPS]] == path
    assert log[STEPS:] == [{"step": STEPS, "leftover": leftover, "applied": True}]
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())
