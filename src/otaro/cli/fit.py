"""`otaro fit DIR --text TEXT --budget 90MB`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from otaro.cli import console
from otaro.cli.eval import open_text
from otaro.cli.generate import DeviceOption
from otaro.cli.help import page
from otaro.errors import OtaroError

if TYPE_CHECKING:
    from otaro.evaluate.fit import Fitting, Outcome
    from otaro.file.fits import Budget

TEXT_HELP = "What to measure on, as --text of `otaro eval`: a file, a Hub data set, or `builtin`."


@page(
    {"Measuring": "tokens device"},
    examples="""
    otaro fit DIR --text builtin --budget 90MB
    otaro generate DIR --prompt Hello --precision fit:90MB
    """,
)
def fit(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A nested directory.")],
    text: Annotated[str, typer.Option(help=TEXT_HELP)],
    budget: Annotated[str | None, typer.Option(help="Budget in bytes: 90MB, 1.5GB, 800MiB.")] = None,
    bits: Annotated[
        float | None, typer.Option(help="Budget in bits per weight, as `otaro inspect` counts them.")
    ] = None,
    tokens_per_second: Annotated[
        float | None,
        typer.Option(help="Speed of one answer to reach, by a short measurement of this machine."),
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="Tokens of the text to measure on; four times as many are checked on.", min=16)
    ] = 512,
    device: DeviceOption = "cpu",
    json: console.JsonOption = False,
) -> None:
    """Find the precision of every module that loses least within a budget; it is kept beside the model.

    `--precision fit:90MB` then runs it, wherever a precision is named. What each module loses at each
    precision is measured once, on a text; other budgets then take the check alone. `otaro inspect` lists the
    fits.
    """
    from otaro.evaluate.fit import Fitting, budget_of

    with console.usage():
        wanted = budget_of(budget, bits, tokens_per_second)
    console.quiet_transformers()
    with console.err.status("looking at model and text ..."):
        fitting = Fitting(directory, open_text(text), tokens=tokens, device=device)
    _refuse_more_than_all(wanted, fitting)
    command = shlex.join(
        ["otaro", "fit", str(directory), "--text", text, *wanted.option.split(), "--tokens", str(tokens)]
    )
    try:
        with console.progress_bar("timing") as progress:
            limit = fitting.limit(wanted, progress)
        with console.progress_bar("measuring (layers)") as progress:
            sensitivity = fitting.measure(progress)
        with console.progress_bar("checking (tokens)") as progress:
            shown = command if command.isprintable() else ascii(command)
            outcome = fitting.fit(wanted, limit, sensitivity, shown, progress)
    except KeyboardInterrupt:
        console.remark(
            f"interrupted; what was measured is kept in {fitting.kept.path}, the same command "
            "goes on from there"
        )
        raise typer.Exit(130) from None
    if json:
        console.print_json({**outcome.to_dict(), "measured_before": fitting.kept.taken_over})
    else:
        show(outcome, fitting)


def _refuse_more_than_all(budget: Budget, fitting: Fitting) -> None:
    """Where everything is within the budget there is nothing to choose, and a fit would promise a choice."""
    from otaro.file.fits import bytes_of, weights_of

    nested, finest = fitting.nested, fitting.finest
    most, weights = bytes_of(nested, finest), weights_of(nested)
    if budget.bytes is not None:
        within = budget.bytes <= most
    else:  # bits are shown with three digits, of which the next may always be asked for; speed is timed later
        within = budget.unit != "bits" or 1000 * budget.amount <= -(-8000 * most // weights)
    if within:
        return
    raise OtaroError(
        f"{budget.option}: the whole model takes {most:,} bytes, {8 * most / weights:.3f} bits "
        f"per weight, at {finest}, the finest that is here: {fitting.nothing_to_fit}"
    )


def show(outcome: Outcome, fitting: Fitting) -> None:
    """Print the fit, what it was checked against, and the curve."""
    from collections import Counter

    fit = outcome.fit
    counts = Counter(map(str, fit.precisions.values()))
    mixture = ", ".join(f"{counts[one]} at {one}" for one in sorted(counts, reverse=True))
    taken = f"{console.size(fit.bytes)}, {fit.about['bits_per_weight']:.3f} bits per weight"
    console.out.print(
        f"[bold]{fit}[/] takes {taken}: of {len(fit.precisions)} tensors {mixture}", highlight=False
    )
    alone, measured = fit.about["uniform"], fit.about["uniform_measured"]
    _say(
        f"divergence from {fitting.finest} on {outcome.checked_tokens} tokens that were not measured on: "
        f"{outcome.mixed_measured:.4f} nats, expected {outcome.mixed_predicted:.4f}; {alone} alone: "
        f"{measured:.4f}"
    )
    if not outcome.mixed:
        _say(f"{alone} for all of them does better there, so that is the fit")
    for note in outcome.notes:
        _say(f"note: {note}")
    headings = ("size", "bits", "fit", "one precision", "")
    table = console.table("Expected divergence by size", *headings, words=0, simple=True)
    for point in outcome.curve:
        of_one = "" if point.uniform_predicted is None else f"{point.uniform_predicted:.4f}"
        sizes = (console.size(point.bytes), f"{point.bits_per_weight:.3f}")
        table.add_row(*sizes, f"{point.predicted:.4f}", of_one, point.uniform or "")
    console.out.print(table)
    console.out.print(f"[dim]kept in precisions.json; use it with --precision {fit}[/]", highlight=False)


def _say(line: str) -> None:
    console.out.print(console.escape(line), highlight=False)
