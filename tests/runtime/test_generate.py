"""`generate` of a nested model: transformers' promises hold on the decoder's way too, phases on both."""

import warnings

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LogitsProcessorList,
    StoppingCriteria,
    TextStreamer,
    pipeline,
)
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import otaro
from otaro.errors import OtaroError, PrecisionError, ShardMissingError, SlowWarning
from otaro.kernels import cpu
from otaro.runtime.sample import Sampler
from otaro.runtime.serving import decoder_of

pytestmark = pytest.mark.skipif(bool(cpu.MISSING), reason=cpu.MISSING or "built")

IDS = torch.tensor([[5, 17, 99, 3, 64, 20]])
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model(make_nested):
    return otaro.load(make_nested("qwen2"), "E5M6")


@pytest.fixture(scope="module")
def tokens(tiny):
    return otaro.load(tiny), AutoTokenizer.from_pretrained(tiny)


def by_transformers(model, ids=IDS, **options):
    """The ordinary loop, which a cache of transformers' own asks for."""
    output = model.generate(ids, past_key_values=DynamicCache(config=model.config), **{**OPTIONS, **options})
    assert model.generation.served_by == "transformers"
    assert "DynamicCache" in model.generation.reason
    return output


def by_decoder(model, ids=IDS, **options):
    output = model.generate(ids, **{**OPTIONS, **options})
    assert model.generation.served_by == "decoder", model.generation.reason
    return output


def test_the_likeliest_tokens_are_those_of_the_ordinary_loop(make_nested):
    for name in ("llama", "llama_tied", "mistral", "qwen2", "qwen3"):
        model = otaro.load(make_nested(name), "E5M5")
        assert torch.equal(by_decoder(model), by_transformers(model))


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_from_pretrained_says_the_same_as_load(make_nested, name):
    """In the checkpoint's own type, float16 or bfloat16: the README's way."""
    expected = by_decoder(otaro.load(make_nested(name)))
    model = AutoModelForCausalLM.from_pretrained(make_nested(name))
    assert model.dtype == (torch.float16 if name == "llama" else torch.bfloat16)
    assert torch.equal(by_decoder(model), expected)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert torch.equal(by_decoder(model.to(torch.float32)), expected)
    assert torch.equal(by_decoder(model.to(torch.float16)), expected)


def test_a_pipeline_is_served_by_the_decoder(tiny, recwarn):
    writes = pipeline("text-generation", model=str(tiny))
    assert writes.model.dtype == torch.float16
    said = writes("The module", max_new_tokens=12, do_sample=False)[0]["generated_text"]
    assert writes.model.generation.served_by == "decoder"
    model, tokenizer = otaro.load(tiny), AutoTokenizer.from_pretrained(tiny)
    ids = tokenizer("The module", return_tensors="pt")["input_ids"]
    output = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert said == tokenizer.decode(output[0], skip_special_tokens=True)
    assert not [one for one in recwarn if one.category is SlowWarning]


def slow_warnings(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in caught if one.category is SlowWarning]


def test_who_did_not_ask_for_it_is_told_once_why_the_decoder_does_not_serve(make_nested):
    model = otaro.load(make_nested("qwen2"), "E5M6")
    few = {**OPTIONS, "max_new_tokens": 2}
    for call, words in (
        (
            lambda: model.generate(IDS.repeat(65, 1), **few),
            "has 65 rows, and the decoder takes 64; generate 64 at a time",
        ),
        (lambda: model.generate(IDS, num_beams=2, **few), "it searches with beams; leave out num_beams"),
        (
            lambda: model.generate(IDS, attention_mask=(IDS != 17).long(), **few),
            "not on its left; set the tokenizer's",
        ),
    ):
        (said,) = slow_warnings(call)
        assert said.startswith(
            "this Qwen2ForCausalLM generates through transformers, slower than the decoder: "
        )
        assert words in said
        assert "dtype" not in said
        assert slow_warnings(call) == []
    # the same, with another number
    assert slow_warnings(lambda: model.generate(IDS.repeat(66, 1), **few)) == []
    hook = model.lm_head.register_forward_hook(lambda *_: None)
    assert "it has forward hooks; remove them" in slow_warnings(lambda: model.generate(IDS, **few))[0]
    hook.remove()
    assert slow_warnings(lambda: model.generate(IDS, **few)) == []


def test_what_was_asked_for_needs_no_warning(make_nested, monkeypatch):
    model = otaro.load(make_nested("qwen2"), "E5M6")
    few = {**OPTIONS, "max_new_tokens": 2}
    for options in (
        {"past_key_values": DynamicCache(config=model.config)},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"output_hidden_states": True, "return_dict_in_generate": True},
        {"position_ids": torch.arange(6)[None]},
    ):
        assert slow_warnings(lambda options=options: model.generate(IDS, **few, **options)) == []
    monkeypatch.setenv("OTARO_KERNELS", "reference")
    assert slow_warnings(lambda: model.generate(IDS, **few)) == []


