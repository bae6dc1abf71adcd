"""The figures of the page, each from the rows that it shows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from otaro.evaluate.plots import STYLE
from otaro.sefp.precision import GROUP_SIZE, Precision
from runs.study import plan
from runs.study.plan import BENCHES, BIG, COLUMNS, FULL, NAMES, Bench
from runs.study.quantizers import OTHERS
from runs.study.results import Results, model_at

COLOURS = {"none": "0.6", "fp": "#c44e52", "uniform": "#dd8452", "bps": "#937860", "otaro": "#8172b3", "best": "#2a9d5c"}
COLOURS |= {"fixed": "#4c8fd0", "int4": "#b8860b"}  # which can be told apart on white and on black
DARK = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#c9d1d9")


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
        for line in [line for line in results.rows(bench, name).values() if "zeroshot" in line][:1]:
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


def bits_figure(results: Results, benches: Sequence[Bench], figure: Any) -> None:
    """Perplexity over bits a weight: one nested model, dedicated ones, int4 QAT, and what others store."""
    figure.set_size_inches(4.6 * len(benches), 3.6)
    for axes, bench in zip(figure.subplots(1, len(benches), squeeze=False)[0], benches, strict=True):
        own = newest(results, bench.name)
        less = 3 / GROUP_SIZE if own.version == 1 else 0.0  # its scales had five bits
        bits = [Precision(name).bits_per_weight() - less for name in NAMES]

        def means(name: str, columns: Sequence[str], measure: str = "perplexity", own: Results = own) -> list[float]:
            found = [own.values(bench.name, model_at(name, column), column, measure) for column in columns]  # noqa: B023
            return [statistics.fmean(values) if values else math.nan for values in found]

        axes.plot(
            bits, means("best", NAMES), marker="o", markersize=4, color=COLOURS["best"], label="one model for all: `best`"
        )
        axes.plot(bits, means("fixed", NAMES), "_", markersize=10, color=COLOURS["fixed"], label="a model of its own for each")
        four = means("int4 QAT", ["E5M3"])
        axes.plot([OTHERS["int4"][0]], four, "D", markersize=5, color=COLOURS["int4"], label="int4 QAT, a model of its own")
        theirs = [name for name in OTHERS if name.startswith("Q")]
        values = means("fp", theirs, "others")
        axes.plot([OTHERS[name][0] for name in theirs], values, "x", color=COLOURS["fp"], label="tuned as usual, rounded")
        for name, value in zip(theirs, values, strict=True):
            if math.isfinite(value):
                axes.annotate(name, (OTHERS[name][0], value), xytext=(4, 3), textcoords="offset points", fontsize=7)
        full = means("fp", [FULL])[0]
        if math.isfinite(full):
            axes.axhline(full, color="0.5", linewidth=0.8, linestyle=":", label="tuned as usual, 16 bits")
        title = bench.name if own.version == results.version else f"{bench.name} (format {own.version}: powers of two)"
        axes.set(title=title, xlabel="bits a weight", ylabel="perplexity on WikiText-2", yscale="log")
        _plain(axes)
        axes.legend(fontsize=7)


def newest(results: Results, bench: str) -> Results:
    """The rows of the present format, or, while it has none of the recipe, those of the one before."""
    return results if results.has(bench, "best") or not results.former().has(bench, "best") else results.former()


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


def draw(draw_on: Callable[[Any], None], *, dark: bool = False) -> str:
    """As SVG, the same for the same numbers; dark: for a page with light letters."""
    import io

    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE | (DARK if dark else {})):
        figure = Figure(layout="constrained")
        figure.patch.set_alpha(0.0 if dark else 1.0)
        draw_on(figure)
        buffer = io.StringIO()
        for axes in figure.axes if dark else ():
            axes.patch.set_alpha(0.0)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def figures(results: Results, *, small: bool) -> dict[str, str]:
    """By file name, each of the models that have rows for it; lambda and N of the one that has them all."""
    benches = [BENCHES[name] for name in (("small",) if small else BIG)]
    asked, searched = ("small, questions", "small, longer") if small else (plan.ALPACA, "stories15M")
    whole = [bench for bench in benches if newest(results, bench.name).has(bench.name, "best")]
    tuned = [bench for bench in benches if results.has(bench.name, "uniform")]
    seen = [bench.model for bench in benches if results.observation(bench.model, "midpoint")]
    drawn: dict[str, Callable[[Any], None] | None] = {
        "task.svg": partial(task_figure, results, tuned) if tuned else None,
        "zero-shot.svg": partial(zero_shot_figure, results, asked) if results.seeds_with(asked, "zeroshot") else None,
        "ablations.svg": partial(ablation_figure, results, searched) if results.has(searched, "otaro, N 1") else None,
        "observations.svg": partial(observation_figure, results, seen) if seen else None,
    }
    made = {name: draw(how) for name, how in drawn.items() if how}
    if whole:
        made |= {f"bits{'-dark' * dark}.svg": draw(partial(bits_figure, results, whole), dark=dark) for dark in (False, True)}
    return made
