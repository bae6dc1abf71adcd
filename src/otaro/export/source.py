"""What is exported: a nested directory's tensors at a precision, or each at a fit's, some rows at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from otaro.errors import FormatError, brief
from otaro.export.grid import Grid
from otaro.file.checkpoint import SIDECARS, build_on_meta, resolve_nested
from otaro.file.fits import Fit, finest_of, is_fit, known
from otaro.file.header import BASE, shard_name
from otaro.file.hub import Hub
from otaro.file.io import NestedDirectory
from otaro.file.planes import unpack_codes
from otaro.packable import Kind, packable
from otaro.sefp.codec import decode_codes, scale_values
from otaro.sefp.precision import Precision, of_mantissa_bits

_CHUNK = 1 << 20  # weights at a time


@dataclass(frozen=True)
class Piece:
    """A tensor to write: some rows of a tensor of the nested model, under a name of the target's."""

    name: str
    source: str
    shape: tuple[int, ...]
    rows: torch.Tensor | None = None
    """Which, in their order; None: all as they come."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a packed tensor, at the precision of the export."""

    codes: torch.Tensor
    scales: torch.Tensor
    """Of its groups, float32."""
    grid: Grid
    group_size: int

    @property
    def integers(self) -> torch.Tensor:
        """The values in units of their groups."""
        return self.grid.integers(self.codes)

    def units(self, size: int) -> torch.Tensor:
        """Of every `size` weights; sizes of groups are multiples of it."""
        units = self.grid.units(self.scales).repeat_interleave(self.group_size // size, dim=-1)
        return units[:, : -(-self.codes.shape[-1] // size)]

    def values(self) -> torch.Tensor:
        """As the codec decodes them, float32."""
        bits, reconstruction = self.grid.mantissa_bits, self.grid.reconstruction
        return decode_codes(self.codes, self.scales, bits, self.group_size, reconstruction)


class Source:
    """A nested directory, or the Hub id of one, opened at a precision."""

    def __init__(
        self, model: str | os.PathLike[str], precision: str | Precision, hub: Hub | None = None
    ) -> None:
        hub = hub or Hub()
        self.precision = _known(precision, model, hub)
        finest = finest_of(self.precision)
        self.nested = NestedDirectory(resolve_nested(model, finest, hub))
        self.nested.require(finest)
        schema = self.nested.schema
        its = (
            self.precision.precisions
            if isinstance(self.precision, Fit)
            else dict.fromkeys(schema.packed, finest)
        )
        self.grids = {name: Grid(its[name].mantissa_bits, schema.reconstruction) for name in schema.packed}
        """Of each packed tensor."""
        self.grid = Grid(finest.mantissa_bits, schema.reconstruction)
        """Of the finest: of all, unless it is a fit."""
        self.group_size = schema.group_size
        self.config = _config(self.nested.path)
        self.model = build_on_meta(self.config)
        self.packed = dict(schema.packed)
        """Shapes, inputs last."""
        self.unpacked = {name: entry.shape for name, entry in self.nested.unpacked.items()}
        rule = {one.name: one for one in packable(self.model)}
        self.transposed = {name for name in self.packed if name in rule and rule[name].kind is Kind.CONV1D}
        """Packed as [out, in], which the model class keeps as [in, out]."""
        self.kinds = {name: rule[name].kind for name in self.packed if name in rule}
        self._check(dict(self.model.all_tied_weights_keys))

    @property
    def names(self) -> list[str]:
        """Of all its tensors, in the order of the model class."""
        return [name for name in self.model.state_dict() if name in self.packed or name in self.unpacked]

    @property
    def weights(self) -> int:
        """How many there are."""
        return sum(map(prod, (*self.packed.values(), *self.unpacked.values())))

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor as it is stored here."""
        return tuple(self.packed[name] if name in self.packed else self.unpacked[name])

    def scale_bytes(self, name: str) -> torch.Tensor:
        """The scales of a packed tensor as they are stored."""
        return self.nested.scale_bytes(name)

    def largest_scale(self, name: str) -> float:
        """The largest magnitude of its scales."""
        return float(
            scale_values(self.scale_bytes(name), self.nested.schema.scale_exponents[name]).abs().max()
        )

    def stored(self, name: str) -> torch.Tensor:
        """A tensor that is not packed."""
        return self.nested.base.tensor(name)

    def rows(self, piece: Piece) -> Iterator[Rows]:
        """The rows of a piece of a packed tensor, a few thousand at a time."""
        *lead, length = self.packed[piece.source]
        grid = self.grids[piece.source]
        planes = [
            self.nested.plane(plane).tensor(piece.source) for plane in range(BASE, grid.mantissa_bits + 1)
        ]
        stored = [tensor.reshape(prod(lead), -1) for tensor in planes]
        scale_bytes = self.scale_bytes(piece.source).reshape(prod(lead), -1)
        exponent = self.nested.schema.scale_exponents[piece.source]
        count, total = max(1, _CHUNK // length), prod(lead) if piece.rows is None else len(piece.rows)
        for start in range(0, total, count):
            some = slice(start, start + count) if piece.rows is None else piece.rows[start : start + count]
            base, *more = (tensor[some] for tensor in stored)
            scales = scale_values(scale_bytes[some], exponent)
            yield Rows(unpack_codes(base, more, length), scales, grid, self.group_size)

    def values(self, piece: Piece) -> Iterator[torch.Tensor]:
        """Its rows in full, float32; of a tensor that is not packed all at once, in its own type."""
        if piece.source in self.packed:
            yield from (rows.values() for rows in self.rows(piece))
        else:
            tensor = self.stored(piece.source)
            yield (tensor if piece.rows is None else tensor[piece.rows]).reshape(piece.shape)

    @torch.no_grad()
    def load_into(self, model: torch.nn.Module) -> None:
        """Give a model of the same configuration, loaded by transformers, the weights of this one."""
        there = model.state_dict()
        for name in self.names:
            shape = self.shape(name)
            whole = torch.cat([some.flatten() for some in self.values(Piece(name, name, shape))]).view(shape)
            there[name].copy_(whole.T if name in self.transposed else whole)

    def pieces(self) -> list[Piece]:
        """All tensors under the names that checkpoints on the Hub have: there experts lie one by one."""
        return [piece for name in self.names for piece in self._pieces(name)]

    def copy_sidecars(self, directory: Path) -> None:
        """Copy tokenizer, chat template, generation defaults and licence."""
        for pattern in SIDECARS:
            for path in self.nested.path.glob(pattern):
                if path.is_file():
                    shutil.copyfile(path, directory / path.name)

    def _pieces(self, name: str) -> list[Piece]:
        """What transformers makes of a tensor when it saves a checkpoint, asked with its rows' numbers."""
        shape = self.shape(name)
        if len(shape) != 3:
            return [
                Piece(
                    self._saved_name(name), name, tuple(reversed(shape)) if name in self.transposed else shape
                )
            ]
        # of one column it would drop it
        numbers = torch.arange(prod(shape[:-1])).view(*shape[:-1], 1).expand(*shape[:-1], 2)
        found = self._saved(name, numbers)
        return [
            Piece(key, name, (*at.shape[:-1], shape[-1]), at[..., 0].flatten()) for key, at in found.items()
        ]

    def _saved_name(self, name: str) -> str:
        found = self._saved(name, torch.empty(self.model.state_dict()[name].shape, device="meta"))
        # one that is saved as several loads as it is, too
        return next(iter(found)) if len(found) == 1 else name

    def _saved(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self.model, {name: tensor}))

    def _check(self, tied: dict[str, str]) -> None:
        """The shards must hold what the config describes, and nothing else."""
        where = f"{self.nested.path}: {shard_name(BASE)}"
        for name, tensor in self.model.state_dict().items():
            if name in tied:
                continue
            if name not in self.packed and name not in self.unpacked:
                raise FormatError(
                    f"{where} lacks {name}, which config.json implies; the files are of different models"
                )
            wanted = tuple(reversed(tensor.shape)) if name in self.transposed else tuple(tensor.shape)
            if (stated := self.shape(name)) != wanted:
                raise FormatError(f"{where} has {name} as {list(stated)}, config.json implies {list(wanted)}")
        if left := (self.packed.keys() | self.unpacked.keys()) - self.model.state_dict().keys():
            raise FormatError(
                f"{where} holds {min(left)}, which {self.config.model_type} models by config.json lack"
            )


def chosen_dtype(source: Source) -> torch.dtype:
    """The model's type where it has 16 bits and digits for all packed weights; else float16, else float32."""
    own = source.config.dtype
    bytes_of = torch.cat([source.scale_bytes(name).flatten().unique() for name in source.packed])
    candidates = [own] * (own in (torch.float16, torch.bfloat16)) + [torch.float16]
    grids = set(source.grids.values())
    return next(
        (dtype for dtype in candidates if all(grid.fits(dtype, bytes_of) for grid in grids)), torch.float32
    )


def _known(precision: str | Precision, model: str | os.PathLike[str], hub: Hub) -> Precision | Fit:
    """A precision by its name; for a fit, the file that has it and the base shard are fetched if need be."""
    if not is_fit(precision):
        return Precision(precision)
    return known(NestedDirectory(resolve_nested(model, of_mantissa_bits(BASE), hub)), precision)


Progress = Callable[[str, int, int], None]


def _config(path: Path) -> Any:
    """The configuration of the model, without what makes it a nested one."""
    from transformers import AutoConfig

    if not (path / "config.json").is_file():
        raise FormatError(f"{path} has no config.json; fetch it from where the shards came from")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # whatever a strange config makes transformers stumble over
        raise FormatError(
            f"{path}: config.json describes no model that transformers knows: {brief(error)}"
        ) from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config
