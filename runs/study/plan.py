"""Which rows there are, in blocks, the most valuable first: where time ends early, the least is lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
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
"""`best` of the rows: the recipe where data come again, packed plainly. `recipe_of` says what it is of a bench."""
FORMAT = int(VERSION)  # whose numbers; rows without it have scales that are powers of two


@dataclass(frozen=True)
class Bench:
    """A model, what it is tuned on and measured by, and the sizes of a run."""

    name: str
    model: str
    """A folder under models/; or `builtin`, or `moe`, which is trained here."""
    data: Literal["wikitext", "alpaca", "documentation", "builtin"]
    """`documentation` is what `otaro demo` tunes on; `builtin` its beginning, for the reduced form."""
    batch_size: int
    sequence_length: int
    window: int
    test_tokens: int
    steps: int
    rates: tuple[float, ...] = ()
    """Tried for every method at the first seed; held-out text says which one the method gets. None: rows name theirs."""
    compiled: bool = True
    held_out: float = 0.0
    """Share of the instructions that are held out, and as many to test on; of texts a tenth always is."""


BENCHES = {
    bench.name: bench
    for bench in (
        # What is tuned on here is small: 300 steps see either text about five times.
        Bench(SMOL, SMOL, "wikitext", 8, 512, 2048, 147_456, 300, rates=(1.25e-5, 2.5e-5, 5e-5, 1e-4)),
        Bench(STORIES, STORIES, "wikitext", 16, 256, 256, 147_456, 300, rates=(3.75e-5, 7.5e-5, 1.5e-4, 3e-4)),
        Bench("MoE", "moe", "wikitext", 16, 256, 256, 98_304, 200, rates=(1e-3, 2e-3, 4e-3), compiled=False),
        Bench(ALPACA, SMOL, "alpaca", 16, 256, 256, 131_072, 252, rates=(5e-5, 1e-4, 2e-4), held_out=0.1),
        Bench(LONG, STORIES, "wikitext", 4, 128, 256, 147_456, 2_000, rates=(3.75e-5, 7.5e-5, 1.5e-4)),
        Bench(DEMO, "builtin", "documentation", 4, 128, 256, 65_536, 150, rates=(4e-4,), compiled=False),  # as it tunes
        # 20 epochs, as in the paper.
        Bench("SmolLM2-135M, paper", SMOL, "wikitext", 8, 512, 2048, 147_456, 1_200, rates=SGD_RATES),
        Bench("stories15M, paper", STORIES, "wikitext", 16, 256, 256, 147_456, 1_300, rates=SGD_RATES),
        Bench("small", "builtin", "builtin", 8, 64, 128, 1_024, 10, rates=(1e-3,), compiled=False),
        Bench("small, longer", "builtin", "builtin", 8, 64, 128, 1_024, 40, rates=(1e-3,), compiled=False),
        Bench("small, questions", "builtin", "builtin", 8, 64, 128, 0, 10, compiled=False),
        Bench("small MoE", "moe", "builtin", 8, 64, 128, 1_024, 10, rates=(1e-3,), compiled=False),
        Bench("small, paper", "builtin", "builtin", 8, 64, 128, 1_024, 20, rates=(1e-5, 0.01), compiled=False),
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
    """None: the one of the bench's rates that held-out text found best for the method `rate_of` at the first seed."""
    rate_of: str = ""
    steps: int | None = None
    """None: the bench's."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    schedule: Literal["cosine", "constant"] = "cosine"
    clip: float = 1.0
    start: Literal["plain", "calibrated"] = "plain"
    """The bench's model, or what `otaro pack --calibrate` made of it: its E5M8."""
    packing: Literal["plain", "calibrated"] = "plain"
    """How the tuned weights become codes: each rounded by itself, or by `otaro pack --calibrate` on what was tuned on."""
    quantizer: str = "sefp"
    """Or another grid to round to, of `quantizers.py`."""
    judged: bool = True
    """Whether an average is kept if held-out text says so, or always."""
    measured: tuple[str, ...] = (FULL, *NAMES)
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
        for name in ("name", "bench", "seed", "compiled"):
            stated.pop(name)
        if self.options is not None:
            ours, plain = self.options.to_dict(), DEFAULTS.to_dict()
            stated["options"] = {name: value for name, value in ours.items() if name == "method" or value != plain[name]}
        unstated = {"judged": True, "held_out": 0.0, "start": "plain", "packing": "plain"}  # by older rows
        for name, usual in unstated.items():
            if stated[name] == usual:
                stated.pop(name)
        stated["steps"] = self.steps or BENCHES[self.bench].steps
        stated["format"] = FORMAT
        stated.pop("rates")  # which of them is chosen may change: `results.is_done` asks
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


