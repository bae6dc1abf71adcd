"""What a Trainer's checkpoints gain: the state of the search, the accumulator and the average, and a mark.

The mark says that one is complete: a run that is killed goes on from the last complete one, and takes the
same path to the same weights. Nothing is kept that is not finite: the run ends instead.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.optim.lr_scheduler import LambdaLR

from otaro.tune.checkpoints import COMPLETE_FILE, TrainingError, age, last_good_checkpoint
from otaro.tune.steady import local

STATE_FILE = "otaro_state.json"
ACCUMULATOR_STEM, AVERAGE_STEM = "otaro_accumulator", "otaro_average"

AnyTrainer: Any = object  # whatever Trainer this is mixed into; none has types


class Resuming(AnyTrainer):  # type: ignore[misc]
    """Of `OtaroMixin`: Trainer's checkpoints, with all that a run of ours has besides."""

    def _stopped(self, why: str) -> TrainingError:
        """The end of a run: whatever was wrong has been neither applied nor saved."""
        last = last_good_checkpoint(Path(self.args.output_dir)) or "none"
        advice = "start again with a lower learning rate"
        return TrainingError(f"{why}; the last good checkpoint is {last}: {advice}")

    def _refuse_what_is_not_finite(self) -> None:
        """Of the weights, and of whatever a checkpoint keeps beside them; if one finds any, all stop."""
        kept = {f"the weight {name}": local(p) for name, p in self._tuned_parameters().items()}
        for what, of in (("the delayed gradient", self.delayed), ("the mean", self.average)):
            tensors = of.tensors() if of is not None else {}
            kept |= {f"{what} of {name}": tensor for name, tensor in tensors.items()}
        # The largest of all, as it takes no memory: any NaN or infinity is passed on.
        largest = [(name, torch.linalg.vector_norm(t, torch.inf)) for name, t in kept.items() if t.numel()]
        found = next((name for name, value in largest if not value.isfinite()), None)
        here = torch.tensor(float(found is not None), device=self.accelerator.device)
        if self.accelerator.reduce(here, "sum"):
            what = found or "a weight that another process holds"
            raise self._stopped(f"{what} was no longer finite after step {self.state.global_step}")

    def create_scheduler(self, num_training_steps: int, *args: Any, **kwargs: Any) -> Any:
        """Trainer's."""
        self._planned_steps = num_training_steps
        return super().create_scheduler(num_training_steps, *args, **kwargs)

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
                    advice = "resume with as many processes as wrote the checkpoint"
                    raise TrainingError(f"{file} is missing: {advice}")
                devices = {name: p.device for name, p in self._named_parameters().items()}
                kept.restore(counts[stem], load_file(file), devices)

    def _plan_anew(self) -> None:
        """A run with more steps than before goes on at the rate that one of so many steps has by now."""
        if isinstance(self.lr_scheduler, LambdaLR):
            by_now = [factor(self.lr_scheduler.last_epoch) for factor in self.lr_scheduler.lr_lambdas]
            groups, rates = self.optimizer.param_groups, self.lr_scheduler.base_lrs
            for group, rate, factor in zip(groups, rates, by_now, strict=True):
                group["lr"] = rate * factor

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._drop_anchor()  # at the weights that the run started with, not at those it goes on from
        super()._load_from_checkpoint(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._refuse_what_is_not_finite()
        run = Path(self._get_output_dir(trial))
        mark = run / f"checkpoint-{self.state.global_step}" / COMPLETE_FILE
        limit = self.args.save_total_limit
        self.args.save_total_limit = None  # nothing is deleted before the new one is complete
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
