"""The steps of a decoder as kernels (`cuda_src/decode.cu`, `attend.cu`); what they compute stands in `steps`.

Nothing here waits for the GPU or allocates memory once a decoder has its buffers, so that all of it can be captured into
a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_float, c_int, c_int64, c_void_p
from typing import Any

import torch

from otaro.errors import KernelError
from otaro.kernels import cuda, nvrtc, reference
from otaro.kernels.keyvalues import KeyValues
from otaro.kernels.packed import Packed, Stack
from otaro.kernels.steps import MAX_TOKENS, RING, Activations, Delta, Rope, Routing, State, Tokens

_THREADS = 256
_HEADS = 8  # of a block of `attend`: what the tensor cores take at a time
_SPLITS = 64  # at most; in attend.cu kMostSplits
_BLOCKS = 256  # of `attend` that keep a large GPU busy
_CACHED_HEADS = 4  # of a block of `rope_and_cache`
_ARGMAX_BLOCKS = 64  # that look for the likeliest token
_ROUTED = 8  # experts of a block of `route`
_MOST_EXPERTS = 1024  # in decode.cu kMostExperts
_FLOATS = 2  # attend's OUT


class _Rows(Structure):
    _fields_ = (("base", c_void_p), ("planes", c_void_p * 5), ("exponents", c_void_p))


class _Embed(Structure):
    _fields_ = (
        ("matrix", cuda.PackedParameter), ("ids", c_void_p), ("x", c_void_p),
        ("length", c_int), ("blocks", c_int), ("groups", c_int), ("scale", c_float),
    )  # fmt: skip


class _RmsNorm(Structure):
    _fields_ = (
        ("x", c_void_p), ("delta", c_void_p), ("weight", c_void_p), ("out", cuda.ActivationsParameter), ("halves", c_void_p),
        ("length", c_int), ("units", c_int), ("eps", c_float), ("scale", c_float), ("delta_weight", c_void_p),
        ("floats", c_void_p),
    )  # fmt: skip


class _Quantize(Structure):
    _fields_ = (
        ("x", c_void_p), ("up", c_void_p), ("stride", c_int64), ("out", cuda.ActivationsParameter), ("halves", c_void_p),
        ("tokens", c_int), ("length", c_int), ("units", c_int),
    )  # fmt: skip


class _RopeAndCache(Structure):
    _fields_ = (
        ("source", c_void_p * 3), ("strides", c_int64 * 3), ("norms", c_void_p * 2), ("offsets", c_void_p),
        ("cosines", c_void_p), ("sines", c_void_p), ("positions", c_void_p), ("sequences", c_void_p),
        ("queries", c_void_p), ("rows", _Rows * 2), ("refused", c_void_p), ("capacity", c_int64),
        ("eps", c_float), ("scale", c_float), ("heads", c_int), ("kv_heads", c_int),
    )  # fmt: skip


class _Attend(Structure):
    _fields_ = (
        ("queries", c_void_p), ("keys", _Rows), ("values", _Rows), ("positions", c_void_p), ("sequences", c_void_p),
        ("partial", c_void_p), ("states", c_void_p), ("tickets", c_void_p), ("out", cuda.ActivationsParameter),
        ("halves", c_void_p), ("floats", c_void_p), ("capacity", c_int64),
        ("heads", c_int), ("kv_heads", c_int), ("blocks", c_int), ("window", c_int), ("cap", c_float),
    )  # fmt: skip


class _Route(Structure):
    _fields_ = (
        ("x", c_void_p), ("router", c_void_p), ("scores", c_void_p), ("tickets", c_void_p), ("chosen", c_void_p),
        ("weights", c_void_p), ("length", c_int), ("experts", c_int), ("count", c_int),
    )  # fmt: skip


class _AddExperts(Structure):
    _fields_ = (
        ("parts", c_void_p), ("weights", c_void_p), ("out", c_void_p), ("length", c_int), ("count", c_int),
    )  # fmt: skip


class _CapLogits(Structure):
    _fields_ = (("logits", c_void_p), ("count", c_int64), ("scale", c_float), ("cap", c_float))


class _Argmax(Structure):
    _fields_ = (
        ("logits", c_void_p), ("best", c_void_p), ("tickets", c_void_p), ("ids", c_void_p), ("positions", c_void_p),
        ("steps", c_void_p), ("ring", c_void_p), ("count", c_int), ("ring_size", c_int), ("stride", c_int),
    )  # fmt: skip


class CudaSteps:
    """On one GPU. Scratch memory belongs to this object: two streams at a time need two."""

    product_dtype = torch.float32

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._gpu = torch.cuda.current_device() if self.device == torch.device("cuda") else self.device.index or 0
        self._scratch: dict[tuple[Any, ...], torch.Tensor] = {}

    def activations(self, tokens: int, length: int, group_size: int | None) -> Activations:
        """As integers, or in float16."""
        if group_size is None:
            return Activations(length, None, torch.zeros(tokens, length, dtype=torch.float16, device=self.device))
        return Activations(length, group_size, cuda.new_digits(tokens, length, group_size, self.device))

    def embed(self, ids: torch.Tensor, weight: Packed | torch.Tensor, scale: float, x: torch.Tensor) -> None:
        """Rows of an embedding."""
        if isinstance(weight, torch.Tensor):
            x.copy_(weight.index_select(0, ids))
            if scale != 1:
                x.mul_(scale)
            return
        constants = {"BITS": weight.bits, "TRUNCATE": weight.truncate, "GROUP_SIZE": weight.group_size}
        if scale != 1:
            constants["SCALED"] = True
        blocks = weight.base.shape[1] // 16
        groups = -(-weight.length // weight.group_size)
        matrix = cuda.packed_parameter(weight)
        parameters = _Embed(matrix, ids.data_ptr(), x.data_ptr(), weight.length, blocks, groups, scale)
        grid = (-(-weight.length // (4 * _THREADS)), len(ids))
        nvrtc.kernel("decode.cu", "embed", self._gpu, **constants)(grid, _THREADS, parameters)

    def rms_norm(
        self,
        x: torch.Tensor,
        delta: Delta | None,
        weight: torch.Tensor | None,
        eps: float,
        out: Activations,
        floats: torch.Tensor | None = None,
    ) -> None:
        """Norm."""
        length = x.shape[1]
        unit, units = _units(out)
        quads = -(-length // 4) if out.group_size is None else units * unit // 4
        vectors = -(-quads // 1024)
        threads = -(-quads // (32 * vectors)) * 32
        values, delta_norm, scale = delta or (None, None, 1.0)
        parameters = _RmsNorm(
            x.data_ptr(), _pointer(values), _pointer(weight), _digits(out), _halves(out), length, units,
            eps, scale, _pointer(delta_norm), _pointer(floats),
        )  # fmt: skip
        constants = {
            "UNIT": unit, "HALF_IN": values is not None and values.dtype == torch.float16,
            "HALF_OUT": out.group_size is None, "VECTORS": vectors,
        }  # fmt: skip
        # Named only where a model has them, so that others keep their kernel.
        rare = {"SCALED": scale != 1, "DELTA_NORM": delta_norm is not None, "FLOATS": floats is not None}
        constants.update({name: True for name, there in rare.items() if there})
        if weight is None:
            constants["NORM"] = False
        nvrtc.kernel("decode.cu", "rms_norm", self._gpu, **constants)((len(x),), threads, parameters)

    def multiply(
        self,
        x: Activations,
        weights: Sequence[Packed | torch.Tensor],
        outs: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
    ) -> None:
        """Products: of packed weights our own, one launch for all of one precision; of others those of the device's library."""
        by_bits: dict[int, list[int]] = {}
        for number, weight in enumerate(weights):
            if isinstance(weight, Packed):
                by_bits.setdefault(weight.bits, []).append(number)
            elif (bias := biases[number]) is None:
                torch.mm(x.data, weight.t(), out=outs[number])
            else:
                torch.addmm(bias, x.data, weight.t(), out=outs[number])
        for same in by_bits.values():
            few = [weight for number in same if isinstance(weight := weights[number], Packed)]
            theirs = [biases[number] for number in same]
            cuda.products(x.data, len(outs[0]), few, [outs[number] for number in same], theirs)

    def rope_and_cache(
        self,
        vectors: Sequence[torch.Tensor],
        norms: Sequence[torch.Tensor | None],
        rope: Rope,
        tokens: Tokens,
        queries: torch.Tensor,
        cache: KeyValues,
        layer: int,
    ) -> None:
        """Keys and values into the cache."""
        heads = queries.shape[1] // cache.head
        parameters = _RopeAndCache(
            (c_void_p * 3)(*(one.data_ptr() for one in vectors)), (c_int64 * 3)(*(one.stride(0) for one in vectors)),
            (c_void_p * 2)(*map(_pointer, norms)), 0 if cache.offsets is None else cache.offsets[layer].data_ptr(),
            _pointer(rope.cosines), _pointer(rope.sines),
            tokens.positions.data_ptr(), tokens.sequences.data_ptr(), queries.data_ptr(),
            (_Rows * 2)(_rows(cache, 0, layer), _rows(cache, 1, layer)), cache.refused.data_ptr(), cache.capacity,
            rope.eps, rope.scale, heads, cache.kv_heads,
        )  # fmt: skip
        constants = {"HEAD": cache.head, "KV_BITS": cache.bits, "HALF_IN": vectors[0].dtype == torch.float16}
        pairs = 0 if rope.cosines is None else rope.cosines.shape[1]
        if pairs != cache.head // 2:
            constants["ROPE_PAIRS"] = pairs
        if any(norm is not None and len(norm) != cache.head for norm in norms):
            constants["WHOLE_NORM"] = True
        grid = (-(-(heads + 2 * cache.kv_heads) // _CACHED_HEADS), len(queries))
        nvrtc.kernel("decode.cu", "rope_and_cache", self._gpu, **constants)(grid, 32 * _CACHED_HEADS, parameters)

    def attend(
        self,
        queries: torch.Tensor,
        tokens: Tokens,
        cache: KeyValues,
        layer: int,
        window: int,
        cap: float,
        out: Activations,
    ) -> None:
        """Attention; where a unit of activations spans heads they are quantized afterwards."""
        count, heads = len(queries), queries.shape[1] // cache.head
        group = heads // cache.kv_heads
        blocks = -(-group // _HEADS)
        here = -(-group // blocks)
        splits = max(1, min(_SPLITS, _BLOCKS // (cache.kv_heads * blocks)))
        pitch = -(-cache.head // 32) * 32
        unit, _ = _units(out)
        kind = 1 if out.group_size is None else 0 if cache.head % unit == 0 else _FLOATS
        floats = self._buffer("attended", (MAX_TOKENS, heads * cache.head), torch.float32) if kind == _FLOATS else None
        parameters = _Attend(
            queries.data_ptr(), _rows(cache, 0, layer), _rows(cache, 1, layer),
            tokens.positions.data_ptr(), tokens.sequences.data_ptr(),
            self._buffer("partial", (MAX_TOKENS, heads, splits, pitch), torch.float32).data_ptr(),
            self._buffer("states", (MAX_TOKENS, heads, splits, 2), torch.float32).data_ptr(),
            self._buffer("tickets", (MAX_TOKENS, cache.kv_heads * blocks), torch.int32).data_ptr(),
            _digits(out), _halves(out), _pointer(floats),
            cache.capacity, heads, cache.kv_heads, blocks, window, cap,
        )  # fmt: skip
        constants = {"HEAD": cache.head, "HEADS": here, "KV_BITS": cache.bits, "OUT": kind, "UNIT": unit}
        if cap:
            constants["CAPPED"] = True
        grid = (splits, cache.kv_heads * blocks, count)
        nvrtc.kernel("attend.cu", "attend", self._gpu, **constants)(grid, 128, parameters)
        if floats is not None:
            self.quantize(floats[:count], out)

    def quantize(self, x: torch.Tensor, out: Activations, up: torch.Tensor | None = None, activation: str = "silu") -> None:
        """Numbers as integers or in float16."""
        unit, units = _units(out)
        assert up is None or (up.stride(0) == x.stride(0) and up.dtype == x.dtype)
        parameters = _Quantize(x.data_ptr(), _pointer(up), x.stride(0), _digits(out), _halves(out), len(x), x.shape[1], units)
        grid = (-(-len(x) * units * unit // (4 * _THREADS)),)
        constants = {"UNIT": unit, "HALF_IN": x.dtype == torch.float16, "HALF_OUT": out.group_size is None}
        if up is not None and activation != "silu":
            constants["GELU"] = True
        nvrtc.kernel("decode.cu", "quantize", self._gpu, **constants)(grid, _THREADS, parameters)

    def route(self, x: torch.Tensor, router: torch.Tensor, normalize: bool, routing: Routing) -> None:
        """Scored by many blocks, chosen by the last."""
        experts, count = len(router), routing.experts.shape[1]
        if not count <= experts <= _MOST_EXPERTS:
            raise KernelError(f"{count} of {experts} experts are not what one launch chooses; it takes {_MOST_EXPERTS}")
        parameters = _Route(
            x.data_ptr(), router.data_ptr(), self._buffer("scores", (MAX_TOKENS, experts), torch.float32).data_ptr(),
            self._buffer("routing", (MAX_TOKENS,), torch.int32).data_ptr(), routing.experts.data_ptr(),
            routing.weights.data_ptr(), x.shape[1], experts, count,
        )  # fmt: skip
        constants = {"NORMALIZE": True} if normalize else {}
        grid = (-(-experts // _ROUTED), len(x))
        nvrtc.kernel("decode.cu", "route", self._gpu, **constants)(grid, 32 * _ROUTED, parameters)

    def multiply_experts(self, x: Activations, stacks: Sequence[Stack], outs: Sequence[torch.Tensor], routing: Routing) -> None:
        """One launch for all stacks of one precision; which rows it reads is known on the GPU alone."""
        by_bits: dict[int, list[int]] = {}
        for number, stack in enumerate(stacks):
            by_bits.setdefault(stack.whole.bits, []).append(number)
        for same in by_bits.values():
            chosen = cuda.Chosen(routing.experts, [stacks[number].stride for number in same])
            matrices, theirs = [stacks[number].of(0) for number in same], [outs[number] for number in same]
            cuda.products(x.data, len(x.data.terms), matrices, theirs, [None] * len(same), experts=chosen)

    def add_experts(self, parts: torch.Tensor, routing: Routing, out: torch.Tensor) -> None:
        """One launch."""
        tokens, count = routing.experts.shape
        length = out.shape[1]
        parameters = _AddExperts(parts.data_ptr(), routing.weights.data_ptr(), out.data_ptr(), length, count)
        nvrtc.kernel("decode.cu", "add_experts", self._gpu)((-(-length // (4 * _THREADS)), tokens), _THREADS, parameters)

    def cap_logits(self, logits: torch.Tensor, scale: float, cap: float) -> None:
        """One launch."""
        parameters = _CapLogits(logits.data_ptr(), logits.numel(), scale, cap)
        nvrtc.kernel("decode.cu", "cap_logits", self._gpu)((-(-logits.numel() // _THREADS),), _THREADS, parameters)

    def argmax(self, logits: torch.Tensor, state: State) -> None:
        """One launch."""
        parameters = _Argmax(
            logits.data_ptr(), self._buffer("best", (MAX_TOKENS,), torch.int64).data_ptr(),
            self._buffer("argmax tickets", (MAX_TOKENS,), torch.int32).data_ptr(),
            state.ids.data_ptr(), state.positions.data_ptr(), state.steps.data_ptr(), state.ring.data_ptr(),
            logits.shape[1], RING, MAX_TOKENS,
        )  # fmt: skip
        nvrtc.kernel("decode.cu", "argmax", self._gpu)((_ARGMAX_BLOCKS, len(logits)), _THREADS, parameters)

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Scratch memory, zero at first, kept for good: graphs point into it."""
        key = (name, shape, dtype)
        if key not in self._scratch:
            self._scratch[key] = torch.zeros(shape, dtype=dtype, device=self.device)
        return self._scratch[key]


def _units(out: Activations) -> tuple[int, int]:
    """The size of a unit of activations, and how many there are."""
    unit = reference.unit_size(out.group_size or 64)
    return unit, -(-out.length // unit)


def _digits(out: Activations) -> cuda.ActivationsParameter:
    return cuda.ActivationsParameter(*((0, 0) if out.group_size is None else (part.data_ptr() for part in out.data)))


def _halves(out: Activations) -> int:
    return 0 if out.group_size is not None else int(out.data.data_ptr())


def _pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _rows(cache: KeyValues, kind: int, layer: int) -> _Rows:
    base, exponents, *planes = cache.of_layer(kind, layer)
    return _Rows(_pointer(base), (c_void_p * 5)(*map(_pointer, planes)), _pointer(exponents))
