"""What benches share: the machine (its name, its memory's speed, what of it is held, time), and turns."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from otaro.errors import OtaroError
from otaro.file.io import NestedDirectory
from otaro.kernels import ops
from otaro.sefp.precision import Precision

COPY_BYTES = 1 << 30
PAUSE = 0.02  # seconds between turns: threads of the last contender that still wait for work go to sleep

Key = TypeVar("Key")
Result = TypeVar("Result")


class Cpu:
    """Where a model runs: here."""

    kind = "cpu"

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)

    @property
    def name(self) -> str:
        """The processor, in its maker's words."""
        return cpu_name()

    def finish(self) -> None:
        """Wait for all that was started."""

    def held_bytes(self) -> int | None:
        """Memory of this process that is in RAM; None on systems without /proc.

        What is free but still held, by Python or the allocator, depends on what ran before: it goes first.
        """
        gc.collect()
        # musl has none
        if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
            trim(0)
        try:
            return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return None

    def plain_access(self, size: int) -> tuple[Callable[[], object], int]:
        """Something that moves about `size` bytes of memory and does no more; and how many it moves.

        It is a float32 product with a vector, on torch's threads: the library reads several rows side by
        side, which on a server's CPU is a third faster than a sum over one stretch of memory.
        """
        matrix = torch.ones(4096, size // 4096 // 4)
        vector = torch.ones(matrix.shape[1])
        return lambda: matrix @ vector, size

    def seconds(self, call: Callable[[], object]) -> float:
        """How long a call takes, with all that it starts and nothing that was started before."""
        self.finish()
        started = time.perf_counter()
        call()
        self.finish()
        return time.perf_counter() - started


class Gpu(Cpu):
    """An NVIDIA GPU: work is started there and waited for."""

    kind = "cuda"

    @property
    def name(self) -> str:
        """The GPU, in its maker's words."""
        return str(torch.cuda.get_device_name(self.device))

    def finish(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize(self.device)

    def held_bytes(self) -> int | None:
        """Of tensors on the GPU."""
        gc.collect()
        return int(torch.cuda.memory_allocated(self.device))

    def plain_access(self, size: int) -> tuple[Callable[[], object], int]:
        """A copy by a kernel, both ways counted; ever the same size, as a small one would time its launch."""
        source = torch.zeros(COPY_BYTES // 8, dtype=torch.int64, device=self.device)
        target = torch.empty_like(source)
        return lambda: torch.bitwise_not(source, out=target), 2 * source.nbytes


def processor(device: str) -> Cpu:
    """What runs on a device; refused where there is none."""
    from otaro.runtime.load import check_device

    check_device(device)
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        raise OtaroError(f"device {device!r}: cpu, cuda, cuda:1, ... can be timed")
    return Gpu(device) if kind == "cuda" else Cpu(device)


def device_name(device: str) -> str:
    """What a model runs on, in words."""
    place = torch.device(device)
    return torch.cuda.get_device_name(place) if place.type == "cuda" else place.type


def cpu_name() -> str:
    """The processor, in its maker's words where the system tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def in_turns(
    turns: Mapping[Key, Callable[[], Result]], rounds: int, say: Callable[[Key], object], warm: bool = False
) -> dict[Key, list[Result]]:
    """What turns gave, by round: one turn of each. Unless all are `warm`, a first round does not count."""
    found: dict[Key, list[Result]] = {key: [] for key in turns}
    for number in range(warm, 1 + rounds):
        for key, turn in turns.items():
            say(key)
            time.sleep(PAUSE)
            result = turn()
            if number:
                found[key].append(result)
    return found


@dataclass(frozen=True)
class Measured:
    """A model, and what it ran on."""

    model: str
    device: str
    """cpu or cuda."""
    machine: str
    """The processor or the GPU."""
    threads: int
    kernels: str
    kernels_reason: str

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {one.name: _plain(getattr(self, one.name)) for one in fields(self)}


def _plain(value: Any) -> Any:
    if isinstance(value, Precision):
        return str(value)
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if not is_dataclass(value):
        return value
    return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}


def about(nested: NestedDirectory, place: Cpu, threads: int) -> dict[str, Any]:
    """The fields of `Measured`."""
    kernels, reason = ops.backend(place.device)
    where = {"model": str(nested.path), "device": place.kind, "machine": place.name, "threads": threads}
    return {**where, "kernels": kernels, "kernels_reason": reason}
