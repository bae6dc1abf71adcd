"""The CUDA kernels of `cuda_src/` behind the functions of `reference`: same names, same arguments, same bits.

Two things go beyond them, for a decoder: `Digits`, activations that are integers already, and `products`, which multiplies them
with several matrices in one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from otaro.errors import KernelError
from otaro.file.planes import BASE_BYTES, BLOCK, blocks
from otaro.kernels import nvrtc
from otaro.kernels.packed import Packed
from otaro.kernels.reference import unit_size
from otaro.sefp.precision import COARSEST

MOST_TOKENS = 16
"""Of one launch of `products`."""
MATRICES = 3
INTEGER_TOKENS = (32, 32, 32, 16, 16, 16)
"""Up to so many tokens integers are faster, in passes of `MOST_TOKENS`, at E5M3, E5M4, ...; for more, weights are decoded and
multiplied by the library. Measured at E5M4 and E5M8 (`bench_table2.py --only batch`); others go with the nearer one."""

_TILE = 1 << 26  # weights that are decoded before they are multiplied: smaller tiles cost more than the cache gives back
_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_WARP, _THREADS = 32, 128
_ROWS, _LANES = 16, 16  # of a block of `linear`
_LONG_ROW = 8 * _LANES  # units: eight steps of a warp
_MOST_SHARED = 96 << 10  # bytes of activations that a block keeps to itself: two blocks then still share a multiprocessor


class Digits(NamedTuple):
    """Activations as 16-bit integers, in bytes: `Activations` of sefp.cuh."""

    digits: torch.Tensor
    """int8 [tokens, units, 2, unit]: the high bytes of a unit, then the low ones."""
    terms: torch.Tensor
    """int32 [tokens, units, 2]: a unit's sum, and the bits of its power of two, float32."""


class Chosen(NamedTuple):
    """Which experts' matrices to multiply with."""

    numbers: torch.Tensor
    """int32 [tokens, experts of each]; activations have a row for each token, or for each number."""
    strides: Sequence[int]
    """Of each matrix, rows from one expert's to the next one's."""


