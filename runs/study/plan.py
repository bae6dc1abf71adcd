"""Which rows there are, in blocks, the most valuable first: where time ends early, the least is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any, Literal

from otaro.file.header import VERSION
from otaro.sefp.precision import PRECISIONS, Precision
from otaro.tune import config
from otaro.tune.config import Options, recipe

NAMES = tuple(map(str, PRECISIONS))
FULL = "full"
COLUMNS = (FULL, *NAMES)
SMOL, STORIES = BIG = ("SmolLM2-135M", "stories15M")
SGD_RATES = (1e-5, 1e-3, 0.01, 0.03)
"""The paper's, and up to where training breaks."""
ALPACA, LONG, DEMO = "SmolLM2-135M, Alpaca", "stories15M, long", "demo"
SEEDS = (0, 1, 2)
DEFAULTS = Options()
BEST = replace(config.BEST, full=config.FULL_OF_REPEATED_DATA, calibrate=False)
"""`best` of the rows: the recipe where data come again, packed plainly (`recipe_of` tells where)."""
FORMAT = int(VERSION)  # whose numbers; rows without it have scales that are powers of two


@dataclass(frozen=True)
class Bench:
    """A model, what it is tuned on and measured by, and the sizes of a run."""

    name: str
    model: str
    """A folder under models/; or `builtin`, or `moe`, which is trained here (moe.py)."""
    data: Literal["wikitext", "alpaca", "documentation"]
    """`documentation` is what `otaro demo` tunes on."""
    batch_size: int
    sequence_length: int
    window: int
    test_tokens: int
    steps: int
    rates: tuple[float, ...]
    """Tried for every method at the first seed; held-out text says which one the method gets."""
    compiled: bool = True
    held_out: float = 0.0
    """Share of the instructions that are held out, and as many to test on; of texts a tenth always is."""


BENCHES = {
    bench.name: bench
    for bench in (
        # What is tuned on here is small: 300 steps see either text about five times.
        Bench(SMOL, SMOL, "wikitext", 8, 512, 2048, 147_456, 300, (1.25e-5, 2.5e-5, 5e-5, 1e-4)),
        Bench(STORIES, STORIES, "wikitext", 16, 256, 256, 147_456, 300, (3.75e-5, 7.5e-5, 1.5e-4, 3e-4)),
        Bench("MoE", "moe", "wikitext", 16, 256, 256, 98_304, 200, (1e-3, 2e-3, 4e-3), compiled=False),
        Bench(ALPACA, SMOL, "alpaca", 16, 256, 256, 131_072, 252, (5e-5, 1e-4, 2e-4), held_out=0.1),
        Bench(LONG, STORIES, "wikitext", 4, 128, 256, 147_456, 2_000, (3.75e-5, 7.5e-5, 1.5e-4)),
        Bench(DEMO, "builtin", "documentation", 4, 128, 256, 65_536, 150, (4e-4,), compiled=False),
        # 20 epochs, as in the paper.
        Bench("SmolLM2-135M, paper", SMOL, "wikitext", 8, 512, 2048, 147_456, 1_200, SGD_RATES),
        Bench("stories15M, paper", STORIES, "wikitext", 16, 256, 256, 147_456, 1_300, SGD_RATES),
    )
}


