"""A checkpoint of packed integers for compressed-tensors: what vLLM runs, and transformers opens.

Every linear layer has `weight_packed`, integers of four or eight bits, and `weight_scale`, one for each
group; a weight is the one times the other. The embedding and the head stay in full: few programs read them
packed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import torch

from otaro.errors import OtaroError
from otaro.export.bits import pack_bits, unpack_bits
from otaro.export.checkpoint import Layout, parse_dtype, write_checkpoint
from otaro.export.grid import Grid
from otaro.export.report import Report
from otaro.export.source import Piece, Progress, Rows, Source, chosen_dtype
from otaro.packable import Kind

_WORD = 32


@dataclass(frozen=True)
class PackQuantized:
    """The library's format of that name: signed integers, counted from the lowest."""

    bits: int
    group_size: int
    dtype: torch.dtype

    @property
    def kind(self) -> str:
        """For the report."""
        return f"int{self.bits}"

    def layout(self, piece: Piece) -> Layout:
        """Words of integers, scales, and the shape that the words do not tell."""
        rows, length = piece.shape
        return {
            f"{piece.name}_packed": (torch.int32, (rows, length * self.bits // _WORD)),
            f"{piece.name}_scale": (self.dtype, (rows, length // self.group_size)),
            f"{piece.name}_shape": (torch.int64, (2,)),
        }

    def encode(self, piece: Piece, rows: Rows) -> dict[str, torch.Tensor]:
        """Integers as they are, units as scales."""
        words = pack_bits(rows.integers + (1 << self.bits - 1), self.bits)
        return {
            f"{piece.name}_packed": words,
            f"{piece.name}_scale": rows.units(self.group_size).to(self.dtype),
        }

    def constants(self, piece: Piece) -> dict[str, torch.Tensor]:
        """The shape."""
        return {f"{piece.name}_shape": torch.tensor(piece.shape)}

    def decode(self, piece: Piece, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """In the type of the scales, as the library does."""
        integers = unpack_bits(stored[f"{piece.name}_packed"], self.bits) - (1 << self.bits - 1)
        return integers.to(self.dtype) * stored[f"{piece.name}_scale"].repeat_interleave(self.group_size, -1)


def integer_bits(grid: Grid) -> int | None:
    """How many bits the integers of a precision take, four or eight; None where that is too few."""
    return next(
        (bits for bits in (4, 8) if -(1 << bits - 1) <= grid.least and grid.most < 1 << bits - 1), None
    )


def write(source: Source, out: Path, report: Report, dtype: str | None, progress: Progress) -> None:
    """Fill the directory `out`; scales and what is not packed by default in the smallest exact type."""
    bits = integer_bits(source.grid)
    if bits is None:
        raise OtaroError(
            f"compressed-tensors has no integers that hold {source.precision} "
            f"({source.grid.reconstruction}): "
            "they end at eight bits; export a lower precision, or --to hf"
        )
    pieces = source.pieces()
    kinds = {piece.name: source.kinds.get(piece.source) for piece in pieces}
    linear = [piece for piece in pieces if kinds[piece.name] in (Kind.LINEAR, Kind.EXPERTS)]
    packed = {piece.name: piece for piece in linear if piece.shape[-1] % _WORD == 0}
    if not packed:
        raise OtaroError(
            f"no linear layer of this {source.config.model_type} model has rows of whole "
            "words; export --to hf"
        )
    size = gcd(source.group_size, *(piece.shape[-1] for piece in packed.values()))
    form = PackQuantized(bits, size, chosen_dtype(source) if dtype is None else parse_dtype(dtype))
    # Which are not packed. Routers are linear layers elsewhere, a tied head is one that has no tensor.
    matrices = {
        piece.name for piece in pieces if len(piece.shape) > 1 and kinds[piece.name] is not Kind.EMBEDDING
    }
    left = {"lm_head", *(name.removesuffix(".weight") for name in matrices - packed.keys())}
    source.config.quantization_config = _stated(form, sorted(left))
    write_checkpoint(source, out, report, form.dtype, progress, form, packed)


def _stated(form: PackQuantized, ignore: list[str]) -> dict[str, Any]:
    """For config.json."""
    weights = {"num_bits": form.bits, "type": "int", "symmetric": True, "dynamic": False}
    weights |= {"strategy": "group", "group_size": form.group_size}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ignore,
    }
