"""Chat templates: what the built-in ones write, and what is said of those that users bring."""

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, GenerationConfig

from otaro.builtin import MODEL_DIR
from otaro.tune.chat_templates import BUILT_IN, TemplateError, use_template
from otaro.tune.data import load_data
from otaro.tune.forms import PROMPT

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Two?"},
]
WRITTEN = {
    "alpaca": "Be brief.\n\n### Instruction:\nOne?\n\n### Response:\nYes.</s>\n\n### "
    "Instruction:\nTwo?\n\n### Response:\n",
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n"
    "<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n",
    "vicuna": "Be brief. USER: One? ASSISTANT: Yes.</s>USER: Two? ASSISTANT:",
}
ANSWERS = {"alpaca": "Yes.</s>", "chatml": "Yes.<|im_end|>\n", "vicuna": " Yes.</s>"}


@pytest.fixture
def tokenizer():
    loaded = AutoTokenizer.from_pretrained(MODEL_DIR)
    loaded.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    return loaded


@pytest.fixture
def begun(tokenizer):
    beginning = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = beginning
    return tokenizer


def generation(end=1):
    return GenerationConfig(eos_token_id=end)


def rendered(tokenizer, turns=TURNS):
    return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_template_writes_what_its_name_promises(tokenizer, name):
    assert use_template(name, tokenizer, generation()) == []
    assert rendered(tokenizer) == WRITTEN[name]


@pytest.mark.parametrize("name", BUILT_IN)
def test_it_begins_with_the_beginning_of_text_where_the_tokenizer_writes_one(begun, name):
    assert use_template(name, begun, generation()) == []
    assert rendered(begun) == "<s>" + WRITTEN[name]


@pytest.mark.parametrize("name", BUILT_IN)
def test_answers_are_learnt_with_what_ends_them(tokenizer, tmp_path, name):
    use_template(name, tokenizer, generation())
    (tmp_path / "a.json").write_text(str([{"messages": TURNS[:3]}]).replace("'", '"'))
    labels = load_data(tmp_path / "a.json", tokenizer, 512)[0]["labels"]
    assert tokenizer.decode([label for label in labels if label != -100]) == ANSWERS[name]


def test_alpaca_asks_in_the_words_that_instructions_are_tuned_with(tokenizer):
    use_template("alpaca", tokenizer, generation())
    assert rendered(tokenizer, [{"role": "user", "content": "Count."}]) == PROMPT.format(instruction="Count.")


@pytest.mark.parametrize("name", ["alpaca", "vicuna"])
@pytest.mark.parametrize(
    "turns", [[*TURNS, TURNS[0]], [*TURNS, {"role": "tool", "content": "4"}]], ids=["system", "tool"]
)
def test_a_turn_that_it_has_no_words_for_is_refused_rather_than_dropped(tokenizer, name, turns):
    use_template(name, tokenizer, generation())
    with pytest.raises(Exception, match="it knows user, assistant, and system as the first turn, not"):
        rendered(tokenizer, turns)


@pytest.mark.parametrize(
    ("before", "after"), [(1, [1, "im_end"]), ([1, 2], [1, 2, "im_end"]), (None, ["im_end"])], ids=str
)
def test_the_token_that_ends_an_answer_ends_a_generation(tokenizer, before, after):
    config = generation(before)
    use_template("chatml", tokenizer, config)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert config.eos_token_id == [end if token == "im_end" else token for token in after]


def test_a_token_that_ends_generations_already_is_not_named_twice(tokenizer):
    config = generation(tokenizer.eos_token_id)
    use_template("vicuna", tokenizer, config)
    assert config.eos_token_id == tokenizer.eos_token_id


def test_chatml_is_refused_where_its_tokens_are_missing():
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    with pytest.raises(
        TemplateError,
        match=r"chatml needs <\|im_start\|>, <\|im_end\|>, which .* lacks; take alpaca or "
        r"vicuna",
    ):
        use_template("chatml", tokenizer, generation())


def test_without_an_end_of_text_token_a_built_in_template_is_refused(tokenizer):
    tokenizer.eos_token = None
    with pytest.raises(TemplateError, match="--chat-template vicuna needs an end-of-text token"):
        use_template("vicuna", tokenizer, generation())


LOOP = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("one\n{% for", ", line 2 cannot be rendered: "),
        ("{{ messages[0].content + 1 }}", " cannot be rendered: "),
        ("{{ raise_exception('never') }}", " cannot be rendered: never"),
        ("{{ messages[0].content }}", " leaves out what user or assistant say"),
        ("", " leaves out what"),
    ],
)
def test_a_file_that_is_no_template_is_refused(tokenizer, tmp_path, template, words):
    (tmp_path / "mine.jinja").write_text(template)
    with pytest.raises(TemplateError) as refusal:
        use_template(str(tmp_path / "mine.jinja"), tokenizer, generation())
    assert str(refusal.value).startswith(f"--chat-template {tmp_path / 'mine.jinja'}{words}")


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["missing", "no text"])
def test_what_cannot_be_read_is_refused(tokenizer, tmp_path, content):
    if content:
        (tmp_path / "mine").write_bytes(content)
    with pytest.raises(
        TemplateError,
        match=r"is not built in \(alpaca, chatml, vicuna\) and cannot be read "
        r"as a file",
    ):
        use_template(str(tmp_path / "mine"), tokenizer, generation())


def test_a_file_is_taken_as_it_is_and_what_it_lacks_is_told(begun, tmp_path):
    path, config = tmp_path / "mine.jinja", generation()
    path.write_text(LOOP)
    assert use_template(str(path), begun, config) == [
        f"--chat-template {path}: the vocabulary of this model lacks <|user|>, <|assistant|>, to be read as "
        "plain text",
        f"--chat-template {path}: this model expects <s> first: {{{{ bos_token }}}}",
        f"--chat-template {path}: no token tells where an answer ends; write {{{{ eos_token }}}} there",
    ]
    assert (begun.chat_template, config.eos_token_id) == (LOOP, 1)
    path.write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    )
    assert use_template(str(path), begun, config) == []
