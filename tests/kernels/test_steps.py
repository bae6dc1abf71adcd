"""The steps of a decoder as kernels, against the same steps in torch: on the GPU, and emulated on any CPU.

What is integer must be the same bit for bit: rows of an embedding, cached keys and values, quantized
activations where what is quantized is the same. Norms and attention are sums of floats in another order:
their error is a few units in the last place.
"""

from types import SimpleNamespace

import pytest
import torch

from otaro.errors import KernelError
from otaro.file.planes import pack_codes
from otaro.kernels import cuda, cuda_steps, hopper_halves, reference
from otaro.kernels.cuda_steps import CudaSteps
from otaro.kernels.kv_cache import KvCache
from otaro.kernels.packed import Packed, Stack
from otaro.kernels.steps import RING, Activations, Delta, ReferenceSteps, Rope, Routing, State
from otaro.sefp.codec import encode
from tests.kernels import emulated

NO_GPU = "" if torch.cuda.is_available() else "this machine has no GPU that torch can use"
NOT_EMULATED = emulated.MISSING or ("" if NO_GPU else "the kernels run on this machine's GPU")
DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(bool(NOT_EMULATED), reason=NOT_EMULATED or "there"), id="emulated"
    ),
    pytest.param("cuda", marks=pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU or "there"), id="cuda"),
]
UNIT_ROUNDING = 2.0**-24


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    if request.param == "cpu":
        monkeypatch.setattr(cuda_steps.nvrtc, "kernel", emulated.kernel)
    return request.param


@pytest.fixture
def both(device):
    return CudaSteps(device), ReferenceSteps(device)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def random(*shape, seed=0, device="cpu"):
    """Numbers of many sizes."""
    made = torch.randn(shape, generator=generator(seed)) * 2.0 ** torch.randint(
        -6, 4, (*shape[:-1], 1), generator=generator(seed)
    )
    return made.to(device)


def packed_rows(rows, length, bits, truncate, group_size=64, device="cpu"):
    encoded = encode(random(rows, length), group_size, "truncate" if truncate else "midpoint")
    base, planes = pack_codes(encoded.finest_codes)
    few = [plane.to(device) for plane in planes[: bits - 3]]
    scales, scale_exponent = encoded.scale_bytes.to(device), encoded.scale_exponent
    return Packed(base.to(device), scales, few, length, group_size, truncate, scale_exponent)


def values(activations):
    """Activations as floats, from either kind of steps."""
    if isinstance(activations.data, torch.Tensor):
        return activations.data.float()
    digits, terms = activations.data
    codes = digits[:, :, 0].float() * 256 + digits[:, :, 1]
    return (codes * terms[..., 1].contiguous().view(torch.float32).unsqueeze(-1)).flatten(1)[
        :, : activations.length
    ]


def same_digits(activations, x):
    """Whether activations are exactly what the contract makes of floats."""
    codes, scales = reference.quantize(x, activations.group_size)
    digits, terms = activations.data
    ours = (digits[:, :, 0].int() * 256 + digits[:, :, 1]).flatten(1)
    assert torch.equal(ours[:, : x.shape[1]], codes.int())
    assert not ours[:, x.shape[1] :].any()
    assert torch.equal(terms[..., 0], ours.view(len(x), terms.shape[1], -1).sum(-1).int())
    assert torch.equal(terms[..., 1].contiguous().view(torch.float32), scales)
    return True


# Not all combinations, here and below: each is a kernel of its own, and has to be compiled.
@pytest.mark.parametrize(
    ("bits", "truncate"), [(3, False), (4, True), (7, False), (8, True), (8, False), (4, False)]
)
def test_small_embed(both, device, bits, truncate):
    ours, law = both
    for length, group_size, scale_exponent in ((96, 64, -13), (200, 32, 0), (130, 64, 7)):
        weight = packed_rows(37, length, bits, truncate, group_size, device)
        some = torch.randint(0, 256, weight.scales.shape, generator=generator(), dtype=torch.uint8)
        weight = weight._replace(scales=some.to(device), scale_exponent=scale_exponent)
        ids = torch.tensor([0, 36, 5, 5, 17], dtype=torch.int32, device=device)
        a, b = (torch.zeros(5, length, device=device) for _ in both)
        ours.embed(ids, weight, 1.0, a)
        law.embed(ids, weight, 1.0, b)
        assert torch.equal(a, b)


