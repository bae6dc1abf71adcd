"""A nested model as an ordinary one: its weights at one precision, decoded once, for whoever reads much text.

Packed modules decode what a call needs and forget it. That is right for running a model, and slow for
measuring it: every window would decode every weight anew. So for measuring each precision is decoded once,
into an ordinary transformers model in float32 on a CPU, elsewhere in the model's own type, and transformers
runs it as it runs any other.

The values are those of the packed modules' `weight`, to the last bit. So are the products, up to the rounding
of a sum: for more than a few tokens (`kernels.ops.FEW_TOKENS`) a packed module decodes its weights and
multiplies in floating point too. Only up to so many tokens at once, as when generating, are activations
rounded to 16-bit integers.

One set of decoded weights is in memory, whatever the number of precisions: the next is decoded over it, as
far as it differs. A precision may be one for each tensor (`file.fits`). Norms, biases and all else that is
not packed are the nested model's own tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from otaro.runtime.generate import Generates
from otaro.runtime.modules import PackedWeight, SefpEmbedding
from otaro.runtime.precision import attachment, trim
from otaro.sefp.precision import Precision

_AT_ONCE = 1 << 22  # weights decoded together: a copy of so many is in memory beside the model
_TRIM_EVERY = 1 << 27  # weights, whose planes may be in memory too


class DecodedModel:
    """An ordinary model of a nested one's weights, at one of its precisions at a time.

    >>> decoded = DecodedModel(otaro.load(DIR))                              # doctest: +SKIP
    >>> decoded.at("E5M4").generate(...)                                     # doctest: +SKIP
    """

    def __init__(self, nested: Any, dtype: torch.dtype | None = None, *, keep_planes: bool = False) -> None:
        """`nested` is a model as `otaro.load` returns it; `dtype` is its own unless said otherwise.

        Planes that were decoded leave the memory, unless `keep_planes`: for a nested model that runs too.
        """
        self.nested, self._keep_planes = nested, keep_planes
        modules = {module.packed: module for module in attachment(nested).modules.values()}
        self._weights = {
            packed: torch.empty(packed.shape, dtype=dtype or module._like.dtype, device=packed.base.device)
            for packed, module in modules.items()
        }
        self._model = _ordinary(nested, dtype)
        seen = {packed.name: modules[packed].laid_out(weight) for packed, weight in self._weights.items()}
        self._model.load_state_dict(seen, assign=True, strict=False)
        self._model.tie_weights()
        self._model.requires_grad_(False).eval()
        self._at: dict[PackedWeight, int] = {}

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The decoded weights by the names of their packed tensors, as they are now."""
        return {packed.name: weight for packed, weight in self._weights.items()}

    def at(self, precision: str | Precision | Mapping[str, Precision]) -> Any:
        """The model at this precision, or with one for each packed tensor, until the next call."""
        named = (
            precision if isinstance(precision, Mapping) else dict.fromkeys(self.weights, Precision(precision))
        )
        wanted = {packed: named[packed.name].mantissa_bits for packed in self._weights}
        if wanted != self._at:
            attachment(self.nested).nested.require(max(named.values()))
            self._decode({packed: bits for packed, bits in wanted.items() if self._at.get(packed) != bits})
        return self._model

    @torch.inference_mode()
    def _decode(self, wanted: dict[PackedWeight, int]) -> None:
        since = 0
        for packed, bits in wanted.items():
            weight = self._weights[packed]
            self._at.pop(packed, None)  # whatever interrupts this leaves a mixture
            packed.reach(bits)
            target = weight.view(-1, packed.shape[-1])
            rows = max(1, _AT_ONCE // packed.shape[-1])
            for start in range(0, len(target), rows):
                some = slice(start, min(start + rows, len(target)))
                target[some] = packed.decode(bits, weight.dtype, some)
            self._at[packed] = bits
            since += prod(packed.shape)
            if since >= _TRIM_EVERY and not self._keep_planes:
                trim(self.nested, everything=True)
                since = 0
        if not self._keep_planes:
            trim(self.nested, everything=True)


def _ordinary(nested: Any, dtype: torch.dtype | None) -> Any:
    """The model with its packed weights on the meta device, and all else as the nested model has it."""
    config = copy.deepcopy(nested.config)
    del config.quantization_config
    config._experts_implementation = None  # packed experts run one by one; here transformers chooses
    # without our `generate`
    kind: Any = next(kind for kind in type(nested).__mro__ if not issubclass(kind, Generates))
    with torch.device("meta"):
        model = kind(config)
    own = {name: tensor.to(dtype or tensor.dtype) for name, tensor in nested.state_dict().items()}
    model.load_state_dict(own, assign=True, strict=False)
    # Buffers that no checkpoint holds, such as rotary frequencies, keep their type: angles stay precise.
    there = dict(nested.named_buffers())
    for name, _ in list(model.named_buffers()):
        if name in there:
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, there[name])
    for name, module in attachment(nested).modules.items():
        if isinstance(module, SefpEmbedding):
            # one that scales has the scale as a buffer; its stand-in has not
            table = model.get_submodule(name)
            scale = torch.tensor(module.scale, device=module.packed.base.device)
            table._buffers.update(dict.fromkeys(table._buffers, scale))
    model.generation_config = nested.generation_config
    return model
