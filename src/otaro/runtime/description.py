"""A model as plain data: all that a decoder knows of it.

`architectures.describe` makes one of a loaded model; benchmarks make them by hand. Decoders know nothing of
transformers, and this page knows nothing of how anything is computed.

    x = embedding[token] * embedding_scale
    for each layer:
        x += residual * output_norm(attention(norm(x)))
        x += residual * output_norm(mlp(norm(x)))          # or experts
    logits = cap(lm_head(norm(x)) * logit_scale)

Every norm is an RMS norm with the model's `eps`, and may be missing. Precisions are one byte of mantissa bits
per matrix in *decoder order*: embedding, the seven of every layer (`MATRICES`), head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from otaro.errors import OtaroError
from otaro.kernels.packed import Packed, Stack
from otaro.runtime.modules import bits_of
from otaro.sefp.precision import COARSEST, Precision

MATRICES = ("query", "key", "value", "output", "gate", "up", "down")
"""Of a layer, in decoder order."""


@dataclass(frozen=True)
class Rope:
    """Rotary positions: the first 2n dimensions of a head are rotated by n angles, dimension i with i + n."""

    frequencies: torch.Tensor
    """float32 [n]; an angle is a frequency times the position, in float32."""
    scale: float = 1.0
    """Of cosines and sines."""

    def tables(self, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, float32 [end, n], of the positions up to `end`."""
        positions = torch.arange(end, device=self.frequencies.device, dtype=torch.float32)
        angles = torch.outer(positions, self.frequencies).double()
        return angles.cos().float() * self.scale, angles.sin().float() * self.scale


class Matrix:
    """One matrix: plain, or packed and seen at any precision. It may be some rows of a larger one."""

    def __init__(
        self,
        source: Any,
        bias: torch.Tensor | None = None,
        first: int = 0,
        rows: int | None = None,
        stride: int = 0,
    ) -> None:
        """The source is a plain tensor, a `Packed` with all planes there are, or a packed module of a nested
        model.

        Rows are `rows` from `first` on, by default all. Of a stack of experts they are those of the first
        one; the next expert's begin `stride` rows later.
        """
        self.plain = source if isinstance(source, torch.Tensor) else None
        self._packed = source if isinstance(source, Packed) else None
        self.module: Any = None if isinstance(source, torch.Tensor | Packed) else source
        self._wholes: dict[int, Packed] = {}
        self._seen: dict[tuple[int, int], Packed] = {}
        self.first, self.stride = first, stride
        self.rows = (
            len(self.plain if self.plain is not None else self.whole(COARSEST).base) if rows is None else rows
        )
        """Outputs, of one expert."""
        # Products of packed weights are float32, those of plain ones float16.
        self.bias = (
            None
            if bias is None
            else bias.detach().to(torch.float32 if self.plain is None else self.plain.dtype)
        )

    @property
    def length(self) -> int:
        """Inputs."""
        return int(self.plain.shape[1] if self.plain is not None else self.whole(COARSEST).length)

    @property
    def group_size(self) -> int | None:
        """Weights that share a scale; None for a plain matrix."""
        return None if self.plain is not None else self.whole(COARSEST).group_size

    def at(self, bits: int, expert: int = 0) -> Packed | torch.Tensor:
        """At so many mantissa bits."""
        start = self.first + expert * self.stride
        some = slice(start, start + self.rows)
        if self.plain is not None:
            return self.plain[some]
        if (bits, expert) not in self._seen:
            self._seen[bits, expert] = self.whole(bits).rows(some)
        return self._seen[bits, expert]

    def stack(self, bits: int) -> Stack:
        """Of all experts, at so many mantissa bits."""
        return Stack(self.whole(bits), self.first, self.rows, self.stride)

    def whole(self, bits: int) -> Packed:
        """All rows of the tensor that these are a part of."""
        if bits not in self._wholes:
            if self._packed is not None:
                self._wholes[bits] = self._packed._replace(planes=self._packed.planes[: bits - COARSEST])
            else:
                self.module.packed.reach(bits)
                self._wholes[bits] = self.module.packed._packed(bits)
        return self._wholes[bits]