def test_embed_without_planes(both, device):
    weight = random(20, 48, device=device).half()
    x = torch.zeros(2, 48, device=device)
    for scale in (1.0, 6.9):
        both[0].embed(torch.tensor([3, 19], dtype=torch.int32, device=device), weight, scale, x)
        assert torch.equal(x, weight[[3, 19]].float() * scale)


def test_small_embed_times_a_scale(both, device):
    weight = packed_rows(9, 96, 5, False, device=device)
    ids = torch.tensor([0, 8, 3], dtype=torch.int32, device=device)
    results = [torch.zeros(3, 96, device=device) for _ in both]
    for steps, x in zip(both, results, strict=True):
        steps.embed(ids, weight, 96**0.5, x)
    assert torch.equal(*results)


@pytest.mark.parametrize(("length", "group_size"), [(96, 64), (80, 32), (576, 64), (4096, 64), (5120, 64)])
@pytest.mark.parametrize("with_delta", ["none", "float32", "float16"])
def test_small_rms_norm(both, device, length, group_size, with_delta):
    tokens = 3
    delta = None
    if with_delta != "none":
        delta = Delta(random(tokens, length, seed=1, device=device).to(getattr(torch, with_delta)))
    weight = 1 + 0.2 * random(1, length, seed=2, device=device)[0]
    results = []
    for steps in both:
        x, out = random(tokens, length, device=device), steps.activations(tokens, length, group_size)
        steps.rms_norm(x, delta, weight, 1e-5, out)
        results.append((x, out))
    (our_x, ours), (x, law) = results
    assert torch.equal(our_x, x)
    # A few roundings of the sum, and half a step of the integers, which are 15 bits below the largest of
    # their unit.
    most = law.data.abs().amax(-1, keepdim=True)
    assert ((values(ours) - law.data).abs() <= 2.0**-15 * most + 64 * UNIT_ROUNDING * law.data.abs()).all()
    assert same_digits(ours, values(ours))


@pytest.mark.parametrize("scale", [1.0, 0.22])
@pytest.mark.parametrize(
    ("length", "with_norm", "delta_norm", "with_floats"),
    [(96, True, True, False), (80, False, True, False), (5120, True, True, True), (96, False, False, True)],
)
def test_small_rms_norm_of_what_few_models_have(
    both, device, length, with_norm, delta_norm, with_floats, scale
):
    """Norms of what is added, a scale of it, no norm before a product, floats for a router."""
    weight, of_delta = (1 + 0.2 * random(1, length, seed=seed, device=device)[0] for seed in (2, 3))
    delta = Delta(random(3, length, seed=1, device=device), of_delta if delta_norm else None, scale)
    results = []
    for steps in both:
        x, out = random(3, length, device=device), steps.activations(3, length, 64)
        floats = torch.zeros(3, length, device=device) if with_floats else None
        steps.rms_norm(x, delta, weight if with_norm else None, 1e-5, out, floats)
        results.append((x, out, floats))
    (our_x, ours, our_floats), (x, law, floats) = results
    added = (x - random(3, length, device=device)).abs()
    # A few roundings of the sum of squares; and each of the two sums is rounded for itself.
    rounding = (64 * added + our_x.abs() + x.abs()) * UNIT_ROUNDING
    assert ((our_x - x).abs() <= rounding if delta_norm else our_x == x).all()
    most = law.data.abs().amax(-1, keepdim=True)
    assert ((values(ours) - law.data).abs() <= (2.0**-15 + 128 * UNIT_ROUNDING) * most).all()
    if floats is not None:
        assert ((our_floats - floats).abs() <= 128 * UNIT_ROUNDING * most).all()
        assert same_digits(ours, our_floats)


def test_rms_norm_to_halves(both, device):
    x, weight = random(2, 96, device=device), random(1, 96, seed=2, device=device)[0]
    outs = [steps.activations(2, 96, None) for steps in both]
    for steps, out in zip(both, outs, strict=True):
        steps.rms_norm(x.clone(), None, weight, 1e-5, out)
    assert torch.allclose(outs[0].data.float(), outs[1].data.float(), rtol=2.0**-10, atol=0)


