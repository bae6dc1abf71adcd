"""From the results file to the page: tables between its marks, figures beside it. What stands outside the marks is prose.

A mark is `<!-- study: NAME -->`, its end `<!-- /study -->`. A page that does not exist begins with all of them in order.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from otaro.evaluate.plots import STYLE
from otaro.sefp.precision import Precision
from runs.study import plan
from runs.study.plan import BENCHES, FULL, NAMES, Bench
from runs.study.quantizers import OTHERS
from runs.study.work import Result, heldout_score, read

MAIN = ("none", "fp", "fixed", "uniform", "bps", "otaro", "best")
COLUMNS = (FULL, *NAMES)


class Results:
    """Rows of the results file by what they are."""

    def __init__(self, path: Path) -> None:
        self.lines = list({line["key"]: line for line in read(path)}.values())

    def has(self, bench: str, name: str) -> bool:
        """Whether there is such a row, of any seed."""
        return bool(self.rows(bench, name))

    def observation(self, model: str, reconstruction: str) -> Result | None:
        """What `otaro analyze` found."""
        return next(
            (line for line in self.lines if line["bench"] == "observe" and line["name"] == f"{model}, {reconstruction}"), None
        )

    def rows(self, bench: str, name: str) -> dict[int, Result]:
        """By seed; where several rates were tried, the row with the one that held-out text found best."""
        found: dict[int, Result] = {}
        for line in self.lines:
            if line["bench"] == bench and line["name"] == name and "error" not in line and not _former(line):
                before = found.get(line["seed"])
                if before is None or heldout_score(name, line) < heldout_score(name, before):
                    found[line["seed"]] = line
        return found

    def values(
        self, bench: str, name: str, column: str, measure: str = "perplexity", seeds: Collection[int] | None = None
    ) -> list[float]:
        """One number per seed, of all or of those given."""
        rows = self.rows(bench, name)
        found = [rows[seed].get(measure, {}).get(column) for seed in sorted(rows) if seeds is None or seed in seeds]
        return [value for value in found if value is not None]

    def shared(self, bench: str, names: Sequence[str]) -> set[int]:
        """The seeds that all have, of those that have any: what is compared is to be compared at the same ones."""
        found = [set(rows) for name in names if (rows := self.rows(bench, name))]
        return set.intersection(*found) if found else set()

    def cell(self, bench: str, name: str, column: str, seeds: Collection[int] | None = None) -> list[float]:
        """Likewise; `fixed` is each precision's own model."""
        if _is_fixed(name) and column == FULL:
            return []
        return self.values(bench, _model_at(name, column), column, seeds=seeds)

    def source(self, bench: str, names: Sequence[str], seeds: Collection[int] | None = None) -> str:
        """The line under a table of these rows: command, commits, machines, seeds."""
        own = {one for name in names for one in _models_of(name)}
        lines = [line for line in self.lines if line["bench"] == bench and line["name"] in own]
        lines = [line for line in lines if seeds is None or line["seed"] in seeds]
        chosen = f"--only '{bench}:*'"
        command = f"runs/study.sh --small {chosen}" if bench.startswith("small") else f"runs/study.sh --data DIR {chosen}"
        if not lines:
            return "\n*Not measured.*\n"

        def all_of(field: str) -> str:
            return ", ".join(sorted({str(line.get(field)) for line in lines}))

        return (
            f"\n`{command}`; commit {all_of('commit')}; {all_of('machine')}, torch {all_of('torch')}; seeds {all_of('seed')}.\n"
        )


def _former(line: Result) -> bool:
    """Whether it was made at a rate that the plan no longer tries."""
    rates = BENCHES[line["bench"]].rates
    return bool(rates and line["settings"]["rate_of"] and line["lr"] not in rates)


def _models_of(name: str) -> list[str]:
    """`fixed` stands for the dedicated models of all precisions."""
    return [_model_at(name, p) for p in NAMES] if _is_fixed(name) else [name]


def _model_at(name: str, precision: str) -> str:
    return name.replace("fixed", f"fixed:{precision}", 1) if _is_fixed(name) else name


