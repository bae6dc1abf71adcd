"""Time to switch the precision of a loaded model.

    python benchmarks/bench_switch.py [NESTED_DIR]

Without an argument it packs SmolLM2-135M (210 decoder linears, embedding, head) where `runs/get_smollm2.sh` has fetched it,
and the built-in model (42 linears) always. A switch moves no weights, so its time depends on the number of modules and not
on their size: the last column, time per module, shows it. The first switch up also maps shards and is given apart.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import SMOLLM2, finish

import otaro
from otaro.builtin import MODEL_DIR

ROUNDS = 200


def main() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    results = []
    print(f"{'model':28}{'modules':>8}{'median':>10}{'worst':>10}{'first use':>11}{'per module':>12}")
    with tempfile.TemporaryDirectory() as scratch:
        if len(sys.argv) > 1:
            directories = [Path(sys.argv[1])]
        else:
            directories = []
            for source in (MODEL_DIR, SMOLLM2):
                if source.is_dir():
                    directories.append(Path(scratch) / ("builtin" if source == MODEL_DIR else source.name))
                    otaro.pack(source, directories[-1])
                else:
                    print(f"{source.name}: skipped, run runs/get_smollm2.sh first")
        for directory in directories:
            results.append(measure(directory))
    finish({"benchmark": "switch", "rounds": ROUNDS, "models": results})


def measure(directory: Path) -> dict[str, Any]:
    model = otaro.load(directory, "E5M3")
    modules = len(otaro.precisions_of(model))
    started = time.perf_counter()
    otaro.set_precision(model, "E5M8")
    first = time.perf_counter() - started
    times = []
    for round_ in range(ROUNDS):
        precision = otaro.PRECISIONS[round_ % len(otaro.PRECISIONS)]
        started = time.perf_counter()
        otaro.set_precision(model, precision)
        times.append(time.perf_counter() - started)
    median, worst = statistics.median(times), max(times)
    print(f"{directory.name:28}{modules:8}{median * 1e6:7.0f} us{worst * 1e6:7.0f} us", end="")
    print(f"{first * 1e3:8.1f} ms{median / modules * 1e9:9.0f} ns")
    return {"model": directory.name, "modules": modules, "median_s": median, "worst_s": worst, "first_use_s": first}


if __name__ == "__main__":
    main()
