"""Weights seen through quantization: the forward sees Q(w, b), gradients pass straight through (eqs. 1 to 3).

`Precisely` knows the precision, and makes what the modules of `fake_quant.py` multiply by. Where the
quantized weights are kept is a matter of memory, never of values:

  held       On entering `at` all tuned linears are quantized together and held until it is left: on a GPU by
             one kernel (`fused.py`), in the type that the forward computes in, which saves autocast its
             copies. A tuned weight takes 16 bytes with gradient and optimizer; the copy adds two or four.
             `Precisely.hold = False` saves them.
  made again A frozen weight takes two bytes, and a copy would double them. So it is quantized on the way
             through, layer by layer, and autograd is not given the quantized weight to keep: it keeps what
             the weight was made of, and the backward pass makes it once more where the gradient of the input
             needs it (`product`, `made_again`).

A tensor has one scale exponent, which comes from its largest group. So whoever quantizes a part of a tensor
(the embedding's rows, one expert of a stack) needs the exponent of the whole: a tensor of its own, so that no
GPU is waited for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from otaro.sefp.codec import Reconstruction
from otaro.sefp.precision import GROUP_SIZE, Precision
from otaro.tune import plain

NODE_WEIGHTS = 16  # that share a node of autograd's graph: none has its gradient before the last of them


class Precisely:
    """The precision that prepared modules run at, and how they quantize."""

    hold = True
    """Whether the quantized weights of tuned linears are held for a step, or made again for its backward."""

    def __init__(self, group_size: int = GROUP_SIZE, reconstruction: Reconstruction = "midpoint") -> None:
        self.group_size, self.reconstruction = group_size, reconstruction
        self.precision: Precision | None = None
        self.linears: list[nn.Linear] = []  # those that weights are held for, in their field `held`

    @contextmanager
    def at(self, precision: Precision | None, compute_dtype: torch.dtype | None = None) -> Iterator[None]:
        """Run at `precision` in the block; `compute_dtype` is autocast's where the forward runs under it."""
        before, self.precision = self.precision, precision
        held_before = [(linear, linear.held) for linear in self.linears]
        try:
            for linear, held in zip(self.linears, self._held(compute_dtype), strict=True):
                object.__setattr__(linear, "held", held)
            yield
        finally:
            self.precision = before
            for linear, old in held_before:
                object.__setattr__(linear, "held", old)

    def __call__(
        self,
        weight: torch.Tensor,
        dtype: torch.dtype | None = None,
        scale_exponent: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The weight as the forward should see it, quantized here and now; in its own type or another."""
        if self.precision is None:
            return weight.to(dtype or weight.dtype)
        values = self.values(weight, self.precision, dtype or weight.dtype, scale_exponent)
        return _straight_through([weight], [values])[0]

    def values(
        self,
        weight: torch.Tensor,
        precision: Precision | None,
        dtype: torch.dtype,
        scale_exponent: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What the weight is at a precision, in a type, without a way for gradients.

        A part of a tensor is given the whole's `scale_exponent`.
        """
        if precision is None:
            return weight.detach().to(dtype)
        settings = precision.mantissa_bits, self.group_size, self.reconstruction
        return quantize(weight, *settings, dtype, scale_exponent)

    def scale_exponent(self, whole: torch.Tensor) -> torch.Tensor | None:
        """What parts of a tensor are quantized with; None at full precision."""
        return None if self.precision is None else scale_exponent(whole, self.group_size, self.reconstruction)

    def values_of_all(
        self, weights: Sequence[torch.Tensor], precision: Precision, dtype: torch.dtype | None
    ) -> list[torch.Tensor]:
        """The same of many weights; on a GPU with one launch. None: each in its own type."""
        values: dict[int, torch.Tensor] = {}
        together: dict[tuple[bool, torch.device, torch.dtype], list[int]] = {}
        for i, weight in enumerate(weights):
            together.setdefault((_fused(weight, self.group_size), weight.device, weight.dtype), []).append(i)
        settings = precision.mantissa_bits, self.group_size, self.reconstruction
        for (fused, _, own), members in together.items():
            theirs = [weights[i].detach() for i in members]
            found = _quantizer(fused).quantize_all(theirs, *settings, dtype or own)
            values |= zip(members, found, strict=True)
        return [values[i] for i in range(len(weights))]

    def _held(self, compute_dtype: torch.dtype | None) -> list[torch.Tensor | None]:
        """The quantized weight of each linear; None where there is none, or where the forward must do it."""
        held: list[torch.Tensor | None] = [None] * len(self.linears)
        if self.precision is None or not self.hold:
            return held
        ready = [i for i, one in enumerate(self.linears) if one.weight.requires_grad and is_whole(one)]
        weights = [self.linears[i].weight for i in ready]
        values = self.values_of_all(weights, self.precision, compute_dtype)
        for start in range(0, len(ready), NODE_WEIGHTS):
            node = slice(start, start + NODE_WEIGHTS)
            passed = _straight_through(weights[node], values[node])
            for i, one in zip(ready[node], passed, strict=True):
                held[i] = one
        return held


def is_whole(linear: nn.Linear) -> bool:
    """Of one that is sharded there is nothing to quantize before it is gathered."""
    weight, shape = linear.weight, (linear.out_features, linear.in_features)
    return type(weight.data) is torch.Tensor and weight.shape == shape


def _straight_through(weights: Sequence[torch.Tensor], quantized: Sequence[Any]) -> list[torch.Tensor]:
    """The values of the second, the gradients to the first."""
    passed = list(quantized)
    if torch.is_grad_enabled() and (tuned := [i for i, weight in enumerate(weights) if weight.requires_grad]):
        pairs = [*(weights[i] for i in tuned), *(quantized[i] for i in tuned)]
        through: Any = _StraightThrough.apply(*pairs)  # type: ignore[no-untyped-call] # torch's own
        for i, one in zip(tuned, through, strict=True):
            passed[i] = one
    return passed


class _StraightThrough(torch.autograd.Function):
    """One node for several weights: calling back into Python for each would cost more than the work."""

    @staticmethod
    def forward(ctx: Any, *weights_then_quantized: torch.Tensor) -> Any:
        half = len(weights_then_quantized) // 2
        ctx.set_materialize_grads(False)  # a weight that the forward did not use has none
        ctx.dtypes = [weight.dtype for weight in weights_then_quantized[:half]]
        return tuple(values.view_as(values) for values in weights_then_quantized[half:])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        to_weights = [g if g is None else g.to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)]
        return *to_weights, *([None] * len(to_weights))


