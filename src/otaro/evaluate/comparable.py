"""Which measurements of several runs may stand side by side in one figure: those of the same thing, made in the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from otaro.evaluate.charts import shown
from otaro.evaluate.quality import coding_of, comparable_tasks, task_averages
from otaro.evaluate.records import FULL
from otaro.evaluate.run_folder import BEFORE, Run

Entry = Mapping[str, Any]


class About(NamedTuple):
    """What was measured, in words, and what a machine knows it by."""

    what: str
    digest: str = ""

    def __str__(self) -> str:
        return self.what


Measured = dict[tuple[str, str], Entry]
"""Entries of quality.json by run and precision."""


@dataclass(frozen=True)
class Series:
    """Perplexities of one model on one text."""

    run: str
    """As in the legend: the name of a run, or BEFORE."""
    stage: str
    """before or after tuning; a model that stands for itself is `after`."""
    values: dict[str, float]
    commands: list[str]

    @property
    def label(self) -> str:
        """The heading of its column."""
        return f"{self.run}, before" if self.stage == "before" and self.run != BEFORE else self.run


def perplexities(runs: Sequence[Run]) -> dict[About, list[Series]]:
    """What is comparable goes together: by text, its number of tokens, and the windows it was read in.

    First what `otaro eval` measured, of the packed model mostly; then the tuning's own glance at held-out data. Of either,
    models before tuning come first.
    """
    measured: dict[About, list[Series]] = {}
    for text, entries in by_text(runs, "perplexity").items():
        for run in runs:
            if own := {name: entry for (there, name), entry in entries.items() if there == run.name}:
                values = {name: entry["value"] for name, entry in own.items()}
                commands = [entry["command"] for entry in own.values()]
                measured.setdefault(text, []).append(Series(run.name, stage_of(run.name), values, commands))
    found = {**measured, **_held_out(runs)}
    return {text: sorted(series, key=lambda one: one.stage != "before") for text, series in found.items()}


def _held_out(runs: Sequence[Run]) -> dict[About, list[Series]]:
    found: dict[About, list[Series]] = {}
    for run in runs:
        if run.tuning is not None:
            training = run.tuning["training"]
            begun = ", each with a beginning-of-text token" if run.tuning.get("bos") else ""
            told = f"sequences of {training.get('sequence_length')}{begun}, seed {training.get('seed')}"
            told += f", {run.held_out_tokens:,} tokens" if run.held_out_tokens is not None else ""
            for stage, values in run.held_out.items():
                series = Series(run.name, stage, values, [run.command])
                other = training.get("eval_data")
                text = About(f"{other or 'data held out of ' + run.tuning['data']} ({told})")
                found.setdefault(text, []).append(series)
    for text, several in found.items():
        baselines = [one for one in several if one.stage == "before"]
        if baselines and all(one.values == baselines[0].values for one in baselines):
            shared = Series(BEFORE, "before", baselines[0].values, baselines[0].commands)
            found[text] = [shared, *(one for one in several if one.stage == "after")]
    return found


def stage_of(run: str) -> str:
    """Whether a run of this name was measured before or after tuning."""
    return "before" if run == BEFORE else "after"


def otherwise(run: Run, entry: Entry) -> str:
    """How an entry's weights became codes, in words, where that is not how the run's model does it.

    Runs that were tuned and packed in different ways stand side by side, each as it is; a model that was measured in another
    way than its own is another model, and stands apart.
    """
    coding = coding_of(entry)
    return "" if entry["precision"] == FULL or coding == run.coding else f"{coding or 'an unknown coding'}"


def by_text(runs: Sequence[Run], kind: str) -> dict[About, Measured]:
    """Entries of one kind, by the text and the windows they were measured on, the first of each."""
    found: dict[About, Measured] = {}
    for run in runs:
        for entry in run.quality:
            if entry["kind"] == kind:
                stride = f", stride {entry['stride']}" if "stride" in entry else ""
                begun = {None: "", True: ", each begun with BOS", False: ", none begun with BOS"}[entry.get("bos")]
                kept = f", keys and values in {entry['kv']}" if entry.get("kv") else ""
                windows = f"windows of {entry['window']}{stride}{begun}{kept}"
                text = f"{entry['text']} ({entry['tokens']:,} tokens, {windows})"
                if kind == "divergence":
                    text = f"{shown(entry['reference'])} precision on {text}"
                if apart := otherwise(run, entry):
                    text += f", quantized in {apart}"
                about = About(text, f"sha256 {entry['text_sha256']}" if "text_sha256" in entry else "")
                found.setdefault(about, {}).setdefault((run.name, entry["precision"]), entry)
    return found


def averages(runs: Sequence[Run]) -> dict[str, Measured]:
    """Averages over tasks, those over the same tasks with the same data together."""
    found: dict[tuple[Any, ...], Measured] = {}
    for run in runs:
        for common, entries in comparable_tasks(run.quality).items():
            limit, apart = common.limit, max(otherwise(run, entry) for entry in entries)
            for precision, average in task_averages(entries).items():
                own = [entry for entry in entries if entry["precision"] == precision and entry["task"] in average.tasks]
                data = frozenset((entry["task"], entry.get("data_sha256")) for entry in own)
                about = {"value": average.value, "stderr": average.stderr, "commands": [entry["command"] for entry in own]}
                found.setdefault((average.name, limit, apart, data), {}).setdefault((run.name, precision), about)
    labelled: dict[str, Measured] = {}
    for (name, limit, apart, _), measured in found.items():
        label = f"{name}, first {limit}" if limit else name
        label += f", quantized in {apart}" if apart else ""
        while label in labelled:
            label += ", other tasks or data"
        labelled[label] = measured
    return labelled
