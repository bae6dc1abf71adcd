"""The rows that were made: the file they are kept in, which of them count, and what decides between them."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from runs.study.plan import BENCHES, CALIBRATED, FORMAT, FULL, JUDGED, NAMES, SEEDS, Bench, Job, Row

MOST_LOSS = 50.0  # a perplexity that JSON can hold, and nobody will mind

Result = dict[str, Any]
Seeds = Collection[int] | None


def read(results: Path) -> list[Result]:
    lines = results.read_text().splitlines() if results.is_file() else []
    return [json.loads(line) for line in lines if line.strip()]


def append(results: Path, line: Result) -> None:
    """One write, so that lines of several workers do not mix."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with open(results, "ab", buffering=0) as file:
        file.write((json.dumps(line, allow_nan=False) + "\n").encode())


def finished(lines: Sequence[Result], version: int = FORMAT) -> dict[str, Result]:
    """Lines of a version of the format by key, the last where there are several: others decide nothing."""
    return {line["key"]: line for line in lines if format_of(line) == version}


def is_done(job: Job, done: dict[str, Result]) -> bool:
    """Whether the results hold it, made with the settings that the plan now has, at the rate now chosen.

    More may have been measured than it asks.
    """
    if job.key not in done:
        return False
    line = done[job.key]
    if isinstance(job, Row) and job.lr is None and job.options and line.get("lr") != chosen_rate(job, done):
        return False
    asked, made = json.loads(json.dumps(job.settings())), line["settings"]
    for name in ("measured", "measures"):
        if not set(asked.pop(name, ())) <= set(made.get(name, ())):
            return False
    return all(made.get(name) == wanted for name, wanted in asked.items())


def chosen_rate(row: Row, done: dict[str, Result]) -> float | None:
    """The learning rate of a row; None while the rows that decide it are not all there."""
    if row.options is None:
        return 0.0
    if row.lr is not None:
        return row.lr
    rates = BENCHES[row.bench].rates
    start = f"{row.bench}: {row.rate_of}, lr "
    tried = [done.get(f"{start}{rate:g}, seed {SEEDS[0]}") for rate in rates]
    if any(line is None for line in tried):
        return None
    return min(zip(rates, tried, strict=True), key=lambda pair: heldout_score(row.rate_of, pair[1] or {}))[0]


def heldout_score(method: str, line: Result) -> float:
    """What a row is judged by: log perplexity on held-out text, at its own precision or over all six."""
    measured = line.get("heldout", {})
    own = "E5M3" if method.startswith("int4") else method.removeprefix("fixed:").partition(",")[0]
    names = [own] if own in NAMES else [FULL] if method == "fp" else list(NAMES)
    values = [measured.get(name) for name in names]
    return sum(math.log(value) if value else MOST_LOSS for value in values) / len(values)


class Made:
    """The rows of a bench that were made."""

    def __init__(self, bench: Bench, lines: Iterable[Result]) -> None:
        self.bench = bench
        self.lines = [line for line in lines if line["bench"] == bench.name]

    def rows(self, name: str) -> dict[int, Result]:
        """By seed; where several rates were tried, the row with the one that held-out text found best.

        A name with `JUDGED` is how its runs end: where one was also packed on its text, the better packing.
        """
        if name.endswith(JUDGED):
            own = name.removesuffix(JUDGED)
            packed = self.rows(own + CALIBRATED)
            return self.rows(own) | {seed: _better_packing(line) for seed, line in packed.items()}
        found: dict[int, Result] = {}
        for line in self.lines:
            if line["name"] == name and "error" not in line and not self._at_former_rate(line):
                before = found.get(line["seed"])
                if before is None or heldout_score(name, line) < heldout_score(name, before):
                    found[line["seed"]] = line
        return found

    def _at_former_rate(self, line: Result) -> bool:
        """Whether it was made at a rate that the plan no longer tries."""
        swept = line.get("settings", {}).get("rate_of")
        return bool(swept and format_of(line) == FORMAT and line["lr"] not in self.bench.rates)

    def by_seed(self, name: str, column: str, measure: str) -> dict[int, float]:
        """In the order of seeds; `fixed` is each precision's own model."""
        rows = sorted(self.rows(model_at(name, column)).items())
        found = {seed: row.get(measure, {}).get(column) for seed, row in rows}
        return {seed: value for seed, value in found.items() if value is not None}

    def values(self, name: str, column: str, measure: str = "perplexity", seeds: Seeds = None) -> list[float]:
        """One number per seed, of all or of those given."""
        found = self.by_seed(name, column, measure)
        return [found[seed] for seed in found if seeds is None or seed in seeds]

    def shared(self, names: Sequence[str]) -> set[int]:
        """The seeds that all have, of those that have any: what is compared is compared at the same ones."""
        found = [set(rows) for name in names if (rows := self.rows(name))]
        return set.intersection(*found) if found else set()

    def seeds_with(self, measure: str) -> list[int]:
        """The seeds at which it was measured beside perplexities."""
        return sorted({line["seed"] for line in self.lines if line.get("lr") and measure in line})

    def source(self, names: Sequence[str], seeds: Seeds = None) -> str:
        """The line under a table of these rows: command, commits, machines, seeds."""
        own = {one for name in names for one in models_of(name)}
        lines = [line for line in self.lines if line["name"] in own]
        lines = [line for line in lines if seeds is None or line["seed"] in seeds]
        command = f"runs/study.sh --data DIR --only '{self.bench.name}:*'"
        if not lines:
            return f"\n`{command}`\n"

        def all_of(field: str) -> str:
            return ", ".join(sorted({str(line.get(field)) for line in lines}))

        made = f"commit {all_of('commit')}; {all_of('machine')}, torch {all_of('torch')}"
        return f"\n`{command}`; {made}; seeds {all_of('seed')}.\n"


def format_of(line: Result) -> int:
    """Whose numbers a row has; of what has no settings, such as a count, the present one."""
    return int(line["settings"].get("format", 1)) if "settings" in line else FORMAT


def _better_packing(line: Result) -> Result:
    """A row that was packed in both ways, with the numbers of the one that held-out text prefers."""
    plain = line | line["plain"]
    return min(plain, line, key=lambda one: heldout_score("", one))


def models_of(name: str) -> list[str]:
    """`fixed` stands for dedicated models of all precisions, what is judged for what it is chosen from."""
    if name.endswith(JUDGED):
        return [name.removesuffix(JUDGED) + end for end in ("", CALIBRATED)]
    return [model_at(name, p) for p in NAMES] if is_fixed(name) else [name]


def model_at(name: str, precision: str) -> str:
    """Which of them is measured at a precision."""
    return name.replace("fixed", f"fixed:{precision}", 1) if is_fixed(name) else name


def is_fixed(name: str) -> bool:
    return name.startswith("fixed") and ":" not in name
