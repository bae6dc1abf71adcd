"""What the benchmarks share: alternating timing, and the line that names machine and versions."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from otaro.evaluate.machine import Cpu, cpu_name
from otaro.evaluate.turns import in_turns

ROOT = Path(__file__).resolve().parent.parent


def alternate(contenders: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each contender, run in turn so that a noisy machine is noisy for all of them alike."""
    turns = {name: partial(Cpu().seconds, run) for name, run in contenders.items()}
    return {name: statistics.median(times) for name, times in in_turns(turns, rounds, lambda name: None).items()}


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
