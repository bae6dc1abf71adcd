"""The layers of a described model, step by step: the only place where they are written down for a GPU.

Single tokens and prompts differ in the steps that they are given, `kernels.steps` or `gpu_prompt`. What is
computed with are buffers that are made once, so that captured graphs may point into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch

from otaro.errors import OtaroError
from otaro.kernels.kv_cache import KvCache
from otaro.kernels.steps import MAX_TOKENS, Activations, Delta, Rope, Routing, Steps, Tokens, rows_of
from otaro.runtime.description import MATRICES, Description, Experts, Layer, Matrix


class Span(NamedTuple):
    """Neighbouring tokens of a step that have the same precisions."""

    some: slice
    bits: bytes
    """Mantissa bits of embedding, matrices and head."""


class RopeTables:
    """The rope of each layer, for so many positions."""

    def __init__(self, weights: Description, positions: int) -> None:
        self.positions = positions
        tables = [[table.contiguous() for table in rope.tables(positions)] for rope in weights.ropes]
        ropes = [Rope(cosines, sines, weights.scale, weights.eps) for cosines, sines in tables]
        none = Rope(None, None, weights.scale, weights.eps)
        self.of_layer = [none if layer.rope is None else ropes[layer.rope] for layer in weights.layers]


@dataclass
class _Gated:
    """Buffers of gated products: with a row for each token, or for each of a token's experts."""

    projected: list[torch.Tensor]
    """Gate and up side by side, as one or as two."""
    gate: torch.Tensor
    up: torch.Tensor
    result: Activations
    parts: torch.Tensor | None = None
    """What experts give."""
    routing: Routing | None = None


class Layers:
    """All layers, for so many tokens at most."""

    def __init__(self, weights: Description, steps: Steps, tokens: int = MAX_TOKENS) -> None:
        self.weights, self.steps, self._tokens = weights, steps, tokens
        first, hidden = weights.layers[0], weights.embedding.length
        of_queries, of_keys = weights.heads * weights.head_dim, weights.kv_heads * weights.head_dim
        self.x = self._new(hidden)
        self._queries = torch.zeros(tokens, of_queries, dtype=steps.query_dtype, device=weights.device)
        self.delta = self._new(hidden, first.output)
        """What the last layer has still to add to x."""
        sizes = (of_queries, of_keys, of_keys)
        all_three = self._new(sum(sizes), first.query)
        self._vectors = list(all_three.split(sizes, 1))
        self._projected = [all_three] if first.key is None else self._vectors
        self._hidden = steps.activations(tokens, hidden, first.query.group_size)
        self._attended = steps.activations(tokens, of_queries, first.output.group_size)
        self._gated: dict[tuple[int, int], _Gated] = {}
        for layer in weights.layers:
            key = _kind(layer)
            if key not in self._gated:
                self._gated[key] = self._new_gated(layer)
        routed = any(layer.experts is not None for layer in weights.layers)
        self._floats = self._new(hidden) if routed else None

    def _new(self, length: int, like: Matrix | None = None, rows: int = 1) -> torch.Tensor:
        """A buffer for float32 numbers, or for products with such a matrix; `rows` for each token."""
        kind = torch.float32
        if like is not None:
            kind = torch.float16 if like.plain is not None else self.steps.product_dtype
        return torch.zeros(self._tokens * rows, length, dtype=kind, device=self.weights.device)

    def _new_gated(self, layer: Layer) -> _Gated:
        width, each = _kind(layer)
        rows = max(each, 1)
        both = self._new(2 * width, layer.gate, rows)
        gate, up = both.chunk(2, 1)
        result = self.steps.activations(self._tokens * rows, width, layer.down.group_size)
        made = _Gated([both] if layer.up is None else [gate, up], gate, up, result)
        if each:
            if layer.gate.plain is not None:
                raise OtaroError("the decoder multiplies with experts that are packed; pack this model")
            shape, device = (self._tokens, each), self.weights.device
            experts = torch.zeros(shape, dtype=torch.int32, device=device)
            made.routing = Routing(experts, torch.zeros(shape, device=device))
            made.parts = self._new(self.weights.embedding.length, layer.down, each)
        return made

    def run(self, count: int, tokens: Tokens, spans: list[Span], ropes: RopeTables, cache: KvCache) -> None:
        """What the layers make of the first tokens is x and delta; keys and values go into the cache."""
        steps, weights, some = self.steps, self.weights, slice(0, count)
        x, queries, added = (rows_of(one, some) for one in (self.x, self._queries, self.delta))
        vectors, attended = [rows_of(one, some) for one in self._vectors], self._attended.rows(some)
        for few, bits in parts_of(spans, [0]):
            steps.embed(tokens.ids[few], weights.embedding.at(bits[0]), weights.embedding_scale, x[few])
        delta = None
        for number, layer in enumerate(weights.layers):
            first = 1 + len(MATRICES) * number
            hidden = self._normed(x, delta, layer.attention_norm)
            multiply(steps, hidden, layer.those("query", "key", "value", first=first), self._projected, spans)
            norms = (layer.query_norm, layer.key_norm)
            steps.rope_and_cache(vectors, norms, ropes.of_layer[number], tokens, queries, cache, number)
            steps.attend(queries, tokens, cache, number, layer.window, weights.attention_cap, attended)
            multiply(steps, attended, [(layer.output, first + 3)], [self.delta], spans)
            delta = Delta(added, layer.attention_output_norm, weights.residual_scale)
            floats = None if layer.experts is None or self._floats is None else self._floats[some]
            hidden = self._normed(x, delta, layer.mlp_norm, floats)
            if layer.experts is None:
                self._mlp(count, hidden, layer, first + 4, spans)
            else:
                self._experts(count, hidden, layer, layer.experts, first + 4, spans)
            delta = Delta(added, layer.mlp_output_norm, weights.residual_scale)

    def last_delta(self, some: slice) -> Delta:
        """What is still to be added to x, of some tokens."""
        return Delta(self.delta[some], self.weights.layers[-1].mlp_output_norm, self.weights.residual_scale)

    def _normed(
        self,
        x: torch.Tensor,
        delta: Delta | None,
        norm: torch.Tensor | None,
        floats: torch.Tensor | None = None,
    ) -> Activations:
        hidden = self._hidden.rows(slice(0, len(x)))
        self.steps.rms_norm(x, delta, norm, self.weights.eps, hidden, floats)
        return hidden

    def _mlp(self, count: int, hidden: Activations, layer: Layer, first: int, spans: list[Span]) -> None:
        gated, some = self._gated[_kind(layer)], slice(0, count)
        multiply(self.steps, hidden, layer.those("gate", "up", first=first), gated.projected, spans)
        result = gated.result.rows(some)
        self.steps.quantize(
            rows_of(gated.gate, some), result, rows_of(gated.up, some), self.weights.activation
        )
        multiply(self.steps, result, [(layer.down, first + 2)], [self.delta], spans)

    def _experts(
        self, count: int, hidden: Activations, layer: Layer, experts: Experts, first: int, spans: list[Span]
    ) -> None:
        steps, gated, each = self.steps, self._gated[_kind(layer)], experts.chosen
        assert self._floats is not None
        assert gated.routing is not None
        assert gated.parts is not None
        routing, some = gated.routing.rows(slice(0, count)), slice(0, count * each)
        steps.route(self._floats[:count], experts.router, experts.normalize, routing)
        self._multiply_experts(
            hidden, 1, layer.those("gate", "up", first=first), gated.projected, spans, routing
        )
        result = gated.result.rows(some)
        steps.quantize(gated.gate[some], result, gated.up[some], self.weights.activation)
        self._multiply_experts(result, each, [(layer.down, first + 2)], [gated.parts], spans, routing)
        steps.add_experts(gated.parts[some], routing, self.delta[:count])

    def _multiply_experts(
        self,
        x: Activations,
        rows: int,
        matrices: list[tuple[Matrix, int]],
        outs: Sequence[torch.Tensor],
        spans: list[Span],
        routing: Routing,
    ) -> None:
        """As `multiply`; x has so many rows for each token, outs one for each of its experts."""
        each = routing.experts.shape[1]
        for some, bits in parts_of(spans, [number for _, number in matrices]):
            self.steps.multiply_experts(
                x.rows(slice(some.start * rows, some.stop * rows)),
                [matrix.stack(m) for (matrix, _), m in zip(matrices, bits, strict=True)],
                [out[some.start * each : some.stop * each] for out in outs],
                routing.rows(some),
            )


