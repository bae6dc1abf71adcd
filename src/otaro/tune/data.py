"""Training data from what users have: texts, instruction rows, conversations.

Every source becomes a `TokenDataset`, a list of examples. An example is a list of token ids and, equally
long, the labels: the ids again where the model is to learn, -100 where it only reads. A source holds one of
three kinds of data; `forms` tells how rows of many shapes become them.

**text**: a plain text, which is one document, or rows with a `text`, a document each. Documents are tokenised
as the tokenizer does by default, joined with its end-of-text token between two of them where it has one, and
cut into blocks of `sequence_length` tokens, all of which are learnt. What remains at the end, `h i` below, is
left out; only a stream shorter than one block is one short block. Two documents `a b c` and `d e f g h i`,
cut by 4:

    stream  a b c <eos> d e f g h i     blocks  [a b c <eos>] [d e f g]

Where the tokenizer begins texts with a special token (`tokens.begins_with_bos`), so does every block, since
the model has never seen a text without. It counts in the length, and where a document begins it is there
already:

    stream  <bos> a b c <eos> <bos> d e f g h i     blocks  [<bos> a b c] [<bos> <eos> <bos> d] [<bos> e f g]

With `bos=False` blocks are cut as if it were a token like others.

**instruction**: prompt and answer. Learnt are the answer and the end-of-text token after it. At inference the
prompt comes alone, so the tokens of an example are those of the prompt alone and then the rest of the whole;
where the prompt is tokenised otherwise as part of the whole, the answer is tokenised apart.

**chat**: a conversation as the tokenizer's chat template words it, all special tokens included.

Instruction and chat rows are one example each, cut at `sequence_length`. Left out are rows with an empty
answer, rows without text, and rows that lose their whole answer to the cut. One error names all rows that
cannot be read, by line in .jsonl (where blank lines are no rows), else by index from 0, those with the same
problem together; only `skip_bad_rows` leaves them out. Whatever is left out or cut is counted, and
`TokenDataset.remarks` says it.
"""

from __future__ import annotations

import gzip
import importlib
import json
import random
import re
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from otaro.builtin.documentation import documentation_text
from otaro.errors import OtaroError, install
from otaro.tokens import begins_with_bos
from otaro.tune.forms import NEEDED, BadRow, EmptyAnswer, columns_read, read_row, shared

FILES = (".txt", ".json", ".jsonl", ".parquet")
HUB = re.compile(r"(?P<path>[\w-][\w.-]*/[\w.-]+)(?:/(?P<config>[\w.-]+))?(?::(?P<split>.+))?")
ACCEPTED = (
    "--data takes .txt, .json or .jsonl (each also as .gz), .parquet, a Hub dataset as "
    "owner/name[/config][:split], or builtin"
)
NOT_UTF8 = "not UTF-8; save the file as UTF-8"
UNDECODED = re.compile("[\udc80-\udcff]")  # bytes that are not UTF-8, as "surrogateescape" has them
IGNORED = -100  # what the cross entropy of torch leaves out
PROBLEMS_SHOWN, PLACES_SHOWN = 5, 5  # of rows that cannot be used
TEXTS_AT_ONCE = 1000  # to tokenise in one call: enough for all cores, little enough for any memory

# Each with its place; one that is no JSON, or not UTF-8, is represented by its BadRow.
Rows = Iterable[tuple[str, Any]]
Examples = Iterator[tuple[Sequence[int], Sequence[int]]]
LeftOut = dict[str, int]  # how many rows, by reason


class DataError(OtaroError, ValueError):
    """Training data that cannot be read, or from which nothing can be learnt."""


