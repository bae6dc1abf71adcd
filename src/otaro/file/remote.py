"""A nested model at its source, before anything of it is kept: its headers, and the small files beside it.

Of every shard the header comes first, by itself. It is bounded and sealed, tells how long the shard is and
which model it belongs to, and has a digest of each tensor. So a length that a server states, too short, too
long or none, decides nothing; and two headers that are alike are those of two files that are alike.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from otaro.errors import FetchError, FormatError
from otaro.file.header import (
    AGAIN,
    BASE,
    Entry,
    Header,
    Schema,
    check_header,
    check_plane,
    header_length,
    shard_name,
)
from otaro.file.source import CONFIG, Changed, CutOff, Piece, Source
from otaro.readable import size as readable_size
from otaro.sefp.precision import FINEST

PAUSES = (0.5, 1.0, 2.0, 4.0)  # seconds before another try
CHUNK = 1 << 18
_LARGEST_BESIDE = 256_000_000  # the largest vocabularies take tens of megabytes
_T = TypeVar("_T")


@dataclass(frozen=True)
class Offer:
    """A shard at its source, of which the header is known."""

    header: Header
    start: bytes
    """The first bytes of the file, up to the data."""
    tag: str | None

    @property
    def name(self) -> str:
        """Of the file."""
        return self.header.path.name

    @property
    def size(self) -> int:
        """Bytes of the file, as its header implies them."""
        return self.header.file_size


class RemoteModel:
    """A nested model at its source, as headers describe it; planes must be of its base, or the one given."""

    def __init__(self, source: Source, base: Header | None = None) -> None:
        self.source = source
        self._base = base
        self._offers: dict[int, Offer | None] = {}

    @cached_property
    def base(self) -> Header:
        """Of the base shard."""
        return self.base_offer().header if self._base is None else self._base

    def base_offer(self) -> Offer:
        """The base shard, without which there is no model."""
        if (offer := self.offer(BASE)) is None:
            raise FormatError(f"{self.source} is not a nested model: it has no {shard_name(BASE)}")
        return offer

    @property
    def model(self) -> str:
        """The model's identity."""
        return self.base.model

    @property
    def schema(self) -> Schema:
        """As the base shard states it."""
        assert self.base.schema is not None  # check_header sees to it for the base shard
        return self.base.schema

    @property
    def unpacked(self) -> dict[str, Entry]:
        """What is stored as it came."""
        return self.base.unpacked

    @property
    def sizes(self) -> dict[int, int]:
        """Bytes of the shards that are there, by plane."""
        offers = {plane: self.offer(plane) for plane in range(BASE, FINEST + 1)}
        return {plane: offer.size for plane, offer in offers.items() if offer is not None}

    def offer(self, plane: int, anew: bool = False) -> Offer | None:
        """What the source has of a plane; None where it has none."""
        if anew or plane not in self._offers:
            self._offers[plane] = self._read_offer(plane)
        return self._offers[plane]

    def _read_offer(self, plane: int) -> Offer | None:
        path = Path(shard_name(plane))

        def read() -> Offer | None:
            with self.source.open(path.name, 0, 8) as piece:
                if piece is None:
                    return None
                size, tag, prefix = piece.size, piece.tag, piece.exactly(8)
            end = 8 + header_length(path, prefix, size)
            with self.source.open(path.name, 8, end, tag) as piece:
                if piece is None or (piece.start == 0 and piece.exactly(8) != prefix):
                    raise Changed
                text = piece.exactly(end - 8)
            return Offer(check_header(path, plane, text, size), prefix + text, tag)

        with _said_of(self.source):
            offer = _patiently(read, f"the header of {path} at {self.source}", "; try again later")
            if offer is not None and plane != BASE:
                check_plane(offer.header, self.base)
        return offer


def read_small(source: Source, name: str, path: Path) -> bool:
    """Write a file beside the shards to `path`, whole; whether there is one."""

    def copy() -> bool:
        with source.open(name) as piece, path.open("wb") as file:
            if piece is None:
                return False
            length = 0
            while data := piece.read(CHUNK):
                length += len(data)
                if length > _LARGEST_BESIDE:
                    larger = f"larger than {readable_size(_LARGEST_BESIDE)}, which no model needs"
                    raise FetchError(f"{name} at {source} is {larger}; it is not fetched")
                file.write(data)
            _check_end(piece, length, name, source)
            file.flush()
            os.fsync(file.fileno())
        _check_json(path, name, source)
        return True

    try:
        there = _patiently(copy, f"{name} at {source}", "; the same command goes on from there")
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    if not there:
        path.unlink()
    return there


def _check_end(piece: Piece, length: int, name: str, source: Source) -> None:
    """These files have no digest: a broken-off one is told by its length, or the end of its JSON."""
    if piece.size is not None and length != piece.size:
        raise CutOff(f"it ended after {length} of {piece.size} bytes")
    if not piece.ends and not name.endswith(".json"):
        raise FetchError(f"{source} does not say how long {name} is, so nobody can tell whether it is whole")


def _check_json(path: Path, name: str, source: Source) -> None:
    if not name.endswith(".json"):
        return
    try:
        stated = json.loads(path.read_bytes())
        sefp = name != CONFIG or stated["quantization_config"]["quant_method"] == "sefp"
    except (ValueError, RecursionError):
        raise CutOff("it is not valid JSON") from None
    except (KeyError, TypeError):
        sefp = False
    if not sefp:
        raise FormatError(f"{CONFIG} at {source} does not describe a nested model")


@contextmanager
def _said_of(source: Source) -> Iterator[None]:
    """Say whose shards they are that are refused."""
    try:
        yield
    except FormatError as error:
        raise type(error)(f"at {source}: {error}".replace(AGAIN, "have it put there anew")) from None


def _patiently(action: Callable[[], _T], what: str, advice: str) -> _T:
    """Try a few times, with pauses."""
    for pause in (*PAUSES, None):
        try:
            return action()
        except (CutOff, Changed) as error:
            if pause is None:
                why = str(error) or "it keeps changing"
                raise FetchError(f"{what} could not be fetched: {why}{advice}") from error
            time.sleep(pause)
    raise AssertionError
