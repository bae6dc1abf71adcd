"""From the results file to the pages: tables between their marks, figures (figures.py) beside them. The rest is prose.

A mark is `<!-- study: NAME -->`, its end `<!-- /study -->`. A page that does not exist begins with all of them in order.
What the plan asks for and the results do not hold says so in its cell.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from otaro.sefp.precision import Precision
from runs.study import plan
from runs.study.figures import figures
from runs.study.plan import BENCHES, BIG, COLUMNS, FULL, NAMES, Bench
from runs.study.quantizers import OTHERS
from runs.study.results import Result, Results, finished, is_done, is_fixed, model_at, models_of

MAIN = ("none", "fp", "fixed", "uniform", "bps", "otaro", "best")
SHARES = {"1/3": "best" + plan.JUDGED, "1/2": plan.HALF + plan.JUDGED, "2/3": plan.TWO_THIRDS + plan.JUDGED}
"""Recipes by what they learn in full precision."""
RECIPE = ("none", "fp", "fp" + plan.CALIBRATED, "fixed", "uniform", *SHARES.values())
PAPERS = ("none", "fp", "fixed", "fixed, LAA", "uniform", "bps", "otaro")
MISSING = "*not run yet*"
ALL_MISSING = f"\n{MISSING}\n"


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
    if not any(cell and cell != MISSING for row in kept for cell in row[1:]):
        return ALL_MISSING
    lines = [head, ["---"] * len(head), *kept]
    return "\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def cells(results: Results, bench: str, name: str, columns: Sequence[str], asked: Collection[str] | None = None) -> list[str]:
    """A row of numbers; where `asked` has a column that is not there, it says so."""
    shown = [number(results.cell(bench, name, column)) for column in columns]
    if asked is None:
        return shown
    missing = [not cell and column in asked for cell, column in zip(shown, columns, strict=True)]
    if not any(shown) and any(missing):  # once for the whole row
        missing = [here and not any(missing[:at]) for at, here in enumerate(missing)]
    return [MISSING if here else cell for cell, here in zip(shown, missing, strict=True)]


def asked_of(bench: str) -> dict[str, set[str]]:
    """Which columns of which rows of a bench the plan has."""
    found: dict[str, set[str]] = {}
    for job in plan.small() if bench.startswith("small") else plan.full():
        if isinstance(job, plan.Row) and job.bench == bench:
            found.setdefault(job.name, set()).update(job.measured)
    return found


def method_table(results: Results, bench: str, names: Sequence[str]) -> str:
    """Methods by precision."""
    asked, rows = asked_of(bench), []
    for name in names:
        if is_fixed(name):
            wanted = {p for p in NAMES if p in asked.get(model_at(name, p), ())}
        else:
            wanted = {column for own in models_of(name) for column in asked.get(own, ())}
        rows.append([_called(name), *cells(results, bench, name, COLUMNS, wanted)])
    return table(["", *COLUMNS], rows)


# Tables -------------------------------------------------------------------------------------------------------------------


def regime(results: Results, bench: Bench) -> str:
    """Methods by precision, at the rates that held-out text chose, with models of four bits below."""
    asked = asked_of(bench.name)
    names = [*RECIPE, *(name for name in ("bps", "otaro") if name in asked)]
    four = [[_called(n), *cells(results, bench.name, n, ["E5M3"], ("E5M3",))] for n in ("int4 QAT", "int4 QAT, held as best")]
    text = method_table(results, bench.name, names) + table(["a model of its own", "at 4.25 bits"], four)
    return text + _chosen_rates(results, bench, [*names, "int4 QAT"]) + results.source(bench.name, [*names, "int4 QAT"])


LIMITS = {"E5M8": 0.7, "E5M7": 0.7, "E5M6": 0.7, "E5M5": 1.5, "E5M4": 4.0}
"""By how many percent one model may be behind tuning as usual in full precision."""


HEADS = {"perplexity": "test text", "heldout": "held-out text"}
RIVAL = 0.5
"""By how many percent it may be behind plain sampling and behind dedicated models."""


def bars(results: Results, benches: Sequence[Bench], measure: str) -> str:
    """In each regime: behind tuning as usual, and at E5M3 behind int4 QAT under the same regularisers; seeds paired."""
    rows = []
    for bench in benches:
        ours = plan.recipe_of(bench)
        called = {name: f"{share} in full precision{', `best`' * (name == ours)}" for share, name in SHARES.items()}
        called |= {"fp" + plan.CALIBRATED: "tuned as usual, calibrated", "uniform": "`uniform`"}
        for name, words in called.items():
            shown = []
            for column in NAMES:
                other = "int4 QAT, held as best" if column == "E5M3" else "fp"
                gaps = paired(results, bench, name, other, column, measure, "E5M3" if column == "E5M3" else FULL)
                shown.append(_percent(gaps, LIMITS.get(column, 0.0)))
            rows.append([f"{bench.name}: {words}", *(cell or MISSING for cell in shown)])
    return table([HEADS[measure], *NAMES], rows)


def rivals(results: Results, benches: Sequence[Bench], measure: str) -> str:
    """In each regime, behind plain sampling and behind a model dedicated to each precision; seeds paired."""
    rows = []
    for bench in benches:
        for other in ("uniform", "fixed"):
            gaps = [paired(results, bench, plan.recipe_of(bench), other, column, measure) for column in NAMES]
            rows.append([f"{bench.name}: against {_called(other)}", *(_percent(gap, RIVAL) for gap in gaps)])
    return table([HEADS[measure], *NAMES], rows)


def as_written(results: Results, bench: Bench) -> str:
    """The paper's recipe: SGD at 1e-5 in the first table, at the rate that held-out text prefers in the second."""
    own = [line for line in results.lines if line["bench"] == bench.name]
    stated, best_of = Results(results.path, results.version), Results(results.path, results.version)
    stated.lines = [line for line in own if line["lr"] in (None, bench.rates[0])]
    tried = {(line["name"], line["lr"]) for line in own if line["seed"] == plan.SEEDS[0]}
    swept = [line for line in own if line["lr"] is None or all((line["name"], rate) in tried for rate in bench.rates)]
    best_of.lines = [line for line in swept if line["seed"] == plan.SEEDS[0] or line["settings"]["lr"] is None]
    text = f"\nAt {bench.rates[0]:g}, as written:\n" + method_table(stated, bench.name, PAPERS)
    text += f"\nAt the best of {', '.join(f'{rate:g}' for rate in bench.rates)} by held-out text:\n"
    if any(line["lr"] for line in best_of.lines):
        text += method_table(best_of, bench.name, PAPERS) + _chosen_rates(best_of, bench, PAPERS)
    else:
        text += ALL_MISSING
    failed = [f"`{line['name']}` at {line['lr']:g}: {line['error']}" for line in own if "error" in line]
    if failed:
        text += f"\nEnded early: {'; '.join(sorted(failed))}.\n"
    return text + results.source(bench.name, PAPERS)


