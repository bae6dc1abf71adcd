"""A draft and its judge: what they say the judge alone says, to the last bit; drawn, as often."""

import math
import random
from collections import Counter
from itertools import cycle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

import otaro
from otaro.errors import OtaroError, PrecisionError
from otaro.kernels import cpu, cuda, cuda_steps
from otaro.runtime import serving
from otaro.runtime.decoder import Costs
from otaro.runtime.draft import MOST, Draft, Drafter
from otaro.runtime.gpu import GpuDecoder
from otaro.runtime.report import Generation
from otaro.runtime.sample import Proposal, Sampler
from otaro.runtime.scheduler import Scheduler
from otaro.sefp.precision import Precision
from tests.kernels import emulated
from tests.runtime.test_decode import MORE, SERVED
from tests.runtime.test_gpu import products_from_digits

pytestmark = pytest.mark.usefixtures("swift_products")
PROMPT = [5, 17, 99, 3, 64, 20, 7, 5, 17, 99]
DRAFTS = [
    "E5M3",
    "E5M5",
    "prompt",
    "prompt+E5M3",
    Draft(Precision("E5M3"), tokens=4),
    Draft(prompt=True, tokens=3),
]
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 24}
TOKENS = {"text": False, "ignore_eos": True}


@pytest.fixture(params=["cpu", "gpu"])
def kind(request, monkeypatch):
    """The decoder: that of CPUs, or the GPU's by its steps in torch."""
    if request.param == "cpu" and cpu.MISSING:
        pytest.skip(cpu.MISSING)
    if request.param == "gpu":
        monkeypatch.setattr(serving, "kind_of", lambda model: GpuDecoder)
    return request.param


@pytest.fixture
def model(make_nested, kind):
    return otaro.load(make_nested("llama"), "E5M8", dtype=torch.float32)


def said(model, prompt=PROMPT, cache=None, **options):
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **{**GREEDY, **options}
    )
    assert model.generation.served_by == "decoder", model.generation.reason
    return output


# What is said


KINDS = [("cpu", name, kv) for name in (*SERVED, *MORE) for kv in (None, "E5M7")]
# Of the GPU's decoder those that differ in what a position means (windows, layers without rope), and experts:
# a draft is several tokens of a sequence in one step, and what a step makes of one token test_gpu.py asks of
# all of them.
APART = ("llama", "gemma2", "gemma3", "smollm3", "qwen3_moe")
KINDS += [("gpu", name, kv) for name, kv in zip(APART, cycle([None, "E5M7"]))]


@pytest.mark.parametrize(("kind", "name", "kv"), KINDS, indirect=["kind"])
def test_it_is_what_the_judge_says_alone(make_nested, kind, name, kv):
    """Tokens, logits, and the keys and values that are left."""
    model = otaro.load(make_nested(name), dtype=torch.float32)
    decoder, wanted = serving.decoder_of(model), {"output_logits": True, "return_dict_in_generate": True}
    drafts = DRAFTS if (kind, name) == ("cpu", "llama") else [DRAFTS[4], "prompt+E5M3"]
    precision = None if kv is None else Precision(kv)

    def run(**options):
        cache = decoder.new_cache(precision)
        output = said(model, cache=cache, precision="E5M8", **wanted, **options)
        left = decoder.forward([1], cache, bits=decoder.description.all_at(Precision("E5M8")))
        return output.sequences, torch.cat(output.logits), left, model.generation

    alone = run()
    assert alone[3].drafted == alone[3].accepted == []
    accepted = 0
    for draft in drafts:
        tokens, logits, left, report = run(draft=draft)
        assert torch.equal(tokens, alone[0])
        assert torch.equal(logits, alone[1])
        assert torch.equal(left, alone[2])
        assert report.precisions == ["E5M8"]
        assert all(right <= tried for right, tried in zip(report.accepted, report.drafted, strict=True))
        accepted += sum(report.accepted)
    assert accepted > 0


@pytest.mark.skipif(bool(emulated.MISSING), reason=emulated.MISSING or "there")
@pytest.mark.parametrize("kv", [None, "E5M7"])
def test_by_the_gpus_kernels_emulated_it_is_what_the_judge_says_alone(make_nested, kv, monkeypatch):
    monkeypatch.setattr(cuda_steps.nvrtc, "kernel", emulated.kernel)
    monkeypatch.setattr(cuda_steps.nvrtc, "most_shared", lambda device: 64 << 10)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=2)
    )
    monkeypatch.setattr(cuda, "_linear_kernel", cuda._linear_kernel.__wrapped__)
    monkeypatch.setattr(cuda_steps.cuda, "products", products_from_digits)
    monkeypatch.setattr(serving, "kind_of", lambda model: GpuDecoder)
    model = otaro.load(make_nested("llama"), "E5M8", dtype=torch.float32)
    decoder = GpuDecoder.of(model, cuda_steps.CudaSteps("cpu"))
    monkeypatch.setattr("otaro.runtime.rows.decoder_of", lambda model: decoder)
    alone = said(model, max_new_tokens=7, kv=kv)
    assert torch.equal(
        said(model, max_new_tokens=7, kv=kv, draft=Draft(Precision("E5M3"), True, tokens=3)), alone
    )
    assert sum(model.generation.drafted) > 0


