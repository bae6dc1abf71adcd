"""Packed stand-ins for a model's linears, embedding and expert stacks.

A `PackedWeight` is one tensor of the nested file, mapped and not copied. The stand-ins are thin: each knows a
packed weight and its own mantissa bits, decodes what a call needs, and forgets it. A tied head and embedding
share one packed weight and may still run at different precisions.

Threads may share a model. What grows or switches does so under the lock of its directory,
`NestedDirectory.lock`; what was once attached stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from math import prod
from types import MappingProxyType
from typing import Self, cast

import torch
from torch import nn

from otaro.file.header import BASE
from otaro.file.io import NestedDirectory
from otaro.kernels import ops
from otaro.kernels.packed import Packed
from otaro.packable import scaled
from otaro.sefp.precision import FINEST, Precision, of_mantissa_bits

own_bits: ContextVar[Mapping[SefpModule, int]] = ContextVar("own_bits", default=MappingProxyType({}))
"""Mantissa bits that a generation brought along, which count in its thread alone, before a module's own."""


class PackedWeight(nn.Module):
    """One packed tensor: scales, base nibbles, and as many planes as were needed so far.

    They are buffers, so `model.to("cuda")` moves them, but not part of the state dict: `save_pretrained`
    writes them from here in the file's own form.
    """

    scales: torch.Tensor
    base: torch.Tensor

    def __init__(self, nested: NestedDirectory, name: str) -> None:
        super().__init__()
        self.nested, self.name, self.shape = nested, name, nested.schema.packed[name]
        self.bits = BASE  # mantissa bits that the planes attached so far make up
        for part in ("scales", "base", *(f"plane{plane}" for plane in range(BASE + 1, FINEST + 1))):
            self.register_buffer(part, None, persistent=False)

    def attach(self, device: torch.device | str) -> None:
        """Map scales and base nibbles."""
        self.scales = self._rows(self.nested.scale_bytes(self.name)).to(device)
        self.base = self._rows(self.nested.base.tensor(self.name)).to(device)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        with self.nested.lock:
            return cast(Self, super()._apply(fn, recurse))  # type: ignore[no-untyped-call]

    def reach(self, mantissa_bits: int) -> None:
        """Map the planes that are still missing for this many mantissa bits."""
        if self.bits >= mantissa_bits:
            return
        with self.nested.lock:
            for number in range(self.bits + 1, mantissa_bits + 1):
                plane = self._rows(self.nested.plane(number).tensor(self.name)).to(self.base.device)
                setattr(self, f"plane{number}", plane)
                self.bits = number  # last: whoever sees it without the lock finds the plane

    def decode(self, mantissa_bits: int, dtype: torch.dtype, rows: slice = slice(None)) -> torch.Tensor:
        """Values of all rows, or of some, leading dimensions flattened."""
        values: torch.Tensor = ops.decode(*self._packed(mantissa_bits).rows(rows), dtype)
        return values

    def embedding(self, ids: torch.Tensor, mantissa_bits: int, dtype: torch.dtype) -> torch.Tensor:
        """Values of the rows with the numbers `ids`."""
        values: torch.Tensor = ops.embedding(ids, *self._packed(mantissa_bits), dtype)
        return values

    def linear(self, x: torch.Tensor, mantissa_bits: int, bias: torch.Tensor | None) -> torch.Tensor:
        """Activations [tokens, K] times the rows, plus a bias."""
        product: torch.Tensor = ops.linear(x, *self._packed(mantissa_bits), bias)
        return product

    def _packed(self, mantissa_bits: int) -> Packed:
        """What the operations take."""
        schema = self.nested.schema
        planes = [getattr(self, f"plane{plane}") for plane in range(BASE + 1, mantissa_bits + 1)]
        truncate = schema.reconstruction == "truncate"
        return Packed(
            self.base,
            self.scales,
            planes,
            self.shape[-1],
            schema.group_size,
            truncate,
            schema.scale_exponents[self.name],
        )

    def planes_above(self, mantissa_bits: int) -> list[torch.Tensor]:
        """Attached planes that so many mantissa bits do not need."""
        return [getattr(self, f"plane{plane}") for plane in range(mantissa_bits + 1, self.bits + 1)]

    def extra_repr(self) -> str:
        """Name and shape, as `print(model)` shows them."""
        return f"{self.name}, {list(self.shape)}"

    def _rows(self, stored: torch.Tensor) -> torch.Tensor:
        """What is held of a stored tensor: all of it, leading dimensions flattened."""
        return stored.reshape(-1, stored.shape[-1])


