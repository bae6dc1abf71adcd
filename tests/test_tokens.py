"""Whether texts begin with a special token is what the tokenizer does, not what its settings say."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from otaro.builtin import MODEL_DIR
from otaro.tokens import begins_with_bos


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_DIR)


def writes(tokenizer, template):
    """Let the tokenizer put special tokens around each text, as those of Llama and Gemma do."""
    specials = [("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=specials)
    return tokenizer


def test_a_tokenizer_that_has_a_beginning_but_does_not_write_it_gives_none(tokenizer):
    assert tokenizer.bos_token_id is not None
    assert begins_with_bos(tokenizer) is None


@pytest.mark.parametrize("template", ["<s> $A", "<s> $A </s>"])
def test_a_tokenizer_that_writes_it_gives_its_id(tokenizer, template):
    bos = tokenizer.bos_token_id
    assert begins_with_bos(writes(tokenizer, template)) == bos


def test_another_special_token_before_the_text_is_no_beginning(tokenizer):
    assert begins_with_bos(writes(tokenizer, "</s> $A")) is None


def test_without_such_a_token_there_is_none(tokenizer):
    writes(tokenizer, "<s> $A").bos_token = None
    assert begins_with_bos(tokenizer) is None


def test_an_unknown_word_that_becomes_the_same_token_is_no_beginning():
    words = Tokenizer(WordLevel({"<|endoftext|>": 0, "word": 1}, unk_token="<|endoftext|>"))
    marks = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **marks)
    assert tokenizer("x")["input_ids"] == [tokenizer.bos_token_id]
    assert begins_with_bos(tokenizer) is None
