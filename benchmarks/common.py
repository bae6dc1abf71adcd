"""What the benchmarks share: alternating timing, and the line that names machine and versions."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from otaro.evaluate.machine import cpu_name

ROOT = Path(__file__).resolve().parent.parent


def alternate(contenders: Mapping[str, Callable[[], Any]], rounds: int, pause: float = 0.0) -> dict[str, float]:
    """Median seconds of each contender, run in turn so that a noisy machine is noisy for all of them alike.

    Threads that a contender leaves waiting for work fall asleep in a `pause` before the next one.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for contender in contenders.values():
        contender()  # warm-up
    for _ in range(rounds):
        for name, contender in contenders.items():
            time.sleep(pause)
            started = time.perf_counter()
            contender()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def machine() -> dict[str, Any]:
    """Where the figures come from."""
    return {
        "machine": cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def finish(result: dict[str, Any]) -> None:
    """The last line of every benchmark: one JSON object."""
    print(json.dumps({**machine(), **result}))
