"""`otaro report`: one HTML file that shows what runs gave at each precision.

Every figure and every table has a fold with the commands that made it. Quality, size and speed are in tables
as well; what goes step by step, batch by batch or module by module is only drawn. A section whose data is
absent says in a line which command makes it. How the page is put together is in page.py.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from otaro.evaluate import charts
from otaro.evaluate.charts import BITS, shown
from otaro.evaluate.comparable import About, Series, held_out, measured, stage_of
from otaro.evaluate.page import Cell, Page, escape, made_by, table
from otaro.evaluate.records import FULL
from otaro.evaluate.run_folder import (
    BEFORE,
    BENCH_SETTINGS,
    FULL_PASS,
    NAMES,
    Run,
    Step,
    hardly_follows_bits,
    has_full_pass,
    how_tuned,
    is_finite,
    recipe_of,
)
from otaro.file.atomic import write_text
from otaro.file.replace import check_report
from otaro.readable import size
from otaro.sefp.precision import Precision

SMALL = "So small a model is bound by other work than reading weights: speed hardly follows the bits here."
_WORDS = ("no", "one", "two", "three", "four", "five", "six")


def write_report(runs: Sequence[Run], out: Path) -> None:
    """Write the page, where nothing is or an older one."""
    check_report(out)
    write_text(out, _Report(runs).render())


class _Report:
    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs, self.page = runs, Page()
        # in every table the last
        self.names = sorted((run.name for run in runs), key=lambda name: name == BEFORE)
        self.perplexities = {**measured(runs, "perplexity"), **held_out(runs)}

    def render(self) -> str:
        sections = [
            ("quality", "Quality", self._quality()),
            ("size", "Size and speed", self._size() + self._speed()),
            ("training", "Training", self._training()),
            ("gradients", "Gradients", self._gradients()),
        ]
        return self.page.render(_listed(self.names), self._opening(), sections)

    # The opening: what came out, at a glance.

    def _opening(self) -> str:
        """The first run's result: a sentence, and a tile for each precision."""
        run = self.runs[0]
        about = ((t, s) for t, s in self.perplexities.items() if any(one.run == run.name for one in s))
        text, series = next(about, (About(""), []))
        after = next((one for one in series if one.run == run.name and one.stage == stage_of(run.name)), None)
        baselines = [one for one in series if one.stage == "before" and one is not after]
        before = next((one for one in baselines if one.run in (BEFORE, run.name)), None)
        sizes = _bytes(run)
        present = [name for name in NAMES[1:] if name in sizes or (after and name in after.values)]
        if not present:
            return f"<h1>{escape(run.name)}</h1><p class=lede>Nothing has been measured of it yet.</p>"
        title = f"<h1>One model, {_WORDS[len(present)]} precision{'s' * (len(present) > 1)}</h1>"
        tiles = "".join(_tile(name, run, after, before) for name in present)
        commands = [*(after.commands if after else []), *([_inspect(run)] if run.summary else [])]
        told = f"Perplexity of {run.name} on {text.what}, lower is better; size" if after else "Size"
        lede = f"<p class=lede>{_lede(run, after, before, series, present)} {self._ways()}</p>"
        caption = f"<div class=caption>{escape(f'{told}; {BITS}.')} {made_by(commands)}</div>"
        return f"{title}{lede}<dl class=tiles>{tiles}</dl>{caption}"

    def _ways(self) -> str:
        """What the runs are, where there are several."""
        ways = [f"{run.name} was {how_tuned(run.tuning)}" for run in self.runs if run.tuning is not None]
        return escape(f"Here {'; '.join(ways)}.") if len(ways) > 1 else ""

    # Quality.

    def _quality(self) -> str:
        parts = [self._perplexity(text, series) for text, series in self.perplexities.items()]
        if not parts:
            parts.append(self._missing("perplexity", "otaro eval {model} --precision all --text FILE"))
        return "".join([*parts, self._tasks(), self._divergence()])

    def _perplexity(self, text: About, series: Sequence[Series]) -> str:
        """How far each is from the best, what the bytes buy, and the figures themselves in a table."""
        commands = _commands(series)
        tuned = [one for one in series if one.stage == "after"] or list(series)
        alone = len(tuned) == 1
        points = [
            {**point, "value": 100 * (point["value"] / least - 1)}
            for one in (series if alone else tuned)
            for point in _points([one])
            if (least := _finest(one) if alone else _best(tuned, point["precision"])) is not None
        ]
        above = "its finest precision" if alone else "the best at each precision"
        where = self._short(text)
        title, hint = f"Perplexity on {where}, above {above}", "Lower is better."
        if not alone and len(tuned) < len(series):
            hint += " Before tuning it is far above, and in the table."
        chart = charts.by_precision(points, self.names, f"% above {above}", from_zero=True)
        figures = self.page.figure(title, hint, commands, chart, text.what, text.digest)
        sizes = {(run.name, name): count for run in self.runs for name, count in _bytes(run).items()}
        if sized := [
            {**point, "megabytes": sizes[point["run"], point["precision"]] / 1e6}
            for point in _points(tuned)
            if (point["run"], point["precision"]) in sizes
        ]:
            note = "What every megabyte buys: the points of a line are one file, cut at its shards."
            chart = charts.size_curve(sized, self.names)
            figures += self.page.figure(f"Perplexity on {where}, by size", note, commands, chart, text.what)
        note = "The small figure is the difference from the finest measured."
        values = _by_precision(f"Perplexity on {where}, by precision", series, _perplexity_cell, note)
        return f"<div class=pair>{figures}</div>{values}"

    def _short(self, text: About) -> str:
        """A text without how it was read, where that tells it from the others."""
        name, *others = (one.what.partition(" (")[0] for one in (text, *self.perplexities))
        return name if others.count(name) == 1 else text.what

    def _tasks(self) -> str:
        if not (tasks := measured(self.runs, "task")):
            return self._missing("task accuracies", "otaro eval {model} --precision all --tasks zeroshot8")
        figures = ""
        for task, series in tasks.items():
            chart = charts.by_precision(_points(series, errors=True), self.names, "score", height=170)
            figures += self.page.figure(task.what, "", _commands(series), chart, digest=task.digest)
        names = _present(one for series in tasks.values() for one in series)
        rows = [
            [task.what, one.run, *(_cell(one, name, "{:.3f}", "±{:.3f}") for name in names)]
            for task, series in tasks.items()
            for one in series
        ]
        commands = [command for series in tasks.values() for command in _commands(series)]
        note = "Higher is better. The small figure is the standard error."
        headings = ["task", "run", *map(shown, names)]
        scores = table("Accuracy by task", headings, rows, commands, note, words=2)
        return f"<div class=grid>{figures}</div>{scores}"

    def _divergence(self) -> str:
        told = ""
        hint = "Kullback-Leibler divergence of the next-token distributions, in nats. Lower is better."
        note = "In nats. The small figure is how often the likeliest token is the same."
        for text, series in measured(self.runs, "divergence").items():
            chart = charts.by_precision(_points(series), self.names, "divergence (nats)")
            title, made = f"Divergence from {text.what}", _commands(series)
            told += self.page.figure(title, hint, made, chart, digest=text.digest)
            cell = partial(_cell, form="{:.4f}", beside="{:.1%}")
            told += _by_precision("Divergence by precision", series, cell, note)
        reference = "the unquantized model" if self.runs[0].nested is None else "its finest precision"
        command = "otaro eval {model} --precision all --text FILE --divergence"
        return told or self._missing(f"divergence from {reference}", command)

    # Size and speed.

    def _size(self) -> str:
        alike: dict[tuple[tuple[str, int], ...], list[Run]] = {}
        for run in self.runs:
            if run.summary is not None:
                alike.setdefault(tuple(_bytes(run).items()), []).append(run)
        return "".join(map(_sizes, alike.values())) or self._missing("sizes", "otaro pack {model} OUT")

    def _speed(self) -> str:
        """What `otaro bench` timed, those together that were timed alike."""
        alike: dict[tuple[str, str], list[Run]] = {}
        for run in self.runs:
            if (found := run.bench) is not None:
                place = "{machine}, kernels {kernels}, {threads} threads".format(**found)
                how = "decode of {tokens} tokens after {context}, prefill of {prompt_tokens}"
                how = how.format(**found["settings"])
                alike.setdefault((place, how), []).append(run)
        parts = []
        for (place, how), runs in alike.items():
            benches = [(run.name, run.bench["precisions"]) for run in runs if run.bench]
            timed = [(row["precision"], name, row) for name, found in benches for row in found]
            points = [
                {"precision": at, "run": name, "stage": stage_of(name), "value": row["decode"]}
                for at, name, row in timed
            ]
            chart = charts.by_precision(points, self.names, "tokens per second", from_zero=True)
            commands = [_bench_command(run) for run in runs]
            note = f"One sequence, {how}; the median of rounds in turns. Higher is better. "
            shares = [row.get("bandwidth_share", 1.0) for *_, row in timed]
            told = SMALL if hardly_follows_bits((row["weight_bytes"] for *_, row in timed), shares) else ""
            parts.append(self.page.figure(f"Decode speed on {place}", note + told, commands, chart))
            headings = ["precision", "run", "decode, tokens/s", "prefill, tokens/s", "read per token"]
            rows = [
                [at, name, f"{row['decode']:,.0f}", f"{row['prefill']:,.0f}", size(row["weight_bytes"])]
                for at, name, row in timed
            ]
            parts.append(table("Speed by precision", headings, rows, commands, told, words=2))
        return "".join(parts) or self._missing("speed", "otaro bench {model} --json > {run}/bench.json")

    # Training, and what the analysis found.

    def _training(self) -> str:
        logged = [(run, run.tuning) for run in self.runs if run.log and run.tuning is not None]
        if not logged:
            return self._missing("log of a tuning run", "otaro tune MODEL --data FILE --out RUN")
        counted, note = [Counter(step.precision for step in run.log) for run, _ in logged], ""
        for (run, tuning), counts in zip(logged, counted, strict=True):
            if has_full_pass(tuning):
                counts[FULL], note = len(run.log), f"Where full counts every step, each has {FULL_PASS}."
        names = [name for name in NAMES if any(counts[name] for counts in counted)]
        rows = [
            [run.name, recipe_of(tuning), *(f"{counts[name]:,}" for name in names)]
            for (run, tuning), counts in zip(logged, counted, strict=True)
        ]
        headings, commands = ["run", "recipe", *map(shown, names)], [run.command for run, _ in logged]
        steps = table("Steps at each precision", headings, rows, commands, note, words=2)
        logs = [run.log for run, _ in logged]
        figures = [self._losses(run, tuning, logs) for run, tuning in logged]
        figures += [
            self._path(run, tuning) for run, tuning in logged if len({s.precision for s in run.log}) > 1
        ]
        return f"<div class=pair>{''.join(figures)}</div>{steps}"

    def _losses(self, run: Run, tuning: dict[str, Any], logs: Sequence[Sequence[Step]]) -> str:
        title, chart = f"Cross-entropy by step, {run.name}", charts.training(run.log, logs)
        lost = sum(not math.isfinite(step.cross_entropy) for step in run.log)
        note = "Of the labels alone, so that precisions compare. Dots are steps, "
        note += "lines are means over stretches of steps."
        if all(step.cross_entropy == step.loss for step in run.log) and tuning["options"].get("distill"):
            note = "This log has no cross-entropy: the loss, at some precisions mixed with divergence."
            note += " Do not compare."
        note += f" {lost:,} steps without a finite loss are left out." if lost else ""
        return self.page.figure(title, note, [run.command], chart)

    def _path(self, run: Run, tuning: dict[str, Any]) -> str:
        title, held = f"Precision of each step, {run.name}", sum(not step.applied for step in run.log)
        note = f"{len(run.log):,} steps; the fuller the colour, the larger a precision's share."
        note += " Besides, every step has a pass in full precision." * has_full_pass(tuning)
        note += f" Gradients of {held:,} steps were held back and applied later." if held else ""
        return self.page.figure(title, note, [run.command], charts.path(run.log))

    def _gradients(self) -> str:
        told, command = "", "otaro analyze gradients {checkpoint} --text FILE"
        for run in self.runs:
            if (found := run.gradients) is not None:
                made = [str(found.get("command", "otaro analyze gradients"))]
                figures = "".join(
                    self.page.figure(f"{figure.title}, {run.name}", figure.note, made, figure.draw(found))
                    for figure in charts.GRADIENTS
                )
                told += f"<div class=pair>{figures}</div>"
        return told or self._missing("analysis of gradients", command)

    def _missing(self, what: str, command: str) -> str:
        """A line in place of what is absent."""
        run = self.runs[0]
        places = {"run": run.path, "model": run.nested or run.checkpoint, "checkpoint": run.checkpoint}
        quoted = {name: shlex.quote(str(path)) if path else "MODEL" for name, path in places.items()}
        typed = escape(command.format(**quoted))
        return f"<p class=missing>No {what} here. <code>{typed}</code> makes it.</p>"


