"""Figures of the analyses, as SVG. Each function takes what the JSON file of the same analysis holds, and nothing else.

Drawn as the report's are, in the same colours; a file follows the light or dark of whoever looks at it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from otaro.evaluate import charts
from otaro.evaluate.charts import Spec, alt, of_rows, precision_colour, shown, svg
from otaro.evaluate.run_folder import NAMES
from otaro.sefp.precision import PRECISIONS

WIDTH = 420  # of a panel
_chart = partial(of_rows, width=WIDTH)
SHADES = ("var(--run-1)", "var(--run-3)", "var(--run-5)", "var(--run-2)", "var(--run-4)", "var(--run-6)")


def gradient_figures(result: dict[str, Any]) -> dict[str, str]:
    """The figures of gradients.json by file name."""
    drawn: dict[str, Callable[[dict[str, Any]], Any]] = {
        "similarity": _similarity,
        "by-layer": _similarity_by_layer,
        "norm": lambda found: _titled(charts.norm_error(found), "Error of the gradient norm, batch by batch", 2 * WIDTH),
        "perturbation": _perturbation,
        "accumulated": _accumulated,
    }
    return {f"gradients-{name}.svg": _drawn(draw(result)) for name, draw in drawn.items()}


def weight_figures(result: dict[str, Any]) -> dict[str, str]:
    """The figures of weights.json by file name."""
    return {"weights.svg": _drawn(_weights(result)), "weights-by-layer.svg": _drawn(_weights_by_layer(result))}


def path_figures(result: dict[str, Any]) -> dict[str, str]:
    """The figure of path.json by file name."""
    return {"path.svg": _drawn(_path(result))}


def _drawn(chart: Any) -> str:
    return svg(chart if isinstance(chart, dict) else chart.to_dict())


def _titled(spec: Spec, title: str, width: int) -> Spec:
    """A chart of the report, as a panel."""
    return {**spec, "width": width, "title": title}


# Gradients ------------------------------------------------------------------------------------------------------------


def _similarity(result: dict[str, Any]) -> Any:
    """Fig. 4 for all modules together and for each projection, the mean over its layers."""
    panels = {"all modules": result["overall"]}
    for projection in _projections(result):
        found = [m["matrix"] for m in result["modules"] if m["projection"] == projection]
        size = range(len(PRECISIONS))
        panels[projection] = [[_mean(matrix[row][column] for matrix in found) for column in size] for row in size]
    names = list(map(shown, result["precisions"]))
    rows = [
        {"panel": title, "one": one, "other": other, "value": matrix[i][j]}
        for title, matrix in panels.items()
        for i, other in enumerate(names)
        for j, one in enumerate(names)
        if matrix[i][j] is not None
    ]
    low = charts.low_end(row["value"] for row in rows)
    base = alt.Chart().encode(
        x=alt.X("one:N", sort=names, title=None, axis=alt.Axis(domain=False, labelAngle=-90)),
        y=alt.Y("other:N", sort=names, title=None, axis=alt.Axis(domain=False)),
    )
    layered = alt.layer(*charts.with_numbers(base, low), data=alt.Data(values=rows)).properties(width=200, height=200)
    title = "Cosine similarity of the gradients at two precisions (projections: mean over layers)"
    return layered.facet(facet=alt.Facet("panel:N", sort=list(panels), title=None), columns=4, title=title)


def _similarity_by_layer(result: dict[str, Any]) -> Any:
    """How well each module's gradient at each precision keeps the direction of full precision."""
    values = {name: [module["to_fp"][i] for module in result["modules"]] for i, name in enumerate(result["precisions"])}
    return _layer_maps(result, values, "Cosine similarity with the gradient in full precision")


def _perturbation(result: dict[str, Any]) -> Any:
    """Fig. 6: some entries of Y over the batches, and the distribution of all sampled ones."""
    found = result["y_values"]
    entries = [
        {"batch": batch, "entry": str(entry), "y": value}
        for batch, values in enumerate(found["by_batch"], 1)
        for entry, value in enumerate(values)
    ]
    left = _chart(entries, f"Y of {len(found['by_batch'][0])} entries at {found['precision']}").encode(
        x=alt.X("batch:Q"), y=alt.Y("y:Q", title="Y"), detail="entry:N", color=alt.value("var(--run-1)")
    )
    shares = []
    for precision, fit in result["fit"].items():
        edges, counts = fit["y_histogram"]["edges"], fit["y_histogram"]["counts"]
        for (low, high), count in zip(pairwise(edges), counts, strict=True):
            # Edges span three standard deviations to each side.
            at = (low + high) / 2 / (edges[-1] / 3) if edges[-1] else 0.0
            if count:
                shares.append({"precision": precision, "at": at, "share": count / sum(counts)})
    right = _chart(shares, "Distribution of Y").mark_line(interpolate="step").encode(
        x=alt.X("at:Q", title="Y in its standard deviations (ends: and beyond)"),
        y=alt.Y("share:Q", title="share of entries", scale=alt.Scale(type="log")),
        color=precision_colour(set(result["fit"])),
    )  # fmt: skip
    return left.mark_line(strokeWidth=0.8, opacity=0.7) | right


