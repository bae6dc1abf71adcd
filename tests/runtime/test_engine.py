"""Many requests by one decoder: what each says is what it would say alone, and nobody waits for ever."""

import asyncio
import gc
import itertools
import os
import random
import signal
import threading
import time
import warnings

import numpy as np
import pytest
import torch

import otaro
from otaro.errors import OtaroError, ShardMissingError
from otaro.kernels import cpu
from otaro.runtime import serving
from otaro.runtime.gpu import GpuDecoder
from otaro.runtime.request import Request
from otaro.runtime.scheduler import Scheduler
from otaro.runtime.stream import Stream

pytestmark = pytest.mark.usefixtures("swift_products")
TOKENS = {"text": False, "ignore_eos": True}


@pytest.fixture(scope="module", params=["cpu", "gpu"])
def kind(request):
    """The decoder: that of CPUs, or the GPU's by its steps in torch."""
    if request.param == "cpu" and cpu.MISSING:
        pytest.skip(cpu.MISSING)
    return request.param


@pytest.fixture(autouse=True)
def _decoder(kind, monkeypatch):
    if kind == "gpu":
        monkeypatch.setattr(serving, "kind_of", lambda model: GpuDecoder)


@pytest.fixture(scope="module")
def model(make_nested, kind):
    return otaro.load(make_nested("llama"), "E5M5")


@pytest.fixture
def logits_seen(monkeypatch):
    """Every request's logits, by its stream: the device chooses nothing by itself."""
    monkeypatch.setattr(GpuDecoder, "ahead", 0)
    seen = {}
    choose = Request.choose

    def remember(self, logits, *rest):
        seen.setdefault(self.stream, []).append(logits.clone())
        return choose(self, logits, *rest)

    monkeypatch.setattr(Request, "choose", remember)
    return seen


def finish(scheduler, steps=10_000):
    for _ in range(steps):
        if not scheduler.step():
            return
    raise AssertionError(f"not done after {steps} steps")


# What a sequence says does not depend on its company


def drawn_request(draw, common):
    """Prompt, options, precisions to switch to after so many tokens, and after how many it is cancelled."""
    precisions = ["E5M3", "E5M5", "E5M8"]
    prompt = draw.choice(common)[: draw.choice([0, 12, 24, 40, 48])] + [
        draw.randrange(120) for _ in range(draw.randrange(1, 8))
    ]
    options = {"max_new_tokens": draw.randrange(1, 8), **TOKENS}
    options |= draw.choice(
        [
            {"precision": draw.choice(precisions)},
            {"precision": {0: draw.choice(precisions), 3: draw.choice(precisions)}},
            {"precision": {"*": draw.choice(precisions), "*.k_proj": draw.choice(precisions)}},
            {"prefill": draw.choice(precisions), "decode": draw.choice(precisions)},
            {},
        ]
    )
    if draw.random() < 0.5:
        options["sampling"] = otaro.Sampling(
            draw.choice([0.7, 1.0]),
            draw.choice([0.8, 1.0]),
            draw.choice([0, 20]),
            min_p=draw.choice([0.0, 0.05]),
            repetition_penalty=draw.choice([1.0, 1.2]),
            seed=draw.randrange(100),
        )
    switch = {draw.randrange(4): draw.choice(precisions)} if draw.random() < 0.4 else {}
    return prompt, options, switch, draw.randrange(1, 4) if draw.random() < 0.15 else None


def run(scheduler, requests, arrivals):
    """All of these, arriving at these steps."""
    streams, step = [], 0
    pending = list(zip(requests, arrivals, strict=True))
    going_on = []
    while pending or going_on:
        for request, _ in [one for one in pending if one[1] <= step]:
            prompt, options, switch, cancelled = request
            stream = scheduler.submit(prompt, **options)
            streams.append(stream)
            going_on.append((stream, dict(switch), cancelled))
        pending = [one for one in pending if one[1] > step]
        for stream, switch, cancelled in going_on:
            if len(stream.tokens) in switch:
                stream.set_precision(switch.pop(len(stream.tokens)))
            if len(stream.tokens) == cancelled:
                stream.cancel()
        scheduler.step()
        step += 1
        going_on = [one for one in going_on if one[0].finish_reason is None]
    return streams


