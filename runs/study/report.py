"""From the results file to the pages: tables between marks, figures (figures.py) beside; the rest is prose.

A mark is `<!-- study: NAME -->`, its end `<!-- /study -->`. What the plan asks for and the results do not
hold says so in its cell.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby, product
from pathlib import Path

from otaro.sefp.precision import Precision
from runs.study import plan
from runs.study.figures import figures
from runs.study.plan import BENCHES, BIG, COLUMNS, FULL, LOW, NAMES
from runs.study.quantizers import OTHERS
from runs.study.results import Made, Result, finished, is_done, is_fixed, model_at, models_of, read

MAIN = ("none", "fp", "fixed", *plan.SEARCHES, "best")
SHARES = {"1/3": "best" + plan.JUDGED, "1/2": plan.HALF + plan.JUDGED, "2/3": plan.TWO_THIRDS + plan.JUDGED}
"""Recipes by what they learn in full precision."""
RECIPE = ("none", "fp", "fp" + plan.CALIBRATED, "fixed", "uniform", *SHARES.values())
PAPERS = ("none", "fp", "fixed", "fixed, LAA", *plan.SEARCHES)
TEXTS = {"test": "perplexity", "held-out": "heldout"}
LIMITS = {"E5M8": 0.7, "E5M7": 0.7, "E5M6": 0.7, "E5M5": 1.5, "E5M4": 4.0}
"""By how many percent one model may be behind tuning as usual in full precision."""
RIVAL = 0.5
"""By how many percent it may be behind plain sampling and behind dedicated models."""
MISSING = "*not run yet*"
ALL_MISSING = f"\n{MISSING}\n"


# Cells ------------------------------------------------------------------------------------------------------


def number(values: Sequence[float]) -> str:
    """Mean and, of several, the spread (standard deviation)."""
    if not values:
        return ""
    mean = statistics.fmean(values)
    if mean >= 1e6:
        return f"{mean:.0e}"
    digits = 3 if mean < 100 else 1
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean:.{digits}f}{spread}"


def behind(
    made: Made, name: str, other: Made, its: str, column: str, measure: str, limit: float = 0, at: str = ""
) -> str:
    """By how many percent a row is worse (+) or better (-) than another; bold above a limit.

    At the seeds that both have; the other is taken at the same precision, or at that of `at`.
    """
    ours, theirs = made.by_seed(name, column, measure), other.by_seed(its, at or column, measure)
    gaps = [100 * (ours[seed] / theirs[seed] - 1) for seed in sorted(ours.keys() & theirs.keys())]
    if not gaps:
        return ""
    spread = f" ± {statistics.stdev(gaps):.2f}" if len(gaps) > 1 else ""
    shown = f"{statistics.fmean(gaps):+.2f}{spread}%"
    return f"**{shown}**" if statistics.fmean(gaps) > limit else shown


def all_behind(made: Made, name: str, its: str, measure: str = "perplexity", limit: float = 0) -> list[str]:
    return [behind(made, name, made, its, column, measure, limit) for column in NAMES]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown, without rows that are empty."""
    kept = [row for row in rows if any(row[1:])]
    if not any(cell and cell != MISSING for row in kept for cell in row[1:]):
        return ALL_MISSING
    lines = [head, ["---"] * len(head), *kept]
    return "\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def asked_of(bench: str) -> dict[str, set[str]]:
    """Which columns of which rows of a bench the plan has."""
    found: dict[str, set[str]] = {}
    for row in plan.planned_rows():
        if row.bench == bench:
            found.setdefault(row.name, set()).update(row.measured)
    return found


def method_table(made: Made, names: Sequence[str]) -> str:
    """Methods by precision; what was asked for and is not there says so, once where it is a whole row."""
    asked, rows = asked_of(made.bench.name), []
    for name in names:
        wanted = {column for own in models_of(name) for column in asked.get(own, ())}
        shown = [number(made.values(name, column)) for column in COLUMNS]
        missing = [i for i, column in enumerate(COLUMNS) if column in wanted and not shown[i]]
        for i in missing if any(shown) else missing[:1]:
            shown[i] = MISSING
        rows.append([called(name), *shown])
    return table(["", *COLUMNS], rows)


