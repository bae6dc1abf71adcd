"""The memory that a step of the GPU's decoder computes with: made once, so that captured graphs may point into it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from otaro.kernels.steps import MAX_TOKENS, Steps
from otaro.runtime.description import Description, Matrix


class Buffers:
    """What a step computes with, for 16 tokens."""

    def __init__(self, weights: Description, steps: Steps) -> None:
        first, device = weights.layers[0], weights.device
        hidden = weights.embedding.length
        of_queries, of_keys = weights.heads * weights.head_dim, weights.kv_heads * weights.head_dim

        def new(length: int, like: Matrix | None = None) -> torch.Tensor:
            plain = like is not None and like.plain is not None
            return torch.zeros(MAX_TOKENS, length, dtype=torch.float16 if plain else torch.float32, device=device)

        self.x, self.queries = new(hidden), new(of_queries)
        self.delta = new(hidden, first.output)
        self._sizes = (of_queries, of_keys, of_keys)
        self._fused = first.key is None
        width = first.down.length
        if self._fused:
            self.projected, self.gates = [new(sum(self._sizes), first.query)], [new(2 * width, first.gate)]
        else:
            self.projected = [new(size, first.query) for size in self._sizes]
            side_by_side = new(2 * width, first.gate)
            self.gates = [side_by_side[:, :width], side_by_side[:, width:]]
        self.logits = new(weights.lm_head.rows)
        self.half_logits = new(weights.lm_head.rows, weights.lm_head) if weights.lm_head.plain is not None else None
        self.hidden = steps.activations(MAX_TOKENS, hidden, first.query.group_size)
        self.attended = steps.activations(MAX_TOKENS, of_queries, first.output.group_size)
        self.gated = steps.activations(MAX_TOKENS, width, first.down.group_size)
        self.last = steps.activations(MAX_TOKENS, hidden, weights.lm_head.group_size)

    def vectors(self, tokens: int) -> Sequence[torch.Tensor]:
        """Queries, keys and values."""
        if self._fused:
            return list(self.projected[0][:tokens].split(self._sizes, 1))
        return [one[:tokens] for one in self.projected]

    def gate_and_up(self, tokens: int) -> Sequence[torch.Tensor]:
        """Both products of the gated layer."""
        if self._fused:
            return self.gates[0][:tokens].chunk(2, 1)
        return [one[:tokens] for one in self.gates]
