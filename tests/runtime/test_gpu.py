"""The GPU's decoder. Its steps in torch run on any machine, so that everything but kernels and graphs is
tested here.

Truth is the model in float64 on decoded weights; the error may be at most twice that of packed modules under
transformers.
"""

import gc
import time
from dataclasses import replace
from functools import partial
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
import transformers
from packaging.version import Version

import otaro
from otaro.errors import OtaroError
from otaro.kernels import cuda, cuda_steps, hopper, reference
from otaro.kernels.steps import MAX_TOKENS
from otaro.runtime.architectures import describe
from otaro.runtime.description import Matrix
from otaro.runtime.gpu import GpuDecoder
from otaro.runtime.gpu_prompt import Ahead, CudaPromptSteps, PromptSteps, Straight
from otaro.sefp.precision import Precision
from tests.kernels import emulated
from tests.runtime.test_decode import EXACT, IDS, LONGROPE, MORE, SERVED, VARIANTS, RoundingCache, error, slow

KV = (None, Precision("E5M7"))
ON_GPU = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="this machine has no GPU that torch can use"
)
pytestmark = pytest.mark.usefixtures("swift_products")


@pytest.fixture(params=SERVED)
def served(request):
    return request.param


@pytest.fixture
def llama(make_nested):
    return otaro.load(make_nested("llama"), "E5M5")


def token_by_token(decoder, ids, kv=None):
    cache = decoder.new_cache(kv)
    return torch.stack([decoder.forward([token], cache) for token in ids])


@pytest.mark.parametrize("kv", KV, ids=lambda kv: str(kv or "float16"))
def test_logits_are_those_of_the_slow_path(make_nested, decoded_model, served, reconstruction, kv):
    model = otaro.load(make_nested(served, reconstruction))
    decoder = GpuDecoder.of(model)
    for precision in ("E5M8", "E5M4"):
        otaro.set_precision(model, precision)
        truth = slow(decoded_model(served, precision, reconstruction, torch.float64), IDS[:24], kv and EXACT)
        theirs = error(slow(model, IDS[:24], kv), truth)
        for ours in (
            token_by_token(decoder, IDS[:24], kv),
            decoder.forward(IDS[:24], decoder.new_cache(kv), all_logits=True),
        ):
            assert error(ours, truth) <= 2 * theirs


@pytest.mark.parametrize(
    ("name", "kv"), list(zip(MORE, cycle(KV), strict=False)), ids=lambda one: str(one or "float16")
)
def test_logits_of_more_architectures_are_those_of_the_slow_path(
    make_nested, decoded_model, name, kv, monkeypatch
):
    if name == "gemma2" and Version(transformers.__version__) < Version("5.21"):
        pytest.skip(
            f"transformers {transformers.__version__} leaves out the soft-capping of Gemma 2's attention"
        )
    monkeypatch.setattr("otaro.runtime.gpu.CHUNK", 19)  # several chunks, and a few tokens left over
    model = otaro.load(make_nested(name), "E5M8")
    assert GpuDecoder.why_not(model) is None
    decoder, ids = GpuDecoder.of(model), IDS[:40]
    for precision in ("E5M8", "E5M4"):
        otaro.set_precision(model, precision)
        truth = slow(decoded_model(name, precision, dtype=torch.float64), ids, kv and EXACT)
        theirs = error(slow(model, ids, kv), truth)
        for ours in (
            token_by_token(decoder, ids, kv),
            decoder.forward(ids, decoder.new_cache(kv), all_logits=True),
        ):
            assert error(ours, truth) <= 2 * theirs


