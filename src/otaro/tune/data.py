"""Training data from what users have: texts, instruction rows, conversations.

Every source becomes a `TokenDataset`, a list of examples. An example is a list of token ids and, equally long, the labels:
the ids again where the model is to learn, -100 where it only reads. A source holds one of three kinds of data.

**text**: a plain text, which is one document, or rows with a `text`, a document each (rows without any text are dropped).
Documents are tokenised as the tokenizer does by default, joined with its end-of-text token between two of them where it has
one, and cut into blocks of `sequence_length` tokens, all of which are learnt. What remains at the end, below `h`, is left out;
only a stream shorter than one block is one short block. Two documents `a b c` and `d e f g h`, cut by 4:

    stream  a b c <eos> d e f g h       blocks  [a b c <eos>] [d e f g]

**instruction**: rows with `instruction`, perhaps `input`, and `output`. The prompt is that of Alpaca; learnt are the answer and
the end-of-text token after it. Prompt and answer are tokenised apart, since at inference the prompt comes alone.

**chat**: rows with `messages`, each a `role` and a `content`, worded by the tokenizer's chat template. Learnt are the turns of
the assistant, from where the template's prompt for an answer ends to where it closes the turn. A template does not say where
that is, so a conversation is rendered again and again, up to each of these turns without it and with it.

Instruction and chat rows are one example each, cut at `sequence_length`. Rows that thereby lose their whole answer are dropped.
Null counts as absent, fields not named here are ignored, and a row that could be read in two ways (Alpaca's have a `text` too)
is chat before instruction before text. Any other row not as described is bad. One error names all bad rows, by line in .jsonl
(where blank lines are no rows), else by index from 0; only `skip_bad_rows` drops them. Whatever is dropped is counted.
"""

from __future__ import annotations

import gzip
import importlib
import json
import random
import re
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import jinja2
import torch
from torch.nn.utils.rnn import pad_sequence

from otaro.builtin.documentation import documentation_text
from otaro.errors import OtaroError, install

FILES = (".txt", ".json", ".jsonl", ".parquet")
ACCEPTED = "--data takes .txt, .json or .jsonl (each also as .gz), .parquet, a Hub dataset as owner/name[:split], or builtin"
NEEDED = "a row needs `messages`, or `instruction` and `output`, or `text`"
IGNORED = -100  # what the cross entropy of torch leaves out
BAD_ROWS_SHOWN = 5
TEXTS_AT_ONCE = 1000  # to tokenise in one call: enough for all cores, little enough for any memory
_TASK = "Write a response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n"
PROMPT = f"Below is an instruction that describes a task. {_TASK}### Response:\n"
PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    f"{_TASK}### Input:\n{{input}}\n\n### Response:\n"
)

Rows = Iterable[tuple[str, Any]]  # each with its place; a line that is no JSON is represented by its BadRow
Examples = Iterator[tuple[Sequence[int], Sequence[int]]]


class DataError(OtaroError, ValueError):
    """Training data that cannot be read, or from which nothing can be learnt."""


class BadRow(Exception):
    """Why one row cannot be used; all those of a source end up in one DataError."""


