"""Keys and values on a GPU: memory of a fixed size for each sequence, exchanged for more when it is full."""

from __future__ import annotations

from typing import Any

import torch

from otaro.kernels.kv_cache import KvCache
from otaro.runtime.decode import DecoderCache, cannot_hold
from otaro.runtime.description import Description
from otaro.sefp.precision import Precision

GROWTH = 256
"""Positions by which a cache grows at least."""


class GpuCache(DecoderCache):
    """What `GpuDecoder.new_cache` makes. With several sequences, `length` is that of the longest."""

    pooled = False

    def __init__(
        self, weights: Description, precision: Precision | None, sequences: int, capacity: int, spare: KvCache | None = None
    ) -> None:
        super().__init__(precision, sequences)
        self._lengths = [0] * sequences
        self._beside: Any = None  # a stream, to look at what others write
        bits = precision.mantissa_bits if precision else 0
        self._make = (len(weights.layers), sequences, weights.kv_heads, weights.head_dim, bits, weights.device)
        self._offsets = weights.key_offsets
        spare = spare or self._new(-(-capacity // GROWTH) * GROWTH)
        spare.refused.zero_()  # an interrupted generation may have left it
        self.holder = [spare]
        """The memory, in a list that may outlive this object: graphs point into it, the next cache can have it."""

    def _new(self, capacity: int) -> KvCache:
        layers, sequences, kv_heads, head, bits, device = self._make
        return KvCache(layers, sequences, kv_heads, capacity, head, bits, device, self._offsets)

    @property
    def kv_cache(self) -> KvCache:
        """Where keys and values are."""
        return self.holder[0]

    @property
    def lengths(self) -> list[int]:
        """How many tokens each sequence has."""
        return self._lengths

    @lengths.setter
    def lengths(self, lengths: list[int]) -> None:
        self._lengths = lengths

    @property
    def nbytes(self) -> int:
        """Bytes of memory, for all the positions that fit."""
        return self.kv_cache.nbytes

    @property
    def capacity(self) -> int:
        """Positions that fit, in each sequence."""
        return self.kv_cache.capacity

    def fits(self, weights: Description) -> bool:
        """Whether it was made for such weights."""
        made = (len(weights.layers), weights.kv_heads, weights.head_dim, weights.device)
        return made == (self._make[0], self._make[2], self._make[3], self._make[5])

    def reserve(self, length: int) -> bool:
        """Have memory for so many positions; True if what there was has moved."""
        if length <= self.capacity:
            return False
        # By half at least: a long answer must not be copied every 256 tokens.
        wanted = max(length, self.capacity + self.capacity // 2)
        self.holder[0] = self.kv_cache.grown(-(-wanted // GROWTH) * GROWTH)
        return True

    def crop(self, length: int, sequence: int | None = None) -> None:
        """Forget all but the first `length` tokens of one sequence, or of all; negative: so many of the last."""
        for number, one in enumerate(self.lengths):
            if sequence in (None, number):
                self.lengths[number] = max(0, one + length) if length < 0 else min(one, length)

    def check(self, wait: bool = True) -> None:
        """Refuse, if there was a number since the last time that the cache cannot hold; waits for steps under way, or not."""
        if self._beside is None and not wait and self.kv_cache.refused.is_cuda:
            self._beside = torch.cuda.Stream(self.kv_cache.refused.device)
        with torch.cuda.stream(None if wait else self._beside):
            refused = int(self.kv_cache.refused)
        if refused:
            self.kv_cache.refused.zero_()
            raise cannot_hold(self.precision)
