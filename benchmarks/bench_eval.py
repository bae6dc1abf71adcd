"""How fast `otaro eval` reads a text, beside transformers on the same weights in float32, and the memory it takes.

    python benchmarks/bench_eval.py --model gemma3-270m --threads 2

`builtin` is the built-in model; `gemma3-270m` has the shapes of Gemma-3-270M and random weights: 262,144 words, a cap on
neither. transformers is called as its documentation does (`model(ids, labels=ids).loss`), window by window, and makes all
logits of a window at once. Contenders take turns; CPU seconds are given beside seconds, since another process may have the
machine. Memory is that of a process of its own, which measures perplexity at two precisions and the divergence between them:
its peak, less what it had before the model was opened.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import finish

import otaro
from otaro.evaluate.decoded import DecodedModel
from otaro.evaluate.divergence import Divergence, Keeper
from otaro.evaluate.logits import KeptStates
from otaro.evaluate.perplexity import Loss, perplexity
from otaro.evaluate.windows import ModelReader, Windows, read

GEMMA3_270M = {
    "model_type": "gemma3_text", "vocab_size": 262_144, "hidden_size": 640, "intermediate_size": 2048,
    "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    "max_position_embeddings": 32_768, "sliding_window": 512, "tie_word_embeddings": True,
}  # fmt: skip


def main() -> None:
    """Measure, print a table, end with a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["builtin", "gemma3-270m"], default="builtin")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--windows", type=int, default=2, help="windows in a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", metavar="DIR", help=argparse.SUPPRESS)  # the process of its own
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory:
        print(json.dumps(memory(Path(options.memory), options.window, options.windows)))
        return
    with tempfile.TemporaryDirectory(prefix="bench-eval-") as directory:
        nested = packed(options.model, Path(directory))
        speeds = speed(nested, options)
        words = [sys.executable, __file__, "--memory", str(nested), "--threads", str(options.threads)]
        words += ["--window", str(options.window), "--windows", str(options.windows)]
        taken = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    plain = speeds["transformers"]
    print(f"{'':32}tokens/s  of transformers   by CPU time")
    for name, figures in speeds.items():
        wall, cpu = figures["seconds"], figures["cpu_seconds"]
        tokens = options.window * options.windows / wall
        print(f"{name:32}{tokens:8.1f}  {plain['seconds'] / wall:14.2f}  {plain['cpu_seconds'] / cpu:12.2f}")
    print(f"decoded model {taken['decoded'] / 1e9:.2f} GB; peak of measuring {taken['peak'] / 1e9:.2f} GB")
    finish({"benchmark": "eval", "options": vars(options), "speeds": speeds, "memory": taken})


def packed(name: str, directory: Path) -> Path:
    """The nested model."""
    if name == "builtin":
        otaro.pack("builtin", directory / "nested")
        return directory / "nested"
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**GEMMA3_270M)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory / "checkpoint")
    otaro.pack(directory / "checkpoint", directory / "nested")
    return directory / "nested"


def speed(nested: Path, options: Any) -> dict[str, dict[str, float]]:
    """Median seconds and CPU seconds of a turn of each contender."""
    decoded = DecodedModel(otaro.load(nested))
    model = decoded.at("E5M8")
    size = int(model.config.vocab_size)
    ids = torch.randint(size, (options.windows * options.window,), generator=torch.Generator().manual_seed(0))

    @torch.inference_mode()
    def by_transformers() -> None:
        for some in ids.split(options.window):
            float(model(some[None], labels=some[None], use_cache=False).loss)

    def at(precision: str) -> Callable[[], float]:
        return lambda: perplexity(decoded.at(precision), ids, window=options.window)

    def on_planes() -> float:
        return perplexity(decoded.nested, ids, window=options.window)

    contenders: dict[str, Callable[[], Any]] = {
        "transformers": by_transformers,
        "otaro eval, E5M8": at("E5M8"),
        "otaro eval, decoding E5M3 anew": at("E5M3"),
        "packed modules, in slices": on_planes,
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for number in range(1 + options.rounds):
        for name, contender in contenders.items():
            if name != "otaro eval, decoding E5M3 anew":
                decoded.at("E5M8")
            wall, cpu = time.perf_counter(), time.process_time()
            contender()
            if number:  # the first warms up
                times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {
        name: {"seconds": statistics.median(t[0] for t in turns), "cpu_seconds": statistics.median(t[1] for t in turns)}
        for name, turns in times.items()
    }


def memory(nested: Path, window: int, windows: int) -> dict[str, int]:
    """Bytes at the peak of an evaluation, and of the decoded model alone."""
    before = status("VmRSS")
    decoded = DecodedModel(otaro.load(nested))
    model = decoded.at("E5M8")
    held = sum({p.data_ptr(): p.nbytes for p in model.parameters()}.values())
    ids = torch.randint(int(model.config.vocab_size), (windows * window,), generator=torch.Generator().manual_seed(0))
    text, kept, reader = Windows(ids, window), KeptStates(), ModelReader(model)
    read(reader, text, [Loss(False), Keeper(kept)], lambda done, total: None)
    kept.finish(reader.sliced, decoded.nested, "E5M8")
    read(ModelReader(decoded.at("E5M3")), text, [Loss(False), Divergence(kept)], lambda done, total: None)
    return {"decoded": held, "peak": status("VmHWM") - before}


def status(field: str) -> int:
    """A figure of this process in bytes, as Linux tells it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


if __name__ == "__main__":
    main()
