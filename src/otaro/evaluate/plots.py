"""Figures of the analyses, as SVG. Each function takes what the JSON file of the same analysis holds, and nothing else.

Precisions have one colour each throughout, from dark (finest) to light (coarsest). Text stays text in the files.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from otaro.errors import OtaroError, install
from otaro.sefp.precision import PRECISIONS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "otaro",  # the same numbers give the same file
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
FULL_COLOUR = "0.35"
MOST_LABELS = 30  # ticks along a side before some are left out


def require_matplotlib() -> None:
    """Refuse before the long work, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise OtaroError(f"figures need the package matplotlib; install it with: {install('report')}") from None


def gradient_figures(result: dict[str, Any]) -> dict[str, str]:
    """The figures of gradients.json by file name."""
    return {
        "gradients-similarity.svg": _drawn(_similarity, result),
        "gradients-by-layer.svg": _drawn(_similarity_by_layer, result),
        "gradients-norm.svg": _drawn(_norm_error, result),
        "gradients-perturbation.svg": _drawn(_perturbation, result),
        "gradients-accumulated.svg": _drawn(_accumulated, result),
    }


def weight_figures(result: dict[str, Any]) -> dict[str, str]:
    """The figures of weights.json by file name."""
    return {"weights.svg": _drawn(_weights, result), "weights-by-layer.svg": _drawn(_weights_by_layer, result)}


def path_figures(result: dict[str, Any]) -> dict[str, str]:
    """The figure of path.json by file name."""
    return {"path.svg": _drawn(_path, result)}


def _drawn(draw: Callable[[Figure, dict[str, Any]], None], result: dict[str, Any]) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(layout="constrained")
        draw(figure, result)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _colour(precision: str) -> Any:
    import matplotlib

    names = [str(p) for p in PRECISIONS]
    return (
        matplotlib.colormaps["viridis"](0.9 * names.index(precision) / (len(names) - 1)) if precision in names else FULL_COLOUR
    )


def _numbers(values: Sequence[float | None]) -> list[float]:
    """None, where there is nothing to measure, becomes a gap."""
    return [math.nan if value is None else value for value in values]


# Gradients ------------------------------------------------------------------------------------------------------------


def _similarity(figure: Figure, result: dict[str, Any]) -> None:
    """Fig. 4 for all modules together and for each projection, the mean over its layers."""
    panels = {"all modules": result["overall"]}
    for projection in _projections(result):
        found = [m["matrix"] for m in result["modules"] if m["projection"] == projection]
        panels[projection] = [
            [_mean([matrix[row][column] for matrix in found]) for column in range(len(PRECISIONS))]
            for row in range(len(PRECISIONS))
        ]
    lowest = min((value for matrix in panels.values() for row in matrix for value in _finite(row)), default=0.0)
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    figure.set_size_inches(3.1 * columns + 0.6, 2.9 * lines + 0.5)
    figure.suptitle("Cosine similarity of the gradients at two precisions (projections: mean over layers)")
    grid = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    mesh: Any = None
    for axes, (title, matrix) in zip(grid, panels.items(), strict=False):
        mesh = _heat_map(axes, matrix, result["precisions"], result["precisions"], lowest, 1.0, numbers="{:.2f}")
        axes.set_title(title)
    figure.colorbar(mesh, ax=grid.tolist(), label="cosine similarity", shrink=0.7)


def _similarity_by_layer(figure: Figure, result: dict[str, Any]) -> None:
    """How well each module's gradient at each precision keeps the direction of full precision."""
    names = result["precisions"]
    values = {name: [module["to_fp"][index] for module in result["modules"]] for index, name in enumerate(names)}
    _layer_maps(figure, result, values, "Cosine similarity with the gradient in full precision", highest=1.0)


def _norm_error(figure: Figure, result: dict[str, Any]) -> None:
    """Fig. 5."""
    figure.set_size_inches(8, 4)
    axes = figure.subplots()
    for precision, errors in reversed(result["norm_error"].items()):
        axes.plot(range(1, len(errors) + 1), errors, color=_colour(precision), label=precision, marker=".", linewidth=1)
    axes.axhline(0, color="0.7", linewidth=0.8, zorder=0)
    axes.set(xlabel="batch", ylabel="(|∇sefp| − |∇fp|) / |∇fp|", title="Error of the gradient norm, batch by batch")
    axes.legend(ncols=2)