def powers_of_two(results: Results, bench: Bench) -> str:
    """Format 1, whose rows are kept; below, what the same method gains on format 2, seeds paired."""
    before = results.former()
    rows = [[_called(name), *cells(before, bench.name, name, COLUMNS)] for name in MAIN]
    four = number(before.values(bench.name, "int4 QAT", "E5M3"))
    rows.append(["`int4 QAT`, at the rate of that time", *[""] * 6, four])
    gains = []
    for name in ("none", "fp", "fixed", "uniform", "bps", "otaro"):
        pairs = [paired(results, bench, name, name, column, "perplexity", former=before) for column in NAMES]
        gains.append([_called(name), *(_percent(pair) for pair in pairs)])
    text = table(["format 1", *COLUMNS], rows) + "\n`best` is the recipe of that time.\n" + before.source(bench.name, MAIN)
    return text + "\nFormat 2 against it:\n" + table(["", *NAMES], gains)


def truncated(results: Results, bench: Bench) -> str:
    """AdamW with the paper's reconstruction."""
    names = [f"{name}, truncate" for name in MAIN if name != "best"]
    return method_table(results, bench.name, names) + results.source(bench.name, names)


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


def paired(
    results: Results,
    bench: Bench,
    name: str,
    other: str,
    column: str,
    measure: str = "perplexity",
    against: str | None = None,
    former: Results | None = None,
) -> list[float]:
    """Percent that a row is behind another at the seeds that both have; the other at the same precision or `against`."""
    ours = results.rows(bench.name, model_at(name, column))
    theirs = (former or results).rows(bench.name, model_at(other, against or column))
    pairs = [
        (ours[seed].get(measure, {}).get(column), theirs[seed].get(measure, {}).get(against or column))
        for seed in sorted(ours.keys() & theirs.keys())
    ]
    return [100 * (a / b - 1) for a, b in pairs if a and b]