class SefpModule(nn.Module):
    """What the stand-ins share: a packed weight, the mantissa bits to read it at, the type to decode to."""

    _like: torch.Tensor

    def __init__(self, packed: PackedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed = packed
        self.mantissa_bits = BASE
        # An empty buffer follows .to(dtype) as parameters do; its type is the one to decode to.
        self.register_buffer("_like", torch.empty(0, dtype=dtype, device="cpu"), persistent=False)

    @property
    def bits_now(self) -> int:
        """Mantissa bits of a call: those of the generation that makes it, or else those that are set."""
        if torch.compiler.is_compiling():  # cannot follow the thread; `generate` refuses to need it
            return self.mantissa_bits
        return own_bits.get().get(self, self.mantissa_bits)

    @property
    def precision(self) -> Precision:
        """The precision this module is set to; `otaro.set_precision` changes it."""
        return of_mantissa_bits(self.mantissa_bits)

    @property
    def weight(self) -> torch.Tensor:
        """The weight at the current precision, decoded afresh each time."""
        # not attached yet: transformers asks so that it may fill in random values
        if self.packed.base is None:
            nothing = self.laid_out(torch.empty(self.packed.shape, dtype=self._like.dtype, device="meta"))
            nothing._is_hf_initialized = True  # its own mark for what it has to leave alone
            return nothing
        return self.laid_out(self.packed.decode(self.bits_now, self._like.dtype).reshape(self.packed.shape))

    def laid_out(self, packed: torch.Tensor) -> torch.Tensor:
        """A tensor of the packed shape, seen as the module that was replaced has its weight."""
        return packed

    def extra_repr(self) -> str:
        """Shape and precision, as `print(model)` shows them."""
        return f"{list(self.packed.shape)}, {self.precision}"


class SefpLinear(SefpModule):
    """`nn.Linear` on a packed weight."""

    def __init__(self, packed: PackedWeight, dtype: torch.dtype, bias: nn.Parameter | None) -> None:
        super().__init__(packed, dtype)
        self.out_features, self.in_features = packed.shape
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by the weight, straight from its planes."""
        if x.requires_grad and torch.is_grad_enabled():
            return nn.functional.linear(x, self.packed.decode(self.bits_now, x.dtype), self.bias)
        product = self.packed.linear(x.reshape(-1, self.in_features), self.bits_now, self.bias)
        return product.view(*x.shape[:-1], self.out_features)


class SefpConv1D(SefpLinear):
    """GPT-2's Conv1D, x @ W + b, on a packed W^T: a linear, whose weight others expect to be [in, out]."""

    def laid_out(self, packed: torch.Tensor) -> torch.Tensor:
        """Transposed."""
        return packed.T


class SefpEmbedding(SefpModule):
    """`nn.Embedding` on a packed weight: decodes rows it is asked for; scales them if the model's own did."""

    def __init__(self, packed: PackedWeight, dtype: torch.dtype, scale: float = 1.0) -> None:
        super().__init__(packed, dtype)
        self.num_embeddings, self.embedding_dim = packed.shape
        self.scale = scale

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of the given ids."""
        rows = self.packed.embedding(ids.flatten(), self.bits_now, self._like.dtype)
        return scaled(rows, self.scale).reshape(*ids.shape, self.embedding_dim)


class SefpExperts(SefpModule):
    """A stack of expert matrices [experts, out, in]: indexing decodes one, as the experts' forward does."""

    def __getitem__(self, expert: int | torch.Tensor) -> torch.Tensor:
        rows = prod(self.packed.shape[1:-1])
        start = int(expert) * rows
        some = slice(start, start + rows)
        return self.packed.decode(self.bits_now, self._like.dtype, some).reshape(self.packed.shape[1:])


def bits_of(modules: Iterable[SefpModule], nested: NestedDirectory) -> bytes:
    """The mantissa bits that modules of a model are set to, all at one moment: none amid a switch."""
    with nested.lock:
        return bytes([module.mantissa_bits for module in modules])
