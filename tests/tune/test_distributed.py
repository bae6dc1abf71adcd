"""Two processes that talk through gloo: DDP and FSDP2 through the trainer, and FSDP2 by hand.

On the CPU accelerate turns FSDP into DDP, unless told otherwise, as `Sharded` does; and it cannot write whole
checkpoints of sharded models there, only parts. So `fully_shard` is also applied to a prepared model
directly, in a loop that does what the trainer does with gradients. All run in one launch of torchrun, since
most of its time goes into imports.

Two processes and one add up the same gradients in another order. In float32 that is enough to put a weight
into another cell of a grid now and then, and everything after it elsewhere by far more than rounding. So the
models are in float64: what the order changes, 2^-52 of a weight, does not come near a cell's border. On the
way transformers goes through float32 (norms, the loss), where a last bit may tip; ten steps multiply that by
their rates, which add up to less than 1. Hence `TOLERANCE`, 16 such bits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from transformers import AutoModelForCausalLM, TrainingArguments

from otaro.sefp.precision import Precision
from otaro.tune.accumulate import GradientAccumulator, release, withhold
from otaro.tune.config import BEST, Options
from otaro.tune.fake_quant import Precisely, prepare
from otaro.tune.trainer import OtaroTrainer

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this build of torch cannot run several processes through gloo",
)

OTARO = {"method": "otaro", "exploration": 30.0, "delay": 3}
CASES = {  # options and arguments
    "otaro": (Options(**OTARO), {}),
    "otaro_micro": (Options(**OTARO, accumulate="mean", distill=0.5), {"gradient_accumulation_steps": 2}),
    "best": (BEST, {"ddp_find_unused_parameters": False}),  # gradients of a step's two passes travel together
    "best_apart": (BEST, {"ddp_find_unused_parameters": True}),
    "uniform": (
        Options(distill=0.5),
        # With its usual epsilon Adam blows rounding errors of tiny gradients up to whole steps.
        {"optim": "adamw_torch", "adam_epsilon": 1e-3, "learning_rate": 1e-3, "max_grad_norm": 1.0},
    ),
}
SHARDED = {
    "fsdp_otaro": ("otaro", {}),
    "fsdp_best": ("best", {}),
    "fsdp_best_resumed": ("best", {}),
    "fsdp_best_empty": ("best", {"empty": True}),
}
TOLERANCE = 16 * 2.0**-24
# of the sharded model; a delay of 3
PATH = ["E5M8", "E5M4", "E5M6", "E5M3", "E5M5", "E5M4", "E5M3", "E5M7", "E5M3"]


def examples():
    """The two processes see different numbers of labels in each step."""
    tokens = torch.randint(3, 120, (64, 10), generator=torch.Generator().manual_seed(1))
    return [
        {"input_ids": ids, "labels": ids.where(torch.arange(10) >= n % 4, -100)}
        for n, ids in enumerate(tokens)
    ]


class Sharded(OtaroTrainer):
    """With FSDP2, on the CPU too."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        self.is_fsdp_enabled = True


def train_sharded(checkpoint, directory, case, *, empty=False, resume=None):
    """As `train`. `empty`: only the first process holds weights, the other gets them at sharding."""
    layers = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "cpu_ram_efficient_loading": empty}
    settings = {"fsdp": True, "fsdp_config": {**layers, "state_dict_type": "SHARDED_STATE_DICT"}}
    saved = {"save_strategy": "steps", "save_steps": 6, "resume": resume}
    return train(
        checkpoint,
        directory,
        case,
        2,
        kind=Sharded,
        empty=empty and os.environ["RANK"] != "0",
        **saved,
        **settings,
    )