def test_several_tokens_of_several_sequences_in_one_step_have_the_bits_of_single_ones(make_nested, kind):
    decoder = serving.decoder_of(otaro.load(make_nested("gemma2"), dtype=torch.float32))
    bits = [decoder.description.all_at(Precision(one)) for one in ("E5M8", "E5M3")]
    for kv in (None, Precision("E5M4")):
        caches = [decoder.new_cache(kv, 3) for _ in range(2)]
        for number in range(3):
            for cache in caches:
                decoder.forward(PROMPT[: 3 + number], cache, sequence=number)
        tokens, sequences = [1, 2, 3, 4, 5, 6], [2, 2, 0, 0, 0, 1]
        together = decoder.step(tokens, caches[0], sequences, [bits[1]] * 2 + [bits[0]] * 3 + [bits[1]])
        assert caches[0].lengths == [6, 5, 7]
        for token, number, logits in zip(tokens, sequences, together, strict=True):
            assert torch.equal(decoder.step([token], caches[1], [number], [bits[number != 0]])[0], logits)
    with pytest.raises(OtaroError, match="one after the other"):
        decoder.step([1, 2, 3], caches[0], [0, 1, 0])
    with pytest.raises(OtaroError, match="read at one precision in a step"):
        decoder.step([1, 2], caches[0], [0, 0], bits)


@pytest.mark.parametrize("options", [
    {"repetition_penalty": 1.4},
    {"no_repeat_ngram_size": 2},
    {"prefill": "E5M8", "decode": "E5M6"},
    {"schedule": {0: "E5M5", 4: "E5M8", 9: "E5M3", 12: "E5M7"}},
    {"precision": {"*": "E5M8", "*.k_proj": "E5M3"}},
    {"eos_token_id": list(range(0, 120, 9))},
    {"max_new_tokens": 1},
    {"max_new_tokens": 2},
    {"max_new_tokens": 54},
])  # fmt: skip
@pytest.mark.parametrize("draft", [DRAFTS[4], "prompt+E5M3"])
def test_beside_other_options(model, options, draft):
    alone = said(model, **options)
    precisions = model.generation.precisions
    assert torch.equal(said(model, draft=draft, **options), alone)
    assert model.generation.precisions == precisions


def test_a_streamer_gets_tokens_one_by_one_and_may_switch(model):
    class Streamer:
        def __init__(self):
            self.seen = []

        def put(self, value):
            self.seen.append(value.flatten().tolist())
            if len(self.seen) == 6:
                otaro.set_precision(model, "E5M4")

        def end(self):
            self.seen.append("end")

    streamers = []
    for draft in (None, DRAFTS[4]):
        otaro.set_precision(model, "E5M8")
        streamers.append(Streamer())
        said(model, draft=draft, streamer=streamers[-1])
        assert model.generation.precisions == ["E5M8", "E5M4"]
    assert streamers[0].seen == streamers[1].seen
    assert streamers[1].seen[-1] == "end"


def test_what_draws_with_a_processor_of_its_own_asks_it_once_for_each_token(model):
    class Counts(LogitsProcessor):
        def __init__(self):
            self.lengths = []

        def __call__(self, ids, scores):
            self.lengths.append(ids.shape[1])
            return scores

    counts = Counts()
    torch.manual_seed(0)
    said(model, draft=DRAFTS[4], do_sample=True, logits_processor=LogitsProcessorList([counts]))
    assert counts.lengths == list(range(len(PROMPT), len(PROMPT) + 24))


# In the engine


def drawn_request(draw):
    options = {
        "max_new_tokens": draw.randrange(1, 20),
        "precision": draw.choice(["E5M8", {0: "E5M8", 5: "E5M6"}, "E5M5"]),
    }
    options |= draw.choice([{}, {}, {"stop": [draw.randrange(120)]}, {"logprobs": 2}, {"watched": [3, 4]}])
    if draw.random() < 0.2:
        options["sampling"] = otaro.Sampling(repetition_penalty=1.3)
    prompt = [draw.randrange(120) for _ in range(draw.randrange(1, 9))] * draw.choice([1, 2])
    return prompt, {**options, **TOKENS}