@dataclass(frozen=True)
class Row:
    """One way to tune a bench's model."""

    bench: str
    name: str
    options: Options | None
    """None: not tuned."""
    seed: int = 0
    lr: float | None = None
    """None: that of the bench's rates which held-out text prefers for the method `rate_of`, first seed."""
    rate_of: str = ""
    steps: int | None = None
    """None: the bench's."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    schedule: Literal["cosine", "constant"] = "cosine"
    clip: float = 1.0
    start: Literal["plain", "calibrated"] = "plain"
    """The bench's model, or what `otaro pack --calibrate` made of it: its E5M8."""
    packing: Literal["plain", "calibrated"] = "plain"
    """How tuned weights become codes: rounded, or by `otaro pack --calibrate` on what was tuned on."""
    quantizer: str = "sefp"
    """Or another grid to round to, of `quantizers.py`."""
    judged: bool = True
    """Whether an average is kept if held-out text says so, or always."""
    measured: tuple[str, ...] = COLUMNS
    measures: tuple[str, ...] = ("perplexity",)
    """Of perplexity, zeroshot, and others: rounding to other formats, and reading at other grids."""

    @property
    def key(self) -> str:
        """Tells rows apart, for people and for the results file."""
        rate = "" if self.options is None else f", lr {self.lr:g}" if self.lr else ", chosen lr"
        return f"{self.bench}: {self.name}{rate}, seed {self.seed}"

    def settings(self) -> dict[str, Any]:
        """Everything that the numbers depend on, as JSON; of the options those that are not the default."""
        stated = asdict(self) | asdict(BENCHES[self.bench])
        for name in ("name", "bench", "seed", "compiled", "rates"):  # which rate: `results.is_done` asks
            stated.pop(name)
        if self.options is not None:
            ours, plain = self.options.to_dict(), DEFAULTS.to_dict()
            stated["options"] = {one: ours[one] for one in ours if one == "method" or ours[one] != plain[one]}
        unstated = {"judged": True, "held_out": 0.0, "start": "plain", "packing": "plain"}  # by older rows
        for name, usual in unstated.items():
            if stated[name] == usual:
                stated.pop(name)
        stated |= {"steps": self.steps or BENCHES[self.bench].steps, "format": FORMAT}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in stated.items()}


@dataclass(frozen=True)
class Observation:
    """`otaro analyze` on every layer of a model."""

    model: str
    reconstruction: Literal["midpoint", "truncate"]
    batches: int = 16
    batch_size: int = 4
    sequence_length: int = 256

    @property
    def key(self) -> str:
        """Tells observations apart."""
        return f"observe {self.model}, {self.reconstruction}"

    def settings(self) -> dict[str, Any]:
        """Everything that the numbers depend on, as JSON."""
        return asdict(self) | {"format": FORMAT}


Job = Row | Observation
Rows = Callable[[Bench, int], Iterable[Row]]


# Rows of a bench still to be named --------------------------------------------------------------------------


def method(name: str, options: Options | None = None, **changes: Any) -> Row:
    """At the rate that is best for it; a dedicated model is measured at its own precision."""
    own = name.removeprefix("fixed:").partition(",")[0]
    measured = (own,) if own in NAMES else COLUMNS
    return replace(Row("", name, options or Options(method=name), rate_of=name, measured=measured), **changes)


LOW = ("E5M4", "E5M3")
SEARCHES = ("uniform", "bps", "otaro")
DEDICATED = {p: method(f"fixed:{p}") for p in NAMES}
METHODS = {name: method(name) for name in ("fp", *SEARCHES)} | {"best": method("best", BEST)}
QAT = method("int4 QAT", DEDICATED["E5M3"].options, quantizer="int4", measured=("E5M3",))
"""A model of its own on torchao's grid of four bits."""
HALF, TWO_THIRDS = "best, full 1/2", "best, full 2/3"
CANDIDATES = {
    HALF: replace(BEST, full=0.5),
    "best, full 1/2, not distilled": replace(BEST, full=0.5, distill=0.0),
    "best, full 1/2, 1 distilled": replace(BEST, full=0.5, distill=1.0),
    TWO_THIRDS: replace(BEST, full=config.FULL_OF_NEW_DATA),
    "best, full 2/3, 1 distilled": replace(BEST, full=2 / 3, distill=1.0),
}
"""Recipes that may take the place of `best`, at its rate."""
CALIBRATED, JUDGED = ", calibrated", ", judged"
"""Ends of names: packed on the tuning text; the better of that and plain packing, by held-out text."""
PASSES = 2.2
"""Of a step of `best`, in plain steps: it has two passes, and quantizes for one of them.

Measured roughly, on a busy CPU; `benchmarks/bench_tune.py` on a GPU is to say it exactly.
"""
SIXTH = 1 / 6
"""Of the steps: six dedicated models then cost together what one model does."""


def recipe_of(bench: Bench) -> str:
    """The rows that are `--recipe best` there: it asks how often a run sees its data."""
    return ("best" if bench.name in REPEATED else TWO_THIRDS) + JUDGED


def held_as_best(precision: str) -> Options:
    """A dedicated model with what keeps `best` from fitting its text too closely."""
    return Options(method=f"fixed:{precision}", average=BEST.average)


