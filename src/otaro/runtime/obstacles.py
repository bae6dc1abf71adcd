"""Why a generation goes through transformers instead of a decoder, and what the user is told."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from otaro.errors import OtaroWarning, PositionsWarning, SlowWarning
from otaro.kernels.ops import OVERRIDE
from otaro.runtime import serving
from otaro.runtime.architectures import positions_of, rope_limit
from otaro.runtime.modules import SefpEmbedding
from otaro.runtime.precision import attachment


class Obstacle(NamedTuple):
    """What keeps the decoder from serving, in words."""

    reason: str
    advice: str | None = None
    """What to do about it; None where it was asked for, so that nobody is surprised."""


_ADVICE = {"it has forward hooks": "remove them", "it is in training mode and drops out": "call model.eval()"}


def tokens_at_most(model: Any) -> int | None:
    """How long a text can be where positions are a table (GPT-2, OPT, GPT-J): the last token is not read."""
    known = positions_of(model)
    if known is None:
        return None
    words = model.get_input_embeddings()
    embeddings = (
        one
        for one in model.modules()
        if isinstance(one, torch.nn.Embedding | SefpEmbedding) and one is not words
    )
    tables = [one.num_embeddings for one in embeddings]
    tables += [len(buffer) for name, buffer in model.named_buffers() if name.endswith("embed_positions")]
    # OPT's has two rows more
    return known + 1 if any(known <= rows <= known + 2 for rows in tables) else None


def warn_of_positions(model: Any, positions: int) -> None:
    """Where angles go on but the model was never trained."""
    told = (
        f"this text goes past the {positions} positions that the model was made for; what it says there "
        "may be poor"
    )
    _warn_once(model, "positions", told, PositionsWarning)


def _warn_once(model: Any, about: str, message: str, kind: type[OtaroWarning]) -> None:
    """Once for each model and matter; with a lock, as threads may come at once."""
    attached = attachment(model)
    with attached.nested.lock:
        if about in attached.warned:
            return
        attached.warned.add(about)
    warnings.warn(message, kind, stacklevel=3)


def warn_slow(model: Any, obstacle: Obstacle) -> None:
    """Say why tokens are made more slowly than they could be, to those who did not ask for that."""
    if obstacle.advice is None:
        return
    advice = obstacle.advice and f"; {obstacle.advice}"
    if model.device.type == "cpu" and model.dtype != torch.float32:
        own = str(model.dtype).removeprefix("torch.")
        advice += f"; load it with dtype=torch.float32, which is faster here than {own}"
    told = (
        f"this {type(model).__name__} generates through transformers, slower than the decoder: "
        f"{obstacle.reason}{advice}"
    )
    _warn_once(model, obstacle.advice or obstacle.reason, told, SlowWarning)


def of_model(model: Any) -> Obstacle | None:
    """What about this model no decoder does."""
    reason = serving.why_not(model)
    if reason is None:
        return None
    return Obstacle(reason, None if reason.startswith(OVERRIDE) else _ADVICE.get(reason, ""))


def of_call(model: Any, input_ids: torch.Tensor, options: Mapping[str, Any]) -> Obstacle | None:
    """What in these options the model's decoder does not do."""
    rows, limit = serving.kind_of(model).max_sequences, rope_limit(model)
    config, known = (
        options["generation_config"],
        {"generation_config", "streamer", "tokenizer", "use_cache", "logits_to_keep"},
    )
    if len(input_ids) > rows:
        told = f"the batch has {len(input_ids)} rows, and the decoder takes {rows}"
        return Obstacle(told, f"generate {rows} at a time")
    if limit is not None and config.max_length > limit + 1:  # the last token is not read
        told = (
            f"up to {config.max_length} tokens are wanted, and the decoder knows this model's rotary "
            f"positions up to {limit}"
        )
        return Obstacle(told, "ask for fewer new tokens")
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        return Obstacle("attentions or hidden states are wanted")
    if config.use_cache is False:
        return Obstacle("use_cache is False")
    if config.cache_implementation not in (None, "dynamic"):
        return Obstacle(f"cache_implementation is {config.cache_implementation}")
    if config.is_assistant:
        return Obstacle("it assists another model")
    mask = options.get("attention_mask")
    if (
        mask is not None
        and not bool((mask == 1).all())
        and not (mask.dim() == 2 and padded_on_the_left(mask))
    ):
        return Obstacle(
            "the prompt is padded, and not on its left", "set the tokenizer's padding_side to 'left'"
        )
    known |= {"attention_mask", "position_ids", "cache_position", "past_key_values"}
    unknown = [
        name
        for name, value in options.items()
        if name not in known and value is not None and value is not False
    ]
    return Obstacle(f"{unknown[0]} was given", f"leave {unknown[0]} out") if unknown else None


def padded_on_the_left(mask: torch.Tensor) -> bool:
    """Whether what a mask [rows, tokens] hides is at the beginning of each row, and not all of it."""
    seen = mask == 1
    return bool((seen | (mask == 0)).all() and (seen[:, 1:] | ~seen[:, :-1]).all() and seen[:, -1].all())
