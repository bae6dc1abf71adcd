"""The path of a run, counted by hand."""

import json

import pytest

from otaro.errors import OtaroError
from otaro.evaluate import path
from otaro.evaluate.path import analyze_path
from otaro.evaluate.run_folder import has_full_pass, recipe_of


def record(step, precision, scores=None, applied=True):
    return {"step": step, "precision": precision, "loss": 2.0, "scores": scores or {}, "applied": applied}


def write(run, *records):
    lines = [one if isinstance(one, str) else json.dumps(one) for one in records]
    (run / "log.jsonl").write_text("".join(line + "\n" for line in lines), errors="surrogateescape")
    return run


def test_counts_and_scores_are_those_of_the_log(tmp_path):
    write(
        tmp_path,
        record(1, "E5M8", {"E5M8": None, "E5M3": None}),
        record(2, "E5M3", {"E5M8": 1.5, "E5M3": None}, applied=False),
        record(3, "E5M8", {"E5M8": 2.5, "E5M3": 0.5}),
        record(4, "E5M8", {"E5M8": 2, "E5M3": 1.0}),
        {"step": 4, "leftover": 1, "applied": True},
        {"step": 4, "averaged": 2, "last": 2.5, "average": 2.4, "kept": "average"},
    )
    assert analyze_path(tmp_path) == {
        "steps": 4,
        "recipe": None,
        "full_pass": None,
        "precisions": ["E5M8", "E5M3"],
        "sequence": ["E5M8", "E5M3", "E5M8", "E5M8"],
        "applied": [True, False, True, True],
        "at": [1, 2, 3, 4],
        "counts": {"E5M8": [1, 1, 2, 3], "E5M3": [0, 1, 1, 1]},
        "scores": {"E5M8": [None, 1.5, 2.5, 2], "E5M3": [None, None, 0.5, 1.0]},
    }


def test_a_precision_never_taken_is_there_with_its_scores(tmp_path):
    found = analyze_path(write(tmp_path, record(1, "E5M3", {"E5M3": 0.5, "E5M6": 0.5})))
    assert found["precisions"] == ["E5M6", "E5M3"]
    assert found["counts"]["E5M6"] == [0]


def test_a_run_in_full_precision_has_no_scores(tmp_path):
    found = analyze_path(write(tmp_path, record(1, "fp"), record(2, "fp")))
    assert (found["precisions"], found["counts"], found["scores"]) == (["fp"], {"fp": [1, 2]}, {})


def test_a_long_run_is_thinned_out_but_ends_where_it_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(path, "MOST_POINTS", 4)
    steps = [record(step, "E5M8" if step % 3 else "E5M4", {"E5M8": step / 2, "E5M4": 0.0}) for step in range(1, 11)]
    found = analyze_path(write(tmp_path, *steps))
    assert found["at"] == [2, 5, 7, 10]
    assert found["counts"] == {"E5M8": [2, 4, 5, 7], "E5M4": [0, 1, 2, 3]}
    assert found["scores"]["E5M8"] == [1.0, 2.5, 3.5, 5.0]
    assert len(found["sequence"]) == 10


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"step": 2, "prec', "line 2 is not JSON"),
        ("", "line 2 is not JSON"),
        ("[1]", "line 2: input should be a valid dictionary"),
        ("[" * 100_000, "line 2 is not JSON"),
        ("\udcff", "line 2 is not JSON"),
        ('{"step": 2, "precision": "E5M8", "applied": true}', "line 2: loss: field required"),
        (record(2, "E5M9"), "line 2: precision: it should be one of fp, E5M8, .*, not 'E5M9'"),
        (record(2, None), "line 2: precision: input should be a valid string"),
        (record(2, "E5M8", {"best": 1.0}), "line 2: scores.best: it should be one of fp, E5M8"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, words):
    write(tmp_path, record(1, "E5M8"), line, record(3, "E5M8"))
    with pytest.raises(OtaroError, match=rf"log\.jsonl is damaged: {words}"):
        analyze_path(tmp_path)


def test_a_score_that_is_no_number_is_none(tmp_path):
    found = analyze_path(write(tmp_path, record(1, "E5M8", {"E5M8": float("nan"), "E5M4": "high", "E5M3": 10**400})))
    assert found["scores"] == {"E5M8": [None], "E5M4": [None], "E5M3": [None]}


def test_a_folder_without_a_log_or_a_step_is_refused(tmp_path):
    with pytest.raises(OtaroError, match=r"holds no log\.jsonl; give the folder that `otaro tune --out` wrote"):
        analyze_path(tmp_path)
    with pytest.raises(OtaroError, match="records no step yet"):
        analyze_path(write(tmp_path))


@pytest.mark.parametrize(
    ("recipe", "options", "name", "has_pass"),
    [
        ("best", {"method": "uniform", "full": None}, "best", True),  # by how often data are seen
        ("best", {"method": "uniform", "full": 1 / 3}, "best", True),
        ("best", {"method": "uniform", "full": 0.0}, "uniform", False),  # the method was named, and came plain
        ("best", {"method": "uniform"}, "best", False),  # of before there was such a pass
        ("best", {"method": "fp", "full": 0.0}, "fp", False),
        ("paper", {"method": "otaro", "full": 0.0}, "paper", False),
    ],
)
def test_a_run_is_called_by_its_recipe_or_by_the_method_that_took_its_place(recipe, options, name, has_pass):
    tuning = {"recipe": recipe, "options": options}
    assert (recipe_of(tuning), has_full_pass(tuning)) == (name, has_pass)
