"""Which rows there are, most valuable first: where time ends early, the least is lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from otaro.file.header import VERSION
from otaro.sefp.precision import PRECISIONS, Precision
from otaro.tune.config import BEST, Options

NAMES = tuple(map(str, PRECISIONS))
FULL = "full"
COLUMNS = (FULL, *NAMES)
BIG = ("SmolLM2-135M", "stories15M")
SEEDS = (0, 1, 2)
DEFAULTS = Options()
FORMAT = int(VERSION)  # whose numbers; rows without it have scales that are powers of two


@dataclass(frozen=True)
class Bench:
    """A model, what it is tuned on and measured by, and the sizes of a run."""

    name: str
    model: str
    """A folder under models/; or `builtin`, or `moe`, which is trained here."""
    data: Literal["wikitext", "alpaca", "builtin"]
    batch_size: int
    sequence_length: int
    window: int
    test_tokens: int
    steps: int
    rates: tuple[float, ...] = ()
    """Tried for every method at the first seed; held-out text says which one the method gets. None: rows name theirs."""
    compiled: bool = True
    held_out: float = 0.0
    """Share of the instructions that are held out, to judge an average by; of texts the worker always holds some out."""


BENCHES = {
    bench.name: bench
    for bench in (
        Bench("SmolLM2-135M", "SmolLM2-135M", "wikitext", 8, 512, 2048, 147_456, 300),
        Bench("stories15M", "stories15M", "wikitext", 16, 256, 256, 147_456, 300, rates=(7.5e-5, 1.5e-4, 3e-4)),
        Bench("SmolLM2-135M, Alpaca", "SmolLM2-135M", "alpaca", 16, 256, 2048, 0, 0, held_out=0.05),
        Bench("MoE", "moe", "wikitext", 16, 256, 256, 98_304, 200, rates=(3e-4, 1e-3), compiled=False),
        Bench("small", "builtin", "builtin", 8, 64, 128, 1_024, 10, rates=(1e-3,), compiled=False),
        Bench("small, longer", "builtin", "builtin", 8, 64, 128, 1_024, 40, rates=(1e-3,), compiled=False),
        Bench("small, questions", "builtin", "builtin", 8, 64, 128, 0, 10, compiled=False),
        Bench("small MoE", "moe", "builtin", 8, 64, 128, 1_024, 10, rates=(1e-3,), compiled=False),
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
        for name, usual in (("judged", True), ("held_out", 0.0)):  # which older rows do not state
            if stated[name] == usual:
                stated.pop(name)
        stated["steps"] = self.steps or BENCHES[self.bench].steps
        stated["format"] = FORMAT
        if self.lr is not None or self.options is None:
            stated.pop("rates")  # they matter where one of them is chosen
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


def best(**changes: Any) -> Options:
    """The recipe with changes."""
    return replace(BEST, **changes)


ALL_SIX = (1.0, 1.0, 1.0, 1.0, 1.25, 2.6)


def held_as_best(precision: str) -> Options:
    """A dedicated model with what keeps `best` from fitting its text too closely."""
    return Options(method=f"fixed:{precision}", average=BEST.average)


def candidates() -> dict[str, tuple[Options, float]]:
    """Recipes that may take the place of `best`, and their rates in terms of its own."""
    return {
        "best, full 1/4": (best(full=0.25), 1.0),
        "best, full 1/2, 1 distilled": (best(full=0.5, distill=1.0), 1.0),
        "best, all six drawn": (best(weights=ALL_SIX), 1.0),
        "best, all six drawn, no full pass": (best(weights=ALL_SIX, full=0.0), 1.0),
        "best, rate x 2": (best(), 2.0),
    }


EQUAL_COMPUTE = 1 / 2.2
"""Of the steps: a step of `best` has two passes and quantises for one of them, which takes about 2.2 plain steps.

