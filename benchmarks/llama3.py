"""LLaMA-3-8B in numbers: the shapes of its weights, what they and the cache take in memory, and random ones of that form.

>>> round(weight_bytes(Precision("E5M4")) / GIB, 3), round(cache_bytes(2000, Precision("E5M4")) / GIB, 3)
(4.791, 0.08)
>>> round((weight_bytes(None) + cache_bytes(2000, None)) / GIB, 2)
15.2
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from otaro.file.planes import BASE_BYTES, PLANE_BYTES, blocks
from otaro.kernels.kv_cache import GROUP
from otaro.kernels.packed import Packed
from otaro.sefp.precision import COARSEST, GROUP_SIZE, Precision

GIB = float(1 << 30)
LAYERS = 32
HIDDEN, INTERMEDIATE, VOCABULARY = 4096, 14336, 128256
HEADS, KEY_HEADS, HEAD_SIZE = 32, 8, 128
NORM_BYTES = 2 * HIDDEN * (2 * LAYERS + 1)  # in float16; they are never packed
SCALE_EXPONENT, SCALES = -11, (12 << 3, 15 << 3)
"""Of random weights: bytes from the first to the one before the second, 2^-6 to almost 2^-3, with either sign. So products
stay in the range of half precision."""


@dataclass(frozen=True)
class Product:
    """What one step of decoding multiplies with in one launch."""

    name: str
    rows: tuple[int, ...]
    """Of each matrix that is multiplied together with the others."""
    length: int
    count: int
    """In the model."""

    @property
    def weights(self) -> int:
        """Of all its matrices."""
        return sum(self.rows) * self.length


PRODUCTS = (
    Product("q k v", (HEADS * HEAD_SIZE, KEY_HEADS * HEAD_SIZE, KEY_HEADS * HEAD_SIZE), HIDDEN, LAYERS),
    Product("o", (HIDDEN,), HEADS * HEAD_SIZE, LAYERS),
    Product("gate up", (INTERMEDIATE, INTERMEDIATE), HIDDEN, LAYERS),
    Product("down", (HIDDEN,), INTERMEDIATE, LAYERS),
    Product("head", (VOCABULARY,), HIDDEN, 1),
)


def matrix_bytes(rows: int, length: int, precision: Precision | None) -> int:
    """Of a matrix in memory: at a precision, or in float16."""
    if precision is None:
        return 2 * rows * length
    per_block = BASE_BYTES + (precision.mantissa_bits - COARSEST) * PLANE_BYTES
    return rows * (blocks(length) * per_block + -(-length // GROUP_SIZE))  # a byte for each scale


def weight_bytes(precision: Precision | None) -> int:
    """Of all matrices: the products', and the embedding's."""
    return product_bytes(precision) + matrix_bytes(VOCABULARY, HIDDEN, precision)


def product_bytes(precision: Precision | None) -> int:
    """Of the matrices that every token is multiplied with."""
    return sum(p.count * matrix_bytes(rows, p.length, precision) for p in PRODUCTS for rows in p.rows)


def cache_bytes(tokens: int, precision: Precision | None) -> int:
    """Of the keys and values of so many tokens."""
    values = 2 * LAYERS * tokens * KEY_HEADS * HEAD_SIZE
    return 2 * values if precision is None else values * (1 + precision.mantissa_bits) // 8 + values // GROUP


def step_bytes(tokens: int, precision: Precision | None, cache: Precision | None) -> int:
    """What decoding one token after so many must read: every product's weights, a row of the embedding, norms, the cache."""
    return product_bytes(precision) + matrix_bytes(1, HIDDEN, precision) + NORM_BYTES + cache_bytes(tokens, cache)


def random_bytes(rows: int, count: int, device: str) -> torch.Tensor:
    """Of base nibbles, or of a plane."""
    return torch.randint(0, 256, (rows, count), dtype=torch.uint8, device=device)


def add_plane(packed: Packed) -> None:
    """One bit more for every weight of a random matrix, in place."""
    assert isinstance(packed.planes, list)
    rows, device = len(packed.base), str(packed.base.device)
    packed.planes.append(random_bytes(rows, PLANE_BYTES * blocks(packed.length), device))


def random_packed(rows: int, length: int, device: str, planes: int = 5) -> Packed:
    """A matrix of random codes with some planes, and random scales."""
    base = random_bytes(rows, BASE_BYTES * blocks(length), device)
    scales = torch.randint(*SCALES, (rows, -(-length // GROUP_SIZE)), dtype=torch.uint8, device=device)
    scales |= torch.randint_like(scales, 2) << 7
    packed = Packed(base, scales, [], length, GROUP_SIZE, False, SCALE_EXPONENT)
    for _ in range(planes):
        add_plane(packed)
    return packed


def at(packed: Packed, precision: Precision) -> Packed:
    """The same matrix at a lower precision."""
    return packed._replace(planes=packed.planes[: precision.mantissa_bits - COARSEST])
