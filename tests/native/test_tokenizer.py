"""The tokenizer of otaro.h against the one that transformers uses, on texts of all kinds."""

import ctypes
import json
import random

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from otaro.builtin import MODEL_DIR, topics_training_text
from otaro.errors import OtaroError

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [
    "",
    " ",
    "Hello  world",
    "I'm sure we'll say it'S 'LL, they'Re 'ſ 12345 ½ ٣٤٥\u00a0x",
    "a\n\n  b\r\n\t c  \n",
    "  leading, trailing   ",
    "naïve café — “quotes”… ﬁ Å Å e\u0301\u0323 한국어 각 ㅎ 각 日本語テスト",
    "emoji 👩‍👩‍👧‍👦 🇨🇭 ❤️ 👍🏽 \U0001f9ff",
    "def f(x):\n    return {'a': [1, 2.5e-3]}  # §¶\x00\x01\x7f",
    "<s>a</s> <|im_start|>user\n<s><s>b <pad>c",
    "▁under ▁▁score",
    "עברית العربية हिन्दी ไทย \u200b\u200d\ufeff",
]


def random_texts(count: int) -> list[str]:
    choose = random.Random(0)
    kinds = [
        range(32, 127),
        range(0x250),
        range(0x3000),
        range(0x10000),
        range(0x110000),
        [9, 10, 13, 32, 0xA0, 0x2003],
    ]
    texts = []
    for _ in range(count):
        kind = choose.choice(kinds)
        codes = [
            choose.choice(choose.choice([kind, kinds[0], kinds[-1]])) for _ in range(choose.randrange(60))
        ]
        texts.append("".join(chr(code) for code in codes if not 0xD800 <= code <= 0xDFFF))
        texts.append(choose.randbytes(choose.randrange(40)).decode("utf-8", errors="replace"))
    return texts


class Native:
    """The tokenizer of otaro.h; whatever is refused raises."""

    def __init__(self, library, text):
        self.library, self.handle = library, ctypes.c_void_p(library.otaro_tokenizer_new())
        if library.otaro_tokenizer_read(self.handle, text.encode(), ctypes.c_size_t(len(text.encode()))):
            raise OtaroError(self.error())

    def __del__(self):
        self.library.otaro_tokenizer_free(self.handle)

    def error(self):
        return self.library.otaro_tokenizer_error(self.handle).decode()

    def encode(self, text, special=True):
        data = text if isinstance(text, bytes) else text.encode()
        room = (ctypes.c_int32 * (4 * len(data) + 8))()
        count = self.library.otaro_encode(
            self.handle, data, ctypes.c_size_t(len(data)), int(special), room, len(room)
        )
        if count < 0:
            raise OtaroError(self.error())
        return list(room[:count])

    def decode(self, ids):
        size, pieces = ctypes.c_size_t(), []
        for token in ids:
            start = self.library.otaro_piece(self.handle, token, ctypes.byref(size))
            pieces.append(ctypes.string_at(start, size.value) if size.value else b"")
        return b"".join(pieces).decode("utf-8", errors="replace")


