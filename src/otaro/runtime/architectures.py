"""Which models of transformers the decoders serve, and how each is read.

An architecture is an entry of `ARCHITECTURES`: its differences from LLaMA. `describe(model)` reads a loaded
nested model by its entry; `why_not(model)` says what about a model no decoder does. CONTRIBUTING tells how to
add one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from otaro.errors import OtaroError
from otaro.kernels.kv_cache import OFFSET_POSITIONS, key_offset
from otaro.runtime.description import Description, Experts, Layer, Matrix, Rope, Taken
from otaro.runtime.modules import SefpModule

MAX_HEAD_DIM = 256
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
_ROPES = ("default", "linear", "llama3", "yarn")  # angles depend on the position alone,
# and here as long as a text is no longer than the model was first trained for
_GROWING_ROPES = ("dynamic", "longrope")


def _window_of_model(config: Any, attention: Any) -> int:
    return int(getattr(config, "sliding_window", None) or 0)


def _window_of_layer(config: Any, attention: Any) -> int:
    return int(getattr(attention, "sliding_window", None) or 0)


@dataclass(frozen=True)
class Architecture:
    """Where a layer has its parts, and which of the model's settings count; by default as in LLaMA."""

    attention_norms: tuple[str | None, str | None] = ("input_layernorm", None)
    """Before attention, and of its output."""
    mlp_norms: tuple[str | None, str | None] = ("post_attention_layernorm", None)
    norm_offset: float = 0.0
    """What is added to the weights of norms."""
    fused: bool = False
    """Whether query, key and value are rows of one matrix, and gate and up of another."""
    window: Callable[[Any, Any], int] = _window_of_layer
    """How many positions a token sees, by the config and a layer's attention; 0 for all."""
    activation: str = "hidden_act"
    """The setting that names it."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """{field of a description: setting of the model}, where they are the same number."""
    logits_divided: bool = False
    """By the setting `logits_scaling`."""


_SANDWICH: dict[str, Any] = {
    "attention_norms": ("input_layernorm", "post_attention_layernorm"),
    "mlp_norms": ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
}

ARCHITECTURES = {
    "llama": Architecture(),
    "mistral": Architecture(window=_window_of_model),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
    "smollm3": Architecture(),
    "olmo2": Architecture(
        attention_norms=(None, "post_attention_layernorm"),
        mlp_norms=(None, "post_feedforward_layernorm"),
    ),
    "phi3": Architecture(fused=True, window=_window_of_model),
    "granite": Architecture(
        settings={"embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier"},
        logits_divided=True,
    ),
    "gemma2": Architecture(
        norm_offset=1.0,
        activation="hidden_activation",
        settings={"attention_cap": "attn_logit_softcapping", "logit_cap": "final_logit_softcapping"},
        **_SANDWICH,
    ),
    "gemma3_text": Architecture(
        norm_offset=1.0,
        activation="hidden_activation",
        settings={"logit_cap": "final_logit_softcapping"},
        **_SANDWICH,
    ),
    "mixtral": Architecture(window=_window_of_model),
    "qwen3_moe": Architecture(window=_window_of_model),
}


def why_not(model: Any) -> str:
    """What about this model no decoder of ours does, in words; empty if nothing."""
    config = model.config
    kind = getattr(config, "model_type", None)
    if kind not in ARCHITECTURES or getattr(model, "model", None) is None or not hasattr(model, "lm_head"):
        return f"its architecture is {kind}, and the decoder knows {', '.join(ARCHITECTURES)}"
    activation = getattr(config, ARCHITECTURES[kind].activation, "silu")
    if activation not in _ACTIVATIONS:
        return f"its activation is {activation}, not {' or '.join(_ACTIVATIONS)}"
    for rope in _rope_types(model):
        if rope not in (*_ROPES, *_GROWING_ROPES):
            return f"its rotary positions are of type {rope}"
    if model.model.layers[0].self_attn.head_dim > MAX_HEAD_DIM:
        return f"its heads are wider than {MAX_HEAD_DIM}"
    if getattr(config, "use_bidirectional_attention", False):
        return "its tokens see those behind them"
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


def describe(model: Any) -> Description:
    """The description of a nested model that `why_not` has nothing against."""
    if reason := why_not(model):
        raise OtaroError(f"the decoder does not serve this model: {reason}")
    config, entry, device = (
        model.config,
        ARCHITECTURES[model.config.model_type],
        model.model.norm.weight.device,
    )
    first = model.model.layers[0].self_attn
    ropes = _ropes(model)
    numbers: dict[str, Any] = {
        name: float(getattr(config, setting) or 0) for name, setting in entry.settings.items()
    }
    described = Description(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=first.head_dim,
        eps=config.rms_norm_eps,
        scale=first.scaling,
        embedding=Matrix(model.model.embed_tokens),
        layers=[_layer(model, layer, entry, list(ropes)) for layer in model.model.layers],
        norm=_norm(model.model.norm, entry),
        lm_head=Matrix(model.lm_head, model.lm_head.bias),
        ropes=list(ropes.values()),
        device=device,
        dtype=model.model.norm.weight.dtype,
        activation=_ACTIVATIONS[getattr(config, entry.activation, "silu")],
        positions=rope_limit(model),
        rope_type=", ".join(dict.fromkeys(_rope_types(model))),
        modules=packed_modules(model),
        taken=[Taken.of(tensor) for tensor in _tensors(model)],
        **numbers,
    )
    described.embedding_scale *= float(getattr(model.model.embed_tokens, "scale", 1.0))
    if entry.logits_divided:
        described.logit_scale = 1 / float(config.logits_scaling)
    described.key_offsets = _key_offsets(described)
    return described


def packed_modules(model: Any) -> list[Any]:
    """Packed modules in decoder order; one that holds several matrices is there several times."""
    fused = ARCHITECTURES[model.config.model_type].fused
    modules = [model.model.embed_tokens]
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        modules += (
            [attention.qkv_proj] * 3 if fused else [attention.q_proj, attention.k_proj, attention.v_proj]
        )
        modules.append(attention.o_proj)
        if hasattr(mlp, "experts"):
            modules += [mlp.experts.gate_up_proj] * 2 + [mlp.experts.down_proj]
        else:
            modules += [mlp.gate_up_proj] * 2 if fused else [mlp.gate_proj, mlp.up_proj]
            modules.append(mlp.down_proj)
    return [*modules, model.lm_head]


def unpacked_tensors(model: Any) -> list[torch.Tensor]:
    """Norms, biases and routers."""
    found = list(model.model.parameters())
    bias = getattr(model.lm_head, "bias", None)
    return found if bias is None else [*found, bias]


def still_describes(description: Description, model: Any) -> bool:
    """Whether a model consists of what it consisted of when it was described."""
    now = _tensors(model)
    return len(now) == len(description.taken) and all(
        taken.holds(tensor) for taken, tensor in zip(description.taken, now, strict=True)
    )


def _tensors(model: Any) -> list[torch.Tensor]:
    return [*unpacked_tensors(model), *(module.packed.base for module in packed_modules(model))]


def norm_modules(layer: Any, entry: Architecture) -> dict[str, Any]:
    """The norms of a layer by their names in a description; None where it has none."""
    found = {}
    for part, (before, after) in (("attention", entry.attention_norms), ("mlp", entry.mlp_norms)):
        found[f"{part}_norm"] = None if before is None else getattr(layer, before)
        found[f"{part}_output_norm"] = None if after is None else getattr(layer, after)
    for part in ("query", "key"):
        found[f"{part}_norm"] = getattr(layer.self_attn, f"{part[0]}_norm", None)
    return found


def _layer(model: Any, layer: Any, entry: Architecture, ropes: list[str]) -> Layer:
    config, attention, mlp = model.config, layer.self_attn, layer.mlp
    experts = None
    if hasattr(mlp, "experts"):
        normalize = getattr(mlp.gate, "norm_topk_prob", True)
        experts = Experts(_floats(mlp.gate.weight), mlp.gate.top_k, bool(normalize))
    norms: dict[str, Any] = {
        part: None if norm is None else _norm(norm, entry)
        for part, norm in norm_modules(layer, entry).items()
    }
    rope = ropes.index(getattr(attention, "layer_type", None) or "") if len(ropes) > 1 else 0
    return Layer(
        **_of_attention(config, attention, entry),
        **_of_mlp(mlp, entry),
        **norms,
        rope=rope if getattr(attention, "use_rope", True) else None,
        window=entry.window(config, attention),
        experts=experts,
    )


def _of_attention(config: Any, attention: Any, entry: Architecture) -> dict[str, Any]:
    if entry.fused:
        queries, keys = (
            count * attention.head_dim for count in (config.num_attention_heads, config.num_key_value_heads)
        )
        found = _split(attention.qkv_proj, {"query": queries, "key": keys, "value": keys})
    else:
        found = {name: _whole(getattr(attention, f"{name[0]}_proj")) for name in ("query", "key", "value")}
    return {**found, "output": _whole(attention.o_proj)}


def _of_mlp(mlp: Any, entry: Architecture) -> dict[str, Any]:
    if hasattr(mlp, "experts"):
        both, down = mlp.experts.gate_up_proj, mlp.experts.down_proj
        rows, hidden = both.packed.shape[1], down.packed.shape[1]
        return {
            "gate": Matrix(both, first=0, rows=rows // 2, stride=rows),
            "up": Matrix(both, first=rows // 2, rows=rows // 2, stride=rows),
            "down": Matrix(down, first=0, rows=hidden, stride=hidden),
        }
    if entry.fused:
        width = mlp.gate_up_proj.packed.shape[0] // 2
        found = _split(mlp.gate_up_proj, {"gate": width, "up": width})
    else:
        found = {name: _whole(getattr(mlp, f"{name}_proj")) for name in ("gate", "up")}
    return {**found, "down": _whole(mlp.down_proj)}


def _whole(module: Any) -> Matrix:
    return Matrix(module, module.bias)


def _split(module: Any, rows: dict[str, int]) -> dict[str, Matrix]:
    """Rows of one matrix as several."""
    found, first = {}, 0
    for name, count in rows.items():
        bias = None if module.bias is None else module.bias[first : first + count]
        found[name] = Matrix(module, bias, first, count)
        first += count
    return found


def _norm(module: Any, entry: Architecture) -> torch.Tensor:
    weight = _floats(module.weight)
    return weight + entry.norm_offset if entry.norm_offset else weight


def _floats(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().float().contiguous()


def _rope_types(model: Any) -> list[str]:
    kinds = getattr(model.model.rotary_emb, "rope_type", "default")
    return list(kinds.values()) if isinstance(kinds, dict) else [kinds]


def positions_of(model: Any) -> int | None:
    """How many positions a model was made for, if it says so."""
    known = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return known if isinstance(known, int) and known > 0 else None


def rope_limit(model: Any) -> int | None:
    """How many positions a model's angles hold for, until others would have to turn all; None: any."""
    if not set(_rope_types(model)) & set(_GROWING_ROPES):
        return None
    config = model.config
    parameters = config.rope_parameters
    first = parameters.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    return int(first or config.max_position_embeddings)


