"""What `otaro report` is given, read and checked: run folders of `otaro tune`, and measured models.

A run folder holds config.json, log.jsonl and perplexity.json of the tuning, and two forms of the tuned model,
`nested` and `model`, each perhaps with a quality.json that `otaro eval` wrote. A model directory, nested or
ordinary, may be given in its own right: it then stands for itself, and serves as a baseline. So does a folder
that holds nothing but a quality.json, as `otaro eval --out` makes. A baseline in a folder called `before` is
the model before tuning. Findings of `otaro analyze gradients` lie in `analysis` folders.

Whatever is absent stays empty here; whatever is present must make sense, or the file is refused by name.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from otaro.errors import OtaroError
from otaro.evaluate import records
from otaro.evaluate.progress import Progress
from otaro.evaluate.quality import Entry, coding_of, identity, read_quality
from otaro.evaluate.records import FULL, PRECISION_NAMES
from otaro.file.coding import Coding, choose_coding
from otaro.file.header import BASE, shard_name
from otaro.file.io import NestedDirectory
from otaro.file.replace import QUALITY_FILE
from otaro.file.summary import Summary, summarize
from otaro.idle import flag, idle

T = TypeVar("T")
Stage = Literal["before", "after"]
BEFORE = "before tuning"
"""What the baseline is called that runs share; a folder of that very name is called by its path."""
NAMES = PRECISION_NAMES

METHOD_OF = {"best": "uniform", "paper": "otaro"}  # of the recipes
FULL_PASS = (
    "a pass in full precision beside the one at its own, which keeps the fine precisions where tuning as "
    "usual has them: they need no steps of their own"
)
BENCH_SETTINGS = tuple(records.BenchSettings.__annotations__)
_CACHED = 8e6  # bytes of weights that stay in a cache of most processors


@dataclass(frozen=True)
class Step:
    """A line of log.jsonl."""

    step: int
    precision: str
    loss: float
    """What was trained on, at some precisions mixed with divergence from full precision."""
    cross_entropy: float
    """Of the labels alone, which compares across precisions; of logs that do not tell it, the loss."""
    applied: bool


@dataclass(frozen=True)
class Run:
    """One argument of `otaro report`."""

    name: str
    path: Path
    tuning: dict[str, Any] | None
    """config.json of `otaro tune`."""
    log: list[Step]
    held_out: dict[Stage, dict[str, float]]
    """Perplexity on data held out from the tuning, by precision."""
    held_out_tokens: int | None
    """How many tokens that is, where it is told."""
    quality: list[Entry]
    """Entries of quality.json."""
    coding: Coding | None
    """As in the nested file, else as the checkpoint was tuned, else as it was measured first."""
    gradients: dict[str, Any] | None
    checkpoint: Path | None
    """The directory of the model as an ordinary checkpoint, or where tuning would put it."""
    nested: Path | None
    """The nested directory."""
    summary: Summary | None
    """Sizes of the nested directory."""
    bench: dict[str, Any] | None = None
    """What `otaro bench --json` printed, kept as bench.json."""

    @property
    def command(self) -> str:
        """The `otaro tune` that made this run, with every option that it read, as it was resolved."""
        assert self.tuning is not None
        count = self.tuning.get("processes", 1)
        words = ["torchrun", "--nproc_per_node", str(count), "-m", "otaro"] if count > 1 else ["otaro"]
        model, data = str(self.tuning["model"]), str(self.tuning["data"])
        words += ["tune", model, "--data", data, "--out", str(self.path)]
        said = {"revision": self.tuning.get("revision"), **self.tuning["options"], **self.tuning["training"]}
        # its own share in full precision, which a named method would take away
        of_recipe, unread = said.get("full", 0.0) is None, idle(said)
        for name, value in said.items():
            if of_recipe and name == "calibrate" and value is False:
                words.append("--no-calibrate")  # which the recipe does
            untold = (of_recipe and name == "method") or (name == "epochs" and said.get("steps"))
            if untold or name in unread or value is None or value is False:
                continue
            words.append(flag(name))
            if value is not True:
                words.append(",".join(map(str, value)) if isinstance(value, list) else str(value))
        return shlex.join(words)


def read_runs(paths: Sequence[Path], progress: Progress = lambda what, done, total: None) -> list[Run]:
    """Read every folder. A run has its folder's name, or its whole path where two would be called the same.

    `progress` gets a run's name, and the weights looked at and in total.
    """
    if len({path.resolve() for path in paths}) < len(paths):
        raise OtaroError("the same run is given twice")
    # a name may not be that of the shared baseline
    short = [BEFORE, *(path.resolve().name for path in paths)]
    named = zip(paths, short[1:], strict=True)
    return [_read(path, name if short.count(name) == 1 else str(path), progress) for path, name in named]


def _read(path: Path, name: str, progress: Progress) -> Run:
    if not path.is_dir():
        wanted = "a run folder of `otaro tune`, or a model's directory"
        raise OtaroError(f"{path} is not a directory; give {wanted}")
    if (path / "log.jsonl").is_file() or (path / "perplexity.json").is_file():
        tuning, models = read_tuning(path / "config.json"), [path / "nested", path / "model"]
    elif (path / "config.json").is_file() or (path / QUALITY_FILE).is_file():
        tuning, models = None, [path]
    else:
        raise OtaroError(
            f"{path} is neither a run folder of `otaro tune` nor a model's directory: no config.json in it, "
            f"and no {QUALITY_FILE} of `otaro eval` either"
        )
    nested = next((model for model in models if (model / shard_name(BASE)).is_file()), None)
    directory = NestedDirectory(nested) if nested else None
    identities = {nested: directory.base.header.model} if directory else {}
    schema = directory.schema if directory else None
    coding = Coding(schema.group_size, schema.reconstruction) if schema else None
    measured: dict[tuple[Any, ...], Entry] = {}
    for model in models:  # what was measured of both counts once, as measured of the nested model
        found = read_quality(model, identities.get(model))
        for entry in found.entries if found else ():
            if entry["precision"] in NAMES:  # fits are no step of the scale
                measured.setdefault(identity(entry), entry)
    quality = list(measured.values())
    homes = dict.fromkeys([path, *models])
    found_in = (home / "analysis" / "gradients.json" for home in homes)
    ordinary = path if (path / "config.json").is_file() else None
    held_out, held_out_tokens = _read_held_out(path / "perplexity.json")
    return Run(
        name=BEFORE if name == "before" and tuning is None else name,
        path=path,
        tuning=tuning,
        log=read_log(path / "log.jsonl"),
        held_out=held_out,
        held_out_tokens=held_out_tokens,
        quality=quality,
        coding=coding or _coding_of(models, quality),
        gradients=_first(read_record(file, records.Gradients) for file in found_in),
        checkpoint=ordinary if tuning is None else path / "model",
        nested=nested,
        summary=summarize(directory, partial(progress, name)) if directory else None,
        bench=_first(_read_bench(home / "bench.json") for home in homes),
    )


def recipe_of(tuning: dict[str, Any]) -> str:
    """The recipe of a run, or the method that took the place of the recipe's own."""
    recipe, method = str(tuning.get("recipe")), str(tuning["options"].get("method", "–"))
    # a run of before there was such a pass states none
    plain = recipe == "best" and tuning["options"].get("full", 1) == 0
    return recipe if METHOD_OF.get(recipe) == method and not plain else method


