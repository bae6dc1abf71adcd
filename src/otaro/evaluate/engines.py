"""What `otaro bench` times: things that read tokens, one after the other, and remember them.

An engine is fed tokens and computes the logits that follow the last one; how it does so is its own affair.
Ours come in two kinds: the decode path for the architectures it knows, of a CPU or of a GPU, and
transformers' forward on the packed modules for all others. `plain_model` makes an ordinary model of the
decoded weights, the one to compare with.
"""

from __future__ import annotations

from typing import Any

import torch

from otaro.errors import OtaroError
from otaro.evaluate.decoded import DecodedModel
from otaro.runtime.decode import Decoder
from otaro.runtime.gpu import GpuDecoder
from otaro.runtime.loop import Chunks, Loop, Row, Slot
from otaro.runtime.precision import attachment
from otaro.runtime.sample import Sampler, argmax
from otaro.sefp.precision import Precision

_GROWTH = 64  # tokens by which a decoder's cache grows


class Engine:
    """Reads tokens and remembers them."""

    def feed(self, ids: list[int]) -> None:
        """Read these tokens after those before; when this returns, the logits after the last are there."""
        raise NotImplementedError

    def keep(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        raise NotImplementedError

    def decode(self, ids: list[int]) -> None:
        """Read these tokens one by one."""
        for token in ids:
            self.feed([token])

    @property
    def kv_bytes_per_token(self) -> float:
        """Of keys and values, once something was read."""
        raise NotImplementedError

    def kv_bytes(self, tokens: int) -> int:
        """Held for so many tokens."""
        return round(self.kv_bytes_per_token * tokens)

    @property
    def graph_bytes(self) -> int | None:
        """Of what was captured on a GPU so far."""
        return None


def engine_for(model: Any, kv: Precision | None, positions: int, on_gpu: bool) -> tuple[Engine, str | None]:
    """What runs a nested model here, and why it is not the decode path, if it is not."""
    if why_not := GpuDecoder.why_not(model) if on_gpu else Decoder.why_not(model):
        if kv:
            raise OtaroError(f"keys and values at {kv} need the decode path, but {why_not}")
        return Forward(model), why_not
    return DecodePath(model, kv, positions if on_gpu else 0), None


class DecodePath(Engine):
    """The decode path, by the loop that all tokens come from, keys and values in float16 or at `kv`.

    With `positions`, that of a GPU, whose memory for so many tokens is of one size from the start.
    """

    def __init__(self, model: Any, kv: Precision | None = None, positions: int = 0) -> None:
        self._on_gpu = positions > 0
        self._decoder: Any = (GpuDecoder if positions else Decoder).of(model)
        self._cache: Any = self._decoder.new_cache(kv, capacity=positions)
        self._loop = _Loop(self._decoder, self._cache)

    def feed(self, ids: list[int]) -> None:
        """Read tokens."""
        self._decoder.forward(ids, self._cache)

    def decode(self, ids: list[int]) -> None:
        """Read these; a GPU reads as many, the first of these, then the likeliest, started a step ahead."""
        self._loop.run(ids)

    def keep(self, length: int) -> None:
        """Forget later tokens."""
        self._cache.crop(length)

    @property
    def kv_bytes_per_token(self) -> float:
        """Of keys and values, once something was read."""
        room = self._cache.capacity if self._on_gpu else -(-self._cache.length // _GROWTH) * _GROWTH
        return float(self._cache.nbytes / room)

    def kv_bytes(self, tokens: int) -> int:
        """Held for so many tokens."""
        return int(self._cache.nbytes) if self._on_gpu else super().kv_bytes(tokens)

    @property
    def graph_bytes(self) -> int | None:
        """Of what was captured on a GPU so far."""
        return int(self._decoder.graph_bytes) if self._on_gpu else None


class _Loop(Loop):
    """One sequence, as the model is set."""

    def __init__(self, decoder: Any, cache: Any) -> None:
        super().__init__(decoder, cache, Chunks(1, exact=True))

    def run(self, ids: list[int]) -> None:
        self._ids, ahead, plain = ids, bool(self.decoder.ahead), Sampler((), False)
        row = Row(ids=ids[:1], prompt=0, limit=len(ids) + 1, argmax=ahead, sampler=plain, slot=Slot(0))
        self._running = [row]
        while self.step():
            pass

    def bits(self, some: list[Any], later: int = 0) -> list[bytes]:
        return [self.decoder.description.precisions()]

    def choose(self, some: list[Any], logits: torch.Tensor) -> None:
        self.take(some, argmax(logits))

    def take(self, some: list[Any], tokens: list[int]) -> None:
        (row,) = some
        row.ids += self._ids[row.new : row.new + 1] or tokens  # on a GPU they are not read
        if row.new == row.limit:
            self._leave(row)

    def failed(self, some: list[Any], error: Exception, alone: bool) -> None:
        raise error


class Forward(Engine):
    """A transformers model, packed or plain, called token by token with its own cache."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.keep(0)

    @torch.inference_mode()
    def feed(self, ids: list[int]) -> None:
        """Read tokens."""
        inputs = torch.tensor([ids], device=self._model.device)
        self._model(inputs, past_key_values=self._cache, use_cache=True, logits_to_keep=1)

    def keep(self, length: int) -> None:
        """Forget later tokens."""
        from transformers import DynamicCache

        if length == 0:
            self._cache = DynamicCache(config=self._model.config)
        elif (surplus := self._cache.get_seq_length() - length) > 0:
            self._cache.crop(-surplus)

    @property
    def kv_bytes_per_token(self) -> float:
        """Of keys and values, once something was read."""
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in self._cache.layers)
        return float(held / self._cache.get_seq_length())


def plain_model(model: Any, dtype: torch.dtype = torch.float32) -> Any:
    """An ordinary model, where the nested one is, with its weights at their finest precision."""
    return DecodedModel(model, dtype, keep_planes=True).at(attachment(model).nested.finest)
