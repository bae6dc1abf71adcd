"""Every operation on every backend: the reference's bits, whatever the shape, the memory, the threads."""

from __future__ import annotations

import os
import threading
import time
from functools import cache

import numpy as np
import pytest
import torch

import otaro
from otaro.errors import KernelError
from otaro.kernels import cpu, ops, reference
from otaro.sefp.codec import MAX_SCALE_EXPONENT, MIN_SCALE_EXPONENT

from .packed import (
    GRIDS,
    INSTRUCTIONS,
    Packed,
    make_activations,
    make_packed,
    reference_linear,
    same_bits,
    same_products,
    skip_unless_runnable,
)

# Rows, length, group size. Rows around the numbers that kernels take at a time; lengths around blocks, units
# and the 8 or 16 units that make up a register; last groups and last units that are short.
SHAPES = [
    *[(3, length, 64) for length in (1, 31, 32, 33, 63, 64, 65)],
    *[(2, length, 32) for length in (1, 31, 33, 96, 255, 513)],
    *[(rows, 192, 64) for rows in (0, 1, 4, 5, 7, 8, 9, 17)],
    *[(2, 300, group_size) for group_size in (32, 64, 96, 128, 256)],
    (5, 576, 64),
    *[(rows, length, 64) for rows, length in ((19, 576), (9, 1088), (10, 896), (8, 512), (16, 1536))],
    (3, 1000, 128),
    (2, 1000, 96),
    (2, 1025, 64),
    (1, 2112, 64),
    (1, 4097, 256),
    (1, 14336, 64),
]
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))


def packed_at(shape: tuple[int, int, int], bits: int, truncate: bool) -> Packed:
    return make_packed(*shape, seed=sum(shape)).at(bits, truncate)


@cache
def expected_linear(shape: tuple[int, int, int], bits: int, truncate: bool) -> torch.Tensor:
    """The reference's products for eight tokens. A token's products do not depend on its neighbours."""
    return reference_linear(make_activations(8, shape[1]), packed_at(shape, bits, truncate))


@pytest.fixture
def instructions(request, monkeypatch) -> str:
    """Those of the extension in use."""
    skip_unless_runnable(request.param)
    monkeypatch.setenv(ops.OVERRIDE, f"cpu:{request.param}")
    cpu.choose(request.param)
    return request.param


EVERY_INSTRUCTION_SET = pytest.mark.parametrize("instructions", INSTRUCTIONS, indirect=True)


@pytest.fixture
def restored_threads():
    """Tests may set the number of threads; afterwards it is one again."""
    yield
    torch.set_num_threads(1)


def test_another_build_is_the_one_under_test():
    """Sanitizers that look at the installed extension would find nothing, and nobody would notice."""
    if not (build := os.environ.get("OTARO_CPU_MODULE")):
        pytest.skip("no other build was named in OTARO_CPU_MODULE")
    assert cpu._cpu.__file__ == build


# Exactness


@EVERY_SHAPE
def test_products_of_one_to_eight_tokens_are_those_of_the_reference(backend, shape):
    x = make_activations(8, shape[1])
    for bits, truncate in GRIDS:
        packed, expected = packed_at(shape, bits, truncate), expected_linear(shape, bits, truncate)
        for tokens in range(9):
            got = ops.linear(x[:tokens], *packed)
            assert same_bits(got, expected[:tokens]), f"E5M{bits}, truncate={truncate}, {tokens} tokens"


@EVERY_SHAPE
@EVERY_INSTRUCTION_SET
def test_integer_dots_are_those_of_the_reference(instructions, shape):
    x = make_activations(3, shape[1])
    codes, scales = reference.quantize(x, shape[2])
    for bits, truncate in GRIDS:
        packed = packed_at(shape, bits, truncate)
        got = torch.empty(3, shape[0], scales.shape[1], dtype=torch.int32)
        cpu._cpu.dots(
            x.numpy(),
            *(one.numpy() for one in packed[:2]),
            [p.numpy() for p in packed.planes],
            *packed[3:],
            got.numpy(),
        )
        expected = reference.dots(codes, packed)
        assert torch.equal(got.double(), expected), f"E5M{bits}, truncate={truncate}"