def _is_fixed(name: str) -> bool:
    return name.startswith("fixed") and ":" not in name


def number(values: Sequence[float]) -> str:
    """Mean and, of several, the spread (standard deviation)."""
    if not values:
        return ""
    mean = statistics.fmean(values)
    if mean >= 1e6:
        return f"{mean:.0e}"
    digits = 3 if mean < 100 else 1
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown, without rows that are empty."""
    kept = [row for row in rows if any(row[1:])]
    if not kept:
        return "\n*Not measured.*\n"
    lines = [head, ["---"] * len(head), *kept]
    return "\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


# Tables -------------------------------------------------------------------------------------------------------------------


def task(results: Results, bench: Bench) -> str:
    """Part 1: methods by precision."""
    rows = [[_called(name), *(number(results.cell(bench.name, name, c)) for c in COLUMNS)] for name in MAIN]
    return table(["", *COLUMNS], rows) + _chosen_rates(results, bench, MAIN) + results.source(bench.name, MAIN)


def truncated(results: Results, bench: Bench) -> str:
    """Part 1 with the paper's reconstruction."""
    names = [f"{name}, truncate" for name in MAIN]
    rows = [[_called(name), *(number(results.cell(bench.name, name, c)) for c in COLUMNS)] for name in names]
    return table(["", *COLUMNS], rows) + results.source(bench.name, names)


def against_fixed(results: Results, bench: Bench, measure: str = "perplexity") -> str:
    """By how much one model for all is worse (+, bold) or better (-) than each dedicated one, seeds paired."""
    names = ("best", *plan.candidates(), "uniform", "bps", "otaro")
    rows = [[f"`{name}`", *(_paired(results, bench, name, "fixed", column, measure) for column in NAMES)] for name in names]
    held = [_paired(results, bench, "best", "fixed, held as best", column, measure) for column in NAMES]
    rows.append(["`best` against `fixed:` held as `best`", *held])
    return table(["", *NAMES], rows) + results.source(bench.name, [*names, "fixed", "fixed, held as best"])


def strategies(results: Results, benches: Sequence[Bench]) -> str:
    """What path search adds to uniform sampling, and delayed accumulation to path search, seeds paired."""
    rows = [
        [f"{bench.name}, {text}", f"`{ours}` against `{theirs}`"]
        + [_paired(results, bench, ours, theirs, column, measure) for column in NAMES]
        for ours, theirs in (("bps", "uniform"), ("otaro", "bps"))
        for bench in benches
        for text, measure in (("test", "perplexity"), ("held-out", "heldout"))
    ]
    return table(["", "", *NAMES], [row for row in rows if any(row[2:])]) + "\nRows and commands as above.\n"


def choice(results: Results, bench: Bench) -> str:
    """The same on held-out text, which is what recipes are chosen by."""
    return against_fixed(results, bench, "heldout")


def _paired(results: Results, bench: Bench, name: str, other: str, column: str, measure: str) -> str:
    ours, theirs = (results.rows(bench.name, _model_at(one, column)) for one in (name, other))
    pairs = [
        (ours[seed].get(measure, {}).get(column), theirs[seed].get(measure, {}).get(column))
        for seed in sorted(ours.keys() & theirs.keys())
    ]
    gaps = [100 * (a / b - 1) for a, b in pairs if a and b]
    if not gaps:
        return ""
    spread = f" ± {statistics.stdev(gaps):.2f}" if len(gaps) > 1 else ""
    shown = f"{statistics.fmean(gaps):+.2f}{spread}%"
    return f"**{shown}**" if statistics.fmean(gaps) > 0 else shown


def equal_compute(results: Results, bench: Bench) -> str:
    """Part 1 at equal compute."""
    names = ("best, equal compute", "fixed", "best", "fixed, a sixth")
    rows = [[_called(name), *(number(results.cell(bench.name, name, c)) for c in NAMES)] for name in names]
    for name, other in (names[:2], names[:1:-1]):
        gaps = [_paired(results, bench, name, other, column, "perplexity") for column in NAMES]
        rows.append([f"{_called(name)} against {_called(other)}", *gaps])
    return table(["", *NAMES], rows) + results.source(bench.name, names)


