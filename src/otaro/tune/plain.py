"""Quantizing many weights in torch, on any device: the codec's numbers without its integers.

Truncations compose, and so do floors: a code at m bits is floor(w / step(m) + 2^(m-4)), and its value the
middle of that cell, less 2^(m-4) steps. Where that is a whole number of steps it need not be added at all; at
m = 3 it is one half, and the code is w / step(3) rounded. Floors are right in float64, for the reason that
the codec gives, with products as with quotients, which are slower: of the numbers with four significant bits
none has an inverse that is off by more than 2^-54 of its size, and the product with a weight on a border is
nearest to an integer.

Small weights are taken together, as most of a torch operation on few numbers is the call. The values are
written over a copy of the weights, some at a time. Nothing waits for a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from otaro.sefp.codec import (
    FRACTION_BITS,
    MAX_FLOAT8,
    MIN_FLOAT8,
    MIN_SCALE_EXPONENT,
    Reconstruction,
    border_sides,
    midpoint_offset,
    needs_of,
    power_of_two,
)
from otaro.sefp.precision import COARSEST

TOGETHER = 1 << 20  # weights that share a buffer; a larger tensor has its own
_CHUNK_ON_CPU, _CHUNK = 1 << 18, 1 << 24  # weights in float64 at a time: on a CPU few enough for its cache


def scale_exponents_of(
    weights: Sequence[torch.Tensor], group_size: int, reconstruction: Reconstruction
) -> torch.Tensor:
    """The scale exponent of each of several weights on one device, int32."""
    return exponents_for(*_needs(weights, _fitting(group_size, weights), reconstruction))


def quantize_all(
    weights: Sequence[torch.Tensor],
    mantissa_bits: int,
    group_size: int,
    reconstruction: Reconstruction,
    dtype: torch.dtype | None = None,
    scale_exponents: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """The quantized values of weights on one device, in their own types or another.

    Parts of tensors are given the `scale_exponents` of the whole ones.
    """
    values: list[torch.Tensor] = []
    group_size = _fitting(group_size, weights)
    for some in _batches(weights):
        exponents = None if scale_exponents is None else scale_exponents[some]
        floats = _quantized(weights[some], mantissa_bits, group_size, reconstruction, exponents)
        values += [one.to(dtype or weight.dtype) for one, weight in zip(floats, weights[some], strict=True)]
    return values


def _fitting(group_size: int, weights: Sequence[torch.Tensor]) -> int:
    """No larger than the longest row, which is filled up to a group."""
    return min(group_size, max(weight.shape[-1] for weight in weights)) or 1


def _batches(weights: Sequence[torch.Tensor]) -> Iterator[slice]:
    """Neighbours that are small enough together."""
    start, held = 0, 0
    for i, weight in enumerate(weights):
        if i > start and held + weight.numel() > TOGETHER:
            yield slice(start, i)
            start, held = i, 0
        held += weight.numel()
    yield slice(start, len(weights))


def _quantized(
    weights: Sequence[torch.Tensor],
    mantissa_bits: int,
    group_size: int,
    reconstruction: Reconstruction,
    scale_exponents: torch.Tensor | None,
) -> list[torch.Tensor]:
    """In float32, as views of one buffer."""
    needs, counts = _needs(weights, group_size, reconstruction)
    if scale_exponents is None:
        scale_exponents = exponents_for(needs, counts)
    each = torch.cat(
        [exponent.expand(count) for exponent, count in zip(scale_exponents, counts, strict=True)]
    )
    scales = scales_for(needs, each).unsqueeze(-1)
    inverses = (2.0**mantissa_bits / scales.double()).where(scales != 0, 0.0)
    steps = scales * 2.0**-mantissa_bits

    device = weights[0].device
    groups = torch.empty(len(needs), group_size, device=device)
    parts = [
        part.view(*weight.shape[:-1], -1)[..., : weight.shape[-1]]
        if count
        else torch.empty(weight.shape, device=device)
        for part, weight, count in zip(groups.split(counts), weights, counts, strict=True)
    ]
    for part, weight in zip(parts, weights, strict=True):
        part.copy_(weight.detach())
    size = max(1, (_CHUNK_ON_CPU if device.type == "cpu" else _CHUNK) // group_size)
    buffer = torch.empty(min(len(groups), size), group_size, dtype=torch.float64, device=device)
    cells, offset = 2.0**mantissa_bits, midpoint_offset(mantissa_bits)
    sides = border_sides(group_size, device)
    for start in range(0, len(groups), size):
        some = slice(start, start + size)
        codes = buffer[: len(groups) - start].copy_(groups[some]).mul_(inverses[some])
        if reconstruction == "truncate":
            # trunc_ is slow; and no zero has a sign
            codes.abs_().floor_().mul_(groups[some].sign()).add_(0.0)
        else:
            if mantissa_bits == COARSEST:
                codes.add_(0.5)
            codes.mul_(sides).floor_().add_(0.5).mul_(sides)
            if mantissa_bits == COARSEST:
                codes.sub_(0.5)
            codes.clamp_(offset - cells, offset + cells - 1)
        groups[some].copy_(codes).mul_(steps[some])
    return parts


def _needs(
    weights: Sequence[torch.Tensor], group_size: int, reconstruction: Reconstruction
) -> tuple[torch.Tensor, list[int]]:
    """The needs of all groups of all weights, and how many groups each weight has."""
    least, most = [], []
    for weight in weights:
        values = weight.detach().float()
        if short := -weight.shape[-1] % group_size:
            values = nn.functional.pad(values, (0, short))
        groups = values.reshape(-1, group_size)
        least.append(groups.amin(-1))
        most.append(groups.amax(-1))
    return needs_of(torch.cat(least), torch.cat(most), reconstruction), [len(part) for part in least]


def exponents_for(needs: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """As `codec.smallest_scale_exponent` of each stretch of needs; without the upper limit of packing."""
    parts = needs.abs().split(list(counts))
    largest = torch.stack([part.amax() if len(part) else part.new_zeros(()) for part in parts])
    mantissas, exponents = torch.frexp((largest / MAX_FLOAT8).clamp_(min=2.0**MIN_SCALE_EXPONENT))
    return exponents - (mantissas == 0.5).int()


def scales_for(needs: torch.Tensor, scale_exponents: torch.Tensor) -> torch.Tensor:
    """As `codec.round_up`, in float32 and not as bytes."""
    spacings = torch.frexp(needs).exponent - (1 + FRACTION_BITS)
    units = power_of_two(torch.maximum(spacings, scale_exponents + int(math.log2(MIN_FLOAT8))))
    return torch.copysign((needs.abs() / units).ceil_().mul_(units), needs).float()
