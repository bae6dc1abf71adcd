"""What one process holds of packed weights, as vLLM deals layers out.

A layer's rows go to the processes in equal parts (q/k/v, gate/up, the vocabulary), or its inputs do (the
attention's output, down). A part of the rows is a view of the mapped file. A part of the inputs is a copy of
whole groups: another number would part a group from its scale, and is refused.

Fused layers stay a list of matrices: each has its own power of two beside its scales, so that stacking their
bytes would change what they mean. Products are put side by side instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import pad

from otaro.errors import FormatError, OtaroError
from otaro.file.header import BASE
from otaro.file.io import NestedDirectory
from otaro.runtime.modules import PackedWeight
from otaro.sefp.precision import Precision


def dealt(size: int, each: int, rank: int, processes: int) -> slice:
    """Which of `size` rows or inputs this process has, if each has so many.

    Where there are fewer parts than processes, as of heads for keys, neighbours have the same one.
    """
    parts = size // each
    start = rank * parts // processes * each
    return slice(start, start + each)


class PackedShare(PackedWeight):
    """Some rows of a packed tensor, at some of its inputs."""

    def __init__(self, nested: NestedDirectory, name: str, rows: slice, inputs: slice) -> None:
        super().__init__(nested, name)
        length, group_size = self.shape[-1], nested.schema.group_size
        self.part = rows
        self.inputs = (inputs.start, inputs.stop, length)
        if inputs.stop - inputs.start < length and (inputs.start % group_size or inputs.stop % group_size):
            raise OtaroError(
                f"{name}: {length} inputs dealt out by {inputs.stop - inputs.start} would cut its groups of "
                f"{group_size}; "
                "choose another --tensor-parallel-size"
            )
        self.shape = (rows.stop - rows.start, inputs.stop - inputs.start)

    def _rows(self, stored: torch.Tensor) -> torch.Tensor:
        first, last, length = self.inputs
        rows = super()._rows(stored)[self.part]
        if last - first == length:
            return rows
        width = rows.shape[-1]  # groups are whole, so that all three kinds of bytes divide as the inputs do
        return rows[:, width * first // length : width * last // length].contiguous()


class Shares(nn.Module):
    """The matrices of one layer of vLLM, and the mantissa bits that it reads them at."""

    def __init__(self, layer: str, sizes: Sequence[int], padded: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.sizes, self.padded, self.dtype = layer, tuple(sizes), padded, dtype
        self.bits = BASE
        self.matrices = nn.ModuleList()
        self._taken: dict[int, PackedShare] = {}

    def take(self, index: int, share: PackedShare) -> None:
        """Have one of the matrices; they come in any order."""
        self._taken[index] = share

    def attach(self, precision: Precision, device: torch.device) -> None:
        """Map, or copy to another device, what the precision needs; refused where a matrix has not come."""
        if len(self._taken) != len(self.sizes):
            raise FormatError(
                f"{self.layer}: {len(self._taken)} of {len(self.sizes)} matrices are in the nested directory"
            )
        self.matrices = nn.ModuleList(self._taken[index] for index in range(len(self.sizes)))
        for share in self._taken.values():
            share.attach(device)
        self.reach(precision)
        self.bits = precision.mantissa_bits

    def require(self, precision: Precision) -> None:
        """Refuse a precision whose shards are not all there."""
        self._taken[0].nested.require(precision)

    def reach(self, precision: Precision) -> None:
        """Have the planes of a precision at hand."""
        for share in self._taken.values():
            share.reach(precision.mantissa_bits)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Activations [..., inputs] times all rows, those of the matrices side by side; padding is zero."""
        flat = x.reshape(-1, x.shape[-1])
        biases = [None] * len(self.sizes) if bias is None else bias.split(self.sizes)
        products = [m.linear(flat, self.bits, b) for m, b in zip(self.matrices, biases, strict=True)]  # type: ignore[operator]
        product = products[0] if len(products) == 1 else torch.cat(products, 1)
        if missing := self.padded - product.shape[1]:
            product = pad(product, (0, missing))
        return product.view(*x.shape[:-1], self.padded)

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows with the numbers `ids`."""
        rows: torch.Tensor = self.matrices[0].embedding(ids.flatten(), self.bits, self.dtype)  # type: ignore[operator]
        return rows.view(*ids.shape, rows.shape[1])
