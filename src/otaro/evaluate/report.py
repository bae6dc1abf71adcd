"""`otaro report`: one HTML file that shows what runs gave at each precision.

Every figure and every table has a fold with the commands that made it. Quality, size and speed are in tables
as well; what goes step by step, batch by batch or module by module is only drawn. A section whose data is
absent says in a line which command makes it. How the page is put together is in page.py.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from otaro.errors import OtaroError
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
    has_full_pass,
    is_finite,
    recipe_of,
)
from otaro.file.atomic import write_text
from otaro.file.summary import Summary
from otaro.readable import size
from otaro.sefp.precision import Precision

_WORDS = ("no", "one", "two", "three", "four", "five", "six")


def write_report(runs: Sequence[Run], out: Path) -> None:
    """Write the page."""
    if out.is_dir():
        raise OtaroError(f"{out} is a directory; name the file to write, such as {out / 'report.html'}")
    write_text(out, _Report(runs).render())


class _Report:
    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs, self.page = runs, Page()
        # in every table the first
        self.names = sorted((run.name for run in runs), key=lambda name: name != BEFORE)
        self.perplexities = {**measured(runs, "perplexity"), **held_out(runs)}

    def render(self) -> str:
        sections = [
            ("quality", "Quality", self._quality()),
            ("size", "Size and speed", self._size() + self._speed()),
            ("training", "Training", self._training()),
            ("gradients", "Gradients", self._gradients()),
        ]
        return self.page.render(" and ".join(self.names), self._opening(), sections)

    # The opening: what came out, at a glance.

    def _opening(self) -> str:
        """The first run's result: a sentence, and a tile for each precision."""
        run = self.runs[0]
        about = ((t, s) for t, s in self.perplexities.items() if any(one.run == run.name for one in s))
        text, series = next(about, (About(""), []))
        after = next((one for one in series if one.run == run.name and one.stage == stage_of(run.name)), None)
        baselines = [one for one in series if one.stage == "before" and one is not after]
        before = next((one for one in baselines if one.run in (BEFORE, run.name)), None)
        sizes = _bytes(run.summary)
        present = [name for name in NAMES[1:] if name in sizes or (after and name in after.values)]
        if not present:
            return f"<h1>{escape(run.name)}</h1><p class=lede>Nothing has been measured of it yet.</p>"
        title = f"<h1>One model, {_WORDS[len(present)]} precision{'s' * (len(present) > 1)}</h1>"
        tiles = "".join(_tile(name, run, after, before) for name in present)
        commands = [*(after.commands if after else []), *([_inspect(run)] if run.summary else [])]
        caption = (
            f"Perplexity of {run.name} on {text.what}, lower is better; size; {BITS}."
            if after
            else f"Size; {BITS}."
        )
        return (
            f"{title}<p class=lede>{_lede(run, after, before, series, present)}</p><dl "
            f"class=tiles>{tiles}</dl>"
            f"<div class=caption>{escape(caption)} {made_by(commands)}</div>"
        )

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
        sizes = {run.name: _bytes(run.summary) for run in self.runs}
        if sized := [
            {**point, "megabytes": sizes[point["run"]][point["precision"]] / 1e6}
            for point in _points(tuned)
            if point["precision"] in sizes.get(point["run"], {})
        ]:
            note = "What every megabyte buys: the points of a line are one file, cut at its shards."
            chart = charts.size_curve(sized, self.names)
            figures += self.page.figure(f"Perplexity on {where}, by size", note, commands, chart, text.what)
        note = "The small figure is the difference from the finest measured."
        return f"<div class=pair>{figures}</div>" + _by_precision(
            f"Perplexity on {where}, by precision", series, _perplexity_cell, note
        )

    def _short(self, text: About) -> str:
        """A text without how it was read, where that tells it from the others."""
        name = text.what.partition(" (")[0]
        return (
            name
            if [other.what.partition(" (")[0] for other in self.perplexities].count(name) == 1
            else text.what
        )

    def _tasks(self) -> str:
        if not (tasks := measured(self.runs, "task")):
            return self._missing("task accuracies", "otaro eval {model} --precision all --tasks zeroshot8")
        figures = ""
        for task, series in tasks.items():
            chart = charts.by_precision(_points(series, errors=True), self.names, "score", height=170)
            figures += self.page.figure(task.what, "", _commands(series), chart, digest=task.digest)
        names = _present(one for series in tasks.values() for one in series)
        rows = [
            [task.what, one.run, *(_score_cell(one, name) for name in names)]
            for task, series in tasks.items()
            for one in series
        ]
        commands = [command for series in tasks.values() for command in _commands(series)]
        note = "Higher is better. The small figure is the standard error."
        headings = ["task", "run", *map(shown, names)]
        return f"<div class=grid>{figures}</div>" + table(
            "Accuracy by task", headings, rows, commands, note, words=2
        )

    def _divergence(self) -> str:
        parts = []
        for text, series in measured(self.runs, "divergence").items():
            chart = charts.by_precision(_points(series), self.names, "divergence (nats)")
            hint = "Kullback-Leibler divergence of the next-token distributions, in nats. Lower is better."
            parts.append(
                self.page.figure(
                    f"Divergence from {text.what}", hint, _commands(series), chart, digest=text.digest
                )
            )
            note = "In nats. The small figure is how often the likeliest token is the same."
            parts.append(_by_precision("Divergence by precision", series, _divergence_cell, note))
        reference = "the unquantized model" if self.runs[0].nested is None else "its finest precision"
        return "".join(parts) or self._missing(
            f"divergence from {reference}", "otaro eval {model} --precision all --text FILE --divergence"
        )

    # Size and speed.

    def _size(self) -> str:
        alike: dict[tuple[tuple[str, int], ...], list[Run]] = {}
        for run in self.runs:
            if run.summary is not None:
                alike.setdefault(tuple(_bytes(run.summary).items()), []).append(run)
        return "".join(map(_sizes, alike.values())) or self._missing("sizes", "otaro pack {model} OUT")

    def _speed(self) -> str:
        """What `otaro bench` timed, those together that were timed alike."""
        alike: dict[tuple[str, str], list[Run]] = {}
        for run in self.runs:
            if (found := run.bench) is not None:
                timed = found["settings"]
                place = f"{found['machine']}, kernels {found['kernels']}, {found['threads']} threads"
                how = (
                    f"decode of {timed['tokens']} tokens after {timed['context']}, prefill of "
                    f"{timed['prompt_tokens']}"
                )
                alike.setdefault((place, how), []).append(run)
        parts = []
        for (place, how), runs in alike.items():
            timed = [(run.name, row) for run in runs if run.bench for row in run.bench["precisions"]]
            series = [
                Series(
                    run.name,
                    stage_of(run.name),
                    {row["precision"]: row["decode"] for name, row in timed if name == run.name},
                )
                for run in runs
            ]
            chart = charts.by_precision(_points(series), self.names, "tokens per second", from_zero=True)
            commands = [_bench_command(run) for run in runs]
            note = f"One sequence, {how}; the median of rounds in turns. Higher is better."
            parts.append(self.page.figure(f"Decode speed on {place}", note, commands, chart))
            headings = ["precision", "run", "decode, tokens/s", "prefill, tokens/s", "weights per token"]
            rows = [
                [
                    row["precision"],
                    name,
                    f"{row['decode']:,.0f}",
                    f"{row['prefill']:,.0f}",
                    size(row["weight_bytes"]),
                ]
                for name, row in timed
            ]
            parts.append(table("Speed by precision", headings, rows, commands, words=2))
        return "".join(parts) or self._missing("speed", "otaro bench {model} --json > {run}/bench.json")

    # Training, and what the analysis found.

    def _training(self) -> str:
        logged = [run for run in self.runs if run.log]
        if not logged:
            return self._missing("log of a tuning run", "otaro tune MODEL --data FILE --out RUN")
        headings = ["run", "recipe", *map(shown, NAMES)]
        rows, note = [], ""
        for run in logged:
            assert run.tuning is not None  # a log has its config.json
            counts = {name: sum(step.precision == name for step in run.log) for name in NAMES}
            if has_full_pass(run.tuning):
                counts[FULL], note = len(run.log), f"Where full counts every step, each has {FULL_PASS}."
            rows.append([run.name, recipe_of(run.tuning), *(f"{count:,}" for count in counts.values())])
        steps = table(
            "Steps at each precision", headings, rows, [run.command for run in logged], note, words=2
        )
        return "".join(map(self._training_of, logged)) + steps

    def _training_of(self, run: Run) -> str:
        made = [run.command]
        lost = sum(not math.isfinite(step.cross_entropy) for step in run.log)
        note = (
            "Of the labels alone, so that precisions compare. Dots are steps, lines are means over "
            "stretches of steps."
        )
        if all(step.cross_entropy == step.loss for step in run.log) and (run.tuning or {})["options"].get(
            "distill"
        ):
            note = (
                "This log has no cross-entropy: the loss, at some precisions mixed with divergence. Do "
                "not compare."
            )
        note += f" {lost:,} steps without a finite loss are left out." if lost else ""
        figures = self.page.figure(f"Cross-entropy by step, {run.name}", note, made, charts.training(run.log))
        if len({step.precision for step in run.log}) > 1:
            held = sum(not step.applied for step in run.log)
            note = (
                f"The precision of each of {len(run.log):,} steps; the fuller the colour, the larger its "
                "share."
            )
            note += (
                " Besides, every step has a pass in full precision."
                if has_full_pass(run.tuning or {})
                else ""
            )
            note += f" Gradients of {held:,} steps were held back and applied later." if held else ""
            figures += self.page.figure(f"Search path, {run.name}", note, made, charts.path(run.log))
        return f"<div class=pair>{figures}</div>"

    def _gradients(self) -> str:
        parts = []
        for run in self.runs:
            if (found := run.gradients) is not None:
                made = [str(found.get("command", "otaro analyze gradients"))]
                figures = "".join(
                    self.page.figure(f"{figure.title}, {run.name}", figure.note, made, figure.draw(found))
                    for figure in charts.GRADIENTS
                )
                parts.append(f"<div class=pair>{figures}</div>")
        return "".join(parts) or self._missing(
            "analysis of gradients", "otaro analyze gradients {checkpoint} --text FILE"
        )

    def _missing(self, what: str, command: str) -> str:
        """A line in place of what is absent."""
        run = self.runs[0]
        places = {"run": run.path, "model": run.nested or run.checkpoint, "checkpoint": run.checkpoint}
        quoted = {name: shlex.quote(str(path)) if path else "MODEL" for name, path in places.items()}
        return (
            f"<p class=missing>No {what} here. <code>{escape(command.format(**quoted))}</code> makes it.</p>"
        )


