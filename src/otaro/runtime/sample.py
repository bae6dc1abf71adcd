"""Choosing the next token from logits.

transformers' warpers sort the whole vocabulary for every token, which for a small model takes as long as the model. `Sampler`
keeps exactly the tokens that they keep and gives them the same probabilities, but looks only at the likeliest few hundred.
Where rounding could decide whether a token is in or out, and for every processor it does not know, it asks transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

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
            "temperature": (lambda one: 0 <= one < float("inf"), "0 or more"),
            "top_p": (lambda one: 0 < one <= 1, "above 0 and at most 1"),
            "top_k": (lambda one: isinstance(one, int) and one >= 0, "a whole number, 0 or more"),
            "min_p": (lambda one: 0 <= one <= 1, "from 0 to 1"),
            "repetition_penalty": (lambda one: 0 < one < float("inf"), "above 0"),
            "seed": (lambda one: one is None or (isinstance(one, int) and 0 <= one < 2**64), "a whole number below 2^64"),
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
    tokens: torch.Tensor | None = None
    """Those that it may have drawn (None: the whole vocabulary, in order),"""
    weights: torch.Tensor | None = None
    """and their probabilities up to a factor; None: it would always have said this one."""
    sure: bool = True

    def dense(self, vocabulary: int) -> torch.Tensor:
        """The probability of every token."""
        if self.weights is None:
            return torch.zeros(vocabulary, dtype=torch.float64).index_fill_(0, torch.tensor(self.token), 1.0)
        return _dense(self.tokens, self.weights, vocabulary)


class Sampler:
    """Greedy, or drawing from what temperature, top-k, top-p, min-p and other processors leave."""

    scores: torch.Tensor
    """What the processors made of the last logits, [rows, vocabulary]; only with `exact_scores`."""

    def __init__(
        self, processors: Any, do_sample: bool, exact_scores: bool = False, generator: torch.Generator | None = None
    ) -> None:
        """Without a `generator` of its own it draws from torch's."""
        self.processors, self.do_sample, self.exact_scores = LogitsProcessorList(processors), do_sample, exact_scores
        self.generator = generator
        self.temperature, self.top_k, self.top_p, self.min_p = 1.0, 0, 1.0, 0.0
        kinds = [type(processor) for processor in self.processors]
        order = [TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper]
        # Penalties and bans come first, and cost little. Then warpers: in another order, or twice, they mean something else.
        at = next((number for number, kind in enumerate(kinds) if kind in order), len(kinds))
        self._first, self._warpers = (LogitsProcessorList(some) for some in (self.processors[:at], self.processors[at:]))
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
        """The next token of each row of `ids` [rows, n], given logits [rows, vocabulary], which may be on a GPU.

        There processors run too, as they may have tensors of their own; tokens are drawn on the CPU, so that a seed says the
        same again whatever else draws. A `proposal`, for one row, is kept as often as its token is to be drawn.
        """
        if self.known:
            scores = self._first(ids, logits.clone()) if self._first else logits
        else:
            scores = self.scores = self.processors(ids, logits.clone())
        if not self.do_sample:
            return argmax(scores)
        left = [self._left(ids, one) if self.known else (None, one.softmax(-1)) for one in scores.cpu()]
        return [self._one_of(tokens, weights, scores.shape[1], proposal) for tokens, weights in left]

    def proposed(self, ids: list[int], logits: torch.Tensor, largest: int) -> Proposal:
        """What a draft says after `ids`, given its logits [vocabulary] and where they are largest."""
        if self.argmax or not self._askable:
            return Proposal(largest)
        rows = torch.tensor([ids], device=logits.device)
        if not self.do_sample:
            return Proposal(argmax(self.processors(rows, logits.clone().unsqueeze(0)))[0])
        tokens, weights = (None if one is None else one.cpu() for one in self.distribution(rows, logits))
        assert weights is not None
        return Proposal(self._one_of(tokens, weights, len(logits)), tokens, weights)

    def distribution(self, ids: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The tokens that may be drawn (None: the whole vocabulary, in order), and their probabilities up to a factor."""
        if not self.known:
            return None, self.processors(ids, logits.clone().unsqueeze(0))[0].softmax(0)
        return self._left(ids, self._first(ids, logits.clone().unsqueeze(0))[0] if self._first else logits)

    def _one_of(
        self, tokens: torch.Tensor | None, weights: torch.Tensor, vocabulary: int, proposal: Proposal | None = None
    ) -> int:
        """Drawn from these tokens with these weights, or the token proposed, if that is as good as drawn (`runtime.draft`)."""
        if proposal is not None:
            p, q = _dense(tokens, weights, vocabulary), proposal.dense(vocabulary)
            if float(torch.rand(1, dtype=torch.float64, generator=self.generator)) * q[proposal.token] < p[proposal.token]:
                return proposal.token
            rest = (p - q).clamp_(min=0)
            return _drawn(rest, self.generator) if bool(rest.any()) else proposal.token
        at = _drawn(weights, self.generator)
        return at if tokens is None else int(tokens[at])

    def _left(self, ids: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """What warpers leave of scores [vocabulary]."""
        if not self.top_k and self.top_p >= 1 and not self.min_p:
            return None, (scores / self.temperature).softmax(0)
        return self._top(scores / self.temperature) or (None, self._warpers(ids, scores.clone().unsqueeze(0))[0].softmax(0))

    def _top(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What top-k, top-p and min-p leave, the likeliest first; None where that is a matter of rounding."""
        size = len(scores)
        if self.top_k:
            values, tokens = scores.topk(min(self.top_k + 1, size))
            if len(values) > self.top_k:
                if values[self.top_k] == values[self.top_k - 1]:
                    return None  # a tie: which of them stay?
                values, tokens = values[: self.top_k], tokens[: self.top_k]
            return self._nucleus(values.double().softmax(0), tokens)
        total = scores.logsumexp(0)
        count = min(_FIRST_LOOK, size)
        while True:
            values, tokens = scores.topk(count)
            probabilities = (values - total).double().exp()
            enough = float(probabilities.sum()) > self.top_p + _DOUBT
            if self.min_p:
                enough |= float(probabilities[-1]) < (self.min_p - _DOUBT) * float(probabilities[0])
            if count == size or enough:
                return self._nucleus(probabilities, tokens)
            count = min(8 * count, size)

    def _nucleus(self, probabilities: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A token stays if those before it make up less than top-p."""
        if self.top_p >= 1:
            return self._likely(probabilities, tokens)
        before = probabilities.cumsum(0) - probabilities
        kept = max(1, int((before < self.top_p).sum()))
        if bool(((before - self.top_p).abs() < _DOUBT).any()):
            return None
        if kept < len(probabilities) and probabilities[kept] == probabilities[kept - 1]:
            return None  # a tie: sorting decides
        return self._likely(probabilities[:kept], tokens[:kept])

    def _likely(self, probabilities: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A token stays if it is at least min-p times as likely as the first."""
        if not self.min_p:
            return tokens, probabilities
        above = probabilities / probabilities[0] - self.min_p
        if bool((above.abs() < _DOUBT).any()):
            return None
        kept = int((above > 0).sum())
        return tokens[:kept], probabilities[:kept]


def argmax(logits: torch.Tensor) -> list[int]:
    """Where each row is largest."""
    # numpy finds it in an eighth of the time, and on this thread alone.
    numpy_can = logits.device.type == "cpu" and logits.dtype == torch.float32
    found: list[int] = (logits.numpy() if numpy_can else logits).argmax(-1).tolist()
    return found


def _dense(tokens: torch.Tensor | None, weights: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """The probability of every token."""
    every = torch.zeros(vocabulary, dtype=torch.float64)
    every[slice(len(weights)) if tokens is None else tokens] = weights.double()
    return every / every.sum()


def _drawn(probabilities: torch.Tensor, generator: torch.Generator | None = None) -> int:
    """An index, drawn with these probabilities, which need not add up to one."""
    sums = probabilities.double().cumsum(0)
    at = int(torch.searchsorted(sums, torch.rand(1, dtype=torch.float64, generator=generator) * sums[-1], right=True))
    return min(at, len(sums) - 1)
