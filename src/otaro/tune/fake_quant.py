"""Training through quantization: the modules of a model that read their weights quantized.

`prepare` makes every module that will be packed (`otaro.packable` names them) and peft's LoRA layers read the
weight quantized (`straight_through.py`), by swapping the module's class: parameters, their names and the
state dict stay as they are, so optimizers, checkpoints, DDP and FSDP never notice. All modules look at one
`Precisely` object; inside its `at` they run at a precision, outside and at None as they always did. `restore`
swaps the classes back.

Tuned linears multiply by what is held for them, frozen ones make their weight for each product, and the
embedding quantizes the rows that were looked up.

A LoRA layer quantizes the merged weight W + BA, not W alone. The sum is taken in float32, whatever the type
of W and whatever autocast says, by the one function (`merged_weight`) that also merges for good
(`merge_lora`): what was tuned is, bit for bit, what is saved and packed. In bfloat16 the sum would lose
updates below 2^-8 of a weight, which peft's own merging does.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import nn

from otaro.errors import OtaroError
from otaro.packable import EXPERT_STACKS, Kind, embedding_scale, packable, scaled, token_embeddings
from otaro.tune.straight_through import (
    Precisely,
    computed_in,
    made_again,
    merged_weight,
    product,
    quantize,
    scale_exponent,
)

__all__ = ["Precisely", "merge_lora", "narrow_frozen", "prepare", "quantize", "restore", "scale_exponent"]


class TuneLinear(nn.Linear):
    """A linear that multiplies by its quantized weight."""

    precisely: Precisely
    held: torch.Tensor | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As nn.Linear."""
        if self.held is None:
            return product(self.precisely, input, self)
        return nn.functional.linear(input, self.held, self.bias)

    def weight_now(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight that `forward` multiplies by, with the way for its gradient."""
        return self.precisely(self.weight, dtype) if self.held is None else self.held


class BaseLinear(nn.Linear):
    """Below an adapter added and not merged, as at full precision: the weight as is, in the input's type."""

    precisely: Precisely

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As nn.Linear."""
        return product(self.precisely, input, self)


class _TuneConv1D(nn.Module):
    """Mixed into GPT-2's Conv1D: multiplies by its weight as it is packed, with groups along the input.

    Models that have it are small, so autograd may keep the quantized weight.
    """

    precisely: Precisely

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer: Any = self
        if self.precisely.precision is None:
            return super().forward(x)  # type: ignore[no-any-return]
        quantized = self.precisely(layer.weight.T.contiguous(), computed_in(x)).T.contiguous()
        return torch.addmm(layer.bias, x.reshape(-1, layer.nx), quantized).view(*x.shape[:-1], layer.nf)


class TuneEmbedding(nn.Embedding):
    """An embedding that looks up quantized rows, and scales them where the model's own does."""

    precisely: Precisely
    scale: float
    activations: torch.dtype | None = None
    """What the model computes in, where that is not the type that the rows are kept in (`narrow_frozen`)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As nn.Embedding; rows are quantized after the look-up, which is the same and cheaper."""
        rows = nn.functional.embedding(input, self.weight, self.padding_idx)
        exponent = self.precisely.scale_exponent(self.weight)
        return scaled(self.precisely(rows, self.activations, exponent), self.scale)


class _TuneExperts(nn.Module):
    """Mixed into an experts class: while its forward runs, its stacks read as quantized."""

    precisely: Precisely

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        stacks: dict[str, Any] = {name: self._parameters[name] for name in EXPERT_STACKS}
        kept = self.precisely.hold and any(stack.requires_grad for stack in stacks.values())
        dtype = None if kept else computed_in(hidden_states)
        exponents = {name: self.precisely.scale_exponent(stack) for name, stack in stacks.items()}
        quantized = {name: self.precisely(stack, dtype, exponents[name]) for name, stack in stacks.items()}
        object.__setattr__(self, "_stacks", quantized)
        try:
            with nullcontext() if kept else made_again(self.precisely, stacks, exponents, quantized):
                return super().forward(hidden_states, *args, **kwargs)
        finally:
            object.__setattr__(self, "_stacks", {})

    def __getattr__(self, name: str) -> Any:
        if name in EXPERT_STACKS and (quantized := self.__dict__.get("_stacks", {}).get(name)) is not None:
            return quantized
        return super().__getattr__(name)


class _TuneLora(nn.Module):
    """Mixed into peft's LoRA linear: multiplies by the quantized merged weight."""

    precisely: Precisely

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        layer: Any = self
        if self.precisely.precision is None:
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        return product(self.precisely, x, layer.base_layer, *_factors(layer))


def _factors(layer: Any) -> tuple[list[torch.Tensor], tuple[float, ...]]:
    """A and B of each adapter in use, and their scales."""
    added = not (layer.disable_adapters or layer.merged)
    used = [a for a in layer.active_adapters if a in layer.lora_A] if added else []
    factors = [part[adapter].weight for adapter in used for part in (layer.lora_A, layer.lora_B)]
    return factors, tuple(float(layer.scaling[adapter]) for adapter in used)


@torch.no_grad()
def merge_lora(model: Any) -> Any:
    """The model without its adapters, all of it in float32 and in host memory, layer by layer.

    Merged where the adapters are, so that the sums have the bits that the forward quantized.
    """
    restore(model)
    for layer in model.modules():
        if hasattr(layer, "lora_A"):
            base = layer.base_layer.weight
            base.data = merged_weight(base, *_factors(layer)).float().cpu()
    return model.unload().cpu().float()


def narrow_frozen(model: Any, dtype: torch.dtype) -> None:
    """Keep frozen matrices in `dtype`, their own, all else in float32: neither values nor sums change.

    For a model with adapters, before it is prepared: only prepared modules multiply weights of one type with
    inputs of another. GPT-2's do not.
    """
    taken = [one for one in packable(model) if one.kind is not Kind.CONV1D]
    matrices = {id(getattr(one.module, one.parameter)) for one in taken}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            narrow = id(tensor) in matrices and not tensor.requires_grad
            tensor.data = tensor.data.to(dtype if narrow else torch.float32)
    for table in token_embeddings(model):
        object.__setattr__(table, "activations", torch.float32)


def prepare(model: nn.Module, precisely: Precisely) -> list[str]:
    """Swap the classes of all modules that will be packed; returns their names."""
    restore(model)  # in case some of it was prepared before
    prepared = []
    kinds = {one.path: one.kind for one in packable(model)}
    inside_lora: dict[str, bool] = {}  # whether it is the base layer
    for name, module in list(model.named_modules()):
        if hasattr(module, "lora_A") and isinstance(getattr(module, "base_layer", None), nn.Linear):
            _check_lora(name, module)
            below = [child for child, _ in module.named_modules() if child]
            inside_lora |= {f"{name}.{child}": child == "base_layer" for child in below}
            swapped: type = _mixed(_TuneLora, type(module))
        elif any(hasattr(module, adapter) for adapter in ("lora_A", "lora_embedding_A")):
            only = "only LoRA on linear layers can be quantized as merged"
            raise OtaroError(f"{name}: {only}; leave it out of target_modules")
        elif hasattr(module, "trainable_tokens_delta"):
            advice = "name the embedding in modules_to_save instead"
            raise OtaroError(f"{name}: single tuned tokens cannot be quantized; {advice}")
        elif name in inside_lora:
            if not inside_lora[name]:
                continue
            swapped = BaseLinear
        elif (kind := kinds.get(name)) in (Kind.LINEAR, Kind.HEAD):
            swapped = TuneLinear
        elif kind is Kind.CONV1D:
            swapped = _mixed(_TuneConv1D, type(module))
        elif kind is Kind.EMBEDDING:
            object.__setattr__(module, "scale", embedding_scale(cast(nn.Embedding, module)))
            swapped = TuneEmbedding
        elif kind is Kind.EXPERTS:
            object.__setattr__(module, "_untuned_experts", module.config._experts_implementation)
            module.config._experts_implementation = "eager"  # the one that reads its stacks expert by expert
            swapped = _mixed(_TuneExperts, type(module))
        else:
            continue
        object.__setattr__(module, "_untuned_class", type(module))
        module.__class__ = swapped
        object.__setattr__(module, "precisely", precisely)
        if swapped is TuneLinear:
            precisely.linears.append(module)
        if swapped is not BaseLinear:
            prepared.append(name)
    if not prepared:
        raise OtaroError(f"{type(model).__name__} has no linear layer to quantize")
    return prepared


_MIXED: dict[tuple[type, type], type] = {}


def _mixed(mixin: type, base: type) -> type:
    """The class that is both; the same one every time."""
    return _MIXED.setdefault((mixin, base), type(f"Tune{base.__name__}", (mixin, base), {}))


def _check_lora(name: str, layer: Any) -> None:
    """Only a plain adapter is the same as adding BA to the weight."""
    cannot = "cannot be combined with a quantized merged weight"
    if any(getattr(dropout, "p", 0.0) for dropout in layer.lora_dropout.values()):
        raise OtaroError(f"{name}: LoRA dropout {cannot}; set it to 0")
    if layer.lora_variant:
        kind = type(next(iter(layer.lora_variant.values()))).__name__.removesuffix("LinearVariant")
        raise OtaroError(f"{name}: LoRA of the kind {kind} {cannot}; use plain LoRA")
    if any(getattr(layer, "lora_bias", {}).values()):
        raise OtaroError(f"{name}: a bias of the adapter {cannot}; leave it out")


def restore(model: nn.Module) -> None:
    """Undo `prepare`."""
    for module in reversed(list(model.modules())):  # layers share a config: the first one saw it unchanged
        if (original := module.__dict__.pop("_untuned_class", None)) is not None:
            module.__class__ = original
            module.__dict__["precisely"].linears.clear()
            for added in ("precisely", "held", "scale", "_stacks"):
                module.__dict__.pop(added, None)
            if "_untuned_experts" in module.__dict__:
                config: Any = module.config
                config._experts_implementation = module.__dict__.pop("_untuned_experts")
