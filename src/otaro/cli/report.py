"""`otaro report RUN...`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from otaro.cli import console
from otaro.cli.help import page


@page(
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
            help="Run folders of `otaro tune`; as baselines also directories of models, or of a "
            "quality.json alone.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write, in place of a report at most; by default RUN/report.html, of several "
            "runs report.html."
        ),
    ] = None,
    json: console.JsonOption = False,
) -> None:
    """Write a page that shows what runs gave: quality, size and speed at each precision, training.

    The page is one HTML file that needs no network. The first run is the one it opens with.
    """
    from otaro.evaluate.report import write_report
    from otaro.evaluate.run_folder import read_runs
    from otaro.file.replace import check_report

    target = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    check_report(target)
    with console.progress_bar("reading (million weights)", 1_000_000) as progress:
        read = read_runs(runs, lambda name, done, total: progress(console.escape(name), done, total))
    with console.err.status("writing ..."):
        write_report(read, target)
    if json:
        console.print_json(
            {"out": str(target), "bytes": target.stat().st_size, "runs": [run.name for run in read]}
        )
    else:
        console.out.print(
            f"{target} ({console.size(target.stat().st_size)}) is the report; open it in a browser",
            highlight=False,
        )