@dataclass(frozen=True, eq=False)
class TokenDataset(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Examples ready to be trained on, as pairs of ids and labels; see the head of this module."""

    kind: str  # "text", "instruction" or "chat"
    examples: list[tuple[array[int], array[int]]]
    dropped: int = 0  # rows left out
    cut: int = 0  # examples that lost their end to the sequence length

    @property
    def tokens(self) -> int:
        """Tokens in all examples together, learnt or read."""
        return sum(len(ids) for ids, _ in self.examples)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        ids, labels = self.examples[index]
        return {"input_ids": ids.tolist(), "labels": labels.tolist()}


def load_data(
    source: str | Path, tokenizer: Any, sequence_length: int, *, max_positions: int | None = None, skip_bad_rows: bool = False
) -> TokenDataset:
    """The examples in a file, a Hub dataset or the built-in text; `max_positions` is how many tokens the model can take."""
    if sequence_length < 2:
        raise DataError(f"--sequence-length {sequence_length} leaves no token to predict from another; 2 is the least")
    if max_positions is not None and sequence_length > max_positions:
        raise DataError(f"--sequence-length {sequence_length} is more than the {max_positions} positions of this model")
    name = str(source)
    kind, rows, dropped = _read_rows(name, _open(name), tokenizer, skip_bad_rows)
    if kind == "text":
        dropped += sum(not text.strip() for text in rows)
        examples = _encode_texts(name, rows, tokenizer, sequence_length)
    else:
        examples = (_encode_instructions if kind == "instruction" else _encode_chats)(rows, tokenizer)
    kept, cut = [], 0
    for ids, labels in examples:
        if all(label == IGNORED for label in labels[1:sequence_length]):  # the first token is predicted from nothing
            dropped += 1
            continue
        cut += len(ids) > sequence_length
        kept.append((array("i", ids[:sequence_length]), array("i", labels[:sequence_length])))
    if not kept:
        raise DataError(f"{name}: --sequence-length {sequence_length} cuts away all answers of all rows; give a larger one")
    return TokenDataset(kind, kept, dropped, cut)


def split(dataset: TokenDataset, share: float, seed: int) -> tuple[TokenDataset, TokenDataset]:
    """The data to train on and a `share` of it held out, the same for the same seed, and at least one example each.

    Of a text the last blocks are held out, of rows a random choice; `dropped` and `cut` stay with the training part.
    """
    total = len(dataset)
    if not 0 < share < 1:
        raise DataError(f"the share to hold out must lie between 0 and 1, got {share}")
    if total < 2:
        raise DataError(f"{total} example cannot be divided into one part to train on and one to hold out; give more data")
    count = min(max(1, round(total * share)), total - 1)
    order = list(range(total - 1, -1, -1))
    if dataset.kind != "text":
        random.Random(seed).shuffle(order)
    kept, held = ([dataset.examples[index] for index in sorted(part)] for part in (order[count:], order[:count]))
    return replace(dataset, examples=kept), replace(dataset, examples=held, dropped=0, cut=0)


def collate(pad_id: int) -> Callable[[list[dict[str, list[int]]]], dict[str, torch.Tensor]]:
    """A function that makes a batch [examples, longest example] of examples, padded on the right."""

    def batch_of(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        ids, labels = ([torch.tensor(example[key]) for example in examples] for key in ("input_ids", "labels"))
        pad = partial(pad_sequence, batch_first=True)
        batch = {"input_ids": pad(ids, padding_value=pad_id), "labels": pad(labels, padding_value=IGNORED)}
        return batch | {"attention_mask": pad([torch.ones_like(row) for row in ids], padding_value=0)}

    return batch_of


def padding_id(tokenizer: Any) -> int:
    """What to pad with: the tokenizer's padding token, or its end of text. Nobody reads or learns it, so at worst 0 will do."""
    return next((int(token) for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)


def _open(name: str) -> Rows:
    """The rows of a source; a plain text is one row."""
    if name == "builtin":
        return [("text", {"text": documentation_text("tuning")})]
    path, kind = Path(name), Path(name.lower().removesuffix(".gz")).suffix
    if not path.exists():
        hub = re.fullmatch(r"([\w-][\w.-]*/[\w.-]+)(?::(.+))?", name)
        if kind in FILES or not hub:
            raise DataError(f"{name} does not exist; {ACCEPTED}")
        return _from_datasets(f"{name} (no file, so a Hub dataset)", hub[1], split=hub[2] or "train")
    if path.is_dir() or kind not in FILES:
        raise DataError(f"{name} is {'a directory' if path.is_dir() else 'of no kind that can be read'}; {ACCEPTED}")
    if kind == ".parquet":
        return _from_datasets(name, "parquet", data_files=name, split="train")
    text = _read_text(path)
    if kind == ".jsonl":  # not splitlines: U+2028 may stand within a JSON string
        return ((f"line {number}", _parse(line)) for number, line in enumerate(text.split("\n"), 1) if line.strip())
    if kind == ".txt":
        return [("text", {"text": text})]
    rows = _parse(text)
    if isinstance(rows, BadRow):
        raise DataError(f"{name} is {rows}; a file with one object a line is to be called .jsonl")
    if not isinstance(rows, list):
        raise DataError(f"{name} holds a {type(rows).__name__}, not a list of objects")
    return ((f"index {index}", row) for index, row in enumerate(rows))


def _read_text(path: Path) -> str:
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix.lower() == ".gz" else path.read_bytes()
        text = content.decode().removeprefix("\ufeff")  # the byte order mark some editors write
    except UnicodeDecodeError as error:
        byte, line = f"byte 0x{content[error.start]:02x} at offset {error.start}", content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path} is not UTF-8: {byte}, in line {line}; save it as UTF-8") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not text.strip():
        raise DataError(f"{path} is empty; {ACCEPTED}")
    return text


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return BadRow(f"not JSON: {error}")


def _from_datasets(name: str, *arguments: str, **options: str) -> Rows:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(f"{name} needs the package datasets to be read: {install('data')}") from error
    try:
        table = datasets.load_dataset(*arguments, **options)
    except Exception as error:  # network, Hub, Arrow and datasets itself: each has exceptions of its own
        raise DataError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error
    # Other columns may be images, slow to read; but where no column is known, the rows are to show what they have.
    known = [column for column in table.column_names if column in ("messages", "instruction", "input", "output", "text")]
    return ((f"index {index}", row) for index, row in enumerate(table.select_columns(known) if known else table))


def _read_rows(name: str, rows: Rows, tokenizer: Any, skip_bad_rows: bool) -> tuple[str, list[Any], int]:
    """The kind of the rows, what is to be tokenised of each, and how many were skipped."""
    kind, first, good, bad = "", "", [], []
    for place, row in rows:
        try:
            found, content = _read_row(row, tokenizer)
            kind, first = kind or found, first or place
            if found != kind:
                raise BadRow(f"is of kind {found}, while {first} is of kind {kind}")
            good.append(content)
        except BadRow as problem:
            bad.append(f"{place}: {problem}")
    if bad and not (skip_bad_rows and good):
        shown = bad[:BAD_ROWS_SHOWN] + [f"and {len(bad) - BAD_ROWS_SHOWN} more"] * (len(bad) > BAD_ROWS_SHOWN)
        raise DataError("\n  ".join([f"{name}: {len(bad)} of {len(bad) + len(good)} rows cannot be used:", *shown]))
    if not good:
        raise DataError(f"{name} holds no rows; {NEEDED}")
    return kind, good, len(bad)


def _read_row(row: Any, tokenizer: Any) -> tuple[str, Any]:
    if isinstance(row, BadRow):
        raise row
    if not isinstance(row, Mapping):
        raise BadRow(f"is of type {type(row).__name__}, not an object")
    if row.get("messages") is not None:
        if not tokenizer.chat_template:
            raise BadRow("is a chat, but the tokenizer of this model has no chat template")
        return "chat", _chat(row["messages"], tokenizer)
    if row.get("instruction") is not None:
        if tokenizer.eos_token_id is None:
            raise BadRow("is an instruction, but the tokenizer of this model has no end-of-text token to end the answer with")
        return "instruction", _instruction(row)
    if row.get("text") is not None:
        return "text", _string(row, "text", may_be_blank=True)
    raise BadRow(f"has {', '.join(f'`{field}`' for field in row) or 'no fields'}; {NEEDED}")


def _string(row: Mapping[str, Any], field: str, *, may_be_blank: bool = False, within: str = "") -> str:
    value, called = row.get(field), f"`{within}{field}`"
    if not isinstance(value, str):
        raise BadRow(f"{called} is " + ("missing" if value is None else f"of type {type(value).__name__}, not a string"))
    if not may_be_blank and not value.strip():
        raise BadRow(f"{called} is empty")
    if re.search("[\ud800-\udfff]", value):
        raise BadRow(f"{called} holds half a surrogate pair, which is no character")
    return value


def _instruction(row: Mapping[str, Any]) -> tuple[str, str]:
    context = "" if row.get("input") is None else _string(row, "input", may_be_blank=True)
    prompt = PROMPT_WITH_INPUT if context.strip() else PROMPT
    return prompt.format(instruction=_string(row, "instruction"), input=context), _string(row, "output")


def _chat(value: Any, tokenizer: Any) -> tuple[str, list[tuple[int, int]]]:
    """A conversation as the template words it, and the spans of characters to be learnt."""
    messages, render = _messages(value), partial(tokenizer.apply_chat_template, tokenize=False)
    try:
        full, spans = render(messages), []
        for index in [index for index, message in enumerate(messages) if message["role"] == "assistant"]:
            # Some templates prompt for more than they write into a finished turn, such as <think>; what is shared counts.
            start = _shared(full, render(messages[:index], add_generation_prompt=True))
            turn, answer = render(messages[: index + 1])[start:], messages[index]["content"].strip()
            # Some drop what a turn begins with, such as an empty thought, once another turn follows.
            drops = range(max(turn.find(answer), 0) + 1)
            end = next((start + len(turn) - drop for drop in drops if full.startswith(turn[drop:], start)), None)
            if end is None or start < len(render(messages[:index])):
                raise BadRow(f"the chat template rewords messages[{index}] later; give each turn of the assistant its own row")
            spans.append((start, end))
    except jinja2.TemplateError as error:
        raise BadRow(f"the chat template refuses it: {error}") from error
    return full, spans


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list):
        raise BadRow(f"`messages` is of type {type(value).__name__}, not a list")
    messages = []
    for index, message in enumerate(value):
        within = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise BadRow(f"`{within}` is of type {type(message).__name__}, not an object")
        role = _string(message, "role", within=f"{within}.")
        content = _string(message, "content", within=f"{within}.", may_be_blank=role != "assistant")
        messages.append({"role": role, "content": content})
    roles = [message["role"] for message in messages]
    if "assistant" not in roles or roles[0] == "assistant":
        raise BadRow(f"needs a turn of the assistant, but not as the first; the roles are {', '.join(roles) or 'none'}")
    return messages


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items two sequences begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _ids(tokenizer: Any, texts: Sequence[str], **options: bool) -> Iterator[list[int]]:
    for start in range(0, len(texts), TEXTS_AT_ONCE):  # verbose would warn of every long text
        yield from tokenizer(list(texts[start : start + TEXTS_AT_ONCE]), verbose=False, **options)["input_ids"]


