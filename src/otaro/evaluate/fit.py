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
            only = f"{directory} has no more than {self.finest}"
            raise OtaroError(f"{only}: there is nothing to choose; fetch its other shards")
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
                "measure on and half to check on: give a longer one, or fewer --tokens"
            )
        first = torch.tensor([] if self._bos is None else [self._bos], dtype=ids.dtype)
        starts, length = range(0, count * apart, apart), min(apart // 2, CHECKED * room)
        self._windows = [torch.cat([first, ids[at : at + room]]) for at in starts]
        self._check_ids = torch.cat([ids[at + apart // 2 :][:length] for at in starts])
        place = device_name(device)
        reading = Reading(text.sha256, count * self.window, self.window, str(self.finest), place)
        self.kept = Kept(self.nested.path, self.nested.model, list(self.nested.schema.packed), reading)
        self._reference: KeptStates | None = None
        self._checked: dict[tuple[int, ...], float] = {}

    @property
    def nothing_to_fit(self) -> str:
        """What to do where the finest that is here is within a budget."""
        if self.finest == PRECISIONS[0]:
            return f"there is nothing to fit; run it with --precision {self.finest}"
        bring = f"otaro fetch SOURCE {self.nested.path} --precision {PRECISIONS[0]}"
        return f"there is nothing to fit without finer shards; bring them with: {bring}"

    def measure(self, progress: Progress) -> Sensitivity:
        """What every tensor loses; nothing is measured twice."""
        if len(self.kept.sensitivity.divergences) < len(self.nested.schema.packed):
            measure(Probe(self._decoded, self._windows, self.finest), self._decoded, self.kept, progress)
        return self.kept.sensitivity

    def limit(self, budget: Budget, progress: Progress) -> Limit:
        """What a budget allows; refused where no precision is within it, or the finest is fast enough."""
        if budget.unit == "tps":
            return self._limit_by_speed(budget, progress)
        nested, smallest, weights = self.nested, of_mantissa_bits(COARSEST), weights_of(self.nested)
        least, most = bytes_of(nested, smallest), bytes_of(nested, self.finest)
        allowed = budget.bytes if budget.bytes is not None else int(budget.amount * weights / 8)
        if allowed < least:
            raise OtaroError(
                f"{budget.option}: {smallest}, the smallest there is, takes {_amount(least, weights)}; "
                f"give --bits {-(-8000 * least // weights) / 1000:.3f} or --budget {least}B at least"
            )
        note, all_of_it = f"{budget.name} is more than", _amount(most, weights)
        if self.finest == PRECISIONS[0]:
            note += f" all of it takes: {all_of_it} at {self.finest}"
        else:
            note += f" {self.finest} takes ({all_of_it}), and finer shards are not here; "
            note += f"bring them with: otaro fetch SOURCE {nested.path} --precision {PRECISIONS[0]}"
        return Limit(allowed, plane_bytes(nested.schema), least, [note] if allowed > most else [])

    def fit(
        self, budget: Budget, limit: Limit, sensitivity: Sensitivity, command: str, progress: Progress
    ) -> Outcome:
        """The best choice within a budget, checked, and kept beside the model."""
        nested, names, room = self.nested, list(self.nested.schema.packed), limit.bytes - limit.fixed
        losses = {name: sensitivity.losses(name) for name in names}
        found = Knapsack([limit.costs[name] for name in names], list(losses.values())).solve(room)
        options = zip(names, found.options, strict=True)
        mixed = {name: of_mantissa_bits(COARSEST + option) for name, option in options}
        planes, plane = range(self.finest.mantissa_bits - COARSEST + 1), sum(limit.costs.values())
        uniform = of_mantissa_bits(COARSEST + max(count for count in planes if plane * count <= room))
        alike = dict.fromkeys(names, uniform)
        mixed_measured, uniform_measured = self._check([mixed, alike], progress)
        better = mixed_measured <= uniform_measured
        chosen = mixed if better else alike
        total = bytes_of(nested, chosen)
        about = {
            "bytes": total,
            "bits_per_weight": 8 * total / weights_of(nested),
            "predicted": sum(losses[name][chosen[name].mantissa_bits - COARSEST] for name in names),
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
        nested, sizes, points = self.nested, plane_bytes(self.nested.schema), []
        losses = [sensitivity.losses(name) for name in sizes]
        problem = Knapsack(list(sizes.values()), losses)
        least, plane = bytes_of(nested, of_mantissa_bits(COARSEST)), sum(sizes.values())
        for halves in range(2 * (self.finest.mantissa_bits - COARSEST) + 1):
            whole, half = divmod(halves, 2)
            total = least + halves * plane // 2
            bits, predicted = 8 * total / weights_of(nested), problem.solve(total - least).loss
            alike = (str(of_mantissa_bits(COARSEST + whole)), sum(loss[whole] for loss in losses))
            points.append(Point(total, bits, predicted, *((None, None) if half else alike)))
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
                raise OtaroError("the model's outputs overflow on the text it is checked on: nothing to fit")
            self._checked[key] = max(meter.kl, 0.0)
            read_before += len(self._check_ids)
        return [self._checked[key] for key in keys]

    def _limit_by_speed(self, budget: Budget, progress: Progress) -> Limit:
        """Bytes that a token may read, by the speed of each single precision on this machine now."""
        timed = speed.bench(str(self.nested.path), _TIMED, device=self.device, progress=progress)
        rows = sorted(timed.precisions, key=lambda row: row.weight_bytes)
        wanted = float(budget.amount)
        reach = [number for number, row in enumerate(rows) if row.decode >= wanted]
        # not always the coarsest: where weights lie in a cache a finer one may be faster
        low = rows[reach[-1]] if reach else max(rows, key=lambda row: row.decode)
        made = f"this machine makes {low.decode:.1f} tokens per second at {low.precision} just now"
        if not reach:
            raise OtaroError(f"{budget.option}: {made}, and no precision is faster; ask for fewer")
        if low is rows[-1]:
            raise OtaroError(f"{budget.option}: {made}, the finest that is here: {self.nothing_to_fit}")
        high = rows[reach[-1] + 1]
        share = (1 / wanted - 1 / low.decode) / (1 / high.decode - 1 / low.decode)
        allowed = low.weight_bytes + (high.weight_bytes - low.weight_bytes) * share
        spread = max(max(row.rounds.decode) / min(row.rounds.decode) for row in timed.precisions) - 1
        notes = [
            f"{budget.name} lets a token read {size(allowed)} of weights, by the speed of single precisions "
            f"just now; rounds of {_TIMED.tokens} tokens differed by up to {spread:.0%}, and so may the "
            f"speed: `otaro bench {self.nested.path} --precision fit:{budget.name}` tells"
        ]
        shares = read_shares(self._model)
        costs = {name: int(plane * shares[name]) for name, plane in plane_bytes(self.nested.schema).items()}
        return Limit(int(allowed), costs, rows[0].weight_bytes, notes)

    @cached_property
    def _decoded(self) -> DecodedModel:
        return DecodedModel(self._model, keep_planes=True)


def budget_of(budget: str | None, bits: float | None, tokens_per_second: float | None) -> Budget:
    """The one budget that the options name."""
    given = [one for one in (budget, bits, tokens_per_second) if one is not None]
    if len(given) != 1:
        raise OtaroError("give one budget: --budget 90MB, --bits 4.5, or --tokens-per-second 40")
    if budget is not None:
        try:
            return Budget.parse(budget)
        except OtaroError as error:
            raise OtaroError(f"--budget {error}") from None
    option, amount, unit = "--tokens-per-second", tokens_per_second, "tps"
    if bits is not None:
        option, amount, unit = "--bits", bits, "bits"
    try:
        return Budget.parse(f"{Decimal(str(amount)):f}{unit}")
    except OtaroError:
        digits = "with 15 digits before the point and 6 behind it at most"
        raise OtaroError(f"{option} {amount:g}: give a number above 0, {digits}") from None


def _replaced(before: Fit | None, fit: Fit) -> list[str]:
    """A note where the fit of this name was measured otherwise."""
    measured = {field: fit.about[field] for field in ("text_sha256", "tokens", "reference")}
    if before is None or all(before.about.get(field, now) == now for field, now in measured.items()):
        return []
    there = f"this takes the place of the {fit} of {before.about['date']}"
    return [f"{there}, which was measured on {_measured_on(before)}; now on {_measured_on(fit)}"]


def _measured_on(fit: Fit) -> str:
    text, tokens, reference = (fit.about.get(field) for field in ("text", "tokens", "reference"))
    return f"{text}, {tokens} tokens, from {reference}" if tokens is not None else str(text)


def _amount(count: int, weights: int) -> str:
    return f"{size(count)}, {8 * count / weights:.3f} bits per weight"
