"""What a decoder of the LLaMA family does for a few tokens, step by step, in plain torch: the law of the GPU's kernels.

Up to 16 tokens pass together. Each belongs to a sequence and has a position in it (`State`), and its arithmetic does not
depend on the others. Products are those of `reference.linear`; everything else is float32. `ReferenceSteps` runs on any
device and is what the kernels (`cuda_steps`) are compared with; both work on memory that the caller keeps, and return nothing:

    embed       the rows of an embedding
    normalise   x += delta; the RMS norm of x, as activations
    multiply    activations with one to three matrices
    place       query and key norms, rotation; keys and values into the cache, queries scaled
    attend      attention over the cache, as activations
    quantise    floats as activations; or silu of the floats, times others
    choose      the likeliest token, which becomes the next step's, one position further on
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.functional import linear, silu

from otaro.kernels import reference
from otaro.kernels.cuda import MOST_TOKENS
from otaro.kernels.keyvalues import KeyValues
from otaro.kernels.packed import Packed

MAX_TOKENS = MOST_TOKENS  # a step's products are one launch
RING = 64
"""Steps that the host may lag behind."""


class State:
    """The tokens of a step: which, where, and of which sequence."""

    def __init__(self, device: torch.device | str) -> None:
        on_gpu = torch.device(device).type == "cuda"
        self.all = torch.zeros(4, MAX_TOKENS, dtype=torch.int32, device=device)
        self.ids, self.positions, self.sequences, self.steps = self.all
        """`steps` counts what `choose` has chosen."""
        self.ring = torch.zeros(RING, MAX_TOKENS, dtype=torch.int32, pin_memory=on_gpu)
        """What was chosen in step i is in row i mod RING; the GPU writes into the host's memory."""

    def rows(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions and sequences of the first tokens."""
        return self.positions[:tokens], self.sequences[:tokens]


@dataclass
class Activations:
    """What products are taken with, [tokens, length]. How it is kept is the affair of the steps that made it."""

    length: int
    group_size: int | None
    """Of the weights they meet; None for weights that are not packed."""
    data: Any

    def rows(self, some: slice) -> Activations:
        """Some tokens."""
        if isinstance(self.data, torch.Tensor):
            return Activations(self.length, self.group_size, self.data[some])
        return Activations(self.length, self.group_size, type(self.data)(*(part[some] for part in self.data)))


class Rotation(NamedTuple):
    """How positions turn queries and keys: float32 [positions, head / 2]; and what queries are multiplied with then."""

    cosines: torch.Tensor
    sines: torch.Tensor
    scale: float
    eps: float
    """Of the norms of queries and keys."""


class Steps(Protocol):
    """See the head of this file."""

    def activations(self, tokens: int, length: int, group_size: int | None) -> Activations:
        """Room for activations."""

    def embed(self, ids: torch.Tensor, weight: Packed | torch.Tensor, x: torch.Tensor) -> None:
        """The rows of tokens `ids` into x [tokens, hidden]."""

    def normalise(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, out: Activations
    ) -> None:
        """Add delta to x, in place, and give its norm times the weight."""

    def multiply(
        self,
        x: Activations,
        weights: Sequence[Packed | torch.Tensor],
        outs: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
    ) -> None:
        """Products into `outs`, [tokens, rows] each; those with plain weights are float16."""

    def place(
        self,
        vectors: Sequence[torch.Tensor],
        norms: Sequence[torch.Tensor | None],
        rotation: Rotation,
        state: State,
        queries: torch.Tensor,
        cache: KeyValues,
        layer: int,
    ) -> None:
        """Vectors are queries, keys and values, [tokens, heads * head] each; the first two may have norms."""

    def attend(self, queries: torch.Tensor, state: State, cache: KeyValues, layer: int, window: int, out: Activations) -> None:
        """Queries [tokens, heads * head], over the positions up to their own, or over the last `window` of these."""

    def quantise(self, x: torch.Tensor, out: Activations, up: torch.Tensor | None = None) -> None:
        """Numbers [tokens, length] as activations; silu(x) * up, where `up` is given."""

    def choose(self, logits: torch.Tensor, state: State) -> None:
        """Logits [tokens, vocabulary]; the first of equals is chosen."""


class ReferenceSteps:
    """In torch. Activations are floats here: `reference.linear` makes integers of them."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def activations(self, tokens: int, length: int, group_size: int | None) -> Activations:
        """Room for activations."""
        kind = torch.float16 if group_size is None else torch.float32
        return Activations(length, group_size, torch.zeros(tokens, length, dtype=kind, device=self.device))

    def embed(self, ids: torch.Tensor, weight: Packed | torch.Tensor, x: torch.Tensor) -> None:
        """Rows of an embedding."""
        x.copy_(weight[ids.long()] if isinstance(weight, torch.Tensor) else reference.embedding(ids.long(), weight))

    def normalise(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, out: Activations
    ) -> None:
        """Norm."""
        if delta is not None:
            x += delta
        out.data.copy_(weight * normed(x, eps))

    def multiply(
        self,
        x: Activations,
        weights: Sequence[Packed | torch.Tensor],
        outs: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
    ) -> None:
        """Products."""
        for weight, out, bias in zip(weights, outs, biases, strict=True):
            if isinstance(weight, torch.Tensor):
                out.copy_(linear(x.data, weight, bias))
            else:
                product = reference.linear(x.data, weight)
                out.copy_(product if bias is None else product + bias)

    def place(
        self,
        vectors: Sequence[torch.Tensor],
        norms: Sequence[torch.Tensor | None],
        rotation: Rotation,
        state: State,
        queries: torch.Tensor,
        cache: KeyValues,
        layer: int,
    ) -> None:
        """Keys and values into the cache."""
        tokens = len(queries)
        positions, sequences = (one.long() for one in state.rows(tokens))
        query, key, value = (vector.float().unflatten(1, (-1, cache.head)) for vector in vectors)
        query, key = (
            turned(one if norm is None else norm * normed(one, rotation.eps), rotation, positions)
            for one, norm in zip((query, key), norms, strict=True)
        )
        queries.copy_((query * rotation.scale).flatten(1))
        for token, (position, sequence) in enumerate(zip(positions.tolist(), sequences.tolist(), strict=True)):
            cache.write(0, layer, sequence, position, key[token : token + 1])
            cache.write(1, layer, sequence, position, value[token : token + 1])

    def attend(self, queries: torch.Tensor, state: State, cache: KeyValues, layer: int, window: int, out: Activations) -> None:
        """Attention."""
        positions, sequences = state.rows(len(queries))
        for token, (position, sequence) in enumerate(zip(positions.tolist(), sequences.tolist(), strict=True)):
            some = slice(max(0, position + 1 - window) if window else 0, position + 1)
            keys, values = (cache.read(kind, layer, sequence, some) for kind in (0, 1))
            query = queries[token].view(cache.kv_heads, -1, cache.head)
            out.data[token] = (query @ keys.transpose(1, 2)).softmax(-1).matmul(values).flatten()

    def quantise(self, x: torch.Tensor, out: Activations, up: torch.Tensor | None = None) -> None:
        """Floats stay floats here."""
        out.data.copy_(x if up is None else silu(x.float()) * up)

    def choose(self, logits: torch.Tensor, state: State) -> None:
        """The likeliest."""
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


def turned(vectors: torch.Tensor, rotation: Rotation, positions: torch.Tensor) -> torch.Tensor:
    """Vectors [tokens, heads, head], rotated by the angles of their positions [tokens]."""
    cosines, sines = (table[positions].unsqueeze(1) for table in (rotation.cosines, rotation.sines))
    first, second = vectors.chunk(2, -1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)
