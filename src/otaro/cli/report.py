"""`otaro report RUN...`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from otaro.cli import console
from otaro.cli.help import page

PROMPT = "The main difference between"


@page(
    {"Samples": "prompt max_new_tokens no_samples"},
    examples="""
    otaro report run
    otaro report run usual --out page.html   # two runs side by side
    """,
)
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Run folders of `otaro tune`; as baselines also directories of models, or of a quality.json alone.",
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="The file to write: RUN/report.html, for several runs report.html.")] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help=f"Text to continue at each precision, may be repeated ({PROMPT!r})."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of the continuations.", min=1)] = 40,
    no_samples: Annotated[bool, typer.Option("--no-samples", help="Leave continuations out.")] = False,
    json: console.JsonOption = False,
) -> None:
    """Write a page that shows what runs gave: quality, size and speed at each precision, training, samples of text.

    The page is one HTML file that needs no network. The first run is the one it opens with.
    """
    from otaro.evaluate.report import write_report
    from otaro.evaluate.run_folder import read_runs
    from otaro.evaluate.samples import sample

    console.quiet_transformers()
    with console.progress_bar("reading (million weights)", 1_000_000) as progress:
        read = read_runs(runs, lambda name, done, total: progress(console.escape(name), done, total))
    samples = {}
    if not no_samples:
        prompts = list(dict.fromkeys(prompt or [PROMPT]))
        for run in read:
            if run.nested is not None:
                with console.progress_bar("samples") as progress:
                    samples[run.name] = sample(run.nested, run.path / "samples.json", prompts, max_new_tokens, progress)
    target = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    with console.err.status("writing ..."):
        write_report(read, samples, target)
    if json:
        console.print_json({"out": str(target), "bytes": target.stat().st_size, "runs": [run.name for run in read]})
    else:
        console.out.print(
            f"{target} ({console.size(target.stat().st_size)}) is the report; open it in a browser", highlight=False
        )
