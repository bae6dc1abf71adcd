"""A GGUF file, with vocabulary and chat template: for llama.cpp, Ollama and what builds on them."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch

from otaro.errors import OtaroError, install
from otaro.export import gguf_blocks as blocks
from otaro.export.gguf_architectures import architecture, extra_tensors, metadata, notes, pieces
from otaro.export.gguf_vocabulary import vocabulary
from otaro.export.report import Report
from otaro.export.source import Piece, Progress, Source


def write(source: Source, out: Path, report: Report, kind: str | None, progress: Progress) -> None:
    """Write the file `out`; packed weights in the type `kind`, or the smallest that is exact."""
    gguf = _library()
    asked = None if kind is None else blocks.parse_type(kind)
    wanted = {name: asked or blocks.smallest(grid) for name, grid in source.grids.items()}
    mostly = Counter(wanted.values()).most_common(1)[0][0]
    entry = architecture(source.config)
    writer = gguf.GGUFWriter(out, entry.name)
    header = source.nested.base.header
    writer.add_string("otaro.model", header.model)
    writer.add_string("otaro.precision", str(source.precision))
    writer.add_name(source.nested.path.resolve().name)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if mostly == "F32" else f"MOSTLY_{mostly}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for method, value in metadata(source.config, entry).items():
        getattr(writer, f"add_{method}")(value)
    words = vocabulary(source.nested.path, source.config.vocab_size)
    for method, value in words.items():
        getattr(writer, f"add_{method}")(value)
    report.notes += notes(source.config, entry)
    if words["tokenizer_model"] == "none":
        report.notes.append(
            "the model has no tokenizer, so the file has no vocabulary: tokens go in and out as numbers"
        )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[entry.name.upper()], source.config.num_hidden_layers)
    tensors = pieces(source, entry, names)
    kinds = {piece.name: _kind(piece, wanted) for piece in tensors}
    extra = extra_tensors(source.config, entry)
    for piece in tensors:
        size = blocks.row_bytes(kinds[piece.name], piece.shape[-1]) * prod(piece.shape[:-1])
        writer.add_tensor_info(
            piece.name, piece.shape, torch.float32, size, gguf.GGMLQuantizationType[kinds[piece.name]]
        )
    for name, values in extra.items():
        writer.add_tensor_info(
            name, values.shape, torch.float32, 4 * len(values), gguf.GGMLQuantizationType.F32
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    done, total = 0, 2 * source.weights
    try:
        stream = writer.fout[0]
        writer.write_padding(stream, stream.tell())
        for piece in tensors:
            start = stream.tell()
            for data, count in _bytes(source, piece, kinds[piece.name], entry.norm_offset, gguf):
                progress(piece.name, done, total)
                stream.write(data.contiguous().numpy().data)
                done += count
            writer.write_padding(stream, stream.tell() - start)
        for values in extra.values():
            stream.write(values.float().numpy().data)
            writer.write_padding(stream, 4 * len(values))
    finally:
        writer.close()
    _check(source, out, tensors, entry.norm_offset, report, progress, gguf)


def _kind(piece: Piece, wanted: dict[str, str]) -> str:
    """Blocks need rows of whole blocks; what is not packed is small and stays in full."""
    kind = wanted.get(piece.source, "F32")
    return "F16" if kind in blocks.BLOCK_BYTES and piece.shape[-1] % blocks.BLOCK else kind


def _bytes(
    source: Source, piece: Piece, kind: str, offset: float, gguf: Any
) -> Iterator[tuple[torch.Tensor, int]]:
    """A tensor as the file has it, with how many weights that is, some rows at a time."""
    if piece.source in source.packed:
        for rows in source.rows(piece):
            yield blocks.encode(kind, rows, gguf), rows.codes.numel()
    else:
        for values in _unpacked(source, piece, offset):
            yield values.view(torch.uint8), values.numel()


def _unpacked(source: Source, piece: Piece, offset: float) -> Iterator[torch.Tensor]:
    for values in source.values(piece):
        floats = values.float()
        yield floats + offset if offset and piece.source.endswith("norm.weight") else floats


def _check(
    source: Source,
    out: Path,
    tensors: list[Piece],
    offset: float,
    report: Report,
    progress: Progress,
    gguf: Any,
) -> None:
    """Read everything back as gguf itself reads and dequantizes it."""
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(out).tensors}
    done, total = source.weights, 2 * source.weights
    for piece in tensors:
        tensor = read[piece.name]
        kind = tensor.tensor_type.name
        report.start(kind)
        stored = tensor.data.reshape(prod(piece.shape[:-1]), -1)
        packed, at = piece.source in source.packed, 0
        for wanted in source.values(piece) if packed else _unpacked(source, piece, offset):
            progress(f"checking {piece.name}", done, total)
            rows = wanted.reshape(-1, piece.shape[-1])
            values = gguf.quants.dequantize(stored[at : at + len(rows)], tensor.tensor_type)
            report.compare(kind, piece.name, torch.tensor(values).view(rows.shape), rows)
            at, done = at + len(rows), done + rows.numel()


def _library() -> Any:
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise OtaroError(f"--to gguf needs the package gguf ({error}); {install('gguf')} brings it") from None
