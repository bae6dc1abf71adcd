"""`generate` by the GPU's decoder: on a GPU, and on any machine with its steps in torch.

Rows of a batch must be to the last token what each of them is alone.
"""

import gc
import threading
import weakref

import pytest
import torch
from transformers import AutoTokenizer, DynamicCache, StoppingCriteria

import otaro
from otaro.errors import OtaroError, PrecisionError, ShardMissingError
from otaro.kernels import cpu
from otaro.runtime import serving
from otaro.runtime.architectures import packed_modules
from otaro.runtime.gpu import GpuDecoder
from otaro.runtime.session import ChatSession

NO_GPU = "this machine has no GPU that torch can use"
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)
pytestmark = pytest.mark.usefixtures("swift_products")
ROWS = [[5, 17, 99, 3, 64], [20, 7, 81, 33, 110, 54, 2, 9], [70, 71, 4, 90, 13, 100]]
PAD = 0
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=ON_GPU)])
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def _decoder_of_a_gpu(request, monkeypatch):
    """Tests for both devices take the GPU's decoder on a CPU too."""
    if "device" in request.fixturenames:
        monkeypatch.setattr(serving, "kind_of", lambda model: GpuDecoder)


@pytest.fixture(scope="module")
def model(make_nested, device):
    return otaro.load(make_nested("llama"), "E5M4", device=device, dtype=torch.float32)


def padded(model, rows=ROWS):
    """Rows filled up on their left, and the mask that says so."""
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
    return {"input_ids": ids, "attention_mask": mask}


def by_decoder(model, rows=ROWS, **options):
    inputs = padded(model, rows)
    output = model.generate(**inputs, **{**OPTIONS, **options})
    assert model.generation.served_by == "decoder", model.generation.reason
    return output


def new_tokens(output, rows=ROWS):
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    return sequences[:, max(map(len, rows)) :].tolist()


def alone(model, row, **options):
    return new_tokens(by_decoder(model, [row], **options), [row])[0]


class Streamer:
    """Remembers what it is given, and does something after so many calls; the first is the prompt."""

    def __init__(self, do=lambda calls: None):
        self.seen, self.ended, self.do = [], False, do

    def put(self, value):
        self.seen.append(value.tolist())
        self.do(len(self.seen))

    def end(self):
        self.ended = True


class Never(StoppingCriteria):
    """Looks on, and ends nothing."""

    def __call__(self, ids, scores, **kwargs):
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


def test_rows_of_a_batch_are_what_they_are_alone(model):
    together = new_tokens(by_decoder(model))
    assert model.generation.prompt_tokens == max(map(len, ROWS))
    assert together == [alone(model, row) for row in ROWS]
    how = model.generation
    assert (how.prompt_tokens, how.new_tokens, how.precisions) == (len(ROWS[2]), 12, ["E5M4"])
    assert how.cache_bytes > 0


def test_running_ahead_changes_nothing(model):
    ahead = by_decoder(model)
    for options in (
        {"streamer": Streamer()},
        {"stopping_criteria": [Never()]},
        {"return_dict_in_generate": True, "output_scores": True},
        {"repetition_penalty": 1.0 + 1e-9},
    ):
        assert new_tokens(by_decoder(model, **options)) == new_tokens(ahead), options


def test_a_streamer_and_criteria_may_look_on_while_the_device_is_ahead(model, monkeypatch):
    """Nothing is begun that is known not to be wanted, and what a switch makes wrong is made again."""
    begun, plain = [], GpuDecoder.advance
    monkeypatch.setattr(GpuDecoder, "advance", lambda decoder: begun.append(len(seen.seen)) or plain(decoder))
    for options in ({}, {"stopping_criteria": [Never()]}):
        seen = Streamer()
        alone(model, ROWS[0], streamer=seen, **options)
        assert begun == [2, *range(2, 12)]  # of 12 tokens the first came with the prompt
        begun.clear()
    seen = Streamer(lambda calls: otaro.set_precision(model, "E5M8") if calls == 5 else None)
    with otaro.at_precision(model, "E5M4"):
        alone(model, ROWS[0], streamer=seen)
    assert begun == [2, 2, 3, 4, 5, 5, *range(6, 12)]  # that begun at 4 was dropped


