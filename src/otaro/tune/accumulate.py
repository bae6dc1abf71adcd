"""Low-Precision Asynchronous Accumulation (LAA), lines 6 to 16 of the paper's Algorithm 1.

Gradients taken at ultra-low precisions are noisy. They are not applied at once but put into an accumulator, which survives
while batches at other precisions step in between; when it has taken N of them, their sum (eq. 16), or on request their
mean, is applied as one update. Noise that is independent from batch to batch shrinks against the signal as 1/sqrt(N) (eq.
17).

The accumulator may live in host memory: it is touched only at ultra-low batches, and costs the device nothing in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

Reduction = Literal["sum", "mean"]
Place = Literal["device", "host"]


class GradientAccumulator:
    """Collects gradients by parameter name, `delay` batches of them."""

    def __init__(self, delay: int, reduction: Reduction = "sum", place: Place = "device") -> None:
        self.delay, self.reduction, self.place = delay, reduction, place
        self.count = 0
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, gradients: Mapping[str, torch.Tensor]) -> bool:
        """Take in one batch's gradients, which the caller gives away; True when enough have come together."""
        for name, gradient in gradients.items():
            arriving = gradient.detach().to("cpu") if self.place == "host" else gradient.detach()
            if name in self._sums:
                self._sums[name].add_(arriving)
            else:
                self._sums[name] = arriving
        self.count += 1
        return self.count >= self.delay

    def take(self, devices: Mapping[str, torch.device]) -> dict[str, torch.Tensor]:
        """Hand out the collected gradients, each on the device of its parameter, and start anew."""
        collected, count = self._sums, self.count
        self._sums, self.count = {}, 0
        if self.reduction == "mean":
            for gradient in collected.values():
                gradient.div_(count)
        return {name: gradient.to(devices[name]) for name, gradient in collected.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint must keep, with `count`."""
        return dict(self._sums)

    def restore(self, count: int, tensors: Mapping[str, torch.Tensor], devices: Mapping[str, torch.device]) -> None:
        """Go on from a checkpoint."""
        self.count = count
        self._sums = {n: t.to("cpu" if self.place == "host" else devices[n]) for n, t in tensors.items()}