@pytest.mark.parametrize(("kv", "chunk", "slots"), [(None, 7, 5), ("E5M7", 24, 16)])
def test_a_sequence_says_alone_what_it_says_among_others(model, logits_seen, kv, chunk, slots):
    draw = random.Random(chunk)
    common = [[draw.randrange(120) for _ in range(50)] for _ in range(2)]
    requests = [drawn_request(draw, common) for _ in range(30)]
    scheduler = Scheduler(model, max_sequences=slots, kv=kv, chunk=chunk)
    arrivals = [draw.randrange(20) if number < 15 else draw.randrange(70, 90) for number in range(30)]
    crowd = run(scheduler, requests, sorted(arrivals))
    assert sum(stream.figures.reused_tokens > 0 for stream in crowd) > 0
    for request, among in zip(requests, crowd, strict=True):
        (alone,) = run(Scheduler(model, max_sequences=1, kv=kv, chunk=chunk), [request], [0])
        assert among.finish_reason == alone.finish_reason
        assert among.tokens == alone.tokens
        for ours, theirs in zip(logits_seen[among], logits_seen[alone], strict=True):
            assert torch.equal(ours, theirs)


def test_going_ahead_makes_no_difference(model, kind, monkeypatch):
    """Requests come, go, switch and sample among others that the device goes ahead with."""
    if kind == "cpu":
        pytest.skip("a CPU has nothing to go ahead with")
    draw, advanced, plain = random.Random(5), [], GpuDecoder.advance
    monkeypatch.setattr(GpuDecoder, "advance", lambda decoder: advanced.append(decoder) or plain(decoder))
    common = [[draw.randrange(120) for _ in range(50)] for _ in range(2)]
    requests = [drawn_request(draw, common) for _ in range(30)]
    for _, options, _, _ in requests[::3] + requests[1::3]:
        options.pop("sampling", None)
    arrivals = sorted(draw.randrange(60) for _ in requests)
    ahead = run(Scheduler(model, max_sequences=3, chunk=24), requests, arrivals)
    steps = len(advanced)
    assert steps > 0
    monkeypatch.setattr(GpuDecoder, "ahead", 0)
    plain_ones = run(Scheduler(model, max_sequences=3, chunk=24), requests, arrivals)
    assert len(advanced) == steps
    for one, other in zip(ahead, plain_ones, strict=True):
        assert (one.tokens, one.finish_reason) == (other.tokens, other.finish_reason)
        assert one.figures.precisions == other.figures.precisions


def test_others_may_use_the_decoder_while_it_is_ahead(model, kind, monkeypatch):
    if kind == "cpu":
        pytest.skip("a CPU has nothing to go ahead with")
    scheduler, decoder = Scheduler(model), serving.decoder_of(model)
    expected = scheduler.submit([5, 6], max_new_tokens=12, **TOKENS).result().tokens
    advanced, plain = [], GpuDecoder.advance
    monkeypatch.setattr(GpuDecoder, "advance", lambda decoder: advanced.append(decoder) or plain(decoder))
    stream, cache = scheduler.submit([5, 6], max_new_tokens=12, **TOKENS), decoder.new_cache()
    scheduler.step()
    while scheduler.step():
        decoder.forward([1, 2, 3], cache)
    assert stream.tokens == expected
    assert len(advanced) == 11  # what was begun is not begun again
    stream = scheduler.submit([5, 6], max_new_tokens=12, **TOKENS)
    scheduler.step()
    decoder.begin([7], cache)
    for _ in range(70):
        decoder.advance()  # more than are remembered
    assert stream.result().tokens == expected


def test_tokens_are_those_of_generate(model):
    ids = [5, 17, 99, 3, 64]
    scheduler = Scheduler(model)
    for options in ({"precision": "E5M3"}, {"prefill": "E5M8", "decode": "E5M3"}, {}):
        expected = model.generate(
            torch.tensor([ids]), max_new_tokens=6, do_sample=False, eos_token_id=None, **options
        )
        assert (
            scheduler.submit(ids, max_new_tokens=6, **options, **TOKENS).result().tokens
            == expected[0, 5:].tolist()
        )


def test_a_generator_of_ones_own(model):
    scheduler, sampling = Scheduler(model), otaro.Sampling(temperature=1.0, seed=3)
    torch.manual_seed(0)
    streams = [scheduler.submit([5, 6], sampling=sampling, max_new_tokens=8, **TOKENS) for _ in range(2)]
    others = [
        scheduler.submit([5, 6], sampling=otaro.Sampling(1.0), max_new_tokens=8, **TOKENS) for _ in range(2)
    ]
    finish(scheduler)
    assert streams[0].tokens == streams[1].tokens
    assert others[0].tokens != others[1].tokens


