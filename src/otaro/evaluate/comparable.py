"""Which measurements of several runs may stand side by side: those of the same, made in the same way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from otaro.evaluate.charts import shown
from otaro.evaluate.quality import averages, coding_of
from otaro.evaluate.records import FULL
from otaro.evaluate.run_folder import BEFORE, Run

Entry = Mapping[str, Any]


class About(NamedTuple):
    """What was measured, in words, and what a machine knows it by."""

    what: str
    digest: str = ""


@dataclass(frozen=True)
class Series:
    """Figures of one model, by precision."""

    run: str
    """As in the legend: the name of a run, or BEFORE."""
    stage: str
    """before or after tuning; a model that stands for itself is `after`."""
    values: dict[str, float] = field(default_factory=dict)
    besides: dict[str, float | None] = field(default_factory=dict)
    """Of a task the standard errors, of divergences how often tokens agree."""
    commands: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The heading of its column."""
        return f"{self.run}, before" if self.stage == "before" and self.run != BEFORE else self.run

    def add(self, precision: str, value: float, beside: float | None, commands: Iterable[str]) -> None:
        """A measurement, unless there is one."""
        if precision not in self.values:
            self.values[precision], self.besides[precision] = value, beside
            self.commands.extend(commands)


Compared = dict[About, list[Series]]
"""What is comparable goes together."""

_FIGURES = {"perplexity": ("value", ""), "divergence": ("kl", "agreement"), "task": ("value", "stderr")}


def measured(runs: Sequence[Run], kind: str) -> Compared:
    """What `otaro eval` measured of a kind: by text, tokens and windows, or by task, averages first."""
    value, beside = _FIGURES[kind]
    found: dict[About, dict[str, Series]] = {}
    for means in (True, False):
        for run in runs:
            for entry in averages(run.quality) if means else run.quality:
                if entry["kind"] == kind:
                    by_run = found.setdefault(_about(run, entry), {})
                    series = by_run.setdefault(run.name, Series(run.name, stage_of(run.name)))
                    commands = entry.get("commands", [entry["command"]])
                    series.add(entry["precision"], entry[value], entry.get(beside), commands)
    return _before_last({about: list(series.values()) for about, series in found.items()})


def held_out(runs: Sequence[Run]) -> Compared:
    """Perplexities at tuning's own glance at held-out data; runs that began alike share what they had."""
    found: Compared = {}
    for run in runs:
        if run.tuning is not None:
            training = run.tuning["training"]
            begun = ", each with a beginning-of-text token" if run.tuning.get("bos") else ""
            told = f"sequences of {training.get('sequence_length')}{begun}, seed {training.get('seed')}"
            told += f", {run.held_out_tokens:,} tokens" if run.held_out_tokens is not None else ""
            data, apart = _called(run.tuning["data"], "tuning"), training.get("eval_data")
            text = About(f"{_called(apart, 'tuning') if apart else f'data held out of {data}'} ({told})")
            for stage, values in run.held_out.items():
                found.setdefault(text, []).append(Series(run.name, stage, values, {}, [run.command]))
    for text, several in found.items():
        baselines = [one for one in several if one.stage == "before"]
        if baselines and all(one.values == baselines[0].values for one in baselines):
            shared = Series(BEFORE, "before", baselines[0].values, {}, baselines[0].commands)
            found[text] = [*(one for one in several if one.stage == "after"), shared]
    return _before_last(found)


def stage_of(run: str) -> str:
    """Whether a run of this name was measured before or after tuning."""
    return "before" if run == BEFORE else "after"


def _before_last(found: Compared) -> Compared:
    return {about: sorted(series, key=lambda one: one.stage == "before") for about, series in found.items()}


def _called(name: str, part: str) -> str:
    """A text as people read it: `builtin` is another one to tune on than to measure on."""
    return f"the built-in {part} text" if name == "builtin" else name


def _otherwise(run: Run, entry: Entry) -> str:
    """How an entry's weights became codes, in words, where that is not how the run's model does it.

    Runs that were tuned and packed in different ways stand side by side, each as it is; a model that was
    measured in another way than its own is another model, and stands apart.
    """
    coding = coding_of(entry)
    return "" if entry["precision"] == FULL or coding == run.coding else f", quantized in {coding}"


def _about(run: Run, entry: Entry) -> About:
    if entry["kind"] == "task":
        first = f", first {entry['limit']}" if entry.get("limit") else ""
        data = f"data: sha256 {entry['data_sha256']}" if entry.get("data_sha256") else ""
        return About(f"{entry['task']} ({entry['metric']}{first}{_otherwise(run, entry)})", data)
    stride = f", stride {entry['stride']}" if "stride" in entry else ""
    begun = ", each begun with BOS" if entry["bos"] else ", none begun with BOS"
    kept = f", keys and values in {entry['kv']}" if entry.get("kv") else ""
    windows = f"windows of {entry['window']}{stride}{begun}{kept}"
    text = f"{_called(entry['text'], 'test')} ({entry['tokens']:,} tokens, {windows})"
    if entry["kind"] == "divergence":
        text = f"{shown(entry['reference'])} precision on {text}"
    return About(text + _otherwise(run, entry), f"sha256 {entry['text_sha256']}")
