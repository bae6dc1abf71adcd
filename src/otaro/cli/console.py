"""What the commands share: where output goes, progress bars, and how sizes are written.

Results go to standard output; progress and remarks go to standard error, so that `otaro inspect DIR --json |
jq` just works.
"""

from __future__ import annotations

import io
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.markup import escape as escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from typer._click.exceptions import UsageError

from otaro.errors import OtaroError, OtaroWarning, PrecisionError
from otaro.readable import size as size
from otaro.sefp.precision import PRECISIONS

WIDE = 1000
"""Columns for a table where no terminal limits them."""


class _Console(Console):
    """Wraps sentences, at words, and tables for a terminal alone: who reads a file or pipe has them whole."""

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich's; a table has no blanks at the ends of its lines then."""
        if self.is_terminal:
            super().print(*objects, **options)
        elif all(isinstance(one, str) for one in objects):
            super().print(*objects, **{"soft_wrap": True, **options})
        else:
            asked = os.environ.get("COLUMNS", "")
            wide = int(asked) if asked.isdigit() else WIDE
            # which says what lines can be drawn with
            drawn = io.TextIOWrapper(io.BytesIO(), encoding=self.encoding)
            Console(file=drawn, width=wide, emoji=False).print(*objects, **options)
            drawn.seek(0)
            lines = "\n".join(line.rstrip() for line in drawn.read().splitlines())
            super().print(lines, markup=False, highlight=False, soft_wrap=True)


out = _Console(emoji=False)  # fit:abc: is no emoji
err = _Console(stderr=True, emoji=False)


def complete_precisions(incomplete: str) -> list[str]:
    """For the shell: names of precisions, the last of a list with commas."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in map(str, PRECISIONS) if name.startswith(last)]


def precision_option(help_text: str, *names: str) -> Any:
    """An option for precisions, which the shell completes."""
    return typer.Option(*names, help=help_text, metavar="PRECISION", autocompletion=complete_precisions)


JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one line of JSON.")]
PrecisionOption = Annotated[
    str | None,
    precision_option(
        "E5M8 to E5M3, by default the finest present; a fit: fit:90MB; or by module: E5M3,lm_head=E5M4",
        "--precision",
        "-p",
    ),
]
# How to reach a model on the Hub. The token is for fetching alone: it is neither printed nor recorded.
RevisionOption = Annotated[
    str | None, typer.Option(help="Version of a model on the Hub: a branch, a tag or a commit.")
]
TokenOption = Annotated[
    str | None, typer.Option(help="Token for the Hub, instead of the environment's HF_TOKEN or a login.")
]
CacheDirOption = Annotated[
    Path | None, typer.Option(help="Keep what comes from the Hub here, instead of in HF_HOME.")
]
ReconstructionOption = Annotated[
    Literal["midpoint", "truncate"] | None,
    typer.Option(
        help="What a code stands for: the middle of its interval (midpoint), or its end toward zero "
        "(truncate, the paper's). "
        "By default as the model was tuned, else midpoint.",
    ),
]
GroupSizeOption = Annotated[
    int | None,
    typer.Option(
        help="Weights that share a scale, a multiple of 32. By default as the model was tuned, else 64.",
    ),
]


def table(title: str, *headings: str, words: int = 1, simple: bool = False) -> Table:
    """So many columns of words, then numbers; without lines if simple."""
    looks = (box.SIMPLE_HEAD, (0, 1, 0, 0)) if simple else (box.HEAVY_HEAD, (0, 1))
    made = Table(title=title, title_justify="left", box=looks[0], padding=looks[1])
    vertical: Literal["bottom", "top"] = "bottom" if simple else "top"
    for heading in headings[:words]:
        made.add_column(heading, overflow="fold", vertical=vertical)  # a name that is cut off is none
    for heading in headings[words:]:
        made.add_column(heading, justify="right", vertical=vertical)
    return made


def print_json(value: Any) -> None:
    """One line of JSON, free of any styling."""
    typer.echo(json.dumps(value))


def remark(*lines: str) -> None:
    """Lines on standard error, as they are."""
    for line in lines:
        err.print(escape(line), highlight=False)


LINE_EVERY = 60.0
"""Seconds between two lines of a long command that has no terminal to draw a bar on."""


@contextmanager
def progress_bar(
    title: str, unit_scale: int = 1, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function (what is at hand, done, total) that draws a bar on stderr, or a line a minute."""
    if not err.is_terminal:
        yield _line_a_minute(title, unit_scale, clock)
        return
    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda what, done, total: progress.update(
            task, description=what, completed=done // unit_scale, total=total // unit_scale
        )