def test_rows_end_one_by_one_and_are_padded_then(model):
    usual = new_tokens(by_decoder(model))
    end = usual[1][4]
    lasts = [row.index(end) + 1 if end in row else 12 for row in usual]
    longest = max(lasts)
    expected = [(row[:last] + [PAD] * 12)[:longest] for row, last in zip(usual, lasts, strict=True)]
    for options in ({}, {"stopping_criteria": [Never()]}, {"streamer": Streamer()}):
        result = by_decoder(model, eos_token_id=end, return_dict_in_generate=True, **options)
        assert new_tokens(result) == expected
        lengths = [len(row) + last - 1 for row, last in zip(ROWS, lasts, strict=True)]
        assert result.past_key_values.lengths == lengths


def test_a_row_that_ended_leaves_the_others_alone_without_an_end_of_text(model):
    class Once(StoppingCriteria):
        """Ends the first row at once, the others after five tokens; nothing pads then, as in transformers."""

        def __call__(self, ids, scores, **kwargs):
            count = ids.shape[1] - max(map(len, ROWS))
            return torch.tensor([count == 1, count >= 5, count >= 5], device=ids.device)

    usual = new_tokens(by_decoder(model))
    assert new_tokens(by_decoder(model, stopping_criteria=[Once()])) == [row[:5] for row in usual]


def test_rows_may_have_precisions_of_their_own(model):
    names = ["E5M4", "E5M8", {"*": "E5M4", "lm_head": "E5M8"}]
    together = by_decoder(model, precision=names)
    assert model.generation.precisions == ["E5M4 / E5M8 / E5M4 to E5M8"]
    assert new_tokens(together) == [
        alone(model, row, precision=name) for row, name in zip(ROWS, names, strict=True)
    ]
    stepwise = by_decoder(model, precision=names, stopping_criteria=[Never()])
    assert torch.equal(together, stepwise)
    assert set(map(str, otaro.precisions_of(model).values())) == {"E5M4"}
    assert new_tokens(by_decoder(model, precision="E5M8")) == [
        alone(model, row, precision=["E5M8"]) for row in ROWS
    ]


def forced(model, row, precisions):
    """The likeliest tokens when step i runs at precisions[i], by the decoder one step at a time."""
    decoder, unread, found = serving.decoder_of(model), row, []
    cache = decoder.new_cache()
    for precision in precisions:
        with otaro.at_precision(model, precision):
            unread = [int(decoder.forward(unread, cache).argmax())]
        found += unread
    return found


def test_phases_begin_where_they_should(model):
    steps = [*["E5M8"] * 3, *["E5M4"] * 4, *["E5M8"] * 5]
    for options in ({}, {"streamer": Streamer()}, {"stopping_criteria": [Never()]}):
        output = by_decoder(model, schedule={0: "E5M8", 3: "E5M4", 7: "E5M8", 12: "E5M3"}, **options)
        assert new_tokens(output) == [forced(model, row, steps) for row in ROWS]
        assert model.generation.precisions == ["E5M8", "E5M4", "E5M8"]
    assert alone(model, ROWS[0], precision="E5M8") == forced(model, ROWS[0], ["E5M8"] * 12)
    assert alone(model, ROWS[0], prefill="E5M8") == forced(model, ROWS[0], ["E5M8", *["E5M4"] * 11])
    assert set(map(str, otaro.precisions_of(model).values())) == {"E5M4"}


def test_a_streamer_sees_every_token_and_may_switch(model):
    streamer = Streamer(lambda calls: otaro.set_precision(model, "E5M8") if calls == 5 else None)
    with otaro.at_precision(model, "E5M4"):
        found = alone(model, ROWS[0], streamer=streamer)
    assert streamer.seen == [[ROWS[0]], *([token] for token in found)]
    assert streamer.ended
    assert found == forced(model, ROWS[0], [*["E5M4"] * 4, *["E5M8"] * 8])


