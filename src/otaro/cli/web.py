"""`otaro web DIR OUT`."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from otaro.cli import console
from otaro.cli.help import page


@page(examples="otaro web DIR OUT")
def web(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A nested directory.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    name: Annotated[
        str | None,
        typer.Option(help="What the page calls the model; by default the name of DIR.", show_default=False),
    ] = None,
    files: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Address at which DIR's shards lie already: the page fetches them there, and OUT has none.",
            show_default=False,
        ),
    ] = None,
    json: console.JsonOption = False,
) -> None:
    """Write a page that runs a nested model in the browser, for any static host.

    It answers as soon as the base shard is there, at E5M3, and takes up each further plane as it arrives, in
    the middle of a conversation. The first call compiles the decoder to WebAssembly, which takes a few
    minutes; zig (the extra `web`) and npm must be there.
    """
    from otaro.web.site import write_site

    console.quiet_transformers()
    started = time.perf_counter()
    try:
        with console.progress_bar("writing the page (MB)", 1_000_000) as progress:
            site = write_site(directory, out, name=name, files=files, progress=progress)
    except KeyboardInterrupt:
        console.remark("interrupted: nothing is left behind")
        raise typer.Exit(130) from None
    seconds = time.perf_counter() - started
    if json:
        console.print_json({"out": str(out), **asdict(site), "seconds": seconds})
        return
    first = f"answers after {console.size(site.base_bytes)}, up to {site.finest}"
    for line in (
        f"wrote {out}: {console.size(site.bytes)}, {seconds:.1f} s; {first}",
        f"see it with:  python -m otaro.web.server {out}",
    ):
        console.out.print(console.escape(line), highlight=False, soft_wrap=True)
