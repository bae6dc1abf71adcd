"""What sharing a scale does to the weights of a checkpoint: the outlier question, for several group sizes.

One large weight raises the scale of its whole group, and the others are shifted right to match: at m mantissa bits a
weight that is shifted by s keeps m - s significant bits. How often that happens, and what it costs, is counted here.

  shift       of a nonzero weight: the exponent of its group's largest less its own, each the smallest e with |w| < 2^e.
              Counted for all but the (first) largest weight of each group; `shifts` are shares of these, the last one
              being of `MOST_SHIFT` and more.
  outlier     a group is dominated by an outlier if its largest weight is at least `OUTLIER_RATIO` times as large as the
              second largest, which is two bits above it. A group of a single weight has nobody to dominate.
  lost        a nonzero weight is lost at a precision if zero in its place would be at least as close: |value - w| >= |w|.
              For `truncate` these are the weights below one step, whose value is zero. For `midpoint` at E5M3 likewise those
              whose value is zero, below half a step. Its finer grids have no zero but +-step/2 in the middle, and lose what is
              not above step/4.
  error       root of the summed squares of value - w, relative to that of the weights.

By hand, one group of four, w = [0.5, 0.04, -0.007, 0]: the exponent of 0.5 is 0, those of the others are -4 and -7, so the
shifts are 4 and 7 and the group is dominated. `truncate` has the scale 1, at E5M4 the step 1/16: it makes 0.04 and -0.007
zero, two of three lost. `midpoint` has the scale -1/2 and the step 1/32: it makes them 3/64 and -1/64, and of these only
-0.007 would be better off as zero.

Tensors are read a few thousand rows at a time, and each of these pieces is encoded as a tensor of its own; no model is in
memory.
"""

from __future__ import annotations

import re
from math import prod
from typing import Any

import torch
from torch.nn.functional import pad

from otaro.evaluate.progress import Progress
from otaro.file.checkpoint import Checkpoint
from otaro.file.summary import module_type
from otaro.sefp.codec import Reconstruction, encode, first_refused
from otaro.sefp.precision import PRECISIONS

GROUP_SIZES = (16, 32, 64, 128, 256)
OUTLIER_RATIO = 4
MOST_SHIFT = 16

_CHUNK = 1 << 18  # weights at a time, as in pack


