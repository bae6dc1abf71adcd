"""Zero-shot accuracy by lm-evaluation-harness: its tasks and scoring, our models, data from Hub or files.

A task keeps its own wording and metrics; only where its rows come from may be changed, and it is always run
without examples in the prompt. Of the metrics a task reports one is kept: `acc_norm` (answers compared by
likelihood per byte) where there is one, else `acc`, else the first. Names may be tasks, groups with a score
of their own (`mmlu`), tags (which stand for their tasks), and `zeroshot8`, the eight tasks of the OTARo
paper.

With a data directory a task's rows are the lines of TASK.jsonl.gz (or .jsonl, .json) in it, with the fields
that the task's own data set has. The harness asks a data set for splits by name; whatever the name, it gets
these rows.

Reading the descriptions of all of the harness's fourteen thousand tasks takes ten seconds and more; where
only the paper's eight are wanted, only their folders are read.
"""

from __future__ import annotations

import difflib
import gzip
import hashlib
import json
import logging
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from otaro.errors import OtaroError, install
from otaro.evaluate.progress import Count
from otaro.file.checkpoint import brief

ZEROSHOT8 = "zeroshot8"
PAPER_TASKS = {  # and the folders of the harness that describe them
    "arc_challenge": "arc",
    "arc_easy": "arc",
    "boolq": "super_glue/boolq",
    "hellaswag": "hellaswag",
    "mathqa": "mathqa",
    "openbookqa": "openbookqa",
    "piqa": "piqa",
    "winogrande": "winogrande",
}
_METRICS = ("acc_norm", "acc")  # the first of them that a task has
CLOSE = 0.8  # of all letters: short names of fourteen thousand tasks are near to any word
_FILES = (".jsonl.gz", ".jsonl", ".json")
_SEED = 1234  # the harness's own


class TaskError(OtaroError, ValueError):
    """A task that does not exist, or whose data cannot be had."""


@dataclass(frozen=True)
class TaskResult:
    """The score of a model on a task."""

    metric: str
    value: float
    stderr: float | None
    """None where the harness gives none, as for a single sample."""
    samples: int
    truncated: int
    """Requests longer than the model's context, which lost their beginning."""


class Tasks:
    """Tasks by `names`, checked; their data is loaded once, however many models are measured."""

    def __init__(self, names: Sequence[str], data_dir: Path | None = None) -> None:
        wanted = [task for name in names for task in (PAPER_TASKS if name == ZEROSHOT8 else [name])]
        if find_spec("lm_eval") is None:
            raise TaskError(f"tasks need the package lm-eval; install it with: {install('eval')}")
        with _quiet():
            only_papers = set(wanted) <= PAPER_TASKS.keys()
            self._manager = _manager_of(frozenset(PAPER_TASKS.values()) if only_papers else None)
            self.names = _expanded(self._manager, wanted)
        self._files = {} if data_dir is None else {name: _file_of(name, data_dir) for name in self.names}
        if groups := [name for name in self._files if name in self._manager.all_groups]:
            wanted_files = "with --data-dir name the tasks of it that you have files for"
            raise TaskError(f"{groups[0]} is a group of tasks; {wanted_files}")
        self._loaded: dict[str, Any] = {}

    def data_sha256(self, name: str) -> str | None:
        """Of the file that serves the task; None for the data set that the task itself names."""
        return hashlib.sha256(self._files[name].read_bytes()).hexdigest() if name in self._files else None

    def prepare(self, name: str) -> Any:
        """Load a task with its data, unless that is done."""
        if name not in self._loaded:
            with _quiet():
                self._loaded[name] = self._load(name)
        return self._loaded[name]

    def measure(
        self,
        name: str,
        model: Any,
        tokenizer: Any,
        *,
        limit: int | None = None,
        batch_size: int = 8,
        progress: Count = lambda done, total: None,
    ) -> TaskResult:
        """Run one task; `progress` gets the requests done and in total."""
        loaded = self.prepare(name)
        with _quiet(progress) as noted:
            kind, evaluate = _harness("models.huggingface").HFLM, _harness("evaluator").evaluate
            runner = kind(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
            results = evaluate(lm=runner, task_dict=loaded, limit=limit, log_samples=False)
        counts = results["n-samples"].items()
        samples = sum(count["effective"] for task, count in counts if task in loaded["tasks"])
        return TaskResult(*_score(name, results["results"]), samples, noted.truncated)

    def _load(self, name: str) -> Any:
        source = self._files.get(name)
        spec: str | dict[str, Any] = name
        if source is not None:
            rows = _read_rows(source)
            # A description in full would replace the harness's own; that of a group's member adds to it.
            changes = {"dataset_kwargs": None, "custom_dataset": lambda **_: _AnySplit(rows)}
            spec = {"group": "local", "task": [{"task": name, **changes}]}
        try:
            loaded = self._manager.load([spec])
        except Exception as error:
            # the Hub, Arrow, templates over fields that are not there: each has its own
            raise TaskError(_why_not(name, self._manager, source, error)) from error
        loaded = {"tasks": loaded["tasks"], "groups": {} if source else loaded["groups"]}
        for task in loaded["tasks"].values():
            if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
                raise TaskError(f"{name} needs to run generated code or to see images: not done here")
            task.set_config("num_fewshot", 0)
            task.set_fewshot_seed(_SEED)
        return loaded


class _AnySplit(dict[str, Any]):
    """A data set that has the same rows under every name."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = import_module("datasets").Dataset.from_list(rows)

    def __missing__(self, split: str) -> Any:
        return self._rows


def _harness(module: str) -> Any:
    return import_module(f"lm_eval.{module}")  # which ships no types


@cache
def _manager_of(folders: frozenset[str] | None) -> Any:
    """The harness's index of its tasks: of those in some folders, or of all."""
    tasks = _harness("tasks")
    if folders is None:
        return tasks.TaskManager()
    paths = [Path(tasks.__file__).parent / folder for folder in sorted(folders)]
    return tasks.TaskManager(include_defaults=False, include_path=paths)


def _expanded(manager: Any, names: Sequence[str]) -> list[str]:
    """Each name once, the tasks of a tag in its place; an unknown one is refused, with what may be meant."""
    known = set(manager.all_tasks)
    found: list[str] = []
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, [*known, ZEROSHOT8], n=3, cutoff=CLOSE)
            way = f"did you mean {' or '.join(near)}?" if near else "`lm_eval ls tasks` lists those it has"
            raise TaskError(f"lm-evaluation-harness has no task {name!r}; {way}")
        found += sorted(manager.task_index[name].tags) if name in manager.all_tags else [name]
    return list(dict.fromkeys(found))


