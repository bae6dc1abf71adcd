"""The CUDA kernels: the reference's bits on random shapes and codes. What needs no GPU comes first."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from otaro.errors import KernelError
from otaro.kernels import cuda, hopper, nvrtc, ops, reference
from otaro.sefp.codec import MAX_SCALE_EXPONENT, MIN_SCALE_EXPONENT

from . import emulated
from .packed import GRIDS, Packed, make_activations, make_packed, same_bits

HAS_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")

# Around blocks, units and sixteen units; groups of one unit, of several, of half a one; rows around sixteen.
SHAPES = [
    (3, 1, 64), (17, 33, 64), (16, 64, 64), (5, 65, 64), (40, 576, 64), (33, 1000, 96), (20, 1024, 64),
    (7, 300, 32), (15, 512, 32), (18, 4097, 256), (33, 14336, 64), (100, 2112, 128), (1, 2048, 64),
]  # fmt: skip


def on_gpu(packed: Packed) -> Packed:
    return packed._replace(
        base=packed.base.cuda(), scales=packed.scales.cuda(), planes=[plane.cuda() for plane in packed.planes]
    )


SIZES = (2.0**-90, 2.0**-80, 1.0, 2.0**100)
"""Of activations: below and at the least power of two that they share, and of the largest finite products."""


def with_every_scale(bits: int, truncate: bool, scale_exponent: int) -> Packed:
    """64 rows of 16 groups: each of the 256 scale bytes is the first, second, third and fourth of a word."""
    packed = make_packed(64, 1024, 64, scale_exponent=scale_exponent).at(bits, truncate)
    row, group = torch.arange(64)[:, None], torch.arange(16)
    scales = row + 64 * ((group // 4 + group) % 4)
    assert all(len(scales[:, place::4].unique()) == 256 for place in range(4))
    return packed._replace(scales=scales.to(torch.uint8))


def one_unit_each(size: float) -> torch.Tensor:
    """16 tokens, each with activations in its own unit: a product then shows one scale, nothing hides it."""
    x = torch.rand(16, 16, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return (x * torch.eye(16)[..., None]).flatten(1) * size


# Without a GPU


def test_cuda_can_be_asked_for_and_leaves_the_cpu_alone(monkeypatch):
    plain = ops.backend("cpu")
    monkeypatch.setenv(ops.OVERRIDE, "cuda")
    assert ops.backend("cpu") == plain
    with pytest.raises(KernelError, match="does not serve meta"):
        ops.backend("meta")


def test_an_old_gpu_is_told_apart_from_a_missing_compiler(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    assert "Old GPU has compute capability 7.5, and the kernels need 8.0" in nvrtc.missing.__wrapped__(0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def fail() -> None:
        raise OSError("libnvrtc is not there")

    monkeypatch.setattr(nvrtc, "_nvrtc", fail)
    reason = nvrtc.missing.__wrapped__(0)
    assert "libnvrtc is not there" in reason
    assert "pip install" in reason


COMMON = {"TRUNCATE": 0, "UNIT_BLOCKS": 2, "UNITS_PER_GROUP": 1, "RAGGED": 0}
FEW = COMMON | {"WIDE": 1, "QUADRUPLE": 1, "SHARED": 1}
BATCH = COMMON | {"CHUNK": 4, "SLICES": 2, "GROUPS": 2, "PLANE_COPY": 16, "BLOCKS": 1}
HALVES = COMMON | {"UNITS": 4, "SLICES": 4, "PLANE_COPY": 16, "SCALE_WORDS": 1, "OUT": 1}
CONSTANTS = [
    ("linear.cu", FEW | {"BITS": 3, "TOKENS": 1, "DEPTH": 4}),
    ("linear.cu", FEW | {"BITS": 8, "TOKENS": 2, "DEPTH": 3}),
    ("batch.cu", BATCH | {"BITS": 8, "COLUMNS": 8, "TILES": 1, "STAGES": 3, "STEPS": 1}),
    ("batch.cu", BATCH | {"BITS": 5, "COLUMNS": 16, "TILES": 2, "STAGES": 2, "STEPS": 2}),
    ("hopper.cu", {"BITS": 8, "TRUNCATE": 0, "TOKENS": 16, "STAGES": 3, "STREAMED": 0}),
    ("hopper.cu", {"BITS": 4, "TRUNCATE": 1, "TOKENS": 16, "STAGES": 5, "STREAMED": 1}),
    ("halves.cu", HALVES | {"BITS": 4, "COLUMNS": 32, "GROUPS": 7, "PARTS": 1, "STAGES": 4}),
    ("halves.cu", HALVES | {"BITS": 8, "COLUMNS": 64, "GROUPS": 4, "PARTS": 2, "STAGES": 2}),
]


@pytest.mark.parametrize(("file", "constants"), CONSTANTS, ids=str)
def test_sources_compile_for_a_gpu_that_is_not_there(file, constants):
    try:
        nvrtc.compiler()
    except OSError as error:
        pytest.skip(f"CUDA's compiler library is not on this machine: {error}")
    architecture = "sm_90a" if file in nvrtc.HOPPER else "sm_80"
    flags = (
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        *(f"-D{name}={value}" for name, value in constants.items()),
    )
    source = nvrtc.source_of(file)
    assert nvrtc.compile_source(file, source, flags)[:4] == b"\x7fELF"
    with pytest.raises(KernelError, match=rf"could not compile {file}"):
        nvrtc.compile_source(file, source + b"\nnonsense;", flags)


@pytest.fixture
def emulation(monkeypatch):
    """Kernels run on the CPU, two multiprocessors of one block each: blocks then have several tiles."""
    if HAS_GPU or emulated.MISSING:
        pytest.skip(emulated.MISSING or "the kernels run on this machine's GPU")
    monkeypatch.setattr(nvrtc, "kernel", emulated.kernel)
    monkeypatch.setattr(nvrtc, "most_shared", lambda device: 60416)  # an RTX 30's
    monkeypatch.setattr(hopper, "has_instructions", lambda device: False)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=2)
    )
    caches = (cuda._linear_kernel, cuda._batch_kernel, cuda._shape, hopper.kernel, hopper._columns)
    for one in caches:
        one.cache_clear()
    yield
    for one in caches:
        one.cache_clear()


@pytest.mark.parametrize(
    ("shape", "bits", "truncate", "tokens"),
    [
        ((50, 1024, 64), 3, False, 1),
        ((18, 2048, 64), 4, True, 1),
        ((33, 200, 64), 8, False, 1),
        ((16, 1100, 64), 8, True, 2),
        ((17, 1200, 64), 6, False, 3),  # 19 units
        ((20, 300, 96), 5, True, 8),
        # 36 units: scales are loaded four at a time, and rows end within a step
        ((5, 1152, 32), 7, False, 16),
        ((3, 700, 128), 4, False, 20),
        ((40, 2048, 64), 3, True, 4),
        ((70, 1024, 64), 8, True, 33),
        ((20, 4200, 64), 4, False, 64),  # eight slices, and rows end within a step
        ((9, 300, 32), 5, False, 130),
    ],
    ids=str,
)
def test_emulated_products_are_those_of_the_reference(emulation, shape, bits, truncate, tokens):
    packed, x = make_packed(*shape, seed=sum(shape)).at(bits, truncate), make_activations(tokens, shape[1])
    assert same_bits(cuda.linear(x, packed), reference.linear(x, packed))


@pytest.mark.parametrize("number", range(len(cuda._SHAPES)))
def test_emulated_products_are_the_same_however_they_are_cut(emulation, number):
    """Several matrices, more tiles than blocks, and every second way with rows that end within a step."""
    shape, (bits, truncate) = cuda._SHAPES[number], GRIDS[(5 * number + 4) % len(GRIDS)]
    tokens, length = shape.columns - number % 3, (2048, 1100)[number % 2]
    matrices = [make_packed(3 * shape.rows + 5, length, 64, seed=seed).at(bits, truncate) for seed in (1, 2)]
    x, bias = make_activations(tokens, length), torch.randn(len(matrices[1].base))
    outs = [torch.full((tokens, len(one.base)), 7.0) for one in matrices]
    scratch = cuda.Scratch(torch.device("cpu"))
    for _ in range(2):  # tickets are zero again
        cuda._multiply_batch(cuda.to_digits(x, 64), tokens, matrices, outs, [None, bias], shape, scratch)
        assert same_bits(outs[0], reference.linear(x, matrices[0]))
        assert same_bits(outs[1], reference.linear(x, matrices[1]) + bias)
        outs[0].zero_()


@pytest.fixture
def on_hopper(emulation, monkeypatch):
    monkeypatch.setattr(nvrtc, "most_shared", lambda device: 227328)
    monkeypatch.setattr(hopper, "has_instructions", lambda device: True)


@pytest.mark.parametrize(
    ("columns", "bits", "truncate", "tokens", "length", "rows"),
    [
        (8, 3, False, 8, 1024, (64, 130, 200)),  # more tiles than clusters
        (16, 5, True, 13, 2048, (100, 33, 64)),
        (16, 8, False, 16, 1024, (70,)),
        (8, 8, True, 5, 1024, (65,)),
        (16, 4, False, 9, 2048, (300,)),
        (16, 3, True, 11, 5120, (65,)),  # activations come in two turns, the second not whole
        (8, 6, False, 6, 14336, (33,)),
    ],
    ids=str,
)
def test_emulated_products_on_hopper_are_those_of_the_reference(
    on_hopper, columns, bits, truncate, tokens, length, rows
):
    assert not hopper._shape(0, columns, length // 64, bits).streamed
    check_wide(columns, bits, truncate, tokens, length, rows)


def check_wide(columns, bits, truncate, tokens, length, rows):
    matrices = [make_packed(count, length, 64, seed=count).at(bits, truncate) for count in rows]
    x, biases = (
        make_activations(tokens, length),
        [torch.randn(count) if count % 2 else None for count in rows],
    )
    outs = [torch.full((tokens, count), 7.0) for count in rows]
    cuda._multiply_wide(cuda.to_digits(x, 64), tokens, matrices, outs, biases, columns)
    for one, out, bias in zip(matrices, outs, biases, strict=True):
        expected = reference.linear(x, one)
        assert same_bits(out, expected if bias is None else expected + bias)


STREAMED = [
    (16, 9), (8, 3), (16, 16), (8, 8), (16, 12), (8, 5),
    (16, 15), (16, 10), (8, 7), (16, 14), (16, 11), (16, 13),
]  # fmt: skip
"""Columns and tokens, for each of the grids."""


@pytest.mark.parametrize(
    "number", range(len(GRIDS)), ids=lambda number: str((*GRIDS[number], STREAMED[number]))
)
def test_emulated_products_on_hopper_are_the_same_with_streamed_digits(on_hopper, monkeypatch, number):
    """Rings of two and three stages, rows of four and five, more tiles than clusters."""
    (columns, tokens), (bits, truncate) = STREAMED[number], GRIDS[number]
    length, stages = (4096, 5120)[number % 2], 2 + number // 2 % 2
    shape = hopper.Shape(columns, stages, True, length // 64, bits)
    monkeypatch.setattr(nvrtc, "most_shared", lambda device: shape.shared)
    monkeypatch.setattr(hopper, "STAGES", range(stages, stages + 1))
    assert hopper._shape(0, columns, length // 64, bits) == shape
    check_wide(columns, bits, truncate, tokens, length, (70, 65) if number % 3 else (33, 130, 64))


@pytest.mark.parametrize(("bits", "tokens"), [(4, 16), (8, 9)])
def test_emulated_products_of_llamas_longest_rows(on_hopper, bits, tokens):
    packed, x = make_packed(65, 14336, 64, bits), make_activations(tokens, 14336)
    assert hopper._shape(0, 16, 224, bits).streamed
    assert same_bits(cuda.linear(x, packed), reference.linear(x, packed))


def test_emulated_products_take_hoppers_way_where_rows_are_whole_steps(on_hopper, monkeypatch):
    taken = []
    multiply = cuda._multiply_wide
    monkeypatch.setattr(cuda, "_multiply_wide", lambda *given: (taken.append(given[-1]), multiply(*given)))
    packed, x = make_packed(70, 1024, 64, 4), make_activations(27, 1024)
    for tokens, columns in ((2, []), (3, [8]), (27, [16, 16])):
        taken.clear()
        assert same_bits(cuda.linear(x[:tokens], packed), reference.linear(x[:tokens], packed))
        assert taken == columns
    taken.clear()
    for length, group_size in ((1024, 32), (900, 64)):
        other, few = make_packed(3, length, group_size, 4), x[:3, :length].contiguous()
        assert same_bits(cuda.linear(few, other), reference.linear(few, other))
    elsewhere = (
        torch.empty(packed.scales.numel() + 1, dtype=torch.uint8)[1:]
        .view_as(packed.scales)
        .copy_(packed.scales)
    )
    assert same_bits(cuda.linear(x[:3], packed._replace(scales=elsewhere)), reference.linear(x[:3], packed))
    assert not taken


def test_digits_too_long_for_hoppers_shared_memory_are_streamed(on_hopper):
    for bits in range(3, 9):
        shapes = [hopper._shape(0, tokens, 224, bits) for tokens in (8, 16)]  # 14,336 weights
        assert [(one.tokens, one.streamed) for one in shapes] == [(8, False), (16, True)]
        assert all(one.stages >= 2 and one.shared <= 227328 for one in shapes)
    assert [hopper._columns(0, tokens, 448, 8) for tokens in (8, 9)] == [8, 16]  # 28,672
    assert [hopper._columns(0, tokens, 2400, 4) for tokens in (8, 9)] == [8, None]


def test_emulated_products_of_several_tokens_leave_the_range_of_floats_as_one_does(emulation):
    packed, x = make_packed(33, 1024, 64, 4), make_activations(5, 1024) * 2.0**107
    expected = reference.linear(x, packed)
    assert 0 < expected.isfinite().sum() < expected.numel()
    assert same_bits(cuda.linear(x, packed), expected)


def test_emulated_planes_may_lie_at_any_word(emulation):
    packed, x = make_packed(20, 1024, 64, 5), make_activations(5, 1024)
    count = packed.planes[0].numel()
    elsewhere = [
        torch.empty(count + 4, dtype=torch.uint8)[4:].view_as(plane).copy_(plane) for plane in packed.planes
    ]
    assert elsewhere[0].data_ptr() % 16 == 4
    out = torch.empty(5, 20)
    cuda.products(cuda.to_digits(x, 64), 5, [packed._replace(planes=elsewhere)], [out])
    assert same_bits(out, reference.linear(x, packed))


def test_a_row_too_long_for_shared_memory_is_multiplied_by_two_tokens_at_a_time(emulation, monkeypatch):
    monkeypatch.setattr(nvrtc, "most_shared", lambda device: 1000)
    packed, x = make_packed(5, 640, 64, 4), make_activations(3, 640)
    assert cuda._shape(0, 3, 10, 64, 4) is None
    assert same_bits(cuda.linear(x, packed), reference.linear(x, packed))


def test_activations_stay_out_of_shared_memory_where_a_gpu_has_too_little(emulation, monkeypatch):
    asked = []

    class Recorded(emulated.Kernel):
        def __call__(self, grid, threads, shared=0, /, **fields):
            asked.append(shared)

    monkeypatch.setattr(emulated, "Kernel", Recorded)
    for tokens in (1, 2):
        digits = cuda.new_digits(tokens, 14336, 64, torch.device("cpu"))
        cuda.products(digits, tokens, [make_packed(16, 14336, 64, 4)], [torch.empty(tokens, 16)])
    assert asked == [14336 // 64 * 136, 0]  # bytes of a unit's digits and term


def test_emulated_matrices_share_a_launch(emulation):
    matrices = [
        make_packed(rows, 576, 64, 4, seed=rows, scale_exponent=rows % 5 - 8) for rows in (64, 17, 33)
    ]
    x, biases = make_activations(2, 576), [None, torch.randn(17), None]
    outs = [torch.full((2, len(one.base)), 7.0) for one in matrices]
    cuda.products(cuda.to_digits(x, 64), 2, matrices, outs, biases)
    for one, out, bias in zip(matrices, outs, biases, strict=True):
        expected = reference.linear(x, one)
        assert same_bits(out, expected if bias is None else expected + bias)


@pytest.mark.parametrize("tokens", [1, 2, 16], ids="{} tokens".format)
def test_emulated_products_know_every_scale_byte(emulation, tokens):
    for scale_exponent in (MIN_SCALE_EXPONENT, MAX_SCALE_EXPONENT):
        packed = with_every_scale(8, False, scale_exponent)
        for size in SIZES:
            x = one_unit_each(size)
            expected = reference.linear(x, packed)
            assert expected.isfinite().all()
            assert same_bits(torch.cat([cuda.linear(some, packed) for some in x.split(tokens)]), expected)


def test_emulated_scales_may_lie_anywhere(emulation):
    """Four are loaded as one word where they make up one, and else one by one."""
    packed, x = make_packed(20, 1024, 64, 5), make_activations(4, 1024)
    elsewhere = (
        torch.empty(packed.scales.numel() + 1, dtype=torch.uint8)[1:]
        .view_as(packed.scales)
        .copy_(packed.scales)
    )
    assert elsewhere.data_ptr() % 2 == 1
    assert same_bits(cuda.linear(x, packed._replace(scales=elsewhere)), reference.linear(x, packed))


def test_emulated_rows_know_every_scale_byte(emulation):
    for scale_exponent in (MIN_SCALE_EXPONENT, MAX_SCALE_EXPONENT):
        for bits, truncate in ((3, False), (8, False), (8, True)):
            packed = with_every_scale(bits, truncate, scale_exponent)
            assert same_bits(cuda.decode(packed), reference.decode(packed))


@pytest.mark.parametrize("shape", [(5, 65, 64), (7, 300, 96), (4, 192, 32)], ids=str)
def test_emulated_rows_are_those_of_the_reference(emulation, shape):
    ids = torch.tensor([shape[0] - 1, 0])
    for (bits, truncate), dtype in zip(((3, False), (5, True), (8, False)), cuda._TYPES, strict=True):
        packed = make_packed(*shape, seed=sum(shape)).at(bits, truncate)
        expected = reference.decode(packed, dtype)
        assert same_bits(cuda.decode(packed, dtype), expected)
        assert same_bits(cuda.embedding(ids, packed, dtype), expected[ids])
        for got, law in zip(
            cuda.quantize(expected, shape[2]), reference.quantize(expected, shape[2]), strict=True
        ):
            assert same_bits(got, law)


def decoded_at_once(device, dtype, bits, length, *counts):
    """What one launch makes of several matrices, and what it should make of them."""
    packed = [make_packed(rows, length, 64, seed=rows).at(bits, False) for rows in counts]
    outs = [torch.full((rows + 1, length), 7.0, dtype=dtype, device=device) for rows in counts]
    there = [one if device == "cpu" else on_gpu(one) for one in packed]  # a launch keeps addresses alone
    launch = cuda.decoding(there, dtype)
    for number, out in enumerate(outs):
        launch.fields.out[number] = out.data_ptr()
    launch()
    for one, out in zip(packed, outs, strict=True):
        yield (
            out.cpu(),
            torch.cat((reference.decode(one, dtype), torch.full((1, one.length), 7.0, dtype=dtype))),
        )


@pytest.mark.parametrize("bits", [3, 6, 8])
def test_emulated_matrices_are_decoded_at_once(emulation, bits):
    for got, expected in decoded_at_once("cpu", torch.float16, bits, 200, 9, 1, 40, 2):
        assert same_bits(got, expected)


def test_matrices_of_two_kinds_are_not_decoded_at_once():
    two = [make_packed(4, 64, 64).at(bits, False) for bits in (3, 4)]
    for some in (two, [two[0]] * 5):
        with pytest.raises(KernelError, match="one launch decodes 4 matrices of one length, precision"):
            cuda.decoding(some, torch.float16)


# With one


@needs_gpu
@pytest.mark.parametrize("dtype", cuda._TYPES, ids=str)
def test_small_matrices_are_decoded_at_once(dtype):
    for bits in (4, 8):
        for got, expected in decoded_at_once("cuda", dtype, bits, 2112, 9, 1, 300, 2):
            assert same_bits(got, expected), f"E5M{bits}"


@needs_gpu
@pytest.mark.parametrize("number", range(len(SHAPES)), ids=lambda number: "x".join(map(str, SHAPES[number])))
def test_products_are_those_of_the_reference(number):
    """Not every precision and number of tokens for every shape: each is a kernel, and must be compiled."""
    shape = SHAPES[number]
    x = make_activations(16, shape[1])
    for turn in range(3):
        bits, truncate = GRIDS[(5 * number + 7 * turn) % len(GRIDS)]
        packed = make_packed(*shape, seed=sum(shape)).at(bits, truncate)
        expected = reference.linear(x, packed)
        for tokens in (1, (2, 3, 8, 16)[(number + turn) % 4]):
            got = cuda.linear(x[:tokens].cuda(), on_gpu(packed))
            assert same_bits(got.cpu(), expected[:tokens]), f"E5M{bits}, truncate={truncate}, {tokens} tokens"


@needs_gpu
@pytest.mark.parametrize(("bits", "truncate"), GRIDS)
def test_every_precision_at_a_plain_shape(bits, truncate):
    packed, x = make_packed(48, 4096, 64, seed=bits).at(bits, truncate), make_activations(1, 4096)
    assert same_bits(cuda.linear(x.cuda(), on_gpu(packed)).cpu(), reference.linear(x, packed))


@needs_gpu
@pytest.mark.parametrize("tokens", range(1, 9))
def test_small_products_of_every_count_are_those_of_the_reference(tokens):
    for length in (200, 512):  # the last unit has one block, not two; scales are loaded four at a time
        packed, x = make_packed(37, length, 64, 4), make_activations(tokens, length)
        assert same_bits(ops.linear(x.cuda(), *on_gpu(packed)).cpu(), reference.linear(x, packed))


@needs_gpu
@pytest.mark.parametrize("tokens", [3, 8, 13, 16])
def test_small_products_of_whole_steps_are_those_of_the_reference(tokens):
    """On Hopper by a kernel of their own; many rows, so that clusters have several tiles."""
    for turn, (length, rows) in enumerate([(1024, (70, 130)), (2048, (33,)), (1024, (4500,))]):
        bits, truncate = GRIDS[(tokens + 5 * turn) % len(GRIDS)]
        matrices = [make_packed(count, length, 64, seed=count).at(bits, truncate) for count in rows]
        x = make_activations(tokens, length)
        outs = [torch.full((tokens, count), 7.0, device="cuda") for count in rows]
        cuda.products(cuda.to_digits(x.cuda(), 64), tokens, [on_gpu(one) for one in matrices], outs)
        for one, out in zip(matrices, outs, strict=True):
            some = torch.cat([torch.arange(min(len(one.base), 100)), torch.randint(len(one.base), (100,))])
            assert same_bits(out[:, some.cuda()].cpu(), reference.linear(x, one.rows(some))), (
                f"E5M{bits}, {length}"
            )


@needs_gpu
@pytest.mark.parametrize("number", range(len(GRIDS)))
def test_small_products_of_llamas_longest_rows_are_those_of_the_reference(number):
    """On Hopper with digits in shared memory up to 8 tokens, streamed beyond."""
    (bits, truncate), tokens = GRIDS[number], STREAMED[number][1]
    packed, x = make_packed(100, 14336, 64, seed=number).at(bits, truncate), make_activations(tokens, 14336)
    expected = reference.linear(x, packed)
    for _ in range(3):
        assert same_bits(cuda.linear(x.cuda(), on_gpu(packed)).cpu(), expected)


@needs_gpu
@pytest.mark.parametrize("bits", range(3, 9))
def test_many_long_rows_are_those_of_the_reference(bits):
    """Of two matrices, and several tiles for each cluster."""
    matrices = [make_packed(count, 14336, 64, seed=count).at(bits, bits % 2 == 0) for count in (4096, 9000)]
    x, biases = make_activations(16, 14336), [None, torch.randn(9000)]
    outs = [torch.full((16, len(one.base)), 7.0, device="cuda") for one in matrices]
    given = [on_gpu(one) for one in matrices]
    cuda.products(
        cuda.to_digits(x.cuda(), 64), 16, given, outs, [b if b is None else b.cuda() for b in biases]
    )
    for one, out, bias in zip(matrices, outs, biases, strict=True):
        some = torch.randint(len(one.base), (100,))
        expected = reference.linear(x, one.rows(some))
        assert same_bits(out[:, some.cuda()].cpu(), expected if bias is None else expected + bias[some])


@needs_gpu
@pytest.mark.parametrize("scale_exponent", [MIN_SCALE_EXPONENT, 0, MAX_SCALE_EXPONENT])
def test_small_every_scale_byte_is_known(scale_exponent):
    for bits, truncate in ((3, False), (8, True), (8, False)):
        packed = with_every_scale(bits, truncate, scale_exponent)
        assert same_bits(ops.decode(*on_gpu(packed), torch.float32).cpu(), reference.decode(packed))
    for size in SIZES:
        x = one_unit_each(size)
        expected = reference.linear(x, packed)
        for tokens in (1, 2, 16):
            got = [cuda.linear(some, on_gpu(packed)) for some in x.cuda().split(tokens)]
            assert same_bits(torch.cat(got).cpu(), expected), f"{tokens} tokens, activations of {size}"


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_small_decoded_rows_are_those_of_the_reference(shape, dtype):
    ids = torch.tensor([shape[0] - 1, 0, shape[0] // 2])
    for bits, truncate in GRIDS:
        packed = make_packed(*shape, seed=sum(shape)).at(bits, truncate)
        expected = reference.decode(packed, dtype)
        assert same_bits(ops.decode(*on_gpu(packed), dtype).cpu(), expected), (
            f"E5M{bits}, truncate={truncate}"
        )
        assert same_bits(ops.embedding(ids.cuda(), *on_gpu(packed), dtype).cpu(), expected[ids])


@needs_gpu
def test_small_rows_that_do_not_exist_are_not_numbers():
    packed = on_gpu(make_packed(5, 100, 64, 4))
    values = ops.embedding(torch.tensor([0, 5, -1], device="cuda"), *packed, torch.float32)
    assert values[0].isfinite().all()
    assert values[1:].isnan().all()


@needs_gpu
@pytest.mark.parametrize("group_size", [32, 64, 96])
def test_small_quantized_activations_are_those_of_the_reference(group_size):
    edges = torch.zeros(6, 200)
    edges[1, 3], edges[1, 64] = 32639.5, 32639.498046875
    edges[2, 0], edges[2, 70] = torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max
    edges[3, :50], edges[3, 100:] = 1e-45, 2.0**-95
    edges[4, 0], edges[4, 80], edges[4, 199] = torch.nan, torch.inf, -torch.inf
    edges[5] = -0.0
    for x in (edges, make_activations(9, 1000), make_activations(2, 1)):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            got = ops.quantize(x.to(dtype).cuda(), group_size)
            for one, expected in zip(got, reference.quantize(x.to(dtype), group_size), strict=True):
                assert same_bits(one.cpu(), expected)


@needs_gpu
@pytest.mark.parametrize("tokens", [49, 100])
@pytest.mark.parametrize("rows", [64, 20_000])
def test_many_tokens_are_as_good_as_the_plain_product(rows, tokens):
    packed, x = make_packed(rows, 1024, 64, 5, spread=2), torch.randn(tokens, 1024)
    bias = torch.linspace(-1, 1, rows)
    values = reference.decode(packed)
    exact = torch.nn.functional.linear(x.double(), values.double(), bias.double())
    plain = torch.nn.functional.linear(x.cuda(), values.cuda(), bias.cuda()).cpu()
    got = ops.linear(x.cuda(), *on_gpu(packed), bias.cuda()).cpu()
    assert (got - exact).norm() <= 2 * (plain - exact).norm()


@needs_gpu
@pytest.mark.parametrize(("bits", "tokens"), [(8, 16), (5, 20), (3, 32)])
def test_while_integers_are_faster_many_tokens_are_integers_too(bits, tokens):
    packed, x = make_packed(50, 576, 64, bits), make_activations(tokens, 576)
    assert tokens <= cuda.INTEGER_TOKENS[bits - 3]
    assert same_bits(ops.linear(x.cuda(), *on_gpu(packed)).cpu(), reference.linear(x, packed))


@needs_gpu
def test_small_matrices_share_a_launch():
    matrices = [
        make_packed(rows, 576, 64, 4, seed=rows, scale_exponent=rows % 5 - 8) for rows in (64, 17, 33)
    ]
    x, biases = make_activations(2, 576), [None, torch.randn(17), None]
    outs = [torch.full((2, len(one.base)), 7.0, device="cuda") for one in matrices]
    digits = cuda.to_digits(x.cuda(), 64)
    cuda.products(
        digits, 2, [on_gpu(one) for one in matrices], outs, [b if b is None else b.cuda() for b in biases]
    )
    for one, out, bias in zip(matrices, outs, biases, strict=True):
        expected = reference.linear(x, one)
        assert same_bits(out.cpu(), expected if bias is None else expected + bias)
    with pytest.raises(KernelError, match="must be of one length"):
        cuda.products(digits, 2, [on_gpu(matrices[0]), on_gpu(make_packed(4, 576, 64, 5))], outs[:2])


@needs_gpu
@pytest.mark.parametrize("tokens", [1, 8])
def test_products_can_be_captured_into_a_graph_on_any_stream(tokens):
    packed, x = on_gpu(make_packed(100, 4096, 64, 4)), make_activations(tokens, 4096).cuda()
    expected = ops.linear(x, *packed)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        room = x.clone()
        with torch.cuda.graph(graph, stream=stream):
            got = ops.linear(room, *packed)
        for factor in (1.0, 2.0, -4.0):
            room.copy_(x * factor)
            graph.replay()
            stream.synchronize()
            assert same_bits(got, expected * factor)
