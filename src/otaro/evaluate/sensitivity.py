"""What each tensor of a model loses at each precision: the divergence from the finest that it alone causes.

A few windows of the text are read again for every tensor, with that one tensor at a coarser precision. Layers
before it say what they said the first time, so their outputs are kept and stand in for them; only the rest is
computed.

The two coarsest precisions are measured. Divergence is quadratic in a small error, and errors of finer
precisions are the same error on a finer grid: they lose as much less as the tensor's squared error is
smaller. What tensors lose together is taken as the sum of what each loses alone. Both are checked: whoever
relies on them measures the outcome (`evaluate.fit`).

Measurements are kept in `sensitivity.json` beside the model, by text: one that was interrupted goes on where
it stopped, and a second budget measures nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from otaro.errors import OtaroError
from otaro.evaluate import records
from otaro.evaluate.decoded import DecodedModel
from otaro.evaluate.logits import Ready
from otaro.evaluate.progress import Progress
from otaro.evaluate.records import LARGEST_LOSS
from otaro.file.atomic import update_text
from otaro.file.header import untrusted_json
from otaro.file.replace import SENSITIVITY_FILE
from otaro.runtime.precision import attachment
from otaro.sefp.precision import COARSEST, Precision, of_mantissa_bits

VERSION = 1
MEASURED = 2  # precisions of every tensor, the coarsest
_LARGEST = 1 << 26  # bytes of a file
_EVERY = 5.0  # seconds between two times that it is written
_HEAD = 8  # layers that a head takes as long as, about: for estimates alone


@dataclass(frozen=True)
class Reading:
    """What was read to measure: equal where measurements can be taken over."""

    text_sha256: str
    tokens: int
    window: int
    finest: str
    device: str


@dataclass
class Sensitivity:
    """Of every tensor: divergences at the coarsest precisions, and squared errors at all below the finest."""

    reading: Reading
    divergences: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, list[float]] = field(default_factory=dict)

    def losses(self, tensor: str) -> list[float]:
        """From the coarsest precision to the finest, which loses nothing."""
        measured, errors = self.divergences[tensor], self.errors[tensor]
        lost, error = measured[-1], errors[len(measured) - 1]
        finer = [lost * one / error if error else 0.0 for one in errors[len(measured) :]]
        return [*measured, *(min(loss, LARGEST_LOSS) for loss in finer), 0.0]


class Probe:
    """A decoded model that reads the same windows again and again, and what its finest precision said."""

    def __init__(self, decoded: DecodedModel, windows: Sequence[torch.Tensor], finest: Precision) -> None:
        self._decoded, self._windows, self.finest = decoded, windows, finest
        model = self._model = decoded.at(finest)
        self._layers = _layers(model)
        self._kept: list[list[Any]] = []
        self._said: list[torch.Tensor] = []
        """Logarithms of probabilities, by window."""
        for ids in windows:
            outputs: list[Any] = []
            with ExitStack() as hooks:
                for one in self._layers:
                    keep = one.register_forward_hook(lambda m, a, out, to=outputs: to.append(out))
                    hooks.callback(keep.remove)
                self._said.append(self._log_probabilities(ids))
            self._kept.append(outputs)
        if any(len(outputs) != len(self._layers) for outputs in self._kept):
            self._layers = nn.ModuleList()  # a class that calls them otherwise: everything is computed
        paths = {module: name for name, module in model.named_modules()}
        prefixes = [f"{paths[layer]}." for layer in self._layers]
        self._first = {}
        for name in decoded.weights:
            inside = [number for number, prefix in enumerate(prefixes) if name.startswith(prefix)]
            self._first[name] = inside[0] if inside else self._outside(name)

    def cost(self, tensor: str) -> int:
        """How long a measurement of this tensor takes, in layers."""
        return len(self._layers) - self._first[tensor] + _HEAD

    def divergence(self, precisions: Mapping[str, Precision], changed: str | None = None) -> float:
        """From the finest, in nats. Where all tensors but one are at the finest, `changed` is that one."""
        self._decoded.at(precisions)
        first, total, positions = 0 if changed is None else self._first[changed], 0.0, 0
        for ids, outputs, said in zip(self._windows, self._kept, self._said, strict=True):
            with self._from_layer(first, outputs):
                now = self._log_probabilities(ids)
            total += float((said - now).mul_(said.exp()).sum(dtype=torch.float64))
            positions += len(ids)
        return total / positions

    @torch.inference_mode()
    def _log_probabilities(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self._model(ids.unsqueeze(0).to(self._model.device), use_cache=False).logits[0]
        said: torch.Tensor = logits.float().log_softmax(-1)
        return said

    def _outside(self, name: str) -> int:
        """The layer to begin at for a tensor that is in none: after all of them for a head of its own."""
        head = self._model.get_output_embeddings()
        own = head is not None and self._model.get_input_embeddings().weight is not head.weight
        weight = getattr(head, "weight", None)
        at_end = own and weight is not None and weight.data_ptr() == self._decoded.weights[name].data_ptr()
        return len(self._layers) if at_end else 0

    @contextmanager
    def _from_layer(self, first: int, outputs: list[Any]) -> Iterator[None]:
        """Layers before the first give what they gave; whatever they are passed is of no interest."""
        layers = list(self._layers)
        try:
            for number in range(first):
                self._layers[number] = Ready(outputs[number])
            yield
        finally:
            for number in range(first):
                self._layers[number] = layers[number]


def _layers(model: Any) -> nn.ModuleList:
    """The list of a model's layers; empty where none of its lists has as many as the config says."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = [one for one in model.get_decoder().children() if isinstance(one, nn.ModuleList)]
    found = [one for one in lists if len(one) == count]
    return found[0] if len(found) == 1 else nn.ModuleList()


