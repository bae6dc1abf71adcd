"""Fetching a nested model: the shards that a precision needs and lacks, each checked before it is used.

The header of a shard is known before the shard comes (`remote.py`): what came of it before a cut is gone on
with exactly if it begins with the header that the source has now.

What is under way lies in OUT/.fetch, one file for each shard that grows from its beginning. A shard goes to
its place by a rename, when every digest is right: the base shard first, right behind the files beside it,
then planes in their order. So OUT has nothing but that folder until it opens, and it opens at every moment
from then on.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from otaro.errors import (
    DigestError,
    FetchError,
    FormatError,
    OtaroError,
    PrecisionError,
    ShardMissingError,
    TargetError,
)
from otaro.file.atomic import alone, explained, flush
from otaro.file.checkpoint import HUB
from otaro.file.fits import PREFIX, Budget, fit_name, is_fit, read_fits_in
from otaro.file.header import BASE, Header, check_plane, read_header, shard_name
from otaro.file.hub import Hub
from otaro.file.io import NestedDirectory
from otaro.file.planes import PLANES
from otaro.file.remote import CHUNK, PAUSES, Offer, RemoteModel, read_small
from otaro.file.replace import FITS_FILE
from otaro.file.run import refuse_run
from otaro.file.source import CONFIG, Changed, CutOff, Directory, Source, find_source
from otaro.readable import size as readable_size
from otaro.sefp.precision import FINEST, Precision, of_mantissa_bits

FOLDER = ".fetch"  # in OUT: what is under way
_BESIDE = "beside"  # in that: files beside the shards, until they go to their places
_PROGRESS = 1 << 20  # bytes after which tries are counted anew


@dataclass(frozen=True)
class Fetched:
    """What a call of `fetch` did, and what there is now."""

    nested: NestedDirectory
    names: list[str]
    """Files that came."""
    bytes: int
    """Of shards, that came now; what an earlier call had brought does not count."""
    more: dict[int, int]
    """Bytes of the shards that the source has beyond, by plane."""


def fetch(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    precision: str | Precision | None = None,
    *,
    hub: Hub = HUB,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Fetched:
    """Bring of a nested model what `precision` needs, by default all there is, into the directory `out`.

    A fit, `fit:90MB`, needs what the finest of its precisions does. `model` is a Hub id, http(s)://HOST/PATH
    or file:///DIR of a nested directory, or a directory. What `out` has already of the same model stays as it
    is. `progress` gets the file at hand, bytes done and in total.
    """
    source, target = find_source(model, hub), Path(os.path.realpath(out))
    if isinstance(source, Directory):
        refuse_run(source.path)
        if target == Path(os.path.realpath(source.path)):
            raise TargetError(f"{out} is where the model comes from; choose another place")
    with explained(target), alone(target):
        nested = _there(target)
        remote = RemoteModel(source, None if nested is None else nested.base.header)
        needed = _needed(precision, remote, target)
        offers = _missing(remote, nested, target, needed)
        if nested is not None and not offers and (theirs := RemoteModel(source).model) != nested.model:
            raise TargetError(
                f"{out} holds another model (identity {nested.model[:12]}) than {source} ({theirs[:12]}); "
                "choose another place"
            )
        under_way = target / FOLDER
        _check_space(target, sum(offer.size - _begun(offer, under_way) for offer in offers))
        made = not target.exists()
        under_way.mkdir(parents=True, exist_ok=True)
        count = _Count(progress, sum(offer.size for offer in offers))
        try:
            kept = target if nested or _planes_of(target) else None
            names = _bring_beside(source, under_way / _BESIDE, kept)
            for offer in offers:
                part = _bring_shard(remote, offer, under_way, count)
                _place_all(under_way / _BESIDE, target)
                os.rename(part, target / offer.name)
                flush(target)
            _place_all(under_way / _BESIDE, target)
            nested = nested or NestedDirectory(target)
            nested.require(needed or nested.finest)
            shutil.rmtree(under_way)
        finally:
            shutil.rmtree(under_way / _BESIDE, ignore_errors=True)
            for folder in [under_way, target] if made else [under_way]:
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()
        more = _beyond(remote, nested)
    return Fetched(nested, [*names, *(offer.name for offer in offers)], count.moved, more)


class _Count:
    """Bytes done of all shards together, and those that moved now."""

    def __init__(self, progress: Callable[[str, int, int], None], total: int) -> None:
        self.moved = 0
        self._progress, self._total, self._finished = progress, total, 0

    def at(self, name: str, have: int) -> None:
        self._progress(name, self._finished + have, self._total)

    def finish(self, size: int) -> None:
        self._finished += size


def _there(target: Path) -> NestedDirectory | None:
    """The model that `target` holds already; a place that is not empty, neither one nor begun, is refused."""
    if target.exists() and not target.is_dir():
        raise TargetError(f"{target} exists and is not a directory; choose another place")
    if (target / shard_name(BASE)).is_file():
        return NestedDirectory(target)
    begun = (target / FOLDER).is_dir() or _planes_of(target)
    if target.is_dir() and any(target.iterdir()) and not begun:
        raise TargetError(f"{target} exists, is not empty and holds no nested model; choose another place")
    return None


def _planes_of(target: Path) -> list[int]:
    """Planes that `target` has shards of."""
    return [plane for plane in PLANES if (target / shard_name(plane)).is_file()]


def _needed(precision: str | Precision | None, remote: RemoteModel, target: Path) -> Precision | None:
    """The precision whose shards are needed; fits are looked for in OUT's file, and then in the source's."""
    if not is_fit(precision):
        return None if precision is None else Precision(precision)
    budget, source = Budget.parse(fit_name(str(precision)).removeprefix(PREFIX)), remote.source
    if (fit := read_fits_in(target, remote.model, remote).get(budget.name)) is not None:
        return fit.finest
    with TemporaryDirectory() as folder:
        read_small(source, FITS_FILE, Path(folder) / FITS_FILE)
        fits = read_fits_in(Path(folder), remote.model, remote, str(source))
    if (fit := fits.get(budget.name)) is None:
        there = f"there are {', '.join(map(str, fits.values()))}" if fits else "there are no fits"
        raise PrecisionError(
            f"{source} has no {PREFIX}{budget.name}, {there}; fetch E5M8 to E5M3, and make it with: "
            f"otaro fit {target} --text FILE {budget.option}"
        )
    if (kept := target / FITS_FILE).is_file():
        raise TargetError(f"{kept} lacks {fit}, which {source} has; move it away, and theirs comes")
    return fit.finest


def _missing(
    remote: RemoteModel, nested: NestedDirectory | None, target: Path, precision: Precision | None
) -> list[Offer]:
    """What is to come, in the order of planes; refused where the source lacks a part of it."""
    offers, there = [], _planes_of(target)
    for plane in there if nested is None else ():  # their base shard is gone
        check_plane(read_header(target / shard_name(plane), plane), remote.base)
    for plane in range(BASE, (precision.mantissa_bits if precision else FINEST) + 1):
        if plane in there or (plane == BASE and nested is not None):
            if nested is not None:
                nested.plane(plane)  # refuses one that is damaged or another model's
            continue
        offer = remote.offer(plane) if plane != BASE else remote.base_offer()
        if offer is None and precision is None:
            break
        if offer is None:
            lacks = f"{precision} needs {shard_name(plane)}, which {remote.source} lacks"
            raise ShardMissingError(f"{lacks}; ask for {of_mantissa_bits(plane - 1)} or a lower one")
        offers.append(offer)
    return offers


def _beyond(remote: RemoteModel, nested: NestedDirectory) -> dict[int, int]:
    """Sizes of the finer shards that the source has; one out of order there is nobody's concern yet."""
    found = {}
    try:
        for plane in range(nested.finest.mantissa_bits + 1, FINEST + 1):
            if (offer := remote.offer(plane)) is None:
                break
            found[plane] = offer.size
    except OtaroError:
        pass
    return found


