"""The loss of a forward pass, as a Trainer takes it, and the losses of a model at each precision, measured.

A pass takes cross-entropy, and at low precisions a share of self-distillation: the teacher is what the same
weights say unquantized, in the pass before or in one of its own. Large logits are taken in slices
(`sliced.py`). Everything else is as Trainer's `compute_loss`, or TRL's, has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from otaro.sefp.precision import Precision
from otaro.tune.checkpoints import TrainingError
from otaro.tune.fake_quant import Precisely
from otaro.tune.sliced import Distillation, SlicedHead, SliceLoss, slice_loss

AnyTrainer: Any = object  # whatever Trainer this is mixed into; none has types


class PassLoss(AnyTrainer):  # type: ignore[misc]
    """Of `OtaroMixin`: the loss of the pass under way, and its share in that of the step."""

    compute_loss_func: Any

    def _prepare_losses(self) -> None:
        self._divergence = _divergence
        self._slice_loss: SliceLoss = slice_loss
        self._outputs: Any = None
        self._share = 1.0  # of the step's loss, that the pass under way takes
        self._plain: torch.Tensor | float = 1.0  # of the last pass's loss, what is cross-entropy
        self._teaches = False  # whether it is the teacher of the next one
        self._teacher: torch.Tensor | None = None
        self._of_trl = any(kind.__module__ == "trl.trainer.sft_trainer" for kind in type(self).__mro__)
        if self._of_trl:
            self._keep_trl_to_the_model()

    def _compile_losses(self, model: Any, backend: str) -> None:
        model.loss_function = torch.compile(model.loss_function, backend=backend)
        self._divergence = torch.compile(_divergence, backend=backend)
        self._slice_loss = torch.compile(slice_loss, backend=backend)

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
            mean = self._divergence(outputs.logits, self._taught(model, unlabelled), labels)
            divergence = self._scaled(mean, labels, num_items_in_batch)
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
        """Have SFTTrainer run the whole model: of itself it takes the head's weights unquantized.

        That is what it does where a `compute_loss_func` is given, and for that of ours the outputs are kept.
        """
        if self.args.loss_type != "nll" or getattr(self, "aux_loss_enabled", False):
            only = "only loss_type='nll', without router_aux_loss_coef, can be quantized"
            raise TrainingError(f"of SFTTrainer's losses {only}")
        given, smoother = self.compute_loss_func, self.label_smoother
        model = self.accelerator.unwrap_model(self.model)

        def loss_of(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> Any:
            self._outputs = outputs
            logits, items = outputs.logits, {"num_items_in_batch": num_items_in_batch}
            if given is not None:
                return given(outputs, labels, **items)
            if smoother is not None:
                return smoother(outputs, labels, shift_labels=True, **items)
            return model.loss_function(logits, labels, vocab_size=logits.shape[-1], **items)

        self.compute_loss_func = loss_of

    def _scaled(self, mean: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
        """Weigh a micro-batch's mean as Trainer does the model's loss: by its share of the step's tokens."""
        if num_items_in_batch is None or not self.model_accepts_loss_kwargs:
            return mean
        scaled: torch.Tensor = mean * (labels[..., 1:] != -100).sum() / num_items_in_batch
        return scaled * self.accelerator.num_processes if self.args.average_tokens_across_devices else scaled


def _unlabelled(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name != "labels"}


def reshard(model: torch.nn.Module) -> None:
    """Give back what FSDP has gathered and keeps for a backward pass, after a forward that has none."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


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
        idle = {name for name in ("attention_mask",) if name in batch and bool(batch[name].all())}
        there.append({name: part.to(model.device) for name, part in batch.items() if name not in idle})
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
                labels = batch["labels"][..., 1:].flatten()
                logits = model(**_unlabelled(batch)).logits[..., :-1, :].float().flatten(0, 1)
                sums.append(cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
        means.append(sum(torch.stack(sums).tolist()) / max(tokens, 1) if sums else 0.0)
    model.train(was_training)
    return means