@pytest.mark.parametrize(("kv", "chunk"), [(None, 7), ("E5M7", 24)])
def test_a_request_with_a_draft_says_what_it_says_alone_without(model, kv, chunk):
    draw = random.Random(1)
    requests = [drawn_request(draw) for _ in range(24)]
    alone = []
    for prompt, options in requests:
        scheduler = Scheduler(model, kv=kv, chunk=chunk, max_sequences=1)
        alone.append(list(scheduler.submit(prompt, **options)))
    scheduler, streams, drafted = Scheduler(model, kv=kv, chunk=chunk, max_sequences=7), [], 0
    for prompt, options in requests:
        draft = draw.choice([None, "E5M3", "prompt", "prompt+E5M3", DRAFTS[4]])
        streams.append(scheduler.submit(prompt, draft=draft, **options))
        for _ in range(draw.randrange(3)):
            scheduler.step()
    while scheduler.step():
        pass
    for stream, tokens in zip(streams, alone, strict=True):
        assert list(stream) == tokens
        drafted += sum(stream.figures.drafted)
    assert drafted > 50


def test_with_a_seed_it_says_the_same_again_whoever_is_there(model):
    def submitted(scheduler, seed):
        sampling = otaro.Sampling(1.2, top_p=0.9, repetition_penalty=1.1, seed=seed)
        return scheduler.submit(PROMPT, sampling=sampling, draft="prompt+E5M3", max_new_tokens=20, **TOKENS)

    alone = [submitted(Scheduler(model), seed).result().tokens for seed in range(4)]
    scheduler = Scheduler(model)
    assert [one.result().tokens for one in [submitted(scheduler, seed) for seed in range(4)]] == alone
    assert len({tuple(one) for one in alone}) == 4


def test_drafts_take_no_memory_beyond_what_was_reserved(model, kind):
    """A cache that is full to the last token of the answer; and nothing is kept that was not said."""
    blocks = 1 if kind == "cpu" else 32  # the memory of the cache before, on a GPU
    room = int(Scheduler(model, max_sequences=1).cache_token_bytes) * 64 * blocks
    scheduler = Scheduler(model, max_sequences=1, cache_bytes=room)
    most = scheduler.context + 1 - len(PROMPT)
    alone = scheduler.submit(PROMPT, max_new_tokens=most, **TOKENS).result().tokens
    seen = []
    name = "step" if kind == "cpu" else "likeliest"
    step = getattr(type(scheduler.decoder), name)

    def watched(decoder, ids, cache, *rest):
        found = step(decoder, ids, cache, *rest)
        seen.append(max(cache.lengths))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(scheduler.decoder), name, watched)
        stream = scheduler.submit(PROMPT, draft=DRAFTS[4], max_new_tokens=most, **TOKENS)
        assert stream.result().tokens == alone
    assert max(seen) == scheduler.context
    assert scheduler.cache.lengths == [scheduler.context]
    again = scheduler.submit([*PROMPT, *alone[:-3]], max_new_tokens=3, **TOKENS)
    assert again.result().tokens == alone[-3:]
    if kind == "cpu":
        assert again.figures.reused_tokens == len(PROMPT) + most - 4


def test_cancelled_and_late_answers_end_within_a_draft(model, monkeypatch):
    scheduler = Scheduler(model)
    stream = scheduler.submit(PROMPT, draft=DRAFTS[4], max_new_tokens=40, **TOKENS)
    other = scheduler.submit(PROMPT, max_new_tokens=5, **TOKENS)
    while not stream.tokens:
        scheduler.step()
    stream.cancel()
    assert other.result().finish_reason == "length"
    assert stream.finish_reason == "cancelled"
    late = scheduler.submit(PROMPT, draft=DRAFTS[4], max_new_tokens=40, deadline=1000.0, **TOKENS)
    scheduler.step()
    before = len(late.tokens)
    monkeypatch.setattr("otaro.runtime.request.time.perf_counter", lambda: 1e9)
    while late.finish_reason is None:
        scheduler.step()
    assert late.finish_reason == "deadline"
    assert len(late.tokens) == before + 1


def test_a_draft_that_fails_is_none(model, kind, monkeypatch):
    alone = said(model)
    decoder, name = type(serving.decoder_of(model)), "step" if kind == "cpu" else "likeliest"
    reads = getattr(decoder, name)

    def breaks(decoder, ids, cache, sequences=None, bits=None):
        if len(ids) > 1:
            raise OtaroError("a key that nobody would have had")
        return reads(decoder, ids, cache, sequences, bits)

    monkeypatch.setattr(decoder, name, breaks)
    assert torch.equal(said(model, draft=DRAFTS[4]), alone)
    assert sum(model.generation.drafted) == 0


