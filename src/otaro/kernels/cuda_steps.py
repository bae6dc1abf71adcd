"""The steps of a decoder as kernels (`cuda_src/decode.cu`, `attend.cu`); what they compute stands in `steps`.

Nothing here waits for the GPU or allocates memory once a decoder has its buffers, so that all of it can be
captured into a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure
from typing import Any

import torch

from otaro.errors import KernelError
from otaro.kernels import cuda, nvrtc, reference
from otaro.kernels.cuda_structs import filled, structure
from otaro.kernels.kv_cache import KvCache
from otaro.kernels.packed import Packed, Stack
from otaro.kernels.steps import MAX_TOKENS, RING, Activations, Delta, Rope, Routing, State, Tokens

_THREADS = 256
_HEADS = 8  # of a block of `attend`: what the tensor cores take at a time
_SPLITS = 64  # at most; in attend.cu kMostSplits
_BLOCKS = 256  # of `attend` that keep a large GPU busy
_CACHED_HEADS = 4  # of a block of `rope_and_cache`
_ARGMAX_BLOCKS = 64  # for each token
_ROUTED = 8  # experts of a block of `route`
_MOST_EXPERTS = 1024  # in decode.cu kMostExperts
_FLOATS = 2  # attend's OUT


class CudaSteps:
    """On one GPU. Scratch memory belongs to this object: two streams at a time need two."""

    product_dtype = query_dtype = torch.float32

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._gpu = (
            torch.cuda.current_device() if self.device == torch.device("cuda") else self.device.index or 0
        )
        self._scratch: dict[tuple[Any, ...], torch.Tensor] = {}
        self._products = cuda.Scratch(self.device)

    def activations(self, tokens: int, length: int, group_size: int | None) -> Activations:
        """As integers, or in float16."""
        if group_size is None:
            return Activations(
                length, None, torch.zeros(tokens, length, dtype=torch.float16, device=self.device)
            )
        return Activations(length, group_size, cuda.new_digits(tokens, length, group_size, self.device))

    def embed(self, ids: torch.Tensor, weight: Packed | torch.Tensor, scale: float, x: torch.Tensor) -> None:
        """Our own kernel for packed rows, torch for others."""
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
        grid = (-(-weight.length // (4 * _THREADS)), len(ids))
        nvrtc.kernel("decode.cu", "embed", self._gpu, **constants)(
            grid, _THREADS, matrix=cuda.packed_fields(weight), ids=ids, x=x, length=weight.length,
            blocks=blocks, groups=groups, scale=scale,
        )  # fmt: skip

    def rms_norm(
        self,
        x: torch.Tensor,
        delta: Delta | None,
        weight: torch.Tensor | None,
        eps: float,
        out: Activations,
        floats: torch.Tensor | None = None,
    ) -> None:
        """One block for each token."""
        self._rms_norm(x, delta, weight, eps, out, floats)()

    def _rms_norm(
        self,
        x: torch.Tensor,
        delta: Delta | None,
        weight: torch.Tensor | None,
        eps: float,
        out: Activations,
        floats: torch.Tensor | None = None,
    ) -> nvrtc.Launch:
        length = x.shape[1]
        unit, units = _units(out)
        quads = -(-length // 4) if out.group_size is None else units * unit // 4
        vectors = -(-quads // 1024)
        threads = -(-quads // (32 * vectors)) * 32
        values, delta_norm, scale = delta or (None, None, 1.0)
        constants = {
            "UNIT": unit, "HALF_IN": values is not None and values.dtype != torch.float32,
            "HALF_OUT": out.group_size is None, "VECTORS": vectors,
        }  # fmt: skip
        # Named only where a model has them, so that others keep their kernel.
        rare = {
            "SCALED": scale != 1, "DELTA_NORM": delta_norm is not None, "FLOATS": floats is not None,
            "BFLOAT": _bfloat(out.data), "ARRANGED": out.arranged,
        }  # fmt: skip
        constants.update({name: value for name, value in rare.items() if value})
        if weight is None:
            constants["NORM"] = False
        return nvrtc.kernel("decode.cu", "rms_norm", self._gpu, **constants).bound(
            (len(x),), threads, x=x, delta=values, weight=weight, **_out(out), length=length, units=units,
            eps=eps, scale=scale, delta_weight=delta_norm, floats=floats,
        )  # fmt: skip

    def multiply(
        self,
        x: Activations,
        weights: Sequence[Packed | torch.Tensor],
        outs: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
    ) -> None:
        """Products: of packed weights our own, one launch for all of one precision; of others those of the
        device's library.
        """
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
            cuda.products(
                x.data, len(outs[0]), few, [outs[number] for number in same], theirs, scratch=self._products
            )

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
        """One warp for each head of each token."""
        self._rope_and_cache(vectors, norms, rope, tokens, queries, cache, layer)()

    def _rope_and_cache(
        self,
        vectors: Sequence[torch.Tensor],
        norms: Sequence[torch.Tensor | None],
        rope: Rope,
        tokens: Tokens,
        queries: torch.Tensor,
        cache: KvCache,
        layer: int,
    ) -> nvrtc.Launch:
        heads = queries.shape[1] // cache.head
        constants = {"HEAD": cache.head, "KV_BITS": cache.bits, "HALF_IN": vectors[0].dtype != torch.float32}
        if _bfloat(vectors[0]):
            constants["BFLOAT"] = True
        if queries.dtype == torch.float16:
            constants["HALF_QUERIES"] = True
        pairs = 0 if rope.cosines is None else rope.cosines.shape[1]
        if pairs != cache.head // 2:
            constants["ROPE_PAIRS"] = pairs
        if any(norm is not None and len(norm) != cache.head for norm in norms):
            constants["WHOLE_NORM"] = True
        grid = (-(-(heads + 2 * cache.kv_heads) // _CACHED_HEADS), len(queries))
        return nvrtc.kernel("decode.cu", "rope_and_cache", self._gpu, **constants).bound(
            grid, 32 * _CACHED_HEADS, vectors=vectors, strides=[one.stride(0) for one in vectors],
            norms=norms, offsets=None if cache.offsets is None else cache.offsets[layer],
            cosines=rope.cosines, sines=rope.sines, positions=tokens.positions, sequences=tokens.sequences,
            queries=queries, rows=[cache_rows("decode.cu", cache, kind, layer) for kind in (0, 1)],
            refused=cache.refused, capacity=cache.capacity, eps=rope.eps, scale=rope.scale, heads=heads,
            kv_heads=cache.kv_heads,
        )  # fmt: skip

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
        """Attention; where a unit of activations spans heads they are quantized afterwards."""
        count, heads = len(queries), queries.shape[1] // cache.head
        group = heads // cache.kv_heads
        blocks = -(-group // _HEADS)
        here = -(-group // blocks)
        splits = max(1, min(_SPLITS, _BLOCKS // (cache.kv_heads * blocks)))
        pitch = -(-cache.head // 32) * 32
        unit, _ = _units(out)
        kind = 1 if out.group_size is None else 0 if cache.head % unit == 0 else _FLOATS
        floats = (
            self._buffer("attended", (MAX_TOKENS, heads * cache.head), torch.float32)
            if kind == _FLOATS
            else None
        )
        constants = {"HEAD": cache.head, "HEADS": here, "KV_BITS": cache.bits, "OUT": kind, "UNIT": unit}
        if cap:
            constants["CAPPED"] = True
        grid = (splits, cache.kv_heads * blocks, count)
        nvrtc.kernel("attend.cu", "attend", self._gpu, **constants)(
            grid, 128, queries=queries, keys=cache_rows("attend.cu", cache, 0, layer),
            values=cache_rows("attend.cu", cache, 1, layer), positions=tokens.positions,
            sequences=tokens.sequences,
            partial=self._buffer("partial", (MAX_TOKENS, heads, splits, pitch), torch.float32),
            states=self._buffer("states", (MAX_TOKENS, heads, splits, 2), torch.float32),
            tickets=self._buffer("tickets", (MAX_TOKENS, cache.kv_heads * blocks), torch.int32),
            **_out(out), floats=floats, capacity=cache.capacity,
            heads=heads, kv_heads=cache.kv_heads, blocks=blocks, window=window, cap=cap,
        )  # fmt: skip
        if floats is not None:
            self.quantize(floats[:count], out)

    def quantize(
        self, x: torch.Tensor, out: Activations, up: torch.Tensor | None = None, activation: str = "silu"
    ) -> None:
        """Numbers as integers or in float16."""
        self._quantize(x, out, up, activation)()

    def _quantize(
        self, x: torch.Tensor, out: Activations, up: torch.Tensor | None, activation: str
    ) -> nvrtc.Launch:
        unit, units = _units(out)
        assert up is None or (up.stride(0) == x.stride(0) and up.dtype == x.dtype)
        grid = (-(-len(x) * units * unit // (4 * _THREADS)),)
        constants = {"UNIT": unit, "HALF_IN": x.dtype != torch.float32, "HALF_OUT": out.group_size is None}
        rare = {
            "BFLOAT": _bfloat(out.data),
            "ARRANGED": out.arranged,
            "GELU": up is not None and activation != "silu",
        }
        constants.update({name: value for name, value in rare.items() if value})
        return nvrtc.kernel("decode.cu", "quantize", self._gpu, **constants).bound(
            grid,
            _THREADS,
            x=x,
            up=up,
            stride=x.stride(0),
            **_out(out),
            tokens=len(x),
            length=x.shape[1],
            units=units,
        )

    def route(self, x: torch.Tensor, router: torch.Tensor, normalize: bool, routing: Routing) -> None:
        """Scored by many blocks, chosen by the last."""
        experts, count = len(router), routing.experts.shape[1]
        if not count <= experts <= _MOST_EXPERTS:
            raise KernelError(
                f"{count} of {experts} experts are not what one launch chooses; it takes {_MOST_EXPERTS}"
            )
        constants = {"NORMALIZE": True} if normalize else {}
        grid = (-(-experts // _ROUTED), len(x))
        nvrtc.kernel("decode.cu", "route", self._gpu, **constants)(
            grid, 32 * _ROUTED, x=x, router=router,
            scores=self._buffer("scores", (MAX_TOKENS, experts), torch.float32),
            tickets=self._buffer("routing", (MAX_TOKENS,), torch.int32), chosen=routing.experts,
            weights=routing.weights, length=x.shape[1], experts=experts, count=count,
        )  # fmt: skip

    def multiply_experts(
        self, x: Activations, stacks: Sequence[Stack], outs: Sequence[torch.Tensor], routing: Routing
    ) -> None:
        """One launch for all stacks of one precision; which rows it reads is known on the GPU alone."""
        by_bits: dict[int, list[int]] = {}
        for number, stack in enumerate(stacks):
            by_bits.setdefault(stack.whole.bits, []).append(number)
        for same in by_bits.values():
            chosen = cuda.Chosen(routing.experts, [stacks[number].stride for number in same])
            matrices, theirs = [stacks[number].of(0) for number in same], [outs[number] for number in same]
            cuda.products(x.data, len(x.data.terms), matrices, theirs, [None] * len(same), experts=chosen)

    def add_experts(self, parts: torch.Tensor, routing: Routing, out: torch.Tensor) -> None:
        """Four numbers to a thread."""
        tokens, count = routing.experts.shape
        length = out.shape[1]
        nvrtc.kernel("decode.cu", "add_experts", self._gpu)(
            (-(-length // (4 * _THREADS)), tokens),
            _THREADS,
            parts=parts,
            weights=routing.weights,
            out=out,
            length=length,
            count=count,
        )

    def cap_logits(self, logits: torch.Tensor, scale: float, cap: float) -> None:
        """One number to a thread."""
        grid = (-(-logits.numel() // _THREADS),)
        nvrtc.kernel("decode.cu", "cap_logits", self._gpu)(
            grid, _THREADS, logits=logits, count=logits.numel(), scale=scale, cap=cap
        )

    def argmax(self, logits: torch.Tensor, state: State) -> None:
        """By many blocks; the one that finishes last writes the token down."""
        nvrtc.kernel("decode.cu", "argmax", self._gpu)(
            (_ARGMAX_BLOCKS, len(logits)), _THREADS, logits=logits,
            best=self._buffer("best", (MAX_TOKENS,), torch.int64),
            tickets=self._buffer("argmax tickets", (MAX_TOKENS,), torch.int32), ids=state.ids,
            positions=state.positions, steps=state.steps, ring=state.ring, count=logits.shape[1],
            ring_size=RING, stride=MAX_TOKENS,
        )  # fmt: skip

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


def _bfloat(data: Any) -> bool:
    """Whether the halves of a prompt are bfloat16."""
    return isinstance(data, torch.Tensor) and data.dtype == torch.bfloat16


def _out(out: Activations) -> dict[str, Any]:
    """Where a kernel puts activations: integers or float16."""
    if out.group_size is None:
        return {"out": {"digits": None, "terms": None}, "halves": out.data}
    return {"out": out.data._asdict(), "halves": None}


def cache_rows(file: str, cache: KvCache, kind: int, layer: int) -> Structure:
    """What the kernels of a source are told of the keys or values of a layer; made once."""
    found: Structure | None = cache.told.get((file, kind, layer))
    if found is None:
        base, exponents, *planes = cache.of_layer(kind, layer)
        fields = {"base": base, "planes": planes, "exponents": exponents}
        found = cache.told[file, kind, layer] = filled(structure(file, "CacheRows"), fields)
    return found