def zero_shot(results: Results, bench: Bench) -> str:
    """Part 2: averages by precision, then tasks."""
    rows = []
    for name in MAIN:
        cells = []
        for column in COLUMNS:
            line = results.rows(bench.name, _model_at(name, column)).get(plan.SEEDS[0], {"zeroshot": {}})
            tasks = line["zeroshot"].get(column)
            cells.append(_average(tasks) if tasks and not (name == "fixed" and column == FULL) else "")
        rows.append([_called(name), *cells])
    text = table(["average of the tasks, %", *COLUMNS], rows)
    for name in ("none", "fp", "best"):
        found: Result = results.rows(bench.name, name).get(plan.SEEDS[0], {"zeroshot": {}})["zeroshot"]
        tasks = list(next(iter(found.values()), {}))
        some = [[task_name, *(_share(found.get(c, {}).get(task_name)) for c in COLUMNS)] for task_name in tasks]
        if some:
            text += table([f"`{name}`, %", *COLUMNS], some)
    return text + results.source(bench.name, MAIN, plan.SEEDS[:1])


def _average(tasks: dict[str, list[float | None]]) -> str:
    errors = [error or 0.0 for _, error in tasks.values()]
    mean = statistics.fmean(share for share, _ in tasks.values() if share is not None)
    return f"{100 * mean:.1f} ± {100 * math.sqrt(sum(e * e for e in errors)) / len(tasks):.1f}"


def _share(found: list[float | None] | None) -> str:
    return "" if not found or found[0] is None else f"{100 * found[0]:.1f} ± {100 * (found[1] or 0.0):.1f}"


def ablations(results: Results, bench: Bench) -> str:
    """Part 3."""
    groups: dict[str, list[str]] = {}
    for group, row in plan.ablations():
        groups.setdefault(group, []).append(row.name)
    bases = {"lambda": ("bps", "otaro"), "delay": ("bps", "otaro"), "reduction": ("otaro",), "ultra-low": ("otaro",)}
    titles = {
        "lambda": "λ (5 is the default)",
        "delay": "N (10 is the default; `bps` does without LAA)",
        "reduction": "sum or mean",
    }
    rows, shown, seeds = [], set[str](), plan.SEEDS[:1]  # variants were made there
    for group, names in groups.items():
        made = [name for name in names if results.has(bench.name, name)]
        if not made:
            continue
        rows.append([f"**{titles.get(group, group)}**", *([""] * 6), " "])
        every = [*bases.get(group, ("best",)), *made]
        shown |= {*every}
        rows += [
            [_called(name), *(number(results.values(bench.name, name, c, seeds=seeds)) for c in COLUMNS)] for name in every
        ]
    return table(["", *COLUMNS], rows) + results.source(bench.name, sorted(shown), seeds)


def optimizers(results: Results, bench: Bench) -> str:
    """Open question 1: every row at every rate, those that failed too."""
    lines = [line for line in results.lines if line["bench"] == bench.name and line["name"].endswith(", SGD")]
    rows = []
    for line in sorted(lines, key=lambda line: (line["lr"], line["name"])):
        shown = [number([v]) if (v := line.get("perplexity", {}).get(c)) else "" for c in COLUMNS]
        failed = [line.get("error", "every loss is infinite or not a number")] + [""] * 6
        rows.append([f"{line['name']}, {line['lr']:g}", *(shown if any(shown) else failed)])
    names, seeds = ("uniform", "bps", "otaro", "otaro, mean"), plan.SEEDS[:1]
    for name in names if lines else ():
        rows.append([f"{name}, AdamW", *(number(results.values(bench.name, name, c, seeds=seeds)) for c in COLUMNS)])
    shown = [*names, *(line["name"] for line in lines)]
    return table(["", *COLUMNS], rows) + results.source(bench.name, shown, seeds)


