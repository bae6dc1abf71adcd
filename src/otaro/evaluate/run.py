"""One evaluation: what is to be measured, what of it is in the record already, and the rest, one by one.

Every measurement is an entry of the quality record (`evaluate.quality`), kept as soon as it is made. So an
evaluation that was interrupted goes on where it stopped, and one that was finished measures nothing.
Precision is the outer loop, full precision first: the unquantized model goes before the packed one comes.

What is measured on a text comes from readings of it. Perplexity and divergence of a precision are one
reading, where their windows are the same. The reference is read before all that is compared with it, once,
and kept (`evaluate.logits`).
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from otaro.errors import OtaroError
from otaro.evaluate.harness import Tasks
from otaro.evaluate.logits import KeptStates
from otaro.evaluate.machine import device_name
from otaro.evaluate.meters import Divergence, Loss
from otaro.evaluate.progress import Progress
from otaro.evaluate.quality import Entry, Record, identity
from otaro.evaluate.records import FULL, LONGEST
from otaro.evaluate.subject import Subject
from otaro.evaluate.text import Text
from otaro.evaluate.windows import KvReader, ModelReader, Reader, Windows, choose_window, read
from otaro.readable import duration
from otaro.tokens import begins_with_bos

_WARM_UP = 16  # tokens read before the clock starts: weights are read in, kernels chosen


@dataclass(frozen=True)
class Wanted:
    """What to measure at every precision."""

    text: Text | None = None
    window: int | None = None
    stride: int | None = None
    divergence: bool = False
    tasks: tuple[str, ...] = ()
    data_dir: Path | None = None
    limit: int | None = None
    batch_size: int = 8
    bos: bool = True
    """Whether windows begin with the token that the tokenizer begins texts with, if it does."""
    kv: tuple[str, ...] = ()
    """Read through the decoder, with keys and values in each of these: float16, or a precision."""


@dataclass
class Reading:
    """The text, read once at a precision."""

    precision: str
    kv: str | None
    windows: Windows
    entries: list[Entry] = field(default_factory=list)
    """What it gives."""
    is_reference: bool = False
    """Whether others are compared with it."""


class Evaluation:
    """A subject and what is wanted of it, checked before anything large is loaded."""

    def __init__(self, subject: Subject, wanted: Wanted) -> None:
        self.subject, self.wanted = subject, wanted
        self.window = self.stride = 0
        self._windows: Windows | None = None
        tokenizer = subject.tokenizer  # refused here where there is none
        if wanted.text is not None:
            self._windows = self._cut(wanted.text, tokenizer)
            self.window, self.stride = self._windows.window, self._windows.stride or self._windows.window
        self._tasks = Tasks(wanted.tasks, wanted.data_dir) if wanted.tasks else None
        if wanted.kv and self._tasks is not None:
            raise OtaroError("--kv is measured on a text; leave --tasks for another command")
        precisions = [one for one in subject.precisions if one != FULL] if wanted.kv else subject.precisions
        if not precisions:
            packed = "--kv needs the decoder, which runs packed weights"
            raise OtaroError(f"{packed}: give another --precision than {FULL}")
        at = product(wanted.kv or (None,), precisions)
        self.plan = [entry for kv, precision in at for entry in self._entries_at(precision, kv)]

    def run(
        self,
        record: Record,
        versions: dict[str, str],
        *,
        again: bool = False,
        progress: Progress = lambda what, done, total: None,
    ) -> list[Entry]:
        """The entries of `plan` with their outcomes; those not in the record are measured, kept one by one.

        `progress` gets what is being measured, after the first window with how long all readings will take,
        and how much is done: of the tokens of all readings, or of a task's requests. A measurement that does
        not come out finite is not kept; it is told of, by an exception, when all others have been made.
        """
        overflowed = []
        entries = [None if again else record.find(entry) for entry in self.plan]
        missing = [number for number, entry in enumerate(entries) if entry is None]
        to_make = [self.plan[number] for number in missing]
        for entry in to_make:
            if self._tasks is not None and entry["kind"] == "task":
                self._tasks.prepare(entry["task"])  # data that cannot be had is better missed now
        readings = _Readings(self.subject, self._readings(to_make), progress)
        for done, (number, entry) in enumerate(zip(missing, to_make, strict=True)):
            kv = f" with keys and values in {entry['kv']}" if "kv" in entry else ""
            at = f"{entry['precision']} {entry.get('task', entry['kind'])}{kv}, {done + 1} of {len(missing)}"
            is_task = entry["kind"] == "task"
            outcome = self._task(entry, progress, at) if is_task else readings.outcome(entry, at)
            numbers = [value for value in outcome.values() if isinstance(value, float)]
            if odd := [value for value in numbers if not isfinite(value)]:
                overflowed.append(f"{at}: comes out as {odd[0]}")
            else:
                today = date.today().isoformat()
                made = {"command": self._command(entry), "date": today, "versions": versions}
                entries[number] = finished = {**entry, **outcome, **made}
                record.add(finished)
            if not readings.need_full and all(one["precision"] != FULL for one in to_make[done + 1 :]):
                self.subject.release_full()
        if overflowed:
            told = "; ".join(overflowed)
            raise OtaroError(f"the model's outputs overflow ({told}); everything else has been measured")
        return [entry for entry in entries if entry is not None]

    def _cut(self, text: Text, tokenizer: Any) -> Windows:
        ids, original = text.ids(tokenizer), self.subject.original
        bos = begins_with_bos(tokenizer) if self.wanted.bos else None
        if original is not None:
            their_bos = begins_with_bos(original.tokenizer) if self.wanted.bos else None
            if their_bos != bos or not torch.equal(text.ids(original.tokenizer), ids):
                other = f"--reference {original.model} has another tokenizer"
                raise OtaroError(f"{other}: it reads {text.name} otherwise")
        window = choose_window(self.subject.config, self.wanted.window)
        return Windows(ids, window, self.wanted.stride or window, bos)

    def _entries_at(self, precision: str, kv: str | None) -> Iterator[Entry]:
        """What identifies the measurements at a precision."""
        subject, windows, text = self.subject, self._windows, self.wanted.text
        elsewhere = {"reference_model": subject.original.identity} if subject.original is not None else {}
        at = {"precision": precision, "device": device_name(subject.device)}
        at |= elsewhere if precision == FULL else asdict(subject.coding)
        if precision in subject.fits:
            at["fit_sha256"] = subject.fits[precision].sha256
        if text is not None and windows is not None:
            on_text = {"text": text.name, "text_sha256": text.sha256, "window": windows.window}
            on_text |= {"tokens": len(windows.ids), "bos": windows.bos is not None}
            on_text |= {} if kv is None else {"kv": kv}
            yield {"kind": "perplexity", **at, **on_text, "stride": self.stride}
            if self.wanted.divergence and (precision, kv) != (subject.reference, None):
                yield {"kind": "divergence", **at, **on_text, "reference": subject.reference, **elsewhere}
        if (tasks := self._tasks) is not None:
            for name in tasks.names:
                data = {"limit": self.wanted.limit, "data_sha256": tasks.data_sha256(name)}
                yield {"kind": "task", **at, "task": name, **data}

    def _readings(self, missing: Sequence[Entry]) -> list[Reading]:
        """How often, and at what, the text has to be read for these entries."""
        if (windows := self._windows) is None:
            return []
        apart = Windows(windows.ids, windows.window, None, windows.bos)  # windows that do not overlap
        found: dict[tuple[str, str | None, bool], Reading] = {}

        def reading(precision: str, kv: str | None, overlap: bool) -> Reading:
            fresh = Reading(precision, kv, windows if overlap else apart)
            return found.setdefault((precision, kv, overlap), fresh)

        if any(entry["kind"] == "divergence" for entry in missing):
            reading(self.subject.reference, None, False).is_reference = True  # the first
        for entry in missing:
            if entry["kind"] != "task":
                overlap = entry["kind"] == "perplexity" and windows.overlap
                reading(entry["precision"], entry.get("kv"), overlap).entries.append(entry)
        return list(found.values())

    def _task(self, entry: Entry, progress: Progress, at: str) -> dict[str, Any]:
        assert self._tasks is not None  # or there would be no such entry
        measure = partial(self._tasks.measure, limit=self.wanted.limit, batch_size=self.wanted.batch_size)
        model = self.subject.at(entry["precision"], progress)
        return asdict(measure(entry["task"], model, self.subject.tokenizer, progress=partial(progress, at)))

    def _command(self, entry: Entry) -> str:
        """What to type to measure this entry alone."""
        words = ["otaro", "eval", self.subject.model, "--precision", entry["precision"]]
        if entry["kind"] == "task":
            words += ["--tasks", entry["task"]]
            words += ["--data-dir", str(self.wanted.data_dir)] if self.wanted.data_dir is not None else []
            words += ["--limit", str(self.wanted.limit)] if self.wanted.limit is not None else []
            words += ["--batch-size", str(self.wanted.batch_size)]
        elif self.wanted.text is not None:
            words += ["--text", self.wanted.text.source]
            words += ["--window", str(self.window), "--stride", str(self.stride)]
            words += [] if self.wanted.bos else ["--no-bos"]
            words += ["--kv", entry["kv"]] if "kv" in entry else []
            words += ["--divergence"] if entry["kind"] == "divergence" else []
        if self.subject.coding_asked and entry["precision"] != FULL:
            coding = self.subject.coding
            words += ["--group-size", str(coding.group_size), "--reconstruction", coding.reconstruction]
        if self.subject.original is not None and FULL in (entry["precision"], entry.get("reference")):
            words += ["--reference", self.subject.original.model]
        words += ["--revision", self.subject.revision] if self.subject.revision is not None else []
        words += ["--device", self.subject.device] if self.subject.device != "cpu" else []
        command = shlex.join(words)
        command = command if command.isprintable() else ascii(command)
        return command if len(command) <= LONGEST else f"{command[: LONGEST - 1]}…"


class _Readings:
    """Readings of a text, made in their order when what they give is asked for."""

    def __init__(self, subject: Subject, readings: list[Reading], progress: Progress) -> None:
        self._subject, self._left, self._progress = subject, readings, progress
        self._all, self._read = sum(len(reading.windows.ids) for reading in readings), 0  # tokens
        self._told = False  # how long they will take
        self._outcomes: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._reference: KeptStates | None = None

    @property
    def need_full(self) -> bool:
        """Whether the unquantized model is still to be read."""
        return any(reading.precision == FULL for reading in self._left)

    def outcome(self, entry: Entry, at: str) -> dict[str, Any]:
        """What the entry measures."""
        while identity(entry) not in self._outcomes:
            self._make(self._left.pop(0), at)
        return self._outcomes.pop(identity(entry))

    def _make(self, reading: Reading, at: str) -> None:
        windows, started = reading.windows, time.perf_counter()
        reader = self._reader(reading)
        meters = {identity(entry): self._meter(entry, windows) for entry in reading.entries}
        kept = KeptStates() if reading.is_reference else None
        for _ in reader.read(windows.ids[:_WARM_UP], True):
            pass

        def report(done: int, total: int) -> None:
            read, what = self._read + done, at if reading.entries else f"{reading.precision}, to compare with"
            if not self._told:  # a bar knows from the second window on
                left = (time.perf_counter() - started) / read * (self._all - read)
                what, self._told = f"{what}, about {duration(left)} left", True
            self._progress(what, read, self._all)

        every = [*meters.values(), *([kept] if kept else [])]
        seconds = read(reader, windows, every, report, with_logits=bool(meters))
        self._read += len(windows.ids)
        if kept is not None and isinstance(reader, ModelReader):
            kept.finish(reader.sliced)
            self._reference = kept
        for key, meter in meters.items():
            if isinstance(meter, Loss):
                speed = len(windows.ids) / seconds
                self._outcomes[key] = {"value": meter.perplexity, "tokens_per_second": speed}
            else:
                self._outcomes[key] = {"kl": meter.kl, "agreement": meter.agreement}

    def _reader(self, reading: Reading) -> Reader:
        if reading.kv is not None:
            return KvReader(self._subject.packed_at(reading.precision, self._progress), reading.kv)
        comparing = any(entry["kind"] == "divergence" for entry in reading.entries)
        return ModelReader(self._subject.at(reading.precision, self._progress), comparing=comparing)

    def _meter(self, entry: Entry, windows: Windows) -> Loss | Divergence:
        if entry["kind"] == "perplexity":
            return Loss(windows.bos is not None)
        assert self._reference is not None  # its reading is the first
        return Divergence(self._reference)
