"""Typed decisions at two precisions: what `precision: "auto"` of /v1/systemone gives up, and what it saves.

    python benchmarks/bench_decisions.py DIR --data FOLDER [--sets arc_easy,piqa] [--skip 80] [--limit 400]

FOLDER has zero-shot sets as `otaro eval --data-dir` takes them, SET.jsonl.gz. Each row becomes one question.
On the even rows every question is asked at E5M3 and at E5M8; the margin below which a decision is asked again
is the smallest that leaves `--agreement` of the decisions as E5M8 makes them. With that margin the odd rows
are asked by auto, at E5M3 and at E5M8, in turns: share asked again, accuracy of each, and the time of each.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

from common import arguments, finish

import otaro
from otaro.serve.decisions import decisions_ask, margin
from otaro.serve.service import Service
from otaro.serve.settings import Settings

COARSE, FINE = "E5M3", "E5M8"
_TURN = 4  # rows; never the same one twice in a row, which the cache would hold already


Asked = tuple[dict[str, Any], int]
"""A request, and which answer is right."""


def choice(question: str, options: list[str], right: int) -> Asked:
    """A choice by the answers' own words. Small models say A whatever is asked."""
    criteria = {f"option {number + 1}": option for number, option in enumerate(options)}
    asked = {"type": "choice", "by": "text", "instructions": question, "criteria": criteria}
    return {"state": "", "questions": {"q": asked}}, right


def arc(row: dict[str, Any]) -> Asked:
    right = row["choices"]["label"].index(row["answerKey"])
    return choice(row.get("question") or row["question_stem"], row["choices"]["text"], right)


def piqa(row: dict[str, Any]) -> Asked:
    return choice(row["goal"], [row["sol1"], row["sol2"]], int(row["label"]))


SETS = {"piqa": piqa, "arc_easy": arc, "arc_challenge": arc, "openbookqa": arc}


class Made(NamedTuple):
    """A decision."""

    answer: int
    margin: float
    precision: str
    seconds: float


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", default="arc_easy,piqa")
    parser.add_argument("--skip", type=int, default=80, help="first rows, on which settings were tried")
    parser.add_argument("--limit", type=int, default=400, help="rows of a set, half to choose the margin")
    parser.add_argument("--agreement", type=float, default=0.95, help="share of decisions as E5M8 makes them")
    args = parser.parse_args()
    model = otaro.load(args.directory)
    results = []
    for name in args.sets.split(","):
        with gzip.open(args.data / f"{name}.jsonl.gz", "rt") as file:
            rows = [SETS[name](json.loads(line)) for line in file][args.skip :][: args.limit]
        results.append(measured(model, name, rows, args.agreement))
    about = {"benchmark": "decisions", "model": args.directory.name, "agreement": args.agreement}
    finish(about | {"sets": results})


def measured(model: Any, name: str, rows: list[Asked], agreement: float) -> dict[str, Any]:
    """One set; printed, and for the last line."""
    ways = (COARSE, "auto", FINE)
    choosing, reported = rows[::2], rows[1::2]
    made = asyncio.run(ask_all(model, choosing, (COARSE, FINE), Settings()))
    least = smallest_margin(made[COARSE], made[FINE], agreement)
    other = asyncio.run(ask_all(model, reported, ("auto", COARSE, FINE), Settings(auto_margin=least)))
    auto, fine = other["auto"], other[FINE]
    right = {key: share_of(decisions, [answer for _, answer in reported]) for key, decisions in other.items()}
    again = sum(one.precision == FINE for one in auto) / len(auto)
    alike, same = (share_of(other[key], [one.answer for one in fine]) for key in (COARSE, "auto"))
    seconds = {key: quiet_mean([one.seconds for one in decisions]) for key, decisions in other.items()}
    error = math.sqrt(right[FINE] * (1 - right[FINE]) / len(fine))
    saved = 1 - seconds["auto"] / seconds[FINE]
    print(f"\n{name}: {len(choosing)} rows to choose the margin, {len(reported)} reported")
    print(f"  margin, asked again at {FINE}           {least:.3f}, {again:.1%}")
    print(f"  {'':18}{COARSE:>8}{'auto':>8}{FINE:>8}")
    print(f"  accuracy          {''.join(f'{right[key]:>8.3f}' for key in ways)}  (+- {error:.3f})")
    print(f"  decided as {FINE}   {alike:>8.1%}{same:>8.1%}{1:>8.1%}")
    print(f"  milliseconds      {''.join(f'{1e3 * seconds[key]:>8.1f}' for key in ways)}")
    print(f"  time saved by auto  {saved:+.1%}")
    return {
        "set": name, "rows": len(reported), "margin": least, "escalated": again, "accuracy": right,
        "agreement": {COARSE: alike, "auto": same}, "seconds": seconds,
    }  # fmt: skip


def quiet_mean(seconds: list[float]) -> float:
    """The mean; what took more than twice the median, which is another process's doing, counts as that."""
    most = 2 * statistics.median_high(seconds)
    return statistics.fmean(min(one, most) for one in seconds)


def share_of(made: list[Made], answers: list[int]) -> float:
    """How many decided so."""
    return sum(one.answer == answer for one, answer in zip(made, answers, strict=True)) / len(made)


def smallest_margin(coarse: list[Made], fine: list[Made], agreement: float) -> float:
    """Below which decisions have to be asked again so that so many are as the fine ones."""
    pairs = sorted(zip(coarse, fine, strict=True), key=lambda pair: pair[0].margin)
    differing = sum(one.answer != two.answer for one, two in pairs)
    for one, two in pairs:
        if differing <= (1 - agreement) * len(pairs):
            return one.margin
        differing -= one.answer != two.answer
    return 1.0


async def ask_all(
    model: Any, rows: list[Asked], precisions: tuple[str, ...], settings: Settings
) -> dict[str, list[Made]]:
    """Every row at each precision, in turns, by what answers /v1/systemone."""
    service = Service(model, otaro.Engine(model, max_sequences=1), "model", settings)
    made: dict[str, list[Made]] = {precision: [] for precision in precisions}
    async with service.running():
        for start in range(0, len(rows), _TURN):
            for precision in precisions:
                for row, _ in rows[start : start + _TURN]:
                    asked, started = decisions_ask({**row, "precision": precision}), time.perf_counter()
                    (found,) = await service.decide(asked)
                    seconds, shares = time.perf_counter() - started, found.probabilities
                    answer = shares.index(max(shares))
                    made[precision].append(Made(answer, margin(shares), str(found.precision), seconds))
    return made


if __name__ == "__main__":
    main()
