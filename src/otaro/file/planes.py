"""Codes to bytes and back: the order of bits inside a nested file (FORMAT.md, "Blocks").

A code is stored as u = code + 256, nine bits, offset binary. The top four bits of u are its *base nibble*
(sign and three mantissa bits: all of E5M3), each further bit belongs to a *plane*, plane 4 first. Rows are
cut into blocks of 32 weights, the last one filled up with u = 0. Within a block, call the four weights 4j ...
4j+3 the *quad* j (j = 0 ... 7):

  base   16 bytes: byte 4w + b holds weight 8w + b in its low and weight 8w + 4 + b in its high nibble
         (w, b = 0 ... 3), so the little-endian word w holds quad 2w in the low nibbles of its bytes and
         quad 2w + 1 in the high ones;
  plane  4 bytes: bit j of byte b belongs to weight 4j + b, so shifting the word right by j leaves quad j's
         bits in the lowest bit of each byte.

Every function below therefore works on 32-bit words of four weights: one shift and one mask unpack a quad. A
CPU with 32-byte registers takes a whole block at a time by the same two steps, a GPU thread takes quads as
`dp4a` wants them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from otaro.sefp.precision import COARSEST, FINEST

BLOCK = 32
BASE_BYTES, PLANE_BYTES = BLOCK // 2, BLOCK // 8  # per block
PLANES = range(COARSEST + 1, FINEST + 1)

_QUADS = torch.arange(8, dtype=torch.int32)
_LOW_NIBBLES, _LOW_BITS = 0x0F0F0F0F, 0x01010101

if sys.byteorder != "little":
    raise ImportError(
        "otaro reads 32-bit words straight from little-endian files and needs a little-endian machine"
    )


def blocks(length: int) -> int:
    """How many blocks a row of `length` weights takes."""
    return -(-length // BLOCK)


def pack_codes(codes: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """E5M8 codes, int16 [..., K], to base bytes [..., 16 * blocks] and the five planes [..., 4 * blocks], all
    uint8.
    """
    length = codes.shape[-1]
    offset = pad(codes + (1 << FINEST), (0, blocks(length) * BLOCK - length))
    top = _quads((offset >> (FINEST - COARSEST)).to(torch.uint8))
    base = top[..., 0::2] | (top[..., 1::2] << 4)
    low = _quads((offset & 0xFF).to(torch.uint8))
    quads = _QUADS.to(codes.device)
    planes = []
    for m in PLANES:
        bits = (low >> (FINEST - m)) & _LOW_BITS
        planes.append(_bytes((bits << quads).sum(-1, dtype=torch.int32).unsqueeze(-1)))
    return _bytes(base), planes


def unpack_codes(base: torch.Tensor, planes: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    """Codes, int16 [..., length], at the mantissa bits that the base and these planes (4, 5, ...) make up."""
    words = _words(base)
    words = words.view(*words.shape[:-1], words.shape[-1] // 4, 4)
    offset = (torch.stack((words, words >> 4), -1) & _LOW_NIBBLES).flatten(-2)
    quads = _QUADS.to(base.device)
    mantissa_bits = COARSEST + len(planes)
    for plane in planes[: FINEST - COARSEST - 1]:
        offset = (offset << 1) | ((_words(plane).unsqueeze(-1) >> quads) & _LOW_BITS)
    codes = _bytes(offset).to(torch.int16)
    if mantissa_bits == FINEST:  # the ninth bit no longer fits a byte
        last = (_words(planes[-1]).unsqueeze(-1) >> quads) & _LOW_BITS
        codes = codes.mul_(2).add_(_bytes(last))
    return codes[..., :length].sub_(1 << mantissa_bits)


def _quads(weights: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 32 n] as 32-bit words [..., n, 8], four weights to a word."""
    words = weights.contiguous().view(torch.int32)
    return words.view(*words.shape[:-1], words.shape[-1] // 8, 8)


def _words(stored: torch.Tensor) -> torch.Tensor:
    """Bytes [..., 4 n] as 32-bit words [..., n]; copied where torch would not view them so."""
    stored = stored.contiguous()
    if stored.storage_offset() % 4 or stored.stride(-1) != 1:
        stored = stored.clone(memory_format=torch.contiguous_format)
    return stored.view(torch.int32)


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """int32 [..., n, k] as uint8 [..., 4 k n]."""
    return words.contiguous().flatten(-2).view(torch.uint8)