def _fused(weight: torch.Tensor, group_size: int) -> bool:
    """Whether the GPU's kernel takes this weight."""
    if not (weight.is_cuda and _triton_is_here()):
        return False
    from otaro.tune.fused import serves

    return serves(weight, group_size)


@cache
def _triton_is_here() -> bool:
    return find_spec("triton") is not None


def _quantizer(fused: bool) -> Any:
    """The GPU's kernels, or torch."""
    if not fused:
        return plain
    from otaro.tune import fused as kernels

    return kernels


def quantize(
    weight: torch.Tensor,
    mantissa_bits: int,
    group_size: int,
    reconstruction: Reconstruction,
    dtype: torch.dtype | None = None,
    scale_exponent: torch.Tensor | None = None,
) -> torch.Tensor:
    """Values of `encode(weight).decode(...)`, bit for bit, in the weight's own type or another.

    A part of a tensor is given the whole's `scale_exponent`.
    """
    settings = mantissa_bits, group_size, reconstruction, dtype or weight.dtype
    exponents = None if scale_exponent is None else scale_exponent.view(1)
    quantizer = _quantizer(_fused(weight, group_size))
    values = quantizer.quantize_all([weight.detach()], *settings, scale_exponents=exponents)
    return values[0]  # type: ignore[no-any-return]


def scale_exponent(whole: torch.Tensor, group_size: int, reconstruction: Reconstruction) -> torch.Tensor:
    """The scale exponent of `encode(whole)`, int32, on the device of the tensor."""
    quantizer = _quantizer(_fused(whole, group_size))
    found = quantizer.scale_exponents_of([whole.detach()], group_size, reconstruction)
    return found[0]  # type: ignore[no-any-return]