def _line_a_minute(
    title: str, unit_scale: int, clock: Callable[[], float]
) -> Callable[[str, int, int], None]:
    started = last = clock()

    def update(what: str, done: int, total: int) -> None:
        nonlocal last
        now = clock()
        if now - last < LINE_EVERY:
            return
        last, took = now, now - started
        left = f", about {_duration(took * (total - done) / done)} left" if done else ""
        at_hand = f" ({what})" if what else ""
        progress = f"{title}: {done // unit_scale} of {total // unit_scale}{at_hand}"
        typer.echo(f"{progress}, {_duration(took)} so far{left}", err=True)

    return update


def _duration(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    return f"{minutes} min" if minutes < 120 else f"{round(minutes / 60)} h"


@contextmanager
def warnings_in_a_line() -> Iterator[None]:
    """Print our warnings as a remark of one line each, and not as Python prints warnings."""
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, OtaroWarning):
            err.print(f"[dim]note: {escape(str(message))}[/]", highlight=False)
        else:
            usual(message, category, *where, **more)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = usual


class Misuse(UsageError, OtaroError):
    """What is wrong with the command line itself, whatever lies on the disk: ends with status 2."""


@contextmanager
def usage() -> Iterator[None]:
    """Have what is refused inside end as a wrong command line."""
    try:
        yield
    except OtaroError as error:
        raise Misuse(str(error)) from error


def parse_precision(text: str, option: str = "--precision") -> dict[str, str]:
    """`E5M3,lm_head=E5M4` as a mapping from patterns to precisions; a precision alone is for all modules."""
    parts = [part.rpartition("=") for part in text.split(",")]
    found = {(pattern or "*").strip(): precision.strip() for pattern, _, precision in parts}
    if len(found) < len(parts):
        raise Misuse(
            f"{option} {text}: one of the modules has two precisions; write E5M4, or E5M3,lm_head=E5M4"
        )
    check_precisions(option, text, *found.values(), fits=True)
    return found


def check_precisions(
    option: str, given: str | None, *names: str, fits: bool = False, others: tuple[str, ...] = ()
) -> None:
    """Refuse an option whose precisions do not exist, before a model is opened; `names` are those in it."""
    from otaro.file.fits import fit_name, is_fit

    known = [*others, *map(str, PRECISIONS)]
    for name in names or (() if given is None else (given,)):
        if fits and is_fit(name):
            try:
                fit_name(name)
            except PrecisionError as error:
                raise Misuse(f"{option} {error}" if name == given else f"{option} {given}: {error}") from None
        elif name.upper() not in map(str.upper, known):
            odd = "" if name == given else f"{name} is no precision; "
            more = " or a fit such as fit:90MB" if fits else ""
            raise Misuse(f"{option} {given}: {odd}choose from {', '.join(known)}{more}")


@contextmanager
def named_as_options(mark: str = "--") -> Iterator[None]:
    """Name what is refused as it was given, `--draft E5M8`, and not as in Python, `draft=E5M8`."""
    try:
        yield
    except OtaroError as error:
        told = re.sub(
            r"^([a-z_]+)=('?)([^\s':]*)\2(?=[: ])",
            lambda found: f"{mark}{found[1].replace('_', '-')} {found[3]}",
            str(error),
        )
        raise type(error)(told) from error


def describe_precision(model: Any) -> str:
    """The precision a model runs at: one, or the range where modules differ."""
    from otaro.runtime.precision import precisions_of

    used = set(precisions_of(model).values())
    return str(min(used)) if len(used) == 1 else f"{min(used)} to {max(used)}"


def quiet_transformers() -> None:
    """Keep transformers' own bars and notices out of our output; errors stay."""
    import logging as standard

    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    standard.getLogger("bitsandbytes").setLevel(standard.ERROR)  # tells of kernels that nobody asked for


def versions() -> dict[str, str]:
    """What a measurement was made with."""
    import torch
    import transformers

    import otaro

    return {"otaro": otaro.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
