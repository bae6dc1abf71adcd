"""Models of transformers as GGUF knows them: names of settings and tensors, order of rows.

What llama.cpp builds in and a file cannot say (which layers have no positions, how scores are scaled) is
compared with the model's config. Where they differ in what short texts show, the model is refused; a window
is a note.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from otaro.errors import OtaroError
from otaro.export.source import Piece, Source
from otaro.file.gguf_config import ARCHITECTURES, Architecture, head_size, llama3_factors


def architecture(config: Any) -> Architecture:
    """That of a model; refused where there is none, or where llama.cpp would compute something else."""
    kind = config.model_type
    if kind not in ARCHITECTURES:
        raise OtaroError(
            f"{kind} models cannot be written as GGUF here, but {', '.join(ARCHITECTURES)} can; "
            "export --to hf, and give that to llama.cpp's own converter"
        )
    if why := _unlike(config, ARCHITECTURES[kind]):
        raise OtaroError(f"llama.cpp would not compute what this model does: {why}; export --to hf instead")
    return ARCHITECTURES[kind]


def _unlike(config: Any, entry: Architecture) -> str:
    """What llama.cpp does otherwise, in words; empty if nothing."""
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "silu")
    if activation != entry.activation:
        return f"its activation is {activation}, there {config.model_type} models have {entry.activation}"
    if (kind := _rope(config)["rope_type"]) not in ("default", "linear", "llama3", "yarn", "longrope"):
        return f"its rotary positions are of type {kind}"
    if (kind == "longrope") != ("long_factor" in _rope(config)) or (
        kind == "longrope" and entry.name != "phi3"
    ):
        return f"its rotary positions are of type {kind}"
    if kind == "llama3" and entry.name not in ("llama", "granite"):
        return f"{config.model_type} models have no rotary positions of type llama3 there"
    if entry.name == "smollm3":
        without = [not int(used) for used in config.no_rope_layers]
        if without != [number % 4 == 3 for number in range(config.num_hidden_layers)]:
            return "it leaves out positions in other layers than every fourth"
    if entry.name in ("gemma2", "gemma3"):
        largest = config.num_hidden_layers == {"gemma2": 46, "gemma3": 62}[entry.name]
        wanted = config.hidden_size // config.num_attention_heads if largest else config.head_dim
        if config.query_pre_attn_scalar != wanted:
            return (
                f"its scores are divided by the root of {config.query_pre_attn_scalar}, there by that of "
                f"{wanted}"
            )
    if entry.name == "granite" and head_size(config) * config.num_attention_heads != config.hidden_size:
        return "its heads are not as wide as its state divided by their number"
    if entry.name == "qwen3moe" and not config.norm_topk_prob:
        return "the weights of its experts do not add up to one"
    return ""


def _rope(config: Any) -> dict[str, Any]:
    """Rotary positions; of the layers that see everything where there are two kinds."""
    parameters = config.rope_parameters
    return dict(parameters.get("full_attention", parameters))


def metadata(config: Any, entry: Architecture) -> dict[str, Any]:
    """What llama.cpp must know of the model, by names of gguf's writer."""
    size, rope = head_size(config), _rope(config)
    found = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "key_length": size,
        "value_length": size,
        "rope_dimension_count": int(size * rope.get("partial_rotary_factor", 1.0)),
        "rope_freq_base": rope["rope_theta"],
        "layer_norm_rms_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
    }
    numbers = {method: getattr(config, setting) for method, setting in entry.numbers.items()}
    found |= {method: number for method, number in numbers.items() if number is not None}
    if rope["rope_type"] in ("linear", "yarn"):
        found |= {"rope_scaling_type": _scaling(rope["rope_type"]), "rope_scaling_factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        optional = {
            "attention_factor": "yarn_attn_factor",
            "beta_fast": "yarn_beta_fast",
            "beta_slow": "yarn_beta_slow",
        }
        found |= {
            f"rope_scaling_{name}": rope[key] for key, name in optional.items() if rope.get(key) is not None
        }
    if entry.name == "phi3" or rope["rope_type"] == "yarn":
        found["rope_scaling_orig_ctx_len"] = _original_context(config, rope)
    if rope["rope_type"] == "longrope":
        found |= {
            "rope_scaling_type": _scaling("longrope"),
            "rope_scaling_attn_factors": _longrope_factor(config, rope),
        }
    if entry.name in ("gemma2", "gemma3"):
        found["sliding_window"] = config.sliding_window
        found["sliding_window_pattern"] = [kind == "sliding_attention" for kind in config.layer_types]
    if entry.name == "gemma3":
        found["rope_freq_base_swa"] = config.rope_parameters["sliding_attention"]["rope_theta"]
    if entry.name == "phi3":
        found["sliding_window"] = config.sliding_window or 0
    return found


def _scaling(kind: str) -> Any:
    import gguf

    return gguf.RopeScalingType[kind.upper()]


def _original_context(config: Any, rope: dict[str, Any]) -> int:
    stated = rope.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    return int(stated or config.max_position_embeddings)


def _longrope_factor(config: Any, rope: dict[str, Any]) -> float:
    """What longrope multiplies cosines and sines by."""
    if (stated := rope.get("attention_factor")) is not None:
        return float(stated)
    original = _original_context(config, rope)
    factor = config.max_position_embeddings / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def notes(config: Any, entry: Architecture) -> list[str]:
    """Where llama.cpp computes otherwise once a text gets long."""
    window = getattr(config, "sliding_window", None)
    if not window or entry.name in ("gemma2", "gemma3") or window >= config.max_position_embeddings:
        return []
    return [
        f"llama.cpp has no window for {config.model_type} models: beyond {window} tokens it sees more "
        "than this model does"
    ]


def extra_tensors(config: Any, entry: Architecture) -> dict[str, torch.Tensor]:
    """What rotary frequencies are divided by, where they are not plain."""
    rope = _rope(config)
    if rope["rope_type"] == "longrope":
        return {
            f"rope_factors_{kind}.weight": torch.tensor(rope[f"{kind}_factor"]) for kind in ("long", "short")
        }
    if rope["rope_type"] != "llama3":
        return {}
    return {"rope_freqs.weight": llama3_factors(config)}


def pieces(source: Source, entry: Architecture, names: Any) -> list[Piece]:
    """All tensors by GGUF's names; `names` is gguf's own map."""
    found = []
    for name in source.names:
        shape = source.shape(name)
        if name.endswith(".experts.gate_up_proj"):  # rows of gates, then as many of ups, expert after expert
            experts, rows, length = shape
            numbers = torch.arange(experts * rows).view(experts, 2, rows // 2)
            for part, key in enumerate(("gate", "up")):
                target = _renamed(name.replace("gate_up_proj", f"{key}_proj"), names, source)
                found.append(Piece(target, name, (experts, rows // 2, length), numbers[:, part].flatten()))
        else:
            order = entry.turned_rows(name, shape[0], source.config)
            found.append(Piece(_renamed(name, names, source), name, shape, order))
    return found


def _renamed(name: str, names: Any, source: Source) -> str:
    full = name if name.endswith((".weight", ".bias")) else f"{name}.weight"
    if (found := names.get_name(full, (".weight", ".bias"))) is None:
        raise OtaroError(f"GGUF's {source.config.model_type} models have no {name}; export --to hf instead")
    return str(found)