@dataclass(frozen=True)
class Method:
    """A row of the table of methods."""

    name: str
    options: Options
    measured: tuple[str, ...] = (FULL, *NAMES)
    extra: dict[str, Any] = field(default_factory=dict)


def methods(reconstruction: Literal["midpoint", "truncate"] = "midpoint") -> list[Method]:
    """fp, fixed for each precision, uniform, bps, otaro, and, of midpoint, best."""
    suffix = "" if reconstruction == "midpoint" else ", truncate"

    def plain(name: str) -> Options:
        return Options(method=name, reconstruction=reconstruction)

    found = [Method(f"fp{suffix}", plain("fp"))]
    found += [Method(f"fixed:{p}{suffix}", plain(f"fixed:{p}"), (p,)) for p in NAMES]
    found += [Method(f"{name}{suffix}", plain(name)) for name in ("uniform", "bps", "otaro")]
    return [*found, Method("best", BEST)] if reconstruction == "midpoint" else found


KNOWN = {method.name: method for method in methods()}
LOW = ("E5M4", "E5M3")
QAT = Method("int4 QAT", Options(method="fixed:E5M3"), ("E5M3",), {"quantizer": "int4"})
"""A model of its own on torchao's grid of four bits."""


def best(**changes: Any) -> Options:
    return replace(BEST, **changes)


def held_as_best(precision: str) -> Options:
    """A dedicated model with what keeps `best` from fitting its text too closely."""
    return Options(method=f"fixed:{precision}", average=BEST.average)


HALF, TWO_THIRDS = "best, full 1/2", "best, full 2/3"
CALIBRATED, JUDGED = ", calibrated", ", judged"
"""Ends of names: packed on the tuning text; and the better of that and plain packing, by held-out text, as a run ends."""


def recipe_of(bench: Bench) -> str:
    """The rows that are `--recipe best` there: it asks how often a run sees its data."""
    return ("best" if bench.name in REPEATED else TWO_THIRDS) + JUDGED


def candidates() -> dict[str, Options]:
    """Recipes that may take the place of `best`, at its rate."""
    return {
        HALF: best(full=0.5),
        "best, full 1/2, not distilled": best(full=0.5, distill=0.0),
        "best, full 1/2, 1 distilled": best(full=0.5, distill=1.0),
        TWO_THIRDS: best(full=config.FULL_OF_NEW_DATA),
        "best, full 2/3, 1 distilled": best(full=2 / 3, distill=1.0),
    }


PASSES = 2.2
"""Of a step of `best`, in plain steps: it has two passes, and quantizes for one of them.

Measured roughly, on a busy CPU; `benchmarks/bench_tune.py` on a GPU is to say it exactly.
"""
SIXTH = 1 / 6
"""Of the steps: six dedicated models then cost together what one model does."""
OF_THE_FORMAT = tuple(
    f"best, {what}" for what in ("pow2 scales", "E5M2 scales", "groups of 32", "zero at E5M4", "zero a sixth off")
)
"""The ablations of the format itself."""


