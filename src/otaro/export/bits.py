"""Small integers as a stream of bits, the first lowest: the 32-bit words of compressed-tensors and MLX."""

from __future__ import annotations

import torch


def pack_bits(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers from 0 to 2^bits - 1, [..., 32 n], as int32 [..., bits n]."""
    each = (numbers.unsqueeze(-1) >> torch.arange(bits)).to(torch.uint8) & 1
    return _joined(each.flatten(-2), 8, torch.uint8).view(torch.int32)


def unpack_bits(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The integers again, int16."""
    octets = words.contiguous().view(torch.uint8)
    each = (octets.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return _joined(each.flatten(-2), bits, torch.int16)


def _joined(each: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    """So many bits at a time, the lowest first, as integers."""
    several: torch.Tensor = each.to(dtype).unflatten(-1, (-1, count))
    return (several << torch.arange(count, dtype=dtype)).sum(-1, dtype=dtype)
