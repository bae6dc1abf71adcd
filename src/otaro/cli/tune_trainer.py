"""The Trainer of a tuning run: the settings it is given, what accelerate may have been told, and its bar."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otaro.cli import console
from otaro.cli.tune_ends import worded
from otaro.errors import OtaroError
from otaro.tune import processes

if TYPE_CHECKING:
    from otaro.tune.config import Options, Training
    from otaro.tune.data import TokenDataset


def launcher_says(name: str) -> bool:
    """Whether `accelerate launch` has switched something on, in the environment."""
    return os.environ.get(name, "false").lower() == "true"


def arguments(training: Training, save_every: int, checkpoints: Path) -> Any:
    """Trainer's own, from the run's; what accelerate was told beside them, and cannot be, is refused."""
    import torch
    from transformers import TrainingArguments

    from otaro.cli.tune_model import OPTIMIZERS

    t = training
    settings: dict[str, Any] = {}
    if t.fsdp and not launcher_says("ACCELERATE_USE_FSDP"):  # else its launcher has told it all
        settings = {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
    mixed = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if mixed != "no" and not (mixed == "bf16" and t.bf16):
        advice = "leave that to --bf16, and tell accelerate `no`"
        raise OtaroError(f"accelerate was told to compute in {mixed}; {advice}")
    if launcher_says("ACCELERATE_USE_DEEPSPEED"):
        raise OtaroError("DeepSpeed is not supported; to share weights out over processes use --fsdp")
    with worded():
        return TrainingArguments(
            output_dir=str(checkpoints),
            per_device_train_batch_size=t.batch_size,
            gradient_accumulation_steps=t.grad_accum,
            num_train_epochs=t.epochs,
            max_steps=t.steps or -1,
            learning_rate=t.lr,
            lr_scheduler_type=t.schedule,
            optim=OPTIMIZERS[t.optimizer],
            max_grad_norm=t.clip,
            bf16=t.bf16,
            gradient_checkpointing=t.gradient_checkpointing,
            seed=t.seed,
            save_steps=save_every,
            save_total_limit=2,
            logging_strategy="no",
            logging_nan_inf_filter=False,  # our trainer stops at the first such loss
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=torch.cuda.is_available(),
            use_cpu=processes.on_cpu(),  # or accelerate would leave processes on a CPU to themselves
            **settings,
        )


def make_trainer(
    model: Any, tokenizer: Any, data: TokenDataset, settings: Any, options: Options, log: Path
) -> Any:
    """One that agrees with the launcher on how many processes there are."""
    from transformers import PrinterCallback

    from otaro.tune.data import collate, padding_id
    from otaro.tune.trainer import OtaroTrainer, reaches_all

    with worded():
        trainer = OtaroTrainer(
            model=model,
            args=settings,
            train_dataset=data,
            data_collator=collate(padding_id(tokenizer)),
            otaro=options,
            otaro_log=log,
        )
    if (seen := trainer.accelerator.num_processes) != (there := processes.size()):
        raise OtaroError(f"accelerate sees {seen} of {there} processes; start them with torchrun")
    by_ddp = processes.size() > 1 and not trainer.is_fsdp_enabled
    if by_ddp and processes.from_first(lambda: reaches_all(trainer.model)):
        # Or DDP would look for weights without a gradient in every step, and warn that there are none.
        trainer.accelerator.ddp_handler.find_unused_parameters = False
    trainer.remove_callback(PrinterCallback)  # we have a bar
    return trainer


def train(trainer: Any, checkpoint: Path | None, begin: Callable[[], None]) -> float:
    """Train with a bar; `begin` is called first. Returns how many seconds the steps took after it."""
    with ExitStack() as stack:  # closes the bar, however it ends
        trainer.add_callback(watcher := _watcher(trainer, stack, begin))
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return float(watcher.seconds)


def _watcher(trainer: Any, stack: ExitStack, begin: Callable[[], None]) -> Any:
    """Calls `begin` when model and optimizer are in place, then draws a bar: loss and precision of each step.

    After the last one the bar is closed: what is judged then has one of its own.
    """
    from transformers import TrainerCallback

    class Watcher(TrainerCallback):  # type: ignore[misc] # transformers is not typed
        started = seconds = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            begin()
            self.started = time.perf_counter()
            self.progress = stack.enter_context(console.progress_bar("tuning (steps)"))

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            last = trainer.last_record
            held = "" if last["applied"] else f", held back {last['accumulated']}"
            said = f"loss {last['loss']:.3f} at {last['precision']}{held}"
            self.progress(said, state.global_step, state.max_steps)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seconds = time.perf_counter() - self.started
            stack.close()

    return Watcher()