def _encode_texts(name: str, documents: list[str], tokenizer: Any, length: int) -> Examples:
    stream, eos = array("i"), tokenizer.eos_token_id
    for ids in _ids(tokenizer, [text for text in documents if text.strip()]):
        if stream and eos is not None and stream[-1] != eos:  # some tokenizers have put it there themselves
            stream.append(eos)
        stream.extend(ids)
    if len(stream) < 2:
        raise DataError(f"{name} has {len(stream)} tokens of text; one to predict and one before it are the least")
    for start in range(0, max(len(stream) - length, 0) + 1, length):
        yield (block := stream[start : start + length]), block


def _encode_instructions(rows: list[tuple[str, str]], tokenizer: Any) -> Examples:
    (prompts, answers), eos = zip(*rows, strict=True), tokenizer.eos_token_id
    for prompt, answer in zip(_ids(tokenizer, prompts), _ids(tokenizer, answers, add_special_tokens=False), strict=True):
        read = prompt[:-1] if prompt[-1] == eos else prompt  # from a tokenizer that ends every text by itself
        yield [*read, *answer, eos], [*[IGNORED] * len(read), *answer, eos]


def _encode_chats(rows: list[tuple[str, list[tuple[int, int]]]], tokenizer: Any) -> Examples:
    for full, spans in rows:
        # The template has written all special tokens. A token across the border between prompt and answer counts as answer.
        ids, *encoded = _ids(tokenizer, [full, *(full[:at] for span in spans for at in span)], add_special_tokens=False)
        positions = [_shared(ids, prefix) for prefix in encoded]
        labels = [IGNORED] * len(ids)
        for start, end in zip(positions[::2], positions[1::2], strict=True):
            labels[start:end] = ids[start:end]
        yield ids, labels
