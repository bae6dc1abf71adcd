"""Models of transformers and what GGUF calls them, in both directions; the config a GGUF file implies."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from otaro.errors import CheckpointError, brief

if TYPE_CHECKING:
    from otaro.file.gguf import Gguf


@dataclass(frozen=True)
class Architecture:
    """How one of transformers' kinds of model is written."""

    name: str
    """That of GGUF."""
    turned: bool = False
    """Whether neighbouring values of a head turn by one angle, where transformers turns values half a head
    apart: then rows of queries and keys are put into that order."""
    norm_offset: float = 0.0
    """What transformers adds to the weights of norms when it runs; GGUF has it added."""
    activation: str = "silu"
    numbers: dict[str, str] = field(default_factory=dict)
    """{method of gguf's writer: setting of the model}."""

    def turned_rows(self, name: str, rows: int, config: Any) -> torch.Tensor | None:
        """The rows of queries and keys with the two halves of each head interleaved; None for others."""
        projection = name.split(".")[-2] if "." in name else ""
        if not self.turned or projection not in ("q_proj", "k_proj"):
            return None
        heads = config.num_attention_heads if projection == "q_proj" else config.num_key_value_heads
        return torch.arange(rows).view(heads, 2, -1).transpose(1, 2).flatten()

    def order(self, name: str, shape: tuple[int, ...], config: Any) -> torch.Tensor:
        """Where a file has each row of a tensor; of experts, gates lie before ups."""
        if name.endswith(".experts.gate_up_proj"):
            experts, rows, _ = shape
            return torch.arange(experts * rows).view(2, experts, rows // 2).transpose(0, 1).flatten()
        turned = self.turned_rows(name, shape[0], config)
        if turned is not None:
            return turned.argsort()
        return torch.arange(prod(shape[:-1]))


_GEMMA: dict[str, Any] = {"norm_offset": 1.0, "activation": "gelu_pytorch_tanh"}

ARCHITECTURES = {
    "llama": Architecture("llama", turned=True),
    "mistral": Architecture("llama", turned=True),
    "mixtral": Architecture(
        "llama",
        turned=True,
        numbers={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    ),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3_moe": Architecture(
        "qwen3moe",
        numbers={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
    ),
    "smollm3": Architecture("smollm3", turned=True),
    "olmo2": Architecture("olmo2"),
    "phi3": Architecture("phi3"),
    "granite": Architecture(
        "granite",
        turned=True,
        numbers={
            "attention_scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
    "gemma2": Architecture(
        "gemma2",
        numbers={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        **_GEMMA,
    ),
    "gemma3_text": Architecture(
        "gemma3", numbers={"final_logit_softcapping": "final_logit_softcapping"}, **_GEMMA
    ),
}
_KEYS = {"attention_scale": "attention.scale"}  # where the writer's method has another name than the setting


def head_size(config: Any) -> int:
    """Width of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def llama3_factors(config: Any) -> torch.Tensor:
    """What rotary positions of type llama3 divide plain frequencies by."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    size = head_size(config)
    plain: torch.Tensor = config.rope_parameters["rope_theta"] ** -(torch.arange(0, size, 2).float() / size)
    factors: torch.Tensor = plain / frequencies
    return factors


def read_config(gguf: Gguf) -> tuple[Any, Architecture]:
    """The config of transformers that a file implies."""
    from transformers import AutoConfig

    if (parts := gguf.fields.get("split.count", 1)) != 1:
        raise gguf.refused(
            f"it is one of {str(parts)[:20]} parts, which llama.cpp's llama-gguf-split --merge makes one"
        )
    known = [kind for kind, entry in ARCHITECTURES.items() if entry.name == gguf.architecture]
    if not known:
        readable = ", ".join(dict.fromkeys(entry.name for entry in ARCHITECTURES.values()))
        raise gguf.refused(f"its architecture is {gguf.architecture!r}, and {readable} are read here")
    kind = "mixtral" if gguf.architecture == "llama" and gguf.setting("expert_count", 0) else known[0]
    entry = ARCHITECTURES[kind]
    settings = _common(gguf)
    for method, name in entry.numbers.items():
        if (value := gguf.fields.get(f"{gguf.architecture}.{_KEYS.get(method, method)}")) is not None:
            settings[name] = _number(gguf, _KEYS.get(method, method), value)
    settings |= _of_kind(kind, gguf, settings)
    # For activations, on GPUs. Those of Gemma are too large for float16.
    wide = "BF16" in gguf.kinds or entry.norm_offset
    settings["dtype"] = "float32" if set(gguf.kinds) == {"F32"} else "bfloat16" if wide else "float16"
    try:
        config = AutoConfig.for_model(kind, **settings)
    except Exception as error:  # whatever odd numbers make transformers stumble over
        raise gguf.refused(f"transformers makes no {kind} of its settings: {brief(error)}") from error
    if "rope_freqs.weight" in gguf.tensors:
        _check_frequencies(gguf, config)
    return config, entry


def _common(gguf: Gguf) -> dict[str, Any]:
    heads, width = _count(gguf, "attention.head_count"), _count(gguf, "embedding_length")
    layers = _count(gguf, "block_count")
    if layers > len(gguf.tensors):
        raise gguf.refused(f"it states {layers} layers and has {len(gguf.tensors)} tensors")
    if "token_embd.weight" not in gguf.tensors:
        raise gguf.refused("it has no embedding (token_embd.weight)")
    settings: dict[str, Any] = {
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
        "hidden_size": width,
        "intermediate_size": _count(gguf, "feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _count(gguf, "attention.head_count_kv", heads),
        "head_dim": _count(gguf, "attention.key_length", width // heads),
        "max_position_embeddings": _count(gguf, "context_length"),
        "rms_norm_eps": _number(gguf, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(gguf),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
    }
    if settings["head_dim"] % 2:
        raise gguf.refused(f"its heads are {settings['head_dim']} wide, and rotary positions turn pairs")
    for name in ("bos", "eos", "pad"):
        number = gguf.fields.get(f"tokenizer.ggml.{'padding' if name == 'pad' else name}_token_id")
        settings[f"{name}_token_id"] = number if type(number) is int else None
    return settings


def _rope(gguf: Gguf) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": _number(gguf, "rope.freq_base", 1e4)}
    scaling = gguf.setting("rope.scaling.type", "none")
    if "rope_freqs.weight" in gguf.tensors:
        factors = gguf.rows("rope_freqs.weight", torch.zeros(1, dtype=torch.long))
        numbers = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        rope |= {"rope_type": "llama3", "factor": round(float(factors.max()), 3), **numbers}
    elif scaling in ("linear", "yarn"):
        rope |= {"rope_type": scaling, "factor": _number(gguf, "rope.scaling.factor")}
        if scaling == "yarn":
            rope["original_max_position_embeddings"] = _count(gguf, "rope.scaling.original_context_length")
    elif scaling != "none" or "rope_factors_long.weight" in gguf.tensors:
        raise gguf.refused(f"its rotary positions are of type {scaling}")
    return rope


def _of_kind(kind: str, gguf: Gguf, settings: dict[str, Any]) -> dict[str, Any]:
    """What sets an architecture apart."""
    biased = "blk.0.attn_q.bias" in gguf.tensors
    if kind in ("llama", "granite"):
        return {"attention_bias": biased, "mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors}
    if kind in ("qwen3", "qwen3_moe", "olmo2", "smollm3"):
        return {"attention_bias": biased} | ({"norm_topk_prob": True} if kind == "qwen3_moe" else {})
    if kind == "phi3":
        share = _count(gguf, "rope.dimension_count", settings["head_dim"]) / settings["head_dim"]
        return {
            "sliding_window": None,
            "rope_parameters": {**settings["rope_parameters"], "partial_rotary_factor": share},
        }
    if kind not in ("gemma2", "gemma3_text"):
        return {"sliding_window": None} if kind == "mixtral" else {}
    layers, every = settings["num_hidden_layers"], 2 if kind == "gemma2" else 6
    largest = layers == (46 if kind == "gemma2" else 62)
    pattern = gguf.setting("attention.sliding_window_pattern", every)
    if isinstance(pattern, int) and pattern > 0:
        pattern = [(number + 1) % pattern != 0 for number in range(layers)]
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise gguf.refused("it does not say for each layer whether it has a window")
    found = {
        "sliding_window": _count(gguf, "attention.sliding_window"),
        "layer_types": ["sliding_attention" if sliding else "full_attention" for sliding in pattern],
        "query_pre_attn_scalar": (
            settings["hidden_size"] // settings["num_attention_heads"] if largest else settings["head_dim"]
        ),
    }
    if kind == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": _number(gguf, "rope.freq_base_swa", 1e4)}
        found["rope_parameters"] = {"full_attention": settings["rope_parameters"], "sliding_attention": local}
    return found


def _check_frequencies(gguf: Gguf, config: Any) -> None:
    """Of Llama 3 a file has the factors alone, and not what they were made from."""
    stored = gguf.rows("rope_freqs.weight", torch.zeros(1, dtype=torch.long)).flatten()
    wanted = llama3_factors(config)
    if stored.shape != wanted.shape or not torch.allclose(stored, wanted, rtol=1e-4):
        raise gguf.refused("its rotary positions are not those of Llama 3")


def _count(gguf: Gguf, name: str, default: int | None = None) -> int:
    value = gguf.setting(name, default)
    if type(value) is not int or not 0 < value < 1 << 31:
        raise _odd(gguf, name, value)
    return value


def _number(gguf: Gguf, name: str, default: Any = None) -> Any:
    value = gguf.setting(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _odd(gguf, name, value)
    return value


def _odd(gguf: Gguf, name: str, value: Any) -> CheckpointError:
    return gguf.refused(f"its {gguf.architecture}.{name} is {str(value)[:20]!r}")
