"""What a tuning step costs: time and peak memory of each method beside plain fine-tuning, alternating in one run.

Every contender trains the same model on the same random tokens for some steps, in turn, several rounds over; a first round,
in which steps are compiled, and the first steps of each turn are not counted. `trainer` is transformers' own Trainer; `fp` is
ours tuning at full precision. Peak memory is what tensors took on the GPU at most while counted steps ran, without the
allocator's rounding.

    python benchmarks/bench_tune.py                                   # a GPU, the shape of SmolLM2-135M, 8 x 512 tokens
    python benchmarks/bench_tune.py --device cpu --shape builtin      # two cores
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from typing import Any

import torch
from common import SMOLLM2, finish
from training import Clock, release, train
from transformers import AutoModelForCausalLM, LlamaConfig, logging

from otaro.evaluate.machine import in_turns
from otaro.sefp.precision import PRECISIONS
from otaro.tune import memory
from otaro.tune.config import BEST, Options

METHODS: dict[str, Options | None] = {
    "trainer": None,
    "fp": Options(method="fp"),
    "uniform": Options(),
    "uniform, made again": Options(),  # quantized weights are not held but made twice a step, as where memory is short
    "otaro": Options(method="otaro"),
    "otaro, host": Options(method="otaro", accumulator="host"),
    "distill": Options(distill=0.5, distill_at=PRECISIONS),  # a teacher at every step
    "best": BEST,  # a pass in full precision before each, and averaged
}


def turn(a: argparse.Namespace, weights: Any, name: str, options: Options | None, compiled: bool) -> tuple[list[float], float]:
    """One contender's turn: seconds of the counted steps, and the peak of memory in bytes."""
    memory.ROOM = 0.0 if "made again" in name else 1.0  # of the device that may be filled
    model = AutoModelForCausalLM.from_config(weights["config"], dtype=torch.float32)
    model.load_state_dict(weights["state"], assign=False)
    clock, batch = Clock(a.device, a.ignored), (a.batch_size, a.sequence_length)
    train(model, options, batch, a.steps, clock, compiled=compiled, bf16=a.device == "cuda")
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] if a.device == "cuda" else 0
    del model
    release(a.device)
    return clock.seconds()[a.ignored - 1 :], float(peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=("smollm2", "builtin"), default="smollm2")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=40, help="in a turn")
    parser.add_argument("--ignored", type=int, default=10, help="steps of a turn that are not counted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--compile", choices=("no", "yes", "both"), default="both")
    a = parser.parse_args()
    logging.set_verbosity_error()

    if a.shape == "smollm2":
        config = LlamaConfig(**SMOLLM2, max_position_embeddings=8192)
    else:
        from otaro.builtin import MODEL_DIR

        config = LlamaConfig.from_pretrained(MODEL_DIR)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    parameters = sum(p.numel() for p in model.parameters())
    weights = {"config": config, "state": model.state_dict()}
    modes = [("", False), (", compiled", True)]
    modes = modes if a.compile == "both" else [modes[a.compile == "yes"]]
    turns = {
        method + suffix: partial(turn, a, weights, method, METHODS[method], compiled)
        for suffix, compiled in modes
        for method in a.methods
    }
    found = in_turns(turns, a.rounds, lambda name: print(name, file=sys.stderr, flush=True))
    times = {name: [statistics.fmean(seconds) for seconds, _ in rounds] for name, rounds in found.items()}
    peaks = {name: max(peak for _, peak in rounds) for name, rounds in found.items()}
    print(f"{parameters / 1e6:.1f} M parameters, {a.batch_size} x {a.sequence_length} tokens, AdamW, {a.device}")
    print(f"{'':24}{'ms a step':>12}{'of fp':>8}{'tokens/s':>12}{'peak MB':>10}{'over fp, MB':>13}")
    rows = {}
    for name in turns:
        base = "fp" + name.partition(", compiled")[1]
        ratio = statistics.median(one / fp for one, fp in zip(times[name], times[base], strict=True))
        mean = statistics.median(times[name])
        speed = a.batch_size * a.sequence_length / mean
        over = peaks[name] - peaks[base]
        print(f"{name:24}{1000 * mean:12.1f}{ratio:8.2f}{speed:12.0f}{peaks[name] / 1e6:10.0f}{over / 1e6:13.0f}")
        rows[name] = {"seconds": mean, "of_fp": ratio, "peak_bytes": peaks[name], "rounds": times[name]}
    if a.device == "cuda":
        print(f"one set of gradients: {4 * parameters / 1e6:.0f} MB; {torch.cuda.get_device_name()}")
    finish({"benchmark": "tune", "device": a.device, "shape": a.shape, "parameters": parameters, "rows": rows})


if __name__ == "__main__":
    main()
