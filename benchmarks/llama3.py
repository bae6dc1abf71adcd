"""LLaMA-3-8B: shapes of its weights, what they and the cache take in memory, random ones for our decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gpu
import torch
from common import LLAMA_8B
from transformers import LlamaConfig

from otaro.file.planes import BASE_BYTES, PLANE_BYTES, blocks
from otaro.kernels.kv_cache import GROUP
from otaro.kernels.packed import Packed
from otaro.runtime.caches import GpuCache
from otaro.runtime.description import Description, Layer, Matrix, Rope
from otaro.sefp.precision import COARSEST, FINEST, GROUP_SIZE, Precision

GIB = float(1 << 30)
ROPE_BASE = 500000.0
_MORE = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2}
SHAPE: Any = LlamaConfig(**LLAMA_8B, rope_theta=ROPE_BASE, **_MORE)
HIDDEN, LAYERS, VOCABULARY = (LLAMA_8B[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size"))
KEYS: int = SHAPE.num_key_value_heads * SHAPE.head_dim
NORM_BYTES = 2 * HIDDEN * (2 * LAYERS + 1)  # in float16; they are never packed
ALL_PLANES = FINEST - COARSEST  # besides the base nibbles
SCALE_EXPONENT, SCALES = -11, (12 << 3, 15 << 3)
"""Of random weights: bytes from the first to the one before the second, 2^-6 to almost 2^-3, with either
sign. So products stay in the range of half precision."""
KEY_EXPONENTS = (-2, 1)
"""Of random keys and values in a packed cache, likewise: about as large as normal ones."""


@dataclass(frozen=True)
class Product:
    """What one step of decoding multiplies with in one launch."""

    name: str
    rows: tuple[int, ...]
    """Of each matrix that is multiplied together with the others."""
    length: int
    count: int
    """In the model."""

    def nbytes(self, precision: Precision | None) -> int:
        """Of the matrices in memory."""
        return sum(matrix_bytes(rows, self.length, precision) for rows in self.rows)


PRODUCTS = (
    Product("q k v", (HIDDEN, KEYS, KEYS), HIDDEN, LAYERS),
    Product("o", (HIDDEN,), HIDDEN, LAYERS),
    Product("gate up", (SHAPE.intermediate_size,) * 2, HIDDEN, LAYERS),
    Product("down", (HIDDEN,), SHAPE.intermediate_size, LAYERS),
    Product("head", (VOCABULARY,), HIDDEN, 1),
)


def matrix_bytes(rows: int, length: int, precision: Precision | None) -> int:
    """Of a matrix in memory: at a precision, or in float16."""
    if precision is None:
        return 2 * rows * length
    per_block = BASE_BYTES + (precision.mantissa_bits - COARSEST) * PLANE_BYTES
    return rows * (blocks(length) * per_block + -(-length // GROUP_SIZE))  # a byte for each scale


def weight_bytes(precision: Precision | None) -> int:
    return product_bytes(precision) + matrix_bytes(VOCABULARY, HIDDEN, precision)


def product_bytes(precision: Precision | None) -> int:
    """Of the matrices that every token is multiplied with."""
    return sum(product.count * product.nbytes(precision) for product in PRODUCTS)


def cache_bytes(tokens: int, precision: Precision | None) -> int:
    values = 2 * LAYERS * tokens * KEYS
    return 2 * values if precision is None else values * (1 + precision.mantissa_bits) // 8 + values // GROUP


def step_bytes(tokens: int, precision: Precision | None, cache: Precision | None) -> int:
    """What a token after so many must read: products' weights, a row of the embedding, norms, the cache."""
    weights = product_bytes(precision) + matrix_bytes(1, HIDDEN, precision)
    return weights + NORM_BYTES + cache_bytes(tokens, cache)


# Random weights ---------------------------------------------------------------------------------------------


def random_packed(rows: int, length: int, planes: int = ALL_PLANES) -> Packed:
    """A matrix of random codes with some planes, and random scales."""
    groups, device = -(-length // GROUP_SIZE), gpu.DEVICE
    base = torch.randint(0, 256, (rows, BASE_BYTES * blocks(length)), dtype=torch.uint8, device=device)
    scales = torch.randint(*SCALES, (rows, groups), dtype=torch.uint8, device=device)
    scales |= torch.randint_like(scales, 2) << 7
    packed = Packed(base, scales, [], length, GROUP_SIZE, False, SCALE_EXPONENT)
    for _ in range(planes):
        add_plane(packed)
    return packed


def add_plane(packed: Packed) -> None:
    """One bit more for every weight of a random matrix, in place."""
    assert isinstance(packed.planes, list)
    shape = (len(packed.base), PLANE_BYTES * blocks(packed.length))
    packed.planes.append(torch.randint(0, 256, shape, dtype=torch.uint8, device=packed.base.device))


def at(packed: Packed, precision: Precision) -> Packed:
    """The same matrix at a lower precision."""
    return packed._replace(planes=packed.planes[: precision.mantissa_bits - COARSEST])


def packed_model() -> Description:
    """LLaMA-3-8B with packed weights, all planes there."""
    return model_of(lambda rows, length: Matrix(random_packed(rows, length)))


def half_model() -> Description:
    """The same in float16."""
    return model_of(lambda rows, length: Matrix(gpu.halves(rows, length)), fused=True)


def model_of(matrix: Callable[[int, int], Matrix], fused: bool = False) -> Description:
    """A model of such matrices. Fused, queries, keys and values are one matrix, and so are gate and up."""
    hidden, intermediate, head = SHAPE.hidden_size, SHAPE.intermediate_size, SHAPE.head_dim
    device = gpu.DEVICE
    queries, keys = SHAPE.num_attention_heads * head, SHAPE.num_key_value_heads * head

    def ones() -> torch.Tensor:
        return torch.ones(hidden, device=device)

    layers = [
        Layer(
            attention_norm=ones(),
            mlp_norm=ones(),
            query=matrix(queries + 2 * keys if fused else queries, hidden),
            key=None if fused else matrix(keys, hidden),
            value=None if fused else matrix(keys, hidden),
            output=matrix(hidden, queries),
            gate=matrix(2 * intermediate if fused else intermediate, hidden),
            up=None if fused else matrix(intermediate, hidden),
            down=matrix(hidden, intermediate),
        )
        for _ in range(SHAPE.num_hidden_layers)
    ]
    return Description(
        heads=SHAPE.num_attention_heads,
        kv_heads=SHAPE.num_key_value_heads,
        head_dim=head,
        eps=SHAPE.rms_norm_eps,
        scale=head**-0.5,
        embedding=matrix(SHAPE.vocab_size, hidden),
        layers=layers,
        norm=ones(),
        lm_head=matrix(SHAPE.vocab_size, hidden),
        ropes=[Rope(ROPE_BASE ** -(torch.arange(0, head, 2, device=device) / head))],
        device=torch.device(device),
    )


def fill(cache: GpuCache, tokens: int) -> None:
    """Make a cache hold random keys and values of so many tokens."""
    kv_cache = cache.kv_cache
    if kv_cache.exponents is None:
        kv_cache.base.normal_()
    else:
        for codes in (kv_cache.base, *kv_cache.planes):
            codes.random_(0, 256)
        kv_cache.exponents.random_(*KEY_EXPONENTS)
    cache.lengths[:] = [tokens] * len(cache.lengths)
