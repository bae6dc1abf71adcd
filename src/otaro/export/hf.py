"""An ordinary checkpoint: `model.safetensors` in one floating-point type, with the config and the tokenizer beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from otaro.errors import OtaroError
from otaro.export.report import Report
from otaro.export.safetensors import SafetensorsWriter
from otaro.export.source import Piece, Progress, Source, chosen_dtype

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
WEIGHTS = "model.safetensors"


def parse_dtype(name: str | None, source: Source) -> torch.dtype:
    """The type that was asked for, or the one that suits."""
    if name is not None and name.lower() not in DTYPES:
        raise OtaroError(f"unknown type {name!r}; choose from {', '.join(DTYPES)}")
    return chosen_dtype(source) if name is None else DTYPES[name.lower()]


def write(source: Source, out: Path, report: Report, dtype_name: str | None, progress: Progress) -> None:
    """Fill the directory `out`."""
    dtype = parse_dtype(dtype_name, source)
    pieces = source.pieces()
    dtypes = {piece.name: dtype_of(source, piece, dtype) for piece in pieces}
    done, total = 0, 2 * source.weights
    with SafetensorsWriter(out / WEIGHTS, {piece.name: (dtypes[piece.name], piece.shape) for piece in pieces}) as writer:
        for piece in pieces:
            for values in values_of(source, piece):
                progress(piece.name, done, total)
                writer.append(piece.name, values.to(dtypes[piece.name]))
                done += values.numel()
    write_config(source, out, dtype)
    with safe_open(out / WEIGHTS, framework="pt") as file:
        for piece in pieces:
            kind = str(dtypes[piece.name]).removeprefix("torch.")
            report.start(kind)
            read, at = file.get_tensor(piece.name).flatten(), 0
            for values in values_of(source, piece):
                progress(f"checking {piece.name}", done, total)
                part = read[at : at + values.numel()].view(values.shape)
                report.compare(kind, piece.name, part.to(values.dtype), values)
                at, done = at + values.numel(), done + values.numel()


def dtype_of(source: Source, piece: Piece, dtype: torch.dtype) -> torch.dtype:
    """Of one tensor: what is not packed keeps its own type where the checkpoint's would round it."""
    if piece.source in source.packed:
        return dtype
    stored = source.stored(piece.source)
    exact = stored.is_floating_point() and torch.equal(stored.to(dtype).to(stored.dtype), stored)
    return dtype if exact else stored.dtype


def values_of(source: Source, piece: Piece) -> Iterator[torch.Tensor]:
    """Those of a piece, as the model class has them."""
    if piece.source not in source.transposed:
        return source.values(piece)
    return iter([torch.cat(list(source.values(piece))).T.contiguous()])


def write_config(source: Source, out: Path, dtype: torch.dtype) -> None:
    """The model's config, without what made it a nested one, and what lies beside it."""
    source.copy_sidecars(out)
    source.config.dtype = dtype
    source.config.save_pretrained(out)
