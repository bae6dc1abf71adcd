"""The quality record: what was measured of a model, in `quality.json` in the model's own folder.

A record names the model it is about and lists measurements, `entries`, of three kinds:

    perplexity  of a text, by the sliding window
    divergence  from a reference precision on a text: by KL, and how often the likeliest token is the same
    task        accuracy on a task of lm-evaluation-harness

An entry is *identified* by its kind, its precision, how weights became codes, the device and what was asked
(`IDENTITY`); measuring the same again replaces it. The rest is the outcome, and under which circumstances it
came about: command, date, versions. The file is written whole after every measurement, so an evaluation that
dies loses only what it was at.

`bos` says whether windows began with a beginning-of-text token, `kv` what keys and values were kept in if not
in the type of the model. A precision may be the name of a fit (`file.fits`); `fit_sha256` then tells its
precisions from those of another fit of this name.

Full precision has no codes, hence neither group size nor reconstruction, and goes with those of every coding
(`series`). A nested model has no full precision of its own; `reference_model` then says which checkpoint's it
is.

A record travels with its model and so comes from strangers: nothing in it is believed before `records` has
checked it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from otaro.errors import OtaroError
from otaro.evaluate import records
from otaro.evaluate.harness import PAPER_TASKS, ZEROSHOT8
from otaro.evaluate.records import FULL, IDENTITY, PRECISION_NAMES
from otaro.file.atomic import update_text
from otaro.file.coding import Coding
from otaro.file.header import untrusted_json
from otaro.file.replace import QUALITY_FILE

SCHEMA = 1
CODING = ("group_size", "reconstruction")
_LARGEST = 1 << 24  # bytes of a file; thousands of entries

Entry = dict[str, Any]


class QualityError(OtaroError):
    """A quality record that is damaged, or of another model."""


def identity(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells an entry from others: equal for two measurements of the same thing."""
    return (entry["kind"], *(entry.get(field) for field in IDENTITY[entry["kind"]]))


def coding_of(entry: Mapping[str, Any]) -> Coding | None:
    """How weights became codes; None for full precision."""
    return None if entry["precision"] == FULL else Coding(*(entry[field] for field in CODING))


def in_order(names: Iterable[str]) -> list[str]:
    """Names of precisions from fine to coarse, and fits behind them."""
    there = set(names)
    return [name for name in PRECISION_NAMES if name in there] + sorted(there - set(PRECISION_NAMES))


def series(entries: Iterable[Entry]) -> list[dict[str, Entry]]:
    """Entries that differ in nothing but precision, by precision and from fine to coarse.

    Full precision is that of every coding of the same model: it begins each series that else agrees with it.
    """
    whole: dict[tuple[Any, ...], list[Entry]] = {}  # full precision
    parts: dict[tuple[Any, ...], dict[tuple[Any, ...], dict[str, Entry]]] = {}  # by coding
    for entry in entries:
        free = {"precision", "fit_sha256", *CODING}
        free |= {"reference_model"} if entry["kind"] != "divergence" else set()
        key = identity({field: value for field, value in entry.items() if field not in free})
        codings = parts.setdefault(key, {})
        if entry["precision"] == FULL:
            whole.setdefault(key, []).append(entry)
        else:
            codings.setdefault(tuple(entry.get(field) for field in CODING), {})[entry["precision"]] = entry
    return [
        {**full, **{name: part[name] for name in in_order(part)}}
        for key, codings in parts.items()
        for full in [{FULL: entry} for entry in whole.get(key, [])] or [{}]
        for part in codings.values() or [{}]
    ]


@dataclass(frozen=True)
class Quality:
    """A record, checked: the SHA-256 that identifies the model, and what was measured of it."""

    model: str
    entries: tuple[Entry, ...] = ()

    def find(self, wanted: Mapping[str, Any]) -> Entry | None:
        """The entry that `wanted` identifies, if it has been measured."""
        return next((entry for entry in self.entries if identity(entry) == identity(wanted)), None)

    def including(self, new: Entry) -> Quality:
        """The record with `new` in it, in place of an earlier measurement of the same."""
        entries = [new if identity(entry) == identity(new) else entry for entry in self.entries]
        return Quality(self.model, tuple(entries if new in entries else [*entries, new]))

    def to_dict(self) -> dict[str, Any]:
        """As it is stored."""
        return {"schema": SCHEMA, "model": self.model, "entries": list(self.entries)}


