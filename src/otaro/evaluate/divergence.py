"""How far a model's predictions are from a reference's, on a text.

Perplexity asks how well a model predicts a text; two models may do so equally well and yet differ. Divergence asks how much a
precision changes what the model says: at every position of the text both predict the next token, and compared are the two
distributions, by the Kullback-Leibler divergence from the reference in nats, and the two likeliest tokens, by whether they
agree. Both are means over all positions. Windows do not overlap, so a position sees the text from the start of its window.

The reference reads the text first, and may then go: `KeptStates` has what its head needs to say again what it said.
"""

from __future__ import annotations

import torch

from otaro.evaluate.logits import KeptStates
from otaro.evaluate.windows import Window


class Keeper:
    """Keeps the states of the reference."""

    aside = True

    def __init__(self, kept: KeptStates) -> None:
        self._kept = kept

    def add(self, window: Window, first: int, states: torch.Tensor | None, logits: torch.Tensor | None) -> None:
        """Keep them."""
        assert states is not None
        self._kept.keep(states)


class Divergence:
    """The divergence of a model from a reference that has read the same windows."""

    aside = True

    def __init__(self, reference: KeptStates) -> None:
        self._reference = reference
        self._kl, self._agreed, self.tokens = 0.0, 0, 0

    def add(self, window: Window, first: int, states: torch.Tensor | None, logits: torch.Tensor | None) -> None:
        """Compare these positions."""
        assert logits is not None
        q = logits.float().log_softmax(-1)
        p = self._reference.logits(window.position + first, len(logits), logits.device).float().log_softmax(-1)
        self._agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
        self._kl += float((p.exp() * p.sub(q)).sum(dtype=torch.float64))
        self.tokens += len(logits)

    @property
    def kl(self) -> float:
        """In nats."""
        return self._kl / self.tokens

    @property
    def agreement(self) -> float:
        """How often the likeliest token is the same."""
        return self._agreed / self.tokens