def _percent(gaps: Sequence[float], limit: float = 0.0) -> str:
    """Mean and spread; bold above a limit."""
    if not gaps:
        return ""
    spread = f" ± {statistics.stdev(gaps):.2f}" if len(gaps) > 1 else ""
    shown = f"{statistics.fmean(gaps):+.2f}{spread}%"
    return f"**{shown}**" if statistics.fmean(gaps) > limit else shown


def _paired(results: Results, bench: Bench, name: str, other: str, column: str, measure: str) -> str:
    return _percent(paired(results, bench, name, other, column, measure))


def calibrated(results: Results, bench: Bench) -> str:
    """Whether calibrated weights are a better start, seeds paired."""
    before, after = ("none", "none, calibrated"), ("best", "best, calibrated start")
    text = method_table(results, bench.name, [*before, *after])
    gaps = [
        [f"{_called(theirs)}, {told}", *(_paired(results, bench, theirs, ours, column, measure) for column in NAMES)]
        for ours, theirs in (before, after)
        for told, measure in (("test", "perplexity"), ("held-out", "heldout"))
    ]
    text += table(["against plain weights", *NAMES], gaps)
    return text + _chosen_rates(results, bench, after) + results.source(bench.name, [*before, *after])


def equal_compute(results: Results, bench: Bench) -> str:
    names = ("best, equal compute", "fixed", "best", "fixed, a sixth")
    rows = [[_called(name), *(number(results.cell(bench.name, name, c)) for c in NAMES)] for name in names]
    for name, other in (names[:2], names[:1:-1]):
        gaps = [_paired(results, bench, name, other, column, "perplexity") for column in NAMES]
        rows.append([f"{_called(name)} against {_called(other)}", *gaps])
    return table(["", *NAMES], rows) + results.source(bench.name, names)


def zero_shot(results: Results, bench: Bench) -> str:
    """Averages by precision, then tasks, of the first seed that has them."""
    seeds = sorted(results.seeds_with(bench.name, "zeroshot"))[:1]

    def found(name: str) -> Result:
        lines: list[Result] = [line for line in results.rows(bench.name, name).values() if "zeroshot" in line]
        return lines[0]["zeroshot"] if lines else {}

    rows = []
    for name in MAIN:
        tasks = [found(model_at(name, c)).get(c) if not (is_fixed(name) and c == FULL) else None for c in COLUMNS]
        rows.append([_called(name), *(_average(some) if some else "" for some in tasks)])
    text = table(["average of the tasks, %", *COLUMNS], rows)
    for name in ("none", "fp", "best"):
        tasks_of = found(name)
        names = list(next(iter(tasks_of.values()), {}))
        some = [[task_name, *(_share(tasks_of.get(c, {}).get(task_name)) for c in COLUMNS)] for task_name in names]
        if some:
            text += table([f"`{name}`, %", *COLUMNS], some)
    return text + results.source(bench.name, MAIN, [0, *seeds])


