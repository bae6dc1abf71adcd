"""What a run is said to need, against what it takes; and what is kept elsewhere, which changes nothing."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

from otaro.sefp.precision import Precision
from otaro.tune import memory
from otaro.tune.config import BEST, Options
from otaro.tune.fake_quant import Precisely, narrow_frozen, prepare
from otaro.tune.memory import Batch, MemoryNeedError, Run
from otaro.tune.steady import Anchor, WeightAverage
from otaro.tune.trainer import OtaroTrainer, TrainingError

GIB = 1 << 30
COPYING = replace(BEST, l2_sp=23.0)
"""Keeps two copies of the weights."""
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


def on_paper(dtype=torch.float32, **changes):
    """A model of these shapes that has no memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model("llama", **{**LLAMA_8B, **changes}), dtype=dtype
        )


@pytest.fixture(scope="module")
def full():
    return on_paper()


def test_full_tuning_of_8b_is_refused_where_it_cannot_work_and_told_what_does(full):
    run = Run(full, BEST, "adamw", Batch(2, 512, bf16=True))
    plan = run.plan(torch.device("cuda"), room=80 * GIB)
    with pytest.raises(MemoryNeedError) as refused:
        plan.check()
    assert str(refused.value).startswith(
        "weights, gradients and optimizer alone take 128.5 GB, and cuda has 85.9 GB; "
    )
    assert "--lora 16 (about 2" in str(refused.value)
    assert "--optimizer adamw8bit (saves 48.2 GB)" in str(refused.value)
    assert "FSDP over" in str(refused.value)


def test_copies_move_to_the_host_before_the_held_weights_go_and_only_as_far_as_needed(full):
    run, seen = Run(full, COPYING, "adamw", Batch(2, 512, bf16=True)), []
    for room in (300, 180, 150, 140, 120):
        plan = run.plan(torch.device("cuda"), room=room * GIB)
        seen.append((plan.copies_on_host, plan.hold, plan.fits))
    assert seen == [
        (False, True, True),
        (True, True, True),
        (True, False, True),
        (True, False, False),
        (True, False, False),
    ]
    told = str(run.plan(torch.device("cuda"), room=180 * GIB))
    assert "the copies of --l2-sp and --average are kept in host memory" in told
    assert "not fit" not in told
    plan = run.plan(torch.device("cuda"), room=140 * GIB)
    plan.check()  # not certain to fail, so it may be tried
    assert "this will probably not fit; what takes less: --lora 16" in str(plan)


def test_on_a_cpu_there_is_no_other_place_to_keep_copies(full):
    plan = Run(full, COPYING, "adamw", Batch(2, 512, bf16=False)).plan(torch.device("cpu"), room=180 * GIB)
    assert not plan.copies_on_host
    assert memory.device_bytes(torch.device("cpu")) > GIB