def test_a_cache_can_be_used_again(model):
    whole = by_decoder(model, ROWS[:2])
    first = by_decoder(model, ROWS[:2], max_new_tokens=5, return_dict_in_generate=True)
    cache = first.past_key_values
    rows = [row + new for row, new in zip(ROWS[:2], new_tokens(first, ROWS[:2]), strict=True)]
    assert cache.lengths == [len(row) - 1 for row in rows]
    second = by_decoder(model, rows, max_new_tokens=7, past_key_values=cache)
    assert new_tokens(second, rows) == [row[5:] for row in new_tokens(whole, ROWS[:2])]
    assert model.generation.reused_tokens == max(map(len, rows)) - 1
    with pytest.raises(OtaroError, match="pass all tokens"):
        by_decoder(model, rows, past_key_values=cache)
    with pytest.raises(OtaroError, match="another number of rows"):
        by_decoder(model, [rows[0] * 3], past_key_values=cache)


def test_a_prompt_longer_than_a_step(model):
    rows = [ROWS[0] * 8, ROWS[1]]
    assert new_tokens(by_decoder(model, rows), rows) == [alone(model, row) for row in rows]


def test_packed_keys_and_values(model):
    assert new_tokens(by_decoder(model, kv="E5M7")) == [alone(model, row, kv="E5M7") for row in ROWS]
    packed = model.generation.cache_bytes
    alone(model, ROWS[2])
    assert packed < model.generation.cache_bytes


@pytest.mark.parametrize("kv", [None, otaro.Precision("E5M7")], ids=["float16", "packed"])
@pytest.mark.parametrize("streamer", [None, Streamer()], ids=["ahead", "streamed"])
def test_what_a_cache_cannot_hold_is_refused(model, streamer, kv, monkeypatch):
    cache = serving.decoder_of(model).new_cache(kv, len(ROWS))
    plain = GpuDecoder.advance

    def too_large(decoder):
        cache.kv_cache.refused.fill_(1)
        return plain(decoder)

    monkeypatch.setattr(GpuDecoder, "advance", too_large)
    with pytest.raises(OtaroError, match="cannot hold it"):
        by_decoder(model, past_key_values=cache, streamer=streamer)
    assert cache.lengths == [0, 0, 0]
    cache.check()


def test_sampling_with_a_seed_says_the_same_again(model):
    def sampled(seed, **options):
        torch.manual_seed(seed)
        return new_tokens(by_decoder(model, do_sample=True, **options))

    for options in ({"top_p": 0.8}, {"temperature": 1.5, "top_k": 0}, {"min_p": 0.05}):
        assert sampled(3, **options) == sampled(3, **options)
        assert any(sampled(3, **options) != sampled(seed, **options) for seed in (4, 5, 6))


def test_processors_are_obeyed_in_every_row(model):
    usual = new_tokens(by_decoder(model))
    forbidden = [[row[3]] for row in usual]
    options = {
        "bad_words_ids": forbidden,
        "repetition_penalty": 1.3,
        "min_new_tokens": 4,
        "eos_token_id": usual[0][1],
    }
    changed = new_tokens(by_decoder(model, **options))
    assert not {token for [token] in forbidden} & {token for row in changed for token in row}
    assert all(usual[0][1] not in row[:4] for row in changed)


def test_threads_share_a_decoder(model):
    """Some run ahead and some are looked at after every token: each is alone with what it began."""
    expected = [alone(model, row) for row in ROWS]
    found = {}

    def work(number):
        options = {"streamer": Streamer()} if number % 2 else {}
        inputs = padded(model, [ROWS[number % 3]])
        output = model.generate(**inputs, **OPTIONS, **options)
        found[number] = output[0, inputs["input_ids"].shape[1] :].tolist()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: expected[number % 3] for number in range(6)}


