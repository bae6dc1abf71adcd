"""`otaro fetch MODEL OUT`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from otaro.cli import console
from otaro.cli.help import page
from otaro.sefp.precision import of_mantissa_bits

if TYPE_CHECKING:
    from otaro.file.fetch import Fetched


@page(
    examples="""
    otaro fetch owner/name small --precision E5M4   # what E5M4 needs
    otaro fetch owner/name small                    # later: the other shards, and nothing twice
    """
)
def fetch(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A nested model: a Hub id, http(s)://HOST/PATH or file:///DIR of its directory, or a "
            "directory.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="The directory to put it into, or one that has a part of it."),
    ],
    precision: Annotated[
        str | None,
        console.precision_option(
            "Fetch what this precision needs, E5M8 to E5M3 or a fit: fit:90MB; by default all that there is. "
            "Call again for a finer one.",
            "--precision",
            "-p",
        ),
    ] = None,
    revision: console.RevisionOption = None,
    token: console.TokenOption = None,
    json: console.JsonOption = False,
) -> None:
    """Fetch as much of a nested model as a precision needs, and what is not there yet.

    Every shard is checked before it is put in place, and OUT runs as soon as it has its first.
    After a cut, the same command goes on where it stopped.
    """
    started = time.perf_counter()
    console.check_precisions("--precision", precision, fits=True)
    try:
        from otaro.file.fetch import fetch as fetch_model
        from otaro.file.hub import Hub

        with console.progress_bar("fetching (MB)", 1_000_000) as progress:
            hub, rated = Hub(revision, token), _with_rate(progress)
            fetched = fetch_model(model, out, precision, hub=hub, progress=rated)
    except KeyboardInterrupt:
        console.remark("interrupted: what has come is kept, and the same command goes on from there")
        raise typer.Exit(130) from None
    seconds = time.perf_counter() - started
    nested = fetched.nested
    total = sum(size for plane, size in nested.sizes.items() if plane <= nested.finest.mantissa_bits)
    if json:
        more = {str(of_mantissa_bits(plane)): size for plane, size in fetched.more.items()}
        result = {
            "out": str(out),
            "model": nested.model,
            "finest": str(nested.finest),
            "bytes": total,
            "seconds": seconds,
        }
        console.print_json({**result, "fetched": fetched.names, "fetched_bytes": fetched.bytes, "more": more})
        return
    came = (
        f"{console.size(fetched.bytes)} came in {seconds:.1f} s" if fetched.names else "nothing was missing"
    )
    line = f"{out} is complete up to {nested.finest}, {console.size(total)}; {came}"
    for text in [line, _next(model, out, fetched)] if fetched.more else [line]:
        console.out.print(console.escape(text), highlight=False)


def _next(model: str, out: Path, fetched: Fetched) -> str:
    finest = of_mantissa_bits(max(fetched.more))
    command = shlex.join(["otaro", "fetch", model, str(out), "--precision", str(finest)])
    return f"`{command}` adds {console.size(sum(fetched.more.values()))}"


def _with_rate(progress: Callable[[str, int, int], None]) -> Callable[[str, int, int], None]:
    """Say of each file how fast it comes."""
    at, since, first = "", 0.0, 0

    def update(what: str, done: int, total: int) -> None:
        nonlocal at, since, first
        now = time.monotonic()
        if what != at:
            at, since, first = what, now, done
        rate = f", {console.size(max(done - first, 0) / (now - since))}/s" if now - since > 1 else ""
        progress(what + rate, done, total)

    return update