def _file_of(name: str, data_dir: Path) -> Path:
    for ending in _FILES:
        if (path := data_dir / f"{name}{ending}").is_file():
            return path
    others = " or ".join(_FILES[1:])
    raise TaskError(f"--data-dir {data_dir} has no {name}{_FILES[0]} (nor {others}) for the task {name}")


def _read_rows(path: Path) -> list[dict[str, Any]]:
    try:
        text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
        lines = [line for line in text.split("\n") if line.strip()]
        rows = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in lines]
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise TaskError(f"{path} cannot be read: {error}") from error
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise TaskError(f"{path} is to hold one JSON object per sample, and at least one")
    return rows


def _why_not(name: str, manager: Any, source: Path | None, error: Exception) -> str:
    reason = f"{type(error).__name__}: {brief(error)}"
    if source is not None:
        needed = "which needs the fields of its own data set"
        return f"{source} does not serve the task {name}, {needed}: {reason}"
    stated = (manager.task_index[name].cfg or {}).get("dataset_path")
    data = f"the data set {stated}" if stated else "its data"
    files = f"{name}.jsonl.gz" if name not in manager.all_groups else "the files of its tasks"
    remedy = f"reach the Hub once, or serve {files} from a folder with --data-dir"
    return f"{name}: {data} is not to be had ({reason}); {remedy}"


def _score(name: str, results: dict[str, dict[str, Any]]) -> tuple[str, float, float | None]:
    """The metric, its value and its standard error; keys of the harness are "metric,filter"."""
    reported = results.get(name, {})
    numbers = [key for key, value in reported.items() if isinstance(value, float | int)]
    metrics = [key for key in numbers if "," in key and "_stderr," not in key]
    if not metrics:
        own = f"{name} is a group of tasks without a score of its own"
        raise TaskError(f"{own}; name its tasks: {', '.join(results)[:200]}")
    preferred = [key for metric in _METRICS for key in metrics if key.partition(",")[0] == metric]
    chosen = (preferred or metrics)[0]
    metric, _, way = chosen.partition(",")
    error = reported.get(f"{metric}_stderr,{way}")
    stderr = float(error) if isinstance(error, float | int) and math.isfinite(error) else None
    return metric if way == "none" else f"{metric} ({way})", float(reported[chosen]), stderr


class _Noted(logging.Handler):
    """Takes what the harness logs off the terminal, and counts the requests that it had to truncate."""

    truncated = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.truncated += "Truncating" in record.getMessage()


class _Bar:
    """What the harness gets for tqdm."""

    def __init__(self, report: Count, items: Any = None, total: int | None = None, **_: Any) -> None:
        self._report, self._items, self._done = report, items, 0
        self._total = len(items) if total is None else total

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            yield item
            self.update()

    def update(self, count: int = 1) -> None:
        self._done += count
        self._report(self._done, self._total)

    def close(self) -> None:
        """Nothing is left on the screen."""


@contextmanager
def _quiet(progress: Count = lambda done, total: None) -> Iterator[_Noted]:
    """Let the harness report to `progress` and to nobody else."""
    datasets = import_module("datasets")
    logger, noted = logging.getLogger("lm_eval"), _Noted()
    before = (logger.propagate, logger.handlers)
    # each has imported tqdm by name
    modules = [_harness(name) for name in ("api.model", "api.task", "models.huggingface")]
    bars = [module.tqdm for module in modules]
    shown = not datasets.are_progress_bars_disabled()
    logger.propagate, logger.handlers = False, [noted]
    datasets.disable_progress_bars()
    for module in modules:
        module.tqdm = partial(_Bar, progress)
    try:
        yield noted
    finally:
        for module, original in zip(modules, bars, strict=True):
            module.tqdm = original
        if shown:
            datasets.enable_progress_bars()
        logger.propagate, logger.handlers = before
