"""Which decoder serves a model: on a CPU the extension's (`decode`), on a GPU that of graphs (`gpu`)."""

from __future__ import annotations

from typing import Any

import torch

from otaro.runtime.decode import Decoder
from otaro.runtime.gpu import GpuDecoder
from otaro.runtime.precision import attachment


def kind_of(model: Any) -> type[Decoder] | type[GpuDecoder]:
    """The decoder for the device that a model is on."""
    return GpuDecoder if model.device.type == "cuda" else Decoder


def why_not(model: Any) -> str | None:
    """Why this model has to go through transformers, in words; None if a decoder serves it."""
    return kind_of(model).why_not(model)


@torch.inference_mode(False)
def decoder_of(model: Any) -> Decoder | GpuDecoder:
    """The decoder of a model, made when it is first needed, and anew when the model was changed."""
    attached, kind = attachment(model), kind_of(model)
    with attached.nested.lock:
        if not isinstance(attached.decoder, kind) or not attached.decoder.serves(model):
            attached.decoder = GpuDecoder.of(model) if kind is GpuDecoder else Decoder.of(model)
        decoder: Decoder | GpuDecoder = attached.decoder
    return decoder


def forget(model: Any) -> None:
    """Let go of a model's decoder: it points into tensors that are about to move, and would keep them."""
    attached = attachment(model)
    with attached.nested.lock:
        attached.decoder = None
