"""One option for every item, of least loss within a capacity: the multiple-choice knapsack.

Items are a model's tensors, options the planes that each may have. All planes of a tensor have one size, and
sizes of a model's tensors have a large common divisor; so dynamic programming over multiples of it is exact
and takes milliseconds: after each item, the least loss for every capacity, and which option gives it. Where
the divisor is too small for that, sizes are rounded up to a unit, so that what is found still fits; some of
`_MOST_UNITS` of the capacity may then stay unused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch

_MOST_UNITS = 1 << 17  # of a capacity: the table has a byte for each item and unit


@dataclass(frozen=True)
class Solution:
    """The option of every item, and what they lose and take together."""

    options: list[int]
    loss: float
    cost: int


class Knapsack:
    """Items whose option `n` costs `n` times their size and loses `losses[n]`; solved for all capacities."""

    def __init__(self, sizes: Sequence[int], losses: Sequence[Sequence[float]]) -> None:
        self._sizes = list(sizes)
        most = sum(size * (len(loss) - 1) for size, loss in zip(sizes, losses, strict=True))
        divisor = gcd(*sizes) or 1
        self._unit = max(divisor, -(-most // _MOST_UNITS))
        self.exact = self._unit == divisor
        units = [-(-size // self._unit) for size in sizes]
        length = 1 + sum(size * (len(loss) - 1) for size, loss in zip(units, losses, strict=True))
        best = torch.zeros(length, dtype=torch.float64)
        self._chosen = torch.zeros(len(units), length, dtype=torch.uint8)
        for number, (size, loss) in enumerate(zip(units, losses, strict=True)):
            before, best = best, torch.full_like(best, torch.inf)
            for option, value in enumerate(loss):
                left = length - option * size
                found = torch.full_like(best, torch.inf)
                found[length - left :] = before[:left] + value
                better = found < best
                best = torch.where(better, found, best)
                self._chosen[number][better] = option
        self._best, self._units = best, units

    def solve(self, capacity: int) -> Solution:
        """The choice of least loss whose cost is at most `capacity`, which is not negative."""
        at = min(capacity // self._unit, len(self._best) - 1)
        loss, options = float(self._best[at]), [0] * len(self._units)
        for number in reversed(range(len(options))):
            options[number] = int(self._chosen[number, at])
            at -= options[number] * self._units[number]
        cost = sum(option * size for option, size in zip(options, self._sizes, strict=True))
        return Solution(options, loss, cost)