def new_digits(tokens: int, length: int, group_size: int, device: torch.device) -> Digits:
    """A buffer for the activations of some tokens."""
    unit = unit_size(group_size)
    units = -(-length // unit)
    digits = torch.empty(tokens, units, 2, unit, dtype=torch.int8, device=device)
    return Digits(digits, torch.empty(tokens, units, 2, dtype=torch.int32, device=device))


def to_digits(x: torch.Tensor, group_size: int, out: Digits | None = None) -> Digits:
    """Activations [tokens, length] as integers."""
    tokens, length = x.shape
    out = out or new_digits(tokens, length, group_size, x.device)
    units, unit = out.digits.shape[1], out.digits.shape[3]
    kernel = nvrtc.kernel("rows.cu", "quantize", _device(x), DTYPE=_TYPES[x.dtype], UNIT=unit)
    kernel((-(-tokens * units // 4),), _THREADS, x=x, out=out._asdict(), tokens=tokens, length=length, units=units)
    return out


def quantize(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.quantize`."""
    digits, terms = to_digits(x, group_size)
    codes = digits[:, :, 0].short() * 256 + digits[:, :, 1]
    return codes.flatten(1)[:, : x.shape[1]].contiguous(), terms[..., 1].contiguous().view(torch.float32)


def linear(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """As `reference.linear`."""
    out = torch.empty(len(x), len(packed.base), device=x.device)
    if out.numel():
        packed = _aligned_rows(packed)  # before `quantize`: `linear` loads weights without waiting for its predecessor
        digits = to_digits(x, packed.group_size)
        for first in range(0, len(x), MOST_TOKENS):
            products(digits, min(MOST_TOKENS, len(x) - first), [packed], [out], first=first)
    return out


def products(
    digits: Digits,
    tokens: int,
    matrices: Sequence[Packed],
    outs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] = (),
    first: int = 0,
    experts: Chosen | None = None,
) -> None:
    """Multiply tokens `first`, `first` + 1, ... with up to three matrices of one form in one launch.

    Products are float32 [tokens, rows]. With experts, matrices are those of the first one, and products have
    a row for each pair of a token and one of its experts.
    """
    like = matrices[0]
    if any(one[3:6] != like[3:6] or one.bits != like.bits for one in matrices):  # scale exponents may differ
        raise KernelError(
            "matrices that are multiplied together must be of one length, precision, group size and reconstruction"
        )
    pairs = 1 if experts is None else experts.numbers.numel()
    if not 0 < tokens <= (MOST_TOKENS if experts is None else pairs) or not 0 < len(matrices) <= MATRICES:
        raise KernelError(f"{tokens} tokens and {len(matrices)} matrices are not what one launch takes")
    if any(one.base.numel() >= BASE_BYTES << 32 for one in matrices):
        raise KernelError("a matrix of so many weights has to be multiplied in parts")  # offsets into it are 32-bit numbers
    unit, count, device = unit_size(like.group_size), blocks(like.length), _device(like.base)
    columns = tokens if experts is None else 1
    units, most_columns = digits.digits.shape[1], next(n for n in (1, 2, 4, 8, MOST_TOKENS) if n >= columns)
    shared = most_columns * units * (2 * unit + 8) if most_columns <= 2 else 0
    shared = shared if shared <= min(_MOST_SHARED, nvrtc.most_shared(device)) else 0
    kernel, threads, most = _linear_kernel(
        device, like.bits, like.truncate, unit // BLOCK, like.group_size // unit,
        most_columns, count % 2 == 0 and all(plane.data_ptr() % 8 == 0 for one in matrices for plane in one.planes),
        like.group_size == unit and units % 4 == 0 and all(one.scales.data_ptr() % 4 == 0 for one in matrices),
        count % (_LANES * unit // BLOCK) != 0, units >= _LONG_ROW, shared, experts is not None,
    )  # fmt: skip
    tiles = [-(-len(one.base) // _ROWS) for one in matrices]
    share = min(1.0, most / max(sum(tiles) * pairs, 1))
    ends = list(accumulate(max(1, int(tile * share)) if tile else 0 for tile in tiles))
    kernel(
        (ends[-1],) if experts is None else (ends[-1], pairs), threads, shared,
        matrix=[packed_fields(one) for one in matrices], bias=biases,
        out=[out[first:] for out in outs] if first else outs, stride=[out.stride(0) for out in outs],
        first_block=[0, *ends, *[ends[-1]] * (MATRICES - len(ends))],
        x=(Digits(*(part[first:] for part in digits)) if first else digits)._asdict(),
        tokens=columns, blocks=count, units=units, groups=-(-like.length // like.group_size),
        experts=None if experts is None else experts.numbers, expert_rows=() if experts is None else experts.strides,
        each=pairs // tokens,
    )  # fmt: skip


@cache
def _linear_kernel(
    device: int, bits: int, truncate: bool, unit_blocks: int, per_group: int, tokens: int, wide: bool, quadruple: bool,
    ragged: bool, long: bool, shared: int, experts: bool,
) -> tuple[nvrtc.Kernel, int, int]:  # fmt: skip
    """The kernel, its threads, and how many of its blocks the GPU runs at a time.

    One or two tokens wait for memory: a warp takes four lanes and loads three steps ahead, of a long row four. With more
    tokens a warp has more sums to hold, takes two lanes, and loads as far ahead as registers last: with few planes three
    steps, else two. (Measured on an H200, docs/gpu.md.)
    """
    if tokens <= 2:
        span, depth = 4, 4 if long else 3
    else:
        span, depth = 2, 3 if bits <= (6 if tokens == 4 else 4) else 2
    units = min(span, max(1, 4 // tokens))
    of_experts = {"EXPERTS": True} if experts else {}
    kernel = nvrtc.kernel(
        "linear.cu", "linear", device, BITS=bits, TRUNCATE=truncate, UNIT_BLOCKS=unit_blocks, UNITS_PER_GROUP=per_group,
        TOKENS=tokens, SPAN=span, UNITS=units, WIDE=wide, QUADRUPLE=quadruple, RAGGED=ragged, SHARED=shared > 0,
        DEPTH=depth, **of_experts,
    )  # fmt: skip
    threads = _WARP * _LANES // span
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return kernel, threads, processors * kernel.blocks_per_multiprocessor(threads, shared)


def decode(packed: Packed, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """As `reference.decode`."""
    return _decode(packed, None, len(packed.base), dtype)


def embedding(ids: torch.Tensor, packed: Packed, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """As `reference.embedding`."""
    return _decode(packed, ids, len(ids), dtype)


def matmul(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `reference.matmul`; integers serve while they are faster, then decoded weights."""
    if len(x) <= INTEGER_TOKENS[packed.bits - COARSEST]:
        product = linear(x, packed)
        return (product if bias is None else product + bias).to(x.dtype)
    count, rows = len(packed.base), max(64, _TILE // packed.length)
    if count <= rows:
        return torch.nn.functional.linear(x, decode(packed, x.dtype), bias)
    out = torch.empty(len(x), count, dtype=x.dtype, device=x.device)
    for start in range(0, count, rows):
        some = slice(start, start + rows)
        values = decode(packed.rows(some), x.dtype)
        out[:, some] = torch.nn.functional.linear(x, values, None if bias is None else bias[some])
    return out


def _decode(packed: Packed, ids: torch.Tensor | None, count: int, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(count, packed.length, dtype=dtype, device=packed.base.device)
    threads = count * 4 * blocks(packed.length)
    if not threads:
        return out
    packed = _aligned_rows(packed)
    kernel = nvrtc.kernel(
        "rows.cu", "decode", _device(packed.base), DTYPE=_TYPES[dtype], BITS=packed.bits, TRUNCATE=packed.truncate,
        IDS=ids is not None,
    )  # fmt: skip
    kernel(
        (-(-threads // 256),), 256, packed=packed_fields(packed), ids=ids, out=out, count=count, length=packed.length,
        blocks=blocks(packed.length), groups=-(-packed.length // packed.group_size), group_size=packed.group_size,
    )  # fmt: skip
    return out


def _device(tensor: torch.Tensor) -> int:
    index: int = tensor.get_device()
    return index


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where its numbers do not lie at multiples of 16 bytes."""
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _aligned_rows(packed: Packed) -> Packed:
    return packed._replace(base=_aligned(packed.base), planes=[_aligned(plane) for plane in packed.planes])


def packed_fields(packed: Packed) -> dict[str, Any]:
    """`Packed` of sefp.cuh."""
    if packed.base.data_ptr() % 16 or any(plane.data_ptr() % 4 for plane in packed.planes):
        raise KernelError("packed rows must lie at multiples of 16 bytes; clone() them")
    rows, exponent = len(packed.base), packed.scale_exponent
    return {"base": packed.base, "planes": packed.planes, "scales": packed.scales, "rows": rows, "scale_exponent": exponent}