def called(name: str) -> str:
    if name.startswith("none"):
        return name.replace("none", "before", 1)
    return f"`fixed:`, {len(NAMES)} models{name.removeprefix('fixed')}" if is_fixed(name) else f"`{name}`"


def chosen_rates(made: Made, names: Sequence[str]) -> str:
    """Which of the rates each method was given."""
    every, rates = [own for name in names for own in models_of(name)], made.bench.rates
    chosen = {own: row["lr"] for own in every if (row := made.rows(own).get(0)) and row["lr"]}
    if not chosen or len(rates) < 2:
        return ""
    told = ", ".join(f"`{own}` {rate:g}" for own, rate in chosen.items())
    return f"\nLearning rates, of {', '.join(f'{rate:g}' for rate in rates)} by held-out text: {told}.\n"


# Tables -----------------------------------------------------------------------------------------------------


def regime(made: Made) -> str:
    """Methods by precision, at the rates that held-out text chose, with models of four bits below."""
    asked = asked_of(made.bench.name)
    names = [*RECIPE, *(name for name in ("bps", "otaro") if name in asked)]
    four = {n: number(made.values(n, "E5M3")) or MISSING for n in ("int4 QAT", "int4 QAT, held as best")}
    rows = [[called(name), value] for name, value in four.items()]
    text = method_table(made, names) + table(["a model of its own", "at 4.25 bits"], rows)
    return text + chosen_rates(made, [*names, "int4 QAT"]) + made.source([*names, "int4 QAT"])


def bars(regimes: Iterable[Made], text: str) -> str:
    """In each regime: behind tuning as usual, at E5M3 behind int4 QAT with `best`'s average; seeds paired."""
    rows, measure = [], TEXTS[text]
    for made in regimes:
        ours = plan.recipe_of(made.bench)
        full = "in full precision"
        names = {name: f"{part} {full}{', `best`' * (name == ours)}" for part, name in SHARES.items()}
        names |= {"fp" + plan.CALIBRATED: "tuned as usual, calibrated", "uniform": "`uniform`"}
        for name, words in names.items():
            cells = [behind(made, name, made, "fp", p, measure, LIMITS[p], at=FULL) for p in LIMITS]
            cells.append(behind(made, name, made, "int4 QAT, held as best", "E5M3", measure))
            rows.append([f"{made.bench.name}: {words}", *(cell or MISSING for cell in cells)])
    return table([f"{text} text", *NAMES], rows)


def rivals(regimes: Iterable[Made], text: str) -> str:
    """In each regime, behind plain sampling and behind a model dedicated to each precision; seeds paired."""
    rows = []
    for made in regimes:
        for other in ("uniform", "fixed"):
            gaps = all_behind(made, plan.recipe_of(made.bench), other, TEXTS[text], RIVAL)
            rows.append([f"{made.bench.name}: against {called(other)}", *gaps])
    return table([f"{text} text", *NAMES], rows)


def as_written(made: Made) -> str:
    """The paper's recipe: SGD at 1e-5 in the first table, in the second at the rate held-out text prefers."""
    own, bench, first = made.lines, made.bench, plan.SEEDS[0]
    stated = Made(bench, [line for line in own if line["lr"] in (None, bench.rates[0])])
    tried = {(line["name"], line["lr"]) for line in own if line["seed"] == first}
    whole = {name for name, _ in tried if all((name, rate) in tried for rate in bench.rates)}
    swept = [line for line in own if line["lr"] is None or line["name"] in whole]
    best_of = Made(bench, [line for line in swept if line["seed"] == first or line["settings"]["lr"] is None])
    text = f"\nAt {bench.rates[0]:g}, as written:\n" + method_table(stated, PAPERS)
    text += f"\nAt the best of {', '.join(f'{rate:g}' for rate in bench.rates)} by held-out text:\n"
    if any(line["lr"] for line in best_of.lines):
        text += method_table(best_of, PAPERS) + chosen_rates(best_of, PAPERS)
    else:
        text += ALL_MISSING
    failed = [f"`{line['name']}` at {line['lr']:g}: {line['error']}" for line in own if "error" in line]
    if failed:
        text += f"\nEnded early: {'; '.join(sorted(failed))}.\n"
    return text + made.source(PAPERS)


