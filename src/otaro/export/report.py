"""What was written, and how it compares with the precision that was asked for, tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass
class TypeReport:
    """The tensors that were written in one type."""

    type: str
    tensors: int = 0
    weights: int = 0
    rounded_tensors: int = 0
    rounded_weights: int = 0
    """Of which another value was read back than the nested model has."""
    largest_error: float = 0.0
    worst: str = ""
    """The tensor that has it."""


@dataclass
class Report:
    """Of an export: all tensors were read back from what was written, and compared with the codec."""

    target: str
    precision: str
    types: dict[str, TypeReport] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    path: Path = Path()
    bytes: int = 0

    @property
    def exact(self) -> bool:
        """Whether every value read back is the nested model's, bit for bit."""
        return not any(one.rounded_tensors for one in self.types.values())

    @property
    def tensors(self) -> int:
        """How many were written."""
        return sum(one.tensors for one in self.types.values())

    def start(self, kind: str) -> None:
        """Count a tensor; `compare` then gets its values, in as many parts as it likes."""
        one = self.types.setdefault(kind, TypeReport(kind))
        one.tensors += 1
        self._rounded = False

    def compare(self, kind: str, name: str, read: torch.Tensor, wanted: torch.Tensor) -> None:
        """Values of a tensor as they were read back, beside those that it should have."""
        one = self.types[kind]
        one.weights += wanted.numel()
        if torch.equal(read, wanted):
            return
        one.rounded_tensors += not self._rounded
        self._rounded = True
        other = read != wanted
        one.rounded_weights += int(other.sum())
        error = float((read[other].double() - wanted[other].double()).abs().max())
        if not error <= one.largest_error:
            one.largest_error, one.worst = error, name
