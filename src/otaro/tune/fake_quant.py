"""Training through quantisation: the forward sees Q(w, b), the gradient passes as if it had seen w (eqs. 1 to 3).

`prepare` makes every module that will be packed (the linears, the token embedding and the head, fused experts, peft's LoRA
layers) read its weight quantised, by swapping the module's class: parameters, their names and the state dict stay as they
are, so optimizers, checkpoints, DDP and FSDP never notice. All modules look at one `Precisely` object; inside its `at` they
run at a precision, outside and at None as they always did. `restore` swaps the classes back.

On entering `at` all linears are quantised together and held until it is left: on a GPU by one kernel (`fused.py`), in the
type that the forward computes in, which saves autocast its copies. What cannot be known beforehand is quantised on the
way: the looked-up rows of the embedding, the merged weights of LoRA, expert stacks, and weights that FSDP gathers layer by
layer.

A LoRA layer quantises the merged weight W + BA, not W alone: merging the adapter afterwards then changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from otaro.errors import OtaroError
from otaro.sefp.codec import MIN_EXPONENT, Reconstruction, midpoint_offset, power_of_two
from otaro.sefp.precision import COARSEST, GROUP_SIZE, Precision

EXPERT_STACKS = ("gate_up_proj", "down_proj")
NODE_WEIGHTS = 16  # that share a node of autograd's graph; few, as none gets its gradient before the last of them has one


class Precisely:
    """The precision that prepared modules run at, and how they quantise."""

    def __init__(self, group_size: int = GROUP_SIZE, reconstruction: Reconstruction = "midpoint") -> None:
        self.group_size, self.reconstruction = group_size, reconstruction
        self.precision: Precision | None = None
        self.linears: list[TuneLinear] = []

    @contextmanager
    def at(self, precision: Precision | None, compute_dtype: torch.dtype | None = None) -> Iterator[None]:
        """Run at `precision` inside the block; `compute_dtype` is autocast's type where the forward runs under it."""
        before, self.precision = self.precision, precision
        held_before = [(linear, linear.held) for linear in self.linears]
        try:
            for linear, held in zip(self.linears, self._quantized(compute_dtype), strict=True):
                object.__setattr__(linear, "held", held)
            yield
        finally:
            self.precision = before
            for linear, held in held_before:
                object.__setattr__(linear, "held", held)

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight as the forward should see it, quantised here and now."""
        if self.precision is None:
            return weight
        values = quantize(weight, self.precision.mantissa_bits, self.group_size, self.reconstruction)
        return _straight_through([weight], [values])[0]

    def _quantized(self, compute_dtype: torch.dtype | None) -> list[torch.Tensor | None]:
        """The quantised weight of each linear; None where there is none, or where it must be left to the forward."""
        if self.precision is None:
            return [None] * len(self.linears)
        settings = self.precision.mantissa_bits, self.group_size, self.reconstruction
        quantized: list[torch.Tensor | None] = [None] * len(self.linears)
        together: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, linear in enumerate(self.linears):
            weight = linear.weight
            whole = type(weight.data) is torch.Tensor and weight.shape == (linear.out_features, linear.in_features)
            if not whole:
                continue  # sharded: there is nothing to quantise before it is gathered
            if _fused(weight, self.group_size):
                together.setdefault((weight.device, weight.dtype), []).append(i)
            else:
                quantized[i] = quantize(weight, *settings).to(compute_dtype or weight.dtype)
        for (_, dtype), members in together.items():
            from otaro.tune.fused import quantize_all

            done = quantize_all([self.linears[i].weight.detach() for i in members], *settings, compute_dtype or dtype)
            for i, values in zip(members, done, strict=True):
                quantized[i] = values
        ready = [i for i, values in enumerate(quantized) if values is not None]
        for start in range(0, len(ready), NODE_WEIGHTS):
            members = ready[start : start + NODE_WEIGHTS]
            passed = _straight_through([self.linears[i].weight for i in members], [quantized[i] for i in members])
            for i, values in zip(members, passed, strict=True):
                quantized[i] = values
        return quantized


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
    """One node for several weights: calling back into Python for each of hundreds would cost more than the work."""

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


def quantize(weight: torch.Tensor, mantissa_bits: int, group_size: int, reconstruction: Reconstruction) -> torch.Tensor:
    """Values of `encode(weight).decode(...)` in the weight's own type, without going through integers.

    Truncations compose, and so do floors: a code at m >= 4 bits is floor(w / step(m)) + 2^(m-4), the shift of 16 steps being a
    whole number of steps there. At m = 3 it is half a step, and the floor is taken at 4 bits before it is halved. One
    difference remains: a negative weight so small that scaling it underflows counts as zero here.
    """
    if _fused(weight, group_size):
        from otaro.tune.fused import quantize_all

        return quantize_all([weight.detach()], mantissa_bits, group_size, reconstruction, weight.dtype)[0]
    length = weight.shape[-1]
    groups = -(-length // group_size)
    values = weight.detach().float()
    if length != groups * group_size:
        values = nn.functional.pad(values, (0, groups * group_size - length))
    values = values.view(*values.shape[:-1], groups, group_size)
    fields = values.abs().amax(-1, keepdim=True).view(torch.int32) >> 23
    exponents = (fields - 126).clamp_(min=MIN_EXPONENT)
    grid_bits = mantissa_bits if reconstruction == "truncate" else max(mantissa_bits, COARSEST + 1)
    scaled = values * power_of_two(grid_bits - exponents)
    if reconstruction == "truncate":
        codes = scaled.trunc_()
    else:
        codes = scaled.floor_().add_(2.0 ** (grid_bits - COARSEST - 1))
        if grid_bits != mantissa_bits:
            codes = codes.mul_(0.5).floor_()
        codes = codes.clamp_(max=2.0**mantissa_bits - 1).add_(midpoint_offset(mantissa_bits))
    values = codes.mul_(power_of_two(exponents - mantissa_bits)).flatten(-2)[..., :length]
    return values.to(weight.dtype)


class TuneLinear(nn.Linear):
    """A linear that multiplies by its quantised weight."""

    precisely: Precisely
    held: torch.Tensor | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As nn.Linear."""
        weight = self.precisely(self.weight) if self.held is None else self.held
        return nn.functional.linear(input, weight, self.bias)