def _perturbation(figure: Figure, result: dict[str, Any]) -> None:
    """Fig. 6: some entries of Y over the batches, and the distribution of all sampled ones."""
    figure.set_size_inches(10, 4)
    left, right = figure.subplots(1, 2)
    shown = result["y_values"]
    for entry in zip(*shown["by_batch"], strict=True):
        left.plot(range(1, len(entry) + 1), entry, linewidth=0.7, alpha=0.7, marker=".", markersize=3)
    left.set(xlabel="batch", ylabel="Y", title=f"Y of {len(shown['by_batch'][0])} entries at {shown['precision']}")
    for precision, fit in result["fit"].items():
        edges, counts = fit["y_histogram"]["edges"], fit["y_histogram"]["counts"]
        spread = edges[-1] / 3  # edges span three standard deviations to each side
        shares = [count / max(sum(counts), 1) for count in counts]
        middles = [(a + b) / 2 / spread for a, b in pairwise(edges)]
        right.step(middles, _numbers([s or None for s in shares]), where="mid", color=_colour(precision), label=precision)
    right.set(
        xlabel="Y in its standard deviations (ends: and beyond)",
        ylabel="share of entries",
        yscale="log",
        title="Distribution of Y",
    )
    right.legend()


def _accumulated(figure: Figure, result: dict[str, Any]) -> None:
    """Eq. 17 in logarithms, where 1/sqrt(N) is a straight line; and its two norms."""
    figure.set_size_inches(10, 4)
    left, right = figure.subplots(1, 2)
    for precision, noise in result["noise"].items():
        colour = _colour(precision)
        left.plot(noise["n"], noise["ratio"], color=colour, marker="o", markersize=4, label=precision)
        left.plot(noise["n"], noise["one_over_sqrt_n"], color=colour, linestyle=":", linewidth=1)
        if noise["y_norm"][0]:
            right.plot(noise["n"], [y / noise["y_norm"][0] for y in noise["y_norm"]], color=colour, marker="o", markersize=4)
    left.set(xlabel="batches N", ylabel="|ΣY| / |Σ∇fp|", title="Perturbation after accumulation (dotted: falling as 1/√N)")
    left.legend(loc="upper left", bbox_to_anchor=(1, 1))
    n = next(iter(result["noise"].values()))["n"]
    norms = next(iter(result["noise"].values()))["gradient_norm"]
    right.plot(n, [norm / norms[0] for norm in norms], color=FULL_COLOUR, marker="s", markersize=4, label="|Σ∇fp|")
    right.plot(n, n, color="0.6", linestyle="--", linewidth=1, label="N")
    right.plot(n, [count**0.5 for count in n], color="0.6", linestyle=":", linewidth=1, label="√N")
    right.set(xlabel="batches N", ylabel="norm, relative to N = 1", title="What makes the ratio: |ΣY| by colour, and |Σ∇fp|")
    right.legend()
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(n, [str(count) for count in n])


# Weights --------------------------------------------------------------------------------------------------------------


def _weights(figure: Figure, result: dict[str, Any]) -> None:
    import matplotlib

    figure.set_size_inches(11, 7.5)
    (shifts, outliers), (lost, errors) = figure.subplots(2, 2)
    sizes = [str(size) for size in result["group_sizes"]]
    precisions = result["precisions"]
    for index, size in enumerate(sizes):
        found, colour = result["overall"][size], matplotlib.colormaps["plasma"](0.85 * index / max(len(sizes) - 1, 1))
        label = f"groups of {size}"
        shares = _numbers(list(found["shifts"].values()))
        shifts.plot(range(len(shares)), shares, color=colour, marker=".", label=label)
        lost.plot(precisions, _numbers([found["lost"][p] or None for p in precisions]), color=colour, marker="o", label=label)
        errors.plot(precisions, _numbers([found["error"][p] for p in precisions]), color=colour, marker="o", label=label)
    most = len(result["overall"][sizes[0]]["shifts"]) - 1
    shifts.set_xticks(range(0, most + 1, 2), [f"{s}+" if s == most else str(s) for s in range(0, most + 1, 2)])
    shifts.set(xlabel="bits below the group's largest", ylabel="share of weights but the largest", title="Right shifts")
    shares = [result["overall"][size]["outlier_groups"] or 0.0 for size in sizes]
    outliers.bar(sizes, [100 * share for share in shares], color="0.55")
    for index, share in enumerate(shares):
        outliers.annotate(f"{share:.3%}", (index, 100 * share), ha="center", va="bottom")
    outliers.set(xlabel="group size", ylabel="percent of groups", title="Groups dominated by an outlier (4 × the second)")
    lost.set(ylabel="share of nonzero weights", yscale="log", title="Weights lost: zero would be as close")
    errors.set(ylabel="relative error", yscale="log", title=f"Root mean square error ({result['reconstruction']})")
    for axes in (shifts, lost, errors):
        axes.legend()


def _weights_by_layer(figure: Figure, result: dict[str, Any]) -> None:
    """The relative error of every module at each precision, at the group size that files have by default."""
    size = "64" if "64" in result["overall"] else str(result["group_sizes"][0])
    values = {
        name: [module["by_group_size"][size]["error"][name] for module in result["modules"]] for name in result["precisions"]
    }
    _layer_maps(figure, result, values, f"Relative error, groups of {size} (each panel has its own scale)", shared=False)


