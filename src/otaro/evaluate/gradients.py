"""Gradients at every precision: the paper's Figs. 4 and 5 and eqs. 14 to 17, for every packed module.

The straight-through gradient at a precision is the gradient at the quantized weights, passed on as it is
(eqs. 1 to 3): that of a model that simply holds the decoded weights. So one float model is enough. For each
batch it gets its original weights and then those of each precision in turn, seven backward passes in all, and
yields f, the paper's gradient in full precision, and six gradients g. All of them concern the packed weights;
norms and biases are not quantized and not looked at.

  similarity  (Fig. 4) the cosine between the gradients at two precisions: <g, g'> / (|g| |g'|), all batches
              laid end to end, per module and over all modules (`overall`). `to_fp` is the cosine with f.
  norm_error  (Fig. 5) (|g| - |f|) / |f| for each batch, all modules together. The paper shows the absolute
              difference from full precision; the relative one compares between batches and models.
  fit         (eq. 14) g = X f + Y by least squares over all entries of all batches. As a full matrix X would
              have more unknowns than batches give equations, and Y would vanish; here X is a number,
              <g, f> / <f, f>. `y_share` is |Y| / |f|.
              (eq. 15) The mean over all entries is near zero for any gradient, as signs cancel. Whether each
              entry's own mean over the batches is zero tells `y_bias`, the norm of the mean Y over the root
              mean square norm of a batch's Y: about 1/sqrt(batches) for noise, 1 if Y is always the same.
  noise       (eq. 17) |sum of Y| / |sum of f| over the first n batches. `exponent` is the slope of log ratio
              over log n by least squares: -1/2 is the paper's law.

All of these are functions of inner products between the seven gradients, so per module a 7 x 7 Gram matrix is
summed up in float64 and no gradient outlives its batch, but for the running sums that eq. 17 needs.

In memory: 4 bytes per weight of the model, 4 for the originals, 2 for the codes; and per weight that is
looked at 4 for the gradient at hand, 28 for the seven of a batch, 28 for their sums. For a large model look
at some modules only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from statistics import linear_regression
from typing import Any

import torch

from otaro.errors import OtaroError
from otaro.evaluate.progress import Progress
from otaro.evaluate.records import FULL
from otaro.file.summary import module_type
from otaro.packable import Kind, packable
from otaro.sefp.codec import Reconstruction, encode
from otaro.sefp.precision import GROUP_SIZE, PRECISIONS, Precision

# of Gram matrices: full precision, then the finest to the coarsest
ROWS: tuple[Precision | None, ...] = (None, *PRECISIONS)
_CHUNK = 1 << 20  # entries whose inner products are taken at a time, as float64 needs twice the room


def analyze_gradients(
    model: Any,
    packed: Sequence[str],
    batches: Sequence[Mapping[str, torch.Tensor]],
    *,
    group_size: int = GROUP_SIZE,
    reconstruction: Reconstruction = "midpoint",
    modules: str = "*",
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Any]:
    """Compare the gradients of all precisions over `batches`, which hold input_ids and labels.

    `model` is a causal language model in float32 and `packed` names its parameters to be quantized; it is
    left as it was. Only modules whose name matches the pattern `modules` are looked at, though all are
    quantized. `progress` gets backward passes done and in total.
    """
    matching = [name for name in packed if fnmatchcase(name.removesuffix(".weight"), modules)]
    if not matching:
        like = packed[0].removesuffix(".weight")
        raise OtaroError(f"no packed module matches {modules!r}; names look like {like!r}")
    chosen = {name: model.get_parameter(name) for name in matching}
    entries = {name: weight.numel() for name, weight in chosen.items()}
    tally = GradientTally(entries, chosen[matching[0]].device)
    gradients = {name: weight.new_empty(len(ROWS), entries[name]) for name, weight in chosen.items()}
    losses = torch.zeros(len(ROWS), dtype=torch.float64)
    with _only_trainable(model, chosen), _switched(model, packed, group_size, reconstruction) as switch:
        for number, batch in enumerate(batches):
            inputs = {key: tensor.to(model.device) for key, tensor in batch.items()}
            for row, precision in enumerate(ROWS):
                at = str(precision or "full precision")
                progress(f"batch {number + 1} at {at}", number * len(ROWS) + row, len(batches) * len(ROWS))
                switch(precision)
                loss = model(**inputs, use_cache=False).loss
                if not math.isfinite(value := float(loss.detach())):
                    odd = f"the loss of batch {number + 1} at {at} is {value}"
                    raise OtaroError(f"{odd}; gradients of it mean nothing")
                losses[row] += value / len(batches)
                loss.backward()
                for name, weight in chosen.items():
                    # an expert may go unused
                    gradients[name][row] = 0 if weight.grad is None else weight.grad.flatten()
                    weight.grad = None
            tally.add(gradients)
    names = [str(precision or FULL) for precision in ROWS]
    return {
        "group_size": group_size,
        "reconstruction": reconstruction,
        "batches": len(batches),
        "tokens": sum(batch["input_ids"].numel() for batch in batches),
        "loss": dict(zip(names, losses.tolist(), strict=True)),
        **tally.summary(),
    }


class GradientTally:
    """Of the gradients of many batches; made for entries per module, fed with [7, entries] for each."""

    def __init__(self, entries: Mapping[str, int], device: torch.device | str = "cpu") -> None:
        self._sums = {name: torch.zeros(len(ROWS), count, device=device) for name, count in entries.items()}
        self._grams = {name: torch.zeros(len(ROWS), len(ROWS), dtype=torch.float64) for name in entries}
        self._norms: list[torch.Tensor] = []  # per batch, of all modules together
        self._grams_of_sums: dict[int, torch.Tensor] = {}  # after 1, 2, 4, ... batches

    def add(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Take in one batch: for each module the gradients in the order of `ROWS`."""
        norms = torch.zeros(len(ROWS), dtype=torch.float64)
        for name, rows in gradients.items():
            gram = _gram(rows)
            if not gram.isfinite().all():
                raise OtaroError(f"{name}: the gradient of batch {len(self._norms) + 1} is not finite")
            self._grams[name] += gram
            self._sums[name] += rows
            norms += gram.diagonal()
        if not norms[0]:
            zero = f"the gradient of batch {len(self._norms) + 1} is zero at full precision"
            raise OtaroError(f"{zero}; there is nothing to compare")
        self._norms.append(norms.sqrt())
        batches = len(self._norms)
        if batches.bit_count() == 1:  # a power of two
            self._grams_of_sums[batches] = self._gram_of_sums()

    def summary(self) -> dict[str, Any]:
        """Everything but the description of the run, as described at the head of this module."""
        batches = len(self._norms)
        self._grams_of_sums[batches] = self._gram_of_sums()
        gram = torch.stack(list(self._grams.values())).sum(0)
        norms = torch.stack(self._norms)
        names = list(map(str, PRECISIONS))
        fits, noise, errors = {}, {}, {}
        for row, name in enumerate(names, 1):
            fits[name], noise[name] = self._fit(gram, row)
            errors[name] = (norms[:, row] / norms[:, 0] - 1).tolist()
        together = _similarities(gram)
        return {
            "precisions": names,
            "modules": [{**place(name), **_similarities(found)} for name, found in self._grams.items()],
            "overall": together["matrix"],
            "to_fp": together["to_fp"],
            "norm_error": errors,
            "fit": fits,
            "noise": noise,
        }

    def _fit(self, gram: torch.Tensor, row: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Eqs. 14, 15 and 17 for the precision in `row`."""
        batches, sums = len(self._norms), self._grams_of_sums
        x = float(gram[row, 0] / gram[0, 0])  # no batch without a gradient was let in
        y_square = _y_square(gram, row, x)
        fit = {
            "x": x,
            "y_share": (y_square / float(gram[0, 0])) ** 0.5,
            "y_bias": (_y_square(sums[batches], row, x) / batches / y_square) ** 0.5 if y_square else None,
        }
        n = sorted(sums)
        ratio = [(_y_square(sums[count], row, x) / float(sums[count][0, 0])) ** 0.5 for count in n]
        return fit, {"n": n, "ratio": ratio, "exponent": _slope(n, ratio)}

    def _gram_of_sums(self) -> torch.Tensor:
        return torch.stack([_gram(rows) for rows in self._sums.values()]).sum(0)


def place(name: str) -> dict[str, Any]:
    """Where a tensor sits: `model.layers.3.self_attn.q_proj.weight` is self_attn.q_proj of layer 3."""
    module = name.removesuffix(".weight")
    layer = re.search(r"\.(\d+)\.", module)
    return {
        "module": module,
        "layer": int(layer[1]) if layer else None,
        "projection": module[layer.end() :] if layer else module_type(name),
    }


def _gram(rows: torch.Tensor) -> torch.Tensor:
    """All inner products between rows, in float64: the squares of Y are small differences of large ones."""
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for some in rows.split(_CHUNK, 1):
        wide = some.double()
        total += wide @ wide.T
    return (0.5 * (total + total.T)).cpu()


def _similarities(gram: torch.Tensor) -> dict[str, Any]:
    """Cosines from a Gram matrix; None where a gradient is zero."""
    squares = gram.diagonal()
    cosines = gram / torch.outer(squares, squares).sqrt()  # NaN where a gradient is zero
    return {
        "matrix": [[_number(value) for value in line] for line in cosines[1:, 1:].tolist()],
        "to_fp": [_number(value) for value in cosines[0, 1:].tolist()],
    }


def _y_square(gram: torch.Tensor, row: int, x: float) -> float:
    """|g - X f|^2, multiplied out."""
    return max(float(gram[row, row] - 2 * x * gram[row, 0] + x * x * gram[0, 0]), 0.0)


def _slope(n: Sequence[int], ratio: Sequence[float]) -> float | None:
    """The power of n that the ratio follows, by least squares of logarithms; None with less than two."""
    points = [(math.log(count), math.log(value)) for count, value in zip(n, ratio, strict=True) if value]
    return linear_regression(*zip(*points, strict=True)).slope if len(points) > 1 else None


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


@contextmanager
def _switched(
    model: Any, packed: Sequence[str], group_size: int, reconstruction: Reconstruction
) -> Iterator[Callable[[Precision | None], None]]:
    """Yield a function that puts weights of a precision, or the originals, into the model, as at the end."""
    weights = {name: model.get_parameter(name).detach() for name in packed}
    turned = [one.name for one in packable(model) if one.kind is Kind.CONV1D and one.name in weights]
    rows = weights | {name: weights[name].T for name in turned}  # the same memory, seen as it is packed
    originals = {name: weight.clone() for name, weight in rows.items()}
    codes = {
        name: encode(weight.contiguous(), group_size, reconstruction, name=name)
        for name, weight in rows.items()
    }

    def switch(precision: Precision | None) -> None:
        for name, row in rows.items():
            row.copy_(originals[name] if precision is None else codes[name].decode(precision))

    try:
        yield switch
    finally:
        switch(None)


@contextmanager
def _only_trainable(model: Any, chosen: Mapping[str, torch.nn.Parameter]) -> Iterator[None]:
    """Gradients for the chosen parameters alone, and no dropout; as before afterwards."""
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    was_training = model.training
    model.requires_grad_(False).eval()
    for parameter in chosen.values():
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        model.train(was_training)
        for parameter, required in before.items():
            parameter.requires_grad_(required)
