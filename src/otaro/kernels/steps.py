"""What a decoder does for a few tokens, step by step, in plain torch: the law of the GPU's kernels.

Up to 16 tokens pass together. Each belongs to a sequence and has a position in it (`Tokens`), and its
arithmetic does not depend on the others. Products are those of `reference.linear`; everything else is
float32. `ReferenceSteps` runs on any device and is what the kernels (`cuda_steps`) are compared with; both
work on buffers that the caller keeps, and return nothing:

    embed             the rows of an embedding
    rms_norm          what a layer adds to x; the RMS norm of x, or x itself, as activations
    multiply          activations with one to three matrices
    rope_and_cache    query and key norms, rope; keys and values into the cache, queries scaled
    attend            attention over the cache, as activations
    quantize          floats as activations; or silu or gelu of the floats, times others
    route             the experts of each token, and what each counts
    multiply_experts  as `multiply`, with the matrices of chosen experts
    add_experts       what the experts of a token give, in one
    cap_logits        logits scaled and capped
    argmax            the token of the largest logit, which becomes the next step's, one position further on
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.functional import gelu, linear, silu

from otaro.kernels import reference
from otaro.kernels.kv_cache import KvCache
from otaro.kernels.packed import Packed, Stack

MAX_TOKENS = 16  # a step's products are one launch on any GPU
RING = 64
"""Steps that the host may lag behind."""


class Tokens:
    """Which, where, and of which sequence: int32 [tokens] each."""

    def __init__(self, ids: torch.Tensor, positions: torch.Tensor, sequences: torch.Tensor) -> None:
        self.ids, self.positions, self.sequences = ids, positions, sequences

    def rows(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions and sequences of the first tokens."""
        return self.positions[:tokens], self.sequences[:tokens]


class State(Tokens):
    """The tokens of a step, in memory that stays, and what was chosen."""

    def __init__(self, device: torch.device | str) -> None:
        on_gpu = torch.device(device).type == "cuda"
        self.all = torch.zeros(4, MAX_TOKENS, dtype=torch.int32, device=device)
        super().__init__(*self.all[:3])
        self.steps = self.all[3]
        """Counts what `argmax` has chosen."""
        self.ring = torch.zeros(RING, MAX_TOKENS, dtype=torch.int32, pin_memory=on_gpu)
        """What was chosen in step i is in row i mod RING; the GPU writes into the host's memory."""


@dataclass
class Activations:
    """What products are taken with, [tokens, length], kept as the steps that made it like it."""

    length: int
    group_size: int | None
    """Of the weights they meet; None for weights that are not packed."""
    data: Any
    arranged: int = 0
    """Tokens of a pass, where halves lie as `hopper_halves.arranged` puts them."""

    def rows(self, some: slice) -> Activations:
        """Some tokens."""
        if isinstance(self.data, torch.Tensor):
            return Activations(self.length, self.group_size, rows_of(self.data, some), self.arranged)
        return Activations(self.length, self.group_size, type(self.data)(*(part[some] for part in self.data)))


def rows_of(tensor: torch.Tensor, some: slice) -> torch.Tensor:
    """Some rows; where that is all of them the tensor itself, which takes no time."""
    return tensor if some.start == 0 and some.stop == tensor.shape[0] else tensor[some]


class Delta(NamedTuple):
    """What a layer adds to x: values [tokens, hidden], or their norm, times the scale."""

    values: torch.Tensor
    norm: torch.Tensor | None = None
    scale: float = 1.0


class Rope(NamedTuple):
    """How positions rotate queries and keys: float32 [positions, n], for the first 2n dimensions of a head.

    None: not at all.
    """

    cosines: torch.Tensor | None
    sines: torch.Tensor | None
    scale: float
    """What queries are multiplied with then."""
    eps: float
    """Of the norms of queries and keys."""


class Routing(NamedTuple):
    """The experts of tokens in ascending order, int32 [tokens, chosen], and what each counts, float32."""

    experts: torch.Tensor
    weights: torch.Tensor

    def rows(self, some: slice) -> Routing:
        """Of some tokens."""
        return Routing(self.experts[some], self.weights[some])


