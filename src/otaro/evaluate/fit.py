"""`otaro fit`: the precision of every tensor that loses least within a budget.

What each tensor loses at each precision is measured on a text (`evaluate.sensitivity`), the choice of least
sum within the budget is found exactly (`evaluate.knapsack`), and what it really loses is measured on other
parts of the text, beside the best single precision that fits. Whichever of the two loses less there is the
fit, and is kept beside the model (`file.fits`).

A budget is bytes, bits per weight, or tokens per second. Speed is bytes: decoding reads every weight once per
token. So each single precision is timed here and now, and how many bytes a token may read is taken from the
line between the two that enclose the speed asked for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from decimal import Decimal
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from otaro.errors import OtaroError
from otaro.evaluate import speed
from otaro.evaluate.decoded import DecodedModel
from otaro.evaluate.knapsack import Knapsack
from otaro.evaluate.logits import KeptStates
from otaro.evaluate.machine import device_name
from otaro.evaluate.meters import Divergence
from otaro.evaluate.progress import Progress
from otaro.evaluate.records import LARGEST_LOSS
from otaro.evaluate.sensitivity import Kept, Probe, Reading, Sensitivity, check_reached, measure
from otaro.evaluate.text import Text, TextError
from otaro.evaluate.windows import ModelReader, Windows, choose_window, read
from otaro.file.fits import Budget, Fit, bytes_of, plane_bytes, read_fits, weights_of, write_fit
from otaro.file.io import NestedDirectory
from otaro.readable import size
from otaro.runtime.footprint import read_shares
from otaro.runtime.load import load, load_tokenizer
from otaro.sefp.precision import COARSEST, PRECISIONS, Precision, of_mantissa_bits
from otaro.tokens import begins_with_bos

WINDOW = 128  # tokens read together
CHECKED = 4  # times as many tokens are checked on as are measured on
_TIMED = speed.Settings(prompt_tokens=16, tokens=24, context=32, rounds=7)


@dataclass(frozen=True)
class Point:
    """A size, and what is expected to be lost there."""

    bytes: int
    bits_per_weight: float
    predicted: float
    """By the best choice of this size."""
    uniform: str | None
    """The precision that takes as much, if one does."""
    uniform_predicted: float | None
    """By this one."""


@dataclass(frozen=True)
class Outcome:
    """What was found."""

    fit: Fit
    mixed: bool
    """Whether the choice by tensor was the better one on the text it was checked on."""
    mixed_measured: float
    mixed_predicted: float
    curve: list[Point]
    checked_tokens: int
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "fit": {"name": str(self.fit), **self.fit.to_dict()}}


@dataclass(frozen=True)
class Limit:
    """What a choice may take: bytes of all of it, or bytes that a token reads."""

    bytes: int
    costs: dict[str, int]
    """Of a plane of each tensor."""
    fixed: int
    """Of the base."""
    notes: list[str]


class Fitting:
    """A nested directory and a text, measured once for any number of budgets."""

    def __init__(
        self, directory: str | os.PathLike[str], text: Text, *, tokens: int = 512, device: str = "cpu"
    ) -> None:
        """`tokens` of the text are measured on, a few times as many are checked on."""
        self.nested = NestedDirectory(directory)
        self.finest, self.text, self.device = self.nested.finest, text, device
        if self.finest.mantissa_bits == COARSEST:
            raise OtaroError(
                f"{directory} has no more than {self.finest}: there is nothing to choose; "
                "fetch its other shards"
            )
        read_fits(self.nested)  # a file that cannot be added to is better known now
        tokenizer = load_tokenizer(self.nested.path)
        ids, self._bos = text.ids(tokenizer), begins_with_bos(tokenizer)
        self._model = load(self.nested.path, self.finest, device=device)
        check_reached(self._model)
        longest = choose_window(self._model.config)
        self.window, self._check_window = min(WINDOW, longest), min(2 * WINDOW, longest)
        count = max(1, tokens // self.window)
        apart = len(ids) // count
        room = self.window - (self._bos is not None)
        if apart < 2 * room:
            raise TextError(
                f"--text {text.source} has {len(ids)} tokens; {2 * count * room} are the least, half to "
                "measure on and half "
                "to check on: give a longer one, or fewer --tokens"
            )
        first = torch.tensor([] if self._bos is None else [self._bos], dtype=ids.dtype)
        self._windows = [torch.cat([first, ids[at : at + room]]) for at in range(0, count * apart, apart)]
        length = min(apart // 2, CHECKED * room)
        self._check_ids = torch.cat(
            [ids[at + apart // 2 :][:length] for at in range(0, count * apart, apart)]
        )
        reading = Reading(
            text.sha256, count * self.window, self.window, str(self.finest), device_name(device)
        )
        self.kept = Kept(self.nested.path, self.nested.model, list(self.nested.schema.packed), reading)
        self._reference: KeptStates | None = None
        self._checked: dict[tuple[int, ...], float] = {}

    def measure(self, progress: Progress) -> Sensitivity:
        """What every tensor loses; nothing is measured twice."""
        found = self.kept.sensitivity
        if len(found.divergences) < len(self.nested.schema.packed):
            found = measure(
                Probe(self._decoded, self._windows, self.finest), self._decoded, self.kept, progress
            )
        return found

    def limit(self, budget: Budget, progress: Progress) -> Limit:
        """What a budget allows; refused where no precision is within it."""
        nested, sizes = self.nested, plane_bytes(self.nested.schema)
        least, most = bytes_of(nested, of_mantissa_bits(COARSEST)), bytes_of(nested, self.finest)
        if budget.unit == "tps":
            return self._limit_by_speed(budget, progress)
        weights = weights_of(nested)
        allowed = budget.bytes if budget.bytes is not None else int(budget.amount * weights / 8)
        if allowed < least:
            raise OtaroError(
                f"{budget.option}: {of_mantissa_bits(COARSEST)}, the smallest there is, takes "
                f"{_amount(least, weights)}; "
                f"give --bits {-(-8000 * least // weights) / 1000:.3f} or --budget {least}B at least"
            )
        notes = []
        if allowed > most and self.finest == PRECISIONS[0]:
            notes = [f"{budget.name} is more than all of it takes: {_amount(most, weights)} at {self.finest}"]
        elif allowed > most:
            notes = [
                f"{budget.name} is more than {self.finest} takes ({_amount(most, weights)}), and finer "
                "shards are not here; "
                f"bring them with: otaro fetch SOURCE {nested.path} --precision {PRECISIONS[0]}"
            ]
        return Limit(allowed, sizes, least, notes)

    def fit(
        self, budget: Budget, limit: Limit, sensitivity: Sensitivity, command: str, progress: Progress
    ) -> Outcome:
        """The best choice within a budget, checked, and kept beside the model."""
        nested, names = self.nested, list(self.nested.schema.packed)
        problem = Knapsack(
            [limit.costs[name] for name in names], [sensitivity.losses(name) for name in names]
        )
        found = problem.solve(limit.bytes - limit.fixed)
        mixed = {
            name: of_mantissa_bits(COARSEST + option)
            for name, option in zip(names, found.options, strict=True)
        }
        present = [of_mantissa_bits(bits) for bits in range(COARSEST, self.finest.mantissa_bits + 1)]
        uniform = max(
            one
            for one in present
            if limit.fixed + sum(limit.costs.values()) * (one.mantissa_bits - COARSEST) <= limit.bytes
        )
        alike = dict.fromkeys(names, uniform)
        mixed_measured, uniform_measured = self._check([mixed, alike], progress)
        better = mixed_measured <= uniform_measured
        chosen = mixed if better else alike
        total = bytes_of(nested, chosen)
        about = {
            "bytes": total,
            "bits_per_weight": 8 * total / weights_of(nested),
            "predicted": sum(
                sensitivity.losses(name)[chosen[name].mantissa_bits - COARSEST] for name in names
            ),
            "measured": min(mixed_measured, uniform_measured),
            "uniform": str(uniform),
            "uniform_measured": uniform_measured,
            "reference": str(self.finest),
            "text": self.text.name,
            "text_sha256": self.text.sha256,
            "tokens": sensitivity.reading.tokens,
            "command": command,
            "date": date.today().isoformat(),
        }
        fit = Fit(budget.name, chosen, about)
        notes = [*limit.notes, *_replaced(read_fits(nested).get(budget.name), fit)]
        write_fit(nested, fit)
        curve = self.curve(sensitivity)
        return Outcome(fit, better, mixed_measured, found.loss, curve, len(self._check_ids), notes)

    def curve(self, sensitivity: Sensitivity) -> list[Point]:
        """What is expected to be lost, over sizes: at those of the single precisions and halfway between."""
        nested, names, points = self.nested, list(self.nested.schema.packed), []
        sizes, weights = plane_bytes(nested.schema), weights_of(nested)
        losses = [sensitivity.losses(name) for name in names]
        problem = Knapsack([sizes[name] for name in names], losses)
        least, plane = bytes_of(nested, of_mantissa_bits(COARSEST)), sum(sizes.values())
        for halves in range(2 * (self.finest.mantissa_bits - COARSEST) + 1):
            more, whole = halves * plane // 2, halves // 2 if halves % 2 == 0 else None
            point = Point(
                bytes=least + more,
                bits_per_weight=8 * (least + more) / weights,
                predicted=problem.solve(more).loss,
                uniform=None if whole is None else str(of_mantissa_bits(COARSEST + whole)),
                uniform_predicted=None if whole is None else sum(loss[whole] for loss in losses),
            )
            points.append(point)
        return points

    def _check(self, choices: Sequence[dict[str, Precision]], progress: Progress) -> list[float]:
        """Divergences from the finest on parts of the text that were not measured on."""
        windows, decoded = Windows(self._check_ids, self._check_window, None, self._bos), self._decoded
        keys = [tuple(one.mantissa_bits for one in choice.values()) for choice in choices]
        new = {key: choice for key, choice in zip(keys, choices, strict=True) if key not in self._checked}
        read_before, total = 0, len(self._check_ids) * (len(new) + (self._reference is None))

        def report(done: int, of: int) -> None:
            progress("", read_before + done, total)

        if self._reference is None:
            reader, kept = ModelReader(decoded.at(self.finest)), KeptStates()
            read(reader, windows, [kept], report, with_logits=False)
            kept.finish(reader.sliced)
            self._reference, read_before = kept, len(self._check_ids)
        for key, choice in new.items():
            meter = Divergence(self._reference)
            read(ModelReader(decoded.at(choice)), windows, [meter], report)
            if not abs(meter.kl) <= LARGEST_LOSS:
                raise OtaroError(
                    "the model's outputs overflow on the text it is checked on; it cannot be fitted"
                )
            self._checked[key] = max(meter.kl, 0.0)
            read_before += len(self._check_ids)
        return [self._checked[key] for key in keys]

    def _limit_by_speed(self, budget: Budget, progress: Progress) -> Limit:
        """Bytes that a token may read, by the speed of each single precision on this machine now."""
        timed = speed.bench(str(self.nested.path), _TIMED, device=self.device, progress=progress)
        rows = sorted((row.weight_bytes, 1 / row.decode, row) for row in timed.precisions)
        wanted, fastest = 1 / float(budget.amount), max(row.decode for row in timed.precisions)
        if rows[0][1] > wanted:
            raise OtaroError(
                f"{budget.option}: this machine makes {fastest:.1f} tokens per second at "
                f"{rows[0][2].precision}, its smallest "
                "precision, just now; ask for fewer"
            )
        allowed = float(rows[0][0])
        for (low, fast, _), (high, slow, _) in pairwise(rows):
            if slow > wanted:
                allowed = low + (high - low) * (wanted - fast) / (slow - fast)
                break
            allowed = high
        spread = max(max(row.rounds.decode) / min(row.rounds.decode) for row in timed.precisions) - 1
        notes = [
            f"{budget.name} lets a token read {size(allowed)} of weights, by the speed of single precisions "
            "just now; rounds "
            f"of {_TIMED.tokens} tokens differed by up to {spread:.0%}, and so may the speed: "
            f"`otaro bench {self.nested.path} --precision fit:{budget.name}` tells"
        ]
        shares = read_shares(self._model)
        costs = {name: int(plane * shares[name]) for name, plane in plane_bytes(self.nested.schema).items()}
        return Limit(int(allowed), costs, rows[0][0], notes)

    @cached_property
    def _decoded(self) -> DecodedModel:
        return DecodedModel(self._model, keep_planes=True)


def budget_of(budget: str | None, bits: float | None, tokens_per_second: float | None) -> Budget:
    """The one budget that the options name."""
    given = [one for one in (budget, bits, tokens_per_second) if one is not None]
    if len(given) != 1:
        raise OtaroError("give one budget: --budget 90MB, --bits 4.5, or --tokens-per-second 40")
    if budget is not None:
        return Budget.parse(budget)
    amount, unit = (bits, "bits") if bits is not None else (tokens_per_second, "tps")
    return Budget.parse(f"{Decimal(str(amount)):f}{unit}")


def _replaced(before: Fit | None, fit: Fit) -> list[str]:
    """A note where the fit of this name was measured otherwise."""
    measured = ("text_sha256", "tokens", "reference")
    if before is None or all(
        before.about.get(field, fit.about[field]) == fit.about[field] for field in measured
    ):
        return []
    old, new = (
        ", ".join(
            [one["text"], *([f"{one['tokens']} tokens, from {one['reference']}"] if "tokens" in one else [])]
        )
        for one in (before.about, fit.about)
    )
    return [
        f"this takes the place of the {fit} of {before.about['date']}, which was measured on {old}; now "
        f"on {new}"
    ]


def _amount(count: int, weights: int) -> str:
    return f"{size(count)}, {8 * count / weights:.3f} bits per weight"