class TuneEmbedding(nn.Embedding):
    """An embedding that looks up quantised rows."""

    precisely: Precisely

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As nn.Embedding; rows are quantised after the look-up, which is the same and cheaper."""
        return self.precisely(nn.functional.embedding(input, self.weight, self.padding_idx))


class _TuneExperts(nn.Module):
    """Mixed into an experts class: while its forward runs, its stacks read as quantised."""

    precisely: Precisely

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        object.__setattr__(self, "_stacks", {name: self.precisely(getattr(self, name)) for name in EXPERT_STACKS})
        try:
            return super().forward(*args, **kwargs)
        finally:
            object.__setattr__(self, "_stacks", {})

    def __getattr__(self, name: str) -> Any:
        if name in EXPERT_STACKS and (quantized := self.__dict__.get("_stacks", {}).get(name)) is not None:
            return quantized
        return super().__getattr__(name)


class _TuneLora(nn.Module):
    """Mixed into peft's LoRA linear: multiplies by the quantised merged weight."""

    precisely: Precisely

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        layer: Any = self
        if self.precisely.precision is None:
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        merged = layer.base_layer.weight
        for adapter in () if layer.disable_adapters or layer.merged else layer.active_adapters:
            merged = merged + layer.get_delta_weight(adapter).to(merged.dtype)
        return nn.functional.linear(x, self.precisely(merged), layer.base_layer.bias)


def prepare(model: nn.Module, precisely: Precisely) -> list[str]:
    """Swap the classes of all modules that will be packed; returns their names."""
    restore(model)  # in case some of it was prepared before
    prepared = []
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    inside_lora = set()
    for name, module in list(model.named_modules()):
        if hasattr(module, "lora_A") and isinstance(getattr(module, "base_layer", None), nn.Linear):
            _check_lora(name, module)
            inside_lora |= {f"{name}.{child}" for child, _ in module.named_modules() if child}
            swapped: type = _mixed(_TuneLora, type(module))
        elif any(hasattr(module, adapter) for adapter in ("lora_A", "lora_embedding_A")):
            raise OtaroError(f"{name}: only LoRA on linear layers can be quantised as merged; leave it out of target_modules")
        elif name in inside_lora:
            continue
        elif type(module) is nn.Linear:
            swapped = TuneLinear
        elif module is embedding and type(module) is nn.Embedding:
            swapped = TuneEmbedding
        elif all(isinstance(module._parameters.get(stack), nn.Parameter) for stack in EXPERT_STACKS):
            object.__setattr__(module, "_untuned_experts", module.config._experts_implementation)
            module.config._experts_implementation = "eager"  # the one that reads its stacks expert by expert
            swapped = _mixed(_TuneExperts, type(module))
        else:
            continue
        object.__setattr__(module, "_untuned_class", type(module))
        module.__class__ = swapped
        object.__setattr__(module, "precisely", precisely)
        if isinstance(module, TuneLinear):
            precisely.linears.append(module)
        prepared.append(name)
    if not prepared:
        raise OtaroError(f"{type(model).__name__} has no linear layer to quantise")
    return prepared


_MIXED: dict[tuple[type, type], type] = {}


def _mixed(mixin: type, base: type) -> type:
    """The class that is both; the same one every time."""
    return _MIXED.setdefault((mixin, base), type(f"Tune{base.__name__}", (mixin, base), {}))


def _check_lora(name: str, layer: Any) -> None:
    """Only a plain adapter is the same as adding BA to the weight."""
    if any(getattr(dropout, "p", 0.0) for dropout in layer.lora_dropout.values()):
        raise OtaroError(f"{name}: LoRA dropout cannot be combined with a quantised merged weight; set it to 0")
    if any(getattr(layer, "use_dora", {}).values()):
        raise OtaroError(f"{name}: DoRA cannot be combined with a quantised merged weight; use plain LoRA")
    if any(getattr(layer, "lora_bias", {}).values()):
        raise OtaroError(f"{name}: a bias of the adapter cannot be combined with a quantised merged weight; leave it out")


def restore(model: nn.Module) -> None:
    """Undo `prepare`."""
    for module in reversed(list(model.modules())):  # layers share a config: the first one saw it unchanged
        if (original := module.__dict__.pop("_untuned_class", None)) is not None:
            module.__class__ = original
            module.__dict__["precisely"].linears.clear()
            for added in ("precisely", "held", "_stacks"):
                module.__dict__.pop(added, None)
            if "_untuned_experts" in module.__dict__:
                config: Any = module.config
                config._experts_implementation = module.__dict__.pop("_untuned_experts")
