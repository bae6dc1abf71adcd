"""The path of a tuning run: which precision each step was taken at, read back from the run's log.jsonl."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

from otaro.errors import OtaroError
from otaro.evaluate.records import PRECISION_NAMES
from otaro.evaluate.run_folder import has_full_pass, read_log, read_tuning, recipe_of

MOST_POINTS = 500  # of counts and scores over time; more cannot be told apart in a figure


def analyze_path(run: Path) -> dict[str, Any]:
    """The sequence of precisions, which steps were applied, and over time the counts and scores of each precision.

    Counts are cumulative. Counts and scores stand for the steps in `at`: all of a short run, `MOST_POINTS` of a long one. A
    score is what the search went by at that step: eq. 5 for the path search (None for a precision not tried yet), the
    probability for random draws, nothing where there was no choice. `recipe` and `full_pass`, whether every step has a pass in
    full precision besides, are those of config.json; None without it.
    """
    log = run / "log.jsonl"
    if not log.is_file():
        raise OtaroError(f"{run} holds no {log.name}; give the folder that `otaro tune --out` wrote")
    if not (steps := read_log(log)):
        raise OtaroError(f"{log} records no step yet")
    tuning = read_tuning(run / "config.json") if (run / "config.json").is_file() else None
    sequence = [step.precision for step in steps]
    scored = {name for step in steps for name in step.scores}
    precisions = sorted({*sequence, *scored}, key=PRECISION_NAMES.index)
    points = min(len(steps), MOST_POINTS)
    shown = [(point + 1) * len(steps) // points - 1 for point in range(points)]
    counts = {name: list(accumulate(int(taken == name) for taken in sequence)) for name in precisions}
    return {
        "steps": len(steps),
        "recipe": tuning and recipe_of(tuning),
        "full_pass": tuning and has_full_pass(tuning),
        "precisions": precisions,
        "sequence": sequence,
        "applied": [step.applied for step in steps],
        "at": [index + 1 for index in shown],
        "counts": {name: [counts[name][index] for index in shown] for name in precisions},
        "scores": {name: [steps[index].scores.get(name) for index in shown] for name in precisions if name in scored},
    }
