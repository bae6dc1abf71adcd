"""Fits: a precision for every packed tensor, that which loses least within a budget, in `precisions.json`
beside the model.

`otaro fit` writes them, one for each budget, and a fit goes by the name of its budget wherever a precision is
named: `fit:90MB` is 90 million bytes, `fit:4.5bits` so many bits per weight, `fit:40tps` so many tokens per
second.

    {"version": 1, "model": "5d0c…", "fits": {"90MB": {"precisions": {"model.embed_tokens.weight": "E5M4", …},
     "bytes": 89990784, "bits_per_weight": 5.352, "predicted": 0.021, "measured": 0.023, "uniform": "E5M4",
     "uniform_measured": 0.041, "reference": "E5M8", "text": "valid.txt", "text_sha256": "…", "tokens": 512,
     "command": "otaro fit …", "date": "2026-11-16"}}}

Bytes are those of the planes, scales and unpacked tensors that the model then reads, headers of files aside,
as bits per weight of `otaro inspect` count them. Divergences are in nats, on text, from the reference: the
finest precision that was there. `tokens` of the text were measured on. (The first files lack reference and
tokens, and are read.)

The file travels with its model and so comes from strangers: it names the model it is for, and nothing in it
is believed before it has been checked. Every packed tensor must have its precision, and no other may.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from functools import cached_property
from math import isclose, prod
from pathlib import Path
from typing import Any, Protocol

from otaro.errors import FormatError, OtaroError, PrecisionError, ShardMissingError
from otaro.file.atomic import update_text
from otaro.file.header import BASE, Entry, Schema, is_digest, shard_name, untrusted_json
from otaro.file.replace import FITS_FILE
from otaro.sefp.precision import Precision

PREFIX = "fit:"
VERSION = 1
_LARGEST = 1 << 24  # bytes of a file
_MOST = 256  # fits in it
_LONGEST = 4096  # characters of a string
LARGEST_SUM = 1e12  # nats that all tensors could lose together: sums and squares stay finite
_UNITS = {
    "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "bits": None,
    "tps": None,
}  # fmt: skip
_SPELLING = {unit.casefold(): unit for unit in _UNITS}
_BUDGET = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?([a-z]+)", re.IGNORECASE | re.ASCII)


class Stored(Protocol):
    """What tells how large a model is: an open directory, or one whose headers alone were read."""

    @property
    def schema(self) -> Schema:
        """Its packed tensors."""

    @property
    def unpacked(self) -> Mapping[str, Entry]:
        """Its others."""


class Nested(Stored, Protocol):
    """A nested directory."""

    path: Path

    @property
    def model(self) -> str:
        """Its identity."""

    @property
    def finest(self) -> Precision:
        """The finest that is there."""


@dataclass(frozen=True)
class Budget:
    """So much of a unit: of bytes, `bits` per weight, or tokens per second (`tps`)."""

    amount: Decimal
    unit: str

    @staticmethod
    def parse(text: str) -> Budget:
        """`90MB`, `1.5 GiB`, `4.5bits`, `40tps`; capitals or not."""
        found = _BUDGET.fullmatch(text.strip())
        if found is None or (unit := _SPELLING.get(found[2].casefold())) is None or not Decimal(found[1]):
            raise OtaroError(
                f"{text[:40]!r} is no budget; write 90MB, 1.5GB, 4.5bits or 40tps ({', '.join(_UNITS)})"
            )
        return Budget(Decimal(found[1]), unit)

    @property
    def name(self) -> str:
        """As fits go by it: `90.0 mb` is 90MB."""
        return f"{self.amount.normalize():f}{self.unit}"

    @property
    def option(self) -> str:
        """As `otaro fit` is asked for it."""
        if self.unit == "bits":
            return f"--bits {self.amount.normalize():f}"
        return (
            f"--tokens-per-second {self.amount.normalize():f}"
            if self.unit == "tps"
            else f"--budget {self.name}"
        )

    @property
    def bytes(self) -> int | None:
        """Of a budget of bytes."""
        factor = _UNITS[self.unit]
        return None if factor is None else int(self.amount * factor)


@dataclass(frozen=True)
class Fit:
    """A precision for every packed tensor."""

    name: str
    precisions: Mapping[str, Precision]
    about: Mapping[str, Any]
    """What else is stored of it."""

    def __str__(self) -> str:
        return PREFIX + self.name

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def sha256(self) -> str:
        """Of its precisions: a fit that is made again under the same name may be another."""
        stated = {tensor: str(one) for tensor, one in self.precisions.items()}
        return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()

    @cached_property
    def finest(self) -> Precision:
        """The finest among them: its shards are needed."""
        return max(self.precisions.values())

    @property
    def bytes(self) -> int:
        """What it takes."""
        return int(self.about["bytes"])

    def to_dict(self) -> dict[str, Any]:
        """As it is stored."""
        return {"precisions": {tensor: str(one) for tensor, one in self.precisions.items()}, **self.about}


def is_fit(value: object) -> bool:
    """Whether a precision is the name of a fit."""
    return isinstance(value, str) and value.strip().casefold().startswith(PREFIX)


def fit_name(value: str) -> str:
    """The name of a fit in the one spelling it has: `fit:90.0 mb` is fit:90MB."""
    wanted = value.strip()[len(PREFIX) :]
    try:
        return PREFIX + Budget.parse(wanted).name
    except OtaroError as error:
        raise PrecisionError(f"{PREFIX}{wanted[:40]}: {error}") from None


def known(nested: Nested, precision: str | Precision | Fit) -> Precision | Fit:
    """A precision, or a fit of the model, by its name."""
    if isinstance(precision, Fit):
        return precision
    return find_fit(nested, str(precision)) if is_fit(precision) else Precision(precision)


def finest_of(precision: Precision | Fit) -> Precision:
    """The precision whose shards are needed."""
    return precision.finest if isinstance(precision, Fit) else precision


def bytes_of(nested: Stored, precisions: Mapping[str, Precision] | Precision | Fit) -> int:
    """Bytes that a model reads at a precision, or at one for each packed tensor."""
    schema, precisions = nested.schema, precisions.precisions if isinstance(precisions, Fit) else precisions
    base = sum(prod(shape) for _, shape in schema.packed_entries(BASE).values())
    base += sum(entry.end - entry.start for entry in nested.unpacked.values())
    for name, size in plane_bytes(schema).items():
        one = precisions if isinstance(precisions, Precision) else precisions[name]
        base += size * (one.mantissa_bits - BASE)
    return base


def weights_of(nested: Stored) -> int:
    """All weights, packed or not: what bits per weight are counted over."""
    shapes = [*nested.schema.packed.values(), *(entry.shape for entry in nested.unpacked.values())]
    return sum(map(prod, shapes))


def plane_bytes(schema: Schema) -> dict[str, int]:
    """Bytes of a plane of each packed tensor; all of its planes have as many."""
    return {name: prod(shape) for name, (_, shape) in schema.packed_entries(BASE + 1).items()}


def find_fit(nested: Nested, name: str) -> Fit:
    """The fit that a precision names, `fit:90MB`; refused if there is none, or it lacks shards."""
    budget, fits = Budget.parse(fit_name(name)[len(PREFIX) :]), read_fits(nested)
    if (fit := fits.get(budget.name)) is None:
        there = f"there are {', '.join(map(str, fits.values()))}" if fits else "there are no fits yet"
        raise PrecisionError(
            f"{nested.path} has no {PREFIX}{budget.name}, {there}; make it with: "
            f"otaro fit {nested.path} --text FILE {budget.option}"
        )
    if fit.finest > nested.finest:
        raise ShardMissingError(
            f"{fit} needs shards up to {shard_name(fit.finest.mantissa_bits)}, and {nested.path} is "
            "complete up to "
            f"{nested.finest}; bring them with: otaro fetch SOURCE {nested.path} --precision {fit.finest}"
        )
    return fit


def read_fits(nested: Nested) -> dict[str, Fit]:
    """The fits beside a model by name; a file that is damaged, or of another model, is refused."""
    return read_fits_in(nested.path, nested.model, nested)


def read_fits_in(directory: Path, model: str, stored: Stored, source: str = "") -> dict[str, Fit]:
    """The same for a directory that holds the file, and perhaps no model; `source` is where it came from."""
    path = directory / FITS_FILE
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError("it is larger than any")
        about, fits = parse_fits(path.read_text(encoding="utf-8"), stored)
        if about != model:
            raise ValueError(f"it is for another model ({about[:12]}) than the one beside it ({model[:12]})")
    except ValueError as error:  # of JSON, of UTF-8, or ours
        place = f"{FITS_FILE} at {source}" if source else path
        again = "have `otaro fit` run there again" if source else "move it away and run `otaro fit` again"
        raise FormatError(f"{place} cannot be used: {error}; {again}") from None
    return fits


def write_fit(nested: Nested, fit: Fit) -> None:
    """Keep a fit beside its model, in place of an earlier one of the same name; others stay."""

    def updated() -> str:
        fits = {**read_fits(nested), fit.name: fit}
        stored = {name: one.to_dict() for name, one in fits.items()}
        text = json.dumps({"version": VERSION, "model": nested.model, "fits": stored}, indent=1) + "\n"
        parse_fits(text, nested)  # what we would not read, we do not write
        return text

    update_text(nested.path / FITS_FILE, updated)


def parse_fits(text: str, stored: Stored) -> tuple[str, dict[str, Fit]]:
    """The model's identity and its fits; a ValueError says what is wrong."""
    raw = untrusted_json(text)
    if not isinstance(raw, dict) or raw.keys() != {"version", "model", "fits"}:
        raise ValueError("it does not consist of version, model and fits")
    if raw["version"] != VERSION or type(raw["version"]) is not int:
        raise ValueError(f"its version is {str(raw['version'])[:20]!r}, this program reads {VERSION}")
    if not is_digest(raw["model"]):
        raise ValueError("its model is not a SHA-256")
    if not isinstance(raw["fits"], dict) or len(raw["fits"]) > _MOST:
        raise ValueError(f"its fits are not an object of {_MOST} at most")
    return raw["model"], {name: _fit(name, stated, stored) for name, stated in raw["fits"].items()}


