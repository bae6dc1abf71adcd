"""What keeps a run from fitting its text too closely: L2-SP and weight averaging, each an option of its own.

  L2-SP     after every step each weight goes back toward its starting point (SP) by the share rate * l2_sp of
            the way, as weight decay goes toward zero. It keeps one more set of weights in memory. Of LoRA's
            two factors only B goes back, which takes the merged weight back by that share; with both it would
            be twice as much.
  average   the mean of the weights after each step of a run's last part may take the place of the last ones.
            Where there is much to learn it lags behind, so held-out data decide. Also one more set of
            weights, from the first averaged step on; checkpoints keep it. Of adapters, the mean of each.

Both sets are touched once a step, and move to host memory where the device has no room (`memory.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def local(tensor: Any) -> torch.Tensor:
    """Of one that FSDP shards, this process's part."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach()


def goes_back(name: str) -> bool:
    """Whether L2-SP takes a weight back: not the first of LoRA's factors."""
    return "lora_A" not in name and "lora_embedding_A" not in name


class Anchor:
    """Where the weights started, and the way back."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], strength: float, on_host: bool = False
    ) -> None:
        """`on_host`: the copy is in host memory, and comes to the device by weights; sums are the same."""
        self.strength = strength
        self._start = {name: _kept(local(p), on_host) for name, p in parameters.items() if goes_back(name)}

    @torch.no_grad()
    def apply(self, parameters: Mapping[str, nn.Parameter], rate: float) -> None:
        """Go back by rate * strength of the way."""
        _go_toward(
            [local(parameters[name]) for name in self._start],
            list(self._start.values()),
            rate * self.strength,
        )


class WeightAverage:
    """The mean of the weights after each of the last steps."""

    def __init__(self, share: float, on_host: bool = False) -> None:
        """`share` of the steps, the last ones, are averaged; `on_host` as for an anchor."""
        self.share, self.count, self.on_host = share, 0, on_host
        self._means: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def add(self, parameters: Mapping[str, nn.Parameter], step: int, steps: int) -> None:
        """Take in the weights after `step` of `steps`, if it is one of the last."""
        if step <= steps * (1 - self.share):
            return
        self.count += 1
        # At least in float32: what a late step adds to the mean is less than bfloat16 can tell.
        now = {name: _wide(local(parameter)) for name, parameter in parameters.items()}
        if self.count == 1:
            self._means = {name: _kept(weight, self.on_host) for name, weight in now.items()}
        else:
            _go_toward([self._means[name] for name in now], list(now.values()), 1 / self.count)

    @torch.no_grad()
    def swap(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Put the mean in place of the weights, and them in its own; twice, they are back to the bit."""
        for name, mean in self._means.items():
            weight = local(parameters[name])
            kept = weight.clone()
            weight.copy_(mean)
            mean.copy_(kept)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint must keep, with `count`."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # means may still be on their way to the host
        return dict(self._means)

    def restore(
        self, count: int, tensors: Mapping[str, torch.Tensor], devices: Mapping[str, torch.device]
    ) -> None:
        """Go on from a checkpoint."""
        self.count = count
        self._means = {
            name: _kept(tensor.to(devices[name]), self.on_host) for name, tensor in tensors.items()
        }


def _wide(weight: torch.Tensor) -> torch.Tensor:
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


def _kept(weight: torch.Tensor, on_host: bool) -> torch.Tensor:
    """A copy on the same device, or in memory of the host that a GPU can read by itself."""
    if not on_host or not weight.is_cuda:
        return weight.clone()
    return torch.empty(weight.shape, dtype=weight.dtype, pin_memory=True).copy_(weight)


def _go_toward(moved: list[torch.Tensor], targets: list[torch.Tensor], share: float) -> None:
    """Move by a share of the way, in place.

    Where one of the two is in host memory, it is done on the other's device one by one, by the same kernel:
    copies are queued behind the work on that device, and nothing waits for them.
    """
    if all(one.device == other.device for one, other in zip(moved, targets, strict=True)):
        torch._foreach_lerp_(moved, targets, share)
        return
    for one, other in zip(moved, targets, strict=True):
        device = other.device if one.device.type == "cpu" else one.device
        there = one.to(device, non_blocking=True)
        torch._foreach_lerp_([there], [other.to(device, non_blocking=True)], share)
        if there is not one:
            one.copy_(there, non_blocking=True)