def check_reached(nested: Any) -> None:
    """Refuse a model with packed tensors that no text ever reaches: what they lose could not be told."""
    text = {*nested.get_decoder().modules(), nested.get_output_embeddings()}
    for name, module in attachment(nested).modules.items():
        if module not in text:
            raise OtaroError(f"{name} reads no text, so none tells what it loses; name a precision for it")


def measure(probe: Probe, decoded: DecodedModel, kept: Kept, progress: Progress) -> Sensitivity:
    """Measure every tensor that was not measured yet, and keep what is measured."""
    sensitivity, at_finest = kept.sensitivity, dict.fromkeys(decoded.weights, probe.finest)
    coarser = [of_mantissa_bits(bits) for bits in range(COARSEST, probe.finest.mantissa_bits)]
    missing = [name for name in decoded.weights if name not in sensitivity.divergences]
    done, total = 0, sum(probe.cost(name) for name in missing) * min(MEASURED, len(coarser))
    try:
        for name in missing:
            fine = decoded.weights[name].clone()
            errors, divergences = list[float](), list[float]()
            for number, precision in enumerate(coarser):
                decoded.at(precisions := {**at_finest, name: precision})
                errors.append(_squared_error(decoded.weights[name], fine))
                if number < MEASURED:
                    progress(name, done, total)
                    lost = probe.divergence(precisions, changed=name)
                    if not abs(lost) <= LARGEST_LOSS:
                        raise OtaroError(f"{name} at {precision} makes outputs overflow; nothing to fit")
                    divergences.append(max(lost, 0.0))  # rounding may leave less than nothing
                    done += probe.cost(name)
            decoded.at(at_finest)
            kept.add(name, divergences, errors)
        progress("", total, total)
    finally:
        kept.flush()
    return sensitivity


@torch.inference_mode()
def _squared_error(weight: torch.Tensor, fine: torch.Tensor) -> float:
    rows = zip(weight.flatten(0, -2).split(1 << 10), fine.flatten(0, -2).split(1 << 10), strict=True)
    return sum(float((some - other).float().square().sum()) for some, other in rows)


class Kept:
    """Measurements of one model as they are kept beside it; those of one reading are added to."""

    def __init__(self, directory: Path, model: str, tensors: Sequence[str], reading: Reading) -> None:
        """Measurements of `reading` that are there are taken over."""
        self.path = directory / SENSITIVITY_FILE
        self._model, self._tensors, self._written = model, set(tensors), time.monotonic()
        found = [one for one in self._read() if one.reading == reading]
        self.sensitivity = found[0] if found else Sensitivity(reading)
        self.taken_over = len(self.sensitivity.divergences)

    def add(self, tensor: str, divergences: list[float], errors: list[float]) -> None:
        """Keep the measurements of a tensor, on disk now or a few seconds later."""
        self.sensitivity.divergences[tensor], self.sensitivity.errors[tensor] = divergences, errors
        if time.monotonic() - self._written > _EVERY:
            self.flush()

    def flush(self) -> None:
        """Write what there is."""

        def updated() -> str:
            others = [one for one in self._read() if one.reading != self.sensitivity.reading]
            every = [asdict(one) for one in [*others, self.sensitivity]]
            rows = [{**one.pop("reading"), **one} for one in every]
            return json.dumps({"version": VERSION, "model": self._model, "readings": rows}, indent=1) + "\n"

        update_text(self.path, updated)
        self._written = time.monotonic()

    def _read(self) -> list[Sensitivity]:
        if not self.path.is_file():
            return []
        try:
            if self.path.stat().st_size > _LARGEST:
                raise ValueError("it is larger than any")
            raw = records.check(records.Sensitivity, untrusted_json(self.path.read_text(encoding="utf-8")))
            if raw["model"] != self._model:
                raise ValueError("it is about another model than the one beside it")
            return [_of_reading(row, self._tensors) for row in raw["readings"]]
        except ValueError as error:  # of JSON, of UTF-8, or ours
            raise OtaroError(f"{self.path} cannot be used: {error}; move it away to measure anew") from None


def _of_reading(row: dict[str, Any], tensors: set[str]) -> Sensitivity:
    """The measurements of one text, checked as strangers' are; a ValueError says what is wrong."""
    reading = Reading(**{name: row[name] for name in Reading.__dataclass_fields__})
    below = Precision(reading.finest).mantissa_bits - COARSEST  # a PrecisionError is a ValueError
    for name, count in (("divergences", min(MEASURED, below)), ("errors", below)):
        if row[name].keys() != row["errors"].keys() or not row[name].keys() <= tensors:
            raise ValueError(f"its {name} are of other tensors")
        if any(len(values) != count for values in row[name].values()):
            raise ValueError(f"its {name} are not {count} numbers for each tensor")
    return Sensitivity(reading, row["divergences"], row["errors"])