def test_small_steps_of_a_prompt_in_bfloat16(both, device):
    """What a bfloat16 model's prompts go through: one rounding of what the steps in torch give."""
    kind, x = torch.bfloat16, random(3, 96, device=device)
    delta, weight = (
        Delta(random(3, 96, seed=1, device=device).to(kind)),
        random(1, 96, seed=2, device=device)[0],
    )
    outs = [Activations(96, None, torch.zeros(3, 96, dtype=kind, device=device)) for _ in range(4)]
    sums = [x.clone(), x.clone()]
    for steps, one, out in zip(both, sums, outs[:2], strict=True):
        steps.rms_norm(one, delta, weight, 1e-5, out)
    assert torch.equal(*sums)
    gated = random(3, 192, seed=3, device=device).to(kind)
    for steps, out in zip(both, outs[2:], strict=True):
        steps.quantize(gated[:, :96], out, up=gated[:, 96:])
    for ours, law in (outs[:2], outs[2:]):
        assert torch.allclose(ours.data.float(), law.data.float(), rtol=2.0**-7, atol=0)


def test_small_steps_arrange_halves_as_hopper_wants_them(both, device):
    x, weight = random(3, 256, device=device), random(1, 256, seed=2, device=device)[0]
    plain = Activations(256, None, torch.zeros(3, 256).half().to(device))
    arranged = Activations(256, None, torch.zeros(4, 256).half().to(device), 2)  # two passes
    for run in (
        lambda out: both[0].rms_norm(x.clone(), None, weight, 1e-5, out),
        lambda out: both[0].quantize(x, out, up=x.flip(0)),
    ):
        run(plain), run(arranged)
        assert torch.equal(arranged.data, hopper_halves.arranged(plain.data, 2))


@pytest.mark.parametrize("group_size", [32, 64])
def test_small_quantize(both, device, group_size):
    x = random(5, 176, device=device)
    x[1, 3], x[2, 170], x[3] = torch.inf, torch.nan, 0.0
    out = both[0].activations(5, 176, group_size)
    both[0].quantize(x, out)
    codes, scales = reference.quantize(x, group_size)
    ours = (out.data.digits[:, :, 0].int() * 256 + out.data.digits[:, :, 1]).flatten(1)[:, :176]
    assert torch.equal(ours, codes.int())
    assert torch.equal(
        out.data.terms[..., 1].contiguous().view(torch.float32).nan_to_num(-1), scales.nan_to_num(-1)
    )


