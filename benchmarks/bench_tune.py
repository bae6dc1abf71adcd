"""What a tuning step costs: time and peak memory of each method beside plain fine-tuning, in turns.

Every contender trains the same model on the same random tokens for some steps, in turn, several rounds over;
a first round, in which steps are compiled, and the first steps of each turn are not counted. `trainer` is
transformers' own Trainer; `fp` is ours tuning at full precision. Peak memory is what tensors took on the GPU
at most while counted steps ran, without the allocator's rounding. On a GPU all of them run compiled, too.

    python benchmarks/bench_tune.py                                # a GPU, SmolLM2-135M, 8 x 512 tokens
    python benchmarks/bench_tune.py --device cpu --shape builtin   # two cores
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import tempfile
import time
from functools import partial
from typing import Any

import torch
from common import SMOLLM2, arguments, finish
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, logging
from transformers.trainer_callback import PrinterCallback, TrainerCallback

from otaro.builtin import MODEL_DIR
from otaro.evaluate.machine import in_turns
from otaro.sefp.precision import PRECISIONS
from otaro.tune import memory
from otaro.tune.config import BEST, Options
from otaro.tune.trainer import OtaroTrainer

METHODS: dict[str, Options | None] = {
    "trainer": None,
    "fp": Options(method="fp"),
    "uniform": Options(),
    "uniform, made again": Options(),  # quantized weights are made twice a step, as where memory is short
    "otaro": Options(method="otaro"),
    "otaro, host": Options(method="otaro", accumulator="host"),
    "distill": Options(distill=0.5, distill_at=PRECISIONS),  # a teacher at every step
    "best": BEST,  # a pass in full precision before each, and averaged
}


class Clock(TrainerCallback):  # type: ignore[misc] # transformers is not typed
    """The end of each step, the GPU's work included; peaks of memory count from step `ignored` on."""

    def __init__(self, device: str, ignored: int) -> None:
        self.device, self.ignored, self.times = device, ignored, list[float]()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the time."""
        if self.device == "cuda":
            torch.cuda.synchronize()
            if state.global_step == self.ignored:
                torch.cuda.reset_peak_memory_stats()
        self.times.append(time.perf_counter())


def turn(
    a: argparse.Namespace, config: Any, start: Any, name: str, options: Options | None, compiled: bool
) -> tuple[list[float], float]:
    """Seconds of each step that counts, and peak bytes; without options by transformers' own trainer."""
    memory.ROOM = 0.0 if "made again" in name else 1.0  # of the device that may be filled
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(start, assign=False)
    clock, cuda = Clock(a.device, a.ignored), a.device == "cuda"
    tokens = torch.randint(3, config.vocab_size, (a.batch_size * a.steps, a.sequence_length))
    with tempfile.TemporaryDirectory() as scratch:
        settings = TrainingArguments(
            scratch, per_device_train_batch_size=a.batch_size, max_steps=a.steps, learning_rate=1e-5,
            report_to=[], use_cpu=not cuda, bf16=cuda, save_strategy="no", logging_strategy="no",
            disable_tqdm=True, logging_nan_inf_filter=False, optim="adamw_torch_fused",
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row} for row in tokens]
        common = {"model": model, "args": settings, "train_dataset": rows}
        trainer = Trainer(**common) if options is None else OtaroTrainer(**common, otaro=options)
        trainer.judge = lambda: 0.0  # so that weights are averaged, though nothing is held out
        if compiled:
            OtaroTrainer.compile_steps(trainer)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(clock)
        trainer.train()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] if cuda else 0
    trainer.model = trainer.model_wrapped = trainer.optimizer = trainer.lr_scheduler = None
    trainer.anchor = trainer.average = None
    trainer.accelerator.free_memory()
    del model
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    seconds = [later - earlier for earlier, later in itertools.pairwise(clock.times)]
    return seconds[a.ignored - 1 :], float(peak)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=("smollm2", "builtin"), default="smollm2")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=40, help="in a turn")
    parser.add_argument("--ignored", type=int, default=10, help="steps of a turn that are not counted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    a = parser.parse_args()
    logging.set_verbosity_error()

    if a.shape == "smollm2":
        config = LlamaConfig(**SMOLLM2, max_position_embeddings=8192)
    else:
        config = LlamaConfig.from_pretrained(MODEL_DIR)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    parameters = sum(p.numel() for p in model.parameters())
    modes = {"": False} | ({", compiled": True} if a.device == "cuda" else {})
    turns = {
        method + suffix: partial(turn, a, config, model.state_dict(), method, METHODS[method], compiled)
        for suffix, compiled in modes.items()
        for method in a.methods
    }
    found = in_turns(turns, a.rounds, lambda name: print(name, file=sys.stderr, flush=True))
    times = {name: [statistics.fmean(seconds) for seconds, _ in rounds] for name, rounds in found.items()}
    peaks = {name: max(peak for _, peak in rounds) for name, rounds in found.items()}
    size = f"{a.batch_size} x {a.sequence_length} tokens"
    print(f"{parameters / 1e6:.1f} M parameters, {size}, AdamW, {a.device}")
    print(f"{'':24}{'ms a step':>12}{'of fp':>8}{'tokens/s':>12}{'peak MB':>10}{'over fp, MB':>13}")
    rows = {}
    for name in turns:
        base = "fp" + name.partition(", compiled")[1]
        ratio = statistics.median(one / fp for one, fp in zip(times[name], times[base], strict=True))
        mean = statistics.median(times[name])
        speed = a.batch_size * a.sequence_length / mean
        peak, over = peaks[name] / 1e6, (peaks[name] - peaks[base]) / 1e6
        print(f"{name:24}{1000 * mean:12.1f}{ratio:8.2f}{speed:12.0f}{peak:10.0f}{over:13.0f}")
        rows[name] = {"seconds": mean, "of_fp": ratio, "peak_bytes": peaks[name], "rounds": times[name]}
    if a.device == "cuda":
        print(f"one set of gradients: {4 * parameters / 1e6:.0f} MB; {torch.cuda.get_device_name()}")
    about = {"benchmark": "tune", "device": a.device, "shape": a.shape, "parameters": parameters}
    finish(about | {"rows": rows})


if __name__ == "__main__":
    main()