# What is drawn


def bound(samples, outcomes, chance=1e-9):
    """What a frequency misses its probability by, but with this chance, for any outcome (Hoeffding)."""
    return math.sqrt(math.log(2 * outcomes / chance) / (2 * samples))


@pytest.mark.parametrize("sharp", [True, False], ids=["certain", "drawn"])
@pytest.mark.parametrize(
    "warpers", [[], [TemperatureLogitsWarper(0.7), TopKLogitsWarper(4)]], ids=["plain", "top-k"]
)
def test_a_proposal_is_kept_as_often_as_its_token_would_be_drawn(warpers, sharp):
    samples, generator, ids = 8_000, torch.Generator().manual_seed(0), torch.tensor([[0]])
    judge, draft = torch.randn(2, 7, generator=generator) * 1.5
    sampler = Sampler(warpers, do_sample=True, generator=generator)
    expected = np.zeros(7)
    tokens, chances = sampler.distribution(ids, judge)
    expected[slice(None) if tokens is None else tokens] = chances / chances.sum()
    seen, kept = Counter(), 0
    for _ in range(samples):
        proposal = (
            Proposal(int(draft.argmax())) if sharp else sampler.proposed([0], draft, int(draft.argmax()))
        )
        (token,) = sampler.choose(ids, judge.unsqueeze(0), proposal)
        seen[token] += 1
        kept += token == proposal.token
    for token in range(7):
        assert abs(seen[token] / samples - expected[token]) <= bound(samples, 7)
    assert 0 < kept < samples


@pytest.mark.parametrize("kind", ["cpu"], indirect=True)
def test_what_is_drawn_with_a_draft_is_distributed_as_without(model):
    """Pairs of tokens, of which the second was drafted; their probabilities are the judge's."""
    samples, options = 1200, {"top_k": 3, "temperature": 1.5}
    decoder, cache = serving.decoder_of(model), serving.decoder_of(model).new_cache()
    bits = decoder.description.all_at(Precision("E5M8"))
    first = decoder.forward(PROMPT, cache, bits=bits)

    def chances(logits):
        values, tokens = (logits / options["temperature"]).topk(options["top_k"])
        return zip(tokens.tolist(), values.softmax(0).tolist(), strict=True)

    expected = {}
    for token, chance in chances(first):
        for other, then in chances(decoder.forward([token], cache, bits=bits)):
            expected[token, other] = chance * then
        cache.crop(len(PROMPT))
    scheduler, streams = Scheduler(model), []
    for seed in range(samples):
        sampling = otaro.Sampling(**options, seed=seed)
        streams.append(
            scheduler.submit(PROMPT, sampling=sampling, draft=DRAFTS[4], max_new_tokens=3, **TOKENS)
        )
    while scheduler.step():
        pass
    seen = Counter(tuple(one.tokens[:2]) for one in streams)
    assert set(seen) <= set(expected)
    for pair, chance in expected.items():
        assert abs(seen[pair] / samples - chance) <= bound(samples, len(expected))
    accepted, drafted = (
        sum(sum(getattr(one.figures, name)) for one in streams) for name in ("accepted", "drafted")
    )
    assert 0 < accepted < drafted


# How many tokens are drafted, and which


def drafter(draft, judge=b"\x08\x08"):
    return Drafter(Draft.of(draft), [judge], Generation())


COSTS = Costs(several=0.25, each=0.15, fixed=0.0)


def learn(one, drafted, right, sure=True):
    one.begin(drafted)
    for position in range(min(drafted, right + 1)):
        one.judged(position < right, sure)


def test_as_many_tokens_are_drafted_as_pay():
    one, fine = drafter("E5M3"), b"\x08\x08"
    for _ in range(40):
        count = one.count(fine, 100, COSTS)
        learn(one, count, count)
    assert count == MOST["weights"]
    assert one.count(fine, 2, COSTS) == 2  # there is no room for more
    for _ in range(40):  # nine of ten are right
        learn(one, 10, 9)
    assert 0 < one.count(fine, 100, COSTS) < MOST["weights"]
    tried = []
    for _ in range(200):
        tried.append(one.count(fine, 100, COSTS))
        learn(one, tried[-1], 0)
    assert 0 in tried[60:]
    assert 0 < sum(map(bool, tried[60:])) < 40  # now and then it is tried again
    assert one.count(b"\x03\x03", 100, COSTS) == 0  # nothing to gain
    assert one.bits(b"\x08\x03\x02") == b"\x03\x03\x02"
    assert drafter(Draft(Precision("E5M4"), tokens=9)).count(fine, 100, COSTS) == 9
    sure, unsure = drafter("E5M3"), drafter("E5M3")
    assert sure.count(fine, 100, COSTS) == unsure.count(fine, 100, COSTS)
    for _ in range(20):
        learn(sure, 1, 0)
        learn(unsure, 1, 0, sure=False)
    assert sure.count(fine, 100, COSTS) == 0
    assert unsure.count(fine, 100, COSTS) > 1


