"""Figures as Vega-Lite specifications made with altair: those of the report, and of files.

Colours are names of CSS variables, such as var(--run-1): the page's style sheet says what they are in the
light, in the dark and on paper, and a figure follows without being drawn again. A run has the same colour in
every figure, and so has a precision. Only values in data come from files: field names, expressions and titles
of axes are fixed here. `svg` makes a file of a figure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from itertools import combinations, cycle, islice
from statistics import fmean
from typing import Any, Literal, NamedTuple

from otaro.errors import OtaroError, install
from otaro.evaluate.records import FULL
from otaro.evaluate.run_folder import BEFORE, NAMES, Step, is_finite
from otaro.sefp.precision import PRECISIONS

BITS = "bits per weight of the whole model"
"""What bits are counted, everywhere on a page: all bytes at a precision by the number of weights."""
RUN_COLOURS = 6  # --run-1 ... --run-6 of the style sheet, then from the first again
_SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
_LOG_FROM = 4  # a range of perplexities wider than this factor is shown on a logarithmic scale
_BINS = 120  # of steps, along the path
_MEANS, _FEWEST = 40, 8  # means of losses along the training, each of so many steps: one of fewer jumps about

_INK, _MUTED, _LINE = "var(--ink)", "var(--muted)", "var(--line)"
_TEXT = {"labelColor": _MUTED, "titleColor": _MUTED, "labelFontSize": 12, "titleFontSize": 12}
_TEXT |= {"titleFontWeight": 400}
_LINES = {"domainColor": _LINE, "tickColor": _LINE, "gridColor": _LINE, "gridOpacity": 0.7}
_NAMES = {"labelColor": _INK, "labelFontSize": 13}
_TITLE = {"color": _INK, "subtitleColor": _MUTED, "fontSize": 13, "fontWeight": 600, "anchor": "start"}
CONFIG: dict[str, Any] = {
    "background": "transparent",
    "view": {"stroke": None},
    "axis": {**_TEXT, **_LINES, "titlePadding": 12},
    "axisX": {"grid": False},
    "axisQuantitative": {"tickCount": 6},
    "axisY": {"domain": False, "ticks": False, "labelPadding": 8},
    "legend": {**_TEXT, **_NAMES, "symbolSize": 90, "columnPadding": 14, "offset": 14},
    "title": _TITLE,
    "header": {**_NAMES, "labelFontWeight": 600},
    "text": {"fill": _INK, "fontSize": 12},
}
"""What all figures look like; on a page its script adds the font."""

Spec = dict[str, Any]
Row = dict[str, Any]


def altair() -> Any:
    """The package altair; refused with what to install where it, or vl-convert that draws, is missing."""
    try:
        import altair
        import vl_convert  # noqa: F401
    except ImportError as error:
        package = "altair" if error.name == "altair" else "vl-convert-python"
        raise OtaroError(f"figures need the package {package}: {install('report')}") from None
    return altair


class _WhenUsed:
    """Altair, imported when something of it is first asked for: it takes half a second."""

    def __getattr__(self, name: str) -> Any:
        return getattr(altair(), name)


alt: Any = _WhenUsed()


def svg(spec: Spec, theme: Literal["light", "dark"] | None = None) -> str:
    """A figure as a file of its own; without a theme it follows the light or dark of whoever looks at it."""
    import vl_convert

    style = resources.files("otaro.evaluate").joinpath("assets", "report.css").read_text(encoding="utf-8")
    colours = re.findall(r"(--[\w-]+): light-dark\((.*?), (.*?)\);", style)
    light, dark = (";".join(f"{name}:{values[i]}" for name, *values in colours) for i in (0, 1))
    rules = {"light": f":root{{{light}}}", "dark": f":root{{{dark}}}"}
    both = f"{rules['light']}@media(prefers-color-scheme:dark){{{rules['dark']}}}"
    drawn = str(vl_convert.vegalite_to_svg({"padding": 16, **spec, "config": CONFIG}))
    return drawn.replace(">", f"><style>{rules[theme] if theme else both}</style>", 1) + "\n"


def of_rows(rows: Iterable[Row], title: str = "", width: int | None = None) -> Any:
    """A chart of data from files; with a width, a panel of a figure in a file."""
    chart = alt.Chart(alt.Data(values=list(rows)))
    titled = {"title": title} if title else {}
    return chart if width is None else chart.properties(width=width, height=240, **titled)


def _tips(*fields: str | tuple[str | None, ...]) -> list[Any]:
    """What hovering shows: fields, or fields with a title and the form of a number."""
    found = []
    for one in fields:
        told = zip(("shorthand", "title", "format"), [one] if isinstance(one, str) else one, strict=False)
        found.append(alt.Tooltip(**{name: value for name, value in told if value}))
    return found


def _legend(**more: Any) -> Any:
    return alt.Legend(title=None, orient="top", **more)


def _lines_and_points(base: Any, width: float = 2.5) -> list[Any]:
    lines, points = base.mark_line(strokeWidth=width), base.mark_point(filled=True, size=70, opacity=1)
    return [lines.properties(name="lines"), points.properties(name="points")]


def shown(precision: str) -> str:
    """A precision as people read it."""
    return "full" if precision == FULL else precision


_ORDER = [*map(shown, NAMES)]  # from fine to coarse, as in tables


def by_precision(
    rows: Sequence[Row], runs: Sequence[str], title: str, *, from_zero: bool = False, height: int = 240
) -> Spec:
    """A measurement against precision: `rows` have precision, run, stage, value and maybe error.

    The unquantized model stands apart, to the left.
    """
    data = [
        {**row, "precision": shown(row["precision"]), "full": row["precision"] == FULL}
        for row in rows
        if math.isfinite(row["value"])
    ]
    x = alt.X("precision:N", sort=_ORDER, title="precision", axis=alt.Axis(labelAngle=0, labelPadding=6))
    scale = alt.Scale(zero=True, padding=0) if from_zero else _value_scale(data, 12)
    y = alt.Y("value:Q", title=title, scale=scale)
    dashed = any(row["stage"] == "before" and row["run"] != BEFORE for row in data)
    has_errors = any("error" in row for row in data)
    colour = _run_colour(runs, {row["run"] for row in data})
    shapes = alt.Scale(domain=(names := _run_names(runs)), range=list(islice(cycle(_SHAPES), len(names))))
    shape = alt.Shape("run:N", scale=shapes, legend=colour["legend"])
    stages = alt.Scale(domain=["before", "after"], range=[[5, 4], [1, 0]])
    dash = alt.StrokeDash("stage:N", scale=stages, legend=_legend() if dashed else None)
    tooltip = _tips("run:N", "precision:N", ("value:Q", title, ",.4~g"))
    tooltip += _tips(("stage:N", "tuning")) if dashed else []
    tooltip += _tips(("error:Q", "standard error", ".2~g")) if has_errors else []
    base = of_rows(data).encode(x=x, y=y, color=colour, detail="stage:N")
    lines, points = _lines_and_points(base)
    lines = lines.transform_filter("!datum.full").encode(strokeDash=dash)
    layers = [lines, points.encode(shape=shape, tooltip=tooltip)]
    if has_errors:
        whiskers = base.transform_filter("isValid(datum.error)").transform_calculate(
            low="datum.value - datum.error", high="datum.value + datum.error"
        )
        layers.insert(0, whiskers.mark_rule(opacity=0.5).encode(y=alt.Y("low:Q", title=title), y2="high:Q"))
    return _finish(alt.layer(*layers), height)


def size_curve(rows: Sequence[Row], runs: Sequence[str]) -> Spec:
    """What every megabyte buys: `rows` have precision, run, megabytes, and perplexity as value."""
    # A name stands above the highest point at its size: as lines fall to the right, all lie below it there.
    ascending = sorted(rows, key=lambda row: row["value"])
    highest = {(row["precision"], row["megabytes"]): row for row in ascending}
    first = rows[0]["run"]
    named = [highest[row["precision"], row["megabytes"]] for row in rows if row["run"] == first]
    labelled = [{**row, "label": row["precision"] if row in named else ""} for row in rows]
    figures = (("megabytes:Q", "MB", ",.4~g"), ("value:Q", "perplexity", ",.4~g"))
    axis = alt.Axis(title="megabytes on disk", labelFlush=False)
    base = of_rows(labelled).encode(
        x=alt.X("megabytes:Q", scale=alt.Scale(zero=False, padding=24), axis=axis),
        y=alt.Y("value:Q", title="perplexity", scale=_value_scale(rows, 16)),
        color=_run_colour(runs, {row["run"] for row in rows}),
        tooltip=_tips("run:N", "precision:N", *figures),
    )
    names = base.mark_text(dx=3, dy=-10, align="left").encode(text="label:N", color=alt.value(_INK))
    return _finish(alt.layer(*_lines_and_points(base), names), 260)


def training(log: Sequence[Step], logs: Sequence[Sequence[Step]]) -> Spec:
    """Cross-entropy by step in its precision's colour, on the scale of all `logs` that stand side by side:
    steps, thinned where many, and means of stretches.
    """
    finite = [step for step in log if math.isfinite(step.cross_entropy)]
    points: list[Row] = [
        {"step": step.step, "precision": shown(step.precision), "loss": step.cross_entropy}
        for step in finite[:: max(1, len(finite) // 1500)]
    ]
    means = []
    for name in NAMES:
        mine = [step for step in finite if step.precision == name]
        count = min(_MEANS, len(mine) // _FEWEST)
        for part in (mine[i * len(mine) // count : (i + 1) * len(mine) // count] for i in range(count)):
            at, loss = fmean(step.step for step in part), fmean(step.cross_entropy for step in part)
            means.append({"step": at, "precision": shown(name), "loss": loss})
    losses = [step.cross_entropy for one in logs for step in one if is_finite(step.cross_entropy)]
    domain = {"domain": [min(losses), max(losses)], "nice": True} if len(set(losses)) > 1 else {}
    encoding = {
        "x": alt.X("step:Q", title="step", scale=alt.Scale(nice=False), axis=_step_axis()),
        "y": alt.Y("loss:Q", title="cross-entropy (nats)", scale=alt.Scale(zero=False, **domain)),
        "color": _precision_colour({row["precision"] for row in points}),
    }
    tooltip = _tips("step:Q", "precision:N", ("loss:Q", None, ".4f"))
    steps = of_rows(points).mark_circle(size=22, opacity=0.45).encode(**encoding, tooltip=tooltip)
    lines = of_rows(means).mark_line(strokeWidth=2).encode(**encoding)
    return _finish(alt.layer(lines.properties(name="lines"), steps.properties(name="points")))


def path(log: Sequence[Step]) -> Spec:
    """Which precision each stretch of steps went to: the fuller the colour, the larger its share."""
    stretch = max(1, math.ceil(len(log) / _BINS))
    counts: dict[tuple[int, str], list[int]] = {}
    for step in log:
        seen = counts.setdefault(((step.step - 1) // stretch, shown(step.precision)), [0, 0])
        seen[0] += 1
        seen[1] += not step.applied
    rows: list[Row] = []
    for (number, name), (count, held) in counts.items():
        first, last = number * stretch + 1, (number + 1) * stretch
        place = {"from": first - 0.5, "to": last + 0.5, "precision": name, "count": count, "held": held}
        steps = f"{first} to {last}" if stretch > 1 else str(first)
        rows.append({**place, "share": count / stretch, "steps": steps})
    present = {row["precision"] for row in rows}
    bands, shares = alt.Scale(padding=0.15), alt.Scale(domain=[0, 1], range=[0.12, 1])
    told = (("steps:N", "step"), "precision:N", ("count:Q", "steps at it"), ("held:Q", "of these held back"))
    chart = of_rows(rows).mark_rect(stroke=None)
    chart = chart.encode(
        x=alt.X("from:Q", title="step", scale=alt.Scale(nice=False, zero=False), axis=_step_axis()),
        x2="to:Q",
        y=alt.Y("precision:N", sort=_ORDER, title=None, scale=bands, axis=alt.Axis(domain=False)),
        color=_precision_colour(present, legend=False),
        opacity=alt.Opacity("share:Q", scale=shares, legend=None),
        tooltip=_tips(*told),
    )
    return _finish(chart.properties(name="steps"), 26 * len(present) + 20)


def similarity(gradients: dict[str, Any]) -> Spec:
    """Cosine similarity of gradients between precisions, as a matrix with its numbers."""
    order, matrix = list(map(shown, gradients["precisions"])), gradients["overall"]
    rows = [
        {"one": one, "other": other, "similarity": matrix[i][j]}
        for i, one in enumerate(order)
        for j, other in enumerate(order)
        if is_finite(matrix[i][j])
    ]
    base = of_rows(rows).encode(
        x=alt.X("one:N", sort=order, title=None, axis=alt.Axis(orient="top", labelAngle=0, domain=False)),
        y=alt.Y("other:N", sort=order, title=None, axis=alt.Axis(domain=False)),
        tooltip=_tips("one:N", "other:N", ("similarity:Q", None, ".4f")),
    )
    low = _low_end(rows)
    ink = alt.condition(f"datum.similarity < {(low + 1) / 2}", alt.value("#fff"), alt.value("#111"))
    numbers = base.mark_text().encode(text=alt.Text("similarity:Q", format=".2f"), color=ink)
    cells = base.mark_rect().encode(color=_similarity_colour(low, legend=None)).properties(name="cells")
    return _finish(alt.layer(cells, numbers), 44 * len(order))


def similarity_by_module(gradients: dict[str, Any]) -> Spec:
    """The same for every layer and projection, between two precisions that the reader chooses."""
    names = list(map(shown, gradients["precisions"]))
    pairs = [(i, j, f"{names[i]} and {names[j]}") for i, j in combinations(range(len(names)), 2)]
    rows = []
    for module in gradients["modules"]:
        layer = "–" if module.get("layer") is None else str(module["layer"])
        place = {"module": module["module"], "projection": module["projection"]}
        for i, j, between in pairs:
            if is_finite(value := module["matrix"][i][j]):
                rows.append({**place, "pair": between, "layer": layer, "similarity": value})
    layers = sorted({row["layer"] for row in rows}, key=lambda one: math.inf if one == "–" else int(one))
    choice = alt.binding_select(options=[between for *_, between in pairs], name="Gradients at ")
    pair = alt.param(name="pair", value=f"{names[0]} and {names[-1]}", bind=choice)
    axis = alt.Axis(labelAngle=0, domain=False, labelOverlap=True)
    legend = alt.Legend(title="cosine similarity", orient="top", gradientLength=200, format=".2~f")
    chart = of_rows(rows).transform_filter("datum.pair === pair").mark_rect()
    chart = chart.encode(
        x=alt.X("layer:N", sort=layers, title="layer", axis=axis),
        y=alt.Y("projection:N", sort=None, title=None, axis=alt.Axis(domain=False)),
        color=_similarity_colour(_low_end(rows), legend),
        tooltip=_tips("module:N", "pair:N", ("similarity:Q", None, ".4f")),
    )
    height = 24 * len({row["projection"] for row in rows}) + 20
    return _finish(chart.add_params(pair).properties(name="cells"), height)


def _finish(chart: Any, height: int = 240) -> Spec:
    spec: Spec = chart.properties(width="container", height=height).to_dict()
    del spec["config"]  # `CONFIG` is that of all
    return spec


def _step_axis() -> Any:
    return alt.Axis(grid=False, tickMinStep=1, tickCount=10, labelFlush=False)


def _value_scale(data: Sequence[Row], padding: int) -> Any:
    """Logarithmic for a wide range of values."""
    values = [row["value"] for row in data]
    wide = bool(values) and min(values) > 0 and max(values) / min(values) > _LOG_FROM
    kind = {"type": "log", "nice": False} if wide else {"zero": False}
    return alt.Scale(**kind, padding=padding)


def _low_end(rows: Sequence[Row]) -> float:
    """The lower end of a scale of similarities that ends at 1."""
    lowest = math.floor(10 * min((row["similarity"] for row in rows), default=0.0)) / 10
    return lowest if lowest < 1 else 0.0


def _run_names(runs: Sequence[str]) -> list[str]:
    return [*(run for run in runs if run != BEFORE), BEFORE]


def _run_colour(runs: Sequence[str], present: set[str]) -> Any:
    names = _run_names(runs)
    colours = [*(f"var(--run-{i % RUN_COLOURS + 1})" for i in range(len(names) - 1)), "var(--before)"]
    legend = _legend(values=[name for name in names if name in present], labelLimit=400, symbolOpacity=1)
    return alt.Color("run:N", scale=alt.Scale(domain=names, range=colours), legend=legend)


def _precision_colour(present: set[str], *, legend: bool = True) -> Any:
    """Every precision has its own, everywhere."""
    strokes = {"symbolType": "stroke", "symbolStrokeWidth": 3, "symbolOpacity": 1}
    told = _legend(values=[name for name in _ORDER if name in present], **strokes) if legend else None
    colours = ["var(--before)", *(f"var(--m{p.mantissa_bits})" for p in PRECISIONS)]
    return alt.Color("precision:N", scale=alt.Scale(domain=_ORDER, range=colours), legend=told)


def _similarity_colour(low: float, legend: Any) -> Any:
    return alt.Color("similarity:Q", scale=alt.Scale(scheme="cividis", domain=[low, 1]), legend=legend)


class Figure(NamedTuple):
    """A figure of gradients.json, for the report and for a file of its own."""

    name: str
    title: str
    note: str
    draw: Callable[[dict[str, Any]], Spec]


GRADIENTS = (
    Figure(
        "similarity",
        "Similarity of gradients",
        "Cosine between the gradients of all weights at two precisions; 1 is the same direction.",
        similarity,
    ),
    Figure(
        "by-layer",
        "Similarity by layer and projection",
        "The same in every layer, between the finest and the coarsest precision; in a report, between any "
        "two.",
        similarity_by_module,
    ),
)


def gradient_files(gradients: dict[str, Any]) -> dict[str, str]:
    """The same figures as SVG, by file name."""
    return {
        f"gradients-{figure.name}.svg": svg(
            figure.draw(gradients) | {"width": 480, "title": {"text": figure.title, "subtitle": figure.note}}
        )
        for figure in GRADIENTS
    }
