"""Reading and writing nested directories.

`NestedDirectory` opens one: the base shard at once, each plane when it is first asked for, all memory-mapped.
`NestedWriter` makes one, tensor by tensor: layouts are fixed before the first byte, so the six shards are
filled side by side while their digests are taken, and no tensor is ever held whole.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from otaro.errors import DigestError, FormatError, OtaroError, ShardMissingError
from otaro.file.atomic import new_directory
from otaro.file.header import (
    BASE,
    DTYPE_NAMES,
    SCALES,
    Entry,
    Header,
    Schema,
    check_plane,
    draft_header,
    model_identity,
    packed_identity,
    read_header,
    refuse_file,
    render_header,
    seal_header,
    shard_name,
)
from otaro.file.planes import PLANES, pack_codes
from otaro.file.replace import carry_over, check_replaceable
from otaro.sefp.codec import SefpTensor
from otaro.sefp.precision import FINEST, Precision, of_mantissa_bits

_READ_SIZE = 1 << 22


@dataclass(frozen=True)
class Shard:
    """One shard, its header checked and its file mapped."""

    header: Header
    handle: Any  # safetensors' safe_open: maps the file, hands out views of the mapping

    @staticmethod
    def open(path: Path, plane: int) -> Shard:
        """Check the header and map the file."""
        header = read_header(path, plane)
        try:
            return Shard(header, safe_open(path, framework="pt", device="cpu"))
        except SafetensorError as error:
            raise FormatError(f"{path}: {error}") from error

    @property
    def size(self) -> int:
        """Bytes of data."""
        return sum(entry.end - entry.start for entry in self.header.entries.values())

    def tensor(self, name: str) -> torch.Tensor:
        """A view of the mapped bytes; nothing is read before it is used."""
        tensor: torch.Tensor = self.handle.get_tensor(name)
        return tensor

    def verify(self, progress: Callable[[str, int], None] = lambda what, size: None) -> None:
        """Read all and compare digests; raises at the first damaged tensor. `progress` gets each size."""
        with self.header.path.open("rb") as file:
            for name, entry in self.header.entries.items():
                digest = hashlib.sha256()
                file.seek(self.header.data_start + entry.start)
                for start in range(entry.start, entry.end, _READ_SIZE):
                    digest.update(file.read(min(_READ_SIZE, entry.end - start)))
                if digest.hexdigest() != self.header.digests[name]:
                    raise DigestError(
                        f"{self.header.path}: the bytes of {name} are damaged; delete the file, and `otaro "
                        "fetch` it again"
                    )
                progress(f"{self.header.path.name} {name}", entry.end - entry.start)


class NestedDirectory:
    """A nested directory, opened for reading.

    >>> nested = NestedDirectory("model-dir")                               # doctest: +SKIP
    >>> nested.finest, nested.schema.reconstruction                          # doctest: +SKIP
    (Precision('E5M8'), 'midpoint')
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        refuse_file(self.path)
        if not self.path.is_dir():
            raise FormatError(f"{self.path} is not a directory; give one that `otaro pack` wrote")
        base = self.path / shard_name(BASE)
        if not base.is_file():
            found = [n for p in PLANES if (self.path / (n := shard_name(p))).is_file()]
            if not found:
                there = self.path / "nested"  # where a tuning run puts it
                way = (
                    f"give {there}"
                    if (there / base.name).is_file()
                    else f"make one with `otaro pack {self.path} OUT`"
                )
                raise FormatError(f"{self.path} is not a nested model (no {base.name}); {way}")
            raise ShardMissingError(
                f"{self.path} has {', '.join(found)} but not {base.name}, which every precision needs; "
                "copy it from where these came from, or make the model anew with `otaro fetch SOURCE OUT` or "
                "`otaro pack MODEL OUT`"
            )
        self._shards = {BASE: Shard.open(base, BASE)}
        self.lock = RLock()
        """For whatever grows or switches: shards opened here, planes and precisions of its models."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NestedDirectory:
        return self  # read-only: copies of a model share the mapped files

    def __reduce__(self) -> Any:
        raise OtaroError(
            f"{self.path} is not pickled: it is files, which NestedDirectory and otaro.load "
            "open where they are"
        )

    @property
    def base(self) -> Shard:
        """The base shard: all of E5M3, and what is not packed."""
        return self._shards[BASE]

    @cached_property
    def schema(self) -> Schema:
        """Group size, reconstruction, and the packed tensors with their shapes."""
        assert self.base.header.schema is not None  # read_header sees to it for the base shard
        return self.base.header.schema

    @property
    def model(self) -> str:
        """The model's identity."""
        return self.base.header.model

    @cached_property
    def unpacked(self) -> dict[str, Entry]:
        """Norms, biases and whatever else is stored as it came."""
        return self.base.header.unpacked

    @property
    def sizes(self) -> dict[int, int]:
        """Bytes of the files that are present right now, by plane."""
        paths = {plane: self.path / shard_name(plane) for plane in range(BASE, FINEST + 1)}
        return {plane: path.stat().st_size for plane, path in paths.items() if path.is_file()}

    @property
    def finest(self) -> Precision:
        """The highest precision whose shards are all present right now."""
        bits = BASE
        while bits < FINEST and (self.path / shard_name(bits + 1)).is_file():
            bits += 1
        return of_mantissa_bits(bits)

    def plane(self, plane: int) -> Shard:
        """The shard of a plane, opened on first use; a file that was added since is found."""
        if plane not in self._shards:
            with self.lock:
                if plane not in self._shards:
                    self._shards[plane] = self._opened(plane)
        return self._shards[plane]

    def _opened(self, plane: int) -> Shard:
        path = self.path / shard_name(plane)
        if not path.is_file():
            raise ShardMissingError(f"{self.path} lacks {path.name}; fetch that file into the directory")
        shard = Shard.open(path, plane)
        check_plane(shard.header, self.base.header)
        return shard

    def require(self, precision: Precision) -> None:
        """Open every shard that `precision` needs; refuse if one is missing or wrong."""
        names = [
            shard_name(plane)
            for plane in range(BASE + 1, precision.mantissa_bits + 1)
            if plane not in self._shards
        ]
        if missing := [name for name in names if not (self.path / name).is_file()]:
            raise ShardMissingError(
                f"{precision} needs {', '.join(missing)}, which {self.path} lacks (it is complete up to "
                f"{self.finest}); "
                "fetch into the directory and ask again, or use a lower precision"
            )
        for plane in range(BASE + 1, precision.mantissa_bits + 1):
            self.plane(plane)

    def scale_bytes(self, name: str) -> torch.Tensor:
        """A packed tensor's scales as stored, uint8; `schema.scale_exponents` has their power of two."""
        return self.base.tensor(name + SCALES).view(torch.uint8)

    def behind_gap(self) -> list[int]:
        """Planes that are present but cannot be used, since one before them is missing."""
        beyond = range(self.finest.mantissa_bits + 1, FINEST + 1)
        return [plane for plane in beyond if (self.path / shard_name(plane)).is_file()]

    def shards(self) -> list[Shard]:
        """All shards that are present and of use, the base shard first."""
        self.require(self.finest)
        return [self._shards[plane] for plane in range(BASE, self.finest.mantissa_bits + 1)]

    def verify(self, progress: Callable[[str, int, int], None] = lambda what, done, total: None) -> None:
        """Read everything and compare digests; raises at the first damaged tensor. `progress` gets bytes done
        and in total.

        Shards behind a missing one are of no use yet, but are checked too.
        """
        shards = self.shards()
        shards += [self.plane(plane) for plane in self.behind_gap()]
        total, done = sum(shard.size for shard in shards), 0

        def count(what: str, size: int) -> None:
            nonlocal done
            done += size
            progress(what, done, total)

        for shard in shards:
            shard.verify(count)