def _lede(
    run: Run, after: Series | None, before: Series | None, series: Sequence[Series], present: Sequence[str]
) -> str:
    """The result in a sentence or two."""
    finest, coarsest, sizes = present[0], present[-1], _bytes(run)
    sentences = []
    if finest != coarsest and {finest, coarsest} <= sizes.keys():
        sentences.append(
            f"<strong>{escape(run.name)}</strong> takes {size(sizes[finest])} at {finest}, and the first "
            f"{size(sizes[coarsest])} of it are the model at {coarsest}."
        )
    if after and (cost := _cost(after, finest, coarsest)) is not None:
        others = [
            f"{'before tuning' if other is before else escape(other.label)}: {there:+,.1%}"
            for other in series
            if other is not after and (there := _cost(other, finest, coarsest)) is not None
        ]
        changes = f"<strong>{cost:+,.1%}</strong>" + (f" ({'; '.join(others)})" if others else "")
        sentences.append(f"From {finest} down to {coarsest} perplexity changes by {changes}.")
    return " ".join(sentences)


def _cost(series: Series, finest: str, coarsest: str) -> float | None:
    values = series.values
    if finest == coarsest or not {finest, coarsest} <= values.keys():
        return None
    cost = values[coarsest] / values[finest] - 1
    return cost if math.isfinite(cost) else None


