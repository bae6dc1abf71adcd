"""Checkpoints as Hugging Face lays them out: `model.safetensors`, the config and the tokenizer, in a
directory.

Linear layers may be packed into integers; a `Form` says how, and every other tensor is in one floating-point
type. What was written is read back, weights are computed from it as the reader computes them, and compared.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open

from otaro.errors import OtaroError
from otaro.export.report import Report
from otaro.export.safetensors import SafetensorsWriter
from otaro.export.source import Piece, Progress, Rows, Source

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
WEIGHTS, CONFIG = "model.safetensors", "config.json"

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class Form(Protocol):
    """How a matrix is packed."""

    @property
    def kind(self) -> str:
        """For the report."""

    def layout(self, piece: Piece) -> Layout:
        """The tensors that a matrix becomes."""

    def encode(self, piece: Piece, rows: Rows) -> dict[str, torch.Tensor]:
        """What some of its rows become."""

    def constants(self, piece: Piece) -> dict[str, torch.Tensor]:
        """Those that have no rows."""

    def decode(self, piece: Piece, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Some rows as their reader computes them."""


def parse_dtype(name: str) -> torch.dtype:
    """The type that a user asks for."""
    if name.lower() not in DTYPES:
        raise OtaroError(f"unknown type {name!r}; choose from {', '.join(DTYPES)}")
    return DTYPES[name.lower()]


def write_checkpoint(
    source: Source,
    out: Path,
    report: Report,
    dtype: torch.dtype,
    progress: Progress,
    form: Form | None = None,
    packed: Container[str] = (),
) -> None:
    """Fill the directory `out` with the pieces that `packed` names in a form and `source.config` as it is."""
    pieces = source.pieces()
    dtypes = {piece.name: _dtype(source, piece, dtype) for piece in pieces}
    layout: Layout = {}
    for piece in pieces:
        layout |= (
            form.layout(piece)
            if form and piece.name in packed
            else {piece.name: (dtypes[piece.name], piece.shape)}
        )
    done, total = 0, 2 * source.weights
    with SafetensorsWriter(out / WEIGHTS, layout) as writer:
        for piece in pieces:
            if form and piece.name in packed:
                for rows in source.rows(piece):
                    progress(piece.name, done, total)
                    for name, data in form.encode(piece, rows).items():
                        writer.append(name, data)
                    done += rows.codes.numel()
                for name, data in form.constants(piece).items():
                    writer.append(name, data)
            else:
                for values in _values(source, piece):
                    progress(piece.name, done, total)
                    writer.append(piece.name, values.to(dtypes[piece.name]))
                    done += values.numel()
    source.copy_sidecars(out)
    source.config.dtype = dtype
    source.config.save_pretrained(out)
    spell_out_rope(out / CONFIG)
    with safe_open(out / WEIGHTS, framework="pt") as file:
        for piece in pieces:
            its_form = form if piece.name in packed else None
            kind = its_form.kind if its_form else str(dtypes[piece.name]).removeprefix("torch.")
            names = (
                its_form.layout(piece).keys() - its_form.constants(piece).keys() if its_form else {piece.name}
            )
            stored = {name: _matrix(file.get_tensor(name)) for name in names}
            report.start(kind)
            at = 0
            for wanted in _values(source, piece):
                progress(f"checking {piece.name}", done, total)
                matrix = _matrix(wanted)
                some = {name: tensor[at : at + len(matrix)] for name, tensor in stored.items()}
                found = its_form.decode(piece, some) if its_form else some[piece.name]
                report.compare(kind, piece.name, found.to(matrix.dtype), matrix)
                at, done = at + len(matrix), done + matrix.numel()


def spell_out_rope(path: Path) -> None:
    """Rope as readers look for it that do not know `rope_parameters`: mlx_lm takes its default silently."""
    config = json.loads(path.read_text())
    rope = config.get("rope_parameters") or {}
    if "full_attention" in rope:  # a rope for each kind of layer, as in Gemma 3
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    scaling = dict(rope)
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in scaling:
            config[name] = scaling.pop(name)
    if scaling.get("rope_type", "default") != "default":
        config["rope_scaling"] = scaling
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(prod(tensor.shape[:-1]), -1)


def _dtype(source: Source, piece: Piece, dtype: torch.dtype) -> torch.dtype:
    """Of one tensor: what is not packed here keeps its own type where the checkpoint's would round it."""
    if piece.source in source.packed:
        return dtype
    stored = source.stored(piece.source)
    exact = stored.is_floating_point() and torch.equal(stored.to(dtype).to(stored.dtype), stored)
    return dtype if exact else stored.dtype


def _values(source: Source, piece: Piece) -> Iterator[torch.Tensor]:
    """Those of a piece, as the model class has them."""
    if piece.source not in source.transposed:
        return source.values(piece)
    return iter([torch.cat(list(source.values(piece))).T.contiguous()])