class _ShardWriter:
    """One shard being filled: each tensor from its start to its end, tensors in any order."""

    def __init__(
        self, path: Path, plane: int, schema: Schema, unpacked: Mapping[str, tuple[str, tuple[int, ...]]]
    ) -> None:
        self.draft, self.entries = draft_header(plane, schema, unpacked)
        self.data_start = len(render_header(self.draft))
        self.file = path.open("xb", buffering=0)
        end = self.data_start + max((entry.end for entry in self.entries.values()), default=0)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.file.fileno(), 0, end)  # a full disk shows now, not after an hour
        else:
            self.file.truncate(end)
        self._written = dict.fromkeys(self.entries, 0)
        self._digests = {name: hashlib.sha256() for name in self.entries}

    def append(self, name: str, data: torch.Tensor) -> None:
        entry = self.entries[name]
        raw = data.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        if entry.start + self._written[name] + len(raw) > entry.end:
            raise AssertionError(f"{name}: more bytes than its shape allows")
        self._digests[name].update(raw)
        self.file.seek(self.data_start + entry.start + self._written[name])
        self._written[name] += len(raw)
        while raw:
            raw = raw[self.file.write(raw) :]

    def digests(self) -> dict[str, str]:
        for name, entry in self.entries.items():
            if self._written[name] != entry.end - entry.start:
                raise AssertionError(f"{name}: fewer bytes than its shape needs")
        return {name: digest.hexdigest() for name, digest in self._digests.items()}

    def close(self, model: str, schema: Schema) -> None:
        self.file.seek(0)
        self.file.write(seal_header(self.draft, model, self.digests(), schema))
        self.file.close()


