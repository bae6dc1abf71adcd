"""Writing a model where one is: an older nested model gives way, other weights are in the way, everything
else stays.

Two models in one folder would leave it to chance which one is opened, and replacing an ordinary checkpoint
would lose it: a folder that holds one is refused. A record (quality, fits) stays with the model it is about;
that of another is put aside. A report gives way to a report, and no other file does.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path

from otaro.errors import OtaroWarning, TargetError
from otaro.file.header import BASE, is_digest, shard_name
from otaro.sefp.precision import FINEST

QUALITY_FILE = "quality.json"  # what `otaro eval` measured of the model beside it
FITS_FILE = "precisions.json"  # the fits that `otaro fit` made for it
SENSITIVITY_FILE = "sensitivity.json"  # what it measured for that
DECODER_FILE = "decoder.json"  # the model as decoders see it, for programs without Python
SHARDS = [shard_name(plane) for plane in range(BASE, FINEST + 1)]
_RECORDS = (QUALITY_FILE, FITS_FILE, SENSITIVITY_FILE)
# in the head of a report, and of one from before 0.2.0
_REPORTS = (b'<meta name="generator" content="otaro report">', b"<title>OTARo report: ")
_OTHER_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*")


def check_replaceable(target: Path) -> None:
    """Refuse a folder with a model that is not a nested one, or with other weights beside it."""
    names = sorted(path.name for path in target.iterdir()) if target.is_dir() else []
    other = [
        name for name in names if name not in SHARDS and any(Path(name).match(p) for p in _OTHER_WEIGHTS)
    ]
    if not other and SHARDS[0] not in names:
        other = [name for name in names if name == "config.json"]
    if other:
        raise TargetError(
            f"{target} holds another model ({other[0]}), which stays as it is; choose another folder"
        )


def check_report(target: Path) -> None:
    """Refuse a place that is a directory, or a file other than a report."""
    if target.is_dir():
        example = target / "report.html"
        raise TargetError(f"{target} is a directory; name the file to write, such as {example}")
    if target.exists() and not (target.is_file() and _is_report(target)):
        raise TargetError(f"{target} is there, and no report of ours; choose another --out, or remove it")


def _is_report(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(1024).partition(b"<style>")[0]  # what it says of a run comes after its title
    return head.startswith(b"<!doctype html>") and any(mark in head for mark in _REPORTS)


def carry_over(old: Path, new: Path, model: str, replaced: Sequence[str]) -> None:
    """Copy what is not of the older nested model into the folder that takes its place.

    `replaced` are patterns of files that belong to the older model beside its shards; `model` is the newer
    one's identity.
    """
    for path in sorted(old.iterdir()) if old.is_dir() else ():
        kept = new / path.name if path.name not in _RECORDS else _place_of_record(path, new, model)
        of_old_model = path.name in SHARDS or (
            path.is_file() and any(path.match(pattern) for pattern in replaced)
        )
        if kept.exists() or of_old_model:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, kept, symlinks=True)
        else:
            shutil.copy2(path, kept, follow_symlinks=False)
        if kept.name != path.name:
            what = f"{old / path.name} is about the model that was there, and is kept as {kept.name}"
            warnings.warn(what, OtaroWarning, stacklevel=2)


def _place_of_record(path: Path, new: Path, model: str) -> Path:
    """Where a record goes: it keeps its name if of `model`, else gets a free one, after its own model."""
    try:
        about = json.loads(path.read_text())["model"]
    except (OSError, ValueError, KeyError, TypeError):
        about = None
    if about == model:
        return new / path.name
    stem = f"{path.stem}-{about[:12]}" if is_digest(about) else f"{path.stem}-damaged"
    names = chain([f"{stem}.json"], (f"{stem}-{number}.json" for number in count(2)))
    return new / next(name for name in names if not path.with_name(name).exists())
