"""Choosing the next token from logits.

transformers' warpers sort the whole vocabulary for every token, which for a small model takes as long as the
model. `Sampler` keeps exactly the tokens that they keep and gives them the same probabilities, but looks only
at the likeliest few hundred. Where rounding could decide whether a token is in or out, and for every
processor it does not know, it asks transformers. It computes in numpy, on this thread alone: torch would
start threads of its own beside the decoder's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import LogitsProcessorList
from transformers.generation import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from otaro.errors import OtaroError

Array = np.ndarray[Any, np.dtype[Any]]

_FIRST_LOOK = 256  # tokens
_DOUBT = 1e-6  # of a probability: sums of float32 differ by no more


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: the likeliest, or with a temperature drawn from what the other numbers leave."""

    temperature: float = 0.0
    top_p: float = 1.0
    """The likeliest tokens that make up this share stay."""
    top_k: int = 0
    """So many of the likeliest stay; 0: all."""
    min_p: float = 0.0
    """Tokens at least this likely, relative to the likeliest, stay."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens that were there before less likely."""
    seed: int | None = None
    """What is drawn again with the same seed; None: something else each time."""

    def __post_init__(self) -> None:
        allowed: dict[str, tuple[Callable[[Any], bool], str]] = {
            "temperature": (lambda one: 0 <= one < float("inf"), "a finite number, 0 or more"),
            "top_p": (lambda one: 0 < one <= 1, "above 0 and at most 1"),
            "top_k": (lambda one: isinstance(one, int) and one >= 0, "a whole number, 0 or more"),
            "min_p": (lambda one: 0 <= one <= 1, "from 0 to 1"),
            "repetition_penalty": (lambda one: 0 < one < float("inf"), "a finite number above 0"),
            "seed": (
                lambda one: one is None or (isinstance(one, int) and 0 <= one < 2**64),
                "a whole number below 2^64",
            ),
        }
        for name, (holds, what) in allowed.items():
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number or (name == "seed" and value is None)) or not holds(value):
                raise OtaroError(f"{name}={value!r}: give {what}")

    def sampler(self) -> Sampler:
        """One that draws from a generator of its own."""
        processors: list[Any] = []
        if self.repetition_penalty != 1.0:
            processors.append(RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty)))
        if not self.temperature:
            return Sampler(processors, do_sample=False)
        if self.temperature != 1.0:
            processors.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k:
            processors.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            processors.append(TopPLogitsWarper(float(self.top_p)))
        if self.min_p > 0:
            processors.append(MinPLogitsWarper(float(self.min_p)))
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return Sampler(processors, do_sample=True, generator=generator)


class Proposal(NamedTuple):
    """A token that a draft says may follow."""

    token: int
    tokens: Array | None = None
    """Those that it may have drawn (None: the whole vocabulary, in order),"""
    chances: Array | None = None
    """and their probabilities up to a factor; None: it would always have said this one."""
    sure: bool = True

    def dense(self, vocabulary: int) -> Array:
        """The probability of every token."""
        if self.chances is None:
            return _dense(np.array([self.token]), np.ones(1), vocabulary)
        return _dense(self.tokens, self.chances, vocabulary)


