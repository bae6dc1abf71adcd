"""The steps of a decoder for prompts: many tokens of one sequence, by decoded weights and the library's attention.

Between products numbers are float32 as in a decoder's other steps; products and attention are in the model's
own type. Weights are decoded for one product and forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from otaro.kernels import ops
from otaro.kernels.kv_cache import KvCache
from otaro.kernels.packed import Packed, Stack
from otaro.kernels.steps import Activations, ReferenceSteps, Routing, Tokens, capped

CHUNK = 2048
"""Tokens read at a time."""
_SCORES = 1 << 26  # that are in memory at a time, where they are capped: the library's attention does not


class PromptSteps(ReferenceSteps):
    """For the tokens that come after `past` others of a sequence."""

    def __init__(self, device: torch.device, dtype: torch.dtype, sequence: int, past: int) -> None:
        super().__init__(device)
        self.product_dtype = dtype
        self._sequence, self._past = sequence, past
        self._chosen: list[tuple[int, torch.Tensor]] = []

    def embed(self, ids: torch.Tensor, weight: Packed | torch.Tensor, scale: float, x: torch.Tensor) -> None:
        """By the device's kernel."""
        x.copy_(weight[ids] if isinstance(weight, torch.Tensor) else ops.embedding(ids, *weight, torch.float32))
        if scale != 1:
            x *= scale

    def product(self, x: torch.Tensor, weight: Packed, bias: torch.Tensor | None = None) -> torch.Tensor:
        """In the model's type."""
        result: torch.Tensor = ops.linear(x, *weight, None if bias is None else bias.to(x.dtype))
        return result

    def write(
        self,
        cache: KvCache,
        layer: int,
        sequences: torch.Tensor,
        positions: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """All at once."""
        cache.write(0, layer, self._sequence, self._past, key)
        cache.write(1, layer, self._sequence, self._past, value)

    def attend(
        self, queries: torch.Tensor, tokens: Tokens, cache: KvCache, layer: int, window: int, cap: float, out: Activations
    ) -> None:
        """The library's attention, where scores are not capped."""
        # Keys are float16, or packed at less: bfloat16 could not hold them.
        kind = torch.float32 if self.product_dtype == torch.float32 else torch.float16
        end = self._past + len(queries)
        first = max(0, self._past + 1 - window) if window else 0
        keys, values = (cache.read(one, layer, self._sequence, slice(first, end), kind) for one in (0, 1))
        query = queries.unflatten(1, (-1, cache.head)).transpose(0, 1).to(kind)
        group = len(query) // cache.kv_heads
        if group > 1:
            keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        mask = None
        if self._past or window or cap:
            positions, seen = tokens.positions[:, None], torch.arange(first, end, device=queries.device)
            mask = seen <= positions
            if window:
                mask &= seen > positions - window
        if mask is not None and cap:
            size = max(1, _SCORES // (len(query) * (end - first)))
            some = [_capped(*both, keys, values, cap) for both in zip(query.split(size, 1), mask.split(size), strict=True)]
            result = torch.cat(some, 1)
        else:
            result = scaled_dot_product_attention(
                query[None], keys[None], values[None], attn_mask=mask, is_causal=mask is None, scale=1.0
            )[0]
        out.data.copy_(result.transpose(0, 1).flatten(1))

    def route(self, x: torch.Tensor, router: torch.Tensor, normalize: bool, routing: Routing) -> None:
        """And which pairs of a token and its expert each expert has."""
        scores = linear(x, router).softmax(-1)
        experts = scores.topk(routing.experts.shape[1], sorted=False).indices.sort().values
        weights = scores.gather(1, experts)
        routing.experts.copy_(experts)
        routing.weights.copy_(weights / weights.sum(-1, keepdim=True) if normalize else weights)
        order = experts.flatten().sort(stable=True)
        those, counts = (one.tolist() for one in order.values.unique_consecutive(return_counts=True))
        self._chosen = list(zip(those, order.indices.split(counts), strict=True))

    def multiply_experts(self, x: Activations, stacks: Sequence[Stack], outs: Sequence[torch.Tensor], routing: Routing) -> None:
        """Expert by expert, with all tokens that chose it."""
        each = routing.experts.numel() // len(x.data)
        for expert, pairs in self._chosen:
            rows = x.data[pairs // each]
            for stack, out in zip(stacks, outs, strict=True):
                out[pairs] = self.product(rows, stack.of(expert))


def _capped(query: torch.Tensor, mask: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cap: float) -> torch.Tensor:
    """Attention whose scores are capped, of queries [heads, tokens, head]."""
    scores = capped((query @ keys.transpose(1, 2)).float(), cap).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).to(values.dtype) @ values