@dataclass
class Experts:
    """Of a layer whose `gate`, `up` and `down` are stacks: each token has those with the highest scores."""

    router: torch.Tensor
    """float32 [experts, hidden]; scores are the softmax of its product with a token."""
    chosen: int
    """For each token."""
    normalize: bool
    """Whether the scores of those chosen are divided by their sum."""


@dataclass
class Layer:
    """One layer. Where matrices are plain, `query` holds keys and values too, `gate` up: these are None."""

    query: Matrix
    key: Matrix | None
    value: Matrix | None
    output: Matrix
    gate: Matrix
    up: Matrix | None
    down: Matrix
    attention_norm: torch.Tensor | None = None
    """Of what attention reads; norms are float32, an offset of their weights included."""
    attention_output_norm: torch.Tensor | None = None
    mlp_norm: torch.Tensor | None = None
    mlp_output_norm: torch.Tensor | None = None
    query_norm: torch.Tensor | None = None
    """[head_dim], of every head by itself, or [heads * head_dim], of all at once."""
    key_norm: torch.Tensor | None = None
    rope: int | None = 0
    """Which of the ropes turns queries and keys; None: none does."""
    window: int = 0
    """How many positions a token sees, itself included; 0 for all."""
    experts: Experts | None = None

    def those(self, *names: str, first: int) -> list[tuple[Matrix, int]]:
        """Some matrices with their numbers, counted from `first`; plain ones have swallowed neighbours."""
        found = ((getattr(self, name), number) for number, name in enumerate(names, first))
        return [(matrix, number) for matrix, number in found if matrix is not None]


class Taken(NamedTuple):
    """A tensor that a description was made of, as it was then."""

    tensor: torch.Tensor
    address: int
    version: int
    values: torch.Tensor | None
    """Of norms and biases on a CPU: what is written past autograd counts no version."""

    @staticmethod
    def of(tensor: torch.Tensor) -> Taken:
        """As it is now."""
        small = tensor.device.type == "cpu" and tensor.is_floating_point()
        return Taken(tensor, tensor.data_ptr(), _version(tensor), tensor.detach().clone() if small else None)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether this tensor is the one that was taken, unchanged."""
        same = (
            tensor is self.tensor and tensor.data_ptr() == self.address and _version(tensor) == self.version
        )
        return same and (self.values is None or torch.equal(tensor, self.values))


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@dataclass
class Description:
    """All of a model."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    """Of all norms."""
    scale: float
    """Of queries."""
    embedding: Matrix
    layers: Sequence[Layer]
    norm: torch.Tensor
    lm_head: Matrix
    ropes: Sequence[Rope]
    device: torch.device
    dtype: torch.dtype = torch.float16
    """In which prompts are read."""
    activation: str = "silu"
    """Or "gelu_tanh"."""
    attention_cap: float = 0.0
    """Scores s become cap * tanh(s / cap); 0: they stay."""
    logit_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    positions: int | None = None
    """How far the ropes hold: beyond, other angles would have to turn all positions."""
    rope_type: str = "default"
    modules: Sequence[Any] = ()
    """They say how precise each matrix is, in decoder order. Without any, all are at E5M8."""
    key_offsets: torch.Tensor | None = None
    """What a packed cache keeps keys less, float32 [layers, kv_heads * head_dim]; see `kv_cache`."""
    taken: Sequence[Taken] = ()

    def check_positions(self, count: int) -> None:
        """Refuse a text of so many tokens, if the ropes do not hold so far."""
        if self.positions is not None and count > self.positions:
            raise OtaroError(
                f"the decoder knows rotary positions of type {self.rope_type} up to {self.positions} "
                "tokens, and this text has "
                f"{count}: shorten it, or let transformers keep the cache, "
                "past_key_values=DynamicCache(config=model.config)"
            )

    def precisions(self) -> bytes:
        """Mantissa bits of all matrices as they are now, in decoder order."""
        if self.modules:
            return bits_of(self.modules, self.modules[0].packed.nested)
        return self.all_at(Precision("E5M8"))

    def all_at(self, precision: Precision) -> bytes:
        """Every matrix at one precision."""
        return bytes([precision.mantissa_bits]) * (2 + len(MATRICES) * len(self.layers))
