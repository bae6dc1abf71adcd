"""The CUDA kernels of `cuda_src/` behind the functions of `reference`: same names, same arguments, same bits.

Two things go beyond them, for a decoder: `Digits`, activations that are integers already, and `products`,
which multiplies them with several matrices in one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from math import gcd
from typing import Any, NamedTuple

import torch

from otaro.errors import KernelError
from otaro.file.planes import BASE_BYTES, BLOCK, PLANE_BYTES, blocks
from otaro.kernels import halves, hopper, hopper_halves, nvrtc
from otaro.kernels.packed import Packed
from otaro.kernels.reference import unit_size
from otaro.sefp.precision import COARSEST

MOST_TOKENS = 16
"""Of one call of `products`, which is one launch where rows are not too long for shared memory."""
MATRICES = 3
DECODED = 4
"""Matrices of one launch of `decoding`."""
INTEGER_TOKENS = (48, 48, 48, 32, 32, 32)
"""Where halves do not serve, integers are faster up to so many tokens at E5M3, E5M4, ...; for more, weights
are decoded and multiplied by the library. Measured at E5M3, E5M4 and E5M8 on an H200; others go with the
nearer one."""

# weights that are decoded before they are multiplied: smaller tiles cost more than the cache gives back
_TILE = 1 << 26
_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_WARP, _THREADS = 32, 128
_ROWS, _LANES = 16, 16  # of a block of `linear`
_FEW = 2  # tokens that `linear` takes; `batch` takes more
_FINE = 7  # mantissa bits from which on `hopper`, where it serves, is faster with two: measured on an H200
_COLUMNS = (8, 16)  # tokens that `batch` is compiled for
_DECODED_ROWS = 4  # that a thread of `decode` has a word of
_LONG_ROW = 8 * _LANES  # units: eight steps of a warp
# bytes of activations that a block keeps to itself: two blocks then still share a multiprocessor
_MOST_SHARED = 96 << 10


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
    kernel(
        (-(-tokens * units // 4),),
        _THREADS,
        x=x,
        out=out._asdict(),
        tokens=tokens,
        length=length,
        units=units,
    )
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
        # before `quantize`: `linear` loads weights without waiting for its predecessor
        packed = _aligned_rows(packed)
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
    scratch: Scratch | None = None,
) -> None:
    """Multiply tokens `first`, `first` + 1, ... with up to three matrices of one form in one launch.

    Products are float32 [tokens, rows]. With experts, matrices are those of the first one, and products have
    a row for each pair of a token and one of its experts.
    """
    like = matrices[0]
    if any(one[3:6] != like[3:6] or one.bits != like.bits for one in matrices):  # scale exponents may differ
        raise KernelError(
            "matrices that are multiplied together must be of one length, precision, group size and "
            "reconstruction"
        )
    pairs = 1 if experts is None else experts.numbers.numel()
    if not 0 < tokens <= (MOST_TOKENS if experts is None else pairs) or not 0 < len(matrices) <= MATRICES:
        raise KernelError(f"{tokens} tokens and {len(matrices)} matrices are not what one launch takes")
    if any(one.base.numel() >= BASE_BYTES << 32 for one in matrices):
        # offsets into it are 32-bit numbers
        raise KernelError("a matrix of so many weights has to be multiplied in parts")
    if experts is not None:
        _multiply_few(digits, pairs, matrices, outs, biases, experts, pairs // tokens)
        return
    units, unit = digits.digits.shape[1], unit_size(like.group_size)
    columns = hopper.columns(matrices, tokens) if tokens > (1 if like.bits >= _FINE else _FEW) else None
    while tokens:
        shape = (
            None if columns or tokens <= _FEW else _shape(_device(like.base), tokens, units, unit, like.bits)
        )
        now = tokens if columns else min(tokens, _FEW if shape is None else shape.columns)
        some, theirs = digits, outs
        if first:
            some, theirs = Digits(*(part[first:] for part in digits)), [out[first:] for out in outs]
        if columns:
            _multiply_wide(some, now, matrices, theirs, biases, columns)
        elif shape is None:
            _multiply_few(some, now, matrices, theirs, biases)
        else:
            _multiply_batch(some, now, matrices, theirs, biases, shape, scratch)
        first, tokens = first + now, tokens - now


def _multiply_few(
    digits: Digits,
    tokens: int,
    matrices: Sequence[Packed],
    outs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    experts: Chosen | None = None,
    each: int = 1,
) -> None:
    """One or two tokens; or so many pairs of a token and one of its `each` experts."""
    like, pairs, columns = matrices[0], 1 if experts is None else tokens, 1 if experts is not None else tokens
    unit, count, device = unit_size(like.group_size), blocks(like.length), _device(like.base)
    units = digits.digits.shape[1]
    shared = columns * units * (2 * unit + 8)
    shared = shared if shared <= min(_MOST_SHARED, nvrtc.most_shared(device)) else 0
    kernel, most = _linear_kernel(
        device, like.bits, like.truncate, unit // BLOCK, like.group_size // unit, columns,
        count % 2 == 0 and all(plane.data_ptr() % 8 == 0 for one in matrices for plane in one.planes),
        like.group_size == unit
        and units % 4 == 0
        and all(one.scales.data_ptr() % 4 == 0 for one in matrices),
        count % (_LANES * unit // BLOCK) != 0, units >= _LONG_ROW, shared, experts is not None,
    )  # fmt: skip
    tiles = [-(-len(one.base) // _ROWS) for one in matrices]
    share = min(1.0, most / max(sum(tiles) * pairs, 1))
    ends = list(accumulate(max(1, int(tile * share)) if tile else 0 for tile in tiles))
    kernel(
        (ends[-1],) if experts is None else (ends[-1], pairs), _THREADS, shared,
        matrix=[packed_fields(one) for one in matrices], bias=biases, out=outs,
        stride=[out.stride(0) for out in outs], first_block=[0, *ends, *[ends[-1]] * (MATRICES - len(ends))],
        x=digits._asdict(), tokens=columns, blocks=count, units=units,
        groups=-(-like.length // like.group_size), experts=None if experts is None else experts.numbers,
        expert_rows=() if experts is None else experts.strides, each=each,
    )  # fmt: skip


class Scratch:
    """Where the blocks of a launch meet; one for each stream that products run on."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.empty(0, device=device)
        self._tickets = torch.zeros(0, dtype=torch.int32, device=device)
        self._outgrown: list[torch.Tensor] = []  # graphs may point there

    def of(self, sums: int, tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for so many sums, and a zero for each tile, which launches leave zero."""
        if self._sums.numel() < sums:
            self._outgrown.append(self._sums)
            self._sums = torch.empty(sums, device=self._sums.device)
        if self._tickets.numel() < tiles:
            self._outgrown.append(self._tickets)
            self._tickets = torch.zeros(tiles, dtype=torch.int32, device=self._sums.device)
        return self._sums, self._tickets


class _Shape(NamedTuple):
    """How `batch` cuts its work: constants of batch.cu."""

    columns: int
    slices: int
    groups: int
    tiles: int
    stages: int
    steps: int
    blocks: int = 1
    chunk: int = 4

    @property
    def lanes(self) -> int:
        """Of a slice."""
        return _LANES // self.slices

    @property
    def threads(self) -> int:
        """Of a block."""
        return _WARP * self.groups * self.lanes

    @property
    def rows(self) -> int:
        """Of a block."""
        return _ROWS * self.tiles * self.groups

    def shared(self, units: int, unit: int, bits: int) -> int:
        """Bytes of shared memory: weights' ring, a slice's digits and terms, sums if no stage holds them."""
        count = self.steps * self.lanes * unit // BLOCK
        base = BASE_BYTES * count
        row = (
            base
            + (0 if base % 64 else 32)
            + (bits - COARSEST) * (PLANE_BYTES * count + 16)
            + self.steps * self.lanes
        )
        stage, sums = -(-self.rows * row // 16) * 16, 4 * self.lanes * self.columns * (self.rows + 4)
        kept = -(-units // (_LANES * self.steps)) * self.steps * self.lanes
        return min(self.stages * max(stage, sums), self.stages * stage + sums) + kept * self.columns * (
            2 * unit + 8
        )


# As measured on an H200: of what fits the first, which for a row of 4,096 weights is the fastest.
_SHAPES = (
    _Shape(16, 1, 1, 2, 2, 2), _Shape(16, 1, 1, 2, 2, 1),
    _Shape(16, 4, 4, 2, 2, 2), _Shape(16, 4, 4, 2, 2, 1),
    _Shape(8, 1, 1, 2, 3, 2), _Shape(8, 1, 1, 2, 4, 1), _Shape(8, 1, 1, 2, 3, 1), _Shape(8, 4, 4, 2, 4, 1),
    _Shape(8, 4, 4, 1, 2, 1, 2), _Shape(8, 8, 8, 1, 2, 1, 1, 2), _Shape(8, 16, 8, 1, 2, 1, 1, 1),
)  # fmt: skip


@cache
def _shape(device: int, tokens: int, units: int, unit: int, bits: int) -> _Shape | None:
    """For so many tokens, or as many as fit; None where rows are too long for any."""
    most = nvrtc.most_shared(device)
    columns = next((n for n in _COLUMNS if n >= tokens), _COLUMNS[-1])
    for shape in _SHAPES:
        if shape.columns <= columns and shape.shared(units, unit, bits) <= most:
            return shape
    return None


def _multiply_batch(
    digits: Digits,
    tokens: int,
    matrices: Sequence[Packed],
    outs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    shape: _Shape,
    scratch: Scratch | None,
) -> None:
    """More tokens, up to the columns of the shape."""
    like, device = matrices[0], _device(matrices[0].base)
    unit, units, count = unit_size(like.group_size), digits.digits.shape[1], blocks(like.length)
    planes = [count * PLANE_BYTES, shape.chunk * unit // BLOCK * PLANE_BYTES]
    planes += [plane.data_ptr() for one in matrices for plane in one.planes]
    kernel, most = _batch_kernel(
        device, like.bits, like.truncate, unit // BLOCK, like.group_size // unit, shape,
        count % (shape.steps * _LANES * unit // BLOCK) != 0, gcd(16, *planes), units,
    )  # fmt: skip
    ends = list(accumulate(-(-len(one.base) // shape.rows) for one in matrices))
    sums, tickets = None, None
    if shape.slices > 1:
        needed = ends[-1] * shape.rows * shape.columns * shape.slices * shape.chunk
        sums, tickets = (scratch or Scratch(like.base.device)).of(needed, ends[-1])
    kernel(
        (shape.slices * min(ends[-1], max(1, most // shape.slices)),), shape.threads,
        shape.shared(units, unit, like.bits),
        matrix=[packed_fields(one) for one in matrices], bias=biases, out=outs,
        stride=[out.stride(0) for out in outs], first_tile=[0, *ends, *[ends[-1]] * (MATRICES - len(ends))],
        x=digits._asdict(), scratch=sums, tickets=tickets, tokens=tokens, blocks=count, units=units,
        groups=-(-like.length // like.group_size),
    )  # fmt: skip


@cache
def _batch_kernel(
    device: int, bits: int, truncate: bool, unit_blocks: int, per_group: int, shape: _Shape, ragged: bool,
    plane_copy: int, units: int,
) -> tuple[nvrtc.Kernel, int]:  # fmt: skip
    """The kernel, and how many of its blocks the GPU runs at a time."""
    kernel = nvrtc.kernel(
        "batch.cu", "batch", device, BITS=bits, TRUNCATE=truncate, UNIT_BLOCKS=unit_blocks,
        UNITS_PER_GROUP=per_group, COLUMNS=shape.columns, CHUNK=shape.chunk, SLICES=shape.slices,
        GROUPS=shape.groups, TILES=shape.tiles, STAGES=shape.stages, STEPS=shape.steps, RAGGED=ragged,
        PLANE_COPY=plane_copy, BLOCKS=shape.blocks,
    )  # fmt: skip
    shared = shape.shared(units, unit_blocks * BLOCK, bits)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return kernel, processors * kernel.blocks_per_multiprocessor(shape.threads, shared)


def _multiply_wide(
    digits: Digits,
    tokens: int,
    matrices: Sequence[Packed],
    outs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    columns: int,
) -> None:
    """Up to 16 where `hopper` serves, by clusters that take so many."""
    like, units = matrices[0], digits.digits.shape[1]
    kernel, shape, most = hopper.kernel(_device(like.base), like.bits, like.truncate, columns, units)
    ends = list(accumulate(-(-len(one.base) // hopper.ROWS) for one in matrices))
    kernel(
        (hopper.CLUSTER * min(ends[-1], most),), shape.threads, shape.shared,
        matrix=[packed_fields(one) for one in matrices], bias=biases, out=outs,
        stride=[out.stride(0) for out in outs], first_tile=[0, *ends, *[ends[-1]] * (MATRICES - len(ends))],
        x=digits._asdict(), tokens=tokens, units=units,
    )  # fmt: skip


def multiply_halves(
    x: torch.Tensor,
    matrices: Sequence[Packed],
    outs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] = (),
    scratch: Scratch | None = None,
    early: bool = False,
    shape: halves.Shape | hopper_halves.Shape | None = None,
    arranged: bool = False,
) -> None:
    """Multiply tokens [tokens, length], rounded to float16, with up to three matrices of one form in one
    launch.

    Products [tokens, rows] are of any one type, biases float32. Tokens in float16 are taken as they are.
    Others get a power of two each, so that whatever float32 holds becomes halves. Weights that nobody has
    just written may be loaded early.
    """
    sizes = None
    if x.dtype != torch.float16 or x.shape[1] % 8 or x.data_ptr() % 16 or not x.is_contiguous():
        x, sizes = _to_halves(x)
    scratch = scratch or Scratch(x.device)  # which must live until it is launched
    launch = halves_launch(len(outs[0]), matrices, outs[0].dtype, scratch, biases, sizes, shape, arranged)
    launch.fields.x, launch.fields.early = x.data_ptr(), int(early)
    for number, out in enumerate(outs):
        launch.fields.out[number], launch.fields.stride[number] = out.data_ptr(), out.stride(0)
    launch()


def halves_launch(
    tokens: int,
    matrices: Sequence[Packed],
    dtype: torch.dtype,
    scratch: Scratch,
    biases: Sequence[torch.Tensor | None] = (),
    sizes: torch.Tensor | None = None,
    shape: halves.Shape | hopper_halves.Shape | None = None,
    arranged: bool = False,
) -> nvrtc.Launch:
    """The launch of `multiply_halves`. For the caller to say is where tokens lie (`fields.x`), and where
    products of this type go to (`fields.out`, `stride`). Tokens may be `hopper_halves.arranged` where that
    serves.
    """
    like, device = matrices[0], _device(matrices[0].base)
    if len(matrices) > MATRICES or any((one.bits, *one[3:6]) != (like.bits, *like[3:6]) for one in matrices):
        raise KernelError(
            f"one launch takes {MATRICES} matrices of one length, precision, group size and reconstruction"
        )
    units, rows = -(-like.length // halves.UNIT), tuple(len(one.base) for one in matrices)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    fields: dict[str, Any] = {}
    if isinstance(shape, hopper_halves.Shape) or (shape is None and hopper_halves.serves(matrices)):
        stages = like.length // hopper_halves.STAGE
        shape = shape or hopper_halves.shape(
            nvrtc.most_shared(device), processors, tokens, rows, stages, like.bits
        )
        kernel = nvrtc.kernel(
            "hopper_halves.cu", "wide_halves", device, BITS=like.bits, TRUNCATE=like.truncate,
            COLUMNS=shape.columns, GROUPS=shape.groups, STAGES=shape.stages, SLICES=shape.slices,
            ARRANGED=arranged, OUT=_TYPES[dtype],
        )  # fmt: skip
        most = processors
    else:
        if arranged:
            raise KernelError("arranged tokens are taken by Hopper's kernel alone")
        count, per_group = blocks(like.length), like.group_size // halves.UNIT
        shape = shape or halves.shape(nvrtc.most_shared(device), processors, tokens, rows, units, like.bits)
        planes = [
            count * PLANE_BYTES,
            2 * shape.units * PLANE_BYTES,
            *(one.data_ptr() for m in matrices for one in m.planes),
        ]
        words = (
            shape.units == 4
            and per_group == 1
            and units % 4 == 0
            and all(one.scales.data_ptr() % 4 == 0 for one in matrices)
        )
        ragged = like.length % (halves.UNIT * shape.units) != 0
        kernel, most = _halves_kernel(
            device, like.bits, like.truncate, per_group, shape, ragged, gcd(16, *planes), words, dtype
        )  # fmt: skip
        fields = {
            "blocks": count,
            "groups": -(-like.length // like.group_size),
            "pieces": -(-like.length // 8),
        }
    ends, passes = list(accumulate(-(-one // shape.rows) for one in rows)), -(-tokens // shape.columns)
    items, sums, tickets = ends[-1] * passes * shape.slices, None, None
    if shape.slices > 1:
        sums, tickets = scratch.of(items * shape.rows * shape.columns, ends[-1] * passes)
    return kernel.bound(
        (min(items, most),), shape.threads, shape.shared(like.bits),
        matrix=[packed_fields(one) for one in matrices], bias=biases, out=(), stride=(),
        first_tile=[0, *ends, *[ends[-1]] * (MATRICES - len(ends))], x=None, sizes=sizes, scratch=sums,
        tickets=tickets, tokens=tokens, units=units, early=1, **fields,
    )  # fmt: skip


@cache
def _halves_kernel(
    device: int, bits: int, truncate: bool, per_group: int, shape: halves.Shape, ragged: bool,
    plane_copy: int, words: bool, dtype: torch.dtype,
) -> tuple[nvrtc.Kernel, int]:  # fmt: skip
    """The kernel, and how many of its blocks the GPU runs at a time."""
    kernel = nvrtc.kernel(
        "halves.cu", "halves", device, BITS=bits, TRUNCATE=truncate, UNITS_PER_GROUP=per_group,
        COLUMNS=shape.columns, GROUPS=shape.groups, PARTS=shape.parts, UNITS=shape.units, STAGES=shape.stages,
        SLICES=shape.slices, RAGGED=ragged, PLANE_COPY=plane_copy, SCALE_WORDS=words, OUT=_TYPES[dtype],
    )  # fmt: skip
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return kernel, processors * kernel.blocks_per_multiprocessor(shape.threads, shape.shared(bits))


def _to_halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [tokens, length] in float16, whole eights of them, and what each is to be multiplied with."""
    tokens, length = x.shape
    out = torch.empty(tokens, -(-length // 8) * 8, dtype=torch.float16, device=x.device)
    sizes = torch.empty(tokens, device=x.device)
    kernel = nvrtc.kernel("rows.cu", "halve", _device(x), DTYPE=_TYPES[x.dtype])
    kernel((tokens,), _THREADS, x=x.contiguous(), out=out, sizes=sizes, length=length, padded=out.shape[1])
    return out, sizes


@cache
def _linear_kernel(
    device: int, bits: int, truncate: bool, unit_blocks: int, per_group: int, tokens: int, wide: bool,
    quadruple: bool, ragged: bool, long: bool, shared: int, experts: bool,
) -> tuple[nvrtc.Kernel, int]:  # fmt: skip
    """The kernel, and how many of its blocks the GPU runs at a time.

    A warp takes four lanes and loads three steps ahead, of a long row four (measured on an H200,
    docs/gpu.md).
    """
    of_experts = {"EXPERTS": True} if experts else {}
    kernel = nvrtc.kernel(
        "linear.cu", "linear", device, BITS=bits, TRUNCATE=truncate, UNIT_BLOCKS=unit_blocks,
        UNITS_PER_GROUP=per_group, TOKENS=tokens, WIDE=wide, QUADRUPLE=quadruple, RAGGED=ragged,
        SHARED=shared > 0, DEPTH=4 if long else 3, **of_experts,
    )  # fmt: skip
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return kernel, processors * kernel.blocks_per_multiprocessor(_THREADS, shared)


def decode(
    packed: Packed, dtype: torch.dtype = torch.float32, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `reference.decode`; into `out` [rows, length], contiguous, where that is given."""
    if out is None:
        out = torch.empty(len(packed.base), packed.length, dtype=dtype, device=packed.base.device)
    return _decode(packed, None, out)


def embedding(ids: torch.Tensor, packed: Packed, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """As `reference.embedding`."""
    return _decode(packed, ids, torch.empty(len(ids), packed.length, dtype=dtype, device=packed.base.device))


def matmul(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `reference.matmul`; integers serve while they are faster, then halves, then decoded weights."""
    if len(x) > MOST_TOKENS and halves.serves([packed], len(x), x.dtype):
        out = torch.empty(len(x), len(packed.base), dtype=x.dtype, device=x.device)
        if out.numel():
            multiply_halves(x, [_aligned_rows(packed)], [out], [None if bias is None else bias.float()])
        return out
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


def _decode(packed: Packed, ids: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    if out.numel():
        launch = decoding([_aligned_rows(packed)], out.dtype, ids)
        launch.fields.out[0] = out.data_ptr()
        launch()
    return out


def decoding(matrices: Sequence[Packed], dtype: torch.dtype, ids: torch.Tensor | None = None) -> nvrtc.Launch:
    """A launch that decodes up to four matrices of one form, or of a matrix the rows `ids`.

    Where to is for the caller to say: `fields.out`, an address for each.
    """
    like = matrices[0]
    if len(matrices) > DECODED or any((one.bits, *one[3:6]) != (like.bits, *like[3:6]) for one in matrices):
        raise KernelError(
            f"one launch decodes {DECODED} matrices of one length, precision, group size and reconstruction"
        )
    kernel = nvrtc.kernel(
        "rows.cu", "decode", _device(like.base), DTYPE=_TYPES[dtype], BITS=like.bits, TRUNCATE=like.truncate,
        GROUP_SIZE=like.group_size, IDS=ids is not None,
    )  # fmt: skip
    counts = [len(one.base) for one in matrices] if ids is None else [len(ids)]
    words = 4 * blocks(like.length)
    threads = min(256, -(-words // _WARP) * _WARP)
    ends = list(accumulate(min(-(-count // _DECODED_ROWS), 4096) for count in counts))
    return kernel.bound(
        (-(-words // threads), ends[-1]), threads, packed=[packed_fields(one) for one in matrices], out=(),
        counts=counts, first_block=[0, *ends, *[ends[-1]] * (DECODED - len(ends))], ids=ids,
        length=like.length, blocks=blocks(like.length), groups=-(-like.length // like.group_size),
    )  # fmt: skip


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
    return {
        "base": packed.base,
        "planes": packed.planes,
        "scales": packed.scales,
        "rows": rows,
        "scale_exponent": exponent,
    }
