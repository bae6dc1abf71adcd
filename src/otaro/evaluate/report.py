"""`otaro report`: one HTML file that shows what runs gave at each precision.

Every figure refers by number to the command that made it; the commands are listed at the end. Quality, size and speed are in
tables as well, and of the analyses what holds for the whole model; what goes step by step, batch by batch or module by module
is only drawn. A section whose data is absent says in a line which command makes it. How the page is put together is in page.py.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from otaro.errors import OtaroError
from otaro.evaluate import charts
from otaro.evaluate.charts import BITS, shown
from otaro.evaluate.comparable import About, Entry, Measured, Series, averages, by_text, otherwise, perplexities, stage_of
from otaro.evaluate.page import Cell, Page, escape, word
from otaro.evaluate.records import FULL
from otaro.evaluate.run_folder import BEFORE, BENCH_SETTINGS, FULL_PASS, NAMES, Run, has_full_pass, is_finite, recipe_of
from otaro.evaluate.samples import Samples
from otaro.file.atomic import write_text
from otaro.file.fits import Fit
from otaro.file.summary import Summary
from otaro.readable import size
from otaro.sefp.precision import PRECISIONS, Precision

_GRADIENT_FIGURES: dict[str, tuple[str, str, Callable[[dict[str, Any]], charts.Spec]]] = {  # by what they show
    "overall": (
        "Similarity of gradients",
        "Cosine between the gradients of all weights at two precisions; 1 is the same direction.",
        charts.similarity,
    ),
    "modules": (
        "Similarity by layer and projection",
        "The same in every layer, between two precisions to choose.",
        charts.similarity_by_module,
    ),
    "norm_error": (
        "Error of the gradient norm",
        "Relative to the gradient of the unquantized model, batch by batch.",
        charts.norm_error,
    ),
    "noise": (
        "Noise left after adding up N batches",
        "Dashed: a fall as 1/√N, as that of independent noise.",
        charts.noise,
    ),
}
_WORDS = ("no", "one", "two", "three", "four", "five", "six")


def write_report(runs: Sequence[Run], samples: Mapping[str, Samples], out: Path) -> None:
    """Write the page. `samples` are by name of the run."""
    if out.is_dir():
        raise OtaroError(f"{out} is a directory; name the file to write, such as {out / 'report.html'}")
    write_text(out, _Report(runs, samples).render())


class _Report:
    def __init__(self, runs: Sequence[Run], samples: Mapping[str, Samples]) -> None:
        self.runs, self.samples, self.page = runs, samples, Page()
        self.names = sorted((run.name for run in runs), key=lambda name: name != BEFORE)  # in every table the first
        self.perplexities = perplexities(runs)
        bits = [_bits(run.summary) for run in runs if run.summary]
        self.bits = bits[0] if bits and all(one == bits[0] for one in bits) else None  # none where runs differ

    def render(self) -> str:
        opening = self._opening()
        sections = [
            ("quality", "Quality", self._quality()),
            ("size", "Size and speed", self._size() + self._fits() + self._speed()),
            ("training", "Training", self._training()),
            ("analyses", "Analyses", self._gradients() + self._weights()),
            ("samples", "Samples", self._samples()),
        ]
        sections.append(("commands", "Commands", self._commands()))  # the last: all others add to it
        return self.page.render(" and ".join(run.name for run in self.runs), opening, sections)

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
        caption = f"Perplexity of {run.name} on {text}, lower is better; size; {BITS}." if after else f"Size; {BITS}."
        return (
            f"{title}<p class=lede>{_lede(run, after, before, series, present)}</p><dl class=tiles>{tiles}</dl>"
            f"<p class=caption>{escape(caption)} {self.page.made_by(commands)}</p>"
        )

    # Quality.

    def _quality(self) -> str:
        parts = [self._perplexity(text, series) for text, series in self.perplexities.items()]
        if not parts:
            parts.append(self._missing("perplexity", "otaro eval {model} --precision all --text FILE"))
        return "".join([*parts, self._tasks(), self._divergence()])

    def _perplexity(self, text: About, series: Sequence[Series]) -> str:
        """How far each is from the best, what the bytes buy, and the figures themselves in a table."""
        commands = [command for one in series for command in one.commands]
        tuned = [one for one in series if one.stage == "after"] or list(series)
        alone = len(tuned) == 1
        points = [
            {"precision": name, "run": one.run, "stage": one.stage, "value": 100 * (value / least - 1)}
            for one in (series if alone else tuned)
            for name, value in one.values.items()
            if math.isfinite(value) and (least := _finest(one) if alone else _best(tuned, name)) is not None
        ]
        above = "its finest precision" if alone else "the best at each precision"
        where = self._short(text)
        title, hint = f"Perplexity on {where}, above {above}", "Lower is better."
        if not alone and len(tuned) < len(series):
            hint += " Before tuning it is far above, and in the table."
        chart = charts.by_precision(points, self.names, f"% above {above}", bits=self.bits, from_zero=True)
        figures = self.page.figure(title, hint, commands, chart, text.what, text.digest)
        if sized := self._by_size(tuned):
            note = "What every megabyte buys: the points of a line are one file, cut at its shards."
            chart = charts.size_curve(sized, self.names)
            figures += self.page.figure(f"Perplexity on {where}, by size", note, commands, chart, text.what)
        rows = [
            [word(shown(name)), *(_perplexity_cell(one.values, name) for one in series)]
            for name in NAMES
            if any(name in one.values for one in series)
        ]
        headings = ["precision", *(one.label for one in series)]
        note = "The small figure is the difference from the finest measured."
        return f"<div class=pair>{figures}</div>" + self.page.table(
            f"Perplexity on {where}, by precision", headings, rows, commands, note
        )

    def _short(self, text: About) -> str:
        """A text without how it was read, where that tells it from the others."""
        name = text.what.partition(" (")[0]
        return name if [other.what.partition(" (")[0] for other in self.perplexities].count(name) == 1 else text.what

    def _by_size(self, series: Sequence[Series]) -> list[charts.Row]:
        sizes = {run.name: _bytes(run.summary) for run in self.runs}
        return [
            {"precision": name, "run": one.run, "megabytes": sizes[one.run][name] / 1e6, "value": value}
            for one in series
            for name, value in one.values.items()
            if name in sizes.get(one.run, {})
        ]

    def _tasks(self) -> str:
        by_task: dict[About, Measured] = {}
        for run in self.runs:
            for entry in run.quality:
                if entry["kind"] == "task":
                    limit = f", first {entry['limit']}" if entry.get("limit") else ""
                    data = f"data: sha256 {entry['data_sha256']}" if entry.get("data_sha256") else ""
                    apart = f", quantized in {told}" if (told := otherwise(run, entry)) else ""
                    measured = by_task.setdefault(About(f"{entry['task']} ({entry['metric']}{limit}{apart})", data), {})
                    measured.setdefault((run.name, entry["precision"]), entry)
        if not by_task:
            return self._missing("task accuracies", "otaro eval {model} --precision all --tasks zeroshot8")
        by_task = {**{About(name): found for name, found in averages(self.runs).items()}, **by_task}
        figures = ""
        for task, measured in by_task.items():
            points = [{**point, "error": measured[point["run"], point["precision"]]["stderr"]}
                      for point in _points(measured, "value")]  # fmt: skip
            chart = charts.by_precision(points, self.names, "score", height=170)
            figures += self.page.figure(task.what, "", _commands(measured), chart, details=task.digest)
        names = [name for name in NAMES if any(name == there for measured in by_task.values() for _, there in measured)]
        rows = [
            [word(task.what), word(run), *(_score_cell(measured.get((run, name), {})) for name in names)]
            for task, measured in by_task.items()
            for run in self.names
            if any(there == run for there, _ in measured)
        ]
        commands = [command for measured in by_task.values() for command in _commands(measured)]
        note = "Higher is better. The small figure is the standard error."
        headings = ["task", "run", *map(shown, names)]
        return f"<div class=grid>{figures}</div>" + self.page.table("Accuracy by task", headings, rows, commands, note)

    def _divergence(self) -> str:
        parts = []
        for text, measured in by_text(self.runs, "divergence").items():
            points = _points(measured, "kl")
            chart = charts.by_precision(points, self.names, "divergence (nats)", bits=self.bits)
            hint = "Kullback-Leibler divergence of the next-token distributions, in nats. Lower is better."
            commands = _commands(measured)
            parts.append(self.page.figure(f"Divergence from {text}", hint, commands, chart, details=text.digest))
            runs = [run for run in self.names if any(there == run for there, _ in measured)]
            names = [name for name in NAMES if any(there == name for _, there in measured)]
            rows = []
            for name in names:
                found = [measured.get((run, name), {}) for run in runs]
                cells = (_cell(one.get("kl"), ".4f", _percent(one.get("agreement"))) for one in found)
                rows.append([word(shown(name)), *cells])
            note = "In nats. The small figure is how often the likeliest token is the same."
            parts.append(self.page.table("Divergence by precision", ["precision", *runs], rows, commands, note))
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
        return "".join(map(self._size_of, alike.values())) or self._missing("sizes", "otaro pack {model} OUT")

    def _size_of(self, runs: Sequence[Run]) -> str:
        summary = runs[0].summary
        assert summary is not None
        sizes = _bytes(summary)
        whole = 2 * (summary.packed_weights + summary.other_parameters)
        bars = [
            {"name": name, "megabytes": count / 1e6, "text": size(count)} for name, count in [("FP16", whole), *sizes.items()]
        ]
        rows = [[word("FP16"), Cell(size(whole), whole), Cell("16.00", 16), Cell("100.0%", 1), word("")]]
        for row in summary.precisions:
            if row.bytes is not None:
                bits, share = _cell(row.bits_per_weight, ".3f"), _cell(row.ratio_to_fp16, ".1%")
                shards = word(", ".join(name.removesuffix(".safetensors") for name in row.shards))
                rows.append([word(row.precision), Cell(size(row.bytes), row.bytes), bits, share, shards])
        commands = [_inspect(run) for run in runs]
        note = (
            "Each precision is a prefix of the next finer one: "
            f"all {_WORDS[len(sizes)]} together take {size(max(sizes.values()))}, "
            f"where separate files would take {size(sum(sizes.values()))}. FP16 is two bytes for every weight. "
            f"Here and elsewhere bits are {BITS}, what is not packed included."
        )
        headings = ["precision", "size", "bits per weight", "of FP16", "shards"]
        return self.page.figure(f"Size of {', '.join(run.name for run in runs)}", note, commands, charts.sizes(bars)) + (
            self.page.table("Size by precision", headings, rows, commands)
        )

    def _fits(self) -> str:
        """What fits lose beside the single precisions that they take the place of, by size."""
        parts = []
        for run in self.runs:
            by_text: dict[str, list[Fit]] = {}
            for fit in sorted(run.fits, key=lambda one: one.bytes):
                by_text.setdefault(fit.about["text"], []).append(fit)
            alone = _bits(run.summary)
            for text, fits in by_text.items():
                points, rows = [], []
                for fit in fits:
                    bits, lost, one, one_lost = (
                        fit.about[key] for key in ("bits_per_weight", "measured", "uniform", "uniform_measured")
                    )
                    points.append({"bits": bits, "name": str(fit), "value": lost, "kind": "fit"})
                    points.append({"bits": alone[one], "name": one, "value": one_lost, "kind": "one precision"})
                    cells = [Cell(size(fit.bytes), fit.bytes), _cell(bits, ".3f"), _cell(lost, ".4f")]
                    rows.append([word(str(fit)), *cells, word(one), _cell(one_lost, ".4f")])
                commands = [fit.about["command"] for fit in fits]
                title = f"Fits of {run.name}: divergence by size, {text}"
                hint = "In nats, from the finest precision, on text that they were not measured on. Lower is better."
                parts.append(self.page.figure(title, hint, commands, charts.by_size(points)))
                headings = ["fit", "size", "bits per weight", "divergence", "instead of", "divergence"]
                parts.append(self.page.table(f"Fits of {run.name}", headings, rows, commands))
        return "".join(parts)

    def _speed(self) -> str:
        """What `otaro bench` timed, those together that were timed alike."""
        alike: dict[tuple[str, str], list[Run]] = {}
        for run in self.runs:
            if (found := run.bench) is not None:
                timed = found["settings"]
                place = f"{found['machine']}, kernels {found['kernels']}, {found['threads']} threads"
                how = f"decode of {timed['tokens']} tokens after {timed['context']}, prefill of {timed['prompt_tokens']}"
                alike.setdefault((place, how), []).append(run)
        parts = []
        for (place, how), runs in alike.items():
            entries = {(run.name, row["precision"]): row for run in runs if run.bench for row in run.bench["precisions"]}
            chart = charts.by_precision(
                _points(entries, "decode"), self.names, "tokens per second", bits=self.bits, from_zero=True
            )
            commands = [_bench_command(run) for run in runs]
            note = f"One sequence, {how}; the median of rounds in turns. Higher is better."
            parts.append(self.page.figure(f"Decode speed on {place}", note, commands, chart))
            headings = ["precision", "run", "decode, tokens/s", "prefill, tokens/s", "read per token", "switch to it"]
            rows = [
                [
                    *(word(name), word(run), _cell(row["decode"], ",.0f"), _cell(row["prefill"], ",.0f")),
                    Cell(size(row["weight_bytes"]), row["weight_bytes"]),
                    Cell("–") if row.get("switch") is None else Cell(f"{row['switch'] * 1e6:,.0f} µs", row["switch"]),
                ]
                for (run, name), row in entries.items()
            ]
            parts.append(self.page.table("Speed by precision", headings, rows, commands))
        return "".join(parts) or self._missing("speed", "otaro bench {model} --json > {run}/bench.json")

    # Training, and what the analyses found.

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
            cells = (Cell(f"{count:,}", count) for count in counts.values())
            rows.append([word(run.name), word(recipe_of(run.tuning)), *cells])
        table = self.page.table("Steps at each precision", headings, rows, [run.command for run in logged], note)
        return "".join(map(self._training_of, logged)) + table

    def _training_of(self, run: Run) -> str:
        made = [run.command]
        lost = sum(not math.isfinite(step.cross_entropy) for step in run.log)
        note = "Of the labels alone, so that precisions compare. Dots are steps, lines are means over stretches of steps."
        if all(step.cross_entropy == step.loss for step in run.log) and (run.tuning or {})["options"].get("distill"):
            note = "This log has no cross-entropy: the loss, at some precisions mixed with divergence. Do not compare."
        note += f" {lost:,} steps without a finite loss are left out." if lost else ""
        figures = self.page.figure(f"Cross-entropy by step, {run.name}", note, made, charts.training(run.log))
        if len({step.precision for step in run.log}) > 1:
            held = sum(not step.applied for step in run.log)
            note = f"The precision of each of {len(run.log):,} steps; the fuller the colour, the larger its share."
            note += " Besides, every step has a pass in full precision." if has_full_pass(run.tuning or {}) else ""
            note += f" Gradients of {held:,} steps were held back and applied later." if held else ""
            figures += self.page.figure(f"Search path, {run.name}", note, made, charts.path(run.log))
        if any(step.scores != run.log[-1].scores for step in run.log if step.scores):
            note = "The precision with the highest score is next."
            figures += self.page.figure(f"Scores of the path search, {run.name}", note, made, charts.scores(run.log))
        return f"<div class=pair>{figures}</div>"

    def _gradients(self) -> str:
        parts = []
        for run in self.runs:
            if (found := run.gradients) is None:
                continue
            made = [str(found.get("command", "otaro analyze gradients"))]
            figures = "".join(
                self.page.figure(f"{title}, {run.name}", note, made, chart(found))
                for key, (title, note, chart) in _GRADIENT_FIGURES.items()
                if found.get(key)
            )
            names = list(map(shown, found["precisions"]))
            rows = [
                [word(name), *(_cell(value, ".4f") for value in line)]
                for name, line in zip(names, found["overall"], strict=True)
            ]
            title = f"Similarity of gradients by precision, {run.name}"
            parts += [f"<div class=pair>{figures}</div>", self.page.table(title, ["precision", *names], rows, made)]
            if fit := found.get("fit"):
                headings = ["precision", "X", "mean of Y", "spread of Y"]
                rows = [
                    [word(shown(name)), _cell(one["x"], ".4f"), _cell(one["y_mean"], ".2e"), _cell(one["y_std"], ".2e")]
                    for name, one in fit.items()
                ]
                note = "The gradient at a precision as X times that of the unquantized model, and the rest Y, over all entries."
                parts.append(self.page.table(f"Fit of the gradients, {run.name}", headings, rows, made, note))
        return "".join(parts) or self._missing("analysis of gradients", "otaro analyze gradients {checkpoint} --text FILE")

    def _weights(self) -> str:
        parts = []
        for run in self.runs:
            if (found := run.weights) is None:
                continue
            overall: dict[str, Any] = found["overall"]
            names = [name for name in NAMES if all(name in figures["error"] for figures in overall.values())]
            rows = [
                [
                    Cell(size, int(size)),
                    *(_cell(figures[key], ".2%") for key in ("outlier_groups", "zeros")),
                    *(_cell(figures["error"][name], ".4f", _percent(figures["lost"].get(name))) for name in names),
                ]
                for size, figures in overall.items()
            ]
            headings = ["group size", "outlier groups", "exact zeros", *map(shown, names)]
            note = (
                "At each precision the root mean square error relative to the weights', and below it the share of weights lost."
            )
            made = [str(found.get("command", "otaro analyze weights"))]
            parts.append(self.page.table(f"Weights by group size, {run.name}", headings, rows, made, note))
        return "".join(parts) or self._missing("analysis of weights", "otaro analyze weights {checkpoint}")

    # Samples, and the commands.

    def _samples(self) -> str:
        if not self.samples:
            return self._missing("samples", "otaro report {run}", " without --no-samples")
        prompts = dict.fromkeys(prompt for one in self.samples.values() for prompt in one.texts)
        note = "The likeliest token at each step. What follows the first difference from the finest precision is marked."
        return f"<p>{note}</p>" + "".join(map(self._samples_of, prompts))

    def _samples_of(self, prompt: str) -> str:
        head = "".join(f"<th scope=col>{escape(run)}</th>" for run in self.samples)
        rows = ""
        for name in map(str, PRECISIONS):
            cells = "".join(f"<td>{self._sample(one, prompt, name)}</td>" for one in self.samples.values())
            rows += f"<tr><th scope=row>{name}</th>{cells}</tr>"
        return (
            f"<div class=scroll><table class=samples><caption><strong>{escape(prompt)} …</strong></caption>"
            f"<thead><tr><th scope=col>precision</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        )

    def _sample(self, samples: Samples, prompt: str, name: str) -> str:
        """A text, with what follows the first difference from the finest precision's marked."""
        texts = samples.texts.get(prompt, {})
        if name not in texts:
            return "–"
        pairs = zip(texts[name], next(iter(texts.values())), strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        marked = f"<mark>{escape(texts[name][same:])}</mark>" if texts[name][same:] else ""
        return f"{escape(texts[name][:same])}{marked} {self.page.made_by([samples.command(prompt, name)])}"

    def _commands(self) -> str:
        tuned = [(run.name, run.tuning["versions"]) for run in self.runs if run.tuning and run.tuning["versions"]]
        told = [f"{name} with {', '.join(f'{k} {v}' for k, v in versions.items())}" for name, versions in tuned]
        used = f"<p class=caption>Tuned: {escape('; '.join(told))}.</p>" if told else ""
        intro = "<p>The numbers beside figures and tables refer to these commands, which made them.</p>"
        return f"{intro}{self.page.list_of_commands()}{used}"

    # What several sections share.

    def _missing(self, what: str, command: str, more: str = "") -> str:
        """A line in place of what is absent."""
        run = self.runs[0]
        places = {"run": run.path, "model": run.nested or run.checkpoint, "checkpoint": run.checkpoint}
        quoted = {name: shlex.quote(str(path)) if path else "MODEL" for name, path in places.items()}
        return f"<p class=missing>No {what} here. <code>{escape(command.format(**quoted))}</code>{more} makes it.</p>"


def _lede(run: Run, after: Series | None, before: Series | None, series: Sequence[Series], present: Sequence[str]) -> str:
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
        sentences.append(f"From {finest} down to {coarsest} perplexity changes by <strong>{cost:+,.1%}</strong>{more}.")
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


def _points(measured: Measured, key: str) -> list[charts.Row]:
    return [
        {"precision": name, "run": run, "stage": stage_of(run), "value": entry[key]} for (run, name), entry in measured.items()
    ]


def _commands(measured: Measured) -> list[str]:
    return [command for entry in measured.values() for command in entry.get("commands", [entry.get("command")])]


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
    return {row.precision: row.bytes for row in summary.precisions if row.bytes is not None} if summary else {}


def _bits(summary: Summary | None) -> dict[str, float]:
    """Of the whole model, what is not packed included."""
    return {row.precision: row.bits_per_weight for row in summary.precisions} if summary else {}


# What numbers look like in tables; a dash stands for one that is not there.


def _number(value: float) -> str:
    """A perplexity: as many digits as are worth reading."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}" if value < 1e7 else f"{value:.1e}"


def _perplexity_cell(values: Mapping[str, float], name: str) -> Cell:
    """With the difference from the finest measured; unquantized weights are the finest."""
    if name not in values:
        return Cell("–")
    finest = next(one for one in NAMES if one in values)
    change = values[name] / values[finest] - 1
    note = f"{change:+,.1%}".replace("-0.0%", "+0.0%") if name != finest and math.isfinite(change) else ""
    return Cell(_number(values[name]), values[name], note)


def _score_cell(entry: Entry) -> Cell:
    """A score and its standard error."""
    error = entry.get("stderr")
    return _cell(entry.get("value"), ".3f", "" if error is None else f"±{error:.3f}")


def _cell(value: float | None, form: str, note: str = "") -> Cell:
    return Cell(f"{value:{form}}", value, note) if is_finite(value) else Cell("–", note=note)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
