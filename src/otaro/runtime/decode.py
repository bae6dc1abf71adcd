"""A decoder for the LLaMA family whose cost is the weights: all layers of a step are one call into the C++ extension.

`Decoder(model)` points into the mapped planes of a nested model and copies none. It computes in float32 whatever the model's
type is: norms and biases are pointed into where they are float32, else copied, exactly. `forward` reads tokens into a cache
and returns logits. A token's arithmetic does not depend on the tokens it is read with: a prompt leaves the same bits read at
once, in pieces or token by token. Unless it is given mantissa bits, `forward` asks the model's modules for theirs, so that
`otaro.set_precision` takes effect at the next token and the cache stays.

    decoder = Decoder(model)
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
from typing import Any, NamedTuple

import numpy as np
import torch

from otaro.errors import OtaroError
from otaro.file.header import BASE
from otaro.kernels import cpu, ops
from otaro.kernels.keyvalues import OFFSET_POSITIONS, key_offset
from otaro.runtime.modules import PackedWeight, SefpModule, bits_of
from otaro.sefp.precision import Precision

_cpu: Any = vars(cpu)["_cpu"]  # None where it was not built

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
LINEARS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # angles that depend on the position alone, not on the length
_EXACT_IN_FLOAT32 = (torch.float32, torch.float16, torch.bfloat16)
_MAX_HEAD = 256
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
    """Runs a nested model on the CPU; `why_not` says which models it serves."""

    def __init__(self, model: Any) -> None:
        if reason := self.why_not(model):
            raise OtaroError(f"the decoder does not serve this model: {reason}")
        # Parts of the model, and not the model itself: it must be free to go when only its decoder is left.
        self._rotary = rotary_of(model)
        self.vocabulary = int(model.config.vocab_size)
        self._taken = [_Taken(one, one.data_ptr(), one.detach().float().contiguous()) for one in unpacked_tensors(model)]
        self.modules: list[SefpModule] = packed_modules(model)
        """In the order in which `forward` takes their mantissa bits."""
        self._nested = self.modules[0].packed.nested
        self._attached = [BASE] * len(self.modules)  # mantissa bits that the extension has planes for,
        self._reached = BASE  # and that it has for all modules
        self._native = self._build(model)

    @staticmethod
    def why_not(model: Any) -> str | None:
        """Why this model has to go through transformers, in words; None if the decoder serves it."""
        if reason := _choose() or architecture_obstacle(model):
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
        tensors, modules = unpacked_tensors(model), packed_modules(model)
        return (
            len(tensors) == len(self._taken)
            and all(taken.holds(tensor) for taken, tensor in zip(self._taken, tensors, strict=True))
            and all(ours is theirs for ours, theirs in zip(self.modules, modules, strict=False))
        )

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
        wanted = bits_of(self.modules, self._nested) if bits is None else bits
        if len(wanted) != len(self.modules):
            raise OtaroError(f"precisions of {len(wanted)} matrices were given for {len(self.modules)}")
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
            for number, (module, wanted) in enumerate(zip(self.modules, bits, strict=True)):
                module.packed.reach(wanted)
                for plane in range(self._attached[number] + 1, wanted + 1):
                    self._native.attach(number, plane, getattr(module.packed, f"plane{plane}").numpy())
                    self._attached[number] = plane
            self._reached = min(self._attached)

    def _know_positions(self, count: int) -> None:
        """Compute angles up to `count` positions."""
        if count > (start := self._native.positions):
            end = -(-count // _POSITIONS) * _POSITIONS
            self._native.extend_positions(start, *(table.numpy() for table in self._angles(start, end)))

    def _angles(self, start: int, end: int) -> list[torch.Tensor]:
        """Cosines and sines [positions, head / 2], by the model's own rotary module."""
        with torch.no_grad():
            both = self._rotary(torch.empty(0), torch.arange(start, end).unsqueeze(0))
        return [table[0, :, : self._half].contiguous() for table in both]

    def _build(self, model: Any) -> Any:
        config, first = model.config, model.model.layers[0].self_attn
        self._half = first.head_dim // 2
        floats = {id(taken.tensor): taken.floats.numpy() for taken in self._taken}
        matrices = {packed: _matrix(packed) for packed in {module.packed for module in self.modules}}  # tied ones share one
        offsets = key_offsets(model, *self._angles(0, OFFSET_POSITIONS))
        self._offsets = None if offsets is None else offsets.numpy()  # the extension points into it
        layers = []
        for number, layer in enumerate(model.model.layers):
            parts: dict[str, Any] = {"key_offset": None if self._offsets is None else self._offsets[number]}
            for name, path in LINEARS.items():
                linear = layer.get_submodule(path)
                parts[name] = matrices[linear.packed]
                parts[name + "_bias"] = None if linear.bias is None else floats[id(linear.bias)]
            parts["input_norm"] = floats[id(layer.input_layernorm.weight)]
            parts["mlp_norm"] = floats[id(layer.post_attention_layernorm.weight)]
            for name in ("query_norm", "key_norm"):
                norm = getattr(layer.self_attn, f"{name[0]}_norm", None)
                parts[name] = None if norm is None else floats[id(norm.weight)]
            parts["window"] = window_of(config, layer.self_attn)
            layers.append(parts)
        return _cpu.Decoder(
            config.num_attention_heads,
            config.num_key_value_heads,
            first.head_dim,
            model.model.norm.variance_epsilon,
            first.scaling,
            matrices[model.model.embed_tokens.packed],
            matrices[model.lm_head.packed],
            floats[id(model.model.norm.weight)],
            layers,
        )