@EVERY_SHAPE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_decoded_rows_and_embeddings_are_those_of_the_reference(backend, shape, dtype):
    rows = shape[0]
    ids = torch.tensor([rows - 1, 0, 0, rows // 2] if rows else [], dtype=torch.int64)
    for bits, truncate in GRIDS:
        packed = packed_at(shape, bits, truncate)
        expected = reference.decode(packed, dtype)
        assert same_bits(ops.decode(*packed, dtype), expected), f"E5M{bits}, truncate={truncate}"
        assert same_bits(ops.embedding(ids, *packed, dtype), expected[ids]), f"E5M{bits}, truncate={truncate}"
        assert same_bits(ops.embedding(ids.int(), *packed, dtype), expected[ids]), (
            f"E5M{bits}, truncate={truncate}"
        )


@pytest.fixture(params=[False, True], ids=["subnormals kept", "subnormals flushed"])
def flushed(request):
    """Whether the CPU takes subnormal numbers for zero, as a library built with -ffast-math may leave it."""
    if request.param and not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal numbers")
    torch.set_flush_denormal(False)
    yield request.param
    torch.set_flush_denormal(False)


# Every byte is the only one of a row, one of many units (whole registers of them, one left over, a short one,
# half of one), and the scale of several units.
@pytest.mark.parametrize(
    "shape", [(256, 60, 64), (10, 1728, 64), (17, 1023, 64), (32, 256, 32), (64, 500, 128)], ids=str
)
@pytest.mark.parametrize("scale_exponent", [MIN_SCALE_EXPONENT, MAX_SCALE_EXPONENT])
def test_every_scale_byte_means_the_same_on_every_backend_and_in_every_mode(
    backend, shape, scale_exponent, flushed
):
    whole = make_packed(*shape, scale_exponent=scale_exponent)
    every = torch.arange(256, dtype=torch.uint8).repeat(2)[: whole.scales.numel()]
    assert len(every.unique()) == 256
    whole.scales.copy_(every.view_as(whole.scales))
    x = make_activations(8, shape[1])
    x[1], x[2] = 2.0**-95, x[2] * 2.0**-70  # products with the smallest powers of two that there are
    for bits, truncate in GRIDS:
        packed = whole.at(bits, truncate)
        values, products = reference.decode(packed), reference_linear(x, packed)
        torch.set_flush_denormal(flushed)
        decoded, multiplied = (
            ops.decode(*packed, torch.float32),
            [ops.linear(x[:n], *packed) for n in (1, 3, 8)],
        )
        torch.set_flush_denormal(False)
        assert same_bits(decoded, values), f"E5M{bits}, truncate={truncate}"
        for got in multiplied:
            assert same_bits(got, products[: len(got)]), f"E5M{bits}, truncate={truncate}, {len(got)} tokens"


@EVERY_INSTRUCTION_SET
@pytest.mark.parametrize("tokens", [15, 16, 67])
def test_many_tokens_at_once_have_the_products_that_each_has_alone(instructions, tokens):
    """As the decoder reads prompts: an instruction set may have another way for sixteen tokens and more."""
    for shape in ((19, 960, 64), (40, 600, 128), (5, 1000, 96)):
        x, whole = make_activations(tokens, shape[1]), make_packed(*shape, seed=tokens)
        for bits, truncate in GRIDS:
            packed = whole.at(bits, truncate)
            alone = torch.cat([cpu.linear(one, packed) for one in x.split(8)])
            assert same_bits(cpu.linear(x, packed), alone), f"E5M{bits}, truncate={truncate}, {shape}"


@EVERY_INSTRUCTION_SET
@pytest.mark.parametrize("units", [*range(1, 19), 23, 24, 31, 32, 33])
def test_rows_of_any_number_of_units_are_summed_in_order_for_many_tokens(instructions, units):
    """Sums of more than sixteen tokens may have a scheme of their own, whose order depends on the units."""
    x, whole = make_activations(37, 64 * units), make_packed(17, 64 * units, 64, seed=units)
    for bits in (3, 6, 8):
        packed = whole.at(bits, False)
        alone = torch.cat([cpu.linear(one, packed) for one in x.split(1)])
        assert same_bits(cpu.linear(x, packed), alone), f"E5M{bits}"


@EVERY_INSTRUCTION_SET
@pytest.mark.parametrize("units", [41, 43, 65, 172, 462, 511, 512, 513, 520, 1039, 1048])
def test_rows_of_any_length_have_the_products_of_the_reference_for_one_token(instructions, units):
    """Activations are laid out for several rows, for one, or not at all, as there is room on the stack."""
    x, whole = make_activations(1, 64 * units), make_packed(18, 64 * units, 64, seed=units)
    for bits in (3, 4, 8):
        packed = whole.at(bits, False)
        assert same_bits(cpu.linear(x, packed), reference_linear(x, packed)), f"E5M{bits}"


# Pairs of precisions, all of them, all but some, one alone, in any order and as neighbours or not.
MIXES = [
    *[[fine, coarse, fine] for fine in range(4, 9) for coarse in range(3, fine)],
    [3, 4, 5, 6, 7, 8],
    [8, 3, 8, 3, 5, 5, 5, 5, 5, 5, 4, 7, 6, 3, 4, 8],
    [7] * 9,
    [6],
    [4, 6, 4, 8] * 16,
]


@EVERY_SHAPE
@EVERY_INSTRUCTION_SET
@pytest.mark.parametrize("truncate", [False, True], ids=["midpoint", "truncate"])
def test_tokens_of_any_mix_of_precisions_have_the_products_that_each_has_alone(instructions, shape, truncate):
    whole = make_packed(*shape, seed=sum(shape), truncate=truncate)
    x = make_activations(8, shape[1])
    expected = {bits: expected_linear(shape, bits, truncate) for bits in range(3, 9)}
    for mix in MIXES:
        tokens = [number % 8 for number in range(len(mix))]
        got = torch.full((len(mix), shape[0]), torch.nan)
        views = (whole.base.numpy(), whole.scales.numpy(), [plane.numpy() for plane in whole.planes])
        cpu._cpu.mixed(x[tokens].numpy(), *views, *whole[3:], mix, got.numpy())
        alone = torch.stack([expected[bits][token] for bits, token in zip(mix, tokens, strict=True)])
        assert same_bits(got, alone), mix


def test_a_mix_of_precisions_that_cannot_be_is_refused():
    whole = make_packed(3, 64, 64, bits=5)
    views = (whole.base.numpy(), whole.scales.numpy(), [plane.numpy() for plane in whole.planes])
    x = torch.zeros(2, 64).numpy()
    for bits, rows in (([3], 2), ([3, 6], 2), ([2, 3], 2), ([3, 3], 1)):
        with pytest.raises(ValueError, match="bits must be"):
            cpu._cpu.mixed(x, *views, *whole[3:], bits, torch.zeros(rows, 3).numpy())


@pytest.mark.parametrize("group_size", [32, 64, 96, 128, 256])
def test_quantized_activations_are_those_of_the_reference(backend, group_size):
    largest = torch.finfo(torch.float32).max
    edges = torch.zeros(8, 200)
    edges[1, 3], edges[1, 64] = 32639.5, 32639.498046875  # the next float below
    edges[2, 0], edges[2, 70] = largest, -largest
    edges[3, :50], edges[3, 100:] = 1e-45, 2.0**-95
    edges[4, 0], edges[4, 1:64] = 1.0, torch.arange(-31, 32) * 2.0**-15
    edges[5, 0], edges[5, 80], edges[5, 199] = torch.nan, torch.inf, -torch.inf
    edges[6], edges[7, ::2] = -0.0, 2.0**-81
    for x in (edges, make_activations(9, 1000), make_activations(2, 1), make_activations(0, 64)):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for got, expected in zip(
                ops.quantize(x.to(dtype), group_size),
                reference.quantize(x.to(dtype), group_size),
                strict=True,
            ):
                assert same_bits(got, expected)


ONE = 0x38  # a scale byte
EXTREME_CODES = {
    "all zeros": (0x00, 0x00),
    "all ones": (0xFF, 0xFF),
    "the least positive": (0x88, 0x00),
    "the least negative": (0x77, 0xFF),
}
EXTREME_ACTIVATIONS = {
    "the largest": [32639],
    "the smallest": [-32639],
    "both": [32639, -32639],
    "low bytes of -128": [32384],  # 127 * 256 - 128
    "negative low bytes of -128": [-32640 + 128],
    "low bytes of 127, high of -127": [-32512 + 127],
    "one large and many with low bytes of -128": [32639, *[128] * 31],
}


@pytest.mark.parametrize("activations", EXTREME_ACTIVATIONS.values(), ids=EXTREME_ACTIVATIONS)
@pytest.mark.parametrize("codes", EXTREME_CODES.values(), ids=EXTREME_CODES)
def test_nothing_overflows_or_saturates_at_the_ends_of_the_range(backend, codes, activations):
    """Byte products saturate where 16 bits hold their sums: 255 * 127 * 2 would."""
    length = 192
    integers = torch.tensor(activations).repeat(length)[:length]
    x = torch.stack((integers, -integers, integers.flip(0))).float() * 2.0**-15
    assert torch.equal(reference.quantize(x, 64)[0][0].int(), integers)
    for bits, truncate in GRIDS:
        packed = make_packed(5, length, 64, bits, truncate)
        packed.base.fill_(codes[0])
        for plane in packed.planes:
            plane.fill_(codes[1])
        packed.scales.fill_(ONE)
        expected = reference_linear(x, packed)
        assert same_bits(ops.linear(x, *packed), expected), f"E5M{bits}, truncate={truncate}"
        # These sums are whole numbers of steps below 2^24 in count per unit pattern, so float64 has them
        # exactly.
        exact = x.double() @ reference.decode(packed).double().T
        assert (expected.double() - exact).abs().max() <= exact.abs().max() * 2.0**-22


@pytest.mark.parametrize("tokens", [9, 17, 64])
@pytest.mark.parametrize(
    "shape", [(40, 1, 64), (33, 65, 64), (64, 576, 64), (20, 1000, 96), (600, 1024, 64)], ids=str
)
def test_many_tokens_are_as_good_as_the_plain_float32_product(backend, shape, tokens):
    """Decoded in tiles and multiplied by the library, whose order of sums is its own: judged by float64.

    For fewer than 16 tokens the library sums in another order when weight and activations change places, with
    half the error; either is the plain product.
    """
    x = torch.randn(tokens, shape[1], generator=torch.Generator().manual_seed(tokens))
    bias = torch.linspace(-1, 1, shape[0])
    for bits, truncate in ((8, False), (3, True), (5, False)):
        packed = make_packed(*shape, bits, truncate, spread=2)
        values = reference.decode(packed)
        for added in (None, bias):
            got = ops.linear(x, *packed, added)
            plain = [x @ values.T, (values @ x.T).T]
            plain = [one if added is None else one + added for one in plain]
            exact = torch.nn.functional.linear(
                x.double(), values.double(), None if added is None else added.double()
            )
            assert got.shape == exact.shape
            assert got.is_contiguous()
            assert (got - exact).norm() <= 2 * max((one - exact).norm() for one in plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_comes_and_goes_through_float32(backend, dtype):
    packed = make_packed(7, 200, 64, spread=3)
    x, bias = make_activations(4, 200).clamp(-100, 100).to(dtype), torch.linspace(-3, 3, 7).to(dtype)
    product = reference_linear(x.float(), packed)
    assert same_bits(ops.linear(x, *packed), product.to(dtype))
    assert same_bits(ops.linear(x, *packed, bias), (product + bias.float()).to(dtype))
    many = x.repeat(3, 1)
    values = reference.decode(packed).double()
    exact = many.double() @ values.T + bias.double()
    plain = torch.nn.functional.linear(many, values.to(dtype), bias)
    got = ops.linear(many, *packed, bias)
    assert got.dtype == dtype
    assert (got - exact).norm() <= 2 * (plain - exact).norm()


def test_a_bias_is_added_after_the_product(backend):
    packed = make_packed(7, 200, 64)
    x, bias = make_activations(4, 200), torch.randn(7)
    assert same_bits(ops.linear(x, *packed, bias), reference_linear(x, packed) + bias)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_what_is_not_finite_stays_with_its_token(backend, bad):
    packed = make_packed(5, 1100, 64)
    x = make_activations(4, 1100)
    expected = reference_linear(x, packed)
    x[2, 1099] = bad
    got = ops.linear(x, *packed)
    assert got[2].isnan().all()
    assert same_bits(got[[0, 1, 3]], expected[[0, 1, 3]])


def test_products_beyond_float32_become_infinite_on_every_backend(backend):
    packed = make_packed(5, 130, 64, scale_exponent=MAX_SCALE_EXPONENT)
    packed.scales.fill_(0x7F)
    x = torch.full((3, 130), torch.finfo(torch.float32).max)
    expected = reference_linear(x, packed)
    assert not expected.isfinite().any()
    assert same_bits(ops.linear(x, *packed), expected)


# Memory


def views(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same numbers, elsewhere."""
    rows, columns = tensor.shape
    wide = torch.zeros(rows + 2, 2 * columns + 3, dtype=tensor.dtype)
    wide[1:-1, 1 : 1 + columns] = tensor
    gaps = torch.zeros(rows, 2 * columns, dtype=tensor.dtype)
    gaps[:, ::2] = tensor
    raw = bytearray(b"\0" + tensor.numpy().tobytes())
    fixed = np.frombuffer(tensor.numpy().tobytes(), tensor.numpy().dtype).reshape(rows, columns)
    return {
        "part of a larger one": wide[1:-1, 1 : 1 + columns],
        "every other column": gaps[:, ::2],
        "transposed": tensor.T.contiguous().T,
        "at an odd address": torch.frombuffer(raw, dtype=tensor.dtype, offset=1).view(rows, columns),
        "read-only": torch.from_numpy(fixed),
    }


VIEWS = list(views(torch.zeros(1, 1)))


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("tokens", [2, 10])
@pytest.mark.parametrize("form", VIEWS)
def test_where_and_how_tensors_lie_does_not_matter(backend, form, tokens):
    packed, x = make_packed(6, 200, 64, spread=3), make_activations(tokens, 200).clamp(-100, 100)
    product, values = ops.linear(x, *packed), ops.decode(*packed, torch.float32)
    base, scales = views(packed.base)[form], views(packed.scales)[form]
    elsewhere = packed._replace(
        base=base, scales=scales, planes=[views(plane)[form] for plane in packed.planes]
    )
    assert same_products(ops.linear(views(x)[form], *elsewhere), product, x, packed)
    assert same_bits(ops.decode(*elsewhere, torch.float32), values)
    ids = torch.tensor([[5, 0, 5, 2]])
    assert same_bits(ops.embedding(views(ids)[form][0], *elsewhere, torch.float32), values[ids[0]])
    for got, expected in zip(ops.quantize(views(x)[form], 64), ops.quantize(x, 64), strict=True):
        assert same_bits(got, expected)


@pytest.mark.parametrize("tokens", [2, 10])
def test_rows_that_are_stored_once_may_be_given_many_times(backend, tokens):
    packed, x = make_packed(1, 200, 64, spread=3), make_activations(1, 200).clamp(-100, 100)
    many = packed._replace(
        base=packed.base.expand(5, -1),
        scales=packed.scales.expand(5, -1),
        planes=[plane.expand(5, -1) for plane in packed.planes],
    )
    got, copied = ops.linear(x.expand(tokens, -1), *many), x.repeat(tokens, 1)
    assert got.shape == (tokens, 5)
    whole = Packed(*(part.contiguous() if isinstance(part, torch.Tensor) else part for part in many))
    assert same_products(got, ops.linear(copied, *whole), copied, whole)


def test_inputs_are_left_as_they_were(backend):
    packed, x = make_packed(6, 200, 64), make_activations(3, 200)
    before = [one.clone() for one in (x, packed.base, packed.scales, *packed.planes)]
    (
        ops.linear(x, *packed),
        ops.linear(x.repeat(4, 1), *packed),
        ops.decode(*packed, torch.float32),
        ops.quantize(x, 64),
    )
    after = (x, packed.base, packed.scales, *packed.planes)
    assert all(same_bits(now, then) for now, then in zip(after, before, strict=True))


def test_activations_that_want_a_gradient_are_multiplied_all_the_same(backend):
    packed, x = make_packed(6, 200, 64), make_activations(12, 200)
    bias = torch.randn(6)
    for tokens in (3, 12):
        expected = ops.linear(x[:tokens], *packed, bias)
        got = ops.linear(x[:tokens].requires_grad_(), *packed, bias.clone().requires_grad_())
        assert same_products(got.detach(), expected, x[:tokens].detach(), packed, bias)
        with pytest.raises(RuntimeError, match=r"backward through otaro\.linear"):
            got.sum().backward()


# What torch asks of an operation


@pytest.mark.parametrize(
    ("tokens", "bias"), [(0, None), (1, torch.zeros(3)), (9, None)], ids=["none", "one", "nine"]
)
def test_linear_is_an_operation_as_torch_wants_it(backend, tokens, bias, installed):
    torch.library.opcheck(ops.linear, (torch.randn(tokens, 100), *make_packed(3, 100, 64, 5), bias))


def test_the_other_operations_are_as_torch_wants_them(backend, installed):
    packed = make_packed(3, 100, 64, 5)
    torch.library.opcheck(ops.decode, (*packed, torch.float16))
    torch.library.opcheck(ops.embedding, (torch.tensor([2, 0]), *packed, torch.float32))
    torch.library.opcheck(ops.quantize, (torch.randn(2, 100), 64))


@pytest.mark.parametrize("rows", [0, 1])
def test_no_rows_and_one_row_are_as_torch_wants_them(backend, rows, installed):
    packed = make_packed(rows, 33, 32, 8)
    torch.library.opcheck(ops.linear, (torch.randn(9, 33), *packed))
    torch.library.opcheck(ops.decode, (*packed, torch.float32))


def test_compiled_modules_give_the_same_products(installed, backend, nested_dir):
    model = otaro.load(nested_dir, "E5M5")
    linear = model.get_submodule("model.layers.0.self_attn.q_proj")
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    for tokens in (1, 12):
        x = torch.randn(tokens, linear.in_features)
        with torch.no_grad():
            assert same_products(compiled(x), linear(x), x, linear.packed._packed(linear.mantissa_bits))


# Threads


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_any_number_of_threads_gives_the_same_bits_each_time(backend, restored_threads, threads):
    packed, x = make_packed(150, 300, 64, 6), make_activations(3, 300)
    expected = [reference_linear(x, packed), reference.decode(packed)]
    torch.set_num_threads(threads)
    for _ in range(20):
        assert same_bits(ops.linear(x, *packed), expected[0])
        assert same_bits(ops.decode(*packed, torch.float32), expected[1])


@EVERY_INSTRUCTION_SET
def test_calls_at_the_same_time_do_not_disturb_each_other(instructions, restored_threads):
    """One call has the pool, the others work alone; regions open and close all the time."""
    torch.set_num_threads(3)
    problems = [
        (make_packed(rows, 200, 64, seed=rows), make_activations(2, 200, seed=rows))
        for rows in (17, 40, 64, 100, 128)
    ]
    expected = [reference_linear(x, packed) for packed, x in problems]
    wrong: list[str] = []
    start = threading.Barrier(len(problems))

    def work(number: int) -> None:
        packed, x = problems[number]
        start.wait()
        for turn in range(100):
            try:
                if not same_bits(ops.linear(x, *packed), expected[number]):
                    wrong.append(f"thread {number}, turn {turn}")
            except Exception as error:
                wrong.append(repr(error))

    workers = [threading.Thread(target=work, args=(number,)) for number in range(len(problems))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@EVERY_INSTRUCTION_SET
def test_the_number_of_threads_may_change_while_others_compute(instructions, restored_threads):
    packed, x = make_packed(64, 200, 64), make_activations(2, 200)
    expected, done, wrong = reference_linear(x, packed), threading.Event(), []

    def change() -> None:
        number = 0
        while not done.is_set():
            number += 1
            cpu._cpu.set_threads(1 + number % 5)

    changer = threading.Thread(target=change)
    changer.start()
    for turn in range(100):
        if not same_bits(ops.linear(x, *packed), expected):
            wrong.append(turn)
    done.set()
    changer.join()
    assert not wrong


def child_status(compute, seconds: float = 60) -> int | None:
    """The exit status of a forked child: 0 where compute() says so; None where it did not end in time."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            status = 0 if compute() else 1
        finally:
            os._exit(status)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None


@pytest.mark.filterwarnings("ignore:.*use of fork")
@EVERY_INSTRUCTION_SET
def test_a_forked_child_computes_with_threads_of_its_own(instructions, restored_threads):
    packed, x = make_packed(64, 200, 64), make_activations(2, 200)
    expected = reference_linear(x, packed)
    torch.set_num_threads(3)

    def right() -> bool:
        return all(same_bits(ops.linear(x, *packed), expected) for _ in range(5))

    assert right()  # so that there are helpers, whom the child will not have
    assert child_status(right) == 0
    assert child_status(lambda: child_status(right) == 0) == 0  # a child's child
    assert right()


@pytest.mark.filterwarnings("ignore:.*use of fork")
def test_a_fork_in_the_middle_of_other_threads_work_does_not_hang(restored_threads, monkeypatch):
    skip_unless_runnable("portable")
    monkeypatch.setenv(ops.OVERRIDE, "cpu")
    packed, x = make_packed(200, 500, 64), make_activations(2, 500)
    expected, done = reference_linear(x, packed), threading.Event()
    arrays = (
        x.numpy(),
        packed.base.numpy(),
        packed.scales.numpy(),
        [plane.numpy() for plane in packed.planes],
        *packed[3:],
    )
    cpu._cpu.set_threads(3)

    def work() -> None:
        out = np.empty((2, 200), np.float32)
        while not done.is_set():
            cpu._cpu.linear(*arrays, out)

    def right() -> bool:
        """Only the extension and numpy: a library's allocator may not survive a threaded fork, ours must."""
        out = np.empty((2, 200), np.float32)
        cpu._cpu.linear(*arrays, out)
        return bool((out == expected.numpy()).all())

    worker = threading.Thread(target=work)
    worker.start()
    try:
        assert [child_status(right) for _ in range(10)] == [0] * 10
    finally:
        done.set()
        worker.join()


def test_threads_are_as_many_as_torch_uses_and_sleep_when_idle(installed, in_child):
    skip_unless_runnable("portable")
    done = in_child("""
        import os, time, torch
        from otaro.kernels import ops
        base, scales = torch.zeros(4096, 64, dtype=torch.uint8), torch.zeros(4096, 2, dtype=torch.uint8)
        x = torch.ones(1, 128)
        alone = len(os.listdir("/proc/self/task"))
        for threads in (1, 3, 2, 5):
            torch.set_num_threads(threads)
            ops.linear(x, base, scales, [], 128, 64, False, 0)
            print(threads, len(os.listdir("/proc/self/task")) - alone + 1)
        time.sleep(0.05)  # helpers spin for a moment
        before = time.process_time()
        time.sleep(0.5)
        print("idle", time.process_time() - before)
    """)
    *counts, idle = done.stdout.splitlines()
    assert (done.returncode, counts) == (0, ["1 1", "3 3", "2 2", "5 5"]), done.stderr
    assert float(idle.split()[1]) < 0.005  # of 2.5 seconds that five busy threads would take


# Refusals


def spoiled(**changes: object) -> tuple:
    packed = make_packed(4, 100, 64, 5)
    return tuple(packed._replace(**changes))


REFUSED = {
    "no weights": ({"length": 0}, "a row cannot have 0 weights"),
    "negative length": ({"length": -100}, "a row cannot have -100 weights"),
    "too long": ({"length": 2**40}, "a row cannot have"),
    "another length": ({"length": 129}, r"base must be torch.uint8 \[rows, 80\]"),
    "groups of none": ({"group_size": 0}, "group_size is 0, and must be a positive multiple of 32"),
    "negative groups": ({"group_size": -32}, "group_size is -32"),
    "odd groups": ({"group_size": 33}, "group_size is 33"),
    "huge groups": ({"group_size": 2**40}, "group_size is"),
    "other groups": ({"group_size": 32}, r"scales must be torch.uint8 \[4, 4\], not torch.uint8 \[4, 2\]"),
    "six planes": (
        {"planes": [torch.zeros(4, 16, dtype=torch.uint8)] * 6},
        "6 planes were given, and there are 5 at most",
    ),
    "a plane too short": (
        {"planes": [torch.zeros(4, 12, dtype=torch.uint8)]},
        r"plane 4 must be "
        r"torch.uint8 \[4, 16\]",
    ),
    "a plane of other rows": ({"planes": [torch.zeros(3, 16, dtype=torch.uint8)]}, "plane 4 must be"),
    "a signed plane": ({"planes": [torch.zeros(4, 16, dtype=torch.int8)]}, "plane 4 must be torch.uint8"),
    "a plane elsewhere": (
        {"planes": [torch.zeros(4, 16, dtype=torch.uint8, device="meta")]},
        "plane 4 is on meta",
    ),
    "a flat base": ({"base": torch.zeros(256, dtype=torch.uint8)}, r"base must be torch.uint8 \[rows, 64\]"),
    "a signed base": ({"base": torch.zeros(4, 64, dtype=torch.int8)}, "base must be torch.uint8"),
    "a sparse base": (
        {"base": torch.ones(4, 64, dtype=torch.uint8).to_sparse()},
        "base must be an ordinary tensor",
    ),
    "signed scales": ({"scales": torch.zeros(4, 2, dtype=torch.int8)}, "scales must be torch.uint8"),
    "scales that are floats": (
        {"scales": torch.zeros(4, 2).to(torch.float8_e4m3fn)},
        "scales must be torch.uint8",
    ),
    "scales too small": ({"scale_exponent": -14}, "scale_exponent is -14, and must be from -13 to 7"),
    "scales too large": ({"scale_exponent": 8}, "scale_exponent is 8, and must be from -13 to 7"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_a_packed_weight_that_does_not_fit_is_refused_in_words(backend, changes, message):
    packed = spoiled(**changes)
    length = min(max(packed[3], 0), 1000)
    for call in (
        lambda: ops.linear(torch.ones(2, length), *packed),
        lambda: ops.linear(torch.ones(10, length), *packed),
        lambda: ops.decode(*packed, torch.float32),
        lambda: ops.embedding(torch.tensor([0]), *packed, torch.float32),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("scale_exponent", [-14, 8, 2**31 - 1])
def test_the_extension_itself_refuses_scales_whose_products_would_not_be_exact(scale_exponent):
    skip_unless_runnable("portable")
    packed = make_packed(4, 100, 64)._replace(scale_exponent=scale_exponent)
    base, scales, _, *numbers = packed
    for call in (
        lambda: cpu.linear(torch.ones(1, 100), packed),
        lambda: cpu.decode(packed),
        lambda: cpu._cpu.Matrix(base.numpy(), scales.numpy(), *numbers),
    ):
        with pytest.raises(ValueError, match="scale_exponent must lie between -13 and 7"):
            call()


WRONG_ACTIVATIONS = {
    "flat": (torch.ones(100), r"\[tokens, 100\], not torch.float32 \[100\]"),
    "too short": (torch.ones(2, 99), r"\[tokens, 100\], not torch.float32 \[2, 99\]"),
    "double": (torch.ones(2, 100, dtype=torch.float64), "not torch.float64"),
    "whole": (torch.ones(2, 100, dtype=torch.int32), "not torch.int32"),
    "elsewhere": (torch.ones(2, 100, device="meta"), "activations are on meta, the packed weight on cpu"),
    "sparse": (torch.ones(2, 100).to_sparse(), "activations must be an ordinary tensor"),
}


@pytest.mark.parametrize(("x", "message"), WRONG_ACTIVATIONS.values(), ids=WRONG_ACTIVATIONS)
def test_activations_that_do_not_fit_are_refused_in_words(backend, x, message):
    with pytest.raises(KernelError, match=message):
        ops.linear(x, *spoiled())


@pytest.mark.parametrize(
    "bias", [torch.ones(3), torch.ones(4, 1), torch.ones(4).half(), torch.ones(4, device="meta")], ids=str
)
def test_a_bias_that_does_not_fit_is_refused_in_words(backend, bias):
    with pytest.raises(KernelError, match=r"the bias must be torch.float32 \[4\] on cpu, not"):
        ops.linear(torch.ones(2, 100), *spoiled(), bias)


@pytest.mark.parametrize("ids", [[-1], [4], [0, 2**40], [-(2**62), 0]], ids=str)
def test_row_numbers_out_of_range_are_refused_in_words(backend, ids):
    with pytest.raises(KernelError, match=rf"ids run from {min(ids)} to {max(ids)}, but there are 4 rows"):
        ops.embedding(torch.tensor(ids), *spoiled(), torch.float32)


def test_odd_ids_types_and_group_sizes_are_refused_in_words(backend):
    with pytest.raises(KernelError, match=r"ids must be int64 or int32 \[count\]"):
        ops.embedding(torch.zeros(2), *spoiled(), torch.float32)
    with pytest.raises(KernelError, match=r"ids must be int64 or int32 \[count\]"):
        ops.embedding(torch.zeros(2, 2, dtype=torch.int64), *spoiled(), torch.float32)
    with pytest.raises(
        KernelError,
        match=r"weights decode to float32, float16 or bfloat16, not "
        r"torch.float64",
    ):
        ops.decode(*spoiled(), torch.float64)
    with pytest.raises(KernelError, match="group_size is 48"):
        ops.quantize(torch.ones(1, 64), 48)
    with pytest.raises(KernelError, match=r"activations must be .* \[tokens, length\]"):
        ops.quantize(torch.ones(1, 0), 64)


def test_tensors_without_numbers_give_shapes(backend):
    on_meta = [p.to("meta") if isinstance(p, torch.Tensor) else p for p in make_packed(4, 100, 64, 3)]
    assert ops.linear(torch.ones(2, 100, device="meta"), *on_meta).shape == (2, 4)
    assert ops.decode(*on_meta, torch.float16).dtype == torch.float16
    assert [tuple(one.shape) for one in ops.quantize(torch.ones(2, 100, device="meta"), 64)] == [
        (2, 100),
        (2, 2),
    ]
