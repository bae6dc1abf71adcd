"""What numbers look like in the tables of a report; a dash stands for one that is not there."""

from __future__ import annotations

import math
from collections.abc import Mapping

from otaro.evaluate.comparable import Entry
from otaro.evaluate.page import Cell
from otaro.evaluate.run_folder import NAMES


def number(value: float) -> str:
    """A perplexity: as many digits as are worth reading."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}" if value < 1e7 else f"{value:.1e}"


def perplexity_cell(values: Mapping[str, float], name: str) -> Cell:
    """With the difference from the finest measured; unquantized weights are the finest."""
    if name not in values:
        return Cell("–")
    finest = next(one for one in NAMES if one in values)
    change = values[name] / values[finest] - 1
    note = f"{change:+,.1%}".replace("-0.0%", "+0.0%") if name != finest and math.isfinite(change) else ""
    return Cell(number(values[name]), values[name], note)


def score_cell(entry: Entry | None) -> Cell:
    """A score and its standard error."""
    if entry is None:
        return Cell("–")
    return Cell(f"{entry['value']:.3f}", entry["value"], f"±{entry['stderr']:.3f}" if entry["stderr"] is not None else "")


def figure_cell(value: float | None, form: str = ".2e") -> Cell:
    """A number in a form of its own."""
    return Cell("–") if value is None or not math.isfinite(value) else Cell(f"{value:{form}}", value)


def share_cell(share: float | None) -> Cell:
    """In percent."""
    return Cell("–") if share is None else Cell(f"{share:.2%}", share)


def error_cell(error: float | None, lost: float | None) -> Cell:
    """An error, and beside it the share of weights that are lost."""
    note = "" if lost is None else f"{lost:.1%}"
    return Cell("–" if error is None else f"{error:.4f}", error, note)
