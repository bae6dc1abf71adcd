"""Vocabularies: what GGUF says of a tokenizer, and that llama.cpp cuts text into the same tokens by it."""

import importlib.util
import json

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import otaro
from otaro.errors import OtaroError
from otaro.export.gguf_vocabulary import split_rule, vocabulary
from otaro.export.run import export
from otaro.file.gguf_tokenizer import SPLITS
from tests.conftest import ROOT

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
needs_llama = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None,
    reason="llama-cpp-python is not installed (pip install 'otaro-llm[llama]')",
)
SIZE = 500
TEXTS = [
    "Precision is data: one array of mantissa bits per sequence, isn't it? WE'LL see in 1969 or 12345.",
    "  two  spaces\tand a tab\n\n\nthree lines; naïve café, 😀 我想在apple工作, `code`(x) != [1, 2]\r\n",
    "<|user|>hello world<|end|>\nsure",
    "a",
]


def trained(kind):
    """A small tokenizer of a kind, trained on the pages of this repository."""
    corpus = [(ROOT / page).read_text() for page in ("README.md", "FORMAT.md", "CONTRIBUTING.md")]
    special = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>"]
    if kind.startswith("spm"):
        made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        steps = [normalizers.Replace(" ", "▁")]
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *steps] if kind == "spm" else steps)
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        made.train_from_iterator(
            corpus, trainers.BpeTrainer(vocab_size=SIZE, special_tokens=special, show_progress=False)
        )
        stated = json.loads(made.to_str())  # byte tokens are no special ones
        stated["added_tokens"] = stated["added_tokens"][:5]
        made = Tokenizer.from_str(json.dumps(stated))
    else:
        made = Tokenizer(models.BPE(ignore_merges=kind == "llama-bpe"))
        first = {"gpt-2": [], "smollm": [pre_tokenizers.Digits(individual_digits=True)]}.get(kind)
        if first is None:
            pattern = Regex(SPLITS["dbrx" if kind == "llama-bpe" else kind])
            first = [pre_tokenizers.Split(pattern, "isolated")]
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind in ("gpt-2", "smollm"))
        made.pre_tokenizer = pre_tokenizers.Sequence([*first, level])
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=SIZE, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        made.train_from_iterator(corpus, trainer)
    if kind in ("spm", "llama-bpe"):
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template="{{ messages }}",
    )


KINDS = ["gpt-2", "smollm", "dbrx", "llama-bpe", "qwen2", "tekken", "spm", "spm without space"]


@pytest.fixture(scope="module")
def make(tmp_path_factory, random_model):
    """make(kind): the directory of a nested model with such a tokenizer, and the tokenizer."""

    def made(kind, rows=SIZE + 12):
        folder, tokenizer = tmp_path_factory.mktemp("vocabulary"), trained(kind)
        random_model("llama_tied", vocab_size=rows).save_pretrained(folder / "checkpoint")
        tokenizer.save_pretrained(folder / "checkpoint")
        otaro.pack(folder / "checkpoint", folder / "nested")
        return folder / "nested", tokenizer

    return made


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_states_the_tokenizer(kind, make, tmp_path):
    nested, tokenizer = make(kind)
    assert export(nested, tmp_path / "m.gguf", precision="E5M3", to="gguf").exact
    about = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "m.gguf").fields.items()}
    tokens = about["tokenizer.ggml.tokens"]
    assert {token: tokens.index(token) for token in tokenizer.get_vocab()} == tokenizer.get_vocab()
    assert tokens[SIZE:] == [f"[PAD{number}]" for number in range(SIZE, SIZE + 12)]
    kinds = about["tokenizer.ggml.token_type"]
    assert kinds[SIZE:] == [5] * 12
    assert kinds[1:5] == [3] * 4
    assert about["tokenizer.chat_template"] == "{{ messages }}"
    assert (about["tokenizer.ggml.bos_token_id"], about["tokenizer.ggml.eos_token_id"]) == (1, 2)
    assert about["tokenizer.ggml.add_bos_token"] is (kind in ("spm", "llama-bpe"))
    if kind.startswith("spm"):
        assert about["tokenizer.ggml.model"] == "llama"
        assert about["tokenizer.ggml.add_space_prefix"] is (kind == "spm")
        assert (kinds[0], kinds[tokens.index("<0x0A>")]) == (2, 6)
        scores = about["tokenizer.ggml.scores"]
        merged = [token for token in tokens[:SIZE] if scores[tokens.index(token)] > -1e4]
        assert sorted(merged, key=lambda token: -scores[tokens.index(token)]) == merged, (
            "merged in the order of training"
        )
    else:
        assert (about["tokenizer.ggml.model"], about["tokenizer.ggml.pre"]) == ("gpt2", kind)
        assert about["tokenizer.ggml.merges"][0] == " ".join(
            json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"][0]
        )


@needs_llama
@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_cuts_text_into_the_same_tokens(kind, make, tmp_path):
    import llama_cpp

    nested, tokenizer = make(kind)
    export(nested, tmp_path / "m.gguf", precision="E5M3", to="gguf")
    model = llama_cpp.Llama(str(tmp_path / "m.gguf"), vocab_only=True, verbose=False)
    for text in TEXTS:
        assert model.tokenize(text.encode(), add_bos=True, special=True) == tokenizer(text).input_ids, text


def test_a_rule_that_llama_cpp_lacks_is_refused(make):
    nested, _ = make("qwen2")
    stated = json.loads((nested / "tokenizer.json").read_text())
    stated["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\p{N}{1,2}"
    assert split_rule(stated) is None
    (nested / "tokenizer.json").write_text(json.dumps(stated))
    with pytest.raises(
        OtaroError,
        match=r"cannot be written as GGUF: llama.cpp has no rule like its "
        r"pre_tokenizer; export",
    ):
        vocabulary(nested, SIZE)


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [{"type": "Whitespace"}],
        [{"type": "ByteLevel", "add_prefix_space": True}],
        [{"type": "Digits", "individual_digits": False}, {"type": "ByteLevel"}],
    ],
)
def test_other_rules_are_none(steps):
    assert split_rule({"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}, "model": {}}) is None


def test_more_tokens_than_rows_are_refused(make):
    nested, _ = make("gpt-2")
    with pytest.raises(OtaroError, match=rf"it has a token {SIZE - 1}, and the embedding 400 rows"):
        vocabulary(nested, 400)


def test_other_models_of_tokenizers_are_refused(tmp_path):
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    )
    made.save_pretrained(tmp_path)
    with pytest.raises(
        OtaroError,
        match=r"it is WordLevel, and llama.cpp gets byte-level BPE and "
        r"SentencePiece's BPE here",
    ):
        vocabulary(tmp_path, 10)


def test_a_model_without_tokenizer_has_no_vocabulary(make_fitting, tmp_path):
    report = export(make_fitting("llama"), tmp_path / "m.gguf", precision="E5M3", to="gguf")
    assert report.notes == [
        "the model has no tokenizer, so the file has no vocabulary: tokens go in and out as numbers"
    ]