def trained(pre_tokenizer, normalizer=None, decoder=None, **settings):
    """A small vocabulary of the built-in text."""
    tokenizer = Tokenizer(models.BPE(**settings))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    byte_level = decoder is None
    tokenizer.decoder = decoders.ByteLevel() if byte_level else decoder
    alphabet = pre_tokenizers.ByteLevel.alphabet() if byte_level else []
    special = (
        ["<s>", "</s>", "<|im_start|>"]
        if byte_level
        else ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=800, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator([topics_training_text()[:60_000]], trainer)
    return tokenizer


def split_by(pattern, *first):
    steps = [
        *first,
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(steps)


def llama2(normalizer=None, pre_tokenizer=None):
    """Characters, and bytes for those that are not known; trained with spaces that can be seen."""
    spaces = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = trained(
        pre_tokenizers.Metaspace(), None, spaces, byte_fallback=True, fuse_unk=True, unk_token="<unk>"
    )
    stated = json.loads(tokenizer.to_str())
    stated["pre_tokenizer"], stated["normalizer"] = pre_tokenizer, normalizer
    # In real vocabularies bytes are ordinary tokens: a text that spells one is not meant.
    stated["added_tokens"] = stated["added_tokens"][:2]
    return Tokenizer.from_str(json.dumps(stated))


MARKED = [
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
]
KINDS = {
    "built-in": lambda: Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")),
    "llama3": lambda: trained(split_by(LLAMA3)),
    "llama3 that ignores merges": lambda: trained(split_by(LLAMA3), ignore_merges=True),
    "qwen2": lambda: trained(split_by(LLAMA3.replace("{1,3}", "")), normalizers.NFC()),
    "smollm2": lambda: trained(
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
        )
    ),
    "digits together, a space before": lambda: trained(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=True)])
    ),
    "llama2": lambda: llama2({"type": "Sequence", "normalizers": MARKED}),
    "gemma": lambda: llama2(
        MARKED[1],
        {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
    ),
    "metaspace at the first word": lambda: llama2(
        None, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    ),
    "metaspace that splits": lambda: llama2(
        None, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_library(library, kind):
    theirs = KINDS[kind]()
    ours = Native(library, theirs.to_str())
    for text in [*TEXTS, topics_training_text()[:3000], *random_texts(400)]:
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids, repr(text)
        decoded = theirs.decode(ids)
        assert ours.decode(ids).removeprefix(" ") == decoded.removeprefix(" ") or "\ufffd" in decoded


def test_tokens_of_a_real_vocabulary_are_those_of_the_library(library, smollm2, shared_data):
    stated = (smollm2 / "tokenizer.json").read_text()
    theirs, ours = Tokenizer.from_str(stated), Native(library, stated)
    text = (shared_data / "wikitext-2" / "test.txt").read_text()
    for piece in [*(text[start : start + 5000] for start in range(0, len(text), 5000)), *random_texts(2000)]:
        assert ours.encode(piece) == theirs.encode(piece).ids


def test_special_tokens_begin_a_text_and_say_nothing(library):
    theirs = KINDS["llama3"]()
    stated = json.loads(theirs.to_str())
    sequence, begin = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<s>", "type_id": 0}}
    known = {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}
    template = {
        "type": "TemplateProcessing",
        "single": [begin, sequence, begin],
        "pair": [],
        "special_tokens": known,
    }
    stated["post_processor"] = {"type": "Sequence", "processors": [{"type": "ByteLevel"}, template]}
    stated["added_tokens"][2] |= {"lstrip": True, "rstrip": True}
    theirs_text = json.dumps(stated | {"post_processor": template})
    ours = Native(library, json.dumps(stated))
    assert ours.encode("a <|im_start|> \n b <s>") == [
        0,
        *Tokenizer.from_str(theirs_text).encode("a <|im_start|> \n b <s>", add_special_tokens=False).ids,
        0,
    ]
    assert ours.encode("a", special=False) == ours.encode("a")[1:-1]
    assert ours.decode(ours.encode("a<|im_start|>b")) == "ab"


REFUSED = {
    "Unigram": ({"model": {"type": "Unigram"}}, "no model Unigram"),
    "a lowercaser": ({"normalizer": {"type": "Lowercase"}}, "no normalizer Lowercase"),
    "a pattern": (
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": "(a+)+b"},
                "behavior": "Isolated",
                "invert": False,
            }
        },
        "no pattern to split by: ",
    ),
    "a pre-tokenizer": ({"pre_tokenizer": {"type": "BertPreTokenizer"}}, "no pre-tokenizer BertPreTokenizer"),
    "a decoder": ({"decoder": {"type": "WordPiece"}}, "no decoder WordPiece"),
    "a post-processor": ({"post_processor": {"type": "BertProcessing"}}, "no post-processor BertProcessing"),
    "a huge number": (
        {"added_tokens": [{"id": 10**12, "content": "x"}]},
        "an added token has no text or no number",
    ),
    "a merge of nothing": (
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}},
        "merge 0 is of tokens that are not in the vocabulary",
    ),
    "dropout": ({"model": {"type": "BPE", "dropout": 0.1}}, "no setting dropout"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_known_is_refused_by_name(library, what):
    changes, words = REFUSED[what]
    stated = json.loads((MODEL_DIR / "tokenizer.json").read_text()) | changes
    with pytest.raises(OtaroError, match=words):
        Native(library, json.dumps(stated))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1", '{"a":1,"a":2}', '{"a":01}', '"\\ud800"', '"\x01"', "[" * 100 + "]" * 100, "1 2", "nul"],
)
def test_json_that_is_none_is_refused(library, text):
    with pytest.raises(OtaroError, match="it is not valid JSON"):
        Native(library, text)


def test_a_text_that_is_not_utf8_is_refused(library):
    ours = Native(library, (MODEL_DIR / "tokenizer.json").read_text())
    for data in (b"\xff", b"a\xc3", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf5\x80\x80\x80"):
        with pytest.raises(OtaroError, match="not UTF-8"):
            ours.encode(data)