def powers_of_two(made: Made, former: Made) -> str:
    """Format 1, whose rows are kept; below, what the same method gains on format 2, seeds paired."""
    rows = [[called(name), *(number(former.values(name, column)) for column in COLUMNS)] for name in MAIN]
    four = number(former.values("int4 QAT", "E5M3"))
    rows.append(["`int4 QAT`, at the rate of that time", *[""] * 6, four])
    text = table(["format 1", *COLUMNS], rows) + "\n`best` is the recipe of that time.\n"
    gains = []
    for name in MAIN[:-1]:
        gains.append([called(name), *(behind(made, name, former, name, p, "perplexity") for p in NAMES)])
    return text + former.source(MAIN) + "\nFormat 2 against it:\n" + table(["", *NAMES], gains)


def truncated(made: Made) -> str:
    """AdamW with the paper's reconstruction."""
    names = [f"{name}, truncate" for name in MAIN[:-1]]
    return method_table(made, names) + made.source(names)


def against_fixed(made: Made, text: str) -> str:
    """How one model for all compares with each dedicated one, seeds paired."""
    names = ("best", *plan.CANDIDATES, *plan.SEARCHES)
    rows = [[f"`{name}`", *all_behind(made, name, "fixed", TEXTS[text])] for name in names]
    held = "fixed, held as best"
    rows.append(["`best` against `fixed:` held as `best`", *all_behind(made, "best", held, TEXTS[text])])
    return table(["", *NAMES], rows) + made.source([*names, "fixed", held])


def strategies(models: Sequence[Made]) -> str:
    """What path search adds to uniform sampling, and delayed accumulation to path search, seeds paired."""
    rows = []
    for (ours, its), made, text in product((("bps", "uniform"), ("otaro", "bps")), models, TEXTS):
        if any(gaps := all_behind(made, ours, its, TEXTS[text])):
            rows.append([f"{made.bench.name}, {text}", f"`{ours}` against `{its}`", *gaps])
    return table(["", "", *NAMES], rows) + "\nRows and commands as above.\n"


def calibrated(made: Made) -> str:
    """Whether calibrated weights are a better start, seeds paired."""
    before, after = ("none", "none, calibrated"), ("best", "best, calibrated start")
    gaps = [
        [f"{called(ours)}, {text}", *all_behind(made, ours, plain, measure)]
        for plain, ours in (before, after)
        for text, measure in TEXTS.items()
    ]
    text = method_table(made, [*before, *after]) + table(["against plain weights", *NAMES], gaps)
    return text + chosen_rates(made, after) + made.source([*before, *after])


def equal_compute(made: Made) -> str:
    names = ("best, equal compute", "fixed", "best", "fixed, a sixth")
    rows = [[called(name), *(number(made.values(name, column)) for column in NAMES)] for name in names]
    for name, other in (names[:2], names[:1:-1]):
        rows.append([f"{called(name)} against {called(other)}", *all_behind(made, name, other)])
    return table(["", *NAMES], rows) + made.source(names)


def zero_shot(made: Made) -> str:
    """Averages by precision, then tasks, of the first seed that has them."""

    def found(name: str, column: str) -> Result:
        lines = made.rows(model_at(name, column)).values()
        return next((line["zeroshot"].get(column, {}) for line in lines if "zeroshot" in line), {})

    rows = [[called(name), *(average(found(name, p).values()) for p in COLUMNS)] for name in MAIN]
    text = table(["average of the tasks, %", *COLUMNS], rows)
    for name in ("none", "fp", "best"):
        tasks = found(name, FULL)
        if rows := [[task, *(average([found(name, p)[task]]) for p in COLUMNS)] for task in tasks]:
            text += table([f"`{name}`, %", *COLUMNS], rows)
    return text + made.source(MAIN, [0, *made.seeds_with("zeroshot")[:1]])


def average(tasks: Iterable[tuple[float, float]]) -> str:
    """Of accuracies and their standard errors."""
    found = list(tasks)
    if not found:
        return ""
    mean = statistics.fmean(share for share, _ in found)
    return f"{100 * mean:.1f} ± {100 * math.sqrt(sum(error * error for _, error in found)) / len(found):.1f}"