def test_lora_on_8b_is_promised_in_less_than_30_gb():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    with torch.device("meta"):
        model = on_paper(torch.bfloat16)
        linears = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        lora = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=linears))
    narrow_frozen(lora, torch.bfloat16)
    needs = Run(lora, BEST, "adamw", Batch(2, 512, bf16=True)).needs()
    assert 16.0e9 < needs.weights < 16.3e9
    assert needs.quantized == 0
    assert needs.total < 27e9


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_activations_are_estimated_within_a_fifth(lora, bf16):
    shapes = {"hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 3, "num_attention_heads": 8}
    config = AutoConfig.for_model("llama", **shapes, num_key_value_heads=2, vocab_size=64)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if lora:
        peft = pytest.importorskip("peft", reason="peft is not installed")
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    prepare(model.train(), precisely := Precisely())
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.zeros(2, 128, dtype=torch.long)
    with (
        precisely.at(Precision("E5M4"), torch.bfloat16 if bf16 else None),
        torch.autocast("cpu", enabled=bf16),
    ):
        own |= {
            linear.held.untyped_storage().data_ptr()
            for linear in precisely.linears
            if linear.held is not None
        }
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.get_decoder()(input_ids=ids) if not lora else model.base_model.model.model(input_ids=ids)
    found = sum(tensor.untyped_storage().nbytes() for place, tensor in saved.items() if place not in own)
    assert memory.activation_bytes(model, Batch(2, 128, bf16)) == pytest.approx(found, rel=0.2)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adamw8bit"])
def test_weights_gradients_and_optimizer_are_counted_to_the_byte(random_model, tmp_path, optimizer):
    name = {"adamw": "adamw_torch", "sgd": "sgd", "adamw8bit": "adamw_bnb_8bit"}[optimizer]
    if optimizer == "adamw8bit":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    model = random_model("llama", hidden_size=512, intermediate_size=512, head_dim=128).float()
    trainer = OtaroTrainer(
        model,
        TrainingArguments(
            tmp_path,
            use_cpu=True,
            max_steps=1,
            optim=name,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
        ),
        train_dataset=(data := [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8),
        eval_dataset=data,
        otaro=COPYING,
    )
    needs = trainer._plan().needs
    trainer.train()
    state = sum(
        tensor.nbytes
        for entry in trainer.optimizer.state.values()
        for tensor in entry.values()
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 2
    )
    assert needs.weights == sum(p.nbytes for p in trainer.model.parameters())
    assert needs.gradients == needs.weights == needs.l2_sp == needs.average
    trainer.judge = None  # then nothing is averaged
    assert trainer._plan().needs.average == 0
    # Norms aside; bitsandbytes keeps scales of blocks beside, and weights of fewer than 4,096 in float32.
    assert needs.optimizer == pytest.approx(state, rel=0.02)
    assert {tensor.nbytes for tensor in trainer.average.tensors().values()} == {
        p.nbytes for p in trainer.model.parameters()
    }


def test_the_8_bit_optimizer_learns_and_goes_back_by_l2_sp(random_model, tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    tokens = torch.randint(3, 120, (8, 10), generator=torch.Generator().manual_seed(1))
    settings = {
        "use_cpu": True,
        "max_steps": 30,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "report_to": [],
    }
    arguments = TrainingArguments(
        tmp_path, optim="adamw_bnb_8bit", disable_tqdm=True, save_strategy="no", **settings
    )
    data = [{"input_ids": ids, "labels": ids} for ids in tokens]
    losses = []
    trainer = OtaroTrainer(
        random_model("llama").float(), arguments, train_dataset=data, otaro=Options(l2_sp=1.0)
    )
    trainer.search.record = lambda precision, loss: losses.append(loss)
    trainer.train()
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_the_8_bit_optimizer_is_refused_with_fsdp(random_model, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.Trainer.__init__", lambda self, *_, **__: None)
    sharded = type("Sharded", (OtaroTrainer,), {"is_fsdp_enabled": True})
    monkeypatch.setattr(
        sharded, "args", TrainingArguments(tmp_path, optim="adamw_bnb_8bit", use_cpu=True), raising=False
    )
    plugin = type("Plugin", (), {"fsdp_version": 2})
    state = type("State", (), {"fsdp_plugin": plugin})
    monkeypatch.setattr(sharded, "accelerator", type("Accelerator", (), {"state": state}), raising=False)
    with pytest.raises(TrainingError, match="8-bit optimizer"):
        sharded()


def test_copies_in_host_memory_have_the_same_bits_and_so_do_weights_that_are_not_held(
    random_model, tmp_path, monkeypatch
):
    """Without a GPU both places are the same memory; tests/tune/test_fused.py has the two."""
    tokens = torch.randint(3, 120, (16, 10), generator=torch.Generator().manual_seed(1))
    ended = []
    for small in (False, True):
        settings = {
            "use_cpu": True,
            "max_steps": 8,
            "learning_rate": 1e-4,
            "report_to": [],
            "disable_tqdm": True,
        }
        arguments = TrainingArguments(tmp_path, optim="adamw_torch", save_strategy="no", **settings)
        if small:
            monkeypatch.setattr(memory, "device_bytes", lambda device: 1000)
        data = [{"input_ids": ids, "labels": ids} for ids in tokens]
        trainer = OtaroTrainer(
            random_model("llama").float(), arguments, train_dataset=data, eval_dataset=data, otaro=COPYING
        )
        trainer.train()
        assert trainer.precisely.hold is not small
        assert trainer.average.count == 4
        ended.append([p.detach().clone() for p in trainer.model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ended, strict=True))


def test_an_anchor_and_an_average_on_the_host_do_what_those_on_the_device_do():
    generator = torch.Generator().manual_seed(0)
    start = {
        name: torch.nn.Parameter(torch.randn(70, generator=generator))
        for name in ("a", "b", "x.lora_A.weight")
    }
    ended = []
    for on_host in (False, True):
        weights = copy.deepcopy(start)
        anchor, average = Anchor(weights, 0.25, on_host), WeightAverage(1.0, on_host)
        for step in range(4):
            for parameter in weights.values():
                parameter.data += 1.0 + step
            anchor.apply(weights, 0.5)
            average.add(weights, step + 1, 4)
        average.swap(weights)
        ended.append(weights)
    assert all(torch.equal(ended[0][name], ended[1][name]) for name in start)
    assert not torch.equal(ended[0]["a"], start["a"])
