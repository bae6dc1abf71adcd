"""`otaro eval MODEL`: what each precision costs, as a table and as the model's quality record."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from otaro.cli import console
from otaro.cli.generate import DeviceOption
from otaro.cli.help import page
from otaro.cli.quality import show_quality

if TYPE_CHECKING:
    from otaro.evaluate.run import Evaluation
    from otaro.evaluate.text import Text

MODEL_HELP = (
    "A nested model or an ordinary checkpoint, which is quantized on the fly: a directory, a Hub "
    "id, or `builtin`."
)
TEXT_HELP = (
    "Measure perplexity on a text file (or the `text` of .jsonl, .json and .parquet rows), on a Hub data set "
    "(owner/name or owner/name/config:split), or on `builtin`."
)
REFERENCE_HELP = (
    "The checkpoint that a nested model came from: fp is then this one, and divergence is from it."
)
KV_HELP = (
    "Read the text through the decoder, with keys and values in some of float16,E5M8,...,E5M3 or `all`: "
    "what packing them costs."
)
TASKS_HELP = (
    "Tasks of lm-evaluation-harness, such as arc_easy,boolq; zeroshot8 is the paper's eight, "
    "and `lm_eval ls tasks` lists all."
)


@page(
    {
        "Perplexity": "window stride divergence no_bos kv",
        "Tasks": "data_dir limit batch_size",
        "Model": "reference group_size reconstruction device",
        "Output": "out again",
    },
    examples="""
    otaro eval DIR --text notes.txt
    otaro eval DIR --tasks zeroshot8 --precision E5M8,E5M3
    otaro eval DIR --text builtin --divergence
    """,
)
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    precision: Annotated[
        str,
        console.precision_option(
            "all, or some of fp,E5M8,...,E5M3 and fits (fit:90MB); fp is a checkpoint unquantized.",
            "--precision",
            "-p",
        ),
    ] = "all",
    text: Annotated[str | None, typer.Option(help=TEXT_HELP)] = None,
    window: Annotated[
        int | None,
        typer.Option(help="Tokens in a window; by default the model's positions, 2048 at most.", min=2),
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens between windows; by default the window.", min=1)
    ] = None,
    divergence: Annotated[
        bool,
        typer.Option(
            "--divergence", help="Compare predictions on the text with fp, or a nested model's finest."
        ),
    ] = False,
    no_bos: Annotated[
        bool, typer.Option("--no-bos", help="Begin windows without the tokenizer's beginning-of-text token.")
    ] = False,
    kv: Annotated[str | None, typer.Option(help=KV_HELP)] = None,
    reference: Annotated[str | None, typer.Option(help=REFERENCE_HELP)] = None,
    group_size: console.GroupSizeOption = None,
    reconstruction: console.ReconstructionOption = None,
    tasks: Annotated[str | None, typer.Option(help=TASKS_HELP)] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Take the tasks' data from TASK.jsonl.gz files in this folder.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Take only the first N samples of each task.", min=1)
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Requests of a task that run together.", min=1)] = 8,
    device: DeviceOption = "cpu",
    out: Annotated[
        Path | None, typer.Option(help="Keep quality.json in this folder instead of the model's own.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure anew what quality.json already holds.")
    ] = False,
    revision: console.RevisionOption = None,
    token: console.TokenOption = None,
    cache_dir: console.CacheDirOption = None,
    json: console.JsonOption = False,
) -> None:
    """Measure what each precision costs: perplexity, zero-shot accuracy, divergence from full precision.

    A checkpoint is quantized as `otaro tune` tuned it, or as --group-size and --reconstruction say. Every
    finished measurement is kept in quality.json in the model's folder, and is not made twice: an interrupted
    evaluation goes on where it stopped. `otaro inspect` shows the record.
    """
    import otaro
    from otaro.evaluate.quality import Record
    from otaro.evaluate.run import Evaluation, Wanted
    from otaro.evaluate.subject import Subject, parse_precisions
    from otaro.evaluate.windows import parse_kv
    from otaro.file.hub import Hub

    on_text = {
        "--window": window,
        "--stride": stride,
        "--divergence": divergence or None,
        "--no-bos": no_bos or None,
        "--kv": kv,
    }
    on_tasks = {"--data-dir": data_dir, "--limit": limit}
    for needed, value, options in (("--text", text, on_text), ("--tasks", tasks, on_tasks)):
        if value is None and (odd := [name for name, given in options.items() if given is not None]):
            raise console.Misuse(f"{odd[0]} says how to measure with {needed}, which is not given")
    if not text and not tasks:
        raise console.Misuse(
            "there is nothing to measure: give --text FILE (or --text builtin), --tasks NAMES, or both"
        )
    asked = [name.strip() for name in precision.split(",")]
    console.check_precisions("--precision", precision, *asked, fits=True, others=("all", "fp"))
    with console.usage():
        parse_precisions(precision)
        kinds = () if kv is None else parse_kv(kv)
    console.quiet_transformers()
    with console.err.status("looking at model, text and tasks ..."):
        subject = Subject(
            model,
            precision,
            device=device,
            with_reference=divergence,
            group_size=group_size,
            reconstruction=reconstruction,
            original=reference,
            hub=Hub(revision, token, cache_dir),
        )
        names = tuple(name.strip() for name in (tasks or "").split(",") if name.strip())
        wanted = Wanted(
            open_text(text) if text else None,
            window,
            stride,
            divergence,
            names,
            data_dir,
            limit,
            batch_size,
            bos=not no_bos,
            kv=kinds,
        )
        evaluation = Evaluation(subject, wanted)
        place = out if out is not None else subject.path if subject.is_directory else None
        record = Record(subject.identity if place is not None else "0" * 64, place)
    try:
        with console.progress_bar("evaluating") as progress:
            entries = evaluation.run(record, console.versions(), again=again, progress=progress)
    except otaro.errors.TargetError as error:
        raise otaro.OtaroError(f"{error}, with --out DIR") from error
    except KeyboardInterrupt:
        kept = "nothing is kept without --out DIR"
        if record.path:
            kept = f"what was finished is kept in {record.path}; the same command goes on from there"
            kept = kept if record.path.exists() else "nothing was finished yet"
        console.err.print(f"interrupted; {kept}", highlight=False)
        raise typer.Exit(130) from None
    if json:
        console.print_json(_report(evaluation, record.path, entries))
    else:
        show_quality(entries)
        kept = (
            f"kept in {record.path}"
            if record.path
            else "not kept; --out DIR would put them into DIR/quality.json"
        )
        console.out.print(f"[dim]results {console.escape(kept)}[/]", highlight=False)


def open_text(source: str) -> Text:
    """A text by the name that --text gives it."""
    from otaro.builtin.documentation import documentation_text
    from otaro.evaluate.text import Text, read_text

    return Text(source, documentation_text("heldout"), source) if source == "builtin" else read_text(source)


def _report(evaluation: Evaluation, path: Path | None, entries: list[dict[str, Any]]) -> dict[str, Any]:
    from otaro.evaluate.quality import averages
    from otaro.evaluate.records import FULL

    subject = evaluation.subject
    return {
        "model": subject.model,
        "precisions": subject.precisions,
        "reference": subject.reference,
        "reference_model": subject.original and subject.original.identity,
        **({} if subject.precisions == [FULL] else asdict(subject.coding)),
        "window": evaluation.window or None,
        "stride": evaluation.stride or None,
        "entries": entries,
        "averages": {
            one["precision"]: {name: one[name] for name in ("task", "value", "stderr")}
            for one in averages(entries)
        },
        "quality": path and str(path),
    }
