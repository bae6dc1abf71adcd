"""What is read of a run's folder, besides what the page shows of it."""

import json

import pytest

from otaro.errors import OtaroError
from otaro.evaluate.run_folder import Step, has_full_pass, read_log, recipe_of


def record(step, precision, applied=True):
    return {"step": step, "precision": precision, "loss": 2.0, "applied": applied}


def write(run, *records):
    lines = [one if isinstance(one, str) else json.dumps(one) for one in records]
    (run / "log.jsonl").write_text("".join(line + "\n" for line in lines), errors="surrogateescape")
    return run / "log.jsonl"


def test_steps_are_those_of_the_log(tmp_path):
    log = write(
        tmp_path,
        record(1, "E5M8"),
        {**record(2, "E5M3", applied=False), "cross_entropy": 3.0},
        {"step": 2, "leftover": 1, "applied": True},
        {"step": 2, "averaged": 2, "last": 2.5, "average": 2.4, "kept": "average"},
    )
    assert read_log(log) == [Step(1, "E5M8", 2.0, 2.0, True), Step(2, "E5M3", 2.0, 3.0, False)]


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
    ],
)
def test_a_bad_line_is_named(tmp_path, line, words):
    log = write(tmp_path, record(1, "E5M8"), line, record(3, "E5M8"))
    with pytest.raises(OtaroError, match=rf"log\.jsonl is damaged: {words}"):
        read_log(log)


@pytest.mark.parametrize(
    ("recipe", "options", "name", "has_pass"),
    [
        ("best", {"method": "uniform", "full": None}, "best", True),  # by how often data are seen
        ("best", {"method": "uniform", "full": 1 / 3}, "best", True),
        # the method was named, and came plain
        ("best", {"method": "uniform", "full": 0.0}, "uniform", False),
        ("best", {"method": "uniform"}, "best", False),  # of before there was such a pass
        ("best", {"method": "fp", "full": 0.0}, "fp", False),
        ("paper", {"method": "otaro", "full": 0.0}, "paper", False),
    ],
)
def test_a_run_is_called_by_its_recipe_or_by_the_method_that_took_its_place(recipe, options, name, has_pass):
    tuning = {"recipe": recipe, "options": options}
    assert (recipe_of(tuning), has_full_pass(tuning)) == (name, has_pass)
