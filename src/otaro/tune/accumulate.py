"""Low-Precision Asynchronous Accumulation (LAA), lines 6 to 16 of the paper's Algorithm 1.

Gradients taken at ultra-low precisions are noisy. They are not applied at once but put into an accumulator,
which survives while batches at other precisions step in between; when it has taken N of them, their sum (eq.
16), or on request their mean, is applied as one update. Noise that is independent from batch to batch shrinks
against the signal as 1/sqrt(N) (eq. 17).

The accumulator may live in host memory: it is touched only at ultra-low batches, and costs the device nothing
in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from otaro.tune.config import Place, Reduction


class GradientAccumulator:
    """Collects gradients by parameter name, `delay` batches of them."""

    def __init__(self, delay: int, reduction: Reduction = "sum", place: Place = "device") -> None:
        self.delay, self.reduction, self.place = delay, reduction, place
        self.count = 0
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, gradients: Mapping[str, torch.Tensor]) -> bool:
        """Take in one batch's gradients, which the caller gives away; True when enough have come together."""
        if self.place == "host":
            for name, gradient in gradients.items():
                self._sums[name] = _add_on_host(self._sums.get(name), gradient.detach())
        else:
            if known := [name for name in gradients if name in self._sums]:
                torch._foreach_add_(
                    [self._sums[name] for name in known], [gradients[name].detach() for name in known]
                )
            self._sums.update(
                {name: gradients[name].detach() for name in gradients if name not in self._sums}
            )
        self.count += 1
        return self.count >= self.delay

    def take(self, devices: Mapping[str, torch.device]) -> dict[str, torch.Tensor]:
        """Hand out the collected gradients, each on the device of its parameter, and start anew."""
        collected, count = self._sums, self.count
        self._sums, self.count = {}, 0
        handed = {name: gradient.to(devices[name]) for name, gradient in collected.items()}
        if self.reduction == "mean" and handed:
            torch._foreach_div_(list(handed.values()), count)
        return handed

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint must keep, with `count`."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # sums may still be on their way to the host
        return dict(self._sums)

    def restore(
        self, count: int, tensors: Mapping[str, torch.Tensor], devices: Mapping[str, torch.device]
    ) -> None:
        """Go on from a checkpoint."""
        self.count = count
        self._sums = {n: t.to("cpu" if self.place == "host" else devices[n]) for n, t in tensors.items()}


def withhold(parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Take the gradients away from their parameters; of one that FSDP shards, this process's part."""
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        gradient: Any = parameter.grad
        gradients[name] = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        parameter.grad = None
    return gradients


def release(parameters: Mapping[str, nn.Parameter], accumulator: GradientAccumulator) -> None:
    """Put what was collected where the optimizer will find it."""
    collected = accumulator.take({name: parameter.device for name, parameter in parameters.items()})
    for name, gradient in collected.items():
        parameter: Any = parameters[name]
        if hasattr(parameter, "to_local"):
            from torch.distributed.tensor import DTensor

            gradient = DTensor.from_local(
                gradient,
                parameter.device_mesh,
                parameter.placements,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        parameter.grad = gradient


def _add_on_host(total: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor:
    """The sum, in host memory; a GPU adds, since it reads the old sum faster than the host could add to it.

    The copies are queued and not waited for: whatever reads the sum on the same GPU comes after them.
    """
    if not gradient.is_cuda:
        return gradient.to("cpu") if total is None else total.add_(gradient.to("cpu"))
    if total is not None:
        gradient.add_(total.to(gradient.device, non_blocking=True))
    else:
        total = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=True)
    return total.copy_(gradient, non_blocking=True)