Measured roughly, on a busy CPU; `benchmarks/bench_tune.py` on a GPU is to say it exactly.
"""
SIXTH = 1 / 6
"""Of the steps: six dedicated models then cost together what one model does."""


def ablations() -> list[tuple[str, Row]]:
    """The rows of the ablations by group, for a bench still to be named; `rate_of` says whose rate they take."""
    rows: list[tuple[str, Row]] = []

    def add(group: str, name: str, options: Options, rate_of: str, **changes: Any) -> None:
        rows.append((group, Row("", name, options, rate_of=rate_of, **changes)))

    for exploration in (3.0, 4.0, 6.0, 7.0):
        for method in ("bps", "otaro"):
            add("lambda", f"{method}, lambda {exploration:g}", Options(method=method, exploration=exploration), method)
    for delay in (1, 5, 20):
        add("delay", f"otaro, N {delay}", Options(method="otaro", delay=delay), "otaro")
    add("reduction", "otaro, mean", Options(method="otaro", accumulate="mean"), "otaro")
    e5m5, e5m4, e5m3 = map(Precision, ("E5M5", "E5M4", "E5M3"))
    add("ultra-low", "otaro, only E5M3 ultra-low", Options(method="otaro", ultra_low=(e5m3,)), "otaro")
    add("ultra-low", "otaro, E5M5 ultra-low too", Options(method="otaro", ultra_low=(e5m5, e5m4, e5m3)), "otaro")
    for distill in (0.0, 0.25, 0.75, 1.0):
        add("distillation", f"best, {distill:g} distilled", best(distill=distill), "best")
    for weights in ((0, 0, 0, 1, 1, 1), (0, 0, 0, 1, 2, 4), (0, 0, 1, 1, 1.25, 2.6), (1, 1, 1, 1, 1, 1)):
        add("sampling", f"best, weights {' '.join(map(str, weights))}", best(weights=tuple(map(float, weights))), "best")
    add("parts", "best, no full pass", best(full=0.0), "best")
    add("parts", "best, full 1/2", best(full=0.5), "best")
    add("parts", "best, never averaged", best(average=0.0), "best")
    add("parts", "best, always averaged", BEST, "best", judged=False)
    add("parts", "best, L2-SP 23", best(l2_sp=23.0), "best")
    add("parts", "uniform, 0.5 distilled", Options(distill=0.5), "uniform")
    for size in (32, 128, 256):
        add("group size", f"best, groups of {size}", best(group_size=size), "best")
    add("reconstruction", "best, truncate", best(reconstruction="truncate"), "best")
    for scales in ("pow2", "E5M2"):
        add("scales", f"best, {scales} scales", BEST, "best", quantizer=scales)
    for grid in ("zero at E5M4", "zero nowhere", "zero a sixth off"):
        add("reconstruction", f"best, {grid}", BEST, "best", quantizer=grid)
    return rows


def optimizers(rates: tuple[float, ...]) -> list[Row]:
    """SGD, as in the paper and at rates that move a model; for a bench still to be named."""
    rows = []
    for rate in rates:
        for method, options in (
            ("uniform", Options()),
            ("bps", Options(method="bps")),
            ("otaro", Options(method="otaro")),
            ("otaro, mean", Options(method="otaro", accumulate="mean")),
        ):
            row = Row("", f"{method}, SGD", options, lr=rate, optimizer="sgd", schedule="constant", clip=0.0)
            rows.append(row)
    return rows


def swept(bench: Bench, method: Method, seed: int) -> Iterator[Row]:
    """The method at all rates of the bench at the first seed, at the chosen one at others."""
    row = Row(bench.name, method.name, method.options, seed, rate_of=method.name, measured=method.measured, **method.extra)
    if seed == SEEDS[0]:
        yield from (replace(row, lr=rate) for rate in bench.rates)
    else:
        yield row


def method_rows(bench: Bench, seeds: tuple[int, ...]) -> Iterator[Row]:
    """Part 1 for a bench whose rates are chosen; other formats are measured on the way, at the first seed alone."""
    yield Row(bench.name, "none", None, measures=("perplexity", "others"))
    yield Row(bench.name, "none, truncate", None, quantizer="truncate")
    for seed in seeds:
        for method in methods():
            if method.name in ("fp", "best") and seed == SEEDS[0]:
                method = replace(method, extra={"measures": ("perplexity", "others")})
            yield from swept(bench, method, seed)


def variant_rows(bench: Bench, seed: int) -> Iterator[Row]:
    """The rest of parts 1 and 6: the paper's reconstruction, other recipes, equal compute, other roundings."""
    name = bench.name
    for method in methods("truncate"):
        rate_of = method.name.removesuffix(", truncate")
        yield Row(name, method.name, method.options, seed, rate_of=rate_of, measured=method.measured)
    qat = Row(name, "int4 QAT", Options(method="fixed:E5M3"), seed, quantizer="int4", measured=("E5M3",))
    yield replace(qat, rate_of="fixed:E5M3")
    yield replace(qat, rate_of="fixed:E5M3", name="int4 QAT, held as best", options=held_as_best("E5M3"))
    yield Row(name, "best, equal compute", BEST, seed, rate_of="best", steps=round(EQUAL_COMPUTE * bench.steps))
    for p in NAMES:
        dedicated, steps = Options(method=f"fixed:{p}"), max(1, round(SIXTH * bench.steps))
        few = Row(name, f"fixed:{p}, a sixth", dedicated, seed, rate_of=f"fixed:{p}", steps=steps)
        yield replace(few, measured=(p,))
    for recipe, (options, factor) in candidates().items():
        if factor == 1.0:
            yield Row(name, recipe, options, seed, rate_of="best")
    for p in NAMES:
        yield Row(name, f"fixed:{p}, held as best", held_as_best(p), seed, rate_of=f"fixed:{p}", measured=(p,))


