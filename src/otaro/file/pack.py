"""Packing: a checkpoint in, a nested directory out, a few thousand rows in memory at any time.

Every tensor is read twice: once for the largest scale it needs, then to be encoded. Each core takes a few
thousand rows of its own. Were the cores to share each of torch's operations instead, they would meet a dozen
times for every such piece, and where another process keeps one of them busy, all would wait for it every
time.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from otaro.errors import OtaroWarning, TargetError, WeightError
from otaro.file.checkpoint import SIDECARS, Checkpoint, resolve_model
from otaro.file.coding import CODING_FILE, Coding, choose_coding, write_coding
from otaro.file.gguf import is_gguf, stated_types
from otaro.file.gguf_tokenizer import write_tokenizer
from otaro.file.header import BASE, Schema, shard_name
from otaro.file.hub import Hub
from otaro.file.io import NestedDirectory, NestedWriter, PackedRows
from otaro.file.replace import DECODER_FILE
from otaro.sefp.codec import (
    Reconstruction,
    encode,
    first_refused,
    group_needs,
    needs_are_met,
    smallest_scale_exponent,
)

MANY_ZEROS = 0.01
"""From this share of exact zeros on `midpoint`, which keeps none above E5M3, may not be what is wanted."""

LARGE_BYTES = 1 << 20
"""From this size on a float32 matrix that is not packed is stored in 16 bits."""

REPLACED = (*SIDECARS, CODING_FILE, DECODER_FILE)  # what is of a model besides its shards
_CHUNK = 1 << 18  # weights encoded between two writes: few enough to stay in the cache
_TRIM_EVERY = 1 << 22  # weights

_T = TypeVar("_T")
_R = TypeVar("_R")


class Chosen(Protocol):
    """Codes that were chosen before; what it has none for is encoded here."""

    def rows(self, name: str) -> Iterator[PackedRows] | None:
        """The encoded rows of a tensor, in order."""

    def stored(self, name: str) -> torch.Tensor | None:
        """A tensor that is not packed, where it has become another."""


def pack(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    group_size: int | None = None,
    reconstruction: Reconstruction | None = None,
    overwrite: bool = False,
    keep_float32: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
    chosen: Chosen | None = None,
    record: Mapping[str, Any] | None = None,
) -> NestedDirectory:
    """Turn a Hugging Face model (a directory, a Hub id, or `builtin`) or a GGUF file into the nested
    directory `out`.

    Without `group_size` and `reconstruction` a checkpoint is packed as `otaro tune` tuned it (`file.coding`),
    any other in groups of 64 with midpoints. Large float32 matrices that are not packed are stored in 16
    bits, with a warning that names them, unless `keep_float32`. `out` appears when everything is written and
    flushed, or not at all. `progress` is called with the tensor at hand and the weights done and in total.
    `revision`, `token` and `cache_dir` are those of transformers, for a model on the Hub. `chosen` has codes
    that were chosen otherwise, `record` what `otaro.json` says of them.
    """
    if not isinstance(out, str | os.PathLike) or not str(out):
        raise TargetError(f"out={out!r} names no place to write to; give a new directory")
    source = Path(model) if is_gguf(model) else resolve_model(model, hub=Hub(revision, token, cache_dir))
    coding = choose_coding(source, group_size, reconstruction)
    target = Path(os.path.realpath(out))  # also in case the current directory is what gets replaced
    check_target(target, source, overwrite)
    checkpoint = Checkpoint(source)
    if unused := checkpoint.unused():
        warnings.warn(
            f"left out {len(unused)} tensors that {checkpoint.config.model_type} models lack: {unused[0]} "
            "...",
            stacklevel=2,
        )
    schema = Schema(coding.group_size, coding.reconstruction, checkpoint.packed)
    kept = {name: shape for name, shape in checkpoint.shapes.items() if name not in checkpoint.packed}
    large = [] if keep_float32 else _large_float32(checkpoint, kept)
    narrow = {name: _sixteen_bits(checkpoint.read(name)) for name in large}
    unpacked = {
        name: (narrow.get(name, checkpoint.stored_dtype(name)), shape) for name, shape in kept.items()
    }
    total, done, zeros = sum(map(prod, checkpoint.packed.values())), 0, 0
    looked_at, on_grid = 0, 0
    with (
        NestedWriter.create(target, schema, unpacked, overwrite=overwrite, replaced=REPLACED) as writer,
        one_core_each() as pool,
    ):
        for name in checkpoint.packed:
            given = None if chosen is None else chosen.rows(name)
            for rows in _packed_rows(checkpoint, name, coding, pool) if given is None else given:
                progress(name, done, total)
                writer.append_rows(name, rows)
                before, done, zeros = done, done + rows.weights, zeros + rows.zeros
                if given is None:
                    bits = _on_coarsest_grid(rows)
                    looked_at, on_grid = looked_at + bits.size, on_grid + int(bits.sum())
                if done // _TRIM_EVERY > before // _TRIM_EVERY:
                    _return_freed_memory()
        if coding.reconstruction == "midpoint" and zeros > MANY_ZEROS * total:
            warnings.warn(
                f"{zeros / total:.1%} of the weights are exactly zero, and midpoints keep no zero above "
                "E5M3; if the model "
                "was pruned, --reconstruction truncate keeps them (if it comes from a file of 4 bits, "
                "truncate is far worse)",
                stacklevel=2,
            )
        if coding.reconstruction == "midpoint" and 2 * on_grid > looked_at:
            warnings.warn(
                "these weights lie on E5M3's grid: the model was quantized to 4 bits before, and E5M4 will "
                "be worse than E5M3, "
                "as it errs by a quarter of E5M3's step everywhere (E5M5 by an eighth, and so on); pack the "
                "model that it was "
                "made from",
                stacklevel=2,
            )
        for name in kept:
            other = None if chosen is None else chosen.stored(name)
            tensor = checkpoint.read(name) if other is None else other
            _check_finite(name, tensor, name in checkpoint.buffers)
            writer.append_stored(BASE, name, tensor.to(unpacked[name][0]))
        _write_sidecars(checkpoint, schema, coding, writer.directory, record)
        progress("flushing to disk", done, total)
    if narrow:
        told = ", ".join(f"{name} in {str(dtype).removeprefix('torch.')}" for name, dtype in narrow.items())
        warnings.warn(
            f"float32 tensors that are not packed are stored in 16 bits: {told}; otaro pack --keep-float32 "
            "keeps them",
            stacklevel=2,
        )
    return NestedDirectory(target)


def check_target(target: Path, source: Path, overwrite: bool) -> None:
    """Overwriting is for nested models: nothing else is ever replaced, least of all the checkpoint."""
    if source.resolve().is_relative_to(target):
        raise TargetError(
            f"{target} is or holds the checkpoint itself; choose another place for the packed model"
        )
    if (nested := (target / shard_name(BASE)).is_file()) and not overwrite:
        way = "choose another place, or replace it with --overwrite (in Python: overwrite=True)"
        raise TargetError(f"{target} holds a nested model already; {way}")
    if overwrite and target.is_dir() and any(target.iterdir()) and not nested:
        raise TargetError(
            f"{target} is not empty and holds no nested model; it is not overwritten, choose another place"
        )


def _large_float32(checkpoint: Checkpoint, kept: Mapping[str, Sequence[int]]) -> list[str]:
    """Matrices that stay unpacked, and would take three times the room of packed ones and more."""
    large = [name for name, shape in kept.items() if len(shape) > 1 and 4 * prod(shape) >= LARGE_BYTES]
    return [
        name
        for name in large
        if checkpoint.stored_dtype(name) == torch.float32 and name not in checkpoint.buffers
    ]


def _sixteen_bits(tensor: torch.Tensor) -> torch.dtype:
    """bfloat16 where it is exact; else float16, eight times finer; bfloat16 again beyond its range."""
    if torch.equal(tensor.bfloat16().float(), tensor) or not tensor.half().isfinite().all():
        return torch.bfloat16
    return torch.float16


def _check_finite(name: str, tensor: torch.Tensor, is_buffer: bool) -> None:
    """Refuse NaN, and infinity in a parameter; a buffer may hold it on purpose, as a mask does."""
    if tensor.is_floating_point():
        bad = tensor.isnan() if is_buffer else ~tensor.isfinite()
        if bad.any():
            index = bad.nonzero()[0].tolist()
            raise WeightError(
                f"{name}{index} is {tensor[tuple(index)]:g}, with which no model runs; repair the checkpoint"
            )


def _packed_rows(
    checkpoint: Checkpoint, name: str, coding: Coding, pool: ThreadPoolExecutor
) -> Iterator[PackedRows]:
    """The encoded rows of a tensor, some at a time."""
    shape = checkpoint.packed[name]
    count = max(1, _CHUNK // shape[-1])

    def scale_exponent(rows: torch.Tensor) -> tuple[int, tuple[int, float] | None]:
        """The least that serves these rows; or which of them is refused, and its value."""
        needs = group_needs(rows, coding.group_size, coding.reconstruction)
        bad = None if needs_are_met(needs) else first_refused(rows)
        return smallest_scale_exponent(needs), None if bad is None else (bad, float(rows.flatten()[bad]))

    def packed(rows: torch.Tensor) -> PackedRows:
        tensor = encode(rows, coding.group_size, coding.reconstruction, scale_exponent=largest, name=name)
        return PackedRows.of(tensor, zeros=rows.numel() - int(torch.count_nonzero(rows)))

    largest = None
    for number, (exponent, refused) in enumerate(
        _in_order(pool, scale_exponent, checkpoint.rows(name, count))
    ):
        if refused is not None:
            raise checkpoint.refusal(name, number * count * shape[-1] + refused[0], refused[1])
        largest = exponent if largest is None else max(largest, exponent)
    yield from _in_order(pool, packed, checkpoint.rows(name, count))


def _on_coarsest_grid(rows: PackedRows) -> Any:
    """Of each weight of the first row whether it may be a value of E5M3: after its bits 10000 or, on the
    other side, 01111.
    """
    first, *rest = (plane[0].numpy() for plane in rows.planes)
    return np.unpackbits(np.bitwise_and.reduce([first ^ plane for plane in rest]))


@contextmanager
def one_core_each() -> Iterator[ThreadPoolExecutor]:
    """As many threads as torch would use for one operation, each of which computes alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