@pytest.mark.parametrize(
    "rope",
    [{"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, LONGROPE],
    ids=lambda rope: rope["rope_type"],
)
def test_growing_ropes_serve_as_far_as_they_do_not_grow(make_variant, rope):
    nested, truth_at = make_variant("llama", {"rope_parameters": rope, "max_position_embeddings": 40})
    model = otaro.load(nested, "E5M6")
    decoder, truth = GpuDecoder.of(model), slow(truth_at("E5M6"), IDS[:40])
    theirs = error(slow(model, IDS[:40]), truth)
    assert error(token_by_token(decoder, IDS[:40]), truth) <= 2 * theirs
    cache = decoder.new_cache(capacity=300)
    assert error(decoder.forward(IDS[:40], cache, all_logits=True), truth) <= 2 * theirs
    refusal = f"positions of type {rope['rope_type']} up to 40 tokens.*has 41.*DynamicCache"
    for read in (decoder.forward, decoder.step, decoder.begin):
        with pytest.raises(OtaroError, match=refusal):
            read([1], cache)
    cache.crop(39)
    decoder.begin([1], cache)
    decoder.advance()
    with pytest.raises(OtaroError, match=refusal):
        decoder.advance()
    assert cache.length == 40


@pytest.mark.parametrize("kv", KV, ids=lambda kv: str(kv or "float16"))
def test_products_of_the_reference_give_the_bits_of_those_the_other_tests_take(
    make_nested, served, kv, monkeypatch
):
    decoder = GpuDecoder.of(otaro.load(make_nested(served), {"*": "E5M5", "*.k_proj": "E5M3"}))

    def some():
        cache = decoder.new_cache(kv)
        return torch.stack(
            [decoder.forward(ids, cache) for ids in (IDS[:13], IDS[13:14], IDS[14:16], IDS[16:40])]
        )

    taken = some()
    monkeypatch.undo()
    assert torch.equal(some(), taken)


@pytest.mark.parametrize(
    ("variant", "kv"), list(zip(VARIANTS, cycle(KV), strict=False)), ids=lambda one: str(one or "float16")
)
def test_variants_of_the_architectures(make_variant, variant, kv, monkeypatch):
    nested, truth_at = make_variant(*VARIANTS[variant])
    model = otaro.load(nested, "E5M6")
    decoder, ids = GpuDecoder.of(model), IDS[:100] if "segments" in variant else IDS[:40]
    truth = slow(truth_at("E5M6"), ids, kv and EXACT)
    theirs = error(slow(model, ids, kv), truth)
    assert error(token_by_token(decoder, ids, kv), truth) <= 2 * theirs
    monkeypatch.setattr("otaro.runtime.gpu.CHUNK", 19)  # several chunks, and a few tokens left over
    assert error(decoder.forward(ids, decoder.new_cache(kv), all_logits=True), truth) <= 2 * theirs


def test_only_the_last_logits_are_computed_unless_all_are_wanted(llama):
    decoder = GpuDecoder.of(llama)
    for count in (5, 40):
        every = decoder.forward(IDS[:count], decoder.new_cache(), all_logits=True)
        assert torch.equal(decoder.forward(IDS[:count], decoder.new_cache()), every[-1])


@pytest.mark.parametrize("kv", KV, ids=lambda kv: str(kv or "float16"))
def test_a_cache_grows_and_can_be_cropped(llama, kv, monkeypatch):
    monkeypatch.setattr("otaro.runtime.caches.GROWTH", 16)
    decoder = GpuDecoder.of(llama)
    cache, large = decoder.new_cache(kv), decoder.new_cache(kv, capacity=200)
    rows = [[decoder.forward([token], one) for token in IDS[:50]] for one in (cache, large)]
    assert torch.equal(torch.stack(rows[0]), torch.stack(rows[1]))
    assert cache.length == 50 <= cache.capacity < large.capacity
    cache.crop(30)
    again = [decoder.forward([token], cache) for token in IDS[30:50]]
    assert torch.equal(torch.stack(again), torch.stack(rows[0][30:]))
    cache.crop(-4)
    assert cache.length == 46


def test_precision_may_change_between_any_two_tokens(make_nested):
    model = otaro.load(make_nested("qwen2"), "E5M3")
    changes = [
        "E5M3",
        "E5M8",
        {"*": "E5M4", "*.self_attn.*": "E5M7", "*.q_proj": "E5M3"},
        "E5M5",
        {"lm_head": "E5M8"},
    ]
    decoder = GpuDecoder.of(model)
    cache, theirs = decoder.new_cache(), RoundingCache(None, config=model.config)
    for token, precision in zip(IDS[:10], changes * 2, strict=True):
        otaro.set_precision(model, precision)
        ours = decoder.forward([token], cache)
        with torch.no_grad():
            expected = model(torch.tensor([[token]]), past_key_values=theirs).logits[0, -1]
        assert torch.allclose(ours, expected, rtol=1e-3, atol=1e-3)


def prompts(decoder, cache, lengths):
    """Different prompts in the sequences of a cache."""
    for sequence, length in enumerate(lengths):
        decoder.forward(IDS[sequence : sequence + length], cache, sequence=sequence)


@pytest.mark.parametrize(
    ("name", "kv"), [("llama", KV[0]), ("llama", KV[1]), ("qwen3_moe_mixed", KV[0]), ("gemma2", KV[1])]
)
def test_rows_of_a_batch_are_what_they_are_alone(make_nested, name, kv):
    model = otaro.load(make_nested(name), "E5M5")
    decoder = GpuDecoder.of(model)
    lengths, names = (3, 70, 20, 9), ("E5M4", "E5M8", "E5M3", "E5M4")
    bits = [decoder.description.all_at(Precision(name)) for name in names]
    batch = decoder.new_cache(kv, sequences=4)
    prompts(decoder, batch, lengths)
    together = [decoder.step(IDS[i : i + 4], batch, bits=bits) for i in range(3)]
    assert batch.lengths == [length + 3 for length in lengths]
    for row, length in enumerate(lengths):
        alone = decoder.new_cache(kv)
        decoder.forward(IDS[row : row + length], alone)
        for i in range(3):
            otaro.set_precision(model, names[row])
            assert torch.equal(decoder.forward([IDS[i + row]], alone), together[i][row])
        otaro.set_precision(model, "E5M5")


def test_some_sequences_of_a_cache_can_go_on(llama):
    decoder = GpuDecoder.of(llama)
    cache, other = decoder.new_cache(sequences=3), decoder.new_cache(sequences=3)
    for one in (cache, other):
        prompts(decoder, one, (4, 6, 8))
    whole = decoder.step([1, 2, 3], cache)
    assert torch.equal(decoder.step([3, 1], other, sequences=[2, 0]), whole[[2, 0]])
    assert other.lengths == [5, 6, 9]


def test_the_likeliest_tokens_are_chosen_ahead_of_the_host(llama):
    decoder = GpuDecoder.of(llama)
    names = ["E5M6", "E5M3"]
    bits = [decoder.description.all_at(Precision(name)) for name in names]
    cache, other = (decoder.new_cache(sequences=2) for _ in range(2))
    for one in (cache, other):
        prompts(decoder, one, (30, 5))
    expected, ids = [], [7, 8]
    for _ in range(6):
        ids = decoder.step(ids, other, bits=bits).argmax(-1).tolist()
        expected.append(ids)
    decoder.begin([7, 8], cache, bits=bits)
    numbers = [decoder.advance() for _ in range(6)]
    assert [decoder.chosen(number) for number in numbers] == expected
    assert cache.lengths == other.lengths
    decoder.step([1, 1], cache)
    with pytest.raises(OtaroError, match="nothing was begun"):
        decoder.advance()
    with pytest.raises(OtaroError, match="not, or no longer"):
        decoder.chosen(1000)


def test_weights_need_no_model(llama, decoded_model):
    """Plain float16 matrices, fused as the library likes them, are as good as transformers in float16."""
    packed = describe(llama)

    def plain(*matrices):
        return Matrix(torch.cat([reference.decode(matrix.at(8)) for matrix in matrices]).half())

    layers = [
        replace(
            one,
            query=plain(one.query, one.key, one.value), key=None, value=None, output=plain(one.output),
            gate=plain(one.gate, one.up), up=None, down=plain(one.down),
        )
        for one in packed.layers
    ]  # fmt: skip
    weights = replace(
        packed, embedding=plain(packed.embedding), layers=layers, lm_head=plain(packed.lm_head), modules=(),
        dtype=torch.float16,
    )  # fmt: skip
    decoder = GpuDecoder(weights)
    truth = slow(decoded_model("llama", "E5M8", dtype=torch.float64), IDS[:30])
    theirs = error(slow(decoded_model("llama", "E5M8", dtype=torch.float16), IDS[:30]), truth)
    for ours in (
        token_by_token(decoder, IDS[:30]),
        decoder.forward(IDS[:30], decoder.new_cache(), all_logits=True),
    ):
        assert error(ours, truth) <= 2 * theirs


def test_experts_that_are_not_packed_are_refused(make_nested):
    described = describe(otaro.load(make_nested("mixtral"), "E5M4"))
    layers = [replace(layer, gate=Matrix(torch.zeros(8, 96).half()), up=None) for layer in described.layers]
    with pytest.raises(OtaroError, match="experts that are packed; pack this model"):
        GpuDecoder(replace(described, layers=layers))


def test_what_cannot_be_is_refused_and_leaves_the_cache_alone(make_nested):
    decoder, other = (GpuDecoder.of(otaro.load(make_nested(name), "E5M4")) for name in ("llama", "mistral"))
    cache = decoder.new_cache()
    decoder.forward(IDS[:5], cache)
    for ids, message in (
        ([], "one token or more"),
        ([[1, 2]], "one token or more"),
        ([3, 120], "token 120 is not in the vocabulary of 120"),
        ([-1], "token -1"),
    ):
        with pytest.raises(OtaroError, match=message):
            decoder.forward(ids, cache)
        assert cache.length == 5
    with pytest.raises(OtaroError, match="another model"):
        other.forward([1], cache)
    with pytest.raises(OtaroError, match="one after the other"):
        decoder.step([1, 2], cache)
    with pytest.raises(OtaroError, match="one token of each sequence"):
        decoder.begin([1, 2], cache, [0, 0])
    short, right = b"\4", decoder.description.all_at(Precision("E5M4"))
    for wrong, message in (
        ({"sequences": [-1]}, "sequence -1 is none of the 1"),
        ({"sequences": [1]}, "sequence 1 is none of the 1"),
        ({"bits": [short]}, "precisions of 1 matrices were given for"),
        ({"bits": [right, right]}, "precisions of 2 tokens were given for 1"),
    ):
        for read in (decoder.step, decoder.begin):
            with pytest.raises(OtaroError, match=message):
                read([1], cache, **wrong)
    for wrong, message in (({"sequence": -1}, "sequence -1"), ({"bits": short}, "precisions of 1 matrices")):
        with pytest.raises(OtaroError, match=message):
            decoder.forward([1], cache, **wrong)
    assert cache.lengths == [5]
    with pytest.raises(OtaroError, match=f"1 to {MAX_TOKENS}"):
        decoder.new_cache(sequences=17)


@pytest.mark.parametrize("count", [2, 30])
@pytest.mark.parametrize("kv", [None, Precision("E5M8")], ids=["float16", "packed"])
def test_a_cache_refuses_what_it_cannot_hold(make_nested, kv, count):
    model = otaro.load(make_nested("qwen2"), "E5M8")
    model.model.layers[1].self_attn.v_proj.bias.data[3] = 1e6
    decoder = GpuDecoder.of(model)
    cache = decoder.new_cache(kv)
    message = f"a cache {f'at {kv}' if kv else 'in float16'} cannot hold it.*DynamicCache"
    with pytest.raises(OtaroError, match=message):
        decoder.forward(IDS[:count], cache)
    with pytest.raises(OtaroError, match=message):
        decoder.step(IDS[:1], cache)
    assert cache.length == 0
    cache.check()


def test_why_not_and_what_it_serves(make_nested, llama):
    assert "its architecture is gemma, and the decoder knows" in GpuDecoder.why_not(
        otaro.load(make_nested("gemma"))
    )
    assert GpuDecoder.why_not(otaro.load(make_nested("llama"), dtype=torch.bfloat16)) is None
    decoder = GpuDecoder.of(llama)
    assert decoder.serves(llama)
    with torch.no_grad():
        llama.model.norm.weight.mul_(2)
    assert not decoder.serves(llama)


def test_half_precision_models(make_nested, decoded_model):
    truth = slow(decoded_model("llama", "E5M6", "midpoint", torch.float64), IDS[:30])
    for dtype in (torch.float16, torch.bfloat16):
        model = otaro.load(make_nested("llama"), "E5M6", dtype=dtype)
        decoder, theirs = GpuDecoder.of(model), error(slow(model, IDS[:30]), truth)
        for found in (
            token_by_token(decoder, IDS[:30]),
            decoder.forward(IDS[:30], decoder.new_cache(), all_logits=True),
        ):
            assert error(found, truth) <= 2 * theirs


def test_the_room_of_a_cache_that_is_gone_serves_the_next(llama):
    decoder = GpuDecoder.of(llama)
    cache = decoder.new_cache(capacity=100)
    expected = token_by_token(decoder, IDS[:4])
    decoder.forward(IDS[:70], cache)
    number = cache.kv_cache.number
    del cache
    gc.collect()
    again = decoder.new_cache()
    assert (again.kv_cache.number, again.length) == (number, 0)
    assert torch.equal(torch.stack([decoder.forward([token], again) for token in IDS[:4]]), expected)


# Kernels and graphs

products_on_gpu = cuda.products
EMULATED = [*zip(("llama", "llama", "qwen3"), (*KV, KV[1]), strict=True)]
EMULATED += zip(("gemma2", "phi3", "olmo2", "granite", "qwen3_moe_mixed"), cycle(KV), strict=False)


def products_from_digits(digits, tokens, matrices, outs, biases=(), first=0, experts=None, scratch=None):
    """What `cuda.products` computes, in torch; for experts it is emulated."""
    if experts is not None:
        products_on_gpu(digits, tokens, matrices, outs, biases, first, experts)
        return
    codes = (
        digits.digits[first : first + tokens, :, 0].float() * 256
        + digits.digits[first : first + tokens, :, 1]
    )
    scales = digits.terms[first : first + tokens, :, 1].contiguous().view(torch.float32)
    for matrix, out, bias in zip(matrices, outs, biases, strict=True):
        product = reference.linear((codes * scales.unsqueeze(-1)).flatten(1)[:, : matrix.length], matrix)
        out[first : first + tokens] = product if bias is None else product + bias


@pytest.mark.skipif(bool(emulated.MISSING), reason=emulated.MISSING or "there")
@pytest.mark.parametrize(("name", "kv"), EMULATED, ids=lambda one: str(one or "float16"))
def test_kernels_decode_what_torch_decodes(make_nested, name, kv, monkeypatch):
    """All kernels but the products of most models, one after the other, emulated on the CPU."""
    monkeypatch.setattr(cuda_steps.nvrtc, "kernel", emulated.kernel)
    monkeypatch.setattr(cuda_steps.nvrtc, "most_shared", lambda device: 64 << 10)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=2)
    )
    monkeypatch.setattr(cuda, "_linear_kernel", cuda._linear_kernel.__wrapped__)
    monkeypatch.setattr(cuda_steps.cuda, "products", products_from_digits)
    model = otaro.load(make_nested(name), {"*": "E5M5", "*.o_proj" if name == "phi3" else "*.k_proj": "E5M4"})
    decoder, law = GpuDecoder.of(model, cuda_steps.CudaSteps("cpu")), GpuDecoder.of(model)
    # An activation or a key that rounds the other way moves by a step of 2^-15 or 2^-11; packed keys by 2^-7.
    rounding = 2.0**-9 if kv is None else 2.0**-5
    expected = token_by_token(law, IDS[:5], kv)
    assert (token_by_token(decoder, IDS[:5], kv) - expected).abs().max() <= rounding * expected.abs().max()
    bits = [decoder.description.all_at(Precision(one)) for one in ("E5M6", "E5M3", "E5M6")]
    rows = []
    for one in (decoder, law):
        cache = one.new_cache(kv, sequences=3)
        prompts(one, cache, (18, 2, 3))
        rows.append(one.step([4, 5, 6], cache, bits=bits))
        one.begin([4, 5, 6], cache, bits=bits)
        assert (
            one.chosen(one.advance()) == one.step([4, 5, 6], _cropped(cache), bits=bits).argmax(-1).tolist()
        )
    assert (rows[0] - rows[1]).abs().max() <= rounding * rows[1].abs().max()