def test_weights_stop_where_they_are_not_sure(model, kind, monkeypatch):
    """On a CPU; a GPU is not asked."""
    counts = []
    begin = Drafter.begin
    monkeypatch.setattr(Drafter, "begin", lambda self, count: counts.append(count) or begin(self, count))
    for threshold, goes_on in ((0.0, True), (1.1, kind == "gpu")):
        monkeypatch.setattr("otaro.runtime.draft._SURE", threshold)
        counts.clear()
        said(model, draft="E5M3")
        assert (max(counts) > 1) == goes_on


def test_what_no_precision_saves_makes_a_draft_dearer():
    fine, coarse = b"\x08\x08", b"\x03\x03"
    assert COSTS.draft(coarse, fine) == 4 / 9
    assert COSTS._replace(fixed=0.25).draft(coarse, fine) == 0.25 + 0.75 * 4 / 9
    assert COSTS._replace(fixed=1.0).draft(coarse, fine) == 1
    assert drafter("E5M3").count(fine, 100, COSTS._replace(fixed=1.0)) == 0


def test_a_text_goes_on_as_it_did_the_last_time():
    one = drafter("prompt")
    ids = [1, 2, 3, 4, 5, 9, 2, 3, 7, 8, 9, 1, 2, 3]
    assert one.from_text(ids[:5], 100, COSTS) == []
    assert one.from_text(ids, 3, COSTS) == [4, 5, 9]  # after 1 2 3, not after 2 3 alone
    ids += [7, 8]
    assert one.from_text(ids, 2, COSTS) == [9, 1]
    assert drafter(Draft(prompt=True, tokens=7)).from_text([5, 6, 7, 5, 6], 100, COSTS) == [
        7,
        5,
        6,
        7,
        5,
        6,
        7,
    ]
    assert drafter("E5M3").from_text([5, 6, 5, 6], 100, COSTS) == []


# What cannot be


def test_what_is_no_draft_is_refused(model, tmp_path):
    for draft, message in (("E5M9", "draft='E5M9': give a precision, prompt, or"), ("", "give a precision")):
        with pytest.raises(PrecisionError, match=message):
            said(model, draft=draft)
    for draft in ("E5M3+E5M4", "prompt+prompt", "prompt+E5M3+E5M3"):
        with pytest.raises(OtaroError, match="give a precision, prompt, or both"):
            Scheduler(model).submit(PROMPT, draft=draft, **TOKENS)
    for options in (
        {"precision": "E5M4"},
        {"schedule": {0: "E5M3", 5: "E5M4"}},
        {"prefill": "E5M8", "decode": "E5M4"},
    ):
        with pytest.raises(OtaroError, match="draft=E5M4: a draft is coarser than what it serves"):
            said(model, draft="E5M4", **options)
    with pytest.raises(OtaroError, match="a draft is coarser than what it serves"):
        Scheduler(model).submit(PROMPT, draft="E5M8", **TOKENS)
    with pytest.raises(OtaroError, match="a draft serves one row"):
        model.generate(
            torch.tensor([PROMPT, PROMPT]), attention_mask=torch.ones(2, len(PROMPT)), draft="E5M3", **GREEDY
        )
    with pytest.raises(
        OtaroError, match="draft=E5M3 needs the decoder, which does not serve here: it searches with beams"
    ):
        model.generate(torch.tensor([PROMPT]), draft="E5M3", num_beams=2, **GREEDY)
    with pytest.raises(OtaroError, match="and draft do not go together with assisted generation"):
        model.generate(torch.tensor([PROMPT]), draft="E5M3", prompt_lookup_num_tokens=3, **GREEDY)


def test_the_names_of_drafts():
    assert [str(Draft.of(name)) for name in ("E5M3", "prompt", "Prompt + E5M4")] == [
        "E5M3",
        "prompt",
        "prompt+E5M4",
    ]
    assert Draft.of(None) is None
    assert Draft.of(Precision("E5M3")) == Draft(Precision("E5M3"))
