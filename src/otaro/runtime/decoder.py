"""What the loop asks of a decoder, and what `decode.Decoder`, on a CPU, and `gpu.GpuDecoder` do alike.

A decoder reads tokens into a cache of some sequences and returns logits. A chunk of one sequence is read by
`forward`, a token or a few of each of several by `step`, every token at its own precision: `bits` is one byte
of mantissa bits per matrix, in decoder order (`description`). What a step computes for a sequence depends on
that sequence alone, to the last bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar, NamedTuple, Self

import torch

from otaro.errors import OtaroError
from otaro.runtime.architectures import describe, still_describes
from otaro.runtime.description import Description
from otaro.sefp.precision import COARSEST, FINEST, Precision, of_mantissa_bits


class Chunk(NamedTuple):
    """Tokens of one sequence to be read."""

    ids: list[int]
    sequence: int
    bits: bytes
    wanted: bool
    """Whether the logits after the last of them are."""


class Costs(NamedTuple):
    """What steps take, as shares of a step of one token: measured once, where nothing else ran."""

    several: float
    """What one with several tokens takes more."""
    each: float
    """And for each token after the first."""
    fixed: float
    """Of a step at E5M8: what no coarser precision saves."""

    def draft(self, bits: bytes, judge: bytes) -> float:
        """A step at these mantissa bits, as a share of one at the judge's."""
        return self._step(bits) / self._step(judge)

    def _step(self, bits: bytes) -> float:
        stored, most = sum(bits) / len(bits) + 1, FINEST + 1  # a sign each
        return self.fixed + (1 - self.fixed) * stored / most


@dataclass(eq=False)
class Arranged:
    """Tokens of some sequences, in the order in which they are computed; each sequence's stand together."""

    ids: list[int]
    sequences: list[int]
    bits: list[bytes] | None
    """None: as the model is set."""
    at: list[int]
    """Where the caller's tokens are."""
    cache: Any

    @property
    def counts(self) -> dict[int, int]:
        """How many tokens each sequence has, in their order."""
        return Counter(self.sequences)


class BaseDecoder(ABC):
    """Runs a described model; its methods may be called by any thread."""

    max_sequences: ClassVar[int]
    """In one step, and in one cache."""
    pooled: ClassVar[bool]
    """As in its caches."""
    exact_prompts: ClassVar[bool]
    """Whether a token leaves the same bits with whatever tokens of its sequence it is read.

    Otherwise that holds for up to `MAX_TOKENS` at a time."""
    together: ClassVar[bool]
    """Whether a step reads chunks of prompts beside the tokens of others, all in one pass over the weights.
    """
    costs: ClassVar[Costs]
    """Which drafts ask for."""
    ahead: ClassVar[int]
    """Steps that it pays to begin before the last one's token is looked at; `gpu.GpuDecoder.begin` says."""

    def __init__(self, description: Description) -> None:
        self.description, self.vocabulary = description, description.lm_head.rows
        self._matrices = len(description.all_at(of_mantissa_bits(COARSEST)))

    @classmethod
    def of(cls, model: Any, *args: Any) -> Self:
        """The decoder of a nested model; it keeps parts, not the model itself, which must be free to go."""
        if reason := cls.why_not(model):
            raise OtaroError(f"the decoder does not serve this model: {reason}")
        return cls(describe(model), *args)

    @staticmethod
    @abstractmethod
    def why_not(model: Any) -> str | None:
        """Why this model has to go through transformers, in words; None if the decoder serves it."""

    def serves(self, model: Any) -> bool:
        """Whether this decoder still has what the model consists of."""
        return still_describes(self.description, model)

    @abstractmethod
    def new_cache(self, kv: Precision | None = None, sequences: int = 1, capacity: int = 0) -> Any:
        """Empty, in float16 or packed, with memory for `capacity` tokens of each sequence from the start."""

    @abstractmethod
    def forward(
        self,
        ids: Sequence[int],
        cache: Any,
        all_logits: bool = False,
        sequence: int = 0,
        bits: bytes | None = None,
    ) -> torch.Tensor:
        """Read a chunk of one sequence: float32 logits [vocabulary] after it, or [ids, vocabulary] after
        each.

        They are on the device. `bits` are by default those that are set now. If anything is refused the cache
        is as before.
        """

    @abstractmethod
    def step(
        self,
        ids: Sequence[int],
        cache: Any,
        sequences: Sequence[int] | None = None,
        bits: Sequence[bytes] | None = None,
    ) -> torch.Tensor:
        """Read one token of each of some sequences, by default of all: float32 logits [tokens, vocabulary],
        as `forward`.

        A sequence that is named several times in a row has so many tokens, at one precision. `bits` are those
        of each token; tokens of one precision share a pass over the weights.
        """

    def likeliest(
        self, ids: Sequence[int], cache: Any, sequences: Sequence[int], bits: Sequence[bytes]
    ) -> list[int]:
        """Where `ahead` is not 0, as `step`: where the logits after each token are largest."""
        raise NotImplementedError

    def read(self, chunks: Sequence[Chunk], cache: Any) -> torch.Tensor:
        """Where `together` holds, read a token or more of each of some sequences: logits [those that are
        wanted, vocabulary].

        They are in the order of the chunks, `max_sequences` tokens at most.
        """
        raise NotImplementedError

    def _checked(
        self, ids: Sequence[int], cache: Any, sequences: list[int], bits: Sequence[bytes]
    ) -> list[int]:
        """Tokens, if all of this can be."""
        tokens = [int(one) for one in ids] if all(not isinstance(one, list | tuple) for one in ids) else []
        if not tokens:
            raise OtaroError("the decoder reads one token or more, as a flat sequence")
        if min(tokens) < 0 or max(tokens) >= self.vocabulary:
            strange = next(token for token in tokens if not 0 <= token < self.vocabulary)
            raise OtaroError(f"token {strange} is not in the vocabulary of {self.vocabulary}")
        for sequence in sequences:
            if not 0 <= sequence < cache.sequences:
                raise OtaroError(
                    f"sequence {sequence} is none of the {cache.sequences} of this cache, counted from 0"
                )
        for one in bits:
            if len(one) != self._matrices:
                told = f"precisions of {len(one)} matrices were given for {self._matrices}"
                raise OtaroError(f"{told}; `Description.all_at` makes them")
        return tokens

    def _arranged(
        self, ids: Sequence[int], cache: Any, sequences: Sequence[int] | None, bits: Sequence[bytes] | None
    ) -> Arranged:
        """Tokens of one precision as neighbours."""
        those = list(range(cache.sequences)) if sequences is None else list(sequences)
        tokens = self._checked(ids, cache, those, bits or ())
        runs = [one for one, _ in groupby(those)]
        if len(those) != len(tokens) or len(set(runs)) != len(runs) or len(tokens) > self.max_sequences:
            told = f"{len(tokens)} tokens for {len(those)} sequences"
            raise OtaroError(
                f"{told}: a step takes those of each one after the other, and {self.max_sequences} at most"
            )
        if bits is None:
            return Arranged(tokens, those, None, list(range(len(tokens))), cache)
        if len(bits) != len(tokens):
            raise OtaroError(f"precisions of {len(bits)} tokens were given for {len(tokens)}")
        if len(set(zip(those, bits, strict=True))) != len(runs):
            raise OtaroError("the tokens of a sequence are read at one precision in a step")
        order = sorted(range(len(tokens)), key=bits.__getitem__)
        at = sorted(range(len(tokens)), key=order.__getitem__)
        return Arranged(
            [tokens[i] for i in order], [those[i] for i in order], [bits[i] for i in order], at, cache
        )
