"""`decoder.json`: a nested directory's description, for programs without Python (`otaro.h`, `otaro-run`, the
browser).

It is what `description.py` says, with tensors by their names in the base shard; FORMAT.md lists its fields.
So no other program has to know architectures. Numbers are written as the float32 that every decoder takes
them for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils import logging

from otaro.errors import OtaroError
from otaro.file.atomic import write_text
from otaro.file.replace import DECODER_FILE
from otaro.runtime.architectures import ARCHITECTURES, describe, norm_modules, positions_of, why_not
from otaro.runtime.description import MATRICES, Description, Layer, Matrix
from otaro.runtime.load import load
from otaro.sefp.precision import COARSEST, of_mantissa_bits

VERSION = 1
_NUMBERS = ("eps", "scale", "attention_cap", "logit_cap", "embedding_scale", "residual_scale", "logit_scale")


def write_decoder_file(directory: Path) -> None:
    """Put `decoder.json` into a nested directory; refused where no decoder serves the model."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # nobody asked for a model to be loaded
    try:
        model = load(directory, of_mantissa_bits(COARSEST))
    finally:
        if shown:
            logging.enable_progress_bar()
    if reason := why_not(model):
        raise OtaroError(f"{directory} runs in Python only: {reason}")
    write_text(directory / DECODER_FILE, decoder_text(model))


def decoder_text(model: Any) -> str:
    """What `decoder.json` says of a loaded nested model."""
    described, entry = describe(model), ARCHITECTURES[model.config.model_type]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    layers = []
    for layer, module in zip(described.layers, model.model.layers, strict=True):
        norms = {
            part: names[id(norm.weight)]
            for part, norm in norm_modules(module, entry).items()
            if norm is not None
        }
        router = None if layer.experts is None else names[id(module.mlp.gate.weight)]
        layers.append(_layer(layer, names, router) | norms)
    stated = {
        "version": VERSION,
        "model": described.modules[0].packed.nested.base.header.model,
        "architecture": model.config.model_type,
        **{name: getattr(described, name) for name in ("heads", "kv_heads", "head_dim", "activation")},
        **{name: _number(getattr(described, name)) for name in _NUMBERS},
        "norm_offset": entry.norm_offset,
        "positions": described.positions,
        "trained_positions": positions_of(model),
        "ropes": _ropes(described),
        "embedding": _matrix(described.embedding, names),
        "norm": names[id(model.model.norm.weight)],
        "lm_head": _matrix(described.lm_head, names),
        "layers": layers,
    }
    return json.dumps({name: value for name, value in stated.items() if value is not None}, indent=1) + "\n"


def _ropes(described: Description) -> list[dict[str, Any]]:
    return [
        {"frequencies": [_number(one) for one in rope.frequencies.tolist()], "scale": _number(rope.scale)}
        for rope in described.ropes
    ]


def _layer(layer: Layer, names: dict[int, str], router: str | None) -> dict[str, Any]:
    stated: dict[str, Any] = {name: _matrix(getattr(layer, name), names) for name in MATRICES}
    if layer.rope is not None:
        stated["rope"] = layer.rope
    if layer.window:
        stated["window"] = layer.window
    if layer.experts is not None:
        chosen, normalize = layer.experts.chosen, layer.experts.normalize
        stated["experts"] = {"router": router, "chosen": chosen, "normalize": normalize}
    return stated


def _matrix(matrix: Matrix, names: dict[int, str]) -> dict[str, Any]:
    module = matrix.module
    stated: dict[str, Any] = {"tensor": module.packed.name}
    if (bias := getattr(module, "bias", None)) is not None:
        stated["bias"] = names[id(bias)]
    if (matrix.first, matrix.rows, matrix.stride) != (0, module.packed.base.shape[0], 0):
        stated |= {"first": matrix.first, "rows": matrix.rows}
    if matrix.stride:
        stated["stride"] = matrix.stride
    return stated


def _number(value: float) -> float:
    """The float32 nearest to it, in the fewest digits."""
    return float(str(np.float32(value)))