# The cache


def test_what_was_read_before_is_used_again_where_it_makes_no_difference(model, kind):
    scheduler = Scheduler(model, chunk=8)
    prompt = list(range(10, 30))

    def reused(tokens, **options):
        stream = scheduler.submit(tokens, max_new_tokens=4, **options, **TOKENS)
        finish(scheduler)
        return stream.figures.reused_tokens, [*tokens, *stream.tokens]

    nothing, said = reused(prompt, precision="E5M4")
    assert nothing == 0
    assert reused(prompt, precision="E5M4")[0] == 19  # its last token must be read for its logits
    assert reused([*prompt[:12], 1, 2], precision="E5M4")[0] == 12
    few = reused([*prompt[:4], *range(50, 60)], precision="E5M4")[0]
    assert few == (0 if kind == "gpu" else 4)  # a copy; without one it is too little: others may come back
    _, said = reused(list(range(30, 50)), prefill="E5M8", decode="E5M4")
    assert reused([*said, 7], precision="E5M4")[0] < 20
    assert reused([*said, 7], precision="E5M8")[0] == 20  # answers were read at E5M4


def test_what_has_ended_stays_while_there_is_memory_and_the_oldest_goes_first(model, kind):
    if kind == "gpu":
        pytest.skip("there each sequence has its own memory")
    segment = Scheduler(model)._slots.token_bytes * 64
    scheduler = Scheduler(model, max_sequences=2, cache_bytes=int(6 * segment))
    prompts = [[number, *range(10, 30)] for number in range(1, 9)]
    alone = {}

    def reused(number, **options):
        stream = scheduler.submit(prompts[number], max_new_tokens=4, **options, **TOKENS)
        finish(scheduler)
        assert scheduler.cache_bytes <= 6 * segment
        assert alone.setdefault(number, stream.tokens) == stream.tokens
        return stream.figures.reused_tokens

    assert [reused(number) for number in range(5)] == [0] * 5  # more than run at once
    assert [reused(number) for number in range(5)] == [20] * 5
    assert [reused(number) for number in range(5, 8)] == [0] * 3  # 0 to 2 have gone
    assert [reused(number) for number in (7, 6, 5, 4, 3, 0)] == [20] * 5 + [0]


def test_a_prefix_is_copied_from_a_sequence_that_runs_or_that_others_may_come_back_for(model, kind):
    if kind == "gpu":
        pytest.skip("there none is copied")
    system, scheduler = list(range(10, 40)), Scheduler(model)
    first = scheduler.submit([*system, 1], max_new_tokens=20, **TOKENS)
    while not first.tokens:
        scheduler.step()
    other = scheduler.submit([*system, 2], max_new_tokens=4, **TOKENS)
    finish(scheduler)
    assert (first.figures.reused_tokens, other.figures.reused_tokens) == (0, 30)
    again = scheduler.submit([*system, 1, *first.tokens, 3], max_new_tokens=4, **TOKENS)
    finish(scheduler)
    assert again.figures.reused_tokens == 31 + 19  # the last token said was never read
    fresh = Scheduler(model)
    for stream, prompt in ((other, [*system, 2]), (again, [*system, 1, *first.tokens, 3])):
        assert fresh.submit(prompt, max_new_tokens=4, **TOKENS).result().tokens == stream.tokens


def test_where_products_depend_on_neighbours_whole_chunks_are_used_again(model, kind):
    scheduler = Scheduler(model, chunk=20)
    prompt = list(range(10, 55))

    def reused(tokens):
        return scheduler.submit(tokens, max_new_tokens=2, **TOKENS).result().figures.reused_tokens

    assert reused(prompt) == 0
    assert reused([*prompt[:42], 1, 2]) == 42  # the chunk from 40 on is short
    assert reused([*prompt[:36], 1, 2]) == (20 if kind == "gpu" else 36)


def test_a_request_that_never_fits_is_refused_in_words(model, kind):
    with pytest.raises(OtaroError, match="cache_bytes=10: keys and values of 16 sequences take"):
        Scheduler(model, cache_bytes=10)
    scheduler = Scheduler(model)
    with pytest.raises(
        OtaroError, match="prompt has 60 tokens and 6 new ones are asked for: this model has positions for 64"
    ):
        scheduler.submit([1] * 60, max_new_tokens=6)
    assert len(scheduler.submit([1] * 60, **TOKENS).result().tokens) == 5