class AtOnce:
    """A stream or an event where there is no GPU: everything is done when it is asked for."""

    cuda_stream = 0

    def __init__(self, *given):
        pass

    def record(self, stream=None):
        pass

    def wait_event(self, event):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on this machine's GPU")
@pytest.mark.skipif(bool(emulated.MISSING), reason=emulated.MISSING or "there")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", torch.float16), ("qwen2", torch.bfloat16), ("gemma2", torch.bfloat16)],
    ids=str,
)
def test_prompts_by_kernels_are_as_good_as_those_by_torch(
    make_nested, decoded_model, monkeypatch, name, dtype
):
    monkeypatch.setattr("otaro.runtime.gpu.CHUNK", 24)  # the second chunk has others before it
    model = otaro.load(make_nested(name), "E5M5", dtype=dtype)
    decoder, ids = GpuDecoder.of(model), IDS[:41]
    truth = slow(decoded_model(name, "E5M5", dtype=torch.float64), ids)
    theirs = error(decoder.forward(ids, decoder.new_cache(), all_logits=True), truth)
    monkeypatch.setattr(cuda_steps.nvrtc, "kernel", emulated.kernel)
    for one in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, one, AtOnce)
    parts, bits = decoder._parts, decoder.description.precisions()
    assert len(parts.at(bits)) == 3 * len(decoder.description.layers)
    monkeypatch.setattr(cuda_steps.nvrtc, "most_shared", lambda device: 64 << 10)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=2)
    )
    monkeypatch.setattr(cuda, "_halves_kernel", cuda._halves_kernel.__wrapped__)
    monkeypatch.setattr("otaro.runtime.gpu_prompt.STRAIGHT", 24)
    assert isinstance(parts.of(bits, 24), Straight if dtype == torch.float16 else Ahead)
    for way in (lambda: parts.ahead(bits), lambda: parts.of(bits, 24)):
        monkeypatch.setattr(
            "otaro.runtime.gpu.PromptSteps", lambda *given, way=way: CudaPromptSteps(*given, way())
        )
        assert error(decoder.forward(ids, decoder.new_cache(), all_logits=True), truth) <= 2 * theirs


WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "dtype": "float16"}
"""Rows that Hopper's kernel takes."""


@pytest.mark.skipif(bool(emulated.MISSING), reason=emulated.MISSING or "there")
def test_prompts_straight_on_hopper_are_as_good_as_those_by_torch(make_variant, monkeypatch):
    nested, truth_at = make_variant("llama", WIDE)
    decoder, ids = GpuDecoder.of(otaro.load(nested, "E5M5", dtype=torch.float16)), IDS[:41]
    truth = slow(truth_at("E5M5"), ids)
    theirs = error(decoder.forward(ids, decoder.new_cache(), all_logits=True), truth)
    monkeypatch.setattr(cuda_steps.nvrtc, "kernel", emulated.kernel)
    monkeypatch.setattr(hopper, "has_instructions", lambda device: True)
    monkeypatch.setattr(cuda_steps.nvrtc, "most_shared", lambda device: 222 << 10)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=2)
    )
    monkeypatch.setattr(torch.cuda, "current_stream", AtOnce)
    weights = decoder._parts.of(decoder.description.precisions(), 41)
    assert isinstance(weights, Straight)
    assert weights.arranged == 64
    monkeypatch.setattr("otaro.runtime.gpu.PromptSteps", lambda *given: CudaPromptSteps(*given, weights))
    assert error(decoder.forward(ids, decoder.new_cache(), all_logits=True), truth) <= 2 * theirs


