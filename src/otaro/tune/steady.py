"""What lets a run take a high learning rate without fitting its text too closely: an anchor, an average, rates by size.

Low precisions want a high rate: at E5M3 a weight must go far before it rounds to another value. Fine precisions pay for it
by fitting the text they are tuned on. Three remedies, each an option of its own (docs/log.md has the measurements):

  pull            after every step each weight goes back toward where it started by the share rate * pull of the way, as
                  weight decay goes toward zero. It keeps one more set of weights in memory. Of LoRA's two factors only B goes
                  back, which takes the merged weight back by that share; with both it would be twice as much.
  average         the run ends with the mean of the weights after each step of its last part, not with the last ones. Also one
                  more set of weights, from the first averaged step on; checkpoints keep it. Of adapters, the mean of each.
                  Both sets are touched once a step, and move to host memory where the device has no room (`memory.py`).
  rates by size   a matrix is tuned at the rate times its root mean square over that of the model (a geometric mean over all
                  matrices, weight by weight), so that all move alike in proportion. Rounded to eighths of a power of two, so
                  that a few groups of parameters serve; norms, biases and adapters keep the rate.
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
    """Whether `pull` takes a weight back: not the first of LoRA's factors."""
    return "lora_A" not in name and "lora_embedding_A" not in name


class Anchor:
    """Where the weights started, and the way back."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], pull: float, on_host: bool = False) -> None:
        """`on_host`: the copy is kept in host memory, and comes to the device weight by weight; the sums are the same."""
        self.pull = pull
        self._start = {name: _kept(local(p), on_host) for name, p in parameters.items() if goes_back(name)}

    @torch.no_grad()
    def apply(self, parameters: Mapping[str, nn.Parameter], rate: float) -> None:
        """Go back by rate * pull of the way."""
        _go_toward([local(parameters[name]) for name in self._start], list(self._start.values()), rate * self.pull)


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
        # In float32, whatever the weights: what a late step adds to the mean is less than bfloat16 can tell.
        now = {name: local(parameter).float() for name, parameter in parameters.items()}
        if self.count == 1:
            self._means = {name: _kept(weight, self.on_host) for name, weight in now.items()}
        else:
            _go_toward([self._means[name] for name in now], list(now.values()), 1 / self.count)

    @torch.no_grad()
    def install(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Put the mean in place of the weights."""
        for name, mean in self._means.items():
            local(parameters[name]).copy_(mean)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint must keep, with `count`."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # means may still be on their way to the host
        return dict(self._means)

    def restore(self, count: int, tensors: Mapping[str, torch.Tensor], devices: Mapping[str, torch.device]) -> None:
        """Go on from a checkpoint."""
        self.count = count
        self._means = {name: _kept(tensor.to(devices[name]), self.on_host) for name, tensor in tensors.items()}


def _kept(weight: torch.Tensor, on_host: bool) -> torch.Tensor:
    """A copy on the same device, or in memory of the host that a GPU can read by itself."""
    if not on_host or not weight.is_cuda:
        return weight.clone()
    return torch.empty(weight.shape, dtype=weight.dtype, pin_memory=True).copy_(weight)


def _go_toward(moved: list[torch.Tensor], targets: list[torch.Tensor], share: float) -> None:
    """Move by a share of the way, in place.

    Where one of the two is in host memory, it is done on the other's device one by one, by the same kernel: copies are
    queued behind the work on that device, and nothing waits for them.
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


def rates_by_size(parameters: Mapping[str, nn.Parameter]) -> dict[str, float]:
    """What the learning rate of each matrix is multiplied with; others are not named."""
    matrices = {name: p for name, p in parameters.items() if p.ndim > 1 and "lora_" not in name}
    if not matrices:
        return {}
    norms = [torch.linalg.vector_norm(p.detach().float()) for p in matrices.values()]
    sizes = torch.tensor([p.numel() for p in matrices.values()], dtype=torch.float64)
    whole = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    logs = torch.stack([norm.cpu() for norm in whole]).double().log2() - sizes.log2() / 2
    known = logs.isfinite()  # a matrix of zeros has no size to go by
    centre = (logs * sizes)[known].sum() / sizes[known].sum()
    eighths = (8 * (logs - centre)).round().where(known, torch.zeros(()))
    return dict(zip(matrices, (2 ** (eighths / 8)).tolist(), strict=True))


def split_groups(optimizer: torch.optim.Optimizer, factors: Mapping[int, float]) -> None:
    """Give each parameter its rate: `factors` by the parameter's id, those not named keep theirs."""
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        by_factor: dict[float, list[Any]] = {}
        for parameter in group["params"]:
            by_factor.setdefault(factors.get(id(parameter), 1.0), []).append(parameter)
        groups += [
            {**group, "params": members, "lr": group["lr"] * factor, "rate_factor": factor}
            for factor, members in sorted(by_factor.items())
        ]
    optimizer.param_groups[:] = groups
