"""Text as it comes: whole characters, no part of a stop, and nothing lost."""

import random
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import otaro
from otaro.builtin import MODEL_DIR
from otaro.kernels import cpu
from otaro.runtime.pieces import Pieces
from otaro.runtime.scheduler import Scheduler

NEEDS_DECODER = pytest.mark.skipif(bool(cpu.MISSING), reason=str(cpu.MISSING))
TEXT = "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich; 木曜日 🙂👩‍🚀 e\u0301nd.\n"


@pytest.fixture(scope="module")
def byte_level():
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def byte_fallback():
    """As SentencePiece models are converted: words begin with a ▁, dropped at the beginning of a text."""
    words = ["<unk>", "</s>", "▁a", "▁word", "s", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def told(pieces, ids):
    """Pieces until a stop, and what was held back at the end."""
    found = []
    for token in ids:
        found.append(pieces.add(token))
        if pieces.stopped_by is not None:
            return found
    return [*found, pieces.end()]


def test_no_piece_splits_a_character_and_together_they_are_the_text(byte_level):
    prompt, ids = byte_level("say:")["input_ids"], byte_level(TEXT, add_special_tokens=False)["input_ids"]
    pieces = told(Pieces(byte_level, prompt), ids)
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert sum(map(bool, pieces)) > 20


def test_a_word_keeps_the_space_before_it(byte_fallback):
    a, word, s, first = (byte_fallback.convert_tokens_to_ids(one) for one in ("▁a", "▁word", "s", "<0x00>"))
    letters = [first + byte for byte in "ö🙂".encode()]
    pieces = told(
        Pieces(byte_fallback, [a, word]), [word, s, byte_fallback.eos_token_id, word, *letters, *letters, a]
    )
    assert pieces == [" word", "s", "", " word", *["", "ö", "", "", "", "🙂"] * 2, " a", ""]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_a_model_says_nothing_is_lost_and_nothing_held_for_ever(byte_level, seed):
    draw = random.Random(seed)
    # of byte-level tokenizers: parts of characters, and others
    letters = byte_level.convert_tokens_to_ids(list("ÃðŁĺĤab"))
    prompt, ids = [5, 6], [draw.choice(letters) for _ in range(200)]
    pieces = told(Pieces(byte_level, prompt), ids)
    whole = byte_level.decode([*prompt, *ids], skip_special_tokens=True)[len(byte_level.decode(prompt)) :]
    assert "".join(pieces).replace("\ufffd", "") == whole.replace("\ufffd", "")
    assert max(len(run) for run in "".join("x" if piece else "-" for piece in pieces).split("x")) < 16


@pytest.mark.parametrize(
    ("stops", "expected", "by"),
    [
        (["Viktor"], "Zwölf Boxkämpfer jagen ", "Viktor"),
        (["er quer", "jagen V"], "Zwölf Boxkämpfer ", "jagen V"),
        (["ö"], "Zw", "ö"),
        (["jagen Viktoria", "Deich;;"], TEXT, None),  # both begin, neither comes
        (["\n\n", ".\n"], TEXT[:-2], ".\n"),
    ],
)
def test_a_stop_is_found_wherever_tokens_end_and_is_not_told(byte_level, stops, expected, by):
    ids = byte_level(TEXT, add_special_tokens=False)["input_ids"]
    pieces = Pieces(byte_level, [5], stops)
    found = told(pieces, ids)
    assert "".join(found) == expected
    assert pieces.stopped_by == by


@NEEDS_DECODER
def test_a_stop_ends_an_answer(tiny):
    scheduler = Scheduler(otaro.load(tiny))
    prompt = "def read(self"
    whole = scheduler.submit(prompt, max_new_tokens=30).result()
    stop = whole.text[8:14]
    stream = scheduler.submit(prompt, max_new_tokens=30, stop=["never", stop])
    answer = stream.result()
    assert (answer.text, answer.finish_reason, stream.stopped_by) == (
        whole.text[: whole.text.index(stop)],
        "stop",
        stop,
    )
    assert len(answer.tokens) < 30
    token = whole.tokens[5]
    stream = scheduler.submit(prompt, max_new_tokens=30, stop=[token])
    assert stream.result().tokens == whole.tokens[: whole.tokens.index(token) + 1]
    assert (stream.finish_reason, stream.stopped_by) == ("stop", token)
    assert stream.text() == scheduler.tokenizer.decode(stream.tokens[:-1])
    assert "".join(piece.text for piece in scheduler.submit(prompt, max_new_tokens=30)) == whole.text


@NEEDS_DECODER
def test_a_special_token_stops_by_its_name(tiny):
    scheduler = Scheduler(otaro.load(tiny))
    special = scheduler.tokenizer.all_special_tokens[0]
    scheduler.submit("def read(self", stop=special, ignore_eos=True)
    assert scheduler._arrived[-1].ends == {scheduler.tokenizer.convert_tokens_to_ids(special)}


@NEEDS_DECODER
def test_messages_go_through_the_chat_template(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    scheduler = Scheduler(otaro.load(tiny), tokenizer=tokenizer)
    asked = scheduler.submit([{"role": "user", "content": "def"}], max_new_tokens=8)
    assert asked.text() == scheduler.submit("user: def\nassistant:", max_new_tokens=8).text()


@NEEDS_DECODER
def test_the_example_of_the_documentation_runs(tiny, capsys):
    text = (Path(__file__).parents[2] / "docs" / "engine.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    exec(code.replace("demo/tiny", str(tiny)), {})
    assert "['E5M8']" in capsys.readouterr().out