def _average(tasks: dict[str, list[float | None]]) -> str:
    errors = [error or 0.0 for _, error in tasks.values()]
    mean = statistics.fmean(share for share, _ in tasks.values() if share is not None)
    return f"{100 * mean:.1f} ± {100 * math.sqrt(sum(e * e for e in errors)) / len(tasks):.1f}"


def _share(found: list[float | None] | None) -> str:
    return "" if not found or found[0] is None else f"{100 * found[0]:.1f} ± {100 * (found[1] or 0.0):.1f}"


def ablations(results: Results, bench: Bench) -> str:
    groups: dict[str, list[str]] = {}
    for group, row in plan.ablations():
        groups.setdefault(group, []).append(row.name)
    bases = {"lambda": ("bps", "otaro"), "delay": ("bps", "otaro"), "reduction": ("otaro",), "ultra-low": ("otaro",)}
    titles = {
        "lambda": "λ (5 is the default)",
        "delay": "N (10 is the default; `bps` does without LAA)",
        "reduction": "sum or mean",
    }
    rows, shown = [], set[str]()
    for group, names in groups.items():
        made = [name for name in names if results.has(bench.name, name)]
        if not made:
            continue
        rows.append([f"**{titles.get(group, group)}**", *([""] * 6), " "])
        every = [*bases.get(group, ("best",)), *made]
        shown |= {*every}
        seeds = results.shared(bench.name, every)
        rows += [
            [_called(name), *(number(results.values(bench.name, name, c, seeds=seeds)) for c in COLUMNS)] for name in every
        ]
    return table(["", *COLUMNS], rows) + results.source(bench.name, sorted(shown))


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
    """What weights tuned in one way are worth in other formats."""
    tuned = [name for name in ("none", "fp", "best") if results.rows(bench.name, name)]
    rows, seeds = [], results.seeds_with(bench.name, "others")
    for name in (*OTHERS, *NAMES):
        bits = OTHERS[name][0] if name in OTHERS else Precision(name).bits_per_weight()
        shown = [name, f"{bits:.3f}"]
        for weights in tuned:
            at = None if weights == "none" else seeds
            measure = "others" if name in OTHERS else "perplexity"
            shown.append(number(results.values(bench.name, weights, name, measure, at)))
        rows.append(shown)
    rows.sort(key=lambda row: float(row[1]))
    text = table(["", "bits a weight", *(f"`{name}`" for name in tuned)], rows) if tuned else ALL_MISSING
    own = {"int4 QAT": ("int4 QAT, groups of 64", "4.25"), "int4 QAT, held as best": ("the same, averaged", "4.25")}
    own |= {"fixed:E5M3": ("`fixed:E5M3`", "4.125"), "best": ("`best`", "4.125")}
    common = results.shared(bench.name, list(own))
    trained = [
        [*called, number(results.values(bench.name, name, "E5M3", seeds=common)) or MISSING] for name, called in own.items()
    ]
    text += table(["tuned at four bits", "bits a weight", "perplexity"], trained)
    return text + results.source(bench.name, ["none", *own, "fp"])


def boundaries(results: Results) -> str:
    """How many weights lie on a border between two cells, by precision."""
    rows, told = [], []
    for line in results.lines:
        if line["bench"] == "boundaries":
            rows.append([line["name"], *(f"{line['on_border'][p]:.4%}" for p in NAMES), f"{line['zeros']:.4%}"])
            told.append(f"`{line['command']}`; commit {line['commit']}.")
    return table(["share of the weights", *NAMES, "exactly zero"], rows) + "".join(f"\n{one}\n" for one in told)


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
    if not chosen:
        return ""
    told = ", ".join(f"`{own}` {rate:g}" for own, rate in chosen.items())
    return f"\nLearning rates, of {', '.join(f'{rate:g}' for rate in bench.rates)} by held-out text: {told}.\n"


# The page -----------------------------------------------------------------------------------------------------------------


