"""LLaMA-3-8B with random weights for our own decoder: packed, plane by plane, or in float16."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from types import SimpleNamespace
from typing import Any, NamedTuple

import gpu
import torch
from llama3 import HEAD_SIZE, HEADS, HIDDEN, INTERMEDIATE, KEY_HEADS, LAYERS, VOCABULARY, add_plane, random_packed

from otaro.kernels.packed import Packed
from otaro.runtime.caches import GpuCache
from otaro.runtime.description import Description, Layer, Matrix, Rope
from otaro.runtime.modules import SefpModule
from otaro.runtime.precision import Attachment, set_precision
from otaro.sefp.precision import COARSEST, FINEST, Precision

ROPE_BASE = 500000.0
EPS = 1e-5
ALL_PLANES = FINEST - COARSEST  # besides the base nibbles
STD = 0.02  # of weights in float16
KEY_EXPONENTS = (-2, 1)
"""Of random keys and values in a packed cache, from the first to the one before the second: about as large as normal ones."""


class Shape(NamedTuple):
    """Of a model."""

    layers: int = LAYERS
    hidden: int = HIDDEN
    intermediate: int = INTERMEDIATE
    vocabulary: int = VOCABULARY
    heads: int = HEADS
    key_heads: int = KEY_HEADS
    head: int = HEAD_SIZE


SHAPE = Shape()


class PackedModel:
    """The model with packed weights: their base nibbles, which are E5M3, and some planes; `add_plane` adds a bit."""

    def __init__(self, planes: int = 0) -> None:
        self._packed: list[Packed] = []
        self._planes = planes
        self.weights = _weights(self._matrix, fused=False)
        # What a nested model has in their place, so that a switch costs what it costs there.
        nested: Any = SimpleNamespace(require=lambda precision: None, lock=RLock())
        weight: Any = _AllThere(nested)
        modules = {f"module{number}": SefpModule(weight, torch.float16) for number in range(2 + 7 * SHAPE.layers)}
        self.weights.modules = list(modules.values())
        self._model = SimpleNamespace(sefp=Attachment(nested, modules))

    def add_plane(self) -> None:
        """One bit more for every weight."""
        for packed in self._packed:
            add_plane(packed)

    def switch(self, precision: Precision) -> None:
        """As a nested model does."""
        set_precision(self._model, precision)

    def _matrix(self, rows: int, length: int) -> Matrix:
        self._packed.append(random_packed(rows, length, gpu.DEVICE, self._planes))
        return Matrix(self._packed[-1])


class _AllThere:
    """A packed weight whose planes are attached."""

    def __init__(self, nested: Any) -> None:
        self.nested = nested

    def reach(self, mantissa_bits: int) -> None:
        """There is nothing to fetch."""


def half_weights() -> Description:
    """The same model in float16."""
    return _weights(lambda rows, length: Matrix(_half(rows, length)), fused=True)


def _half(rows: int, length: int) -> torch.Tensor:
    return torch.empty(rows, length, dtype=torch.float16, device=gpu.DEVICE).normal_(std=STD)


def _weights(matrix: Callable[[int, int], Matrix], fused: bool) -> Description:
    """A model of such matrices. Fused, queries, keys and values are one matrix, and so are gate and up."""
    shape, device = SHAPE, torch.device(gpu.DEVICE)
    queries, keys = shape.heads * shape.head, shape.key_heads * shape.head
    layers = []
    for _ in range(shape.layers):
        layers.append(
            Layer(
                attention_norm=_ones(shape.hidden),
                mlp_norm=_ones(shape.hidden),
                query=matrix(queries + 2 * keys if fused else queries, shape.hidden),
                key=None if fused else matrix(keys, shape.hidden),
                value=None if fused else matrix(keys, shape.hidden),
                output=matrix(shape.hidden, queries),
                gate=matrix(2 * shape.intermediate if fused else shape.intermediate, shape.hidden),
                up=None if fused else matrix(shape.intermediate, shape.hidden),
                down=matrix(shape.hidden, shape.intermediate),
            )
        )
    return Description(
        heads=shape.heads,
        kv_heads=shape.key_heads,
        head_dim=shape.head,
        eps=EPS,
        scale=shape.head**-0.5,
        embedding=matrix(shape.vocabulary, shape.hidden),
        layers=layers,
        norm=_ones(shape.hidden),
        lm_head=matrix(shape.vocabulary, shape.hidden),
        ropes=[Rope(ROPE_BASE ** -(torch.arange(0, shape.head, 2, device=device) / shape.head))],
        device=device,
    )


def _ones(count: int) -> torch.Tensor:
    return torch.ones(count, device=gpu.DEVICE)


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
