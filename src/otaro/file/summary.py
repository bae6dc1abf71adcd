"""What a nested directory holds, in numbers: the data behind `otaro inspect`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any, Protocol

import torch

from otaro.file.header import BASE, Entry, Schema, shard_name
from otaro.file.io import NestedDirectory
from otaro.sefp.codec import Reconstruction, scale_values
from otaro.sefp.precision import COARSEST, PRECISIONS, Precision

_CHUNK = 1 << 24  # bytes looked at together


@dataclass(frozen=True)
class PrecisionSummary:
    """What it takes to run at one precision."""

    precision: str
    shards: list[str]
    missing: list[str]
    bytes: int | None
    """Of all its shards together; None where one is missing."""
    bits_per_weight: float
    """Of all weights, packed or not."""
    ratio_to_fp16: float | None


@dataclass(frozen=True)
class ModuleSummary:
    """The packed tensors of one kind, such as all `q_proj`."""

    type: str
    tensors: int
    weights: int
    min_scale: float
    max_scale: float
    """The smallest and the largest magnitude of its scales; groups of zeros, whose scale is 0, aside."""
    zero_share: float
    """Share of weights that are zero at the coarsest precision."""


@dataclass(frozen=True)
class UnpackedSummary:
    """Tensors that are stored as they are, of one name but for the numbers of layers."""

    name: str
    tensors: int
    weights: int
    bytes: int
    dtype: str


@dataclass(frozen=True)
class Summary:
    """Everything `otaro inspect` shows."""

    path: str
    model: str
    group_size: int
    reconstruction: Reconstruction
    packed_weights: int
    other_parameters: int
    exact_zeros: float
    """Share of packed weights that were zero before they were encoded."""
    precisions: list[PrecisionSummary]
    modules: list[ModuleSummary]
    """Empty where only headers were read."""
    unpacked: list[UnpackedSummary]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Described(Protocol):
    """A nested model as its headers describe it, here (`NestedDirectory`) or elsewhere (`RemoteModel`)."""

    @property
    def model(self) -> str: ...  # noqa: D102
    @property
    def schema(self) -> Schema: ...  # noqa: D102
    @property
    def unpacked(self) -> Mapping[str, Entry]: ...  # noqa: D102
    @property
    def sizes(self) -> Mapping[int, int]: ...  # noqa: D102


def summarize(
    nested: NestedDirectory, progress: Callable[[int, int], None] = lambda done, total: None
) -> Summary:
    """Count and look at everything; reads the base shard once. `progress` gets weights done and in total."""
    nested.require(nested.finest)  # sizes are only worth showing of shards that belong here
    summary = summarize_headers(nested, str(nested.path))
    return replace(summary, modules=list(_modules(nested, summary.packed_weights, progress)))


def summarize_headers(nested: Described, path: str) -> Summary:
    """What headers alone tell: all but the numbers per kind of module."""
    schema, left = nested.schema, unpacked(nested)
    weights = sum(map(prod, schema.packed.values()))
    return Summary(
        path=path,
        model=nested.model,
        group_size=schema.group_size,
        reconstruction=schema.reconstruction,
        packed_weights=weights,
        other_parameters=sum(group.weights for group in left),
        exact_zeros=schema.zeros / max(weights, 1),  # a stranger may pack nothing
        precisions=[precision_summary(nested, p) for p in PRECISIONS],
        modules=[],
        unpacked=left,
    )


def precision_summary(nested: Described, precision: Precision) -> PrecisionSummary:
    """Sizes of one precision, from headers alone."""
    planes, sizes = range(BASE, precision.mantissa_bits + 1), nested.sizes
    missing = [shard_name(plane) for plane in planes if plane not in sizes]
    size = None if missing else sum(sizes[plane] for plane in planes)
    left = unpacked(nested)
    weights = sum(map(prod, nested.schema.packed.values())) + sum(group.weights for group in left)
    stored = sum(prod(shape) for plane in planes for _, shape in nested.schema.packed_entries(plane).values())
    stored += sum(group.bytes for group in left)
    ratio = None if size is None else size / (2 * weights)
    names = [shard_name(plane) for plane in planes]
    return PrecisionSummary(str(precision), names, missing, size, 8 * stored / weights, ratio)


def unpacked(nested: Described) -> list[UnpackedSummary]:
    """What is stored as it is, the largest first."""
    alike: dict[tuple[str, str], list[Entry]] = {}
    for name, entry in nested.unpacked.items():
        alike.setdefault((re.sub(r"\.\d+(?=\.)", ".*", name), entry.dtype), []).append(entry)
    groups = [
        UnpackedSummary(
            name, len(some), sum(prod(e.shape) for e in some), sum(e.end - e.start for e in some), dtype
        )
        for (name, dtype), some in alike.items()
    ]
    return sorted(groups, key=lambda group: -group.bytes)


def _modules(
    nested: NestedDirectory, total: int, progress: Callable[[int, int], None]
) -> Iterator[ModuleSummary]:
    kinds: dict[str, list[str]] = {}
    for name in nested.schema.packed:
        kinds.setdefault(module_type(name), []).append(name)
    done = 0
    for kind, names in kinds.items():
        weights = sum(prod(nested.schema.packed[name]) for name in names)
        zeros, ranges = 0, []
        for name in names:
            zeros += _zeros(nested, name)
            sizes = scale_values(nested.scale_bytes(name), nested.schema.scale_exponents[name]).abs_()
            ranges += [float(sizes[sizes > 0].min()), float(sizes.max())] if sizes.any() else []
            done += prod(nested.schema.packed[name])
            progress(done, total)
        yield ModuleSummary(
            kind, len(names), weights, min(ranges, default=0.0), max(ranges, default=0.0), zeros / weights
        )


def module_type(name: str) -> str:
    """The last word that tells modules apart: `q_proj` of `model.layers.0.self_attn.q_proj.weight`."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _zeros(nested: NestedDirectory, name: str) -> int:
    """Weights whose value at the coarsest precision is zero: code 0, and for `truncate` also code -1.

    A base nibble is code + 8; the padding of rows is nibble 0 and so never counts.
    """
    zero = 1 << COARSEST
    nibbles_of_zero = (zero,) if nested.schema.reconstruction == "midpoint" else (zero, zero - 1)
    count = 0
    for some in nested.base.tensor(name).flatten().split(_CHUNK):
        for nibbles in (some & 0x0F, some >> 4):
            count += sum(int(torch.count_nonzero(nibbles == zero)) for zero in nibbles_of_zero)
    return count
