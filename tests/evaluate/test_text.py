"""Texts from files and data sets."""

import gzip
import hashlib
import importlib
import io
import json
import sys
import types

import pytest
from transformers import AutoTokenizer

from otaro.builtin import MODEL_DIR
from otaro.evaluate.text import Text, TextError, read_text


def test_a_file_goes_by_its_name_and_its_digest(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffGrüße\n".encode())
    text = read_text(str(tmp_path / "a.txt"))
    assert (text.name, text.content, text.source) == ("a.txt", "Grüße\n", str(tmp_path / "a.txt"))
    assert text.sha256 == hashlib.sha256("Grüße\n".encode()).hexdigest()


def test_a_compressed_file_is_the_text_in_it(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"hello"))
    assert read_text(str(tmp_path / "a.txt.gz")).content == "hello"


def write_rows(path, rows):
    """Rows in a file of the kind that its name says."""
    if ".parquet" in path.name:
        arrow = pytest.importorskip("pyarrow", reason="pyarrow, which writes parquet files, is not installed")
        parquet = importlib.import_module("pyarrow.parquet")
        buffer = io.BytesIO()
        parquet.write_table(arrow.Table.from_pylist(rows), buffer)
        raw = buffer.getvalue()
    elif ".jsonl" in path.name:
        raw = "".join(json.dumps(row) + "\n\n" for row in rows).encode()  # blank lines are no rows
    else:
        raw = json.dumps(rows).encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.json", "a.parquet", "a.jsonl.gz", "a.json.gz", "a.parquet.gz", "A.JSONL"]
)
def test_rows_with_a_text_are_joined_by_blank_lines_and_others_refused_by_their_fields(tmp_path, name):
    rows = [{"text": "one", "id": 1}, {"text": "", "id": 2}, {"text": "two", "id": 3}]
    assert (
        read_text(str(write_rows(tmp_path / name.lower(), rows).rename(tmp_path / name))).content
        == "one\n\n\n\ntwo"
    )
    rows = (
        [{"text": "one", "id": 1}, {"instruction": "Add.", "output": "3"}]
        if "parquet" not in name
        else [{"output": "3"}]
    )
    write_rows(tmp_path / name.lower(), rows).rename(tmp_path / name)
    with pytest.raises(
        TextError, match=f"row {len(rows)} has no `text`, but .*`output`; write what is to be measured"
    ):
        read_text(str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text": "one"}\n{"text"', "is no JSONL: "),
        ("a.json", b"[" * 100_000, "is no JSON: "),
        ("a.json", b'["one", "two"]', "row 1 is no object with a `text`"),
        ("a.json", b'{"text": 7}', "row 1 has no `text`, but `text`"),
        ("a.json", b'[{"\\u001b[2J": 7}]', r"but .*x1b"),
        ("a.json", b"[]", "holds no text"),
        ("a.parquet", b"PAR1", "cannot be read"),
    ],
)
def test_rows_that_cannot_be_read_are_refused(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TextError, match=words) as refusal:
        read_text(str(tmp_path / name))
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "holds no text"), (b" \n", "holds no text"), (b"ab\xff", "no text in UTF-8 .byte 2")],
)
def test_what_is_no_text_is_refused(tmp_path, content, words):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(TextError, match=words):
        read_text(str(tmp_path / "a.txt"))


def test_a_damaged_archive_a_directory_and_nothing_at_all_are_refused(tmp_path):
    (tmp_path / "a.gz").write_bytes(b"not compressed")
    with pytest.raises(TextError, match="cannot be read"):
        read_text(str(tmp_path / "a.gz"))
    with pytest.raises(TextError, match="is a directory"):
        read_text(str(tmp_path))
    with pytest.raises(TextError, match=r"nowhere.txt does not exist"):
        read_text("nowhere.txt")


def test_a_name_that_would_speak_to_the_terminal_is_spelled_out(tmp_path):
    (tmp_path / "a\x1b[31m").write_text("hello")
    assert read_text(str(tmp_path / "a\x1b[31m")).name == r"'a\x1b[31m'"


def test_the_rows_of_a_data_set_are_joined_by_blank_lines(monkeypatch):
    asked = []

    class Rows(dict):
        column_names = ("text",)

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return Rows(text=["one", "", None, "two"])

    monkeypatch.setitem(
        sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset, __spec__="here")
    )
    text = read_text("Salesforce/wikitext/wikitext-2-raw-v1:validation")
    assert text.content == "one\n\n\n\n\n\ntwo"
    assert text.name == "Salesforce/wikitext/wikitext-2-raw-v1:validation"
    read_text("owner/name")
    assert asked == [
        (("Salesforce/wikitext", "wikitext-2-raw-v1"), {"split": "validation"}),
        (("owner/name", None), {"split": "test"}),
    ]
    Rows.column_names = ("question",)
    with pytest.raises(TextError, match="no column `text`, but question"):
        read_text("owner/name")


def test_a_data_set_that_cannot_be_reached_is_named():
    with pytest.raises(
        TextError, match="--text owner/no-such-set is no file, and fetching it from the Hub failed"
    ):
        read_text("owner/no-such-set")


def test_a_single_token_is_too_little():
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    with pytest.raises(TextError, match=r"a.txt has 1 tokens"):
        Text("a.txt", "a", "a.txt").ids(tokenizer)
