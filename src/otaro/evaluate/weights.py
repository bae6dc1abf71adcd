"""What sharing a scale does to the weights of a checkpoint: the outlier question, for several group sizes.

One large weight raises the scale of its whole group, and the others are shifted right to match. How often
that happens, and what it costs, is counted here.

  outlier  a group is dominated by an outlier if its largest weight is at least `OUTLIER_RATIO` times the
           second largest, which is two bits above it. A group of a single weight has nobody to dominate.
  lost     a nonzero weight is lost at a precision if zero would be at least as close: |value - w| >= |w|.
           For `truncate` these are the weights below one step, whose value is zero. For `midpoint` at E5M3
           likewise those whose value is zero, below half a step. Its finer grids have no zero but +-step/2
           in the middle, and lose what is not above step/4.
  error    root of the summed squares of value - w, relative to that of the weights.

By hand, one group of four, w = [0.5, 0.04, -0.007, 0]: the group is dominated. `truncate` has the scale 1, at
E5M4 the step 1/16: it makes 0.04 and -0.007 zero, two of three lost. `midpoint` has the scale -1/2 and the
step 1/32: it makes them 3/64 and -1/64, and of these only -0.007 would be better off as zero.

Tensors are read a few thousand rows at a time, and each of these pieces is encoded as a tensor of its own; no
model is in memory.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.nn.functional import pad

from otaro.evaluate.progress import Progress
from otaro.file.checkpoint import Checkpoint
from otaro.sefp.codec import Reconstruction, encode, first_refused
from otaro.sefp.precision import PRECISIONS

GROUP_SIZES = (16, 32, 64, 128, 256)
OUTLIER_RATIO = 4

_CHUNK = 1 << 18  # weights at a time, as in pack


def analyze_weights(
    checkpoint: Checkpoint,
    *,
    reconstruction: Reconstruction = "midpoint",
    group_sizes: tuple[int, ...] = GROUP_SIZES,
    progress: Progress = lambda name, done, total: None,
) -> dict[str, Any]:
    """All counts of each packed tensor and of the model, by group size; `progress` gets weights."""
    total, done = sum(map(prod, checkpoint.packed.values())), 0
    overall, modules = dict[int, torch.Tensor](), []
    for name, shape in checkpoint.packed.items():
        found: dict[int, torch.Tensor] = {}
        before = done
        for rows in checkpoint.rows(name, max(1, _CHUNK // shape[-1])):
            progress(name, done, total)
            if (bad := first_refused(rows)) is not None:
                raise checkpoint.refusal(name, done - before + bad, float(rows.flatten()[bad]))
            for size in group_sizes:
                found[size] = found.get(size, 0) + counted(rows, size, reconstruction)
            done += rows.numel()
        overall = {size: overall.get(size, 0) + counts for size, counts in found.items()}
        by_size = {str(size): shares(counts) for size, counts in found.items()}
        modules.append({"module": name.removesuffix(".weight"), "by_group_size": by_size})
    return {
        "reconstruction": reconstruction,
        "weights": total,
        "modules": modules,
        "overall": {str(size): shares(counts) for size, counts in overall.items()},
    }


def counted(rows: torch.Tensor, group_size: int, reconstruction: Reconstruction) -> torch.Tensor:
    """Groups, those with an outlier, nonzero weights, squares; by precision those lost, squares of errors.

    Counts of further rows are added. Rows are whole, so that groups begin where they do in the tensor.
    """
    encoded = encode(rows, group_size, reconstruction)
    rows, groups = rows.float(), encoded.scale_bytes.shape[-1]
    size, is_zero = rows.abs(), rows == 0
    # [rows, groups, 2]. What fills up a short group is zero.
    grouped = pad(size, (0, groups * group_size - rows.shape[-1])).unflatten(-1, (groups, group_size))
    largest, second = grouped.topk(2, -1).values.unbind(-1)
    members = torch.full((groups,), group_size)
    members[-1] = rows.shape[-1] - (groups - 1) * group_size
    dominated = (largest >= OUTLIER_RATIO * second) & (largest > 0) & (members > 1)
    errors = [(encoded.decode(precision) - rows).abs_() for precision in PRECISIONS]
    found = [largest.numel(), dominated.sum(), (~is_zero).sum(), _squares(size)]
    found += [((error >= size) & ~is_zero).sum() for error in errors]
    found += [_squares(error) for error in errors]
    return torch.tensor([float(one) for one in found], dtype=torch.float64)


def _squares(values: torch.Tensor) -> torch.Tensor:
    return values.square().sum(dtype=torch.float64)


def shares(counts: torch.Tensor) -> dict[str, Any]:
    """The counts as shares; None where there is nothing to take a share of."""
    groups, outliers, weights, square, *rest = counts.tolist()
    names = list(map(str, PRECISIONS))
    lost = [count / weights if weights else None for count in rest[: len(names)]]
    errors = [(one / square) ** 0.5 if square else None for one in rest[len(names) :]]
    by_name = {"lost": dict(zip(names, lost, strict=True)), "error": dict(zip(names, errors, strict=True))}
    return {"outlier_groups": outliers / groups, **by_name}