def ablations() -> Iterator[tuple[str, Row]]:
    """By group: `best` or a search, at its rate, with one thing changed."""

    def best(change: str, **options: Any) -> Row:
        return method(f"best, {change}", replace(BEST, **options), rate_of="best")

    def search(name: str, change: str, **options: Any) -> Row:
        return method(f"{name}, {change}", Options(method=name, **options), rate_of=name)

    for scales in ("pow2", "E5M2"):
        yield "scales", replace(best(f"{scales} scales"), quantizer=scales)
    yield from (("group size", best(f"groups of {size}", group_size=size)) for size in (32, 128, 256))
    for grid in ("zero at E5M4", "zero nowhere", "zero a sixth off"):
        yield "place of zero", replace(best(grid), quantizer=grid)
    yield "reconstruction", best("truncate", reconstruction="truncate")
    for part in (0.0, 0.25, 0.75, 1.0):
        yield "distillation", best(f"{part:g} distilled", distill=part)
    for weights in ("0 0 0 1 1 1", "0 0 0 1 2 4", "0 0 1 1 1.25 2.6", "1 1 1 1 1 1"):
        yield "sampling", best(f"weights {weights}", weights=tuple(map(float, weights.split())))
    yield "parts", best("no full pass", full=0.0)
    yield "parts", best("never averaged", average=0.0)
    yield "parts", replace(best("always averaged"), judged=False)
    yield "parts", best("L2-SP 23", l2_sp=23.0)
    yield "parts", search("uniform", "0.5 distilled", distill=0.5)
    for exploration, name in product((3.0, 4.0, 6.0, 7.0), ("bps", "otaro")):
        yield "lambda", search(name, f"lambda {exploration:g}", exploration=exploration)
    yield from (("delay", search("otaro", f"N {delay}", delay=delay)) for delay in (1, 5, 20))
    yield "reduction", search("otaro", "mean", accumulate="mean")
    e5m5, e5m4, e5m3 = map(Precision, ("E5M5", "E5M4", "E5M3"))
    yield "ultra-low", search("otaro", "only E5M3 ultra-low", ultra_low=(e5m3,))
    yield "ultra-low", search("otaro", "E5M5 ultra-low too", ultra_low=(e5m5, e5m4, e5m3))


OF_THE_FORMAT = ("pow2 scales", "E5M2 scales", "groups of 32", "zero at E5M4", "zero a sixth off")
"""Those of the ablations that ask about the format itself."""


def paper_methods() -> list[Row]:
    """What the paper compares, with its options: truncation, lambda 5, N 10, nothing applied that waits.

    The paper says that the updates of its baselines are aligned with its own, so dedicated models of the
    ultra-low precisions come with delayed accumulation too: a search among one precision.
    """
    names = ["otaro", "bps", "uniform", "fp", *(f"fixed:{p}" for p in NAMES)]
    options = {name: recipe("paper", name)[0] for name in names}
    options |= {f"fixed:{p}, LAA": replace(options["otaro"], precisions=(Precision(p),)) for p in LOW}
    plain = {"optimizer": "sgd", "schedule": "constant", "clip": 0.0}
    return [method(name, own, **plain) for name, own in options.items()]


# Rows of a bench --------------------------------------------------------------------------------------------


def swept(bench: Bench, row: Row, seed: int) -> list[Row]:
    """The row at all rates of the bench at the first seed, at the chosen one at others."""
    row = replace(row, bench=bench.name, seed=seed)
    return [replace(row, lr=rate) for rate in bench.rates] if seed == SEEDS[0] else [row]


def recipe_rows(bench: Bench, seed: int) -> Iterator[Row]:
    """`best`, and what it is to hold against: tuning as usual, int4 QAT, plain sampling; then its rival.

    Other formats and the tasks are measured at one seed, one whose rate is chosen already.
    """
    more = {ALPACA: "zeroshot", SMOL: "others", STORIES: "others"}.get(bench.name)
    measures = ("perplexity", more) if more else ("perplexity",)
    if seed == SEEDS[0]:
        yield Row(bench.name, "none", None, measures=measures)
    for row in (METHODS["best"], METHODS["fp"], QAT, METHODS["uniform"]):
        asked = row.name in ("best", "fp") or (more == "zeroshot" and row is not QAT)
        yield from swept(bench, replace(row, measures=measures) if asked and seed == SEEDS[1] else row, seed)
    held = replace(QAT, name="int4 QAT, held as best", options=held_as_best("E5M3"))
    yield replace(held, bench=bench.name, seed=seed)
    if bench.name != LONG or seed == SEEDS[0]:
        yield Row(bench.name, HALF, CANDIDATES[HALF], seed, rate_of="best")


