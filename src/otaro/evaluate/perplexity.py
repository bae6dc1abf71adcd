"""Perplexity of a causal language model on a text, by the usual sliding window.

Windows of `window` tokens start every `stride` tokens; of each, only the tokens that no earlier window has scored count, with
the rest as their context. The last window may be shorter. The result is exp of the mean loss over the counted tokens. This is
the computation of the transformers documentation, its weighting included: a window counts as many tokens as it has
labels, less the one that the shift by one leaves without a prediction. In windows that begin with a beginning-of-text token
(`evaluate.windows`) no token is left without one, and all count.

Losses are added up in float64, from logits in float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from otaro.evaluate.progress import Count
from otaro.evaluate.windows import ModelReader, Window, Windows, read


class Loss:
    """The mean loss of the tokens of a text."""

    aside = False

    def __init__(self, has_bos: bool) -> None:
        self._has_bos = has_bos
        self._sum = self._weight = 0.0
        self._window_sum, self._window_count = 0.0, 0

    def add(self, window: Window, first: int, states: torch.Tensor | None, logits: torch.Tensor | None) -> None:
        """Score the tokens after these positions, those that are to be scored."""
        assert logits is not None
        last = min(first + len(logits), len(window.ids) - 1)  # nothing follows the last position
        begin = min(max(first, window.known - 1, 0), last)
        if begin < last:
            rows = logits[begin - first : last - first].float()
            targets = window.ids[begin + 1 : last + 1].to(rows.device)
            losses = torch.nn.functional.cross_entropy(rows, targets, reduction="none")
            self._window_sum += float(losses.sum(dtype=torch.float64))
            self._window_count += last - begin
        if first + len(logits) == len(window.ids):
            weight = len(window.ids) - window.known - (not self._has_bos)
            if weight > 0:
                self._sum += self._window_sum / self._window_count * weight
                self._weight += weight
            self._window_sum, self._window_count = 0.0, 0

    @property
    def perplexity(self) -> float:
        """The result."""
        loss = self._sum / self._weight
        return math.inf if loss > 700 else math.exp(loss)  # which a float cannot hold


def perplexity(
    model: Any,
    ids: torch.Tensor,
    *,
    window: int,
    stride: int | None = None,
    bos: int | None = None,
    progress: Count = lambda done, total: None,
) -> float:
    """Perplexity on the token ids [tokens]; `stride` defaults to `window`, which is fastest and a little pessimistic."""
    windows = Windows(ids, window, stride, bos)
    loss = Loss(bos is not None)
    read(ModelReader(model, comparing=False), windows, [loss], progress)
    return loss.perplexity
