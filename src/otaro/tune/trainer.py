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

Checkpoints gain the state of the search, the accumulator and the average, and a mark that they are complete:
a run that is killed goes on from the last complete one and takes the same path to the same weights.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    broadcast_object_list,
    gather_object,
)
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import has_length

from otaro.errors import OtaroError, OtaroWarning
from otaro.sefp.precision import Precision
from otaro.tune.accumulate import release, withhold
from otaro.tune.checkpoints import COMPLETE_FILE, age, last_good_checkpoint
from otaro.tune.config import Options, recipe
from otaro.tune.fake_quant import Precisely, prepare
from otaro.tune.memory import Batch, Plan, Run
from otaro.tune.sliced import Distillation, SlicedHead, SliceLoss, slice_loss
from otaro.tune.steady import Anchor, WeightAverage, local

STATE_FILE = "otaro_state.json"
ACCUMULATOR_STEM, AVERAGE_STEM = "otaro_accumulator", "otaro_average"
UNJUDGED = "nothing is held out to judge the mean of the weights by: the run ends with the last ones"
JUDGED = 128
"""Held-out examples of each process that an average is judged by: enough to tell it from the last weights."""


if TYPE_CHECKING:  # of whatever Trainer it is mixed into
    _Base: type[Any] = Trainer
else:
    _Base = object


class TrainingError(OtaroError):
    """A run that cannot go on."""


