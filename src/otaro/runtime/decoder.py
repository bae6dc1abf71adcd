"""What the engine asks of a decoder: `decode.Decoder` on a CPU and `gpu.GpuDecoder` on a GPU both have it.

A decoder reads tokens into a cache of some sequences and returns logits. A chunk of one sequence is read by
`forward`, one token of each of several by `step`, every token at its own precision: `bits` is one byte of
mantissa bits per matrix, in decoder order (`description`). What a step computes for a sequence depends on that
sequence alone, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from otaro.runtime.description import Description
from otaro.sefp.precision import Precision


class Cache(Protocol):
    """Keys and values of some sequences."""

    pooled: bool
    """Whether sequences grow and shrink one by one, or have as much memory each from the start."""

    @property
    def lengths(self) -> list[int]:
        """How many tokens each sequence has."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""

    def crop(self, length: int, sequence: int | None = None) -> None:
        """Forget all but the first `length` tokens of one sequence, or of all; negative: so many of the last."""

    def check(self, wait: bool = True) -> None:
        """Refuse, if it was given a number that it cannot hold; of steps under way it need not know."""


class Decoder(Protocol):
    """Runs a described model; its methods may be called by any thread."""

    description: Description
    vocabulary: int
    max_sequences: int
    """In one step, and in one cache."""
    pooled: bool
    """As in its caches."""
    exact_prompts: bool
    """Whether a token leaves the same bits with whatever tokens of its sequence it is read.

    Otherwise that holds for up to `MAX_TOKENS` at a time."""
    ahead: int
    """Steps that it pays to have begun before the last one's token is looked at.

    Where there are some, `gpu.GpuDecoder.begin` tells how: tokens are chosen on the device."""

    def new_cache(self, kv: Precision | None = None, sequences: int = 1, capacity: int = 0) -> Any:
        """An empty `Cache`, in float16 or packed, with room for `capacity` tokens of each sequence from the start."""

    def forward(
        self, ids: Sequence[int], cache: Any, all_logits: bool = False, sequence: int = 0, bits: bytes | None = None
    ) -> torch.Tensor:
        """Read a chunk of one sequence: float32 logits [vocabulary] after it, or [ids, vocabulary].

        If anything is refused the cache is as before.
        """

    def step(
        self,
        ids: Sequence[int],
        cache: Any,
        sequences: Sequence[int] | None = None,
        bits: Sequence[bytes] | None = None,
    ) -> torch.Tensor:
        """Read one token of each of some sequences: float32 logits [tokens, vocabulary].

        If anything is refused the cache is as before.
        """
