"""A decoder for the LLaMA family whose cost is the weights: all layers of a step are one call into the C++ extension.

`Decoder.of(model)` points into the mapped planes of a nested model and copies none. It computes in float32 whatever the model's
type is: norms and biases are pointed into where they are float32, else copied, exactly. `forward` reads tokens into a cache
and returns logits. A token's arithmetic does not depend on the tokens it is read with: a prompt leaves the same bits read at
once, in pieces or token by token. Unless it is given mantissa bits, `forward` asks the model's modules for theirs, so that
`otaro.set_precision` takes effect at the next token and the cache stays.

    decoder = Decoder.of(model)
    cache = decoder.new_cache()                     # float16; new_cache(Precision("E5M7")) for packed keys and values
    logits = decoder.forward(prompt, cache)
    logits = decoder.forward([int(logits.argmax())], cache)

Threads may share a decoder, and take turns step by step; what grows (planes, positions, a cache) does so under the extension's
locks. Why layers fused in the extension and not a compiled graph: see docs/decode.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, RLock
from typing import Any

import numpy as np
import torch

from otaro.errors import OtaroError
from otaro.file.header import BASE
from otaro.kernels import cpu, ops
from otaro.runtime.architectures import describe, packed_modules, still_describes, unpacked_tensors, why_not
from otaro.runtime.description import MATRICES, Description, Matrix
from otaro.sefp.precision import Precision

_cpu: Any = vars(cpu)["_cpu"]  # None where it was not built

_EXACT_IN_FLOAT32 = (torch.float32, torch.float16, torch.bfloat16)
_POSITIONS = 1024  # whose angles are computed at a time


class DecoderCache:
    """Keys and values of the tokens read so far; made by `Decoder.new_cache`."""

    def __init__(self, native: Any, precision: Precision | None) -> None:
        self.native, self.precision = native, precision
        self._lock, self._claim = RLock(), Lock()

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """For one generation at a time: two would read each other's tokens."""
        if not self._claim.acquire(blocking=False):
            raise OtaroError("another generation is using this cache; give each one its own")
        try:
            yield
        finally:
            self._claim.release()

    @property
    def length(self) -> int:
        """How many tokens it holds."""
        return int(self.native.length)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, which grow by 64 tokens at a time."""
        return int(self.native.nbytes)

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens; negative: so many of the last, as transformers' caches have it."""
        with self._lock:
            self.native.crop(max(0, self.length + length) if length < 0 else length)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """`length` by the name that transformers knows."""
        return self.length

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """What transformers' own attention would call: refused, as it cannot read this cache."""
        raise OtaroError("a decoder's cache serves the decoder alone; leave it out to generate with beams or other options")