def test_a_streamer_may_generate_itself(model):
    inner = []
    streamer = Streamer(lambda calls: inner.append(alone(model, ROWS[1])) if calls == 4 else None)
    expected = alone(model, ROWS[0]), alone(model, ROWS[1])
    assert (alone(model, ROWS[0], streamer=streamer), inner[0]) == expected


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_what_a_decoder_does_not_do_goes_through_transformers(model):
    inputs = padded(model)
    right = {"input_ids": inputs["input_ids"].flip(1), "attention_mask": inputs["attention_mask"].flip(1)}
    for given, options, reason in (
        (right, {}, "not on its left"),
        (padded(model, ROWS * 6), {}, "18 rows, and the decoder takes 16"),
        (inputs, {"num_beams": 2}, "beams"),
    ):
        model.generate(**given, **{**OPTIONS, "max_new_tokens": 2, **options})
        assert model.generation.served_by == "transformers"
        assert reason in model.generation.reason
        with pytest.raises(OtaroError, match="a precision for each row needs"):
            model.generate(**given, precision=["E5M4"] * 3, **{**OPTIONS, **options})


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_contradictions_are_refused(model, make_nested, copy_of, device):
    for options, message in (
        ({"precision": ["E5M4"] * 2}, "2 precisions were given for 3 rows"),
        ({"precision": "E5M4", "decode": "E5M8"}, "either precision"),
        ({"precision": ["E5M9"] * 3}, "E5M9"),
        ({"precision": 3}, "precision=3: give one such as E5M4, or a list"),
    ):
        with pytest.raises(PrecisionError, match=message):
            by_decoder(model, **options)
    partial = otaro.load(copy_of(make_nested("llama"), planes=(3, 4)), device=device, dtype=torch.float32)
    with pytest.raises(ShardMissingError, match="E5M8 needs"):
        by_decoder(partial, precision=["E5M4", "E5M8", "E5M4"])
    assert set(map(str, otaro.precisions_of(partial).values())) == {"E5M4"}


def test_a_conversation_keeps_its_cache(tiny, device):
    model = otaro.load(tiny, "E5M4", device=device)
    session = ChatSession(model, AutoTokenizer.from_pretrained(tiny), otaro.Precision("E5M7"))
    options = {"max_new_tokens": 6, "do_sample": False}
    session.reply("The module", **options)
    kept = session.cached_tokens
    assert kept == len(session._ids) - 1
    otaro.set_precision(model, "E5M8")
    session.reply("and more", **options)
    assert (model.generation.served_by, session.reused) == ("decoder", kept)
    assert model.generation.precisions == ["E5M8"]


def test_batches_say_what_transformers_says(make_nested, monkeypatch):
    monkeypatch.setattr(serving, "kind_of", lambda model: GpuDecoder)
    for name in ("llama_tied", "mistral", "qwen2", "qwen3"):
        model = otaro.load(make_nested(name), "E5M5")
        end = new_tokens(by_decoder(model))[1][4]
        options = {"eos_token_id": end, "repetition_penalty": 1.2}
        for some in ({}, {"eos_token_id": end}, options):
            theirs = model.generate(
                **padded(model), past_key_values=DynamicCache(config=model.config), **{**OPTIONS, **some}
            )
            assert model.generation.served_by == "transformers"
            assert torch.equal(by_decoder(model, **some), theirs)


@pytest.mark.skipif(bool(cpu.MISSING), reason=cpu.MISSING or "built")
def test_batches_on_a_cpu_say_what_their_rows_say_alone(make_nested):
    for name in ("llama", "qwen2", "qwen3_moe"):
        model, names = otaro.load(make_nested(name), "E5M4"), ["E5M8", "E5M3", "E5M5"]
        alone = [by_decoder(model, [row], precision=one) for row, one in zip(ROWS, names, strict=True)]
        together = by_decoder(model, precision=names)
        assert model.generation.precisions == ["E5M8 / E5M3 / E5M5"]
        expected = [new_tokens(one, [row])[0] for one, row in zip(alone, ROWS, strict=True)]
        assert new_tokens(together) == expected


# On a GPU alone


@ON_GPU
@pytest.mark.parametrize("kv", [None, "E5M7"])
def test_on_a_gpu_it_says_what_the_cpu_says(tiny, kv):
    """Logits of two orders of float32 sums differ a little: a token may, where the best leads by less."""
    here, there = (otaro.load(tiny, "E5M4", device=device, dtype=torch.float32) for device in ("cpu", "cuda"))
    ids = AutoTokenizer.from_pretrained(tiny)("The module", return_tensors="pt")["input_ids"]
    options = {**OPTIONS, "max_new_tokens": 40, "kv": kv}
    found = there.generate(ids.cuda(), **options)
    assert there.generation.served_by == "decoder", there.generation.reason
    stepwise = there.generate(ids.cuda(), return_dict_in_generate=True, output_logits=True, **options)
    assert torch.equal(stepwise.sequences, found)
    law = GpuDecoder.of(here) if cpu.MISSING else serving.decoder_of(here)
    cache = law.new_cache(kv and otaro.Precision(kv))
    expected = torch.stack([law.forward([token], cache) for token in found[0, :-1].tolist()])[
        ids.shape[1] - 1 :
    ]
    off = (torch.cat(stepwise.logits).cpu() - expected).abs().amax(-1)
    best = expected.topk(2).values
    decided = best[:, 0] - best[:, 1] > 2 * off
    assert torch.equal(expected.argmax(-1)[decided], found[0, ids.shape[1] :].cpu()[decided])
    assert decided.sum() >= 30  # of 40


