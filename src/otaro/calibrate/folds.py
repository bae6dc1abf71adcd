"""Input-channel scales, moved into what makes the inputs.

A matrix whose column j is multiplied by t_j, read with inputs divided by t_j, gives the same products.
Columns with large inputs become large weights, on which the shared step of a group weighs less (AWQ, Lin et
al., 2023). It costs nothing where the division can be done beforehand: in the weights of the norm before
(query, key, value; gate, up), in the rows of the values (output projection) and in those of `up` (`down`).
Nothing is rounded by it: the new weights of a norm are rounded to its type first, and t is the ratio of old
and new; matrices are float32 until they are encoded.

t_j = (inputs_j^a / weights_j^b), with the root mean square of the inputs and the largest weight of the
column, for the pair of `EXPONENTS` with the least error at E5M3 when rounded plainly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from otaro.runtime.architectures import ARCHITECTURES
from otaro.sefp.codec import encode
from otaro.sefp.precision import COARSEST, of_mantissa_bits

EXPONENTS = ((0.0, 0.0), (0.25, 0.0), (0.35, 0.35), (0.5, 0.5))
_ROWS = 512  # looked at of each matrix
_LARGEST = 64.0  # factor, and its inverse


@dataclass(frozen=True)
class Fold:
    """Matrices that read the same inputs, and what makes these."""

    readers: tuple[str, ...]
    norm: str | None = None
    offset: float = 0.0
    """What is added to the weights of the norm."""
    rows_of: str | None = None
    """A matrix with a row for each input, from `first` on."""
    first: int = 0
    repeats: int = 1
    """Heads that share the inputs of one key-value head,"""
    width: int = 0
    """of so many channels."""


def folds(config: Any, names: Mapping[str, Any]) -> list[Fold]:
    """Those of one layer, with names inside of it; `names` are its parameters. None if it is unknown."""
    entry = ARCHITECTURES.get(config.model_type)
    if entry is None:
        return []
    found = []
    attention, mlp = (("self_attn.qkv_proj",), ("mlp.gate_up_proj",)) if entry.fused else (
        tuple(f"self_attn.{name}_proj" for name in "qkv"),
        ("mlp.gate_proj", "mlp.up_proj"),
    )  # fmt: skip
    for (norm, _), readers in ((entry.attention_norms, attention), (entry.mlp_norms, mlp)):
        if norm is not None and all(f"{name}.weight" in names for name in readers):
            found.append(
                Fold(tuple(f"{name}.weight" for name in readers), f"{norm}.weight", entry.norm_offset)
            )
    values, up = attention[-1], mlp[-1]
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if f"{values}.bias" not in names:
        width = names["self_attn.o_proj.weight"].shape[1] // heads
        first = (heads + kv_heads) * width if entry.fused else 0
        found.append(
            Fold(
                ("self_attn.o_proj.weight",),
                rows_of=f"{values}.weight",
                first=first,
                repeats=heads // kv_heads,
                width=width,
            )
        )
    if f"{up}.weight" in names and f"{up}.bias" not in names:
        first = names[f"{up}.weight"].shape[0] // 2 if entry.fused else 0
        found.append(Fold(("mlp.down_proj.weight",), rows_of=f"{up}.weight", first=first))
    return found[::-1]  # those that change rows of matrices first, as these are readers of the others


def apply(
    fold: Fold, weights: dict[str, torch.Tensor], gram: torch.Tensor, norm_dtype: torch.dtype, group_size: int
) -> torch.Tensor:
    """Choose and apply factors, in place; returns the Gram matrix of the new inputs."""
    factors = _best(fold, [weights[name] for name in fold.readers], gram, group_size)
    if fold.norm is not None:
        old = weights[fold.norm] + fold.offset
        new = (old / factors - fold.offset).to(norm_dtype).float()
        ratio = old / (new + fold.offset)
        keep = ~(ratio.isfinite() & (ratio > 0))
        weights[fold.norm] = torch.where(keep, weights[fold.norm], new)
        factors = torch.where(keep, 1.0, ratio)
    else:
        assert fold.rows_of is not None
        own = _per_row(fold, factors)
        rows = weights[fold.rows_of][fold.first : fold.first + len(own)]
        rows.div_(own.unsqueeze(1))
    for name in fold.readers:
        weights[name].mul_(factors)
    return gram / factors / factors.unsqueeze(1)


def _per_row(fold: Fold, factors: torch.Tensor) -> torch.Tensor:
    """The factors of the rows that make inputs: one for each, or for all the heads that share it."""
    return factors if fold.repeats == 1 else factors.view(-1, fold.repeats, fold.width)[:, 0].reshape(-1)


def _mean_of_heads(values: torch.Tensor, fold: Fold) -> torch.Tensor:
    heads = values.view(-1, fold.repeats, fold.width)
    return heads.mean(1, keepdim=True).expand_as(heads).reshape(-1)


def _best(fold: Fold, matrices: list[torch.Tensor], gram: torch.Tensor, group_size: int) -> torch.Tensor:
    inputs = gram.diagonal().sqrt()
    largest = torch.stack([matrix.abs().amax(0) for matrix in matrices]).amax(0)
    if fold.repeats > 1:  # heads that share a channel have to have the same factor
        inputs, largest = (_mean_of_heads(values, fold) for values in (inputs, largest))
    some = torch.cat([matrix[:: max(1, len(matrix) // _ROWS)] for matrix in matrices])
    best, least = torch.ones_like(inputs), torch.inf
    for a, b in EXPONENTS:
        factors = a * inputs.clamp(min=1e-12).log() - b * largest.clamp(min=1e-12).log()
        factors = (factors - factors.mean()).exp().clamp(1 / _LARGEST, _LARGEST)
        scaled = some * factors
        missed = (scaled - encode(scaled, group_size).decode(of_mantissa_bits(COARSEST))) / factors
        error = float((missed @ gram).mul_(missed).sum(dtype=torch.float64))
        if error < least:
            best, least = factors, error
    return best
