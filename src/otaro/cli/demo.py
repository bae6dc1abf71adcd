"""`otaro demo`: the whole story end to end, on the built-in model without any download, or on a model of
one's own.

The same model is tuned twice on the same data, as usual and for all precisions, packed, and measured from its
nested file on text that neither run has seen. Then the file shows what it can (demo_story.py). Every figure
is measured here and now.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
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

BEFORE, USUAL, OURS, UPGRADE = "before", "usual", "otaro", "upgrade"
TITLES = {USUAL: "tuned as usual", OURS: "tuned once for all"}
PROMPT = "Returns a new tensor"
LEVEL = 0.002  # a difference in perplexity from which on a model is called ahead
SEEN = 0.0005  # one that the table shows
CHOSEN = (
    "Tuned as usual is rounded weight by weight. Tuned once for all ends with codes chosen on the data, as "
    "held-out data "
    "preferred them; `otaro pack --calibrate` does that for any model, and is part of the gain."
)
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
    model: Annotated[
        str, typer.Option(help="A Hugging Face model: a directory, a Hub id, or `builtin`.")
    ] = "builtin",
    data: Annotated[str, typer.Option(help="What to tune on, as `otaro tune --data` takes it.")] = "builtin",
    text: Annotated[
        str, typer.Option(help="What to measure on, as `otaro eval --text` takes it.")
    ] = "builtin",
    out: Annotated[
        Path, typer.Option(help="The folder for runs and report; what an earlier demo left is replaced.")
    ] = Path("demo"),
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
    """Tune a model as usual and once for all precisions, and show what one file then does.

    Shows what each precision costs, a text while the precision changes, the size of every prefix, a switch's
    time, an upgrade by one shard, speed, and a report. The built-in model needs no download, and two minutes
    of two cores.
    """
    import torch

    from otaro.cli import demo_story
    from otaro.cli.eval import open_text
    from otaro.evaluate.charts import altair
    from otaro.evaluate.report import write_report
    from otaro.evaluate.run_folder import read_runs
    from otaro.evaluate.subject import Subject
    from otaro.file.hub import Hub
    from otaro.file.io import NestedDirectory
    from otaro.file.replace import check_report
    from otaro.file.summary import summarize
    from otaro.tune.config import recipe

    report = out / "report.html"
    altair()  # is refused now if it is missing, not after all the work
    check_report(report)
    console.quiet_transformers()
    recipes = {USUAL: recipe("best", "fp"), OURS: recipe("best")}
    settings: dict[str, Any] = {"steps": steps, "batch_size": batch_size, "sequence_length": sequence_length}
    if lr is not None or model == "builtin":
        settings["lr"] = BUILTIN_LR if lr is None else lr
    device = "cuda" if torch.cuda.is_available() else "cpu"  # as the trainer chooses
    hub = Hub(revision, token, cache_dir)
    original, unseen = Subject(model, device=device, hub=hub), open_text(text)
    folders = {name: out / name for name in (BEFORE, USUAL, OURS, UPGRADE)}
    _make_room(list(folders.values()), {"--model": model, "--data": data, "--text": text})

    _say("1 of 5: before tuning, at every precision")
    measured = {BEFORE: _measure(original, unseen, folders[BEFORE])}
    for number, (name, (options, training)) in enumerate(recipes.items(), 2):
        _say(f"{number} of 5: {TITLES[name]}, packed, and measured again")
        packing = _tune(model, data, folders[name], options, replace(training, **settings), hub)["packing"]
        tuned = folders[name] / "nested"
        measured[name] = _measure(Subject(str(tuned), device=device), unseen, tuned)
    nested = folders[OURS] / "nested"
    _say("4 of 5: speed, a change of precision, an upgrade")
    bench = demo_story.timed(nested, folders[OURS] / "bench.json", device)
    parts = demo_story.changing(nested, prompt, device)
    upgraded = demo_story.upgrade(nested, folders[UPGRADE], prompt, device)
    _say("5 of 5: a report")
    write_report(read_runs([folders[OURS], folders[USUAL], folders[BEFORE]]), report)
    summary = summarize(NestedDirectory(nested))
    if json:
        shown: dict[str, Any] = {
            "out": str(out),
            "report": str(report),
            "perplexity": measured,
            "changing": parts,
        }
        shown["bytes"] = {row.precision: row.bytes for row in summary.precisions}
        shown["decode"] = {row.precision: row.decode for row in bench.precisions}
        shown["switch"] = {row.precision: row.switch for row in bench.precisions}
        shown["upgrade"] = {"shard": upgraded.shard, "bytes": upgraded.bytes, "same": upgraded.same}
        console.print_json(shown)
    else:
        _show(summary, measured)
        if packing and packing["kept"] == "calibrated":
            console.out.print(CHOSEN, highlight=False)
        demo_story.show(summary, parts, prompt, upgraded, bench)
        _next(report, nested)


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
                    f"{flag} {given} lies in {folder}, which this demo would replace; choose another folder "
                    "with --out"
                )
        if (folder.is_symlink() or folder.exists()) and not (folder / MARK).is_file():
            raise OtaroError(
                f"{folder} is there and was not made by a demo; choose another folder with --out"
            )
    for folder in folders:
        with explained(folder):
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
            (folder / MARK).touch()


def _tune(
    model: str, data: str, folder: Path, options: Options, training: Training, hub: Hub
) -> dict[str, Any]:
    from otaro.cli.tune_run import TuningRun
    from otaro.tune.config import Around

    # The tuned model is measured from its file afterwards; of held-out data a glance will do.
    around = Around(eval_tokens=4096, save_every=training.steps or 1)
    return TuningRun(model, data, folder, options, training, around, allowed={MARK}, hub=hub).go()


def _measure(subject: Subject, text: Text, keep: Path) -> Measured:
    """Perplexity at each precision, as `otaro eval` measures and keeps it."""
    from otaro.evaluate.quality import Record
    from otaro.evaluate.run import Evaluation, Wanted

    with console.progress_bar("measuring") as progress:
        evaluation = Evaluation(subject, Wanted(text))
        record = Record(subject.identity, keep)
        entries = evaluation.run(record, console.versions(), progress=progress)
    return {entry["precision"]: entry["value"] for entry in entries}


def _show(summary: Summary, measured: dict[str, Measured]) -> None:
    """One table: perplexity, and how the one model for all stands beside tuning as usual."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = "Perplexity on unseen text, lower is better"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("")
    headings = (
        "bits a\nweight",
        "before\ntuning",
        "tuned\nas usual",
        "[bold]tuned once\nfor all[/]",
        "for all\nagainst usual",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    usual, ours = measured[USUAL], measured[OURS]
    for row in summary.precisions:
        name = row.precision
        cells = [f"{values[name]:.2f}" for values in (measured[BEFORE], usual, ours)]
        table.add_row(name, f"{row.bits_per_weight:.2f}", *cells, _percent(ours[name] / usual[name] - 1))
    console.out.print(table)
    console.out.print(verdict([row.precision for row in summary.precisions], usual, ours), highlight=False)


def verdict(names: Sequence[str], usual: Measured, ours: Measured) -> str:
    """What is to be seen in the table, finest precision first, whichever way it came out."""
    against = {name: ours[name] / usual[name] - 1 for name in names}
    worst = max(against, key=lambda name: against[name])
    ahead = [name for name in names if against[name] <= -LEVEL]
    behind = f"nowhere more than {against[worst]:.1%} behind tuning as usual (at {worst})"
    behind = behind if against[worst] >= SEEN else "level with tuning as usual, or ahead"
    told = ", ".join(f"{name} ({-against[name]:.1%})" for name in ahead) or "none"
    usually, for_all = (values[names[-1]] / values[names[0]] - 1 for values in (usual, ours))
    return (
        f"What to see: one model tuned for all is {behind}; it is ahead at {told}. From {names[0]} down to "
        f"{names[-1]} "
        f"perplexity changes by {_percent(for_all)}, tuned as usual by {_percent(usually)}."
    )


def _percent(change: float) -> str:
    return f"{change:+.1%}".replace("-0.0%", "+0.0%")


def _next(report: Path, nested: Path) -> None:
    """Where the figures are, and what to type next."""
    tool = sys.argv[0] if Path(sys.argv[0]).name == "otaro" and not shutil.which("otaro") else "otaro"
    offered = {
        "talk to it, and type /precision E5M3": ["chat", str(nested)],
        "a precision for every module, within a budget": [
            "fit",
            str(nested),
            "--text",
            "builtin",
            "--bits",
            "5.2",
        ],
        "a real model, from the Hub": ["pack", "HuggingFaceTB/SmolLM2-135M", "smol"],
    }
    told = "\n".join(f"  [dim]# {why}[/]\n  {shlex.join([tool, *words])}" for why, words in offered.items())
    where = f"\nAll of it with figures: {report} (open it in a browser)\n\n[bold]To try next[/]\n{told}"
    console.out.print(where, highlight=False, soft_wrap=True)
