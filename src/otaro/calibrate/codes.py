"""One matrix: codes that make up for each other's error, at all precisions at once.

Plain packing rounds each weight to the nearest code. But what counts is the product with the inputs X, and
inputs are correlated: an error at one weight of a row can be made up for by the weights after it. With the
Gram matrix H = X^T X the error of a row is e H e^T, where e = w - value, and GPTQ (Frantar et al., 2022) goes
through the columns once: round a column, then move all columns that are still free to where they best make up
for the error made. With U the upper Cholesky factor of H^-1, its rows divided by their diagonal, that move is
-e_j U[j, j+1:], and what is left of the error in the end is exactly the sum of e_j^2 / d_j with d_j = U_jj^2
before the division.

Here a code has a value at every precision, and each precision its own error. So there are six such passes in
step, one per precision, each with its own moved weights t_m; only the code of a weight is common to all. It
is the one that minimises

    sum over m of LAMBDA_m (t_m - value_m(code))^2

among six candidates: for each precision m the nearest code at m, whose prefix fixes the coarser ones, and
which is refined towards the targets of the finer ones. A coarse precision pulls a weight out of its own cell
where that helps it most; the finer ones, which then miss that weight by more than a cell of theirs, make up
for it inside the cells of the others.

Rows are independent of each other, and columns go by falling H_jj: those that matter most have most others
behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat

import torch

from otaro.file.pack import one_core_each
from otaro.sefp.codec import MIDPOINT_SHIFT
from otaro.sefp.precision import COARSEST, FINEST

LEVELS = range(COARSEST, FINEST + 1)
LAMBDAS = (1.0, 2.0, 2.0, 4.0, 4.0, 16.0)
"""What the squared error counts at E5M3, E5M4, ... E5M8; chosen on held-out text (docs/log.md)."""
DAMPING = 0.1
"""Added to the diagonal of H, as a share of its mean: inputs that never occurred may occur."""

_BLOCK = 32  # columns between two products that move all later ones
_BYTES_ON_CPU, _BYTES_ELSEWHERE = 32 << 20, 4 << 30  # of moved weights at a time; rows are cut accordingly


class Errors:
    """A Gram matrix, damped and factored: an error's cost in each column, and how later ones make up."""

    def __init__(self, gram: torch.Tensor) -> None:
        damped = gram.double()
        mean = damped.diagonal().mean()
        # without any input all columns count alike
        damped.diagonal().add_(DAMPING * mean if mean > 0 else 1.0)
        self.order = damped.diagonal().argsort(descending=True, stable=True)
        lower = torch.linalg.cholesky(damped[self.order][:, self.order])
        upper = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
        self.moves = (upper / upper.diagonal().unsqueeze(1)).float()


