"""What the GPU benchmarks share: launches captured into graphs, timed in turn; the speed of a plain copy; which GPU it was.

A graph repeats its launches without the host, so that what is timed is the GPU's own work. Contenders run in turn, round after
round, between two events each, and the median of a contender's rounds counts: whatever clocks and neighbours do meets all
of them alike.
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from common import ROOT

LONG_ENOUGH = 2e-3
"""Seconds that a graph should take: what lies between an event and the first kernel of a graph is then less than a percent."""
COPIED = 2 << 30  # bytes
DEVICE = "cuda"


def require() -> str:
    """The name of the GPU; ends the program with words if there is none."""
    if not torch.cuda.is_available():
        reason = "torch finds no NVIDIA GPU" if torch.version.cuda else "this torch is built without CUDA"
        sys.exit(f"{sys.argv[0]}: {reason}; nothing was measured")
    return str(torch.cuda.get_device_name())


@dataclass
class Captured:
    """Some launches that are replayed as one."""

    graph: torch.cuda.CUDAGraph
    launches: int
    """What the time of a replay is divided by."""
    kept: Any = None
    """What the launches read and write: a graph knows addresses only."""


def capture(launch: Callable[[int], Any], launches: int, kept: Any = None) -> Captured:
    """Run `launch(0)`, `launch(1)`, ... into a graph, after one run of each outside it, which compiles what is missing."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch(0)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for number in range(launches):
            launch(number)
    return Captured(graph, launches, (launch, kept))


def enough(seconds: float, copies: int, most: int = 1000) -> int:
    """How many launches of about so many seconds make a graph, each copy of the weights equally often."""
    rounds = max(1, round(min(most, LONG_ENOUGH / seconds) / copies))
    return rounds * copies


def alternate(contenders: Mapping[str, Captured], rounds: int) -> dict[str, list[float]]:
    """Seconds of one launch of each contender, in every round."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for contender in contenders.values():
        contender.graph.replay()  # the first replay of a graph uploads it
    for _ in range(rounds):
        marks = []
        for contender in contenders.values():
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            contender.graph.replay()
            after.record()
            marks.append((before, after))
        torch.cuda.synchronize()
        for (name, contender), (before, after) in zip(contenders.items(), marks, strict=True):
            times[name].append(before.elapsed_time(after) * 1e-3 / contender.launches)
    return times


def medians(times: Mapping[str, Iterable[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


def copy_rate(rounds: int = 15) -> float:
    """Bytes a second of a large copy on the GPU, those read and those written counted.

    By a kernel: a graph would hand `copy_` to the copy engines, which reach two thirds of what kernels do.
    """
    source = torch.randint(0, 255, (COPIED // 4,), dtype=torch.int32, device=DEVICE)
    target = torch.empty_like(source)
    graph = capture(lambda _: torch.bitwise_not(source, out=target), 2)
    return 2 * COPIED / medians(alternate({"copy": graph}, rounds))["copy"]


def release() -> None:
    """Give back what nobody holds, so that the next section finds the memory empty."""
    gc.collect()
    torch.cuda.empty_cache()


def machine() -> dict[str, Any]:
    """Where the figures come from."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "commit": os.environ.get("OTARO_COMMIT") or _first_line("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
    }


def _first_line(*command: str) -> str | None:
    """What a program says, or None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.partition("\n")[0].strip() or None if done.returncode == 0 else None
