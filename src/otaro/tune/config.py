"""What a tuning run is told: the method and its options, the training settings, and the two recipes.

Everything the paper leaves open is an option here with a default. A field is also a flag of `otaro tune`,
which takes name, default and help from here. Contradictions are refused in the spelling of these flags. No
torch: `--help` reads this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from otaro.errors import OtaroError, PrecisionError
from otaro.sefp.precision import GROUP_SIZE, PRECISIONS, RECONSTRUCTIONS, Precision, Reconstruction
from otaro.tune.path_search import BitWidthPathSearch, FixedSearch, PathSearch, UniformSearch

if TYPE_CHECKING:
    from otaro.tune.accumulate import GradientAccumulator

_T = TypeVar("_T")
Reduction = Literal["sum", "mean"]
Place = Literal["device", "host"]
Leftover = Literal["apply", "drop"]
Optimizer = Literal["adamw", "adamw8bit", "sgd"]
Schedule = Literal["cosine", "linear", "constant"]
METHODS = ("otaro", "bps", "uniform", "fixed:E5M4", "fp")  # fixed: takes any precision


class ConfigError(OtaroError, ValueError):
    """Options that make no sense, alone or together."""


# Panels of `otaro tune --help`.
METHOD, SEARCH, DELAY = "Method", "Path search (of otaro and bps)", "Delayed updates (of otaro)"
TRAINING, MEMORY, DATA = "Training", "Memory and speed", "Data"


def flag(default: _T, panel: str, help_text: str, name: str = "") -> _T:
    """A field that is also a flag; `name` only where it is not the field's."""
    return field(default=default, metadata={"panel": panel, "help": help_text, "name": name})


