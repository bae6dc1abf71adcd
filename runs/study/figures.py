"""The figure of the page, from the rows that it shows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from otaro.evaluate.charts import Row, altair, of_rows, svg
from otaro.sefp.precision import Precision
from runs.study.plan import FULL, NAMES
from runs.study.quantizers import OTHERS
from runs.study.results import Made

ONE, OWN = "one file for all six, tuned once", "six models, one for each"
INT4 = "int4 QAT, a model of its own"
ROUNDED, WHOLE = "tuned as usual, rounded", "tuned as usual, 16 bits"
SERIES = {  # colours and shapes
    ONE: ("var(--run-1)", "circle"),
    OWN: ("var(--run-3)", "stroke"),
    INT4: ("var(--run-5)", "diamond"),
    ROUNDED: ("var(--run-2)", "cross"),
    WHOLE: ("var(--before)", "stroke"),
}

_chart = partial(of_rows, width=340)


def figures(models: Sequence[Made]) -> dict[str, str]:
    """By file name."""
    spec = altair().hconcat(*map(bits_panel, models)).to_dict()
    return {"bits.svg": svg(spec, "light"), "bits-dark.svg": svg(spec, "dark")}


def bits_panel(made: Made) -> Any:
    """Perplexity over bits a weight: one nested model, dedicated ones, int4 QAT, and what others store."""
    alt, rows, title = altair(), bits_rows(made), made.bench.name
    scale = alt.Scale
    colours, shapes = (scale(domain=[*SERIES], range=[*one]) for one in zip(*SERIES.values(), strict=True))
    legend = alt.Legend(title=None, orient="top", columns=3, labelLimit=0, columnPadding=40)
    logarithmic = scale(type="log", nice=False, padding=10)
    base = _chart([row for row in rows if row["series"] != WHOLE], title).encode(
        x=alt.X("bits:Q", title="bits a weight", scale=scale(zero=False)),
        y=alt.Y("value:Q", title="perplexity on WikiText-2", scale=logarithmic),
        color=alt.Color("series:N", scale=colours, legend=legend),
    )
    points = base.mark_point(size=70, filled=False, strokeWidth=2, opacity=1)
    rule = _chart([row for row in rows if row["series"] == WHOLE]).mark_rule(strokeDash=[2, 3])
    return alt.layer(
        base.transform_filter({"field": "series", "equal": ONE}).mark_line(),
        points.encode(shape=alt.Shape("series:N", scale=shapes, legend=legend)),
        base.mark_text(align="left", dx=6, dy=-6, fontSize=10).encode(text="label:N"),
        rule.encode(y="value:Q", color=alt.Color("series:N", scale=colours)),
    ).properties(width=340, height=240, title=title)


def bits_rows(made: Made) -> list[Row]:
    ours = {name: Precision(name).bits_per_weight() for name in NAMES}
    theirs = {name: bits for name, (bits, _) in OTHERS.items() if name.startswith("Q")}
    drawn = (
        (ONE, "best", "perplexity", ours),
        (OWN, "fixed", "perplexity", ours),
        (INT4, "int4 QAT", "perplexity", {"E5M3": OTHERS["int4"][0]}),
        (ROUNDED, "fp", "others", theirs),
        (WHOLE, "fp", "perplexity", {FULL: 16.0}),
    )
    rows: list[Row] = []
    for series, name, measure, columns in drawn:
        for column, bits in columns.items():
            if found := made.values(name, column, measure):
                value, label = statistics.fmean(found), column if measure == "others" else ""
                rows.append({"series": series, "bits": bits, "value": value, "label": label})
    return rows
