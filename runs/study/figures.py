"""The figures of the page, each from the rows that it shows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from otaro.evaluate.plots import STYLE
from otaro.sefp.precision import Precision
from runs.study import plan
from runs.study.plan import BENCHES, BIG, COLUMNS, NAMES, Bench
from runs.study.quantizers import OTHERS
from runs.study.results import Results

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