def ablations() -> list[tuple[str, Row]]:
    """The rows of the ablations by group, for a bench still to be named; `rate_of` says whose rate they take."""
    rows: list[tuple[str, Row]] = []

    def add(group: str, name: str, options: Options, rate_of: str, **changes: Any) -> None:
        rows.append((group, Row("", name, options, rate_of=rate_of, **changes)))

    for scales in ("pow2", "E5M2"):
        add("scales", f"best, {scales} scales", BEST, "best", quantizer=scales)
    for size in (32, 128, 256):
        add("group size", f"best, groups of {size}", best(group_size=size), "best")
    for grid in ("zero at E5M4", "zero nowhere", "zero a sixth off"):
        add("place of zero", f"best, {grid}", BEST, "best", quantizer=grid)
    add("reconstruction", "best, truncate", best(reconstruction="truncate"), "best")
    for distill in (0.0, 0.25, 0.75, 1.0):
        add("distillation", f"best, {distill:g} distilled", best(distill=distill), "best")
    for weights in ((0, 0, 0, 1, 1, 1), (0, 0, 0, 1, 2, 4), (0, 0, 1, 1, 1.25, 2.6), (1, 1, 1, 1, 1, 1)):
        add("sampling", f"best, weights {' '.join(map(str, weights))}", best(weights=tuple(map(float, weights))), "best")
    add("parts", "best, no full pass", best(full=0.0), "best")
    add("parts", "best, never averaged", best(average=0.0), "best")
    add("parts", "best, always averaged", BEST, "best", judged=False)
    add("parts", "best, L2-SP 23", best(l2_sp=23.0), "best")
    add("parts", "uniform, 0.5 distilled", Options(distill=0.5), "uniform")
    for exploration in (3.0, 4.0, 6.0, 7.0):
        for method in ("bps", "otaro"):
            add("lambda", f"{method}, lambda {exploration:g}", Options(method=method, exploration=exploration), method)
    for delay in (1, 5, 20):
        add("delay", f"otaro, N {delay}", Options(method="otaro", delay=delay), "otaro")
    add("reduction", "otaro, mean", Options(method="otaro", accumulate="mean"), "otaro")
    e5m5, e5m4, e5m3 = map(Precision, ("E5M5", "E5M4", "E5M3"))
    add("ultra-low", "otaro, only E5M3 ultra-low", Options(method="otaro", ultra_low=(e5m3,)), "otaro")
    add("ultra-low", "otaro, E5M5 ultra-low too", Options(method="otaro", ultra_low=(e5m5, e5m4, e5m3)), "otaro")
    return rows


# Rows of a bench ------------------------------------------------------------------------------------------------------


def swept(bench: Bench, method: Method, seed: int) -> Iterator[Row]:
    """The method at all rates of the bench at the first seed, at the chosen one at others."""
    row = Row(bench.name, method.name, method.options, seed, rate_of=method.name, measured=method.measured, **method.extra)
    if seed == SEEDS[0]:
        yield from (replace(row, lr=rate) for rate in bench.rates)
    else:
        yield row


def recipe_rows(bench: Bench, seed: int, others_at: int = SEEDS[1]) -> Iterator[Row]:
    """`best`, and what it is to hold against: tuning as usual, int4 QAT, plain sampling; then its rival.

    Other formats and the tasks are measured at one seed, by default one whose rate is chosen already.
    """
    more = {ALPACA: "zeroshot", SMOL: "others", STORIES: "others", "small": "others"}.get(bench.name)
    measures: dict[str, Any] = {"measures": ("perplexity", more) if more else ("perplexity",)}
    if seed == SEEDS[0]:
        yield Row(bench.name, "none", None, **measures)
    for method in (KNOWN["best"], KNOWN["fp"], QAT, KNOWN["uniform"]):
        asked = seed == others_at and (method.name in ("best", "fp") or (more == "zeroshot" and method is not QAT))
        yield from swept(bench, replace(method, extra=measures) if asked else method, seed)
    held = Row(bench.name, "int4 QAT, held as best", held_as_best("E5M3"), seed, rate_of="int4 QAT", **QAT.extra)
    yield replace(held, measured=("E5M3",))
    if bench.name != LONG or seed == SEEDS[0]:
        yield Row(bench.name, HALF, candidates()[HALF], seed, rate_of="best")


