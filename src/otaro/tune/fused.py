"""Quantising many weights with one launch, for GPUs: a Triton kernel with the arithmetic of `fake_quant.quantize`.

A model has hundreds of weights, most of them small, and a dozen torch operations on each costs more in launches than in
work. Here one program takes one tile of whole groups, whichever weight they belong to: a table says where each tile is
read from and where it goes. The number of mantissa bits is an ordinary argument, so that one compiled kernel serves all
precisions.

Weights are read once and written once, and memory is what the kernel waits for. So the compiler is told that tiles begin at
multiples of 16 bytes and end with a group, which it cannot see in addresses from a table: a thread then loads 16 bytes at a
time, and the threads of a group are in one warp.

Imported only where there is a GPU, for which torch's builds bring Triton along, or where TRITON_INTERPRET=1 lets Triton run
its kernels on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from otaro.sefp.codec import Reconstruction

ALIGNED = 16  # bytes


class Launch(NamedTuple):
    """How the work is cut."""

    tile: int
    """Weights of a program: a power of two."""
    warps: int
    """Of a program."""


BEST = Launch(4096, 8)


def serves(weight: torch.Tensor, group_size: int) -> bool:
    """Whether the kernel can take this weight: in whole groups of a power of two, row by row from a multiple of 16 bytes on."""
    whole = weight.shape[-1] % group_size == 0 and group_size & (group_size - 1) == 0 and ALIGNED <= group_size <= BEST.tile
    return whole and weight.is_contiguous() and weight.numel() > 0 and weight.data_ptr() % ALIGNED == 0


def quantize_all(
    weights: Sequence[torch.Tensor],
    mantissa_bits: int,
    group_size: int,
    reconstruction: Reconstruction,
    dtype: torch.dtype,
    launch: Launch = BEST,
) -> list[torch.Tensor]:
    """The quantised values of weights of one type on one GPU, in `dtype`: views of one new buffer."""
    first = weights[0]
    sizes = [weight.numel() for weight in weights]
    buffer = torch.empty(sum(sizes), dtype=dtype, device=first.device)
    addresses = tuple(weight.data_ptr() for weight in weights)
    table = _table(addresses, tuple(sizes), first.element_size(), launch.tile, first.device)
    with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
        _quantize_tiles[(len(table),)](
            table, first.detach(), buffer, mantissa_bits, group_size, launch.tile, reconstruction == "truncate",
            num_warps=launch.warps,
        )  # fmt: skip
    return [part.view(weight.shape) for part, weight in zip(buffer.split(sizes), weights, strict=True)]


@lru_cache(maxsize=16)
def _table(addresses: tuple[int, ...], sizes: tuple[int, ...], width: int, tile: int, device: torch.device) -> torch.Tensor:
    """A line per tile: its address, how many weights of `width` bytes it has, and their place in the buffer."""
    lines, place = [], 0
    for address, size in zip(addresses, sizes, strict=True):
        offsets = torch.arange(0, size, tile)
        lines.append(torch.stack([address + width * offsets, (size - offsets).clamp(max=tile), offsets + place], 1))
        place += size
    return torch.cat(lines).to(device)


@triton.jit(do_not_specialize=["m"])  # type: ignore[untyped-decorator]
def _quantize_tiles(  # type: ignore[no-untyped-def]
    table,  # noqa: ANN001
    like,  # noqa: ANN001
    buffer,  # noqa: ANN001
    m,  # noqa: ANN001
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    TRUNCATE: tl.constexpr,
):
    line = table + 3 * tl.program_id(0)
    source = tl.multiple_of(tl.load(line).to(like.dtype), 16)  # ALIGNED
    count, place = tl.multiple_of(tl.load(line + 1), GROUP), tl.multiple_of(tl.load(line + 2), GROUP)
    at = tl.arange(0, TILE // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(source + at, mask=at < count, other=0.0).to(tl.float32)

    fields = tl.max(tl.abs(values), 1).to(tl.int32, bitcast=True) >> 23
    exponents = tl.maximum(fields - 126, -15)[:, None]
    grid_bits = m if TRUNCATE else tl.maximum(m, 4)
    scaled = values * _power_of_two(grid_bits - exponents)
    if TRUNCATE:
        codes = tl.where(scaled < 0, tl.ceil(scaled), tl.floor(scaled))
    else:
        codes = tl.floor(scaled) + _power_of_two(grid_bits - 4)
        codes = tl.floor(codes * _power_of_two(m - grid_bits))  # by one half at 3 bits, else by one
        codes = tl.minimum(codes, _power_of_two(m) - 1, propagate_nan=tl.PropagateNan.ALL)
        codes = codes + (0.5 - _power_of_two(m - 4))
    values = codes * _power_of_two(exponents - m)
    tl.store(buffer + place + at, values.to(buffer.dtype.element_ty), mask=at < count)


@triton.jit
def _power_of_two(exponent):  # type: ignore[no-untyped-def] # noqa: ANN001
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)
