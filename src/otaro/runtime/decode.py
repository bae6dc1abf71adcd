"""A decoder for the LLaMA family whose cost is the weights: all layers of a step are one call into the C++ extension.

`Decoder(model)` points into the mapped planes of a nested model and into its norms, and copies neither. `forward` reads
tokens into a cache and returns logits. A token's arithmetic does not depend on the tokens it is read with: a prompt leaves the
same bits read at once, in pieces or token by token. Every step asks the model's modules for their precision, so that
`otaro.set_precision` takes effect at the next token and the cache stays.

    decoder = Decoder(model)
    cache = decoder.new_cache()                     # float16; new_cache(Precision("E5M7")) for packed keys and values
    logits = decoder.forward(prompt, cache)
    logits = decoder.forward([int(logits.argmax())], cache)

Why layers fused in the extension and not a compiled graph: see docs/decode.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from otaro.errors import OtaroError
from otaro.kernels import cpu, ops
from otaro.runtime.modules import PackedWeight, SefpModule
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
_MAX_HEAD = 256
_POSITIONS = 1024  # whose angles are computed at a time


class DecoderCache:
    """Keys and values of the tokens read so far; made by `Decoder.new_cache`."""

    def __init__(self, native: Any, precision: Precision | None) -> None:
        self.native, self.precision = native, precision

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
        self._rotary = model.model.rotary_emb
        self.vocabulary = int(model.config.vocab_size)
        self._keep = unpacked_tensors(model)
        self._modules = packed_modules(model)
        self._native_matrices: dict[int, Any] = {}
        self._matrices = [self._matrix(module.packed) for module in self._modules]
        self.precisions = b""  # mantissa bits of every module at the last step
        self._native = self._build(model)

    @staticmethod
    def why_not(model: Any) -> str | None:
        """Why this model has to go through transformers, in words; None if the decoder serves it."""
        if reason := _choose() or architecture_obstacle(model):
            return reason
        for tensor in unpacked_tensors(model):
            if tensor.device.type != "cpu":
                return f"it is on {tensor.device.type}"
            if tensor.dtype != torch.float32:
                return f"it runs in {str(tensor.dtype).removeprefix('torch.')}, the decoder in float32"
        modules = packed_modules(model)
        if any(module._like.dtype != torch.float32 or module.packed.base.device.type != "cpu" for module in modules):
            return "its packed weights are not for float32 on the CPU"
        return None

    def serves(self, model: Any) -> bool:
        """Whether this decoder still points at what the model consists of."""
        now = unpacked_tensors(model)
        return len(now) == len(self._keep) and all(
            a is b and a.data_ptr() == b.data_ptr() for a, b in zip(now, self._keep, strict=True)
        )

    def new_cache(self, kv: Precision | None = None) -> DecoderCache:
        """An empty cache, in float16, or packed at a precision."""
        return DecoderCache(self._native.new_cache(kv.mantissa_bits if kv else 0), kv)

    def forward(self, ids: Sequence[int], cache: DecoderCache, all_logits: bool = False) -> torch.Tensor:
        """Read `ids` after what the cache holds; float32 logits [vocabulary] after the last, or [ids, vocabulary] after each.

        If anything is refused the cache is as before.
        """
        tokens = np.asarray(ids, dtype=np.int64)
        if tokens.ndim != 1 or not len(tokens):
            raise OtaroError("the decoder reads one token or more, as a flat sequence")
        before = cache.length
        self._know_positions(before + len(tokens))
        logits = torch.empty(len(tokens) if all_logits else 1, self.vocabulary)
        if reason := _choose():
            raise OtaroError(f"the decoder needs the C++ extension: {reason}")
        try:
            for start in range(0, len(tokens), _cpu.max_step):
                some = tokens[start : start + _cpu.max_step]
                last = start + len(some) == len(tokens)
                rows = logits[start : start + len(some)] if all_logits else logits
                self._native.step(some, cache.native, self._precisions(), rows.numpy() if last or all_logits else None)
        except BaseException as error:
            cache.native.crop(before)
            if isinstance(error, ValueError):
                raise OtaroError(str(error)) from error
            raise
        return logits if all_logits else logits[0]

    def _precisions(self) -> bytes:
        """The mantissa bits of every module as they are now, their planes attached."""
        bits = bytes([module.mantissa_bits for module in self._modules])
        if bits != self.precisions:
            for module, matrix, wanted in zip(self._modules, self._matrices, bits, strict=True):
                while matrix.bits < wanted:
                    matrix.attach(getattr(module.packed, f"plane{matrix.bits + 1}").numpy())
            self.precisions = bits
        return bits

    def _know_positions(self, count: int) -> None:
        """Compute angles up to `count` positions, by the model's own rotary module."""
        if count > self._native.positions:
            start, half = self._native.positions, self._half
            end = -(-count // _POSITIONS) * _POSITIONS
            with torch.no_grad():
                cosines, sines = self._rotary(torch.empty(0), torch.arange(start, end).unsqueeze(0))
            self._native.extend_positions(*(t[0, :, :half].contiguous().numpy() for t in (cosines, sines)))

    def _matrix(self, packed: PackedWeight) -> Any:
        """The native view of a packed weight, shared where weights are tied."""
        if id(packed) not in self._native_matrices:
            schema = packed.nested.schema
            self._native_matrices[id(packed)] = _cpu.Matrix(
                packed.base.numpy(),
                packed.exponents.numpy(),
                packed.shape[-1],
                schema.group_size,
                schema.reconstruction == "truncate",
            )
        return self._native_matrices[id(packed)]

    def _build(self, model: Any) -> Any:
        config, first = model.config, model.model.layers[0].self_attn
        self._half = first.head_dim // 2
        layers = []
        for layer in model.model.layers:
            parts: dict[str, Any] = {}
            for name, path in LINEARS.items():
                linear = layer.get_submodule(path)
                parts[name] = self._matrix(linear.packed)
                parts[name + "_bias"] = _array(linear.bias)
            parts["input_norm"] = _array(layer.input_layernorm.weight)
            parts["mlp_norm"] = _array(layer.post_attention_layernorm.weight)
            for name in ("query_norm", "key_norm"):
                norm = getattr(layer.self_attn, f"{name[0]}_norm", None)
                parts[name] = None if norm is None else _array(norm.weight)
            parts["window"] = window_of(config, layer.self_attn)
            layers.append(parts)
        return _cpu.Decoder(
            config.num_attention_heads,
            config.num_key_value_heads,
            first.head_dim,
            model.model.norm.variance_epsilon,
            first.scaling,
            self._matrix(model.model.embed_tokens.packed),
            self._matrix(model.lm_head.packed),
            _array(model.model.norm.weight),
            layers,
        )


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
    """Norms and biases, which the extension points into."""
    found = list(model.model.parameters())
    bias = getattr(model.lm_head, "bias", None)
    return found if bias is None else [*found, bias]


def _hooked(module: Any) -> bool:
    """Whether somebody looks at what goes in or out; transformers' own hooks, which collect hidden states, stay for good."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(not str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks)


def _array(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else tensor.detach().numpy()


def window_of(config: Any, attention: Any) -> int:
    """How many positions a token sees in this layer, 0 for all: Mistral's is for the model, Qwen's for some layers."""
    window = config.sliding_window if config.model_type == "mistral" else getattr(attention, "sliding_window", None)
    return int(window or 0)
