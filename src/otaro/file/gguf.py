"""GGUF files as checkpoints to pack: parsed and checked here, dequantized a few rows at a time by the package
gguf.

Files come from strangers: no count, length, offset or type is believed before it was held against the size of
the file, so whatever is wrong with one ends in a `CheckpointError`. `file.gguf_config` makes a config of what
it says, `file.gguf_tokenizer` a tokenizer.
"""

from __future__ import annotations

import importlib
import mmap
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from otaro.errors import CheckpointError, install

MAGIC = b"GGUF"
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_KINDS = {"F16": torch.float16, "BF16": torch.bfloat16}
"""Types whose values are those of a type of torch; of all others float32 holds them."""


def is_gguf(model: object) -> bool:
    """Whether this is a GGUF file; one that is called so is, even if it is damaged."""
    path = Path(str(model))
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix == ".gguf" or file.read(4) == MAGIC


@dataclass(frozen=True)
class Stored:
    """A tensor of the file."""

    shape: tuple[int, ...]
    """Inputs last, as torch has it."""
    kind: Any
    """gguf's type."""
    start: int
    row_bytes: int


class Gguf:
    """A GGUF file, its header parsed and checked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._gguf = _library()
        try:
            with path.open("rb") as file:
                self._data: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        self._at = 0
        if self._take(4) != MAGIC:
            raise self._refused("it does not begin as one")
        (version,) = self._numbers("<I")
        if version not in (2, 3):
            raise self._refused(
                f"its version is {version}, and 2 and 3 are known (files for big-endian "
                "machines are not read)"
            )
        tensors, settings = self._numbers("<QQ")
        self.fields: dict[str, Any] = {}
        for _ in range(self._count(settings, 13, "settings")):
            name = self._string()
            if name in self.fields:
                raise self._refused(f"it says {name!r} twice")
            self.fields[name] = self._value(self._numbers("<I")[0])
        self.tensors = self._tensors(self._count(tensors, 32, "tensors"))

    @property
    def architecture(self) -> str:
        """Of the model, by GGUF's name."""
        return str(self.fields.get("general.architecture", ""))

    def setting(self, name: str, default: Any = None) -> Any:
        """What the file says of its architecture; without a default it must."""
        found = self.fields.get(f"{self.architecture}.{name}", default)
        if found is None:
            raise self._refused(f"it does not say {self.architecture}.{name}")
        return found

    @cached_property
    def kinds(self) -> dict[str, int]:
        """How many tensors there are of each type, most first."""
        return dict(Counter(tensor.kind.name for tensor in self.tensors.values()).most_common())

    def rows(self, name: str, numbers: torch.Tensor) -> torch.Tensor:
        """Some rows of a tensor, leading dimensions flattened."""
        tensor = self.tensors[name]
        count = prod(tensor.shape[:-1])
        raw = np.frombuffer(self._data, np.uint8, count * tensor.row_bytes, tensor.start).reshape(count, -1)
        some = raw[numbers.numpy()]
        if (dtype := _KINDS.get(tensor.kind.name)) is not None:
            return torch.from_numpy(some).view(dtype)
        if tensor.kind.name == "F32":
            return torch.from_numpy(some).view(torch.float32)
        return torch.from_numpy(self._gguf.quants.dequantize(some, tensor.kind))

    def refused(self, why: str) -> CheckpointError:
        """That this file cannot be packed."""
        return CheckpointError(
            f"{self.path} cannot be packed: {why}; give a Hugging Face checkpoint of the model"
        )

    def _refused(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is no sound GGUF file: {why}; fetch it again")

    def _take(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise self._refused(f"it ends before its header does, at byte {len(self._data)}")
        self._at += count
        return bytes(self._data[self._at - count : self._at])

    def _numbers(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def _count(self, stated: int, least: int, what: str) -> int:
        """A number of things that take `least` bytes each at the very least."""
        if stated * least > len(self._data) - self._at:
            raise self._refused(f"it states {stated} {what}, for which it is too short")
        return stated

    def _string(self) -> str:
        try:
            return self._take(self._numbers("<Q")[0]).decode()
        except UnicodeDecodeError:
            raise self._refused(f"a text before byte {self._at} is not UTF-8") from None

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._numbers(_SCALARS[kind])[0]
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth > 2:
            raise self._refused(f"it has a setting of the unknown type {kind}")
        item, stated = self._numbers("<IQ")
        if item in _SCALARS:
            size = struct.calcsize(_SCALARS[item])
            return np.frombuffer(
                self._take(self._count(stated, size, "numbers") * size), _SCALARS[item]
            ).tolist()
        return [self._value(item, depth + 1) for _ in range(self._count(stated, 8, "values"))]

    def _tensors(self, count: int) -> dict[str, Stored]:
        found = {}
        for _ in range(count):
            name, (dimensions,) = self._string(), self._numbers("<I")
            if not 0 < dimensions <= _MOST_DIMENSIONS or name in found:
                raise self._refused(f"its tensor {name!r} is there twice, or has {dimensions} dimensions")
            shape = tuple(reversed(self._numbers(f"<{dimensions}Q")))
            number, offset = self._numbers("<IQ")
            try:
                kind = self._gguf.GGMLQuantizationType(number)
                block, size = self._gguf.GGML_QUANT_SIZES[kind]
            except (ValueError, KeyError):
                raise self._refused(f"{name} is of the unknown type {number}") from None
            if not all(shape) or shape[-1] % block:
                raise self._refused(
                    f"{name} has the shape {list(shape)}, and {kind.name} comes in blocks of {block}"
                )
            found[name] = Stored(shape, kind, offset, shape[-1] // block * size)
        alignment = self.fields.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise self._refused(f"its alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        for name, tensor in found.items():
            if start + tensor.start + prod(tensor.shape[:-1]) * tensor.row_bytes > len(self._data):
                raise self._refused(f"it ends before {name} does")
        return {name: Stored(t.shape, t.kind, start + t.start, t.row_bytes) for name, t in found.items()}


@dataclass(frozen=True)
class _Named:
    """A tensor of the model class: rows of tensors of the file that lie behind each other."""

    parts: list[str]
    shape: tuple[int, ...]
    order: torch.Tensor
    """Of its rows among those of all parts; of a bias, of its numbers."""
    offset: float


class GgufTensors:
    """The tensors of a GGUF file by the names of a model class; for `Checkpoint` like a safetensors file."""

    def __init__(self, gguf: Gguf, model: Any, architecture: Any) -> None:
        self._gguf = gguf
        library = importlib.import_module("gguf")
        layers = model.config.num_hidden_layers
        names = library.get_tensor_name_map(library.MODEL_ARCH[architecture.name.upper()], layers)
        tied = dict(model.all_tied_weights_keys)
        self.entries: dict[str, _Named] = {}
        used = {name for name in gguf.tensors if name.startswith("rope_f")}  # of the config
        for name, tensor in model.state_dict().items():
            keys = [key for key in _parts(name, names) if key in gguf.tensors]
            if len(keys) == len(_parts(name, names)) and name not in tied:
                order = architecture.order(name, tuple(tensor.shape), model.config)
                offset = -architecture.norm_offset if name.endswith("norm.weight") else 0.0
                stored = {gguf.tensors[key].shape for key in keys}
                if len(stored) > 1:
                    raise gguf.refused(f"{' and '.join(keys)} differ in shape")
                self.entries[name] = _Named(keys, _joined(stored.pop(), len(keys)), order, offset)
                used |= set(keys)
        if left := gguf.tensors.keys() - used:
            raise gguf.refused(
                f"it holds {min(left)}, which {model.config.model_type} models do not have here"
            )

    def call(self, key: str, name: str) -> None:
        """Call a tensor by another name from now on."""
        self.entries[name] = self.entries.pop(key)

    def shape(self, key: str) -> tuple[int, ...]:
        """Of a tensor."""
        return self.entries[key].shape

    def dtype(self, key: str) -> torch.dtype:
        """The type that holds its values."""
        kinds = {
            _KINDS.get(self._gguf.tensors[part].kind.name, torch.float32) for part in self.entries[key].parts
        }
        return kinds.pop() if len(kinds) == 1 else torch.float32

    def row_count(self, key: str) -> int:
        """Of a tensor, leading dimensions flattened."""
        return prod(self.shape(key)[:-1])

    def rows(self, key: str, first: int, last: int) -> torch.Tensor:
        """Some of them."""
        entry, start = self.entries[key], 0
        if len(entry.shape) == 1:
            values = self._gguf.rows(entry.parts[0], torch.zeros(1, dtype=torch.long)) + entry.offset
            return values[:, entry.order] if len(entry.order) == values.shape[-1] else values
        wanted = entry.order[first:last]
        found = torch.empty(len(wanted), entry.shape[-1], dtype=self.dtype(key))
        for part in entry.parts:
            end = start + prod(self._gguf.tensors[part].shape[:-1])
            here = (wanted >= start) & (wanted < end)
            if here.any():
                found[here] = self._gguf.rows(part, wanted[here] - start).to(found.dtype)
            start = end
        return found


def _parts(name: str, names: Any) -> list[str]:
    """What GGUF calls a tensor: of experts, gates and ups are two."""
    found = [name]
    if name.endswith(".experts.gate_up_proj"):
        found = [name.replace("gate_up_proj", part) for part in ("gate_proj", "up_proj")]
    full = [one if one.endswith((".weight", ".bias")) else f"{one}.weight" for one in found]
    return [str(names.get_name(one, (".weight", ".bias"))) for one in full]


def _joined(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Of matrices of experts that lie one above the other."""
    return (shape[0], count * shape[1], *shape[2:]) if count > 1 and len(shape) > 1 else shape


def stated_types(kinds: Mapping[str, int]) -> str:
    """In words."""
    return ", ".join(f"{count} in {kind}" for kind, count in kinds.items())


def _library() -> Any:
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise CheckpointError(
            f"GGUF files are read by the package gguf ({error}); {install('gguf')} brings it"
        ) from None
