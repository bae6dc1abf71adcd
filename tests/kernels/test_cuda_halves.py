"""Products of many tokens by halves, on a GPU or emulated: as exact as sums in float32 are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from otaro.errors import KernelError
from otaro.kernels import cuda, halves, hopper, hopper_halves, nvrtc, ops, reference
from otaro.kernels.halves import Shape
from otaro.kernels.hopper_halves import Shape as Wide

from . import emulated
from .packed import GRIDS, Packed, make_packed, same_bits

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
HOPPER = 227328
"""Bytes of shared memory."""


@pytest.fixture(autouse=True)
def on_some_gpu(monkeypatch):
    """On the GPU there is, else emulated: two multiprocessors of one block each, with several tiles."""
    if HAS_GPU:
        yield
        return
    if emulated.MISSING:
        pytest.skip(emulated.MISSING)
    monkeypatch.setattr(nvrtc, "kernel", emulated.kernel)
    monkeypatch.setattr(hopper, "has_instructions", lambda device: False)
    monkeypatch.setattr(nvrtc, "most_shared", lambda device: 60416)  # an RTX 30's
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=2)
    )
    cuda._halves_kernel.cache_clear()
    yield
    cuda._halves_kernel.cache_clear()


def there(packed: Packed) -> Packed:
    base, scales, *planes = (part.to(DEVICE) for part in (packed.base, packed.scales, *packed.planes))
    return packed._replace(base=base, scales=scales, planes=planes)


def off(got: torch.Tensor, x: torch.Tensor, packed: Packed, bias: torch.Tensor | None = None) -> float:
    """The largest error beside what roundings give: one for each term of a unit, each unit, parts and slices,
    in units of 2^-23 of the sum of magnitudes; and one of the result's own type."""
    return _off(got, x, packed, reference.decode(packed).double(), bias)


def _off(got, x, packed, weight, bias):
    exact, size = x.double() @ weight.T, x.double().abs() @ weight.abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    limits = torch.finfo(got.dtype)
    bound = (64 + packed.length / 64 + 16) * 2.0**-23 * size + limits.eps / 2 * exact.abs() + limits.tiny
    return float(((got.double().cpu() - exact).abs() / bound).max())


def multiplied(x, matrices, biases, shape, dtype=torch.float32, scratch=None, arranged=False, tokens=None):
    outs = [
        torch.full((tokens or len(x), len(one.base) + 3), 7.0, dtype=dtype, device=DEVICE)[:, :-3]
        for one in matrices
    ]
    on_device = [None if one is None else one.to(DEVICE) for one in biases]
    x, matrices = x.to(DEVICE), [there(one) for one in matrices]
    cuda.multiply_halves(x, matrices, outs, on_device, scratch, early=True, shape=shape, arranged=arranged)
    return outs


@pytest.mark.parametrize(
    ("shape", "tokens", "length", "group_size", "rows"),
    [
        (Shape(32, 2, 2, 4, 3), 20, 1024, 64, (100, 33, 5)),
        (Shape(64, 2, 2, 2, 3, slices=2), 64, 512, 64, (64,)),
        (Shape(32, 1, 4, 4, 2, slices=3), 70, 1096, 64, (50, 31)),  # three passes, and rows end within a unit
        (Shape(32, 3, 1, 2, 4, slices=2), 17, 200, 128, (150,)),
    ],
    ids=str,
)
def test_small_products_by_halves_are_exact_but_for_sums(shape, tokens, length, group_size, rows):
    """However they are cut; with several matrices, biases, and twice, since launches leave tickets zero."""
    matrices = [
        make_packed(count, length, group_size, seed=count).at(*GRIDS[tokens % len(GRIDS)]) for count in rows
    ]
    x, biases = (
        torch.randn(tokens, length).half(),
        [torch.randn(count) if count % 2 else None for count in rows],
    )
    scratch = cuda.Scratch(torch.device(DEVICE))
    first, again = (multiplied(x, matrices, biases, shape, scratch=scratch) for _ in range(2))
    for one, out, twice, bias in zip(matrices, first, again, biases, strict=True):
        assert off(out, x, one, bias) <= 1
        assert same_bits(out, twice)


@pytest.mark.parametrize(("bits", "truncate"), GRIDS)
def test_small_products_by_halves_know_every_code(bits, truncate):
    """A token for each weight of a unit shows each by itself: these products are weights, and exact."""
    packed = make_packed(64, 64, 64, seed=bits, spread=2).at(bits, truncate)
    (got,) = multiplied(torch.eye(64).half(), [packed], [None], Shape(16, 1, 1, 2, 2))
    assert torch.equal(got.cpu(), reference.decode(packed).T)  # but for the sign of zero


