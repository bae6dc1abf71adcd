"""The steps of a decoder for prompts: many tokens of one sequence, by decoded weights and the library's
attention.

Between products numbers are float32 as in a decoder's other steps; products and attention are in the model's
own type. Weights are decoded for one product and forgotten; on a GPU of ours a second stream decodes those of
the next layer while those of this one are multiplied with. Short prompts can be multiplied straight from the
planes.

A prompt of some hundred tokens takes a GPU no longer than it takes the host to ask for it. So what is asked
for at every layer is made once for all of them (`CudaPromptSteps`), and but for addresses stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import linear, scaled_dot_product_attention

from otaro.kernels import cuda, halves, hopper_halves, nvrtc, ops
from otaro.kernels.cuda_steps import CudaSteps, cache_rows
from otaro.kernels.kv_cache import KvCache
from otaro.kernels.packed import Packed, Stack
from otaro.kernels.steps import Activations, Delta, ReferenceSteps, Rope, Routing, Tokens, capped
from otaro.runtime.description import MATRICES, Description, Layer

CHUNK = 4096
"""Tokens read at a time."""
STRAIGHT = 128
"""Up to so many tokens are multiplied straight from the planes."""
_PARTS = 4096  # that are known at most
_ALIGNED = 128  # numbers, so that the library finds a decoded matrix as it finds a tensor
_PRODUCTS = (((0, 3), (3, 4)), ((4, 6),), ((6, 7),))  # of a layer, by their matrices' numbers, part by part
_TURNS = len(_PRODUCTS)
_SCORES = 1 << 26  # that are in memory at a time, where they are capped: the library's attention does not


class _Attention:
    """Of the tokens that come after `past` others of a sequence, by the library."""

    product_dtype: torch.dtype

    def __init__(self, dtype: torch.dtype, sequence: int, past: int) -> None:
        self.product_dtype = dtype
        self._sequence, self._past = sequence, past

    def attend(
        self,
        queries: torch.Tensor,
        tokens: Tokens,
        cache: KvCache,
        layer: int,
        window: int,
        cap: float,
        out: Activations,
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
            some = [
                _capped(*both, keys, values, cap)
                for both in zip(query.split(size, 1), mask.split(size), strict=True)
            ]
            result = torch.cat(some, 1)
        else:
            result = scaled_dot_product_attention(
                query[None], keys[None], values[None], attn_mask=mask, is_causal=mask is None, scale=1.0,
                enable_gqa=len(keys) < len(query),
            )[0]  # fmt: skip
        out.data, out.arranged = result.transpose(0, 1).flatten(1).to(out.data.dtype), 0


class PromptSteps(_Attention, ReferenceSteps):
    """In torch, on any device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, sequence: int, past: int) -> None:
        ReferenceSteps.__init__(self, device)
        _Attention.__init__(self, dtype, sequence, past)
        self._chosen: list[tuple[int, torch.Tensor]] = []

    def embed(self, ids: torch.Tensor, weight: Packed | torch.Tensor, scale: float, x: torch.Tensor) -> None:
        """By the device's kernel."""
        x.copy_(
            weight[ids] if isinstance(weight, torch.Tensor) else ops.embedding(ids, *weight, torch.float32)
        )
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

    def multiply_experts(
        self, x: Activations, stacks: Sequence[Stack], outs: Sequence[torch.Tensor], routing: Routing
    ) -> None:
        """Expert by expert, with all tokens that chose it."""
        each = routing.experts.numel() // len(x.data)
        for expert, pairs in self._chosen:
            rows = x.data[pairs // each]
            for stack, out in zip(stacks, outs, strict=True):
                out[pairs] = self.product(rows, stack.of(expert))


class Part:
    """Matrices that are decoded at once: products, each of matrices whose rows follow one another."""

    def __init__(self, products: Sequence[Sequence[Packed]], dtype: torch.dtype) -> None:
        self.size = 0
        """In numbers."""
        self.places: dict[int, int] = {}
        """Where each matrix begins, by the address of its base."""
        for matrices in products:
            for one in matrices:
                self.places[one.base.data_ptr()] = self.size
                self.size += len(one.base) * one.length
            self.size += -self.size % _ALIGNED
        by_kind: dict[Any, list[Packed]] = {}
        for one in chain(*products):
            by_kind.setdefault((one.bits, one[3:6]), []).append(one)
        self._launches = [
            (cuda.decoding(same, dtype), [dtype.itemsize * self.places[one.base.data_ptr()] for one in same])
            for same in by_kind.values()
        ]

    def decode(self, address: int, stream: int) -> None:
        """Into this memory, on the stream with this handle."""
        for launch, places in self._launches:
            for number, place in enumerate(places):
                launch.fields.out[number] = address + place
            launch.on(stream)


class Parts:
    """Of a model, three to a layer: what attention multiplies with, gate and up, down."""

    def __init__(self, description: Description) -> None:
        self._description = description
        self._known: dict[tuple[int, bytes], Part] = {}
        self._last: tuple[bytes, list[Part]] = (b"", [])
        self._stream: Any = None
        matrices = [matrix for layer in description.layers for matrix, _ in layer.those(*MATRICES, first=0)]
        self._scratch, self._made = cuda.Scratch(description.device), dict[tuple[int, ...], nvrtc.Launch]()
        self._arranged: dict[bytes, bool] = {}
        self._served = description.dtype == torch.float16 and all(
            one.group_size is None or (one.group_size % halves.UNIT == 0 and one.length % 8 == 0)
            for one in matrices
        )

    def of(self, bits: bytes, tokens: int) -> Ahead | Straight:
        """What a chunk of so many tokens is multiplied with."""
        if not self._served or tokens > STRAIGHT:
            return self.ahead(bits)
        if bits not in self._arranged:
            layers = enumerate(self._description.layers)
            those = [
                one for n, layer in layers for one in layer.those(*MATRICES, first=1 + len(MATRICES) * n)
            ]
            seen = [matrix.at(bits[number]) for matrix, number in those]
            packed = [one for one in seen if isinstance(one, Packed)]
            self._arranged[bits] = len(packed) == len(seen) and hopper_halves.serves(packed)
        return Straight(
            self._scratch, self._made, hopper_halves.columns_of(tokens) if self._arranged[bits] else 0
        )

    def ahead(self, bits: bytes) -> Ahead:
        """All parts at these precisions, for a chunk."""
        device, dtype = self._description.device, self._description.dtype
        self._stream = self._stream or torch.cuda.Stream(device)
        return Ahead(self.at(bits), self._stream, device, dtype)

    def at(self, bits: bytes) -> list[Part]:
        """In the order in which they are needed, where matrices are packed at all; made once."""
        if self._last[0] == bits:
            return self._last[1]
        if len(self._known) > _PARTS:
            self._known.clear()
        found = []
        for number, layer in enumerate(self._description.layers):
            first = 1 + len(MATRICES) * number
            for products in _PRODUCTS:
                start, end = first + products[0][0], first + products[-1][1]
                key = (start, bits[start:end])
                if key not in self._known:
                    self._known[key] = self._part(layer, first, products, bits)
                found.append(self._known[key])
        self._last = (bits, [part for part in found if part.size])
        return self._last[1]

    def _part(self, layer: Layer, first: int, products: Sequence[tuple[int, int]], bits: bytes) -> Part:
        made = []
        for start, end in products:
            those = layer.those(*MATRICES[start:end], first=first + start)
            seen = [matrix.at(bits[number]) for matrix, number in those]
            made.append([one for one in seen if isinstance(one, Packed)])
        return Part(made, self._description.dtype)


class Ahead:
    """Decodes parts by another stream, up to a layer ahead of what torch's current one multiplies with."""

    def __init__(self, parts: Sequence[Part], stream: Any, device: torch.device, dtype: torch.dtype) -> None:
        self._parts, self._number, self._left = parts, -1, 0
        self._now, self._stream = torch.cuda.current_stream(device), stream
        self._decoded, self._multiplied = ([torch.cuda.Event() for _ in _PRODUCTS] for _ in range(2))
        self._views: dict[tuple[int, ...], torch.Tensor] = {}
        self._buffers = []
        for turn in range(_TURNS):
            size = max((part.size for part in parts[turn::_TURNS]), default=0)
            # Memory of the other stream: it has its next owner there, should a prompt be given up while it is
            # written to.
            with torch.cuda.stream(stream):
                self._buffers.append(torch.empty(size, dtype=dtype, device=device))
            self._multiplied[turn].record(self._now)  # whatever had this memory before is done then
            self._decode(turn)

    def matrix(self, weight: Packed, rows: int) -> torch.Tensor:
        """Decoded, and what follows up to so many rows, transposed. What is launched next may read it."""
        if not self._left:
            self._number += 1
            self._left = len(self._parts[self._number].places)
            self._now.wait_event(self._decoded[self._number % _TURNS])
        turn, place = self._number % _TURNS, self._parts[self._number].places[weight.base.data_ptr()]
        key = (turn, place, rows, weight.length)
        if key not in self._views:
            values = self._buffers[turn][place : place + rows * weight.length]
            self._views[key] = values.view(rows, weight.length).t()
        return self._views[key]

    def done(self, matrices: int) -> None:
        """With so many; where it was the last of its part, that of the next layer is decoded over it."""
        self._left -= matrices
        if not self._left:
            self._multiplied[self._number % _TURNS].record(self._now)
            self._decode(self._number + _TURNS)

    def _decode(self, number: int) -> None:
        if number < len(self._parts):
            turn = number % _TURNS
            self._stream.wait_event(self._multiplied[turn])
            self._parts[number].decode(self._buffers[turn].data_ptr(), self._stream.cuda_stream)
            self._decoded[turn].record(self._stream)


class Straight:
    """Products with few enough tokens to take weights as packed; launches are made once for all prompts."""

    def __init__(
        self, scratch: cuda.Scratch, made: dict[tuple[int, ...], nvrtc.Launch], arranged: int
    ) -> None:
        self._scratch, self._made, self.arranged = scratch, made, arranged
        """Tokens of a pass, where kernels before it may leave activations in the order of Hopper's kernel."""

    def multiply(
        self,
        activations: Activations,
        weights: Sequence[Packed],
        outs: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        stream: int,
    ) -> None:
        """Matrices of one form, on the stream with this handle."""
        x, arranged, now = activations.data, activations.arranged, len(outs[0])
        tokens, bits = halves.as_many(now), weights[0].bits
        parts = [part for one in weights for part in (one.base, one.scales, *one.planes)]
        key = (
            tokens,
            arranged,
            bits,
            *(0 if part is None else part.data_ptr() for part in (*parts, *biases)),
        )
        if key not in self._made:
            if len(self._made) > _PARTS:
                self._made.clear()
            self._made[key] = cuda.halves_launch(
                tokens, weights, outs[0].dtype, self._scratch, biases, arranged=arranged > 0
            )
        launch = self._made[key]
        fields = launch.fields
        fields.tokens, fields.x = now, x.data_ptr()
        for number, out in enumerate(outs):
            fields.out[number], fields.stride[number] = out.data_ptr(), out.stride(0)
        launch.on(stream)


class CudaPromptSteps(_Attention, CudaSteps):
    """By kernels; of models without experts, in float16 or bfloat16. For one chunk, in its GPU's context."""

    query_dtype = torch.float16

    def __init__(
        self, device: torch.device, dtype: torch.dtype, sequence: int, past: int, weights: Ahead | Straight
    ) -> None:
        CudaSteps.__init__(self, device)
        _Attention.__init__(self, dtype, sequence, past)
        if device.type == "cuda":
            nvrtc.enter_context(self._gpu)
        self._weights = weights
        self._stream = torch.cuda.current_stream(device).cuda_stream
        self._made: dict[tuple[Any, ...], nvrtc.Launch] = {}

    def activations(self, tokens: int, length: int, group_size: int | None) -> Activations:
        """As plain weights want them: none here meets integers."""
        kind = torch.float16 if group_size is None else self.product_dtype
        arranged = self._weights.arranged if isinstance(self._weights, Straight) else 0
        tokens += -tokens % max(arranged, 1)
        return Activations(
            length, None, torch.empty(tokens, length, dtype=kind, device=self.device), arranged
        )

    def rms_norm(
        self,
        x: torch.Tensor,
        delta: Delta | None,
        weight: torch.Tensor | None,
        eps: float,
        out: Activations,
        floats: torch.Tensor | None = None,
    ) -> None:
        """The first of its kind, with other weights."""
        values, norm, scale = delta or (None, None, 1.0)
        key = (
            "rms_norm",
            x.data_ptr(),
            _address(values),
            out.data.data_ptr(),
            weight is None,
            norm is None,
            eps,
            scale,
        )
        launch = self._made.get(key)
        if launch is None:
            launch = self._made[key] = self._rms_norm(x, delta, weight, eps, out, floats)
        launch.fields.weight, launch.fields.delta_weight = _address(weight), _address(norm)
        launch.on(self._stream)

    def rope_and_cache(
        self,
        vectors: Sequence[torch.Tensor],
        norms: Sequence[torch.Tensor | None],
        rope: Rope,
        tokens: Tokens,
        queries: torch.Tensor,
        cache: KvCache,
        layer: int,
    ) -> None:
        """The first of its kind, with another layer's norms and cache."""
        sizes = [0 if norm is None else norm.shape[0] for norm in norms]
        key = ("rope_and_cache", vectors[0].data_ptr(), queries.data_ptr(), _address(rope.cosines), *sizes)
        launch = self._made.get(key)
        if launch is None:
            launch = self._made[key] = self._rope_and_cache(
                vectors, norms, rope, tokens, queries, cache, layer
            )
        fields = launch.fields
        fields.norms[0], fields.norms[1] = _address(norms[0]), _address(norms[1])
        fields.rows[0], fields.rows[1] = (cache_rows("decode.cu", cache, kind, layer) for kind in (0, 1))
        if cache.offsets is not None:
            fields.offsets = cache.offsets[layer].data_ptr()
        launch.on(self._stream)

    def quantize(
        self, x: torch.Tensor, out: Activations, up: torch.Tensor | None = None, activation: str = "silu"
    ) -> None:
        """The first of its kind."""
        key = ("quantize", x.data_ptr(), out.data.data_ptr(), _address(up))
        launch = self._made.get(key)
        if launch is None:
            launch = self._made[key] = self._quantize(x, out, up, activation)
        launch.on(self._stream)

    def multiply(
        self,
        x: Activations,
        weights: Sequence[Packed | torch.Tensor],
        outs: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
    ) -> None:
        """Straight, or by the library, where products that lie side by side are one of its own."""
        packed = [weight for weight in weights if isinstance(weight, Packed)]
        if len(packed) < len(weights):
            super().multiply(x, weights, outs, biases)
        elif isinstance(self._weights, Straight):
            for same in _of_one_form(packed):
                few = [packed[number] for number in same]
                theirs = [biases[number] for number in same]
                self._weights.multiply(x, few, [outs[number] for number in same], theirs, self._stream)
        elif len(packed) > 1 and not any(bias is not None for bias in biases) and _side_by_side(outs):
            tokens, rows = outs[0].shape[0], sum(out.shape[1] for out in outs)
            whole = outs[0].as_strided((tokens, rows), outs[0].stride())
            torch.mm(x.data, self._weights.matrix(packed[0], rows), out=whole)
            self._weights.done(len(packed))
        else:
            for weight, out, bias in zip(packed, outs, biases, strict=True):
                matrix = self._weights.matrix(weight, out.shape[1])
                if bias is None:
                    torch.mm(x.data, matrix, out=out)
                else:
                    torch.addmm(bias.to(x.data.dtype), x.data, matrix, out=out)
                self._weights.done(1)


def _of_one_form(matrices: Sequence[Packed]) -> list[list[int]]:
    """Their numbers, by what one launch takes together."""
    found: dict[Any, list[int]] = {}
    for number, one in enumerate(matrices):
        found.setdefault((one.bits, one[3:6]), []).append(number)
    return list(found.values())


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _side_by_side(outs: Sequence[torch.Tensor]) -> bool:
    """Whether they are neighbouring columns of one tensor."""
    return all(
        one.stride() == next_one.stride()
        and one.data_ptr() + one.shape[1] * one.element_size() == next_one.data_ptr()
        for one, next_one in pairwise(outs)
    )


def _capped(
    query: torch.Tensor, mask: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cap: float
) -> torch.Tensor:
    """Attention whose scores are capped, of queries [heads, tokens, head]."""
    scores = capped((query @ keys.transpose(1, 2)).float(), cap).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).to(values.dtype) @ values