def sections(results: Results, *, small: bool) -> dict[str, Callable[[], str]]:
    """What stands between the marks, by name."""
    benches = [BENCHES[name] for name in (("small",) if small else BIG)]
    longer = [BENCHES["small, longer"]] if small else []
    regimes = [BENCHES[name] for name in (("small", "small MoE") if small else plan.REGIMES)]
    papers = [BENCHES[name] for name in (("small, paper",) if small else plan.PAPER)]
    found: dict[str, Callable[[], str]] = {
        "bars, held-out": partial(bars, results, regimes, "heldout"),
        "bars, test": partial(bars, results, regimes, "perplexity"),
        "rivals, held-out": partial(rivals, results, regimes, "heldout"),
        "rivals, test": partial(rivals, results, regimes, "perplexity"),
    }
    found |= {f"regime, {bench.name}": partial(regime, results, bench) for bench in regimes}
    found |= {f"paper, {bench.name}": partial(as_written, results, bench) for bench in papers}
    kinds: dict[str, Callable[..., str]] = {
        "against fixed": against_fixed,
        "choice": partial(against_fixed, measure="heldout"),  # what recipes are chosen by
        "truncate": truncated,
        "equal compute": equal_compute,
        "calibrated": calibrated,
    }
    for kind, make in kinds.items():
        found |= {f"{kind}, {bench.name}": partial(make, results, bench) for bench in benches}
    found |= {f"regime, {bench.name}": partial(regime, results, bench) for bench in longer}
    found["strategies"] = partial(strategies, results, [*benches, *longer])
    found["zero-shot"] = partial(zero_shot, results, BENCHES["small, questions" if small else plan.ALPACA])
    for kind, make in {"ablations": ablations, "paths": paths}.items():
        found |= {f"{kind}, {bench.name}": partial(make, results, bench) for bench in (*benches, *longer)}
    found |= {f"observations, {bench.model}": partial(observed, results, bench.model) for bench in benches}
    found |= {f"others, {bench.name}": partial(others, results, bench) for bench in benches}
    found["boundaries"] = partial(boundaries, results)
    if not small:
        found |= {f"powers of two, {name}": partial(powers_of_two, results, BENCHES[name]) for name in (*BIG, "MoE")}
        found["state"] = partial(state, results)
    return found


def state(results: Results) -> str:
    """How much of the plan is there."""
    done = finished(results.lines)
    lines = []
    for name, jobs in plan.blocks().items():
        made = sum(is_done(job, done) for job in jobs)
        minutes = sum(plan.cost(job) for job in jobs if not is_done(job, done)) / 60
        lines.append([name, f"{made} of {len(jobs)}", f"{minutes:.0f}" if minutes else ""])
    return table(["rows of format 2, most valuable first", "made", "minutes of an H200 that the others take, about"], lines)


def fill(page: str, made: dict[str, Callable[[], str]]) -> str:
    """The page with everything between its marks made anew."""

    def replaced(match: re.Match[str]) -> str:
        if match[1] not in made:
            raise SystemExit(f"error: the page has a mark for {match[1]!r}, which is none of: {', '.join(made)}")
        return f"<!-- study: {match[1]} -->\n{made[match[1]]()}\n<!-- /study -->"

    return re.sub(r"<!-- study: (.+?) -->\n.*?<!-- /study -->", replaced, page, flags=re.DOTALL)


def write(results_file: Path, pages: Sequence[Path], *, small: bool) -> list[str]:
    """Write pages and figures; the names of the files."""
    results = Results(results_file)
    made = sections(results, small=small)
    for page in pages:
        if page.is_file():
            text = page.read_text()
        else:
            text = "# Results\n\n" + "\n".join(f"## {name}\n\n<!-- study: {name} -->\n<!-- /study -->\n" for name in made)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(fill(text, made))
    drawn, folder = figures(results, small=small), pages[0].parent / "figures"
    folder.mkdir(exist_ok=True)
    for name, drawing in drawn.items():
        (folder / name).write_text(drawing)
    return [*map(str, pages), *(str(folder / name) for name in drawn)]