@dataclass(frozen=True)
class Options:
    """How precisions are chosen and gradients applied. Defaults are the bare method; `recipe` adds to it."""

    method: str = flag(
        "uniform",
        METHOD,
        "How precisions are chosen, in place of the recipe's way: uniform (by --weights), otaro (the "
        "paper's Algorithm 1), "
        "bps, fixed:E5M4, fp. It comes plain: what --recipe best adds is off, unless a flag asks for it.",
    )
    precisions: tuple[Precision, ...] = flag(PRECISIONS, METHOD, "The precisions to tune for.")
    weights: tuple[float, ...] | None = flag(
        None,
        METHOD,
        "How often each precision is drawn, finest first. By default 0,0,0,1,1.25,2.6 in --recipe best, and "
        "1,1,1,1,1,1 with --method uniform.",
    )
    full: float | None = flag(
        0.0,
        METHOD,
        "Share of the loss that a pass in full precision takes in every step. In --recipe best two thirds "
        "by default, or a third where the run sees its data more than three times.",
    )
    distill: float = flag(
        0.0,
        METHOD,
        "Share of the loss at a precision that pulls toward what the same weights say unquantized.",
    )
    # The finer ones are too close to their teacher to learn from it.
    distill_at: tuple[Precision, ...] = flag(
        (Precision("E5M5"), Precision("E5M4"), Precision("E5M3")), METHOD, "The precisions to distil at."
    )
    calibrate: bool = flag(
        False,
        METHOD,
        "Choose the codes of the tuned weights on the data they were tuned on, as `otaro pack --calibrate` "
        "does, and keep "
        "them if they are better on held-out data. On in --recipe best.",
        "--calibrate/--no-calibrate",
    )
    average: float = flag(
        0.0,
        METHOD,
        "End with the mean weights of this share of the steps, the last ones, if they are better on "
        "held-out data. "
        "Keeps a copy of all weights.",
    )
    l2_sp: float = flag(
        0.0,
        METHOD,
        "After each step, pull the weights back toward their starting values by this fraction times the "
        "learning rate (L2-SP). Keeps a copy of all weights.",
    )
    reconstruction: Reconstruction = flag(
        "midpoint",
        METHOD,
        "What a code stands for: the middle of its interval, or its end toward zero as in the paper.",
    )
    group_size: int = flag(GROUP_SIZE, METHOD, "Weights that share a scale, a multiple of 32.")
    exploration: float = flag(5.0, SEARCH, "How much the path search explores.", "--lambda")
    delay: int = flag(10, DELAY, "Ultra-low batches to one update: the paper's N.")
    ultra_low: tuple[Precision, ...] = flag(
        (Precision("E5M4"), Precision("E5M3")), DELAY, "Precisions whose updates are delayed."
    )
    accumulate: Reduction = flag("sum", DELAY, "What of the delayed gradients is applied.")
    accumulator: Place = flag("device", DELAY, "Where delayed gradients are kept.")
    leftover: Leftover = flag("apply", DELAY, "What becomes of gradients that still wait at the end.")

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
        if self.full is not None and not 0 <= self.full < 1:
            raise ConfigError(
                f"--full {self.full}: must be 0 or more, and less than 1; --method fp is all of it"
            )
        if self.full != 0 and self.method == "fp":
            given = "" if self.full is None else f"--full {self.full}: "
            raise ConfigError(f"{given}--method fp has all of its loss in full precision; it needs --full 0")
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
            raise ConfigError(
                f"--reconstruction {self.reconstruction}: choose from {', '.join(RECONSTRUCTIONS)}"
            )
        if fixed is not None and self.precisions not in (PRECISIONS, (fixed,)):
            raise ConfigError(f"--precisions: --method {self.method} has one of its own; leave them out")
        if self.weights is not None:
            if len(self.weights) != len(self.precisions):
                raise ConfigError(
                    f"--weights gives {len(self.weights)} numbers for {len(self.precisions)} --precisions"
                )
            if not all(0 <= weight < math.inf for weight in self.weights) or sum(self.weights) == 0:
                raise ConfigError("--weights must be numbers, not negative, nor all zero")
        if self.group_size < 1 or self.group_size % 32:
            raise ConfigError(f"--group-size {self.group_size}: must be a positive multiple of 32")

    def full_share(self, passes: float) -> float:
        """`full`, or what suits a run that sees each of its examples so many times."""
        if self.full is not None:
            return self.full
        return FULL_OF_NEW_DATA if passes <= FEW_PASSES else FULL_OF_REPEATED_DATA

    def check_rate(self, lr: float) -> None:
        """Refuse a way back that would undo every step."""
        if lr * self.l2_sp >= 1:
            raise ConfigError(
                f"--l2-sp {self.l2_sp:g} undoes every step at --lr {lr:g}; their product must be below 1"
            )

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
        from otaro.tune.accumulate import GradientAccumulator

        return (
            GradientAccumulator(self.delay, self.accumulate, self.accumulator)
            if self.method == "otaro"
            else None
        )

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
            raise ConfigError(
                f"--rates {told['rates']} is no longer there, and this run has it: start it anew"
            )
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

    steps: int | None = flag(None, TRAINING, "Optimizer steps, instead of --epochs.")
    epochs: float = flag(1.0, TRAINING, "Passes over the data.")
    lr: float = flag(5e-5, TRAINING, "Peak learning rate.")
    batch_size: int = flag(8, TRAINING, "Sequences in a batch, of each process.")
    grad_accum: int = flag(1, TRAINING, "Batches to one optimizer step.")
    sequence_length: int = flag(
        512, TRAINING, "Tokens in a sequence; fewer if the model has fewer positions."
    )
    optimizer: Optimizer = flag(
        "adamw", TRAINING, "adamw8bit: AdamW with 2 bytes of state a weight instead of 8, by bitsandbytes."
    )
    schedule: Schedule = flag("cosine", TRAINING, "Course of the learning rate.")
    clip: float = flag(1.0, TRAINING, "Largest gradient norm; 0 for none.")
    seed: int = flag(0, TRAINING, "Seed of the order of data, and of what is drawn.")
    lora: int | None = flag(None, MEMORY, "Tune adapters of this rank instead of all weights.")
    bf16: bool = flag(False, MEMORY, "Compute in bfloat16.", "--bf16/--no-bf16")
    gradient_checkpointing: bool = flag(
        False, MEMORY, "Compute activations again for the backward pass: less memory, more time."
    )
    compile: bool = flag(False, MEMORY, "Compile the steps: faster on a GPU, after a minute.")
    fsdp: bool = flag(
        False, MEMORY, "Share weights and optimizer out over the processes that torchrun started (FSDP2)."
    )
    no_bos: bool = flag(
        False,
        DATA,
        "Do not begin every block of text with the beginning-of-text token, where the tokenizer writes one.",
    )
    chat_template: str | None = flag(
        None,
        DATA,
        "How to word chats, for a model without a chat template: alpaca, chatml, vicuna, or a Jinja file.",
    )

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        if self.optimizer not in get_args(Optimizer):
            raise ConfigError(f"--optimizer {self.optimizer}: choose from {', '.join(get_args(Optimizer))}")
        if self.schedule not in get_args(Schedule):
            raise ConfigError(f"--schedule {self.schedule}: choose from {', '.join(get_args(Schedule))}")
        for flag, value in (("--lr", self.lr), ("--epochs", self.epochs)):
            if not 0 < value < math.inf:
                raise ConfigError(f"{flag} {value}: must be a number above zero")
        if not 0 <= self.clip < math.inf:
            raise ConfigError(f"--clip {self.clip}: must be a number, and not negative; 0 for no clipping")
        counts = {
            "steps": self.steps,
            "batch-size": self.batch_size,
            "grad-accum": self.grad_accum,
            "lora": self.lora,
        }
        for name, count in counts.items():
            if count is not None and count < 1:
                raise ConfigError(f"--{name} {count}: must be at least 1")
        if self.sequence_length < 2:
            raise ConfigError(f"--sequence-length {self.sequence_length}: must be at least 2")
        if self.compile and self.lora:
            raise ConfigError(
                "--compile cannot be combined with --lora: every precision would need its own graph"
            )
        if self.compile and self.fsdp:
            raise ConfigError(
                "--compile cannot be combined with --fsdp: weights are quantized where they are gathered"
            )
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"--seed {self.seed}: must be from 0 to {2**32 - 1}")

    @classmethod
    def from_dict(cls, stated: Mapping[str, Any]) -> Training:
        """The settings that a run's config.json states; others beside them are left alone."""
        return cls(**_known(cls, stated))


