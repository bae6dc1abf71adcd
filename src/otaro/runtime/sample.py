"""Choosing the next token from logits.

transformers' warpers sort the whole vocabulary for every token, which for a small model takes as long as the model. `Sampler`
keeps exactly the tokens that they keep and gives them the same probabilities, but looks only at the likeliest few hundred.
Where rounding could decide whether a token is in or out, and for every processor it does not know, it asks transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

_FIRST_LOOK = 256  # tokens
_DOUBT = 1e-6  # of a probability: sums of float32 differ by no more


class Sampler:
    """Greedy, or drawing from what temperature, top-k, top-p and other processors leave."""

    scores: torch.Tensor
    """What the processors made of the last logits, [rows, vocabulary]; only with `exact_scores`."""

    def __init__(self, processors: Any, do_sample: bool, exact_scores: bool = False) -> None:
        self.processors, self.do_sample, self.exact_scores = LogitsProcessorList(processors), do_sample, exact_scores
        self.temperature, self.top_k, self.top_p = 1.0, 0, 1.0
        kinds = [type(processor) for processor in self.processors]
        order = [TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper]
        # In another order, or twice, they mean something else.
        self.known = not exact_scores and kinds == [kind for kind in order if kind in kinds]
        for processor in self.processors if self.known else ():
            if isinstance(processor, TemperatureLogitsWarper):
                self.temperature = processor.temperature
            elif isinstance(processor, TopKLogitsWarper):
                self.top_k = processor.top_k
            else:
                self.top_p = processor.top_p
                self.known = processor.min_tokens_to_keep == 1

    def choose(self, ids: torch.Tensor, logits: torch.Tensor) -> list[int]:
        """The next token of each row of `ids` [rows, n], given logits [rows, vocabulary], which may be on a GPU.

        There processors run too, as they may have tensors of their own; tokens are drawn on the CPU, so that a seed says the
        same again whatever else draws.
        """
        if self.known and not self.do_sample:
            chosen: list[int] = logits.argmax(-1).tolist()
            return chosen
        if self.known:
            return [self._drawn_after(ids[row : row + 1], one) for row, one in enumerate(logits.cpu())]
        self.scores = self.processors(ids, logits.clone())
        if not self.do_sample:
            chosen = self.scores.argmax(-1).tolist()
            return chosen
        return [_drawn(row) for row in self.scores.softmax(-1).cpu()]

    def _drawn_after(self, ids: torch.Tensor, logits: torch.Tensor) -> int:
        tokens, probabilities = self.distribution(ids, logits)
        at = _drawn(probabilities)
        return at if tokens is None else int(tokens[at])

    def distribution(self, ids: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The tokens that may be drawn (None: the whole vocabulary, in order), and their probabilities up to a factor."""
        if self.known and (self.top_k or self.top_p < 1):
            found = self._top(logits / self.temperature)
            if found is not None:
                return found
        elif self.known:
            return None, (logits / self.temperature).softmax(0)
        return None, self._processed(ids, logits).softmax(0)

    def _processed(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        self.scores = self.processors(ids, logits.clone().unsqueeze(0))
        return self.scores[0]

    def _top(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What top-k and top-p leave, the likeliest first; None where that is a matter of rounding."""
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
            if count == size or float(probabilities.sum()) > self.top_p + _DOUBT:
                return self._nucleus(probabilities, tokens)
            count = min(8 * count, size)

    def _nucleus(self, probabilities: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A token stays if those before it make up less than top-p."""
        if self.top_p >= 1:
            return tokens, probabilities
        before = probabilities.cumsum(0) - probabilities
        kept = max(1, int((before < self.top_p).sum()))
        if bool(((before - self.top_p).abs() < _DOUBT).any()):
            return None
        if kept < len(probabilities) and probabilities[kept] == probabilities[kept - 1]:
            return None  # a tie: sorting decides
        return tokens[:kept], probabilities[:kept]


def _drawn(probabilities: torch.Tensor) -> int:
    """A place, drawn with these probabilities, which need not add up to one."""
    sums = probabilities.double().cumsum(0)
    at = int(torch.searchsorted(sums, torch.rand(1, dtype=torch.float64) * sums[-1], right=True))
    return min(at, len(sums) - 1)