def _accumulated(result: dict[str, Any]) -> Any:
    """Eq. 17 in logarithms, where 1/sqrt(N) is a straight line; and its two norms."""
    left = _titled(charts.noise(result), "Perturbation after accumulation (dashed: falling as 1/√N)", WIDTH)
    first = next(iter(result["noise"].values()))
    norms = {"|Σ∇fp|": first["gradient_norm"], "N": first["n"], "√N": [n**0.5 for n in first["n"]]}
    norms |= {f"|ΣY| {name}": noise["y_norm"] for name, noise in result["noise"].items()}
    lines = {name: [norm / found[0] for norm in found] for name, found in norms.items() if found[0]}
    rows = [
        {"line": name, "n": n, "norm": value}
        for name, values in lines.items()
        for n, value in zip(first["n"], values, strict=True)
        if value > 0
    ]
    colours = ["var(--ink)", "var(--before)", "var(--before)", *(f"var(--m{name[-1]})" for name in list(lines)[3:])]
    scale = alt.Scale(domain=list(lines), range=colours)
    right = _chart(rows, "What makes the ratio").mark_line(point=True).encode(
        x=alt.X("n:Q", title="batches N", scale=alt.Scale(type="log", base=2)),
        y=alt.Y("norm:Q", title="norm, relative to N = 1", scale=alt.Scale(type="log")),
        color=alt.Color("line:N", scale=scale, legend=alt.Legend(title=None)),
    )  # fmt: skip
    panel = {key: value for key, value in right.to_dict().items() if key not in ("config", "$schema")}
    return {"hconcat": [left, panel], "resolve": {"scale": {"color": "independent"}}}


# Weights --------------------------------------------------------------------------------------------------------------


