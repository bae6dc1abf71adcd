"""A checkpoint for Apple's MLX, as `mlx_lm` loads it.

A packed matrix has unsigned integers of four, five, six or eight bits as 32-bit words under its own name, and
`scales` and `biases` for each group beside it: a weight is integer times scale plus bias. With the lowest
value of a group as its bias every precision but E5M8 fits, E5M7 with scales in float32. Embedding and head
are packed too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from pathlib import Path

import torch

from otaro.errors import OtaroError
from otaro.export.bits import pack_bits, unpack_bits
from otaro.export.checkpoint import Layout, parse_dtype, write_checkpoint
from otaro.export.grid import Grid
from otaro.export.report import Report
from otaro.export.source import Piece, Progress, Rows, Source, chosen_dtype
from otaro.sefp.codec import scale_values

_WORD = 32
_SIZES = (128, 64, 32)  # of groups


@dataclass(frozen=True)
class Affine:
    """MLX's mode of that name."""

    bits: int
    group_size: int
    dtype: torch.dtype
    grid: Grid

    @property
    def kind(self) -> str:
        """For the report."""
        return f"{self.bits} bits"

    def layout(self, piece: Piece) -> Layout:
        """Words of integers, scales, biases."""
        *rows, length = piece.shape
        stem, groups = piece.name.removesuffix(".weight"), (*rows, length // self.group_size)
        return {
            piece.name: (torch.uint32, (*rows, length * self.bits // _WORD)),
            f"{stem}.scales": (self.dtype, groups),
            f"{stem}.biases": (self.dtype, groups),
        }

    def encode(self, piece: Piece, rows: Rows) -> dict[str, torch.Tensor]:
        """Integers counted from the lowest."""
        stem, units = piece.name.removesuffix(".weight"), rows.units(self.group_size)
        return {
            piece.name: pack_bits((rows.integers - self.grid.least) // self.grid.stride, self.bits),
            f"{stem}.scales": (units * self.grid.stride).to(self.dtype),
            f"{stem}.biases": (units * self.grid.least).to(self.dtype),
        }

    def constants(self, piece: Piece) -> dict[str, torch.Tensor]:
        """None."""
        return {}

    def decode(self, piece: Piece, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """In the type of scales and biases, as MLX does."""
        stem = piece.name.removesuffix(".weight")
        scales, biases = (
            stored[f"{stem}.{part}"].repeat_interleave(self.group_size, -1) for part in ("scales", "biases")
        )
        return unpack_bits(stored[piece.name], self.bits).to(self.dtype) * scales + biases


def integer_bits(grid: Grid) -> int | None:
    """How many bits the integers of a precision take, of those that MLX has; None where it has too few."""
    return next((bits for bits in (4, 5, 6, 8) if grid.levels <= 1 << bits), None)


def is_exact(grid: Grid, dtype: torch.dtype, scale_bytes: torch.Tensor) -> bool:
    """Whether a type has the digits for integer times scale plus bias, for every code at these scales."""
    units = grid.units(scale_values(scale_bytes.unique(), 0)).view(-1, 1)
    numbers = torch.arange(grid.levels)
    found = numbers.to(dtype) * (units * grid.stride).to(dtype) + (units * grid.least).to(dtype)
    return torch.equal(found.float(), (numbers * grid.stride + grid.least) * units)


def write(source: Source, out: Path, report: Report, dtype: str | None, progress: Progress) -> None:
    """Fill the directory `out`; scales and what is not packed by default in the smallest exact type."""
    if source.transposed:
        raise OtaroError(
            f"{source.config.model_type} models cannot be written for MLX here; export --to hf, and use "
            "mlx_lm.convert"
        )
    bits = integer_bits(source.grid)
    if bits is None:
        report.notes.append(f"MLX has no integers that hold {source.precision}: weights are in full")
        write_checkpoint(
            source, out, report, chosen_dtype(source) if dtype is None else parse_dtype(dtype), progress
        )
        return
    pieces = source.pieces()
    packed = {
        piece.name: piece
        for piece in pieces
        if piece.source in source.packed and piece.shape[-1] % _WORD == 0
    }
    common = gcd(source.group_size, *(piece.shape[-1] for piece in packed.values()))
    size = next(size for size in _SIZES if common % size == 0)
    form = Affine(bits, size, _dtype(source) if dtype is None else parse_dtype(dtype), source.grid)
    source.config.quantization = {"group_size": size, "bits": bits}
    write_checkpoint(source, out, report, form.dtype, progress, form, packed)


def _dtype(source: Source) -> torch.dtype:
    """The model's own type where that has 16 bits and is exact, else float16, else float32."""
    own = source.config.dtype
    scale_bytes = torch.cat([source.scale_bytes(name).flatten().unique() for name in source.packed])
    largest = max(source.largest_scale(name) for name in source.packed)
    candidates = [own] * (own in (torch.float16, torch.bfloat16)) + [torch.float16]
    # integers count from the lowest value
    fitting = [dtype for dtype in candidates if 2 * largest < torch.finfo(dtype).max]
    return next((dtype for dtype in fitting if is_exact(source.grid, dtype, scale_bytes)), torch.float32)
