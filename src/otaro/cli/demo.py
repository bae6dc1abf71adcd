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

if TYPE_CHECKING:
    from otaro.file.summary import Summary
    from otaro.tune.config import Training

USUAL, OURS = "usual", "otaro"
TITLES = {USUAL: "tuned as usual", OURS: "tuned once for all"}
PROMPT = "Returns a new tensor"
SAMPLE_TOKENS = 30

Measured = dict[str, float]
"""Perplexity by precision."""


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
    lr: Annotated[
        float | None, typer.Option(help="Learning rate: 2e-4 for the built-in model, else 5e-5.", show_default=False)
    ] = None,
    prompt: Annotated[str, typer.Option(help="What to continue at the finest and the coarsest precision.")] = PROMPT,
    json: console.JsonOption = False,
) -> None:
    """Tune a model as usual and once for all precisions, pack it, and show what each precision then costs."""
    from otaro.evaluate.report import write_report
    from otaro.evaluate.run_folder import read_runs
    from otaro.evaluate.samples import sample
    from otaro.file.io import NestedDirectory
    from otaro.file.summary import summarize
    from otaro.tune.config import Options, recipe

    console.quiet_transformers()
    ours, training = recipe("best")
    rate = lr if lr is not None else (2e-4 if model == "builtin" else 5e-5)
    training = replace(training, steps=steps, batch_size=batch_size, sequence_length=sequence_length, lr=rate)
    folders = {USUAL: out / USUAL, OURS: out / OURS}
    for folder in folders.values():
        _clear(folder)

    _say("1. before tuning, at every precision")
    measured = {"before": _measure(model, text, keep=False)}
    for number, (name, options) in enumerate({USUAL: Options(method="fp", distill=0.0), OURS: ours}.items(), 2):
        _say(f"{number}. {TITLES[name]}, packed, and measured again")
        _tune(model, data, folders[name], options, training)
        measured[name] = _measure(str(folders[name] / "nested"), text, keep=True)
    _say("4. samples and report")
    with console.progress_bar("reading and sampling") as progress:
        ours_at = folders[OURS]
        samples = {OURS: sample(ours_at / "nested", ours_at / "samples.json", [prompt], SAMPLE_TOKENS, progress)}
        runs = read_runs([folders[OURS], folders[USUAL]])
        summary = summarize(NestedDirectory(folders[OURS] / "nested"))
    report = out / "report.html"
    write_report(runs, samples, report)

    said = samples[OURS].texts[prompt]
    ends = {name: said[name] for name in (min(said), max(said))}
    if json:
        sizes = {row.precision: row.bytes for row in summary.precisions}
        shown = {"out": str(out), "report": str(report), "bytes": sizes, "perplexity": measured, "samples": ends}
        console.print_json(shown)
    else:
        _show(summary, measured)
        for name, continuation in sorted(ends.items(), reverse=True):
            console.out.print(f"\n[bold]{name}[/] continues [italic]{console.escape(prompt)}[/]", highlight=False)
            console.out.print(console.escape(continuation.strip()), highlight=False)
        console.out.print(
            f"\nThe whole story with figures: {report}, to be opened in a browser", highlight=False, soft_wrap=True
        )
        console.out.print(f"The model, all precisions in one: {folders[OURS] / 'nested'}", highlight=False, soft_wrap=True)


def _say(what: str) -> None:
    console.err.print(f"[bold]{what}[/]", highlight=False)


def _clear(folder: Path) -> None:
    """Remove what an earlier demo left, and nothing else."""
    from otaro.errors import OtaroError

    if folder.exists() and any(folder.iterdir()):
        if not (folder / "perplexity.json").is_file() and not (folder / "config.json").is_file():
            raise OtaroError(f"{folder} is there and not from an earlier demo; choose another folder with --out")
        shutil.rmtree(folder)


def _tune(model: str, data: str, folder: Path, options: Any, training: Training) -> None:
    from otaro.cli.tune import TuningRun

    # Both forms of the tuned model are measured on --text by and by; of held-out data a glance will do.
    TuningRun(model, data, folder, options, training, eval_tokens=4096, save_every=training.steps or 1).go()


def _measure(model: str, text: str, *, keep: bool) -> Measured:
    """Perplexity at each precision, as `otaro eval` measures and keeps it."""
    from otaro.cli.eval import open_text
    from otaro.evaluate.quality import Record
    from otaro.evaluate.run import Evaluation, Wanted
    from otaro.evaluate.subject import Subject

    subject = Subject(model)
    record = Record(subject.identity, subject.path if keep else None)
    with console.progress_bar("measuring") as progress:
        entries = Evaluation(subject, Wanted(open_text(text))).run(record, console.versions(), progress=progress)
    return {entry["precision"]: entry["value"] for entry in entries}


def _show(summary: Summary, measured: dict[str, Measured]) -> None:
    """One table: perplexity, and what the precision costs against the finest of the same model."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    finest = summary.precisions[0].precision
    title = "Perplexity on unseen text, lower is better, and what a precision costs"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("")
    once = "[bold]tuned\nfor all[/]"
    for heading in ("bits", "size", "before", "cost", "tuned\nas usual", "cost", once, "[bold]cost[/]"):
        table.add_column(heading, justify="right")
    for row in summary.precisions:
        assert row.bytes is not None  # just packed, so complete
        cells = [f"{row.bits_per_weight:.2f}", console.size(row.bytes)]
        for values in measured.values():
            cost = values[row.precision] / values[finest] - 1
            cells += [f"{values[row.precision]:.2f}", f"{cost:+.1%}" if row.precision != finest else ""]
        table.add_row(row.precision, *cells)
    console.out.print(table)
    coarsest = summary.precisions[-1]
    usual, ours = measured[USUAL], measured[OURS]
    console.out.print(
        f"At {coarsest.precision}, {coarsest.bits_per_weight:.2f} bits a weight, tuning once for all gives "
        f"{ours[coarsest.precision]:.2f} instead of {usual[coarsest.precision]:.2f}; at {finest} {ours[finest]:.2f} against "
        f"{usual[finest]:.2f}. One file holds all six.",
        highlight=False,
    )