# Path -----------------------------------------------------------------------------------------------------------------


def _path(figure: Figure, result: dict[str, Any]) -> None:
    names, at = result["precisions"], result["at"]
    has_scores = bool(result["scores"])
    figure.set_size_inches(9, 8 if has_scores else 5.5)
    panels = figure.subplots(2 + has_scores, 1, sharex=True)
    for name in names:
        for applied in (True, False):
            taken = zip(result["sequence"], result["applied"], strict=True)
            x = [step for step, (p, a) in enumerate(taken, 1) if p == name and a == applied]
            filling = _colour(name) if applied else "none"
            panels[0].scatter(x, [names.index(name)] * len(x), s=14, edgecolor=_colour(name), facecolor=filling, linewidth=0.8)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    panels[0].set_title("Precision of each step (hollow: gradients held back)")
    for name in names:
        panels[1].plot(at, result["counts"][name], color=_colour(name), label=name, drawstyle="steps-post")
    panels[1].set(ylabel="steps so far", title="Steps at each precision")
    panels[1].legend(ncols=2)
    if has_scores:
        for name, scores in result["scores"].items():
            panels[2].plot(at, _numbers(scores), color=_colour(name), label=name, linewidth=1)
        panels[2].set(ylabel="score", title="What the choice went by")
    panels[-1].set_xlabel("step")


# Heat maps ------------------------------------------------------------------------------------------------------------


def _projections(result: dict[str, Any]) -> list[str]:
    """In the order of the model."""
    return list(dict.fromkeys(module["projection"] for module in result["modules"]))


def _layers(result: dict[str, Any]) -> list[int | None]:
    """Those there are; None is for modules outside the layers, such as the embedding."""
    found = {module["layer"] for module in result["modules"]}
    return [*([None] if None in found else []), *sorted(layer for layer in found if layer is not None)]


def _layer_maps(
    figure: Figure,
    result: dict[str, Any],
    values: Mapping[str, Sequence[float | None]],
    title: str,
    *,
    highest: float | None = None,
    shared: bool = True,
) -> None:
    """A map for each precision of a value of each module, projections down and layers across.

    `shared` gives all maps one scale of colours, `highest` its upper end where that is known.
    """
    projections, layers = _projections(result), _layers(result)
    width, height = 1.6 + 0.22 * max(len(layers), 8), 0.7 + 0.22 * max(len(projections), 4)
    lines = -(-len(values) // 2)
    figure.set_size_inches(2 * width + 1.2, lines * height + 0.6)
    figure.suptitle(title)
    grid = figure.subplots(lines, 2, squeeze=False).flatten()
    mesh: Any = None
    for axes, (name, of_modules) in zip(grid, values.items(), strict=True):
        table: list[list[float | None]] = [[None] * len(layers) for _ in projections]
        for module, value in zip(result["modules"], of_modules, strict=True):
            table[projections.index(module["projection"])][layers.index(module["layer"])] = value
        scale = [value for shown in (values.values() if shared else [of_modules]) for value in _finite(shown)]
        low, high = min(scale, default=0.0), max(scale, default=1.0) if highest is None else highest
        mesh = _heat_map(axes, table, _short(projections), ["–" if n is None else str(n) for n in layers], low, high)
        axes.set(title=name, xlabel="layer (–: outside the layers)" if None in layers else "layer")
        if not shared:
            figure.colorbar(mesh, ax=axes)
    if shared:
        figure.colorbar(mesh, ax=grid.tolist(), shrink=0.6)


def _heat_map(
    axes: Axes,
    table: Sequence[Sequence[float | None]],
    rows: Sequence[str],
    columns: Sequence[str],
    low: float,
    high: float,
    numbers: str | None = None,
) -> Any:
    mesh = axes.pcolormesh(
        [_numbers(row) for row in table], vmin=low, vmax=high, cmap="viridis", edgecolors="white", linewidth=0.3
    )
    every = -(-len(columns) // MOST_LABELS)
    axes.set_xticks([index + 0.5 for index in range(0, len(columns), every)], columns[::every], rotation=90 if numbers else 0)
    axes.set_yticks([index + 0.5 for index in range(len(rows))], rows)
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    axes.invert_yaxis()
    if numbers:
        middle = (low + high) / 2
        for y, row in enumerate(table):
            for x, value in enumerate(row):
                if value is not None:
                    ink = "white" if value < middle else "black"
                    axes.text(x + 0.5, y + 0.5, numbers.format(value), ha="center", va="center", color=ink, fontsize=7)
    return mesh


def _short(names: Sequence[str]) -> list[str]:
    """The last words, where these tell the names apart."""
    last = [name.rpartition(".")[2] for name in names]
    return [word if last.count(word) == 1 else name for name, word in zip(names, last, strict=True)]


def _finite(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float | None]) -> float | None:
    found = _finite(values)
    return sum(found) / len(found) if found else None
