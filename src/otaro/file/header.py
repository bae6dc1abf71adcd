"""The header of a shard: what it must say, and every way in which it can be wrong.

A shard is an ordinary safetensors file whose `__metadata__` also carries the format version, which plane it
is, the identity of the model, a SHA-256 per tensor, and a *seal*: the SHA-256 of the header itself, taken
with the seal's own digits as zeros. Reading a header costs microseconds and proves it undamaged; the seal
vouches for the digests, the digests for the data.

Files come from strangers. Nothing here trusts a length, an offset, a shape or a name before it has been
checked, and the payload cannot lie either: every pattern of scale and code bits decodes to a finite number.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from otaro.errors import DigestError, FormatError
from otaro.file.planes import BASE_BYTES, PLANE_BYTES, PLANES, blocks
from otaro.sefp.codec import MAX_SCALE_EXPONENT, MIN_SCALE_EXPONENT, RECONSTRUCTIONS, Reconstruction
from otaro.sefp.precision import COARSEST

AGAIN = "delete it and fetch it again"
"""What there is to do about a damaged file; at a source it is for others to do."""
VERSION = "2"
MAX_HEADER = 100_000_000  # safetensors' own limit
ALIGNMENT = 64  # of the data within the file, so that mapped tensors suit vector loads
SCALES = ".scales"  # suffix of the tensor that holds a packed tensor's scales
BASE = COARSEST  # the base shard counts as plane 3

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
SCALE_DTYPE = "F8_E4M3"  # of scales alone
_ITEM_SIZES = {name: dtype.itemsize for name, dtype in DTYPES.items()} | {SCALE_DTYPE: 1}

_NO_DIGEST = "0" * 64
_HEX_DIGEST = re.compile(r"[0-9a-f]{64}")


def shard_name(plane: int) -> str:
    """File name of the base shard (3) or of a plane (4 to 8)."""
    return f"model-m{plane}.safetensors"


def refuse_file(path: Path) -> None:
    """Where a nested directory is wanted: a file is none, though it may lie in one."""
    if path.is_file():
        there = (path.parent / shard_name(BASE)).is_file()
        way = (
            f"the nested directory it lies in, {path.parent}"
            if there
            else "a nested directory, as `otaro pack` writes it"
        )
        raise FormatError(f"{path} is a file; give {way}")


@dataclass(frozen=True)
class Entry:
    """One tensor of a shard; `start` and `end` count from the beginning of the data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Schema:
    """What a model's shards hold together: the base shard states it, all shards must obey it."""

    group_size: int
    reconstruction: Reconstruction
    packed: Mapping[str, tuple[int, ...]]
    """Name and shape, as weights, of every packed tensor."""
    scale_exponents: Mapping[str, int] = field(default_factory=dict)
    """The power of two that each one's scales are multiplied with; known once a tensor is encoded."""
    zeros: int = 0
    """How many of the weights were zero before they were encoded."""

    def scales_shape(self, name: str) -> tuple[int, ...]:
        """One scale per group."""
        *lead, length = self.packed[name]
        return (*lead, -(-length // self.group_size))

    def packed_entries(self, plane: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name, dtype and shape of all tensors that this plane's shard needs, unpacked tensors aside."""
        per_block = BASE_BYTES if plane == BASE else PLANE_BYTES
        entries = {
            n: ("U8", (*shape[:-1], per_block * blocks(shape[-1]))) for n, shape in self.packed.items()
        }
        if plane == BASE:
            for name in self.packed:
                entries[name + SCALES] = (SCALE_DTYPE, self.scales_shape(name))
        return entries

    def stated(self) -> str:
        """As the base shard's header states it."""
        fields = {"group_size": self.group_size, "reconstruction": self.reconstruction, "shapes": self.packed}
        return _json(fields | {"scale_exponents": self.scale_exponents, "zeros": self.zeros})


@dataclass(frozen=True)
class Header:
    """A shard's header, checked."""

    path: Path
    plane: int
    model: str
    entries: Mapping[str, Entry]
    digests: Mapping[str, str]
    schema: Schema | None
    """Stated by the base shard only."""
    data_start: int

    @property
    def file_size(self) -> int:
        """Bytes of the whole shard."""
        return self.data_start + max((entry.end for entry in self.entries.values()), default=0)

    @property
    def unpacked(self) -> dict[str, Entry]:
        """Of a base shard: what is stored as it came."""
        assert self.schema is not None
        packed = self.schema.packed_entries(BASE)
        return {name: entry for name, entry in self.entries.items() if name not in packed}


def draft_header(
    plane: int, schema: Schema, unpacked: Mapping[str, tuple[str, tuple[int, ...]]]
) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Lay out a shard: header with blank digests, and where each tensor goes.

    Base nibbles come first (their sizes are multiples of 16 bytes), then unpacked tensors, widest type first,
    then the scales, of which there is any number: so every tensor is aligned for its own type. What only
    packing will tell has the room of the longest numbers.
    """
    needed = schema.packed_entries(plane)
    wide = dict(sorted(unpacked.items(), key=lambda item: -DTYPES[item[1][0]].itemsize))
    scales = {name: needed.pop(name) for name in [n + SCALES for n in schema.packed] if name in needed}
    entries: dict[str, Entry] = {}
    end = 0
    for name, (dtype, shape) in {**needed, **wide, **scales}.items():
        start, end = end, end + prod(shape) * _ITEM_SIZES[dtype]
        entries[name] = Entry(dtype, shape, start, end)
    metadata = {
        "format": "pt",
        "otaro": VERSION,
        "plane": str(plane),
        "model": _NO_DIGEST,
        "seal": _NO_DIGEST,
        "digests": _json(dict.fromkeys(entries, _NO_DIGEST)),
    }
    if plane == BASE:
        longest = dict.fromkeys(schema.packed, MIN_SCALE_EXPONENT)
        metadata["sefp"] = replace(
            schema, scale_exponents=longest, zeros=sum(map(prod, schema.packed.values()))
        ).stated()
    header: dict[str, Any] = {"__metadata__": metadata}
    for name, entry in entries.items():
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [entry.start, entry.end]}
    return header, entries


def render_header(header: dict[str, Any], size: int = 0) -> bytes:
    """The first bytes of a shard: length, JSON, spaces up to the alignment and to `size` bytes at least."""
    text = _json(header).encode()
    text += b" " * (max(-(8 + len(text)) % ALIGNMENT, size - 8 - len(text)))
    return len(text).to_bytes(8, "little") + text


def seal_header(header: dict[str, Any], model: str, digests: Mapping[str, str], schema: Schema) -> bytes:
    """Fill in what the draft left open, and seal; returns the finished bytes, as many as the draft's."""
    metadata, size = header["__metadata__"], len(render_header(header))
    metadata |= {"model": model, "seal": _NO_DIGEST, "digests": _json(digests)}
    if "sefp" in metadata:
        metadata["sefp"] = schema.stated()
    metadata["seal"] = hashlib.sha256(render_header(header, size)[8:]).hexdigest()
    return render_header(header, size)


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(dict(value), separators=(",", ":"))


def packed_identity(schema: Schema, digests_by_plane: Mapping[int, Mapping[str, str]]) -> str:
    """SHA-256 over what tells all packed tensors: names, scale exponents, digests of scales, base, planes."""
    items = [str(schema.group_size), schema.reconstruction]
    for name in schema.packed:
        items += [name, str(schema.scale_exponents[name]), digests_by_plane[BASE][name + SCALES]]
        items += [digests_by_plane[plane][name] for plane in (BASE, *PLANES)]
    return _digest_of_lines(items)


def model_identity(packed: str, entries: Mapping[str, Entry], digests: Mapping[str, str]) -> str:
    """The identity of packed tensors, and of unpacked ones: names, types, shapes and digests."""
    items = [packed]
    for name in sorted(entries):
        items += [name, entries[name].dtype, ",".join(map(str, entries[name].shape)), digests[name]]
    return _digest_of_lines(items)


def _digest_of_lines(items: list[str]) -> str:
    return hashlib.sha256("".join(f"{item}\n" for item in items).encode()).hexdigest()


def read_header(path: Path, plane: int) -> Header:
    """Read and check the header of the shard at `path`, which should be `plane`'s."""
    size, text = _read_text(path)
    return check_header(path, plane, text, size)


def check_header(path: Path, plane: int, text: bytes, size: int | None) -> Header:
    """Check a header's text; `size` is that of the file, None where only the header came and nobody said."""
    header = _parse_object(text, f"{path}: the header")
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or "otaro" not in metadata:
        raise FormatError(f"{path} is not an OTARo shard: its header has no format version")
    if metadata["otaro"] != VERSION:
        raise FormatError(
            f"{path} has format version {metadata['otaro']!r:.20}, this program reads version {VERSION!r}; "
            "pack the checkpoint anew with `otaro pack CHECKPOINT OUT`, or use the release that wrote it"
        )
    _check_seal(path, text, metadata)
    entries = _check_entries(path, header, None if size is None else size - 8 - len(text))
    digests = _parse_object(metadata.get("digests", ""), f"{path}: 'digests'")
    if digests.keys() != entries.keys() or not all(is_digest(value) for value in digests.values()):
        raise FormatError(f"{path}: 'digests' does not give one SHA-256 for every tensor")
    if not is_digest(metadata.get("model")):
        raise FormatError(f"{path}: 'model' is not a SHA-256")
    if metadata.get("plane") != str(plane):
        raise FormatError(
            f"{path} holds plane {metadata.get('plane')!r} but its name says plane {plane}: "
            "shards were renamed or swapped; give each its own name again"
        )
    schema = _read_schema(path, metadata) if plane == BASE else None
    if schema is not None:
        check_schema(path, entries, schema, plane)
    return Header(path, plane, metadata["model"], entries, digests, schema, 8 + len(text))


def check_plane(header: Header, base: Header) -> None:
    """Refuse a plane that is not of the base shard's model."""
    assert base.schema is not None  # check_header sees to it for the base shard
    if header.model != base.model:
        raise FormatError(
            f"{header.path} belongs to another model (identity {header.model[:12]}, the base shard's is "
            f"{base.model[:12]}); fetch the shard of this model"
        )
    check_schema(header.path, header.entries, base.schema, header.plane)


def check_schema(path: Path, entries: Mapping[str, Entry], schema: Schema, plane: int) -> None:
    """Refuse a shard whose tensors are not those that the schema asks of it."""
    needed = schema.packed_entries(plane)
    for name, (dtype, shape) in needed.items():
        entry = entries.get(name)
        if entry is None:
            raise FormatError(f"{path} lacks the tensor {name}")
        if entry.dtype != dtype or entry.shape != shape:
            raise FormatError(
                f"{path}: {name} is {entry.dtype} {list(entry.shape)} where the model's base shard "
                f"implies {dtype} {list(shape)}"
            )
    if plane != BASE and (extra := entries.keys() - needed.keys()):
        raise FormatError(f"{path} holds {min(extra)}, which the base shard does not know")


def _read_text(path: Path) -> tuple[int, bytes]:
    """File size and raw header text."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        return size, file.read(header_length(path, file.read(8), size))


def header_length(path: Path, prefix: bytes, size: int | None) -> int:
    """Of the header's text, as a shard's first eight bytes state it: not beyond the file or the limit."""
    length = int.from_bytes(prefix, "little")
    if size is not None and (size < 8 or length > size - 8):
        raise FormatError(f"{path} is truncated inside its header ({size} bytes); {AGAIN}")
    if length > MAX_HEADER:
        raise FormatError(f"{path}: a header of {length} bytes is over the limit of {MAX_HEADER}")
    return length


def _parse_object(text: str | bytes, what: str) -> dict[str, Any]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        unique = dict(pairs)
        if len(unique) != len(pairs):
            raise ValueError("a key occurs twice")
        return unique

    try:
        value = json.loads(text, object_pairs_hook=no_duplicates)
    except UnicodeDecodeError:
        raise FormatError(f"{what} is not text; the file is damaged; {AGAIN}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise FormatError(f"{what} is not valid JSON ({error}); the file is damaged; {AGAIN}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{what} is not a JSON object")
    return value


def _check_seal(path: Path, text: bytes, metadata: Mapping[str, Any]) -> None:
    seal = metadata.get("seal")
    if not is_digest(seal):
        raise FormatError(f"{path}: the header has no seal")
    blank = text.replace(b'"seal":"%s"' % str(seal).encode(), b'"seal":"%s"' % _NO_DIGEST.encode())
    if hashlib.sha256(blank).hexdigest() != seal:
        raise DigestError(f"{path}: the header does not match its seal; the file is damaged; {AGAIN}")


def _check_entries(path: Path, header: Mapping[str, Any], data_size: int | None) -> dict[str, Entry]:
    """Entries must tile the data without gap or overlap, each exactly as large as its dtype and shape say."""
    entries: dict[str, Entry] = {}
    for name, raw in header.items():
        try:
            dtype, shape, (start, end) = raw["dtype"], tuple(raw["shape"]), raw["data_offsets"]
            if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
                raise ValueError
        except (TypeError, KeyError, ValueError):
            raise FormatError(f"{path}: the header entry of {name} is malformed") from None
        if (
            not isinstance(dtype, str)
            or dtype not in _ITEM_SIZES
            or (dtype == SCALE_DTYPE and not name.endswith(SCALES))
        ):
            raise FormatError(f"{path}: {name} has the unknown dtype {dtype!r}")
        if end - start != prod(shape) * _ITEM_SIZES[dtype]:
            raise FormatError(
                f"{path}: {name} claims {end - start} bytes, {dtype} {list(shape)} takes another number"
            )
        entries[name] = Entry(dtype, shape, start, end)
    reached = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != reached:
            kind = "overlaps the tensor before it" if entry.start < reached else "leaves a gap before it"
            raise FormatError(f"{path}: {name} {kind}")
        reached = entry.end
    if data_size is not None and reached != data_size:
        problem = "is truncated" if reached > data_size else "has bytes after its last tensor"
        raise FormatError(f"{path} {problem}: {reached} bytes of data promised, {data_size} found; {AGAIN}")
    return entries


def _read_schema(path: Path, metadata: Mapping[str, Any]) -> Schema:
    stated = _parse_object(metadata.get("sefp", ""), f"{path}: 'sefp'")
    group_size, reconstruction, shapes = (
        stated.get(key) for key in ("group_size", "reconstruction", "shapes")
    )
    if type(group_size) is not int or group_size < 1 or group_size % 32:
        raise FormatError(f"{path}: the group size is {group_size!r}, not a positive multiple of 32")
    if reconstruction not in RECONSTRUCTIONS:
        raise FormatError(f"{path}: unknown reconstruction {reconstruction!r}")
    if not isinstance(shapes, dict):
        raise FormatError(f"{path}: 'sefp' gives no shapes")
    for name, shape in shapes.items():
        whole = isinstance(shape, list) and len(shape) >= 2 and all(type(n) is int and n > 0 for n in shape)
        if not whole or name + SCALES in shapes:
            raise FormatError(f"{path}: the packed tensor {name} has the impossible shape {shape!r}")
    exponents, zeros = stated.get("scale_exponents"), stated.get("zeros")
    if not isinstance(exponents, dict) or exponents.keys() != shapes.keys():
        raise FormatError(f"{path}: 'sefp' does not give one scale exponent for every packed tensor")
    for name, exponent in exponents.items():
        if type(exponent) is not int or not MIN_SCALE_EXPONENT <= exponent <= MAX_SCALE_EXPONENT:
            between = f"from {MIN_SCALE_EXPONENT} to {MAX_SCALE_EXPONENT}"
            raise FormatError(f"{path}: the scale exponent of {name} is {exponent!r}, not a number {between}")
    if type(zeros) is not int or not 0 <= zeros <= sum(map(prod, shapes.values())):
        raise FormatError(f"{path}: 'sefp' says that {zeros!r} weights are zero")
    return Schema(
        group_size, reconstruction, {name: tuple(shape) for name, shape in shapes.items()}, exponents, zeros
    )


def is_digest(value: object) -> bool:
    """Whether this is a SHA-256 in hex."""
    return isinstance(value, str) and _HEX_DIGEST.fullmatch(value) is not None


def untrusted_json(text: str) -> Any:
    """What a file beside a model says, which may come from strangers; a ValueError says what is wrong."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