@pytest.mark.parametrize(
    ("tokens", "length", "dtype"),
    [(17, 65, torch.bfloat16), (33, 1024, torch.float16), (130, 200, torch.bfloat16)],
    ids=str,
)
def test_small_products_of_many_tokens_are_those_of_halves(monkeypatch, tokens, length, dtype):
    """Through the operation, whose results have the tokens' type, as exact, of any size that it holds."""
    monkeypatch.setattr(ops, "_serving", lambda device: cuda)
    monkeypatch.setattr(halves, "MOST_TOKENS", 130)
    packed = make_packed(70, length, 64, 5, seed=length)
    x, bias = torch.randn(tokens, length).to(dtype), torch.randn(70).to(dtype)
    if dtype == torch.bfloat16:
        x[1] *= 2.0**100
        x[2] *= 2.0**-100
        x[3] = 0
    got = ops.linear(x.to(DEVICE), *there(packed), bias.to(DEVICE))
    assert got.dtype == dtype
    assert off(got, x, packed, bias) <= 1


def test_small_products_by_halves_pass_on_what_is_not_finite():
    packed, x = make_packed(40, 512, 64, 6), torch.randn(20, 512)
    x[1, 3], x[2, 100] = torch.nan, torch.inf
    for kind in (torch.float16, torch.bfloat16):
        (got,) = multiplied(x.to(kind), [packed], [None], Shape(32, 2, 1, 4, 2))
        assert not got[1:3].isfinite().any()
        assert got[0].isfinite().all()
        assert got[3:].isfinite().all()


def test_small_planes_scales_and_tokens_may_lie_anywhere():
    packed, x = make_packed(40, 512, 64, 6), torch.randn(20, 512).half()
    expected = multiplied(x, [packed], [None], Shape(32, 2, 1, 4, 2))[0]

    def elsewhere(tensor, by):
        return (
            torch.empty(tensor.numel() + by, dtype=tensor.dtype, device=DEVICE)[by:]
            .view_as(tensor)
            .copy_(tensor)
        )

    moved = packed._replace(
        base=packed.base.to(DEVICE),
        planes=[elsewhere(one, 4) for one in packed.planes],
        scales=elsewhere(packed.scales, 1),
    )
    out = torch.empty_like(expected)
    cuda.multiply_halves(elsewhere(x, 1), [moved], [out], shape=Shape(32, 2, 1, 4, 2))
    assert same_bits(out, expected)


def test_matrices_of_two_kinds_are_not_multiplied_at_once():
    two = [make_packed(4, 64, 64).at(bits, False) for bits in (3, 4)]
    for some in (two, [two[0]] * 4):
        with pytest.raises(KernelError, match="one launch takes 3 matrices of one length, precision"):
            cuda.halves_launch(20, some, torch.float32, cuda.Scratch(torch.device(DEVICE)))


