"""One model in many threads: every answer is, bit for bit, what one thread alone gets, first uses included.

A round loads a model at E5M3, so that no plane, no angle and no decoder is there yet, and lets eight threads
loose on it. Afterwards the model must be sound: what raced must have left nothing behind. A few rounds are
part of `make test`;

    OTARO_STRESS_SECONDS=600 python -m pytest tests/runtime/test_threads.py

goes on for ten minutes, with other choices in every round.
"""

import os
import random
import sys
import threading
import time
from functools import cache

import pytest
import torch
from transformers import DynamicCache

import otaro
from otaro.errors import OtaroError
from otaro.kernels import cpu
from otaro.runtime import serving
from otaro.runtime.decode import Decoder
from otaro.runtime.gpu import GpuDecoder
from otaro.runtime.report import Generation

pytestmark = pytest.mark.skipif(bool(cpu.MISSING), reason=cpu.MISSING or "built")

SECONDS = float(os.environ.get("OTARO_STRESS_SECONDS", "4"))
NAMES = [str(precision) for precision in otaro.PRECISIONS]
OPTIONS = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SHORT = [(11 * i + 5) % 120 for i in range(9)]
LONG = [(7 * i + i * i // 3) % 120 for i in range(1020)]  # generating goes past the first 1024 positions
LONGER = LONG * 2 + SHORT  # and past the second


@pytest.fixture(autouse=True)
def _threads_change_often():
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


def at_once(jobs):
    """Their results, all begun at the same moment; what one of them raised is raised."""
    found, start = [None] * len(jobs), threading.Barrier(len(jobs))

    def work(number):
        start.wait()
        try:
            found[number] = jobs[number]()
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


def generated(model, ids, rows=1, **options):
    """New tokens, and at which precisions this generation says that it ran."""
    report = Generation()
    if options.pop("by_transformers", False):
        options["past_key_values"] = DynamicCache(config=model.config)
    inputs = torch.tensor([ids] * rows)
    output = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), report=report, **{**OPTIONS, **options}
    )
    return output[:, len(ids) :].tolist(), report.precisions


def choices(rng):
    """What a thread may ask of `generate`: precisions of its own, at any length, by either way."""
    ids = rng.choice([SHORT, SHORT, SHORT, SHORT, LONG, LONGER])
    one, other = rng.choice(NAMES), rng.choice(NAMES)
    return ids, rng.choice(
        [
            {"precision": one},
            {"precision": one, "kv": "E5M7"},
            {"prefill": one, "decode": other},
            {"schedule": {0: one, 3: {"*": other, "lm_head": "E5M8"}}},
            *(
                [{"precision": one, "by_transformers": True}, {"precision": one, "rows": 2}]
                if ids is SHORT
                else []
            ),
        ]
    )


@pytest.mark.parametrize("architecture", ["qwen2", "llama_tied"])
def test_threads_get_what_one_thread_gets(make_nested, architecture):
    directory = make_nested(architecture)
    alone = otaro.load(directory)

    @cache
    def truth(length, options):
        return generated(alone, [SHORT, LONG, LONGER][length], **eval(options))

    def expected(ids, options):
        return truth([len(SHORT), len(LONG), len(LONGER)].index(len(ids)), repr(options))

    began, rounds = time.monotonic(), 0
    while rounds < 2 or time.monotonic() - began < SECONDS / 2:
        rng = random.Random(f"{architecture} {rounds}")
        model, asked = otaro.load(directory, "E5M3"), [choices(rng) for _ in range(8)]
        done = threading.Event()

        def disturb(model=model, rng=rng, done=done):
            """Switches and trims for as long as the others generate: none of their business."""
            while not done.is_set():
                otaro.set_precision(model, rng.choice([*NAMES, {"*": "E5M4", "lm_head": "E5M7"}]))
                otaro.trim(model)
                assert serving.decoder_of(model).new_cache().length == 0
                time.sleep(1e-3)

        disturbing = [threading.Thread(target=disturb) for _ in range(2)]
        for thread in disturbing:
            thread.start()
        try:
            found = at_once(
                [lambda model=model, one=one: generated(model, one[0], **one[1]) for one in asked]
            )
        finally:
            done.set()
            for thread in disturbing:
                thread.join()
        for one, answer in zip(asked, found, strict=True):
            assert answer == expected(*one), (rounds, one[1])
        for name in NAMES:  # what the threads left behind
            otaro.set_precision(model, name)
            ids = LONGER if name == "E5M8" else SHORT
            assert generated(model, ids)[0] == expected(ids, {"precision": name})[0], (rounds, name)
        rounds += 1


def test_planes_that_threads_map_at_once_get_their_own_names(make_nested):
    """As many threads as there are go from E5M3 to E5M8: what each of them computes then is right."""
    truth = generated(otaro.load(make_nested("qwen2"), "E5M8"), SHORT)

    def switched(model):
        otaro.set_precision(model, "E5M8")
        return generated(model, SHORT)

    for _ in range(6):
        model = otaro.load(make_nested("qwen2"), "E5M3")
        assert at_once([lambda model=model: switched(model)] * 8) == [truth] * 8
        for module in model.sefp.modules.values():
            for plane in range(4, 9):
                stored = model.sefp.nested.plane(plane).tensor(module.packed.name)
                assert torch.equal(
                    getattr(module.packed, f"plane{plane}"), stored.reshape(-1, stored.shape[-1])
                )


