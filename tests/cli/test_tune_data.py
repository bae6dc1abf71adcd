"""What `otaro tune` makes of its data, as a user meets it: what is said, what is recorded, what `otaro chat`
speaks."""

import json
import shutil

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

import otaro
from otaro.builtin import MODEL_DIR, topics_training_text
from otaro.cli.analyze import _load
from otaro.cli.main import app
from otaro.file.checkpoint import Checkpoint
from otaro.tune.forms import PROMPT

SMALL = [
    "--steps",
    "1",
    "--batch-size",
    "1",
    "--sequence-length",
    "96",
    "--eval-tokens",
    "64",
    "--method",
    "fp",
]
CHAT = {
    "messages": [
        {"role": "user", "content": "What is a list?"},
        {"role": "assistant", "content": "A sequence."},
    ]
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The built-in model with a tokenizer that begins every text with <s>."""
    directory = tmp_path_factory.mktemp("begun") / "model"
    shutil.copytree(MODEL_DIR, directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    beginning = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = beginning
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(topics_training_text()[:2000])
    return tmp_path / "text.txt"


def tune(model, data, out, *more):
    return CliRunner().invoke(app, ["tune", *map(str, (model, "--data", data, "--out", out)), *SMALL, *more])


@pytest.mark.parametrize(("flags", "bos"), [([], True), (["--no-bos"], False)], ids=["", "--no-bos"])
def test_a_run_records_whether_its_sequences_begin_with_the_beginning_of_text(
    model, text, tmp_path, flags, bos
):
    result = tune(model, text, tmp_path / "run", *flags, "--json")
    assert result.exit_code == 0, result.output + repr(result.exception)
    stated = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (stated["bos"], stated["training"]["no_bos"]) == (bos, not bos)


@pytest.mark.parametrize("bos", [True, False])
def test_sequences_that_gradients_are_compared_on_begin_with_it_too(model, text, bos):
    _, batches, begun = _load(Checkpoint(model), str(text), 2, 2, 32, bos, "cpu")
    assert begun == bos
    assert [bool((batch["input_ids"][:, 0] == 0).all()) for batch in batches] == [bos, bos]


def test_a_base_model_tuned_on_chats_speaks_the_template_it_was_given(model, tmp_path):
    empty = {"messages": [CHAT["messages"][0], {"role": "assistant", "content": ""}]}
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, [CHAT] * 3 + [empty])))
    refused = tune(model, tmp_path / "chats.jsonl", tmp_path / "run")
    assert "this model has no chat template; give it one, such as --chat-template alpaca" in str(
        refused.exception
    )
    result = tune(model, tmp_path / "chats.jsonl", tmp_path / "run", "--chat-template", "alpaca")
    assert result.exit_code == 0, result.output + repr(result.exception)
    assert "1 of 4 rows left out: empty answer" in result.stderr.splitlines()
    for kept in (tmp_path / "run" / "model", tmp_path / "run" / "nested"):
        tokenizer = AutoTokenizer.from_pretrained(kept)
        prompt = tokenizer.apply_chat_template(
            CHAT["messages"][:1], tokenize=False, add_generation_prompt=True
        )
        assert prompt == "<s>" + PROMPT.format(instruction="What is a list?")
        assert GenerationConfig.from_pretrained(kept).eos_token_id in (
            tokenizer.eos_token_id,
            [tokenizer.eos_token_id],
        )
    chat = CliRunner().invoke(
        app, ["chat", str(tmp_path / "run" / "nested"), "--max-new-tokens", "2"], input="Hello\n"
    )
    assert chat.exit_code == 0, chat.output + repr(chat.exception)
    assert "no chat template" not in chat.stderr


def test_a_template_that_does_not_exist_is_refused_before_anything_is_written(text, tmp_path):
    result = tune("builtin", text, tmp_path / "run", "--chat-template", "chatm")
    assert isinstance(result.exception, otaro.OtaroError)
    assert "--chat-template chatm is not built in (alpaca, chatml, vicuna) and cannot be read" in str(
        result.exception
    )
    assert not (tmp_path / "run").exists()