class Steps(Protocol):
    """See the head of this file."""

    product_dtype: torch.dtype
    """Of products with packed weights."""
    query_dtype: torch.dtype
    """Of queries, as attention reads them."""

    def activations(self, tokens: int, length: int, group_size: int | None) -> Activations:
        """A buffer for activations."""

    def embed(self, ids: torch.Tensor, weight: Packed | torch.Tensor, scale: float, x: torch.Tensor) -> None:
        """The rows of tokens `ids`, times the scale, into x [tokens, hidden]."""

    def rms_norm(
        self,
        x: torch.Tensor,
        delta: Delta | None,
        weight: torch.Tensor | None,
        eps: float,
        out: Activations,
        floats: torch.Tensor | None = None,
    ) -> None:
        """Add delta to x, in place, and give its norm times the weight, or x itself.

        As floats too, where they are wanted.
        """

    def multiply(
        self,
        x: Activations,
        weights: Sequence[Packed | torch.Tensor],
        outs: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
    ) -> None:
        """Products into `outs`, [tokens, rows] each; those with plain weights are float16."""

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
        """Vectors are queries, keys and values, [tokens, heads * head] each; the first two may have norms.

        A norm is that of every head, [head], or that of all at once, [heads * head].
        """

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
        """Queries [tokens, heads * head], over the positions up to their own, or over the last `window`.

        Where there is a cap, a score s is cap * tanh(s / cap).
        """

    def quantize(
        self, x: torch.Tensor, out: Activations, up: torch.Tensor | None = None, activation: str = "silu"
    ) -> None:
        """Numbers [tokens, length] as activations; with `up`, silu(x) * up or gelu_tanh(x) * up."""

    def route(self, x: torch.Tensor, router: torch.Tensor, normalize: bool, routing: Routing) -> None:
        """Those with the highest scores: softmax of router [experts, length] times x [tokens, length].

        Of equals the first. Each counts by its score, or by its share of the scores of those chosen.
        """

    def multiply_experts(
        self, x: Activations, stacks: Sequence[Stack], outs: Sequence[torch.Tensor], routing: Routing
    ) -> None:
        """Products into `outs`, [tokens * chosen, rows] each.

        x has a row for each token, or one for each of its experts.
        """

    def add_experts(self, parts: torch.Tensor, routing: Routing, out: torch.Tensor) -> None:
        """Parts [tokens * chosen, length], each times what its expert counts, added one after the other."""

    def cap_logits(self, logits: torch.Tensor, scale: float, cap: float) -> None:
        """Logits times the scale, in place; where there is a cap, cap * tanh(logits / cap)."""

    def argmax(self, logits: torch.Tensor, state: State) -> None:
        """Logits [tokens, vocabulary]; the first of equals is chosen."""


