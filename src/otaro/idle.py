"""Options of `otaro tune` that a run does not read, as others of its options decide.

`otaro tune` refuses those that were given, and the command that a report shows leaves them out. What is asked
is what the config.json of a run states, so runs of any age can be asked about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Stated = Mapping[str, Any]
"""Options and settings of a run by name, precisions by theirs."""


@dataclass(frozen=True)
class Idle:
    """Options that have no effect, and why."""

    options: tuple[str, ...]
    by: tuple[str, ...]
    """What decides so, if one of these was given; else the method does, or the recipe that it comes from."""
    when: Callable[[Stated], bool]
    why: str


def flag(name: str) -> str:
    """An option as the command line spells it."""
    return "--" + {"exploration": "lambda"}.get(name, name).replace("_", "-")


def idle(stated: Stated) -> dict[str, Idle]:
    """The options that such a run does not read, each with the first reason."""
    run, found = {**UNSTATED, **stated}, dict[str, Idle]()
    for rule in RULES:
        if rule.when(run):
            found |= {name: rule for name in rule.options if name not in found}
    return found


def _trained_at(run: Stated) -> set[str]:
    """The precisions at which steps are taken, but for full precision."""
    if run["method"] == "fp":
        return set()
    if str(run["method"]).startswith("fixed:"):
        return {run["method"].removeprefix("fixed:").upper()}
    if run["method"] != "uniform" or run["weights"] is None:
        return set(run["precisions"])
    return {name for name, weight in zip(run["precisions"], run["weights"], strict=False) if weight}


def _holds_nothing_out(run: Stated) -> bool:
    return run["hold_out"] == 0 and run["eval_data"] is None


UNSTATED: Stated = {
    "method": "uniform",
    "precisions": (),
    "weights": None,
    "distill": 0.0,
    "distill_at": ("E5M5", "E5M4", "E5M3"),
    "ultra_low": ("E5M4", "E5M3"),
    "reconstruction": "midpoint",
    "hold_out": None,
    "eval_data": None,
    "fsdp": False,
    "recipe": None,
}
"""How it was in runs that do not say. A recipe is stated here only where a method was named beside it."""

_DELAYED = ("delay", "ultra_low", "accumulate", "accumulator", "leftover")
RULES = (
    Idle(
        ("precisions",),
        ("method",),
        lambda run: run["method"] not in ("otaro", "bps", "uniform"),
        "it has one precision of its own for all steps",
    ),
    Idle(
        ("weights",),
        ("method",),
        lambda run: run["method"] != "uniform",
        "they are for --method uniform and --recipe best",
    ),
    Idle(
        ("exploration",),
        ("method",),
        lambda run: run["method"] not in ("otaro", "bps"),
        "it is for --method otaro and bps",
    ),
    Idle(_DELAYED, ("method",), lambda run: run["method"] != "otaro", "it is for --method otaro"),
    Idle(
        _DELAYED,
        ("ultra_low", "precisions"),
        lambda run: _trained_at(run).isdisjoint(run["ultra_low"]),
        "no step is at a precision of --ultra-low",
    ),
    Idle(
        ("distill", "distill_at"),
        ("method",),
        lambda run: run["method"] == "fp",
        "all of its steps are in full precision",
    ),
    Idle(
        ("distill_at",),
        ("distill",),
        lambda run: not run["distill"],
        "nothing is distilled without --distill",
    ),
    Idle(
        ("distill", "distill_at"),
        ("distill_at", "weights", "precisions"),
        lambda run: _trained_at(run).isdisjoint(run["distill_at"]),
        "no step is at a precision of --distill-at",
    ),
    Idle(
        ("hold_out",),
        ("eval_data",),
        lambda run: run["eval_data"] is not None,
        "that is measured on instead",
    ),
    Idle(("calibrate", "average"), ("hold_out",), _holds_nothing_out, "nothing is held out to judge it by"),
    Idle(("eval_tokens",), ("hold_out",), _holds_nothing_out, "nothing is held out to measure on"),
    Idle(
        ("calibrate",),
        ("reconstruction",),
        lambda run: run["reconstruction"] != "midpoint",
        "it chooses codes that stand for midpoints, not for --reconstruction truncate",
    ),
    Idle(
        ("calibrate",),
        ("fsdp",),
        lambda run: run["fsdp"],
        "a sharded model cannot be judged; otaro pack --calibrate takes OUT/model and a text",
    ),
    Idle(
        ("recipe",),
        ("method",),
        lambda run: run["recipe"] == "best",
        "a method that is named comes plain, without what that recipe adds",
    ),
)