def _tile(name: str, run: Run, after: Series | None, before: Series | None) -> str:
    sizes = _bytes(run)
    bits = {row.precision: row.bits_per_weight for row in run.summary.precisions} if run.summary else {}
    lines = [f"<dt>{name}</dt>"]
    if after and name in after.values:
        lines.append(f"<dd class=figure>{_number(after.values[name])}</dd>")
    if name in sizes:
        lines.append(f"<dd>{size(sizes[name])}</dd>")
    if name in bits:
        lines.append(f"<dd>{bits[name]:.2f} bits</dd>")
    if before and name in before.values:
        lines.append(f"<dd>{_number(before.values[name])} before tuning</dd>")
    return f'<div class="tile m{Precision(name).mantissa_bits}">{"".join(lines)}</div>'


def _sizes(runs: Sequence[Run]) -> str:
    """Of runs whose models take the same."""
    summary = runs[0].summary
    assert summary is not None
    sizes = _bytes(runs[0])
    rows = [["FP16", size(2 * (summary.packed_weights + summary.other_parameters)), "16.00", "100.0%"]]
    for row in summary.precisions:
        if row.bytes is not None:
            shares = f"{row.bits_per_weight:.2f}", f"{row.ratio_to_fp16:.1%}"
            rows.append([row.precision, size(row.bytes), *shares])
    note = (
        f"Each precision is a prefix of the next finer one: all {_WORDS[len(sizes)]} together take "
        f"{size(max(sizes.values()))}, where separate files would take {size(sum(sizes.values()))}. FP16 is "
        f"two bytes for every weight. Here and elsewhere bits are {BITS}, what is not packed included."
    )
    title = f"Size of {_listed([run.name for run in runs])}"
    return table(title, ["precision", "size", "bits per weight", "of FP16"], rows, map(_inspect, runs), note)