def start_rows(bench: Bench, seed: int) -> Iterator[Row]:
    """`best` from calibrated weights, at rates of its own; at the first seed also how these are before."""
    if seed == SEEDS[0]:
        yield Row(bench.name, "none, calibrated", None, start="calibrated")
    yield from swept(bench, Method("best, calibrated start", BEST, extra={"start": "calibrated"}), seed)


def packing_rows(bench: Bench, seed: int) -> Iterator[Row]:
    """Tuned as usual and by recipes with more or less of a step in full precision, then packed on the tuning text."""
    names = [HALF, TWO_THIRDS]
    if seed == SEEDS[0] and bench.name != LONG:
        names += ["best, full 1/2, not distilled", "best, full 2/3, 1 distilled"]
    recipes = {"fp": KNOWN["fp"].options, "best": BEST} | {name: candidates()[name] for name in names}
    for name, options in recipes.items():
        rate_of = "fp" if name == "fp" else "best"
        yield Row(bench.name, name + CALIBRATED, options, seed, rate_of=rate_of, packing="calibrated")


def candidate_rows(bench: Bench) -> Iterator[Row]:
    """What may take the place of `best`, at its rate and one seed."""
    yield from (Row(bench.name, name, options, SEEDS[0], rate_of="best") for name, options in candidates().items())


def dedicated_rows(bench: Bench, seed: int, precisions: tuple[str, ...] = NAMES) -> Iterator[Row]:
    """Models of one precision each; the fine ones are tuned much as in full precision, and take the rate of that.

    In the long run, whose rows are dear, the low ones take the rate of the other model of four bits.
    """
    for p in reversed(precisions):
        method, low = KNOWN[f"fixed:{p}"], p in LOW
        if low and bench.name == ALPACA and seed == SEEDS[1]:
            method = replace(method, extra={"measures": ("perplexity", "zeroshot")})
        if low and bench.name != LONG:
            yield from swept(bench, method, seed)
        else:
            rate_of = "int4 QAT" if low else "fp"
            yield Row(bench.name, method.name, method.options, seed, rate_of=rate_of, measured=method.measured)


def paper_methods() -> list[Method]:
    """What the paper compares, with its own options: truncation, lambda 5, N 10, nothing applied that still waits.

    The paper says that the updates of its baselines are aligned with its own, so dedicated models of the ultra-low
    precisions come with delayed accumulation too: a search among one precision.
    """
    plain = {"optimizer": "sgd", "schedule": "constant", "clip": 0.0}
    found = [Method(name, recipe("paper", name)[0], extra=plain) for name in ("otaro", "bps", "uniform", "fp")]
    found += [Method(f"fixed:{p}", recipe("paper", f"fixed:{p}")[0], (p,), plain) for p in NAMES]
    for p in LOW:
        alone = replace(recipe("paper", "otaro")[0], precisions=(Precision(p),))
        found.append(Method(f"fixed:{p}, LAA", alone, (p,), plain))
    return found


def paper_rows(bench: Bench, seed: int) -> Iterator[Row]:
    """The paper's recipe as written: plain SGD at 1e-5."""
    if seed == SEEDS[0]:
        yield Row(bench.name, "none", None, quantizer="truncate")
    for method in paper_methods():
        row = Row(bench.name, method.name, method.options, seed, SGD_RATES[0], method.name, **method.extra)
        yield replace(row, measured=method.measured)