def paths(results: Results, bench: Bench) -> str:
    """How often the search took each precision, by lambda."""
    rows, names = [], ("bps, lambda 3", "bps, lambda 4", "bps", "bps, lambda 6", "bps, lambda 7", "otaro")
    for name in names:
        taken = [line["path"] for line in results.rows(bench.name, name).values() if "path" in line]
        total = sum(sum(counts.values()) for counts in taken) or 1
        shares = [sum(counts.get(c, 0) for counts in taken) / total for c in NAMES]
        rows.append([name, *(f"{share:.1%}" if taken else "" for share in shares)])
    return table(["share of the steps", *NAMES], rows) + results.source(bench.name, names)


def others(results: Results, bench: Bench) -> str:
    """Part 6: what weights tuned in one way are worth in other formats."""
    tuned = [name for name in ("none", "fp", "best") if results.rows(bench.name, name)]
    if not tuned:
        return table([""], [])
    rows, seeds = [], plan.SEEDS[:1]  # other formats were measured there
    for name, (bits, _) in OTHERS.items():
        rows.append([name, f"{bits:.2f}", *(number(results.values(bench.name, t, name, "others", seeds)) for t in tuned)])
    for name in NAMES:
        bits = Precision(name).bits_per_weight()
        rows.append([name, f"{bits:.2f}", *(number(results.values(bench.name, t, name, seeds=seeds)) for t in tuned)])
    rows.sort(key=lambda row: float(row[1]))
    text = table(["", "bits a weight", *(f"`{name}`" for name in tuned)], rows)
    four = {"int4 QAT": ("int4 QAT, groups of 64", "4.25"), "fixed:E5M3": ("`fixed:E5M3`", "4.08"), "best": ("`best`", "4.08")}
    common = results.shared(bench.name, list(four))
    trained = [[*called, number(results.values(bench.name, name, "E5M3", seeds=common))] for name, called in four.items()]
    shown = ["none", *four, "fp"]
    return text + table(["tuned at four bits", "bits a weight", "perplexity"], trained) + results.source(bench.name, shown)


def observed(results: Results, model: str) -> str:
    """Part 4, from `otaro analyze`."""
    text = ""
    for reconstruction in ("midpoint", "truncate"):
        line = results.observation(model, reconstruction)
        if line is None:
            continue
        rows = []
        for index, name in enumerate(NAMES):
            fit, exponent = line["fit"][name], line["noise"][name]["exponent"]
            cosines = [m["to_fp"][index] for m in line["modules"] if m["to_fp"][index] is not None]
            cells = [name, f"{line['to_fp'][index]:.3f}", f"{min(cosines):.3f}", f"{line['norm_error'][name]:.1%}"]
            cells += [f"{fit['y_share']:.3f}", "" if fit["y_bias"] is None else f"{fit['y_bias']:.2f}"]
            rows.append([*cells, "" if exponent is None else f"N^{exponent:+.2f}"])
        chance = line["settings"]["batches"] ** -0.5
        head = [f"`{reconstruction}`", "cosine with full precision", "worst module", "norm error", "size of Y"]
        head += [f"bias of Y ({chance:.2f}: noise)", "sum of Y over sum of gradients (N^-0.50: noise)"]
        text += table(head, rows)
        shown = ("E5M4", "E5M3")
        sizes = [
            [f"groups of {size}", f"{found['outlier_groups']:.3%}"]
            + [f"{found[kind][p] or 0.0:.1%}" for kind in ("lost", "error") for p in shown]
            for size, found in line["weights"].items()
        ]
        text += table(["", "with an outlier", "lost at E5M4", "at E5M3", "error at E5M4", "at E5M3"], sizes)
        most = ", ".join(f"`{name}` {share:.2%}" for name, share in line["most_outliers"].items())
        text += f"\nMost outliers in groups of 64: {most}.\n"
        text += f"\n`{line['command']}`, and `otaro analyze weights`; commit {line['commit']}; {line['machine']}.\n"
    return text or "\n*Not measured.*\n"


def mixture(results: Results, bench: Bench) -> str:
    """Part 5."""
    rows = [[_called(name), *(number(results.cell(bench.name, name, c)) for c in COLUMNS)] for name in MAIN]
    return table(["", *COLUMNS], rows) + _chosen_rates(results, bench, MAIN) + results.source(bench.name, MAIN)