def _check_space(target: Path, needed: int) -> None:
    folder = next(path for path in (target, *target.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise TargetError(
            f"{readable_size(needed)} are to come, and {folder} has room for {readable_size(free)}; "
            "free some space, choose another place or a lower precision"
        )


def _part(offer: Offer, under_way: Path) -> Path:
    return under_way / f"{offer.name}.part"


def _begun(offer: Offer, under_way: Path) -> int:
    """Bytes of a shard that have come before; none where it begins otherwise, or goes on beyond the shard."""
    try:
        with _part(offer, under_way).open("rb") as file:
            same = file.read(len(offer.start)) == offer.start
            length = file.seek(0, 2)
            return length if same and length <= offer.size else 0
    except FileNotFoundError:
        return 0


def _bring_shard(remote: RemoteModel, offer: Offer, under_way: Path, count: _Count) -> Path:
    """Fetch and check; returns the file, which is ready to be put in place."""
    part, first = _part(offer, under_way), offer
    wrong = tries = 0
    while True:
        before = _begun(offer, under_way)
        try:
            _download(remote.source, offer, part, count)
        except CutOff as error:
            have = _begun(offer, under_way)
            tries = 0 if have - before >= _PROGRESS else tries + 1
            if tries > len(PAUSES):
                came = f"{readable_size(have)} of {readable_size(offer.size)}"
                raise FetchError(
                    f"{offer.name} from {remote.source} broke off after {came} ({error}); what has come is "
                    "kept, and the same command goes on from there"
                ) from error
            time.sleep(PAUSES[max(tries, 1) - 1])
            continue
        except Changed:
            wrong += 1
            new = remote.offer(offer.header.plane, anew=True)
            if new is None or new.header.model != first.header.model or wrong > 2:
                raise FetchError(
                    f"{offer.name} at {remote.source} was exchanged while it was fetched, or is stated to "
                    "have another length than its header implies; what has come is kept, call again"
                ) from None
            offer = new
            continue
        sound, damaged = _sound(part, offer.header)
        if damaged is None:
            break
        wrong += 1
        with part.open("r+b") as file:
            file.truncate(sound)
        if wrong > 2:
            part.unlink()
            raise DigestError(
                f"{remote.source} serves a damaged {offer.name}: three times over the bytes of {damaged} "
                "were not those that its header promises; have the file put there anew"
            )
    flush(part)
    count.finish(first.size)
    return part


def _download(source: Source, offer: Offer, part: Path, count: _Count) -> None:
    """Bring the partial file to its full length, from where it is."""
    have = _begun(offer, part.parent)
    if not have:
        part.write_bytes(offer.start)
        have = len(offer.start)
        count.moved += have
    count.at(offer.name, have)
    if have == offer.size:
        return
    with source.open(offer.name, have, None, offer.tag) as piece:
        if piece is None or piece.size not in (None, offer.size):
            raise Changed
        if piece.start != have:  # a server that knows no ranges, or has another file by now
            if piece.exactly(len(offer.start)) != offer.start:
                raise Changed
            have = len(offer.start)
        with part.open("r+b") as file:
            file.truncate(have)
            file.seek(have)
            while have < offer.size:
                data = piece.read(min(CHUNK, offer.size - have))
                if not data:
                    raise CutOff("the stream ended")
                file.write(data)
                have += len(data)
                count.moved += len(data)
                count.at(offer.name, have)


def _sound(path: Path, header: Header) -> tuple[int, str | None]:
    """How many leading bytes of a shard are right, to the tensor, and the first damaged one."""
    with path.open("rb") as file:
        for name, entry in sorted(header.entries.items(), key=lambda item: item[1].start):
            digest = hashlib.sha256()
            file.seek(header.data_start + entry.start)
            for start in range(entry.start, entry.end, CHUNK):
                digest.update(file.read(min(CHUNK, entry.end - start)))
            if digest.hexdigest() != header.digests[name]:
                return header.data_start + entry.start, name
    return header.file_size, None


def _bring_beside(source: Source, folder: Path, target: Path | None) -> list[str]:
    """Fetch the small files that `target` lacks: the configuration, which must be, tokenizer, licence.

    Before there is a shard that is everything, also what came before: it may be another model's.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    names = [name for name in source.beside() if target is None or not (target / name).exists()]
    brought = [name for name in names if read_small(source, name, folder / name)]
    if not any(place is not None and (place / CONFIG).is_file() for place in (folder, target)):
        raise FormatError(f"{source} has no {CONFIG}, which a nested model needs")
    return brought


def _place_all(folder: Path, target: Path) -> None:
    for path in sorted(folder.iterdir()):
        os.rename(path, target / path.name)
