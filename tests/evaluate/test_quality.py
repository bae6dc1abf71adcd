"""The quality record: it survives, it replaces, and it believes nothing."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from otaro.errors import TargetError
from otaro.evaluate.harness import PAPER_TASKS
from otaro.evaluate.quality import (
    Quality,
    QualityError,
    Record,
    averages,
    read_quality,
    series,
)

MODEL, OTHER = "a" * 64, "b" * 64
MADE = {"command": "otaro eval x", "date": "2026-11-15", "versions": {"otaro": "0.1.0"}, "device": "cpu"}
CODING = {"group_size": 64, "reconstruction": "midpoint"}
ON_WIKI = {"text": "wiki", "text_sha256": "c" * 64, "window": 512, "tokens": 1000, "bos": True}
PERPLEXITY = {
    "kind": "perplexity", "precision": "E5M4", **ON_WIKI, "stride": 256, "value": 19.5,
    "tokens_per_second": 100.0, **CODING, **MADE,
}  # fmt: skip
DIVERGENCE = {
    "kind": "divergence", "precision": "E5M4", **ON_WIKI, "reference": "fp", "kl": 0.1, "agreement": 0.9,
    **CODING, **MADE,
}  # fmt: skip
TASK = {
    "kind": "task", "precision": "fp", "task": "boolq", "limit": None, "data_sha256": None, "metric": "acc",
    "value": 0.5, "stderr": 0.1, "samples": 20, "truncated": 0, **MADE,
}  # fmt: skip


def stored(directory, **changes):
    """A record with one entry, changed, as a stranger may have written it."""
    record = {"schema": 1, "model": MODEL, "entries": [PERPLEXITY], **changes}
    (directory / "quality.json").write_text(json.dumps(record))
    return directory


def test_what_is_written_is_read(tmp_path):
    quality = Quality(MODEL, (PERPLEXITY, DIVERGENCE, TASK))
    for entry in quality.entries:
        Record(MODEL, tmp_path).add(entry)
    assert read_quality(tmp_path, MODEL) == quality
    assert [path.name for path in tmp_path.iterdir()] == ["quality.json"]


def test_no_record_is_none(tmp_path):
    assert read_quality(tmp_path) is None


def test_measuring_again_replaces_and_anything_else_adds():
    quality = Quality(MODEL, (PERPLEXITY, TASK)).including(
        {**PERPLEXITY, "value": 18.0, "date": "2026-11-16"}
    )
    assert [entry["value"] for entry in quality.entries] == [18.0, 0.5]
    for asked in (
        {"stride": 512},
        {"precision": "E5M3"},
        {"text_sha256": "d" * 64},
        {"tokens": 999},
        {"device": "a GPU"},
    ):
        assert len(quality.including({**PERPLEXITY, **asked}).entries) == 3
    assert len(quality.including({**TASK, "limit": 10}).entries) == 3
    assert quality.find({**TASK, "limit": 10}) is None
    assert (
        quality.find(
            {key: TASK[key] for key in ("kind", "precision", "device", "task", "limit", "data_sha256")}
        )
        == TASK
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("value", float("nan")), ("value", -1.0), ("value", "19"), ("value", True), ("value", 10**400),
        ("value", None), ("tokens", 0), ("tokens", 1.5), ("window", True), ("window", 1 << 70),
        ("precision", "E5M9"), ("precision", ["E5M4"]), ("kind", "rumour"), ("kind", ["task"]),
        ("kind", None), ("text", "\x1b[31mred"), ("text", "x" * 5000), ("text", ""),
        ("text_sha256", "c" * 63), ("text_sha256", None), ("command", "a\nb"), ("date", "yesterday"),
        ("date", "2026-13-01"), ("versions", {"otaro": 1}), ("versions", []), ("extra", 1),
        ("reference", "fp"), ("device", None),
    ],
    ids=lambda value: str(value)[:20].encode("unicode_escape").decode(),
)  # fmt: skip
def test_an_entry_with_a_bad_field_is_refused(tmp_path, field, value):
    with pytest.raises(QualityError, match=r"quality.json is no quality record"):
        read_quality(stored(tmp_path, entries=[{**PERPLEXITY, field: value}]))


@pytest.mark.parametrize("field", ["value", "text", "stride", "command", "kind", "bos", "device", *CODING])
def test_an_entry_that_lacks_a_field_is_refused(tmp_path, field):
    with pytest.raises(QualityError, match="no quality record"):
        read_quality(
            stored(tmp_path, entries=[{key: value for key, value in PERPLEXITY.items() if key != field}])
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": 2}, {"schema": None}, {"model": "me"}, {"model": 7}, {"entries": {}}, {"entries": [7]},
        {"entries": [[]]}, {"entries": [PERPLEXITY, PERPLEXITY]}, {"more": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_record_of_another_make_is_refused(tmp_path, changes):
    with pytest.raises(QualityError, match="no quality record"):
        read_quality(stored(tmp_path, **changes))


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b"9" * 10_000, b'{"schema": Infinity}']
)
def test_what_is_no_record_is_refused(tmp_path, text):
    (tmp_path / "quality.json").write_bytes(text)
    with pytest.raises(QualityError, match=r"quality.json"):
        read_quality(tmp_path)


def test_a_huge_file_is_not_read(tmp_path):
    with (tmp_path / "quality.json").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(QualityError, match="larger than any"):
        read_quality(tmp_path)


def test_a_record_of_another_model_is_refused_and_stays(tmp_path):
    before = (stored(tmp_path) / "quality.json").read_bytes()
    with pytest.raises(QualityError, match=f"about another model \\({MODEL[:12]}\\)"):
        Record(OTHER, tmp_path)
    assert (tmp_path / "quality.json").read_bytes() == before


def test_two_evaluations_of_one_model_keep_each_others_results(tmp_path):
    one, two = Record(MODEL, tmp_path), Record(MODEL, tmp_path)
    one.add(PERPLEXITY)
    two.add(TASK)
    assert read_quality(tmp_path).entries == (PERPLEXITY, TASK)


def test_what_is_added_at_the_same_time_all_stays(tmp_path):
    def add(window):
        Record(MODEL, tmp_path).add({**PERPLEXITY, "window": window})

    with ThreadPoolExecutor(8) as pool:  # locks tell threads apart as they do processes
        list(pool.map(add, range(1, 41)))
    assert len(read_quality(tmp_path).entries) == 40
    assert [path.name for path in tmp_path.iterdir()] == ["quality.json"]


def test_what_would_not_be_read_is_not_written(tmp_path):
    with pytest.raises(
        QualityError,
        match=r"cannot be kept in a quality record: "
        r"entries\.0\.perplexity\.command: string",
    ):
        Record(MODEL, tmp_path).add({**PERPLEXITY, "command": "x" * 5000})
    assert not list(tmp_path.iterdir())


def test_a_record_without_a_place_is_kept_in_memory():
    record = Record(MODEL, None)
    record.add(PERPLEXITY)
    record.add(TASK)
    assert record.path is None
    assert (record.find(PERPLEXITY), record.find(TASK)) == (PERPLEXITY, TASK)


def test_a_place_that_is_a_file_is_explained(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TargetError, match="a part of that path is a file"):
        Record(MODEL, tmp_path / "file" / "below").add(TASK)


def test_averages_are_of_precisions_that_have_all_tasks():
    tasks = [
        TASK,
        {**TASK, "task": "piqa", "value": 0.7, "stderr": 0.2},
        {**TASK, "precision": "E5M3", **CODING},
        PERPLEXITY,
    ]
    (average,) = averages(tasks)
    assert (average["task"], average["precision"]) == ("average of 2", "fp")
    assert average["value"] == pytest.approx(0.6)
    assert average["stderr"] == pytest.approx((0.1**2 + 0.2**2) ** 0.5 / 2)
    assert averages([{**tasks[0], "stderr": None}, tasks[1]])[0]["stderr"] is None
    assert averages(tasks[:1]) == []
    assert averages([tasks[0], {**tasks[1], "metric": "word_perplexity", "value": 20.0}]) == []
    (other,) = averages([tasks[0], {**tasks[1], "task": "hellaswag"}])
    assert other["data_sha256"] != average["data_sha256"]  # which never stand side by side


def test_the_average_of_the_papers_eight_stays_whatever_else_was_measured():
    eight = [{**TASK, "task": task, "value": 0.1 * number} for number, task in enumerate(PAPER_TASKS)]
    other = {**TASK, "task": "lambada", "metric": "perplexity", "value": 90.0}
    for entries in (eight, [other, *eight], [*eight, {**other, "precision": "E5M3", **CODING}]):
        (average,) = averages(entries)
        assert (average["task"], average["value"]) == ("zeroshot8", pytest.approx(0.35))
    assert averages([other, *eight[1:]]) == []


def test_tasks_are_averaged_at_one_limit_on_one_device():
    both = [TASK, {**TASK, "task": "piqa", "value": 0.7}]
    others = [{**entry, **odd, "value": 0.1} for odd in ({"limit": 5}, {"device": "a GPU"}) for entry in both]
    assert [
        (one["limit"], one["device"], one["value"]) for one in averages([*both, *others, PERPLEXITY])
    ] == [
        (None, "cpu", pytest.approx(0.6)),
        (5, "cpu", pytest.approx(0.1)),
        (None, "a GPU", pytest.approx(0.1)),
    ]


def test_full_precision_goes_with_every_coding_and_codings_never_with_each_other():
    paper, ours = ({"group_size": 64, "reconstruction": kind} for kind in ("truncate", "midpoint"))
    for kind in (PERPLEXITY, {**TASK, "precision": "E5M4"}):
        full = {field: value for field, value in kind.items() if field not in CODING} | {
            "precision": "fp",
            "value": 0.9,
        }
        coded = [{**kind, **coding, "precision": p} for coding in (paper, ours) for p in ("E5M3", "E5M8")]
        groups = series([coded[0], full, *coded[1:]])
        assert [list(group.items()) for group in groups] == [
            [("fp", full), ("E5M8", coded[1]), ("E5M3", coded[0])],
            [("fp", full), ("E5M8", coded[3]), ("E5M3", coded[2])],
        ]
    tasks = [
        {**TASK, "task": task, **coding}
        for task in ("boolq", "piqa")
        for coding in ({}, {**paper, "precision": "E5M3"})
    ]
    (group,) = series(averages(tasks))
    assert [(name, one["task"]) for name, one in group.items()] == [
        ("fp", "average of 2"),
        ("E5M3", "average of 2"),
    ]


@pytest.mark.parametrize(
    "coding",
    [
        {"group_size": 33}, {"group_size": True}, {"reconstruction": "\x1b[2J"}, {"reconstruction": None},
        {"precision": "fp"}, {"reference_model": "abc"},
    ],
    ids=str,
)  # fmt: skip
def test_an_odd_coding_is_refused(tmp_path, coding):
    with pytest.raises(QualityError, match="no quality record"):
        read_quality(stored(tmp_path, entries=[{**PERPLEXITY, **coding}]))