def test_memory_stays_within_its_bound(model, kind, monkeypatch):
    monkeypatch.setattr("otaro.runtime.scheduler.positions_of", lambda model: None)
    default = Scheduler(model, max_sequences=4)._slots.nbytes  # 2,048 tokens of each
    bound = default // (8 if kind == "gpu" else 16)
    scheduler = Scheduler(model, max_sequences=4, cache_bytes=bound)
    with pytest.raises(OtaroError, match="give the engine more, or fewer max_sequences"):
        scheduler.submit([1] * 60, max_new_tokens=600, **TOKENS)
    streams = [scheduler.submit([1] * 200, max_new_tokens=3, **TOKENS) for _ in range(5)]
    while scheduler.step():
        assert scheduler.cache_bytes <= bound
        assert scheduler.running <= (4 if kind == "gpu" else 2)
    assert all(stream.finish_reason == "length" for stream in streams)


def test_prompts_are_read_in_the_pass_of_the_others(model, kind, monkeypatch):
    if kind == "gpu":
        pytest.skip("it has passes for prompts alone")
    scheduler, read, passes = Scheduler(model, chunk=8), serving.decoder_of(model).read, []

    def recorded(chunks, cache):
        passes.append([len(chunk.ids) for chunk in chunks])
        return read(chunks, cache)

    monkeypatch.setattr(scheduler.decoder, "read", recorded)
    prompts = {"E5M8": [5, 6, 7], "E5M4": [8, 9], "E5M3": list(range(20, 32))}
    streams = {
        name: scheduler.submit(ids, precision=name, max_new_tokens=6, **TOKENS)
        for name, ids in prompts.items()
    }
    finish(scheduler)
    assert [sorted(one) for one in passes[:3]] == [[2, 3, 3], [1, 1, 8], [1, 1, 1]]
    for name, ids in prompts.items():
        alone = Scheduler(model).submit(ids, precision=name, max_new_tokens=6, **TOKENS).result()
        assert streams[name].tokens == alone.tokens


# Order


def test_a_long_prompt_holds_nobody_up_for_longer_than_a_chunk(model):
    scheduler = Scheduler(model, chunk=4)
    short = scheduler.submit([1, 2], max_new_tokens=20, **TOKENS)
    scheduler.step()
    long = scheduler.submit([3] * 40, max_new_tokens=1, **TOKENS)
    for _ in range(9):
        before = len(short.tokens)
        scheduler.step()
        assert len(short.tokens) == before + 1
        assert not long.tokens
    scheduler.step()
    assert long.finish_reason == "length"


def test_short_prompts_pass_a_long_one_that_comes_to_its_end_nevertheless(model):
    scheduler = Scheduler(model, max_sequences=2, chunk=4)
    long = scheduler.submit([3] * 40, max_new_tokens=1, **TOKENS)
    scheduler.step()
    shorts = []
    while long.finish_reason is None:
        shorts.append(scheduler.submit([1, 2, 3, 4], max_new_tokens=1, **TOKENS))
        scheduler.step()
    assert len(shorts) <= 4 * 10  # of ten chunks
    assert 2 * sum(stream.finish_reason == "length" for stream in shorts) > len(shorts)


def test_who_waits_for_memory_is_passed_so_many_times_and_no_more(model, kind, monkeypatch):
    if kind == "gpu":
        pytest.skip("a GPU's memory is divided evenly: who has a slot has memory")
    monkeypatch.setattr("otaro.runtime.scheduler.positions_of", lambda model: None)
    segment = Scheduler(model, max_sequences=1)._slots.nbytes // 32
    scheduler = Scheduler(model, max_sequences=4, cache_bytes=4 * segment)
    large = [scheduler.submit([1] * 100, max_new_tokens=60, **TOKENS) for _ in range(2)]
    small = [scheduler.submit([number, 2], max_new_tokens=1, **TOKENS) for number in range(20)]
    while large[0].finish_reason is None:
        scheduler.step()
    assert sum(stream.finish_reason is not None for stream in small) == 16
    finish(scheduler)
    assert all(stream.finish_reason == "length" for stream in (*large, *small))


def test_first_come_first_served(model):
    scheduler = Scheduler(model, max_sequences=1)
    streams = [scheduler.submit([1, 2, number], max_new_tokens=2, **TOKENS) for number in range(3)]
    assert done_in_turn(scheduler, streams) == [0, 1, 2]