class OtaroMixin(_Base):  # type: ignore[misc]
    """Mix in before a Trainer class: `class MyTrainer(OtaroMixin, SFTTrainer)`.

    Takes two more arguments: `otaro=Options(...)`, by default those of the recipe `best`, and
    `otaro_log=Path(...)`, a file that gets one line of JSON per step. The learning rate is Trainer's own. A
    run that is resumed must be given the weights that it started with, as L2-SP goes back to them.

    The recipe averages weights and keeps the mean if it is better on held-out data: on `eval_dataset`, or by
    whatever is put into `judge`, a function without arguments that returns a loss. With neither, a run ends
    with its last weights.
    """

    compute_loss_func: Any

    def __init__(
        self, *args: Any, otaro: Options | None = None, otaro_log: Path | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.otaro = otaro or recipe("best")[0]
        self.otaro.check_rate(self.args.learning_rate)
        if self.args.fp16 and self.otaro.method == "otaro":
            raise TrainingError("fp16 loss scaling cannot be combined with delayed updates; use bf16")
        if self.is_fsdp_enabled and self.accelerator.state.fsdp_plugin.fsdp_version == 1:
            raise TrainingError(
                "FSDP of version 1 flattens weights, which leaves no matrices to quantize; use version 2"
            )
        if self.is_fsdp_enabled and self._optimizer_kind() == "adamw8bit":
            raise TrainingError(
                "the 8-bit optimizer of bitsandbytes cannot update weights that FSDP shards; use adamw"
            )
        if self.otaro.average and self.args.load_best_model_at_end:
            warnings.warn(
                "load_best_model_at_end keeps one checkpoint's weights: no average takes their place",
                stacklevel=2,
            )
        self.precisely = Precisely(self.otaro.group_size, self.otaro.reconstruction)
        prepare(self.model, self.precisely)
        if self.args.n_gpu > 1:
            # DataParallel copies modules to other devices: each quantizes on its own
            self.precisely.linears.clear()
        self._compute_dtype = torch.bfloat16 if self.args.bf16 else None
        self.search = self.otaro.search(self.args.seed)
        self.delayed = self.otaro.gradient_accumulator()
        self.anchor: Anchor | None = None
        self.average: WeightAverage | None = None
        self.judge: Callable[[], float] | None = (
            self._held_out_loss if getattr(self, "eval_dataset", None) else None
        )
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
        self._divergence = _divergence
        self._slice_loss: SliceLoss = slice_loss
        self._compiled = False
        self._outputs: Any = None
        self._share = 1.0  # of the loss, that the pass under way takes
        # cross-entropy in the loss of the last pass, relative to all of it
        self._plain: torch.Tensor | float = 1.0
        self._teaches = False  # whether it is the teacher of the next one
        self._teacher: torch.Tensor | None = None
        self._of_trl = any(kind.__module__ == "trl.trainer.sft_trainer" for kind in type(self).__mro__)
        if self._of_trl:
            self._keep_trl_to_the_model()

    def create_accelerator_and_postprocess(self) -> None:
        """Trainer's, with FSDP2 as it was asked for.

        On a CPU accelerate makes DDP of it without a word. And where bfloat16 was asked for it has weights
        gathered in that type, while they are to be quantized as they are: autocast makes the products
        bfloat16 instead.
        """
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        asked = (
            self.args.fsdp_plugin_args is not None
            or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
        )
        if asked and state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.FSDP
            # accelerate cannot write checkpoints in whole there
            parts = {"state_dict_type": "SHARDED_STATE_DICT"}
            state.fsdp_plugin = FullyShardedDataParallelPlugin(
                **{**(self.args.fsdp_plugin_args or {}), **parts}
            )
            self.is_fsdp_enabled = True
        if self.is_fsdp_enabled and state.fsdp_plugin.fsdp_version == 2:
            state.fsdp_plugin.mixed_precision_policy = None

    def autocast_smart_context_manager(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, which leaves autocast to accelerate, which leaves it to FSDP, which must not have it:
        see above.
        """
        if self.is_fsdp_enabled:
            return self.accelerator.autocast()
        return super().autocast_smart_context_manager(*args, **kwargs)

    def compile_steps(self, backend: str = "inductor") -> None:
        """Compile what a step repeats: the decoder layers, one graph for all of them, and the losses over the
        vocabulary.

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
        model.loss_function = torch.compile(model.loss_function, backend=backend)
        self._divergence = torch.compile(_divergence, backend=backend)
        self._slice_loss = torch.compile(slice_loss, backend=backend)
        self._compiled = True

    # One step -----------------------------------------------------------------------------------------------

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Trainer's, at the precision chosen for this step, and before in full precision for `full` of it."""
        if self._record is None:
            precision = self.search.choose()
            self._record = {
                "precision": precision,
                "scores": self.search.scores(),
                "loss": 0.0,
                "cross_entropy": 0.0,
                "tokens": 0,
            }
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

    @contextmanager
    def _passing(self, precision: Precision | None, share: float, teaches: bool = False) -> Iterator[None]:
        """One forward and backward pass at a precision, with its share of the step's loss."""
        self._share, self._teaches, self._plain = share, teaches, 1.0
        try:
            with self.precisely.at(precision, self._compute_dtype):
                yield
        finally:
            self._share, self._teaches = 1.0, False

    def _distilled(self, precision: Precision | None) -> float:
        """Share of self-distillation in the loss at a precision."""
        return self.otaro.distill if precision in self.otaro.distill_at else 0.0

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Trainer's, with a share of self-distillation where that was asked for; sliced for large logits."""
        share = self._distilled(self.precisely.precision) if model.training else 0.0
        if not return_outputs and (sliced := self._sliced_head(model, inputs)) is not None:
            return self._shared(self._loss_in_slices(sliced, share, model, inputs, num_items_in_batch))
        if not share and not self._teaches:
            found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            return (self._shared(found[0]), *found[1:]) if return_outputs else self._shared(found)
        unlabelled, labels = _unlabelled(inputs), inputs["labels"]
        if self._of_trl:  # the outputs that it returns are those of another pass, without gradients
            loss = super().compute_loss(model, inputs, False, num_items_in_batch)
            outputs, self._outputs = self._outputs, None
        else:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if share:
            teacher = self._taught(model, unlabelled)
            divergence = self._scaled(
                self._divergence(outputs.logits, teacher, labels), labels, num_items_in_batch
            )
            plain, loss = loss.detach(), (1 - share) * loss + share * divergence
            self._plain = _relative(plain, loss.detach())
        else:
            self._teacher = outputs.logits.detach()
        return (self._shared(loss), outputs) if return_outputs else self._shared(loss)

    def _shared(self, loss: torch.Tensor) -> torch.Tensor:
        """As far as the pass counts in the loss of the step."""
        return loss if self._share == 1 else loss * self._share

    def _taught(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """What the same weights unquantized say: in this step already, or in a pass of their own."""
        teacher: torch.Tensor | None = self._teacher
        if teacher is None:
            with torch.no_grad(), self.precisely.at(None):
                teacher = self.accelerator.unwrap_model(model)(**inputs).logits
        return teacher

    def _sliced_head(self, model: Any, inputs: dict[str, Any]) -> SlicedHead | None:
        """None where whole logits serve, or are asked for: by a user's loss, by TRL, by DataParallel."""
        if self.compute_loss_func is not None or self.label_smoother is not None or self.args.n_gpu > 1:
            return None
        return SlicedHead.find(self.accelerator.unwrap_model(model), inputs) if "labels" in inputs else None

    def _loss_in_slices(
        self, sliced: SlicedHead, share: float, model: Any, inputs: dict[str, Any], num_items_in_batch: Any
    ) -> torch.Tensor:
        distillation = None
        if share:
            with sliced.hidden_states():
                distillation = Distillation(share, self._taught(model, _unlabelled(inputs)))
        with sliced.losses(distillation, of_slice=self._slice_loss):
            found = super().compute_loss(model, inputs, self._teaches, num_items_in_batch)
        if distillation is not None:
            self._plain = _relative(distillation.plain, distillation.mixed)
        loss: torch.Tensor = found[0] if self._teaches else found
        if self._teaches:
            self._teacher = found[1].logits.detach()  # hidden states: the head has handed them on
        return loss

    def _keep_trl_to_the_model(self) -> None:
        """Have SFTTrainer run the whole model: of itself it multiplies with the head's weights, which are not
        quantized.

        That is what it does where a `compute_loss_func` is given, and for that of ours the outputs are kept.
        """
        if self.args.loss_type != "nll" or getattr(self, "aux_loss_enabled", False):
            raise TrainingError(
                "of SFTTrainer's losses only loss_type='nll', without router_aux_loss_coef, can be quantized"
            )
        given, smoother, model = (
            self.compute_loss_func,
            self.label_smoother,
            self.accelerator.unwrap_model(self.model),
        )

        def loss_of(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
            self._outputs = outputs
            items = {"num_items_in_batch": num_items_in_batch}
            loss: torch.Tensor
            if given is not None:
                loss = given(outputs, labels, **items)
            elif smoother is not None:
                loss = smoother(outputs, labels, shift_labels=True, **items)
            else:
                loss = model.loss_function(
                    outputs.logits, labels, vocab_size=outputs.logits.shape[-1], **items
                )
            return loss

        self.compute_loss_func = loss_of

    def _scaled(self, mean: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
        """Weigh a micro-batch's mean as Trainer does the model's loss: by its share of the step's tokens."""
        if num_items_in_batch is None or not self.model_accepts_loss_kwargs:
            return mean
        scaled: torch.Tensor = mean * (labels[..., 1:] != -100).sum() / num_items_in_batch
        return scaled * self.accelerator.num_processes if self.args.average_tokens_across_devices else scaled

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
        loss, cross_entropy, gradient_norm = torch.stack(
            [*shared, norm.to(shared.device, torch.float32)]
        ).tolist()
        at = f"at step {self.state.global_step + 1}, trained at {precision or 'full precision'}"
        if not math.isfinite(loss):
            raise self._stopped(f"the loss became {loss} {at}")
        # by fp16, which leaves out steps that overflow
        scaled = getattr(self.accelerator, "scaler", None) is not None
        if not math.isfinite(gradient_norm) and not scaled:
            raise self._stopped(
                f"the norm of the gradient became {gradient_norm} {at}, while the loss was {loss:.4g}"
            )
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

    def _stopped(self, why: str) -> TrainingError:
        """The end of a run: whatever was wrong has been neither applied nor saved."""
        last = last_good_checkpoint(Path(self.args.output_dir)) or "none"
        return TrainingError(
            f"{why}; the last good checkpoint is {last}: start again with a lower learning rate"
        )

    def _refuse_what_is_not_finite(self) -> None:
        """Of the weights, and of whatever a checkpoint keeps beside them; if one finds any, all stop."""
        kept = {
            f"the weight {name}": local(p) for name, p in self._named_parameters().items() if p.requires_grad
        }
        for what, of in (("the delayed gradient", self.delayed), ("the mean", self.average)):
            kept |= {
                f"{what} of {name}": tensor
                for name, tensor in (of.tensors() if of is not None else {}).items()
            }
        # The largest of all, as it takes no memory: any NaN or infinity is passed on.
        largest = [(name, torch.linalg.vector_norm(t, torch.inf)) for name, t in kept.items() if t.numel()]
        found = next((name for name, value in largest if not value.isfinite()), None)
        anywhere = self.accelerator.reduce(
            torch.tensor(float(found is not None), device=self.accelerator.device), "sum"
        )
        if anywhere:
            what = found or "a weight that another process holds"
            raise self._stopped(f"{what} was no longer finite after step {self.state.global_step}")

    def _after_optimizer_step(self) -> None:
        """Hold the weights back and average them, as far as that was asked for."""
        parameters = {name: p for name, p in self._named_parameters().items() if p.requires_grad}
        if self.anchor is not None:
            self.anchor.apply(parameters, self.last_record["lr"])
        if self.average is not None:
            self.average.add(parameters, self.state.global_step + 1, self.state.max_steps)

    def _drop_anchor(self) -> None:
        """Keep the weights as they are; called before anything changes them, and after FSDP sharded them."""
        if self.otaro.l2_sp and self.anchor is None:
            tuned = {name: p for name, p in self._named_parameters().items() if p.requires_grad}
            self.anchor = Anchor(tuned, self.otaro.l2_sp, self._plan().copies_on_host)

    def _plan(self) -> Plan:
        """What the run takes of its device, and what therefore is kept elsewhere."""
        args = self.args
        batch = Batch(
            args.per_device_train_batch_size, self._sequence_length(), args.bf16, args.gradient_checkpointing
        )
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

    def create_scheduler(self, num_training_steps: int, *args: Any, **kwargs: Any) -> Any:
        """Trainer's."""
        self._planned_steps = num_training_steps
        return super().create_scheduler(num_training_steps, *args, **kwargs)

    def _named_parameters(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.accelerator.unwrap_model(self.model_wrapped).named_parameters())

    # The whole run ------------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's; gradients still waiting at the end are applied, at the learning rate of the last step,
        or dropped.

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
        self.judgement = {
            "step": self.state.global_step,
            "averaged": self.average.count,
            **losses,
            "kept": kept,
        }
        self._write_log(self.judgement)

    def _held_out_loss(self) -> float:
        """Of `eval_dataset` or the first `JUDGED` examples of each process, over the precisions tuned for."""
        sets, most = self.eval_dataset, max(1, JUDGED // self.args.per_device_eval_batch_size)
        loaders = [self.get_eval_dataloader(name) for name in (sets if isinstance(sets, Mapping) else [None])]
        batches = [batch for loader in loaders for batch in islice(loader, most) if "labels" in batch]
        losses = losses_by_precision(
            self.model, self.precisely, self.otaro.tuned_for, batches, self._compute_dtype
        )
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
            parameters = {name: p for name, p in self._named_parameters().items() if p.requires_grad}
            self.average.add(parameters, self.state.global_step, self.state.max_steps)

    def _write_log(self, record: dict[str, Any]) -> None:
        if self._log_path is not None and self.is_world_process_zero():
            with open(self._log_path, "a") as file:
                file.write(json.dumps(record) + "\n")

    # Checkpoints --------------------------------------------------------------------------------------------

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.is_world_process_zero():
            state = {
                "search": self.search.state_dict(),
                "accumulated": self.delayed.count if self.delayed else 0,
                "averaged": self.average.count if self.average else 0,
                "learning_rates": self._learning_rates,
                "steps": self._planned_steps,
            }
            (Path(output_dir) / STATE_FILE).write_text(json.dumps(state))
        for stem, kept in ((ACCUMULATOR_STEM, self.delayed), (AVERAGE_STEM, self.average)):
            if kept is not None and kept.count and (self.is_fsdp_enabled or self.is_world_process_zero()):
                tensors = {name: tensor.contiguous() for name, tensor in kept.tensors().items()}
                save_file(tensors, self._part_file(stem, output_dir))

    def _part_file(self, stem: str, checkpoint: str) -> Path:
        """Under FSDP each process keeps its own part; else all have the same, and one file serves them."""
        part = f"-{self.args.process_index}" if self.is_fsdp_enabled else ""
        return Path(checkpoint) / f"{stem}{part}.safetensors"

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        state = json.loads((Path(checkpoint) / STATE_FILE).read_text())
        self.search.load_state_dict(state["search"])
        self._learning_rates = state["learning_rates"]
        if state.get("steps", self._planned_steps) != self._planned_steps:
            self._plan_anew()
            state["averaged"] = 0  # a mean of the last steps must not begin before them: it starts anew
        counts = {ACCUMULATOR_STEM: state["accumulated"], AVERAGE_STEM: state.get("averaged", 0)}
        for stem, kept in ((ACCUMULATOR_STEM, self.delayed), (AVERAGE_STEM, self.average)):
            if kept is not None and counts[stem]:
                file = self._part_file(stem, checkpoint)
                if not file.is_file():
                    raise TrainingError(
                        f"{file} is missing: resume with as many processes as wrote the checkpoint"
                    )
                devices = {name: p.device for name, p in self._named_parameters().items()}
                kept.restore(counts[stem], load_file(file), devices)

    def _plan_anew(self) -> None:
        """A run with more steps than before goes on at the rate that one of so many steps has by now."""
        if isinstance(self.lr_scheduler, LambdaLR):
            by_now = [factor(self.lr_scheduler.last_epoch) for factor in self.lr_scheduler.lr_lambdas]
            for group, rate, factor in zip(
                self.optimizer.param_groups, self.lr_scheduler.base_lrs, by_now, strict=True
            ):
                group["lr"] = rate * factor

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._drop_anchor()  # at the weights that the run started with, not at those it goes on from
        super()._load_from_checkpoint(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._refuse_what_is_not_finite()
        run = Path(self._get_output_dir(trial))
        mark = run / f"checkpoint-{self.state.global_step}" / COMPLETE_FILE
        limit, self.args.save_total_limit = (
            self.args.save_total_limit,
            None,
        )  # nothing is deleted before the new one is complete
        try:
            if self.is_world_process_zero():
                mark.unlink(missing_ok=True)
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()  # each writes a part of it
        if self.is_world_process_zero():
            if not self.args.save_only_model:  # without its optimizer a run cannot go on
                mark.touch()
            if limit:
                best = self.state.best_model_checkpoint
                for old in sorted(run.glob("checkpoint-*"), key=age)[:-limit]:
                    if old != mark.parent and (best is None or old != Path(best)):
                        shutil.rmtree(old, ignore_errors=True)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # else Trainer would take a step more when resumed after the last
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)


class _SteadyCallback(TrainerCallback):  # type: ignore[misc] # transformers is not typed
    def __init__(self, trainer: OtaroMixin) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._drop_anchor()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._after_optimizer_step()


class OtaroTrainer(OtaroMixin, Trainer):  # type: ignore[misc]
    """transformers' Trainer, tuning for all precisions."""


def _unlabelled(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name != "labels"}


def _together(model: Any) -> AbstractContextManager[Any]:
    """Of DDP, have the gradients of this pass wait for the next one's and travel with them.

    Not where it looks for weights that a pass leaves out: what the next one leaves out, such as an expert
    that none of its tokens takes, would not travel at all.
    """
    waits = hasattr(model, "no_sync") and not getattr(model, "find_unused_parameters", False)
    return model.no_sync() if waits else nullcontext()


def reshard(model: torch.nn.Module) -> None:
    """Give back what FSDP has gathered and keeps for a backward pass, after a forward that has none."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


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


def _relative(part: Any, whole: Any) -> torch.Tensor:
    """Of a micro-batch without labels all."""
    part, whole = torch.as_tensor(part).mean(), torch.as_tensor(whole).mean()
    return torch.where(whole == 0, 1.0, part / whole)


def _divergence(student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean KL divergence from teacher to student over the tokens that have a label."""
    counted = labels[..., 1:] != -100
    of_student = log_softmax(student[..., :-1, :].float(), -1)
    of_teacher = log_softmax(teacher[..., :-1, :].float(), -1)
    each = kl_div(of_student, of_teacher, reduction="none", log_target=True).sum(-1)
    return each.where(counted, 0.0).sum() / counted.sum().clamp(min=1)


@torch.no_grad()  # not inference_mode: weights that FSDP gathers in it could not be trained afterwards
def losses_by_precision(
    model: Any,
    precisely: Precisely,
    precisions: Sequence[Precision | None],
    batches: list[dict[str, torch.Tensor]],
    compute_dtype: torch.dtype | None = None,
) -> list[float]:
    """Mean loss per token at each precision, of a prepared model; batches as the collator makes them.

    With a `compute_dtype` under autocast, as a forward of tuning is.

    Not compiled, even if the steps are: other shapes would crowd out their graphs. A GPU is waited for once
    per precision: where several processes share it, each wait is a turn of all the others.
    """
    was_training = model.training
    model.eval()
    tokens = sum(int((batch["labels"][..., 1:] != -100).sum()) for batch in batches)
    there = []
    for batch in batches:
        # A mask that masks nothing is left out: the model would look at it, and wait.
        idle = "attention_mask" in batch and bool(batch["attention_mask"].all())
        there.append(
            {
                n: tensor.to(model.device)
                for n, tensor in batch.items()
                if not (idle and n == "attention_mask")
            }
        )
    means = []
    for precision in precisions:
        sums = []
        with (
            precisely.at(precision, compute_dtype),
            torch.autocast(model.device.type, compute_dtype, enabled=compute_dtype is not None),
            torch.compiler.set_stance("force_eager"),
        ):
            for batch in there:
                if (sliced := SlicedHead.find(model, batch)) is not None:
                    with sliced.losses(total=True):
                        sums.append(model(**batch).loss)
                    continue
                labels = batch["labels"][..., 1:]
                inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
                logits = model(**inputs).logits[..., :-1, :].float()
                sums.append(
                    cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
                )
        means.append(sum(torch.stack(sums).tolist()) / max(tokens, 1) if sums else 0.0)
    model.train(was_training)
    return means