class Sampler:
    """Greedy, or drawing from what temperature, top-k, top-p, min-p and other processors leave."""

    scores: torch.Tensor
    """What the processors made of the last logits, [rows, vocabulary]; only with `exact_scores`."""

    def __init__(
        self,
        processors: Any,
        do_sample: bool,
        exact_scores: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        """Without a `generator` of its own it draws from torch's."""
        self.processors, self.do_sample, self.exact_scores = (
            LogitsProcessorList(processors),
            do_sample,
            exact_scores,
        )
        self.generator = generator
        self.temperature, self.top_k, self.top_p, self.min_p = 1.0, 0, 1.0, 0.0
        kinds = [type(processor) for processor in self.processors]
        order = [TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper]
        # Penalties and bans come first, and cost little. Then warpers: in another order, or twice, they mean
        # something else.
        at = next((number for number, kind in enumerate(kinds) if kind in order), len(kinds))
        self._first, self._warpers = (
            LogitsProcessorList(some) for some in (self.processors[:at], self.processors[at:])
        )
        self._penalty = _penalty_of(self._first)
        stateless = {RepetitionPenaltyLogitsProcessor, *order}
        self._askable = stateless.issuperset(kinds)
        """Whether it makes no difference how often processors are asked."""
        self.known = not exact_scores and kinds[at:] == [kind for kind in order if kind in kinds]
        for warper in self._warpers if self.known else ():
            self.known &= getattr(warper, "min_tokens_to_keep", 1) == 1
            if isinstance(warper, TemperatureLogitsWarper):
                self.temperature = warper.temperature
            elif isinstance(warper, TopKLogitsWarper):
                self.top_k = warper.top_k
            elif isinstance(warper, TopPLogitsWarper):
                self.top_p = warper.top_p
            else:
                self.min_p = warper.min_p

    @property
    def argmax(self) -> bool:
        """Whether logits alone decide, by their largest."""
        return self.known and not self.do_sample and not self.processors

    def choose(self, ids: torch.Tensor, logits: torch.Tensor, proposal: Proposal | None = None) -> list[int]:
        """The next token of each row of `ids` [rows, n], given logits [rows, vocabulary], which may be on a
        GPU.

        There processors run too, as they may have tensors of their own; tokens are drawn on the CPU, so that
        a seed says the same again whatever else draws. A `proposal`, for one row, is kept as often as its
        token is to be drawn.
        """
        if self.known:
            scores = self._penalized(ids, logits)
        else:
            scores = self.scores = self.processors(ids, logits.clone())
        if not self.do_sample:
            return argmax(scores)
        if self.known:
            left = [self._left(ids, one) for one in scores.cpu()]
        else:
            left = [(None, one) for one in scores.softmax(-1).double().cpu().numpy()]
        return [self._one_of(tokens, chances, scores.shape[1], proposal) for tokens, chances in left]

    def proposed(self, ids: list[int], logits: torch.Tensor, largest: int) -> Proposal:
        """What a draft says after `ids`, given its logits [vocabulary] and where they are largest."""
        if self.argmax or not self._askable:
            return Proposal(largest)
        rows = torch.tensor([ids], device=logits.device)
        if not self.do_sample:
            scores = logits.unsqueeze(0)
            return Proposal(
                argmax(
                    self._penalized(rows, scores) if self.known else self.processors(rows, scores.clone())
                )[0]
            )
        tokens, chances = self.distribution(rows, logits)
        return Proposal(self._one_of(tokens, chances, len(logits)), tokens, chances)

    def distribution(self, ids: torch.Tensor, logits: torch.Tensor) -> tuple[Array | None, Array]:
        """Tokens that may be drawn (None: all the vocabulary, in order), and probabilities up to a factor."""
        if not self.known:
            return None, self.processors(ids, logits.clone().unsqueeze(0))[0].softmax(
                0
            ).double().cpu().numpy()
        return self._left(ids, self._penalized(ids, logits.unsqueeze(0))[0].cpu())

    def _penalized(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """What penalties and bans make of logits [rows, vocabulary]."""
        if self._penalty is None or logits.device.type != "cpu" or logits.dtype != torch.float32:
            return self._first(ids, logits.clone()) if self._first else logits
        scores = logits.numpy().copy()
        for row, tokens in zip(scores, ids.numpy(), strict=True):
            said = tokens[tokens < len(row)]
            row[said] = np.where(row[said] < 0, row[said] * self._penalty, row[said] / self._penalty)
        return torch.from_numpy(scores)

    def _one_of(
        self, tokens: Array | None, chances: Array, vocabulary: int, proposal: Proposal | None = None
    ) -> int:
        """Drawn from tokens by these chances, or the one proposed if as good as drawn (`runtime.draft`)."""
        if proposal is not None:
            p, q = _dense(tokens, chances, vocabulary), proposal.dense(vocabulary)
            if _uniform(self.generator) * q[proposal.token] < p[proposal.token]:
                return proposal.token
            rest = (p - q).clip(min=0)
            return _drawn(rest, self.generator) if rest.any() else proposal.token
        at = _drawn(chances, self.generator)
        return at if tokens is None else int(tokens[at])

    def _left(self, ids: torch.Tensor, scores: torch.Tensor) -> tuple[Array | None, Array]:
        """What warpers leave of scores [vocabulary], which are on the CPU."""
        values = scores.float().numpy() / np.float32(self.temperature)
        if not self.top_k and self.top_p >= 1 and not self.min_p:
            return None, np.exp((values - values.max()).astype(np.float64))
        return self._top(values) or (
            None,
            self._warpers(ids, scores.clone().unsqueeze(0))[0].softmax(0).double().numpy(),
        )

    def _top(self, values: Array) -> tuple[Array, Array] | None:
        """What top-k, top-p and min-p leave, the likeliest first; None where that is a matter of rounding."""
        if self.top_k:
            tokens = _likeliest(values, self.top_k + 1)[: self.top_k + 1]
            if len(tokens) > self.top_k:
                if values[tokens[self.top_k]] == values[tokens[self.top_k - 1]]:
                    return None  # a tie: which of them stay?
                tokens = tokens[: self.top_k]
            chances = np.exp(values[tokens].astype(np.float64) - values[tokens[0]])
            return self._nucleus(chances / chances.sum(), tokens)
        largest, count = values.max(), _FIRST_LOOK
        total = np.exp(values - largest).sum(dtype=np.float64)
        while True:
            tokens = _likeliest(values, count)
            chances = np.exp(values[tokens].astype(np.float64) - largest) / total
            enough = chances.sum() > self.top_p + _DOUBT
            if self.min_p:
                enough |= chances[-1] < (self.min_p - _DOUBT) * chances[0]
            if count >= len(values) or enough:
                return self._nucleus(chances, tokens)
            count *= 8

    def _nucleus(self, chances: Array, tokens: Array) -> tuple[Array, Array] | None:
        """A token stays if those before it make up less than top-p."""
        if self.top_p >= 1:
            return self._likely(chances, tokens)
        before = chances.cumsum() - chances
        kept = max(1, int((before < self.top_p).sum()))
        if (abs(before - self.top_p) < _DOUBT).any():
            return None
        if kept < len(chances) and chances[kept] == chances[kept - 1]:
            return None  # a tie: sorting decides
        return self._likely(chances[:kept], tokens[:kept])

    def _likely(self, chances: Array, tokens: Array) -> tuple[Array, Array] | None:
        """A token stays if it is at least min-p times as likely as the first."""
        if not self.min_p:
            return tokens, chances
        above = chances / chances[0] - self.min_p
        if (abs(above) < _DOUBT).any():
            return None
        kept = int((above > 0).sum())
        return tokens[:kept], chances[:kept]


def _penalty_of(processors: LogitsProcessorList) -> Any:
    """That of repetition, in float32, where there is nothing else."""
    if [type(one) for one in processors] != [RepetitionPenaltyLogitsProcessor] or processors[
        0
    ].prompt_ignore_length:
        return None
    return np.float32(processors[0].penalty)


def argmax(logits: torch.Tensor) -> list[int]:
    """Where each row is largest."""
    # numpy finds it in an eighth of the time, and on this thread alone.
    numpy_can = logits.device.type == "cpu" and logits.dtype == torch.float32
    found: list[int] = (logits.numpy() if numpy_can else logits).argmax(-1).tolist()
    return found


def largest_chance(logits: torch.Tensor, largest: int) -> float:
    """The probability of the likeliest token, given logits [vocabulary] and where they are largest."""
    values = logits.float().cpu().numpy()
    return 1 / float(np.exp(values - values[largest]).sum())


def _likeliest(values: Array, count: int) -> Array:
    """Indices of the largest in order, so many of them or a few more."""
    # Of the largest of each part, so many are as large as the least of them: what is smaller need not be
    # sorted.
    size = max(1, len(values) // (4 * count))
    parts = len(values) // size
    largest = values[: parts * size].reshape(size, parts).max(0)
    found = (
        np.flatnonzero(values >= np.partition(largest, parts - count)[parts - count])
        if count < parts
        else np.arange(len(values))
    )
    return found[np.argsort(-values[found], kind="stable")]


def _dense(tokens: Array | None, chances: Array, vocabulary: int) -> Array:
    """The probability of every token."""
    every = np.zeros(vocabulary)
    every[slice(None) if tokens is None else tokens] = chances / chances.sum()
    return every


def _uniform(generator: torch.Generator | None) -> float:
    return float(torch.rand(1, dtype=torch.float64, generator=generator))


def _drawn(chances: Array, generator: torch.Generator | None = None) -> int:
    """An index, drawn with these probabilities, which need not add up to one."""
    sums = chances.cumsum()
    drawn = _uniform(generator) * sums[-1]
    return min(int(sums.searchsorted(drawn, side="right")), len(sums) - 1)
