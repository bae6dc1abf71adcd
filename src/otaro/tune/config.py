"""What a tuning run is told: the method and its options, the training settings, and the two recipes.

Everything the paper leaves open is an option here with a default. Contradictions are refused in the spelling of the command
line's flags.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from otaro.errors import OtaroError, PrecisionError
from otaro.sefp.codec import RECONSTRUCTIONS, Reconstruction
from otaro.sefp.precision import GROUP_SIZE, PRECISIONS, Precision
from otaro.tune.accumulate import GradientAccumulator, Place, Reduction
from otaro.tune.path_search import BitWidthPathSearch, FixedSearch, PathSearch, UniformSearch

Leftover = Literal["apply", "drop"]
METHODS = ("otaro", "bps", "uniform", "fixed:E5M4", "fp")  # fixed: takes any precision


class ConfigError(OtaroError, ValueError):
    """Options that make no sense, alone or together."""


@dataclass(frozen=True)
class Options:
    """How precisions are chosen and gradients applied. The defaults are the bare method; what we add to it is `recipe`."""

    method: str = "uniform"
    """otaro (path search and delayed low-precision updates: the paper's Algorithm 1), bps, uniform, fixed:E5M4, fp."""
    precisions: tuple[Precision, ...] = PRECISIONS
    exploration: float = 5.0
    """The paper's lambda."""
    delay: int = 10
    """The paper's N: ultra-low batches to one update."""
    ultra_low: tuple[Precision, ...] = (Precision("E5M4"), Precision("E5M3"))
    accumulate: Reduction = "sum"
    accumulator: Place = "device"
    leftover: Leftover = "apply"
    """What becomes of fewer than `delay` gradients that still wait at the end."""
    weights: tuple[float, ...] | None = None
    """How often `uniform` draws each precision, in their order; None draws all alike."""
    distill: float = 0.0
    """Share of the loss at a precision that pulls toward the same weights unquantized."""
    distill_at: tuple[Precision, ...] = (Precision("E5M5"), Precision("E5M4"), Precision("E5M3"))
    """The precisions that this is done at; the finer ones are too close to their teacher to learn from it."""
    full: float = 0.0
    """Share of the loss that is taken in full precision, in a pass of its own in the same step."""
    l2_sp: float = 0.0
    """L2-SP: after each step weights go back toward their start, by rate * l2_sp of the way."""
    average: float = 0.0
    """Of the steps, the last ones: the mean of the weights after them is kept if it is better on held-out data."""
    reconstruction: Reconstruction = "midpoint"
    group_size: int = GROUP_SIZE

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        try:
            fixed = self._fixed_precision()
        except PrecisionError as error:
            raise ConfigError(f"--method {self.method}: {error}") from None
        if self.method not in ("otaro", "bps", "uniform", "fp") and fixed is None:
            raise ConfigError(f"--method {self.method}: choose from {', '.join(METHODS)}")
        if not self.precisions or len(set(self.precisions)) != len(self.precisions):
            raise ConfigError("--precisions must name at least one precision, and none twice")
        if not 0 <= self.exploration < math.inf:
            raise ConfigError(f"--lambda {self.exploration}: must be a number, and not negative")
        if self.delay < 1:
            raise ConfigError(f"--delay {self.delay}: must be at least 1")
        if not 0 <= self.distill <= 1:
            raise ConfigError(f"--distill {self.distill}: must be between 0 and 1")
        if not 0 <= self.full < 1:
            raise ConfigError(f"--full {self.full}: must be 0 or more, and less than 1; --method fp is all of it")
        if self.full and self.method == "fp":
            raise ConfigError(f"--full {self.full:g}: --method fp has all of its loss in full precision")
        if not 0 <= self.l2_sp < math.inf:
            raise ConfigError(f"--l2-sp {self.l2_sp}: must be a number, and not negative; 0 for none")
        if not 0 <= self.average <= 1:
            raise ConfigError(f"--average {self.average}: must be between 0 and 1")
        if self.accumulate not in get_args(Reduction):
            raise ConfigError(f"--accumulate {self.accumulate}: choose from {', '.join(get_args(Reduction))}")
        if self.accumulator not in get_args(Place):
            raise ConfigError(f"--accumulator {self.accumulator}: choose from {', '.join(get_args(Place))}")
        if self.leftover not in get_args(Leftover):
            raise ConfigError(f"--leftover {self.leftover}: choose from {', '.join(get_args(Leftover))}")
        if self.reconstruction not in RECONSTRUCTIONS:
            raise ConfigError(f"--reconstruction {self.reconstruction}: choose from {', '.join(RECONSTRUCTIONS)}")
        if self.weights is not None:
            if len(self.weights) != len(self.precisions):
                raise ConfigError(f"--weights gives {len(self.weights)} numbers for {len(self.precisions)} --precisions")
            if not all(0 <= weight < math.inf for weight in self.weights) or sum(self.weights) == 0:
                raise ConfigError("--weights must be numbers, not negative, nor all zero")
        if self.group_size < 1 or self.group_size % 32:
            raise ConfigError(f"--group-size {self.group_size}: must be a positive multiple of 32")

    def check_rate(self, lr: float) -> None:
        """Refuse a way back that would undo every step."""
        if lr * self.l2_sp >= 1:
            raise ConfigError(f"--l2-sp {self.l2_sp:g} undoes every step at --lr {lr:g}; their product must be below 1")

    @property
    def tuned_for(self) -> tuple[Precision | None, ...]:
        """The precisions at which the result is to be good; None is full precision."""
        return self.precisions if self.method in ("otaro", "bps", "uniform") else (self._fixed_precision(),)

    def search(self, seed: int) -> PathSearch:
        """The search that the method asks for."""
        if self.method in ("otaro", "bps"):
            return BitWidthPathSearch(self.precisions, self.exploration)
        if self.method == "uniform":
            return UniformSearch(self.precisions, self.weights, seed)
        return FixedSearch(self._fixed_precision())

    def gradient_accumulator(self) -> GradientAccumulator | None:
        """The accumulator of the method `otaro`; other methods apply every gradient at once."""
        return GradientAccumulator(self.delay, self.accumulate, self.accumulator) if self.method == "otaro" else None

    def to_dict(self) -> dict[str, Any]:
        """As JSON, precisions by name."""
        stated = dict(self.__dict__)
        stated["precisions"] = [str(p) for p in self.precisions]
        stated["ultra_low"] = [str(p) for p in self.ultra_low]
        stated["distill_at"] = [str(p) for p in self.distill_at]
        stated["weights"] = list(self.weights or [1.0] * len(self.precisions))
        return stated

    @classmethod
    def from_dict(cls, stated: Mapping[str, Any]) -> Options:
        """What `to_dict` made; options that were not there yet are at their defaults."""
        told = renamed(stated)
        if told.get("rates", "same") != "same":
            raise ConfigError(f"--rates {told['rates']} is no longer there, and this run has it: start it anew")
        for name in ("precisions", "ultra_low", "distill_at"):
            told[name] = tuple(Precision(p) for p in told.get(name, getattr(cls, name)))
        if told.get("weights") is not None:
            told["weights"] = tuple(told["weights"])
        return cls(**_known(cls, told))

    def _fixed_precision(self) -> Precision | None:
        return Precision(self.method.removeprefix("fixed:")) if self.method.startswith("fixed:") else None


@dataclass(frozen=True)
class Training:
    """The ordinary settings of a fine-tuning run."""

    optimizer: Literal["adamw", "adamw8bit", "sgd"] = "adamw"
    lr: float = 5e-5
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    clip: float = 1.0
    """Gradients are scaled down to this norm; 0 leaves them alone."""
    epochs: float = 1.0
    steps: int | None = None
    """Instead of epochs."""
    batch_size: int = 8
    grad_accum: int = 1
    sequence_length: int = 512
    no_bos: bool = False
    """Blocks of text do not begin with the beginning-of-text token, though the tokenizer writes one before a text."""
    chat_template: str | None = None
    """A built-in template by name, or a Jinja file; None keeps the tokenizer's own."""
    lora: int | None = None
    """Rank; None tunes all weights."""
    bf16: bool = False
    gradient_checkpointing: bool = False
    compile: bool = False
    """Compile the steps: faster on a GPU after a minute of compiling."""
    fsdp: bool = False
    """Share weights, gradients and the optimizer's state out over the processes, instead of a copy for each."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        if self.optimizer not in ("adamw", "adamw8bit", "sgd"):
            raise ConfigError(f"--optimizer {self.optimizer}: choose from adamw, adamw8bit, sgd")
        if self.schedule not in ("cosine", "linear", "constant"):
            raise ConfigError(f"--schedule {self.schedule}: choose from cosine, linear, constant")
        for flag, value in (("--lr", self.lr), ("--epochs", self.epochs)):
            if not 0 < value < math.inf:
                raise ConfigError(f"{flag} {value}: must be a number above zero")
        if not 0 <= self.clip < math.inf:
            raise ConfigError(f"--clip {self.clip}: must be a number, and not negative; 0 for no clipping")
        counts = {"steps": self.steps, "batch-size": self.batch_size, "grad-accum": self.grad_accum, "lora": self.lora}
        for name, count in counts.items():
            if count is not None and count < 1:
                raise ConfigError(f"--{name} {count}: must be at least 1")
        if self.sequence_length < 2:
            raise ConfigError(f"--sequence-length {self.sequence_length}: must be at least 2")
        if self.compile and self.lora:
            raise ConfigError("--compile cannot be combined with --lora: every precision would need its own graph")
        if self.compile and self.fsdp:
            raise ConfigError("--compile cannot be combined with --fsdp: weights are quantized where they are gathered")
        if self.seed < 0:
            raise ConfigError(f"--seed {self.seed}: must not be negative")

    @classmethod
    def from_dict(cls, stated: Mapping[str, Any]) -> Training:
        """The settings that a run's config.json states; others beside them are left alone."""
        return cls(**_known(cls, stated))


def renamed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that a run's config.json states, under the names that they have now."""
    return {"l2_sp" if name == "pull" else name: value for name, value in options.items()}


def _known(kind: type, stated: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: stated[field.name] for field in fields(kind) if field.name in stated}


Recipe = Literal["best", "paper"]
# Chosen among sixty candidates by held-out text in five regimes (docs/log.md). The pass in full precision keeps the
# fine precisions where tuning as usual has them, so that only the lower three need be drawn. What holds a run back
# helps where a text is fitted too closely, and costs where there is much to learn: so no L2-SP, and a judged average.
BEST = Options(weights=(0.0, 0.0, 0.0, 1.0, 1.25, 2.6), full=1 / 3, distill=0.5, average=0.5)


def recipe(name: Recipe, method: str | None = None) -> tuple[Options, Training]:
    """The two starting points; every flag given beside a recipe overrides it.

    `paper` is what the paper states: Algorithm 1 with lambda 5 and N 10, groups of 64, truncation, plain SGD at 1e-5. Its
    listing ends with the last batch and applies nothing that still waits then.
    `best` is ours, chosen by measurement. A third of every step's loss is cross-entropy in full precision; a third
    each are cross-entropy, and divergence from that pass, at one of the lower three precisions, drawn at random with
    a tilt toward the lowest. AdamW at the rate of tuning as usual; in the end the mean weights of the last half of the
    steps, if they are better on held-out data.

    Another method than the recipe's own takes the place of its: of `best` nothing else then remains, since all of it was
    chosen for that one method, and a baseline is to be what its name says.
    """
    if name == "best":
        if method in (None, BEST.method):
            return BEST, Training()
        return Options(method=method), Training()
    if name == "paper":
        options = Options(method=method or "otaro", reconstruction="truncate", leftover="drop")
        return options, Training(optimizer="sgd", lr=1e-5, schedule="constant", clip=0.0)
    raise ConfigError(f"--recipe {name}: choose from best, paper")


def with_precisions(options: Options, names: Sequence[str]) -> Options:
    """Options with other precisions; each that had a weight keeps it, and where that would draw none, all are alike."""
    precisions = tuple(Precision(name) for name in names)
    if options.weights is None:
        return replace(options, precisions=precisions)
    weight_of = dict(zip(options.precisions, options.weights, strict=True))
    weights = tuple(weight_of.get(p, 1.0) for p in precisions)
    return replace(options, precisions=precisions, weights=weights if any(weights) else None)