def _called(name: str) -> str:
    if name.startswith("none"):
        return name.replace("none", "before", 1)
    return f"`fixed:`, {len(NAMES)} models{name.removeprefix('fixed')}" if _is_fixed(name) else f"`{name}`"


def _chosen_rates(results: Results, bench: Bench, names: Sequence[str]) -> str:
    """Which of the rates each method was given."""
    if len(bench.rates) < 2:
        return ""
    every = [own for name in names for own in _models_of(name)]
    chosen = {own: rows[0]["lr"] for own in every if (rows := results.rows(bench.name, own)) and 0 in rows and rows[0]["lr"]}
    told = ", ".join(f"`{own}` {rate:g}" for own, rate in chosen.items())
    return f"\nLearning rates, of {', '.join(f'{rate:g}' for rate in bench.rates)} by held-out text: {told}.\n"


# Figures ------------------------------------------------------------------------------------------------------------------

COLOURS = {"none": "0.6", "fp": "#c44e52", "uniform": "#dd8452", "bps": "#937860", "otaro": "#8172b3", "best": "#2a9d5c"}


def task_figure(results: Results, benches: Sequence[Bench], figure: Any) -> None:
    """Fig. 3 and 7: how much worse than the dedicated model of each precision."""
    figure.set_size_inches(4.6 * len(benches), 3.4)
    for axes, bench in zip(figure.subplots(1, len(benches), squeeze=False)[0], benches, strict=True):
        for name in ("fp", "uniform", "bps", "otaro", "best"):
            gaps = []
            for column in NAMES:
                ours, theirs = results.cell(bench.name, name, column), results.cell(bench.name, "fixed", column)
                gaps.append(100 * (statistics.fmean(ours) / statistics.fmean(theirs) - 1) if ours and theirs else math.nan)
            axes.plot(NAMES, gaps, marker="o", markersize=3, color=COLOURS[name], label=name)
        axes.axhline(0, color="0.3", linewidth=0.8)
        axes.set_yscale("symlog", linthresh=1)
        _plain(axes)
        axes.set(title=bench.name, ylabel="perplexity against the dedicated model, %")
        axes.legend(fontsize=7)


def zero_shot_figure(results: Results, bench: str, figure: Any) -> None:
    """Table 1 as lines."""
    figure.set_size_inches(5.2, 3.4)
    axes = figure.subplots()
    for name in ("none", "fp", "uniform", "bps", "otaro", "best"):
        if line := results.rows(bench, name).get(plan.SEEDS[0]):
            means = [100 * statistics.fmean(share for share, _ in line["zeroshot"][c].values()) for c in COLUMNS]
            called = "before" if name == "none" else name
            axes.plot(COLUMNS, means, marker="o", markersize=3, color=COLOURS[name], label=called)
    axes.set(ylabel="average accuracy, %", title=bench)
    axes.legend(fontsize=7)


def ablation_figure(results: Results, bench: str, figure: Any) -> None:
    """Fig. 8: lambda and N."""
    figure.set_size_inches(9, 3.4)
    left, right = figure.subplots(1, 2)
    for method in ("bps", "otaro"):
        for column, style in (("E5M8", "-"), ("E5M4", "--"), ("E5M3", ":")):
            names = [f"{method}, lambda 3", f"{method}, lambda 4", method, f"{method}, lambda 6", f"{method}, lambda 7"]
            left.plot(
                [3, 4, 5, 6, 7], _means(results, bench, names, column), style, color=COLOURS[method], label=f"{method} {column}"
            )
    for column, style in (("E5M8", "-"), ("E5M4", "--"), ("E5M3", ":")):
        names = ["otaro, N 1", "otaro, N 5", "otaro", "otaro, N 20"]
        right.plot([1, 5, 10, 20], _means(results, bench, names, column), style, color=COLOURS["otaro"], label=column)
    left.set(xlabel="λ", ylabel="perplexity", title=f"{bench}: exploration", yscale="log")
    right.set(xlabel="N", title="delay of ultra-low updates (N = 1: none)", yscale="log")
    left.set_xticks([3, 4, 5, 6, 7])
    right.set_xticks([1, 5, 10, 20])
    _plain(left)
    _plain(right)
    left.legend(fontsize=7)
    right.legend(fontsize=7)