def _ropes(model: Any) -> dict[str, Rope]:
    """By kind of layer where they have their own (Gemma 3), else one."""
    rotary = model.model.rotary_emb
    frequencies = [buffer for name, buffer in rotary.named_buffers() if name.endswith("inv_freq")]
    # `.half()` rounds frequencies, and growing ropes change theirs when somebody else reads a long text.
    if rope_limit(model) is not None or any(one.dtype != torch.float32 for one in frequencies):
        rotary = type(rotary)(config=model.config).to(frequencies[0].device)
    kinds = getattr(rotary, "rope_type", None)
    prefixes = {kind: f"{kind}_" for kind in kinds} if isinstance(kinds, dict) else {"": ""}
    return {
        kind: Rope(
            getattr(rotary, f"{prefix}inv_freq").detach(),
            float(getattr(rotary, f"{prefix}attention_scaling")),
        )
        for kind, prefix in prefixes.items()
    }


def _key_offsets(described: Description) -> torch.Tensor | None:
    """What a packed cache keeps the keys of each layer less; None where keys have no bias, or are normed.

    Nor where scores are capped: what is taken from all of them would not be the same then.
    """
    if described.attention_cap:
        return None
    tables = [rope.tables(OFFSET_POSITIONS) for rope in described.ropes]
    offsets = []
    for layer in described.layers:
        if layer.key is None or layer.key.bias is None or layer.key_norm is not None:
            return None
        angles = () if layer.rope is None else tables[layer.rope]
        offsets.append(key_offset(layer.key.bias, described.head_dim, *angles))
    return torch.stack(offsets)


def _hooked(module: Any) -> bool:
    """Whether somebody looks at what goes in or out; transformers' hooks for hidden states stay for good."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(not str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks)
