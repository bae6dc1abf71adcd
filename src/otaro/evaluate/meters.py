"""What is asked of a model's predictions on a text: perplexity, and divergence from a reference.

Perplexity is that of the usual sliding window. Windows of `window` tokens start every `stride` tokens; of
each, only the tokens that no earlier window has scored count, with the rest as their context. The last window
may be shorter. The result is exp of the mean loss over the counted tokens. This is the computation of the
transformers documentation, its weighting included: a window counts as many tokens as it has labels, less the
one that the shift by one leaves without a prediction. In windows that begin with a beginning-of-text token
(`evaluate.windows`) no token is left without one, and all count. Losses are added up in float64, from logits
in float32.

Perplexity asks how well a model predicts a text; two models may do so equally well and yet differ. Divergence
asks how much a precision changes what the model says: at every position of the text both predict the next
token, and compared are the two distributions, by the Kullback-Leibler divergence from the reference in nats,
and the two likeliest tokens, by whether they agree. Both are means over all positions. Windows do not
overlap, so a position sees the text from the start of its window. The reference reads the text first, and may
then go: `KeptStates` has what its head needs to say again what it said.
"""

from __future__ import annotations

import math

import torch

from otaro.evaluate.logits import KeptStates
from otaro.evaluate.windows import AtPositions, Window


class Loss:
    """The mean loss of the tokens of a text."""

    aside = False

    def __init__(self, has_bos: bool) -> None:
        self._has_bos = has_bos
        self._sum = self._weight = 0.0
        self._window_sum, self._window_count = 0.0, 0

    def add(self, window: Window, first: int, states: AtPositions, logits: AtPositions) -> None:
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


class Divergence:
    """The divergence of a model from a reference that has read the same windows."""

    aside = True

    def __init__(self, reference: KeptStates) -> None:
        self._reference = reference
        self._kl, self._agreed, self.tokens = 0.0, 0, 0

    def add(self, window: Window, first: int, states: AtPositions, logits: AtPositions) -> None:
        """Compare these positions."""
        assert logits is not None
        p = self._reference.logits(window.position + first, len(logits), logits.device)
        p, q = p.float().log_softmax(-1), logits.float().log_softmax(-1)
        self._agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
        probabilities = p.exp()
        self._kl += float(p.sub_(q).mul_(probabilities).sum(dtype=torch.float64))
        self.tokens += len(logits)

    @property
    def kl(self) -> float:
        """In nats."""
        return self._kl / self.tokens

    @property
    def agreement(self) -> float:
        """How often the likeliest token is the same."""
        return self._agreed / self.tokens