class Decoder:
    """Runs a described model on the CPU; `why_not` says which models it serves."""

    def __init__(self, description: Description) -> None:
        self.description = description
        self.vocabulary = description.lm_head.rows
        self._nested = description.modules[0].packed.nested
        self._attached = [BASE] * len(description.modules)  # mantissa bits that the extension has planes for,
        self._reached = BASE  # and that it has for all modules
        self._native = self._build()

    @staticmethod
    def of(model: Any) -> Decoder:
        """The decoder of a nested model. It keeps parts of it, and not the model itself, which must be free to go."""
        if reason := Decoder.why_not(model):
            raise OtaroError(f"the decoder does not serve this model: {reason}")
        return Decoder(describe(model))

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

    def serves(self, model: Any) -> bool:
        """Whether this decoder still has what the model consists of."""
        return still_describes(self.description, model)

    def new_cache(self, kv: Precision | None = None) -> DecoderCache:
        """An empty cache, in float16, or packed at a precision."""
        return DecoderCache(self._native.new_cache(kv.mantissa_bits if kv else 0), kv)

    def forward(
        self, ids: Sequence[int], cache: DecoderCache, all_logits: bool = False, bits: bytes | None = None
    ) -> torch.Tensor:
        """Read `ids` after what the cache holds; float32 logits [vocabulary] after the last, or [ids, vocabulary] after each.

        `bits` are the mantissa bits of `modules`, by default those that are set now. If anything is refused the cache is as
        before.
        """
        tokens = np.asarray(ids, dtype=np.int64)
        if tokens.ndim != 1 or not len(tokens):
            raise OtaroError("the decoder reads one token or more, as a flat sequence")
        if reason := _choose():
            raise OtaroError(f"the decoder needs the C++ extension: {reason}")
        wanted = self.description.precisions() if bits is None else bits
        if len(wanted) != len(self.description.modules):
            raise OtaroError(f"precisions of {len(wanted)} matrices were given for {len(self.description.modules)}")
        self._attach(wanted)
        logits = torch.empty(len(tokens) if all_logits else 1, self.vocabulary)
        with cache._lock:
            before = cache.length
            self._know_positions(before + len(tokens))
            try:
                for start in range(0, len(tokens), _cpu.max_step):
                    some = tokens[start : start + _cpu.max_step]
                    last = start + len(some) == len(tokens)
                    rows = logits[start : start + len(some)] if all_logits else logits
                    if not self._native.step(some, cache.native, wanted, rows.numpy() if last or all_logits else None):
                        raise cannot_hold(cache.precision)
            except BaseException as error:
                cache.native.crop(before)
                if isinstance(error, ValueError):
                    raise OtaroError(str(error)) from error
                raise
        return logits if all_logits else logits[0]

    def _attach(self, bits: bytes) -> None:
        """Have the planes that so many mantissa bits of each module need."""
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
        if count > (start := self._native.positions):
            end = -(-count // _POSITIONS) * _POSITIONS
            self._native.extend_positions(start, *(table.numpy() for table in self.description.ropes[0](start, end)))

    def _build(self) -> Any:
        described = self.description
        offsets = described.key_offsets
        matrices: dict[Any, Any] = {}

        def native(matrix: Matrix) -> Any:
            packed = matrix.module.packed
            if packed not in matrices:  # tied ones share one
                base, scales, _, *numbers = packed._packed(BASE)
                matrices[packed] = _cpu.Matrix(base.numpy(), scales.numpy(), *numbers)
            return matrices[packed]

        def floats(tensor: torch.Tensor | None) -> Any:
            return None if tensor is None else tensor.numpy()

        layers = []
        for number, layer in enumerate(described.layers):
            parts: dict[str, Any] = {"key_offset": None if offsets is None else offsets[number].numpy()}
            for name in MATRICES:
                matrix = getattr(layer, name)
                parts[name], parts[name + "_bias"] = native(matrix), floats(matrix.bias)
            parts["input_norm"] = floats(layer.attention_norm)
            for name in ("mlp_norm", "query_norm", "key_norm"):
                parts[name] = floats(getattr(layer, name))
            parts["window"] = layer.window
            layers.append(parts)
        return _cpu.Decoder(
            described.heads,
            described.kv_heads,
            described.head_dim,
            described.eps,
            described.scale,
            native(described.embedding),
            native(described.lm_head),
            floats(described.norm),
            layers,
        )


def cannot_hold(kv: Precision | None) -> OtaroError:
    """What to say where a cache, in float16 or at a precision, cannot hold a key or value."""
    instead = "past_key_values=DynamicCache(config=model.config), transformers' own, keeps them in the model's type"
    if kv is None:
        return OtaroError(
            "a key or value is 65520 or more, or not finite: a cache in float16 cannot hold it; "
            f"kv='E5M8' holds less than 65536, and {instead}"
        )
    return OtaroError(
        f"a key or value is 65536 or more, or not finite: a cache at {kv} cannot hold it, nor can any other kv; {instead}"
    )


def _choose() -> str:
    """Have the extension compute as OTARO_KERNELS says; returns why it cannot."""
    name, reason = ops.backend("cpu")
    if name == "reference":
        return reason
    cpu.choose(name.removeprefix("cpu:"))
    return ""