class Head:
    """The last norm and logits, of up to 16 tokens."""

    def __init__(self, weights: Description, steps: Steps) -> None:
        self.weights, self.steps, head = weights, steps, weights.lm_head
        self.logits = torch.zeros(MAX_TOKENS, head.rows, device=weights.device)
        self._products = self.logits if head.plain is None else self.logits.half()
        self._hidden = steps.activations(MAX_TOKENS, weights.embedding.length, head.group_size)

    def run(self, some: slice, x: torch.Tensor, delta: Delta, spans: list[Span]) -> None:
        """Of some tokens, whose x and delta are given."""
        weights = self.weights
        self.steps.rms_norm(x, delta, weights.norm, weights.eps, self._hidden.rows(some))
        number = 1 + len(MATRICES) * len(weights.layers)
        multiply(self.steps, self._hidden, [(weights.lm_head, number)], [self._products], spans)
        if self._products is not self.logits:
            self.logits[some] = self._products[some]
        if weights.logit_scale != 1 or weights.logit_cap:
            self.steps.cap_logits(self.logits[some], weights.logit_scale, weights.logit_cap)


def multiply(
    steps: Steps,
    x: Activations,
    matrices: list[tuple[Matrix, int]],
    outs: Sequence[torch.Tensor],
    spans: list[Span],
) -> None:
    """Products of some matrices, each with its number among the precisions, once for each precision."""
    for some, bits in parts_of(spans, [number for _, number in matrices]):
        steps.multiply(
            x.rows(some),
            [matrix.at(m) for (matrix, _), m in zip(matrices, bits, strict=True)],
            [rows_of(out, some) for out in outs],
            [matrix.bias for matrix, _ in matrices],
        )


def parts_of(spans: list[Span], numbers: list[int]) -> list[tuple[slice, bytes]]:
    """Neighbours that agree in the precisions of these matrices."""
    if len(spans) == 1:
        return [(spans[0].some, bytes([spans[0].bits[number] for number in numbers]))]
    parts = []
    for bits, same in groupby(spans, key=lambda span: bytes(span.bits[number] for number in numbers)):
        few = list(same)
        parts.append((slice(few[0].some.start, few[-1].some.stop), bits))
    return parts


def _kind(layer: Layer) -> tuple[int, int]:
    """The width of its gated products, and how many experts a token has."""
    return layer.down.length, 0 if layer.experts is None else layer.experts.chosen
