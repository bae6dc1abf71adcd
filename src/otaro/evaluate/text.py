"""The text to measure on: a file, or a data set on the Hub, and what identifies it in a quality record."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import zlib
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from otaro.errors import OtaroError, install
from otaro.file.checkpoint import brief
from otaro.tokens import begins_with_bos

_HUB = re.compile(r"(?P<path>[\w-][\w.-]*/[\w.-]+)(?:/(?P<config>[\w.-]+))?(?::(?P<split>[\w.\[\]%:+-]+))?")
_HUB_FORM = "owner/name[/config][:split]"


class TextError(OtaroError, ValueError):
    """A text that cannot be read, or holds nothing to measure on."""


@dataclass(frozen=True)
class Text:
    """A text, the name it goes by, and the words of the command line that fetch it again."""

    name: str
    content: str
    source: str

    @property
    def sha256(self) -> str:
        """Of the text in UTF-8."""
        return hashlib.sha256(self.content.encode()).hexdigest()

    def ids(self, tokenizer: Any) -> torch.Tensor:
        """The text as token ids [tokens], without a token that begins it: windows have that, each of them."""
        ids: torch.Tensor = tokenizer(self.content, return_tensors="pt", verbose=False)["input_ids"][0]
        if begins_with_bos(tokenizer) is not None:
            ids = ids[1:]
        if len(ids) < 2:
            least = "one to predict and one before it are the least"
            raise TextError(f"{self.source} has {len(ids)} tokens of text; {least}")
        return ids


def read_text(source: str) -> Text:
    """Read a text file (UTF-8, perhaps .gz), or the `text` of a Hub data set: owner/name[/config][:split].

    Rows of a data set are joined by blank lines, as the transformers documentation does; the split is `test`
    unless given. So are the rows of a .jsonl, .json or .parquet file, which must have a `text`: markup is no
    text to measure on.
    """
    path = Path(source)
    if not source or path.is_dir():
        odd = f"{source} is a directory" if source else "is empty"
        raise TextError(f"--text {odd}; give a text file, or a Hub data set as {_HUB_FORM}")
    content = _from_file(path) if path.exists() else _from_hub(source)
    if not content.strip():
        raise TextError(f"--text {source} holds no text")
    name = path.name if path.exists() else source
    return Text(name if name.isprintable() else ascii(name), content, source)


def _from_file(path: Path) -> str:
    plain = path.with_suffix("") if path.suffix == ".gz" else path  # whose ending tells what it is
    kind = plain.suffix.lower()
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if kind == ".parquet":
            return _joined(path, _parquet_rows(path, raw))
        content = raw.decode().removeprefix("\ufeff")  # the byte order mark some editors write
        return _joined(path, _json_rows(path, content, kind)) if kind in (".json", ".jsonl") else content
    except UnicodeDecodeError as error:
        odd = f"byte {error.start} is not"
        raise TextError(f"--text {path} is no text in UTF-8 ({odd}); convert it") from None
    except (OSError, EOFError, zlib.error) as error:
        raise TextError(f"--text {path} cannot be read: {error}") from error


def _json_rows(path: Path, content: str, kind: str) -> list[Any]:
    try:
        if kind == ".jsonl":
            return [json.loads(line) for line in content.split("\n") if line.strip()]
        rows = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TextError(f"--text {path} is no {kind.removeprefix('.').upper()}: {brief(error)}") from None
    return rows if isinstance(rows, list) else [rows]


def _parquet_rows(path: Path, raw: bytes) -> list[Any]:
    if find_spec("pyarrow") is None:
        raise TextError(f"--text {path} needs a package: {install('data')}")
    try:
        found: list[Any] = import_module("pyarrow.parquet").read_table(io.BytesIO(raw)).to_pylist()
    except Exception as error:  # pyarrow has exceptions of its own
        raise TextError(f"--text {path} cannot be read: {brief(error)}") from None
    return found


def _joined(path: Path, rows: list[Any]) -> str:
    """The texts of the rows, joined by blank lines; rows without one are refused: all else is no text."""
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise TextError(f"--text {path}: row {number} is no object with a `text`")
        if not isinstance(row.get("text"), str | None) or "text" not in row:
            has = ", ".join(f"`{str(name)[:40]}`" for name in list(row)[:8]) or "nothing"
            has = has if has.isprintable() else ascii(has)
            odd = f"--text {path}: row {number} has no `text`, but {has}"
            raise TextError(f"{odd}; write what is to be measured into a text file")
    return "\n\n".join(row["text"] or "" for row in rows)


def _from_hub(source: str) -> str:
    if (hub := _HUB.fullmatch(source)) is None:
        raise TextError(f"--text {source} does not exist, and is no Hub data set either ({_HUB_FORM})")
    if find_spec("datasets") is None:
        raise TextError(f"--text {source} is no file, and a Hub data set needs a package: {install('data')}")
    try:
        load, split = import_module("datasets").load_dataset, hub["split"] or "test"
        rows = load(hub["path"], hub["config"], split=split)
    except Exception as error:  # network, Hub, Arrow and datasets itself: each has exceptions of its own
        failed = f"fetching it from the Hub failed: {brief(error)}"
        raise TextError(f"--text {source} is no file, and {failed}") from error
    if "text" not in rows.column_names:
        raise TextError(f"--text {source} has no column `text`, but {', '.join(rows.column_names)}")
    return "\n\n".join(row or "" for row in rows["text"])