@dataclass(frozen=True)
class PackedRows:
    """Encoded rows as a nested file holds them."""

    scale_bytes: torch.Tensor
    scale_exponent: int
    base: torch.Tensor
    planes: list[torch.Tensor]
    weights: int
    zeros: int
    """How many of the weights were zero."""

    @staticmethod
    def of(tensor: SefpTensor, zeros: int = 0) -> PackedRows:
        """The codes cut into planes."""
        base, planes = pack_codes(tensor.finest_codes)
        return PackedRows(
            tensor.scale_bytes, tensor.scale_exponent, base, planes, tensor.finest_codes.numel(), zeros
        )


class NestedWriter:
    """Writes the shards of one model; use `NestedWriter.create`."""

    def __init__(
        self,
        directory: Path,
        schema: Schema,
        unpacked: Mapping[str, tuple[str, tuple[int, ...]]],
        finest: Precision,
        original: Header | None,
    ) -> None:
        self.directory = directory
        self._schema = schema
        self._scale_exponents = dict(schema.scale_exponents)
        self._zeros = schema.zeros
        self._original = original
        self._unpacked = list(unpacked)
        self._shards = {
            plane: _ShardWriter(
                directory / shard_name(plane), plane, schema, unpacked if plane == BASE else {}
            )
            for plane in range(BASE, finest.mantissa_bits + 1)
        }

    @staticmethod
    @contextmanager
    def create(
        target: Path,
        schema: Schema,
        unpacked: Mapping[str, tuple[torch.dtype, Sequence[int]]],
        *,
        finest: Precision | None = None,
        original: Header | None = None,
        overwrite: bool = False,
        replaced: Sequence[str] = (),
    ) -> Iterator[NestedWriter]:
        """Write a nested directory at `target`, which appears when the block ends and all tensors have been
        written.

        A copy of an existing model gives its `finest` precision and the header of its base shard, the
        `original`: as long as no tensor differs it keeps the identity. A new model has all planes and gets
        its identity from its content. Other files (config, tokenizer) go into `writer.directory`. An older
        nested model is overwritten if asked, with files that match `replaced`; what else its directory holds
        stays.
        """
        if overwrite:
            check_replaceable(target)
        stored = {name: (DTYPE_NAMES[dtype], tuple(shape)) for name, (dtype, shape) in unpacked.items()}
        with new_directory(target, overwrite) as directory:
            writer = NestedWriter(directory, schema, stored, finest or of_mantissa_bits(FINEST), original)
            try:
                yield writer
                carry_over(target, directory, writer._finish(), replaced)
            finally:
                for shard in writer._shards.values():
                    shard.file.close()

    def append_rows(self, name: str, rows: PackedRows) -> None:
        """Append encoded rows to a packed tensor; all of them have one scale exponent."""
        if self._scale_exponents.setdefault(name, rows.scale_exponent) != rows.scale_exponent:
            raise AssertionError(f"{name}: rows with different scale exponents")
        self._zeros += rows.zeros
        self._shards[BASE].append(name + SCALES, rows.scale_bytes)
        self._shards[BASE].append(name, rows.base)
        for number, plane in zip(PLANES, rows.planes, strict=True):
            self._shards[number].append(name, plane)

    def append_stored(self, plane: int, name: str, data: torch.Tensor) -> None:
        """Append bytes that already are in the file's form, or an unpacked tensor."""
        self._shards[plane].append(name, data)

    def _finish(self) -> str:
        """Seal all shards; returns the model's identity."""
        digests = {plane: shard.digests() for plane, shard in self._shards.items()}
        schema = replace(self._schema, scale_exponents=self._scale_exponents, zeros=self._zeros)
        model = self._identity(schema, digests)
        for shard in self._shards.values():
            shard.close(model, schema)
        return model

    def _identity(self, schema: Schema, digests: Mapping[int, Mapping[str, str]]) -> str:
        entries, original = self._shards[BASE].entries, self._original
        if original is not None and (original.entries, original.digests) == (entries, digests[BASE]):
            return original.model
        # Of planes that a copy lacks nothing is known but whose they were.
        copied = original if len(digests) <= len(PLANES) else None
        packed = copied.model if copied is not None else packed_identity(schema, digests)
        return model_identity(packed, {name: entries[name] for name in self._unpacked}, digests[BASE])