class _Recipe(NamedTuple):
    """How the weight of a product is made; the precision is the forward's, whenever the backward asks."""

    precisely: Precisely
    precision: Precision | None
    dtype: torch.dtype
    scales: tuple[float, ...]
    """One for each pair of LoRA's factors."""

    def weight(self, weight: torch.Tensor, factors: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.precisely.values(merged_weight(weight, factors, self.scales), self.precision, self.dtype)


class _Product(torch.autograd.Function):
    """x times a weight that is made for this product alone, and made again for the gradient of x.

    Gradients pass the quantization straight through. Those of LoRA's factors come from products of their rank
    with x and the gradient, and never from a gradient of the whole weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        recipe: _Recipe,
        weight: torch.Tensor,
        *factors: Any,
    ) -> Any:
        ctx.save_for_backward(x, weight, *factors)
        ctx.recipe, ctx.bias_dtype = recipe, None if bias is None else bias.dtype
        return nn.functional.linear(x, recipe.weight(weight, factors), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight, *factors = ctx.saved_tensors
        for_x, for_bias, _, for_weight, *for_factors = ctx.needs_input_grad
        rows, dtype = gradient.reshape(-1, gradient.shape[-1]), ctx.recipe.dtype
        inputs = x.reshape(-1, x.shape[-1])
        of_x = of_bias = of_weight = None
        if for_x:
            of_x = (rows @ ctx.recipe.weight(weight, factors)).view(x.shape).to(x.dtype)
        if for_bias:
            of_bias = rows.sum(0).to(ctx.bias_dtype)
        if for_weight:
            of_weight = (rows.T @ inputs.to(dtype)).to(weight.dtype)
        of_factors: list[torch.Tensor | None] = []
        if any(for_factors):
            rows, inputs = rows.float(), inputs.float()
            for a, b, scale in zip(factors[::2], factors[1::2], ctx.recipe.scales, strict=True):
                of_a = scale * (rows @ b.float()).T @ inputs
                of_b = scale * (rows.T @ (inputs @ a.float().T))
                of_factors += [of_a.to(a.dtype), of_b.to(b.dtype)]
        return of_x, of_bias, None, of_weight, *(of_factors or [None] * len(factors))


def product(
    precisely: Precisely,
    x: torch.Tensor,
    linear: nn.Linear,
    factors: Sequence[torch.Tensor] = (),
    scales: tuple[float, ...] = (),
) -> torch.Tensor:
    """As nn.Linear, with the weight quantized, merged and in the type of the computation, whichever apply."""
    dtype, weight = computed_in(x), linear.weight
    # a teacher; autocast would hold its copies to the end
    if precisely.precision is None and not torch.is_grad_enabled():
        return nn.functional.linear(x, weight.to(dtype), linear.bias)
    if precisely.precision is None and (weight.requires_grad or weight.dtype == dtype):
        return nn.functional.linear(x, weight, linear.bias)
    recipe = _Recipe(precisely, precisely.precision, dtype, scales)
    result: torch.Tensor = _Product.apply(x, linear.bias, recipe, weight, *factors)  # type: ignore[no-untyped-call]
    return result


def computed_in(x: torch.Tensor) -> torch.dtype:
    """The type that products of x are taken in: autocast's, or that of x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def merged_weight(
    weight: torch.Tensor, factors: Sequence[torch.Tensor], scales: Sequence[float]
) -> torch.Tensor:
    """W + s1 B1 A1 + ..., in float32; the weight itself where there are no factors."""
    if not factors:
        return weight
    merged = weight.detach().float()
    with torch.autocast(weight.device.type, enabled=False):
        for a, b, scale in zip(factors[::2], factors[1::2], scales, strict=True):
            # two matrices at any time
            merged = (b.detach().float() @ a.detach().float()).mul_(scale).add_(merged)
    return merged


def made_again(
    precisely: Precisely,
    stacks: dict[str, torch.Tensor],
    exponents: dict[str, torch.Tensor | None],
    quantized: dict[str, torch.Tensor],
) -> AbstractContextManager[None]:
    """Has autograd remember which expert's weight it would keep, and makes that again when it asks for it.

    Of the quantized stacks it knows addresses alone, as both functions live as long as the graph does.
    """
    precision = precisely.precision
    new = {name: values for name, values in quantized.items() if values.data_ptr() != stacks[name].data_ptr()}
    places = {values.untyped_storage().data_ptr(): (name, values.stride(0)) for name, values in new.items()}

    def keep(tensor: torch.Tensor) -> Any:
        place = places.get(tensor.untyped_storage().data_ptr())
        if place is None:
            return tensor
        expert, offset = divmod(int(tensor.storage_offset()), place[1])
        return place[0], expert, tensor.dtype, tensor.shape, tensor.stride(), offset

    def give(kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        name, expert, dtype, shape, stride, offset = kept
        values = precisely.values(stacks[name][expert], precision, dtype, exponents[name])
        return values.as_strided(shape, stride, offset)

    return torch.autograd.graph.saved_tensors_hooks(keep, give)
