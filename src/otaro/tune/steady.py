"""What lets a run take a high learning rate without fitting its text too closely: an anchor, an average, rates by size.

Low precisions want a high rate: at E5M3 a weight must go far before it rounds to another value. Fine precisions pay for it
by fitting the text they are tuned on. Three remedies, each an option of its own (docs/log.md has the measurements):

  pull            after every step each weight goes back toward where it started by the share rate * pull of the way, as
                  weight decay goes toward zero. It keeps one more set of weights in memory. Of LoRA's two factors only B goes
                  back, which takes the merged weight back by that share; with both it would be twice as much.
  average         the run ends with the mean of the weights after each step of its last part, not with the last ones. Also one
                  more set of weights, from the first averaged step on; checkpoints keep it. Of adapters, the mean of each.
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


class Anchor:
    """Where the weights started, and the way back."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], pull: float) -> None:
        self.pull = pull
        self._start = {name: local(p).clone() for name, p in parameters.items() if not _first_factor(name)}

    @torch.no_grad()
    def apply(self, parameters: Mapping[str, nn.Parameter], rate: float) -> None:
        """Go back by rate * pull of the way."""
        now = [local(parameters[name]) for name in self._start]
        torch._foreach_lerp_(now, list(self._start.values()), rate * self.pull)


def _first_factor(name: str) -> bool:
    return "lora_A" in name or "lora_embedding_A" in name


class WeightAverage:
    """The mean of the weights after each of the last steps."""

    def __init__(self, share: float) -> None:
        """`share` of the steps, the last ones, are averaged."""
        self.share, self.count = share, 0
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
            self._means = {name: weight.clone() for name, weight in now.items()}
        else:
            torch._foreach_lerp_([self._means[name] for name in now], list(now.values()), 1 / self.count)

    @torch.no_grad()
    def install(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Put the mean in place of the weights."""
        for name, mean in self._means.items():
            local(parameters[name]).copy_(mean)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint must keep, with `count`."""
        return dict(self._means)

    def restore(self, count: int, tensors: Mapping[str, torch.Tensor], devices: Mapping[str, torch.device]) -> None:
        """Go on from a checkpoint."""
        self.count = count
        self._means = {name: tensor.to(devices[name]) for name, tensor in tensors.items()}


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