def done_in_turn(scheduler, streams):
    """Numbers of the streams as they ended, one running at a time."""
    done, more = [], True
    while more:
        more = scheduler.step()
        done += [
            number for number, stream in enumerate(streams) if stream.finish_reason and number not in done
        ]
        assert scheduler.running <= 1
    return done


def test_priority_goes_before_the_order_of_arrival(model):
    scheduler = Scheduler(model, max_sequences=1)
    running = scheduler.submit([1, 2], max_new_tokens=2, **TOKENS)
    scheduler.step()
    given = [0, 2, -1, 2, 0]
    streams = [
        scheduler.submit([1, 2, 3], max_new_tokens=2, priority=priority, **TOKENS) for priority in given
    ]
    assert done_in_turn(scheduler, streams) == [1, 3, 0, 4, 2]
    assert running.finish_reason == "length"


def test_who_is_cancelled_frees_its_place_at_the_next_step(model):
    scheduler = Scheduler(model, max_sequences=1)
    first, second, third = (scheduler.submit([1, 2], max_new_tokens=50, **TOKENS) for _ in range(3))
    scheduler.step()
    first.cancel()
    third.cancel()
    scheduler.step()
    assert (first.finish_reason, third.finish_reason) == ("cancelled", "cancelled")
    assert first.result().tokens == first.tokens
    assert second.tokens
    assert second.finish_reason is None


def test_deadlines(model):
    scheduler = Scheduler(model, max_sequences=1)
    running = scheduler.submit([1, 2], max_new_tokens=50, deadline=60.0, **TOKENS)
    waiting = scheduler.submit([1, 2], deadline=1e-9, **TOKENS)
    scheduler.step()
    assert (waiting.finish_reason, waiting.tokens) == ("deadline", [])
    assert running.finish_reason is None
    scheduler._running[0].deadline = 0.0
    scheduler.step()
    assert running.finish_reason == "deadline"


# Errors


def test_an_error_is_that_of_one_request_alone(model, monkeypatch):
    scheduler = Scheduler(model)
    streams = [scheduler.submit([number, 2], max_new_tokens=5, **TOKENS) for number in range(3)]
    scheduler.step()
    slot = scheduler._running[1].slot.number

    def refusing(read):
        def refuse(ids, cache, sequences, bits):
            if slot in sequences:
                raise OtaroError("this one")
            return read(ids, cache, sequences, bits)

        return refuse

    with monkeypatch.context() as patch:
        for name in ("step", "begin")[: 1 + scheduler.decoder.ahead]:
            patch.setattr(scheduler.decoder, name, refusing(getattr(scheduler.decoder, name)))
        if scheduler.decoder.ahead:
            patch.setattr(scheduler.decoder, "goes_on", lambda begun: False)  # it begins anew
        finish(scheduler)
    with pytest.raises(OtaroError, match="this one"):
        streams[1].text()
    assert streams[1].finish_reason == "error"
    for number in (0, 2):
        assert (
            streams[number].tokens
            == scheduler.submit([number, 2], max_new_tokens=5, **TOKENS).result().tokens
        )


def test_what_the_cache_cannot_hold_while_ahead_is_one_requests_error(model, kind, monkeypatch):
    """It is noticed at once, if not in whose step."""
    if kind == "cpu":
        pytest.skip("a CPU has nothing to go ahead with")
    scheduler = Scheduler(model)
    streams = [scheduler.submit([number, 2], max_new_tokens=8, **TOKENS) for number in range(3)]
    scheduler.step()
    refused, plain, step = scheduler.cache.kv_cache.refused, GpuDecoder.advance, GpuDecoder.step
    wrong, steps = scheduler._running[2].slot.number, []

    def advance(decoder):
        if len(streams[2].tokens) == 4 and streams[2].finish_reason is None:
            refused.fill_(1)
        return plain(decoder)

    def alone(decoder, ids, cache, sequences, bits):
        steps.append(list(sequences))
        if wrong in sequences:
            refused.fill_(1)
        return step(decoder, ids, cache, sequences, bits)

    with monkeypatch.context() as patch:
        patch.setattr(GpuDecoder, "advance", advance)
        patch.setattr(GpuDecoder, "step", alone)
        finish(scheduler)
    assert steps == [[stream_slot] for stream_slot in (0, 1, 2)]
    with pytest.raises(OtaroError, match="cannot hold it"):
        streams[2].text()
    assert len(streams[2].tokens) == 4
    for number in (0, 1):
        assert (
            streams[number].tokens
            == scheduler.submit([number, 2], max_new_tokens=8, **TOKENS).result().tokens
        )