def how_tuned(tuning: dict[str, Any]) -> str:
    """What a run did to the model, in words."""
    method, _, alone = str(tuning["options"].get("method")).partition(":")
    for_what = f"for {alone} alone" if alone else "once for all precisions"
    return "tuned as usual, then rounded" if method == FULL else f"tuned {for_what}"


def has_full_pass(tuning: dict[str, Any]) -> bool:
    """Whether every step has a pass in full precision beside the one at the precision drawn."""
    share = tuning["options"].get("full", 0.0)
    return share is None or (records.is_exact(share) and share > 0)  # None: by how often the data are seen


def hardly_follows_bits(weight_bytes: Iterable[float], shares: Iterable[float]) -> bool:
    """Whether other work than reading weights bounds the speed: these fit into a cache, or little of the
    memory's bandwidth is used.
    """
    return max(weight_bytes, default=math.inf) < _CACHED or max(shares, default=1.0) < 0.3


def _coding_of(models: Sequence[Path], quality: Sequence[Entry]) -> Coding | None:
    """How a model that is not nested is quantized, if anything tells."""
    checkpoint = next((model for model in models if (model / "config.json").is_file()), None)
    return choose_coding(checkpoint) if checkpoint else _first(map(coding_of, quality))


def read_json(path: Path) -> Any:
    """The object in a JSON file, None if there is no file."""
    if not path.is_file():
        return None
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise OtaroError(f"{path} is damaged: not JSON ({error}); make it again or remove it") from None
    if not isinstance(stored, dict):
        raise OtaroError(f"{path} is damaged: not a JSON object; make it again or remove it")
    return stored


def read_record(path: Path, kind: Any) -> Any:
    """The same, checked to be a record of a kind."""
    stored = read_json(path)
    return None if stored is None else check_record(path, kind, stored)


def check_record(path: Path, kind: Any, stored: Any, where: str = "") -> Any:
    """What is stored, if it is a record of a kind."""
    try:
        return records.check(kind, stored)
    except ValueError as error:
        raise OtaroError(f"{path} is damaged: {where}{error}; make it again or remove it") from None


def read_tuning(path: Path) -> dict[str, Any]:
    """config.json of a tuning run, as far as it is needed here."""
    stored = read_json(path)
    if stored is None:
        raise OtaroError(f"{path} is missing, though a log or perplexities of a run lie beside it")
    return dict(check_record(path, records.Tuning, {"versions": {}, **stored}))


def _read_held_out(path: Path) -> tuple[dict[Stage, dict[str, float]], int | None]:
    stored = read_record(path, records.HeldOut) or {}
    stages: tuple[Stage, ...] = ("before", "after")
    return {stage: stored[stage] for stage in stages if stage in stored}, stored.get("tokens")


def read_log(path: Path) -> list[Step]:
    """The steps of log.jsonl; none without the file. Lines about its end, leftovers or averages, are none."""
    text, steps = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else "", []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            remedy = "remove it, or `otaro tune --resume` a run that was stopped"
            raise OtaroError(f"{path} is damaged: line {number} is not JSON; {remedy}") from None
        if isinstance(record, dict) and "precision" not in record:
            continue
        check_record(path, records.TrainedStep, record, f"line {number}: ")
        plain, applied = record.get("cross_entropy", record["loss"]), record.get("applied") is not False
        steps.append(Step(record["step"], record["precision"], record["loss"], plain, applied))
    return steps


def _read_bench(path: Path) -> dict[str, Any] | None:
    try:
        stored = read_record(path, records.Bench)
    except OtaroError as error:
        raise OtaroError(f"{error} (by `otaro bench DIR --json`, without --parallel or --draft)") from None
    if stored is None:
        return None
    # no fits
    return {**stored, "precisions": [row for row in stored["precisions"] if row["precision"] in NAMES]}


def is_finite(value: float | None) -> bool:
    """Whether there is a figure to show; null in a file means that there was nothing to compare."""
    return value is not None and math.isfinite(value)


def _first(found: Iterable[T | None]) -> T | None:
    return next((some for some in found if some is not None), None)