def start_rows(bench: Bench, seed: int) -> Iterator[Row]:
    """`best` from calibrated weights, at rates of its own; at the first seed also how these are before."""
    if seed == SEEDS[0]:
        yield Row(bench.name, "none, calibrated", None, start="calibrated")
    yield from swept(bench, method("best, calibrated start", BEST, start="calibrated"), seed)


def packing_rows(bench: Bench, seed: int) -> Iterator[Row]:
    """As usual and by recipes with more or less of full precision, then packed on the tuning text."""
    names = [HALF, TWO_THIRDS]
    if seed == SEEDS[0] and bench.name != LONG:
        names += ["best, full 1/2, not distilled", "best, full 2/3, 1 distilled"]
    recipes = {"fp": METHODS["fp"].options, "best": BEST} | {name: CANDIDATES[name] for name in names}
    for name, options in recipes.items():
        rate_of = "fp" if name == "fp" else "best"
        yield Row(bench.name, name + CALIBRATED, options, seed, rate_of=rate_of, packing="calibrated")


def candidate_rows(bench: Bench, seed: int) -> list[Row]:
    return [Row(bench.name, name, options, seed, rate_of="best") for name, options in CANDIDATES.items()]


def dedicated_rows(bench: Bench, seed: int, precisions: tuple[str, ...] = NAMES) -> Iterator[Row]:
    """Models of one precision each; the fine ones take the rate of full precision, which is much the same.

    In the long run, whose rows are dear, the low ones take the rate of the other model of four bits.
    """
    for p in reversed(precisions):
        row, low = DEDICATED[p], p in LOW
        if low and bench.name == ALPACA and seed == SEEDS[1]:
            row = replace(row, measures=("perplexity", "zeroshot"))
        if low and bench.name != LONG:
            yield from swept(bench, row, seed)
        else:
            yield replace(row, bench=bench.name, seed=seed, rate_of="int4 QAT" if low else "fp")


def paper_rows(bench: Bench, seed: int) -> Iterator[Row]:
    """The paper's recipe as written: plain SGD at 1e-5."""
    if seed == SEEDS[0]:
        yield Row(bench.name, "none", None, quantizer="truncate")
    yield from (replace(row, bench=bench.name, seed=seed, lr=SGD_RATES[0]) for row in paper_methods())


def paper_rates(bench: Bench, seed: int) -> Iterator[Row]:
    """The same at other rates and the one that held-out text prefers; where rows are dear, what decides."""
    decisive = (*METHODS, *(f"fixed:{p}" for p in LOW))
    for row in paper_methods():
        if bench.model == STORIES or row.name in decisive:
            yield from (one for one in swept(bench, row, seed) if one.lr != SGD_RATES[0])


def variant_rows(bench: Bench, seed: int) -> Iterator[Row]:
    """The paper's reconstruction with our optimizer, equal compute, other regularisers."""
    yield Row(bench.name, "none, truncate", None, quantizer="truncate")
    for name in ("fp", *(f"fixed:{p}" for p in NAMES), *SEARCHES):
        truncated = method(f"{name}, truncate", Options(method=name, reconstruction="truncate"))
        fine = name.startswith("fixed:") and not name.endswith(LOW)
        yield replace(truncated, bench=bench.name, seed=seed, rate_of="fp" if fine else name)
    fewer = round(bench.steps / PASSES)
    yield Row(bench.name, "best, equal compute", BEST, seed, rate_of="best", steps=fewer)
    for row in dedicated_rows(bench, SEEDS[1]):
        row = replace(row, seed=seed)
        yield replace(row, name=f"{row.name}, a sixth", steps=round(SIXTH * bench.steps))
        yield replace(row, name=f"{row.name}, held as best", options=held_as_best(row.measured[0]))


