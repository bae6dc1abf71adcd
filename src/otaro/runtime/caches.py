"""Keys and values of the tokens that some sequences consist of so far: the caches of the decoders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, RLock
from typing import Any

import torch

from otaro.errors import OtaroError
from otaro.kernels.kv_cache import KvCache
from otaro.runtime.description import Description
from otaro.sefp.precision import Precision

GROWTH = 256
"""Positions by which a cache grows at least."""


class DecoderCache:
    """What `decode.Decoder.new_cache` makes: memory that grows with each sequence."""

    pooled = True
    """Whether sequences grow and shrink one by one, or have as much memory each from the start."""

    def __init__(self, precision: Precision | None, sequences: int, natives: Sequence[Any] = ()) -> None:
        self.precision, self.sequences, self.natives = precision, sequences, list(natives)
        self._lock, self._claim = RLock(), Lock()

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """For one generation at a time: two would read each other's tokens."""
        if not self._claim.acquire(blocking=False):
            raise OtaroError("another generation is using this cache; give each one its own")
        try:
            yield
        finally:
            self._claim.release()

    @property
    def lengths(self) -> list[int]:
        """How many tokens each sequence has; whoever reads into it is waited for, as it may be refused."""
        with self._lock:
            return [int(native.length) for native in self.natives]

    @property
    def length(self) -> int:
        """How many tokens the longest sequence has."""
        return max(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, which grow by 64 tokens at a time."""
        return sum(int(native.nbytes) for native in self.natives)

    def crop(self, length: int, sequence: int | None = None) -> None:
        """Forget all but the first `length` tokens of one sequence, or of all.

        Negative: so many of the last, as transformers' caches have it.
        """
        with self._lock:
            for native in self.natives if sequence is None else [self.natives[sequence]]:
                native.crop(max(0, native.length + length) if length < 0 else length)

    def add(self, one: DecoderCache) -> int:
        """Have the sequence of another cache, which is of no use then; returns its number here."""
        with self._lock:
            self.natives += one.natives
            self.sequences = len(self.natives)
            return self.sequences - 1

    def copy(self, length: int, source: int, sequence: int) -> None:
        """Have a sequence be the first `length` tokens of another."""
        with self._lock:
            self.natives[sequence].copy(self.natives[source], length)

    def check(self, wait: bool = True) -> None:
        """Refuse, if it was given a number that it cannot hold; here whoever reads is refused at once."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """`length` by the name that transformers knows."""
        return self.length

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """What transformers' own attention would call: refused, as it cannot read this cache."""
        raise OtaroError(
            "a decoder's cache serves the decoder alone; leave it out to generate with beams or other options"
        )


class GpuCache(DecoderCache):
    """What `GpuDecoder.new_cache` makes: memory of a fixed size for each sequence, more once it is full."""

    pooled = False

    def __init__(
        self,
        weights: Description,
        precision: Precision | None,
        sequences: int,
        capacity: int,
        spare: KvCache | None = None,
    ) -> None:
        super().__init__(precision, sequences)
        self._lengths = [0] * sequences
        self._beside: Any = None  # a stream, to look at what others write
        bits = precision.mantissa_bits if precision else 0
        self._make = (
            len(weights.layers),
            sequences,
            weights.kv_heads,
            weights.head_dim,
            bits,
            weights.device,
        )
        self._offsets = weights.key_offsets
        spare = spare or self._new(-(-capacity // GROWTH) * GROWTH)
        spare.refused.zero_()  # an interrupted generation may have left it
        self.holder = [spare]
        """The memory, in a list that may outlive this object: graphs point into it, the next can have it."""

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
        """Forget all but the first `length` tokens of one sequence or all; negative: so many of the last."""
        for number, one in enumerate(self.lengths):
            if sequence in (None, number):
                self.lengths[number] = max(0, one + length) if length < 0 else min(one, length)

    def check(self, wait: bool = True) -> None:
        """Refuse, if a number since the last time did not fit; waits for steps under way, or not."""
        if self._beside is None and not wait and self.kv_cache.refused.is_cuda:
            self._beside = torch.cuda.Stream(self.kv_cache.refused.device)
        with torch.cuda.stream(None if wait else self._beside):
            refused = int(self.kv_cache.refused)
        if refused:
            self.kv_cache.refused.zero_()
            raise cannot_hold(self.precision)


def cannot_hold(kv: Precision | None) -> OtaroError:
    """What to say where a cache, in float16 or at a precision, cannot hold a key or value."""
    instead = (
        "past_key_values=DynamicCache(config=model.config), transformers' own, keeps them in the model's type"
    )
    if kv is None:
        return OtaroError(
            "a key or value is 65520 or more, or not finite: a cache in float16 cannot hold it; "
            f"kv='E5M8' holds less than 65536, and {instead}"
        )
    return OtaroError(
        f"a key or value is 65536 or more, or not finite: a cache at {kv} cannot hold it, nor can any other "
        f"kv; {instead}"
    )
