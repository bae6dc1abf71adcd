"""What `otaro bench` times: things that read tokens, one after the other, and remember them.

An engine is fed tokens and computes the logits that follow the last one; how it does so is its own affair. Ours come in two
kinds: the decode path for the architectures it knows, and transformers' forward on the packed modules for all others.
`plain_model` makes an ordinary float32 model of the decoded weights, the one to compare with.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from otaro.runtime.decode import Decoder
from otaro.runtime.precision import attachment
from otaro.sefp.precision import Precision

_GROWTH = 64  # tokens by which a decoder's cache grows


class Engine(Protocol):
    """Reads tokens and remembers them."""

    def feed(self, ids: list[int]) -> None:
        """Read these tokens after those before; the logits after the last one are computed when this returns."""

    def keep(self, length: int) -> None:
        """Forget all but the first `length` tokens."""


class DecodePath:
    """The decode path, with its keys and values in float16 or at the precision `kv`."""

    def __init__(self, model: Any, kv: Precision | None = None) -> None:
        self._decoder = Decoder(model)
        self._cache = self._decoder.new_cache(kv=kv)

    def feed(self, ids: list[int]) -> None:
        """Read tokens."""
        self._decoder.forward(ids, self._cache)

    def keep(self, length: int) -> None:
        """Forget later tokens."""
        self._cache.crop(length)

    @property
    def kv_bytes_per_token(self) -> float:
        """Of keys and values, once something was read."""
        return float(self._cache.nbytes / (-(-self._cache.length // _GROWTH) * _GROWTH))


class Forward:
    """A transformers model, packed or plain, called token by token with its own cache."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.keep(0)

    @torch.inference_mode()
    def feed(self, ids: list[int]) -> None:
        """Read tokens."""
        self._model(torch.tensor([ids]), past_key_values=self._cache, use_cache=True, logits_to_keep=1)

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


def plain_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a nested model at its finest, in float32, by their names in an ordinary checkpoint; tied ones once."""
    attached = attachment(model)
    finest = attached.nested.finest
    for name, tensor in model.state_dict().items():
        yield name, tensor.float()
    for packed in dict.fromkeys(module.packed for module in attached.modules.values()):
        packed.reach(finest.mantissa_bits)
        yield packed.name, packed.decode(finest.mantissa_bits, torch.float32).reshape(packed.shape)


def plain_model(model: Any) -> Any:
    """An ordinary float32 model with the weights of a nested one at its finest precision."""
    config = copy.deepcopy(model.config)
    del config.quantization_config
    with torch.device("meta"):
        plain = type(model)(config)
    plain.to_empty(device="cpu").load_state_dict(dict(plain_weights(model)), strict=False)
    plain.tie_weights()
    # Buffers that no checkpoint holds, such as the frequencies of rotary embeddings.
    there = dict(plain.named_buffers())
    for name, buffer in model.named_buffers():
        if name in there:
            there[name].copy_(buffer)
    return plain.eval()