def _listed(names: Sequence[str]) -> str:
    return " and ".join([*filter(None, [", ".join(names[:-1])]), names[-1]])


def _by_precision(
    title: str, series: Sequence[Series], cell: Callable[[Series, str], Cell], note: str
) -> str:
    """A table with precisions downwards and runs across."""
    rows = [[shown(name), *(cell(one, name) for one in series)] for name in _present(series)]
    return table(title, ["precision", *(one.label for one in series)], rows, _commands(series), note)


def _present(series: Iterable[Series]) -> list[str]:
    found = {name for one in series for name in one.values}
    return [name for name in NAMES if name in found]


def _points(series: Sequence[Series], *, errors: bool = False) -> list[charts.Row]:
    return [
        {"precision": name, "run": one.run, "stage": one.stage, "value": value}
        | ({"error": one.besides[name]} if errors else {})
        for one in series
        for name, value in one.values.items()
        if math.isfinite(value)
    ]


def _commands(series: Sequence[Series]) -> list[str]:
    return [command for one in series for command in one.commands]


def _finest(series: Series) -> float | None:
    return next((series.values[name] for name in NAMES if is_finite(series.values.get(name))), None)


def _best(series: Sequence[Series], name: str) -> float | None:
    return min((one.values[name] for one in series if is_finite(one.values.get(name))), default=None)


def _bench_command(run: Run) -> str:
    assert run.bench is not None
    words = ["otaro", "bench", str(run.nested or run.path)]
    for name in BENCH_SETTINGS:
        words += [f"--{name.replace('_', '-')}", str(run.bench["settings"][name])]
    return shlex.join([*words, "--json"])


def _inspect(run: Run) -> str:
    return shlex.join(["otaro", "inspect", str(run.nested)])


def _bytes(run: Run) -> dict[str, int]:
    rows = run.summary.precisions if run.summary else []
    return {row.precision: row.bytes for row in rows if row.bytes is not None}


# What numbers look like in tables; a dash stands for one that is not there.


def _number(value: float) -> str:
    """A perplexity: as many digits as are worth reading."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}" if value < 1e7 else f"{value:.1e}"


def _perplexity_cell(series: Series, name: str) -> Cell:
    """With the difference from the finest measured; unquantized weights are the finest."""
    values: Mapping[str, float] = series.values
    if name not in values:
        return "–", ""
    finest = next(one for one in NAMES if one in values)
    change = values[name] / values[finest] - 1
    note = f"{change:+,.1%}".replace("-0.0%", "+0.0%") if name != finest and math.isfinite(change) else ""
    return _number(values[name]), note


def _cell(series: Series, name: str, form: str, beside: str) -> Cell:
    """A figure, and what was measured beside it."""
    if name not in series.values:
        return "–", ""
    other = series.besides.get(name)
    return form.format(series.values[name]), "" if other is None else beside.format(other)