@dataclass(frozen=True, eq=False)
class TokenDataset(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Examples ready to be trained on, as pairs of ids and labels; see the head of this module."""

    kind: str  # "text", "instruction" or "chat"
    examples: list[tuple[array[int], array[int]]]
    bos: bool = False  # every block of text begins with the beginning-of-text token
    dropped: int = 0  # rows left out
    cut: int = 0  # examples that lost their end to the sequence length
    remarks: tuple[str, ...] = ()  # what a user should know of the last two, a line each

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
    source: str | Path,
    tokenizer: Any,
    sequence_length: int,
    *,
    max_positions: int | None = None,
    skip_bad_rows: bool = False,
    bos: bool = True,
) -> TokenDataset:
    """The examples in a file, a Hub dataset or the built-in text.

    `max_positions` is how many tokens the model can take. `bos` lets blocks of text begin with the
    beginning-of-text token, if the tokenizer begins texts with one.
    """
    if sequence_length < 2:
        raise DataError(
            f"--sequence-length {sequence_length} leaves no token to predict from another; 2 is the least"
        )
    if max_positions is not None and sequence_length > max_positions:
        raise DataError(
            f"--sequence-length {sequence_length} is more than the {max_positions} positions of this model"
        )
    name = str(source)
    kind, rows, left_out = _read_rows(name, _open(name), tokenizer, skip_bad_rows)
    total = len(rows) + sum(left_out.values())
    beginning = begins_with_bos(tokenizer)
    if kind == "text":
        documents = [text for text in rows if text.strip()]
        left_out["no text"] = len(rows) - len(documents)
        stream = _join(name, documents, tokenizer, beginning)
        blocks = _blocks(stream, sequence_length, beginning if bos else None)
        examples: Examples = ((block, block) for block in blocks)
    elif kind == "instruction":
        examples = _encode_instructions(rows, tokenizer, beginning)
    else:
        examples = _encode_chats(rows, tokenizer)
    kept, cut, answerless = [], 0, 0
    for ids, labels in examples:
        # the first token is predicted from nothing
        if all(label == IGNORED for label in labels[1:sequence_length]):
            answerless += 1
            continue
        cut += len(ids) > sequence_length
        kept.append((array("i", ids[:sequence_length]), array("i", labels[:sequence_length])))
    if not kept:
        way = "give a larger one"
        if sequence_length == max_positions:
            way = "this model has no more positions, so shorten the prompts"
        elif max_positions is not None:
            way += f", up to the {max_positions} positions of this model"
        raise DataError(
            f"{name}: --sequence-length {sequence_length} cuts away all answers of all rows; {way}"
        )
    left_out[f"--sequence-length {sequence_length} cuts the whole answer away"] = answerless
    remarks = [
        f"{count:,} of {total:,} rows left out: {reason}" for reason, count in left_out.items() if count
    ]
    if cut:
        remarks.append(f"{cut:,} of {total:,} rows cut short by --sequence-length {sequence_length}")
    begun = bos and kind == "text" and beginning is not None
    return TokenDataset(kind, kept, begun, sum(left_out.values()), cut, tuple(remarks))


def split(dataset: TokenDataset, share: float, seed: int) -> tuple[TokenDataset, TokenDataset]:
    """The data to train on and a `share` of it held out, the same for the same seed, and at least one example
    each.

    Of a text the last blocks are held out, of rows a random choice; remarks stay with the training part.
    """
    total = len(dataset)
    if not 0 < share < 1:
        raise DataError(f"the share to hold out must lie between 0 and 1, got {share}")
    if total < 2:
        raise DataError(
            f"{total} example cannot be divided into one part to train on and one to hold out; give more "
            "data (a text is cut "
            "into blocks of --sequence-length tokens), other data to measure on (--eval-data), or "
            "--hold-out 0"
        )
    count = min(max(1, round(total * share)), total - 1)
    order = list(range(total - 1, -1, -1))
    if dataset.kind != "text":
        random.Random(seed).shuffle(order)
    kept, held = (
        [dataset.examples[index] for index in sorted(part)] for part in (order[count:], order[:count])
    )
    return replace(dataset, examples=kept), replace(dataset, examples=held, dropped=0, cut=0, remarks=())


def collate(pad_id: int) -> Callable[[list[dict[str, list[int]]]], dict[str, torch.Tensor]]:
    """A function that makes a batch [examples, longest example] of examples, padded on the right."""

    def batch_of(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        ids, labels = (
            [torch.tensor(example[key]) for example in examples] for key in ("input_ids", "labels")
        )
        pad = partial(pad_sequence, batch_first=True)
        batch = {"input_ids": pad(ids, padding_value=pad_id), "labels": pad(labels, padding_value=IGNORED)}
        return batch | {"attention_mask": pad([torch.ones_like(row) for row in ids], padding_value=0)}

    return batch_of


def padding_id(tokenizer: Any) -> int:
    """What to pad with: the tokenizer's padding token, or its end of text. Nobody reads or learns it, so at
    worst 0 will do.
    """
    return next(
        (int(token) for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0
    )


def _open(name: str) -> Rows:
    """The rows of a source; a plain text is one row."""
    if name == "builtin":
        return [("text", {"text": documentation_text("tuning")})]
    path, kind = Path(name), Path(name.lower().removesuffix(".gz")).suffix
    if not path.exists():
        hub = HUB.fullmatch(name)
        if kind in FILES or not hub:
            raise DataError(f"{name} does not exist; {ACCEPTED}")
        where = [part for part in (hub["path"], hub["config"]) if part]
        return _from_datasets(f"{name} (no file, so a Hub dataset)", *where, split=hub["split"] or "train")
    if path.is_dir() or kind not in FILES:
        raise DataError(
            f"{name} is {'a directory' if path.is_dir() else 'of no kind that can be read'}; {ACCEPTED}"
        )
    if kind == ".parquet":
        return _from_datasets(name, "parquet", data_files=name, split="train")
    text, not_utf8 = _read_text(path)
    if kind == ".jsonl":  # not splitlines: U+2028 may stand within a JSON string
        return (
            (f"line {number}", BadRow(NOT_UTF8) if UNDECODED.search(line) else _parse(line))
            for number, line in enumerate(text.split("\n"), 1)
            if line.strip()
        )
    rows: Any = {"text": text} if kind == ".txt" else _parse(text)
    if not_utf8 is not None and not isinstance(rows, list):
        raise not_utf8
    if kind == ".txt":
        return [("text", rows)]
    if isinstance(rows, BadRow):
        raise DataError(f"{name} is {rows}; a file with one object a line is to be called .jsonl")
    if not isinstance(rows, list):
        raise DataError(f"{name} holds a {type(rows).__name__}, not a list of objects")
    if not_utf8 is not None:
        rows = [BadRow(NOT_UTF8) if UNDECODED.search(_worded(row)) else row for row in rows]
    return ((f"index {index}", row) for index, row in enumerate(rows))


def _read_text(path: Path) -> tuple[str, DataError | None]:
    """The text of a file; of one that is not UTF-8 as far as it is, with `UNDECODED` for the rest, and why
    not.
    """
    refusal: DataError | None = None
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix.lower() == ".gz" else path.read_bytes()
        text = content.decode()
    except UnicodeDecodeError as error:
        byte, line = (
            f"byte 0x{content[error.start]:02x} at offset {error.start}",
            content.count(b"\n", 0, error.start) + 1,
        )
        refusal = DataError(f"{path} is not UTF-8: {byte}, in line {line}; save it as UTF-8")
        text = content.decode(errors="surrogateescape")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    text = text.removeprefix("\ufeff")  # the byte order mark some editors write
    if not text.strip():
        raise DataError(f"{path} is empty; {ACCEPTED}")
    return text, refusal


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return BadRow(f"not JSON: {error}")


def _worded(row: Any) -> str:
    """All that a row says."""
    try:
        return json.dumps(row, ensure_ascii=False)
    except RecursionError:
        return ""  # is refused for what it is


def _from_datasets(name: str, *arguments: str, **options: str) -> Rows:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(f"{name} needs the package datasets to be read: {install('data')}") from error
    try:
        table = datasets.load_dataset(*arguments, **options)
    except Exception as error:  # network, Hub, Arrow and datasets itself: each has exceptions of its own
        raise DataError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error
    # Other columns may be images, slow to read.
    return _of_table(table.select_columns(columns_read(table.column_names)))


def _of_table(table: Any) -> Iterator[tuple[str, Any]]:
    """Its rows; from the first one that is not UTF-8 on, which ends a walk through them, one by one."""
    done = 0
    with suppress(UnicodeDecodeError):
        for row in table:
            yield f"index {done}", row
            done += 1
    for index in range(done, len(table)):
        try:
            row = table[index]
        except UnicodeDecodeError:
            row = BadRow(NOT_UTF8)
        yield f"index {index}", row


def _read_rows(name: str, rows: Rows, tokenizer: Any, skip_bad_rows: bool) -> tuple[str, list[Any], LeftOut]:
    """The kind of the rows, what is to be tokenised of each, and how many were left out, by reason."""
    kind, first, empty, good = "", "", 0, []
    bad: dict[str, list[str]] = {}  # where a problem occurs
    for place, row in rows:
        try:
            found, content = read_row(row, tokenizer)
            kind, first = kind or found, first or place
            if found != kind:
                raise BadRow(f"is of kind {found}, while {first} is of kind {kind}")
            good.append(content)
        except EmptyAnswer:
            empty += 1
        except BadRow as problem:
            bad.setdefault(str(problem), []).append(place)
    unusable = sum(map(len, bad.values()))
    total = len(good) + unusable + empty
    if bad and not (skip_bad_rows and good):
        shown = [f"{_listed(places)}: {problem}" for problem, places in bad.items()][:PROBLEMS_SHOWN]
        if rest := [len(places) for places in bad.values()][PROBLEMS_SHOWN:]:
            shown.append(f"and {sum(rest):,} more, with other problems")
        raise DataError("\n  ".join([f"{name}: {unusable:,} of {total:,} rows cannot be used:", *shown]))
    if not good:
        nothing = f": the answers of all {empty} rows are empty" if empty else f" holds no rows; {NEEDED}"
        raise DataError(name + nothing)
    reasons = {"empty answer": empty}
    if bad:
        such, places = next(iter(bad.items()))
        reasons[f"cannot be used, such as {places[0]}: {such}"] = unusable
    return kind, good, reasons


def _listed(places: list[str]) -> str:
    more = len(places) - PLACES_SHOWN
    return ", ".join(places[:PLACES_SHOWN]) + (f" and {more:,} more" if more > 0 else "")


def _ids(tokenizer: Any, texts: Sequence[str], **options: bool) -> Iterator[list[int]]:
    for start in range(0, len(texts), TEXTS_AT_ONCE):  # verbose would warn of every long text
        yield from tokenizer(list(texts[start : start + TEXTS_AT_ONCE]), verbose=False, **options)[
            "input_ids"
        ]


def _texts_ids(tokenizer: Any, texts: Sequence[str], beginning: int | None) -> Iterator[list[int]]:
    """The ids of whole texts; where one spells out the beginning that the tokenizer adds, it has it once."""
    for ids in _ids(tokenizer, texts):
        yield ids[1:] if beginning is not None and ids[:2] == [beginning, beginning] else ids


def _join(name: str, documents: list[str], tokenizer: Any, beginning: int | None) -> array[int]:
    stream, eos = array("i"), tokenizer.eos_token_id
    for ids in _texts_ids(tokenizer, documents, beginning):
        if stream and eos is not None and stream[-1] != eos:  # some tokenizers have put it there themselves
            stream.append(eos)
        stream.extend(ids)
    if len(stream) < 2:
        raise DataError(
            f"{name} has {len(stream)} tokens of text; one to predict and one before it are the least"
        )
    return stream


def _blocks(stream: array[int], length: int, bos: int | None) -> Iterator[array[int]]:
    """Blocks of `length` tokens one after the other, each with `bos` in front unless it has it already."""
    start = 0
    while start < len(stream):
        head = array("i", [] if bos is None or stream[start] == bos else [bos])
        end = start + length - len(head)
        if start == 0 or end <= len(stream):
            yield head + stream[start:end]
        start = end


def _encode_instructions(rows: list[tuple[str, str]], tokenizer: Any, beginning: int | None) -> Examples:
    (prompts, answers), eos = zip(*rows, strict=True), tokenizer.eos_token_id
    wholes = [prompt + answer for prompt, answer in rows]
    for read, whole, answer in zip(
        (_without_end(ids, eos) for ids in _texts_ids(tokenizer, prompts, beginning)),
        (_without_end(ids, eos) for ids in _texts_ids(tokenizer, wholes, beginning)),
        (_without_end(ids, eos) for ids in _ids(tokenizer, answers, add_special_tokens=False)),
        strict=True,
    ):
        learnt = whole[len(read) :] if whole[: len(read)] == read else answer
        yield [*read, *learnt, eos], [*[IGNORED] * len(read), *learnt, eos]


def _without_end(ids: list[int], eos: int) -> list[int]:
    """Ids without the end-of-text token that some tokenizers, and some people, put after every text."""
    return ids[:-1] if ids[-1:] == [eos] else ids


def _encode_chats(rows: list[tuple[str, list[tuple[int, int]]]], tokenizer: Any) -> Examples:
    for full, spans in rows:
        # The template has written all special tokens. A token across the border between prompt and answer
        # counts as answer.
        ids, *encoded = _ids(
            tokenizer, [full, *(full[:at] for span in spans for at in span)], add_special_tokens=False
        )
        positions = [shared(ids, prefix) for prefix in encoded]
        labels = [IGNORED] * len(ids)
        for start, end in zip(positions[::2], positions[1::2], strict=True):
            labels[start:end] = ids[start:end]
        yield ids, labels
