"""A decoder for CPUs whose cost is the weights: all layers of a step are one call into the C++ extension.

`Decoder.of(model)` points into the mapped planes of a nested model and copies none. It computes in float32
whatever the model's type is: norms and biases are pointed into where they are float32, else copied, exactly.
A prompt leaves the same bits read at once, in pieces, token by token or beside others.

    decoder = Decoder.of(model)
    cache = decoder.new_cache()                     # float16; packed: new_cache(Precision("E5M7"))
    logits = decoder.forward(prompt, cache)
    logits = decoder.forward([int(logits.argmax())], cache)

Threads may share a decoder, and take turns step by step; what grows (planes, positions, a cache) does so
under the extension's locks. Why layers fused in the extension and not a compiled graph: see docs/decode.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from otaro.errors import OtaroError
from otaro.file.header import BASE
from otaro.kernels import cpu, ops
from otaro.kernels.cpu import _cpu
from otaro.runtime.architectures import packed_modules, unpacked_tensors, why_not
from otaro.runtime.caches import DecoderCache, cannot_hold
from otaro.runtime.decoder import BaseDecoder, Chunk, Costs
from otaro.runtime.description import MATRICES, Description, Matrix
from otaro.sefp.precision import Precision

_EXACT_IN_FLOAT32 = (torch.float32, torch.float16, torch.bfloat16)
_POSITIONS = 1024  # whose angles are computed at a time


class Decoder(BaseDecoder):
    """Runs a described model on the CPU; `why_not` says which models it serves."""

    max_sequences = getattr(_cpu, "max_step", 0)
    exact_prompts = True  # whatever they are read with
    together = True
    costs = Costs(several=0.25, each=0.15, fixed=0.0)
    pooled = True
    ahead = 0

    def __init__(self, description: Description) -> None:
        super().__init__(description)
        self._nested = description.modules[0].packed.nested
        self._attached = [BASE] * len(description.modules)  # mantissa bits that the extension has planes for,
        self._reached = BASE  # and that it has for all modules
        self._native = self._build()

    @staticmethod
    def why_not(model: Any) -> str | None:
        """Why this model has to go through transformers, in words; None if the decoder serves it."""
        if reason := _choose() or why_not(model):
            return reason
        for tensor in unpacked_tensors(model):
            if tensor.device.type != "cpu":
                return f"it is on {tensor.device.type}"
            if tensor.dtype not in _EXACT_IN_FLOAT32:
                return f"it runs in {str(tensor.dtype).removeprefix('torch.')}, the decoder in float32"
        if any(module.packed.base.device.type != "cpu" for module in packed_modules(model)):
            return "its packed weights are not on the CPU"
        return None

    def new_cache(self, kv: Precision | None = None, sequences: int = 1, capacity: int = 0) -> DecoderCache:
        """An empty cache for some sequences, in float16, or packed at a precision; grows as it is filled."""
        if not 0 < sequences <= self.max_sequences:
            raise OtaroError(f"a cache holds 1 to {self.max_sequences} sequences, not {sequences}")
        bits = kv.mantissa_bits if kv else 0
        return DecoderCache(kv, sequences, [self._native.new_cache(bits) for _ in range(sequences)])

    def forward(
        self,
        ids: Sequence[int],
        cache: DecoderCache,
        all_logits: bool = False,
        sequence: int = 0,
        bits: bytes | None = None,
    ) -> torch.Tensor:
        """In one pass over the weights for every 64 tokens."""
        wanted = [self.description.precisions() if bits is None else bits]
        tokens = np.array(self._checked(ids, cache, [sequence], wanted))
        logits = torch.empty(len(tokens) if all_logits else 1, self.vocabulary)
        with cache._lock, self._restoring(cache, [sequence], len(tokens), wanted):
            for start in range(0, len(tokens), self.max_sequences):
                some = tokens[start : start + self.max_sequences]
                last = start + len(some) == len(tokens)
                numbers = range(len(some)) if all_logits else range(len(some) - 1, len(some)) if last else ()
                rows = logits[start : start + len(some)] if all_logits else logits
                out = rows.numpy() if numbers else None
                if self._native.step(
                    some, [cache.natives[sequence]], [len(some)], wanted, list(numbers), out
                ):
                    raise cannot_hold(cache.precision)
        return logits if all_logits else logits[0]

    def step(
        self,
        ids: Sequence[int],
        cache: DecoderCache,
        sequences: Sequence[int] | None = None,
        bits: Sequence[bytes] | None = None,
    ) -> torch.Tensor:
        """In one pass over the weights; but plain code unpacks them for each precision."""
        some = self._arranged(ids, cache, sequences, bits)
        counts, count = some.counts, len(some.ids)
        of_each = dict(zip(some.sequences, some.bits or [self.description.precisions()] * count, strict=True))
        wanted, logits = list(of_each.values()), torch.empty(count, self.vocabulary)
        with cache._lock, self._restoring(cache, list(counts), max(counts.values()), wanted):
            natives, those = [cache.natives[sequence] for sequence in counts], list(range(count))
            if self._native.step(
                np.array(some.ids), natives, list(counts.values()), wanted, those, logits.numpy()
            ):
                raise cannot_hold(cache.precision)
        return logits if some.at == list(range(count)) else logits[some.at]

    def read(self, chunks: Sequence[Chunk], cache: DecoderCache) -> torch.Tensor:
        """In one pass over the weights."""
        sequences, bits = [chunk.sequence for chunk in chunks], [chunk.bits for chunk in chunks]
        tokens = np.array(
            self._checked([token for chunk in chunks for token in chunk.ids], cache, sequences, bits)
        )
        counts = [len(chunk.ids) for chunk in chunks]
        wanted = [end - 1 for chunk, end in zip(chunks, accumulate(counts), strict=True) if chunk.wanted]
        logits = torch.empty(len(wanted), self.vocabulary)
        with cache._lock, self._restoring(cache, sequences, max(counts), bits):
            natives, out = (
                [cache.natives[sequence] for sequence in sequences],
                logits.numpy() if wanted else None,
            )
            if self._native.step(tokens, natives, counts, bits, wanted, out):
                raise cannot_hold(cache.precision)
        return logits

    def _checked(
        self, ids: Sequence[int], cache: DecoderCache, sequences: list[int], bits: Sequence[bytes]
    ) -> list[int]:
        if reason := _choose():
            raise OtaroError(f"the decoder needs the C++ extension: {reason}")
        return super()._checked(ids, cache, sequences, bits)

    @contextmanager
    def _restoring(
        self, cache: DecoderCache, sequences: list[int], count: int, bits: Sequence[bytes]
    ) -> Iterator[None]:
        """Have what so many more tokens of some sequences need; if any is refused, these as they were."""
        before = {sequence: cache.natives[sequence].length for sequence in sequences}
        for one in set(bits):
            self._attach(one)
        self._know_positions(max(before.values()) + count)
        try:
            yield
        except BaseException as error:
            for sequence, length in before.items():
                cache.natives[sequence].crop(length)
            if isinstance(error, ValueError):
                raise OtaroError(str(error)) from error
            raise

    def _attach(self, bits: bytes) -> None:
        """Have the planes that so many mantissa bits of each matrix need."""
        if max(bits) <= self._reached:
            return
        with self._nested.lock:
            for number, (module, wanted) in enumerate(zip(self.description.modules, bits, strict=True)):
                module.packed.reach(wanted)
                for plane in range(self._attached[number] + 1, wanted + 1):
                    self._native.attach(number, plane, getattr(module.packed, f"plane{plane}").numpy())
                    self._attached[number] = plane
            self._reached = min(self._attached)

    def _know_positions(self, count: int) -> None:
        """Compute angles up to `count` positions."""
        self.description.check_positions(count)
        if count > self._native.positions:
            end = min(-(-count // _POSITIONS) * _POSITIONS, self.description.positions or sys.maxsize)
            self._native.extend_positions(end)

    def _build(self) -> Any:
        described, natives = self.description, {}
        offsets = described.key_offsets

        def matrix(one: Matrix) -> dict[str, Any]:
            packed = one.module.packed
            if packed not in natives:  # tied ones share one
                base, scales, _, *numbers = packed._packed(BASE)
                natives[packed] = _cpu.Matrix(base.numpy(), scales.numpy(), *numbers)
            whole, bias = natives[packed], floats(one.bias)
            return {"matrix": whole, "first": one.first, "rows": one.rows, "stride": one.stride, "bias": bias}

        def floats(tensor: torch.Tensor | None) -> Any:
            return None if tensor is None else tensor.numpy()

        numbers = ("heads", "kv_heads", "head_dim", "eps", "scale", "attention_cap", "logit_cap",
                   "embedding_scale", "residual_scale", "logit_scale")  # fmt: skip
        model = {name: getattr(described, name) for name in numbers}
        model |= {name: matrix(getattr(described, name)) for name in ("embedding", "lm_head")}
        model["norm"], model["gelu"] = floats(described.norm), described.activation == "gelu_tanh"
        model["ropes"] = [(rope.frequencies.tolist(), rope.scale) for rope in described.ropes]
        layers = []
        for number, layer in enumerate(described.layers):
            parts: dict[str, Any] = {name: matrix(getattr(layer, name)) for name in MATRICES}
            for name in (
                "attention_norm",
                "attention_output_norm",
                "mlp_norm",
                "mlp_output_norm",
                "query_norm",
                "key_norm",
            ):
                parts[name] = floats(getattr(layer, name))
            norm, experts = layer.query_norm, layer.experts
            parts["norms_all_heads"] = norm is not None and len(norm) != described.head_dim
            parts["key_offset"] = None if offsets is None else offsets[number].numpy()
            parts["rope"], parts["window"] = layer.rope, layer.window
            parts["router"] = None if experts is None else experts.router.flatten().numpy()
            if experts is not None:
                parts |= {
                    "experts": len(experts.router),
                    "chosen": experts.chosen,
                    "normalize": experts.normalize,
                }
            layers.append(parts)
        return _cpu.Decoder(model, layers)


def _choose() -> str:
    """Have the extension compute as OTARO_KERNELS says; returns why it cannot."""
    name, reason = ops.backend("cpu")
    if name == "reference":
        return reason
    cpu.choose(name.removeprefix("cpu:"))
    return ""