@ON_GPU
def test_on_a_gpu_no_decoded_weight_is_kept(tiny):
    model = otaro.load(tiny, "E5M8", device="cuda")
    decoder = serving.decoder_of(model)
    cache = decoder.new_cache(capacity=512)
    decoder.reserve(cache, 512)
    ids = torch.arange(3, 303, device="cuda").unsqueeze(0)
    mask = torch.ones_like(ids)
    # What a step and a prompt take for themselves, the library's memory for each stream included
    model.generate(ids, attention_mask=mask, past_key_values=cache, precision="E5M4", **OPTIONS)
    cache.crop(0)
    before = torch.cuda.memory_allocated()
    model.generate(ids, attention_mask=mask, past_key_values=cache, **OPTIONS)
    assert model.generation.served_by == "decoder", model.generation.reason
    gc.collect()
    smallest = min(2 * module.packed.shape[0] * module.packed.shape[1] for module in packed_modules(model))
    assert torch.cuda.memory_allocated() - before < smallest


@ON_GPU
def test_on_a_gpu_a_directory_is_served_in_its_own_type(tiny):
    model = otaro.load(tiny, "E5M4", device="cuda")
    assert model.dtype == torch.float16
    ids = torch.tensor([[5, 6, 7]], device="cuda")
    assert model.generate(ids, **OPTIONS).shape == (1, 15)
    assert (model.generation.served_by, model.generation.reason) == ("decoder", "")


@ON_GPU
def test_on_a_gpu_a_small_batch_without_a_captured_step(make_nested):
    model = otaro.load(make_nested("llama"), "E5M4", device="cuda", dtype=torch.float32)
    decoder, found = serving.decoder_of(model), new_tokens(by_decoder(model, max_new_tokens=2))
    for row, expected in zip(ROWS, found, strict=True):
        decoder._occurred.clear()  # or the second step of a kind would be captured
        assert alone(model, row, max_new_tokens=2) == expected
    assert not decoder._graphs


def test_inference_mode_comes_and_goes(make_nested, device):
    """What a decoder keeps was once made inside, and must be writable outside; and the other way round."""
    with torch.inference_mode():
        model = otaro.load(make_nested("llama"), "E5M4", device=device, dtype=torch.float32)
        inside = by_decoder(model)
    assert torch.equal(by_decoder(model), inside)
    with torch.inference_mode():
        assert torch.equal(by_decoder(model), inside)


def test_a_model_that_moves_lets_go_of_its_decoder(make_nested, device):
    model = otaro.load(make_nested("llama"), "E5M4", device=device, dtype=torch.float32)
    by_decoder(model)
    decoder = weakref.ref(serving.decoder_of(model))
    model._apply(lambda tensor: tensor.clone())
    gc.collect()
    assert decoder() is None


def test_rooms_of_caches_that_are_gone_do_not_pile_up(make_nested, device):
    model = otaro.load(make_nested("llama"), "E5M4", device=device, dtype=torch.float32)
    for rows in (1, 2, 3):
        by_decoder(model, ROWS[:rows])
    decoder = serving.decoder_of(model)
    gc.collect()
    assert [spare.sequences for spare in decoder._spare][-1:] == [3]  # the last one has let go of it
    cache = decoder.new_cache(sequences=3, capacity=100)
    assert not decoder._spare
    cache.kv_cache.refused.fill_(1)
    assert cache.kv_cache.grown(1000).refused.item() == 1
    del cache
    gc.collect()
    assert decoder.new_cache(sequences=3).kv_cache.refused.item() == 0
