"""Keys and values of several sequences in memory of a fixed size, in float16 or packed: what a decoder's
steps read and write.

A row is one head at one position. In float16 it is filled up with zeros to whole blocks of 32; packed, it is
`midpoint` in the layout of a file (FORMAT.md, "Blocks") with a group of 32, whose scale is the smallest power
of two above all its numbers, its exponent a byte. That is quickly found, which counts where every token is
packed, and its range suits numbers of any size; the largest of a group may be clamped, to 15/16 of it. Rows
of a head lie together, position by position.

Keys are harder to pack than weights: some dimensions are large at every position, and take the bits of their
group from all others. Where a projection has a bias (Qwen2) it may be a hundred times what varies. So a
packed cache keeps keys less an *offset*, one vector for each head that is the same at all positions
(`key_offset`). That takes the same number from all scores of a query, which the softmax does not notice:
nothing has to be added again. Groups of 32, not 64, do the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count as counter
from typing import Any

import torch
from torch.nn.functional import pad

from otaro.file.planes import BASE_BYTES, BLOCK, PLANE_BYTES, blocks, pack_codes, unpack_codes
from otaro.sefp.codec import MAX_CODE, MIDPOINT_SHIFT, decode_codes, power_of_two
from otaro.sefp.precision import COARSEST, FINEST

GROUP = BLOCK
"""Numbers of a packed row that share an exponent."""
MIN_EXPONENT, MAX_EXPONENT = -15, 16
OFFSET_POSITIONS = 1024
_numbers = counter()


def key_offset(
    bias: torch.Tensor, head_dim: int, cosines: torch.Tensor | None = None, sines: torch.Tensor | None = None
) -> torch.Tensor:
    """What a bias [kv heads * head_dim] adds to keys on average over some positions.

    Cosines and sines of the positions' angles are [positions, n], for 2n dimensions of a head. Dimensions
    that rotate slowly, and it is these that have large biases, hardly rotate within a context: the mean is
    the bias itself. Of those that rotate fast nothing is left.
    """
    heads = bias.detach().float().view(-1, head_dim)
    if cosines is None or sines is None:
        return heads.flatten()
    count = cosines.shape[1]
    first, second, rest = heads.split((count, count, head_dim - 2 * count), 1)
    cosine, sine = cosines.float().mean(0), sines.float().mean(0)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine, rest), 1).flatten()


class KvCache:
    """Memory for `capacity` positions of each sequence. `bits` are mantissa bits, 0 is float16."""

    def __init__(
        self,
        layers: int,
        sequences: int,
        kv_heads: int,
        capacity: int,
        head: int,
        bits: int,
        device: torch.device | str,
        offsets: torch.Tensor | None = None,
    ) -> None:
        """`offsets` are those of keys, float32 [layers, kv heads * head], or None."""
        self.layers, self.sequences, self.kv_heads, self.capacity = layers, sequences, kv_heads, capacity
        self.head, self.bits = head, bits
        self.offsets = offsets if bits else None
        self.number = next(_numbers)
        """No other cache has it."""
        shape = (2, layers, sequences, kv_heads, capacity)
        self.planes: list[torch.Tensor] = []
        self.exponents: torch.Tensor | None = None
        count = blocks(head)
        if bits:
            # Zeros: what lies beyond the last position is read here and there, though never used.
            self.base = torch.zeros(*shape, BASE_BYTES * count, dtype=torch.uint8, device=device)
            planes = range(bits - COARSEST)
            self.planes = [
                torch.zeros(*shape, PLANE_BYTES * count, dtype=torch.uint8, device=device) for _ in planes
            ]
            self.exponents = torch.zeros(*shape, -(-head // GROUP), dtype=torch.int8, device=device)
        else:
            self.base = torch.zeros(*shape, BLOCK * count, dtype=torch.float16, device=device)
        self._views: dict[tuple[int, int], Sequence[torch.Tensor | None]] = {}
        self.told: dict[tuple[str, int, int], Any] = {}
        """Its addresses as kernels take them: `cuda_steps.cache_rows`."""
        self.refused = torch.zeros(1, dtype=torch.int32, device=device)
        """Set where a number was too large to be kept, or not finite."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that takes memory."""
        return [self.base, *self.planes, *([] if self.exponents is None else [self.exponents])]

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def grown(self, capacity: int) -> KvCache:
        """The same with memory for more positions."""
        device = self.base.device
        new = KvCache(
            self.layers, self.sequences, self.kv_heads, capacity, self.head, self.bits, device, self.offsets
        )
        for ours, theirs in zip(self.tensors, new.tensors, strict=True):
            theirs[..., : self.capacity, :] = ours
        new.refused.copy_(self.refused)
        return new

    def write(self, kind: int, layer: int, sequence: int, start: int, rows: torch.Tensor) -> None:
        """Put keys (kind 0) or values (kind 1), [positions, kv heads, head], at positions from `start` on."""
        some = (kind, layer, sequence, slice(None), slice(start, start + len(rows)))
        rows = rows.transpose(0, 1)
        if not self.bits:
            halves = rows.half()
            self.refused.logical_or_(~halves.isfinite().all())
            self.base[some][..., : self.head] = halves
            return
        if kind == 0 and self.offsets is not None:
            rows = rows.float() - self.offsets[layer].view(self.kv_heads, 1, self.head)
        flat = rows.float().reshape(-1, self.head)
        exponents, codes = _encoded(flat)
        too_large = exponents > MAX_EXPONENT
        self.refused.logical_or_(too_large.any())
        codes = codes.where(~too_large.any(1, keepdim=True), MIDPOINT_SHIFT)
        exponents = exponents.where(~too_large, 0)
        base, planes = pack_codes(codes)
        assert self.exponents is not None
        self.base[some] = base.view(*rows.shape[:2], -1)
        self.exponents[some] = exponents.to(torch.int8).view(*rows.shape[:2], -1)
        for ours, plane in zip(self.planes, planes, strict=False):
            ours[some] = plane.view(*rows.shape[:2], -1)

    def read(
        self, kind: int, layer: int, sequence: int, some: slice, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Keys, less their offsets, or values at some positions, [kv heads, positions, head]."""
        at = (kind, layer, sequence, slice(None), some)
        base = self.base[at]
        if not self.bits:
            return base[..., : self.head].to(dtype)
        assert self.exponents is not None
        codes = unpack_codes(
            base.flatten(0, 1), [plane[at].flatten(0, 1) for plane in self.planes], self.head
        )
        scales = power_of_two(self.exponents[at].flatten(0, 1).int())
        values = decode_codes(codes, scales, self.bits, GROUP, "midpoint")
        return values.view(*base.shape[:2], self.head).to(dtype)

    def of_layer(self, kind: int, layer: int) -> Sequence[torch.Tensor | None]:
        """Base, exponents and planes of a layer's keys or values."""
        found = self._views.get((kind, layer))
        if found is None:
            exponents = None if self.exponents is None else self.exponents[kind, layer]
            found = [self.base[kind, layer], exponents, *(plane[kind, layer] for plane in self.planes)]
            self._views[kind, layer] = found
        return found


def _encoded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Exponents, int32, and codes, int16, of float32 rows. NaN and infinity give one never allowed."""
    length = rows.shape[1]
    groups = pad(rows, (0, -length % GROUP)).unflatten(1, (-1, GROUP))
    fields = groups.abs().amax(-1).view(torch.int32) >> 23  # a float32 is below 2^(field - 126)
    exponents = (fields - 126).clamp_(min=MIN_EXPONENT)
    scaled = groups.double() * power_of_two(FINEST - exponents).unsqueeze(-1)
    codes = scaled.floor_().add_(MIDPOINT_SHIFT).clamp_(max=MAX_CODE).nan_to_num_()
    return exponents, codes.to(torch.int16).flatten(1)[:, :length]
