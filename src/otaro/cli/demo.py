"""`otaro demo`: the whole story end to end, on the built-in model without any download, or on a model of one's own.

The same model is tuned twice on the same data, as usual and for all precisions, packed, and measured from its nested file
on text that neither run has seen.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from otaro.cli import console
from otaro.cli.help import page

if TYPE_CHECKING:
    from otaro.evaluate.subject import Subject
    from otaro.evaluate.text import Text
    from otaro.file.hub import Hub
    from otaro.file.summary import Summary
    from otaro.tune.config import Options, Training

BEFORE, USUAL, OURS = "before", "usual", "otaro"
TITLES = {USUAL: "tuned as usual", OURS: "tuned once for all"}
PROMPT = "Returns a new tensor"
SAMPLE_TOKENS = 30
LR_HELP = "Learning rate of both runs: 4e-4 for the built-in model, else 5e-5."
BUILTIN_LR = 4e-4  # the best of tuning as usual (docs/log.md), and tuning for all takes the same
MARK = "made_by_otaro_demo"  # a file in every folder that a later demo may replace

Measured = dict[str, float]
"""Perplexity by precision."""


@page(
    {"Both tuning runs": "steps batch_size sequence_length lr"},
    examples="""
    otaro demo
    otaro demo --model MODEL --data chats.jsonl --text unseen.txt --out story
    """,
)
def demo(
    model: Annotated[str, typer.Option(help="A Hugging Face model: a directory, a Hub id, or `builtin`.")] = "builtin",
    data: Annotated[str, typer.Option(help="What to tune on, as `otaro tune --data` takes it.")] = "builtin",
    text: Annotated[str, typer.Option(help="What to measure on, as `otaro eval --text` takes it.")] = "builtin",
    out: Annotated[Path, typer.Option(help="The folder for runs and report; what an earlier demo left is replaced.")] = Path(
        "demo"
    ),
    steps: Annotated[int, typer.Option(help="Steps of each of the two tuning runs.", min=1)] = 150,
    batch_size: Annotated[int, typer.Option(help="Sequences in a batch.", min=1)] = 4,
    sequence_length: Annotated[int, typer.Option(help="Tokens in a sequence.", min=2)] = 128,
    lr: Annotated[float | None, typer.Option(help=LR_HELP)] = None,
    prompt: Annotated[str, typer.Option(help="What to continue at each precision.")] = PROMPT,
    revision: console.RevisionOption = None,
    token: console.TokenOption = None,
    cache_dir: console.CacheDirOption = None,
    json: console.JsonOption = False,
) -> None:
    """Tune a model as usual and once for all precisions, pack it, and show what each precision then costs."""
    import torch

    from otaro.cli.eval import open_text
    from otaro.evaluate.charts import altair
    from otaro.evaluate.report import write_report
    from otaro.evaluate.run_folder import read_runs
    from otaro.evaluate.samples import sample
    from otaro.evaluate.subject import Subject
    from otaro.file.hub import Hub
    from otaro.file.io import NestedDirectory
    from otaro.file.summary import summarize
    from otaro.tune.config import recipe

    altair()  # is refused now if it is missing, not after all the work
    console.quiet_transformers()
    recipes = {USUAL: recipe("best", "fp"), OURS: recipe("best")}
    settings: dict[str, Any] = {"steps": steps, "batch_size": batch_size, "sequence_length": sequence_length}
    if lr is not None or model == "builtin":
        settings["lr"] = BUILTIN_LR if lr is None else lr
    device = "cuda" if torch.cuda.is_available() else "cpu"  # as the trainer chooses
    hub = Hub(revision, token, cache_dir)
    original, unseen = Subject(model, device=device, hub=hub), open_text(text)
    folders = {name: out / name for name in (BEFORE, USUAL, OURS)}
    _make_room(list(folders.values()), {"--model": model, "--data": data, "--text": text})

    _say("1. before tuning, at every precision")
    measured = {BEFORE: _measure(original, unseen, folders[BEFORE])}
    for number, (name, (options, training)) in enumerate(recipes.items(), 2):
        _say(f"{number}. {TITLES[name]}, packed, and measured again")
        _tune(model, data, folders[name], options, replace(training, **settings), hub)
        nested = folders[name] / "nested"
        measured[name] = _measure(Subject(str(nested), device=device), unseen, nested)
    _say("4. samples and report")
    with console.progress_bar("samples") as progress:
        tuned = {name: folders[name] for name in (OURS, USUAL)}
        samples = {n: sample(f / "nested", f / "samples.json", [prompt], SAMPLE_TOKENS, progress) for n, f in tuned.items()}
    summary = summarize(NestedDirectory(folders[OURS] / "nested"))
    said = samples[OURS].texts[prompt]
    ends = {name: said[name] for name in (max(said), min(said))}
    if not json:
        _show(summary, measured)
        for name, continuation in ends.items():
            console.out.print(f"\n[bold]{name}[/] continues [italic]{console.escape(prompt)}[/]", highlight=False)
            console.out.print(console.escape(continuation.strip()), highlight=False)
    report = out / "report.html"
    write_report(read_runs([folders[OURS], folders[USUAL], folders[BEFORE]]), samples, report)
    if json:
        sizes = {row.precision: row.bytes for row in summary.precisions}
        shown = {"out": str(out), "report": str(report), "bytes": sizes, "perplexity": measured, "samples": ends}
        console.print_json(shown)
    else:
        where = f"\nThe story with figures: {report} (open it in a browser)\nThe model, all precisions in one: {nested}"
        console.out.print(where, highlight=False, soft_wrap=True)


def _say(what: str) -> None:
    console.err.print(f"[bold]{what}[/]", highlight=False)


def _make_room(folders: list[Path], inputs: dict[str, str]) -> None:
    """Make the folders, in place of those of an earlier demo; whatever else is there is left alone."""
    from otaro.errors import OtaroError
    from otaro.file.atomic import explained

    for folder in folders:
        for flag, given in inputs.items():
            if Path(given).resolve().is_relative_to(folder.resolve()):
                raise OtaroError(
                    f"{flag} {given} lies in {folder}, which this demo would replace; choose another folder with --out"
                )
        if (folder.is_symlink() or folder.exists()) and not (folder / MARK).is_file():
            raise OtaroError(f"{folder} is there and was not made by a demo; choose another folder with --out")
    for folder in folders:
        with explained(folder):
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
            (folder / MARK).touch()


def _tune(model: str, data: str, folder: Path, options: Options, training: Training, hub: Hub) -> None:
    from otaro.cli.tune_run import TuningRun
    from otaro.tune.config import Around

    # The tuned model is measured from its file afterwards; of held-out data a glance will do.
    around = Around(eval_tokens=4096, save_every=training.steps or 1)
    TuningRun(model, data, folder, options, training, around, allowed={MARK}, hub=hub).go()


def _measure(subject: Subject, text: Text, keep: Path) -> Measured:
    """Perplexity at each precision, as `otaro eval` measures and keeps it."""
    from otaro.evaluate.quality import Record
    from otaro.evaluate.run import Evaluation, Wanted

    with console.progress_bar("measuring") as progress:
        evaluation = Evaluation(subject, Wanted(text))
        record = Record(subject.identity, keep, subject.older_coding)
        entries = evaluation.run(record, console.versions(), progress=progress)
    return {entry["precision"]: entry["value"] for entry in entries}


def _show(summary: Summary, measured: dict[str, Measured]) -> None:
    """One table: perplexity, and what the precision costs against the finest of the same model."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    finest = summary.precisions[0].precision
    title = "Perplexity on unseen text, lower is better, and what a precision costs"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("")
    once = "[bold]tuned\nfor all[/]"
    for heading in ("bits", "size", "before", "cost", "tuned\nas usual", "cost", once, "[bold]cost[/]"):
        table.add_column(heading, justify="right")
    for row in summary.precisions:
        assert row.bytes is not None  # just packed, so complete
        cells = [f"{row.bits_per_weight:.3f}", console.size(row.bytes)]
        for values in measured.values():
            cost = values[row.precision] / values[finest] - 1
            shown = f"{cost:+.1%}".replace("-0.0%", "+0.0%")
            cells += [f"{values[row.precision]:.2f}", shown if row.precision != finest else ""]
        table.add_row(row.precision, *cells)
    console.out.print(table)
    coarsest = summary.precisions[-1]
    usual, ours = measured[USUAL], measured[OURS]
    console.out.print(
        f"At {coarsest.precision}, {coarsest.bits_per_weight:.3f} bits a weight, tuning once for all gives "
        f"{ours[coarsest.precision]:.2f} instead of {usual[coarsest.precision]:.2f}; at {finest} {ours[finest]:.2f} against "
        f"{usual[finest]:.2f}. One file holds all six.",
        highlight=False,
    )