def test_logits_that_are_not_finite_are_an_error(model, monkeypatch):
    scheduler = Scheduler(model)
    broken = torch.full((120,), float("nan"))
    monkeypatch.setattr(scheduler.decoder, "forward", lambda *args, **kwargs: broken)
    monkeypatch.setattr(scheduler.decoder, "read", lambda *args, **kwargs: broken.unsqueeze(0))
    with pytest.raises(OtaroError, match="not finite"):
        scheduler.submit([1, 2], **TOKENS).result()


def test_what_cannot_be_is_refused_at_once(model, copy_of, make_nested):
    scheduler = Scheduler(model)
    for options, what in [
        ({"precision": "E5M9"}, "E5M9"),
        ({"precision": ["E5M4"]}, "a request has one precision"),
        ({"precision": "E5M4", "decode": "E5M3"}, "give either precision"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": 1.5}, "max_new_tokens=1.5"),
        ({"max_new_tokens": "5"}, "max_new_tokens='5'"),
        ({"deadline": 0}, "deadline=0"),
        ({"logprobs": 121}, "logprobs=121"),
        ({"watched": [3, 120]}, "token 120"),
        ({"priority": 0.5}, "priority=0.5"),
        ({"stop": [""]}, "an empty text"),
        ({"stop": [b"x"]}, "stop=b'x': give texts, or tokens"),
        ({"stop": b"x"}, "stop=b'x': give texts, or tokens"),
        ({"stop": 1.5}, "stop=1.5: give texts, or tokens"),
        ({"deadline": "5"}, "deadline='5': give seconds"),
        ({"sampling": {"temperature": 1}}, r"sampling=\{'temperature': 1\}: give an otaro.Sampling"),
        ({"logprobs": "2"}, "logprobs='2': give a number"),
        ({"watched": 3}, "watched=3: give tokens"),
        ({"watched": ["x"]}, "watched: 'x' is no token"),
        ({"draft": 5}, "draft=5: give a precision"),
        ({"precision": 5}, "precision=5: give one such as E5M4"),
    ]:
        with pytest.raises(OtaroError, match=what):
            scheduler.submit([1, 2], **{**TOKENS, **options})
    for prompt, what in [
        ([], "no token"),
        ([[1, 2]], "a flat list of tokens"),
        ([1.5], "a flat list of tokens"),
        (b"bytes", "a flat list of tokens"),
        (None, "a flat list of tokens"),
        ("half \ud800", "character 5 is half of a surrogate pair"),
        ([1, 120], "token 120 is not in the vocabulary of 120"),
        ([{"x": 1}], 'message 0 has no role; give {"role": "user", "content": "..."}'),
        ([{"role": "user", "content": "Hi"}, "Hi"], "message 1 has no role"),
        ([{"role": "user"}], "message 0 has no text as its content"),
        ([{"role": "user", "content": 5}], "message 0 has no text as its content"),
        ([{"role": "user", "content": "\ud800"}], "the content of message 0 is no Unicode text"),
    ]:
        with pytest.raises(OtaroError, match=what):
            scheduler.submit(prompt, **TOKENS)
    with pytest.raises(OtaroError, match=r"has no tokenizer.*or give tokens with text=False"):
        scheduler.submit([1, 2])
    assert len(Scheduler(model).submit([1, 2], max_new_tokens=np.int64(2), **TOKENS).result().tokens) == 2
    for options in ({"max_sequences": 0}, {"max_sequences": 65}, {"chunk": 0}, {"cache_bytes": -1}):
        with pytest.raises(OtaroError, match=f"{next(iter(options))}={next(iter(options.values()))}"):
            Scheduler(model, **options)
    assert scheduler.waiting == 0
    coarse = otaro.load(copy_of(make_nested("llama"), planes=(3, 4)))
    stream = Scheduler(coarse).submit([1, 2], max_new_tokens=3, **TOKENS)
    with pytest.raises(ShardMissingError, match="E5M8 needs"):
        stream.set_precision("E5M8")
    assert len(stream.result().tokens) == 3


class Wordless:
    """A tokenizer, as far as messages are concerned."""

    chat_template: str | None = None
    all_special_tokens: tuple[str, ...] = ()

    def apply_chat_template(self, messages, **options):
        return "a" + messages[0]["content"]


def test_messages_to_a_model_without_a_chat_template_are_refused_in_words(model):
    scheduler = Scheduler(model, tokenizer=Wordless())
    for messages in ([{"role": "user", "content": "Hi"}], [{"role": "system", "content": "Be brief."}]):
        with pytest.raises(
            OtaroError, match="this model has no chat template, so it takes no messages; give"
        ):
            scheduler.submit(messages, **TOKENS)


def test_what_a_chat_template_stumbles_over_is_refused(model):
    tokenizer = Wordless()
    tokenizer.chat_template = "a template"
    with pytest.raises(OtaroError, match="the model's chat template refuses these messages: can only conc"):
        Scheduler(model, tokenizer=tokenizer).submit([{"role": "user", "content": ["parts"]}], **TOKENS)


def test_none_stops_and_none_is_watched(model):
    stream = Scheduler(model).submit([1, 2], max_new_tokens=2, stop=None, watched=None, **TOKENS)
    assert len(stream.result().tokens) == 2


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
def test_sampling_takes_finite_numbers(name, number):
    with pytest.raises(OtaroError, match=f"{name}={number}: give a finite number"):
        otaro.Sampling(**{name: number})


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_p": 0}, {"top_k": 1.5}, {"min_p": 2}, {"seed": -1}]
)
def test_sampling_that_cannot_be(wrong):
    with pytest.raises(OtaroError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))}: give"):
        otaro.Sampling(**wrong)


