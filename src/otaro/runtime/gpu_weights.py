"""A decoder of the LLaMA family as tensors: what `GpuDecoder` runs, with or without a transformers model behind it.

`Weights.of(model)` points into a nested model and copies nothing but norms and biases, which become float32. Every matrix
is packed, and its planes are fetched when a precision needs them; or it is plain float16, and then queries, keys and values are
one matrix, gate and up are another (`Layer`), as the device's library likes it best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from otaro.kernels.keyvalues import OFFSET_POSITIONS
from otaro.kernels.packed import Packed
from otaro.runtime.decode import LINEARS, key_offsets, packed_modules, rotary_of, unpacked_tensors, window_of
from otaro.runtime.modules import bits_of
from otaro.sefp.precision import COARSEST, Precision

MATRICES = len(LINEARS)
"""Of a layer."""


class Matrix:
    """One matrix: plain, or packed and seen at any precision."""

    def __init__(self, source: Any, bias: torch.Tensor | None = None) -> None:
        """The source is a plain tensor, a `Packed` with all planes there are, or a packed module of a nested model."""
        self.plain = source if isinstance(source, torch.Tensor) else None
        self._packed = source if isinstance(source, Packed) else None
        self._module: Any = None if isinstance(source, torch.Tensor | Packed) else source
        self._seen: dict[int, Packed] = {}
        # Products of packed weights are float32, those of plain ones float16.
        self.bias = None if bias is None else bias.detach().to(torch.float32 if self.plain is None else self.plain.dtype)

    @property
    def rows(self) -> int:
        """Outputs."""
        return len(self.plain if self.plain is not None else self._packed_at(COARSEST).base)

    @property
    def length(self) -> int:
        """Inputs."""
        return int(self.plain.shape[1] if self.plain is not None else self._packed_at(COARSEST).length)

    @property
    def group_size(self) -> int | None:
        """Weights that share a scale; None for a plain matrix."""
        return None if self.plain is not None else self._packed_at(COARSEST).group_size

    def at(self, bits: int) -> Packed | torch.Tensor:
        """At so many mantissa bits."""
        return self._packed_at(bits) if self.plain is None else self.plain

    def _packed_at(self, bits: int) -> Packed:
        if bits not in self._seen:
            if self._packed is not None:
                self._seen[bits] = self._packed._replace(planes=self._packed.planes[: bits - COARSEST])
            else:
                self._module.packed.reach(bits)
                self._seen[bits] = self._module.packed._packed(bits)
        return self._seen[bits]


@dataclass
class Layer:
    """One layer. Where matrices are plain, `query` holds keys and values too and `gate` holds up: those are None then."""

    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    query: Matrix
    key: Matrix | None
    value: Matrix | None
    output: Matrix
    gate: Matrix
    up: Matrix | None
    down: Matrix
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    window: int = 0
    """How many positions a token sees; 0 for all."""

    def those(self, *names: str, first: int) -> list[tuple[Matrix, int]]:
        """Some matrices with their numbers, counted from `first`; plain ones have swallowed their neighbours."""
        found = ((getattr(self, name), number) for number, name in enumerate(names, first))
        return [(matrix, number) for matrix, number in found if matrix is not None]


@dataclass
class Weights:
    """All of a decoder. Norms are float32."""

    heads: int
    kv_heads: int
    head: int
    """Width of a head."""
    eps: float
    scale: float
    """Of queries."""
    embedding: Matrix
    layers: Sequence[Layer]
    norm: torch.Tensor
    logits: Matrix
    rotary: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
    """Cosines and sines, float32 [positions, head / 2], of positions from the first number up to the second."""
    device: torch.device
    dtype: torch.dtype = torch.float16
    """In which prompts are read."""
    modules: Sequence[Any] = ()
    """They say how precise each matrix is: embedding, the seven of every layer, head. Without any, all are at E5M8."""
    key_offsets: torch.Tensor | None = None
    """What a packed cache keeps keys less, float32 [layers, kv heads * head]; see `keyvalues`."""

    @staticmethod
    def of(model: Any) -> Weights:
        """The weights of a nested model that `why_not` has no objection to."""
        attention = model.model.layers[0].self_attn
        rotary, half = rotary_of(model), attention.head_dim // 2
        device = model.model.norm.weight.device

        def angles(start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.no_grad():
                both = rotary(torch.empty(0, device=device), torch.arange(start, end, device=device).unsqueeze(0))
            cosines, sines = (one[0, :, :half].float().contiguous() for one in both)
            return cosines, sines

        layers = []
        for layer in model.model.layers:
            linears = {name: layer.get_submodule(path) for name, path in LINEARS.items()}
            norms = [getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm")]
            layers.append(
                Layer(
                    input_norm=_floats(layer.input_layernorm.weight),
                    mlp_norm=_floats(layer.post_attention_layernorm.weight),
                    query_norm=None if norms[0] is None else _floats(norms[0].weight),
                    key_norm=None if norms[1] is None else _floats(norms[1].weight),
                    window=window_of(model.config, layer.self_attn),
                    **{name: Matrix(linear, linear.bias) for name, linear in linears.items()},
                )
            )
        return Weights(
            model.config.num_attention_heads,
            model.config.num_key_value_heads,
            attention.head_dim,
            model.model.norm.variance_epsilon,
            attention.scaling,
            Matrix(model.model.embed_tokens),
            layers,
            _floats(model.model.norm.weight),
            Matrix(model.lm_head, model.lm_head.bias),
            angles,
            device,
            model.model.norm.weight.dtype,
            packed_modules(model),
            key_offsets(model, *angles(0, OFFSET_POSITIONS)),
        )

    def precisions(self) -> bytes:
        """Mantissa bits of embedding, matrices and head as they are now."""
        if self.modules:
            return bits_of(self.modules, self.modules[0].packed.nested)
        return self.all_at(Precision("E5M8"))

    def all_at(self, precision: Precision) -> bytes:
        """Every matrix at one precision."""
        return bytes([precision.mantissa_bits]) * (2 + MATRICES * len(self.layers))


def _floats(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().float().contiguous()


def parts_of(model: Any) -> list[tuple[Any, int, int]]:
    """What a decoder has taken from a model, to be compared with what the model consists of later."""
    tensors = [*unpacked_tensors(model), *(module.packed.base for module in packed_modules(model))]
    return [(tensor, tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors]