def read_quality(directory: Path, model: str | None = None) -> Quality | None:
    """The record in a directory, None where there is none; refused if damaged or not about `model`."""
    path = directory / QUALITY_FILE
    if not path.is_file():
        return None
    if path.stat().st_size > _LARGEST:
        raise QualityError(f"{path} is larger than any quality record; move it away")
    try:
        quality = parse_quality(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON, of UTF-8, or ours
        raise QualityError(f"{path} is no quality record that can be read: {error}; move it away") from None
    if model is not None and quality.model != model:
        other = f"another model ({quality.model[:12]}) than the one beside it ({model[:12]})"
        raise QualityError(f"{path} is about {other}; move it away")
    return quality


def parse_quality(text: str) -> Quality:
    """Check every field of every entry; a ValueError says what is wrong."""
    raw = records.check(records.Quality, untrusted_json(text))
    if len({identity(entry) for entry in raw["entries"]}) != len(raw["entries"]):
        raise ValueError("two entries are about the same measurement")
    return Quality(raw["model"], tuple(raw["entries"]))


def is_share(metric: str) -> bool:
    """Whether a metric is a share of samples, so that it can be averaged over tasks and shown in percent."""
    return metric.startswith(("acc", "exact_match"))


def averages(entries: Iterable[Entry]) -> list[Entry]:
    """Averages over tasks at one limit on one device, as entries, for what was measured on all of these.

    Where the paper's eight are among the tasks, the average is over these and called zeroshot8. None is of
    less than two tasks, or of scores that are no shares. Errors of independent samples add by their squares.
    """
    alike: dict[tuple[int | None, str], dict[tuple[Any, ...], dict[tuple[str, str | None], Entry]]] = {}
    of_model = ("precision", *CODING, "fit_sha256", "reference_model")
    for entry in entries:
        if entry["kind"] == "task":
            model = tuple(entry.get(field) for field in of_model)
            by_model = alike.setdefault((entry["limit"], entry["device"]), {})
            by_model.setdefault(model, {})[entry["task"], entry["data_sha256"]] = entry
    found = []
    for by_model in alike.values():
        every = dict.fromkeys(task for measured in by_model.values() for task in measured)
        is_paper = PAPER_TASKS.keys() <= {name for name, _ in every}
        tasks = [task for task in every if task[0] in PAPER_TASKS or not is_paper]
        data = hashlib.sha256(json.dumps(sorted(tasks, key=str)).encode()).hexdigest()
        name = ZEROSHOT8 if is_paper else f"average of {len(tasks)}"
        about = {"task": name, "metric": "acc", "data_sha256": data}
        for measured in by_model.values():
            own = [measured[task] for task in tasks if task in measured]
            if 1 < len(own) == len(tasks) and all(is_share(entry["metric"]) for entry in own):
                errors = [entry["stderr"] for entry in own]
                stderr = None if None in errors else sqrt(sum(error**2 for error in errors)) / len(own)
                value = sum(entry["value"] for entry in own) / len(own)
                commands = [entry["command"] for entry in own]
                found.append({**own[0], **about, "value": value, "stderr": stderr, "commands": commands})
    return found


class Record:
    """The record of a model while it is evaluated, kept in a directory; with None, in memory only."""

    def __init__(self, model: str, directory: Path | None) -> None:
        self._model, self._directory, self._quality = model, directory, Quality(model)
        self.path = directory and directory / QUALITY_FILE
        self._quality = self._read()

    def find(self, wanted: Mapping[str, Any]) -> Entry | None:
        """The entry that `wanted` identifies, if it has been measured."""
        return self._quality.find(wanted)

    def add(self, entry: Entry) -> None:
        """Keep a measurement, on disk before this returns; what another process added meanwhile stays."""

        def updated() -> str:
            self._quality = self._read().including(entry)
            text = json.dumps(self._quality.to_dict(), indent=1)
            try:
                parse_quality(text)  # what we would not read, we do not write
            except ValueError as error:
                raise QualityError(f"this cannot be kept in a quality record: {error}") from None
            return text + "\n"

        if self.path is None:
            updated()
        else:
            update_text(self.path, updated)

    def _read(self) -> Quality:
        if self._directory is None:
            return self._quality
        return read_quality(self._directory, self._model) or Quality(self._model)