def paper_rates(bench: Bench, seed: int) -> Iterator[Row]:
    """The same at other rates, and at the one that held-out text prefers; where rows are dear, of what decides."""
    for method in paper_methods():
        if bench.model != STORIES and method.name not in ("otaro", "bps", "uniform", "fp", *(f"fixed:{p}" for p in LOW)):
            continue
        yield from (row for row in swept(bench, method, seed) if row.lr != SGD_RATES[0])


def variant_rows(bench: Bench, seed: int) -> Iterator[Row]:
    """The paper's reconstruction with our optimizer, equal compute, other regularisers."""
    name = bench.name
    yield Row(name, "none, truncate", None, quantizer="truncate")
    for method in methods("truncate"):
        rate_of = method.name.removesuffix(", truncate")
        if rate_of.startswith("fixed:") and rate_of[-1] not in "43":
            rate_of = "fp"
        yield Row(name, method.name, method.options, seed, rate_of=rate_of, measured=method.measured)
    yield Row(name, "best, equal compute", BEST, seed, rate_of="best", steps=round(bench.steps / PASSES))
    for row in dedicated_rows(bench, SEEDS[1]):
        few = replace(row, name=f"{row.name}, a sixth", seed=seed, steps=max(1, round(SIXTH * bench.steps)))
        yield from (few, replace(few, name=f"{row.name}, held as best", options=held_as_best(row.measured[0]), steps=None))


def format_rows(bench: Bench, seed: int) -> Iterator[Row]:
    for _, row in ablations():
        if row.name in OF_THE_FORMAT:
            yield replace(row, bench=bench.name, seed=seed)


def search_rows(bench: Bench, seed: int) -> Iterator[Row]:
    """The paper's search and delay with our numbers and optimizer."""
    for name in ("bps", "otaro"):
        yield from swept(bench, KNOWN[name], seed)


# The study ------------------------------------------------------------------------------------------------------------

REGIMES = (SMOL, STORIES, "MoE", ALPACA, LONG, DEMO)
REPEATED = (SMOL, STORIES, LONG)
"""Where a run sees its text four to six times. The mixture of experts sees it 1.8 times, the others once or in part."""
PAPER = tuple(f"{model}, paper" for model in BIG)


def blocks() -> dict[str, list[Job]]:
    """The rows of the study by what they are for, no row twice."""
    regimes, papers, models = ([BENCHES[name] for name in names] for names in (REGIMES, PAPER, BIG))
    of_smol, of_stories = papers
    first, later = SEEDS[0], SEEDS[1:]
    fine = [bench for bench in regimes if bench.name != LONG]
    every: dict[str, list[Job]] = {
        "the recipe": [row for seed in SEEDS for bench in regimes for row in recipe_rows(bench, seed)],
        "what may take its place": [row for bench in fine for row in candidate_rows(bench)],
        "dedicated models": [
            *(row for seed in SEEDS for bench in regimes for row in dedicated_rows(bench, seed, LOW)),
            *(row for bench in fine for row in dedicated_rows(bench, first)),
        ],
        "packed on the tuning text": [
            *(row for seed in SEEDS for bench in fine for row in packing_rows(bench, seed)),
            *(row for seed in SEEDS for row in packing_rows(BENCHES[LONG], seed)),
        ],
        "the paper as written": [row for bench in papers for row in paper_rows(bench, first)],
        "the paper as written, two seeds more": [
            *(row for seed in later for row in paper_rows(of_stories, seed)),
            *(row for seed in later for row in paper_rows(of_smol, seed)),
        ],
        "search and delay": [row for seed in SEEDS for bench in models for row in search_rows(bench, seed)],
        "the format": [row for bench in models for row in format_rows(bench, first)],
        "from calibrated weights": [row for seed in SEEDS for bench in models for row in start_rows(bench, seed)],
        "the paper at other rates": [row for seed in SEEDS for bench in reversed(papers) for row in paper_rates(bench, seed)],
        "two seeds more": [
            *(row for seed in later for bench in models for row in format_rows(bench, seed)),
            *(row for seed in later for bench in fine for row in dedicated_rows(bench, seed)),
        ],
        "the rest of the tables": [
            *(Observation(model, "midpoint") for model in BIG),
            *(row for bench in models for row in variant_rows(bench, first)),
            *(replace(row, bench=model) for model in reversed(BIG) for _, row in ablations()),
            *(Observation(model, "truncate", batches=8) for model in BIG),
            *(row for seed in SEEDS for row in search_rows(BENCHES["MoE"], seed)),
            *(row for seed in later for bench in models for row in variant_rows(bench, seed)),
        ],
    }
    where = {job.key: name for name in reversed(every) for job in every[name]}  # the first that asks for it
    return {name: list({job.key: job for job in jobs if where[job.key] == name}.values()) for name, jobs in every.items()}