def _plain(axes: Any) -> None:
    """Numbers beside a logarithmic axis as people write them."""
    from matplotlib.ticker import LogLocator, NullLocator

    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.2, 1.4, 1.6, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 9.0)))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")


def _means(results: Results, bench: str, names: Sequence[str], column: str) -> list[float]:
    seeds = results.shared(bench, names)
    found = [results.values(bench, name, column, seeds=seeds) for name in names]
    return [statistics.fmean(values) if values else math.nan for values in found]


def others_figure(results: Results, benches: Sequence[Bench], figure: Any) -> None:
    """Perplexity over bits a weight."""
    figure.set_size_inches(4.6 * len(benches), 3.4)
    for axes, bench in zip(figure.subplots(1, len(benches), squeeze=False)[0], benches, strict=True):
        bits = [Precision(name).bits_per_weight() for name in NAMES]
        seeds = plan.SEEDS[:1]  # other formats were measured there
        ours = [statistics.fmean(results.values(bench.name, "best", name, seeds=seeds) or [math.nan]) for name in NAMES]
        axes.plot(bits, ours, marker="o", markersize=3, color=COLOURS["best"], label="`best`, one nested model")
        for name, (size, _) in OTHERS.items():
            for tuned in ("fp", "best"):
                values = results.values(bench.name, tuned, name, "others", seeds)
                if values:
                    axes.plot([size], [statistics.fmean(values)], "x", color=COLOURS[tuned])
                    axes.annotate(name, (size, statistics.fmean(values)), fontsize=6)
        axes.plot([], [], "x", color=COLOURS["fp"], label="plain tuning, rounded")
        axes.plot([], [], "x", color=COLOURS["best"], label="`best`, rounded")
        axes.set(title=bench.name, xlabel="bits a weight", ylabel="perplexity", yscale="log")
        _plain(axes)
        axes.legend(fontsize=7)


def observation_figure(results: Results, models: Sequence[str], figure: Any) -> None:
    """Fig. 4, the same by layer, and eq. 17."""
    figure.set_size_inches(12, 3.3 * len(models))
    shades = ["#440154", "#414487", "#2a788e", "#22a884", "#7ad151", "#d8b800"]
    for (heat, layers, sums), model in zip(figure.subplots(len(models), 3, squeeze=False), models, strict=True):
        line = results.observation(model, "midpoint")
        if line is None:
            continue
        heat.imshow(line["overall"], vmin=0.5, vmax=1.0)
        for row, values in enumerate(line["overall"]):
            for column, value in enumerate(values):
                heat.text(column, row, f"{value:.2f}", ha="center", va="center", color="w" if value < 0.8 else "k", fontsize=7)
        heat.set_xticks(range(6), NAMES, fontsize=7)
        heat.set_yticks(range(6), NAMES, fontsize=7)
        heat.set_title(f"{model}: cosine of gradients")
        count = 1 + max(module["layer"] or 0 for module in line["modules"])
        for index, name in enumerate(NAMES):
            means = [
                statistics.fmean(m["to_fp"][index] for m in line["modules"] if m["layer"] == layer) for layer in range(count)
            ]
            layers.plot(range(count), means, color=shades[index], label=name)
            noise = line["noise"][name]
            sums.plot(noise["n"], noise["ratio"], color=shades[index], marker="o", markersize=3)
            sums.plot(noise["n"], [noise["ratio"][0] / n**0.5 for n in noise["n"]], ":", color=shades[index], linewidth=0.8)
        layers.set(title="with full precision, by layer", xlabel="layer")
        layers.legend(fontsize=7)
        sums.set(title="|ΣY| / |Σ∇| over N batches (dotted: noise)", xlabel="N", xscale="log", yscale="log")


