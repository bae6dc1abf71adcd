"""What the benches of `otaro bench` share: contenders that take turns, and what they ran on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

from otaro.evaluate.machine import Cpu
from otaro.file.io import NestedDirectory
from otaro.kernels import ops
from otaro.sefp.precision import Precision

PAUSE = 0.02  # seconds between turns: threads of the last contender that still wait for work go to sleep

Key = TypeVar("Key")
Result = TypeVar("Result")


def in_turns(
    turns: Mapping[Key, Callable[[], Result]], rounds: int, say: Callable[[Key], object], *, warm: bool = False
) -> dict[Key, list[Result]]:
    """What every turn gave, round by round; a round is one turn of each. Unless all are `warm`, a first one does not count."""
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
        found: dict[str, Any] = _plain(self)
        return found


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