def test_where_transformers_runs_in_float16_on_a_cpu_float32_is_recommended(make_nested):
    model = AutoModelForCausalLM.from_pretrained(make_nested("gemma"))
    (said,) = slow_warnings(lambda: model.generate(IDS, **{**OPTIONS, "max_new_tokens": 2}))
    assert "its architecture is gemma" in said
    assert (
        slow_warnings(lambda: model.generate(IDS.repeat(65, 1), **{**OPTIONS, "max_new_tokens": 2})) == []
    )  # no row would help
    assert said.endswith("load it with dtype=torch.float32, which is faster here than bfloat16")


def test_other_architectures_go_through_transformers(make_nested):
    model = otaro.load(make_nested("gemma"), "E5M5")
    assert model.generate(IDS, **OPTIONS).shape == (1, 18)
    assert model.generation.served_by == "transformers"
    assert "gemma" in model.generation.reason
    assert model.generation.new_tokens == 12


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2}, "beams"),
        ({"num_return_sequences": 65, "do_sample": True}, "65 rows"),
        ({"use_cache": False}, "use_cache"),
        ({"cache_implementation": "static"}, "static"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "hidden states"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1]])}, "padded"),
        ({"position_ids": torch.arange(6)[None]}, "position_ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_decoder_does_not_do_goes_through_transformers(model, options, reason):
    model.generate(IDS, **{**OPTIONS, "max_new_tokens": 3, **options})
    assert model.generation.served_by == "transformers"
    assert reason in model.generation.reason
    with pytest.raises(OtaroError, match="kv=E5M7 needs the decoder"):
        model.generate(IDS, kv="E5M7", **{**OPTIONS, "max_new_tokens": 3, **options})


def test_a_processor_is_obeyed(model):
    usual = by_decoder(model)
    forbidden = [[int(usual[0, 8])], [int(usual[0, 11])]]
    options = {"bad_words_ids": forbidden, "repetition_penalty": 1.3}
    changed = by_decoder(model, **options)
    assert not {token for [token] in forbidden} & set(changed[0, 6:].tolist())
    assert torch.equal(changed, by_transformers(model, **options))


def test_it_ends_where_it_should(model):
    usual = by_decoder(model)
    end = int(usual[0, 9])
    first = usual[0, 6:].tolist().index(end)
    assert by_decoder(model, eos_token_id=end).shape[1] == 7 + first
    later = by_decoder(model, eos_token_id=end, min_new_tokens=first + 2)
    assert torch.equal(later, by_transformers(model, eos_token_id=end, min_new_tokens=first + 2))
    assert by_decoder(model, max_new_tokens=None, max_length=10).shape[1] == 10

    class Four(StoppingCriteria):
        def __call__(self, ids, scores, **kwargs):
            return torch.full((len(ids),), ids.shape[1] >= 10)

    assert by_decoder(model, stopping_criteria=[Four()]).shape[1] == 10


def test_it_returns_what_transformers_returns(model):
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    ours, theirs = by_decoder(model, **options), by_transformers(model, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    for name in ("scores", "logits"):
        assert [t.shape for t in ours[name]] == [t.shape for t in theirs[name]]
        assert torch.equal(torch.cat(ours[name]).argmax(-1), ours.sequences[0, 6:])
    assert ours.past_key_values.length == 17


def test_a_cache_can_be_used_again(model):
    whole = by_decoder(model)
    cache = decoder_of(model).new_cache()
    first = by_decoder(model, max_new_tokens=5, past_key_values=cache)
    assert cache.length == 10
    second = by_decoder(model, first, max_new_tokens=7, past_key_values=cache)
    assert torch.equal(second, whole)
    assert model.generation.reused_tokens == 10
    with pytest.raises(OtaroError, match="pass all tokens"):
        by_decoder(model, past_key_values=cache)
    with pytest.raises(OtaroError, match="beams"):
        model.generate(second, num_beams=2, past_key_values=cache, **OPTIONS)


def test_tokens_are_streamed_in_order_as_they_come(tokens, capsys):
    model, tokenizer = tokens
    ids = tokenizer("The module", return_tensors="pt")["input_ids"]
    seen = []

    class Streamer(TextStreamer):
        def put(self, value):
            seen.append(value.flatten().tolist())
            super().put(value)

    output = by_decoder(model, ids, streamer=Streamer(tokenizer))
    assert seen == [ids[0].tolist(), *([token] for token in output[0, ids.shape[1] :].tolist())]
    assert capsys.readouterr().out == tokenizer.decode(output[0]) + "\n"


def test_stop_strings(tokens):
    model, tokenizer = tokens
    ids = tokenizer("The module", return_tensors="pt")["input_ids"]
    full = tokenizer.decode(by_decoder(model, ids, max_new_tokens=30)[0, ids.shape[1] :])
    stop = full[10:14]
    cut = tokenizer.decode(
        by_decoder(model, ids, max_new_tokens=30, stop_strings=[stop], tokenizer=tokenizer)[0, ids.shape[1] :]
    )
    assert stop in cut
    assert full.startswith(cut)
    assert len(cut) < len(full)


# Precisions in motion


def forced(model, ids, precisions):
    """The likeliest tokens when step i runs at precisions[i], by the ordinary loop one token at a time."""
    cache, unread = DynamicCache(config=model.config), ids
    for precision in precisions:
        with torch.no_grad(), otaro.at_precision(model, precision):
            logits = model(unread, past_key_values=cache).logits[:, -1]
        unread = logits.argmax(-1, keepdim=True)
        ids = torch.cat([ids, unread], 1)
    return ids


@pytest.mark.parametrize("generate", [by_decoder, by_transformers])
def test_precision_by_phase(model, generate):
    output = generate(model, prefill="E5M8", decode="E5M3")
    assert torch.equal(output, forced(model, IDS, ["E5M8", *["E5M3"] * 11]))
    assert model.generation.precisions == ["E5M8", "E5M3"]
    output = generate(model, schedule={0: "E5M8", 5: {"*": "E5M4", "lm_head": "E5M8"}, 9: "E5M3"})
    mixed = {"*": "E5M4", "lm_head": "E5M8"}
    assert torch.equal(output, forced(model, IDS, [*["E5M8"] * 5, *[mixed] * 4, *["E5M3"] * 3]))
    assert model.generation.precisions == ["E5M8", "E5M4 to E5M8", "E5M3"]
    output = generate(model, decode="E5M3")
    assert torch.equal(output, forced(model, IDS, ["E5M6", *["E5M3"] * 11]))
    assert set(map(str, otaro.precisions_of(model).values())) == {"E5M6"}


def test_a_compiled_model_is_one_graph_and_runs_as_it_is_set(make_nested):
    model = otaro.load(make_nested("qwen2"), "E5M5")
    options = {**OPTIONS, "use_cache": False}  # by transformers
    model.lm_head.compile(backend="eager", fullgraph=True)
    with otaro.at_precision(model, "E5M3"):
        expected = model.generate(IDS, **options)
    otaro.set_precision(model, "E5M3")
    assert torch.equal(model.generate(IDS, **options), expected)
    with pytest.raises(OtaroError, match=r"a compiled model runs as it is set: use otaro.set_precision"):
        model.generate(IDS, precision="E5M8", **options)
    model.lm_head._compiled_call_impl = None
    model.lm_head.forward = torch.compile(model.lm_head.forward, backend="eager", fullgraph=True)
    assert torch.equal(model.generate(IDS, **options), expected)
    with pytest.raises(OtaroError, match="a compiled model"):
        model.generate(IDS, precision="E5M8", **options)


def test_beams_have_phases_too(model):
    model.generate(IDS, num_beams=2, prefill="E5M8", decode="E5M3", **OPTIONS)
    assert model.generation.precisions == ["E5M8", "E5M3"]


def test_a_streamer_may_switch_between_two_tokens(model):
    class Switch:
        def __init__(self):
            self.count = 0

        def put(self, value):
            self.count += 1
            if self.count == 5:  # the prompt and four tokens
                otaro.set_precision(model, "E5M3")

        def end(self):
            pass

    with otaro.at_precision(model, "E5M8"):
        output = by_decoder(model, streamer=Switch())
    assert torch.equal(output, forced(model, IDS, [*["E5M8"] * 4, *["E5M3"] * 8]))


def test_an_interrupted_generation_restores_the_precision(model):
    class Interrupt:
        def put(self, value):
            if value.dim() == 1:
                raise KeyboardInterrupt

        def end(self):
            pass

    with pytest.raises(KeyboardInterrupt):
        by_decoder(model, streamer=Interrupt(), decode="E5M3", prefill="E5M8")
    assert set(map(str, otaro.precisions_of(model).values())) == {"E5M6"}


@pytest.mark.parametrize("kv", [None, "E5M7"])
def test_a_generation_that_a_cache_refuses_leaves_it_as_it_was(make_nested, kv):
    model = otaro.load(make_nested("qwen2"), "E5M6")
    cache = decoder_of(model).new_cache(kv and otaro.Precision(kv))
    first = by_decoder(model, max_new_tokens=3, past_key_values=cache)
    expected = by_decoder(model, first)
    bias = model.model.layers[1].self_attn.v_proj.bias.data
    usual = bias.clone()

    class TooLarge:
        def put(self, value):
            if value.dim() == 1:
                bias[3] = 1e6

        def end(self):
            pass

    with pytest.raises(OtaroError, match="cannot hold it"):
        by_decoder(model, first, past_key_values=cache, streamer=TooLarge())
    assert cache.length == 8
    bias.copy_(usual)
    if kv is None:
        assert torch.equal(by_decoder(model, first, past_key_values=cache), expected)


def test_packed_keys_and_values(model):
    assert by_decoder(model, kv="E5M8").shape == (1, 18)
    packed = model.generation.cache_bytes
    by_decoder(model)
    assert packed < model.generation.cache_bytes


def test_contradictions_and_missing_shards_are_refused(model, make_nested, copy_of):
    for options, message in (
        ({"schedule": {0: "E5M8"}, "decode": "E5M3"}, "either schedule"),
        ({"schedule": {-1: "E5M8"}}, "-1"),
        ({"schedule": {"0": "E5M8"}}, "'0'"),
        ({"schedule": "0:E5M8"}, "schedule='0:E5M8': give a mapping"),
        ({"prefill": "E5M9"}, "E5M9"),
    ):
        with pytest.raises(PrecisionError, match=message):
            by_decoder(model, **options)
    for ids in (torch.tensor([[10.7, 20.2]]), torch.zeros(0, 3, dtype=torch.long)):
        with pytest.raises(OtaroError, match="tokens are whole numbers"):
            model.generate(ids, max_new_tokens=2)
    with pytest.raises(OtaroError, match="give either"):
        by_decoder(model, kv="E5M7", past_key_values=decoder_of(model).new_cache())
    partial = otaro.load(copy_of(make_nested("llama"), planes=(3, 4)))
    with pytest.raises(ShardMissingError, match="E5M8 needs"):
        by_decoder(partial, schedule={0: "E5M3", 1000: "E5M8"})


# Sampling


@pytest.mark.parametrize("top_k", [0, 1, 20])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("spread", [0.3, 2.0, 8.0])
def test_exactly_transformers_tokens_may_be_drawn_with_its_probabilities(top_p, top_k, spread):
    logits = spread * torch.randn(5000, generator=torch.Generator().manual_seed(1))
    logits[100:120] = logits[50]  # ties
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.7)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    tokens, chances = Sampler(warpers, do_sample=True).distribution(IDS, logits)
    ours = torch.zeros(5000, dtype=torch.float64)
    ours[slice(None) if tokens is None else tokens] = torch.from_numpy(chances)
    theirs = warpers(IDS, logits.clone()[None]).softmax(-1)[0].double()
    assert torch.equal(ours > 0, theirs > 0)
    assert torch.allclose(ours / ours.sum(), theirs, rtol=1e-4, atol=0)


def test_tokens_are_drawn_with_their_probabilities():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).repeat(2)
    sampler = Sampler([TemperatureLogitsWarper(0.8), TopPLogitsWarper(0.95)], do_sample=True)
    torch.manual_seed(0)
    counts = (
        torch.bincount(
            torch.tensor([sampler.choose(IDS, logits[None])[0] for _ in range(4_000)]), minlength=8
        )
        / 4_000
    )
    expected = TopPLogitsWarper(0.95)(IDS, logits[None] / 0.8).softmax(-1)[0]
    assert torch.allclose(counts, expected, atol=4 * (0.25 / 4_000) ** 0.5)


def test_a_seed_says_the_same_again(model):
    def sampled(seed, **options):
        torch.manual_seed(seed)
        return by_decoder(model, do_sample=True, **options)

    for options in ({"top_p": 0.8}, {"temperature": 1.5, "top_k": 0}, {"min_p": 0.05}):
        assert torch.equal(sampled(3, **options), sampled(3, **options))
        assert any(not torch.equal(sampled(3, **options), sampled(seed, **options)) for seed in (4, 5, 6))


def test_ways_of_transformers_that_are_slow_say_so_and_are_reported(make_nested):
    model = otaro.load(make_nested("llama"), "E5M6")
    with pytest.warns(SlowWarning, match='prompt_lookup_num_tokens was given; draft="prompt" is'):
        model.generate(IDS, prompt_lookup_num_tokens=3, **OPTIONS)
    told = model.generation
    assert (told.served_by, told.prompt_tokens, told.new_tokens) == ("transformers", IDS.shape[1], 12)
    assert told.precisions == ["E5M6"]
    with pytest.warns(SlowWarning, match="for guidance_scale it reads every token twice; leave"):
        model.generate(IDS, guidance_scale=1.5, **OPTIONS)