@pytest.mark.parametrize(
    ("name", "mlp"),
    [
        ("llama", ["linear", "quantize", "linear"]),
        ("mixtral", ["route", "linear", "quantize", "linear", "add_experts"]),
    ],
    ids=["llama", "mixtral"],
)
def test_a_step_is_as_many_launches_as_before(make_variant, monkeypatch, name, mlp):
    """Nine to a layer, where it has no experts, and no constant that its kernels did not have."""
    launched, constants = [], {}

    def kernel(file, name, device, **given):
        constants.setdefault(name, set()).update(given)

        def launch(*sizes, **fields):
            launched.append(name)

        launch.bound = lambda *sizes, **fields: partial(launch, *sizes, **fields)
        return launch

    monkeypatch.setattr(cuda_steps.nvrtc, "kernel", kernel)
    monkeypatch.setattr(cuda_steps.cuda, "products", lambda *args, **kwargs: launched.append("linear"))
    model = otaro.load(make_variant(name, {"head_dim": 64})[0], "E5M5")
    decoder = GpuDecoder.of(model, cuda_steps.CudaSteps("cpu"))
    decoder.begin([1], decoder.new_cache())
    launched.clear()
    decoder.advance()
    layer = ["rms_norm", "linear", "rope_and_cache", "attend", "linear", "rms_norm", *mlp]
    assert launched == ["embed", *layer, *layer, "rms_norm", "linear", "argmax"]
    if name == "llama":
        assert constants == {
            "embed": {"BITS", "TRUNCATE", "GROUP_SIZE"},
            "rms_norm": {"UNIT", "HALF_IN", "HALF_OUT", "VECTORS"},
            "rope_and_cache": {"HEAD", "KV_BITS", "HALF_IN"},
            "attend": {"HEAD", "HEADS", "KV_BITS", "OUT", "UNIT"},
            "quantize": {"UNIT", "HALF_IN", "HALF_OUT"},
            "argmax": set(),
        }