def _in_order(pool: ThreadPoolExecutor, work: Callable[[_T], _R], items: Iterable[_T]) -> Iterator[_R]:
    """What the work makes of the items, in their order; few are under way at a time."""
    ahead: deque[Future[_R]] = deque()
    try:
        for item in items:
            ahead.append(pool.submit(work, item))
            if len(ahead) > 2 * pool._max_workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        for future in ahead:
            future.cancel()


def _return_freed_memory() -> None:
    """Give freed memory back to the system, where the C library can be asked to.

    glibc before 2.38 hardly reuses freed aligned blocks, which are what torch asks for: without this, packing
    would grow by more than half of the model.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def _write_sidecars(
    checkpoint: Checkpoint, schema: Schema, coding: Coding, directory: Path, record: Mapping[str, Any] | None
) -> None:
    origin = {} if checkpoint.gguf is None else {"source": _write_origin(checkpoint, directory)}
    if about := {**origin, **(record or {})}:
        write_coding(directory, coding, about)
    for pattern in SIDECARS:
        for path in checkpoint.directory.glob(pattern) if checkpoint.gguf is None else ():
            if path.is_file():
                shutil.copyfile(path, directory / path.name)
    config = checkpoint.config
    config.dtype = getattr(config, "dtype", None) or checkpoint.dtype
    config.quantization_config = {
        "quant_method": "sefp",
        "group_size": schema.group_size,
        "reconstruction": schema.reconstruction,
    }
    write_config(config, directory)


def _write_origin(checkpoint: Checkpoint, directory: Path) -> dict[str, Any]:
    """Of a GGUF file: write the tokenizer that it states, and say what the weights were rounded to before."""
    assert checkpoint.gguf is not None
    kinds = checkpoint.gguf.kinds
    warnings.warn(
        f"the weights come from a GGUF file ({stated_types(kinds)}); what was rounded there stays so",
        OtaroWarning,
        stacklevel=4,
    )
    if why := write_tokenizer(checkpoint.gguf.fields, directory, checkpoint.config.max_position_embeddings):
        warnings.warn(
            f"no tokenizer is written: {why}; copy the original model's beside", OtaroWarning, stacklevel=4
        )
    return {"gguf": checkpoint.directory.name, "types": kinds}


def write_config(config: Any, directory: Path) -> None:
    """Write config.json so that transformers opens the base shard alone: the plug-in attaches planes."""
    config.save_pretrained(directory)
    path = directory / "config.json"
    # which save_pretrained leaves out
    stated = json.loads(path.read_text()) | {"transformers_weights": shard_name(BASE)}
    path.write_text(json.dumps(stated, indent=2, sort_keys=True) + "\n")
