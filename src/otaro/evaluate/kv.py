"""Reading a text through the decoder's own cache, to see what packed keys and values cost.

The decoder keeps keys and values in float16, or at a precision; transformers, by which everything else is measured, in
the type of the model. A window is read from an empty cache, in steps: a token's arithmetic does not depend on the tokens it is
read with, so the logits are those of reading one token after the other, and what a token attends to is what the cache holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from otaro.errors import OtaroError, PrecisionError
from otaro.evaluate.logits import SLICE
from otaro.runtime.decode import Decoder
from otaro.runtime.gpu import GpuDecoder
from otaro.sefp.precision import PRECISIONS, Precision

FLOAT16 = "float16"
KV_NAMES = (FLOAT16, *map(str, PRECISIONS))


def parse_kv(text: str) -> tuple[str, ...]:
    """`float16,E5M7,E5M5` as names; `all` for all of them."""
    names = [name.strip() for name in text.split(",")]
    if names == ["all"]:
        return KV_NAMES
    exact = {name.lower(): name for name in KV_NAMES}
    if odd := [name for name in names if name.lower() not in exact]:
        raise PrecisionError(f"--kv {odd[0]}: give all, or some of {', '.join(KV_NAMES)}")
    return tuple(dict.fromkeys(exact[name.lower()] for name in names))


class KvReader:
    """Reads by the decoder of a nested model, with keys and values in float16 or at a precision."""

    def __init__(self, model: Any, kv: str) -> None:
        on_gpu = model.device.type == "cuda"
        if why_not := GpuDecoder.why_not(model) if on_gpu else Decoder.why_not(model):
            raise OtaroError(f"--kv {kv} needs the decoder, which does not serve this model: {why_not}")
        self._decoder: Any = GpuDecoder.of(model) if on_gpu else Decoder.of(model)
        self._kv = None if kv == FLOAT16 else Precision(kv)
        self._at_once = max(8, SLICE // int(model.config.vocab_size))

    def read(self, ids: torch.Tensor, with_logits: bool) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None]]:
        """Logits at the positions of a window, some at a time."""
        cache = self._decoder.new_cache(kv=self._kv)
        for some in ids.split(self._at_once):
            yield None, self._decoder.forward(some.tolist(), cache, all_logits=True)