def ablation_rows(bench: Bench, sgd: tuple[float, ...]) -> Iterator[Row]:
    """Part 3."""
    for _, row in ablations():
        yield replace(row, bench=bench.name)
    for row in optimizers(sgd):
        yield replace(row, bench=bench.name)


SMOL, ALPACA = "SmolLM2-135M", "SmolLM2-135M, Alpaca"
SMOL_RATE = 5e-5


def smollm2_rows() -> Iterator[Job]:
    """All parts but the fifth for SmolLM2, whose rates docs/log.md settled."""
    yield Row(SMOL, "none", None, measures=("perplexity", "others"))
    main = sorted(methods(), key=lambda method: method.name != "best")
    for seed in SEEDS:
        for method in main:
            both = method.name in ("fp", "best") and seed == SEEDS[0]
            measures = ("perplexity", "others") if both else ("perplexity",)
            yield Row(SMOL, method.name, method.options, seed, SMOL_RATE, measured=method.measured, measures=measures)
    yield from alpaca_rows(("none", "best", "fp", "fixed:E5M4", "fixed:E5M3", "otaro", "uniform", "bps"))
    yield Observation(SMOL, "midpoint")
    yield Row(SMOL, "none, truncate", None, quantizer="truncate")
    truncated = {method.name: method for method in methods("truncate")}
    for name in ("otaro", "uniform", "bps", "fp", *(f"fixed:{p}" for p in reversed(NAMES))):
        method = truncated[f"{name}, truncate"]
        yield Row(SMOL, method.name, method.options, 0, SMOL_RATE, measured=method.measured)
    qat = Row(SMOL, "int4 QAT", Options(method="fixed:E5M3"), 0, SMOL_RATE, quantizer="int4", measured=("E5M3",))
    yield from (qat, replace(qat, name="int4 QAT, held as best", options=held_as_best("E5M3")))
    equal = Row(SMOL, "best, equal compute", BEST, 0, SMOL_RATE, steps=round(EQUAL_COMPUTE * BENCHES[SMOL].steps))
    yield equal
    for p in NAMES:
        yield Row(SMOL, f"fixed:{p}, a sixth", Options(method=f"fixed:{p}"), 0, SMOL_RATE, steps=50, measured=(p,))
    for p in ("E5M3", "E5M4", "E5M8"):
        yield Row(SMOL, f"fixed:{p}, held as best", held_as_best(p), 0, SMOL_RATE, measured=(p,))
    wanted = {
        "otaro, mean", "otaro, N 1", "otaro, N 5", "otaro, N 20", "otaro, lambda 3", "otaro, lambda 7", "best, 0 distilled",
        "best, 1 distilled", "best, no full pass", "best, full 1/2", "best, never averaged", "best, always averaged",
        "best, L2-SP 23", "best, weights 0 0 0 1 1 1", "best, weights 1 1 1 1 1 1", "best, truncate",
        "best, pow2 scales", "best, E5M2 scales", "best, zero at E5M4", "best, zero a sixth off", "best, groups of 32",
        "best, groups of 128", "uniform, 0.5 distilled",
    }  # fmt: skip
    yield from alpaca_rows(("fixed:E5M8", "fixed:E5M5", "fixed:E5M6", "fixed:E5M7"))
    for name, (options, factor) in candidates().items():
        for seed in SEEDS:
            yield Row(SMOL, name, options, seed, factor * SMOL_RATE)
    for _, row in ablations():
        if row.name in wanted:
            yield replace(row, bench=SMOL, lr=SMOL_RATE, rate_of="")
    yield Observation(SMOL, "truncate", batches=8)
    for row in optimizers((1e-5, 0.03)):
        if row.name != "uniform, SGD":
            yield replace(row, bench=SMOL)
    for seed in SEEDS[1:]:
        yield replace(equal, seed=seed)
        for method in methods("truncate"):
            yield Row(SMOL, method.name, method.options, seed, SMOL_RATE, measured=method.measured)