def train(checkpoint, directory, case, batch_size, *, kind=OtaroTrainer, empty=False, resume=None, **more):
    """Through the trainer; returns weights and path, and of an average which weights were kept, and why."""
    options, changes = CASES[case]
    settings = {
        "optim": "sgd",
        "learning_rate": 2.0**-7,
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        **changes,
        **more,
    }
    arguments = TrainingArguments(
        directory,
        use_cpu=True,
        max_steps=10,
        per_device_train_batch_size=batch_size,
        train_sampling_strategy="sequential",
        lr_scheduler_type="cosine",
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    if empty:
        for parameter in model.parameters():
            parameter.data.zero_()
    log = directory / f"{case}.jsonl"
    data = examples()
    trainer = kind(model, arguments, train_dataset=data, eval_dataset=data[-8:], otaro=options, otaro_log=log)
    paths = []
    record = trainer.search.record
    trainer.search.record = lambda precision, loss: (
        paths.append([str(precision), loss]),
        record(precision, loss),
    )
    trainer.train(resume_from_checkpoint=resume)
    if trainer.judgement:
        paths.append([trainer.judgement.pop("kept"), *trainer.judgement.values()])
    return {name: whole(weight) for name, weight in trainer.model.state_dict().items()}, paths


def whole(weight):
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


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
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
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
        results[f"sharded_{place}"] = {
            name: parameter.full_tensor() for name, parameter in model.state_dict().items()
        }
    # At last, since the processes take FSDP for their way of working from then on.
    for run, (case, settings) in SHARDED.items():
        folder = Path(directory) / run.removesuffix("_resumed")
        folder.mkdir(exist_ok=True)
        resume = folder / "checkpoint-6" if run.endswith("_resumed") else None
        results[run] = train_sharded(checkpoint, folder, case, resume=resume, **settings)
    torch.save(results, Path(directory) / f"rank{rank}.pt")


@pytest.fixture(scope="module")
def ranks(checkpoint_dir, tmp_path_factory):
    """What each of the two processes ended with, and their directory."""
    directory = tmp_path_factory.mktemp("ranks")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = {key: value for key, value in environment.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        [*launch, __file__, str(checkpoint_dir), str(directory)],
        capture_output=True,
        text=True,
        timeout=480,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return [torch.load(directory / f"rank{rank}.pt") for rank in range(2)], directory


def assert_close(one, other):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_walk_one_path_to_the_weights_of_one_with_twice_the_batch(
    ranks, case, checkpoint_dir, tmp_path
):
    ((weights, path), (others, other_path)), directory = [rank[case] for rank in ranks[0]], ranks[1]
    assert path == other_path  # the losses, too: that is why they choose alike
    assert all(torch.equal(weights[name], others[name]) for name in weights)

    alone, alone_path = train(checkpoint_dir, tmp_path, case, 4)
    assert [taken[0] for taken in path] == [taken[0] for taken in alone_path]
    assert [losses for _, *losses in path] == [
        pytest.approx(losses, rel=TOLERANCE) for _, *losses in alone_path
    ]
    assert (len(path) == 11) == case.startswith("best")
    assert_close(weights, alone)

    log, alone_log = (
        [json.loads(line) for line in (place / f"{case}.jsonl").read_text().splitlines()]
        for place in (directory, tmp_path)
    )  # written by one of the two alone
    told = [[(line["step"], line.get("applied")) for line in lines] for lines in (log, alone_log)]
    assert told[0] == told[1]
    norms = [[line.get("gradient_norm", 0.0) for line in lines] for lines in (log, alone_log)]
    assert norms[0] == pytest.approx(norms[1], rel=TOLERANCE)


@pytest.mark.parametrize("run", SHARDED)
def test_two_processes_that_share_the_weights_out_end_with_the_same_ones(
    ranks, run, checkpoint_dir, tmp_path
):
    (weights, path), (others, other_path) = (rank[run] for rank in ranks[0])
    assert path == other_path
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    alone, alone_path = train(checkpoint_dir, tmp_path, SHARDED[run][0], 4)
    assert [taken[0] for taken in path] == [taken[0] for taken in alone_path][-len(path) :]
    assert len(path) == (4 if run.endswith("_resumed") else 10) + ("best" in run)
    assert_close(weights, alone)


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