def _weights(result: dict[str, Any]) -> Any:
    sizes = [str(size) for size in result["group_sizes"]]
    labels = [f"groups of {size}" for size in sizes]
    colour = alt.Color("size:N", scale=alt.Scale(domain=labels, range=SHADES), legend=alt.Legend(title=None, orient="top"))

    def lines(kind: str, title: str, y: str) -> Any:
        rows = [
            {"size": label, "precision": name, "value": value}
            for size, label in zip(sizes, labels, strict=True)
            for name in result["precisions"]
            if (value := result["overall"][size][kind][name])
        ]
        return _chart(rows, title).mark_line(point=True).encode(
            x=alt.X("precision:N", sort=list(result["precisions"]), title=None, axis=alt.Axis(labelAngle=0)),
            y=alt.Y("value:Q", title=y, scale=alt.Scale(type="log")),
            color=colour,
        )  # fmt: skip

    found = result["overall"]
    shifts = [
        {"size": label, "shift": number, "share": share}
        for size, label in zip(sizes, labels, strict=True)
        for number, share in enumerate(found[size]["shifts"].values())
        if share is not None
    ]
    shifted = _chart(shifts, "Right shifts").mark_line(point=True).encode(
        x=alt.X("shift:Q", title="bits below the group's largest (the last: and more)"),
        y=alt.Y("share:Q", title="share of weights but the largest"),
        color=colour,
    )  # fmt: skip
    outliers = [{"size": size, "percent": 100 * (found[size]["outlier_groups"] or 0.0)} for size in sizes]
    bars = _chart(outliers, "Groups dominated by an outlier (4 × the second)").encode(
        x=alt.X("size:N", sort=sizes, title="group size", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("percent:Q", title="percent of groups"),
    )
    dominated = alt.layer(
        bars.mark_bar(color="var(--before)"),
        bars.mark_text(dy=-6, fill="var(--ink)").encode(text=alt.Text("percent:Q", format=".3f")),
    )
    lost = lines("lost", "Weights lost: zero would be as close", "share of nonzero weights")
    errors = lines("error", f"Root mean square error ({result['reconstruction']})", "relative error")
    return (shifted | dominated) & (lost | errors)


def _weights_by_layer(result: dict[str, Any]) -> Any:
    """The relative error of every module at each precision, at the group size that files have by default."""
    size = "64" if "64" in result["overall"] else str(result["group_sizes"][0])
    values = {
        name: [module["by_group_size"][size]["error"][name] for module in result["modules"]] for name in result["precisions"]
    }
    return _layer_maps(result, values, f"Relative error, groups of {size} (each panel has its own scale)", shared=False)


# Path -----------------------------------------------------------------------------------------------------------------


def _path(result: dict[str, Any]) -> Any:
    names = [shown(name) for name in NAMES if name in result["precisions"]]
    colour = precision_colour(set(names))
    steps = [
        {"step": step, "precision": shown(name), "applied": "applied" if applied else "held back"}
        for step, (name, applied) in enumerate(zip(result["sequence"], result["applied"], strict=True), 1)
    ]
    filling = alt.Scale(domain=["applied", "held back"], range=[1, 0])
    taken = _chart(steps, "Precision of each step (hollow: gradients held back)").mark_point(size=22, filled=False).encode(
        x=alt.X("step:Q"),
        y=alt.Y("precision:N", sort=names, title=None),
        color=precision_colour(set(names), legend=False),
        fill=precision_colour(set(names), legend=False, channel="Fill"),
        fillOpacity=alt.FillOpacity("applied:N", scale=filling, legend=None),
    )  # fmt: skip

    def over_time(kind: str, title: str, label: str) -> Any:
        rows = [
            {"step": step, "precision": shown(name), "value": value}
            for name, values in result[kind].items()
            for step, value in zip(result["at"], values, strict=True)
            if value is not None
        ]
        return _chart(rows, title).mark_line().encode(
            x=alt.X("step:Q"), y=alt.Y("value:Q", title=label, scale=alt.Scale(zero=kind == "counts")), color=colour
        )  # fmt: skip

    panels = [taken, over_time("counts", "Steps at each precision", "steps so far")]
    if result["scores"]:
        panels.append(over_time("scores", "What the choice went by", "score"))
    return alt.vconcat(*(panel.properties(width=2 * WIDTH, height=180) for panel in panels))


# Heat maps ------------------------------------------------------------------------------------------------------------


def _projections(result: dict[str, Any]) -> list[str]:
    """In the order of the model."""
    return list(dict.fromkeys(module["projection"] for module in result["modules"]))


def _layer_maps(result: dict[str, Any], values: Mapping[str, Sequence[float | None]], title: str, shared: bool = True) -> Any:
    """A map for each precision of a value of each module, projections down and layers across; `shared`: on one scale."""
    projections = _projections(result)
    short = dict(zip(projections, _short(projections), strict=True))
    layers = sorted({module["layer"] for module in result["modules"]}, key=lambda layer: -1 if layer is None else layer)
    ticks = ["–" if layer is None else str(layer) for layer in layers]
    rows = [
        {
            "precision": name,
            "projection": short[module["projection"]],
            "layer": "–" if module["layer"] is None else str(module["layer"]),
            "value": value,
        }
        for name, of_modules in values.items()
        for module, value in zip(result["modules"], of_modules, strict=True)
        if value is not None
    ]
    across = "layer (–: outside the layers)" if None in layers else "layer"
    maps = _chart(rows).mark_rect().encode(
        x=alt.X("layer:N", sort=ticks, title=across, axis=alt.Axis(labelAngle=0, labelOverlap=True, domain=False)),
        y=alt.Y("projection:N", sort=list(short.values()), title=None, axis=alt.Axis(domain=False)),
        color=alt.Color("value:Q", scale=alt.Scale(scheme="cividis"), legend=alt.Legend(title=None)),
    )  # fmt: skip
    maps = maps.properties(width=max(200, 14 * len(ticks)), height=22 * len(projections))
    facets = maps.facet(facet=alt.Facet("precision:N", sort=list(values), title=None), columns=2, title=title)
    return facets if shared else facets.resolve_scale(color="independent")


def _short(names: Sequence[str]) -> list[str]:
    """The last words, where these tell the names apart."""
    last = [name.rpartition(".")[2] for name in names]
    return [word if last.count(word) == 1 else name for name, word in zip(names, last, strict=True)]


def _mean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None