def _cropped(cache):
    cache.crop(-1)
    return cache


@pytest.fixture
def on_gpu(make_nested):
    return otaro.load(make_nested("llama"), "E5M5", device="cuda", dtype=torch.float32)


@ON_GPU
@pytest.mark.parametrize("kv", KV, ids=lambda kv: str(kv or "float16"))
@pytest.mark.parametrize("name", [*SERVED, *MORE])
def test_on_the_gpu_it_computes_what_torch_computes(make_nested, decoded_model, name, kv):
    """Steps in torch are the measure: kernels sum in another order, and may be twice as far off at most."""
    model = otaro.load(make_nested(name), "E5M5", device="cuda", dtype=torch.float32)
    decoder, law = GpuDecoder.of(model), GpuDecoder.of(otaro.load(make_nested(name), "E5M5"))
    truth = slow(decoded_model(name, "E5M5", dtype=torch.float64), IDS[:40], kv and EXACT)
    theirs = error(token_by_token(law, IDS[:40], kv), truth)
    for ours in (
        token_by_token(decoder, IDS[:40], kv),
        decoder.forward(IDS[:40], decoder.new_cache(kv), all_logits=True),
    ):
        assert error(ours.cpu(), truth) <= 2 * theirs


@ON_GPU
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
def test_on_the_gpu_prompts_by_kernels_are_as_good_as_those_by_torch(
    make_nested, decoded_model, monkeypatch, name, dtype
):
    monkeypatch.setattr("otaro.runtime.gpu.CHUNK", 24)
    decoder, ids = GpuDecoder.of(otaro.load(make_nested(name), "E5M5", device="cuda", dtype=dtype)), IDS[:41]
    truth = slow(decoded_model(name, "E5M5", dtype=torch.float64), ids)
    ours = [error(decoder.forward(ids, decoder.new_cache(), all_logits=True).cpu(), truth) for _ in range(2)]
    monkeypatch.setattr("otaro.runtime.gpu.CudaPromptSteps", lambda *given: PromptSteps(*given[:-1]))
    theirs = error(decoder.forward(ids, decoder.new_cache(), all_logits=True).cpu(), truth)
    assert max(ours) <= 2 * theirs


