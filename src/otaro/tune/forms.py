"""What a row of training data may look like.

People keep the same thing under many names: a prompt and its answer, or a conversation. `FORMS` lists what is
read, and docs/data.md shows a row of each. A form applies to a row that has all the fields it needs, the
first of them not null; of several that apply (Alpaca's rows have a `text` too) the first in the list.
Whatever it is called, a row becomes one of three kinds of content:

    text          a document
    instruction   a prompt and its answer, as they are to be read
    chat          a conversation as the chat template words it, and the spans of characters to be learnt

Learnt are the answers alone. A template does not say where the turns of the assistant are, so a conversation
is rendered again and again, up to each of these turns without it and with it: learnt is from where the
template's prompt for an answer ends to where it closes the turn.

A question is a turn of the user where the model has a chat template, since so it will be asked; elsewhere it
is the text that evaluations of base models use, `Question: ...`, a new line, `Answer:`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

import jinja2

_TASK = "Write a response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n"
PROMPT = f"Below is an instruction that describes a task. {_TASK}### Response:\n"
PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    f"{_TASK}### Input:\n{{input}}\n\n### Response:\n"
)
QUESTION, ANSWER = "Question: {question}\nAnswer:", " {answer}"
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}

Row = Mapping[str, Any]
Content = tuple[str, Any]  # one of the three kinds, and what is to be tokenised


class BadRow(Exception):
    """Why a row cannot be used."""


class EmptyAnswer(Exception):
    """A row as it should be, but with nothing in it to learn."""


@dataclass(frozen=True)
class Form:
    """A form of rows: the fields it needs, of which the first must not be null, and those it may have."""

    needed: tuple[str, ...]
    read: Callable[[Row, Any], Content]
    optional: tuple[str, ...] = ()

    def applies_to(self, row: Row) -> bool:
        """Whether a row is of this form."""
        return row.get(self.needed[0]) is not None and all(field in row for field in self.needed)


def read_row(row: Any, tokenizer: Any) -> Content:
    """The kind of a row, and what is to be tokenised of it."""
    if isinstance(row, BadRow):
        raise row
    if not isinstance(row, Mapping):
        raise BadRow(f"is of type {type(row).__name__}, not an object")
    for form in FORMS:
        if form.applies_to(row):
            return form.read(row, tokenizer)
    if all(row.get(field) is not None for field in PREFERENCE):
        raise BadRow(f"is preference data, which is not read; keep the `chosen` answers: {NEEDED}")
    raise BadRow(f"has {', '.join(f'`{field}`' for field in row) or 'no fields'}; {NEEDED}")


def columns_read(columns: Collection[str]) -> list[str]:
    """The columns of a table that rows are read from; all where they make up no form, for the error."""
    found = [form for form in FORMS if {*form.needed} <= {*columns}]
    read = {field for form in found for field in (*form.needed, *form.optional)}
    return [column for column in columns if column in read or not read]


def _string(row: Row, field: str, *, may_be_blank: bool = False, within: str = "") -> str:
    value, called = row.get(field), f"`{within}{field}`"
    if not isinstance(value, str):
        found = "missing" if value is None else f"of type {type(value).__name__}, not a string"
        raise BadRow(f"{called} is {found}")
    if not may_be_blank and not value.strip():
        raise BadRow(f"{called} is empty")
    if re.search("[\ud800-\udfff]", value):
        raise BadRow(f"{called} holds half a surrogate pair, which is no character")
    return value


def _answer(row: Row, field: str) -> str:
    """What is to be learnt of a row that has such a field; in a table, null is how an answer is missing."""
    if row[field] is None or not (answer := _string(row, field, may_be_blank=True)).strip():
        raise EmptyAnswer
    return answer


# Prompts and answers.


def _read_instruction(row: Row, tokenizer: Any) -> Content:
    context = "" if row.get("input") is None else _string(row, "input", may_be_blank=True)
    template = PROMPT_WITH_INPUT if context.strip() else PROMPT
    prompt = template.format(instruction=_string(row, "instruction"), input=context)
    return _pair(prompt, _answer(row, "output"), tokenizer)


def _read_question(row: Row, tokenizer: Any) -> Content:
    question, answer = _string(row, "question"), _answer(row, "answer")
    if not tokenizer.chat_template:
        return _pair(QUESTION.format(question=question), ANSWER.format(answer=answer), tokenizer)
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return _chat(turns, tokenizer)


def _read_completion(row: Row, tokenizer: Any) -> Content:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(row.get("label"), bool):
        raise BadRow(f"is preference data, by its `label`; keep the good completions, without it: {NEEDED}")
    if completion is None:
        raise EmptyAnswer
    if isinstance(prompt, list) and isinstance(completion, list):
        before = _messages(prompt, "prompt")
        if not (after := _messages(completion, "completion")):
            raise EmptyAnswer
        return _chat([*before, *after], tokenizer, learnt_from=len(before))
    if isinstance(prompt, list) or isinstance(completion, list):
        raise BadRow("of `prompt` and `completion` one is a list; give two strings, or two lists of messages")
    return _pair(_string(row, "prompt", may_be_blank=True), _answer(row, "completion"), tokenizer)


def _pair(prompt: str, answer: str, tokenizer: Any) -> Content:
    if tokenizer.eos_token_id is None:
        raise BadRow("has an answer, but the tokenizer of this model has no end-of-text token to end it with")
    return "instruction", (prompt, answer)


# Conversations.


def _read_messages(row: Row, tokenizer: Any) -> Content:
    return _chat(_messages(row["messages"], "messages"), tokenizer)


def _read_conversations(row: Row, tokenizer: Any) -> Content:
    return _chat(_messages(row["conversations"], "conversations"), tokenizer)


def _messages(value: Any, name: str) -> list[dict[str, str]]:
    """The turns of a conversation, each as a `role` and a `content`, whatever they are called there."""
    if not isinstance(value, list):
        raise BadRow(f"`{name}` is of type {type(value).__name__}, not a list")
    messages = []
    for index, message in enumerate(value):
        within = f"{name}[{index}]"
        if not isinstance(message, Mapping):
            raise BadRow(f"`{within}` is of type {type(message).__name__}, not an object")
        of_sharegpt = message.get("role") is None and message.get("from") is not None
        names = ("from", "value") if of_sharegpt else ("role", "content")
        role = _string(message, names[0], within=f"{within}.")
        if of_sharegpt and role not in SPEAKERS:
            raise BadRow(f"`{within}.from` is {role!r}; {', '.join(SPEAKERS)} are known")
        if message.get("tool_calls"):
            raise BadRow(f"`{within}.tool_calls` holds calls of tools, which are not learnt")
        content = _string(message, names[1], within=f"{within}.", may_be_blank=True)
        messages.append({"role": SPEAKERS[role] if of_sharegpt else role, "content": content})
    return messages


def _chat(messages: list[dict[str, str]], tokenizer: Any, learnt_from: int = 0) -> Content:
    """A conversation as the template words it, and the spans of the assistant's turns from an index on."""
    roles = [message["role"] for message in messages]
    if "assistant" not in roles[learnt_from:] or roles[0] == "assistant":
        present = ", ".join(roles) or "none"
        raise BadRow(f"needs a turn of the assistant, but not as the first; the roles are {present}")
    turns = [index for index in range(learnt_from, len(roles)) if roles[index] == "assistant"]
    if not all(messages[index]["content"].strip() for index in turns):
        raise EmptyAnswer
    if not tokenizer.chat_template:
        raise BadRow(
            "is a chat, but this model has no chat template; give it one, such as --chat-template alpaca"
        )
    render = partial(tokenizer.apply_chat_template, tokenize=False)
    try:
        full, spans = render(messages), []
        for index in turns:
            # Some prompt for more than a finished turn shows, such as <think>; what is shared counts.
            start = shared(full, render(messages[:index], add_generation_prompt=True))
            turn, answer = render(messages[: index + 1])[start:], messages[index]["content"].strip()
            # Some drop what a turn begins with, such as an empty thought, once another turn follows.
            drops = range(max(turn.find(answer), 0) + 1)
            drop = next((drop for drop in drops if full.startswith(turn[drop:], start)), None)
            if drop is None or start < len(render(messages[:index])):
                raise BadRow(f"the chat template rewords turn {index} later; end a row after each such turn")
            spans.append((start, start + len(turn) - drop))
    except jinja2.TemplateError as error:
        raise BadRow(f"the chat template refuses it: {error}") from error
    return "chat", (full, spans)


def shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items two sequences begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _read_text(row: Row, tokenizer: Any) -> Content:
    return "text", _string(row, "text", may_be_blank=True)


FORMS = (
    Form(("messages",), _read_messages),
    Form(("conversations",), _read_conversations),
    Form(("prompt", "completion"), _read_completion, optional=("label",)),
    Form(("instruction", "output"), _read_instruction, optional=("input",)),
    Form(("question", "answer"), _read_question),
    Form(("text",), _read_text),
)
PREFERENCE = ("chosen", "rejected")
NEEDED = "a row needs " + ", or ".join(" and ".join(f"`{field}`" for field in form.needed) for form in FORMS)
