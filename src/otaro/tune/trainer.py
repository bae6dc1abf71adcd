"""The trainer: `OtaroMixin` over transformers' Trainer, and `OtaroTrainer`, the two together.

Per optimizer step the mixin chooses a precision, runs forward and backward with all weights quantized to it,
and reports the loss to the search. Where a share of the loss is taken in full precision (`full`), that is a
forward and backward of its own before: its activations are gone when the other begins, and what it said is
the teacher of self-distillation. With the method `otaro` the gradients of an ultra-low precision are then
moved into the accumulator and `.grad` set to None: what follows in Trainer's loop, clipping and the
optimizer's step, finds nothing to do, until the N-th such batch puts the collected sum back. So nothing of
the loop is rewritten, and whatever else Trainer does (DDP, FSDP2, gradient accumulation, checkpointing of
activations, bf16, peft, TRL's SFTTrainer, logging) goes on as before. The learning-rate schedule advances on
withheld steps too.

What a pass takes as its loss is `losses.py`, what checkpoints gain is `resuming.py`.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    broadcast_object_list,
    gather_object,
)
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import has_length

from otaro.errors import OtaroWarning
from otaro.sefp.precision import Precision
from otaro.tune.accumulate import release, withhold
from otaro.tune.checkpoints import TrainingError
from otaro.tune.config import Options, recipe
from otaro.tune.fake_quant import Precisely, prepare
from otaro.tune.losses import PassLoss, losses_by_precision, reshard
from otaro.tune.memory import Batch, Plan, Run
from otaro.tune.resuming import ACCUMULATOR_STEM, AVERAGE_STEM, STATE_FILE, Resuming
from otaro.tune.steady import Anchor, WeightAverage

__all__ = ["ACCUMULATOR_STEM", "AVERAGE_STEM", "JUDGED", "STATE_FILE", "UNJUDGED", "OtaroMixin"]
__all__ += ["OtaroTrainer", "TrainingError", "losses_by_precision", "reaches_all", "reshard"]

UNJUDGED = "nothing is held out to judge the mean of the weights by: the run ends with the last ones"
JUDGED = 128
"""Held-out examples of each process that an average is judged by: enough to tell it from the last weights."""


class OtaroMixin(PassLoss, Resuming):
    """Mix in before a Trainer class: `class MyTrainer(OtaroMixin, SFTTrainer)`.

    Takes two more arguments: `otaro=Options(...)`, by default those of the recipe `best`, and
    `otaro_log=Path(...)`, a file that gets one line of JSON per step. The learning rate is Trainer's own. A
    run that is resumed must be given the weights that it started with, as L2-SP goes back to them.

    The recipe averages weights and keeps the mean if it is better on held-out data: on `eval_dataset`, or by
    whatever is put into `judge`, a function without arguments that returns a loss. With neither, a run ends
    with its last weights.
    """

    def __init__(
        self, *args: Any, otaro: Options | None = None, otaro_log: Path | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.otaro = otaro or recipe("best")[0]
        self.otaro.check_rate(self.args.learning_rate)
        if self.args.fp16 and self.otaro.method == "otaro":
            raise TrainingError("fp16 loss scaling cannot be combined with delayed updates; use bf16")
        if self.is_fsdp_enabled and self.accelerator.state.fsdp_plugin.fsdp_version == 1:
            why = "FSDP of version 1 flattens weights, which leaves no matrices to quantize"
            raise TrainingError(f"{why}; use version 2")
        if self.is_fsdp_enabled and self._optimizer_kind() == "adamw8bit":
            why = "the 8-bit optimizer of bitsandbytes cannot update weights that FSDP shards"
            raise TrainingError(f"{why}; use adamw")
        if self.otaro.average and self.args.load_best_model_at_end:
            what = "load_best_model_at_end keeps one checkpoint's weights: no average takes their place"
            warnings.warn(what, stacklevel=2)
        self.precisely = Precisely(self.otaro.group_size, self.otaro.reconstruction)
        prepare(self.model, self.precisely)
        if self.args.n_gpu > 1:
            self.precisely.linears.clear()  # DataParallel copies modules: each quantizes on its device
        self._compute_dtype = torch.bfloat16 if self.args.bf16 else None
        self.search = self.otaro.search(self.args.seed)
        self.delayed = self.otaro.gradient_accumulator()
        self.anchor: Anchor | None = None
        self.average: WeightAverage | None = None
        held_out = getattr(self, "eval_dataset", None)
        self.judge: Callable[[], float] | None = self._held_out_loss if held_out else None
        """Says which weights are better, with the same answer in all processes."""
        self.judgement: dict[str, Any] = {}
        """What the log says of the average: the loss with it, that with the last weights, what was kept."""
        if self.otaro.l2_sp or self.otaro.average:
            self.add_callback(_SteadyCallback(self))
        self._log_path = otaro_log
        self._record: dict[str, Any] | None = None  # of the optimizer step under way
        self.last_record: dict[str, Any] = {}
        """What the log says of the last optimizer step."""
        self._started = 0.0
        self._learning_rates: list[float] = []
        self._planned_steps = 0
        self._compiled = False
        self._prepare_losses()

    def create_accelerator_and_postprocess(self) -> None:
        """Trainer's, with FSDP2 as it was asked for.

        On a CPU accelerate makes DDP of it without a word. And where bfloat16 was asked for it has weights
        gathered in that type, while they are to be quantized as they are: autocast makes the products
        bfloat16 instead.
        """
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        settings, launched = self.args.fsdp_plugin_args, os.environ.get("ACCELERATE_USE_FSDP", "false")
        asked = settings is not None or launched.lower() == "true"
        if asked and state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.FSDP
            # accelerate cannot write checkpoints in whole there
            settings = {**(settings or {}), "state_dict_type": "SHARDED_STATE_DICT"}
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**settings)
            self.is_fsdp_enabled = True
        if self.is_fsdp_enabled and state.fsdp_plugin.fsdp_version == 2:
            state.fsdp_plugin.mixed_precision_policy = None

    def autocast_smart_context_manager(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's leaves it to accelerate, which leaves it to FSDP, which must not have it: see above."""
        if self.is_fsdp_enabled:
            return self.accelerator.autocast()
        return super().autocast_smart_context_manager(*args, **kwargs)

    def compile_steps(self, backend: str = "inductor") -> None:
        """Compile what a step repeats: the decoder layers, with one graph for all, and the losses.

        The quantized weights of linears are held outside the layers and come in like any weight, so the same
        graph serves every precision; expert stacks and LoRA are quantized inside, and need a graph each.
        Small models are bound by the launching of kernels, and this leaves fewer to launch.
        """
        model = self.accelerator.unwrap_model(self.model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        layers = set(model._no_split_modules or ())
        for module in model.modules():
            if type(module).__name__ in layers:
                module.compile(backend=backend)
        self._compile_losses(model, backend)
        self._compiled = True

    # One step -----------------------------------------------------------------------------------------------

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Trainer's, at the precision chosen for this step, and before in full precision for `full` of it."""
        if self._record is None:
            precision = self.search.choose()
            self._record = {"precision": precision, "scores": self.search.scores()}
            self._record |= {"loss": 0.0, "cross_entropy": 0.0, "tokens": 0}
            self._started = time.perf_counter()
        self._record["tokens"] += int(inputs["input_ids"].numel()) if "input_ids" in inputs else 0
        precision, full = self._record["precision"], self.full_share
        told: torch.Tensor | float = 0.0
        if full and precision is not None:
            with self._passing(None, full, teaches=bool(self._distilled(precision))), _together(model):
                told = super().training_step(model, inputs, num_items_in_batch)
        rest = 1.0 if precision is None else 1 - full
        with self._passing(precision, rest):
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        self._teacher = None
        # Trainer scales micro-batches so that they add up to the step's mean
        self._record["loss"] += loss / rest
        self._record["cross_entropy"] += loss / rest * self._plain
        if self.accelerator.sync_gradients:
            self._finish_step(model)
        return told + loss

    @property
    def full_share(self) -> float:
        """Of the loss of a step, that the pass in full precision takes; known once the run has begun.

        Data without a length are a stream, and taken to be new.
        """
        return self.otaro.full_share(self.state.num_train_epochs if has_length(self.train_dataset) else 1)

    def _finish_step(self, model: Any) -> None:
        """After the last backward of an optimizer step: tell the search, keep or release gradients, log."""
        record, self._record = self._record, None
        assert record is not None
        precision: Precision | None = record["precision"]
        parameters = {name: p for name, p in self._named_parameters().items() if p.grad is not None}
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters.values() if p.grad is not None])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        both = torch.stack([record["loss"], record["cross_entropy"]]).float()
        shared = self.accelerator.reduce(both, "mean")  # all ranks see the same, so choose alike
        three = torch.stack([*shared, norm.to(shared.device, torch.float32)])
        loss, cross_entropy, gradient_norm = three.tolist()
        at = f"at step {self.state.global_step + 1}, trained at {precision or 'full precision'}"
        if not math.isfinite(loss):
            raise self._stopped(f"the loss became {loss} {at}")
        # by fp16, which leaves out steps that overflow
        scaled = getattr(self.accelerator, "scaler", None) is not None
        if not math.isfinite(gradient_norm) and not scaled:
            what = f"the norm of the gradient became {gradient_norm}"
            raise self._stopped(f"{what} {at}, while the loss was {loss:.4g}")
        self.search.record(precision, loss)
        applied = True
        if self.delayed is not None and precision in self.otaro.ultra_low:
            applied = self.delayed.add(withhold(parameters))
            if applied:
                release(self._named_parameters(), self.delayed)
        self._learning_rates = [group["lr"] for group in self.optimizer.param_groups]
        seconds = time.perf_counter() - self._started
        self.last_record = {
            "step": self.state.global_step + 1,
            "precision": str(precision) if precision else "fp",
            "loss": loss,
            "cross_entropy": cross_entropy,
            "scores": record["scores"],
            "gradient_norm": gradient_norm,
            "lr": self._learning_rates[0],
            "tokens_per_second": record["tokens"] * self.accelerator.num_processes / seconds,
            "memory": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
            "applied": applied,
            "accumulated": self.delayed.count if self.delayed else 0,
        }
        self._write_log(self.last_record)

    def _after_optimizer_step(self) -> None:
        """Hold the weights back and average them, as far as that was asked for."""
        parameters = self._tuned_parameters()
        if self.anchor is not None:
            self.anchor.apply(parameters, self.last_record["lr"])
        if self.average is not None:
            self.average.add(parameters, self.state.global_step + 1, self.state.max_steps)

    def _drop_anchor(self) -> None:
        """Keep the weights as they are; called before anything changes them, and after FSDP sharded them."""
        if self.otaro.l2_sp and self.anchor is None:
            on_host = self._plan().copies_on_host
            self.anchor = Anchor(self._tuned_parameters(), self.otaro.l2_sp, on_host)

    def _plan(self) -> Plan:
        """What the run takes of its device, and what therefore is kept elsewhere."""
        args = self.args
        size, length = args.per_device_train_batch_size, self._sequence_length()
        batch = Batch(size, length, args.bf16, args.gradient_checkpointing)
        shards = self.accelerator.num_processes if self.is_fsdp_enabled else 1
        options = self.otaro if self.judge is not None else replace(self.otaro, average=0.0)
        run = Run(self.accelerator.unwrap_model(self.model), options, self._optimizer_kind(), batch, shards)
        return run.plan(args.device)

    def _optimizer_kind(self) -> str:
        name = str(getattr(self.args.optim, "value", self.args.optim))
        return "sgd" if name == "sgd" else "adamw8bit" if "8bit" in name else "adamw"

    def _sequence_length(self) -> int:
        """Of the first example, where the data has one to look at; else a usual one."""
        first = self.train_dataset[0] if has_length(self.train_dataset) else None
        return len(first["input_ids"]) if isinstance(first, Mapping) and "input_ids" in first else 1024

    def _named_parameters(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.accelerator.unwrap_model(self.model_wrapped).named_parameters())

    def _tuned_parameters(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self._named_parameters().items() if p.requires_grad}

    # The whole run ------------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's; then gradients that still wait are applied, at the last learning rate, or dropped.

        Where weights are averaged, the mean then takes their place if held-out data say so.
        """
        plan = self._plan()
        # made inside a graph, they would need one for each precision
        self.precisely.hold = plan.hold or self._compiled
        self.average, self.judgement = None, {}
        if self.otaro.average and self.judge is None:
            warnings.warn(UNJUDGED, OtaroWarning, stacklevel=2)
        elif self.otaro.average:
            self.average = WeightAverage(self.otaro.average, plan.copies_on_host)
        result = super().train(*args, **kwargs)
        waiting = self.delayed.count if self.delayed is not None and self._learning_rates else 0
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
            if waiting:
                self._write_log({"step": self.state.global_step, "leftover": waiting, "applied": False})
            return result  # what waits and what was averaged belong to weights that have just been replaced
        if waiting:
            applied = self.otaro.leftover == "apply"
            if applied:
                self._apply_leftover()
            self._write_log({"step": self.state.global_step, "leftover": waiting, "applied": applied})
        if self.average is not None and self.average.count:
            self._keep_the_better()
        self._refuse_what_is_not_finite()
        return result

    def _keep_the_better(self) -> None:
        """The mean or the last weights, by their loss on held-out data."""
        assert self.judge is not None
        assert self.average is not None
        losses = {"last": self.judge()}
        self.average.swap(self._named_parameters())
        losses["average"] = self.judge()
        (kept,) = broadcast_object_list(["average" if losses["average"] < losses["last"] else "last"])
        if kept == "last":
            self.average.swap(self._named_parameters())
        self.judgement = {"step": self.state.global_step, "averaged": self.average.count}
        self.judgement |= {**losses, "kept": kept}
        self._write_log(self.judgement)

    def _held_out_loss(self) -> float:
        """Of `eval_dataset` or the first `JUDGED` examples of each process, over the precisions tuned for."""
        sets, most = self.eval_dataset, max(1, JUDGED // self.args.per_device_eval_batch_size)
        loaders = [self.get_eval_dataloader(name) for name in (sets if isinstance(sets, Mapping) else [None])]
        batches = [batch for loader in loaders for batch in islice(loader, most) if "labels" in batch]
        precisions, dtype = self.otaro.tuned_for, self._compute_dtype
        losses = losses_by_precision(self.model, self.precisely, precisions, batches, dtype)
        reshard(self.model)
        counted = sum(int((batch["labels"][..., 1:] != -100).sum()) for batch in batches)
        parts = gather_object([(fmean(losses) * counted, counted)])
        return float(sum(total for total, _ in parts) / max(sum(tokens for _, tokens in parts), 1))

    def _apply_leftover(self) -> None:
        assert self.delayed is not None
        release(self._named_parameters(), self.delayed)
        if self.args.max_grad_norm:
            self.accelerator.clip_grad_norm_(self.model_wrapped.parameters(), self.args.max_grad_norm)
        for group, rate in zip(self.optimizer.param_groups, self._learning_rates, strict=True):
            group["lr"] = rate  # the schedule has moved on, often to zero
        self.optimizer.step()
        self.model_wrapped.zero_grad()
        if self.average is not None:
            self.average.add(self._tuned_parameters(), self.state.global_step, self.state.max_steps)

    def _write_log(self, record: dict[str, Any]) -> None:
        if self._log_path is not None and self.is_world_process_zero():
            with open(self._log_path, "a") as file:
                file.write(json.dumps(record) + "\n")


class _SteadyCallback(TrainerCallback):  # type: ignore[misc] # transformers is not typed
    def __init__(self, trainer: OtaroMixin) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._drop_anchor()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._after_optimizer_step()


class OtaroTrainer(OtaroMixin, Trainer):  # type: ignore[misc]
    """transformers' Trainer, tuning for all precisions."""


def _together(model: Any) -> AbstractContextManager[Any]:
    """Of DDP, have the gradients of this pass wait for the next one's and travel with them.

    Not where it looks for weights that a pass leaves out: what the next one leaves out, such as an expert
    that none of its tokens takes, would not travel at all.
    """
    waits = hasattr(model, "no_sync") and not getattr(model, "find_unused_parameters", False)
    return model.no_sync() if waits else nullcontext()


def reaches_all(model: Any) -> bool:
    """Whether the loss of any tokens depends on every weight that is tuned.

    Asked of two tokens, so that the answer is no where tokens take some experts and leave others, each a
    weight of its own.
    """
    tokens = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    model(input_ids=tokens, labels=tokens).loss.backward()
    reached = all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)
    model.zero_grad(set_to_none=True)
    return reached
