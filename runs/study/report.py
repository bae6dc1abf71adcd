"""From the results file to the page: tables between its marks, figures (figures.py) beside it. What stands outside is prose.

A mark is `<!-- study: NAME -->`, its end `<!-- /study -->`. A page that does not exist begins with all of them in order.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from otaro.sefp.precision import Precision
from runs.study import plan
from runs.study.figures import figures
from runs.study.plan import BENCHES, BIG, COLUMNS, FULL, NAMES, Bench
from runs.study.quantizers import OTHERS
from runs.study.results import Result, Results, is_fixed, model_at, models_of

MAIN = ("none", "fp", "fixed", "uniform", "bps", "otaro", "best")


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
    ours, theirs = (results.rows(bench.name, model_at(one, column)) for one in (name, other))
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
            line = results.rows(bench.name, model_at(name, column)).get(plan.SEEDS[0], {"zeroshot": {}})
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
        rows.append([name, f"{bits:.3f}", *(number(results.values(bench.name, t, name, "others", seeds)) for t in tuned)])
    for name in NAMES:
        bits = Precision(name).bits_per_weight()
        rows.append([name, f"{bits:.3f}", *(number(results.values(bench.name, t, name, seeds=seeds)) for t in tuned)])
    rows.sort(key=lambda row: float(row[1]))
    text = table(["", "bits a weight", *(f"`{name}`" for name in tuned)], rows)
    four = {"int4 QAT": ("int4 QAT, groups of 64", "4.25"), "int4 QAT, held as best": ("the same, averaged", "4.25")}
    four |= {"fixed:E5M3": ("`fixed:E5M3`", "4.125"), "best": ("`best`", "4.125")}
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
    return f"`fixed:`, {len(NAMES)} models{name.removeprefix('fixed')}" if is_fixed(name) else f"`{name}`"


def _chosen_rates(results: Results, bench: Bench, names: Sequence[str]) -> str:
    """Which of the rates each method was given."""
    if len(bench.rates) < 2:
        return ""
    every = [own for name in names for own in models_of(name)]
    chosen = {own: rows[0]["lr"] for own in every if (rows := results.rows(bench.name, own)) and 0 in rows and rows[0]["lr"]}
    told = ", ".join(f"`{own}` {rate:g}" for own, rate in chosen.items())
    return f"\nLearning rates, of {', '.join(f'{rate:g}' for rate in bench.rates)} by held-out text: {told}.\n"


# The page -----------------------------------------------------------------------------------------------------------------


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
