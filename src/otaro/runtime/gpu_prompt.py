"""The steps of a decoder for prompts: many tokens of one sequence, by decoded weights and the library's attention.

Between products numbers are float32 as in a decoder's other steps; products and attention are in the model's
own type. Weights are decoded for one product and forgotten; on a GPU of ours a second stream decodes those of
the next product meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import linear, scaled_dot_product_attention

from otaro.kernels import cuda, ops
from otaro.kernels.cuda_steps import CudaSteps
from otaro.kernels.kv_cache import KvCache
from otaro.kernels.nvrtc import Launch
from otaro.kernels.packed import Packed, Stack
from otaro.kernels.steps import Activations, ReferenceSteps, Routing, Tokens, capped

CHUNK = 4096
"""Tokens read at a time."""
_LAUNCHES = 4096  # that are known at most
_SCORES = 1 << 26  # that are in memory at a time, where they are capped: the library's attention does not


Launches = dict[tuple[Any, ...], list[Launch]]
"""Of a decoder, by the addresses of the weights that are decoded and of what they are decoded into."""


class _Attention:
    """Of the tokens that come after `past` others of a sequence, by the library."""

    product_dtype: torch.dtype

    def __init__(self, dtype: torch.dtype, sequence: int, past: int) -> None:
        self.product_dtype = dtype
        self._sequence, self._past = sequence, past

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
        if group > 1 and (self._past or cap):  # else the library shares them out itself
            keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        mask: torch.Tensor | None = causal_lower_right(len(queries), end - first) if self._past else None
        if cap or window:
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
                query[None], keys[None], values[None], attn_mask=mask, is_causal=mask is None, scale=1.0,
                enable_gqa=len(keys) < len(query),
            )[0]  # fmt: skip
        out.data.copy_(result.transpose(0, 1).flatten(1))


class PromptSteps(_Attention, ReferenceSteps):
    """In torch, on any device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, sequence: int, past: int) -> None:
        ReferenceSteps.__init__(self, device)
        _Attention.__init__(self, dtype, sequence, past)
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


class CudaPromptSteps(_Attention, CudaSteps):
    """By kernels; of models without experts, in float16 or bfloat16."""

    def __init__(self, device: torch.device, dtype: torch.dtype, sequence: int, past: int, known: Launches) -> None:
        CudaSteps.__init__(self, device)
        _Attention.__init__(self, dtype, sequence, past)
        self._known = known
        self._stream = torch.cuda.Stream(device)
        self._buffers = [_Buffer(torch.empty(0, dtype=dtype, device=device), *_events()) for _ in range(2)]
        self._turn = 0

    def activations(self, tokens: int, length: int, group_size: int | None) -> Activations:
        """As plain weights want them: none here meets integers."""
        kind = torch.float16 if group_size is None else self.product_dtype
        return Activations(length, None, torch.empty(tokens, length, dtype=kind, device=self.device))

    def multiply(
        self,
        x: Activations,
        weights: Sequence[Packed | torch.Tensor],
        outs: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
    ) -> None:
        """Products that lie side by side are one of the library's."""
        packed = [weight for weight in weights if isinstance(weight, Packed)]
        if len(packed) < len(weights):
            super().multiply(x, weights, outs, biases)
        elif len(packed) > 1 and not any(bias is not None for bias in biases) and _side_by_side(outs):
            tokens, rows = len(outs[0]), sum(out.shape[1] for out in outs)
            self._multiply(x.data, packed, outs[0].as_strided((tokens, rows), outs[0].stride()), None)
        else:
            for weight, out, bias in zip(packed, outs, biases, strict=True):
                self._multiply(x.data, [weight], out, bias)

    def _multiply(self, x: torch.Tensor, packed: list[Packed], out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Where the library still multiplies with the last weights, the next are decoded beside that."""
        rows, length = sum(len(one.base) for one in packed), packed[0].length
        now = torch.cuda.current_stream(self.device)
        self._turn ^= 1
        values, decoded, multiplied = self._buffers[self._turn]
        if values.numel() < rows * length:
            values, decoded, multiplied = torch.empty(rows * length, dtype=values.dtype, device=self.device), *_events()
            self._buffers[self._turn] = _Buffer(values, decoded, multiplied)
            multiplied.record(now)  # whatever had this memory before is done then
        matrix = values[: rows * length].view(rows, length)
        self._stream.wait_event(multiplied)
        for launch in self._decoding(packed, matrix):
            launch(self._stream)
        decoded.record(self._stream)
        now.wait_event(decoded)
        if bias is None:
            torch.mm(x, matrix.t(), out=out)
        else:
            torch.addmm(bias.to(x.dtype), x, matrix.t(), out=out)
        multiplied.record(now)

    def _decoding(self, packed: list[Packed], matrix: torch.Tensor) -> list[Launch]:
        """Launches, found again where addresses are those of an earlier prompt: making one takes longer than it."""
        addresses = [part.data_ptr() for one in packed for part in (one.base, one.scales, *one.planes)]
        key = (matrix.data_ptr(), *(len(one.base) for one in packed), packed[0].length, *addresses)
        if key not in self._known:
            if len(self._known) > _LAUNCHES:
                self._known.clear()
            parts = matrix.split([len(one.base) for one in packed])
            self._known[key] = [cuda.decoding(one, part) for one, part in zip(packed, parts, strict=True)]
        return self._known[key]


class _Buffer(NamedTuple):
    """For decoded weights."""

    values: torch.Tensor
    decoded: torch.cuda.Event
    multiplied: torch.cuda.Event


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(), torch.cuda.Event()


def _side_by_side(outs: Sequence[torch.Tensor]) -> bool:
    """Whether they are neighbouring columns of one tensor."""
    return all(
        one.stride() == next_one.stride() and one.data_ptr() + one.shape[1] * one.element_size() == next_one.data_ptr()
        for one, next_one in pairwise(outs)
    )


def _capped(query: torch.Tensor, mask: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cap: float) -> torch.Tensor:
    """Attention whose scores are capped, of queries [heads, tokens, head]."""
    scores = capped((query @ keys.transpose(1, 2)).float(), cap).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).to(values.dtype) @ values