# What is told


def test_log_probabilities_are_the_models_own(model, logits_seen):
    stream = Scheduler(model).submit(
        [1, 2], max_new_tokens=3, logprobs=2, sampling=otaro.Sampling(2.0, seed=1), precision="E5M4", **TOKENS
    )
    stream.text()
    for token, logits in zip(stream, logits_seen[stream], strict=True):
        every = logits[0].log_softmax(0)
        assert token.logprob == float(every[token.id])
        assert [one for one, _ in token.top] == every.topk(2).indices.tolist()
        assert token.watched == ()


def test_watched_tokens_are_told_whatever_is_chosen(model, logits_seen):
    stream = Scheduler(model).submit([1, 2], max_new_tokens=2, watched=[7, 3, 7], precision="E5M4", **TOKENS)
    stream.text()
    for token, logits in zip(stream, logits_seen[stream], strict=True):
        every = logits[0].log_softmax(0)
        assert token.watched == tuple(every[[7, 3, 7]].tolist())
        assert token.logprob is None


def test_figures(model):
    stream = Scheduler(model).submit([1, 2, 3], precision={0: "E5M8", 2: "E5M3"}, max_new_tokens=4, **TOKENS)
    figures = stream.result().figures
    assert (figures.prompt_tokens, figures.new_tokens, figures.precisions) == (3, 4, ["E5M8", "E5M3"])
    assert min(figures.queue_seconds, figures.prefill_seconds, figures.decode_seconds) > 0
    assert figures.cache_bytes > 0


# The thread


def test_threads_submit_and_read_at_will(model):
    prompts = [[number, 7, 9] for number in range(20)]
    expected = [
        Scheduler(model).submit(prompt, max_new_tokens=5, **TOKENS).result().tokens for prompt in prompts
    ]
    got = {}
    with otaro.Engine(model, max_sequences=3) as engine:

        def ask(number):
            got[number] = [token.id for token in engine.submit(prompts[number], max_new_tokens=5, **TOKENS)]

        async def ask_in_a_loop(number):
            stream = engine.submit(prompts[number], max_new_tokens=5, **TOKENS)
            got[number] = [token.id async for token in stream]

        async def ask_many():
            await asyncio.gather(*(ask_in_a_loop(number) for number in range(10, 20)))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(10)]
        for thread in threads:
            thread.start()
        asyncio.run(ask_many())
        for thread in threads:
            thread.join()
    assert [got[number] for number in range(20)] == expected
    with pytest.raises(OtaroError, match="this engine is closed"):
        engine.submit([1])


@pytest.mark.parametrize("odd", ["nonsense", "by_thread"])
def test_an_option_that_there_is_none_of_is_refused_by_the_name_of_what_was_called(model, odd):
    with otaro.Engine(model) as engine:
        with pytest.raises(TypeError) as refused:
            engine.submit([1, 2], **{odd: 1}, **TOKENS)
        assert engine.waiting == engine.running == 0
    told = str(refused.value)
    assert told.startswith(f"Engine.submit() takes no {odd}; what it takes beside the prompt: precision, ")
    assert "Scheduler" not in told