def ablation_rows(bench: Bench, seed: int) -> Iterator[Row]:
    yield from (replace(row, bench=bench.name, seed=seed) for _, row in ablations())


def format_rows(bench: Bench, seed: int) -> Iterator[Row]:
    yield from (row for row in ablation_rows(bench, seed) if row.name.removeprefix("best, ") in OF_THE_FORMAT)


def search_rows(bench: Bench, seed: int) -> Iterator[Row]:
    """The paper's search and delay with our numbers and optimizer."""
    for name in ("bps", "otaro"):
        yield from swept(bench, METHODS[name], seed)


# The study --------------------------------------------------------------------------------------------------

REGIMES = (SMOL, STORIES, "MoE", ALPACA, LONG, DEMO)
REPEATED = (SMOL, STORIES, LONG)
"""Where a run sees its text four to six times: the mixture of experts 1.8 times, others once or less."""
PAPER = tuple(f"{model}, paper" for model in BIG)


@cache
def blocks() -> dict[str, list[Job]]:
    """The rows of the study by what they are for, no row twice."""
    first, later = SEEDS[:1], SEEDS[1:]
    fine, low_rows = [name for name in REGIMES if name != LONG], partial(dedicated_rows, precisions=LOW)

    def rows(make: Rows, names: Sequence[str], seeds: Sequence[int] = first) -> list[Job]:
        return [row for seed in seeds for name in names for row in make(BENCHES[name], seed)]

    every = {
        "the recipe": rows(recipe_rows, REGIMES, SEEDS),
        "what may take its place": rows(candidate_rows, fine),
        "dedicated models": rows(low_rows, REGIMES, SEEDS) + rows(dedicated_rows, fine),
        "packed on the tuning text": rows(packing_rows, fine, SEEDS) + rows(packing_rows, [LONG], SEEDS),
        "the paper as written": rows(paper_rows, PAPER),
        "the paper as written, two seeds more": [
            row for name in reversed(PAPER) for row in rows(paper_rows, [name], later)
        ],
        "search and delay": rows(search_rows, BIG, SEEDS),
        "the format": rows(format_rows, BIG),
        "from calibrated weights": rows(start_rows, BIG, SEEDS),
        "the paper at other rates": rows(paper_rates, PAPER[::-1], SEEDS),
        "two seeds more": rows(format_rows, BIG, later) + rows(dedicated_rows, fine, later),
        "the rest of the tables": [
            *(Observation(model, "midpoint") for model in BIG),
            *rows(variant_rows, BIG),
            *rows(ablation_rows, BIG[::-1]),
            *(Observation(model, "truncate", batches=8) for model in BIG),
            *rows(search_rows, ["MoE"], SEEDS),
            *rows(variant_rows, BIG, later),
        ],
    }
    where = {job.key: name for name in reversed(every) for job in every[name]}  # the first that asks for it
    return {
        name: list({job.key: job for job in jobs if where[job.key] == name}.values())
        for name, jobs in every.items()
    }


def planned_rows() -> list[Row]:
    return [job for jobs in blocks().values() for job in jobs if isinstance(job, Row)]


# What a row takes of an H200 that fourteen workers share, in seconds: a plain step, and reading the texts at
# one precision. From the rows of format 1: their `seconds` are fourteen times the minutes that all took.
STEP = {SMOL: 0.020, STORIES: 0.005, "moe": 0.015, "builtin": 0.005}
READING = {SMOL: 0.30, STORIES: 0.08, "moe": 0.17, "builtin": 0.02}
OTHER_FORMATS, TASKS, OBSERVING = 6, 2, 14.0  # in readings; in readings at each precision; in seconds


def cost(job: Job) -> float:
    """Seconds of the GPU, roughly."""
    if isinstance(job, Observation):
        return OBSERVING
    bench = BENCHES[job.bench]
    readings = len(job.measured) * (1 + TASKS * ("zeroshot" in job.measures))
    readings += OTHER_FORMATS * ("others" in job.measures)
    found = readings * READING[bench.model] * (2 if job.packing == "calibrated" else 1)
    if job.options is None:
        return found
    passes = PASSES if job.options.full else 1.25 if job.options.distill else 1.0
    return found + (job.steps or bench.steps) * passes * STEP[bench.model]