class _Taken(NamedTuple):
    """A norm or bias: where it was, and what the extension points into, the same memory where it is float32."""

    tensor: torch.Tensor
    address: int
    floats: torch.Tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the extension computes with what this tensor is now."""
        same = tensor is self.tensor and tensor.data_ptr() == self.address
        return same and (self.floats.data_ptr() == self.address or torch.equal(tensor.detach().float(), self.floats))


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


def _matrix(packed: PackedWeight) -> Any:
    """The native view of a packed weight."""
    base, scales, _, *numbers = packed._packed(BASE)
    return _cpu.Matrix(base.numpy(), scales.numpy(), *numbers)


def _choose() -> str:
    """Have the extension compute as OTARO_KERNELS says; returns why it cannot."""
    name, reason = ops.backend("cpu")
    if name == "reference":
        return reason
    cpu.choose(name.removeprefix("cpu:"))
    return ""


def architecture_obstacle(model: Any) -> str:
    """What about this model no decoder of ours does, in words."""
    config = model.config
    kind = getattr(config, "model_type", None)
    if kind not in MODEL_TYPES or getattr(model, "model", None) is None or not hasattr(model, "lm_head"):
        return f"its architecture is {kind}, and the decoder knows {', '.join(MODEL_TYPES)}"
    if getattr(config, "hidden_act", "silu") not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}, not silu"
    rope = getattr(model.model.rotary_emb, "rope_type", "default")
    if rope not in _FIXED_ROPE:
        return f"its rotary positions are of type {rope}"
    head = model.model.layers[0].self_attn.head_dim
    if 2 * model.model.rotary_emb.inv_freq.numel() != head:
        return "only a part of each head is rotated"
    if head > _MAX_HEAD:
        return f"its heads are wider than {_MAX_HEAD}"
    if model.training and getattr(config, "attention_dropout", 0):
        return "it is in training mode and drops out"
    if any(_hooked(module) for module in model.modules()):
        return "it has forward hooks"
    modules = packed_modules(model)
    if not all(isinstance(module, SefpModule) for module in modules):
        return "not all of its weights are packed"
    if modules[0].packed.nested.schema.group_size % 32:
        return "its group size is no multiple of 32"
    return ""


def packed_modules(model: Any) -> list[Any]:
    """Packed modules in the order in which the extension takes their precisions."""
    linears = [layer.get_submodule(path) for layer in model.model.layers for path in LINEARS.values()]
    return [model.model.embed_tokens, *linears, model.lm_head]


def unpacked_tensors(model: Any) -> list[torch.Tensor]:
    """Norms and biases."""
    found = list(model.model.parameters())
    bias = getattr(model.lm_head, "bias", None)
    return found if bias is None else [*found, bias]


def _hooked(module: Any) -> bool:
    """Whether somebody looks at what goes in or out; transformers' own hooks, which collect hidden states, stay for good."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(not str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks)


def rotary_of(model: Any) -> Any:
    """The model's rotary module; where `.half()` has rounded its frequencies, one like it from the model's config."""
    rotary = model.model.rotary_emb
    return rotary if rotary.inv_freq.dtype == torch.float32 else type(rotary)(config=model.config).to(rotary.inv_freq.device)


def key_offsets(model: Any, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor | None:
    """What a packed cache keeps the keys of each layer less, [layers, kv heads * head]; None where keys have no bias."""
    attentions = [layer.self_attn for layer in model.model.layers]
    biases = [attention.k_proj.bias for attention in attentions if not hasattr(attention, "k_norm")]
    if len(biases) < len(attentions) or any(bias is None for bias in biases):
        return None
    return torch.stack([key_offset(bias, cosines, sines) for bias in biases])


def window_of(config: Any, attention: Any) -> int:
    """How many positions a token sees in this layer, 0 for all: Mistral's is for the model, Qwen's for some layers."""
    window = config.sliding_window if config.model_type == "mistral" else getattr(attention, "sliding_window", None)
    return int(window or 0)