def ablations(made: Made) -> str:
    both, last = ("bps", "otaro"), ("otaro",)
    bases = {"lambda": both, "delay": both, "reduction": last, "ultra-low": last}
    titles = {
        "lambda": "λ (5 is the default)",
        "delay": "N (10 is the default; `bps` does without LAA)",
        "reduction": "sum or mean",
    }
    rows, shown = [], set[str]()
    for group, members in groupby(plan.ablations(), key=lambda one: one[0]):
        if there := [row.name for _, row in members if made.rows(row.name)]:
            every = [*bases.get(group, ("best",)), *there]
            shown.update(every)
            seeds = made.shared(every)
            rows.append([f"**{titles.get(group, group)}**", *([""] * 6), " "])
            for name in every:
                rows.append([called(name), *(number(made.values(name, p, seeds=seeds)) for p in COLUMNS)])
    return table(["", *COLUMNS], rows) + made.source(sorted(shown))


def paths(made: Made) -> str:
    """How often the search took each precision, by lambda."""
    rows, names = [], ("bps, lambda 3", "bps, lambda 4", "bps", "bps, lambda 6", "bps, lambda 7", "otaro")
    for name in names:
        taken = [line["path"] for line in made.rows(name).values() if "path" in line]
        total = sum(sum(counts.values()) for counts in taken) or 1
        shares = [sum(counts.get(c, 0) for counts in taken) / total for c in NAMES]
        rows.append([name, *(f"{share:.1%}" if taken else "" for share in shares)])
    return table(["share of the steps", *NAMES], rows) + made.source(names)


def others(made: Made) -> str:
    """What weights tuned in one way are worth in other formats."""
    tuned = [name for name in ("none", "fp", "best") if made.rows(name)]
    seeds = made.seeds_with("others")
    bits = {name: (bits, "others") for name, (bits, _) in OTHERS.items()}
    bits |= {name: (Precision(name).bits_per_weight(), "perplexity") for name in NAMES}
    at = {weights: None if weights == "none" else seeds for weights in tuned}
    rows = []
    for name, (each, measure) in sorted(bits.items(), key=lambda one: one[1][0]):
        cells = (number(made.values(weights, name, measure, at[weights])) for weights in tuned)
        rows.append([name, f"{each:.3f}", *cells])
    text = table(["", "bits a weight", *(f"`{name}`" for name in tuned)], rows)
    own = {"int4 QAT": ("int4 QAT, groups of 64", "4.25")}
    own |= {"int4 QAT, held as best": ("the same, averaged", "4.25")}
    own |= {"fixed:E5M3": ("`fixed:E5M3`", "4.125"), "best": ("`best`", "4.125")}
    common = made.shared(list(own))
    trained = [[*own[name], number(made.values(name, "E5M3", seeds=common)) or MISSING] for name in own]
    text += table(["tuned at four bits", "bits a weight", "perplexity"], trained)
    return text + made.source(["none", *own, "fp"])


def boundaries(lines: Iterable[Result]) -> str:
    """How many weights lie on a border between two cells, by precision."""
    counted, rows = [line for line in lines if line["bench"] == "boundaries"], []
    for one in counted:
        rows.append([one["name"], *(f"{one['on_border'][p]:.4%}" for p in NAMES), f"{one['zeros']:.4%}"])
    commits = ", ".join(dict.fromkeys(one["commit"] for one in counted))
    return table(["share of the weights", *NAMES, "exactly zero"], rows) + f"\nCounted at commit {commits}.\n"


def observed(lines: Iterable[Result], model: str) -> str:
    """Part 4, from `otaro analyze`."""
    found = {line["name"]: line for line in lines if line["bench"] == "observe"}
    ways = [way for way in ("midpoint", "truncate") if f"{model}, {way}" in found]
    return "".join(_observed(found[f"{model}, {way}"], way) for way in ways) or "\n*Not measured.*\n"


