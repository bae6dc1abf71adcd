"""Perplexity of a causal language model on a text, by the usual sliding window.

Windows of `window` tokens start every `stride` tokens; of each, only the tokens that no earlier window has scored count, with
the rest as their context. The last window may be shorter. The result is exp of the mean loss over the counted tokens. This is
the computation of the transformers documentation, its weighting included: a window counts as many tokens as it has
labels, less the one that the shift by one leaves without a prediction.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from otaro.errors import OtaroError
from otaro.evaluate.progress import Count

LONGEST_WINDOW = 2048  # unless asked for more


def choose_window(config: Any, wanted: int | None = None) -> int:
    """The window to use with the model of this config: the one wanted, or as many positions as it has, up to 2048."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if wanted is None:
        return min(positions or LONGEST_WINDOW, LONGEST_WINDOW)
    if positions is not None and wanted > positions:
        raise OtaroError(f"a window of {wanted} tokens is more than the {positions} positions that this model has")
    return wanted


@torch.inference_mode()
def perplexity(
    model: Any,
    ids: torch.Tensor,
    *,
    window: int,
    stride: int | None = None,
    progress: Count = lambda done, total: None,
) -> float:
    """Perplexity on the token ids [tokens]; `stride` defaults to `window`, which is fastest and a little pessimistic."""
    stride = stride or window
    tokens = len(ids)
    if tokens < 2:
        raise OtaroError(f"perplexity needs at least 2 tokens of text, got {tokens}")
    if not 0 < stride <= window:
        raise OtaroError(f"the stride must be between 1 and the window of {window} tokens, got {stride}")
    loss_sum, counted, scored_to = 0.0, 0, 0
    for start in range(0, tokens, stride):
        end = min(start + window, tokens)
        inputs = ids[start:end].unsqueeze(0).to(model.device)
        labels = inputs.clone()
        labels[:, : -(end - scored_to)] = -100  # scored before, context now
        weight = int((labels != -100).sum()) - 1
        if weight > 0:
            loss_sum += float(model(inputs, labels=labels, use_cache=False).loss) * weight
            counted += weight
        scored_to = end
        progress(end, tokens)
        if end == tokens:
            break
    loss = loss_sum / counted
    return math.inf if loss > 700 else math.exp(loss)  # which a float cannot hold
