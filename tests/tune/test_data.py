"""Training data: every format, every refusal, and labels exactly where something is to be learnt."""

import gzip
import importlib.util
import json
import re
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
from tokenizers import normalizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer
from typer.testing import CliRunner

from otaro.builtin import MODEL_DIR
from otaro.builtin.documentation import documentation_text
from otaro.cli.main import app
from otaro.errors import OtaroError
from otaro.tokens import begins_with_bos
from otaro.tune.data import DataError, collate, load_data, padding_id, split
from otaro.tune.forms import FORMS, PROMPT, PROMPT_WITH_INPUT

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'clown' %}{{ raise_exception('no clowns') }}{% endif %}"
    "<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}{% if add_generation_prompt "
    "%}<|assistant|>\n{% endif %}"
)
# As Qwen3 does: the last turn gets an empty thought, earlier ones do not.
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' and loop.last "
    "%}<think></think>\n{% endif %}"
    "{{ m.content }}{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# As DeepSeek does: the prompt opens a thought that a finished turn does not show.
OPENING = TEMPLATE.replace("<|assistant|>\n{% endif %}", "<|assistant|>\n<think>{% endif %}")
REWORDING = "{{ messages | length }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"

SQUARE = {"instruction": "Square it.", "input": "7", "output": "It is 49."}
GREETING = {"instruction": "Greet {me}.", "output": "Good day,\nand {welcome} — ünïcode too."}
CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is an assert statement?"},
        {"role": "assistant", "content": "A check\nfor debugging."},
        {"role": "user", "content": "And a raise?"},
        {"role": "assistant", "content": "It raises an exception."},
    ]
}
USER, ASSISTANT = CHAT["messages"][1:3]
SHAREGPT = {
    "conversations": [
        {
            "from": {"system": "system", "user": "human", "assistant": "gpt"}[turn["role"]],
            "value": turn["content"],
        }
        for turn in CHAT["messages"]
    ]
}
# A row of each form whose answer may be empty, and how it then looks.
ANSWERED = [
    (SQUARE, {"output": " \n"}),
    (SQUARE, {"output": None}),
    ({"prompt": "The sky is", "completion": " blue"}, {"completion": ""}),
    ({"prompt": "The sky is", "completion": " blue"}, {"completion": None}),
    ({"prompt": [USER], "completion": [ASSISTANT]}, {"completion": []}),
    ({"question": "How many?", "answer": "Six."}, {"answer": ""}),
    (CHAT, {"messages": [USER, {**ASSISTANT, "content": ""}]}),
    (SHAREGPT, {"conversations": [SHAREGPT["conversations"][1], {"from": "gpt", "value": " "}]}),
]


@pytest.fixture
def tokenizer():
    loaded = AutoTokenizer.from_pretrained(MODEL_DIR)
    loaded.chat_template = TEMPLATE
    return loaded


@pytest.fixture
def begun(tokenizer):
    """The tokenizer as one that begins every text with <s>, as those of Llama and Gemma do."""
    beginning = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = beginning
    assert begins_with_bos(tokenizer) == tokenizer.bos_token_id
    return tokenizer


@pytest.fixture
def write(tmp_path):
    """write("a.jsonl", rows) makes a file of that kind; strings and bytes are written as they are."""

    def write(name, content):
        path = tmp_path / name
        if isinstance(content, list):
            content = "\n".join(map(json.dumps, content)) if ".jsonl" in name else json.dumps(content)
        content = content.encode() if isinstance(content, str) else content
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return path

    return write


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def learnt(tokenizer, example):
    assert len(example["input_ids"]) == len(example["labels"])
    assert all(
        label in (-100, token) for token, label in zip(example["input_ids"], example["labels"], strict=True)
    )
    return tokenizer.decode([label for label in example["labels"] if label != -100])


def answers(tokenizer, data):
    return [learnt(tokenizer, data[index]) for index in range(len(data))]