def _observed(line: Result, reconstruction: str) -> str:
    rows = []
    for index, name in enumerate(NAMES):
        fit, exponent = line["fit"][name], line["noise"][name]["exponent"]
        cosines = [m["to_fp"][index] for m in line["modules"] if m["to_fp"][index] is not None]
        cells = [name, f"{line['to_fp'][index]:.3f}", f"{min(cosines):.3f}"]
        cells += [f"{line['norm_error'][name]:.1%}"]
        cells += [f"{fit['y_share']:.3f}", "" if fit["y_bias"] is None else f"{fit['y_bias']:.2f}"]
        rows.append([*cells, "" if exponent is None else f"N^{exponent:+.2f}"])
    chance = line["settings"]["batches"] ** -0.5
    head = [f"`{reconstruction}`", "cosine with full precision", "worst module", "norm error", "size of Y"]
    head += [f"bias of Y ({chance:.2f}: noise)", "sum of Y over sum of gradients (N^-0.50: noise)"]
    sizes = [
        [f"groups of {size}", f"{found['outlier_groups']:.3%}"]
        + [f"{found[kind][p] or 0.0:.1%}" for kind in ("lost", "error") for p in LOW]
        for size, found in line["weights"].items()
    ]
    text = table(head, rows)
    text += table(["", "with an outlier", "lost at E5M4", "at E5M3", "error at E5M4", "at E5M3"], sizes)
    most = ", ".join(f"`{name}` {share:.2%}" for name, share in line["most_outliers"].items())
    text += f"\nMost outliers in groups of 64: {most}.\n\n`{line['command']}`, and `otaro analyze weights`; "
    return text + f"commit {line['commit']}; {line['machine']}.\n"


def state(done: dict[str, Result]) -> str:
    """How much of the plan is there."""
    rows = []
    for name, jobs in plan.blocks().items():
        missing = [job for job in jobs if not is_done(job, done)]
        minutes = f"{sum(map(plan.cost, missing)) / 60:.0f}" if missing else ""
        rows.append([name, f"{len(jobs) - len(missing)} of {len(jobs)}", minutes])
    takes = "minutes of an H200 that the others take, about"
    return table(["rows of format 2, most valuable first", "made", takes], rows)


# The pages --------------------------------------------------------------------------------------------------


def sections(lines: Sequence[Result]) -> dict[str, str]:
    """What stands between the marks, by name."""
    done, former = finished(lines), finished(lines, 1)
    made = {name: Made(bench, done.values()) for name, bench in BENCHES.items()}
    regimes, models = [made[name] for name in plan.REGIMES], [made[name] for name in BIG]
    by_bench: dict[str, tuple[Sequence[str], Callable[[Made], str]]] = {
        "regime": (plan.REGIMES, regime),
        "paper": (plan.PAPER, as_written),
        "against fixed": (BIG, partial(against_fixed, text="test")),
        "choice": (BIG, partial(against_fixed, text="held-out")),  # what recipes are chosen by
        "truncate": (BIG, truncated),
        "equal compute": (BIG, equal_compute),
        "calibrated": (BIG, calibrated),
        "ablations": (BIG, ablations),
        "paths": (BIG, paths),
        "others": (BIG, others),
    }
    found = {f"{kind}, {one}": make(made[one]) for kind, (names, make) in by_bench.items() for one in names}
    found |= {f"bars, {text}": bars(regimes, text) for text in TEXTS}
    found |= {f"rivals, {text}": rivals(regimes, text) for text in TEXTS}
    found |= {f"observations, {model}": observed(done.values(), model) for model in BIG}
    for name in (*BIG, "MoE"):
        found[f"powers of two, {name}"] = powers_of_two(made[name], Made(BENCHES[name], former.values()))
    found |= {"strategies": strategies(models), "zero-shot": zero_shot(made[plan.ALPACA])}
    return found | {"boundaries": boundaries(done.values()), "state": state(done)}


def fill(page: str, made: Mapping[str, str]) -> str:
    """The page with everything between its marks made anew."""

    def replaced(match: re.Match[str]) -> str:
        if match[1] not in made:
            raise SystemExit(f"error: the page has a mark {match[1]!r}, which is none of: {', '.join(made)}")
        return f"<!-- study: {match[1]} -->\n{made[match[1]]}\n<!-- /study -->"

    return re.sub(r"<!-- study: (.+?) -->\n.*?<!-- /study -->", replaced, page, flags=re.DOTALL)


def write(results: Path, folder: Path) -> list[Path]:
    """Fill in the pages of a folder and draw the figures; the files."""
    lines = read(results)
    made, models = sections(lines), [Made(BENCHES[name], finished(lines).values()) for name in BIG]
    files = {page: fill(page.read_text(), made) for page in (folder / "results.md", folder / "tables.md")}
    files |= {folder / "figures" / name: drawing for name, drawing in figures(models).items()}
    for path, content in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    return list(files)