def compensated(weight: torch.Tensor, scales: torch.Tensor, group_size: int, errors: Errors) -> torch.Tensor:
    """The E5M8 codes, int16, of a float32 matrix [rows, columns] on the grids of `scales` [rows, groups]."""
    (rows, columns), on_cpu = weight.shape, weight.device.type == "cpu"
    count = max(64, (_BYTES_ON_CPU if on_cpu else _BYTES_ELSEWHERE) // (4 * len(LEVELS) * columns))
    if on_cpu:
        count = min(count, -(-rows // torch.get_num_threads()))
    pieces = weight.split(count), scales.split(count), repeat(group_size), repeat(errors)
    if not on_cpu:
        return torch.cat(list(map(_compensated, *pieces)))
    with one_core_each() as pool:
        return torch.cat(list(pool.map(_compensated, *pieces)))


@torch.inference_mode()  # which a thread has to ask for itself
def _compensated(weight: torch.Tensor, scales: torch.Tensor, group_size: int, errors: Errors) -> torch.Tensor:
    """Columns come first in here, then precisions, then rows: what is done at a time lies together."""
    (rows, columns), levels, device = weight.shape, len(LEVELS), weight.device
    steps = (scales.T / 2**FINEST)[errors.order // group_size]
    targets = weight.T[errors.order].unsqueeze(1).repeat(1, levels, 1)
    codes = torch.empty(columns, rows, dtype=torch.int16, device=device)
    missed = torch.empty(_BLOCK, levels, rows, device=device)
    block = _Block(device)
    choose = block.captured(levels, rows) if device.type == "cuda" and columns >= 2 * _BLOCK else block
    for first in range(0, columns, _BLOCK):
        last = min(first + _BLOCK, columns)
        parts = targets[first:last], steps[first:last], errors.moves[first:last, first:last]
        (choose if last - first == _BLOCK else block)(*parts, codes[first:last], missed[: last - first])
        if last < columns:
            error = missed.view(_BLOCK, -1)
            targets[last:].view(columns - last, -1).addmm_(errors.moves[first:last, last:].T, error, alpha=-1)
    placed = torch.empty_like(codes)
    placed[errors.order] = codes
    return placed.T


class _Block:
    """Some columns, one after the other: each is moved by what those before it missed, and gets its codes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._choice = _Choice(device)

    def __call__(
        self,
        targets: torch.Tensor,
        steps: torch.Tensor,
        moves: torch.Tensor,
        codes: torch.Tensor,
        missed: torch.Tensor,
    ) -> None:
        """Writes `codes` [columns, rows] and, for what comes after, `missed` [columns, precisions, rows]."""
        inverses = torch.where(steps == 0, 0.0, 1 / steps)
        for at, target in enumerate(targets):
            if at:
                target = target - missed[:at].view(at, -1).T.mv(moves[:at, at]).view_as(target)
            chosen = self._choice(target * inverses[at])
            codes[at] = chosen
            torch.sub(target, self._choice.values(chosen).mul_(steps[at]), out=missed[at])

    def captured(self, levels: int, rows: int) -> Callable[..., None]:
        """The same for blocks as one CUDA graph: a column is some ninety launches, each after Python."""
        shapes = (
            (_BLOCK, levels, rows),
            (_BLOCK, rows),
            (_BLOCK, _BLOCK),
            (_BLOCK, rows),
            (_BLOCK, levels, rows),
        )
        types = torch.float32, torch.float32, torch.float32, torch.int16, torch.float32
        own = [
            torch.zeros(shape, dtype=dtype, device=self._device)
            for shape, dtype in zip(shapes, types, strict=True)
        ]
        stream = torch.cuda.Stream(self._device)  # libraries make their workspaces outside of captures
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self(*own)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self(*own)

        def replay(*parts: torch.Tensor) -> None:
            for mine, given in zip(own[:3], parts, strict=False):
                mine.copy_(given)
            graph.replay()
            for mine, given in zip(own[3:], parts[3:], strict=True):
                given.copy_(mine)

        return replay


class _Choice:
    """The code of a weight by its targets at all precisions, everything in units of step(8)."""

    def __init__(self, device: torch.device) -> None:
        column = torch.tensor([2.0 ** (m - FINEST) for m in LEVELS], device=device).unsqueeze(1)
        self._shifts = column
        self._least = -(2.0**FINEST) * column
        self._most = -self._least - 1

    def __call__(self, targets: torch.Tensor) -> torch.Tensor:
        """Codes [rows], float32, for targets [precisions, rows]."""
        nearest = ((targets + MIDPOINT_SHIFT) * self._shifts).floor_()
        nearest = torch.minimum(torch.maximum(nearest, self._least), self._most)
        cost = refined = None
        for level, m in enumerate(LEVELS):
            prefixes = (nearest[level:] * (self._shifts[level] / self._shifts[level:])).floor_()
            if refined is not None:
                child = refined[:level] * 2
                prefixes = torch.cat(
                    [torch.minimum(torch.maximum(nearest[level], child), child + 1), prefixes]
                )
            width = 2.0 ** (FINEST - m)
            error = (
                (prefixes * width)
                .add_(width / 2 - MIDPOINT_SHIFT)
                .sub_(targets[level])
                .square_()
                .mul_(LAMBDAS[level])
            )
            cost = error if cost is None else cost.add_(error)
            refined = prefixes
        assert cost is not None
        assert refined is not None
        return refined.gather(0, cost.argmin(0, keepdim=True))[0]

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        """What codes [rows] stand for at each precision, [precisions, rows]."""
        return (codes * self._shifts).floor_().add_(0.5).div_(self._shifts).sub_(MIDPOINT_SHIFT)
