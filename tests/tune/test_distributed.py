"""Two processes that talk through gloo: DDP through the trainer, and FSDP2 by hand.

On the CPU Trainer turns FSDP into DDP, so `fully_shard` is applied to a prepared model directly, in a loop that does what the
trainer does with gradients. Both run in one launch of torchrun, since most of its time goes into imports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainingArguments

from otaro.sefp.precision import Precision
from otaro.tune.accumulate import GradientAccumulator, release, withhold
from otaro.tune.config import Options
from otaro.tune.fake_quant import Precisely, prepare
from otaro.tune.trainer import OtaroTrainer

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this build of torch cannot run several processes through gloo",
)

CASES = {  # options and arguments
    "otaro": ({"method": "otaro"}, {}),
    "otaro_micro": ({"method": "otaro", "accumulate": "mean", "distill": 0.5}, {"gradient_accumulation_steps": 2}),
    "uniform": (
        {"method": "uniform", "distill": 0.5},
        # With its usual epsilon Adam blows rounding errors of tiny gradients up to whole steps.
        {"optim": "adamw_torch", "adam_epsilon": 1e-3, "learning_rate": 1e-3, "max_grad_norm": 1.0},
    ),
}
PATH = ["E5M8", "E5M4", "E5M6", "E5M3", "E5M5", "E5M4", "E5M3", "E5M7", "E5M3"]  # of the sharded model; a delay of 3


def examples():
    """The two processes see different numbers of labels in each step."""
    tokens = torch.randint(3, 120, (64, 10), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": ids, "labels": ids.where(torch.arange(10) >= n % 4, -100)} for n, ids in enumerate(tokens)]


def train(checkpoint, directory, case, batch_size):
    """Through the trainer; returns weights and, in the first process, the log."""
    own, changes = CASES[case]
    settings = {"optim": "sgd", "learning_rate": 2.0**-7, "max_grad_norm": 0.0, **changes}
    arguments = TrainingArguments(
        directory,
        use_cpu=True,
        max_steps=10,
        per_device_train_batch_size=batch_size,
        train_sampling_strategy="sequential",
        lr_scheduler_type="cosine",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    options = Options(**{"exploration": 30.0, "delay": 3, "distill": 0.0, **own})
    log = directory / f"{case}.jsonl"
    trainer = OtaroTrainer(model, arguments, train_dataset=examples(), otaro=options, otaro_log=log)
    paths = []
    record = trainer.search.record
    trainer.search.record = lambda precision, loss: (paths.append([str(precision), loss]), record(precision, loss))
    trainer.train()
    return model.state_dict(), paths


def train_by_hand(model, batches, place):
    """What the trainer does with gradients, on whatever kind of tensor they are; plain SGD."""
    precisely, accumulator = model.lm_head.precisely, GradientAccumulator(3, "sum", place)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), lr=2.0**-7)
    for name, ids in zip(PATH, batches, strict=True):
        with precisely.at(Precision(name)):
            model(input_ids=ids, labels=ids).loss.backward()
        if name in ("E5M4", "E5M3") and accumulator.add(withhold(parameters)):
            release(parameters, accumulator)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert accumulator.count == 2


def prepared(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    prepare(model, Precisely())
    return model


def batches():
    return torch.randint(3, 120, (len(PATH), 4, 10), generator=torch.Generator().manual_seed(2))


def main(checkpoint, directory):
    """Run by each of the two processes."""
    from pathlib import Path

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.set_num_threads(1)
    rank, results = int(os.environ["RANK"]), {}
    for case in CASES:
        results[case] = train(checkpoint, Path(directory), case, 2)
    mesh = init_device_mesh("cpu", (2,))
    for place in ("device", "host"):
        model = prepared(checkpoint)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        train_by_hand(model, [batch.chunk(2)[rank] for batch in batches()], place)
        results[f"sharded_{place}"] = {name: parameter.full_tensor() for name, parameter in model.state_dict().items()}
    torch.save(results, Path(directory) / f"rank{rank}.pt")


@pytest.fixture(scope="module")
def ranks(checkpoint_dir, tmp_path_factory):
    """What each of the two processes ended with, and their directory."""
    directory = tmp_path_factory.mktemp("ranks")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = {key: value for key, value in environment.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        [*launch, __file__, str(checkpoint_dir), str(directory)], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return [torch.load(directory / f"rank{rank}.pt") for rank in range(2)], directory


def assert_close(one, other, tolerance=2e-5):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_walk_one_path_to_the_weights_of_one_with_twice_the_batch(ranks, case, checkpoint_dir, tmp_path):
    ((weights, path), (others, other_path)), directory = [rank[case] for rank in ranks[0]], ranks[1]
    assert path == other_path  # the losses, too: that is why they choose alike
    assert all(torch.equal(weights[name], others[name]) for name in weights)

    alone, alone_path = train(checkpoint_dir, tmp_path, case, 4)
    assert [precision for precision, _ in path] == [precision for precision, _ in alone_path]
    assert [loss for _, loss in path] == pytest.approx([loss for _, loss in alone_path], rel=1e-4)
    assert_close(weights, alone)

    log, alone_log = (
        [json.loads(line) for line in (place / f"{case}.jsonl").read_text().splitlines()] for place in (directory, tmp_path)
    )  # written by one of the two alone
    assert [(line["step"], line["applied"]) for line in log] == [(line["step"], line["applied"]) for line in alone_log]
    norms = [[line.get("gradient_norm", 0.0) for line in lines] for lines in (log, alone_log)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


@pytest.mark.parametrize("place", ["device", "host"])
def test_gradients_of_a_sharded_model_are_withheld_and_released_alike(ranks, place, checkpoint_dir):
    weights, others = (rank[f"sharded_{place}"] for rank in ranks[0])
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    model = prepared(checkpoint_dir)
    before = {name: parameter.clone() for name, parameter in model.state_dict().items()}
    train_by_hand(model, batches(), place)
    assert_close(weights, model.state_dict())
    assert not any(torch.equal(before[name], weights[name]) for name in weights)


if __name__ == "__main__":
    main(*sys.argv[1:])
