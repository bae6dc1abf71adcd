"""The path of a tuning run: which precision each step was taken at, read back from the run's log.jsonl."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

from otaro.errors import OtaroError
from otaro.evaluate import records
from otaro.evaluate.run_folder import has_full_pass, read_tuning, recipe_of

MOST_POINTS = 500  # of counts and scores over time; more cannot be told apart in a figure


def analyze_path(run: Path) -> dict[str, Any]:
    """The sequence of precisions, which steps were applied, and over time the counts and scores of each precision.

    Counts are cumulative. Counts and scores stand for the steps in `at`: all of a short run, `MOST_POINTS` of a long one. A
    score is what the search went by at that step: eq. 5 for the path search (None for a precision not tried yet), the
    probability for random draws, nothing where there was no choice. `recipe` and `full_pass`, whether every step has a pass in
    full precision besides, are those of config.json; None without it.
    """
    steps = read_log(run / "log.jsonl")
    tuning = read_tuning(run / "config.json") if (run / "config.json").is_file() else None
    sequence = [record["precision"] for record in steps]
    scored = {name for record in steps for name in record["scores"]}
    precisions = sorted({*sequence, *scored}, key=records.PRECISION_NAMES.index)
    points = min(len(steps), MOST_POINTS)
    shown = [(point + 1) * len(steps) // points - 1 for point in range(points)]
    counts = {name: list(accumulate(int(taken == name) for taken in sequence)) for name in precisions}
    return {
        "steps": len(steps),
        "recipe": tuning and recipe_of(tuning),
        "full_pass": tuning and has_full_pass(tuning),
        "precisions": precisions,
        "sequence": sequence,
        "applied": [record["applied"] for record in steps],
        "at": [index + 1 for index in shown],
        "counts": {name: [counts[name][index] for index in shown] for name in precisions},
        "scores": {name: [steps[index]["scores"].get(name) for index in shown] for name in precisions if name in scored},
    }


def read_log(log: Path) -> list[dict[str, Any]]:
    """One record per optimizer step. Lines about the end are no steps and are left out."""
    if not log.is_file():
        raise OtaroError(f"{log.parent} holds no {log.name}; give the folder that `otaro tune --out` wrote")
    steps: list[dict[str, Any]] = []
    try:
        lines = log.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise OtaroError(f"{log} is not the log of a tuning run: it is no UTF-8 ({error.reason})") from None
    for number, line in enumerate(lines, 1):
        try:
            record = _checked(json.loads(line), len(steps) + 1)
        except RecursionError:
            raise OtaroError(f"{log} line {number} is not a step of a tuning run: it is nested too deeply") from None
        except ValueError as error:  # that of json as well
            raise OtaroError(f"{log} line {number} is not a step of a tuning run: {error}") from None
        if not _about_the_end(record):
            steps.append(record)
    if not steps:
        raise OtaroError(f"{log} records no step yet")
    return steps


def _checked(record: Any, step: int) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise ValueError("it is no JSON object")
    if _about_the_end(record):
        return record
    records.check(records.ChosenStep, record)
    if record["step"] != step:
        raise ValueError(f"it is about step {record['step']}, and {step} is due")
    return record


def _about_the_end(record: dict[str, Any]) -> bool:
    """Gradients left over, or whether averaged weights were kept."""
    return "leftover" in record or "averaged" in record
