"""The figure of the page, from the rows that it shows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from otaro.evaluate.charts import Row, altair, of_rows, svg
from otaro.sefp.precision import Precision
from runs.study.plan import BENCHES, BIG, FULL, NAMES, Bench
from runs.study.quantizers import OTHERS
from runs.study.results import Results, model_at

ONE, OWN, INT4 = "one file for all six, tuned once", "six models, one for each", "int4 QAT, a model of its own"
ROUNDED, WHOLE = "tuned as usual, rounded", "tuned as usual, 16 bits"
SERIES = {  # colours and shapes
    ONE: ("var(--run-1)", "circle"),
    OWN: ("var(--run-3)", "stroke"),
    INT4: ("var(--run-5)", "diamond"),
    ROUNDED: ("var(--run-2)", "cross"),
    WHOLE: ("var(--before)", "stroke"),
}

_chart = partial(of_rows, width=340)


def figures(results: Results, *, small: bool) -> dict[str, str]:
    """By file name, of the models that have rows for it."""
    benches = [BENCHES[name] for name in (("small",) if small else BIG)]
    panels = [bits_panel(results, bench) for bench in benches if results.has(bench.name, "best")]
    if not panels:
        return {}
    spec = altair().hconcat(*panels).to_dict()
    return {"bits.svg": svg(spec, "light"), "bits-dark.svg": svg(spec, "dark")}


def bits_panel(results: Results, bench: Bench) -> Any:
    """Perplexity over bits a weight: one nested model, dedicated ones, int4 QAT, and what others store."""
    alt = altair()
    rows = bits_rows(results, bench)
    colours, shapes = (alt.Scale(domain=list(SERIES), range=[one[i] for one in SERIES.values()]) for i in (0, 1))
    legend = alt.Legend(title=None, orient="top", columns=3, labelLimit=0, columnPadding=40)
    base = _chart([row for row in rows if row["series"] != WHOLE], bench.name).encode(
        x=alt.X("bits:Q", title="bits a weight", scale=alt.Scale(zero=False)),
        y=alt.Y("value:Q", title="perplexity on WikiText-2", scale=alt.Scale(type="log", nice=False, padding=10)),
        color=alt.Color("series:N", scale=colours, legend=legend),
    )
    points = base.mark_point(size=70, filled=False, strokeWidth=2, opacity=1)
    rule = _chart([row for row in rows if row["series"] == WHOLE]).mark_rule(strokeDash=[2, 3])
    return alt.layer(
        base.transform_filter({"field": "series", "equal": ONE}).mark_line(),
        points.encode(shape=alt.Shape("series:N", scale=shapes, legend=legend)),
        base.mark_text(align="left", dx=6, dy=-6, fontSize=10).encode(text="label:N"),
        rule.encode(y="value:Q", color=alt.Color("series:N", scale=colours)),
    ).properties(width=340, height=240, title=bench.name)


def bits_rows(results: Results, bench: Bench) -> list[Row]:
    rows: list[Row] = []

    def add(series: str, name: str, columns: Sequence[str], bits: Callable[[str], float], measure: str = "perplexity") -> None:
        for column in columns:
            if found := results.values(bench.name, model_at(name, column), column, measure):
                at = {"series": series, "bits": bits(column), "value": statistics.fmean(found)}
                rows.append({**at, "label": column if measure == "others" else ""})

    for series, name in ((ONE, "best"), (OWN, "fixed")):
        add(series, name, NAMES, lambda column: Precision(column).bits_per_weight())
    add(INT4, "int4 QAT", ["E5M3"], lambda _: OTHERS["int4"][0])
    add(ROUNDED, "fp", [name for name in OTHERS if name.startswith("Q")], lambda column: OTHERS[column][0], "others")
    add(WHOLE, "fp", [FULL], lambda _: 16)
    return rows