class ReferenceSteps:
    """In torch. Activations are floats here: `reference.linear` makes integers of them."""

    product_dtype = query_dtype = torch.float32

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def activations(self, tokens: int, length: int, group_size: int | None) -> Activations:
        """Floats, in the type of products."""
        kind = torch.float16 if group_size is None else self.product_dtype
        return Activations(length, group_size, torch.zeros(tokens, length, dtype=kind, device=self.device))

    def embed(self, ids: torch.Tensor, weight: Packed | torch.Tensor, scale: float, x: torch.Tensor) -> None:
        """Decoded, or looked up."""
        x.copy_(
            weight[ids.long()]
            if isinstance(weight, torch.Tensor)
            else reference.embedding(ids.long(), weight)
        )
        if scale != 1:
            x *= scale

    def rms_norm(
        self,
        x: torch.Tensor,
        delta: Delta | None,
        weight: torch.Tensor | None,
        eps: float,
        out: Activations,
        floats: torch.Tensor | None = None,
    ) -> None:
        """Squares are summed in torch's order."""
        if delta is not None:
            added = delta.values
            if delta.norm is not None:
                added = delta.norm * normed(added.float(), eps)
            x += added if delta.scale == 1 else added.float() * delta.scale
        result = x if weight is None else weight * normed(x, eps)
        out.data.copy_(result)
        if floats is not None:
            floats.copy_(result)

    def multiply(
        self,
        x: Activations,
        weights: Sequence[Packed | torch.Tensor],
        outs: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
    ) -> None:
        """One matrix after the other."""
        for weight, out, bias in zip(weights, outs, biases, strict=True):
            if isinstance(weight, torch.Tensor):
                out.copy_(linear(x.data, weight, bias))
            else:
                out.copy_(self.product(x.data, weight, bias))

    def product(self, x: torch.Tensor, weight: Packed, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Of activations with packed weights: what prompts compute in another way."""
        product = reference.linear(x, weight)
        return product if bias is None else product + bias

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
        """All tokens at once, until they are written."""
        positions, sequences = (one.long() for one in tokens.rows(len(queries)))
        query, key = (
            apply_rope(normed_heads(vector.float(), norm, rope.eps, cache.head), rope, positions)
            for vector, norm in zip(vectors, norms, strict=False)
        )
        value = vectors[2].float().unflatten(1, (-1, cache.head))
        queries.copy_((query * rope.scale).flatten(1))
        self.write(cache, layer, sequences, positions, key, value)

    def write(
        self,
        cache: KvCache,
        layer: int,
        sequences: torch.Tensor,
        positions: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Keys and values, [tokens, heads, head], into the cache."""
        for token, (position, sequence) in enumerate(
            zip(positions.tolist(), sequences.tolist(), strict=True)
        ):
            cache.write(0, layer, sequence, position, key[token : token + 1])
            cache.write(1, layer, sequence, position, value[token : token + 1])

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
        """One token after the other, over keys and values as the cache decodes them."""
        positions, sequences = tokens.rows(len(queries))
        for token, (position, sequence) in enumerate(
            zip(positions.tolist(), sequences.tolist(), strict=True)
        ):
            some = slice(max(0, position + 1 - window) if window else 0, position + 1)
            keys, values = (cache.read(kind, layer, sequence, some) for kind in (0, 1))
            query = queries[token].view(cache.kv_heads, -1, cache.head)
            out.data[token] = capped(query @ keys.transpose(1, 2), cap).softmax(-1).matmul(values).flatten()

    def quantize(
        self, x: torch.Tensor, out: Activations, up: torch.Tensor | None = None, activation: str = "silu"
    ) -> None:
        """Floats stay floats here."""
        if up is not None:
            x = (silu(x.float()) if activation == "silu" else gelu(x.float(), approximate="tanh")) * up
        out.data.copy_(x)

    def route(self, x: torch.Tensor, router: torch.Tensor, normalize: bool, routing: Routing) -> None:
        """Token by token: a library's product of several has other bits."""
        scores = torch.stack([(router * one).sum(-1) for one in x]).softmax(-1)
        count = routing.experts.shape[1]
        experts = scores.sort(descending=True, stable=True).indices[:, :count].sort().values
        weights = scores.gather(1, experts)
        routing.experts.copy_(experts)
        routing.weights.copy_(weights / weights.sum(-1, keepdim=True) if normalize else weights)

    def multiply_experts(
        self, x: Activations, stacks: Sequence[Stack], outs: Sequence[torch.Tensor], routing: Routing
    ) -> None:
        """One pair of a token and an expert after the other."""
        experts = routing.experts.flatten().tolist()
        each = len(experts) // len(x.data)
        for stack, out in zip(stacks, outs, strict=True):
            for number, expert in enumerate(experts):
                row = number // each
                out[number] = self.product(x.data[row : row + 1], stack.of(expert))[0]

    def add_experts(self, parts: torch.Tensor, routing: Routing, out: torch.Tensor) -> None:
        """One expert after the other, as the kernel does: sums have an order."""
        of_token = parts.float().unflatten(0, routing.weights.shape)
        total = torch.zeros(out.shape, device=out.device)
        for number, weight in enumerate(routing.weights.unbind(1)):
            total += of_token[:, number] * weight[:, None]
        out.copy_(total)

    def cap_logits(self, logits: torch.Tensor, scale: float, cap: float) -> None:
        """Scaled first."""
        logits.copy_(capped(logits * scale, cap))

    def argmax(self, logits: torch.Tensor, state: State) -> None:
        """The first of equals."""
        tokens = len(logits)
        chosen = logits.argmax(-1).int()
        for token, step in enumerate(state.steps[:tokens].tolist()):
            state.ring[step % RING, token] = int(chosen[token])
        state.ids[:tokens] = chosen
        state.positions[:tokens] += 1
        state.steps[:tokens] += 1


def normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Vectors divided by their root mean square."""
    return x * (1 / (x.square().mean(-1, keepdim=True) + eps).sqrt())


def normed_heads(x: torch.Tensor, norm: torch.Tensor | None, eps: float, head: int) -> torch.Tensor:
    """Queries or keys [tokens, heads * head] as [tokens, heads, head], after their norm."""
    if norm is not None and len(norm) != head:
        x, norm = norm * normed(x, eps), None
    heads: torch.Tensor = x.unflatten(1, (-1, head))
    return heads if norm is None else norm * normed(heads, eps)


def apply_rope(vectors: torch.Tensor, rope: Rope, positions: torch.Tensor) -> torch.Tensor:
    """Vectors [tokens, heads, head], rotated by the angles of their positions [tokens]."""
    if rope.cosines is None or rope.sines is None:
        return vectors
    cosines, sines = (table[positions].unsqueeze(1) for table in (rope.cosines, rope.sines))
    count = cosines.shape[-1]
    first, second, rest = vectors.split((count, count, vectors.shape[-1] - 2 * count), -1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines, rest), -1)


def capped(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """Softly, to numbers between -cap and cap; 0 leaves them alone."""
    return (scores / cap).tanh() * cap if cap else scores