@ON_GPU
@pytest.mark.parametrize("precision", ["E5M3", "E5M4", "E5M8"])
@pytest.mark.parametrize("tokens", [17, 41, 64])
def test_on_the_gpu_small_straight_prompts_are_as_good_as_those_by_torch(
    make_variant, monkeypatch, precision, tokens
):
    """Rows that Hopper's kernel takes, where there is one."""
    nested, truth_at = make_variant("llama", WIDE)
    decoder, ids = (
        GpuDecoder.of(otaro.load(nested, precision, device="cuda", dtype=torch.float16)),
        (2 * IDS)[:tokens],
    )
    weights = decoder._parts.of(decoder.description.precisions(), tokens)
    assert isinstance(weights, Straight)
    assert bool(weights.arranged) == hopper.has_instructions(0)
    truth = slow(truth_at(precision), ids)
    ours = [error(decoder.forward(ids, decoder.new_cache(), all_logits=True).cpu(), truth) for _ in range(2)]
    monkeypatch.setattr("otaro.runtime.gpu.CudaPromptSteps", lambda *given: PromptSteps(*given[:-1]))
    theirs = error(decoder.forward(ids, decoder.new_cache(), all_logits=True).cpu(), truth)
    assert max(ours) <= 2 * theirs


@ON_GPU
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe_mixed"])
def test_on_the_gpu_a_small_replayed_graph_gives_the_same_bits(make_nested, name):
    decoder = GpuDecoder.of(otaro.load(make_nested(name), "E5M5", device="cuda", dtype=torch.float32))
    eager, cache = [], decoder.new_cache(capacity=64)
    for token in IDS[:20]:
        decoder._occurred.clear()
        eager.append(decoder.forward([token], cache))
    assert not decoder._graphs
    cache.crop(0)
    replayed = [decoder.forward([token], cache) for token in IDS[:20]]
    assert len(decoder._graphs) == 1
    assert decoder.graph_bytes >= 0
    assert torch.equal(torch.stack(eager), torch.stack(replayed))