def test_other_types_and_groups_and_few_tokens_stay_integers(monkeypatch):
    monkeypatch.setattr(cuda, "multiply_halves", None)
    monkeypatch.setattr(cuda, "linear", lambda x, packed: torch.full((len(x), len(packed.base)), 7.0))
    for tokens, group_size, dtype in (
        (16, 64, torch.float16),
        (17, 32, torch.bfloat16),
        (17, 64, torch.float32),
    ):
        got = cuda.matmul(torch.ones(tokens, 192, dtype=dtype), make_packed(20, 192, group_size, 4))
        assert torch.equal(got, torch.full((tokens, 20), 7.0, dtype=dtype))


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("tokens", [17, 64, 128])
def test_every_gpu_has_a_shape_that_fits(bits, tokens):
    for most, processors in ((60416, 20), (161 << 10, 108), (HOPPER, 132)):
        for rows, units in (
            ((4096, 1024, 1024), 64),
            ((4096,), 224),
            ((14336, 14336), 64),
            ((5,), 1),
            ((128256,), 64),
        ):
            shape = halves.shape(most, processors, tokens, rows, units, bits)
            assert shape.shared(bits) <= most
            assert shape.stages >= 2
            assert shape.threads <= 256
            assert shape.slices <= -(-units // shape.units)
            assert shape.units % shape.parts == 0


def test_products_of_llama_s_layers_are_cut_as_they_were_fastest_on_an_h200():
    for rows, units, cut in (
        ((4096, 1024, 1024), 64, (2, 4, 1)),
        ((4096,), 64, (4, 2, 4)),
        ((14336, 14336), 64, (7, 1, 1)),
        ((4096,), 224, (4, 2, 4)),
    ):
        for tokens in (32, 64):
            shape = halves.shape(HOPPER, 132, tokens, rows, units, 4)
            assert (shape.groups, shape.parts, shape.slices) == cut


def needs_hopper():
    """The shapes of such a GPU, whatever compiler it has: products are looked at here."""
    if HAS_GPU and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this GPU has no wgmma")


def rounded(packed):
    """What Hopper's kernel multiplies with: weights as halves, but for the tensor's power of two."""
    raised = 2.0 ** (packed.scale_exponent - 5)  # within the range of halves
    return (reference.decode(packed) / raised).half().double() * raised


@pytest.mark.parametrize(
    ("shape", "tokens", "length", "rows", "arranged"),
    [
        (Wide(32, 2, 3), 20, 512, (200, 33, 5), False),
        (Wide(64, 2, 2, slices=2), 60, 768, (64,), True),
        (Wide(32, 3, 2), 40, 256, (300,), True),  # two passes
        (Wide(32, 4, 2, slices=3), 17, 1024, (70, 31), False),
        (Wide(128, 2, 2), 130, 256, (100,), False),
    ],
    ids=str,
)
def test_small_products_by_halves_on_hopper_are_exact_but_for_sums(shape, tokens, length, rows, arranged):
    """However they are cut, and in whichever order activations come."""
    needs_hopper()
    matrices = [make_packed(count, length, 64, seed=count).at(*GRIDS[tokens % len(GRIDS)]) for count in rows]
    x, biases = (
        torch.randn(tokens, length).half(),
        [torch.randn(count) if count % 2 else None for count in rows],
    )
    scratch, given = (
        cuda.Scratch(torch.device(DEVICE)),
        hopper_halves.arranged(x, shape.columns) if arranged else x,
    )
    first, again = (
        multiplied(given, matrices, biases, shape, scratch=scratch, arranged=arranged, tokens=tokens)
        for _ in range(2)
    )
    for one, out, twice, bias in zip(matrices, first, again, biases, strict=True):
        assert _off(out, x, one, rounded(one), bias) <= 1
        assert same_bits(out, twice)


@pytest.mark.parametrize(("bits", "truncate"), GRIDS)
def test_small_products_by_halves_on_hopper_know_every_code(bits, truncate):
    """A token for each weight of a unit shows it; to E5M5 these are the weights, then the next halves."""
    needs_hopper()
    packed = make_packed(64, 256, 64, seed=bits, spread=2).at(bits, truncate)
    (got,) = multiplied(torch.eye(256)[64:128].half(), [packed], [None], Wide(64, 2, 2))
    weight = reference.decode(packed)
    assert torch.equal(got.cpu().double(), rounded(packed)[:, 64:128].T)
    assert bits > 5 or torch.equal(got.cpu(), weight[:, 64:128].T)


def test_hoppers_kernel_serves_rows_of_whole_stages(monkeypatch):
    monkeypatch.setattr(hopper, "has_instructions", lambda device: True)
    assert hopper_halves.serves([make_packed(8, 512, 64).at(4, False)])
    assert not hopper_halves.serves(
        [make_packed(8, 512, 64).at(4, False), make_packed(8, 320, 64).at(4, False)]
    )
    assert not hopper_halves.serves([make_packed(8, 512, 128).at(4, False)])
    some, scratch = [there(make_packed(8, 320, 64))], cuda.Scratch(torch.device(DEVICE))
    with pytest.raises(KernelError, match="arranged tokens are taken by Hopper's kernel alone"):
        cuda.halves_launch(20, some, torch.float32, scratch, arranged=True)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("tokens", [17, 64, 128, 300])
def test_hopper_has_a_shape_for_all_rows(bits, tokens):
    for rows, stages in (
        ((4096, 1024, 1024), 16),
        ((4096,), 56),
        ((14336, 14336), 16),
        ((5,), 1),
        ((128256,), 16),
    ):
        shape = hopper_halves.shape(HOPPER, 132, tokens, rows, stages, bits)
        assert shape.shared(bits) <= HOPPER
        assert shape.stages >= 2
        assert shape.threads <= 640
        assert shape.slices <= stages


def test_products_of_llama_s_layers_are_cut_on_hopper_as_they_were_fastest():
    for rows, stages, cut in (((4096, 1024, 1024), 16, (2, 2)), ((4096,), 16, (2, 4)), ((4096,), 56, (2, 4))):
        for tokens in (32, 64):
            shape = hopper_halves.shape(HOPPER, 132, tokens, rows, stages, 4)
            assert (shape.groups, shape.slices) == cut
    for bits, groups in ((3, 4), (4, 4), (8, 2)):
        shape = hopper_halves.shape(HOPPER, 132, 32, (14336, 14336), 16, bits)
        assert (shape.groups, shape.slices) == (groups, 1)
