"""What the engine asks of a decoder: `decode.Decoder` on a CPU and `gpu.GpuDecoder` on a GPU both have it.

A decoder reads tokens into a cache of some sequences and returns logits. A chunk of one sequence is read by
`forward`, one token of each of several by `step`, every token at its own precision: `bits` is one byte of
mantissa bits per matrix, in decoder order (`description`). What a step computes for a sequence depends on that
sequence alone, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from otaro.sefp.precision import Precision


class Cache(Protocol):
    """Keys and values of some sequences."""

    lengths: list[int]
    """Tokens that each sequence holds."""
    pooled: bool
    """Whether a sequence takes memory as it grows, and gives it back when it is cropped.

    Otherwise there is room for equally many tokens of every sequence."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""

    def crop(self, length: int, sequence: int | None = None) -> None:
        """Forget all but the first `length` tokens of one sequence, or of all."""


class Decoder(Protocol):
    """Runs a described model; its methods may be called by any thread."""

    vocabulary: int
    exact_prompts: bool
    """Whether a token leaves the same bits with whatever tokens of its sequence it is read.

    Otherwise that holds for up to `MAX_TOKENS` at a time."""
    lock: AbstractContextManager[Any]
    """Whoever has it is alone with what `begin` began."""

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

    def begin(
        self,
        ids: Sequence[int],
        cache: Any,
        sequences: Sequence[int] | None = None,
        bits: Sequence[bytes] | None = None,
    ) -> object:
        """Go on from these tokens by the likeliest, chosen on the device; see `advance`."""

    def goes_on(self, begun: object) -> bool:
        """Whether nothing else was read or begun since."""

    def advance(self, bits: bytes | None = None) -> int:
        """Start a step; its number is for `chosen`."""

    def chosen(self, number: int) -> list[int]:
        """The tokens that a step chose; waits for it."""