def _lede(
    run: Run, after: Series | None, before: Series | None, series: Sequence[Series], present: Sequence[str]
) -> str:
    """The result in a sentence or two."""
    finest, coarsest = present[0], present[-1]
    sizes = _bytes(run.summary)
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
        more = f" ({'; '.join(others)})" if others else ""
        sentences.append(
            f"From {finest} down to {coarsest} perplexity changes by <strong>{cost:+,.1%}</strong>{more}."
        )
    return " ".join(sentences)


def _cost(series: Series, finest: str, coarsest: str) -> float | None:
    values = series.values
    if finest == coarsest or not {finest, coarsest} <= values.keys():
        return None
    cost = values[coarsest] / values[finest] - 1
    return cost if math.isfinite(cost) else None


def _tile(name: str, run: Run, after: Series | None, before: Series | None) -> str:
    sizes, bits = _bytes(run.summary), _bits(run.summary)
    lines = [f"<dt>{name}</dt>"]
    if after and name in after.values:
        lines.append(f"<dd class=figure>{_number(after.values[name])}</dd>")
    if name in sizes:
        lines.append(f"<dd>{size(sizes[name])}</dd>")
    if name in bits:
        lines.append(f"<dd>{bits[name]:.3f} bits</dd>")
    if before and name in before.values:
        lines.append(f"<dd>{_number(before.values[name])} before tuning</dd>")
    return f'<div class="tile m{Precision(name).mantissa_bits}">{"".join(lines)}</div>'


