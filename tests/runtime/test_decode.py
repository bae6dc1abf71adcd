"""The decoder against transformers, step by step: every architecture, precision, reconstruction and kind of
cache.

The slow path runs the same packed modules and rounds keys and values as the decoder's cache does; what is
left between the two is the order of float32 sums. Truth is the same model in float64 on decoded weights.
"""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import otaro
from otaro.errors import OtaroError
from otaro.file.io import NestedDirectory
from otaro.kernels import cpu
from otaro.kernels.kv_cache import OFFSET_POSITIONS, KvCache, key_offset
from otaro.kernels.ops import FEW_TOKENS
from otaro.runtime import decode
from otaro.runtime.decode import Decoder
from otaro.runtime.modules import SefpModule
from otaro.runtime.serving import decoder_of
from otaro.sefp.precision import PRECISIONS, Precision

pytestmark = pytest.mark.skipif(bool(cpu.MISSING), reason=cpu.MISSING or "built")

SERVED = ("llama", "llama_tied", "mistral", "qwen2", "qwen3")
MORE = ("gemma2", "gemma3", "phi3", "olmo2", "smollm3", "granite", "mixtral", "qwen3_moe", "qwen3_moe_mixed")
IDS = [(7 * i + i * i // 3) % 120 for i in range(150)]  # more than two segments of 64 positions
EXACT = object()
KV = (None, Precision("E5M7"), Precision("E5M3"))


class RoundingCache(DynamicCache):
    """Has keys and values as the decoder's cache does: in float16, or at a precision, keys less an offset."""

    def __init__(self, kv, offsets=None, **kwargs):
        super().__init__(**kwargs)
        self.kv, self.offsets = kv, offsets

    def update(self, keys, values, layer, *args, **kwargs):
        if self.offsets is not None and isinstance(self.kv, Precision):
            keys = keys - self.offsets[layer].view(1, keys.shape[1], 1, -1)
        return super().update(self._rounded(keys), self._rounded(values), layer, *args, **kwargs)

    def _rounded(self, tensor):
        if self.kv is EXACT:
            return tensor
        if self.kv is None:
            return tensor.half().to(tensor.dtype)
        _, heads, positions, head = tensor.shape
        cache = KvCache(1, 1, heads, positions, head, self.kv.mantissa_bits, "cpu")
        cache.write(0, 0, 0, 0, tensor[0].transpose(0, 1))
        return cache.read(0, 0, 0, slice(None), tensor.dtype).unsqueeze(0)


def key_offsets(model):
    """What the bias of keys adds to them on average, by the model's own angles; None where they have none."""
    attentions = [layer.self_attn for layer in model.model.layers]
    if any(
        getattr(one, "k_proj", None) is None or one.k_proj.bias is None or hasattr(one, "k_norm")
        for one in attentions
    ):
        return None
    angles = model.model.rotary_emb(torch.empty(0), torch.arange(OFFSET_POSITIONS).unsqueeze(0))
    cosines, sines = (table[0, :, : table.shape[-1] // 2] for table in angles)
    return [key_offset(one.k_proj.bias, one.head_dim, cosines, sines) for one in attentions]


def slow(model, ids, kv=None):
    """Logits [ids, vocabulary] of transformers, as many tokens at a time as modules multiply on integers."""
    offsets = key_offsets(model)
    cache, rows = RoundingCache(kv, offsets, config=model.config), []
    with torch.no_grad():
        for start in range(0, len(ids), FEW_TOKENS):
            rows.append(
                model(torch.tensor([ids[start : start + FEW_TOKENS]]), past_key_values=cache).logits[0]
            )
    return torch.cat(rows)


def fast(model, ids, kv=None):
    decoder = Decoder.of(model)
    return decoder.forward(ids, decoder.new_cache(kv), all_logits=True)


def error(logits, truth):
    return float((logits.double() - truth).pow(2).mean().sqrt())


def check_against_slow_path(model, truth_model, ids=IDS[:40], kv=None):
    # A code that flips by a rounding error moves a packed key by a whole step: there the truth is without any
    # rounding of keys.
    truth = slow(truth_model, ids, kv and EXACT)
    ours, theirs = fast(model, ids, kv), slow(model, ids, kv)
    assert error(ours, truth) <= 2 * error(theirs, truth)
    if kv is None:
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.fixture(params=cpu.available())
def instructions(request):
    cpu._cpu.choose(request.param)
    yield request.param
    cpu._cpu.choose(cpu.best())


@pytest.fixture(params=SERVED)
def served(request):
    return request.param


@pytest.mark.parametrize("kv", KV, ids=lambda kv: str(kv or "float16"))
def test_logits_are_those_of_the_slow_path(make_nested, decoded_model, served, reconstruction, kv):
    model = otaro.load(make_nested(served, reconstruction))
    assert Decoder.why_not(model) is None
    for precision in PRECISIONS if kv is None else PRECISIONS[::4]:
        otaro.set_precision(model, precision)
        truth = decoded_model(served, precision, reconstruction, torch.float64)
        check_against_slow_path(model, truth, IDS[:24], kv)


@pytest.mark.parametrize("kv", KV[:2], ids=lambda kv: str(kv or "float16"))
@pytest.mark.parametrize("name", MORE)
def test_logits_of_more_architectures_are_those_of_the_slow_path(make_nested, decoded_model, name, kv):
    model = otaro.load(make_nested(name))
    assert Decoder.why_not(model) is None
    for precision in PRECISIONS[::2]:
        otaro.set_precision(model, precision)
        check_against_slow_path(
            model, decoded_model(name, precision, "midpoint", torch.float64), IDS[:24], kv
        )


VARIANTS = {
    "biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "linear positions": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama3 positions": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "yarn positions": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "a window": ("mistral", {"sliding_window": 9}),
    "a window across segments": ("mistral", {"sliding_window": 70}),
    "a window in some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "one kv head": ("llama", {"num_key_value_heads": 1, "num_attention_heads": 12, "head_dim": 8}),
    "a kv head each": ("llama", {"num_key_value_heads": 4}),
    "wide heads": ("qwen3", {"head_dim": 80}),
}


@pytest.mark.parametrize("kv", KV[:2], ids=lambda kv: str(kv or "float16"))
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_the_architectures(make_variant, variant, kv):
    nested, truth = make_variant(*VARIANTS[variant])
    check_against_slow_path(
        otaro.load(nested, "E5M6"), truth("E5M6"), IDS[:100] if "segments" in variant else IDS[:40], kv
    )


@pytest.mark.parametrize("kv", KV[:2], ids=lambda kv: str(kv or "float16"))
def test_a_prompt_gives_the_same_bits_at_once_in_pieces_and_token_by_token(make_nested, served, kv):
    decoder = Decoder.of(otaro.load(make_nested(served), "E5M5"))
    ids = IDS * 2  # more than one call takes
    once = decoder.forward(ids, decoder.new_cache(kv), all_logits=True)
    for sizes in ((1,), (7, 64, 1, 100), (255, 3)):
        cache, rows = decoder.new_cache(kv), []
        while cache.length < len(ids):
            size = sizes[len(rows) % len(sizes)]
            rows.append(decoder.forward(ids[cache.length : cache.length + size], cache, all_logits=True))
        assert torch.equal(torch.cat(rows), once), sizes
    assert torch.equal(decoder.forward(ids, decoder.new_cache(kv)), once[-1])


@pytest.mark.parametrize("kv", KV[:2], ids=lambda kv: str(kv or "float16"))
def test_instructions_and_threads_do_not_change_a_bit(make_nested, served, kv, monkeypatch):
    model = otaro.load(make_nested(served), "E5M6")
    results = []
    for instructions in cpu.available():
        monkeypatch.setenv("OTARO_KERNELS", f"cpu:{instructions}")
        for threads in (1, 2, 3) if instructions == cpu.best() else (1,):
            torch.set_num_threads(threads)
            decoder = Decoder.of(model)
            cache = decoder.new_cache(kv)
            pieces = [
                decoder.forward(some, cache, all_logits=True) for some in (IDS[:70], IDS[70:71], IDS[71:])
            ]
            results.append(torch.cat(pieces))
    torch.set_num_threads(1)
    assert len(results) >= 3
    assert all(torch.equal(result, results[0]) for result in results)


def test_precision_may_change_between_any_two_tokens(make_nested, decoded_model):
    model = otaro.load(make_nested("qwen2"), "E5M3")
    truth = decoded_model("qwen2", "E5M3", dtype=torch.float64)
    changes = ["E5M3", "E5M8", {"*": "E5M4", "*.self_attn.*": "E5M7"}, "E5M5", {"lm_head": "E5M8"}]
    decoder, models = Decoder.of(model), (model, truth)
    cache, caches = decoder.new_cache(), [RoundingCache(None, config=model.config) for _ in models]
    logits = []
    for token, precision in zip(IDS[:20], changes * 4, strict=True):
        otaro.set_precision(model, precision)
        for name, module in model.named_modules():
            if isinstance(module, SefpModule):
                values = module.packed.decode(module.mantissa_bits, torch.float32)
                truth.get_submodule(name).weight.data = values.double()
        with torch.no_grad():
            theirs, exact = (
                one(torch.tensor([[token]]), past_key_values=its).logits[0, -1]
                for one, its in zip(models, caches, strict=True)
            )
        logits.append((decoder.forward([token], cache), theirs, exact))
    ours, theirs, exact = map(torch.stack, zip(*logits, strict=True))
    assert error(ours, exact) <= 2 * error(theirs, exact)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_planes_are_attached_when_a_precision_needs_them(make_nested):
    model = otaro.load(make_nested("llama"), "E5M3")
    decoder = Decoder.of(model)
    decoder.forward(IDS[:3], decoder.new_cache())
    assert model.lm_head.packed.plane4 is None
    otaro.set_precision(model, "E5M5")
    finer = decoder.forward(IDS[:3], decoder.new_cache())
    assert torch.equal(finer, fast(otaro.load(make_nested("llama"), "E5M5"), IDS[:3])[-1])


@pytest.mark.parametrize("kv", KV[:2], ids=lambda kv: str(kv or "float16"))
def test_a_cropped_cache_goes_on_as_if_nothing_had_been_read(make_nested, kv):
    decoder = Decoder.of(otaro.load(make_nested("llama"), "E5M4"))
    cache, fresh = decoder.new_cache(kv), decoder.new_cache(kv)
    decoder.forward(IDS[:140], cache)
    bytes_before = cache.nbytes
    cache.crop(30)
    assert (cache.length, cache.nbytes) == (30, bytes_before // 3)
    decoder.forward(IDS[:30], fresh)
    assert torch.equal(decoder.forward(IDS[50:60], cache), decoder.forward(IDS[50:60], fresh))
    cache.crop(-4)
    assert cache.length == 36
    cache.crop(1000)
    assert cache.length == 36


def test_memory_of_the_cache(make_nested):
    decoder = Decoder.of(otaro.load(make_nested("llama"), "E5M4"))
    sizes = {}
    for kv in (None, *PRECISIONS):
        cache = decoder.new_cache(kv)
        assert cache.nbytes == 0
        decoder.forward(IDS[:65], cache)
        sizes[kv] = cache.nbytes
    # positions, keys and values, layers, kv heads, head of 24 padded, bytes
    assert sizes[None] == 128 * 2 * 2 * 2 * 32 * 2
    packed = [sizes[precision] for precision in PRECISIONS]
    assert packed == sorted(packed, reverse=True)
    assert max(packed) < sizes[None]


def test_what_cannot_be_is_refused_and_leaves_the_cache_alone(make_nested):
    decoder, other = (Decoder.of(otaro.load(make_nested(name), "E5M4")) for name in ("llama", "mistral"))
    cache = decoder.new_cache()
    decoder.forward(IDS[:5], cache)
    expected = decoder.forward(IDS[5:6], cache)
    cache.crop(5)
    for ids, message in (
        ([], "one token or more"),
        ([[1, 2]], "one token or more"),
        ([3, 120], "token 120 is not in the vocabulary of 120"),
        ([-1], "token -1"),
        (IDS[:300] * 2 + [999], "token 999"),
    ):
        with pytest.raises(OtaroError, match=message):
            decoder.forward(ids, cache)
        assert cache.length == 5
    with pytest.raises(OtaroError, match="another model"):
        other.forward([1], cache)
    with pytest.raises(OtaroError, match="serves the decoder alone"):
        cache.update(None, None, 0)
    assert torch.equal(decoder.forward(IDS[5:6], cache), expected)


def test_the_extension_takes_all_that_a_description_says_and_nothing_else(make_nested, monkeypatch):
    native, given = decode._cpu, []

    class Recorded:
        Matrix = native.Matrix

        @staticmethod
        def Decoder(model, layers):
            given.append((model, layers))
            return native.Decoder(model, layers)

    monkeypatch.setattr(decode, "_cpu", Recorded)
    Decoder.of(otaro.load(make_nested("qwen2"), "E5M3"))
    model, layers = given[0]
    for changed in ((model, [layers[0], layers[1] | {"more": 1}]), (model | {"more": 1}, layers)):
        with pytest.raises(ValueError, match="the decoder knows no more"):
            native.Decoder(*changed)
    with pytest.raises(ValueError, match="the decoder knows no more"):
        native.Decoder(model | {"lm_head": model["lm_head"] | {"more": 1}}, layers)
    for name in model:
        with pytest.raises(ValueError, match=f"the description lacks {name}"):
            native.Decoder({key: value for key, value in model.items() if key != name}, layers)
    for name in layers[0]:
        with pytest.raises(ValueError, match=f"the description lacks {name}"):
            native.Decoder(model, [{key: value for key, value in layers[0].items() if key != name}])


@pytest.mark.parametrize("kv", KV[:2], ids=lambda kv: str(kv or "float16"))
@pytest.mark.parametrize("projection", ["k_proj", "v_proj"])
@pytest.mark.parametrize("value", [1e6, -1e6, torch.nan, torch.inf])
def test_a_cache_refuses_what_it_cannot_hold(make_nested, instructions, monkeypatch, kv, projection, value):
    monkeypatch.setenv("OTARO_KERNELS", f"cpu:{instructions}")
    model = otaro.load(make_nested("qwen2"), "E5M8")
    decoder = Decoder.of(model)
    cache = decoder.new_cache(kv)
    expected = decoder.forward(IDS[:2], cache)
    bias = getattr(model.model.layers[1].self_attn, projection).bias.data
    usual, bias[3] = float(bias[3]), value
    limit, other = (
        ("65520", "kv='E5M8' holds less than 65536") if kv is None else ("65536", "nor can any other kv")
    )
    with pytest.raises(OtaroError, match=f"{limit} or more, or not finite.*{other}.*DynamicCache"):
        decoder.forward(IDS[2:4], cache)
    assert cache.length == 2
    bias[3] = usual
    cache.crop(0)
    assert torch.equal(decoder.forward(IDS[:2], cache), expected)


def test_the_largest_halves_are_held_and_the_next_are_not(instructions):
    for value, holds in ((65504.0, True), (-65519.99, True), (65520.0, False), (-65536.0, False)):
        x = np.array([0.5, value, -2.0], dtype=np.float32)
        assert cpu._cpu.through_halves(x, np.empty_like(x)) is holds


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8 + [1.5] * 4,
    "long_factor": [4.0] * 12, "original_max_position_embeddings": 40, "factor": 4.0,
}  # fmt: skip


@pytest.mark.parametrize(
    "rope",
    [{"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, LONGROPE],
    ids=lambda rope: rope["rope_type"],
)
def test_growing_ropes_serve_as_far_as_they_do_not_grow(make_variant, rope):
    nested, truth = make_variant("llama", {"rope_parameters": rope, "max_position_embeddings": 40})
    model = otaro.load(nested, "E5M6")
    check_against_slow_path(model, truth("E5M6"), IDS[:40])
    decoder = Decoder.of(model)
    cache = decoder.new_cache()
    decoder.forward(IDS[:38], cache)
    with pytest.raises(
        OtaroError, match=f"positions of type {rope['rope_type']} up to 40 tokens.*has 41.*DynamicCache"
    ):
        decoder.forward(IDS[:3], cache)
    assert cache.length == 38
    for new, by in ((31, "decoder"), (32, "transformers")):
        model.generate(
            torch.tensor([IDS[:10]]), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert model.generation.served_by == by
    assert "42 tokens are wanted" in model.generation.reason
    model(torch.tensor([IDS[:60]]))  # grows the model's own
    assert torch.equal(
        Decoder.of(model).forward(IDS[:38], decoder.new_cache()),
        decoder.forward(IDS[:38], decoder.new_cache()),
    )


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe_mixed", "olmo2"])
def test_rows_of_a_batch_are_what_they_are_alone(make_nested, instructions, name):
    """At other lengths, precisions and kinds of cache, whoever else is there, and in whatever order."""
    model = otaro.load(make_nested(name), "E5M8")
    decoder = Decoder.of(model)
    lengths, names = (3, 130, 20, 9, 64), ("E5M5", "E5M8", "E5M3", "E5M6", "E5M8")
    bits = [decoder.description.all_at(Precision(one)) for one in names]
    mixed = bytearray(bits[2])
    mixed[5] = mixed[-1] = 7
    bits[2] = bytes(mixed)
    for kv in (None, Precision("E5M5")):
        batch = decoder.new_cache(kv, sequences=5)
        alone = [decoder.new_cache(kv) for _ in lengths]
        for row, length in enumerate(lengths):
            for cache, sequence in ((batch, row), (alone[row], 0)):
                decoder.forward(IDS[row : row + length], cache, sequence=sequence, bits=bits[row])
        expected = [
            [decoder.forward([IDS[i + row]], alone[row], bits=bits[row]) for i in range(4)]
            for row in range(5)
        ]
        for i, those in enumerate(([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [1, 4], [3])):
            found = decoder.step([IDS[i + row] for row in those], batch, those, [bits[row] for row in those])
            for logits, row in zip(found, those, strict=True):
                done = batch.lengths[row] - lengths[row] - 1
                if done == i:
                    assert torch.equal(logits, expected[row][i])
        assert batch.lengths == [5, 133, 22, 12, 67]
        assert batch.nbytes == sum(cache.nbytes for cache in alone)


def test_a_batch_with_a_row_that_cannot_be_held_changes_nothing(make_nested):
    model = otaro.load(make_nested("qwen2"), "E5M8")
    decoder = Decoder.of(model)
    cache = decoder.new_cache(sequences=3)
    for row in range(3):
        decoder.forward(IDS[: 3 + row], cache, sequence=row)
    before = decoder.step(IDS[:3], cache)
    cache.crop(-1)
    assert cache.lengths == [3, 4, 5]
    for wrong, message in (
        (([1, 2], None, None), "2 tokens for 3 sequences"),
        (([1, 2, 3], [0, 1, 0], None), "one after the other"),
        (([1], [3], None), "sequence 3 is none of the 3"),
        (([1, 2, 120], None, None), "token 120 is not in the vocabulary"),
        (([1], [0], [b"\4"]), "precisions of 1 matrices"),
        (([1], [0], []), "precisions of 0 tokens"),
    ):
        with pytest.raises(OtaroError, match=message):
            decoder.step(wrong[0], cache, *wrong[1:])
    model.model.layers[1].self_attn.v_proj.bias.data[3] = 1e6
    with pytest.raises(OtaroError, match="cannot hold it"):
        Decoder.of(model).step(IDS[:3], cache)
    assert cache.lengths == [3, 4, 5]
    model.model.layers[1].self_attn.v_proj.bias.data[3] = 0.0
    assert before.shape == decoder.step(IDS[:3], cache).shape
    with pytest.raises(OtaroError, match="holds 1 to 64 sequences"):
        decoder.new_cache(sequences=65)


def test_why_not(make_nested, make_variant):
    def reason(name="llama", change=lambda model: None, **kwargs):
        model = otaro.load(make_nested(name), **kwargs)
        change(model)
        return Decoder.why_not(model)

    assert "its architecture is gemma, and the decoder knows llama, mistral" in reason("gemma")
    assert "float64" in reason(dtype=torch.float64)
    assert "its activation is gelu" in reason(
        change=lambda model: setattr(model.config, "hidden_act", "gelu")
    )
    assert "hooks" in reason(change=lambda model: model.lm_head.register_forward_hook(print))
    assert "not all of its weights" in reason(
        change=lambda model: setattr(model, "lm_head", torch.nn.Linear(96, 120))
    )
    assert reason(change=lambda model: model.train()) is None  # nothing to drop out
    with pytest.raises(OtaroError, match="gemma"):
        Decoder.of(otaro.load(make_nested("gemma")))


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen2", "qwen3"])
def test_it_computes_in_float32_whatever_the_models_type_is(make_nested, name):
    """Stored types are float16, bfloat16 and float32: what is loaded or cast as such is the same numbers."""
    expected = fast(otaro.load(make_nested(name), "E5M6"), IDS[:20])
    stored = NestedDirectory(make_nested(name)).base.tensor("model.norm.weight").dtype
    loaded = otaro.load(make_nested(name), "E5M6", dtype=stored)
    moved = otaro.load(make_nested(name), "E5M6").to(stored)
    for model in (loaded, moved):
        assert model.dtype == stored
        assert torch.equal(fast(model, IDS[:20]), expected)


def test_norms_that_change_are_noticed_whatever_their_type(make_nested):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        model = otaro.load(make_nested("llama"), "E5M4", dtype=dtype)
        decoder, norm = decoder_of(model), model.model.norm.weight
        assert decoder.serves(model)
        assert decoder_of(model) is decoder
        with torch.no_grad():
            norm[3] = 7.0
        assert not decoder.serves(model)
        decoder = decoder_of(model)
        norm.data[4] = 7.0  # no version counts this
        assert not decoder.serves(model)
        changed = decoder_of(model)
        assert torch.equal(changed.forward(IDS[:5], changed.new_cache()), fast(model, IDS[:5])[-1])
        norm.data = norm.data.clone()
        assert not changed.serves(model)
        head = copy.deepcopy(model.lm_head)
        assert decoder_of(model).serves(model)
        model.lm_head = head
        assert decoder_of(model).description.modules[-1] is head


def test_without_the_extension_there_is_a_reason(make_nested, monkeypatch):
    monkeypatch.setenv("OTARO_KERNELS", "reference")
    model = otaro.load(make_nested("llama"))
    assert "OTARO_KERNELS=reference" in Decoder.why_not(model)


def test_a_decoder_does_not_keep_its_model_and_does_not_need_it(make_nested):
    model = otaro.load(make_nested("llama"), "E5M4")
    decoder, gone = Decoder.of(model), weakref.ref(model)
    expected = decoder.forward(IDS[:5], decoder.new_cache())
    del model
    gc.collect()
    assert gone() is None
    assert torch.equal(decoder.forward(IDS[:5], decoder.new_cache()), expected)
    decoder.forward(IDS * 8, decoder.new_cache())  # positions that it has not seen before


def test_a_copy_of_a_model_has_a_decoder_of_its_own(make_nested):
    model = otaro.load(make_nested("llama"), "E5M4")
    first = decoder_of(model)
    assert decoder_of(model) is first
    twin = copy.deepcopy(model)
    otaro.set_precision(twin, "E5M3")
    assert decoder_of(twin) is not first
    assert not torch.equal(*(one.forward(IDS[:5], one.new_cache()) for one in (first, decoder_of(twin))))
    model.model.norm.weight = torch.nn.Parameter(torch.ones(96))
    assert decoder_of(model) is not first


def test_the_exponential_is_right_to_about_a_unit_in_the_last_place(instructions):
    x = np.concatenate([np.linspace(-87, 88, 400_001), np.linspace(-1, 1, 100_001)]).astype(np.float32)
    out = np.empty_like(x)
    cpu._cpu.exponential(x, out)
    exact = np.exp(x.astype(np.float64))
    unit = np.spacing(exact.astype(np.float32)).astype(np.float64)
    assert np.max(np.abs(out - exact) / unit) < 1.5
    edges = np.array([-np.inf, -1000, -87.5, 0, 1000, np.inf, np.nan], dtype=np.float32)
    out = np.empty_like(edges)
    cpu._cpu.exponential(edges, out)
    assert out[:4].tolist() == [0, 0, 0, 1]
    assert out[4] == out[5] > 1e38
    assert np.isnan(out[6])


def test_halves_are_rounded_as_torch_rounds_them(instructions):
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.half).float()
    between = torch.nextafter(every, torch.tensor(torch.inf))
    middle = (every + torch.roll(every, 1)) / 2
    random = (
        torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(0))
        .int()
        .view(torch.float32)
    )
    x = torch.cat([every, between, middle, random])
    out = np.empty(len(x), dtype=np.float32)
    cpu._cpu.through_halves(x.numpy(), out)
    assert torch.equal(
        torch.from_numpy(out).nan_to_num(-7, 1e9, -1e9), x.half().float().nan_to_num(-7, 1e9, -1e9)
    )


def test_a_bias_of_keys_takes_no_bits_from_a_packed_cache(random_model, tmp_path):
    """One on dimensions that hardly turn adds the same to all scores of a query: what the model says stays as
    it is.

    Packed as it is, it would be a hundred times what varies, and leave nothing of it at E5M5.
    """
    errors = {}
    for size in (0.0, 100.0):
        model = random_model("qwen2", rope_parameters={"rope_type": "default", "rope_theta": 1e12})
        half = model.config.head_dim // 2
        for layer in model.model.layers:
            bias = torch.zeros(2, 2, half)
            bias[:, :, -1] = size  # of the slowest pair, which turns by 1e-11 a position
            layer.self_attn.k_proj.bias.data = bias.flatten().to(layer.self_attn.k_proj.bias.dtype)
        model.save_pretrained(tmp_path / str(size))
        otaro.pack(tmp_path / str(size), tmp_path / f"{size}-sefp")
        nested = otaro.load(tmp_path / f"{size}-sefp")
        errors[size] = (fast(nested, IDS, Precision("E5M5")) - fast(nested, IDS)).abs().mean()
    assert errors[0.0] > 0
    assert errors[100.0] < 2 * errors[0.0]


@pytest.mark.parametrize("length", [24, 64, 80, 128])
def test_rows_of_a_packed_cache_are_those_that_a_gpu_would_keep(instructions, length):
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(200, length, generator=generator) * 2.0 ** torch.randint(
        -30, 15, (200, 1), generator=generator
    )
    x[0], x[1, 0], x[2, 5], x[3, 0] = 0.0, -1e-30, 65535.9, -65535.9
    # scaled, the second underflows; its floor is still below zero
    x[4] = torch.tensor([1000.0, -1e-40] * (length // 2))
    for bits in range(3, 9):
        theirs = KvCache(1, 1, 1, len(x), length, bits, "cpu")
        theirs.write(0, 0, 0, 0, x.unsqueeze(1))
        assert not theirs.refused.item()
        base, exponents, *planes = (one[0, 0].numpy() for one in theirs.of_layer(0, 0))
        ours = [np.zeros_like(one) for one in (base, exponents, *planes)]
        cpu._cpu.encode(x.numpy(), ours[0], ours[2:], ours[1])
        for mine, its in zip(ours, (base, exponents, *planes), strict=True):
            assert np.array_equal(mine, its)
    for bad in (65536.0, torch.inf, torch.nan):
        x[7, 3] = bad
        with pytest.raises(ValueError, match="65536"):
            cpu._cpu.encode(x.numpy(), ours[0], ours[2:], ours[1])