@dataclass(frozen=True)
class Around:
    """What surrounds the training: data that are left out, what is measured, when it is saved."""

    skip_bad_rows: bool = flag(False, DATA, "Leave out rows that cannot be used.")
    hold_out: float = flag(0.05, DATA, "Share of the data to measure on and not to train on.")
    eval_data: str | None = flag(None, DATA, "Data to measure perplexity on, instead of held-out data.")
    eval_tokens: int = flag(16_384, DATA, "Tokens to measure perplexity on.")
    save_every: int = flag(100, TRAINING, "Optimizer steps between checkpoints.")

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        if not 0 <= self.hold_out < 1:
            raise ConfigError(f"--hold-out {self.hold_out}: must be 0 or more, and less than 1")
        if self.eval_tokens < 2:
            raise ConfigError(f"--eval-tokens {self.eval_tokens}: must be at least 2")
        if self.save_every < 1:
            raise ConfigError(f"--save-every {self.save_every}: must be at least 1")

    @classmethod
    def from_dict(cls, stated: Mapping[str, Any]) -> Around:
        """As `Training.from_dict`, from the same place."""
        return cls(**_known(cls, stated))


def renamed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that a run's config.json states, under the names that they have now."""
    return {"l2_sp" if name == "pull" else name: value for name, value in options.items()}


def _known(kind: type, stated: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: stated[field.name] for field in fields(kind) if field.name in stated}


Recipe = Literal["best", "paper"]
# Chosen by held-out text in six regimes (docs/log.md). The pass in full precision keeps the fine precisions
# where tuning as usual has them, so that only the lower three need be drawn. Where data are new, what is
# learnt in full precision is what counts, and codes chosen on the data make up for most of what the low
# precisions then lack. Where data come again and again, the noise of low precisions keeps a run from fitting
# them too closely. Average and codes are judged: each helps in some regimes and costs in others.
BEST = Options(weights=(0.0, 0.0, 0.0, 1.0, 1.25, 2.6), full=None, distill=0.5, calibrate=True, average=0.5)
FULL_OF_NEW_DATA, FULL_OF_REPEATED_DATA, FEW_PASSES = 2 / 3, 1 / 3, 3


def recipe(name: Recipe, method: str | None = None) -> tuple[Options, Training]:
    """The two starting points; every flag given beside a recipe overrides it.

    `paper` is what the paper states: Algorithm 1 with lambda 5 and N 10, groups of 64, truncation, plain SGD
    at 1e-5. Its listing ends with the last batch and applies nothing that still waits then. `best` is ours,
    chosen by measurement. Two thirds of every step's loss (a third, where the run sees its data more than
    three times) are cross-entropy in full precision; half of the rest each are cross-entropy, and divergence
    from that pass, at one of the lower three precisions, drawn at random with a tilt toward the lowest. AdamW
    at the rate of tuning as usual; in the end the mean weights of the last half of the steps, and codes
    chosen on the data that were tuned on, each if they are better on held-out data.

    A method that is named takes the place of the recipe's own: of `best` nothing else then remains, since all
    of it was chosen together, and a baseline is to be what its name says.
    """
    if name == "best":
        return (BEST if method is None else Options(method=method)), Training()
    if name == "paper":
        options = Options(method=method or "otaro", reconstruction="truncate", leftover="drop")
        return options, Training(optimizer="sgd", lr=1e-5, schedule="constant", clip=0.0)
    raise ConfigError(f"--recipe {name}: choose from best, paper")


def with_precisions(options: Options, names: Sequence[str]) -> Options:
    """Options with other precisions; one that had a weight keeps it; if that drew none, all are alike."""
    precisions = tuple(Precision(name) for name in names)
    if options.weights is None:
        return replace(options, precisions=precisions)
    weight_of = dict(zip(options.precisions, options.weights, strict=True))
    weights = tuple(weight_of.get(p, 1.0) for p in precisions)
    return replace(options, precisions=precisions, weights=weights if any(weights) else None)