def test_of_switches_at_once_one_is_the_last_for_all_modules(make_nested):
    model = otaro.load(make_nested("qwen2"))
    decoder, seen = serving.decoder_of(model), []

    class Slow(dict):
        """A module in their midst that takes its time."""

        def __setitem__(self, name, value):
            time.sleep(1e-4)

    model.sefp.states.insert(8, Slow())

    def switch(name):
        for _ in range(20):
            otaro.set_precision(model, name)
            seen.append(set(decoder.description.precisions()))

    at_once([lambda name=name: switch(name) for name in NAMES])
    assert len(seen) == 120
    assert all(len(bits) == 1 for bits in seen)


def test_threads_that_come_first_get_one_decoder(make_nested):
    for _ in range(5):
        model = otaro.load(make_nested("qwen2"))
        assert len(set(map(id, at_once([lambda model=model: serving.decoder_of(model)] * 8)))) == 1


def test_threads_extend_the_positions_once(make_nested):
    model = otaro.load(make_nested("qwen2"), "E5M4")
    decoder = Decoder.of(model)
    expected = decoder.forward(LONGER, decoder.new_cache())
    for _ in range(3):
        decoder = Decoder.of(model)
        at_once([lambda decoder=decoder: decoder.forward(LONG, decoder.new_cache())] * 4)
        assert decoder._native.positions == 1024
        answers = at_once([lambda decoder=decoder: decoder.forward(LONGER, decoder.new_cache())] * 4)
        assert decoder._native.positions == 3072
        assert all(torch.equal(answer, expected) for answer in answers)


def test_a_cache_that_threads_share_is_read_one_by_one(make_nested):
    decoder = Decoder.of(otaro.load(make_nested("qwen2"), "E5M4"))
    shared, lengths = decoder.new_cache(), []
    # more than one call of the extension: in whichever order threads come, the cache holds the same
    same = [5] * 70

    def read():
        for _ in range(5):
            decoder.forward(same, shared)
            lengths.append((shared.length, shared.nbytes))

    at_once([read] * 4)
    fresh = decoder.new_cache()
    decoder.forward(same * 20, fresh)
    assert shared.length == fresh.length == 1400
    assert torch.equal(decoder.forward(SHORT, shared), decoder.forward(SHORT, fresh))

    def refused():
        for _ in range(20):
            with pytest.raises(OtaroError, match="token 999"):
                decoder.forward([*same, 999], shared)

    def crop():
        for _ in range(20):
            shared.crop(1409)
            assert shared.length <= 1409

    at_once([refused, crop, refused, crop])
    assert shared.length == 1409


def test_a_cache_serves_one_generation_at_a_time(make_nested):
    model = otaro.load(make_nested("qwen2"), "E5M4")
    cache, refusals = serving.decoder_of(model).new_cache(), []

    class Second:
        """Another thread comes while tokens are produced."""

        def put(self, value):
            if value.dim() == 1 and not refusals:
                with pytest.raises(OtaroError, match="another generation is using this cache") as refused:
                    at_once([lambda: generated(model, SHORT, past_key_values=cache)])
                refusals.append(refused.value)

        def end(self):
            pass

    first = generated(model, SHORT, past_key_values=cache, streamer=Second())
    assert (first, len(refusals)) == (generated(model, SHORT), 1)
    cache.crop(0)
    assert generated(model, SHORT, past_key_values=cache) == first


@pytest.mark.usefixtures("swift_products")
def test_threads_on_the_decoder_of_a_gpu_get_what_one_thread_gets(make_nested, monkeypatch):
    """With its steps in torch: precisions of their own, by phase and by row, while the model has others."""
    monkeypatch.setattr(serving, "kind_of", lambda model: GpuDecoder)
    directory = make_nested("llama")
    asked = [
        {"precision": "E5M3"},
        {"precision": "E5M8"},
        {"prefill": "E5M8", "decode": "E5M4"},
        {"rows": 2, "precision": ["E5M5", {"*": "E5M4", "lm_head": "E5M8"}]},
        {"schedule": {0: "E5M4", 2: "E5M7"}, "kv": "E5M6"},
        {"precision": "E5M6", "repetition_penalty": 1.1},
    ]
    alone = otaro.load(directory, dtype=torch.float32)
    expected = [generated(alone, SHORT, **options) for options in asked]
    model, done = otaro.load(directory, "E5M3", dtype=torch.float32), threading.Event()

    def disturb():
        while not done.is_set():
            otaro.set_precision(model, random.choice(NAMES))
            decoder = serving.decoder_of(model)
            decoder.forward(SHORT, decoder.new_cache())

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        found = at_once([lambda options=options: generated(model, SHORT, **options) for options in asked])
    finally:
        done.set()
        thread.join()
    assert found == expected