def full() -> list[Job]:
    return [job for jobs in blocks().values() for job in jobs]


# What a row takes of an H200 that fourteen workers share, in seconds: a plain step, and reading the texts at one
# precision. From the rows of format 1, whose `seconds` add up to fourteen times the minutes that they took.
STEP = {SMOL: 0.020, STORIES: 0.005, "moe": 0.015, "builtin": 0.005}
READING = {SMOL: 0.30, STORIES: 0.08, "moe": 0.17, "builtin": 0.02}
OTHER_FORMATS, TASKS, OBSERVING = 6, 2, 14.0  # in readings; in readings at each precision; in seconds


def cost(job: Job) -> float:
    """Seconds of the GPU, roughly."""
    if isinstance(job, Observation):
        return OBSERVING
    bench = BENCHES[job.bench]
    readings = len(job.measured) * (1 + TASKS * ("zeroshot" in job.measures)) + OTHER_FORMATS * ("others" in job.measures)
    found = readings * READING[bench.model] * (2 if job.packing == "calibrated" else 1)
    if job.options is None:
        return found
    passes = PASSES if job.options.full else 1.25 if job.options.distill else 1.0
    return found + (job.steps or bench.steps) * passes * STEP[bench.model]


def small() -> list[Job]:
    """Every table in reduced form on the built-in model; three seeds for the methods, one for the rest."""
    questions = BENCHES["small, questions"]
    asked = [Row(questions.name, "none", None, measures=("zeroshot",))]
    for name in ("fp", "fixed:E5M4", "fixed:E5M3", "uniform", "bps", "otaro", "best"):
        method = KNOWN[name]
        asked.append(Row(questions.name, name, method.options, 0, 1e-3, measured=method.measured, measures=("zeroshot",)))
    bench, longer, experts = BENCHES["small"], BENCHES["small, longer"], BENCHES["small MoE"]
    searched = {row.name for group, row in ablations() if group in ("lambda", "delay")}
    rows: list[Row] = []
    for seed in SEEDS:
        rows += [*recipe_rows(bench, seed, others_at=SEEDS[0]), *dedicated_rows(bench, seed), *search_rows(bench, seed)]
        rows += start_rows(bench, seed)
        # In ten steps the search takes the same path at any lambda, and no accumulator fills.
        rows += [row for name in ("uniform", "bps", "otaro") for row in swept(longer, KNOWN[name], seed)]
        rows += [*recipe_rows(experts, seed), *search_rows(experts, seed)]
    rows += [*variant_rows(bench, SEEDS[0]), *candidate_rows(bench)]
    rows += [replace(row, bench=(longer if row.name in searched else bench).name) for _, row in ablations()]
    paper = BENCHES["small, paper"]
    rows += [*paper_rows(paper, SEEDS[0]), *paper_rates(paper, SEEDS[0])]
    observed = Observation("builtin", "midpoint", batches=8, batch_size=2, sequence_length=64)
    return [*{row.key: row for row in [*rows, *asked]}.values(), observed]