# Text.


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "A.TXT"])
def test_a_text_is_cut_into_full_blocks(tokenizer, write, name):
    text = "The assert statement is a convenient way to insert debugging assertions into a program.\n" * 5
    stream = ids_of(tokenizer, text)
    data = load_data(write(name, text), tokenizer, 16)
    blocks = [data[index]["input_ids"] for index in range(len(data))]
    assert len(stream) % 16
    assert {len(block) for block in blocks} == {16}
    assert list(chain(*blocks)) == stream[: len(stream) // 16 * 16]
    assert all(data[index]["labels"] == block for index, block in enumerate(blocks))
    assert (data.kind, data.tokens, data.dropped, data.cut) == ("text", 16 * len(blocks), 0, 0)


def test_a_last_block_that_is_just_full_is_kept(tokenizer, write):
    text = "one two three four five six seven eight"
    half, odd = divmod(len(ids_of(tokenizer, text)), 2)
    assert [len(ids) for ids, _ in load_data(write("a.txt", text), tokenizer, half).examples] == [half, half]
    assert odd == 0


def test_a_text_shorter_than_a_block_is_one_short_block(tokenizer, write):
    data = load_data(write("a.txt", "just a few words"), tokenizer, 128)
    assert [list(ids) for ids, _ in data.examples] == [ids_of(tokenizer, "just a few words")]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.jsonl.gz"])
def test_text_rows_are_joined_with_the_end_of_text(tokenizer, write, name):
    texts = ["first text", "second one", " \n", "the third"]
    data = load_data(write(name, [{"text": text, "id": 1} for text in texts]), tokenizer, 64)
    assert tokenizer.decode(data[0]["input_ids"]) == "first text</s>second one</s>the third"
    assert (data.kind, data.dropped, data.remarks) == ("text", 1, ("1 of 4 rows left out: no text",))


def test_many_documents_keep_their_order(tokenizer, write):
    texts = [f"row {index}" for index in range(2345)]  # more than are tokenised at once
    data = load_data(write("a.jsonl", [{"text": text} for text in texts]), tokenizer, 2)
    stream = list(chain(*([*ids_of(tokenizer, text), tokenizer.eos_token_id] for text in texts)))[:-1]
    assert list(chain(*(ids for ids, _ in data.examples))) == stream[: len(stream) // 2 * 2]


def test_without_an_end_of_text_token_rows_are_joined_bare(tokenizer, write):
    tokenizer.eos_token = None
    data = load_data(write("a.jsonl", [{"text": "one"}, {"text": "two"}]), tokenizer, 64)
    assert data[0]["input_ids"] == ids_of(tokenizer, "one") + ids_of(tokenizer, "two")


def test_a_tokenizer_that_marks_both_ends_itself_is_left_to_it(tokenizer, write):
    specials = [("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=specials
    )
    texts = load_data(write("a.jsonl", [{"text": "one"}, {"text": "two"}]), tokenizer, 64)
    assert tokenizer.decode(texts[0]["input_ids"]) == "<s>one</s><s>two</s>"
    assert texts.bos
    rows = load_data(write("b.jsonl", [SQUARE]), tokenizer, 512)
    assert tokenizer.decode(rows[0]["input_ids"]) == f"<s>{PROMPT_WITH_INPUT.format(**SQUARE)}It is 49.</s>"
    assert learnt(tokenizer, rows[0]) == "It is 49.</s>"


# The beginning of a text.


def test_every_block_begins_with_the_beginning_of_text_that_the_tokenizer_writes(begun, write):
    text = "The assert statement is a convenient way to insert debugging assertions into a program.\n" * 5
    stream, bos = ids_of(begun, text), begun.bos_token_id
    data = load_data(write("a.txt", text), begun, 16)
    blocks = [data[index]["input_ids"] for index in range(len(data))]
    assert {len(block) for block in blocks} == {16}
    assert blocks == [[bos, *stream[start : start + 15]] for start in range(0, len(stream) - 14, 15)]
    assert all(data[index]["labels"] == block for index, block in enumerate(blocks))
    assert data.bos
    assert all(part.bos for part in split(data, 0.2, 0))


def test_where_a_document_begins_with_it_a_block_does_not_get_a_second_one(begun, write):
    # one spells it out
    path = write("a.jsonl", [{"text": text} for text in ("one two", "<s>six", "seven nine")])
    assert (
        load_data(path, begun, 64)[0]["input_ids"] == begun("one two</s><s>six</s><s>seven nine")["input_ids"]
    )
    length = len(begun("one two</s>")["input_ids"])
    first, second, *_ = (begun.decode(ids) for ids, _ in load_data(path, begun, length).examples)
    assert first == "<s>one two</s>"
    assert second.startswith("<s>six</s>")


def test_without_bos_blocks_are_cut_as_if_it_were_any_token(begun, write):
    texts = ["The first text, rather short.", "A second one. " * 9]
    data = load_data(write("a.jsonl", [{"text": text} for text in texts]), begun, 8, bos=False)
    stream = [*begun(texts[0])["input_ids"], begun.eos_token_id, *begun(texts[1])["input_ids"]]
    assert list(chain(*(ids for ids, _ in data.examples))) == stream[: len(stream) // 8 * 8]
    assert not data.bos


def test_a_tokenizer_that_writes_no_beginning_gives_blocks_without(tokenizer, write):
    path = write("a.txt", "one two three four five six")
    assert not load_data(path, tokenizer, 4).bos
    assert load_data(path, tokenizer, 4).examples == load_data(path, tokenizer, 4, bos=False).examples


def test_prompts_and_chats_begin_with_it_once(begun, write):
    begun.chat_template = "{{ bos_token }}" + TEMPLATE
    spelt = {"prompt": "<s>Say it:", "completion": " yes"}
    for row in (SQUARE, CHAT, spelt, {"prompt": "Say it:", "completion": " yes"}):
        ids = load_data(write("a.jsonl", [row]), begun, 512)[0]["input_ids"]
        assert ids.index(begun.bos_token_id) == 0
        assert ids.count(begun.bos_token_id) == 1


def test_builtin_is_the_documentation_to_tune_on(tokenizer):
    data = load_data("builtin", tokenizer, 512, max_positions=512)
    assert data.kind == "text"
    assert documentation_text("tuning").startswith(tokenizer.decode(data[0]["input_ids"]))
    assert data.tokens == 512 * len(data) > 50_000


def test_a_byte_order_mark_is_no_text(tokenizer, write):
    assert (
        tokenizer.decode(load_data(write("a.txt", b"\xef\xbb\xbfhello you"), tokenizer, 64)[0]["input_ids"])
        == "hello you"
    )


# Instructions.


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_of_instructions_only_the_answer_is_learnt(tokenizer, write, name):
    data = load_data(
        write(name, [SQUARE, GREETING, {**GREETING, "input": None, "text": "all of it"}]), tokenizer, 512
    )
    assert (data.kind, len(data), data.dropped, data.cut) == ("instruction", 3, 0, 0)
    assert learnt(tokenizer, data[0]) == "It is 49.</s>"
    assert tokenizer.decode(data[0]["input_ids"]) == PROMPT_WITH_INPUT.format(**SQUARE) + "It is 49.</s>"
    assert learnt(tokenizer, data[1]) == learnt(tokenizer, data[2]) == GREETING["output"] + "</s>"
    assert tokenizer.decode(data[1]["input_ids"]) == PROMPT.format(**GREETING) + GREETING["output"] + "</s>"
    assert data.tokens == sum(len(data[index]["input_ids"]) for index in range(3))


def test_the_prompts_are_those_of_alpaca():
    assert PROMPT_WITH_INPUT.format(instruction="I", input="X") == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nI\n\n### Input:\nX\n\n### Response:\n"
    )
    assert PROMPT.format(instruction="I") == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the "
        "request.\n\n"
        "### Instruction:\nI\n\n### Response:\n"
    )


def test_long_rows_are_cut_and_those_without_an_answer_left_are_dropped(tokenizer, write):
    path = write("a.jsonl", [SQUARE, {**SQUARE, "instruction": "Square it. " * 50}])
    prompt = len(ids_of(tokenizer, PROMPT_WITH_INPUT.format(**SQUARE)))
    data = load_data(path, tokenizer, prompt + 1)
    assert (len(data), data.dropped, data.cut) == (1, 1, 1)
    assert data.remarks == (
        f"1 of 2 rows left out: --sequence-length {prompt + 1} cuts the whole answer away",
        f"1 of 2 rows cut short by --sequence-length {prompt + 1}",
    )
    assert learnt(tokenizer, data[0]) == tokenizer.decode(ids_of(tokenizer, "It is 49.")[:1])
    for positions, way in (
        (None, "give a larger one"),
        (2048, "give a larger one, up to the 2048 positions of this model"),
        (prompt, "this model has no more positions, so shorten the prompts"),
    ):
        with pytest.raises(DataError) as refusal:
            load_data(path, tokenizer, prompt, max_positions=positions)
        assert (
            str(refusal.value)
            == f"{path}: --sequence-length {prompt} cuts away all answers of all rows; {way}"
        )


def test_the_alpaca_slice(tokenizer, shared_data):
    path = shared_data / "alpaca" / "alpaca_5000.json"
    data = load_data(path, tokenizer, 100_000)
    assert (data.kind, len(data), data.dropped, data.cut) == ("instruction", 4998, 2, 0)
    assert data.remarks == ("2 of 5,000 rows left out: empty answer",)
    expected = [row["output"] + "</s>" for row in json.loads(path.read_text()) if row["output"]]
    assert answers(tokenizer, data) == expected


# Conversations.


@pytest.mark.parametrize(
    "template", [TEMPLATE, THINKING, OPENING], ids=["plain", "drops thoughts", "opens thoughts"]
)
def test_of_a_conversation_only_the_assistant_is_learnt(tokenizer, write, template):
    tokenizer.chat_template = template
    data = load_data(write("a.jsonl", [CHAT]), tokenizer, 512)
    assert (data.kind, len(data)) == ("chat", 1)
    assert data[0]["input_ids"] == tokenizer.apply_chat_template(CHAT["messages"], return_dict=False)
    thought = "<think></think>\n" if template == THINKING else ""
    assert (
        learnt(tokenizer, data[0]) == f"A check\nfor debugging.</s>\n{thought}It raises an exception.</s>\n"
    )


def test_a_conversation_is_cut(tokenizer, write):
    full = load_data(write("a.jsonl", [CHAT]), tokenizer, 512)
    first = next(index for index, label in enumerate(full[0]["labels"]) if label != -100)
    data = load_data(write("a.jsonl", [CHAT]), tokenizer, first + 1)
    assert (len(data), data.cut, data.tokens) == (1, 1, first + 1)
    with pytest.raises(DataError, match="cuts away all answers"):
        load_data(write("a.jsonl", [CHAT]), tokenizer, first)


def test_templates_that_cannot_be_followed_are_refused(tokenizer, write):
    tokenizer.chat_template = REWORDING
    with pytest.raises(DataError, match="line 1: the chat template rewords turn 2 later"):
        load_data(write("a.jsonl", [CHAT]), tokenizer, 512)


def test_without_a_template_chats_are_refused_in_one_sentence(tokenizer, write):
    tokenizer.chat_template = None
    path = write("a.jsonl", [SHAREGPT] * 1500)
    with pytest.raises(DataError) as refusal:
        load_data(path, tokenizer, 512)
    places = "line 1, line 2, line 3, line 4, line 5 and 1,495 more"
    assert str(refusal.value) == (
        f"{path}: 1,500 of 1,500 rows cannot be used:\n  {places}: is a chat, but this model has no chat "
        "template; "
        "give it one, such as --chat-template alpaca"
    )


def test_without_an_end_of_text_token_instructions_are_refused(tokenizer, write):
    tokenizer.eos_token = None
    with pytest.raises(
        DataError, match="line 1: has an answer, but the tokenizer of this model has no end-of-text"
    ):
        load_data(write("a.jsonl", [SQUARE]), tokenizer, 512)


# Other names for the same.


def test_of_a_completion_all_is_learnt_and_of_its_prompt_nothing(tokenizer, write):
    rows = [("The sky is", " blue."), ("", "No prompt at all."), ("It says:", " so.</s>")]
    data = load_data(write("a.jsonl", [{"prompt": p, "completion": c} for p, c in rows]), tokenizer, 512)
    assert (data.kind, len(data)) == ("instruction", 3)
    assert answers(tokenizer, data) == [" blue.</s>", "No prompt at all.</s>", " so.</s>"]
    assert tokenizer.decode(data[0]["input_ids"]) == "The sky is blue.</s>"


def test_of_messages_in_prompt_and_completion_only_the_completion_is_learnt(tokenizer, write):
    turns = CHAT["messages"]
    data = load_data(write("a.jsonl", [{"prompt": turns[:4], "completion": turns[4:]}]), tokenizer, 512)
    assert (data.kind, data[0]["input_ids"]) == (
        "chat",
        tokenizer.apply_chat_template(turns, return_dict=False),
    )
    assert learnt(tokenizer, data[0]) == "It raises an exception.</s>\n"


def test_sharegpt_is_read_as_the_same_conversation(tokenizer, write):
    expected = load_data(write("a.jsonl", [CHAT]), tokenizer, 512).examples
    assert load_data(write("b.json", [SHAREGPT]), tokenizer, 512).examples == expected
    assert (
        load_data(write("c.json", [{"conversations": CHAT["messages"]}]), tokenizer, 512).examples == expected
    )


def test_a_question_is_a_turn_of_the_user_where_there_is_a_template(tokenizer, write):
    path = write("a.jsonl", [{"question": "How many {legs}?", "answer": "Six {of them}."}])
    turns = [
        {"role": "user", "content": "How many {legs}?"},
        {"role": "assistant", "content": "Six {of them}."},
    ]
    data = load_data(path, tokenizer, 512)
    assert data.examples == load_data(write("b.jsonl", [{"messages": turns}]), tokenizer, 512).examples
    tokenizer.chat_template = None
    data = load_data(path, tokenizer, 512)
    assert tokenizer.decode(data[0]["input_ids"]) == "Question: How many {legs}?\nAnswer: Six {of them}.</s>"
    assert learnt(tokenizer, data[0]) == " Six {of them}.</s>"


def test_an_answer_is_tokenised_as_it_goes_on_after_its_prompt(tokenizer, write):
    # as Llama's puts a space before every text
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend("_")
    data = load_data(write("a.jsonl", [SQUARE]), tokenizer, 512)
    assert learnt(tokenizer, data[0]) == "It is 49.</s>"
    assert tokenizer.decode(data[0]["input_ids"]) == f"_{PROMPT_WITH_INPUT.format(**SQUARE)}It is 49.</s>"


def test_a_prompt_keeps_the_tokens_that_it_has_alone(tokenizer, write):
    prompt, completion = "The stat", "ement is here."
    # a token across the border
    assert ids_of(tokenizer, prompt + completion)[:3] != ids_of(tokenizer, prompt)[:3]
    data = load_data(write("a.jsonl", [{"prompt": prompt, "completion": completion}]), tokenizer, 512)
    assert data[0]["input_ids"] == [
        *ids_of(tokenizer, prompt),
        *ids_of(tokenizer, completion),
        tokenizer.eos_token_id,
    ]
    assert learnt(tokenizer, data[0]) == "ement is here.</s>"


# Rows with nothing to learn.


@pytest.mark.parametrize(("row", "change"), ANSWERED, ids=lambda value: " ".join(value))
def test_rows_with_an_empty_answer_are_left_out_counted_and_told(tokenizer, write, row, change):
    expected = load_data(write("a.json", [row, row]), tokenizer, 512)
    data = load_data(write("b.json", [row, {**row, **change}, row, {**row, **change}]), tokenizer, 512)
    assert data.examples == expected.examples
    assert (data.dropped, data.remarks, expected.remarks) == (2, ("2 of 4 rows left out: empty answer",), ())
    with pytest.raises(DataError, match="the answers of all 1 rows are empty"):
        load_data(write("c.json", [{**row, **change}]), tokenizer, 512)


# Refusals.


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            "{'text': 1}",
            "not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        ),
        ("[" * 100_000, "not JSON: maximum recursion depth exceeded"),
        ("[1, 2]", "is of type list, not an object"),
        (
            "{}",
            "has no fields; a row needs `messages`, or `conversations`, or `prompt` and `completion`, "
            "or `instruction` and `output`, or `question` and `answer`, or `text`",
        ),
        ({"prompt": "a", "answer": "b"}, "has `prompt`, `answer`; a row needs"),
        (
            {"question": "a", "context": "b", "answers": {}},
            "has `question`, `context`, `answers`; a row needs",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            "is preference data, which is not read; keep the `chosen`",
        ),
        (
            {"chosen": [], "rejected": []},
            "is preference data, which is not read; keep the `chosen` answers: a row",
        ),
        (
            {"prompt": "a", "completion": "b", "label": False},
            "is preference data, by its `label`; keep the good",
        ),
        ({"prompt": "a", "completion": 1}, "`completion` is of type int, not a string"),
        ({"prompt": 1, "completion": "b"}, "`prompt` is of type int, not a string"),
        (
            {"prompt": "a", "completion": [ASSISTANT]},
            "of `prompt` and `completion` one is a list; give two strings, or two",
        ),
        (
            {"prompt": [USER], "completion": [USER]},
            "needs a turn of the assistant, but not as the first; the roles are",
        ),
        ({"prompt": ["hello"], "completion": [ASSISTANT]}, "`prompt[0]` is of type str, not an object"),
        ({"question": " ", "answer": "b"}, "`question` is empty"),
        ({"question": "a", "answer": 2}, "`answer` is of type int, not a string"),
        ({"conversations": {}}, "`conversations` is of type dict, not a list"),
        (
            {"conversations": [{"from": "tool", "value": "a"}]},
            "`conversations[0].from` is 'tool'; human, user, gpt,",
        ),
        ({"conversations": [{"from": "human", "text": "a"}]}, "`conversations[0].value` is missing"),
        (
            {"messages": [USER, {**ASSISTANT, "tool_calls": [{}]}]},
            "`messages[1].tool_calls` holds calls of tools",
        ),
        ({"text": None}, "has `text`; a row needs"),
        ({"text": 5}, "`text` is of type int, not a string"),
        ({"text": "a \ud800 b"}, "`text` holds half a surrogate pair"),
        ({"instruction": "Do."}, "has `instruction`; a row needs"),
        ({"instruction": "Do.", "output": ["a"]}, "`output` is of type list, not a string"),
        ({"instruction": "", "output": "Done."}, "`instruction` is empty"),
        ({"instruction": "Do.", "input": 3, "output": "Done."}, "`input` is of type int, not a string"),
        ({"messages": "hello"}, "`messages` is of type str, not a list"),
        ({"messages": []}, "needs a turn of the assistant, but not as the first; the roles are none"),
        ({"messages": [USER]}, "needs a turn of the assistant, but not as the first; the roles are user"),
        (
            {"messages": [ASSISTANT, USER]},
            "needs a turn of the assistant, but not as the first; the roles are assistant, user",
        ),
        ({"messages": [USER, "hello"]}, "`messages[1]` is of type str, not an object"),
        ({"messages": [USER, {"role": "assistant"}]}, "`messages[1].content` is missing"),
        ({"messages": [{"content": "hello"}, ASSISTANT]}, "`messages[0].role` is missing"),
        (
            {"messages": [{"role": "clown", "content": "boo"}, ASSISTANT]},
            "the chat template refuses it: no clowns",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_bad_row_is_named_by_its_line(tokenizer, write, row, problem):
    line = row if isinstance(row, str) else json.dumps(row)
    with pytest.raises(DataError) as refusal:
        load_data(write("a.jsonl", f"\n{line}\n\n"), tokenizer, 64)
    assert f"1 of 1 rows cannot be used:\n  line 2: {problem}" in str(refusal.value)
    with pytest.raises(DataError, match="1 of 1 rows"):
        load_data(write("a.jsonl", f"\n{line}\n\n"), tokenizer, 64, skip_bad_rows=True)


def test_all_bad_rows_are_counted_and_the_first_ones_shown_with_those_alike(tokenizer, write):
    rows = [{"text": "good"}, *[{"text": number} for number in range(8)], CHAT]
    path = write("a.json", rows)
    with pytest.raises(DataError) as refusal:
        load_data(path, tokenizer, 64)
    assert str(refusal.value).split("\n") == [
        f"{path}: 9 of 10 rows cannot be used:",
        "  index 1, index 2, index 3, index 4, index 5 and 3 more: `text` is of type int, not a string",
        "  index 9: is of kind chat, while index 0 is of kind text",
    ]
    with pytest.raises(DataError) as refusal:
        load_data(write("b.json", [{f"field{number}": ""} for number in range(7)]), tokenizer, 64)
    assert len(lines := str(refusal.value).split("\n")) == 7
    assert lines[-1] == "  and 2 more, with other problems"
    data = load_data(path, tokenizer, 64, skip_bad_rows=True)
    assert (data.dropped, data[0]["input_ids"]) == (9, ids_of(tokenizer, "good"))
    assert data.remarks == (
        "9 of 10 rows left out: cannot be used, such as index 1: `text` is of type int, not a string",
    )


LATIN = '{"text": "caf\xe9"}'.encode("latin-1")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
def test_a_row_that_is_not_utf8_is_one_bad_row_among_others(tokenizer, tmp_path, name):
    rows = [
        b'\xef\xbb\xbf{"text": "caf\xc3\xa9"}',
        LATIN,
        b'{"text": "\\ud83d\\ude00"}',
        b'{"other": "\xff"}',
    ]
    content = b"\n".join(rows)
    if name == "a.json":
        content = rows[0][:3] + b"[" + b", ".join([rows[0][3:], *rows[1:]]) + b"]"
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    places = ["line 2", "line 4"] if "jsonl" in name else ["index 1", "index 3"]
    problem = "not UTF-8; save the file as UTF-8"
    with pytest.raises(DataError) as refusal:
        load_data(tmp_path / name, tokenizer, 64)
    assert str(refusal.value).split("\n") == [
        f"{tmp_path / name}: 2 of 4 rows cannot be used:",
        f"  {', '.join(places)}: {problem}",
    ]
    data = load_data(tmp_path / name, tokenizer, 64, skip_bad_rows=True)
    assert data.dropped == 2
    assert data.remarks == (f"2 of 4 rows left out: cannot be used, such as {places[0]}: {problem}",)
    (tmp_path / "good.jsonl").write_bytes(b"\n".join([rows[0], rows[2]]))
    assert data.examples == load_data(tmp_path / "good.jsonl", tokenizer, 64).examples


def test_a_file_without_a_row_in_utf8_is_refused(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LATIN + b"\n" + LATIN)
    with pytest.raises(DataError, match="2 of 2 rows cannot be used:\n  line 1, line 2: not UTF-8; save"):
        load_data(tmp_path / "a.jsonl", tokenizer, 64, skip_bad_rows=True)


def test_kinds_do_not_mix(tokenizer, write):
    with pytest.raises(
        DataError,
        match="1 of 3 rows cannot be used:\n  line 3: is of kind chat, while line 1 is of kind text",
    ):
        load_data(write("a.jsonl", [{"text": "one"}, {"text": "two"}, CHAT]), tokenizer, 64)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.txt", b"", "is empty; --data takes .txt"),
        ("a.jsonl", b" \n\n", "is empty"),
        ("a.json", b"[]", "holds no rows; a row needs"),
        ("a.json", b'{"text": "a"}', "holds a dict, not a list of objects"),
        (
            "a.json",
            b'{"text": "a"}\n{"text": "b"}',
            "is not JSON: Extra data: line 2 column 1 (char 14); a file with one object",
        ),
        ("a.txt", b"x", "has 1 tokens of text"),
        ("a.jsonl", b'{"text": ""}', "has 0 tokens of text"),
        ("a.txt", b"ab\n\nc\xff", "is not UTF-8: byte 0xff at offset 5, in line 3; save it as UTF-8"),
        ("a.json", b'["\xe9"', "is not UTF-8: byte 0xe9 at offset 2, in line 1; save it as UTF-8"),
        ("a.txt", "hello".encode("utf-16"), "is not UTF-8: byte 0xff at offset 0, in line 1"),
        ("a.csv", b"a,b", "is of no kind that can be read; --data takes .txt, .json or .jsonl"),
        ("a", b"a,b", "is of no kind that can be read"),
    ],
)
def test_files_that_cannot_be_read(tokenizer, write, name, content, problem):
    path = write(name, content)
    with pytest.raises(DataError) as refusal:
        load_data(path, tokenizer, 64)
    assert str(refusal.value).startswith(f"{path} {problem}")
    assert isinstance(refusal.value, OtaroError)


@pytest.mark.parametrize(
    "content", [b"no gzip", gzip.compress(b'{"text": "hello"}' * 9)[:-12]], ids=["other", "short"]
)
def test_a_broken_gz_is_refused(tokenizer, tmp_path, content):
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.jsonl\.gz cannot be read"):
        load_data(tmp_path / "a.jsonl.gz", tokenizer, 64)


def test_what_is_no_file(tokenizer, tmp_path):
    with pytest.raises(DataError, match="is a directory; --data takes"):
        load_data(tmp_path, tokenizer, 64)
    for name in (
        str(tmp_path / "missing"),
        "missing",
        "some/missing.jsonl",
        "some/missing.parquet",
        "a/b/c/d",
    ):
        with pytest.raises(DataError, match=r"does not exist; --data takes .*owner/name"):
            load_data(name, tokenizer, 64)


def test_sequence_lengths_the_model_cannot_take(tokenizer):
    with pytest.raises(
        DataError, match="--sequence-length 4096 is more than the 2048 positions of this model"
    ):
        load_data("builtin", tokenizer, 4096, max_positions=2048)
    with pytest.raises(DataError, match="--sequence-length 1 leaves no token to predict"):
        load_data("builtin", tokenizer, 1)


# Through the package datasets.


@pytest.mark.parametrize("source", ["a.parquet", "owner/name"])
def test_without_datasets_the_extra_is_named(tokenizer, write, monkeypatch, source):
    monkeypatch.setitem(sys.modules, "datasets", None)
    source = str(write(source, b"PAR1")) if source == "a.parquet" else source
    with pytest.raises(
        DataError,
        match=r"needs the package datasets to be read: .* -m pip install "
        r"'otaro-llm\[data\]'",
    ):
        load_data(source, tokenizer, 64)


class FakeDatasets:
    """What is used of the package, so that Hub ids are tested without a Hub."""

    def __init__(self, rows):
        self.rows, self.column_names, self.asked = rows, list(rows[0]), None

    def load_dataset(self, name, *config, **options):
        self.asked = (name, *config, options)
        if name == "owner/secret":
            raise PermissionError("log in first")
        return self

    def select_columns(self, names):
        self.selected = names
        return [{name: row[name] for name in names} for row in self.rows]


def test_hub_ids(tokenizer, monkeypatch):
    hub = FakeDatasets([{"text": "one", "image": 1}, {"text": "two", "image": 2}])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert tokenizer.decode(load_data("owner/name-v1.5", tokenizer, 64)[0]["input_ids"]) == "one</s>two"
    assert hub.asked == ("owner/name-v1.5", {"split": "train"})
    load_data("owner/name:test[:10%]", tokenizer, 64)
    assert hub.asked == ("owner/name", {"split": "test[:10%]"})
    load_data("owner/name/main:test", tokenizer, 64)
    assert hub.asked == ("owner/name", "main", {"split": "test"})
    hub.rows[1]["text"] = 2
    with pytest.raises(DataError, match="index 1: `text` is of type int"):
        load_data("owner/name", tokenizer, 64)
    with pytest.raises(
        DataError,
        match=r"owner/secret .*Hub dataset\) cannot be loaded: PermissionError: "
        r"log in first",
    ):
        load_data("owner/secret", tokenizer, 64)


def test_of_a_hub_table_only_the_columns_that_are_read_are_fetched(tokenizer, monkeypatch):
    for row, _ in ANSWERED:
        hub = FakeDatasets([{"image": 1, **row, "score": 2}])
        monkeypatch.setitem(sys.modules, "datasets", hub)
        assert len(load_data("owner/name", tokenizer, 512)) == 1
        assert hub.selected == list(row)
    hub = FakeDatasets([{"prompt": "a", "completion": "b", "label": True}])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    with pytest.raises(DataError, match="is preference data, by its `label`"):
        load_data("owner/name", tokenizer, 512)
    hub = FakeDatasets([{"instruction": "a", "context": "b", "response": "c"}])  # tells all it has
    monkeypatch.setitem(sys.modules, "datasets", hub)
    with pytest.raises(DataError, match="index 0: has `instruction`, `context`, `response`; a row needs"):
        load_data("owner/name", tokenizer, 512)


@pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="the package datasets is not installed (extra: data)"
)
def test_parquet(tokenizer, tmp_path, write, monkeypatch):
    import datasets
    import pyarrow
    from pyarrow import parquet

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def stored(name, rows):
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name)
        return tmp_path / name

    data = load_data(stored("a.parquet", [SQUARE, {**SQUARE, "input": None}]), tokenizer, 512)
    assert [learnt(tokenizer, data[index]) for index in range(2)] == ["It is 49.</s>"] * 2
    assert load_data(stored("b.parquet", [CHAT]), tokenizer, 512).kind == "chat"
    for number, (row, change) in enumerate(ANSWERED):
        data = load_data(
            stored(f"c{number}.parquet", [{**row, "extra": 1}, {**row, **change, "extra": 2}]), tokenizer, 512
        )
        assert data.examples == load_data(write("c.json", [row]), tokenizer, 512).examples
        assert data.remarks == ("1 of 2 rows left out: empty answer",)
    with pytest.raises(DataError, match="index 0: has `a`; a row needs"):
        load_data(stored("d.parquet", [{"a": 1}]), tokenizer, 512)
    words = pyarrow.array([b"one", LATIN, b"two"], pyarrow.binary()).buffers()
    latin = pyarrow.StringArray.from_buffers(3, words[1], words[2])
    parquet.write_table(pyarrow.table({"text": latin}), tmp_path / "f.parquet")
    with pytest.raises(DataError, match="1 of 3 rows cannot be used:\n  index 1: not UTF-8"):
        load_data(tmp_path / "f.parquet", tokenizer, 512)
    data = load_data(tmp_path / "f.parquet", tokenizer, 512, skip_bad_rows=True)
    assert tokenizer.decode(data[0]["input_ids"]) == "one</s>two"
    assert data.dropped == 1
    (tmp_path / "e.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"e\.parquet cannot be loaded"):
        load_data(tmp_path / "e.parquet", tokenizer, 512)


# What happens to a dataset.


def test_rows_are_held_out_by_lot_and_the_same_every_time(tokenizer, write):
    rows = [{**SQUARE, "output": f"answer {index}"} for index in range(20)]
    data = load_data(write("a.jsonl", [*rows, {**SQUARE, "output": 5}]), tokenizer, 512, skip_bad_rows=True)
    training, held = split(data, 0.25, seed=1)
    assert (len(training), len(held)) == (15, 5)
    assert (training.dropped, held.dropped, held.kind) == (1, 0, "instruction")
    everything = answers(tokenizer, data)
    assert sorted(answers(tokenizer, training) + answers(tokenizer, held)) == sorted(everything)
    assert set(answers(tokenizer, training)).isdisjoint(answers(tokenizer, held))
    assert [part.examples for part in split(data, 0.25, seed=1)] == [training.examples, held.examples]
    assert split(data, 0.25, seed=2)[1].examples != held.examples
    assert answers(tokenizer, held) != everything[-5:]


def test_of_a_text_the_end_is_held_out(tokenizer, write):
    data = load_data(write("a.txt", "word " * 100), tokenizer, 10)
    training, held = split(data, 0.3, seed=0)
    assert training.examples + held.examples == data.examples
    assert len(held) == round(0.3 * len(data))
    assert training.tokens + held.tokens == data.tokens


def test_both_parts_have_an_example_or_it_is_refused(tokenizer, write):
    data = load_data(write("a.jsonl", [SQUARE, GREETING]), tokenizer, 512)
    assert [len(part) for share in (0.01, 0.99) for part in split(data, share, 0)] == [1, 1, 1, 1]
    with pytest.raises(DataError, match="1 example cannot be divided"):
        split(split(data, 0.5, 0)[0], 0.5, 0)
    for share in (0, 1, -0.5, float("nan")):
        with pytest.raises(DataError, match="must lie between 0 and 1"):
            split(data, share, 0)


def test_a_batch_is_padded_and_masked():
    examples = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [8]}]
    batch = collate(9)(examples)
    assert {name: column.tolist() for name, column in batch.items()} == {
        "input_ids": [[5, 6, 7], [8, 9, 9]],
        "labels": [[-100, 6, 7], [8, -100, -100]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
    }
    assert {column.dtype for column in batch.values()} == {torch.int64}


def test_a_loader_makes_batches(tokenizer, write):
    data = load_data(write("a.jsonl", [SQUARE, GREETING, SQUARE]), tokenizer, 512)
    loader = torch.utils.data.DataLoader(data, batch_size=2, collate_fn=collate(padding_id(tokenizer)))
    assert [batch["input_ids"].shape[0] for batch in loader] == [2, 1]


def test_the_end_of_text_pads_where_no_padding_token_exists(tokenizer):
    assert padding_id(tokenizer) == tokenizer.pad_token_id == 2
    tokenizer.pad_token = None
    assert padding_id(tokenizer) == tokenizer.eos_token_id == 1
    tokenizer.eos_token = None
    assert padding_id(tokenizer) == 0


# What users are told.


def test_help_and_documentation_name_every_form():
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    help_of_tune = CliRunner().invoke(app, ["tune", "--help"], env={"COLUMNS": "200"})
    assert help_of_tune.exit_code == 0  # brackets in it may be markup
    shown = help_of_tune.output
    for name in (field for form in FORMS for field in (*form.needed, *form.optional) if field != "label"):
        assert f"`{name}`" in page
        assert f"`{name}`" in shown


def test_every_row_that_the_documentation_shows_is_read(tokenizer, write):
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    rows = [json.loads(line) for line in re.findall(r"^\{.*\}$", page, re.MULTILINE)]
    assert {form.needed for form in FORMS} == {
        next(f.needed for f in FORMS if f.applies_to(row)) for row in rows
    }
    for row in rows:
        assert len(load_data(write("a.jsonl", [row]), tokenizer, 512)) == 1
