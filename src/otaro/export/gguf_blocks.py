"""GGUF's types for weights: which holds a precision exactly, and how its blocks of 32 are laid out.

A block has a scale d in float16, and d times an integer is a weight: Q4_0 has integers of four bits, Q5_0 of
five, Q8_0 of eight; Q5_1 counts from a lowest value m, also float16. Integers and units (`export.grid`) are
put there as they are. (`gguf.quants.quantize` would look for scales of its own.)

What may be rounded: float16 has no steps below 2^-24, so the unit of a group whose weights are all below
2^-15 or so may not be among its numbers. The report says where that happens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from otaro.errors import OtaroError
from otaro.export.grid import Grid
from otaro.export.source import Rows

BLOCK = 32
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCK_BYTES = {"Q4_0": 18, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}
TYPES = (*BLOCK_BYTES, "F16", "BF16", "F32")
_ENDS = {"Q4_0": (-8, 7), "Q5_0": (-16, 15), "Q8_0": (-128, 127)}


def holds(kind: str, grid: Grid) -> bool:
    """Whether a type of blocks has all integers of a precision."""
    if kind == "Q5_1":
        return grid.levels <= 32
    least, most = _ENDS[kind]
    return least <= grid.least and grid.most <= most


def smallest(grid: Grid) -> str:
    """The type with the fewest bits that has them; F16 where none has."""
    return next((kind for kind in BLOCK_BYTES if holds(kind, grid)), "F16")


def parse_type(name: str) -> str:
    """The type that a user asks for."""
    if name.upper() not in TYPES:
        raise OtaroError(f"unknown type {name!r}; choose from {', '.join(TYPES)}")
    return name.upper()


def row_bytes(kind: str, length: int) -> int:
    """What a row of weights takes."""
    return length // BLOCK * BLOCK_BYTES[kind] if kind in BLOCK_BYTES else length * PLAIN[kind].itemsize


def encode(kind: str, rows: Rows, gguf: Any) -> torch.Tensor:
    """Rows as the bytes of a type, uint8 [rows, row_bytes]."""
    if kind in PLAIN:
        return rows.values().to(PLAIN[kind]).view(torch.uint8)
    if not holds(kind, rows.grid):
        data = gguf.quants.quantize(rows.values().numpy(), gguf.GGMLQuantizationType[kind])
        return torch.from_numpy(data)
    units = rows.units(BLOCK).unsqueeze(-1)
    integers = rows.integers.unflatten(-1, (-1, BLOCK))
    return torch.cat(_LAYOUTS[kind](integers, units, rows.grid), -1).flatten(-2)


def _q4_0(integers: torch.Tensor, units: torch.Tensor, grid: Grid) -> list[torch.Tensor]:
    return [_half(units), _nibbles(integers + 8)]


def _q5_0(integers: torch.Tensor, units: torch.Tensor, grid: Grid) -> list[torch.Tensor]:
    return [_half(units), _fifth_bits(integers + 16), _nibbles(integers + 16)]


def _q5_1(integers: torch.Tensor, units: torch.Tensor, grid: Grid) -> list[torch.Tensor]:
    counted = (integers - grid.least) // grid.stride
    return [_half(units * grid.stride), _half(units * grid.least), _fifth_bits(counted), _nibbles(counted)]


def _q8_0(integers: torch.Tensor, units: torch.Tensor, grid: Grid) -> list[torch.Tensor]:
    return [_half(units), integers.to(torch.int8).view(torch.uint8)]


_LAYOUTS: dict[str, Callable[[torch.Tensor, torch.Tensor, Grid], list[torch.Tensor]]] = {
    "Q4_0": _q4_0,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
}


def _half(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float16).view(torch.uint8)


def _nibbles(numbers: torch.Tensor) -> torch.Tensor:
    """The low four bits: weights 0 to 15 in the low halves of 16 bytes, 16 to 31 in the high ones."""
    low = (numbers & 15).to(torch.uint8)
    return low[..., :16] | (low[..., 16:] << 4)


def _fifth_bits(numbers: torch.Tensor) -> torch.Tensor:
    """Bit 4 of weight i as bit i of a little-endian word."""
    bits: torch.Tensor = (numbers >> 4 & 1).to(torch.uint8).unflatten(-1, (4, 8))
    return (bits << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