def rope(head, device, positions=200, scale=0.3, count=None):
    if count == 0:
        return Rope(None, None, scale, 1e-6)
    angles = torch.arange(positions)[:, None] / 50.0 ** (torch.arange(count or head // 2) / (head // 2))
    return Rope(angles.cos().to(device), angles.sin().to(device), scale, 1e-6)


def state_of(device, positions, sequences):
    state = State(device)
    state.positions[: len(positions)] = torch.tensor(positions)
    state.sequences[: len(sequences)] = torch.tensor(sequences)
    return state


@pytest.mark.parametrize(
    ("head", "bits", "dtype"),
    [
        *((head, 0, torch.float32) for head in (20, 64, 128)),
        *((head, 4, torch.float16) for head in (24, 64, 128)),
        (80, 3, torch.float32),
        (20, 8, torch.float16),
        (80, 8, torch.float32),
        (64, 0, torch.float16),
        (64, 0, torch.bfloat16),
    ],
    ids=str,
)
def test_small_rope_and_cache(both, device, head, bits, dtype):
    heads, kv_heads, tokens = 6, 2, 3
    vectors = [
        random(tokens, count * head, seed=seed, device=device).to(dtype)
        for seed, count in enumerate((heads, kv_heads, kv_heads))
    ]
    # The largest that fits, and a tiny negative number whose floor is still below zero.
    vectors[2][0, 0], vectors[2][0, 1] = 30000.0, -1e-7
    state = state_of(device, [0, 70, 69], [0, 1, 2])
    for norms in ([None, None], [1 + random(1, head, seed=seed, device=device)[0] for seed in (7, 8)]):
        offsets = None if norms[0] is not None else random(2, kv_heads * head, seed=9, device=device)
        results = []
        for steps in both:
            cache = KvCache(2, 3, kv_heads, 128, head, bits, device, offsets)
            queries = torch.zeros(tokens, heads * head, device=device)
            steps.rope_and_cache(vectors, norms, rope(head, device), state, queries, cache, 1)
            results.append((queries, cache))
        (queries, ours), (expected, law) = results
        exact = norms[0] is None  # a norm is a sum, in another order
        most = expected.abs().amax()
        assert (queries - expected).abs().max() <= (0 if exact else 16 * UNIT_ROUNDING) * most
        for theirs, tensor in zip(law.tensors, ours.tensors, strict=True):
            assert torch.equal(tensor[1], theirs[1])  # values
            assert not exact or torch.equal(tensor, theirs)
        for sequence, position in enumerate((0, 70, 69)):
            some = slice(position, position + 1)
            key, other = (one.read(0, 1, sequence, some) for one in (ours, law))
            assert (
                (key - other).abs().max() <= 2.0**-2 * other.abs().max()
                if bits == 3
                else 2.0**-3 * other.abs().max()
            )
        assert not int(ours.refused)


@pytest.mark.parametrize(
    ("head", "bits", "count", "norm"),
    [(24, 0, 6, ""), (128, 4, 48, "head"), (64, 0, 0, ""), (80, 4, 40, "whole"), (20, 0, 0, "whole")],
)
def test_small_rope_and_cache_of_what_few_models_have(both, device, head, bits, count, norm):
    """A part of a head is turned, or none; norms are of all heads at once."""
    heads, kv_heads, tokens = 6, 2, 3
    vectors = [
        random(tokens, n * head, seed=seed, device=device)
        for seed, n in enumerate((heads, kv_heads, kv_heads))
    ]
    sizes = [n * head if norm == "whole" else head for n in (heads, kv_heads)]
    norms = [1 + random(1, size, seed=7, device=device)[0] if norm else None for size in sizes]
    state, results = state_of(device, [0, 70, 69], [0, 1, 2]), []
    for steps in both:
        cache = KvCache(2, 3, kv_heads, 128, head, bits, device)
        queries = torch.zeros(tokens, heads * head, device=device)
        steps.rope_and_cache(vectors, norms, rope(head, device, count=count), state, queries, cache, 1)
        results.append((queries, cache))
    (queries, ours), (expected, law) = results
    assert (queries - expected).abs().max() <= (16 * UNIT_ROUNDING if norm else 0) * expected.abs().amax()
    for theirs, tensor in zip(law.tensors, ours.tensors, strict=True):
        assert torch.equal(tensor if not norm else tensor[1], theirs if not norm else theirs[1])
    for sequence, position in enumerate((0, 70, 69)):
        key, other = (one.read(0, 1, sequence, slice(position, position + 1)) for one in (ours, law))
        assert (key - other).abs().max() <= (2.0**-3 if bits else 2.0**-10) * other.abs().max()
    # The law itself: what is not turned is where it was, the norm of all heads is one number.
    if not norm:
        whole = vectors[0].unflatten(1, (heads, head))[..., 2 * count :] * 0.3
        assert torch.equal(expected.unflatten(1, (heads, head))[..., 2 * count :], whole)
    elif norm == "whole" and not count:
        one = vectors[0] * (1 / (vectors[0].square().mean(-1, keepdim=True) + 1e-6).sqrt())
        assert torch.allclose(expected, norms[0] * one * 0.3, rtol=2.0**-20, atol=0)


@pytest.mark.parametrize("bits", [0, 4])
def test_small_rope_and_cache_refuses_what_the_cache_cannot_hold(both, device, bits):
    largest = 65519.9 if bits == 0 else 65535.9
    for kind, at, value, refused in (
        (2, 5, largest, False),
        (2, 40, -largest, False),
        (2, 5, -65536.0, True),
        (2, 63, torch.nan, True),
        (1, 33, torch.inf, True),
        (2, 31, 65520.0, bits == 0),
    ):
        vectors = [random(1, 64, device=device) for _ in range(3)]
        vectors[kind][0, at] = value
        for steps in both:
            cache = KvCache(1, 1, 1, 64, 64, bits, device)
            steps.rope_and_cache(
                vectors,
                [None, None],
                rope(64, device),
                state_of(device, [3], [0]),
                vectors[0].clone(),
                cache,
                0,
            )
            assert bool(cache.refused) is refused, (kind, at, value, steps)


ATTENDED = [  # head, heads, kv heads, mantissa bits (0: float16), window
    (128, 4, 1, 0, 0), (128, 4, 1, 4, 0), (128, 4, 1, 8, 70), (64, 6, 2, 3, 0), (64, 6, 2, 7, 70),
    (24, 4, 2, 0, 70), (24, 4, 2, 5, 0), (20, 4, 4, 8, 0), (80, 7, 1, 6, 0), (80, 7, 1, 0, 0),
    (64, 24, 2, 4, 0), (256, 2, 1, 0, 0),
]  # fmt: skip


@pytest.mark.parametrize(("head", "heads", "kv_heads", "bits", "window"), ATTENDED)
def test_small_attend(both, device, head, heads, kv_heads, bits, window):
    positions, sequences = [0, 63, 64, 150, 300], [0, 1, 2, 1, 2]
    cache = KvCache(1, 3, kv_heads, 320, head, bits, device)
    for kind in (0, 1):
        for sequence in range(3):
            cache.write(
                kind, 0, sequence, 0, random(301, kv_heads, head, seed=kind + 2 * sequence, device=device)
            )
    queries = random(5, heads * head, seed=9, device=device) / head**0.5
    state = state_of(device, positions, sequences)
    for group_size in (64, None) if bits % 2 else (32, None):
        outs = [steps.activations(5, heads * head, group_size) for steps in both]
        for _ in range(2 if head == 24 else 1):  # counters are left as they were found
            for steps, out in zip(both, outs, strict=True):
                steps.attend(queries, state, cache, 0, window, 0.0, out)
        ours, law = values(outs[0]), outs[1].data.float()
        most = law.abs().amax(-1, keepdim=True)
        rounding = 2.0**-10 if group_size is None else 2.0**-15
        # Scores are sums of products that are each rounded; an error there moves weights between values that
        # differ by `most`.
        assert ((ours - law).abs() <= (rounding + 2.0**-17) * most).all(), ((ours - law).abs() / most).max()


@pytest.mark.parametrize(("head", "bits", "window"), [(128, 0, 0), (24, 5, 70)])
def test_small_attend_with_capped_scores(both, device, head, bits, window):
    cache = KvCache(1, 2, 2, 320, head, bits, device)
    for kind in (0, 1):
        for sequence in range(2):
            cache.write(kind, 0, sequence, 0, random(301, 2, head, seed=kind + 2 * sequence, device=device))
    queries = random(3, 4 * head, seed=9, device=device) / head**0.5
    state, cap = state_of(device, [0, 150, 300], [0, 1, 0]), 2.0
    outs = [steps.activations(3, 4 * head, 64) for steps in both]
    for steps, out in zip(both, outs, strict=True):
        steps.attend(queries, state, cache, 0, window, cap, out)
    ours, law = values(outs[0]), outs[1].data
    assert ((ours - law).abs() <= (2.0**-15 + 2.0**-17) * law.abs().amax(-1, keepdim=True)).all()  # as above
    without = both[1].activations(3, 4 * head, 64)
    both[1].attend(queries, state, cache, 0, window, 0.0, without)
    assert (without.data - law).abs().max() > 2.0**-5 * law.abs().max()  # it does something


def test_attend_gives_a_token_the_same_bits_alone(both, device):
    steps = both[0]
    cache = KvCache(1, 2, 2, 320, 64, 0, device)
    for kind in (0, 1):
        for sequence in range(2):
            cache.write(kind, 0, sequence, 0, random(300, 2, 64, seed=kind + 2 * sequence, device=device))
    queries = random(3, 8 * 64, seed=9, device=device)
    together = steps.activations(3, 8 * 64, 64)
    steps.attend(queries, state_of(device, [250, 7, 130], [0, 1, 1]), cache, 0, 0, 0.0, together)
    for token, (position, sequence) in enumerate(((250, 0), (7, 1), (130, 1))):
        alone = steps.activations(1, 8 * 64, 64)
        steps.attend(
            queries[token : token + 1], state_of(device, [position], [sequence]), cache, 0, 0, 0.0, alone
        )
        assert torch.equal(values(alone)[0], values(together)[token])


def test_small_argmax(both, device):
    logits = torch.randn(4, 5000, generator=generator()).to(device)
    logits[0, 4321] = logits[0, 77] = 50.0  # the first of equals
    logits[1, 4999], logits[2, 300] = 60.0, torch.nan
    logits[3] = -logits[3].abs() - 1
    logits[3, 12], logits[3, 13] = -0.0, 0.0
    states = []
    for steps in both:
        state = state_of(device, [5, 6, 7, 8], [0, 1, 2, 3])
        state.steps += RING - 2
        for _ in range(4):
            steps.argmax(logits, state)
        if device == "cuda":
            torch.cuda.synchronize()
        states.append(state)
    ours, law = states
    assert ours.ids[:4].tolist() == [77, 4999, 300, 12]
    assert torch.equal(ours.all, law.all)
    assert torch.equal(ours.ring, law.ring)
    assert ours.positions[:4].tolist() == [9, 10, 11, 12]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("group_size", [32, 64, None])
def test_a_gated_product_is_quantized(both, device, dtype, group_size):
    side_by_side = random(3, 2 * 176, device=device).to(dtype)
    outs = [steps.activations(3, 176, group_size) for steps in both]
    for steps, out in zip(both, outs, strict=True):
        steps.quantize(side_by_side[:, :176], out, up=side_by_side[:, 176:])
    ours, law = values(outs[0]), outs[1].data.float()
    rounding = 2.0**-10 if group_size is None else 2.0**-15
    assert ((ours - law).abs() <= rounding * law.abs().amax(-1, keepdim=True) + 2.0**-20 * law.abs()).all()


def test_small_gelu(both, device):
    side_by_side = random(3, 2 * 176, device=device)
    outs = [steps.activations(3, 176, 64) for steps in both]
    for steps, out in zip(both, outs, strict=True):
        steps.quantize(side_by_side[:, :176], out, up=side_by_side[:, 176:], activation="gelu_tanh")
    ours, law = values(outs[0]), outs[1].data
    gate, up = side_by_side.double().chunk(2, 1)
    truth = torch.nn.functional.gelu(gate, approximate="tanh") * up
    most = truth.abs().amax(-1, keepdim=True)
    for found, rounding in ((law, 2.0**-20), (ours, 2.0**-15)):
        assert ((found - truth).abs() <= rounding * most).all()


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("experts", "count"), [(4, 2), (6, 6), (128, 8), (40, 1)])
def test_small_route(both, device, experts, count, normalize):
    x, router = random(5, 100, device=device), random(experts, 100, seed=4, device=device) / 8
    router[1] = router[0]  # the first of equals
    routings = []
    for steps in both:
        routing = Routing(
            torch.full((5, count), -1, dtype=torch.int32, device=device), torch.zeros(5, count, device=device)
        )
        for _ in range(2):  # counters are left as they were found
            steps.route(x, router, normalize, routing)
        routings.append(routing)
    ours, law = routings
    assert torch.equal(ours.experts, law.experts)
    assert (law.experts.diff() > 0).all()
    # A score is a sum of 100 products, rounded 100 times, and a weight depends on the difference of two
    # scores.
    rounding = 2 * 100 * UNIT_ROUNDING * float((x.abs() @ router.abs().T).max())
    scores = (x.double() @ router.double().T).softmax(-1)
    truth = scores.gather(1, law.experts.long())
    assert torch.allclose(truth.sum(-1), scores.topk(count).values.sum(-1), rtol=rounding, atol=0)
    truth = truth / truth.sum(-1, keepdim=True) if normalize else truth
    for routing in routings:
        assert torch.allclose(routing.weights.double(), truth, rtol=2 * rounding, atol=0)
    for token in range(5):
        alone = Routing(*(torch.zeros_like(one[:1]) for one in ours))
        both[0].route(x[token : token + 1], router, normalize, alone)
        assert torch.equal(alone.experts, ours.experts[token : token + 1])
        assert torch.equal(alone.weights, ours.weights[token : token + 1])


def test_more_experts_than_a_launch_chooses_among_are_refused(both, device):
    routing = Routing(torch.zeros(1, 2, dtype=torch.int32, device=device), torch.zeros(1, 2, device=device))
    for experts in (1, 1025):
        with pytest.raises(KernelError, match=f"2 of {experts} experts.*1024"):
            both[0].route(random(1, 4, device=device), random(experts, 4, device=device), False, routing)


def test_small_add_experts_adds_experts_in_their_order(both, device):
    parts, weights = random(3 * 4, 100, device=device), random(3, 4, seed=1, device=device)
    routing = Routing(torch.zeros(3, 4, dtype=torch.int32, device=device), weights)
    results = [torch.zeros(3, 100, device=device) for _ in both]
    for steps, out in zip(both, results, strict=True):
        steps.add_experts(parts, routing, out)
    assert torch.equal(*results)
    total = torch.zeros(100, device=device)
    for n in range(4):
        total = total + parts[4 + n] * weights[1, n]
    assert torch.equal(results[1][1], total)


@pytest.mark.parametrize("cap", [0.0, 30.0])
def test_small_cap_logits(both, device, cap):
    results = [100 * random(2, 333, device=device) for _ in both]
    truth = results[0].double() * 0.7
    for steps, logits in zip(both, results, strict=True):
        steps.cap_logits(logits, 0.7, cap)
    truth = cap * (truth / cap).tanh() if cap else truth
    for logits in results:
        assert ((logits - truth).abs() <= 2.0**-21 * truth.abs()).all()


@pytest.mark.parametrize(("bits", "length", "rows"), [(3, 96, 20), (5, 1024, 33), (8, 200, 16)])
def test_small_products_with_chosen_experts(both, device, monkeypatch, bits, length, rows):
    """Experts' rows are found on the device; a token and its expert have the bits of their own product."""
    if device == "cpu":
        monkeypatch.setattr(cuda.nvrtc, "most_shared", lambda device: 64 << 10)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=2)
        )
        cuda._linear_kernel.cache_clear()
    experts = torch.tensor([[0, 2], [1, 2], [3, 4]], dtype=torch.int32, device=device)
    routing = Routing(experts, torch.ones(3, 2, device=device))
    whole = packed_rows(5 * 2 * rows, length, bits, False, device=device)
    stacks = [Stack(whole, 0, rows, 2 * rows), Stack(whole, rows, rows, 2 * rows)]
    for of_x in (3, 6):  # a row for each token, or for each of its experts
        x, results = random(of_x, length, seed=3, device=device), []
        for steps in both:
            activations = steps.activations(of_x, length, 64)
            steps.quantize(x, activations)
            results.append(torch.zeros(6, 2 * rows, device=device))
            steps.multiply_experts(activations, stacks, results[-1].chunk(2, 1), routing)
        assert torch.equal(*results)
        row = 1 if of_x == 6 else 0  # the second expert of the first token
        expected = [reference.linear(x[row : row + 1], stack.of(2)) for stack in stacks]
        assert torch.equal(results[1][1:2], torch.cat(expected, 1))
    if device == "cpu":
        cuda._linear_kernel.cache_clear()


@pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU or "there")
@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_multiply_takes_matrices_of_several_precisions(tokens):
    weights = [
        packed_rows(rows, 200, bits, False, device="cuda") for rows, bits in ((33, 4), (16, 4), (7, 6))
    ]
    biases = [None, random(1, 16, device="cuda")[0], None]
    x = random(tokens, 200, device="cuda")
    results = []
    for steps in (CudaSteps("cuda"), ReferenceSteps("cuda")):
        acts = steps.activations(tokens, 200, 64)
        steps.quantize(x, acts)
        results.append([torch.zeros(tokens, len(weight.base), device="cuda") for weight in weights])
        steps.multiply(acts, weights, results[-1], biases)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU or "there")
def test_plain_weights_go_through_the_library():
    weight, x = random(48, 64, device="cuda").half() / 8, random(2, 64, seed=3, device="cuda").half()
    results = []
    for steps in (CudaSteps("cuda"), ReferenceSteps("cuda")):
        acts = steps.activations(2, 64, None)
        acts.data.copy_(x)
        for bias in (None, weight[:, 0].contiguous()):
            results.append(torch.zeros(2, 48, dtype=torch.float16, device="cuda"))
            steps.multiply(acts, [weight], results[-1:], [bias])
    for a, b in zip(results[:2], results[2:], strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=2.0**-8, atol=2.0**-8)


def test_digits_are_the_backend_s(device):
    made = cuda.new_digits(2, 100, 64, torch.device(device))
    assert (made.digits.shape, made.terms.shape) == ((2, 2, 2, 64), (2, 2, 2))