def _sizes(runs: Sequence[Run]) -> str:
    """Of runs whose models take the same."""
    summary = runs[0].summary
    assert summary is not None
    sizes = _bytes(summary)
    rows = [["FP16", size(2 * (summary.packed_weights + summary.other_parameters)), "16.000", "100.0%"]]
    for row in summary.precisions:
        if row.bytes is not None:
            rows.append(
                [row.precision, size(row.bytes), f"{row.bits_per_weight:.3f}", f"{row.ratio_to_fp16:.1%}"]
            )
    note = (
        "Each precision is a prefix of the next finer one: "
        f"all {_WORDS[len(sizes)]} together take {size(max(sizes.values()))}, "
        f"where separate files would take {size(sum(sizes.values()))}. FP16 is two bytes for every weight. "
        f"Here and elsewhere bits are {BITS}, what is not packed included."
    )
    title = f"Size of {', '.join(run.name for run in runs)}"
    return table(title, ["precision", "size", "bits per weight", "of FP16"], rows, map(_inspect, runs), note)


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


def _bytes(summary: Summary | None) -> dict[str, int]:
    return (
        {row.precision: row.bytes for row in summary.precisions if row.bytes is not None} if summary else {}
    )


def _bits(summary: Summary | None) -> dict[str, float]:
    """Of the whole model, what is not packed included."""
    return {row.precision: row.bits_per_weight for row in summary.precisions} if summary else {}


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


def _score_cell(series: Series, name: str) -> Cell:
    """A score and its standard error."""
    error = series.besides.get(name)
    return (
        (f"{series.values[name]:.3f}", "" if error is None else f"±{error:.3f}")
        if name in series.values
        else ("–", "")
    )


def _divergence_cell(series: Series, name: str) -> Cell:
    """With how often the likeliest token is the same."""
    return (
        (f"{series.values[name]:.4f}", f"{series.besides[name]:.1%}") if name in series.values else ("–", "")
    )