def alpaca_rows(names: tuple[str, ...]) -> Iterator[Row]:
    """Part 2: one epoch of instructions, then the eight tasks."""
    known = {method.name: method for method in methods()}
    for name in names:
        if name == "none":
            yield Row(ALPACA, name, None, measures=("zeroshot",))
            continue
        method = known[name]
        measured = method.measured if name.startswith("fixed") else (FULL, *NAMES)
        yield Row(ALPACA, name, method.options, 0, SMOL_RATE, measured=measured, measures=("zeroshot",))


def moe_rows(bench: Bench, seeds: tuple[int, ...] = SEEDS[:1]) -> Iterator[Row]:
    """Part 5."""
    yield Row(bench.name, "none", None)
    wanted = ("fp", "best", "otaro", "bps", "uniform", "fixed:E5M3", "fixed:E5M4", "fixed:E5M8")
    known = {method.name: method for method in methods()}
    for seed in seeds:
        for name in wanted:
            yield from swept(bench, known[name], seed)


def full() -> list[Job]:
    """The study."""
    stories = BENCHES["stories15M"]
    methods_of_stories = sorted(method_rows(stories, SEEDS), key=lambda row: row.name != "best")  # the one most waited for
    jobs: list[Job] = [*smollm2_rows(), *methods_of_stories, *moe_rows(BENCHES["MoE"])]
    jobs += [*ablation_rows(stories, (1e-5, 0.03, 0.1)), *(row for seed in SEEDS for row in variant_rows(stories, seed))]
    jobs += [Observation("stories15M", "midpoint"), Observation("stories15M", "truncate")]
    return jobs


def small() -> list[Job]:
    """Every table in reduced form on the built-in model; three seeds for the methods, one for the rest."""
    questions = BENCHES["small, questions"]
    known = {method.name: method for method in methods()}
    asked = [Row(questions.name, "none", None, measures=("zeroshot",))]
    for name in ("fp", "fixed:E5M4", "fixed:E5M3", "uniform", "bps", "otaro", "best"):
        method = known[name]
        asked.append(Row(questions.name, name, method.options, 0, 1e-3, measured=method.measured, measures=("zeroshot",)))
    bench, longer = BENCHES["small"], BENCHES["small, longer"]
    searched = {row.name for group, row in ablations() if group in ("lambda", "delay")}
    rows = [*method_rows(bench, SEEDS), *variant_rows(bench, SEEDS[0])]
    rows += [row for row in ablation_rows(bench, (1e-5, 0.01)) if row.name not in searched]
    # In ten steps the search takes the same path at any lambda, and no accumulator fills.
    rows += [row for seed in SEEDS for name in ("uniform", "bps", "otaro") for row in swept(longer, known[name], seed)]
    rows += [replace(row, bench=longer.name) for _, row in ablations() if row.name in searched]
    observed = Observation("builtin", "midpoint", batches=8, batch_size=2, sequence_length=64)
    return [*rows, *asked, *moe_rows(BENCHES["small MoE"], SEEDS), observed]
