"""What the benchmarks of tuning share: a few steps by the trainer on random tokens, and when each of them ended."""

from __future__ import annotations

import gc
import itertools
import tempfile
import time
from typing import Any

import torch
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from otaro.tune.config import Options
from otaro.tune.trainer import OtaroTrainer


class Clock(TrainerCallback):  # type: ignore[misc] # transformers is not typed
    """The end of each step, the GPU's work included; peaks of memory count from step `ignored` on."""

    def __init__(self, device: str, ignored: int = 0) -> None:
        self.device, self.ignored, self.times = device, ignored, list[float]()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the time."""
        if self.device == "cuda":
            torch.cuda.synchronize()
            if state.global_step == self.ignored:
                torch.cuda.reset_peak_memory_stats()
        self.times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Of every step that has one before it."""
        return [later - earlier for earlier, later in itertools.pairwise(self.times)]


def train(
    model: Any,
    options: Options | None,
    batch: tuple[int, int],
    steps: int,
    clock: Clock,
    *,
    compiled: bool = False,
    **more: Any,
) -> Any:
    """So many steps with batches of random tokens; without options by transformers' own trainer. Returns the plan of
    memory, if there is one.
    """
    tokens = torch.randint(3, model.config.vocab_size, (batch[0] * steps, batch[1]))
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            scratch, per_device_train_batch_size=batch[0], max_steps=steps, learning_rate=1e-5, report_to=[],
            use_cpu=clock.device == "cpu", save_strategy="no", logging_strategy="no", disable_tqdm=True,
            logging_nan_inf_filter=False, **{"optim": "adamw_torch_fused", **more},
        )  # fmt: skip
        common = {"model": model, "args": arguments, "train_dataset": [{"input_ids": row, "labels": row} for row in tokens]}
        trainer = Trainer(**common) if options is None else OtaroTrainer(**common, otaro=options)
        trainer.judge = lambda: 0.0  # so that weights are averaged, though nothing is held out
        plan = None if options is None else trainer._plan()
        if compiled:
            OtaroTrainer.compile_steps(trainer)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(clock)
        trainer.train()
    trainer.model = trainer.model_wrapped = trainer.optimizer = trainer.lr_scheduler = None
    trainer.anchor = trainer.average = None
    trainer.accelerator.free_memory()
    return plan


def release(device: str) -> None:
    """Give back what nobody holds."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