@pytest.mark.parametrize("there", [True, False])
def test_a_loop_is_free_between_two_tokens(model, there):
    """Also where none has to be waited for: others of a server would wait for all of an answer."""
    stream, turns = Scheduler(model).submit([1, 2], max_new_tokens=8, **TOKENS), 0
    if there:
        stream.result()

    async def read():
        other = asyncio.ensure_future(count())
        seen = [turns async for _ in stream]
        other.cancel()
        return seen

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    seen = asyncio.run(read())
    assert len(seen) == 8
    assert all(before < after for before, after in itertools.pairwise(seen))


def test_closing_finishes_or_cancels(model, monkeypatch):
    engine = otaro.Engine(model)
    stream = engine.submit([1, 2], max_new_tokens=30, **TOKENS)
    engine.close()
    assert stream.finish_reason == "length"
    engine, told = otaro.Engine(model), threading.Event()
    step, cancel_all = engine.scheduler.step, engine.scheduler.cancel_all
    monkeypatch.setattr(engine.scheduler, "step", lambda: told.wait() and step())  # not done before
    monkeypatch.setattr(engine.scheduler, "cancel_all", lambda: (cancel_all(), told.set()))
    stream = engine.submit([1, 2], max_new_tokens=60, **TOKENS)
    with pytest.raises(ZeroDivisionError), engine:
        raise ZeroDivisionError
    assert stream.finish_reason == "cancelled"


def test_a_stream_keeps_its_engine_and_nothing_keeps_the_thread(model):
    before = threading.active_count()
    stream = otaro.Engine(model).submit([1, 2], max_new_tokens=8, **TOKENS)
    gc.collect()
    assert len(stream.result().tokens) == 8
    del stream
    deadline = time.monotonic() + 60
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.01)


def told_by_fork(work):
    """What `work` returns in a forked process; empty where that hangs."""
    reading, writing = os.pipe()
    with warnings.catch_warnings(action="ignore"):  # of forks beside threads
        child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            told = work()
        except BaseException as error:
            told = repr(error)
        os.write(writing, told.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return told


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no forks")
def test_a_forked_process_is_refused_and_does_not_hang(model):
    engine = otaro.Engine(model)
    done = engine.submit([1, 2], max_new_tokens=3, **TOKENS)
    tokens = done.result().tokens
    waiting = Stream(lambda precision: None, lambda: None, None)

    async def first():
        return [token async for token in waiting]

    def use():
        refused = []
        for ask in (
            lambda: engine.submit([1, 2], **TOKENS),
            waiting.text,
            lambda: asyncio.run(first()),
        ):
            try:
                ask()
            except OtaroError as error:
                refused.append(str(error).partition(" belongs to ")[0])
        said = done.result().tokens
        engine._stop()
        with engine:
            pass
        engine.close(wait=False)
        return f"{refused} {engine.alive} {said}"

    with engine._lock:  # which nobody there gives back
        told = told_by_fork(use)
    assert told == f"{['this engine', 'this answer', 'this answer']} False {tokens}"
    assert engine.submit([1, 2], max_new_tokens=3, **TOKENS).result().tokens == tokens
    engine.close()


def test_an_engine_that_breaks_tells_everybody(model, monkeypatch):
    engine = otaro.Engine(model)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setattr(engine.scheduler, "_admit", lambda: 1 / 0)
    stream = engine.submit([1, 2], **TOKENS)
    with pytest.raises(ZeroDivisionError):
        stream.text()
    engine.close()
    with pytest.raises(OtaroError, match="closed"):
        engine.submit([1, 2], **TOKENS)


def test_a_precision_may_change_on_the_way(model):
    stream = Scheduler(model).submit([1, 2], precision="E5M8", max_new_tokens=6, **TOKENS)
    for number, _ in enumerate(stream):
        if number == 2:
            stream.set_precision("E5M3")
    assert stream.figures.precisions == ["E5M8", "E5M3"]
    assert stream.finish_reason == "length"


def test_a_model_that_no_decoder_serves_is_refused(make_nested):
    hooked = otaro.load(make_nested("llama"))
    hooked.lm_head.register_forward_hook(lambda *args: None)
    with pytest.raises(OtaroError, match="none serves this model: it has forward hooks"):
        Scheduler(hooked)
    with pytest.raises(OtaroError, match="this Linear has no precision to switch"):
        Scheduler(torch.nn.Linear(2, 2))