def _fit(name: str, stated: object, model: Stored) -> Fit:
    where = f"the fit {name[:40]!r}"
    try:
        known = Budget.parse(name).name == name
    except OtaroError:
        known = False
    if not known:
        raise ValueError(f"{where} is not named after a budget")
    if not isinstance(stated, dict) or {*stated, *_ADDED} != {"precisions", *_ABOUT}:
        raise ValueError(f"{where} does not consist of precisions, {', '.join(_ABOUT)}")
    about = {field: value for field, value in stated.items() if field != "precisions"}
    for field, value in about.items():
        if not _ABOUT[field](value):
            raise ValueError(f"{where}: {field} is {str(value)[:40]!r}")
    schema, stored = model.schema, stated["precisions"]
    if not isinstance(stored, dict) or (odd := stored.keys() ^ schema.packed.keys()):
        which = f"; {min(odd)[:80]!r} is in one and not in the other" if isinstance(stored, dict) else ""
        raise ValueError(f"{where} does not have one precision for each packed tensor{which}")
    try:
        precisions = {tensor: Precision(stored[tensor]) for tensor in schema.packed}
    except PrecisionError as error:
        raise ValueError(f"{where}: {str(error)[:200]}") from None
    size = bytes_of(model, precisions)
    if about["bytes"] != size or not isclose(about["bits_per_weight"], 8 * size / weights_of(model)):
        raise ValueError(
            f"{where} takes {size} bytes by its precisions, and its bytes or bits_per_weight "
            "say something else"
        )
    return Fit(name, precisions, about)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 60


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and 0 <= value <= LARGEST_SUM


def _is_precision(value: object) -> bool:
    try:
        return isinstance(value, str) and str(Precision(value)) == value
    except PrecisionError:
        return False


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _LONGEST and value.isprintable()


def _is_date(value: object) -> bool:
    try:
        return isinstance(value, str) and date.fromisoformat(value).isoformat() == value
    except ValueError:
        return False


_ABOUT = {
    "bytes": _is_size,
    "bits_per_weight": _is_number,
    "predicted": _is_number,
    "measured": _is_number,
    "uniform": _is_precision,
    "uniform_measured": _is_number,
    "reference": _is_precision,
    "text": _is_name,
    "text_sha256": is_digest,
    "tokens": _is_size,
    "command": _is_name,
    "date": _is_date,
}
_ADDED = ("reference", "tokens")