@ON_GPU
@pytest.mark.parametrize("name", ["llama", "qwen3_moe_mixed"])
def test_on_the_gpu_rows_of_a_batch_are_what_they_are_alone(make_nested, name):
    model = otaro.load(make_nested(name), "E5M5", device="cuda", dtype=torch.float32)
    decoder = GpuDecoder.of(model)
    names = ("E5M4", "E5M8", "E5M4")
    bits = [decoder.description.all_at(Precision(one)) for one in names]
    cache = decoder.new_cache(sequences=3)
    prompts(decoder, cache, (3, 9, 5))
    decoder.begin([4, 5, 6], cache, bits=bits)
    numbers = [decoder.advance() for _ in range(8)]
    together = [decoder.chosen(number) for number in numbers]
    for row, (length, one) in enumerate(zip((3, 9, 5), names, strict=True)):
        alone = decoder.new_cache()
        otaro.set_precision(model, "E5M5")
        decoder.forward(IDS[row : row + length], alone)
        otaro.set_precision(model, one)
        decoder.begin([4 + row], alone)
        numbers = [decoder.advance() for _ in range(8)]
        assert [decoder.chosen(number)[0] for number in numbers] == [chosen[row] for chosen in together]


@ON_GPU
def test_on_the_gpu_a_switch_costs_little(on_gpu):
    decoder = GpuDecoder.of(on_gpu)
    cache = decoder.new_cache(capacity=256)
    decoder.forward(IDS[:3], cache)
    times = {"same": [], "switched": []}
    for i in range(60):
        decoder.begin([IDS[i]], cache)
        torch.cuda.synchronize()
        start = time.perf_counter()
        if i % 2 == 0:
            otaro.set_precision(on_gpu, "E5M3" if i % 4 else "E5M7")
        decoder.advance()
        times["same" if i % 2 else "switched"].append(time.perf_counter() - start)
    # what a busy machine adds is not the switch's
    least = {name: min(found[8:]) for name, found in times.items()}
    assert least["switched"] - least["same"] < 50e-6


@ON_GPU
def test_on_the_gpu_two_streams_follow_each_other(on_gpu):
    decoder = GpuDecoder.of(on_gpu)
    expected = token_by_token(decoder, IDS[:12])
    cache, rows = decoder.new_cache(), []
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for i, token in enumerate(IDS[:12]):
        with torch.cuda.stream(streams[i % 2]):
            rows.append(decoder.forward([token], cache))
    torch.cuda.synchronize()
    assert torch.equal(torch.stack(rows), expected)
