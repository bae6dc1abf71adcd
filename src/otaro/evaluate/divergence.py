"""How far a model's predictions are from a reference's, on a text.

Perplexity asks how well a model predicts a text; two models may do so equally well and yet differ. Divergence asks how much a
precision changes what the model says: at every position of the text both predict the next token, and compared are the two
distributions, by the Kullback-Leibler divergence from the reference in nats, and the two likeliest tokens, by whether they
agree. Both are means over all positions. Windows do not overlap, so a position sees the text from the start of its window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from otaro.errors import OtaroError
from otaro.evaluate.progress import Count

_AT_ONCE = 256  # positions compared together: a vocabulary is large

Logits = Callable[[torch.Tensor], torch.Tensor]
"""From token ids [1, tokens] to logits [1, tokens, vocabulary]: `lambda ids: model(ids, use_cache=False).logits`."""


@dataclass(frozen=True)
class Divergence:
    """Means over `tokens` positions."""

    kl: float
    agreement: float
    tokens: int


@torch.inference_mode()
def divergence(
    logits: Logits,
    reference: Logits,
    ids: torch.Tensor,
    *,
    window: int,
    progress: Count = lambda done, total: None,
) -> Divergence:
    """Divergence of `logits` from `reference` on the token ids [tokens]."""
    tokens = len(ids)
    if tokens < 1 or window < 1:
        raise OtaroError(f"divergence needs a token of text and a window of one at least, got {tokens} and {window}")
    kl, agreed = 0.0, 0
    for start in range(0, tokens, window):
        some = ids[start : start + window].unsqueeze(0)
        theirs, ours = reference(some)[0], logits(some)[0]
        for part in range(0, len(ours), _AT_ONCE):
            p, q = (rows[part : part + _AT_ONCE].float().log_softmax(-1) for rows in (theirs, ours))
            kl += float((p.exp() * (p - q)).sum(dtype=torch.float64))
            agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
        progress(min(start + window, tokens), tokens)
    return Divergence(kl / tokens, agreed / tokens, tokens)