def draw(draw_on: Callable[[Any], None]) -> str:
    """As SVG, the same for the same numbers."""
    import io

    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(layout="constrained")
        draw_on(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


# The page -----------------------------------------------------------------------------------------------------------------


BIG = ("SmolLM2-135M", "stories15M")


def sections(results: Results, *, small: bool) -> dict[str, Callable[[], str]]:
    """What stands between the marks, by name."""
    benches = [BENCHES[name] for name in (("small",) if small else BIG)]
    longer = [BENCHES["small, longer"]] if small else []
    kinds = {"task": task, "against fixed": against_fixed, "choice": choice}
    kinds |= {"truncate": truncated, "equal compute": equal_compute}
    found: dict[str, Callable[[], str]] = {}
    for kind, make in kinds.items():
        found |= {f"{kind}, {bench.name}": partial(make, results, bench) for bench in benches}
    found |= {f"task, {bench.name}": partial(task, results, bench) for bench in longer}
    found["strategies"] = partial(strategies, results, [*benches, *longer])
    found["zero-shot"] = partial(zero_shot, results, BENCHES["small, questions" if small else plan.ALPACA])
    for kind, make in {"ablations": ablations, "paths": paths}.items():
        found |= {f"{kind}, {bench.name}": partial(make, results, bench) for bench in (*benches, *longer)}
    found |= {f"optimizers, {bench.name}": partial(optimizers, results, bench) for bench in benches}
    found |= {f"observations, {bench.model}": partial(observed, results, bench.model) for bench in benches}
    found["mixture of experts"] = partial(mixture, results, BENCHES["small MoE" if small else "MoE"])
    found |= {f"others, {bench.name}": partial(others, results, bench) for bench in benches}
    return found


def figures(results: Results, *, small: bool) -> dict[str, str]:
    """By file name, each of the models that have rows for it; lambda and N of the one that has them all."""
    benches = [BENCHES[name] for name in (("small",) if small else BIG)]
    asked, searched = ("small, questions", "small, longer") if small else (plan.ALPACA, "stories15M")
    whole = [bench for bench in benches if results.has(bench.name, "best")]
    tuned = [bench for bench in benches if results.has(bench.name, "uniform")]
    seen = [bench.model for bench in benches if results.observation(bench.model, "midpoint")]
    drawn: dict[str, Callable[[Any], None] | None] = {
        "task.svg": partial(task_figure, results, tuned) if tuned else None,
        "zero-shot.svg": partial(zero_shot_figure, results, asked) if results.has(asked, "none") else None,
        "ablations.svg": partial(ablation_figure, results, searched) if results.has(searched, "otaro, N 1") else None,
        "others.svg": partial(others_figure, results, whole) if whole else None,
        "observations.svg": partial(observation_figure, results, seen) if seen else None,
    }
    return {name: draw(how) for name, how in drawn.items() if how}


def fill(page: str, made: dict[str, Callable[[], str]]) -> str:
    """The page with everything between its marks made anew."""

    def replaced(match: re.Match[str]) -> str:
        if match[1] not in made:
            raise SystemExit(f"error: the page has a mark for {match[1]!r}, which is none of: {', '.join(made)}")
        return f"<!-- study: {match[1]} -->\n{made[match[1]]()}\n<!-- /study -->"

    return re.sub(r"<!-- study: (.+?) -->\n.*?<!-- /study -->", replaced, page, flags=re.DOTALL)


def write(results_file: Path, page: Path, *, small: bool) -> list[str]:
    """Write page and figures; the names of the files."""
    results = Results(results_file)
    made = sections(results, small=small)
    if page.is_file():
        text = page.read_text()
    else:
        text = "# Results\n\n" + "\n".join(f"## {name}\n\n<!-- study: {name} -->\n<!-- /study -->\n" for name in made)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(fill(text, made))
    drawn = figures(results, small=small)
    (page.parent / "figures").mkdir(exist_ok=True)
    for name, drawing in drawn.items():
        (page.parent / "figures" / name).write_text(drawing)
    return [str(page), *(str(page.parent / "figures" / name) for name in drawn)]
