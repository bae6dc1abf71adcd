"""Quantizing many weights with two launches, for GPUs: Triton kernels with the values of `plain.py`.

A model has hundreds of weights, most of them small, and dozens of torch operations on each cost more in
launches than in work. Here one program takes one tile of whole groups, whichever weight they belong to: a
table says where each tile is read from and where it goes. The first launch finds the scale exponent of each
weight, the second its values. The number of mantissa bits is an ordinary argument, so that one compiled
kernel serves all precisions.

Weights are read twice and written once, and memory is what the kernels wait for. So the compiler is told that
tiles begin at multiples of 16 bytes and end with a group, which it cannot see in addresses from a table: a
thread then loads 16 bytes at a time, and the threads of a group are in one warp.

Most GPUs are slow in float64, in which the codec computes. Here everything is float32, and still exact: a
quotient that may be off is only a first guess, put right by products that cannot be, as they have few
significant bits (`_scales`, `_quantize_tiles`).

Imported only where there is a GPU, for which torch's builds bring Triton along, or where TRITON_INTERPRET=1
lets Triton run its kernels on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from otaro.sefp.codec import MIN_SCALE_EXPONENT, Reconstruction

ALIGNED = 16  # bytes


class Launch(NamedTuple):
    """How the work is cut."""

    tile: int
    """Weights of a program: a power of two."""
    warps: int
    """Of a program."""


BEST = Launch(4096, 8)


def serves(weight: torch.Tensor, group_size: int) -> bool:
    """Whether the kernel can take this weight: in whole groups of a power of two, row by row from a multiple
    of 16 bytes on.
    """
    whole = (
        weight.shape[-1] % group_size == 0
        and group_size & (group_size - 1) == 0
        and ALIGNED <= group_size <= BEST.tile
    )
    return whole and weight.is_contiguous() and weight.numel() > 0 and weight.data_ptr() % ALIGNED == 0


def scale_exponents_of(
    weights: Sequence[torch.Tensor], group_size: int, reconstruction: Reconstruction, launch: Launch = BEST
) -> torch.Tensor:
    """The scale exponent of each of several weights of one type on one GPU, int32."""
    first = weights[0]
    found = torch.full((len(weights),), MIN_SCALE_EXPONENT, dtype=torch.int32, device=first.device)
    table = _table_of(weights, launch)
    with _on(first):
        _find_exponents[(len(table),)](
            table,
            first.detach(),
            found,
            group_size,
            launch.tile,
            reconstruction == "truncate",
            num_warps=launch.warps,
        )
    return found


def quantize_all(
    weights: Sequence[torch.Tensor],
    mantissa_bits: int,
    group_size: int,
    reconstruction: Reconstruction,
    dtype: torch.dtype,
    launch: Launch = BEST,
    scale_exponents: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """The quantized values of weights of one type on one GPU, in `dtype`: views of one new buffer.

    Parts of tensors are given the `scale_exponents` of the whole ones.
    """
    first, truncate = weights[0], reconstruction == "truncate"
    if scale_exponents is None:
        scale_exponents = scale_exponents_of(weights, group_size, reconstruction, launch)
    sizes = [weight.numel() for weight in weights]
    buffer = torch.empty(sum(sizes), dtype=dtype, device=first.device)
    table = _table_of(weights, launch)
    with _on(first):
        _quantize_tiles[(len(table),)](
            table, first.detach(), buffer, scale_exponents, mantissa_bits, group_size, launch.tile, truncate,
            num_warps=launch.warps,
        )  # fmt: skip
    return [part.view(weight.shape) for part, weight in zip(buffer.split(sizes), weights, strict=True)]


def _on(weight: torch.Tensor) -> AbstractContextManager[None]:
    """Launch where the weight is."""
    return torch.cuda.device(weight.device) if weight.is_cuda else nullcontext()


def _table_of(weights: Sequence[torch.Tensor], launch: Launch) -> torch.Tensor:
    addresses, sizes = (
        tuple(weight.data_ptr() for weight in weights),
        tuple(weight.numel() for weight in weights),
    )
    return _table(addresses, sizes, weights[0].element_size(), launch.tile, weights[0].device)


@lru_cache(maxsize=16)
def _table(
    addresses: tuple[int, ...], sizes: tuple[int, ...], width: int, tile: int, device: torch.device
) -> torch.Tensor:
    """A line per tile: its address, how many weights of `width` bytes it has, their place in the buffer,
    whose they are.
    """
    lines, place = [], 0
    for number, (address, size) in enumerate(zip(addresses, sizes, strict=True)):
        offsets = torch.arange(0, size, tile)
        counts, numbers = (size - offsets).clamp(max=tile), torch.full_like(offsets, number)
        lines.append(torch.stack([address + width * offsets, counts, offsets + place, numbers], 1))
        place += size
    return torch.cat(lines).to(device)


@triton.jit  # type: ignore[untyped-decorator]
def _find_exponents(  # type: ignore[no-untyped-def]
    table,  # noqa: ANN001
    like,  # noqa: ANN001
    found,  # noqa: ANN001
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    TRUNCATE: tl.constexpr,
):
    """The largest of the exponents that the groups of a weight need."""
    line = table + 4 * tl.program_id(0)
    values, _, _ = _tile(line, like, GROUP, TILE)
    scales, _ = _scales(values, TRUNCATE)
    # Of (1 + f/8) 2^k a float8, which ends at 448 = (1 + 6/8) 2^8, holds 2^(k - 8), or half of it where f is
    # 7.
    needed = ((scales.to(tl.int32, bitcast=True) + (1 << 20)) >> 23) - (127 + 8)
    tl.atomic_max(found + tl.load(line + 3), tl.max(needed, 0))


@triton.jit(do_not_specialize=["m"])  # type: ignore[untyped-decorator]
def _quantize_tiles(  # type: ignore[no-untyped-def]
    table,  # noqa: ANN001
    like,  # noqa: ANN001
    buffer,  # noqa: ANN001
    scale_exponents,  # noqa: ANN001
    m,  # noqa: ANN001
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    TRUNCATE: tl.constexpr,
):
    line = table + 4 * tl.program_id(0)
    values, at, count = _tile(line, like, GROUP, TILE)
    place = tl.multiple_of(tl.load(line + 2), GROUP)

    scales, mirrored = _scales(values, TRUNCATE)
    # of which all scales are multiples: float8's smallest
    unit = tl.load(scale_exponents + tl.load(line + 3)) - 9
    scales = tl.ceil(scales * _power_of_two(-unit)) * _power_of_two(unit)
    inverses = (_power_of_two(m) / tl.maximum(scales, 1e-12))[:, None]  # any will do for zeros
    steps = (scales * _power_of_two(-m))[:, None]
    if TRUNCATE:
        scaled = values * inverses
        codes = tl.where(scaled < 0, tl.ceil(scaled), tl.floor(scaled)) + 0.0  # so that no zero has a sign
    else:
        upright = tl.where(mirrored[:, None], -values, values)
        shift = _power_of_two(m - 4)
        # the nearest, or one that is as good as near
        borders = tl.floor(upright * inverses + (shift + 0.5)) - shift
        edges = borders * steps  # of 13 bits: exact
        below = (upright < edges) | ((upright == edges) & _goes_below(GROUP))
        codes = borders + tl.where(below, -0.5, 0.5)
        codes = tl.maximum(codes, 0.5 - _power_of_two(m) - shift, propagate_nan=tl.PropagateNan.ALL)
        codes = tl.minimum(codes, _power_of_two(m) - 0.5 - shift, propagate_nan=tl.PropagateNan.ALL)
        steps = tl.where(mirrored[:, None], -steps, steps)
    values = codes * steps
    tl.store(buffer + place + at, values.to(buffer.dtype.element_ty), mask=at < count)


@triton.jit  # type: ignore[untyped-decorator]
def _tile(line, like, GROUP: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001
    """The weights of a tile in float32, zero where it has no more; their places in it, and their number."""
    source = tl.multiple_of(tl.load(line).to(like.dtype), 16)  # ALIGNED
    count = tl.multiple_of(tl.load(line + 1), GROUP)
    at = tl.arange(0, TILE // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return tl.load(source + at, mask=at < count, other=0.0).to(tl.float32), at, count


@triton.jit  # type: ignore[untyped-decorator]
def _scales(values, TRUNCATE: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001
    """The |s| of each group, as large as a float8 without limits would have to be, and whether s is negative.

    s is turned so that the grid reaches 17/16 |s| on the longer side of the group and 15/16 |s| on the
    shorter.
    """
    below, above = tl.maximum(-tl.min(values, 1), 0.0), tl.maximum(tl.max(values, 1), 0.0)
    longer, shorter = tl.maximum(below, above), tl.minimum(below, above)
    guess = tl.maximum(longer, 1e-12)  # what is smaller needs the same: the smallest scale of all is 2^-22
    if TRUNCATE:
        bits = ((guess.to(tl.int32, bitcast=True) >> 23) + 1) << 23
    else:
        guess = tl.maximum(guess * (0.99999 * 16 / 17), shorter * (0.99999 * 16 / 15))  # too small by little
        bits = ((guess.to(tl.int32, bitcast=True) + 0xFFFFF) >> 20) << 20  # up to three fraction bits
        scales = bits.to(tl.float32, bitcast=True)
        enough = (17 * scales >= 16 * longer) & (15 * scales >= 16 * shorter)  # both sides are exact
        bits = tl.where(enough, bits, bits + (1 << 20))
    return tl.where(longer > 0, bits.to(tl.float32, bitcast=True), 0.0), above > below


@triton.jit  # type: ignore[untyped-decorator]
def _goes_below(GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where `codec.border_sides` is -1; in a row."""
    places = tl.arange(0, GROUP)[None, :]
    for k in tl.static_range(5):
        places = places ^ (places >> (1 << k))
    return (places & 1) == 1


@triton.jit
def _power_of_two(exponent):  # type: ignore[no-untyped-def] # noqa: ANN001
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)