def analyze_weights(
    checkpoint: Checkpoint,
    *,
    reconstruction: Reconstruction = "midpoint",
    group_sizes: tuple[int, ...] = GROUP_SIZES,
    progress: Progress = lambda name, done, total: None,
) -> dict[str, Any]:
    """All counts of every packed tensor and of the whole model, by group size; `progress` gets weights done and in total."""
    total, done = sum(map(prod, checkpoint.packed.values())), 0
    overall = {size: WeightTally(size, reconstruction) for size in group_sizes}
    modules = []
    for name, shape in checkpoint.packed.items():
        tallies = {size: WeightTally(size, reconstruction) for size in group_sizes}
        at = 0  # weights of this tensor done
        for rows in checkpoint.rows(name, max(1, _CHUNK // shape[-1])):
            progress(name, done, total)
            if (bad := first_refused(rows)) is not None:
                raise checkpoint.refusal(name, at + bad, float(rows.flatten()[bad]))
            for tally in tallies.values():
                tally.add(rows)
            at += rows.numel()
            done += rows.numel()
        for size, tally in tallies.items():
            overall[size].merge(tally)
        by_size = {str(size): tally.summary() for size, tally in tallies.items()}
        modules.append({**place(name), "weights": prod(shape), "by_group_size": by_size})
    return {
        "reconstruction": reconstruction,
        "group_sizes": list(group_sizes),
        "precisions": [str(p) for p in PRECISIONS],
        "weights": total,
        "modules": modules,
        "overall": {str(size): tally.summary() for size, tally in overall.items()},
    }


def place(name: str) -> dict[str, Any]:
    """Where a tensor sits: `model.layers.3.self_attn.q_proj.weight` is self_attn.q_proj of layer 3."""
    module = name.removesuffix(".weight")
    layer = re.search(r"\.(\d+)\.", module)
    return {
        "module": module,
        "layer": int(layer[1]) if layer else None,
        "projection": module[layer.end() :] if layer else module_type(name),
    }


class WeightTally:
    """Counts over matrices of weights at one group size."""

    def __init__(self, group_size: int, reconstruction: Reconstruction) -> None:
        self.group_size, self.reconstruction = group_size, reconstruction
        counts: dict[str, tuple[int, ...]] = dict.fromkeys(("weights", "zeros", "groups", "outliers"), ())
        # Shifts in groups with an outlier, and in the others; squares of the weights, and of the errors.
        counts |= {"lost": (len(PRECISIONS),), "shifts": (2, MOST_SHIFT + 1)}
        self._counts = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in counts.items()}
        self._counts["squares"] = torch.zeros(1 + len(PRECISIONS), dtype=torch.float64)

    def add(self, rows: torch.Tensor) -> None:
        """Count a matrix whose rows are whole, so that groups begin where they do in the tensor."""
        encoded = encode(rows, self.group_size, self.reconstruction)
        rows, length, groups = rows.float(), rows.shape[-1], encoded.scale_bytes.shape[-1]

        # [rows, groups, group_size]. What fills up a short group is zero, and zeros are in none of these counts.
        grouped = pad(rows, (0, groups * self.group_size - length)).unflatten(-1, (groups, self.group_size))
        largest, at = grouped.abs().max(-1, keepdim=True)
        others = grouped.abs().scatter_(-1, at, 0.0)
        members = torch.full((groups, 1), self.group_size)
        members[-1] = length - (groups - 1) * self.group_size
        dominated = (largest >= OUTLIER_RATIO * others.amax(-1, keepdim=True)) & (largest > 0) & (members > 1)
        shifts = (torch.frexp(largest).exponent - torch.frexp(others).exponent).clamp_(max=MOST_SHIFT)
        for index, chosen in enumerate((dominated, ~dominated)):
            self._counts["shifts"][index] += torch.bincount(shifts[(others > 0) & chosen], minlength=MOST_SHIFT + 1)
        self._counts["groups"] += largest.numel()
        self._counts["outliers"] += dominated.sum()

        size = rows.abs()
        zeros = rows.numel() - torch.count_nonzero(rows)
        self._counts["weights"] += rows.numel()
        self._counts["zeros"] += zeros
        self._counts["squares"][0] += size.square().sum(dtype=torch.float64)
        for index, precision in enumerate(PRECISIONS):
            error = encoded.decode(precision).sub_(rows).abs_()
            self._counts["lost"][index] += (error >= size).sum() - zeros  # a zero meets the condition, but has nothing to lose
            self._counts["squares"][1 + index] += error.square_().sum(dtype=torch.float64)

    def merge(self, other: WeightTally) -> None:
        """Add the counts of another tensor."""
        for name, count in other._counts.items():
            self._counts[name] += count

    def summary(self) -> dict[str, Any]:
        """The counts as shares; None where there is nothing to take a share of."""
        counts: dict[str, Any] = {name: count.tolist() for name, count in self._counts.items()}
        weights, zeros, (square, *errors) = counts["weights"], counts["zeros"], counts["squares"]
        dominated, others = self._counts["shifts"]
        shifts = (dominated + others).tolist()
        lost = [_share(count, weights - zeros) for count in counts["lost"]]
        error = [(one / square) ** 0.5 if square else None for one in errors]
        return {
            "shifts": {str(shift): _share(count, sum(shifts)) for shift, count in enumerate(shifts)},
            "mean_shift": {"outlier_groups": _mean(dominated), "other_groups": _mean(others)},
            "outlier_groups": _share(counts["outliers"], counts["groups"]),
            "zeros": _share(zeros, weights),
            "lost": dict(zip(map(str, PRECISIONS), lost, strict=True)),
            "error": dict(zip(map(str, PRECISIONS), error, strict=True)),
        }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _mean(counts: torch.Tensor) -> float | None:
    """Mean shift, of counts per shift."""
    total = int(counts.sum())
    return int((counts * torch.arange(len(counts))).sum()) / total if total else None
