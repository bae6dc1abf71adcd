"""One evaluation: what is to be measured, what of it is in the record already, and the rest, one measurement at a time.

Every measurement is an entry of the quality record (`evaluate.quality`), kept as soon as it is made. So an evaluation that was
interrupted goes on where it stopped, and one that was finished measures nothing. Precision is the outer loop, full precision
first: then the unquantised model can go before the packed one comes, unless divergence needs both.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from otaro.errors import OtaroError
from otaro.evaluate.divergence import divergence
from otaro.evaluate.harness import Tasks
from otaro.evaluate.perplexity import choose_window, perplexity
from otaro.evaluate.progress import Count, Progress
from otaro.evaluate.quality import FULL, LONGEST, Entry, Record, with_coding
from otaro.evaluate.subject import Subject
from otaro.evaluate.text import Text

_WARM_UP = 16  # tokens run before the clock starts: mapped shards are read in, kernels chosen


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


class Evaluation:
    """A subject and what is wanted of it, checked before anything large is loaded."""

    def __init__(self, subject: Subject, wanted: Wanted) -> None:
        self.subject, self.wanted = subject, wanted
        self.window = self.stride = 0
        self._ids = torch.empty(0, dtype=torch.long)
        tokenizer = subject.tokenizer  # refused here where there is none
        if wanted.text is not None:
            self.window = choose_window(subject.config, wanted.window)
            self.stride = wanted.stride or self.window
            if not 0 < self.stride <= self.window:
                raise OtaroError(f"the stride must be between 1 and the window of {self.window} tokens, got {self.stride}")
            self._ids = wanted.text.ids(tokenizer)
            original = subject.original
            if original is not None and not torch.equal(wanted.text.ids(original.tokenizer), self._ids):
                raise OtaroError(f"--reference {original.model} has another tokenizer: it reads {wanted.text.name} otherwise")
        self._tasks = Tasks(wanted.tasks, wanted.data_dir) if wanted.tasks else None
        self.plan = [entry for precision in subject.precisions for entry in self._entries_at(precision)]

    def run(
        self,
        record: Record,
        versions: dict[str, str],
        *,
        again: bool = False,
        progress: Progress = lambda what, done, total: None,
    ) -> list[Entry]:
        """The entries of `plan` with their outcomes; those not found in the record are measured and kept in it one by one.

        `progress` gets what is being measured, and how much of it is done. A measurement that does not come out finite is not
        kept; it is told of, by an exception, when all others have been made.
        """
        overflowed = []
        entries = [None if again else record.find(entry) for entry in self.plan]
        missing = [number for number, entry in enumerate(entries) if entry is None]
        for number in missing:
            if self._tasks is not None and self.plan[number]["kind"] == "task":
                self._tasks.prepare(self.plan[number]["task"])  # data that cannot be had is better missed now than in an hour
        for done, number in enumerate(missing):
            entry = self.plan[number]
            at = f"{entry['precision']} {entry.get('task', entry['kind'])}, {done + 1} of {len(missing)}"
            outcome = self._measure(entry, progress, at)
            if odd := [value for value in outcome.values() if isinstance(value, float) and not isfinite(value)]:
                overflowed.append(f"{at}: comes out as {odd[0]}")
            else:
                circumstances = {"command": self._command(entry), "date": date.today().isoformat(), "versions": versions}
                entries[number] = finished = {**entry, **outcome, **circumstances}
                record.add(finished)
            later = [self.plan[number] for number in missing[done + 1 :]]
            if not any(FULL in (entry["precision"], entry.get("reference")) for entry in later):
                self.subject.release_full()
        if overflowed:
            raise OtaroError(f"the model's outputs overflow ({'; '.join(overflowed)}); everything else has been measured")
        return [entry for entry in entries if entry is not None]

    def _entries_at(self, precision: str) -> Iterator[Entry]:
        """What identifies the measurements at a precision."""
        subject = self.subject
        at = with_coding({"precision": precision, "device": subject.device_name}, subject.coding)
        elsewhere = {"reference_model": subject.original.identity} if subject.original is not None else {}
        if precision == FULL:
            at |= elsewhere
        if (text := self.wanted.text) is not None:
            on_text = {"text": text.name, "text_sha256": text.sha256, "window": self.window, "tokens": len(self._ids)}
            yield {"kind": "perplexity", **at, **on_text, "stride": self.stride}
            if self.wanted.divergence and precision != subject.reference:
                yield {"kind": "divergence", **at, **on_text, "reference": subject.reference, **elsewhere}
        if (tasks := self._tasks) is not None:
            for name in tasks.names:
                data = {"limit": self.wanted.limit, "data_sha256": tasks.data_sha256(name)}
                yield {"kind": "task", **at, "task": name, **data}

    def _measure(self, entry: Entry, progress: Progress, at: str) -> dict[str, Any]:
        def report(done: int, total: int) -> None:
            progress(at, done, total)

        precision = entry["precision"]
        model = self.subject.at(precision, progress)
        if entry["kind"] == "perplexity":
            return self._perplexity(model, report)
        if entry["kind"] == "divergence":
            return self._divergence(model, precision, report)
        assert self._tasks is not None  # or there would be no such entry
        limit, batch_size = self.wanted.limit, self.wanted.batch_size
        score = self._tasks.measure(
            entry["task"], model, self.subject.tokenizer, limit=limit, batch_size=batch_size, progress=report
        )
        return asdict(score)

    def _perplexity(self, model: Any, report: Count) -> dict[str, Any]:
        with torch.inference_mode():
            model(self._ids[:_WARM_UP].unsqueeze(0).to(model.device), use_cache=False)
        started = time.perf_counter()
        value = perplexity(model, self._ids, window=self.window, stride=self.stride, progress=report)
        seconds = time.perf_counter() - started
        return {"value": value, "tokens_per_second": len(self._ids) / seconds}

    def _divergence(self, model: Any, precision: str, report: Count) -> dict[str, Any]:
        def logits_at(precision: str) -> Callable[[torch.Tensor], torch.Tensor]:
            return lambda ids: self.subject.at(precision)(ids, use_cache=False).logits

        ours, theirs = logits_at(precision), logits_at(self.subject.reference)
        measured = divergence(ours, theirs, self._ids.to(model.device), window=self.window, progress=report)
        return {"kl": measured.kl, "agreement": measured.agreement}

    def _command(self, entry: Entry) -> str:
        """What to type to measure this entry alone."""
        words = ["otaro", "eval", self.subject.model, "--precision", entry["precision"]]
        if entry["kind"] == "task":
            words += ["--tasks", entry["task"]]
            words += ["--data-dir", str(self.wanted.data_dir)] if self.wanted.data_dir is not None else []
            words += ["--limit", str(self.wanted.limit)] if self.wanted.limit is not None else []
            words += ["--batch-size", str(self.wanted.batch_size)]
        elif self.wanted.text is not None:
            words += ["--text", self.wanted.text.source, "--window", str(self.window), "--stride", str(self.stride)]
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
