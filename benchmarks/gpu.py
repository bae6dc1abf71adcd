"""What the GPU benchmarks share: launches captured into graphs, timed in turn; a copy's speed; which GPU.

A graph repeats its launches without the host, so that what is timed is the GPU's own work. Contenders run in
turn, round after round, between two events each, and the median of a contender's rounds counts: whatever
clocks and neighbours do meets all of them alike. Weights are copied until they take so many bytes that none
is in the cache when it comes again.
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import common
import torch

LONG_ENOUGH = 2e-3
"""Seconds that a graph should take: between an event and its first kernel is less than a percent of it."""
COPIED = 2 << 30  # bytes
DEVICE = "cuda"
STD = 0.02  # of weights in float16
ROTATED = 200_000_000
"""Bytes that the copies of a matrix take at least: it is to come from memory, not the cache of 60 MB."""

Weights = TypeVar("Weights")


def require() -> None:
    """End the program with words if there is no GPU."""
    if not torch.cuda.is_available():
        reason = "torch finds no NVIDIA GPU" if torch.version.cuda else "this torch is built without CUDA"
        sys.exit(f"{sys.argv[0]}: {reason}; nothing was measured")


def say(text: str = "") -> None:
    print(text, flush=True)


@dataclass
class Captured:
    """Some launches that are replayed as one."""

    graph: torch.cuda.CUDAGraph
    launches: int
    """What the time of a replay is divided by."""
    launch: Callable[[int], Any]
    """Holds what the launches read and write: a graph knows addresses only."""


def capture(launch: Callable[[int], Any], launches: int) -> Captured:
    """Run `launch(0)`, `launch(1)`, ... into a graph, after one outside it that compiles."""
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
    return Captured(graph, launches, launch)


def copies(size: int, make: Callable[[], Weights]) -> list[Weights]:
    """So many of something of so many bytes that they take `ROTATED`."""
    return [make() for _ in range(ROTATED // size + 1)]


def halves(rows: int, length: int) -> torch.Tensor:
    return torch.empty(rows, length, dtype=torch.float16, device=DEVICE).normal_(std=STD)


def rotating(weights: Sequence[Any], seconds: float, call: Callable[..., Any], *arguments: Any) -> Captured:
    """Calls of about so many seconds with each copy of the weights in turn, all equally often."""
    rounds = max(1, round(LONG_ENOUGH / seconds / len(weights)))
    return capture(lambda number: call(weights[number % len(weights)], *arguments), rounds * len(weights))


def alternate(contenders: Mapping[str, Captured], rounds: int) -> dict[str, float]:
    """Seconds of one launch of each contender."""
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
    return {name: statistics.median(values) for name, values in times.items()}


def copy_rate(rounds: int = 15) -> float:
    """Bytes a second of a large copy on the GPU, those read and those written counted.

    By a kernel: a graph would hand `copy_` to the copy engines, which reach two thirds of what kernels do.
    """
    source = torch.randint(0, 255, (COPIED // 4,), dtype=torch.int32, device=DEVICE)
    target = torch.empty_like(source)
    graph = capture(lambda _: torch.bitwise_not(source, out=target), 2)
    return 2 * COPIED / alternate({"copy": graph}, rounds)["copy"]


def release() -> None:
    """Give back what nobody holds, so that the next section finds the memory empty."""
    gc.collect()
    torch.cuda.empty_cache()


def machine() -> dict[str, Any]:
    """Where the figures come from; said, too."""
    properties = torch.cuda.get_device_properties(0)
    driver = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    commit = ("git", "-C", str(common.ROOT), "rev-parse", "--short", "HEAD")
    found = {
        **common.machine(),
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "driver": _first_line(*driver),
        "commit": os.environ.get("OTARO_COMMIT") or _first_line(*commit),
    }
    say(", ".join(f"{key}: {value}" for key, value in found.items()))
    return found


def _first_line(*command: str) -> str | None:
    """What a program says, or None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.partition("\n")[0].strip() or None
