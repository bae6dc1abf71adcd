"""The figures of the page, each from the rows that it shows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from otaro.evaluate.charts import Row, altair, of_rows, precision_colour, svg, with_numbers
from otaro.sefp.precision import GROUP_SIZE, Precision
from runs.study import plan
from runs.study.plan import BENCHES, BIG, COLUMNS, FULL, NAMES, Bench
from runs.study.quantizers import OTHERS
from runs.study.results import Results, model_at

COLOURS = {"before": "var(--before)", "fp": "var(--run-2)", "uniform": "var(--run-5)", "bps": "var(--run-6)"}
COLOURS |= {"otaro": "var(--run-4)", "best": "var(--run-1)"}
ONE, OWN, INT4 = "one file for all six, tuned once", "six models, one for each", "int4 QAT, a model of its own"
ROUNDED, WHOLE = "tuned as usual, rounded", "tuned as usual, 16 bits"
SERIES = {ONE: "var(--run-1)", OWN: "var(--run-3)", INT4: "var(--run-5)", ROUNDED: "var(--run-2)", WHOLE: "var(--before)"}

_chart = partial(of_rows, width=340)


def task_figure(results: Results, benches: Sequence[Bench]) -> Any:
    """Fig. 3 and 7: how much worse than the dedicated model of each precision."""
    alt = altair()
    panels = []
    for bench in benches:
        rows = []
        for name in ("fp", "uniform", "bps", "otaro", "best"):
            for column in NAMES:
                ours, theirs = results.cell(bench.name, name, column), results.cell(bench.name, "fixed", column)
                if ours and theirs:
                    gap = 100 * (statistics.fmean(ours) / statistics.fmean(theirs) - 1)
                    rows.append({"method": name, "precision": column, "value": gap})
        scale = alt.Scale(type="symlog", constant=1)
        panels.append(_by_precision(rows, bench.name, "% above the dedicated model", scale, NAMES))
    return alt.hconcat(*panels)


def zero_shot_figure(results: Results, bench: str) -> Any:
    """Table 1 as lines."""
    rows = []
    for name in ("none", "fp", "uniform", "bps", "otaro", "best"):
        for line in [line for line in results.rows(bench, name).values() if "zeroshot" in line][:1]:
            for column in COLUMNS:
                mean = 100 * statistics.fmean(share for share, _ in line["zeroshot"][column].values())
                rows.append({"method": "before" if name == "none" else name, "precision": column, "value": mean})
    return _by_precision(rows, bench, "average accuracy, %", altair().Scale(zero=False), COLUMNS)


def ablation_figure(results: Results, bench: str) -> Any:
    """Fig. 8: lambda and N."""
    alt = altair()
    strokes = alt.Legend(title=None, symbolType="stroke")

    def panel(title: str, x: str, wanted: Sequence[tuple[str, dict[int, str]]]) -> Any:
        rows = [
            {"method": method, "x": number, "precision": column, "value": value}
            for method, names in wanted
            for column in ("E5M8", "E5M4", "E5M3")
            for number, value in zip(names, _means(results, bench, list(names.values()), column), strict=True)
            if math.isfinite(value)
        ]
        return _chart(rows, title).mark_line(point=True).encode(
            x=alt.X("x:Q", title=x, axis=alt.Axis(values=list(wanted[0][1]))),
            y=alt.Y("value:Q", title="perplexity", scale=alt.Scale(type="log", nice=False, padding=10)),
            color=_method_colour(alt, rows),
            strokeDash=alt.StrokeDash("precision:N", sort=["E5M8", "E5M4", "E5M3"], legend=strokes),
        )  # fmt: skip

    lambdas = {n: f", lambda {n}" if n != 5 else "" for n in (3, 4, 5, 6, 7)}
    tried = [(method, {n: f"{method}{name}" for n, name in lambdas.items()}) for method in ("bps", "otaro")]
    delays = {n: "otaro" if n == 10 else f"otaro, N {n}" for n in (1, 5, 10, 20)}
    left = panel(f"{bench}: exploration", "λ", tried)
    return alt.hconcat(left, panel("Delay of ultra-low updates (N = 1: none)", "N", [("otaro", delays)]))


def _means(results: Results, bench: str, names: Sequence[str], column: str) -> list[float]:
    seeds = results.shared(bench, names)
    found = [results.values(bench, name, column, seeds=seeds) for name in names]
    return [statistics.fmean(values) if values else math.nan for values in found]


def bits_figure(results: Results, benches: Sequence[Bench]) -> Any:
    """Perplexity over bits a weight: one nested model, dedicated ones, int4 QAT, and what others store."""
    alt = altair()
    panels = []
    for bench in benches:
        own = newest(results, bench.name)
        less = 3 / GROUP_SIZE if own.version == 1 else 0.0  # its scales had five bits
        rows: list[Row] = []

        def add(series: str, name: str, columns: Sequence[str], bits: Any, measure: str = "perplexity") -> None:
            for column in columns:
                found = own.values(bench.name, model_at(name, column), column, measure)  # noqa: B023
                if found:
                    at = {"series": series, "bits": bits(column), "value": statistics.fmean(found)}
                    rows.append({**at, "label": column if measure == "others" else ""})  # noqa: B023

        for series, name in ((ONE, "best"), (OWN, "fixed")):
            add(series, name, NAMES, lambda column: Precision(column).bits_per_weight() - less)  # noqa: B023
        add(INT4, "int4 QAT", ["E5M3"], lambda _: OTHERS["int4"][0])
        add(ROUNDED, "fp", [name for name in OTHERS if name.startswith("Q")], lambda column: OTHERS[column][0], "others")
        add(WHOLE, "fp", [FULL], lambda _: 16)
        title = bench.name if own.version == results.version else f"{bench.name} (format {own.version}: powers of two)"
        scale = alt.Scale(domain=list(SERIES), range=list(SERIES.values()))
        shapes = {ONE: "circle", OWN: "stroke", INT4: "diamond", ROUNDED: "cross", WHOLE: "stroke"}
        legend = alt.Legend(title=None, orient="top", columns=3, labelLimit=0, columnPadding=40)
        base = _chart([row for row in rows if row["series"] != WHOLE], title).encode(
            x=alt.X("bits:Q", title="bits a weight", scale=alt.Scale(zero=False)),
            y=alt.Y("value:Q", title="perplexity on WikiText-2", scale=alt.Scale(type="log", nice=False, padding=10)),
            color=alt.Color("series:N", scale=scale, legend=legend),
        )
        shape = alt.Shape(
            "series:N", scale=alt.Scale(domain=list(SERIES), range=[shapes[name] for name in SERIES]), legend=legend
        )
        layers = [
            base.transform_filter({"field": "series", "equal": ONE}).mark_line(),
            base.mark_point(size=70, filled=False, strokeWidth=2, opacity=1).encode(shape=shape),
            base.mark_text(align="left", dx=6, dy=-6, fontSize=10).encode(text="label:N"),
        ]
        rule = _chart([row for row in rows if row["series"] == WHOLE]).mark_rule(strokeDash=[2, 3])
        layers.append(rule.encode(y="value:Q", color=alt.Color("series:N", scale=scale)))
        panels.append(alt.layer(*layers).properties(width=340, height=240, title=title))
    return alt.hconcat(*panels)


def newest(results: Results, bench: str) -> Results:
    """The rows of the present format, or, while it has none of the recipe, those of the one before."""
    return results if results.has(bench, "best") or not results.former().has(bench, "best") else results.former()


def observation_figure(results: Results, models: Sequence[str]) -> Any:
    """Fig. 4, the same by layer, and eq. 17."""
    alt = altair()
    colour, lines = precision_colour(alt, set(NAMES)), []
    for model in models:
        line = results.observation(model, "midpoint")
        if line is None:
            continue
        rows = [
            {"one": NAMES[i], "other": NAMES[j], "value": value}
            for j, values in enumerate(line["overall"])
            for i, value in enumerate(values)
        ]
        base = _chart(rows, f"{model}: cosine of gradients").encode(
            x=alt.X("one:N", sort=NAMES, title=None), y=alt.Y("other:N", sort=NAMES, title=None)
        )
        heat = alt.layer(*with_numbers(base, 0.5, legend=False))
        count = 1 + max(module["layer"] or 0 for module in line["modules"])
        means = [
            {"precision": name, "layer": layer, "value": statistics.fmean(of_layer)}
            for index, name in enumerate(NAMES)
            for layer in range(count)
            if (of_layer := [module["to_fp"][index] for module in line["modules"] if module["layer"] == layer])
        ]
        layers = _chart(means, "with full precision, by layer").mark_line().encode(
            x=alt.X("layer:Q"), y=alt.Y("value:Q", title=None, scale=alt.Scale(zero=False)), color=colour
        )  # fmt: skip
        sums = [
            {"precision": name, "n": n, "ratio": ratio, "noise": noise["ratio"][0] / n**0.5}
            for name, noise in line["noise"].items()
            for n, ratio in zip(noise["n"], noise["ratio"], strict=True)
            if ratio > 0
        ]
        summed = _chart(sums, "|ΣY| / |Σ∇| over N batches (dashed: noise)").encode(
            x=alt.X("n:Q", title="N", scale=alt.Scale(type="log", base=2)), color=colour
        )
        log = alt.Scale(type="log")
        both = alt.layer(
            summed.mark_line(point=True).encode(y=alt.Y("ratio:Q", title=None, scale=log)),
            summed.mark_line(strokeDash=[3, 3], opacity=0.6).encode(y=alt.Y("noise:Q", title=None, scale=log)),
        )
        lines.append(alt.hconcat(heat, layers, both).resolve_scale(color="independent"))
    return alt.vconcat(*lines)


def _by_precision(rows: Sequence[Row], title: str, y: str, scale: Any, columns: Sequence[str]) -> Any:
    alt = altair()
    return _chart(rows, title).mark_line(point=True).encode(
        x=alt.X("precision:N", sort=list(columns), title=None, axis=alt.Axis(labelAngle=0)),
        y=alt.Y("value:Q", title=y, scale=scale),
        color=_method_colour(alt, rows),
    )  # fmt: skip


def _method_colour(alt: Any, rows: Sequence[Row]) -> Any:
    scale = alt.Scale(domain=list(COLOURS), range=list(COLOURS.values()))
    present = [name for name in COLOURS if any(row["method"] == name for row in rows)]
    return alt.Color("method:N", scale=scale, legend=alt.Legend(title=None, orient="top", values=present))


def figures(results: Results, *, small: bool) -> dict[str, str]:
    """By file name, each of the models that have rows for it; lambda and N of the one that has them all."""
    benches = [BENCHES[name] for name in (("small",) if small else BIG)]
    asked, searched = ("small, questions", "small, longer") if small else (plan.ALPACA, "stories15M")
    whole = [bench for bench in benches if newest(results, bench.name).has(bench.name, "best")]
    tuned = [bench for bench in benches if results.has(bench.name, "uniform")]
    seen = [bench.model for bench in benches if results.observation(bench.model, "midpoint")]
    drawn: dict[str, Callable[[], Any] | None] = {
        "task.svg": partial(task_figure, results, tuned) if tuned else None,
        "zero-shot.svg": partial(zero_shot_figure, results, asked) if results.seeds_with(asked, "zeroshot") else None,
        "ablations.svg": partial(ablation_figure, results, searched) if results.has(searched, "otaro, N 1") else None,
        "observations.svg": partial(observation_figure, results, seen) if seen else None,
    }
    made = {name: svg(how().to_dict()) for name, how in drawn.items() if how}
    if whole:
        spec = bits_figure(results, whole).to_dict()
        made |= {"bits.svg": svg(spec, "light"), "bits-dark.svg": svg(spec, "dark")}
    return made
